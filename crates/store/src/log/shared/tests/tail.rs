//! Reading a log while it is written: scenarios that the model test does not cover.

use std::sync::Arc;

use fulmar_pages::PartitionId;

use super::*;
use crate::log::{LogEnd, LogPosition, LogTail, NextRecords};

fn tail_of(store: &impl CloneStore, memory_bytes: u64) -> LogTail {
    LogTail::new(Reliable::new(store.share(), Limits::default()), NODE, memory_bytes)
}

/// Reads the transactions from a position to the end. Also returns the end.
async fn read(tail: &LogTail, mut from: LogPosition) -> (Vec<u64>, LogPosition) {
    let LogEnd { needed, end } = tail.poll().await.unwrap();
    from = from.max(needed);
    let mut seen = Vec::new();
    while let NextRecords::Records(object, after) = tail.next(PartitionId(1), from, end).await.unwrap() {
        seen.extend(object.records(PartitionId(1)).map(|record| record.header.transaction));
        from = after;
    }
    (seen, end)
}

#[tokio::test(start_paused = true)]
async fn reading_resumes_across_restarts_of_the_writer() {
    let store = Backend::memory();
    let tail = tail_of(&store, 1 << 20);
    assert!(
        read(&tail, LogPosition::default()).await.0.is_empty(),
        "a store without a log must have no records"
    );
    let mut position = LogPosition::default();
    for start in 0..3 {
        let (log, _) = open(&store).await;
        for transaction in [10 * start + 1, 10 * start + 2] {
            append_durably(&log, transaction).await;
            let (seen, end) = read(&tail, position).await;
            assert_eq!(seen, [transaction]);
            position = end;
        }
        match start {
            0 => drop(log),
            _ => close(&log).await.unwrap(),
        }
        assert!(read(&tail, position).await.0.is_empty());
    }
    // A new reader reads the same records, and none of other partitions.
    let late = read(&tail_of(&store, 1), LogPosition::default()).await.0;
    assert_eq!(late, [1, 2, 11, 12, 21, 22]);
    let next = tail.next(PartitionId(2), tail.poll().await.unwrap().needed, position).await.unwrap();
    assert!(matches!(next, NextRecords::End), "{next:?}");
}

/// Objects after a gap are not acknowledged. They are not read until the gap is filled.
#[tokio::test(start_paused = true)]
async fn reading_stops_at_a_gap_until_it_is_filled() {
    let faulty = FaultyStore::new(Arc::new(Backend::memory()));
    let (log, _) = open(&faulty).await;
    append_durably(&log, 1).await;
    faulty.next(StoreOperation::Put, StoreFault::Delay(Duration::from_secs(5)));
    let late = append(&log, 2);
    tokio::time::sleep(Duration::from_secs(1)).await;
    append(&log, 3);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let tail = tail_of(&faulty, 1 << 20);
    let (seen, end) = read(&tail, LogPosition::default()).await;
    assert_eq!(seen, [1]);
    log.wait_durable(late).await.unwrap();
    assert_eq!(read(&tail, end).await.0, [2, 3]);
}

#[tokio::test(start_paused = true)]
async fn truncated_records_are_reported_as_gone() {
    let store = Backend::memory();
    let (log, _) = open(&store).await;
    append_durably(&log, 1).await;
    let tail = tail_of(&store, 1);
    let (_, old) = read(&tail, LogPosition::default()).await;
    for transaction in 2..=4 {
        let covered = append_durably(&log, transaction).await;
        log.truncate(covered);
    }
    append_durably(&log, 5).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let end = tail.poll().await.unwrap();
    assert!(end.needed > old);
    let next = tail.next(PartitionId(1), old, end.end).await.unwrap();
    assert!(matches!(next, NextRecords::Gone), "{next:?}");
    assert_eq!(read(&tail, end.needed).await.0, [5]);
    assert_eq!(read(&tail_of(&store, 1), end.needed).await.0, [5]);
}

/// A seal that was meant for an old state of the log takes the slot of a deleted object: it ends
/// nothing.
#[tokio::test(start_paused = true)]
async fn zombie_before_the_needed_slot_has_no_effect() {
    let store = Backend::memory();
    let (log, _) = open(&store).await;
    for transaction in 1..=3 {
        let covered = append_durably(&log, transaction).await;
        log.truncate(covered);
    }
    append_durably(&log, 4).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let zombie = Slot { incarnation: 1, sequence: 1 };
    let seal = crate::log::shared::recovery::seal(fulmar_pages::LogId(99), zombie, 0, zombie);
    store.put(&slot(1, 1), seal).await.unwrap();
    let tail = tail_of(&store, 1 << 20);
    let end = tail.poll().await.unwrap();
    assert_eq!(read(&tail, end.needed).await.0, [4]);
    append_durably(&log, 5).await;
    assert_eq!(read(&tail, end.end).await.0, [5]);
}

#[tokio::test(start_paused = true)]
async fn missing_and_damaged_objects_are_named_in_the_error() {
    let store = Backend::memory();
    let (log, _) = open(&store).await;
    for transaction in 1..=3 {
        append_durably(&log, transaction).await;
    }
    let lost = store.get(&slot(1, 2), Span::Whole).await.unwrap().bytes;
    store.delete(&slot(1, 2)).await.unwrap();
    let refused = tail_of(&store, 1).poll().await.unwrap_err();
    assert!(refused.to_string().contains(&slot(1, 2)), "{refused}");
    let mut damaged = lost.to_vec();
    damaged[90] ^= 1;
    store.put(&slot(1, 2), damaged.into()).await.unwrap();
    let refused = tail_of(&store, 1).poll().await.unwrap_err();
    assert!(refused.to_string().contains(&slot(1, 2)), "{refused}");
    store.delete(&slot(1, 2)).await.unwrap();
    store.put(&slot(1, 2), lost).await.unwrap();
    assert_eq!(read(&tail_of(&store, 1), LogPosition::default()).await.0, [1, 2, 3]);
}
