//! Reads the records of partitions from the sealed logs of a cluster's nodes.
//!
//! ```text
//!   records(partition, node, from, to):   incarnations from the newest to the oldest
//!
//!     incarnation 7:  . . 2 3 4 5 6 S . S'        from the needed slot to the first seal, or to `to`
//!                         ^needed   ^end
//! ```
//!
//! The end of a log range is in a log that the ownership protocol has sealed, or is closed by a
//! release, after which there are no unflushed records. Each log is listed and read once, newest
//! object first; its objects below the needed slot are not read. An index of the partitions of each
//! object is kept. The objects are cached within a fixed number of bytes.
//!
//! # Which objects count
//!
//! Those from the beginning of the range, or from the greatest needed slot that an object of the
//! range states if that is later, to the end of the range. An object states that before its needed
//! slot all records of the node's partitions are in manifests. The node has owned the partition
//! during the whole range, so this includes the partition. A missing object among those that count
//! is an error: it was durable, because the log was sealed after it.

use std::collections::{BTreeMap, HashMap};
use std::iter::Peekable;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use fulmar_pages::PartitionId;
use futures::stream::{self, FuturesUnordered, StreamExt, TryStreamExt};
use parking_lot::Mutex;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::sync::OnceCell;

use super::LogPosition;
use super::objects::Objects;
use super::recovery::CONCURRENT_READS;
use super::slot::Slot;
use super::tail::LogObject;
use crate::log::LogError;
use crate::store::Reliable;

/// Typical size of a cached object.
const TYPICAL_OBJECT_BYTES: u64 = 16 << 10;

/// The sealed logs in a store.
pub struct SealedLogs {
    store: Reliable,
    logs: Mutex<HashMap<(u128, u64), SharedIndex>>,
    cache: Cache<(u128, Slot), Arc<LogObject>, ObjectWeight>,
    /// Set by each use, cleared by [`SealedLogs::forget_unused`].
    is_used: AtomicBool,
}

/// The index of a log, read on first use.
type SharedIndex = Arc<OnceCell<SealedLog>>;

#[derive(Clone)]
struct ObjectWeight;

impl Weighter<(u128, Slot), Arc<LogObject>> for ObjectWeight {
    fn weight(&self, _: &(u128, Slot), object: &Arc<LogObject>) -> u64 {
        object.memory_bytes()
    }
}

/// Index of the log of one incarnation.
struct SealedLog {
    /// The slot of the first seal.
    end: u64,
    /// The objects from the needed slot to the end.
    objects: BTreeMap<u64, Entry>,
}

/// An object of a sealed log.
struct Entry {
    needed: Slot,
    partitions: Box<[PartitionId]>,
}

/// Objects by sequence number, and whether they are seals.
type ReadObjects = BTreeMap<u64, (bool, Entry)>;

impl SealedLogs {
    /// The sealed logs in a store. Caches objects in up to `memory_bytes`.
    pub fn new(store: Reliable, memory_bytes: u64) -> Self {
        let capacity = (memory_bytes / TYPICAL_OBJECT_BYTES).max(1) as usize;
        SealedLogs {
            store,
            logs: Mutex::default(),
            cache: Cache::with_weighter(capacity, memory_bytes, ObjectWeight),
            is_used: AtomicBool::new(false),
        }
    }

    /// Returns the objects with unflushed records of a partition in a range of a node's logs, in
    /// order. The node owned the partition during the whole range.
    pub async fn objects_of(
        &self,
        partition: PartitionId,
        node: u128,
        from: LogPosition,
        to: LogPosition,
    ) -> Result<Vec<Arc<LogObject>>, LogError> {
        let objects = Objects::new(self.store.clone(), node);
        let mut slots = Vec::new();
        self.visit(&objects, node, from, to, |slot, partitions| {
            if partitions.binary_search(&partition).is_ok() {
                slots.push(slot);
            }
        })
        .await?;
        slots.sort_unstable();
        let objects = &objects;
        let reads = slots.into_iter().map(|slot| async move {
            self.object(objects, node, slot).await?.ok_or_else(|| missing(objects, slot))
        });
        stream::iter(reads.collect::<Vec<_>>()).buffered(CONCURRENT_READS).try_collect().await
    }

