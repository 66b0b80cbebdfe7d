//! Ten tenants that are moved all the time: back and forth, with random mechanisms and rates, some
//! cancelled.
//!
//! ```text
//!   first, without faults:  no transaction fails, every move ends as its client was told
//!   then, with faults:      kill -9, SIGSTOP and cuts of either end, when a migration has reached a
//!                           certain step; graceful stops, kills of etcd's members, a slow store
//!   at the end:             every migration has ended, and has a report; all nodes agree on the
//!                           owners; the history of every tenant is strictly serializable
//! ```
//!
//! The source of a migration coordinates it, so killing the source kills the coordinator.
//!
//! Both with a common store, and with a store in each node's data directory. There the databases of a
//! node that was killed wait until it has started again, and moves copy the databases.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fulmar_workload::server::{Cluster, ClusterSetup, ClusterStore};
use rand::RngExt;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_postgres::error::SqlState;

use super::client::{ANSWER_TIMEOUT, Record, Shared, describe};
use super::faults::{Faults, Injected};
use super::{
    Clients, Connection, Load, SETTLE_TIMEOUT, check, connect, create_tenants, database, in_private, logs,
    setup, start,
};

/// The system database.
pub const SYSTEM: &str = "fulmar";
const TENANTS: usize = 10;
/// Each moves its own tenants.
const MOVERS: usize = 5;
/// Rows of a kilobyte in each tenant, so that there is something to copy.
const FILLER_ROWS: usize = 100;
/// The first part of the time, one of this number, is without faults.
const GENTLE_SHARE: u32 = 4;
/// How long a fault waits for a migration at a step.
const STEP_PATIENCE: Duration = Duration::from_secs(2);
const STEP_POLL_INTERVAL: Duration = Duration::from_millis(2);
const MIGRATIONS_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The reports that a cluster keeps.
const MAX_REPORTS: usize = 1000;
/// Fewer would test little.
const MIN_MOVES_PER_S: u64 = 1;

/// Where the databases are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stores {
    Common,
    Private,
}

impl Stores {
    fn setup(self) -> ClusterSetup {
        match self {
            Stores::Common => setup(),
            Stores::Private => ClusterSetup {
                store: ClusterStore::Private,
                arguments: vec!["--archives".to_owned(), "16MiB".to_owned()],
                ..setup()
            },
        }
    }

    fn load(self) -> Load {
        let local_tenants = if self == Stores::Private { TENANTS } else { 0 };
        Load { tenants: TENANTS, local_tenants, clients: 8, keys: 8 }
    }

    /// The mechanisms of moves. Gentle ones abort no transaction.
    fn using(self, gentle: bool) -> &'static [&'static str] {
        match self {
            Stores::Common if gentle => &["", " USING albatross"],
            Stores::Common => &["", " USING albatross", " USING flush", " USING stop"],
            Stores::Private => &["", " USING live", " USING 'on-demand'", " USING bulk", " USING sql"],
        }
    }
}

#[test]
fn tenants_that_are_moved_all_the_time_lose_nothing() {
    in_private("moves::tenants_that_are_moved_all_the_time_lose_nothing", |seed, seconds| {
        run(Stores::Common, seed, seconds)
    });
}

#[test]
fn tenants_that_are_moved_between_stores_lose_nothing() {
    in_private("moves::tenants_that_are_moved_between_stores_lose_nothing", |seed, seconds| {
        run(Stores::Private, seed, seconds)
    });
}

