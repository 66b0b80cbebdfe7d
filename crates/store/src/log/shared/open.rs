//! Opens a node's log: seals the earlier incarnations, reads the records that count, claims the next incarnation.
//!
//! ```text
//!   list ---> read objects, newest first ---> a log without an end? ---> seal it ------.
//!    ^                                            | no                                 |
//!    |                                            v                                    |
//!    |<---- another start was faster ----- claim, list ---> it is the last: done       |
//!    `---------------------------------------------------------------------------------'
//! ```
//!
//! Every round begins with a listing, so that nothing is concluded from a state that may have changed. Objects do not
//! change and are read once; the last round reads none. (A listing takes a while: an object that was put meanwhile may be
//! listed and one before it not. An object that its witness calls missing is therefore lost only if the witness was known
//! before the listing.)
//!
//! # How much is read
//!
//! Only objects at or above the *needed slot*, the greatest that any object states. The newest object is read alone
//! first, because it almost always states the greatest one. So a start reads the records that were not flushed, and the
//! number of covered objects that an earlier process did not delete in time does not matter:
//!
//! ```text
//!   covered, not deleted yet   | not flushed             | seal
//!   1  2  3  ...  5000  5001   | 5002  5003  ...  5950   | 5951     states: needed from 5002
//!   not read                   | read, 128 at a time     | read first
//! ```
//!
//! Why skipping the objects below is safe: every object states a slot at or before its own ([`Object::decode`] refuses
//! any other). Let `n` be the greatest slot stated by the objects that were read. An object below `n` states less than
//! `n`, so reading it cannot raise the needed slot, and its records mean nothing. Listings after the first one therefore
//! begin at `n`: seals, claims and witnesses that matter stand at or above it. For the same reason the position that the
//! new log begins at cannot be too low: the claim of each incarnation begins at or after every position that counted
//! before it, and the object with the greatest name, which is always read, does not begin before its incarnation's claim.
//!
//! The objects below `n` are deleted in the background ([`super::writer`]). Each is read first, because seals are never
//! deleted. If an incarnation below `n` has a single object left, that is its seal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use fulmar_pages::{LogId, RecordKind};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use super::object::{self, Head, Object};
use super::objects::Objects;
use super::state::Live;
use super::{LogError, Lsn, RecoveryProgress, Replay, Slot, own_record};

/// Objects that are read at the same time. At 30 ms a read that is 4,000 objects in 1 s.
pub(super) const CONCURRENT_READS: usize = 128;
/// Rounds before other processes' starts are taken to be in the way for good.
pub(super) const MOST_ROUNDS: usize = 50;
/// Time between two log lines about a long read.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// What a start has found, and won.
pub(super) struct Opened {
    /// The claimed slot.
    pub(super) claim: Slot,
    /// The claim's writer.
    pub(super) writer: LogId,
    /// Where the new log begins.
    pub(super) position: u64,
    /// What counts, in order.
    counting: Vec<Object>,
    /// Objects that mean nothing any more and are not seals.
    pub(super) garbage: Vec<Slot>,
    /// Objects below the needed slot that were not read: they mean nothing; seals among them stay.
    pub(super) unread: Vec<Slot>,
}

/// The objects of a node, as far as a start has read them.
#[derive(Default)]
pub(super) struct Survey {
    /// Objects that were read.
    pub(super) known: BTreeMap<Slot, Object>,
    /// The log is needed from here on, as far as is known. Only grows: it stays true whatever is deleted.
    needed: Slot,
    /// The names of the first listing.
    listed: BTreeSet<Slot>,
}

/// Opens a node's log.
pub(super) async fn open(objects: &Objects, progress: &RecoveryProgress) -> Result<Opened, LogError> {
    let writer = LogId(rand::random());
    let mut survey = Survey::default();
    for _ in 0..MOST_ROUNDS {
        let Some(Seen { last, ends, news }) = look(objects, &mut survey, progress).await? else { continue };
        // What was read since the names were listed may stand where something was deleted meanwhile: a seal that ends nothing,
        // before an object, not listed yet, that says from where on the log is needed. If it was known before, that is listed too.
        if seal_open(objects, writer, &survey, &ends).await? || news {
            continue;
        }
        let claim = Slot { incarnation: last.incarnation + 1, sequence: 0 };
        let position = survey.known.values().map(Object::end).max().unwrap_or_default();
        let head = Head { writer, slot: claim, start: position, needed: survey.needed, durable: 0 };
        if objects.put_once(claim, object::finish(object::begin(), &head)).await?
            && objects.list_after(survey.needed.before()).await?.last() == Some(&claim)
        {
            let unread = survey.unread();
            let (counting, garbage) = sort(survey, &ends);
            return Ok(Opened { claim, writer, position, counting, garbage, unread });
        }
    }
    Err(LogError::Contended { directory: objects.directory().to_owned() })
}

