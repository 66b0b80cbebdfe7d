//! Log relocation: appends records of partitions that cannot be opened to the end of their log, so
//! that the log can be truncated before them.
//!
//! A partition with a damaged manifest or segment cannot be flushed until the damage is repaired,
//! perhaps for days. Its records soon become the oldest in the log. Since the log cannot be
//! truncated past them it would reach its size limit, and then commits of *all* tenants would be
//! rejected. The records are in memory ([`fulmar_mvcc::Replay`]), so they are appended again
//! unchanged:
//!
//! ```text
//!   oldest                                    others (first uncovered record of other partitions)
//!     | 1 2 . . 3 . . . . . . . . . . . . . . . | . . . |
//!     |                                         | . . . 1 2 . 3 |      appended, and durable
//!                                               | . . . 1 2 . 3 |      truncated
//! ```
//!
//! # Why nothing is lost
//! Each record has one position for which the log is retained. It changes to the position of the
//! copy once the copy is durable, and not before, and the log is truncated before the lowest of
//! these positions. So the log contains a copy of each record at any time. After a crash during
//! appending, or before the truncation, it contains some records twice. A start applies each record
//! once, in the order of their version numbers, and takes the later position, which is durable; the
//! state is as before the crash. A failed write discards appended copies that are not yet durable;
//! the originals are still in place.
//!
//! Copies that are not durable when the time-out ends are awaited by the next round, and not
//! appended again.
//!
//! A full log still accepts copies, in a reserve that commits do not use ([`Urgency::FreesSpace`]):
//! if the store was unavailable for long enough, all commits of other partitions may come after the
//! records to be relocated.
//!
//! Truncation frees whole files or objects, so some of the older copies may remain. A start must
//! therefore not assume that the first copy of a record that it reads is the oldest record.
//!
//! # Other readers of the log
//! A partition that is opened meanwhile retains the log from where its records were when the
//! opening began, until it is flushed. Copies that come after its own commits have no effect: their
//! version numbers are lower, and their contents are already applied.
//!
//! A replica (`replica` in `fulmar_engine`) that has followed so far skips known records by their
//! numbers. A replica that starts while only part of the older copies is left finds that they
//! continue from a version that it does not have. It reports 40001 for the partition until the
//! primary has opened the repaired partition and flushed it. Records of format version 1 do not
//! contain the version that they continue from, so a replica would not notice; a partition with
//! such records is not relocated.
//!
//! When the partition is flushed at last, older copies may remain without the newest ones. If a
//! manifest is lost at that moment, they reveal as little about it as a log without any of its
//! records.
//!
//! # Members of a cluster
//! Records of earlier incarnations are in sealed logs. As long as a partition with such records can
//! neither be opened nor relocated, the node's log may not be truncated at all. They are therefore
//! copied to it once ([`copy_to`]), and are relocated from then on like those of a single node.
//!
//! # How much is written
//! - Only records that keep an overlong log from being truncated, and only if at least a quarter of
//!   the space to be freed belongs to other partitions. If nearly all records were relocated, the
//!   log would be rewritten in circles. (They can take about 600 MiB of a log of 1 GiB; beyond that
//!   commits are rejected.)
//! - At most a 16th of the log's capacity before each truncation, so the log hardly grows.
//! - For a few seconds at most, since flushes wait meanwhile; the next round continues.

use std::collections::HashSet;
use std::sync::Arc;

use fulmar_mvcc::{Logged, Replay, Unopened, log_error};
use fulmar_pages::PartitionId;
use fulmar_sqlite::Result;
use fulmar_store::{CommitLog, LogError, Lsn, Urgency};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::{Instant, timeout_at};

use super::batch::{LOG_TIMEOUT, log_timeout};
use super::pressure::{Pressure, first_uncovered};
use crate::maintenance::Maintenance;

/// A step covers 1/16 of the log's capacity, then the log is truncated.
const STEP_DIVISOR: u64 = 16;
/// Other partitions' records must be at least 1/4 of the space to be freed.
const MIN_OTHERS_DIVISOR: u64 = 4;
/// Bytes appended before waiting for durability. Concurrent appends queue behind them.
const BATCH_BYTES: u64 = 4 << 20;

