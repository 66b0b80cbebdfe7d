//! `fulmar demo`: a one-minute demonstration of multi-tenancy and crash recovery.
//!
//! ```text
//!   start a node (this executable, temporary directory, free loopback ports)
//!   100 tenants ── 4 banks   PostgreSQL's own pgbench, unmodified: -i, then its TPC-B-like script
//!              ├── 1 ledger  one client that records which of its inserts were acknowledged
//!              └── 95 shops  YCSB: ten operations per transaction, at a constant rate
//!   load ........ kill -9 ── restart ── check ........ load ── check ── summary
//! ```
//!
//! Checks after the crash, and again at the end:
//!
//! - The ledger has every acknowledged row, and no row that its client did not write.
//! - In every bank, the accounts, tellers, branches and history have the same sum (pgbench's
//!   transaction changes all four).
//! - The history of a bank has a row for each transaction acknowledged to pgbench, and at most one
//!   more per connection: a transaction that was unanswered at the crash.
//!
//! The shops' clients reconnect and continue on their own.
//!
//! A failed check ends the demo with an error. On errors and on Ctrl-C too, drop guards end every
//! process that the demo started, by its id, and remove the temporary directory.

mod bank;
mod ledger;
mod live;
mod pgbench;
mod shops;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use fulmar_workload::run::Report;
use fulmar_workload::server::{Fulmar, Server};

use fulmar_workload::{Target, tenants};
use futures::future::try_join_all;
use tokio::time::{Instant, sleep_until};

use crate::cli::DemoArgs;
use crate::{output, size::Bytes};
use bank::Bank;
use ledger::Ledger;
use live::{DemoStatistics, Screen};
use shops::Shops;

/// Memory budget of the node: a small part of any machine's memory, and several times the demo's
/// need.
const MEMORY: Bytes = Bytes(512 << 20);
/// Tenants that run pgbench.
const BANKS: u32 = 4;

/// Runs the demo.
pub async fn run(arguments: DemoArgs) -> anyhow::Result<()> {
    pgbench::check_installed().await?;
    let began = Instant::now();
    let binary = std::env::current_exe().context("cannot determine the path of the fulmar executable")?;
    let mut node = Server::start(Box::new(Fulmar::at(binary)), MEMORY.0, arguments.tenants * 2).await?;
    let target = node.target();
    output::line(&format!(
        "Started a node at {}:{} with {MEMORY} of memory in {:.1} s.",
        target.host,
        target.port,
        began.elapsed().as_secs_f64()
    ))?;

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
    screen.note("Data loaded. All tenants are under load. The node will be killed halfway.");

    let opened = Instant::now();
    work_until_killed(&mut node, &mut banks, &screen, &live, opened + load / 2).await?;
    screen.note("Killed the node with SIGKILL under load. Restarting it ...");
    let back_after = node.restart().await?;
    check(&banks, &ledger).await?;
    screen.note(&format!(
        "The node is back after {} ms. Checked: no acknowledged commit of {} and {} is lost; all \
         books balance.",
        back_after.as_millis(),
        plural(ledger.acknowledged(), "ledger row"),
        plural(banks.iter().map(Bank::acknowledged).sum(), "pgbench transaction"),
    ));

    let left = (opened + load).saturating_duration_since(Instant::now()).max(Duration::from_secs(2));
    let working = async { try_join_all(banks.iter_mut().map(|bank| bank.run_for(left))).await.map(drop) };
    screen.show_while(&live, working).await?;
    let report = screen.show_while(&live, shops.finish()).await?;
    ledger.stop().await?;
    check(&banks, &ledger).await?;
    screen.clear();
    node.stop().await?;
    summary(
        &Summary { tenants: arguments.tenants, took: began.elapsed(), back_after, report: &report },
        &banks,
        &ledger,
    )
}

/// Runs the banks' load, and kills the node at the given time.
async fn work_until_killed(
    node: &mut Server,
    banks: &mut [Bank],
    screen: &Screen,
    live: &DemoStatistics,
    at: Instant,
) -> anyhow::Result<()> {
    let working = try_join_all(banks.iter_mut().map(Bank::run_until_disconnected));
    tokio::pin!(working);
    tokio::select! {
        early = &mut working => {
            early?;
            bail!("pgbench ended before the node was killed");
        }
        () = screen.show_while(live, sleep_until(at)) => {}
    }
    node.kill().await?;
    working.await?;
    Ok(())
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
    took: Duration,
    back_after: Duration,
    report: &'a Report,
}

fn summary(summary: &Summary<'_>, banks: &[Bank], ledger: &Ledger) -> anyhow::Result<()> {
    let Summary { tenants, took, back_after, report } = summary;
    let latency = &report.latency;
    let mut table = output::table(["tenants", "load", "committed", "latency", "after the crash"]);
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
        "{tenants} tenants, one kill -9, recovered in {} ms, nothing lost. Total time {:.0} s. \
         All files are removed.\n\n\
         To start your own node and connect with psql:\n\
         \x20 fulmar start --data ./data --sql 127.0.0.1:5433 --http 127.0.0.1:8080 --insecure\n\
         \x20 fulmar tenant create shop\n\
         \x20 psql postgres://fulmar@127.0.0.1:5433/shop",
        back_after.as_millis(),
        took.as_secs_f64(),
    ))
}

fn plural(count: u64, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}
