//! Garbage collection: deletes segments and manifests that nothing needs.
//!
//! An object store cannot fence a deletion: a collector that was paused, or a request that was
//! delayed, still deletes after another node was elected. Safety therefore rests on two properties,
//! not on the election:
//!
//! - **A decision is final.** An object is chosen only if nothing can need it again.
//! - **Holds and decisions exclude each other.** The collector registers what it will delete (a
//!   *batch*) before it deletes. Only one batch is outstanding: the next one is registered by a
//!   transaction that compares the previous one, after all of that has been deleted. A hold of an
//!   object is refused if the registered batch contains it ([`crate::hold`]).
//!
//! # What is garbage
//! A **manifest**, if a newer one is the newest that recovery may use ([`recovery::is_named`]), or
//! if it may not be used at all, and it is older than the retention. The base of the partition's
//! record is kept, as is a draft that may still become the base.
//!
//! A **segment**, if no manifest names it, and none will. The owner of a partition derives its
//! manifests from its newest one, and from segments that it wrote itself (a segment that it has
//! dropped never returns to its list). So a manifest can name a segment that no stored manifest
//! names only if the segment's maker stores that manifest. It will not if
//! - the maker's incarnation lives and *disowns* the segment: it promises never to name it, and no
//!   manifest that names it is on its way; or
//! - the maker's incarnation has ended, and no range of a partition with pages in the segment needs
//!   its log. Any manifest of that incarnation that arrives now is older than the newest one
//!   ([`crate::truncation`]).
//!
//! Every living incarnation is asked, because others than the maker may be reading the segment.
//!
//! # Order
//! A collection passes over all partitions by id. It lists the segments, then the manifests of each
//! partition, whose garbage it deletes. If segments are left that no manifest names, it reads the
//! records of their partitions, asks for the promises, lists the manifests again, reads the holds,
//! and deletes the segments that are still unnamed. Records and promises concern the future, the
//! list the past, so the list comes last (`promise_first`): an owner that drops a range has stored
//! a manifest before, which may name the segment. A listing takes long, but misses no
//! segment: references are copied from a manifest only to a later one, of the same partition or one
//! with a greater id, while the earlier one exists.
//!
//! The record of a partition is read after its manifests were listed. If a manifest's epoch is
//! above the record's, the metadata store was restored from an old backup, and nothing more is
//! deleted ([`Error::RecordTooOld`]).
//!
//! # Crash points
//! A batch that was registered is completed by the next collection, of any node: its objects stay
//! garbage. Before that nothing is deleted. Manifests are deleted before segments that only they
//! name: these are found by the next collection.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use fulmar_meta::{Revision, Transaction};
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

use crate::election::Term;
use crate::environment::{ObjectEnvironment, StoredManifests};
use crate::hold::{HOLDS_KEY, HoldRecord};
use crate::metadata::{self, Change};
use crate::records::{VERSION, encode, partition_number, records};
use crate::{
    Error, Incarnation, ManifestName, NodeId, NodeRecord, NodeState, PartitionRecord, Read, Rules,
    SegmentName, recovery, retry,
};

/// The key of the collector's record.
pub(crate) const COLLECTION_KEY: &str = "collection";
/// Maximum number of objects in a batch, which is one value of the metadata store.
const MAX_BATCH_OBJECTS: usize = 1000;

/// An object of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectName {
    /// A segment.
    Segment(SegmentName),
    /// A manifest.
    Manifest(#[serde(with = "partition_number")] PartitionId, ManifestName),
}

/// The metadata store's record of the collector: what it deletes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectionRecord {
    v: u32,
    /// The term in which the batch was registered.
    pub term: u64,
    /// The objects that are being deleted, or were.
    pub batch: Vec<ObjectName>,
}

records!(CollectionRecord);

/// The makers of segments.
pub trait Makers: Send + Sync {
    /// Asks a living incarnation which of these segments it disowns: it does not read them, and
    /// those that it wrote will not be named by its manifests. `None`: no answer.
    fn disowned(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        segments: Vec<SegmentName>,
    ) -> impl Future<Output = Option<Vec<SegmentName>>> + Send;
}

/// How a collection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This number of objects was deleted.
    Collected(usize),
    /// Something was changing; some objects may have been deleted.
    Skipped,
    /// Another node is the collector.
    Deposed,
}

/// The collector of one term.
#[derive(Debug)]
pub struct Collector {
    term: Term,
    /// The batch of this revision of the record has been deleted.
    deleted: Option<Revision>,
}

/// Returns from the function if a batch was not deleted.
macro_rules! proceed {
    ($outcome:expr) => {
        match $outcome {
            Outcome::Collected(count) => count,
            stopped => return Ok(stopped),
        }
    };
}

