//! The environment of the protocols: a clock, randomness, the metadata store and the log objects.
//! The server passes the real ones, the simulator its models.

use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_meta::MetadataStore;

use crate::{LogId, Position, Rules};

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

/// The objects of the shared logs.
#[async_trait]
pub trait LogObjects: Send + Sync {
    /// Creates a slot. Returns false if it exists already.
    async fn create(&self, log: LogId, slot: u64, contents: Slot) -> Result<bool, Uncertain>;

    /// The contents of a slot; `None` if it does not exist.
    async fn read(&self, log: LogId, slot: u64) -> Result<Option<Slot>, Uncertain>;

    /// The slots that exist, ascending.
    async fn list(&self, log: LogId) -> Result<Vec<u64>, Uncertain>;
}

/// The environment that a protocol runs in.
pub trait Environment: Clone + Send + Sync + 'static {
    /// CLOCK_BOOTTIME, or virtual time.
    fn now(&self) -> Duration;

    /// Completes after `duration`.
    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// A random duration up to `max`, to spread retries.
    fn jitter(&self, max: Duration) -> Duration;

    /// The metadata store.
    fn metadata(&self) -> &dyn MetadataStore;

    /// The shared logs.
    fn logs(&self) -> &dyn LogObjects;

    /// The rules in force.
    fn rules(&self) -> &Rules;
}
