//! What a partition was: restored, branched, thinned out, collected, with a crash in between.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::minutes::{DAY, HOUR, MINUTE, Node, SHOP, five_minutes};
use crate::common::until;
use fulmar_engine::{Error, TimeSource, sqlstate};
use fulmar_pages::PartitionId;

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_goes_back_to_any_of_its_minutes_and_forth_again() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 5);
    for (minute, time) in times.iter().enumerate() {
        let id = PartitionId(100 + minute as u64);
        node.engine.create_partition(id, Some((SHOP, Some(*time)))).await.unwrap();
        assert_eq!(node.rows(id).await, minute as i64 + 1);
    }

    // Not flushed yet: a restore leaves it restorable.
    node.run("DELETE FROM t").await;
    node.restore(times[2]).await.unwrap();
    assert_eq!(node.rows(SHOP).await, 3);
    let history = node.engine.history(SHOP).await.unwrap();
    let deleted = history.iter().rfind(|point| point.lineage == SHOP.0).unwrap().time_unix_ms;
    node.run("INSERT INTO t(v) VALUES ('after')").await;
    node = node.crash().await;
    assert_eq!(node.rows(SHOP).await, 4);
    node.wait(MINUTE);
    // The last one is now: nothing changes.
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
    assert_eq!(lineages.len(), 6, "that of the beginning, and one for each restore: {history:?}");
    assert_eq!(node.rows(PartitionId(103)).await, 4, "a branch goes its own way");
}

#[tokio::test(flavor = "multi_thread")]
async fn times_that_nobody_can_go_back_to_are_refused() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let error = node.restore(times[0] - DAY).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE);
    assert!(error.get_detail().unwrap().starts_with("It begins at 20"), "{error:?}");
    let error = node.restore(node.clock.unix_ms() + MINUTE).await.unwrap_err();
    assert!(error.message().contains("future"), "{error:?}");
    let error = node.engine.create_partition(PartitionId(8), Some((PartitionId(9), Some(times[0])))).await;
    assert!(error.unwrap_err().get_detail().unwrap().contains("none yet"));
    assert_eq!(node.rows(SHOP).await, 5);
}

/// One manifest of the past is damaged: what lies beside it is listed, and can be looked at and gone back to. Nobody who asks for a time
/// at which it may have been the newest is given an older one.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_manifest_takes_nothing_but_its_own_time() {
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
                assert!(error.get_hint().unwrap().contains("there are versions of 2"), "{error:?}");
            }
            let mut client = node.client(SHOP);
            client.session.set_as_of(Some(time));
            assert_eq!(client.state("SELECT count(*) FROM t").await, "58030");
            client.close().await;
        }
        // What it names nobody knows: nothing is collected.
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

/// It stays until what came behind it is older than the retention: then it goes, and collections delete segments again.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_manifest_has_its_time_too() {
    let (node, _) = five_minutes(Duration::from_millis(DAY)).await;
    let directory = node.directory.path().join(format!("store/manifests/{SHOP}/00000001"));
    let mut manifests: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    manifests.sort();
    std::fs::write(&manifests[1], "damaged").unwrap();
    node.run("UPDATE t SET v = randomblob(3000)").await;
    node.engine.flush().await.unwrap();
    let garbage = node.directory.path().join("store/segments/0000000000000000000000000000000a");
    std::fs::write(&garbage, "a flush that did not come to its end").unwrap();
    assert!(node.engine.collect().await.is_err());
    assert!(garbage.exists() && manifests[1].exists());
    node.wait(DAY + MINUTE);
    node.engine.collect().await.unwrap();
    assert!(!garbage.exists() && !manifests[1].exists());
    assert_eq!(node.rows(SHOP).await, 5);
}

/// A tenant that is written all day: each of its minutes can be gone back to, whatever has been collected meanwhile, unless there is no
/// space for them.
#[tokio::test(flavor = "multi_thread")]
async fn each_minute_of_a_day_stays_and_few_where_the_disk_is_nearly_full() {
    let mut node = Node::start(Duration::from_millis(DAY)).await;
    node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    let mut times = Vec::new();
    for _ in 0..5 {
        times.push(node.minute().await);
        times.push(node.minute().await);
        node.wait(HOUR);
        node.engine.collect().await.unwrap();
    }
    assert!(points_of(&node).await.len() >= 10, "compactions make some, too");
    for (minute, time) in times.iter().enumerate() {
        let id = PartitionId(100 + minute as u64);
        node.engine.create_partition(id, Some((SHOP, Some(*time)))).await.unwrap();
        assert_eq!(node.rows(id).await, minute as i64 + 1);
    }
    // The branches have pinned what they are made of.
    node.wait(5 * HOUR);
    node.available_bytes.store(0, Ordering::Relaxed);
    until("the disk counts as full", async || node.engine.statistics().disk_level > 0).await;
    node.engine.collect().await.unwrap();
    let left = points_of(&node).await;
    let tenth = |time_ms: &u64| (time_ms - 1) / (10 * MINUTE);
    let old: Vec<u64> = left.iter().filter(|time| *time + HOUR < node.clock.unix_ms()).map(tenth).collect();
    assert!(old.len() >= 5 && old.is_sorted_by(|a, b| a < b), "one in ten minutes: {left:?}");
    node.available_bytes.store(u64::MAX, Ordering::Relaxed);
    until("the disk has space again", async || node.engine.statistics().disk_level == 0).await;
    node.restore(left[0]).await.unwrap();
    assert!(node.rows(SHOP).await <= 2);
}

