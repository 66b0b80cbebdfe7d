//! Opens a node's log: seals earlier incarnations, reads the valid records, claims the next
//! incarnation.
//!
//! ```text
//!   list ---> read objects, newest first ---> a log without an end? ---> seal it ------.
//!    ^                                            | no                                 |
//!    |                                            v                                    |
//!    |<---- another start was faster ----- claim, list ---> it is the last: done       |
//!    `---------------------------------------------------------------------------------'
//! ```
//!
//! Every round starts with a listing, so that no decision relies on outdated state. Objects are
//! immutable and are read once; the last round reads none. A listing is not atomic: an object that
//! was put in the meantime may be listed, while an earlier one is not. If an object states that a
//! missing one was durable, the missing one is therefore reported as lost only if the stating
//! object was known before the listing.
//!
//! # Sealing a log whose writer is alive
//!
//! A seal at the end of a log may lose its slot to a put of the old writer, which may be alive and
//! put objects as fast as the store takes them. A round lists, reads and syncs before it puts the
//! next seal, so it could lose every time. After the first loss a *barrier* is therefore put: a
//! seal 64 slots ahead of the last object that is known, or further if that slot is taken. The
//! writer cannot pass it, and uses up at least one slot before it with every seal that loses. The
//! number of rounds is thus bounded.
//!
//! The barrier is a seal like any other. If the log reaches it, the log ends there. Otherwise the
//! log ends at a seal before it, which is never deleted, so the barrier ends nothing and is deleted
//! with the objects that the old writer has put between the two.
//!
//! # How much is read
//!
//! Only objects at or above the *needed slot* are read, the greatest slot that any object states.
//! The newest object is read first and alone, because it almost always states the greatest slot. A
//! start therefore reads the records that were not flushed. The number of covered objects that an
//! earlier process did not delete in time does not matter:
//!
//! ```text
//!   covered, not deleted yet   | not flushed             | seal
//!   1  2  3  ...  5000  5001   | 5002  5003  ...  5950   | 5951     states: needed from 5002
//!   not read                   | read, 128 at a time     | read first
//! ```
//!
//! Skipping the objects below the needed slot is safe: every object states a slot at or before its
//! own ([`Object::decode`] refuses any other). Let `n` be the greatest slot stated by the objects
//! that were read. An object below `n` states less than `n`, so reading it cannot raise the needed
//! slot, and its records do not count. Listings after the first one therefore start at `n`: all
//! seals, claims and statements that matter are at or above it.
//!
//! For the same reason the start position of the new log cannot be too low. The claim of each
//! incarnation starts at or after every position that counted before it. The object with the
//! greatest name is always read, and does not start before its incarnation's claim.
//!
//! The objects below `n` are deleted in the background ([`super::writer`]). Each is read first,
//! because seals are never deleted. If an incarnation below `n` has a single object left, that is
//! its seal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use fulmar_pages::{LogId, RecordKind};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use super::object_format::{self, Head, Object};
use super::objects::Objects;
use super::options::{RecoveryProgress, Replay};
use super::slot::Slot;
use super::state::Live;
use super::writer::Start;
use crate::log::own_record::own_record;
use crate::log::{LogError, Lsn};

/// Number of concurrent reads. At 30 ms per read, this reads 4,000 objects in 1 s.
pub(super) const CONCURRENT_READS: usize = 128;
/// Number of rounds after which an open fails because other processes keep opening the log. A
/// living writer can cost [`BARRIER_DISTANCE`] of them.
pub(super) const MAX_ROUNDS: usize = 50 + BARRIER_DISTANCE as usize;
/// Number of slots between the last known object of a log and its barrier.
const BARRIER_DISTANCE: u64 = 64;
/// Interval of progress messages while objects are read.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Result of opening a log.
pub(super) struct Opened {
    /// The claimed slot.
    claim: Slot,
    /// Writer id of the claim.
    writer: LogId,
    /// Position at which the new log starts.
    position: u64,
    /// Valid objects, in order.
    counting: Vec<Object>,
    /// Objects that do not count and are not seals.
    garbage: Vec<Slot>,
    /// Objects below the needed slot that were not read. They do not count; seals among them are
    /// kept.
    unread: Vec<Slot>,
}

/// The objects of a node that a start has read.
#[derive(Default)]
pub(super) struct Survey {
    /// Objects that were read.
    pub(super) known: BTreeMap<Slot, Object>,
    /// Slot from which on the log is needed, as far as known. Only grows; stays true whatever is
    /// deleted.
    needed: Slot,
    /// Slots of the first listing.
    listed: BTreeSet<Slot>,
}

