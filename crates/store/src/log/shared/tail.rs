//! The log as another process reads it while its owner writes: where it ends now, and what it holds of a partition.
//!
//! ```text
//!   look():  list what stands behind the last object that was read -> read that -> how far does it count?
//!
//!            0 1 2 3 4 5 . 7           counts up to 5; 7 is read, and waits for 6
//!                ^needed   ^end
//!
//!   next(partition, from, to):  the first object from one place to the other that has records of the partition
//! ```
//!
//! Nothing is written. Nobody looks unless somebody asks, so a log that nobody wants to read costs nothing.
//!
//! # What counts
//! What a start would count, by the same rules: from where any object says that the log is needed, without a gap, to a seal or
//! an object of another writer, and then on in the next incarnation. (Incarnations have no gaps: a claim takes the number after
//! the greatest name that there is, and what ends a log is never deleted. Nobody claims one before the one before it has
//! ended; so what comes next is known, and what stands in an incarnation after it is evidence that an end was not seen yet.)
//! What counts once counts for ever, and so do the commits in it, whether their clients have been answered or not. On a
//! disk that is so when the object has been synced; so it is, before it counts.
//!
//! # What a look proves
//! A commit that was acknowledged before the look began stands before the end that it answers, or is covered by a manifest that was
//! there before the look ended:
//!
//! - Its object was there before the names were listed. So it was listed, or had been deleted.
//! - If it was listed, all before it in its log was there too (what is acknowledged has no gap before it). The walk
//!   passes over all of that, unless some of it has been deleted.
//! - What is deleted is covered by manifests, or stands once more behind it, and before it is deleted an object says so (`needed`) that stands behind it, and for
//!   as long as none behind that one says more. The listing meets one of them. So the walk goes on from there; who has not
//!   come so far cannot go on ([`Ahead::Gone`]), and begins anew with a manifest.
//!
//! A listing is not of one moment: an object that was put meanwhile may be seen and one before it not. An object that
//! was made when more was durable than the walk has found (a *witness*) says that this has happened, and all is looked at again. If it
//! was known before the names were listed the object that is missing is lost, which is an error.
//!
//! An object is read after its name was listed, and may not be what was listed then: that was deleted, and a zombie stands in its place. A
//! zombie with records is a late copy of what the slot's winner had put there, with the same bytes; but it may be a seal or a claim of somebody
//! else's. So these mean something only if they were known before the names were listed. For then, if theirs is a slot that had been
//! deleted, there was an object by then that says so, and it is listed.
//!
//! # Memory
//! Objects are kept in so many bytes for all. Of those that are needed and have left it is known whose records are in them,
//! in some sixty bytes each; how many there are the owner bounds, who flushes when its log is long.

use std::collections::BTreeMap;
use std::sync::Arc;

use fulmar_pages::{LogId, PartitionId, Record};
use futures::stream::{self, StreamExt};
use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::object::{Head, Object};
use super::objects::Objects;
use super::{LogError, Slot};
use crate::store::Reliable;

/// Objects that are read at the same time.
const READS: usize = 8;
/// How often all is looked at again because it has changed meanwhile.
const MOST_ROUNDS: usize = 50;
/// Objects that are kept are some kilobytes each, more or less.
const OBJECT_BYTES: u64 = 16 << 10;

/// A place in a log, between two objects. Those of a node's log grow, over its starts too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct LogPlace(Slot);

/// What a look has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogEnd {
    /// Manifests cover everything before.
    pub needed: LogPlace,
    /// All that counts stands before.
    pub end: LogPlace,
}

/// What comes next of a partition.
#[derive(Debug)]
pub enum Ahead {
    /// An object with records of it, and the place behind that.
    Records(Arc<LogObject>, LogPlace),
    /// Nothing more.
    End,
    /// It is not known: there was something that manifests have covered since.
    Gone,
}

/// An object, with what is needed to find a partition's records in it.
#[derive(Debug)]
pub struct LogObject {
    object: Object,
    /// Where records stand, by their partitions, and in their order.
    places: Box<[(PartitionId, usize)]>,
}

/// A node's log, as who does not write it sees it.
pub struct LogTail {
    objects: Objects,
    kept: Cache<Slot, Arc<LogObject>, ObjectWeight>,
    /// One looks at a time.
    walk: tokio::sync::Mutex<Walk>,
    known: Mutex<Known>,
}

