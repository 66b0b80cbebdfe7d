//! One fault at a time during a move: whatever its client is told, the database is at exactly one
//! node, with everything, and can be moved again.

use std::path::Path;
use std::time::{Duration, Instant};

use fulmar_workload::server::Cluster;
use tokio::time::{sleep, timeout};
use tokio_postgres::error::SqlState;

use super::client::{ANSWER_TIMEOUT, describe};
use super::disk::Disk;
use super::moves::{SYSTEM, check_logs, query, wait_for_end};
use super::store::{Proxy, Treatment};
use super::{SETTLE_TIMEOUT, connect, in_private, logs, setup, start};

const ROWS: i64 = 1000;
/// At this rate, copying takes about five seconds.
const LIMIT: &str = "LIMIT '200kB'";
/// How long a fault lasts, unless the move ends before. Nodes are failed over meanwhile.
const FAULT_TIME: Duration = Duration::from_secs(5);
const STORE_DELAY: Duration = Duration::from_secs(3);
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The answers of the destination do not arrive at the source.
    LostAnswers,
    /// The requests of the source do not arrive at the destination.
    LostRequests,
    /// The source's answer to the request to move does not arrive.
    LostStart,
    /// The destination reads the pages slowly.
    SlowDestination,
    /// The disk of the destination is full.
    FullDestination,
    /// The destination's process is stopped, longer than until it is declared dead.
    SuspendedDestination,
}

#[test]
fn interrupted_moves_leave_the_database_at_one_node() {
    in_private("interrupted::interrupted_moves_leave_the_database_at_one_node", run);
}

async fn run(_: u64, _: u64) {
    let mut cluster = Cluster::prepare(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup()).unwrap();
    let (proxies, disks) = start(&mut cluster).await;
    let admin = connect(&cluster.target(0), "fulmar").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop").await.unwrap();
    let client = connect(&cluster.target(0), "shop").await.unwrap();
    let sql = format!(
        "CREATE TABLE big(id INTEGER PRIMARY KEY, text TEXT); \
         WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS}) \
         INSERT INTO big SELECT i, hex(randomblob(500)) FROM n"
    );
    client.batch_execute(&sql).await.unwrap();
    for fault in [
        Fault::LostAnswers,
        Fault::LostRequests,
        Fault::LostStart,
        Fault::SlowDestination,
        Fault::FullDestination,
        Fault::SuspendedDestination,
    ] {
        interrupt(&cluster, &proxies, &disks, fault).await;
    }
    check_logs(&cluster);
    drop(disks);
}

async fn interrupt(cluster: &Cluster, proxies: &[Proxy], disks: &[Disk], fault: Fault) {
    let source = owner(cluster, 0).await;
    let (to, other) = ((source + 1) % 3, (source + 2) % 3);
    // The node through which the migration is observed must not be cut off.
    let observer = if matches!(fault, Fault::LostStart) { to } else { other };
    move_until_done(cluster, observer, "fulmar", observer).await;
    let network = cluster.network().expect("the nodes are isolated");
    if let Fault::LostStart = fault {
        network.cut_between(source, other).unwrap();
    }
    let (target, sql) =
        (cluster.target(other), format!("ALTER DATABASE shop MOVE TO '{}' {LIMIT}", cluster.name(to)));
    let mut moving = tokio::spawn(async move { connect(&target, "fulmar").await?.batch_execute(&sql).await });
    let begun = Instant::now();
    let is_copying = "SELECT 1 FROM fulmar.migrations WHERE step = 'copying'";
    while !moving.is_finished() && query(cluster, observer, SYSTEM, is_copying).await.is_empty() {
        sleep(RETRY_INTERVAL).await;
    }
    match fault {
        Fault::LostAnswers => network.cut_between(to, source).unwrap(),
        Fault::LostRequests => network.cut_between(source, to).unwrap(),
        Fault::LostStart => {}
        Fault::SlowDestination => proxies[to].set(Treatment::Delay(STORE_DELAY)),
        Fault::FullDestination => disks[to].fill(),
        Fault::SuspendedDestination => cluster.signal(to, rustix::process::Signal::STOP).unwrap(),
    }
    let early = timeout(FAULT_TIME, &mut moving).await.ok();
    match fault {
        Fault::LostAnswers => network.heal_between(to, source).unwrap(),
        Fault::LostRequests => network.heal_between(source, to).unwrap(),
        Fault::LostStart => network.heal_between(source, other).unwrap(),
        Fault::SlowDestination => proxies[to].set(Treatment::Pass),
        Fault::FullDestination => disks[to].free(),
        Fault::SuspendedDestination => cluster.signal(to, rustix::process::Signal::CONT).unwrap(),
    }
    let moved = match early {
        Some(moved) => moved,
        None => timeout(ANSWER_TIMEOUT, moving)
            .await
            .unwrap_or_else(|_| panic!("{fault:?}: no answer\n{}", logs(cluster))),
    };
    let moved = moved.unwrap();
    println!("{fault:?}: {:?} in {:?}", moved.as_ref().map_err(describe), begun.elapsed());
    if let Err(error) = moved {
        // Not moved, or the node of the session was cut off.
        let expected = [
            SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
            SqlState::TRANSACTION_RESOLUTION_UNKNOWN,
            SqlState::CANNOT_CONNECT_NOW,
            SqlState::ADMIN_SHUTDOWN,
        ];
        let is_clear = error.code().is_some_and(|code| expected.contains(code));
        assert!(is_clear, "{fault:?}: {error:?}\n{}", logs(cluster));
    }
    let settled = timeout(SETTLE_TIMEOUT, settle(cluster)).await;
    settled.unwrap_or_else(|_| panic!("{fault:?}: the cluster does not settle\n{}", logs(cluster)));
}

/// Waits until all nodes agree, and moves the database again.
async fn settle(cluster: &Cluster) {
    wait_for_end(cluster).await;
    let next = (owner(cluster, 0).await + 1) % 3;
    move_until_done(cluster, 0, "shop", next).await;
    for node in 0..cluster.nodes() {
        while owner(cluster, node).await != next {
            sleep(RETRY_INTERVAL).await;
        }
        let client = connect(&cluster.target(node), "shop").await.unwrap();
        let sql = "SELECT count(*) FROM big WHERE length(text) = 1000";
        let count: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        assert_eq!(count, ROWS, "through {}", cluster.name(node));
    }
}

/// Moves a database without faults. Nodes may still rejoin.
async fn move_until_done(cluster: &Cluster, through: usize, database: &str, to: usize) {
    let sql = format!("ALTER DATABASE {database} MOVE TO '{}'", cluster.name(to));
    loop {
        let moved = async { connect(&cluster.target(through), "fulmar").await?.batch_execute(&sql).await };
        match timeout(ANSWER_TIMEOUT, moved).await.expect("a move was neither carried out nor refused") {
            Ok(()) => return,
            Err(error) => println!("waiting for a move: {}", describe(&error)),
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// The node that owns the database, as another one sees it.
async fn owner(cluster: &Cluster, through: usize) -> usize {
    let rows =
        query(cluster, through, SYSTEM, "SELECT node FROM fulmar.partitions WHERE tenant = 'shop'").await;
    let name: String = rows[0].get(0);
    (0..cluster.nodes()).find(|node| cluster.name(*node) == name).unwrap()
}
