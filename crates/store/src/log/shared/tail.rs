//! Reads a shared log while its owner writes it: finds its end, and the records of a partition.
//!
//! ```text
//!   poll():  list after the last object read -> read the new ones -> find the valid prefix
//!
//!            0 1 2 3 4 5 . 7           valid up to 5; 7 is read, and waits for 6
//!                ^needed   ^end
//!
//!   next(partition, from, to):  the first object between two positions, for the partition
//! ```
//!
//! Nothing is written. The log is polled only on request, so a log without readers costs nothing.
//!
//! # Which objects count
//!
//! The same objects that a start would count, by the same rules: from the greatest slot that any
//! object states as needed, without a gap, up to a seal or an object of another writer, and then on
//! in the next incarnation. Incarnations have no gaps: a claim takes the number after the greatest
//! existing name, the object that ends a log is never deleted, and an incarnation is claimed only
//! after the previous one has ended. The next incarnation is therefore known, and an object of a
//! later one is evidence that an end has not been seen yet.
//!
//! An object that counts continues to count, and so do its commits, whether or not their clients
//! have been answered. On a disk this requires that the object is synced, so it is synced before it
//! counts.
//!
//! # Guarantee of a poll
//!
//! A commit that was acknowledged before a poll started is before the end that the poll returns, or
//! is covered by a manifest that existed before the poll ended:
//!
//! - Its object existed before the names were listed. It was therefore listed, or had been deleted.
//! - If it was listed, all objects before it in its log existed too, because acknowledged objects
//!   have no gap before them. The walk passes all of them, unless some have been deleted.
//! - Deleted objects are covered by manifests, or by copies later in the log. Before they are
//!   deleted, a later object states this (`needed`), and exists until a later one states more. The
//!   listing contains one of them, so the walk continues from the slot that it states. A reader
//!   that has not reached that slot cannot continue ([`NextRecords::Gone`]) and restarts from a
//!   manifest.
//!
//! A listing is not atomic: an object that was put in the meantime may be listed, while an earlier
//! one is not. An object that was created when more was durable than the walk has found (a
//! *witness*) shows that this has happened, and the poll starts another round. If the witness was
//! known before the listing, the missing object is lost, which is an error.
//!
//! An object is read after its name was listed, and may not be the one that was listed: that one
//! was deleted, and a zombie has taken its slot. A zombie with records is a late copy of the object
//! that had won the slot, with the same bytes. It may however be a seal or a claim of another
//! process. Seals and claims therefore count only if they were known before the listing. If such an
//! object is in a slot that had been deleted, an object that states the deletion existed by then
//! and is in the listing.
//!
//! # Memory
//!
//! Objects are cached within a fixed number of bytes. Of the needed objects that were evicted, only
//! the partitions are kept, in about 60 bytes per object. The owner bounds their number, because it
//! flushes when its log is long.

use std::collections::BTreeMap;
use std::sync::Arc;

use fulmar_pages::{LogId, PartitionId, Record};
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::object_format::{Head, Object};
use super::objects::Objects;
use super::slot::Slot;
use crate::log::LogError;
use crate::store::Reliable;

/// Number of concurrent reads.
const CONCURRENT_READS: usize = 8;
/// Maximum number of rounds of a poll that is disturbed by changes.
const MAX_ROUNDS: usize = 50;
/// Typical size of a cached object.
const TYPICAL_OBJECT_BYTES: u64 = 16 << 10;

/// A position between two objects of a log. The positions of a node's logs grow, also across its
/// restarts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct LogPosition(pub(super) Slot);

impl LogPosition {
    /// The position before an object of an incarnation's log.
    pub fn new(incarnation: u64, sequence: u64) -> Self {
        LogPosition(Slot { incarnation, sequence })
    }

    /// The incarnation.
    pub fn incarnation(self) -> u64 {
        self.0.incarnation
    }

    /// The number of the object after the position.
    pub fn sequence(self) -> u64 {
        self.0.sequence
    }
}

impl std::fmt::Display for LogPosition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Result of a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogEnd {
    /// Everything before this position is covered by manifests.
    pub needed: LogPosition,
    /// Everything that counts is before this position.
    pub end: LogPosition,
}

/// The next records of a partition.
#[derive(Debug)]
pub enum NextRecords {
    /// An object with records of the partition, and the position after it.
    Records(Arc<LogObject>, LogPosition),
    /// There are no more records.
    End,
    /// Unknown: there were objects that manifests have covered since.
    Gone,
}

/// An object, with an index of its records by partition.
#[derive(Debug)]
pub struct LogObject {
    pub(super) object: Object,
    /// Partitions and offsets of the records, sorted.
    index: Box<[(PartitionId, usize)]>,
}

/// A node's log as seen by a process that does not write it.
pub struct LogTail {
    objects: Objects,
    cache: Cache<Slot, Arc<LogObject>, ObjectWeight>,
    /// Only one poll runs at a time.
    walk: tokio::sync::Mutex<Walk>,
    known: Mutex<Known>,
}