async fn run(stores: Stores, seed: u64, seconds: u64) {
    let mut cluster = Cluster::prepare(Path::new(env!("CARGO_BIN_EXE_fulmar")), stores.setup()).unwrap();
    let (proxies, disks) = start(&mut cluster).await;
    let load = stores.load();
    create_tenants(&cluster, load).await;
    fill_tenants(&cluster).await;
    let targets = (0..cluster.nodes()).map(|node| cluster.target(node)).collect();
    let shared = Arc::new(Shared::new(targets, load));
    let time = Duration::from_secs(seconds);

    shared.gentle.store(true, Ordering::Relaxed);
    let clients = Clients::start(shared.clone(), seed);
    let movers = Movers::start(&cluster, shared.clone(), stores, seed);
    sleep(time / GENTLE_SHARE).await;
    let gentle = movers.stop(&cluster).await;
    let mut records = clients.stop(&cluster).await;
    println!("without faults: {gentle:?}");
    let failed: Vec<&Record> = records.iter().filter(|record| record.failure.is_some()).collect();
    if let Some(first) = failed.first() {
        let (count, first) = (failed.len(), &first.transaction);
        let saved = save_logs(&cluster, seed);
        panic!("{count} transactions failed without a fault; the first one: {first:?}; {saved}");
    }
    assert_eq!(shared.failed_logins.load(Ordering::Relaxed), 0, "logins failed without a fault");
    assert!(gentle.unexpected.is_empty(), "without faults: {gentle:?}\n{}", logs(&cluster));

    shared.gentle.store(false, Ordering::Relaxed);
    let clients = Clients::start(shared.clone(), seed + 1);
    let movers = Movers::start(&cluster, shared.clone(), stores, seed + 1);
    let mut faults = Faults {
        cluster: &mut cluster,
        proxies: &proxies,
        disks: &disks,
        tenants: TENANTS,
        random: StdRng::seed_from_u64(seed),
        injected: Injected::default(),
    };
    faults.inject_into_moves(Instant::now() + time - time / GENTLE_SHARE).await;
    let injected = faults.injected;
    // A slow machine needs more time for as many.
    let enough = timeout(SETTLE_TIMEOUT, wait_for_migrations(&cluster, seconds * MIN_MOVES_PER_S)).await;
    enough.unwrap_or_else(|_| panic!("too few migrations:\n{}", logs(&cluster)));
    let moves = movers.stop(&cluster).await;
    records.extend(clients.stop(&cluster).await);
    println!("with faults: {moves:?}");
    let ended = timeout(SETTLE_TIMEOUT, wait_for_end(&cluster)).await;
    ended.unwrap_or_else(|_| panic!("migrations do not end:\n{}", logs(&cluster)));
    let summary = check(&cluster, load, seed, &records).await;
    println!("{summary}");
    println!("{injected}");
    let migrations = check_reports(&cluster).await;
    println!("{migrations} migrations");
    check_filler(&cluster).await;
    check_logs(&cluster);
    assert!(gentle.moved > 0 && moves.moved > 0 && injected.total() > 0 && summary.committed > 0);
    // Unmounted before the cluster removes its directory.
    drop(disks);
}

/// Waits until this number of migrations has begun since the start of the cluster.
async fn wait_for_migrations(cluster: &Cluster, least: u64) {
    let sql = "SELECT CAST(sum(newest) AS BIGINT) FROM \
               (SELECT max(number) AS newest FROM fulmar.migrations GROUP BY tenant)";
    while query(cluster, 0, SYSTEM, sql).await[0].get::<_, Option<i64>>(0) < Some(least as i64) {
        sleep(MIGRATIONS_POLL_INTERVAL).await;
    }
}

async fn fill_tenants(cluster: &Cluster) {
    for tenant in 0..TENANTS {
        let client = connect(&cluster.target(0), &database(tenant)).await.unwrap();
        let sql = format!(
            "CREATE TABLE filler(id INTEGER PRIMARY KEY, text TEXT); \
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {FILLER_ROWS}) \
             INSERT INTO filler SELECT i, hex(randomblob(500)) FROM n"
        );
        client.batch_execute(&sql).await.unwrap();
    }
}

/// Counts of requests to move.
#[derive(Debug, Default)]
struct Moves {
    moved: usize,
    cancelled: usize,
    disconnected: usize,
    /// Refused, because the destination of an on-demand move has not yet copied all pages.
    still_copying: usize,
    /// Those that must not happen without faults.
    unexpected: BTreeMap<String, usize>,
}

