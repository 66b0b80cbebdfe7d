//! The environment of the protocols: clocks, randomness, the metadata store, the objects of logs
//! and partitions, and the node's data directory. The server passes the real ones, the simulator
//! its models.

use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_meta::MetadataStore;
use fulmar_pages::PartitionId;

use crate::directory::DataDirectory;
use crate::{LogId, ManifestName, Position, Rules, SegmentName};

/// The contents of a log slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Commits and other records.
    Records {
        /// Before this position, every record of a partition that the node owns is in a manifest.
        kept_from: Position,
        /// The records, in the format of the log.
        body: Vec<u8>,
    },
    /// The log ends at this slot or before it.
    Seal,
}

/// A request to the store failed. It may have been carried out, or may still be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uncertain;

/// The objects of the logs. A local log can be read only by its node, and is never sealed.
#[async_trait]
pub trait LogObjects: Send + Sync {
    /// Creates a slot. Returns false if it exists already.
    async fn create(&self, log: LogId, slot: u64, contents: Slot) -> Result<bool, Uncertain>;

    /// The contents of a slot; `None` if it does not exist.
    async fn read(&self, log: LogId, slot: u64) -> Result<Option<Slot>, Uncertain>;

    /// The slots that exist, ascending.
    async fn list(&self, log: LogId) -> Result<Vec<u64>, Uncertain>;

    /// Creates a seal which states that no slot of the log is needed. Returns false if the slot
    /// exists already.
    async fn create_end_mark(&self, log: LogId, slot: u64) -> Result<bool, Uncertain>;

    /// Deletes a slot, if it exists.
    async fn delete(&self, log: LogId, slot: u64) -> Result<(), Uncertain>;
}

/// The manifests of one partition in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredManifests {
    /// Their names, and whether each is older than the retention: by the store's clock, it was
    /// superseded before the retention period began.
    pub manifests: Vec<(ManifestName, bool)>,
    /// The segments that any of them names.
    pub segments: Vec<SegmentName>,
    /// A manifest of this listing could not be read: it may name other segments.
    pub is_incomplete: bool,
}

/// The segments and manifests of partitions.
///
/// Partitions are listed in the order of their ids. A manifest that is derived from one of another
/// partition (a branch) belongs to a partition with a greater id, and exists while the other one
/// does: a listing contains one of them.
#[async_trait]
pub trait PartitionObjects: Send + Sync {
    /// All segments.
    async fn segments(&self) -> Result<Vec<SegmentName>, Uncertain>;

    /// The partitions whose pages a segment contains.
    async fn contents(&self, segment: SegmentName) -> Result<Vec<PartitionId>, Uncertain>;

    /// The manifests of the next few partitions with ids above `after`, by id; none at the end.
    async fn manifests_after(
        &self,
        after: Option<PartitionId>,
    ) -> Result<Vec<(PartitionId, StoredManifests)>, Uncertain>;

    /// Returns true if the segment exists.
    async fn has_segment(&self, segment: SegmentName) -> Result<bool, Uncertain>;

    /// Returns true if the manifest exists.
    async fn has_manifest(&self, partition: PartitionId, manifest: ManifestName) -> Result<bool, Uncertain>;

    /// Deletes a segment, if it exists.
    async fn delete_segment(&self, segment: SegmentName) -> Result<(), Uncertain>;

    /// Deletes a manifest, if it exists.
    async fn delete_manifest(&self, partition: PartitionId, manifest: ManifestName) -> Result<(), Uncertain>;
}

/// The environment that a protocol runs in.
pub trait Environment: Clone + Send + Sync + 'static {
    /// CLOCK_BOOTTIME: a clock that continues while the machine is suspended, and is never set.
    fn now(&self) -> Duration;

    /// CLOCK_REALTIME, since 1970. It may be set, forwards and backwards.
    fn unix_time(&self) -> Duration;

    /// Completes after `duration`.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// A random duration up to `max`, to spread retries.
    fn jitter(&self, max: Duration) -> Duration;

    /// The metadata store.
    fn metadata(&self) -> &dyn MetadataStore;

    /// The logs.
    fn logs(&self) -> &dyn LogObjects;

    /// This node's data directory.
    fn directory(&self) -> &dyn DataDirectory;

    /// The rules in force.
    fn rules(&self) -> &Rules;
}

/// An environment that also reaches the objects of partitions, for garbage collection.
pub trait ObjectEnvironment: Environment {
    /// The segments and manifests.
    fn objects(&self) -> &dyn PartitionObjects;
}