/// What there is.
pub(super) struct Seen {
    /// The greatest slot that has an object.
    pub(super) last: Slot,
    pub(super) ends: Vec<End>,
    /// Whether some of it was read only now.
    news: bool,
}

/// Looks at all objects from the needed slot on. `None`: some have come or gone meanwhile.
pub(super) async fn look(
    objects: &Objects,
    survey: &mut Survey,
    progress: &RecoveryProgress,
) -> Result<Option<Seen>, LogError> {
    let listed = objects.list_after(survey.needed.before()).await?;
    if survey.listed.is_empty() {
        survey.listed.clone_from(&listed);
    }
    let last = listed.last().copied().unwrap_or(survey.needed);
    let Read::All { news } = read(objects, &listed, survey, progress).await? else { return Ok(None) };
    let ends = ends(objects, survey)?;
    match ends.iter().find_map(|end| end.missing(objects)) {
        // Put while names were being listed, perhaps.
        Some(_) if news => Ok(None),
        Some(lost) => Err(lost),
        None => Ok(Some(Seen { last, ends, news })),
    }
}

/// How reading has ended.
enum Read {
    /// All is known; whether some of it was not known before.
    All { news: bool },
    /// An object has gone since it was listed.
    Gone,
}

/// Reads the listed objects that are needed and not known yet, the newest first.
async fn read(
    objects: &Objects,
    listed: &BTreeSet<Slot>,
    survey: &mut Survey,
    progress: &RecoveryProgress,
) -> Result<Read, LogError> {
    survey.known.retain(|slot, _| listed.contains(slot));
    survey.learn_needed();
    let unknown: Vec<Slot> =
        listed.iter().rev().filter(|slot| !survey.known.contains_key(slot)).copied().collect();
    let (before, mut news) = (progress.read(), false);
    let mut next = unknown.iter().copied().peekable();
    let mut reads = FuturesUnordered::new();
    // The newest one alone: it states which of the others are needed.
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
                news = true;
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
    Ok(Read::All { news })
}

impl Survey {
    fn learn_needed(&mut self) {
        let stated = self.known.values().map(|object| object.head.needed).max();
        self.needed = self.needed.max(stated.unwrap_or_default());
    }

    /// The slots below the needed one that the first listing named and that were not read. An earlier incarnation that has
    /// a single object left has only its seal left, which stays.
    fn unread(&self) -> Vec<Slot> {
        let below: Vec<Slot> = self.listed.range(..self.needed).copied().collect();
        let incarnations = below.chunk_by(|a, b| a.incarnation == b.incarnation);
        let may_go =
            incarnations.filter(|slots| slots.len() > 1 || slots[0].incarnation == self.needed.incarnation);
        may_go.flatten().filter(|slot| !self.known.contains_key(slot)).copied().collect()
    }
}

/// Where a log's contiguous prefix ends.
pub(super) struct End {
    pub(super) slot: Slot,
    /// Its position.
    position: u64,
    /// Whether something stands there.
    pub(super) closed: bool,
    /// An object that was made when more than this was durable.
    witness: Option<Slot>,
}

impl End {
    /// That the object is lost which should stand there, if it is.
    fn missing(&self, objects: &Objects) -> Option<LogError> {
        let witness = self.witness.filter(|_| !self.closed)?;
        let problem = format!("it is missing, though {witness} was made after it");
        Some(objects.corrupt(self.slot, 0, problem))
    }
}

/// The ends of all logs that are needed.
fn ends(objects: &Objects, survey: &Survey) -> Result<Vec<End>, LogError> {
    let Survey { known, needed, .. } = survey;
    let incarnations: BTreeSet<u64> = known.keys().map(|slot| slot.incarnation).collect();
    let needed_ones = incarnations.into_iter().filter(|incarnation| *incarnation >= needed.incarnation);
    needed_ones
        .map(|incarnation| end(objects, known, Slot { incarnation, sequence: 0 }.max(*needed)))
        .collect()
}

