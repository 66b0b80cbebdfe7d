//! A cluster of real processes under faults: three nodes, each in its own network namespace and with a
//! small disk, etcd with three members, and an S3 server. Needs the rights of root.
//!
//! ```text
//!   clients ── transactions that read and append to lists, through random nodes; they
//!              disconnect in transactions and commits                                [`client`]
//!   faults ─── kill -9, SIGSTOP, graceful stops, cut links, moves of tenants, changes
//!              of their durability, kills of etcd's members, full disks, a slow or
//!              failing store                                   [`faults`], [`store`], [`disk`]
//!   at the end: every tenant answers through every node, with the same lists;
//!               the history of every tenant is strictly serializable
//! ```
//!
//! A client records what it saw of each transaction. A transaction whose COMMIT was not answered
//! has committed if the final lists contain its values. Everything acknowledged must be there
//! exactly once, and nothing that was refused.
//!
//! ```text
//! CHAOS_SEED=7 CHAOS_SECONDS=600 cargo test --workspace --test chaos -- --nocapture
//! ```
//!
//! The seed determines the faults and the transactions of the clients, but not the interleaving.
//! Without one, each run has another.

mod client;
mod disk;
mod faults;
mod interrupted;
mod moves;
#[path = "../common/store_proxy.rs"]
mod store;

use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fulmar_workload::Target;
use fulmar_workload::history::{Event, History, Transaction};
use fulmar_workload::server::{Cluster, ClusterSetup, ClusterStore, HUB, run_in_private};
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::task::{AbortHandle, JoinHandle};
use tokio_postgres::NoTls;

use client::{Client, Record, Shared, Summary};
use disk::Disk;
use faults::{Faults, Injected};
use store::Proxy;

/// How long faults are injected, unless CHAOS_SECONDS is set.
const SECONDS: u64 = 45;

/// What the clients use.
#[derive(Clone, Copy)]
struct Load {
    tenants: usize,
    /// Tenants with local durability at first.
    local_tenants: usize,
    clients: usize,
    /// Lists per tenant.
    keys: usize,
}

/// The load under all faults.
const LOAD: Load = Load { tenants: 6, local_tenants: 1, clients: 8, keys: 4 };
/// How long a client waits for a connection, and for the acknowledgement of what it has sent.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the cluster may take to answer everything after the last fault.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(240);

/// A number from the environment.
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn database(tenant: usize) -> String {
    format!("chaos{tenant}")
}

#[test]
fn histories_under_faults_are_strictly_serializable() {
    in_private("histories_under_faults_are_strictly_serializable", run);
}

