//! A node's commit logs: sequences of records, each made durable together for all partitions that commit to it.
//!
//! ```text
//!                          append, wait_durable, truncate
//!                                      |
//!                                  CommitLog --- Progress     what is durable, what is lost, who waits to know
//!                                   |      |
//!   local: files on the node's disk |      | shared: objects in a store that other nodes reach too
//! ```
//!
//! There is one log for each place that commits are made durable. What a log promises is the same for all of them,
//! and said here; how it is kept is said in [`local`] and [`shared`].
//!
//! # Positions
//!
//! A record's place is an [`Lsn`]: the byte position of its end in all that was ever logged in this place. Positions
//! only grow, over crashes and failures too. Those of two places have nothing to do with each other.
//!
//! # Appending
//!
//! [`CommitLog::append`] copies the record into memory under a short lock, and refuses it if there is no room; it waits
//! for nothing, so that it can be called inside a partition's commit lock. What is refused has not become visible.
//! Records become durable in their order: when one is, all before it are.
//!
//! # Loss
//!
//! A record whose position was handed out becomes durable, or is lost for good, or (at a crash, or when the log is
//! closed before it is known) recovery will tell. If records are lost the engine is told first
//! ([`CommitLog::on_discard`]), and those who wait for them only when no crash can bring them back.

mod error;
mod local;
mod progress;
mod shared;
mod statistics;
mod waiters;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use fulmar_pages::record::CutPoint;
use fulmar_pages::{PartitionId, Record, RecordBuilder, RecordHeader, RecordKind, Version};

use crate::files::LogFiles;
use crate::store::Reliable;

use local::LocalLog;
use progress::Progress;
use shared::SharedLog;

pub use error::{FullCause, LogError};
pub use local::{say_when_this_thread_rests, this_thread_rests};
pub use shared::{
    Ahead, LogEnd, LogObject, LogPlace, LogTail, RecoveryProgress, SharedLogCheck, SharedLogOptions,
};
pub use statistics::LogStatistics;

/// A position in a node's log, in bytes: that of a record is the position of its end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Lsn(pub u64);

impl std::fmt::Display for Lsn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// How soon a record must be on its way to the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// As soon as the disk is free: somebody waits for it who has more to do. (Or when its thread [rests](this_thread_rests), if
    /// that thread says so and the log is busy.)
    Prompt,
    /// The same, unless whoever appends it does so seldom: the last time was so long ago. Then it may wait for company, at most a tenth of
    /// that.
    Patient(Duration),
    /// As soon as the disk is free, and a log that is full takes it all the same, within its [reserve](LogOptions::capacity_bytes): when it is
    /// durable the log can be cut.
    MakesRoom,
}

/// The reserve of a log, as a part of its capacity.
const RESERVE_PART: u64 = 8;

/// Whether a log's writer shall end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stop {
    No,
    /// When everything is durable and sealed.
    Drain,
    /// At once.
    Abandon,
}

/// How a log is set up.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// The length of a log file. The first file of a log is shorter, so that a node starts fast.
    pub file_bytes: u64,
    /// The most that all files together may take; at least four files. An eighth more (a file, at least) is kept for what makes room.
    pub capacity_bytes: u64,
    /// The most that may wait in memory to be written (as much again may be on its way to the disk).
    pub pending_bytes: usize,
    /// How long after a failure the disk is tried again; it doubles with each try, up to [`MAX_RETRY_DELAY`].
    pub retry_delay: Duration,
}

/// The longest time between two tries of a broken or full disk.
pub const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions {
            file_bytes: 64 << 20,
            capacity_bytes: 1 << 30,
            pending_bytes: 64 << 20,
            retry_delay: Duration::from_millis(50),
        }
    }
}

/// Called when records are lost: with the durable position, which is kept, and the appended one, which is not.
pub type OnDiscard = Box<dyn Fn(Lsn, Lsn) + Send + Sync>;

/// Called when a flush has become due because of the log.
pub type OnFlushDue = Box<dyn Fn() + Send + Sync>;

/// A node's commit log of one place.
pub struct CommitLog {
    progress: Arc<Progress>,
    kept: Kept,
}

/// How a log is kept.
enum Kept {
    Local(LocalLog),
    Shared(SharedLog),
    /// Not at all.
    ReadOnly,
}

impl CommitLog {
    /// Reads the log in `files` as an opening would, and writes nothing. Blocks on the disk.
    pub fn verify(
        files: &dyn LogFiles,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        LocalLog::verify(files, replay)
    }

    /// Opens the log in `files`: gives every record that counts to `replay`, in order, with the position that its
    /// append had; then begins a new log. The log's own records (cut, seal) are not replayed. Blocks on the disk.
    pub fn open(
        options: LogOptions,
        files: Arc<dyn LogFiles>,
        replay: &mut dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError>,
    ) -> Result<Arc<CommitLog>, LogError> {
        let log = LocalLog::open(options, files, replay)?;
        Ok(Arc::new(CommitLog { progress: log.progress(), kept: Kept::Local(log) }))
    }