impl Collector {
    /// A collector that has just been elected.
    pub fn new(term: Term) -> Collector {
        Collector { term, deleted: None }
    }

    /// Deletes the garbage of all partitions.
    pub async fn collect<E: ObjectEnvironment>(
        &mut self,
        env: &E,
        makers: &impl Makers,
    ) -> Result<Outcome, Error> {
        self.finish(env).await?;
        let mut unnamed: BTreeSet<SegmentName> =
            until_answered(env, || env.objects().segments()).await.into_iter().collect();
        let (mut count, mut after) = (0, None);
        loop {
            let listed = until_answered(env, || env.objects().manifests_after(after)).await;
            let Some((last, _)) = listed.last() else { break };
            after = Some(*last);
            let mut batch = Vec::new();
            for (partition, stored) in &listed {
                batch.extend(self.garbage_manifests(env, *partition, stored).await?);
                remove_named(&mut unnamed, stored);
            }
            count += proceed!(self.delete_all(env, batch).await?);
        }
        if unnamed.is_empty() {
            return Ok(Outcome::Collected(count));
        }
        let nodes = metadata::nodes(env).await?;
        let mut candidates = without_needed(env, &nodes, unnamed).await?;
        if env.rules().promise_first {
            candidates = promises(env, makers, &nodes, candidates).await;
            name_again(env, &mut candidates).await;
        } else {
            name_again(env, &mut candidates).await;
            candidates = promises(env, makers, &nodes, candidates).await;
        }
        let batch = candidates.into_iter().map(ObjectName::Segment).collect();
        count += proceed!(self.delete_all(env, batch).await?);
        Ok(Outcome::Collected(count))
    }

    /// The manifests of a partition that nothing needs.
    async fn garbage_manifests<E: ObjectEnvironment>(
        &self,
        env: &E,
        partition: PartitionId,
        stored: &StoredManifests,
    ) -> Result<Vec<ObjectName>, Error> {
        if !stored.manifests.iter().any(|(_, is_old)| *is_old) {
            return Ok(Vec::new());
        }
        let Some(Read { record, .. }) = metadata::partition(env, partition).await? else {
            return Ok(Vec::new());
        };
        let written = stored.manifests.iter().map(|(name, _)| name).filter(|name| !name.is_draft);
        let newest = written.map(|name| name.epoch).max().unwrap_or(0);
        if newest > record.epoch && env.rules().refuse_newer_epochs {
            return Err(Error::RecordTooOld { partition, stored: newest, recorded: record.epoch });
        }
        let garbage = garbage(env.rules(), &record, &stored.manifests).into_iter();
        Ok(garbage.map(|name| ObjectName::Manifest(partition, name)).collect())
    }

    /// Registers and deletes objects that are not held, in batches.
    async fn delete_all<E: ObjectEnvironment>(
        &mut self,
        env: &E,
        garbage: Vec<ObjectName>,
    ) -> Result<Outcome, Error> {
        let mut count = 0;
        for batch in garbage.chunks(MAX_BATCH_OBJECTS) {
            let previous = self.finish(env).await?;
            let holds_before = metadata_revision(env, HOLDS_KEY).await;
            let held = holds(env).await?;
            let batch: Vec<_> = batch.iter().filter(|object| !held.contains(object)).copied().collect();
            if batch.is_empty() {
                continue;
            }
            let record = CollectionRecord { v: VERSION, term: self.term.number(), batch };
            match self.register(env, previous.as_ref(), holds_before, &record).await? {
                Change::Applied => {
                    self.finish(env).await?;
                    count += record.batch.len();
                }
                // If it was applied, the next collection deletes the batch.
                Change::Unknown => return Ok(Outcome::Skipped),
                Change::Conflict => {
                    let now = metadata::read::<E, CollectionRecord>(env, COLLECTION_KEY).await?;
                    let is_deposed = now.is_some_and(|now| now.record.term > self.term.number());
                    return Ok(if is_deposed { Outcome::Deposed } else { Outcome::Skipped });
                }
            }
        }
        Ok(Outcome::Collected(count))
    }

    /// Deletes the registered batch, which an earlier collector may have left behind.
    async fn finish<E: ObjectEnvironment>(
        &mut self,
        env: &E,
    ) -> Result<Option<Read<CollectionRecord>>, Error> {
        let Some(read) = metadata::read::<E, CollectionRecord>(env, COLLECTION_KEY).await? else {
            return Ok(None);
        };
        let is_own = read.record.term == self.term.number();
        if self.deleted != Some(read.revision) && (is_own || env.rules().fence_collector) {
            for object in &read.record.batch {
                until_answered(env, || delete(env, *object)).await;
            }
            self.deleted = Some(read.revision);
        }
        Ok(Some(read))
    }

