//! What a node needs from its engine and its gateway.

use std::sync::Arc;

use async_trait::async_trait;
use fulmar_control::report::NodeReport;
use fulmar_engine::{
    Archive, ArchiveSize, CachedPages, CarriedSnapshots, Closing, CommonStore, DecisionError, Engine,
    IncomingCopy, LogDurations, OutgoingCopy, PendingMove, Released, Result, RowLoader, RowReader, Timeline,
};
use fulmar_gateway::cluster::{TransactionOutcome, Waits};
use fulmar_gateway::events::Event;
use fulmar_gateway::{GatewaySessions, StatementReport};
use fulmar_pages::{Manifest, PageNo, PartitionId, SegmentId};
use fulmar_store::{LogPosition, Piece, Span};
use fulmar_transport::Stream;
use futures::future::BoxFuture;

/// The partitions of a node: its engine.
#[async_trait]
pub trait Partitions: Send + Sync + 'static {
    /// Opens and flushes a partition, refuses new statements and commits, and writes a durable
    /// `release` record.
    async fn release(&self, partition: PartitionId, closing: Closing) -> Result<Released>;

    /// Flushes a partition, and lists the pages that it has in memory.
    async fn flush_and_list(&self, partition: PartitionId) -> Result<CachedPages>;

    /// Reads pages of a partition that will be moved to this node. Returns how many were not in
    /// memory.
    async fn warm(&self, partition: PartitionId, timeline: Timeline, pages: Vec<PageNo>) -> Result<u64>;

    /// Forgets a partition that is not moved to this node after all.
    fn forget_arrival(&self, partition: PartitionId);

    /// Announces that a partition of this node is about to move: until the result is dropped no COPY
    /// begins, and no transaction if the move is exclusive.
    fn announce_move(&self, partition: PartitionId, is_exclusive: bool) -> PendingMove;

    /// Begins to copy a partition of this node to the store of another one.
    fn copy_out(&self, partition: PartitionId) -> OutgoingCopy;

    /// Fails if there is no room on the disk for this many bytes.
    fn check_room(&self, bytes: u64) -> Result<()>;

    /// Begins to receive a partition that this node will own in an epoch.
    async fn copy_in(&self, partition: PartitionId, timeline: Timeline, epoch: u32) -> Result<IncomingCopy>;

    /// Begins to read a version of a partition as rows.
    async fn read_rows(&self, manifest: &Manifest) -> Result<RowReader>;

    /// Begins to build a database from rows.
    async fn load_rows(&self, partition: PartitionId, timeline: Timeline) -> Result<RowLoader>;

    /// What is stored of a partition that this node does not own.
    async fn archive(&self, partition: PartitionId, timeline: Timeline) -> Result<Option<Archive>>;

    /// The size of an archive.
    async fn archive_size(&self, partition: PartitionId, timeline: Timeline) -> Result<Option<ArchiveSize>>;

    /// Copies the pages of a partition that are still in the source's store, those of `hottest` first.
    /// Returns false if snapshots still read pages there.
    async fn pull(&self, partition: PartitionId, hottest: &[PageNo]) -> Result<bool>;

    /// Reads a part of a segment of this node's own store; `None` if it is not there.
    async fn read_segment(&self, segment: SegmentId, span: Span) -> Result<Option<Piece>>;

    /// Deletes what is stored of a partition that this node does not own.
    async fn delete_copy(&self, partition: PartitionId) -> Result<()>;

    /// The pages that a partition has in memory, hottest first.
    fn pages_in_memory(&self, partition: PartitionId) -> Vec<PageNo>;

    /// The partitions of which something is in the store.
    async fn stored_partitions(&self) -> Result<Vec<PartitionId>>;

    /// The snapshots of a released partition's transactions. A second call returns none.
    fn take_snapshots(&self, partition: PartitionId) -> CarriedSnapshots;

    /// Keeps such snapshots for the first opening of a partition in an epoch. Returns false if it does
    /// not.
    fn expect_snapshots(
        &self,
        partition: PartitionId,
        epoch: u32,
        snapshots: CarriedSnapshots,
    ) -> Result<bool>;

    /// Opens a partition that was moved to this node.
    async fn open_arrived(&self, partition: PartitionId) -> Result<()>;

    /// How long the clients of a partition have waited at this node since the last call.
    fn take_waits(&self, partition: PartitionId) -> Waits;

    /// The smoothed execution time of a partition's statements on this node, in microseconds.
    fn smoothed_us(&self, partition: PartitionId) -> u64;

    /// The partitions that executed statements in the last second, those with most statements first,
    /// with the smoothed execution times of these in microseconds.
    fn latencies(&self) -> Vec<(PartitionId, u64)>;

    /// The load of this node and its partitions.
    fn load_report(&self, with_keys: bool) -> NodeReport;

    /// The share of its capacity that this node has used in the last ten seconds or so.
    fn utilisation(&self) -> f64;

    /// Requests that accesses per key are counted for a window.
    fn request_keys(&self);

    /// The statistics of the statements of these partitions on this node, or of all.
    fn statement_report(&self, partitions: Option<&[u64]>) -> StatementReport;

    /// Stores a manifest of a partition in this incarnation, unless it has no contents.
    async fn cover(&self, partition: PartitionId) -> Result<()>;

    /// Accepts statements for a released partition again.
    async fn take_back(&self, partition: PartitionId) -> Result<()>;

    /// Closes a released partition that another node owns now.
    fn give_up(&self, partition: PartitionId);

    /// Drops a partition.
    async fn drop_partition(&self, partition: PartitionId) -> Result<()>;

    /// Like [`Partitions::release`], for a change that this node makes itself. Returns the position
    /// of the shared log, before which everything is durable.
    async fn release_to_change(&self, partition: PartitionId) -> Result<LogPosition>;

    /// Stores a partition, as it is now or was at a time, as the first manifest of another one.
    async fn branch(&self, source: PartitionId, branch: PartitionId, at_unix_ms: Option<u64>) -> Result<()>;

    /// Restores a partition to a time. `decide` makes that take effect.
    async fn restore<'a>(
        &'a self,
        partition: PartitionId,
        at_unix_ms: u64,
        lineage: u64,
        decide: Decide<'a>,
    ) -> Result<()>;

    /// Returns a new lineage for [`Partitions::restore`].
    fn new_lineage(&self) -> u64;

    /// The position of the shared log, before which everything is durable.
    fn log_position(&self) -> LogPosition;

    /// The number of clients of a partition that are connected to this node.
    fn sessions(&self, partition: PartitionId) -> u64;

    /// Ends the sessions of a partition that this node runs.
    fn end_sessions(&self, partition: PartitionId);

    /// Records in the event log that a partition was quarantined.
    fn record_quarantine(&self, partition: PartitionId);

    /// Records an event in the event log.
    fn record(&self, event: Event);

    /// Reports the outcome of a transaction. One that was not committed can no longer be.
    async fn outcome(&self, partition: PartitionId, transaction: u64) -> Result<TransactionOutcome>;

    /// Returns those of these segments that this node does not need, and promises not to name them
    /// in a manifest.
    async fn disowned(&self, segments: Vec<SegmentId>) -> Vec<SegmentId>;

    /// The durations of the writes of its logs since the start.
    fn log_durations(&self) -> LogDurations;

    /// The objects in the common store.
    fn common_store(&self) -> CommonStore;

    /// Completes when the shared log was sealed by another process.
    async fn fenced(&self);
}

