//! Branches, restores and changes of durability, which owners carry out while they may be replaced.

use std::time::{SystemTime, UNIX_EPOCH};

use fulmar_cluster::LogKind;
use fulmar_engine::*;
use fulmar_pages::PartitionId;
use futures::future::{pending, ready};

use super::rig::{Member, Rig};
use super::{CREATE, ids, insert};
use crate::common::{wait_until, with_timeout};

/// Makes a restore point of the current version of a partition. Returns its time, in milliseconds,
/// when that has passed: a later version would otherwise be as of the same time.
async fn restore_point(member: &Member, id: u64) -> u64 {
    member.engine.flush().await.unwrap();
    let point = member.engine.history(PartitionId(id)).await.unwrap().last().unwrap().time_unix_ms;
    let unix_ms = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    wait_until("the next millisecond", async || unix_ms() > point + 1).await;
    point
}

/// The restore points of a partition that its first owner has made: their versions.
async fn first_versions(member: &Member, id: u64) -> Vec<u64> {
    let history = member.engine.history(PartitionId(id)).await.unwrap();
    // The upper bits are the epoch of the owner.
    history.iter().map(|point| point.version).filter(|version| version >> 40 == 1).collect()
}

async fn created(rig: &Rig, owner: &Member) -> u64 {
    rig.create(owner, [7]).await;
    owner.client(7).run(CREATE).await.unwrap();
    insert(&mut owner.client(7), 1).await.unwrap();
    let point = restore_point(owner, 7).await;
    insert(&mut owner.client(7), 2).await.unwrap();
    point
}

/// A restore is complete except for its last step when its node is failed over. It has no effect,
/// then or later, and the next restore is not disturbed by what it has left.
#[tokio::test(flavor = "multi_thread")]
async fn overtaken_restore_replaces_no_newer_commit() {
    let rig = Rig::new();
    let (zombie, b) = (rig.start(1).await, rig.start(2).await);
    let point = created(&rig, &zombie).await;
    let mut others: Option<Vec<u64>> = None;
    let gate = async {
        rig.fail_over(&zombie, b.node).await;
        insert(&mut b.client(7), 3).await.unwrap();
        b.engine.flush().await.unwrap();
        others = Some(ids(&mut b.client(7)).await);
    };
    rig.restore(&zombie, 7, point, gate).await.unwrap_err();
    assert_eq!(others.unwrap(), [1, 2, 3]);
    assert_eq!(ids(&mut b.client(7)).await, [1, 2, 3]);
    rig.kill(b);
    let b = rig.start(2).await;
    assert_eq!(ids(&mut b.client(7)).await, [1, 2, 3], "the draft is not the newest manifest");

    // The same epoch of the timeline again.
    let before = first_versions(&b, 7).await;
    rig.restore(&b, 7, point, ready(())).await.unwrap();
    assert_eq!(ids(&mut b.client(7)).await, [1]);
    insert(&mut b.client(7), 4).await.unwrap();
    let c = rig.start(3).await;
    rig.fail_over(&b, c.node).await;
    assert_eq!(ids(&mut c.client(7)).await, [1, 4]);
    assert_eq!(first_versions(&c, 7).await, before, "the overtaken restore left no restore point");
    // The discarded version can be restored.
    let before = c.engine.history(PartitionId(7)).await.unwrap();
    let before = before.iter().rev().find(|point| point.lineage == 7).unwrap().time_unix_ms;
    rig.restore(&c, 7, before, ready(())).await.unwrap();
    assert_eq!(ids(&mut c.client(7)).await, [1, 2, 3]);
}

/// The owner dies with a draft stored, or after the restore has taken effect.
#[tokio::test(flavor = "multi_thread")]
async fn restore_takes_effect_with_the_change_of_the_record() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    let point = created(&rig, &a).await;
    let dying = tokio::select! {
        _ = rig.restore(&a, 7, point, pending()) => unreachable!("it waits for the gate"),
        () = async {
            // The draft is stored.
            while rig.manifests(7).await.iter().all(|name| !name.contains("/00000002/")) {
                tokio::task::yield_now().await;
            }
        } => a,
    };
    let epoch = rig.record(7).await.epoch;
    rig.fail_over(&dying, b.node).await;
    rig.kill(dying);
    assert_eq!(ids(&mut b.client(7)).await, [1, 2]);
    rig.restore(&b, 7, point, ready(())).await.unwrap();
    let record = rig.record(7).await;
    assert_eq!((record.epoch, record.ranges.len()), (epoch + 2, 1));
    assert!(record.base.is_some_and(|base| base.is_draft));
    let c = rig.start(3).await;
    rig.fail_over(&b, c.node).await;
    rig.kill(b);
    assert_eq!(ids(&mut c.client(7)).await, [1]);
}

/// A branch is requested again, because its answer was lost: at the same owner, and at the next.
#[tokio::test(flavor = "multi_thread")]
async fn branch_is_made_once() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    let point = created(&rig, &a).await;
    let branch = async |owner: &Member, id: u64, at| {
        owner.engine.create_partition(PartitionId(id), Some((PartitionId(7), at))).await
    };
    for _ in 0..2 {
        branch(&a, 8, None).await.unwrap();
        branch(&a, 9, Some(point)).await.unwrap();
    }
    insert(&mut a.client(7), 3).await.unwrap();
    let dead = a.into_dead(&rig, b.node).await;
    branch(&b, 8, None).await.unwrap();
    branch(&b, 10, None).await.unwrap();
    rig.create(&b, [8, 9, 10]).await;
    for (id, expected) in [(8, vec![1, 2]), (9, vec![1]), (10, vec![1, 2, 3])] {
        assert_eq!(ids(&mut b.client(id)).await, expected);
        insert(&mut b.client(id), 4).await.unwrap();
    }
    // A node that no longer owns the source cannot branch it.
    with_timeout("a late branch", branch(&dead, 11, None)).await.unwrap_err();
    assert_eq!(rig.manifests(11).await, [] as [String; 0]);
}

/// A node releases a partition for its own change, and is failed over or takes it back.
#[tokio::test(flavor = "multi_thread")]
async fn release_to_change_loses_nothing() {
    let rig = Rig::new();
    let (a, b) = (rig.start(1).await, rig.start(2).await);
    created(&rig, &a).await;
    let mut client = a.client(7);
    for _ in 0..2 {
        a.engine.release_to_change(PartitionId(7)).await.unwrap();
        let refused = insert(&mut client, 3).await.unwrap_err();
        assert_eq!(refused.state(), sqlstate::PARTITION_MOVED);
    }
    a.engine.take_back(PartitionId(7)).await.unwrap();
    assert_eq!(ids(&mut a.client(7)).await, [1, 2]);
    insert(&mut a.client(7), 3).await.unwrap();
    a.engine.release_to_change(PartitionId(7)).await.unwrap();
    rig.fail_over(&a, b.node).await;
    rig.kill(a);
    assert_eq!(ids(&mut b.client(7)).await, [1, 2, 3]);
    assert_eq!(rig.record(7).await.log(), LogKind::Shared);
}