    /// Registers a batch, if this node is still the collector, the previous batch is still the one
    /// that was deleted, and no hold was created meanwhile.
    async fn register<E: ObjectEnvironment>(
        &self,
        env: &E,
        previous: Option<&Read<CollectionRecord>>,
        holds_before: Option<Revision>,
        record: &CollectionRecord,
    ) -> Result<Change, Error> {
        let mut transaction = if env.rules().fence_collector {
            self.term.compare(metadata::replace(COLLECTION_KEY, previous, record)?)
        } else {
            Transaction::new().put(COLLECTION_KEY, encode(record)?)
        };
        if env.rules().holds {
            transaction = match holds_before {
                Some(revision) => transaction.unchanged(HOLDS_KEY, revision),
                None => transaction.absent(HOLDS_KEY),
            };
        }
        Ok(metadata::transact(env, transaction).await)
    }
}

async fn delete<E: ObjectEnvironment>(
    env: &E,
    object: ObjectName,
) -> Result<(), crate::environment::Uncertain> {
    match object {
        ObjectName::Segment(segment) => env.objects().delete_segment(segment).await,
        ObjectName::Manifest(partition, manifest) => env.objects().delete_manifest(partition, manifest).await,
    }
}

/// Repeats a request until the store answers.
async fn until_answered<E, T, X, F>(env: &E, mut request: impl FnMut() -> F) -> T
where
    E: ObjectEnvironment,
    F: Future<Output = Result<T, X>>,
{
    loop {
        match request().await {
            Ok(answer) => return answer,
            Err(_) => retry::pause(env).await,
        }
    }
}

async fn metadata_revision<E: ObjectEnvironment>(env: &E, key: &str) -> Option<Revision> {
    until_answered(env, || env.metadata().get(key)).await.map(|entry| entry.modified)
}

/// The objects that living incarnations hold.
async fn holds<E: ObjectEnvironment>(env: &E) -> Result<BTreeSet<ObjectName>, Error> {
    let records = metadata::scan::<E, HoldRecord>(env, "hold/").await?;
    if records.is_empty() {
        return Ok(BTreeSet::new());
    }
    // After the holds: a holder that has ended by then has ended.
    let nodes = metadata::nodes(env).await?;
    let counting = records.into_iter().filter(|(_, hold)| hold.record.counts(nodes.get(&hold.record.node)));
    Ok(counting.flat_map(|(_, hold)| hold.record.objects).collect())
}

/// The segments that all living incarnations disown. A node that does not answer disowns none.
async fn promises<E: ObjectEnvironment>(
    env: &E,
    makers: &impl Makers,
    nodes: &BTreeMap<NodeId, NodeRecord>,
    mut segments: BTreeSet<SegmentName>,
) -> BTreeSet<SegmentName> {
    if !env.rules().disown {
        return segments;
    }
    for (node, record) in nodes.iter().filter(|(_, record)| record.state == NodeState::Alive) {
        if segments.is_empty() {
            break;
        }
        let asked = segments.iter().copied().collect();
        let disowned = makers.disowned(*node, record.incarnation, asked).await.unwrap_or_default();
        let disowned: BTreeSet<SegmentName> = disowned.into_iter().collect();
        segments.retain(|segment| disowned.contains(segment));
    }
    segments
}

/// Removes the segments that manifests name.
async fn name_again<E: ObjectEnvironment>(env: &E, segments: &mut BTreeSet<SegmentName>) {
    let mut after = None;
    while !segments.is_empty() {
        let listed = until_answered(env, || env.objects().manifests_after(after)).await;
        let Some((last, _)) = listed.last() else { return };
        after = Some(*last);
        for (_, stored) in &listed {
            remove_named(segments, stored);
        }
    }
}

/// Removes the segments that these manifests name, or may name.
fn remove_named(segments: &mut BTreeSet<SegmentName>, stored: &StoredManifests) {
    if stored.is_incomplete {
        segments.clear();
    }
    for segment in &stored.segments {
        segments.remove(segment);
    }
}