/// Opens a node's log.
pub(super) async fn open(objects: &Objects, progress: &RecoveryProgress) -> Result<Opened, LogError> {
    let writer = LogId(rand::random());
    let mut survey = Survey::default();
    for _ in 0..MAX_ROUNDS {
        let Some(LogState { last, ends, has_new_objects }) =
            survey_log(objects, &mut survey, progress).await?
        else {
            continue;
        };
        // Objects read since the listing may have taken the slot of a deleted object: for example a
        // seal that ends nothing, before an object that is not listed yet and states a greater
        // needed slot. If an object was known before the listing, such a later object is in the
        // listing too.
        if seal_open(objects, writer, &survey, &ends).await? || has_new_objects {
            continue;
        }
        let claim = Slot { incarnation: last.incarnation + 1, sequence: 0 };
        let position = survey.known.values().map(Object::end).max().unwrap_or_default();
        let head = Head { writer, slot: claim, start: position, needed: survey.needed, durable: 0 };
        if objects.put_once(claim, object_format::finish(object_format::begin(), &head)).await?
            && objects.list_after(survey.needed.before()).await?.last() == Some(&claim)
        {
            let unread = survey.unread();
            let (counting, garbage) = partition_objects(survey, &ends);
            return Ok(Opened { claim, writer, position, counting, garbage, unread });
        }
    }
    Err(LogError::Contended { directory: objects.directory().to_owned() })
}

/// State of the log according to one listing.
pub(super) struct LogState {
    /// The greatest slot that has an object.
    pub(super) last: Slot,
    pub(super) ends: Vec<End>,
    /// Some objects were read only after the listing.
    has_new_objects: bool,
}

/// Lists and reads all objects from the needed slot on. Returns None if objects were created or
/// deleted in the meantime.
pub(super) async fn survey_log(
    objects: &Objects,
    survey: &mut Survey,
    progress: &RecoveryProgress,
) -> Result<Option<LogState>, LogError> {
    let listed = objects.list_after(survey.needed.before()).await?;
    if survey.listed.is_empty() {
        survey.listed.clone_from(&listed);
    }
    let last = listed.last().copied().unwrap_or(survey.needed);
    let Read::All { has_new_objects } = read(objects, &listed, survey, progress).await? else {
        return Ok(None);
    };
    let ends = ends(objects, survey)?;
    match ends.iter().find_map(|end| end.missing(objects)) {
        // The missing object may have been put during the listing.
        Some(_) if has_new_objects => Ok(None),
        Some(lost) => Err(lost),
        None => Ok(Some(LogState { last, ends, has_new_objects })),
    }
}

/// Result of reading the listed objects.
enum Read {
    /// All objects are known. `has_new_objects` is true if some were not known before.
    All { has_new_objects: bool },
    /// An object was deleted since it was listed.
    Gone,
}

/// Reads the listed objects that are needed and not yet known, newest first.
async fn read(
    objects: &Objects,
    listed: &BTreeSet<Slot>,
    survey: &mut Survey,
    progress: &RecoveryProgress,
) -> Result<Read, LogError> {
    survey.known.retain(|slot, _| listed.contains(slot));
    survey.update_needed();
    let unknown: Vec<Slot> =
        listed.iter().rev().filter(|slot| !survey.known.contains_key(slot)).copied().collect();
    let (before, mut has_new_objects) = (progress.read(), false);
    let mut next = unknown.iter().copied().peekable();
    let mut reads = FuturesUnordered::new();
    // The newest object is read alone: it states which of the others are needed.
    let mut concurrent = 1;
    let mut report = Instant::now() + REPORT_INTERVAL;
    loop {
        while reads.len() < concurrent
            && let Some(slot) = next.next_if(|slot| *slot >= survey.needed)
        {
            reads.push(async move { (slot, objects.get(slot).await) });
        }
        let Some((slot, object)) = reads.next().await else { break };
        match object? {
            Some(object) => {
                survey.needed = survey.needed.max(object.head.needed);
                survey.known.insert(slot, object);
                has_new_objects = true;
                progress.object_read();
            }
            None if slot < survey.needed => {}
            None => return Ok(Read::Gone),
        }
        concurrent = CONCURRENT_READS;
        let needed = unknown.partition_point(|slot| *slot >= survey.needed);
        progress.expect(before + needed as u64);
        if Instant::now() >= report {
            report = Instant::now() + REPORT_INTERVAL;
            tracing::info!(objects = progress.read(), of = progress.expected(), "reading the shared log");
        }
    }
    Ok(Read::All { has_new_objects })
}

