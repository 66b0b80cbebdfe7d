//! What a start does: seals the node's earlier logs, reads what counts, claims the next incarnation.
//!
//! ```text
//!   list ---> read all objects ---> a log without an end? ---> seal it -----.
//!    ^                                    | no                              |
//!    |                                    v                                 |
//!    |<---- somebody was faster ---- claim, list ---> it is the last: done   |
//!    `----------------------------------------------------------------------'
//! ```
//!
//! Every round begins with a listing, so that nothing is concluded from what may have changed; objects do not change,
//! and are read once; the last round reads none. (A listing takes a while: an object that was put meanwhile may be seen and one before it not. So
//! what its witness calls missing is lost only if the witness was known before the listing.) The earlier a log, the less is read: of those before the one that is still needed only the seal
//! is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use fulmar_pages::{LogId, RecordKind};
use futures::stream::{self, StreamExt, TryStreamExt};

use super::object::{self, Head, Object};
use super::objects::Objects;
use super::state::Live;
use super::{LogError, Lsn, Replay, Slot, own_record};

/// Objects that are read at the same time.
pub(super) const READS: usize = 32;
/// Rounds before somebody else's starts are held to be in the way for good.
pub(super) const MOST_ROUNDS: usize = 50;

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
    /// Objects that mean nothing any more.
    pub(super) garbage: Vec<Slot>,
}

/// Objects that were read, by slot.
pub(super) type Known = BTreeMap<Slot, Object>;

/// Opens a node's log.
pub(super) async fn open(objects: &Objects) -> Result<Opened, LogError> {
    let writer = LogId(rand::random());
    let mut known = Known::new();
    for _ in 0..MOST_ROUNDS {
        let Some(Seen { last, needed, ends, news }) = look(objects, &mut known).await? else { continue };
        // What was read since the names were listed may stand where something was deleted meanwhile: a seal that ends nothing,
        // before an object, not listed yet, that says from where on the log is needed. If it was known before, that is listed too.
        if seal_open(objects, writer, &known, needed, &ends).await? || news {
            continue;
        }
        let claim = Slot { incarnation: last.incarnation + 1, sequence: 0 };
        let position = known.values().map(Object::end).max().unwrap_or_default();
        let head = Head { writer, slot: claim, start: position, needed, durable: 0 };
        if objects.put_once(claim, object::finish(object::begin(), &head)).await?
            && objects.list().await?.last() == Some(&claim)
        {
            let (counting, garbage) = sort(known, needed, &ends);
            return Ok(Opened { claim, writer, position, counting, garbage });
        }
    }
    Err(LogError::Contended { directory: objects.directory().to_owned() })
}

/// What there is.
pub(super) struct Seen {
    /// The greatest slot that has an object.
    pub(super) last: Slot,
    /// From which slot on the log is needed.
    pub(super) needed: Slot,
    pub(super) ends: Vec<End>,
    /// Whether some of it was read only now.
    news: bool,
}

/// Looks at all objects. `None`: some have come or gone meanwhile.
pub(super) async fn look(objects: &Objects, known: &mut Known) -> Result<Option<Seen>, LogError> {
    let listed = objects.list().await?;
    let Read::All { news } = read(objects, &listed, known).await? else { return Ok(None) };
    let needed = needed(known);
    let ends = ends(objects, known, needed)?;
    match ends.iter().find_map(|end| end.missing(objects)) {
        // Put while names were being listed, perhaps.
        Some(_) if news => Ok(None),
        Some(lost) => Err(lost),
        None => Ok(Some(Seen { last: listed.last().copied().unwrap_or_default(), needed, ends, news })),
    }
}

/// How reading has ended.
enum Read {
    /// All is known; whether some of it was not known before.
    All { news: bool },
    /// An object has gone since it was listed.
    Gone,
}

/// Reads what is listed and not known yet.
async fn read(objects: &Objects, listed: &BTreeSet<Slot>, known: &mut Known) -> Result<Read, LogError> {
    known.retain(|slot, _| listed.contains(slot));
    let mut news = false;
    let mut incarnations: BTreeMap<u64, Vec<Slot>> = BTreeMap::new();
    for slot in listed {
        incarnations.entry(slot.incarnation).or_default().push(*slot);
    }
    for (incarnation, slots) in incarnations.into_iter().rev() {
        if slots.len() == 1 && incarnation < needed(known).incarnation {
            continue;
        }
        let unknown: Vec<Slot> = slots.into_iter().filter(|slot| !known.contains_key(slot)).collect();
        let reads =
            stream::iter(unknown).map(async |slot| Ok::<_, LogError>((slot, objects.get(slot).await?)));
        let found: Vec<_> = reads.buffer_unordered(READS).try_collect().await?;
        for (slot, object) in found {
            let Some(object) = object else { return Ok(Read::Gone) };
            known.insert(slot, object);
            news = true;
        }
    }
    Ok(Read::All { news })
}

/// From which slot on the log is needed.
fn needed(known: &Known) -> Slot {
    known.values().map(|object| object.head.needed).max().unwrap_or_default()
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
fn ends(objects: &Objects, known: &Known, needed: Slot) -> Result<Vec<End>, LogError> {
    let incarnations: BTreeSet<u64> = known.keys().map(|slot| slot.incarnation).collect();
    let needed_ones = incarnations.into_iter().filter(|incarnation| *incarnation >= needed.incarnation);
    needed_ones
        .map(|incarnation| end(objects, known, needed.max(Slot { incarnation, sequence: 0 })))
        .collect()
}

/// Where the log ends that is needed from `slot` on.
fn end(objects: &Objects, known: &Known, mut slot: Slot) -> Result<End, LogError> {
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
    known: &Known,
    needed: Slot,
    ends: &[End],
) -> Result<bool, LogError> {
    let mut was_open = false;
    for end in ends.iter().filter(|end| !end.closed) {
        was_open = true;
        sync_last(objects, known, end.slot).await?;
        // A log of which nothing counts ends where others say that it is needed.
        let positions = known.range(..end.slot).map(|(_, object)| object.end());
        let start = end.position.max(positions.max().unwrap_or_default());
        // It loses to an object that was on its way, or to another seal.
        objects.put_once(end.slot, seal(writer, end.slot, start, needed)).await?;
    }
    Ok(was_open)
}

/// Makes durable the last objects of a log that ends before `end`: those that none of them tells to be. What the seal vouches
/// for must not be gone after the next crash.
async fn sync_last(objects: &Objects, known: &Known, end: Slot) -> Result<(), LogError> {
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
pub(super) fn sort(known: Known, needed: Slot, ends: &[End]) -> (Vec<Object>, Vec<Slot>) {
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
