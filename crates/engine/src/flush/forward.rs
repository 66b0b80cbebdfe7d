//! Records of partitions that cannot be opened are carried forward, to the end of their log, so that it can be cut behind them.
//!
//! A partition whose manifest or segment is damaged cannot be flushed until that is restored, maybe for days. What the log holds
//! of it would be the oldest before long, and the log, which cannot be cut behind it, would reach its bound: then commits
//! of *all* tenants are refused. The records are in memory ([`crate::partition::Replay`]), so they are appended once more, as they are:
//!
//! ```text
//!   oldest                                    others (the first record of anybody else that no manifest covers)
//!     | 1 2 . . 3 . . . . . . . . . . . . . . . | . . . |
//!     |                                         | . . . 1 2 . 3 |      appended, and waited for
//!                                               | . . . 1 2 . 3 |      cut
//! ```
//!
//! # Why nothing is lost
//! Each record has one place where the log is kept for it. It becomes that of the copy when the copy is durable, and not before; and
//! the log is cut before the first place of all. So of each record the log holds a copy at any time, and the crash may
//! come when it likes: in the midst of appending, or before the cut, the log holds some twice. A start takes each once, in the
//! order of their numbers, and for its place the later one, which is durable: it goes on as if nothing had happened. A failed
//! write takes back what was appended and not yet durable; those records are still where they were.
//!
//! What was appended and has not been heard of when patience ends is waited for by the next round, and not appended again.
//!
//! A log that is full takes copies all the same, in a reserve that commits leave ([`Urgency::MakesRoom`]): the store may have been away
//! for so long that all that others have committed stands behind what is to be carried.
//!
//! A cut gives back whole files or objects, so a part of the older copies may stay. Therefore a start must not
//! take the first record that it meets for the oldest.
//!
//! # Who else reads the log
//! A partition that is opened meanwhile keeps the log from where its records stood when that began, until it is flushed. Copies that
//! come after its own commits change nothing: their numbers are lower, and what they tell is told.
//!
//! Who reads beside the owner ([`crate::beside`]) and has followed so far passes over what it has, by the number. Who begins anew while
//! the older copies are there in part finds that they go on from a version that it has not, and is left behind (40001) until the owner
//! has opened the partition, with what is restored, and flushed it. Records of the format's first version do not say what they go on
//! from, so it would not notice; a partition that has some keeps its place in the log.
//!
//! When the partition is flushed at last, older copies may be there yet, without the newest ones. They tell as little of a manifest that
//! is lost in that moment as a log that holds nothing of it.
//!
//! # How much is written
//! Only what keeps a log that is long from being cut, and only if a quarter of what would be given back is others': where those records are
//! nearly all there is the log would be written in circles. (So they may take some 600 MiB of a log of 1 GiB; beyond it commits
//! are refused as before.) A sixteenth of the log's bound at a time, then it is cut: so it never takes much more than it did. And for
//! some seconds at most, since flushes wait for it; the next one goes on.

use std::collections::HashSet;
use std::sync::Arc;

use fulmar_pages::PartitionId;
use fulmar_store::{CommitLog, LogError, Lsn, Urgency};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::{Instant, timeout_at};

use super::batch::{LOG_PATIENCE, silent_log};
use super::{Pressure, first_uncovered, settled};
use crate::engine::Unopened;
use crate::partition::{Logged, log_error};
use crate::{Engine, Result};

/// So much of a log is looked through before it is cut: a part of its bound.
const STEP_PART: u64 = 16;
/// Of what would be given back others' records are one part in so many, at least.
const OTHERS_PART: u64 = 4;
/// Bytes that are appended before they are waited for: what others append meanwhile waits behind them.
const PIECE_BYTES: u64 = 4 << 20;

/// Carries forward some of what keeps the logs from being cut, of partitions that could not be opened. Answers whether there was
/// anything; then there may be more when the logs have been cut.
pub(super) fn carry<'a>(
    engine: &'a Engine,
    unopenable: &'a HashSet<PartitionId>,
    deadline: Instant,
) -> BoxFuture<'a, Result<bool>> {
    async move {
        if unopenable.is_empty() {
            return Ok(false);
        }
        // One at a time, as flushes.
        let _one = settled(engine).await;
        let logs: Vec<Arc<CommitLog>> = engine.node().logs().cloned().collect();
        let mut result = Ok(false);
        for log in logs {
            let held = held_by(engine, &log, unopenable);
            if let Some(upto) = worth_it(engine, &log, &held) {
                let carried = carry_before(&log, &held, upto, deadline).await;
                held.iter().for_each(|one| one.replay.look_for_first());
                result = result.and_then(|before| carried.map(|some| some || before));
            }
        }
        result
    }
    .boxed()
}

/// Those whose records can be carried forward in this log.
fn held_by(engine: &Engine, log: &Arc<CommitLog>, unopenable: &HashSet<PartitionId>) -> Vec<Unopened> {
    let mut held = engine.unopened();
    held.retain(|one| Arc::ptr_eq(&one.log, log) && unopenable.contains(&one.id) && one.replay.may_move());
    held
}