async fn points_of(node: &Node) -> Vec<u64> {
    node.engine.history(SHOP).await.unwrap().iter().map(|point| point.time_unix_ms).collect()
}

/// A restore ends between its manifest and the catalog's word, or behind that; nobody has got to know.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_has_happened_when_the_catalog_says_so() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    node.run("INSERT INTO t(v) VALUES ('in the log')").await;
    let of_epoch = |node: &Node, epoch| node.objects(&format!("manifests/{SHOP}/{epoch:08x}"));
    let fails = async |_| Err(Error::new(sqlstate::IO_ERROR, "the catalog has failed"));
    node.engine.restore_partition(SHOP, times[1], fails).await.unwrap_err();
    let mut client = node.client(SHOP);
    assert_eq!(client.state("INSERT INTO t(v) VALUES (1)").await, "57P01", "it may have been restored");
    client.close().await;
    // The catalog does not know of it.
    node = node.crash().await;
    assert_eq!(of_epoch(&node, 2), 1);
    assert_eq!(node.rows(SHOP).await, 6);
    let history = node.engine.history(SHOP).await.unwrap();
    assert!(history.iter().all(|point| point.lineage == SHOP.0), "{history:?}");
    node.engine.collect().await.unwrap();
    assert_eq!(of_epoch(&node, 2), 0);

    // It does, and that is all that is left of it.
    let eras = &mut node.eras;
    let knows = async |era| {
        eras.insert(SHOP, era);
        Err(Error::new(sqlstate::IO_ERROR, "its answer was lost"))
    };
    node.engine.restore_partition(SHOP, times[1], knows).await.unwrap_err();
    // Nobody knows, so nothing is deleted, and nothing that would be lost is taken until a start has asked.
    node.engine.collect().await.unwrap();
    assert_eq!(of_epoch(&node, 2), 1);
    node = node.crash().await;
    assert_eq!(node.rows(SHOP).await, 2);
    node.engine.collect().await.unwrap();
    assert_eq!(node.rows(SHOP).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_in_a_transaction_cannot_commit_into_what_was_restored() {
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
async fn what_is_older_than_the_retention_goes_and_what_others_name_stays() {
    let (node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let branch = PartitionId(8);
    node.engine.create_partition(branch, Some((SHOP, Some(times[1])))).await.unwrap();
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 5);
    node.wait(DAY + MINUTE);
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 1, "the newest stays");
    assert_eq!((node.rows(SHOP).await, node.rows(branch).await), (5, 2));
    node.engine.drop_partition(SHOP).await.unwrap();
    node.engine.collect().await.unwrap();
    let node = node.crash().await;
    assert_eq!(node.rows(branch).await, 2);
    node.engine.drop_partition(branch).await.unwrap();
    node.engine.collect().await.unwrap();
    assert_eq!((node.objects("manifests"), node.objects("segments")), (0, 0));
}

/// Branches, flushes, drops and collections at once: no branch ever misses a page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_collected_that_a_branch_needs() {
    let (node, _) = five_minutes(Duration::ZERO).await;
    let collecting = tokio::spawn({
        let engine = node.engine.clone();
        async move {
            loop {
                engine.collect().await.unwrap();
            }
        }
    });
    let mut previous = SHOP;
    for number in 100..140 {
        node.run("UPDATE t SET v = randomblob(3000)").await;
        let id = PartitionId(number);
        // Of the newest, or a branch of a branch whose source goes at once.
        let source = if number % 2 == 0 { SHOP } else { previous };
        node.engine.create_partition(id, Some((source, None))).await.unwrap();
        if previous != SHOP {
            node.engine.drop_partition(previous).await.unwrap();
        }
        assert_eq!(node.rows(id).await, 5);
        previous = id;
    }
    collecting.abort();
    let _ = collecting.await;
    assert_eq!(node.rows(SHOP).await, 5);
}

/// A restore that could not be opened could not be undone: the next restore opens the database first.
#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_does_not_open_is_not_restored_to() {
    let (node, times) = five_minutes(Duration::from_millis(DAY)).await;
    // So much is overwritten that all segments become one.
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
    // The caches are empty now.
    let mut node = node.crash().await;
    let pages = node.engine.store();
    let mut manifests = Vec::new();
    for name in pages.list_manifests(Some(SHOP)).await.unwrap() {
        manifests.push(pages.read_manifest(name).await.unwrap());
    }
    let target = manifests.iter().rfind(|manifest| manifest.timestamp >> 16 <= times[0]).unwrap();
    let newest = manifests.last().unwrap();
    let gone: Vec<_> = target.segments.iter().filter(|segment| !newest.segments.contains(segment)).collect();
    assert!(!gone.is_empty(), "the newest version is made of others");
    for segment in gone {
        pages.delete_segment(segment.id).await.unwrap();
    }
    let error = node.restore(times[0]).await.unwrap_err();
    assert_eq!(error.state(), "58030", "{error:?}");
    assert!(node.eras.is_empty(), "nothing was decided");
    assert_eq!(node.rows(SHOP).await, 5);
    let now = node.clock.unix_ms();
    node.restore(now).await.unwrap();
    assert_eq!(node.rows(SHOP).await, 5);
}
