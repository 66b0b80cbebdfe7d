//! Point-in-time recovery: restore, branch, thinning and garbage collection of a partition's
//! history, with crashes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::history::{DAY, HOUR, MINUTE, Node, SHOP, five_minutes};
use crate::common::wait_until;
use fulmar_engine::{Error, TimeSource, sqlstate};
use fulmar_pages::PartitionId;

#[tokio::test(flavor = "multi_thread")]
async fn partition_can_be_restored_to_any_minute_and_forward_again() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 5);
    for (minute, time) in times.iter().enumerate() {
        let id = PartitionId(100 + minute as u64);
        node.engine.create_partition(id, Some((SHOP, Some(*time)))).await.unwrap();
        assert_eq!(node.rows(id).await, minute as i64 + 1);
    }

    // The deletion is not flushed yet. A restore keeps it as a restore point.
    node.run("DELETE FROM t").await;
    node.restore(times[2]).await.unwrap();
    assert_eq!(node.rows(SHOP).await, 3);
    let history = node.engine.history(SHOP).await.unwrap();
    let deleted = history.iter().rfind(|point| point.lineage == SHOP.0).unwrap().time_unix_ms;
    node.run("INSERT INTO t(v) VALUES ('after')").await;
    node = node.crash().await;
    assert_eq!(node.rows(SHOP).await, 4);
    node.advance(MINUTE);
    // The last restore is to the current version and changes nothing.
    for (time, rows) in [(Some(deleted), 0), (Some(times[4]), 5), (Some(times[0]), 1), (None, 1)] {
        let time = time.unwrap_or_else(|| node.clock.unix_ms());
        node.restore(time).await.unwrap();
        assert_eq!(node.rows(SHOP).await, rows, "at {time}");
        node = node.crash().await;
        assert_eq!(node.rows(SHOP).await, rows, "at {time}, after a crash");
    }
    let history = node.engine.history(SHOP).await.unwrap();
    assert!(history.is_sorted_by(|a, b| a.time_unix_ms <= b.time_unix_ms), "{history:?}");
    let mut lineages: Vec<u64> = history.iter().map(|point| point.lineage).collect();
    lineages.dedup();
    assert_eq!(lineages.len(), 6, "the first lineage, and one per restore: {history:?}");
    assert_eq!(node.rows(PartitionId(103)).await, 4, "a restore must not change a branch");
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_to_an_unavailable_time_is_rejected() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let error = node.restore(times[0] - DAY).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE);
    assert!(error.get_detail().unwrap().starts_with("The oldest restore point is at 20"), "{error:?}");
    let error = node.restore(node.clock.unix_ms() + MINUTE).await.unwrap_err();
    assert!(error.message().contains("future"), "{error:?}");
    let error = node.engine.create_partition(PartitionId(8), Some((PartitionId(9), Some(times[0])))).await;
    assert!(error.unwrap_err().get_detail().unwrap().contains("not been flushed yet"));
    assert_eq!(node.rows(SHOP).await, 5);
}

/// One manifest of the history is damaged. Restore points before and after it are listed, can be
/// read and restored. A request for a time at which it may have been the newest version fails; it
/// must not return an older version.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_manifest_affects_only_its_own_time() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let directory = node.directory.path().join(format!("store/manifests/{SHOP}/00000001"));
    let mut manifests: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    manifests.sort();
    assert_eq!(manifests.len(), 5);
    let damaged = format!("manifests/{SHOP}/00000001/{}", manifests[1].file_name().unwrap().display());
    let sound = std::fs::read(&manifests[1]).unwrap();
    let mut flipped = sound.clone();
    flipped[sound.len() / 2] ^= 4;
    let mut ids = (100..).map(PartitionId);
    for harmed in [&flipped[..], &sound[..sound.len() / 2]] {
        std::fs::write(&manifests[1], harmed).unwrap();
        let points = node.engine.history(SHOP).await.unwrap();
        assert_eq!(points.len(), 4);
        let (first, third) = (points[0].time_unix_ms, points[1].time_unix_ms);
        for (time, rows) in [(first, 1), (third, 3), (times[2], 3), (times[4], 5)] {
            let id = ids.next().unwrap();
            node.engine.create_partition(id, Some((SHOP, Some(time)))).await.unwrap();
            assert_eq!(node.rows(id).await, rows, "at {time}");
        }
        for time in [times[0], times[1], third - 1] {
            let branched = node.engine.create_partition(ids.next().unwrap(), Some((SHOP, Some(time)))).await;
            for error in [branched.unwrap_err(), node.restore(time).await.unwrap_err()] {
                assert_eq!(error.state(), sqlstate::IO_ERROR);
                assert!(error.message().contains(&damaged), "{error:?}");
                assert_eq!(error.get_detail(), Some(&*format!("It belongs to partition {SHOP}.")));
                assert!(error.get_hint().unwrap().contains("there are restore points at 2"), "{error:?}");
            }
            let mut client = node.client(SHOP);
            client.session.set_as_of(Some(time));
            assert_eq!(client.state("SELECT count(*) FROM t").await, "58030");
            client.close().await;
        }
        // The segments that it names are unknown, so nothing is collected.
        let error = node.engine.collect().await.unwrap_err();
        assert!(error.message().contains(&damaged), "{error:?}");
        assert_eq!(error.get_detail(), Some(&*format!("It belongs to partition {SHOP}.")));
    }
    node.restore(points_of(&node).await[1]).await.unwrap();
    assert_eq!(node.rows(SHOP).await, 3);
    std::fs::write(&manifests[1], &sound).unwrap();
    node.restore(times[1]).await.unwrap();
    assert_eq!(node.rows(SHOP).await, 2);
    node.engine.collect().await.unwrap();
}