/// Up to where records are to be carried forward, if they are what keeps the log from being cut, and not nearly all of it.
fn worth_it(engine: &Engine, log: &Arc<CommitLog>, held: &[Unopened]) -> Option<Lsn> {
    let pressure = Pressure::of(log, engine.flusher.log_bytes);
    if !held.iter().any(|one| pressure.is_on(one.replay.since())) {
        return None;
    }
    // A start finds copies that another life has left.
    held.iter().for_each(|one| one.replay.look_for_first());
    let since = held.iter().map(|one| one.replay.since()).min().filter(|since| pressure.is_on(*since))?;
    let ids = held.iter().map(|one| one.id).collect();
    let others = first_uncovered(engine, log, &ids);
    let span = others.0.checked_sub(since.0)?;
    let bytes: u64 = placed_before(held, others).map(Logged::bytes).sum();
    let is_worth_it = bytes <= span / OTHERS_PART * (OTHERS_PART - 1);
    is_worth_it.then(|| others.min(Lsn(since.0 + log.capacity_bytes() / STEP_PART)))
}

fn placed_before(held: &[Unopened], upto: Lsn) -> impl Iterator<Item = &Logged> {
    held.iter().flat_map(move |one| one.replay.placed_before(upto))
}

/// Appends what stands before a position once more, as far as it comes until the deadline. Answers whether there was anything.
async fn carry_before(log: &CommitLog, held: &[Unopened], upto: Lsn, deadline: Instant) -> Result<bool> {
    let records: Vec<&Logged> = placed_before(held, upto).collect();
    let mut rest = records.as_slice();
    while !rest.is_empty() && Instant::now() < deadline {
        let carried = carry_piece(log, rest).await?;
        rest = &rest[carried..];
    }
    Ok(!records.is_empty())
}

/// Appends the first of these records once more, and waits until they are durable: that is their place from then on. Answers how
/// many they are. What was appended before and is not durable yet is waited for, and not appended again.
async fn carry_piece(log: &CommitLog, records: &[&Logged]) -> Result<usize> {
    let patience_ends = Instant::now() + LOG_PATIENCE;
    let (mut copied, mut bytes, mut appended) = (0, 0, Ok(()));
    for record in records {
        if record.copy().is_none() {
            match append(log, &record.body, patience_ends).await {
                Ok(end) => record.copied(end),
                Err(error) => {
                    appended = Err(error);
                    break;
                }
            }
        }
        (copied, bytes) = (copied + 1, bytes + record.bytes());
        if bytes >= PIECE_BYTES {
            break;
        }
    }
    let waited = wait_for_copies(log, &records[..copied], patience_ends).await;
    appended.and(waited).map(|()| copied)
}

/// Waits for the last of the copies, and moves each record of which the copy is durable: that the last one is says nothing of the
/// others, which a failed write may have taken back before.
async fn wait_for_copies(log: &CommitLog, records: &[&Logged], patience_ends: Instant) -> Result<()> {
    let Some(last) = records.iter().filter_map(|record| record.copy()).max() else { return Ok(()) };
    let waited = timeout_at(patience_ends, log.wait_durable(last)).await;
    for record in records {
        match record.copy() {
            Some(end) if log.is_durable(end) => record.move_to(end),
            // It was taken back: the next round appends it again.
            Some(end) if end <= log.durable() => record.forget_copy(),
            _ => {}
        }
    }
    waited.map_err(|_| silent_log())?.map_err(log_error)
}

async fn append(log: &CommitLog, body: &[u8], patience_ends: Instant) -> Result<Lsn> {
    while Instant::now() < patience_ends {
        match log.append(body, Urgency::MakesRoom) {
            Err(LogError::Busy) => {
                let room = timeout_at(patience_ends, log.wait_room(body.len(), Urgency::MakesRoom)).await;
                room.map_err(|_| silent_log())?.map_err(log_error)?;
            }
            appended => return appended.map_err(log_error),
        }
    }
    Err(silent_log())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fulmar_pages::record::{self, RecordBuilder, RecordHeader, RecordKind};
    use fulmar_pages::{Version, ZERO_PAGE};
    use fulmar_store::{Fault, FaultyFiles, LogOptions, Operation};

    use super::*;
    use crate::partition::Replay;

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

    /// A failed write takes the first copy back; the log goes on, and what is appended then is durable. The first record must not be taken
    /// for one that has moved.
    #[tokio::test]
    async fn a_copy_that_was_taken_back_is_none() {
        let files = FaultyFiles::new();
        let options = LogOptions { retry_delay: Duration::from_millis(1), ..LogOptions::default() };
        let log = CommitLog::open(options, Arc::new(files.clone()), &mut |_, _| Ok(())).unwrap();
        let mut replay = Replay::default();
        for number in [1, 2] {
            let body = body(number);
            let end = log.append(&body, Urgency::Prompt).unwrap();
            log.wait_durable(end).await.unwrap();
            replay.push(end, &record::decode(&body).unwrap());
        }
        let place = log.durable();
        let records: Vec<&Logged> = replay.records().collect();
        let soon = Instant::now() + Duration::from_secs(120);
        files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
        records[0].copied(append(&log, &records[0].body, soon).await.unwrap());
        log.wait_durable(records[0].copy().unwrap()).await.unwrap_err();
        let works = async {
            while log.works().is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout_at(soon, works).await.expect("timed out: the log works again");
        records[1].copied(append(&log, &records[1].body, soon).await.unwrap());

        wait_for_copies(&log, &records, soon).await.unwrap();
        assert!(records.iter().all(|record| record.copy().is_none()));
        assert_eq!(replay.placed_before(place).count(), 1, "the second has moved, and it alone");
        assert_eq!(carry_piece(&log, &records[..1]).await.unwrap(), 1);
        assert_eq!(replay.placed_before(place).count(), 0);
    }
}
