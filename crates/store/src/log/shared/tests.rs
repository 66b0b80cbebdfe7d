//! The shared log on a store that responds late, loses responses or reports false errors: single
//! scenarios, takeovers from a living writer ([`takeover`]), and model tests ([`model`],
//! [`backlog`]).
//!
//! Time is tokio's paused clock: it advances only while all tasks wait.

mod backlog;
mod model;
mod takeover;
mod verify;
// The same module as that of the integration tests.
#[path = "../../../tests/common/records.rs"]
mod records;
mod sealed;
mod tail;
mod wild;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use fulmar_pages::{Record, RecordKind};
use futures::FutureExt;

use records::commit;

use super::object_format::{HEAD_BYTES, LENGTH_BYTES, Object};
use super::slot::Slot;
use super::*;
use crate::log::own_record::own_record;
use crate::log::{LogBackend, Urgency};
use crate::{Backend, CommitLog, FailureKind, FaultyStore, Limits, Span, Store, StoreFault, StoreOperation};

const NODE: u128 = 7;

async fn open_with(
    options: SharedLogOptions,
    store: Arc<dyn Store>,
    limits: Limits,
) -> Result<(Arc<CommitLog>, Vec<(u64, Lsn)>), LogError> {
    let mut seen = Vec::new();
    let mut replay = |lsn, record: &Record<'_>| {
        seen.push((record.header.transaction, lsn));
        Ok(())
    };
    let log = CommitLog::open_shared(options, Reliable::new(store, limits), NODE, &mut replay).await?;
    Ok((log, seen))
}

async fn open(store: &impl CloneStore) -> (Arc<CommitLog>, Vec<u64>) {
    let opened = open_with(SharedLogOptions::default(), store.share(), Limits::default()).await;
    let (log, seen) = opened.unwrap();
    (log, seen.into_iter().map(|(transaction, _)| transaction).collect())
}

trait CloneStore {
    fn share(&self) -> Arc<dyn Store>;
}

impl<S: Store + Clone> CloneStore for S {
    fn share(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }
}

fn append(log: &CommitLog, transaction: u64) -> Lsn {
    log.append(&commit(transaction, 10), Urgency::Immediate).unwrap()
}

async fn append_durably(log: &CommitLog, transaction: u64) -> Lsn {
    let lsn = append(log, transaction);
    log.wait_durable(lsn).await.unwrap();
    lsn
}

/// As [`CommitLog::close`], which would block the thread that runs the test.
async fn close(log: &CommitLog) -> Result<(), LogError> {
    let LogBackend::Shared(shared) = &log.backend else { panic!("not a shared log") };
    shared.core.stop(Stop::Drain);
    shared.core.progress.wait_end().await;
    shared.core.stopped()
}

/// Three starts. In each, a manifest covers the first of three records.
async fn three_logs(store: &Backend) {
    for start in 0..3 {
        let (log, _) = open(store).await;
        let covered = append_durably(&log, 10 * start).await;
        append_durably(&log, 10 * start + 1).await;
        log.truncate(covered);
        append_durably(&log, 10 * start + 2).await;
        assert!(log.oldest() >= covered, "{} {covered}", log.oldest());
    }
}

fn slot(incarnation: u64, sequence: u64) -> String {
    format!("logs/{NODE:032x}/{}", Slot { incarnation, sequence })
}

async fn names(store: &Backend) -> Vec<String> {
    store.list(&format!("logs/{NODE:032x}"), None).await.unwrap().names
}

#[tokio::test(start_paused = true)]
async fn acknowledged_records_survive_a_crash_and_a_close() {
    let store = Backend::memory();
    let (log, seen) = open(&store).await;
    assert!(seen.is_empty());
    append_durably(&log, 1).await;
    let second = append_durably(&log, 2).await;
    drop(log);
    let (log, seen) = open(&store).await;
    assert_eq!(seen, [1, 2]);
    assert!(log.durable() >= second, "positions must grow across starts");
    append(&log, 3);
    close(&log).await.unwrap();
    assert!(matches!(log.append(&commit(4, 1), Urgency::Immediate), Err(LogError::Closed)));
    let (_, seen) = open(&store).await;
    assert_eq!(seen, [1, 2, 3], "a close must make appended records durable");
}