impl Moves {
    fn unexpected(&mut self, what: String) {
        *self.unexpected.entry(what).or_default() += 1;
    }

    fn add(&mut self, other: Moves) {
        self.moved += other.moved;
        self.cancelled += other.cancelled;
        self.disconnected += other.disconnected;
        self.still_copying += other.still_copying;
        for (what, count) in other.unexpected {
            *self.unexpected.entry(what).or_default() += count;
        }
    }
}

/// Tasks that move tenants.
struct Movers {
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Moves>>,
}

impl Movers {
    fn start(cluster: &Cluster, shared: Arc<Shared>, stores: Stores, seed: u64) -> Movers {
        let stop = Arc::new(AtomicBool::new(false));
        let names: Vec<String> = (0..cluster.nodes()).map(|node| cluster.name(node).to_owned()).collect();
        let tasks = (0..MOVERS).map(|number| {
            let random = StdRng::seed_from_u64(seed << 8 | 0x80 | number as u64);
            let mover = Mover { number, shared: shared.clone(), stores, names: names.clone(), random };
            tokio::spawn(mover.run(stop.clone()))
        });
        Movers { tasks: tasks.collect(), stop }
    }

    async fn stop(self, cluster: &Cluster) -> Moves {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Moves::default();
        for task in self.tasks {
            match task.await {
                Ok(moves) => all.add(moves),
                Err(error) => panic!("a mover failed: {error}\n{}", logs(cluster)),
            }
        }
        all
    }
}

/// Moves some tenants, one after the other.
struct Mover {
    number: usize,
    shared: Arc<Shared>,
    stores: Stores,
    /// Of the nodes.
    names: Vec<String>,
    random: StdRng,
}

impl Mover {
    async fn run(mut self, stop: Arc<AtomicBool>) -> Moves {
        let mut moves = Moves::default();
        while !stop.load(Ordering::Relaxed) {
            let tenant = self.number + MOVERS * self.random.random_range(0..TENANTS / MOVERS);
            let through = self.random.random_range(0..self.names.len());
            match timeout(ANSWER_TIMEOUT, connect(&self.shared.targets[through], "fulmar")).await {
                Ok(Ok(admin)) => self.move_tenant(&database(tenant), &admin, &mut moves).await,
                Ok(Err(error)) => moves.unexpected(format!("login: {}", describe(&error))),
                Err(_) => panic!("a login was neither answered nor refused"),
            }
            sleep(Duration::from_millis(self.random.random_range(0..50))).await;
        }
        moves
    }

    async fn move_tenant(&mut self, tenant: &str, admin: &Connection, moves: &mut Moves) {
        let to = self.names[self.random.random_range(0..self.names.len())].clone();
        let mechanisms = self.stores.using(self.shared.is_gentle());
        let using = mechanisms[self.random.random_range(0..mechanisms.len())];
        let limit = match self.random.random_bool(0.4) {
            true => format!(" LIMIT '{}kB'", self.random.random_range(50..1000)),
            false => String::new(),
        };
        let sql = format!("ALTER DATABASE {tenant} MOVE TO '{to}'{using}{limit}");
        let moving = timeout(ANSWER_TIMEOUT, admin.batch_execute(&sql));
        let patience = Duration::from_millis(self.random.random_range(0..300));
        let ended = match self.random.random_range(0..100) {
            0..15 => {
                let cancelling = async {
                    sleep(patience).await;
                    self.cancel(tenant).await
                };
                let (ended, cancelled) = tokio::join!(moving, cancelling);
                if let Err(error) = cancelled {
                    moves.unexpected(format!("cancel: {error}"));
                }
                ended
            }
            15..20 if !self.shared.is_gentle() => {
                moves.disconnected += 1;
                // The migration continues.
                match timeout(patience, moving).await {
                    Ok(ended) => ended,
                    Err(_) => return admin.disconnect(),
                }
            }
            _ => moving.await,
        };
        match ended.unwrap_or_else(|_| panic!("{sql} was neither carried out nor refused")) {
            Ok(()) => {
                moves.moved += 1;
                if self.shared.is_gentle() {
                    self.check_owner(tenant, admin, &to, moves).await;
                }
            }
            Err(error) if describe(&error).ends_with("cancelled by an administrator") => moves.cancelled += 1,
            // An earlier move of this tenant continues after its client has disconnected.
            Err(error) if describe(&error).ends_with("is already being moved") => moves.disconnected += 1,
            Err(error) if describe(&error).contains("pages of the database are still being copied") => {
                moves.still_copying += 1;
            }
            Err(error) => moves.unexpected(format!("move: {}", describe(&error))),
        }
    }

