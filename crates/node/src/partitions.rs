//! What a node needs from its engine and its gateway.

use std::sync::Arc;

use async_trait::async_trait;
use fulmar_engine::{CommonStore, Engine, Result};
use fulmar_gateway::cluster::TransactionOutcome;
use fulmar_pages::{PartitionId, SegmentId};
use fulmar_store::LogPosition;
use fulmar_transport::Stream;

/// The partitions of a node: its engine.
#[async_trait]
pub trait Partitions: Send + Sync + 'static {
    /// Opens and flushes a partition, refuses new statements and commits, and writes a durable
    /// `release` record. Returns the position after it.
    async fn release(&self, partition: PartitionId) -> Result<LogPosition>;

    /// Stores a manifest of a partition in this incarnation, unless it has no contents.
    async fn cover(&self, partition: PartitionId) -> Result<()>;

    /// Accepts statements for a released partition again.
    async fn take_back(&self, partition: PartitionId) -> Result<()>;

    /// Closes a released partition that another node owns now.
    fn give_up(&self, partition: PartitionId);

    /// Drops a partition.
    async fn drop_partition(&self, partition: PartitionId) -> Result<()>;

    /// Reports what became of a transaction. One that was not committed cannot be any more.
    async fn outcome(&self, partition: PartitionId, transaction: u64) -> Result<TransactionOutcome>;

    /// Returns those of these segments that this node does not need, and promises not to name them
    /// in a manifest.
    async fn disowned(&self, segments: Vec<SegmentId>) -> Vec<SegmentId>;

    /// The objects in the common store.
    fn common_store(&self) -> CommonStore;

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

#[async_trait]
impl Partitions for EnginePartitions {
    async fn release(&self, partition: PartitionId) -> Result<LogPosition> {
        self.0.release(partition).await
    }

    async fn cover(&self, partition: PartitionId) -> Result<()> {
        self.0.cover(partition).await
    }

    async fn take_back(&self, partition: PartitionId) -> Result<()> {
        self.0.take_back(partition).await
    }

    fn give_up(&self, partition: PartitionId) {
        self.0.give_up(partition);
    }

    async fn drop_partition(&self, partition: PartitionId) -> Result<()> {
        self.0.drop_partition(partition).await
    }

    async fn outcome(&self, partition: PartitionId, transaction: u64) -> Result<TransactionOutcome> {
        Ok(match self.0.outcome(partition, transaction).await? {
            fulmar_engine::TransactionOutcome::Ended(true) => TransactionOutcome::Committed,
            fulmar_engine::TransactionOutcome::Ended(false) => TransactionOutcome::Aborted,
            // A transaction that is still open cannot be asked for: the engine decides it.
            fulmar_engine::TransactionOutcome::Forgotten | fulmar_engine::TransactionOutcome::Open => {
                TransactionOutcome::Forgotten
            }
        })
    }

    async fn disowned(&self, segments: Vec<SegmentId>) -> Vec<SegmentId> {
        self.0.disowned(segments).await
    }

    fn common_store(&self) -> CommonStore {
        self.0.common_store()
    }

    async fn fenced(&self) {
        self.0.fenced().await;
    }
}
