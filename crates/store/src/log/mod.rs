//! Commit logs with group commit: one sync makes the records of all partitions durable together.
//!
//! ```text
//!                          append, wait_durable, truncate
//!                                      |
//!                                  CommitLog --- Progress   durable and lost positions, waiters
//!                                   |      |
//!   local: files on the node's disk |      | shared: objects in a store that other nodes can read
//! ```
//!
//! A node has one log per durability target. Both kinds give the guarantees described here. Their
//! implementations are described in [`local`] and [`shared`].
//!
//! # Positions
//!
//! A record's position is its [`Lsn`]: the byte position of its end, counted over everything that
//! was ever logged to this target. Positions only grow, also across crashes and failures. Positions
//! of two targets are not comparable.
//!
//! # Appending
//!
//! [`CommitLog::append`] copies the record into memory under a short lock, and rejects it if there
//! is no space. It never waits, so that it can be called under a partition's commit lock. A
//! rejected record has not become visible. Records become durable in order: when one is durable,
//! all records before it are.
//!
//! # Loss
//!
//! A record whose position was assigned becomes durable or is permanently lost. If the process
//! crashes, or the log is closed before the outcome is known, recovery decides which. When records
//! are lost, the engine is notified first ([`CommitLog::on_discard`]). Waiters are notified only
//! when no crash can bring the records back.

mod error;
mod local;
mod options;
mod own_record;
mod position;
mod progress;
mod shared;
mod statistics;
mod waiters;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use fulmar_pages::Record;

use crate::files::LogFiles;
use crate::store::Reliable;

use local::LocalLog;
use progress::Progress;
use shared::SharedLog;

pub use error::{FullCause, LogError};
pub use local::{announce_idle, flush_on_idle};
pub use options::{LogOptions, MAX_RETRY_DELAY, Urgency};
pub use position::Lsn;
pub use progress::{OnDiscard, OnFlushDue};
pub use shared::{
    LogEnd, LogObject, LogPosition, LogSlot, LogSlots, LogTail, NextRecords, RecoveryProgress, SealedLogs,
    SharedLogCheck, SharedLogOptions,
};
pub use statistics::LogStatistics;

/// A node's commit log for one durability target.
pub struct CommitLog {
    progress: Arc<Progress>,
    backend: LogBackend,
}

/// The implementation of a log.
enum LogBackend {
    Local(LocalLog),
    Shared(SharedLog),
    /// Empty, and rejects all records.
    ReadOnly,
}

impl CommitLog {
    /// Reads the log in `files` as [`CommitLog::open`] would, but writes nothing. Blocks on disk
    /// I/O.
    pub fn verify(
        files: &dyn LogFiles,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        LocalLog::verify(files, replay)
    }

