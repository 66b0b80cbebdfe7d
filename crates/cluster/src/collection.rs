//! Garbage collection: deletes segments and manifests that nothing needs.
//!
//! An object store cannot fence a deletion: a collector that was paused, or a request that was
//! delayed, still deletes after another node was elected. Safety therefore rests on two properties,
//! not on the election:
//!
//! - **A decision stays right for ever.** An object is chosen only if nothing can need it again.
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
//! A **segment**, if no manifest that is kept names it, and none will. The owner of a partition
//! derives its manifests from its newest one, and from segments that it wrote itself (a segment
//! that it has dropped never returns to its list). So a manifest can name a segment that no stored
//! manifest names only if the segment's maker stores that manifest. It will not if
//! - the maker's incarnation lives and *disowns* the segment: it promises never to name it, and no
//!   manifest that names it is on its way; or
//! - the maker's incarnation has ended, and no range of the partition needs its log. Any manifest
//!   of that incarnation that arrives now is older than the newest one.
//!
//! # Order
//! List the segments; read the partition's and the nodes' records; ask for the promises; list the
//! manifests; read the holds; choose; register; delete. A promise concerns the future, the list the
//! past, so the list comes after the promises. A manifest in the list whose epoch is above the
//! record's was written by a later owner, or the metadata store was restored from an old backup:
//! the record is read again, and if it still is older, nothing is deleted
//! ([`Error::RecordTooOld`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fulmar_meta::{Revision, Transaction};
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

use crate::election::Term;
use crate::environment::{ObjectEnvironment, StoredManifest};
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
    /// Asks a living incarnation which of these segments, which it wrote, it disowns. `None`: no
    /// answer.
    fn disowned(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        segments: Vec<SegmentName>,
    ) -> impl Future<Output = Option<Vec<SegmentName>>> + Send;
}

/// How a collection of one partition ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This number of objects was deleted.
    Collected(usize),
    /// The partition was changing; nothing was deleted.
    Skipped,
    /// Another node is the collector.
    Deposed,
}

/// The collector of one term.
#[derive(Debug)]
pub struct Collector {
    term: Term,
    retention: Duration,
    /// The batch of this revision of the record has been deleted.
    deleted: Option<Revision>,
}

/// What was observed of a partition, in the order of the fields.
struct Observed {
    segments: Vec<SegmentName>,
    record: PartitionRecord,
    nodes: BTreeMap<NodeId, NodeRecord>,
    disowned: BTreeSet<SegmentName>,
    manifests: Vec<StoredManifest>,
    held: BTreeSet<ObjectName>,
}

impl Collector {
    /// A collector that has just been elected. Manifests younger than `retention` are kept.
    pub fn new(term: Term, retention: Duration) -> Collector {
        Collector { term, retention, deleted: None }
    }