/// Relocates records of partitions that could not be opened, if they keep a log from being
/// truncated. Returns true if there were any; more may be due after the truncation.
pub(super) fn relocate<'a>(
    maintenance: &'a Maintenance,
    unopenable: &'a HashSet<PartitionId>,
    deadline: Instant,
) -> BoxFuture<'a, Result<bool>> {
    async move {
        if unopenable.is_empty() {
            return Ok(false);
        }
        // Relocations exclude each other and flushes.
        let _one = maintenance.flusher.lock_flushes().await;
        let logs: Vec<Arc<CommitLog>> = maintenance.node().logs().cloned().collect();
        let mut result = Ok(false);
        for log in logs {
            let movable = movable_partitions(maintenance, &log, unopenable);
            if let Some(upto) = relocation_end(maintenance, &log, &movable) {
                let relocated = relocate_before(&log, &movable, upto, deadline).await;
                movable.iter().for_each(|one| one.replay.update_since());
                result = result.and_then(|before| relocated.map(|some| some || before));
            }
        }
        result
    }
    .boxed()
}

/// Appends the records of a partition, which are in other logs, to this one. Returns once the copies
/// are durable.
pub(crate) fn copy_to<'a>(
    maintenance: &'a Maintenance,
    log: &'a CommitLog,
    replay: &'a Replay,
) -> BoxFuture<'a, Result<()>> {
    async move {
        let _one = maintenance.flusher.lock_flushes().await;
        let records: Vec<&Logged> = replay.records().collect();
        let mut rest = records.as_slice();
        while !rest.is_empty() {
            rest = &rest[relocate_batch(log, rest).await?..];
        }
        replay.update_since();
        Ok(())
    }
    .boxed()
}

/// The partitions whose records in this log can be relocated.
fn movable_partitions(
    maintenance: &Maintenance,
    log: &Arc<CommitLog>,
    unopenable: &HashSet<PartitionId>,
) -> Vec<Unopened> {
    let mut movable = maintenance.partitions.unopened();
    movable.retain(|one| Arc::ptr_eq(&one.log, log) && unopenable.contains(&one.id) && one.replay.may_move());
    movable
}

/// Returns the position before which records are to be relocated. None if they do not keep the log
/// from being truncated, or are nearly all of it.
fn relocation_end(maintenance: &Maintenance, log: &Arc<CommitLog>, movable: &[Unopened]) -> Option<Lsn> {
    let pressure = Pressure::of(log, maintenance.flusher.log_bytes);
    if !movable.iter().any(|one| pressure.is_on(one.replay.since())) {
        return None;
    }
    // Finds copies that an earlier process appended.
    movable.iter().for_each(|one| one.replay.update_since());
    let since = movable.iter().map(|one| one.replay.since()).min().filter(|since| pressure.is_on(*since))?;
    let ids = movable.iter().map(|one| one.id).collect();
    let others = first_uncovered(maintenance, log, &ids);
    let span = others.0.checked_sub(since.0)?;
    let bytes: u64 = placed_before(movable, others).map(Logged::bytes).sum();
    let is_worth_it = bytes <= span / MIN_OTHERS_DIVISOR * (MIN_OTHERS_DIVISOR - 1);
    is_worth_it.then(|| others.min(Lsn(since.0 + log.capacity_bytes() / STEP_DIVISOR)))
}

fn placed_before(movable: &[Unopened], upto: Lsn) -> impl Iterator<Item = &Logged> {
    movable.iter().flat_map(move |one| one.replay.placed_before(upto))
}

/// Relocates the records before a position until the deadline. Returns true if there were any.
async fn relocate_before(
    log: &CommitLog,
    movable: &[Unopened],
    upto: Lsn,
    deadline: Instant,
) -> Result<bool> {
    let records: Vec<&Logged> = placed_before(movable, upto).collect();
    let mut rest = records.as_slice();
    while !rest.is_empty() && Instant::now() < deadline {
        let relocated = relocate_batch(log, rest).await?;
        rest = &rest[relocated..];
    }
    Ok(!records.is_empty())
}