/// What is known of the objects that count.
#[derive(Default)]
struct Known {
    /// Manifests cover what stands before.
    needed: Slot,
    counting: BTreeMap<Slot, Counting>,
}

/// An object that counts.
struct Counting {
    /// Who has written it. Another one's in its place means that it was deleted.
    writer: LogId,
    /// Whose records are in it.
    partitions: Box<[PartitionId]>,
}

/// How far the log has been read.
#[derive(Default)]
struct Walk {
    /// The first slot that does not count yet.
    next: Slot,
    /// The object before it, if it is of the same log: its writer, and where it ends.
    last: Option<(LogId, u64)>,
    /// Names up to this one need not be listed.
    after: Option<Slot>,
    /// What has been read from there on.
    beyond: BTreeMap<Slot, Passed>,
}

/// What is remembered of an object until it is known whether it counts.
struct Passed {
    head: Head,
    is_seal: bool,
    end: u64,
    partitions: Box<[PartitionId]>,
}

#[derive(Clone)]
struct ObjectWeight;

impl Weighter<Slot, Arc<LogObject>> for ObjectWeight {
    fn weight(&self, _: &Slot, object: &Arc<LogObject>) -> u64 {
        object.object.bytes() + (object.places.len() * size_of::<(PartitionId, usize)>()) as u64
    }
}

impl LogObject {
    fn new(object: Object) -> Self {
        let partition = |(at, _)| Some((object.record_at(at)?.header.partition, at));
        let mut places: Vec<_> = object.places().filter_map(partition).collect();
        places.sort_unstable();
        LogObject { places: places.into(), object }
    }

    /// A partition's records, in order.
    pub fn records(&self, partition: PartitionId) -> impl Iterator<Item = Record<'_>> {
        let begin = self.places.partition_point(|(of, _)| *of < partition);
        let its_own = self.places[begin..].iter().take_while(move |(of, _)| *of == partition);
        its_own.filter_map(|(_, at)| self.object.record_at(*at))
    }

    fn passed(&self) -> Passed {
        let partitions = self.places.chunk_by(|a, b| a.0 == b.0).map(|of_one| of_one[0].0).collect();
        Passed { head: self.object.head, is_seal: self.object.is_seal, end: self.object.end(), partitions }
    }
}

impl Passed {
    /// Whether it can only be what its log's writer has put there: it is neither a seal nor a claim.
    fn is_plain(&self) -> bool {
        !self.is_seal && self.head.slot.sequence > 0
    }
}

impl Walk {
    /// An object that could not have been made before the one at `next`, which has not been found.
    fn witness(&self) -> Option<(Slot, Slot)> {
        let comes_later = |(slot, passed): &(&Slot, &Passed)| {
            slot.incarnation > self.next.incarnation || passed.head.durable > self.next.sequence
        };
        self.beyond.iter().find(comes_later).map(|(slot, _)| (self.next, *slot))
    }

    fn go_to(&mut self, next: Slot, last: Option<(LogId, u64)>) {
        (self.next, self.last) = (next, last);
        self.beyond = self.beyond.split_off(&next);
    }
}

impl LogTail {
    /// The log of `node` in a store, of which objects are kept in so many bytes.
    pub fn new(store: Reliable, node: u128, memory_bytes: u64) -> Self {
        let most = (memory_bytes / OBJECT_BYTES).max(1) as usize;
        LogTail {
            objects: Objects::new(store, node),
            kept: Cache::with_weighter(most, memory_bytes, ObjectWeight),
            walk: tokio::sync::Mutex::default(),
            known: Mutex::default(),
        }
    }

    /// Looks where the log ends. May be dropped; what has been read by then stays known.
    pub async fn look(&self) -> Result<LogEnd, LogError> {
        let mut walk = self.walk.lock().await;
        for _ in 0..MOST_ROUNDS {
            let known = walk.witness();
            if !self.round(&mut walk).await? {
                continue;
            }
            match walk.witness() {
                None => {
                    let needed = LogPlace(self.known.lock().needed);
                    return Ok(LogEnd { needed, end: LogPlace(walk.next) });
                }
                // Known before the names were listed.
                found if found == known => return Err(self.missing(found)),
                Some(_) => {}
            }
        }
        Err(LogError::Contended { directory: self.objects.directory().to_owned() })
    }