#[tokio::test(start_paused = true)]
async fn puts_that_complete_out_of_order_are_acknowledged_in_order() {
    let faulty = FaultyStore::new(Arc::new(Backend::memory()));
    let (log, _) = open(&faulty).await;
    faulty.next(StoreOperation::Put, StoreFault::Delay(Duration::from_secs(2)));
    let first = append(&log, 1);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let second = append(&log, 2);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(
        log.wait_durable(second).now_or_never().is_none(),
        "a record must not be acknowledged before its predecessor"
    );
    log.wait_durable(second).await.unwrap();
    assert!(log.is_durable(first));
    assert_eq!(log.statistics().batches.load(Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn records_are_batched_while_puts_are_in_flight() {
    let faulty = FaultyStore::new(Arc::new(Backend::memory()));
    let (log, _) = open(&faulty).await;
    faulty.always(StoreOperation::Put, Some(StoreFault::Delay(Duration::from_millis(100))));
    append_durably(&log, 0).await;
    for transaction in 1..=100 {
        append(&log, transaction);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    log.wait_durable(log.appended()).await.unwrap();
    let batches = log.statistics().batches.load(Relaxed);
    // The appends take 500 ms, and one put starts per quarter of a put's latency of 100 ms.
    assert!((15..=30).contains(&batches), "{batches}");
}

#[tokio::test(start_paused = true)]
async fn successor_fences_a_live_writer() {
    let store = Backend::memory();
    let (old, _) = open(&store).await;
    append_durably(&old, 1).await;
    let (new, seen) = open(&store).await;
    assert_eq!(seen, [1]);
    let (notify, discarded) = std::sync::mpsc::channel();
    old.on_discard(Box::new(move |after, upto| notify.send((after, upto)).unwrap()));
    let after = old.durable();
    let lost = append(&old, 2);
    assert!(matches!(old.wait_durable(lost).await, Err(LogError::Discarded { .. })));
    assert_eq!(discarded.recv().unwrap(), (after, lost));
    assert!(matches!(old.append(&commit(3, 1), Urgency::Immediate), Err(LogError::Fenced { .. })));
    append_durably(&new, 4).await;
    assert_eq!(open(&store).await.1, [1, 4]);
}

/// A put in flight when the log is sealed either becomes part of the log or lands after the seal,
/// where it does not count.
#[tokio::test(start_paused = true)]
async fn put_after_the_seal_does_not_count() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    let (old, _) = open(&faulty).await;
    faulty.next(StoreOperation::Put, StoreFault::Delay(Duration::from_secs(5)));
    let late = append(&old, 1);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let early = append(&old, 2);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(names(&store).await.contains(&slot(1, 2)), "the second object must be stored");
    let (_new, seen) = open(&store).await;
    assert!(seen.is_empty(), "the log must end at the gap");
    for lsn in [late, early] {
        assert!(matches!(old.wait_durable(lsn).await, Err(LogError::Discarded { .. })));
    }
    assert!(open(&store).await.1.is_empty());
}

#[tokio::test(start_paused = true)]
async fn commits_are_not_answered_before_their_outcome_is_known() {
    let faulty = FaultyStore::new(Arc::new(Backend::memory()));
    let (log, _) = open(&faulty).await;
    faulty.next(StoreOperation::Put, StoreFault::LoseResponse);
    faulty.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Unavailable)));
    faulty.always(StoreOperation::Get, Some(StoreFault::Fail(FailureKind::Unavailable)));
    let lsn = append(&log, 1);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(log.wait_durable(lsn).now_or_never().is_none());
    let refused = log.append(&commit(2, 1), Urgency::Immediate);
    assert!(matches!(refused, Err(LogError::Unreachable { .. })), "{refused:?}");
    faulty.always(StoreOperation::Put, None);
    faulty.always(StoreOperation::Get, None);
    log.wait_durable(lsn).await.unwrap();
    append_durably(&log, 2).await;
}

#[tokio::test(start_paused = true)]
async fn covered_objects_are_deleted_except_seals() {
    let store = Backend::memory();
    three_logs(&store).await;
    let (log, seen) = open(&store).await;
    assert_eq!(seen, [21, 22]);
    assert_eq!(log.size_bytes(), 2 * (HEAD_BYTES + LENGTH_BYTES + commit(21, 10).len()) as u64);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let end_of = |start, sequence| slot(start, sequence);
    let left = [end_of(1, 4), end_of(2, 4), slot(3, 2), slot(3, 3), end_of(3, 4), slot(4, 0)];
    assert_eq!(names(&store).await, left);
}

/// A process read the log long ago and puts its seal now, into a slot that was used and deleted in
/// the meantime.
#[tokio::test(start_paused = true)]
async fn late_seal_in_a_deleted_slot_has_no_effect() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    let (log, _) = open(&store).await;
    // The successor lists, reads the claim, then puts the seal.
    faulty.next(StoreOperation::Put, StoreFault::Delay(Duration::from_secs(5)));
    let successor = tokio::spawn(async move { open(&faulty).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    for transaction in 1..=3 {
        let covered = append_durably(&log, transaction).await;
        log.truncate(covered);
    }
    append_durably(&log, 4).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!names(&store).await.contains(&slot(1, 1)));
    let (_new, seen) = successor.await.unwrap();
    assert_eq!(seen, [4]);
    let lsn = append(&log, 5);
    assert!(matches!(log.wait_durable(lsn).await, Err(LogError::Discarded { .. })));
}