    /// Cancels the migration of a tenant, which may have ended.
    async fn cancel(&self, tenant: &str) -> Result<(), String> {
        let target = &self.shared.targets[self.number % self.names.len()];
        let cancelling = async {
            let admin = connect(target, "fulmar").await?;
            admin.batch_execute(&format!("ALTER DATABASE {tenant} CANCEL MOVE")).await
        };
        let cancelled = timeout(ANSWER_TIMEOUT, cancelling).await.expect("a cancel was not answered");
        match cancelled {
            Err(error) if error.code() != Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE) => {
                Err(describe(&error))
            }
            _ => Ok(()),
        }
    }

    /// After a move. Without faults only this task moves the tenant.
    async fn check_owner(&self, tenant: &str, admin: &Connection, to: &str, moves: &mut Moves) {
        let sql = "SELECT node FROM fulmar.partitions WHERE tenant = $1";
        let read = timeout(ANSWER_TIMEOUT, admin.query_one(sql, &[&tenant])).await;
        match read.expect("a query was neither answered nor refused") {
            Ok(row) if row.get::<_, String>(0) == to => {}
            Ok(row) => {
                let at: String = row.get(0);
                moves.unexpected(format!("moved, but at another node; moved to {to}, at {at}"));
            }
            Err(error) => moves.unexpected(format!("owner: {}", describe(&error))),
        }
    }
}

impl Faults<'_> {
    /// Injects faults into migrations until the deadline. Then all nodes run and are connected.
    async fn inject_into_moves(&mut self, deadline: Instant) {
        while Instant::now() < deadline {
            let step = ["copying", "handing over", "handing over", "undoing"][self.random.random_range(0..4)];
            let ends = self.wait_for_step(step).await;
            let random = self.random.random_range(0..self.cluster.nodes());
            let (source, destination) = ends.unwrap_or((random, (random + 1) % self.cluster.nodes()));
            let node = if self.random.random_bool(0.5) { source } else { destination };
            match self.random.random_range(0..100) {
                0..45 => self.kill(node).await,
                45..60 => self.pause(node).await,
                60..70 => self.cut(node).await,
                70..82 => self.cut_ends(source, destination).await,
                82..88 => self.stop(node).await,
                _ if self.proxies.is_empty() => self.kill_etcd().await,
                88..92 => self.kill_etcd().await,
                92..96 => self.delay_store(node).await,
                _ => self.fail_store(node).await,
            }
            self.sleep(0, 500).await;
        }
    }

    /// Waits until a migration is at a step, and returns its source and destination.
    async fn wait_for_step(&mut self, step: &str) -> Option<(usize, usize)> {
        let through = self.random.random_range(0..self.cluster.nodes());
        let poll = async {
            let admin = connect(&self.cluster.target(through), "fulmar").await.ok()?;
            let sql = "SELECT source, destination FROM fulmar.migrations WHERE step = $1 LIMIT 1";
            loop {
                if let Some(row) = admin.query_opt(sql, &[&step]).await.ok()? {
                    let number = |name: String| {
                        (0..self.cluster.nodes()).find(|node| self.cluster.name(*node) == name)
                    };
                    return Some((number(row.get(0))?, number(row.get(1))?));
                }
                sleep(STEP_POLL_INTERVAL).await;
            }
        };
        timeout(STEP_PATIENCE, poll).await.ok().flatten()
    }

    /// Cuts the two ends of a migration off from each other, in one direction or both.
    async fn cut_ends(&mut self, source: usize, destination: usize) {
        let ways = match self.random.random_range(0..3) {
            0 => vec![(source, destination)],
            1 => vec![(destination, source)],
            _ => vec![(source, destination), (destination, source)],
        };
        for (from, to) in &ways {
            self.cluster.network().expect("the nodes are isolated").cut_between(*from, *to).unwrap();
        }
        self.sleep(200, 4000).await;
        for (from, to) in &ways {
            self.cluster.network().expect("the nodes are isolated").heal_between(*from, *to).unwrap();
        }
        self.injected.cut_ends();
    }
}

