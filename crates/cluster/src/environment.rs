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
}

/// A manifest in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredManifest {
    /// Its name.
    pub name: ManifestName,
    /// The segments that it names.
    pub segments: Vec<SegmentName>,
    /// How long it has been stored, by the store's clock.
    pub age: Duration,
}

/// The segments and manifests of partitions.
#[async_trait]
pub trait PartitionObjects: Send + Sync {
    /// The partition's segments.
    async fn segments(&self, partition: PartitionId) -> Result<Vec<SegmentName>, Uncertain>;

    /// The partition's manifests.
    async fn manifests(&self, partition: PartitionId) -> Result<Vec<StoredManifest>, Uncertain>;

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