/// A damaged manifest is deleted when its successor is older than the retention. Collections then
/// delete segments again.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_manifest_is_deleted_after_the_retention() {
    let (node, _) = five_minutes(Duration::from_millis(DAY)).await;
    let directory = node.directory.path().join(format!("store/manifests/{SHOP}/00000001"));
    let mut manifests: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    manifests.sort();
    std::fs::write(&manifests[1], "damaged").unwrap();
    node.run("UPDATE t SET v = randomblob(3000)").await;
    node.engine.flush().await.unwrap();
    let garbage = node.directory.path().join("store/segments/0000000000000000000000000000000a");
    std::fs::write(&garbage, "an interrupted flush").unwrap();
    assert!(node.engine.collect().await.is_err());
    assert!(garbage.exists() && manifests[1].exists());
    node.advance(DAY + MINUTE);
    node.engine.collect().await.unwrap();
    assert!(!garbage.exists() && !manifests[1].exists());
    assert_eq!(node.rows(SHOP).await, 5);
}

/// A partition that is written all day: each minute can be restored regardless of collections,
/// unless disk space is short.
#[tokio::test(flavor = "multi_thread")]
async fn each_minute_of_a_day_is_kept_and_thinned_when_the_disk_is_nearly_full() {
    let mut node = Node::start(Duration::from_millis(DAY)).await;
    node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    let mut times = Vec::new();
    for _ in 0..5 {
        times.push(node.minute().await);
        times.push(node.minute().await);
        node.advance(HOUR);
        node.engine.collect().await.unwrap();
    }
    assert!(points_of(&node).await.len() >= 10, "compactions add restore points");
    for (minute, time) in times.iter().enumerate() {
        let id = PartitionId(100 + minute as u64);
        node.engine.create_partition(id, Some((SHOP, Some(*time)))).await.unwrap();
        assert_eq!(node.rows(id).await, minute as i64 + 1);
    }
    // The branches have pinned the manifests that they were made from.
    node.advance(5 * HOUR);
    node.available_bytes.store(0, Ordering::Relaxed);
    wait_until("the disk counts as full", async || node.engine.statistics().disk_level > 0).await;
    node.engine.collect().await.unwrap();
    let left = points_of(&node).await;
    let tenth = |time_ms: &u64| (time_ms - 1) / (10 * MINUTE);
    let old: Vec<u64> = left.iter().filter(|time| *time + HOUR < node.clock.unix_ms()).map(tenth).collect();
    assert!(old.len() >= 5 && old.is_sorted_by(|a, b| a < b), "one in ten minutes: {left:?}");
    node.available_bytes.store(u64::MAX, Ordering::Relaxed);
    wait_until("the disk has space again", async || node.engine.statistics().disk_level == 0).await;
    node.restore(left[0]).await.unwrap();
    assert!(node.rows(SHOP).await <= 2);
}

async fn points_of(node: &Node) -> Vec<u64> {
    node.engine.history(SHOP).await.unwrap().iter().map(|point| point.time_unix_ms).collect()
}

