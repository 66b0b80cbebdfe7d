//! Serializability: the anomalies of the literature one by one, and random histories of list
//! appends, checked for dependency cycles. Conflicts are detected on pages, so the lists share
//! pages, have indexes and split pages. Replays, row locks and write turns take part, and the tests
//! report how often.

mod anomalies;
mod rows_and_turns;
mod run;
mod schedule;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::{Config, Engine};
use fulmar_store::FaultyFiles;

use crate::common::{MEMORY, Node};
use crate::seeds;

/// Number of consecutive schedules per partition: enough for the partition to become contended and
/// uncontended again.
const SCHEDULES_OF_A_PARTITION: u64 = 25;

/// Counts over all schedules of a test.
#[derive(Default)]
struct Totals {
    schedules: AtomicU64,
    committed: AtomicU64,
    not_committed: AtomicU64,
}

/// Partitions stay open until the end, so that their counters can be read.
fn config(directory: &tempfile::TempDir) -> Config {
    Config { idle_after: Duration::from_secs(3600), ..Config::new(directory.path(), MEMORY) }
}

async fn run_on_one_partition(node: &Node, partition: u64, first_seed: u64, totals: &Totals) {
    run::make_tables(node, partition).await;
    for seed in first_seed..first_seed + SCHEDULES_OF_A_PARTITION {
        let history = run::run(node, partition, seed).await;
        if let Err(anomaly) = history.check() {
            panic!("FULMAR_TEST_SEED={seed}: {anomaly}\n{}", history.describe());
        }
        let committed = history.transactions.iter().filter(|t| t.committed).count();
        totals.schedules.fetch_add(1, Ordering::Relaxed);
        totals.committed.fetch_add(committed as u64, Ordering::Relaxed);
        totals.not_committed.fetch_add((history.transactions.len() - committed) as u64, Ordering::Relaxed);
    }
}

async fn run_on_many_partitions(
    config: impl FnOnce(&tempfile::TempDir) -> Config,
    partitions: u64,
    max_concurrent: usize,
) {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::start(config(&directory)).await.unwrap();
    let node = Arc::new(Node { engine, directory });
    let totals = Arc::new(Totals::default());
    let mut tasks = tokio::task::JoinSet::new();
    for partition in 0..seeds::rounds(partitions) {
        if tasks.len() >= max_concurrent {
            tasks.join_next().await.unwrap().unwrap();
        }
        let (node, totals) = (node.clone(), totals.clone());
        let first_seed = seeds::first() + partition * SCHEDULES_OF_A_PARTITION;
        tasks.spawn(async move { run_on_one_partition(&node, partition + 1, first_seed, &totals).await });
    }
    while let Some(end) = tasks.join_next().await {
        end.unwrap();
    }
    let statistics = node.engine.statistics();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{} schedules: {} transactions committed, {} did not; {} conflicts, {} replays",
        count(&totals.schedules),
        count(&totals.committed),
        count(&totals.not_committed),
        statistics.conflicts,
        statistics.replays
    );
    assert!(statistics.replays > 0, "the schedules must cause replays");
    assert!(count(&totals.committed) > count(&totals.not_committed), "most transactions must commit");
}

/// All tasks run on one thread, one partition at a time. They are switched only where the schedules
/// yield or the engine waits.
#[tokio::test(flavor = "current_thread")]
async fn histories_on_one_thread_are_serializable() {
    let in_memory = |directory: &tempfile::TempDir| Config {
        files: Some(Arc::new(FaultyFiles::default())),
        ..config(directory)
    };
    run_on_many_partitions(in_memory, 40, 1).await;
}

/// Several partitions run concurrently on several threads, with a real disk for the commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn histories_on_many_threads_are_serializable() {
    run_on_many_partitions(config, 40, 4).await;
}
