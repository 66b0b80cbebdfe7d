//! The logs of earlier owners and incarnations are covered by manifests, and deleted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_cluster::truncation;
use tokio::time::{sleep, timeout};

use super::rig::{Member, Rig};
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