    /// Opens the log in `files`. Passes every valid record to `replay`, in order and with the
    /// position of its append, then starts a new log. The log's own records (cut, seal) are not
    /// replayed. Blocks on disk I/O.
    pub fn open(
        options: LogOptions,
        files: Arc<dyn LogFiles>,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<Arc<CommitLog>, LogError> {
        let log = LocalLog::open(options, files, replay)?;
        Ok(Arc::new(CommitLog { progress: log.progress(), backend: LogBackend::Local(log) }))
    }

    /// Opens the log of `node` in a store. Permanently closes the logs previously written under
    /// this node id, passes every valid record to `replay`, and starts a new log. Must be called in
    /// a tokio runtime, which then runs the log's writer.
    pub async fn open_shared(
        options: SharedLogOptions,
        store: Reliable,
        node: u128,
        replay: &mut shared::Replay<'_>,
    ) -> Result<Arc<CommitLog>, LogError> {
        let log = SharedLog::open(options, store, node, replay).await?;
        Ok(Arc::new(CommitLog { progress: log.progress(), backend: LogBackend::Shared(log) }))
    }

    /// Opens the log of one incarnation of `node` in a store, which the metadata store of a cluster
    /// has assigned to this process. Fails with [`LogError::Fenced`] if the log exists. Reads no
    /// records. Must be called in a tokio runtime, which then runs the log's writer.
    pub async fn open_incarnation(
        options: SharedLogOptions,
        store: Reliable,
        node: u128,
        incarnation: u64,
    ) -> Result<Arc<CommitLog>, LogError> {
        let log = SharedLog::open_incarnation(options, store, node, incarnation).await?;
        Ok(Arc::new(CommitLog { progress: log.progress(), backend: LogBackend::Shared(log) }))
    }

    /// Declares that manifests contain all records of earlier incarnations of a node of a cluster,
    /// of partitions that the node owns. The log's objects state this from now on.
    pub fn settle_inherited(&self) {
        if let LogBackend::Shared(log) = &self.backend {
            log.settle_inherited();
        }
    }

    /// The position after the last durable object of a shared log.
    pub fn position(&self) -> LogPosition {
        match &self.backend {
            LogBackend::Shared(log) => log.position(),
            LogBackend::Local(_) | LogBackend::ReadOnly => LogPosition::default(),
        }
    }

    /// Waits until it is known that another process has closed the log. Never completes if the log
    /// is closed by this process.
    pub async fn wait_fenced(&self) -> LogError {
        let fenced = self.progress.wait_room(|| {
            let ended = self.progress.has_ended().then_some(Err(LogError::Closed));
            self.fenced().map(Err).or(ended)
        });
        match fenced.await {
            Err(error @ LogError::Fenced { .. }) => error,
            _ => std::future::pending().await,
        }
    }

    /// Returns a log for read-only data. It is empty, durable up to its end, and rejects all
    /// records with [`LogError::ReadOnly`].
    pub fn read_only() -> Arc<CommitLog> {
        Arc::new(CommitLog { progress: Arc::new(Progress::new(0)), backend: LogBackend::ReadOnly })
    }

    /// Returns true if the log is kept in a store.
    pub fn is_shared(&self) -> bool {
        matches!(self.backend, LogBackend::Shared(_))
    }

    /// Returns true if the log rejects all records by design.
    pub fn is_read_only(&self) -> bool {
        matches!(self.backend, LogBackend::ReadOnly)
    }

    /// Lists the nodes that have logs in a store.
    pub async fn nodes_in(store: &Reliable) -> Result<BTreeSet<u128>, LogError> {
        SharedLog::nodes(store).await
    }

    /// Reads all logs of `node` in a store, and writes nothing. If no object is damaged or missing,
    /// passes the records that an opening would replay to `replay`.
    pub async fn verify_shared(
        store: Reliable,
        node: u128,
        replay: &mut shared::Replay<'_>,
    ) -> Result<SharedLogCheck, LogError> {
        SharedLog::verify(store, node, replay).await
    }

    /// Registers a callback for lost records. The log's writer calls it once per failure, before it
    /// notifies any waiter. The callback must discard every version whose record ends above the
    /// first position, and must not wait for the log. A commit that was just appended may not have
    /// installed its version yet; the callback sees that version if it takes the lock that covers
    /// both steps.
    pub fn on_discard(&self, callback: OnDiscard) {
        self.progress.on_discard(callback);
    }

    /// Registers a callback that is called when the backlog exceeds half of its limit. The log's
    /// writer calls it; it must not wait.
    pub fn on_flush_due(&self, callback: OnFlushDue) {
        self.progress.on_flush_due(callback);
    }

    /// Returns the position before which records must be flushed, if the backlog of a shared log
    /// exceeds half of its [limit](SharedLogOptions::backlog_objects). A local log has no such
    /// limit.
    pub fn flush_before(&self) -> Option<Lsn> {
        match &self.backend {
            LogBackend::Shared(log) => log.flush_before(),
            LogBackend::Local(_) | LogBackend::ReadOnly => None,
        }
    }

    /// Number of objects of a shared log that a start would read.
    pub fn backlog_objects(&self) -> u64 {
        match &self.backend {
            LogBackend::Shared(log) => log.backlog_objects(),
            LogBackend::Local(_) | LogBackend::ReadOnly => 0,
        }
    }

    /// Position at which the log started when it was opened. Records of earlier processes precede
    /// it.
    pub fn start_position(&self) -> Lsn {
        Lsn(self.progress.began())
    }

    /// Appends a record and returns the position of its end. Never waits. On error nothing has been
    /// appended: [`LogError::Full`], [`LogError::Busy`], [`LogError::Failed`],
    /// [`LogError::Unreachable`], [`LogError::Fenced`], [`LogError::TooLong`],
    /// [`LogError::Closed`], [`LogError::ReadOnly`].
    pub fn append(&self, body: &[u8], urgency: Urgency) -> Result<Lsn, LogError> {
        let outcome = match &self.backend {
            LogBackend::Local(log) => log.append(body, urgency),
            LogBackend::Shared(log) => log.append(body, urgency),
            LogBackend::ReadOnly => Err(LogError::ReadOnly),
        };
        let statistics = &self.progress.statistics;
        match &outcome {
            Err(LogError::Full(_)) => drop(statistics.refused_full.fetch_add(1, Relaxed)),
            Err(LogError::Busy) => drop(statistics.refused_busy.fetch_add(1, Relaxed)),
            _ => {}
        }
        outcome
    }

    /// Waits until a record of `body_bytes` would fit. A following [`CommitLog::append`] can still
    /// be rejected, because other callers may have used the space. Returns an error if the log is
    /// full, failed or closed, so that the client gets an answer.
    pub fn wait_for_space(
        &self,
        body_bytes: usize,
        urgency: Urgency,
    ) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        self.progress.wait_room(move || match self.admit(body_bytes, urgency) {
            Err(LogError::Busy) => None,
            outcome => Some(outcome),
        })
    }

