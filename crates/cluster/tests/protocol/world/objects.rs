//! A model of the object store, and of local logs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::environment::{
    Environment, LogObjects, PartitionObjects, Slot, StoredManifest, Uncertain,
};
use fulmar_cluster::{LogId, LogKind, ManifestName, SegmentName, recovery};
use fulmar_pages::PartitionId;

use super::{Env, Service};
use crate::partition::Segment;
use crate::violation::Kind;

/// Manifests are deleted when they are older than this.
pub const RETENTION: Duration = Duration::from_millis(1500);

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
}

#[async_trait]
impl PartitionObjects for Env {
    async fn segments(&self, partition: PartitionId) -> Result<Vec<SegmentName>, Uncertain> {
        let list = move |all: &mut super::Contents| {
            let names = all.objects.segments.keys();
            names.filter(|name| name.partition == partition).copied().collect()
        };
        self.request(Service::Objects, list).await
    }

    async fn manifests(&self, partition: PartitionId) -> Result<Vec<StoredManifest>, Uncertain> {
        // Without the rule, ages are the difference between the clocks of two processes.
        let unix_time = (!self.world.rules.store_clock).then(|| self.unix_time());
        let simulation = self.world.simulation.clone();
        let list = move |all: &mut super::Contents| {
            let now = simulation.now();
            let listed = all.objects.of_partition(partition).map(|stored| StoredManifest {
                name: stored.manifest.name,
                segments: stored.manifest.segments.clone(),
                age: match unix_time {
                    Some(unix_time) => unix_time.saturating_sub(stored.unix_time),
                    None => now - stored.at,
                },
            });
            listed.collect()
        };
        self.request(Service::Objects, list).await
    }

    async fn delete_segment(&self, segment: SegmentName) -> Result<(), Uncertain> {
        let world = self.world.clone();
        let delete = move |all: &mut super::Contents| {
            let newest = all.newest(segment.partition);
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

/// The longest pause before a deletion.
const MAX_DELETE_PAUSE: Duration = Duration::from_millis(60);

impl Env {
    /// Deletions are throttled.
    async fn throttle(&self) {
        let simulation = &self.world.simulation;
        simulation.sleep(simulation.delay(Duration::ZERO, MAX_DELETE_PAUSE)).await;
    }

    pub async fn delete_slot(&self, log: LogId, slot: u64) -> Result<(), Uncertain> {
        let delete = move |all: &mut super::Contents| {
            all.objects.logs.remove(&(log, slot));
        };
        self.request(Service::Objects, delete).await
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