    /// Deletes the garbage of one partition.
    pub async fn collect<E: ObjectEnvironment>(
        &mut self,
        env: &E,
        makers: &impl Makers,
        partition: PartitionId,
    ) -> Result<Outcome, Error> {
        let previous = self.finish(env).await?;
        let segments = until_answered(env, || env.objects().segments(partition)).await;
        let Some(read) = metadata::partition(env, partition).await? else { return Ok(Outcome::Skipped) };
        let nodes = nodes(env).await?;
        let (disowned, manifests) = if env.rules().promise_first {
            let disowned = promises(env, makers, &nodes, &segments).await;
            (disowned, until_answered(env, || env.objects().manifests(partition)).await)
        } else {
            let manifests = until_answered(env, || env.objects().manifests(partition)).await;
            (promises(env, makers, &nodes, &segments).await, manifests)
        };
        let stored = manifests.iter().filter(|manifest| !manifest.name.is_draft);
        let stored = stored.map(|manifest| manifest.name.epoch).max().unwrap_or(0);
        if stored > read.record.epoch && env.rules().refuse_newer_epochs {
            let now = metadata::partition(env, partition).await?.map_or(0, |now| now.record.epoch);
            if stored > now {
                return Err(Error::RecordTooOld { partition, stored, recorded: now });
            }
            return Ok(Outcome::Skipped);
        }
        let holds_before = metadata_revision(env, HOLDS_KEY).await;
        let held = holds(env, &nodes).await?;
        let observed = Observed { segments, record: read.record, nodes, disowned, manifests, held };
        let mut batch = garbage(env.rules(), partition, &observed, self.retention);
        batch.truncate(MAX_BATCH_OBJECTS);
        if batch.is_empty() {
            return Ok(Outcome::Collected(0));
        }
        let record = CollectionRecord { v: VERSION, term: self.term.number(), batch };
        match self.register(env, previous.as_ref(), holds_before, &record).await? {
            Change::Applied => {
                self.finish(env).await?;
                Ok(Outcome::Collected(record.batch.len()))
            }
            // If it was applied, the next collection deletes the batch.
            Change::Unknown => Ok(Outcome::Skipped),
            Change::Conflict => {
                let now = metadata::read::<E, CollectionRecord>(env, COLLECTION_KEY).await?;
                let is_deposed = now.is_some_and(|now| now.record.term > self.term.number());
                Ok(if is_deposed { Outcome::Deposed } else { Outcome::Skipped })
            }
        }
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

async fn nodes<E: ObjectEnvironment>(env: &E) -> Result<BTreeMap<NodeId, NodeRecord>, Error> {
    let records = metadata::scan::<E, NodeRecord>(env, "node/").await?.into_iter();
    let node = |key: &str| u32::from_str_radix(key.strip_prefix("node/")?, 16).ok().map(NodeId);
    Ok(records.filter_map(|(key, read)| Some((node(&key)?, read.record))).collect())
}

/// The objects that living incarnations hold.
async fn holds<E: ObjectEnvironment>(
    env: &E,
    nodes: &BTreeMap<NodeId, NodeRecord>,
) -> Result<BTreeSet<ObjectName>, Error> {
    let records = metadata::scan::<E, HoldRecord>(env, "hold/").await?.into_iter();
    let counting = records.filter(|(_, hold)| hold.record.counts(nodes.get(&hold.record.node)));
    Ok(counting.flat_map(|(_, hold)| hold.record.objects).collect())
}

/// The segments that their living makers disown.
async fn promises<E: ObjectEnvironment>(
    env: &E,
    makers: &impl Makers,
    nodes: &BTreeMap<NodeId, NodeRecord>,
    segments: &[SegmentName],
) -> BTreeSet<SegmentName> {
    let mut by_maker: BTreeMap<(NodeId, Incarnation), Vec<SegmentName>> = BTreeMap::new();
    for segment in segments.iter().filter(|segment| lives(nodes, segment.node, segment.incarnation)) {
        by_maker.entry((segment.node, segment.incarnation)).or_default().push(*segment);
    }
    let mut disowned = BTreeSet::new();
    for ((node, incarnation), segments) in by_maker {
        if env.rules().disown {
            disowned.extend(makers.disowned(node, incarnation, segments).await.into_iter().flatten());
        } else {
            disowned.extend(segments);
        }
    }
    disowned
}

fn lives(nodes: &BTreeMap<NodeId, NodeRecord>, node: NodeId, incarnation: Incarnation) -> bool {
    let record = nodes.get(&node);
    record.is_some_and(|record| record.incarnation == incarnation && record.state == NodeState::Alive)
}

/// The objects of a partition that nothing needs.
fn garbage(
    rules: &Rules,
    partition: PartitionId,
    observed: &Observed,
    retention: Duration,
) -> Vec<ObjectName> {
    let Observed { segments, record, nodes, disowned, manifests, held } = observed;
    let named =
        manifests.iter().map(|manifest| manifest.name).filter(|name| recovery::is_named(record, *name));
    let newest = named.max();
    let is_garbage = |manifest: &&StoredManifest| {
        let name = manifest.name;
        let is_superseded = match newest {
            Some(newest) if recovery::is_named(record, name) => name < newest,
            // A draft of a later epoch may become the base. Other manifests of later epochs were
            // stored by later owners.
            _ => name.epoch <= record.epoch || (!name.is_draft && !rules.refuse_newer_epochs),
        };
        let is_held = held.contains(&ObjectName::Manifest(partition, name));
        newest.is_some()
            && is_superseded
            && record.base != Some(name)
            && manifest.age >= retention
            && !is_held
    };
    let (deleted, kept): (Vec<_>, Vec<_>) = manifests.iter().partition(is_garbage);
    let named: BTreeSet<_> = kept.iter().flat_map(|manifest| &manifest.segments).collect();
    let is_garbage = |segment: &&SegmentName| {
        let SegmentName { node, incarnation, .. } = **segment;
        let is_needed_by_range = record.ranges.iter().any(|range| range.needs(node, incarnation));
        let never_named = if lives(nodes, node, incarnation) {
            disowned.contains(segment)
        } else {
            let has_ended = nodes.get(&node).is_some_and(|record| incarnation <= record.incarnation);
            has_ended && (!is_needed_by_range || !rules.ended_makers)
        };
        never_named && !named.contains(segment) && !held.contains(&ObjectName::Segment(**segment))
    };
    let manifests = deleted.into_iter().map(|manifest| ObjectName::Manifest(partition, manifest.name));
    manifests.chain(segments.iter().filter(is_garbage).map(|segment| ObjectName::Segment(*segment))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LogKind, Position};

    const P: PartitionId = PartitionId(1);
    const HOUR: Duration = Duration::from_secs(3600);

    fn segment(incarnation: Incarnation, number: u64) -> SegmentName {
        SegmentName { partition: P, node: NodeId(1), incarnation, number }
    }

    fn manifest(
        epoch: u32,
        incarnation: Incarnation,
        covered: u64,
        segments: &[SegmentName],
    ) -> StoredManifest {
        let name = ManifestName { epoch, incarnation, covered, node: NodeId(1), is_draft: false };
        StoredManifest { name, segments: segments.to_vec(), age: HOUR * 2 }
    }

    /// Node 1, incarnation 2 owns the partition in epoch 1. Its first incarnation's log is needed
    /// from `from` on.
    fn observed(from: Position, segments: &[SegmentName], manifests: Vec<StoredManifest>) -> Observed {
        Observed {
            segments: segments.to_vec(),
            record: PartitionRecord::new(NodeId(1), LogKind::Shared, from),
            nodes: [(NodeId(1), NodeRecord::new(2, NodeState::Alive, 0))].into(),
            disowned: BTreeSet::new(),
            manifests,
            held: BTreeSet::new(),
        }
    }

    fn chosen(observed: &Observed) -> Vec<ObjectName> {
        garbage(&Rules::ALL, P, observed, HOUR)
    }

    const OLD: Position = Position { incarnation: 1, slot: 0 };
    const NEW: Position = Position { incarnation: 2, slot: 5 };

    #[test]
    fn superseded_manifest_is_kept_for_the_retention_and_while_it_is_held_or_the_base() {
        let (old, new) = (manifest(1, 1, 3, &[]), manifest(1, 2, 5, &[]));
        let mut observed = observed(NEW, &[], vec![old.clone(), new]);
        let old = ObjectName::Manifest(P, old.name);
        assert_eq!(chosen(&observed), [old]);
        observed.held.insert(old);
        assert_eq!(chosen(&observed), [], "held");
        observed.held.clear();
        observed.manifests[0].age = HOUR / 2;
        assert_eq!(chosen(&observed), [], "younger than the retention");
        observed.manifests[0].age = HOUR;
        observed.record.base = Some(observed.manifests[0].name);
        assert_eq!(chosen(&observed), [], "the base");
    }

    #[test]
    fn draft_is_kept_until_it_cannot_become_the_base() {
        let mut draft = manifest(2, 2, 5, &[]);
        draft.name.is_draft = true;
        let mut observed = observed(NEW, &[], vec![manifest(1, 2, 4, &[]), draft.clone()]);
        assert_eq!(chosen(&observed), [], "a restore is in progress");
        observed.record = observed.record.rebased(draft.name, LogKind::Shared, NEW);
        observed.record.base = None;
        observed.manifests.push(manifest(2, 2, 6, &[]));
        let superseded = ObjectName::Manifest(P, draft.name);
        assert!(chosen(&observed).contains(&superseded), "the restore was overtaken");
    }

    #[test]
    fn nothing_is_garbage_before_the_first_manifest() {
        let observed = observed(NEW, &[segment(1, 1)], vec![]);
        assert_eq!(chosen(&observed), [ObjectName::Segment(segment(1, 1))], "its log is not needed");
        let observed = self::observed(OLD, &[segment(1, 1)], vec![manifest(7, 1, 1, &[])]);
        assert_eq!(chosen(&observed), [], "no manifest may be used yet");
    }

    #[test]
    fn unnamed_segment_waits_for_its_maker() {
        let segments = [segment(1, 1), segment(2, 1), segment(2, 2), segment(3, 1)];
        let mut observed = observed(OLD, &segments, vec![manifest(1, 2, 5, &[segment(2, 2)])]);
        assert_eq!(chosen(&observed), [], "the first incarnation's log is needed, the second lives");
        observed.disowned.extend([segment(2, 1), segment(2, 2)]);
        assert_eq!(chosen(&observed), [ObjectName::Segment(segment(2, 1))], "one is named");
        observed.record.ranges[0].from = NEW;
        let garbage = [segment(1, 1), segment(2, 1)].map(ObjectName::Segment);
        assert_eq!(chosen(&observed), garbage, "the maker of another one is not known");
    }
}