    /// Returns an error if the log rejects records. Lack of space does not count; see
    /// [`CommitLog::full_cause`].
    pub fn check_available(&self) -> Result<(), LogError> {
        match self.admit(0, Urgency::Immediate) {
            Err(LogError::Busy | LogError::Full(_)) => Ok(()),
            outcome => outcome,
        }
    }

    fn admit(&self, body_bytes: usize, urgency: Urgency) -> Result<(), LogError> {
        match &self.backend {
            LogBackend::Local(log) => log.admit(body_bytes, urgency),
            LogBackend::Shared(log) => log.admit(body_bytes, urgency),
            LogBackend::ReadOnly => Err(LogError::ReadOnly),
        }
    }

    /// Returns the cause if records are rejected with [`LogError::Full`]: from the first rejection
    /// until another file is ready, or while there is no space for a page. Short records may fit in
    /// the meantime.
    pub fn full_cause(&self) -> Option<FullCause> {
        match &self.backend {
            LogBackend::Local(log) => log.full(),
            LogBackend::Shared(log) => log.full(),
            LogBackend::ReadOnly => None,
        }
    }

    /// Returns [`LogError::Fenced`] once it is known that another process has taken over the log
    /// and commits under this node's identity.
    pub fn fenced(&self) -> Option<LogError> {
        match &self.backend {
            LogBackend::Local(_) | LogBackend::ReadOnly => None,
            LogBackend::Shared(log) => log
                .admit(0, Urgency::Immediate)
                .err()
                .filter(|error| matches!(error, LogError::Fenced { .. })),
        }
    }

    /// Position up to which the log is durable. A record at or below it may still have been
    /// discarded. Use [`CommitLog::is_durable`], unless the version is known to have survived
    /// [`CommitLog::on_discard`].
    pub fn durable(&self) -> Lsn {
        Lsn(self.progress.durable())
    }

    /// Returns true if a record is durable. Costs one or two atomic loads.
    pub fn is_durable(&self, lsn: Lsn) -> bool {
        matches!(self.progress.outcome(lsn.0), Some(Ok(())))
    }

    /// Waits until everything up to a position is durable, or known to be lost
    /// ([`LogError::Discarded`]). [`LogError::Closed`] means that the outcome is unknown. Cancel
    /// safe.
    pub fn wait_durable(&self, lsn: Lsn) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        self.progress.wait_durable(lsn.0)
    }

    /// Position at which the next record will start.
    pub fn appended(&self) -> Lsn {
        Lsn(self.progress.appended())
    }

    /// Position of the oldest record that is kept.
    pub fn oldest(&self) -> Lsn {
        match &self.backend {
            LogBackend::Local(log) => log.oldest(),
            LogBackend::Shared(log) => log.oldest(),
            LogBackend::ReadOnly => Lsn(0),
        }
    }

    /// Declares that everything before a position is covered by manifests, or by durable copies at
    /// a later position of the log. Only the durable part counts. Releases the space of whole files
    /// or objects, in the background.
    pub fn truncate(&self, upto: Lsn) {
        match &self.backend {
            LogBackend::Local(log) => log.truncate(upto),
            LogBackend::Shared(log) => log.truncate(upto),
            LogBackend::ReadOnly => {}
        }
    }

    /// Total size of the log's files or objects, preallocated files included.
    pub fn size_bytes(&self) -> u64 {
        match &self.backend {
            LogBackend::Local(log) => log.size_bytes(),
            LogBackend::Shared(log) => log.size_bytes(),
            LogBackend::ReadOnly => 0,
        }
    }

    /// Maximum total size of the log's files or objects.
    pub fn capacity_bytes(&self) -> u64 {
        match &self.backend {
            LogBackend::Local(log) => log.capacity_bytes(),
            LogBackend::Shared(log) => log.capacity_bytes(),
            LogBackend::ReadOnly => u64::MAX,
        }
    }

    /// Counters for the metrics.
    pub fn statistics(&self) -> &LogStatistics {
        &self.progress.statistics
    }

    /// Rejects new records, makes all others durable, seals the log and stops its writer. Blocks
    /// the thread. Returns an error if the log could not be sealed or is failing; acknowledged
    /// records are kept nevertheless. Later calls do nothing. A log that is dropped without this
    /// call ends as in a crash: pending records are not written, and waiters are released.
    pub fn close(&self) -> Result<(), LogError> {
        match &self.backend {
            LogBackend::Local(log) => log.close(),
            LogBackend::Shared(log) => log.close(),
            LogBackend::ReadOnly => Ok(()),
        }
    }
}