/// Where the log ends that is needed from `slot` on.
fn end(objects: &Objects, known: &BTreeMap<Slot, Object>, mut slot: Slot) -> Result<End, LogError> {
    let mut last: Option<&Object> = None;
    let closed = loop {
        let Some(object) = known.get(&slot) else { break false };
        if object.is_seal || last.is_some_and(|last| last.head.writer != object.head.writer) {
            break true;
        }
        if last.is_some_and(|last| last.end() != object.head.start) {
            let problem = "it does not begin where the one before it ends".to_owned();
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

/// Puts a seal at the end of every log that has none. Answers whether there was one: then all is to be looked at again.
async fn seal_open(
    objects: &Objects,
    writer: LogId,
    survey: &Survey,
    ends: &[End],
) -> Result<bool, LogError> {
    let Survey { known, needed, .. } = survey;
    let mut was_open = false;
    for end in ends.iter().filter(|end| !end.closed) {
        was_open = true;
        sync_last(objects, known, end.slot).await?;
        // A log of which nothing counts ends where others say that it is needed.
        let positions = known.range(..end.slot).map(|(_, object)| object.end());
        let start = end.position.max(positions.max().unwrap_or_default());
        // It loses to an object that was on its way, or to another seal.
        objects.put_once(end.slot, seal(writer, end.slot, start, *needed)).await?;
    }
    Ok(was_open)
}

/// Makes durable the last objects of a log that ends before `end`: those that none of them tells to be. What the seal vouches
/// for must not be gone after the next crash.
async fn sync_last(objects: &Objects, known: &BTreeMap<Slot, Object>, end: Slot) -> Result<(), LogError> {
    let log = known.range(Slot { sequence: 0, ..end }..end);
    let durable = log.clone().map(|(_, object)| object.head.durable).max().unwrap_or_default();
    for (slot, _) in log.filter(|(slot, _)| slot.sequence >= durable) {
        objects.sync(*slot).await?;
    }
    Ok(())
}

/// A seal. It vouches for all that stands before it.
pub(super) fn seal(writer: LogId, slot: Slot, start: u64, needed: Slot) -> Bytes {
    let mut bytes = object::begin();
    object::push(&mut bytes, &own_record(RecordKind::Seal, None));
    object::finish(bytes, &Head { writer, slot, start, needed, durable: slot.sequence })
}

/// What counts, in order, and what means nothing any more.
pub(super) fn sort(survey: Survey, ends: &[End]) -> (Vec<Object>, Vec<Slot>) {
    let Survey { known, needed, .. } = survey;
    let counts = |slot: &Slot| {
        let before_its_end = |end: &End| end.slot.incarnation == slot.incarnation && *slot < end.slot;
        *slot >= needed && ends.iter().any(before_its_end)
    };
    let (counting, others): (Vec<_>, Vec<_>) =
        known.into_values().partition(|object| counts(&object.head.slot));
    // What ends a log stays for ever.
    let ends_a_log = |object: &Object| object.is_seal || ends.iter().any(|end| end.slot == object.head.slot);
    let garbage = others.iter().filter(|object| !ends_a_log(object)).map(|object| object.head.slot);
    let garbage = garbage.collect();
    (counting, garbage)
}

pub(super) fn give(counting: &[Object], replay: &mut Replay<'_>) -> Result<(), LogError> {
    for (end, record) in counting.iter().flat_map(Object::records) {
        replay(Lsn(end), &record)?;
    }
    Ok(())
}

impl Opened {
    /// Gives every record that counts to `replay`.
    pub(super) fn replay(&self, replay: &mut Replay<'_>) -> Result<(), LogError> {
        give(&self.counting, replay)
    }

    /// Logs the number of objects read.
    pub(super) fn report(&self, took: Duration) {
        let bytes: u64 = self.counting.iter().map(Object::bytes).sum();
        let (objects, milliseconds) = (self.counting.len(), took.as_millis() as u64);
        tracing::info!(
            incarnation = self.claim.incarnation,
            objects,
            bytes,
            milliseconds,
            "opened the shared log"
        );
    }

    pub(super) fn live(&self) -> VecDeque<Live> {
        let live = |object: &Object| Live {
            slot: object.head.slot,
            start: object.head.start,
            end: object.end(),
            bytes: object.bytes(),
        };
        self.counting.iter().map(live).collect()
    }
}
