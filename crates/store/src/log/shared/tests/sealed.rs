//! Logs of given incarnations, and reading them after they were sealed.

use fulmar_pages::PartitionId;

use super::*;
use crate::{LogPosition, LogSlot, LogSlots, SealedLogs};

/// The partition of the test records.
const PARTITION: PartitionId = PartitionId(1);

fn reliable(store: &Backend) -> Reliable {
    Reliable::new(Arc::new(store.clone()), Limits::default())
}

async fn begin(store: &Backend, incarnation: u64) -> Result<Arc<CommitLog>, LogError> {
    CommitLog::open_incarnation(SharedLogOptions::default(), reliable(store), NODE, incarnation).await
}

/// Seals the log at its end, as the protocol does.
async fn seal(store: &Backend, incarnation: u64) -> u64 {
    let slots = LogSlots::new(reliable(store));
    let end = slots.list(NODE, incarnation).await.unwrap().last().map_or(0, |last| last + 1);
    assert!(slots.create_seal(NODE, incarnation, end).await.unwrap());
    assert_eq!(slots.read(NODE, incarnation, end).await.unwrap(), Some(LogSlot::Seal));
    end
}

/// The transactions of a range, in order.
async fn read(store: &Backend, from: (u64, u64), to: (u64, u64)) -> Result<Vec<u64>, LogError> {
    let logs = SealedLogs::new(reliable(store), 1 << 20);
    let [from, to] = [from, to].map(|(incarnation, slot)| LogPosition::new(incarnation, slot));
    let objects = logs.objects_of(PARTITION, NODE, from, to).await?;
    let records = objects.iter().flat_map(|object| object.records(PARTITION));
    Ok(records.map(|record| record.header.transaction).collect())
}