    /// Returns the partitions with unflushed records in a range of a node's logs.
    pub async fn partitions_in(
        &self,
        node: u128,
        from: LogPosition,
        to: LogPosition,
    ) -> Result<Vec<PartitionId>, LogError> {
        let objects = Objects::new(self.store.clone(), node);
        let mut found = Vec::new();
        self.visit(&objects, node, from, to, |_, partitions| found.extend_from_slice(partitions)).await?;
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Frees the memory if no log was read since the last call. Called periodically.
    pub fn forget_unused(&self) {
        if !self.is_used.swap(false, Relaxed) {
            self.logs.lock().clear();
            self.cache.clear();
        }
    }

    /// Calls `visit` with the objects that count in a range.
    async fn visit(
        &self,
        objects: &Objects,
        node: u128,
        from: LogPosition,
        to: LogPosition,
        mut visit: impl FnMut(Slot, &[PartitionId]),
    ) -> Result<(), LogError> {
        self.is_used.store(true, Relaxed);
        let (mut first, to) = (from.0, to.0);
        let Some(last) = to.before().filter(|_| first < to) else { return Ok(()) };
        let mut incarnation = last.incarnation;
        while incarnation >= first.incarnation {
            let cell = self.logs.lock().entry((node, incarnation)).or_default().clone();
            let log = cell.get_or_try_init(|| self.index(objects, node, incarnation)).await?;
            let end = if incarnation == to.incarnation { to.sequence } else { log.end };
            if end > log.end {
                let problem = format!("the log ends here, but its records up to slot {end} are needed");
                return Err(objects.corrupt(Slot { incarnation, sequence: log.end }, 0, problem));
            }
            let stated = log.objects.range(..end).map(|(_, entry)| entry.needed).max();
            first = first.max(stated.unwrap_or_default());
            let begin = if incarnation == first.incarnation { first.sequence } else { 0 };
            for sequence in begin..end {
                let slot = Slot { incarnation, sequence };
                match log.objects.get(&sequence) {
                    Some(entry) => visit(slot, &entry.partitions),
                    None => return Err(missing(objects, slot)),
                }
            }
            match incarnation.checked_sub(1) {
                Some(previous) => incarnation = previous,
                None => break,
            }
        }
        Ok(())
    }

    /// Lists a log, and reads the objects that count.
    async fn index(&self, objects: &Objects, node: u128, incarnation: u64) -> Result<SealedLog, LogError> {
        let listed = objects.list_incarnation(incarnation).await?;
        let mut rest = listed.iter().rev().copied().peekable();
        let mut read: ReadObjects = BTreeMap::new();
        // The log ends at the first seal from the greatest slot that any object states. Seals before
        // that slot took the places of deleted objects.
        let stated = self.read_back(objects, node, &mut rest, &mut read).await?;
        let mut end = first_in(incarnation, stated);
        while let Some((is_seal, _)) = read.get(&end)
            && !is_seal
        {
            end += 1;
        }
        // Objects after the end were in flight when the log was sealed. What they state does not
        // count, so objects before that slot may still be needed. They were not deleted, because
        // none of the former was acknowledged.
        let is_sealed = read.split_off(&end).first_key_value().is_some_and(|(first, _)| *first == end);
        let stated = self.read_back(objects, node, &mut rest, &mut read).await?;
        let missing = |sequence| Err(missing(objects, Slot { incarnation, sequence }));
        if !is_sealed {
            return missing(end);
        }
        let mut counting = read.split_off(&first_in(incarnation, stated));
        let mut log = SealedLog { end, objects: BTreeMap::new() };
        for sequence in first_in(incarnation, stated)..end {
            match counting.remove(&sequence) {
                Some((false, entry)) => drop(log.objects.insert(sequence, entry)),
                _ => return missing(sequence),
            }
        }
        Ok(log)
    }

    /// Reads a log's objects, the newest first, down to the greatest slot that any of those read
    /// states as needed. Returns that slot.
    async fn read_back(
        &self,
        objects: &Objects,
        node: u128,
        rest: &mut Peekable<impl Iterator<Item = Slot>>,
        read: &mut ReadObjects,
    ) -> Result<Slot, LogError> {
        let records = read.values().filter(|(is_seal, _)| !is_seal);
        let mut needed = records.map(|(_, entry)| entry.needed).max().unwrap_or_default();
        let mut reads = FuturesUnordered::new();
        // The newest object most likely states the greatest needed slot. Seals state less.
        let mut concurrent = if read.is_empty() { 1 } else { CONCURRENT_READS };
        loop {
            while reads.len() < concurrent
                && let Some(slot) = rest.next_if(|slot| *slot >= needed)
            {
                reads.push(async move { (slot, self.object(objects, node, slot).await) });
            }
            let Some((slot, object)) = reads.next().await else { return Ok(needed) };
            // An object that was deleted since it was listed is missed later if it counts.
            let Some(object) = object? else { continue };
            needed = needed.max(object.object.head.needed);
            let entry = Entry { needed: object.object.head.needed, partitions: object.partitions() };
            if !object.object.is_seal {
                concurrent = CONCURRENT_READS;
            }
            read.insert(slot.sequence, (object.object.is_seal, entry));
        }
    }

    /// Reads an object. Returns None if it does not exist.
    async fn object(
        &self,
        objects: &Objects,
        node: u128,
        slot: Slot,
    ) -> Result<Option<Arc<LogObject>>, LogError> {
        let read = async {
            match objects.get(slot).await {
                Ok(Some(object)) => Ok(Arc::new(LogObject::new(object))),
                Ok(None) => Err(None),
                Err(error) => Err(Some(error)),
            }
        };
        match self.cache.get_or_insert_async(&(node, slot), read).await {
            Ok(object) => Ok(Some(object)),
            Err(None) => Ok(None),
            Err(Some(error)) => Err(error),
        }
    }
}

/// The first sequence number of an incarnation from a slot on.
fn first_in(incarnation: u64, slot: Slot) -> u64 {
    if slot.incarnation == incarnation { slot.sequence } else { 0 }
}

fn missing(objects: &Objects, slot: Slot) -> LogError {
    let problem = "the object is missing, or its log was not sealed".to_owned();
    objects.corrupt(slot, 0, problem)
}