impl Survey {
    fn update_needed(&mut self) {
        let stated = self.known.values().map(|object| object.head.needed).max();
        self.needed = self.needed.max(stated.unwrap_or_default());
    }

    /// Slots below the needed one that were listed first and not read. If an earlier incarnation
    /// has a single object left, that is its seal, which is kept.
    fn unread(&self) -> Vec<Slot> {
        let below: Vec<Slot> = self.listed.range(..self.needed).copied().collect();
        let incarnations = below.chunk_by(|a, b| a.incarnation == b.incarnation);
        let deletable =
            incarnations.filter(|slots| slots.len() > 1 || slots[0].incarnation == self.needed.incarnation);
        deletable.flatten().filter(|slot| !self.known.contains_key(slot)).copied().collect()
    }
}

/// End of a log's contiguous prefix.
pub(super) struct End {
    pub(super) slot: Slot,
    /// Position of the end.
    position: u64,
    /// An object occupies this slot.
    pub(super) closed: bool,
    /// An object that was created when more than this was durable.
    witness: Option<Slot>,
}

impl End {
    /// Returns an error if the object of this slot is known to have been durable.
    fn missing(&self, objects: &Objects) -> Option<LogError> {
        let witness = self.witness.filter(|_| !self.closed)?;
        let problem = format!("the object is missing, but {witness} was created after it");
        Some(objects.corrupt(self.slot, 0, problem))
    }
}

/// Finds the ends of all logs that are needed.
fn ends(objects: &Objects, survey: &Survey) -> Result<Vec<End>, LogError> {
    let Survey { known, needed, .. } = survey;
    let incarnations: BTreeSet<u64> = known.keys().map(|slot| slot.incarnation).collect();
    let needed_incarnations =
        incarnations.into_iter().filter(|incarnation| *incarnation >= needed.incarnation);
    needed_incarnations
        .map(|incarnation| end(objects, known, Slot { incarnation, sequence: 0 }.max(*needed)))
        .collect()
}

/// Finds the end of the log that is needed from `slot` on.
fn end(objects: &Objects, known: &BTreeMap<Slot, Object>, mut slot: Slot) -> Result<End, LogError> {
    let mut last: Option<&Object> = None;
    let closed = loop {
        let Some(object) = known.get(&slot) else { break false };
        if object.is_seal || last.is_some_and(|last| last.head.writer != object.head.writer) {
            break true;
        }
        if last.is_some_and(|last| last.end() != object.head.start) {
            let problem = "the object does not start at the end of the previous one".to_owned();
            return Err(objects.corrupt(slot, 48, problem));
        }
        last = Some(object);
        slot = slot.next();
    };
    let same_log = known.range(slot..).take_while(|(other, _)| other.incarnation == slot.incarnation);
    let mut witnesses = same_log.filter(|(_, object)| object.head.durable > slot.sequence);
    let witness = witnesses.next().map(|(slot, _)| *slot);
    Ok(End { slot, position: last.map_or(0, Object::end), closed, witness })
}

/// Puts a seal at the end of every log that has none. Returns true if there was such a log: then
/// another round is needed.
async fn seal_open(
    objects: &Objects,
    writer: LogId,
    survey: &Survey,
    ends: &[End],
) -> Result<bool, LogError> {
    let Survey { known, needed, .. } = survey;
    let mut found_open = false;
    for end in ends.iter().filter(|end| !end.closed) {
        found_open = true;
        sync_last(objects, known, end.slot).await?;
        // If no object of a log counts, the log ends where others state that it is needed.
        let positions = known.range(..end.slot).map(|(_, object)| object.end());
        let start = end.position.max(positions.max().unwrap_or_default());
        // The seal may lose the slot to a put of the log's writer, or to another seal.
        if !objects.put_once(end.slot, seal(writer, end.slot, start, *needed)).await? {
            put_barrier(objects, known, end.slot, |slot| {
                encode_seal(Head { writer, slot, start, needed: *needed, durable: end.slot.sequence })
            })
            .await?;
        }
    }
    Ok(found_open)
}