/// Index of the objects that count.
#[derive(Default)]
struct Known {
    /// Everything before this slot is covered by manifests.
    needed: Slot,
    counting: BTreeMap<Slot, Counting>,
}

/// An object that counts.
struct Counting {
    /// Its writer. If another writer's object is in its slot, it was deleted.
    writer: LogId,
    /// Partitions that have records in it.
    partitions: Box<[PartitionId]>,
}

/// How far the log has been read.
#[derive(Default)]
struct Walk {
    /// The first slot that does not count yet.
    next: Slot,
    /// The object before it, if it is in the same log: its writer, and the position of its end.
    last: Option<(LogId, u64)>,
    /// Names up to this one need not be listed.
    after: Option<Slot>,
    /// Objects that were read from `next` on.
    pending: BTreeMap<Slot, ObjectSummary>,
}

/// Properties of an object that are kept until it is known whether it counts.
struct ObjectSummary {
    head: Head,
    is_seal: bool,
    end: u64,
    partitions: Box<[PartitionId]>,
}

#[derive(Clone)]
struct ObjectWeight;

impl Weighter<Slot, Arc<LogObject>> for ObjectWeight {
    fn weight(&self, _: &Slot, object: &Arc<LogObject>) -> u64 {
        object.memory_bytes()
    }
}

impl LogObject {
    pub(super) fn new(object: Object) -> Self {
        let partition = |(at, _)| Some((object.record_at(at)?.header.partition, at));
        let mut index: Vec<_> = object.offsets().filter_map(partition).collect();
        index.sort_unstable();
        LogObject { index: index.into(), object }
    }

    /// A partition's records, in order.
    pub fn records(&self, partition: PartitionId) -> impl Iterator<Item = Record<'_>> {
        let begin = self.index.partition_point(|(of, _)| *of < partition);
        let its_own = self.index[begin..].iter().take_while(move |(of, _)| *of == partition);
        its_own.filter_map(|(_, at)| self.object.record_at(*at))
    }

    /// The partitions that have records in the object, ascending.
    pub(super) fn partitions(&self) -> Box<[PartitionId]> {
        self.index.chunk_by(|a, b| a.0 == b.0).map(|of_one| of_one[0].0).collect()
    }

    /// Memory that the object takes.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.object.bytes() + (self.index.len() * size_of::<(PartitionId, usize)>()) as u64
    }

    fn summary(&self) -> ObjectSummary {
        let partitions = self.partitions();
        ObjectSummary {
            head: self.object.head,
            is_seal: self.object.is_seal,
            end: self.object.end(),
            partitions,
        }
    }
}

impl ObjectSummary {
    /// Returns true if only the writer of its log can have put it: it is neither a seal nor a
    /// claim.
    fn is_unambiguous(&self) -> bool {
        !self.is_seal && self.head.slot.sequence > 0
    }
}

impl Walk {
    /// Finds an object that cannot have been created before the one at `next`, which was not found.
    /// Returns both slots.
    fn witness(&self) -> Option<(Slot, Slot)> {
        let is_later = |(slot, summary): &(&Slot, &ObjectSummary)| {
            slot.incarnation > self.next.incarnation || summary.head.durable > self.next.sequence
        };
        self.pending.iter().find(is_later).map(|(slot, _)| (self.next, *slot))
    }

    fn advance_to(&mut self, next: Slot, last: Option<(LogId, u64)>) {
        (self.next, self.last) = (next, last);
        self.pending = self.pending.split_off(&next);
    }
}

impl LogTail {
    /// The log of `node` in a store. Caches objects in up to `memory_bytes`.
    pub fn new(store: Reliable, node: u128, memory_bytes: u64) -> Self {
        let capacity = (memory_bytes / TYPICAL_OBJECT_BYTES).max(1) as usize;
        LogTail {
            objects: Objects::new(store, node),
            cache: Cache::with_weighter(capacity, memory_bytes, ObjectWeight),
            walk: tokio::sync::Mutex::default(),
            known: Mutex::default(),
        }
    }

    /// As [`LogTail::new`], from the beginning of an incarnation on: the records of earlier ones are
    /// read elsewhere.
    pub fn since(store: Reliable, node: u128, incarnation: u64, memory_bytes: u64) -> Self {
        let mut tail = Self::new(store, node, memory_bytes);
        let start = Slot { incarnation, sequence: 0 };
        *tail.walk.get_mut() = Walk { next: start, after: start.before(), ..Walk::default() };
        tail.known.get_mut().needed = start;
        tail
    }

    /// Polls the end of the log. Cancel safe: objects that were read by then remain known.
    pub async fn poll(&self) -> Result<LogEnd, LogError> {
        let mut walk = self.walk.lock().await;
        for _ in 0..MAX_ROUNDS {
            let known = walk.witness();
            if !self.round(&mut walk).await? {
                continue;
            }
            match walk.witness() {
                None => {
                    let needed = LogPosition(self.known.lock().needed);
                    return Ok(LogEnd { needed, end: LogPosition(walk.next) });
                }
                // The witness was known before the names were listed.
                found if found == known => return Err(self.missing(found)),
                Some(_) => {}
            }
        }
        Err(LogError::Contended { directory: self.objects.directory().to_owned() })
    }