/// A late seal arrives in a slot whose object the successor has read, covered and deleted, before
/// the old writer learns that its own put had succeeded. The old writer must not report that commit
/// as lost.
#[tokio::test(start_paused = true)]
async fn lost_slot_that_had_been_deleted_does_not_prove_a_loss() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    let (old, _) = open(&faulty).await;
    faulty.next(StoreOperation::Put, StoreFault::LoseResponse);
    faulty.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Unavailable)));
    faulty.always(StoreOperation::Get, Some(StoreFault::Fail(FailureKind::Unavailable)));
    let lsn = append(&old, 1);
    while !names(&store).await.contains(&slot(1, 1)) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let (new, seen) = open(&store).await;
    assert_eq!(seen, [1], "the stored object must count");
    let covered = append_durably(&new, 2).await;
    new.truncate(covered);
    append_durably(&new, 3).await;
    while names(&store).await.contains(&slot(1, 1)) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let place = Slot { incarnation: 1, sequence: 1 };
    let late = recovery::seal(fulmar_pages::LogId(9), place, 0, Slot { incarnation: 1, sequence: 0 });
    store.put(&slot(1, 1), late).await.unwrap();
    faulty.always(StoreOperation::Put, None);
    faulty.always(StoreOperation::Get, None);
    let outcome = old.wait_durable(lsn).await;
    assert!(matches!(outcome, Err(LogError::Closed)), "the outcome must be unknown: {outcome:?}");
    assert!(matches!(old.append(&commit(4, 1), Urgency::Immediate), Err(LogError::Fenced { .. })));
    append_durably(&new, 5).await;
    assert_eq!(open(&store).await.1, [3, 5]);
}

/// If the log cannot be listed, nothing is known about a lost slot.
#[tokio::test(start_paused = true)]
async fn lost_slot_does_not_prove_a_loss_while_the_store_is_unavailable() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    let (old, _) = open(&faulty).await;
    let (_new, _) = open(&store).await;
    faulty.always(StoreOperation::List, Some(StoreFault::Fail(FailureKind::Unavailable)));
    let outcome = old.wait_durable(append(&old, 1)).await;
    assert!(matches!(outcome, Err(LogError::Closed)), "the outcome must be unknown: {outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn damaged_and_missing_objects_are_named_in_the_error() {
    let store = Backend::memory();
    let (log, _) = open(&store).await;
    for transaction in 1..=3 {
        append_durably(&log, transaction).await;
    }
    close(&log).await.unwrap();
    // The claim is below the needed slot: no start reads it.
    for sequence in 1..=4 {
        let name = slot(1, sequence);
        let whole = store.get(&name, Span::Whole).await.unwrap().bytes;
        let mut flipped = whole.to_vec();
        flipped[whole.len() / 2] ^= 1;
        let damaged = [Some(Bytes::from(flipped)), Some(whole.slice(..whole.len() - 1)), None];
        // A missing seal is no loss, since it has no commits.
        for bytes in damaged.into_iter().take(if (1..=3).contains(&sequence) { 3 } else { 2 }) {
            store.delete(&name).await.unwrap();
            if let Some(bytes) = bytes {
                store.put(&name, bytes).await.unwrap();
            }
            let opened = open_with(SharedLogOptions::default(), store.share(), Limits::default()).await;
            match opened.map(drop) {
                Err(LogError::Corrupt { file, .. }) => assert!(file.ends_with(&name), "{file} for {name}"),
                other => panic!("{name}: {other:?}"),
            }
        }
        store.delete(&name).await.unwrap();
        store.put(&name, whole).await.unwrap();
    }
    assert_eq!(open(&store).await.1, [1, 2, 3]);
}

/// Names with the greatest number, which no node creates.
#[tokio::test(start_paused = true)]
async fn objects_with_the_greatest_number_are_named_in_the_error() {
    let (last, first) = (u64::MAX, Slot { incarnation: 1, sequence: 0 });
    for forged in [Slot { incarnation: last, sequence: 0 }, Slot { incarnation: 1, sequence: last }] {
        let store = Backend::memory();
        let head = object_format::Head {
            writer: fulmar_pages::LogId(1),
            slot: forged,
            start: 0,
            needed: forged.max(first),
            durable: 0,
        };
        let name = slot(forged.incarnation, forged.sequence);
        store.put(&name, object_format::finish(object_format::begin(), &head)).await.unwrap();
        let opened = open_with(SharedLogOptions::default(), store.share(), Limits::default()).await;
        let refused = matches!(&opened, Err(LogError::Corrupt { file, .. }) if file.ends_with(&name));
        assert!(refused, "{name}: {:?}", opened.map(drop));
    }
}