/// Puts a seal that the writer of a log, which ends before `end` as far as it is known, cannot
/// pass. Does nothing if there is one.
async fn put_barrier(
    objects: &Objects,
    known: &BTreeMap<Slot, Object>,
    end: Slot,
    seal: impl Fn(Slot) -> Bytes,
) -> Result<(), LogError> {
    let ahead = known.range(end..).take_while(|(slot, _)| slot.incarnation == end.incarnation);
    if ahead.clone().any(|(_, object)| object.is_seal) {
        return Ok(());
    }
    let last = ahead.last().map_or(end.sequence, |(slot, _)| slot.sequence);
    let mut distance = BARRIER_DISTANCE;
    while let Some(sequence) = last.checked_add(distance).filter(|sequence| *sequence < u64::MAX) {
        let slot = Slot { sequence, ..end };
        if objects.put_once(slot, seal(slot)).await?
            || objects.get(slot).await?.is_some_and(|object| object.is_seal)
        {
            break;
        }
        distance = distance.saturating_mul(2);
    }
    Ok(())
}

/// Syncs the last objects of a log that ends before `end`, which no other object states to be
/// durable. Everything that the seal confirms must survive the next crash.
async fn sync_last(objects: &Objects, known: &BTreeMap<Slot, Object>, end: Slot) -> Result<(), LogError> {
    let log = known.range(Slot { sequence: 0, ..end }..end);
    let durable = log.clone().map(|(_, object)| object.head.durable).max().unwrap_or_default();
    for (slot, _) in log.filter(|(slot, _)| slot.sequence >= durable) {
        objects.sync(*slot).await?;
    }
    Ok(())
}

/// Encodes a seal. It confirms the durability of everything before it.
pub(super) fn seal(writer: LogId, slot: Slot, start: u64, needed: Slot) -> Bytes {
    encode_seal(Head { writer, slot, start, needed, durable: slot.sequence })
}

pub(super) fn encode_seal(head: Head) -> Bytes {
    let mut bytes = object_format::begin();
    object_format::push(&mut bytes, &own_record(RecordKind::Seal, None));
    object_format::finish(bytes, &head)
}

/// Splits the objects into those that count, in order, and the slots of those that can be deleted.
pub(super) fn partition_objects(survey: Survey, ends: &[End]) -> (Vec<Object>, Vec<Slot>) {
    let Survey { known, needed, .. } = survey;
    let counts = |slot: &Slot| {
        let before_its_end = |end: &End| end.slot.incarnation == slot.incarnation && *slot < end.slot;
        *slot >= needed && ends.iter().any(before_its_end)
    };
    let (counting, others): (Vec<_>, Vec<_>) =
        known.into_values().partition(|object| counts(&object.head.slot));
    // An object that ends a log is kept permanently, and so is any other seal, except a barrier
    // that its log has not reached.
    let is_kept = |object: &Object| {
        let slot = object.head.slot;
        let ends_before =
            |end: &End| end.closed && end.slot.incarnation == slot.incarnation && end.slot < slot;
        ends.iter().any(|end| end.slot == slot) || (object.is_seal && !ends.iter().any(ends_before))
    };
    let garbage = others.iter().filter(|object| !is_kept(object)).map(|object| object.head.slot);
    let garbage = garbage.collect();
    (counting, garbage)
}

pub(super) fn replay_all(counting: &[Object], replay: &mut Replay<'_>) -> Result<(), LogError> {
    for (end, record) in counting.iter().flat_map(Object::records) {
        replay(Lsn(end), &record)?;
    }
    Ok(())
}

impl Opened {
    /// Passes every valid record to `replay`.
    pub(super) fn replay(&self, replay: &mut Replay<'_>) -> Result<(), LogError> {
        replay_all(&self.counting, replay)
    }

    /// What the log's writer starts with.
    pub(super) fn start(self) -> Start {
        let live = self.live();
        let Opened { claim, writer, position, counting: _, garbage, unread } = self;
        Start { claim, writer, position, live, garbage, unread, is_of_cluster: false }
    }

    /// Logs the number of objects read.
    pub(super) fn report(&self, elapsed: Duration) {
        let bytes: u64 = self.counting.iter().map(Object::bytes).sum();
        let (objects, milliseconds) = (self.counting.len(), elapsed.as_millis() as u64);
        tracing::info!(
            incarnation = self.claim.incarnation,
            objects,
            bytes,
            milliseconds,
            "opened the shared log"
        );
    }

    fn live(&self) -> VecDeque<Live> {
        let live = |object: &Object| Live {
            slot: object.head.slot,
            start: object.head.start,
            end: object.end(),
            bytes: object.bytes(),
        };
        self.counting.iter().map(live).collect()
    }
}
