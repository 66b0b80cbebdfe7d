//! `fulmar demo`: a demonstration of a cluster, of many tenants, of a node's death, and of the
//! controller.
//!
//! ```text
//!   start etcd and three nodes (this executable, temporary directory, free loopback ports)
//!   100 tenants ── 4 banks   PostgreSQL's own pgbench, unmodified: -i, then its TPC-B-like script
//!              ├── 1 ledger  one client that records which of its inserts were acknowledged
//!              └── 95 shops  YCSB: ten operations per transaction, at a constant rate
//!   load ── a bank moves around ── kill -9 of node 3 ........ load ── check
//!   controller on ── tenfold load ── a node is added ── the load falls ── it is removed ── summary
//! ```
//!
//! All clients are connected to node 1, which relays the statements of tenants that other nodes
//! own. The first bank is moved to each of the other nodes, and back: its transactions continue, and
//! the demo shows how long they had to wait. When node 3 dies, the two others take its tenants over: the clients stay connected, and
//! their transactions continue.
//!
//! Checks after the death, and again at the end:
//!
//! - The ledger has every acknowledged row, and no row that its client did not write.
//! - In every bank, the accounts, tellers, branches and history have the same sum (pgbench's
//!   transaction changes all four).
//! - The history of a bank has exactly one row for each transaction acknowledged to pgbench.
//!
//! A failed check ends the demo with an error. On errors and on Ctrl-C too, drop guards end every
//! process that the demo started, by its id, and remove the temporary directory.

mod bank;
mod elastic;
mod ledger;
mod live;
mod moving;
mod pgbench;
mod shops;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use fulmar_workload::client::Client;
use fulmar_workload::run::Report;
use fulmar_workload::server::{AddedNodes, Cluster, ClusterSetup};

use fulmar_workload::{Target, tenants};
use futures::future::try_join_all;
use tokio::time::{Instant, sleep_until, timeout};

use crate::cli::DemoArgs;
use crate::{output, size::Bytes};
use bank::Bank;
use ledger::Ledger;
use live::{DemoStatistics, Screen};
use shops::Shops;

/// Memory budget of each node: a small part of any machine's memory, and several times the demo's
/// need.
const MEMORY: Bytes = Bytes(256 << 20);
/// The node that the clients are connected to, and the one that is killed.
const GATEWAY: usize = 0;
const VICTIM: usize = 2;
/// How long the tenants of a dead node may take to answer at another one.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(60);
/// Tenants that run pgbench.
const BANKS: u32 = 4;

/// Runs the demo.
pub async fn run(arguments: DemoArgs) -> anyhow::Result<()> {
    pgbench::check_installed().await?;
    let began = Instant::now();
    let binary = std::env::current_exe().context("cannot determine the path of the fulmar executable")?;
    let added = AddedNodes::new()?;
    let arguments_of_nodes = elastic::arguments(&added);
    let setup =
        ClusterSetup { memory_bytes: MEMORY.0, arguments: arguments_of_nodes, ..ClusterSetup::default() };
    let mut cluster = Cluster::start(&binary, setup).await?;
    let target = cluster.target(GATEWAY);
    output::line(&format!(
        "Started etcd and {} nodes with {MEMORY} of memory each in {:.1} s. All clients connect to {}, at {}:{}.",
        cluster.nodes(),
        began.elapsed().as_secs_f64(),
        cluster.name(GATEWAY),
        target.host,
        target.port,
    ))?;

    show_console(&target, cluster.http_port(GATEWAY)).await?;

    let names = Names::new(arguments.tenants);
    create(&target, &names).await?;
    let live = Arc::new(DemoStatistics::default());
    let screen = Screen::new();
    screen.busy("running pgbench -i in four tenants and loading the shops");
    let banks = names.banks.iter().map(|name| Bank::open(target.with_database(name), live.clone()));
    let mut banks = try_join_all(banks).await?;
    let mut ledger = Ledger::open(target.with_database(&names.ledger), live.clone()).await?;
    let load = Duration::from_secs(arguments.seconds);
    let shops = Shops::start(&target, &names.shops, load, live.clone()).await?;
    let owned = owned_by(&target, cluster.name(VICTIM)).await?;
    ensure!(!owned.is_empty(), "{} owns no tenant", cluster.name(VICTIM));
    screen.note(&format!(
        "Data loaded. All tenants are under load. {}, which owns {}, will be killed halfway.",
        cluster.name(VICTIM),
        plural(owned.len() as u64, "tenant"),
    ));

    let opened = Instant::now();
    let killing = async {
        let moving = moving::move_around(&cluster, &target, &names.banks[0], &screen);
        moving.await.context("a move failed")?;
        kill_halfway(&mut cluster, &target, &owned, &screen, opened + load / 2).await
    };
    let working = try_join_all(banks.iter_mut().map(|bank| bank.run_for(load)));
    let working = async { tokio::try_join!(working, killing).map(|(_, took)| took) };
    let taken_over_in = screen.show_while(&live, working).await?;
    let report = screen.show_while(&live, shops.finish()).await?;
    ledger.stop().await?;
    check(&banks, &ledger).await?;
    cluster.start_node(VICTIM).await?;
    let growing = elastic::grow_and_shrink(&target, &names.shops, &screen);
    growing.await.context("the cluster did not follow its load")?;
    screen.clear();
    let (tenants, took) = (arguments.tenants, began.elapsed());
    let summary = Summary { tenants, owned: owned.len() as u64, took, taken_over_in, report: &report };
    summarize(&summary, &banks, &ledger)
}