    fn missing(&self, witness: Option<(Slot, Slot)>) -> LogError {
        let (slot, witness) = witness.unwrap_or_default();
        self.objects.corrupt(slot, 0, format!("the object is missing, but {witness} was created after it"))
    }

    /// Reads new objects and advances as far as they count. Returns false if another round is
    /// needed.
    async fn round(&self, walk: &mut Walk) -> Result<bool, LogError> {
        let listed = self.objects.list_after(walk.after).await?;
        walk.pending.retain(|slot, _| listed.contains(slot));
        let (Some(first), Some(last)) = (listed.first(), listed.last()) else { return Ok(true) };
        // The newest object states the greatest needed slot; objects before that are not read.
        match self.object(*last).await? {
            Some(object) => self.advance_needed(walk, object.object.head.needed),
            None => return Ok(false),
        }
        if walk.next == Slot::default() {
            walk.next = Slot { incarnation: first.incarnation, sequence: 0 };
        }
        let unknown = listed.range(walk.next..).filter(|slot| !walk.pending.contains_key(slot));
        let reads = unknown.map(|slot| async { (*slot, self.object(*slot).await) });
        let mut reads = stream::iter(reads.collect::<Vec<_>>()).buffered(CONCURRENT_READS);
        let mut is_unambiguous = true;
        while let Some((slot, object)) = reads.next().await {
            let Some(object) = object? else { return Ok(false) };
            let summary = object.summary();
            is_unambiguous &= summary.is_unambiguous();
            walk.pending.insert(slot, summary);
        }
        if !is_unambiguous {
            return Ok(false);
        }
        if let Some(needed) = walk.pending.values().map(|summary| summary.head.needed).max() {
            self.advance_needed(walk, needed);
        }
        while let Some(summary) = walk.pending.remove(&walk.next) {
            self.advance(walk, summary)?;
        }
        Ok(true)
    }

    /// Records that everything before a slot is covered by manifests.
    fn advance_needed(&self, walk: &mut Walk, needed: Slot) {
        let mut known = self.known.lock();
        if needed > known.needed {
            known.needed = needed;
            known.counting = known.counting.split_off(&needed);
        }
        if needed > walk.next {
            walk.advance_to(needed, None);
            walk.after = walk.after.max(needed.before());
        }
    }

    /// Processes the object at `next`.
    fn advance(&self, walk: &mut Walk, summary: ObjectSummary) -> Result<(), LogError> {
        let (slot, ObjectSummary { head, is_seal, end, partitions }) = (walk.next, summary);
        if is_seal || walk.last.is_some_and(|(writer, _)| writer != head.writer) {
            walk.after = Some(slot);
            walk.advance_to(Slot { incarnation: slot.incarnation + 1, sequence: 0 }, None);
            return Ok(());
        }
        if walk.last.is_some_and(|(_, end)| end != head.start) {
            let problem = "the object does not start at the end of the previous one".to_owned();
            return Err(self.objects.corrupt(slot, 48, problem));
        }
        self.known.lock().counting.insert(slot, Counting { writer: head.writer, partitions });
        walk.after = Some(slot);
        walk.advance_to(slot.next(), Some((head.writer, end)));
        Ok(())
    }

    /// Finds the first object between two positions, which a poll has returned, that has records of
    /// a partition.
    pub async fn next(
        &self,
        partition: PartitionId,
        from: LogPosition,
        to: LogPosition,
    ) -> Result<NextRecords, LogError> {
        let (slot, writer) = {
            let known = self.known.lock();
            if from.0 < known.needed {
                return Ok(NextRecords::Gone);
            }
            if from >= to {
                return Ok(NextRecords::End);
            }
            let has_some = |counting: &Counting| counting.partitions.binary_search(&partition).is_ok();
            let mut between = known.counting.range(from.0..to.0);
            match between.find(|(_, counting)| has_some(counting)) {
                Some((slot, counting)) => (*slot, counting.writer),
                None => return Ok(NextRecords::End),
            }
        };
        // The object may have been evicted and deleted since, and a zombie may be in its slot.
        match self.object(slot).await?.filter(|object| object.object.head.writer == writer) {
            Some(object) => Ok(NextRecords::Records(object, LogPosition(slot.next()))),
            None => Ok(NextRecords::Gone),
        }
    }

    /// Reads an object and syncs it. Returns None if it does not exist.
    async fn object(&self, slot: Slot) -> Result<Option<Arc<LogObject>>, LogError> {
        let read = async {
            match self.objects.get(slot).await {
                Ok(Some(object)) => {
                    self.objects.sync(slot).await.map_err(Some)?;
                    Ok(Arc::new(LogObject::new(object)))
                }
                Ok(None) => Err(None),
                Err(error) => Err(Some(error)),
            }
        };
        match self.cache.get_or_insert_async(&slot, read).await {
            Ok(object) => Ok(Some(object)),
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error),
        }
    }
}