/// Appends a batch of the first records and waits until it is durable, which changes their
/// positions. Returns the number of records in the batch. Records with a copy that is not durable
/// yet are not appended again.
async fn relocate_batch(log: &CommitLog, records: &[&Logged]) -> Result<usize> {
    let deadline = Instant::now() + LOG_TIMEOUT;
    let (mut copied, mut bytes, mut appended) = (0, 0, Ok(()));
    for record in records {
        if record.copy().is_none() {
            match append(log, &record.body, deadline).await {
                Ok(end) => record.copied(end),
                Err(error) => {
                    appended = Err(error);
                    break;
                }
            }
        }
        (copied, bytes) = (copied + 1, bytes + record.bytes());
        if bytes >= BATCH_BYTES {
            break;
        }
    }
    let waited = wait_for_copies(log, &records[..copied], deadline).await;
    appended.and(waited).map(|()| copied)
}

/// Waits for the last copy, and moves each record whose copy is durable. Each copy is checked,
/// since an earlier failed write may have discarded some of them.
async fn wait_for_copies(log: &CommitLog, records: &[&Logged], deadline: Instant) -> Result<()> {
    let Some(last) = records.iter().filter_map(|record| record.copy()).max() else { return Ok(()) };
    let waited = timeout_at(deadline, log.wait_durable(last)).await;
    for record in records {
        match record.copy() {
            Some(end) if log.is_durable(end) => record.move_to(end),
            // The copy was discarded; the next round appends it again.
            Some(end) if end <= log.durable() => record.forget_copy(),
            _ => {}
        }
    }
    waited.map_err(|_| log_timeout())?.map_err(log_error)
}

async fn append(log: &CommitLog, body: &[u8], deadline: Instant) -> Result<Lsn> {
    while Instant::now() < deadline {
        match log.append(body, Urgency::FreesSpace) {
            Err(LogError::Busy) => {
                let room = timeout_at(deadline, log.wait_for_space(body.len(), Urgency::FreesSpace)).await;
                room.map_err(|_| log_timeout())?.map_err(log_error)?;
            }
            appended => return appended.map_err(log_error),
        }
    }
    Err(log_timeout())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fulmar_pages::record::{self, RecordBuilder, RecordHeader, RecordKind};
    use fulmar_pages::{Version, ZERO_PAGE};
    use fulmar_store::{Fault, FaultyFiles, LogOptions, Operation};

    use super::*;

    fn body(number: u64) -> Vec<u8> {
        let mut builder = RecordBuilder::default();
        builder.begin(&RecordHeader {
            kind: RecordKind::Commit,
            partition: PartitionId(1),
            version: Version { lineage: 1, epoch: 1, number },
            transaction: 0,
            timestamp: 1,
            page_count: 1,
            previous: Some(number - 1),
        });
        builder.push_page(1, None, &ZERO_PAGE);
        builder.finish().to_vec()
    }

    /// A failed write discards the first copy; the log then recovers, and later copies are durable.
    /// The first record must not be treated as moved.
    #[tokio::test]
    async fn discarded_copy_does_not_move_its_record() {
        let files = FaultyFiles::new();
        let options = LogOptions { retry_delay: Duration::from_millis(1), ..LogOptions::default() };
        let log = CommitLog::open(options, Arc::new(files.clone()), &mut |_, _| Ok(())).unwrap();
        let mut replay = Replay::default();
        for number in [1, 2] {
            let body = body(number);
            let end = log.append(&body, Urgency::Immediate).unwrap();
            log.wait_durable(end).await.unwrap();
            replay.push(end, &record::decode(&body).unwrap());
        }
        let position = log.durable();
        let records: Vec<&Logged> = replay.records().collect();
        let soon = Instant::now() + Duration::from_secs(120);
        files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
        records[0].copied(append(&log, &records[0].body, soon).await.unwrap());
        log.wait_durable(records[0].copy().unwrap()).await.unwrap_err();
        let works = async {
            while log.check_available().is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout_at(soon, works).await.expect("timed out waiting for the log to recover");
        records[1].copied(append(&log, &records[1].body, soon).await.unwrap());

        wait_for_copies(&log, &records, soon).await.unwrap();
        assert!(records.iter().all(|record| record.copy().is_none()));
        assert_eq!(replay.placed_before(position).count(), 1, "only the second record has moved");
        assert_eq!(relocate_batch(&log, &records[..1]).await.unwrap(), 1);
        assert_eq!(replay.placed_before(position).count(), 0);
    }
}