#[tokio::test(start_paused = true)]
async fn records_are_rejected_until_there_is_space() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    let options =
        SharedLogOptions { pending_bytes: 1000, capacity_bytes: 4000, ..SharedLogOptions::default() };
    let (log, _) = open_with(options, faulty.share(), Limits::default()).await.unwrap();
    faulty.hold(StoreOperation::Put, true);
    let body = commit(1, 600);
    log.append(&body, Urgency::Immediate).unwrap();
    assert!(matches!(log.append(&body, Urgency::Immediate), Err(LogError::Busy)));
    assert!(log.wait_for_space(body.len(), Urgency::Immediate).now_or_never().is_none());
    faulty.hold(StoreOperation::Put, false);
    log.wait_for_space(body.len(), Urgency::Immediate).await.unwrap();
    let full = loop {
        match log.append(&body, Urgency::Immediate) {
            Ok(lsn) => log.wait_durable(lsn).await.unwrap(),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, LogError::Full(FullCause::Capacity { .. })), "{full}");
    log.truncate(log.durable());
    log.append(&body, Urgency::Immediate).unwrap();
    let long = log.append(&commit(1, 3000), Urgency::Immediate);
    assert!(matches!(long, Err(LogError::TooLong { .. })), "{long:?}");
}

/// The golden object was written by an earlier version.
#[test]
fn golden_object_is_written_and_read_unchanged() {
    let slot = Slot { incarnation: 3, sequence: 5 };
    let mut bytes = object_format::begin();
    object_format::push(&mut bytes, &commit(11, 3));
    object_format::push(&mut bytes, &commit(12, 5));
    let head = object_format::Head {
        writer: fulmar_pages::LogId(1 << 100 | 2),
        slot,
        start: 1000,
        needed: Slot { incarnation: 2, sequence: 9 },
        durable: 4,
    };
    let written = object_format::finish(bytes, &head);
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let path = golden.join("log-object-v1-records-v3.bin");
    // Written only if it is missing and the environment variable is set, as the other golden files.
    if !path.exists() && std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &written).unwrap();
    }
    let stored = Bytes::from(std::fs::read(&path).unwrap());
    assert_eq!(written, stored);
    // Objects with records of earlier formats.
    for (name, previous) in [("log-object-v1.bin", None), ("log-object-v1-records-v2.bin", Some(0))] {
        let old = Bytes::from(std::fs::read(golden.join(name)).unwrap());
        let old = Object::decode(slot, old).unwrap();
        assert!(old.records().all(|(_, record)| record.header.previous == previous), "{name}");
        assert_eq!(old.records().count(), 2, "{name}");
    }
    let read = Object::decode(slot, stored.clone()).unwrap();
    assert_eq!(
        (read.head, read.is_seal, read.end()),
        (head, false, 1000 + (stored.len() - HEAD_BYTES) as u64)
    );
    let ids: Vec<_> = read.records().map(|(_, record)| record.header.transaction).collect();
    assert_eq!(ids, [11, 12]);
    for at in 0..stored.len() {
        let mut damaged = stored.to_vec();
        damaged[at] ^= 1;
        assert!(Object::decode(slot, damaged.into()).is_err(), "byte {at}");
    }
}

/// Arbitrary bytes as an object: it is decoded or refused. The checksum is recomputed for every
/// input that has a complete head.
#[test]
fn fuzz_log_object() {
    let slot = Slot { incarnation: 3, sequence: 5 };
    let mut seed = object_format::begin();
    object_format::push(&mut seed, &commit(11, 3));
    object_format::push(&mut seed, &own_record(RecordKind::Seal, None));
    let head =
        object_format::Head { writer: fulmar_pages::LogId(1), slot, start: 9, needed: slot, durable: 4 };
    let seed = object_format::finish(seed, &head).to_vec();
    let target = fulmar_fuzz::Target::new("log-object", env!("CARGO_MANIFEST_DIR")).seeds([seed]);
    target.max_length(4096).run(|input| {
        let mut bytes = input.to_vec();
        if bytes.len() >= HEAD_BYTES {
            let crc = crc32fast::hash(&bytes[16..]);
            bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        }
        if let Ok(object) = Object::decode(slot, bytes.into()) {
            let _ = object.records().count();
            let _ = object.end();
        }
    });
}