/// Shows the address of the console, and a token for it.
async fn show_console(target: &Target, port: u16) -> anyhow::Result<()> {
    let mut client = Client::connect(target).await?;
    let rows = client.query("CREATE TOKEN demo FOR ADMIN").await.context("cannot create a token")?;
    client.close().await?;
    let token = rows.into_iter().flatten().flatten().next().unwrap_or_default();
    output::line(&format!("Console: http://{}:{port}/console with the token {token}", target.host))
}

/// The tenants that a node owns.
async fn owned_by(target: &Target, node: &str) -> anyhow::Result<Vec<String>> {
    let mut client = Client::connect(target).await?;
    let sql = format!("SELECT tenant FROM fulmar.partitions WHERE node = '{node}' AND tenant <> 'fulmar'");
    let rows = client.query(&sql).await.context("cannot read the owners of the tenants")?;
    client.close().await?;
    Ok(rows.into_iter().filter_map(|mut row| row.pop().flatten()).collect())
}

/// Kills a node at the given time, and waits until its tenants answer elsewhere. Returns how long
/// that took.
async fn kill_halfway(
    cluster: &mut Cluster,
    target: &Target,
    owned: &[String],
    screen: &Screen,
    at: Instant,
) -> anyhow::Result<Duration> {
    sleep_until(at).await;
    let death = Instant::now();
    cluster.kill(VICTIM)?;
    let answer = async |database: &String| {
        let mut client = Client::connect(&target.with_database(database)).await?;
        client.query("SELECT count(*) FROM sqlite_master").await?;
        client.close().await
    };
    let answers = timeout(TAKEOVER_TIMEOUT, try_join_all(owned.iter().map(answer))).await;
    answers.with_context(|| format!("the tenants did not answer within {TAKEOVER_TIMEOUT:?}"))??;
    let took = death.elapsed();
    screen.note(&format!(
        "Killed {} with SIGKILL under load. All of its tenants answer on the other nodes after {} ms.",
        cluster.name(VICTIM),
        took.as_millis(),
    ));
    Ok(took)
}

/// The names of the tenants.
struct Names {
    banks: Vec<String>,
    ledger: String,
    shops: Vec<String>,
}

impl Names {
    fn new(tenants: u32) -> Self {
        Self {
            banks: tenants::names("bank_", BANKS),
            ledger: "ledger".to_owned(),
            shops: tenants::names("shop_", tenants - BANKS - 1),
        }
    }
}

async fn create(target: &Target, names: &Names) -> anyhow::Result<()> {
    let began = Instant::now();
    let all: Vec<String> = names.banks.iter().chain([&names.ledger]).chain(&names.shops).cloned().collect();
    let bar = output::progress("creating tenants", all.len() as u64);
    tenants::create(target, &all, |made| bar.set_position(made)).await?;
    bar.finish_and_clear();
    output::line(&format!("Created {} tenants in {:.1} s.", all.len(), began.elapsed().as_secs_f64()))
}

async fn check(banks: &[Bank], ledger: &Ledger) -> anyhow::Result<()> {
    try_join_all(banks.iter().map(Bank::check)).await?;
    ledger.check().await
}

/// The results for the summary, except those of the banks and the ledger.
struct Summary<'a> {
    tenants: u32,
    /// Tenants of the killed node.
    owned: u64,
    took: Duration,
    taken_over_in: Duration,
    report: &'a Report,
}

fn summarize(summary: &Summary<'_>, banks: &[Bank], ledger: &Ledger) -> anyhow::Result<()> {
    let Summary { tenants, owned, took, taken_over_in, report } = summary;
    let latency = &report.latency;
    let mut table = output::table(["tenants", "load", "committed", "latency", "after the kill"]);
    table.add_row([
        format!("{} shops", report.tenants),
        "YCSB, 10 operations".to_owned(),
        format!("{} ({:.0}/s)", report.transactions, report.throughput_tps),
        format!("p50 {:.1} ms, p99 {:.1} ms", latency.p50_ms, latency.p99_ms),
        format!("{}, longest wait {:.0} ms", plural(report.lost_connections, "reconnect"), latency.max_ms),
    ]);
    let committed: u64 = banks.iter().map(Bank::acknowledged).sum();
    let latencies: Vec<f64> = banks.iter().filter_map(Bank::latency_ms).collect();
    let average = latencies.iter().sum::<f64>() / latencies.len().max(1) as f64;
    table.add_row([
        format!("{} banks", banks.len()),
        "pgbench TPC-B-like".to_owned(),
        committed.to_string(),
        format!("average {average:.1} ms"),
        format!("books balance, {} failed", banks.iter().map(Bank::failed).sum::<u64>()),
    ]);
    table.add_row([
        "1 ledger".to_owned(),
        "one INSERT at a time".to_owned(),
        ledger.acknowledged().to_string(),
        String::new(),
        "no acknowledged row lost".to_owned(),
    ]);
    output::line(&table.to_string())?;
    output::line(&format!(
        "{tenants} tenants on three nodes, one kill -9: {} answered elsewhere after {} ms, nothing lost.\n\
         Total time {:.0} s. All files are removed.\n\n\
         To start your own node and connect with psql:\n\
         \x20 fulmar start --data ./data --sql 127.0.0.1:5433 --http 127.0.0.1:8080 --insecure\n\
         \x20 fulmar tenant create shop\n\
         \x20 psql postgres://fulmar@127.0.0.1:5433/shop",
        plural(*owned, "tenant"),
        taken_over_in.as_millis(),
        took.as_secs_f64(),
    ))
}

fn plural(count: u64, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}