/// Runs a test in its own namespaces, with the seed and the seconds of the environment.
fn in_private<F: Future<Output = ()>>(name: &str, test: impl FnOnce(u64, u64) -> F) {
    let mut arguments = vec!["--exact", name];
    if std::env::args().any(|argument| argument == "--nocapture") {
        arguments.push("--nocapture");
    }
    let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
    if let Some(status) = run_in_private(&arguments).unwrap() {
        assert!(status.success(), "the test in the private namespaces failed");
        return;
    }
    let seconds = setting("CHAOS_SECONDS").unwrap_or(SECONDS);
    let seed = setting("CHAOS_SEED").unwrap_or_else(|| rand::random_range(0..1_000_000));
    // Printed when the test fails.
    println!(
        "CHAOS_SEED={seed} CHAOS_SECONDS={seconds} cargo test --workspace --test chaos {name} -- --nocapture"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(test(seed, seconds));
}

fn setup() -> ClusterSetup {
    ClusterSetup { etcd_members: 3, store: ClusterStore::S3, isolated: true, ..ClusterSetup::default() }
}

async fn run(seed: u64, seconds: u64) {
    let mut cluster = Cluster::prepare(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup()).unwrap();
    let (proxies, disks) = start(&mut cluster).await;
    create_tenants(&cluster, LOAD).await;

    let targets = (0..cluster.nodes()).map(|node| cluster.target(node)).collect();
    let clients = Clients::start(Arc::new(Shared::new(targets, LOAD)), seed);
    let random = StdRng::seed_from_u64(seed);
    let mut faults = Faults {
        cluster: &mut cluster,
        proxies: &proxies,
        disks: &disks,
        tenants: LOAD.tenants,
        random,
        injected: Injected::default(),
    };
    faults.inject(Instant::now() + Duration::from_secs(seconds)).await;
    let injected = faults.injected;
    let records = clients.stop(&cluster).await;
    let summary = check(&cluster, LOAD, seed, &records).await;
    println!("{summary}");
    println!("{injected}");
    moves::check_logs(&cluster);
    assert!(summary.committed > 0 && injected.total() > 0, "{summary}; {injected}");
    // Unmounted before the cluster removes its directory.
    drop(disks);
}

/// Running clients.
struct Clients {
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Vec<Record>>>,
}

impl Clients {
    fn start(shared: Arc<Shared>, seed: u64) -> Clients {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = (0..shared.load.clients).map(|number| {
            let random = StdRng::seed_from_u64(seed << 8 | number as u64);
            tokio::spawn(Client::new(number, shared.clone(), random).run(stop.clone()))
        });
        Clients { tasks: tasks.collect(), stop }
    }

    /// Waits for the end of their transactions.
    async fn stop(self, cluster: &Cluster) -> Vec<Record> {
        self.stop.store(true, Ordering::Relaxed);
        let mut records = Vec::new();
        for task in self.tasks {
            match task.await {
                Ok(of_client) => records.extend(of_client),
                Err(error) => panic!("a client failed: {error}\n{}", logs(cluster)),
            }
        }
        records
    }
}

/// Waits until all tenants answer through every node, and checks their histories.
async fn check(cluster: &Cluster, load: Load, seed: u64, records: &[Record]) -> Summary {
    let lists = tokio::time::timeout(SETTLE_TIMEOUT, final_lists(cluster, load)).await;
    let lists = lists.unwrap_or_else(|_| panic!("the cluster does not answer:\n{}", logs(cluster)));
    let mut summary = Summary::default();
    for (tenant, last) in lists.into_iter().enumerate() {
        let transactions = records.iter().filter(|record| record.tenant == tenant);
        let transactions: Vec<Transaction> = transactions.map(|record| record.decided(&last)).collect();
        let of_tenant = records.iter().filter(|record| record.tenant == tenant);
        summary.add(of_tenant.zip(&transactions));
        let history = History { transactions, last };
        if let Err(anomaly) = history.check() {
            let file = std::env::temp_dir().join(format!("fulmar-chaos-{seed}-{tenant}.txt"));
            std::fs::write(&file, history.describe() + &logs(cluster)).unwrap();
            panic!("CHAOS_SEED={seed}: tenant {tenant}: {anomaly}; the history is in {}", file.display());
        }
    }
    summary
}

/// Starts the nodes, each with a small disk and a proxy to the common store, if there is one.
async fn start(cluster: &mut Cluster) -> (Vec<Proxy>, Vec<Disk>) {
    let (mut proxies, mut disks) = (Vec::new(), Vec::new());
    for node in 0..cluster.nodes() {
        if cluster.s3().is_some() {
            proxies.push(Proxy::start(cluster, node, HUB).await);
        }
        disks.push(Disk::mount(cluster.data(node)));
        cluster.start_node(node).await.unwrap();
    }
    cluster.wait_until_alive(cluster.nodes()).await.unwrap();
    (proxies, disks)
}

/// Creates the tenants and their lists.
async fn create_tenants(cluster: &Cluster, load: Load) {
    let admin = connect(&cluster.target(0), "fulmar").await.unwrap();
    for tenant in 0..load.tenants {
        let name = database(tenant);
        let durability = if tenant < load.local_tenants { "local" } else { "shared" };
        admin.batch_execute(&format!("CREATE DATABASE {name} DURABILITY {durability}")).await.unwrap();
        let client = connect(&cluster.target(tenant % cluster.nodes()), &name).await.unwrap();
        client.batch_execute("CREATE TABLE lists (k INTEGER PRIMARY KEY, v TEXT NOT NULL)").await.unwrap();
        for key in 0..load.keys {
            client.execute("INSERT INTO lists VALUES ($1, '')", &[&(key as i64)]).await.unwrap();
        }
    }
}

/// Reads the lists of all tenants through every node. Repeats until all answer.
async fn final_lists(cluster: &Cluster, load: Load) -> Vec<Vec<Vec<u32>>> {
    let mut all = Vec::new();
    for tenant in 0..load.tenants {
        let mut lists: Option<Vec<Vec<u32>>> = None;
        for node in 0..cluster.nodes() {
            let read = loop {
                match read_lists(&cluster.target(node), &database(tenant)).await {
                    Ok(read) => break read,
                    Err(error) => {
                        println!("waiting for tenant {tenant} at node {node}: {error}");
                        tokio::time::sleep(Duration::from_millis(500)).await;
                    }
                }
            };
            let first = lists.get_or_insert_with(|| read.clone());
            assert_eq!(*first, read, "tenant {tenant} differs at node {node}");
        }
        all.extend(lists);
    }
    all
}

async fn read_lists(target: &Target, database: &str) -> Result<Vec<Vec<u32>>, tokio_postgres::Error> {
    let client = connect(target, database).await?;
    let rows = client.query("SELECT v FROM lists ORDER BY k", &[]).await?;
    Ok(rows.iter().map(|row| client::parse(row.get(0))).collect())
}

/// A connection.
struct Connection {
    client: tokio_postgres::Client,
    task: AbortHandle,
}

impl Connection {
    /// Closes the connection without a message to the node.
    fn disconnect(&self) {
        self.task.abort();
    }
}

impl Deref for Connection {
    type Target = tokio_postgres::Client;

    fn deref(&self) -> &tokio_postgres::Client {
        &self.client
    }
}

/// Connects to a database through a node.
async fn connect(target: &Target, database: &str) -> Result<Connection, tokio_postgres::Error> {
    let mut config = tokio_postgres::Config::new();
    config.host(&target.host).port(target.port).user(&target.user).dbname(database);
    config.password(target.password.as_deref().unwrap_or_default()).connect_timeout(CONNECT_TIMEOUT);
    // A client whose node is cut off must notice it.
    config.tcp_user_timeout(CONNECT_TIMEOUT).keepalives_idle(CONNECT_TIMEOUT);
    config.keepalives_interval(Duration::from_secs(1)).keepalives_retries(3);
    let (client, connection) = config.connect(NoTls).await?;
    let task = tokio::spawn(connection).abort_handle();
    Ok(Connection { client, task })
}

fn logs(cluster: &Cluster) -> String {
    let tails =
        (0..cluster.nodes()).map(|node| format!("{}:\n{}\n", cluster.name(node), cluster.log_tail(node)));
    tails.collect()
}

impl Record {
    /// The transaction, with the outcome that the final lists show if its client did not learn it.
    fn decided(&self, last: &[Vec<u32>]) -> Transaction {
        let mut transaction = self.transaction.clone();
        if self.is_unknown {
            let is_there = |event: &Event| match event {
                Event::Append { key, value } => last[*key].contains(value),
                _ => false,
            };
            transaction.committed = transaction.events.iter().any(is_there);
            transaction.ended = u64::MAX;
        }
        transaction
    }
}