    /// Opens the log of `node` in a store: closes what was written in its name, for ever, gives every record that counts
    /// to `replay`, and begins a new log. Must be called in a tokio runtime, which does the writing.
    pub async fn open_shared(
        options: SharedLogOptions,
        store: Reliable,
        node: u128,
        replay: &mut shared::Replay<'_>,
    ) -> Result<Arc<CommitLog>, LogError> {
        let log = SharedLog::open(options, store, node, replay).await?;
        Ok(Arc::new(CommitLog { progress: log.progress(), kept: Kept::Shared(log) }))
    }

    /// The log of what is only read: it is empty, durable as far as it goes, and takes nothing ([`LogError::ReadOnly`]).
    pub fn read_only() -> Arc<CommitLog> {
        Arc::new(CommitLog { progress: Arc::new(Progress::new(0)), kept: Kept::ReadOnly })
    }

    /// Whether it is kept in a store.
    pub fn is_shared(&self) -> bool {
        matches!(self.kept, Kept::Shared(_))
    }

    /// Whether it takes nothing, ever.
    pub fn is_read_only(&self) -> bool {
        matches!(self.kept, Kept::ReadOnly)
    }

    /// The nodes that have logs in a store.
    pub async fn nodes_in(store: &Reliable) -> Result<BTreeSet<u128>, LogError> {
        SharedLog::nodes(store).await
    }

    /// Reads all that `node` has of logs in a store, and writes nothing. What an opening would replay is given to `replay`, if no
    /// object is damaged or missing.
    pub async fn verify_shared(
        store: Reliable,
        node: u128,
        replay: &mut shared::Replay<'_>,
    ) -> Result<SharedLogCheck, LogError> {
        SharedLog::verify(store, node, replay).await
    }

    /// Registers what is called when records are lost, once for each failure, by the log's writer, before anybody
    /// is told. It must discard every version whose record ends above the first position, and must not wait for
    /// the log. A commit that has just been appended may not have installed its version yet; the callback finds it
    /// if it takes the lock under which both happen.
    pub fn on_discard(&self, callback: OnDiscard) {
        self.progress.on_discard(callback);
    }

    /// Registers a callback for the moment when the backlog exceeds half of its bound. It is called by the log's writer and
    /// must not wait.
    pub fn on_flush_due(&self, callback: OnFlushDue) {
        self.progress.on_flush_due(callback);
    }

    /// The position before which records are to be flushed, if the backlog of a shared log exceeds half of its
    /// [bound](SharedLogOptions::backlog_objects). A local log has no such bound.
    pub fn flush_before(&self) -> Option<Lsn> {
        match &self.kept {
            Kept::Shared(log) => log.flush_before(),
            Kept::Local(_) | Kept::ReadOnly => None,
        }
    }

    /// Objects of a shared log that a start would read.
    pub fn backlog_objects(&self) -> u64 {
        match &self.kept {
            Kept::Shared(log) => log.backlog_objects(),
            Kept::Local(_) | Kept::ReadOnly => 0,
        }
    }

    /// Where the log began when it was opened. Records of earlier processes stand before this position.
    pub fn began(&self) -> Lsn {
        Lsn(self.progress.began())
    }

    /// Appends a record and answers the position of its end. Never waits. After an error nothing has been appended:
    /// [`LogError::Full`], [`LogError::Busy`], [`LogError::Failed`], [`LogError::Unreachable`], [`LogError::Fenced`],
    /// [`LogError::TooLong`], [`LogError::Closed`], [`LogError::ReadOnly`].
    pub fn append(&self, body: &[u8], urgency: Urgency) -> Result<Lsn, LogError> {
        let outcome = match &self.kept {
            Kept::Local(log) => log.append(body, urgency),
            Kept::Shared(log) => log.append(body, urgency),
            Kept::ReadOnly => Err(LogError::ReadOnly),
        };
        let statistics = &self.progress.statistics;
        match &outcome {
            Err(LogError::Full(_)) => drop(statistics.refused_full.fetch_add(1, Relaxed)),
            Err(LogError::Busy) => drop(statistics.refused_busy.fetch_add(1, Relaxed)),
            _ => {}
        }
        outcome
    }