async fn needed(store: &Backend, incarnation: u64, slot: u64) -> LogPosition {
    match LogSlots::new(reliable(store)).read(NODE, incarnation, slot).await.unwrap() {
        Some(LogSlot::Records { needed }) => needed,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn incarnation_is_claimed_once() {
    let store = Backend::memory();
    let log = begin(&store, 3).await.unwrap();
    append_durably(&log, 1).await;
    assert!(matches!(begin(&store, 3).await, Err(LogError::Fenced { .. })));
    assert_eq!(log.position(), LogPosition::new(3, 2));
    seal(&store, 3).await;
    let lost = append(&log, 2);
    assert!(matches!(log.wait_fenced().await, LogError::Fenced { .. }));
    assert!(matches!(log.wait_durable(lost).await, Err(LogError::Discarded { .. })));
    let next = begin(&store, 4).await.unwrap();
    append_durably(&next, 3).await;
    seal(&store, 4).await;
    assert_eq!(read(&store, (3, 0), (5, 0)).await.unwrap(), [1, 3]);
    assert_eq!(read(&store, (3, 0), (3, 2)).await.unwrap(), [1]);
    assert_eq!(read(&store, (4, 0), (4, 2)).await.unwrap(), [3]);
    assert_eq!(read(&store, (4, 2), (4, 2)).await.unwrap(), [] as [u64; 0]);
}

#[tokio::test(start_paused = true)]
async fn missing_object_of_a_range_is_an_error_unless_it_was_truncated() {
    let store = Backend::memory();
    let log = begin(&store, 1).await.unwrap();
    log.settle_inherited();
    for transaction in 1..=3 {
        append_durably(&log, transaction).await;
    }
    log.truncate(log.durable());
    for transaction in 4..=6 {
        append_durably(&log, transaction).await;
    }
    drop(log);
    let end = seal(&store, 1).await;
    assert_eq!(read(&store, (1, 0), (2, 0)).await.unwrap(), [4, 5, 6]);
    assert!(!names(&store).await.contains(&slot(1, 1)), "truncated objects must be deleted");
    store.delete(&slot(1, 5)).await.unwrap();
    for to in [(2, 0), (1, end)] {
        let error = read(&store, (1, 0), to).await.unwrap_err();
        assert!(matches!(error, LogError::Corrupt { .. }), "{error}");
    }
    let error = read(&store, (1, 0), (1, end + 1)).await.unwrap_err();
    assert!(matches!(error, LogError::Corrupt { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn log_without_a_seal_is_an_error() {
    let store = Backend::memory();
    let log = begin(&store, 1).await.unwrap();
    append_durably(&log, 1).await;
    assert!(matches!(read(&store, (1, 0), (2, 0)).await, Err(LogError::Corrupt { .. })));
    assert!(matches!(read(&store, (7, 0), (8, 0)).await, Err(LogError::Corrupt { .. })));
}

#[tokio::test(start_paused = true)]
async fn objects_state_their_own_incarnation_only_after_inherited_records_are_flushed() {
    let store = Backend::memory();
    let log = begin(&store, 2).await.unwrap();
    append_durably(&log, 1).await;
    log.truncate(log.durable());
    append_durably(&log, 2).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(needed(&store, 2, 2).await, LogPosition::default());
    assert_eq!(names(&store).await.len(), 3, "nothing may be deleted, and no mark is useful");
    log.settle_inherited();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(needed(&store, 2, 3).await, LogPosition::new(2, 2), "a mark must state it");
    assert_eq!(names(&store).await, [slot(2, 2), slot(2, 3)]);
}

#[tokio::test(start_paused = true)]
async fn clean_stop_leaves_an_object_that_states_what_is_needed() {
    let store = Backend::memory();
    let log = begin(&store, 1).await.unwrap();
    log.settle_inherited();
    append_durably(&log, 1).await;
    log.truncate(log.durable());
    close(&log).await.unwrap();
    let slots = LogSlots::new(reliable(&store));
    let left = slots.list(NODE, 1).await.unwrap();
    assert_eq!(left, [2, 3]);
    assert_eq!(needed(&store, 1, 2).await, LogPosition::new(1, 2));
    assert_eq!(slots.read(NODE, 1, 3).await.unwrap(), Some(LogSlot::Seal));
    assert_eq!(read(&store, (1, 0), (2, 0)).await.unwrap(), [] as [u64; 0]);
}

#[tokio::test(start_paused = true)]
async fn end_mark_of_a_deleted_log_is_read_as_a_seal() {
    let store = Backend::memory();
    let log = begin(&store, 1).await.unwrap();
    append_durably(&log, 1).await;
    let end = seal(&store, 1).await;
    let slots = LogSlots::new(reliable(&store));
    assert!(slots.create_end_mark(NODE, 1, end + 1).await.unwrap());
    assert_eq!(slots.read(NODE, 1, end + 1).await.unwrap(), Some(LogSlot::Seal));
}

/// Puts an object of a writer that keeps several puts in flight.
async fn put(store: &Backend, sequence: u64, needed: u64) {
    let [slot, needed] = [sequence, needed].map(|sequence| Slot { incarnation: 1, sequence });
    let head = object_format::Head {
        writer: fulmar_pages::LogId(1),
        slot,
        start: sequence * 100,
        needed,
        durable: 0,
    };
    let mut object = object_format::begin();
    object_format::push(&mut object, &commit(sequence, 10));
    let name = self::slot(1, sequence);
    reliable(store).put(&name, object_format::finish(object, &head)).await.unwrap();
}

/// The put of slot 5 overtook the one of slot 4, which lost against the seal.
#[tokio::test(start_paused = true)]
async fn object_in_flight_after_the_end_does_not_state_what_is_needed() {
    let expected: Vec<u64> = (0..4).collect();
    for stated in [1, 3, 4] {
        let store = Backend::memory();
        for sequence in 0..4 {
            put(&store, sequence, 0).await;
        }
        put(&store, 5, stated).await;
        let slots = LogSlots::new(reliable(&store));
        assert!(slots.create_seal(NODE, 1, 4).await.unwrap());
        assert!(slots.create_seal(NODE, 1, 70).await.unwrap());
        assert_eq!(read(&store, (1, 0), (1, 4)).await.unwrap(), expected, "stated {stated}");
        assert_eq!(read(&store, (1, 0), (2, 0)).await.unwrap(), expected, "stated {stated}");
    }
}

/// A late seal took the place of a deleted object.
#[tokio::test(start_paused = true)]
async fn seal_before_the_needed_slot_does_not_end_a_log() {
    let store = Backend::memory();
    for sequence in 3..6 {
        put(&store, sequence, 3).await;
    }
    let slots = LogSlots::new(reliable(&store));
    assert!(slots.create_seal(NODE, 1, 1).await.unwrap());
    assert!(slots.create_seal(NODE, 1, 6).await.unwrap());
    assert_eq!(read(&store, (1, 0), (2, 0)).await.unwrap(), [3, 4, 5]);
}
