//! A model of the object store, and of local logs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::environment::{
    Environment, LogObjects, PartitionObjects, Slot, StoredManifests, Uncertain,
};
use fulmar_cluster::{LogId, LogKind, ManifestName, NodeId, SegmentName, recovery};
use fulmar_pages::PartitionId;

use super::{Env, Service};
use crate::partition::Segment;
use crate::violation::Kind;

/// Manifests are deleted when they are older than this.
pub const RETENTION: Duration = Duration::from_millis(1500);

/// Names a segment of a partition.
pub fn segment_name(partition: PartitionId, node: NodeId, incarnation: u64, number: u64) -> SegmentName {
    SegmentName { node, incarnation, number: u128::from(partition.0) << 64 | u128::from(number) }
}

fn partition_of(segment: SegmentName) -> PartitionId {
    PartitionId((segment.number >> 64) as u64)
}

/// A manifest: the segments that make up a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub name: ManifestName,
    pub segments: Vec<SegmentName>,
}

#[derive(Clone, Debug)]
struct Stored {
    manifest: Manifest,
    at: Duration,
    /// By the clock of the process that stored it.
    unix_time: Duration,
}

#[derive(Default)]
pub struct Contents {
    logs: BTreeMap<(LogId, u64), Slot>,
    segments: BTreeMap<SegmentName, Arc<Segment>>,
    manifests: BTreeMap<(PartitionId, ManifestName), Stored>,
    /// When each manifest was stored first. A late request may store it again after its deletion.
    first_stored: BTreeMap<(PartitionId, ManifestName), Duration>,
}

impl Contents {
    pub fn describe(&self) -> Vec<String> {
        let logs = self.logs.iter().map(|((log, slot), contents)| format!("{log:?} {slot} {contents:?}"));
        let segments = self.segments.iter().map(|(name, segment)| format!("{name:?} {segment:?}"));
        let manifests = self.manifests.iter().map(|(key, stored)| format!("{key:?} {stored:?}"));
        logs.chain(segments).chain(manifests).collect()
    }

    pub fn segment(&self, name: SegmentName) -> Option<Arc<Segment>> {
        self.segments.get(&name).cloned()
    }

    fn of_partition(&self, partition: PartitionId) -> impl Iterator<Item = &Stored> {
        let of_partition = self.manifests.iter().filter(move |((id, _), _)| *id == partition);
        of_partition.map(|(_, stored)| stored)
    }

    /// The slots of a log.
    fn slots(&self, log: LogId) -> Vec<u64> {
        self.logs.range((log, 0)..=(log, u64::MAX)).map(|((_, slot), _)| *slot).collect()
    }
}

impl super::Contents {
    /// The manifest that recovery starts from.
    fn newest(&self, partition: PartitionId) -> Option<&Stored> {
        let record = self.partition_record(partition)?;
        let stored = self.objects.of_partition(partition);
        let named = stored.filter(|stored| recovery::is_named(&record, stored.manifest.name));
        named.max_by_key(|stored| stored.manifest.name)
    }
}

#[async_trait]
impl LogObjects for Env {
    async fn create(&self, log: LogId, slot: u64, contents: Slot) -> Result<bool, Uncertain> {
        if log.kind == LogKind::Local {
            self.write(|directory| directory.logs.insert((log, slot), contents)).await;
            return Ok(true);
        }
        let only_if_absent = self.world.rules.create_if_absent;
        let create = move |all: &mut super::Contents| {
            if only_if_absent && all.objects.logs.contains_key(&(log, slot)) {
                return false;
            }
            all.objects.logs.insert((log, slot), contents.clone());
            true
        };
        self.request(Service::Objects, create).await
    }

    async fn read(&self, log: LogId, slot: u64) -> Result<Option<Slot>, Uncertain> {
        if log.kind == LogKind::Local {
            return Ok(self.directory.lock().logs.get(&(log, slot)).cloned());
        }
        self.request(Service::Objects, move |all| all.objects.logs.get(&(log, slot)).cloned()).await
    }

    async fn list(&self, log: LogId) -> Result<Vec<u64>, Uncertain> {
        if log.kind == LogKind::Local {
            let directory = self.directory.lock();
            let slots = directory.logs.range((log, 0)..=(log, u64::MAX));
            return Ok(slots.map(|((_, slot), _)| *slot).collect());
        }
        self.request(Service::Objects, move |all| all.objects.slots(log)).await
    }

    async fn create_end_mark(&self, log: LogId, slot: u64) -> Result<bool, Uncertain> {
        self.create(log, slot, Slot::Seal).await
    }

    async fn delete(&self, log: LogId, slot: u64) -> Result<(), Uncertain> {
        let delete = move |all: &mut super::Contents| {
            all.objects.logs.remove(&(log, slot));
        };
        self.request(Service::Objects, delete).await
    }
}

#[async_trait]
impl PartitionObjects for Env {
    async fn segments(&self) -> Result<Vec<SegmentName>, Uncertain> {
        self.request(Service::Objects, |all| all.objects.segments.keys().copied().collect()).await
    }

    async fn contents(&self, segment: SegmentName) -> Result<Vec<PartitionId>, Uncertain> {
        self.request(Service::Objects, move |_| vec![partition_of(segment)]).await
    }