/// A restore fails after its manifest was stored, before or after the catalog's change. The node
/// does not know which.
#[tokio::test(flavor = "multi_thread")]
async fn restore_takes_effect_with_the_change_of_the_catalog() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    node.run("INSERT INTO t(v) VALUES ('in the log')").await;
    let of_epoch = |node: &Node, epoch| node.objects(&format!("manifests/{SHOP}/{epoch:08x}"));
    let failing_decision = async |_| Err(Error::new(sqlstate::IO_ERROR, "the catalog has failed"));
    node.engine.restore_partition(SHOP, times[1], failing_decision).await.unwrap_err();
    let mut client = node.client(SHOP);
    assert_eq!(
        client.state("INSERT INTO t(v) VALUES (1)").await,
        "57P01",
        "the partition may have been restored"
    );
    client.close().await;
    // The catalog was not changed.
    node = node.crash().await;
    assert_eq!(of_epoch(&node, 2), 1);
    assert_eq!(node.rows(SHOP).await, 6);
    let history = node.engine.history(SHOP).await.unwrap();
    assert!(history.iter().all(|point| point.lineage == SHOP.0), "{history:?}");
    node.engine.collect().await.unwrap();
    assert_eq!(of_epoch(&node, 2), 0);

    // The catalog was changed, but its answer was lost.
    let eras = &mut node.eras;
    let lost_answer = async |era| {
        eras.insert(SHOP, era);
        Err(Error::new(sqlstate::IO_ERROR, "its answer was lost"))
    };
    node.engine.restore_partition(SHOP, times[1], lost_answer).await.unwrap_err();
    // The outcome is unknown. Until a start has read the catalog, nothing is deleted and no commit
    // is accepted that could be lost.
    node.engine.collect().await.unwrap();
    assert_eq!(of_epoch(&node, 2), 1);
    node = node.crash().await;
    assert_eq!(node.rows(SHOP).await, 2);
    node.engine.collect().await.unwrap();
    assert_eq!(node.rows(SHOP).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn open_transaction_cannot_commit_after_a_restore() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let mut client = node.client(SHOP);
    client.run("CREATE TEMP TABLE mine(x); BEGIN; INSERT INTO t(v) VALUES ('before')").await.unwrap();
    node.restore(times[0]).await.unwrap();
    assert_eq!(client.state("COMMIT").await, "57P01");
    let _ = client.run("ROLLBACK").await;
    assert_eq!(client.int("SELECT count(*) FROM t").await, 1);
    client.run("INSERT INTO t(v) VALUES ('after')").await.unwrap();
    client.close().await;
    assert_eq!(node.rows(SHOP).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_history_is_collected_except_for_segments_of_branches() {
    let (node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let branch = PartitionId(8);
    node.engine.create_partition(branch, Some((SHOP, Some(times[1])))).await.unwrap();
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 5);
    node.advance(DAY + MINUTE);
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 1, "the newest version must be kept");
    assert_eq!((node.rows(SHOP).await, node.rows(branch).await), (5, 2));
    node.engine.drop_partition(SHOP).await.unwrap();
    node.engine.collect().await.unwrap();
    let node = node.crash().await;
    assert_eq!(node.rows(branch).await, 2);
    node.engine.drop_partition(branch).await.unwrap();
    node.engine.collect().await.unwrap();
    assert_eq!((node.objects("manifests"), node.objects("segments")), (0, 0));
}

/// Concurrent branches, flushes, drops and collections: no branch may miss a page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn collection_keeps_all_segments_of_branches() {
    let (node, _) = five_minutes(Duration::ZERO).await;
    let passes = Arc::new(AtomicU64::new(0));
    let collecting = tokio::spawn({
        let (engine, passes) = (node.engine.clone(), passes.clone());
        async move {
            loop {
                engine.collect().await.unwrap();
                passes.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let mut previous = SHOP;
    for number in 100..140 {
        node.run("UPDATE t SET v = randomblob(3000)").await;
        let id = PartitionId(number);
        // A branch of the newest version, or of a branch whose source is dropped immediately.
        let source = if number % 2 == 0 { SHOP } else { previous };
        node.engine.create_partition(id, Some((source, None))).await.unwrap();
        if previous != SHOP {
            node.engine.drop_partition(previous).await.unwrap();
        }
        assert_eq!(node.rows(id).await, 5);
        previous = id;
    }
    wait_until("a pass", async || passes.load(Ordering::Relaxed) > 0 || collecting.is_finished()).await;
    collecting.abort();
    assert!(collecting.await.unwrap_err().is_cancelled(), "no pass has failed");
    for partition in [SHOP, previous] {
        assert_eq!(node.rows(partition).await, 5);
    }
}

/// A restore to a version that cannot be opened could not be undone, so a restore first opens that
/// version.
#[tokio::test(flavor = "multi_thread")]
async fn version_that_cannot_be_opened_is_not_restored() {
    let (node, times) = five_minutes(Duration::from_millis(DAY)).await;
    // Overwrites enough pages that all segments are merged into one.
    node.run(
        "CREATE TABLE u AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200)
        SELECT randomblob(3900) AS v FROM n",
    )
    .await;
    for _ in 0..3 {
        node.engine.flush().await.unwrap();
        node.run("UPDATE u SET v = randomblob(3900)").await;
    }
    node.engine.flush().await.unwrap();
    node.engine.compact_all().await.unwrap();
    // After the crash the caches are empty.
    let mut node = node.crash().await;
    let pages = node.engine.store();
    let mut manifests = Vec::new();
    for name in pages.list_manifests(Some(SHOP)).await.unwrap() {
        manifests.push(pages.read_manifest(name).await.unwrap());
    }
    let target = manifests.iter().rfind(|manifest| manifest.timestamp >> 16 <= times[0]).unwrap();
    let newest = manifests.last().unwrap();
    let gone: Vec<_> = target.segments.iter().filter(|segment| !newest.segments.contains(segment)).collect();
    assert!(!gone.is_empty(), "the versions must have different segments");
    for segment in gone {
        pages.delete_segment(segment.id).await.unwrap();
    }
    let error = node.restore(times[0]).await.unwrap_err();
    assert_eq!(error.state(), "58030", "{error:?}");
    assert!(node.eras.is_empty(), "the catalog must not have been changed");
    assert_eq!(node.rows(SHOP).await, 5);
    let now = node.clock.unix_ms();
    node.restore(now).await.unwrap();
    assert_eq!(node.rows(SHOP).await, 5);
}