/// Makes a restore to a timeline take effect.
pub type Decide<'a> =
    Box<dyn FnOnce(Timeline) -> BoxFuture<'a, std::result::Result<(), DecisionError>> + Send + 'a>;

/// Serves a session that another node relays.
pub type SessionHandler = Arc<dyn Fn(Stream) + Send + Sync>;

/// The engine and the gateway of a node.
pub struct EnginePartitions(Arc<Engine>, GatewaySessions);

impl EnginePartitions {
    /// The partitions of this engine, and their sessions.
    pub fn new(engine: Arc<Engine>, sessions: GatewaySessions) -> Self {
        EnginePartitions(engine, sessions)
    }
}

#[async_trait]
impl Partitions for EnginePartitions {
    async fn release(&self, partition: PartitionId, closing: Closing) -> Result<Released> {
        self.0.release(partition, closing).await
    }

    async fn flush_and_list(&self, partition: PartitionId) -> Result<CachedPages> {
        self.0.flush_and_list(partition).await
    }

    async fn warm(&self, partition: PartitionId, timeline: Timeline, pages: Vec<PageNo>) -> Result<u64> {
        self.0.warm(partition, timeline, &pages).await
    }

    fn forget_arrival(&self, partition: PartitionId) {
        self.0.forget_arrival(partition);
    }

    fn announce_move(&self, partition: PartitionId, is_exclusive: bool) -> PendingMove {
        self.0.announce_move(partition, is_exclusive)
    }