    async fn manifests_after(
        &self,
        after: Option<PartitionId>,
    ) -> Result<Vec<(PartitionId, StoredManifests)>, Uncertain> {
        let simulation = &self.world.simulation;
        if self.world.is_listing_slow {
            simulation.sleep(simulation.delay(Duration::ZERO, MAX_LIST_PAUSE)).await;
        }
        // Without the rule, ages are the difference between the clocks of two processes.
        let unix_time = (!self.world.rules.store_clock).then(|| self.unix_time());
        let simulation = self.world.simulation.clone();
        let list = move |all: &mut super::Contents| {
            let now = simulation.now();
            let mut stored = all.objects.manifests.keys().map(|(id, _)| *id);
            let Some(partition) = stored.find(|id| Some(*id) > after) else { return Vec::new() };
            let mut listed = StoredManifests::default();
            for stored in all.objects.of_partition(partition) {
                let age = match unix_time {
                    Some(unix_time) => unix_time.saturating_sub(stored.unix_time),
                    None => now - stored.at,
                };
                listed.manifests.push((stored.manifest.name, age >= RETENTION));
                listed.segments.extend(&stored.manifest.segments);
            }
            vec![(partition, listed)]
        };
        self.request(Service::Objects, list).await
    }

    async fn has_segment(&self, segment: SegmentName) -> Result<bool, Uncertain> {
        self.request(Service::Objects, move |all| all.objects.segments.contains_key(&segment)).await
    }

    async fn has_manifest(&self, partition: PartitionId, manifest: ManifestName) -> Result<bool, Uncertain> {
        let exists =
            move |all: &mut super::Contents| all.objects.manifests.contains_key(&(partition, manifest));
        self.request(Service::Objects, exists).await
    }

    async fn delete_segment(&self, segment: SegmentName) -> Result<(), Uncertain> {
        let world = self.world.clone();
        let delete = move |all: &mut super::Contents| {
            let newest = all.newest(partition_of(segment));
            let is_needed = newest.is_some_and(|newest| newest.manifest.segments.contains(&segment));
            if is_needed && all.objects.segments.contains_key(&segment) {
                world.violation(Kind::MissingSegment, format!("{segment:?} was deleted, but is needed"));
            }
            all.objects.segments.remove(&segment);
        };
        self.throttle().await;
        self.request(Service::Objects, delete).await
    }

    async fn delete_manifest(&self, partition: PartitionId, manifest: ManifestName) -> Result<(), Uncertain> {
        let world = self.world.clone();
        let delete = move |all: &mut super::Contents| {
            let is_newest = all.newest(partition).is_some_and(|newest| newest.manifest.name == manifest);
            if all.objects.manifests.remove(&(partition, manifest)).is_none() {
                return;
            }
            world.simulation.note(|| format!("deletion of {partition}: {manifest:?}"));
            let age = world.simulation.now() - all.objects.first_stored[&(partition, manifest)];
            if is_newest || age < RETENTION {
                let text = format!("{manifest:?} of partition {partition}, {age:?} old, was deleted");
                world.violation(Kind::MissingManifest, text);
            }
        };
        self.throttle().await;
        self.request(Service::Objects, delete).await
    }
}

/// The longest pause before a chunk of a listing.
const MAX_LIST_PAUSE: Duration = Duration::from_millis(800);

/// The longest pause before a deletion.
const MAX_DELETE_PAUSE: Duration = Duration::from_millis(60);

impl Env {
    /// Deletions are throttled.
    async fn throttle(&self) {
        let simulation = &self.world.simulation;
        simulation.sleep(simulation.delay(Duration::ZERO, MAX_DELETE_PAUSE)).await;
    }

    /// The manifests of a partition.
    pub async fn manifests(&self, partition: PartitionId) -> Result<Vec<Manifest>, Uncertain> {
        let list = move |all: &mut super::Contents| {
            all.objects.of_partition(partition).map(|stored| stored.manifest.clone()).collect()
        };
        self.request(Service::Objects, list).await
    }

    pub async fn put_segment(&self, name: SegmentName, segment: Segment) -> Result<(), Uncertain> {
        let segment = Arc::new(segment);
        let put = move |all: &mut super::Contents| {
            all.objects.segments.insert(name, segment.clone());
        };
        self.request(Service::Objects, put).await
    }

    pub async fn segment(&self, name: SegmentName) -> Result<Option<Arc<Segment>>, Uncertain> {
        self.request(Service::Objects, move |all| all.objects.segment(name)).await
    }

    /// Stores a manifest, unless one of the same name exists.
    pub async fn put_manifest(&self, partition: PartitionId, manifest: Manifest) -> Result<(), Uncertain> {
        let (simulation, unix_time) = (self.world.simulation.clone(), self.unix_time());
        let put = move |all: &mut super::Contents| {
            let at = simulation.now();
            simulation.note(|| format!("put of {partition}: {manifest:?}"));
            let stored = || Stored { manifest: manifest.clone(), at, unix_time };
            all.objects.manifests.entry((partition, manifest.name)).or_insert_with(stored);
            all.objects.first_stored.entry((partition, manifest.name)).or_insert(at);
        };
        self.request(Service::Objects, put).await
    }
}