    fn missing(&self, witness: Option<(Slot, Slot)>) -> LogError {
        let (slot, witness) = witness.unwrap_or_default();
        self.objects.corrupt(slot, 0, format!("it is missing, though {witness} was made after it"))
    }

    /// Reads what has come, and goes on as far as it counts. False: all is to be looked at again.
    async fn round(&self, walk: &mut Walk) -> Result<bool, LogError> {
        let listed = self.objects.list_after(walk.after).await?;
        walk.beyond.retain(|slot, _| listed.contains(slot));
        let (Some(first), Some(last)) = (listed.first(), listed.last()) else { return Ok(true) };
        // It knows best: what stands before is not read.
        match self.object(*last).await? {
            Some(object) => self.need(walk, object.object.head.needed),
            None => return Ok(false),
        }
        if walk.next == Slot::default() {
            walk.next = Slot { incarnation: first.incarnation, sequence: 0 };
        }
        let unknown = listed.range(walk.next..).filter(|slot| !walk.beyond.contains_key(slot));
        let reads = unknown.map(|slot| async { (*slot, self.object(*slot).await) });
        let mut reads = stream::iter(reads.collect::<Vec<_>>()).buffered(READS);
        let mut is_plain = true;
        while let Some((slot, object)) = reads.next().await {
            let Some(object) = object? else { return Ok(false) };
            let passed = object.passed();
            is_plain &= passed.is_plain();
            walk.beyond.insert(slot, passed);
        }
        if !is_plain {
            return Ok(false);
        }
        if let Some(needed) = walk.beyond.values().map(|passed| passed.head.needed).max() {
            self.need(walk, needed);
        }
        while let Some(passed) = walk.beyond.remove(&walk.next) {
            self.pass(walk, passed)?;
        }
        Ok(true)
    }

    /// Manifests cover what stands before a slot.
    fn need(&self, walk: &mut Walk, needed: Slot) {
        let mut known = self.known.lock();
        if needed > known.needed {
            known.needed = needed;
            known.counting = known.counting.split_off(&needed);
        }
        if needed > walk.next {
            walk.go_to(needed, None);
            walk.after = walk.after.max(needed.before());
        }
    }

    /// The object at `next` has been found.
    fn pass(&self, walk: &mut Walk, passed: Passed) -> Result<(), LogError> {
        let (slot, Passed { head, is_seal, end, partitions }) = (walk.next, passed);
        if is_seal || walk.last.is_some_and(|(writer, _)| writer != head.writer) {
            walk.after = Some(slot);
            walk.go_to(Slot { incarnation: slot.incarnation + 1, sequence: 0 }, None);
            return Ok(());
        }
        if walk.last.is_some_and(|(_, end)| end != head.start) {
            let problem = "it does not begin where the one before it ends".to_owned();
            return Err(self.objects.corrupt(slot, 48, problem));
        }
        self.known.lock().counting.insert(slot, Counting { writer: head.writer, partitions });
        walk.after = Some(slot);
        walk.go_to(slot.next(), Some((head.writer, end)));
        Ok(())
    }

    /// The first object from one place to another, which a look has answered, that has records of a partition.
    pub async fn next(
        &self,
        partition: PartitionId,
        from: LogPlace,
        to: LogPlace,
    ) -> Result<Ahead, LogError> {
        let (slot, writer) = {
            let known = self.known.lock();
            if from.0 < known.needed {
                return Ok(Ahead::Gone);
            }
            if from >= to {
                return Ok(Ahead::End);
            }
            let has_some = |counting: &Counting| counting.partitions.binary_search(&partition).is_ok();
            let mut between = known.counting.range(from.0..to.0);
            match between.find(|(_, counting)| has_some(counting)) {
                Some((slot, counting)) => (*slot, counting.writer),
                None => return Ok(Ahead::End),
            }
        };
        // It may have left memory, been deleted since, and a zombie stand in its place.
        match self.object(slot).await?.filter(|object| object.object.head.writer == writer) {
            Some(object) => Ok(Ahead::Records(object, LogPlace(slot.next()))),
            None => Ok(Ahead::Gone),
        }
    }

    /// Reads an object, durably; `None` if there is none (any more).
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
        match self.kept.get_or_insert_async(&slot, read).await {
            Ok(object) => Ok(Some(object)),
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error),
        }
    }
}