    fn copy_out(&self, partition: PartitionId) -> OutgoingCopy {
        self.0.copy_out(partition)
    }

    fn check_room(&self, bytes: u64) -> Result<()> {
        self.0.check_room(bytes)
    }

    async fn copy_in(&self, partition: PartitionId, timeline: Timeline, epoch: u32) -> Result<IncomingCopy> {
        self.0.copy_in(partition, timeline, epoch).await
    }

    async fn read_rows(&self, manifest: &Manifest) -> Result<RowReader> {
        self.0.read_rows(manifest).await
    }

    async fn load_rows(&self, partition: PartitionId, timeline: Timeline) -> Result<RowLoader> {
        self.0.load_rows(partition, timeline).await
    }

    async fn archive(&self, partition: PartitionId, timeline: Timeline) -> Result<Option<Archive>> {
        self.0.archive(partition, timeline).await
    }

    async fn archive_size(&self, partition: PartitionId, timeline: Timeline) -> Result<Option<ArchiveSize>> {
        self.0.archive_size(partition, timeline).await
    }

    async fn pull(&self, partition: PartitionId, hottest: &[PageNo]) -> Result<bool> {
        self.0.pull(partition, hottest).await
    }

    async fn read_segment(&self, segment: SegmentId, span: Span) -> Result<Option<Piece>> {
        self.0.read_segment(segment, span).await
    }

    async fn delete_copy(&self, partition: PartitionId) -> Result<()> {
        self.0.delete_copy(partition).await
    }

    fn pages_in_memory(&self, partition: PartitionId) -> Vec<PageNo> {
        self.0.pages_in_memory(partition)
    }

    async fn stored_partitions(&self) -> Result<Vec<PartitionId>> {
        self.0.stored_partitions().await
    }

    fn take_snapshots(&self, partition: PartitionId) -> CarriedSnapshots {
        self.0.take_snapshots(partition)
    }

    fn expect_snapshots(
        &self,
        partition: PartitionId,
        epoch: u32,
        snapshots: CarriedSnapshots,
    ) -> Result<bool> {
        self.0.expect_snapshots(partition, epoch, snapshots)
    }

    async fn open_arrived(&self, partition: PartitionId) -> Result<()> {
        self.0.open_arrived(partition).await
    }

    fn take_waits(&self, partition: PartitionId) -> Waits {
        self.1.take_waits(partition)
    }

    fn smoothed_us(&self, partition: PartitionId) -> u64 {
        self.1.smoothed_us(partition)
    }

    fn latencies(&self) -> Vec<(PartitionId, u64)> {
        self.1.latencies()
    }

    fn load_report(&self, with_keys: bool) -> NodeReport {
        self.1.load_report(with_keys)
    }

    fn utilisation(&self) -> f64 {
        self.1.utilisation()
    }

    fn request_keys(&self) {
        self.1.request_keys();
    }

    fn statement_report(&self, partitions: Option<&[u64]>) -> StatementReport {
        self.1.statement_report(partitions)
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

    async fn release_to_change(&self, partition: PartitionId) -> Result<LogPosition> {
        self.0.release_to_change(partition).await
    }

    async fn branch(&self, source: PartitionId, branch: PartitionId, at_unix_ms: Option<u64>) -> Result<()> {
        self.0.create_partition(branch, Some((source, at_unix_ms))).await
    }

    async fn restore<'a>(
        &'a self,
        partition: PartitionId,
        at_unix_ms: u64,
        lineage: u64,
        decide: Decide<'a>,
    ) -> Result<()> {
        self.0.restore_assigned(partition, at_unix_ms, lineage, decide).await
    }

    fn new_lineage(&self) -> u64 {
        self.0.new_lineage()
    }

    fn log_position(&self) -> LogPosition {
        self.0.log_position()
    }

    fn sessions(&self, partition: PartitionId) -> u64 {
        self.1.clients(partition) as u64
    }

    fn end_sessions(&self, partition: PartitionId) {
        self.1.end(partition);
    }

    fn record_quarantine(&self, partition: PartitionId) {
        self.1.record_quarantine(partition);
    }

    fn record(&self, event: Event) {
        self.1.record(event);
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

    fn log_durations(&self) -> LogDurations {
        self.0.log_durations()
    }

    fn common_store(&self) -> CommonStore {
        self.0.common_store()
    }

    async fn fenced(&self) {
        self.0.fenced().await;
    }
}
