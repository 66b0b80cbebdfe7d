//! What a node needs from its engine and its gateway.

use std::sync::Arc;

use async_trait::async_trait;
use fulmar_engine::{Engine, Result};
use fulmar_gateway::cluster::TransactionOutcome;
use fulmar_pages::PartitionId;
use fulmar_store::LogPosition;
use fulmar_transport::Stream;

/// The partitions of a node: its engine.
#[async_trait]
pub trait Partitions: Send + Sync + 'static {
    /// Opens and flushes a partition, refuses new statements and commits, and writes a durable
    /// `release` record. Returns the position after it.
    async fn release(&self, partition: PartitionId) -> Result<LogPosition>;

    /// Accepts statements for a released partition again.
    async fn take_back(&self, partition: PartitionId) -> Result<()>;

    /// Closes a released partition that another node owns now.
    fn give_up(&self, partition: PartitionId);

    /// Drops a partition.
    async fn drop_partition(&self, partition: PartitionId) -> Result<()>;

    /// Reports what became of a transaction. One that was not committed cannot be any more.
    async fn outcome(&self, partition: PartitionId, transaction: u64) -> Result<TransactionOutcome>;

    /// Completes when the shared log was sealed by another process.
    async fn fenced(&self);
}

/// Serves a session that another node relays.
pub type SessionHandler = Arc<dyn Fn(Stream) + Send + Sync>;

/// The engine of a node.
pub struct EnginePartitions(Arc<Engine>);

impl EnginePartitions {
    /// The partitions of this engine.
    pub fn new(engine: Arc<Engine>) -> Self {
        EnginePartitions(engine)
    }
}

fn not_yet<T>() -> Result<T> {
    Err(fulmar_engine::Error::new(fulmar_engine::sqlstate::FEATURE_NOT_SUPPORTED, "not yet"))
}

#[async_trait]
impl Partitions for EnginePartitions {
    async fn release(&self, _partition: PartitionId) -> Result<LogPosition> {
        not_yet()
    }

    async fn take_back(&self, _partition: PartitionId) -> Result<()> {
        Ok(())
    }

    fn give_up(&self, _partition: PartitionId) {}

    async fn drop_partition(&self, partition: PartitionId) -> Result<()> {
        self.0.drop_partition(partition).await
    }

    async fn outcome(&self, _partition: PartitionId, _transaction: u64) -> Result<TransactionOutcome> {
        not_yet()
    }

    async fn fenced(&self) {
        std::future::pending().await
    }
}