/// The segments without those that a manifest of an ended incarnation may still name, and those of
/// unknown makers.
async fn without_needed<E: ObjectEnvironment>(
    env: &E,
    nodes: &BTreeMap<NodeId, NodeRecord>,
    segments: BTreeSet<SegmentName>,
) -> Result<BTreeSet<SegmentName>, Error> {
    let mut records: BTreeMap<PartitionId, Option<PartitionRecord>> = BTreeMap::new();
    let mut rest = BTreeSet::new();
    'segments: for segment in segments {
        let SegmentName { node, incarnation, .. } = segment;
        let Some(maker) = nodes.get(&node).filter(|maker| incarnation <= maker.incarnation) else {
            continue;
        };
        let lives = maker.incarnation == incarnation && maker.state == NodeState::Alive;
        if !lives && env.rules().ended_makers {
            for partition in until_answered(env, || env.objects().contents(segment)).await {
                if let Entry::Vacant(unread) = records.entry(partition) {
                    let read = metadata::partition(env, partition).await?;
                    unread.insert(read.map(|read| read.record));
                }
                let mut ranges =
                    records.get(&partition).into_iter().flatten().flat_map(|record| &record.ranges);
                if ranges.any(|range| range.needs(node, incarnation)) {
                    continue 'segments;
                }
            }
        }
        rest.insert(segment);
    }
    Ok(rest)
}

/// The manifests of a partition that nothing needs. The flag of each states whether it is older
/// than the retention.
fn garbage(rules: &Rules, record: &PartitionRecord, manifests: &[(ManifestName, bool)]) -> Vec<ManifestName> {
    let named = manifests.iter().map(|(name, _)| *name).filter(|name| recovery::is_named(record, *name));
    let Some(newest) = named.max() else { return Vec::new() };
    let is_superseded = |name: ManifestName| match recovery::is_named(record, name) {
        true => name < newest,
        // A draft of a later epoch may become the base. Other manifests of later epochs were stored
        // by later owners.
        false => name.epoch <= record.epoch || (!name.is_draft && !rules.refuse_newer_epochs),
    };
    let old = manifests.iter().filter(|(_, is_old)| *is_old).map(|(name, _)| *name);
    old.filter(|name| is_superseded(*name) && record.base != Some(*name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LogKind, Position};

    fn manifest(epoch: u32, incarnation: Incarnation, covered: u64) -> ManifestName {
        ManifestName { epoch, incarnation, covered, node: NodeId(1), is_draft: false }
    }

    /// Node 1, incarnation 2 owns the partition in epoch 1.
    fn record() -> PartitionRecord {
        PartitionRecord::new(NodeId(1), LogKind::Shared, NEW)
    }

    fn chosen(record: &PartitionRecord, manifests: &[(ManifestName, bool)]) -> Vec<ManifestName> {
        garbage(&Rules::ALL, record, manifests)
    }

    const NEW: Position = Position { incarnation: 2, slot: 5 };

    #[test]
    fn superseded_manifest_is_kept_for_the_retention_and_if_it_is_the_base() {
        let (old, new) = (manifest(1, 1, 3), manifest(1, 2, 5));
        let mut record = record();
        assert_eq!(chosen(&record, &[(old, true), (new, true)]), [old]);
        assert_eq!(chosen(&record, &[(old, false), (new, false)]), [], "younger than the retention");
        record.base = Some(old);
        assert_eq!(chosen(&record, &[(old, true), (new, true)]), [], "the base");
    }

    #[test]
    fn draft_is_kept_until_it_cannot_become_the_base() {
        let draft = ManifestName { is_draft: true, ..manifest(2, 2, 5) };
        let mut record = record();
        let current = manifest(1, 2, 4);
        assert_eq!(chosen(&record, &[(current, true), (draft, true)]), [], "a restore is in progress");
        record = record.rebased(draft, LogKind::Shared, NEW);
        record.base = None;
        let manifests = [(current, true), (draft, true), (manifest(2, 2, 6), true)];
        assert!(chosen(&record, &manifests).contains(&draft), "the restore was overtaken");
    }

    #[test]
    fn nothing_is_garbage_before_the_first_manifest() {
        assert_eq!(chosen(&record(), &[(manifest(7, 1, 1), true)]), [], "no manifest may be used yet");
    }

    #[test]
    fn covered_record_has_one_range() {
        let (dead, here) = (Position { incarnation: 1, slot: 9 }, Position { incarnation: 4, slot: 0 });
        let moved = record().moved(NEW, dead, NodeId(2), here, true);
        assert_eq!((moved.ranges.len(), moved.is_covered(4)), (2, false));
        let restarted = Position { incarnation: 5, slot: 0 };
        let covered = moved.covered(None, restarted);
        assert_eq!((covered.ranges.len(), covered.ranges[0].from), (1, restarted));
        assert!(covered.is_covered(5) && !covered.is_covered(6));
        assert_eq!(covered.covered(None, here), covered, "a range never grows");
    }
}
