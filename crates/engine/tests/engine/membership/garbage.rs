//! The logs of earlier owners and incarnations are covered by manifests, and deleted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_cluster::truncation;
use fulmar_engine::Config;
use fulmar_pages::PartitionId;
use fulmar_store::{Span, Store};
use tokio::time::{sleep, timeout};

use super::rig::{Member, Rig, log_node};
use super::{CREATE, ids, insert, insert_until_stopped};

/// Longer than any step takes.
const DEADLINE: Duration = Duration::from_secs(120);
/// An ended log keeps its seals: the end, a barrier, and marks.
const SEALS: usize = 4;

/// Waits until the records of these partitions name no range before the owner's incarnation.
async fn wait_until_covered(rig: &Rig, owner: &Member, ids: &[u64]) {
    let covered = async {
        for id in ids {
            while !rig.record(*id).await.is_covered(owner.begun.incarnation) {
                sleep(Duration::from_millis(20)).await;
            }
        }
    };
    timeout(DEADLINE, covered).await.expect("the ranges must be dropped");
}

#[tokio::test(flavor = "multi_thread")]
async fn log_of_a_dead_node_is_deleted_once_its_records_are_in_manifests() {
    let mut rig = Rig::new();
    rig.covers = true;
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    rig.create(&a, [7, 8, 9]).await;
    for partition in [7, 8] {
        let mut client = a.client(partition);
        client.run(CREATE).await.unwrap();
        for id in 1..=10 {
            insert(&mut client, id).await.unwrap();
        }
    }
    let before = rig.store.log_objects(a.node).await;
    assert!(before > SEALS, "{before} objects are too few for this test");
    let mut truncated = BTreeSet::new();
    let deleted = truncation::truncate_ended(&rig.env, &mut truncated).await.unwrap();
    assert_eq!(deleted, 0, "the log of a living incarnation is not deleted");
    let node = a.node;
    rig.kill(a.into_dead(&rig, b.node).await);
    // No session opens the partitions: the new owner does so by itself. Partition 9 has no contents.
    wait_until_covered(&rig, &b, &[7, 8, 9]).await;
    let deleted = truncation::truncate_ended(&rig.env, &mut truncated).await.unwrap();
    assert!(deleted >= 2, "{deleted} objects were deleted");
    assert!(rig.store.log_objects(node).await <= SEALS);
    assert_eq!(truncation::truncate_ended(&rig.env, &mut truncated).await.unwrap(), 0);
    // The new owner dies, too, and starts again.
    insert(&mut b.client(7), 11).await.unwrap();
    let second = b.node;
    rig.kill(b);
    let b = rig.start(second.0).await;
    assert_eq!(ids(&mut b.client(7)).await, (1..=11).collect::<Vec<_>>());
    wait_until_covered(&rig, &b, &[7, 8, 9]).await;
    truncation::truncate_ended(&rig.env, &mut truncated).await.unwrap();
    rig.kill(b);
    let b = rig.start(second.0).await;
    assert_eq!(ids(&mut b.client(7)).await, (1..=11).collect::<Vec<_>>());
    assert_eq!(ids(&mut b.client(8)).await, (1..=10).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread")]
async fn inherited_records_are_covered_although_writes_never_pause() {
    let mut rig = Rig::new();
    rig.covers = true;
    let a = rig.start(1).await;
    rig.create(&a, [7]).await;
    a.client(7).run(CREATE).await.unwrap();
    rig.kill(a);
    let a = rig.start(1).await;
    let stop = Arc::new(AtomicBool::new(false));
    let engines = Arc::new(vec![a.engine.clone()]);
    let next = Arc::new(AtomicU64::new(1));
    let writers =
        (0..4).map(|_| tokio::spawn(insert_until_stopped(engines.clone(), 7, next.clone(), stop.clone())));
    let writers: Vec<_> = writers.collect();
    wait_until_covered(&rig, &a, &[7]).await;
    assert!(truncation::truncate_ended(&rig.env, &mut BTreeSet::new()).await.unwrap() > 0);
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = BTreeSet::new();
    for writer in writers {
        acknowledged.extend(writer.await.unwrap());
    }
    drop(engines);
    rig.kill(a);
    let a = rig.start(1).await;
    assert_eq!(ids(&mut a.client(7)).await, acknowledged.into_iter().collect::<Vec<_>>());
}

/// A partition that cannot be opened does not keep its node's log from being truncated: its records
/// are copied to that log, and a later owner finds them there.
#[tokio::test(flavor = "multi_thread")]
async fn unopenable_partition_does_not_hold_back_its_nodes_log() {
    const BACKLOG: usize = 60;
    const ROWS: u64 = 20;
    let small_log = |config: &mut Config| config.shared_log.backlog_objects = BACKLOG;
    let rig = Rig::new();
    // Its log is not small: a flush in progress when it dies would store a newer manifest.
    let a = rig.start(1).await;
    rig.create(&a, [7, 8]).await;
    for partition in [7, 8] {
        a.client(partition).run(CREATE).await.unwrap();
    }
    a.engine.flush().await.unwrap();
    for id in 1..=ROWS {
        for partition in [7, 8] {
            insert(&mut a.client(partition), id).await.unwrap();
        }
    }
    let first = a.node;
    rig.kill(a);
    let objects = &rig.store.backend;
    let names = objects.list(&format!("manifests/{}", PartitionId(7)), None).await.unwrap().names;
    let damaged = names.into_iter().filter(|name| !name.contains("anchor-")).max().unwrap();
    let whole = objects.get(&damaged, Span::Whole).await.unwrap().bytes;
    objects.delete(&damaged).await.unwrap();
    objects.put(&damaged, "no manifest".into()).await.unwrap();

    // Twice: the second incarnation finds the copies of the first one.
    let mut rows = ROWS;
    for incarnation in 2..=3 {
        let a = rig.start_with(first.0, small_log).await;
        assert_eq!(a.begun.incarnation, incarnation);
        a.client(7).run("SELECT 1 FROM t").await.unwrap_err();
        let log = format!("logs/{:032x}/{incarnation:016x}", log_node(first));
        let count = async || objects.list(&log, None).await.unwrap().names.len();
        let truncated = async {
            let mut most = 0;
            loop {
                rows += 1;
                insert(&mut a.client(8), rows).await.unwrap();
                // Reports that partition 7 cannot be opened.
                let _ = a.engine.flush().await;
                let objects = count().await;
                if objects < most {
                    return;
                }
                most = objects;
            }
        };
        timeout(DEADLINE, truncated).await.expect("the log must be truncated");
        for _ in 0..4 * BACKLOG {
            rows += 1;
            insert(&mut a.client(8), rows).await.unwrap();
            if rows.is_multiple_of(8) {
                let _ = a.engine.flush().await;
            }
            assert!(count().await <= 2 * BACKLOG, "{} objects", count().await);
        }
        rig.kill(a);
    }
    let (a, b) = (rig.start_with(first.0, small_log).await, rig.start(2).await);
    rig.kill(a.into_dead(&rig, b.node).await);
    objects.delete(&damaged).await.unwrap();
    objects.put(&damaged, whole).await.unwrap();
    assert_eq!(ids(&mut b.client(7)).await, (1..=ROWS).collect::<Vec<_>>());
    assert_eq!(ids(&mut b.client(8)).await, (1..=rows).collect::<Vec<_>>());
}