/// Rows of a query of a database through a node. Repeats it until it is answered.
pub async fn query(cluster: &Cluster, through: usize, database: &str, sql: &str) -> Vec<tokio_postgres::Row> {
    loop {
        let result = async { connect(&cluster.target(through), database).await?.query(sql, &[]).await };
        match result.await {
            Ok(rows) => return rows,
            Err(error) => {
                println!("waiting for node {through}: {}", describe(&error));
                sleep(Duration::from_millis(500)).await;
            }
        }
    }
}

/// Waits until all migrations have ended.
pub async fn wait_for_end(cluster: &Cluster) {
    let sql = "SELECT count(*) FROM fulmar.migrations WHERE step NOT IN ('moved', 'undone')";
    while query(cluster, 0, SYSTEM, sql).await[0].get::<_, i64>(0) > 0 {
        sleep(Duration::from_millis(50)).await;
    }
}

/// Every migration of every tenant has a report, unless it is older than the newest 1,000. Returns
/// the number of migrations.
async fn check_reports(cluster: &Cluster) -> usize {
    let rows = query(cluster, 0, SYSTEM, "SELECT tenant, number FROM fulmar.migrations").await;
    let mut numbers: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
    for row in &rows {
        numbers.entry(row.get(0)).or_default().insert(row.get(1));
    }
    let mut migrations = 0;
    for (tenant, numbers) in &numbers {
        let newest = numbers.last().copied().unwrap_or_default();
        let oldest = if rows.len() < MAX_REPORTS { 1 } else { numbers.first().copied().unwrap_or_default() };
        let missing: Vec<i64> = (oldest..=newest).filter(|number| !numbers.contains(number)).collect();
        assert!(
            missing.is_empty(),
            "no reports of the migrations {missing:?} of {tenant}\n{}",
            logs(cluster)
        );
        migrations += newest as usize;
    }
    migrations
}

/// Copies the nodes' logs, which the end of the test removes. Returns where they are.
fn save_logs(cluster: &Cluster, seed: u64) -> String {
    let directory = std::env::temp_dir().join(format!("fulmar-chaos-{seed}"));
    std::fs::create_dir_all(&directory).unwrap();
    for node in 0..cluster.nodes() {
        std::fs::copy(cluster.log(node), directory.join(cluster.name(node))).unwrap();
    }
    format!("the nodes' logs are in {}", directory.display())
}

/// Nodes report damage and bugs as errors. A node that was suspended or cut off may also report that
/// it was fenced.
pub fn check_logs(cluster: &Cluster) {
    for node in 0..cluster.nodes() {
        let log = std::fs::read_to_string(cluster.log(node)).unwrap();
        let damage = log.lines().find(|line| line.contains("damaged") || line.contains("panicked"));
        assert_eq!(damage, None, "{}", cluster.name(node));
    }
}

/// Every node finds the owner of every tenant, and all rows are there.
async fn check_filler(cluster: &Cluster) {
    for node in 0..cluster.nodes() {
        for tenant in 0..TENANTS {
            let rows = query(cluster, node, &database(tenant), "SELECT count(*) FROM filler").await;
            assert_eq!(
                rows[0].get::<_, i64>(0),
                FILLER_ROWS as i64,
                "{tenant} through {}",
                cluster.name(node)
            );
        }
    }
}