    /// Waits until a record of so many bytes would have room; then [`CommitLog::append`] may still be refused if
    /// others were faster. An error if the log is full, failed or closed, so that the client can be told.
    pub fn wait_room(
        &self,
        body_bytes: usize,
        urgency: Urgency,
    ) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        self.progress.wait_room(move || match self.admit(body_bytes, urgency) {
            Err(LogError::Busy) => None,
            known => Some(known),
        })
    }

    /// Whether records are taken, and if not why; want of space does not count ([`CommitLog::full`]).
    pub fn works(&self) -> Result<(), LogError> {
        match self.admit(0, Urgency::Prompt) {
            Err(LogError::Busy | LogError::Full(_)) => Ok(()),
            known => known,
        }
    }

    fn admit(&self, body_bytes: usize, urgency: Urgency) -> Result<(), LogError> {
        match &self.kept {
            Kept::Local(log) => log.admit(body_bytes, urgency),
            Kept::Shared(log) => log.admit(body_bytes, urgency),
            Kept::ReadOnly => Err(LogError::ReadOnly),
        }
    }

    /// Whether records are refused with [`LogError::Full`], and why: from the first one until a further file is ready, or while there is no
    /// room for a page. Short ones may fit meanwhile.
    pub fn full(&self) -> Option<FullCause> {
        match &self.kept {
            Kept::Local(log) => log.full(),
            Kept::Shared(log) => log.full(),
            Kept::ReadOnly => None,
        }
    }

    /// [`LogError::Fenced`] once it is known that another process has taken the log over, and commits in its name.
    pub fn fenced(&self) -> Option<LogError> {
        match &self.kept {
            Kept::Local(_) | Kept::ReadOnly => None,
            Kept::Shared(log) => {
                log.admit(0, Urgency::Prompt).err().filter(|error| matches!(error, LogError::Fenced { .. }))
            }
        }
    }

    /// Up to where the log is durable. A position that is not above this one may still have been discarded: ask
    /// [`CommitLog::is_durable`] unless the version at hand is known to have survived [`CommitLog::on_discard`].
    pub fn durable(&self) -> Lsn {
        Lsn(self.progress.durable())
    }

    /// Whether a record is durable. One or two atomic loads.
    pub fn is_durable(&self, lsn: Lsn) -> bool {
        matches!(self.progress.fate(lsn.0), Some(Ok(())))
    }

    /// Waits until everything up to a position is durable, or known to be lost ([`LogError::Discarded`]).
    /// [`LogError::Closed`]: it is not known. May be dropped at any time.
    pub fn wait_durable(&self, lsn: Lsn) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        self.progress.wait_durable(lsn.0)
    }

    /// Where the next record will begin.
    pub fn appended(&self) -> Lsn {
        Lsn(self.progress.appended())
    }

    /// The position of the oldest record that is kept.
    pub fn oldest(&self) -> Lsn {
        match &self.kept {
            Kept::Local(log) => log.oldest(),
            Kept::Shared(log) => log.oldest(),
            Kept::ReadOnly => Lsn(0),
        }
    }

    /// Says that manifests, or durable copies behind it, cover everything before a position (of which only what is durable counts). Gives back
    /// the space of whole files or objects, in the background.
    pub fn truncate(&self, upto: Lsn) {
        match &self.kept {
            Kept::Local(log) => log.truncate(upto),
            Kept::Shared(log) => log.truncate(upto),
            Kept::ReadOnly => {}
        }
    }

    /// Bytes of all the log's files or objects; files that are made ahead included.
    pub fn size_bytes(&self) -> u64 {
        match &self.kept {
            Kept::Local(log) => log.size_bytes(),
            Kept::Shared(log) => log.size_bytes(),
            Kept::ReadOnly => 0,
        }
    }

    /// The most that all the log's files or objects may take.
    pub fn capacity_bytes(&self) -> u64 {
        match &self.kept {
            Kept::Local(log) => log.capacity_bytes(),
            Kept::Shared(log) => log.capacity_bytes(),
            Kept::ReadOnly => u64::MAX,
        }
    }

    /// Counters for the metrics.
    pub fn statistics(&self) -> &LogStatistics {
        &self.progress.statistics
    }

    /// Refuses new records, makes all others durable, seals the log and ends its writer. Blocks the thread. An
    /// error if the log could not be sealed (or is failing); what was acknowledged is kept all the same. When it is
    /// called again it does nothing. Dropped without it the log ends like at a crash: what is pending is not written,
    /// and nobody waits.
    pub fn close(&self) -> Result<(), LogError> {
        match &self.kept {
            Kept::Local(log) => log.close(),
            Kept::Shared(log) => log.close(),
            Kept::ReadOnly => Ok(()),
        }
    }
}

/// The body of a record that a log writes for itself.
fn own_record(kind: RecordKind, cut: Option<CutPoint>) -> Vec<u8> {
    let mut builder = RecordBuilder::default();
    builder.begin(&RecordHeader {
        kind,
        partition: PartitionId(0),
        version: Version::default(),
        transaction: 0,
        timestamp: 0,
        page_count: 0,
        previous: None,
    });
    if let Some(cut) = cut {
        builder.push_cut(cut);
    }
    builder.finish().to_vec()
}
