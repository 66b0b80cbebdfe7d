//! Configuration of a shared log, and what its recovery reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fulmar_pages::Record;

use crate::log::{LogError, Lsn};

/// Configuration of a shared log.
#[derive(Clone, Debug)]
pub struct SharedLogOptions {
    /// Size from which on an object gets no further records. A single record may be longer.
    pub object_bytes: usize,
    /// Maximum number of concurrent puts.
    pub in_flight: usize,
    /// Maximum total size of all objects.
    pub capacity_bytes: u64,
    /// Maximum size of the records that are held in memory because they are not yet durable.
    pub pending_bytes: usize,
    /// Number of unflushed objects from which on puts are throttled. A flush is due from half of it
    /// on.
    pub backlog_objects: usize,
    /// Intended maximum size of the unflushed objects. A flush is due from half of it on. Beyond it
    /// nothing is throttled: if flushes cannot keep up, the size reaches `capacity_bytes`.
    pub backlog_bytes: u64,
    /// Counts the objects that are read when the log is opened.
    pub progress: Arc<RecoveryProgress>,
}

impl Default for SharedLogOptions {
    fn default() -> Self {
        SharedLogOptions {
            object_bytes: 4 << 20,
            in_flight: 4,
            capacity_bytes: 1 << 30,
            pending_bytes: 64 << 20,
            backlog_objects: 4000,
            backlog_bytes: 64 << 20,
            progress: Arc::default(),
        }
    }
}

/// Progress of opening a shared log: objects read, and objects to read.
#[derive(Debug, Default)]
pub struct RecoveryProgress {
    read: AtomicU64,
    expected: AtomicU64,
}

impl RecoveryProgress {
    /// Number of objects read so far.
    pub fn read(&self) -> u64 {
        self.read.load(Relaxed)
    }

    /// Number of objects to read, as far as known; 0 until the first one was read.
    pub fn expected(&self) -> u64 {
        self.expected.load(Relaxed)
    }

    pub(super) fn object_read(&self) {
        self.read.fetch_add(1, Relaxed);
    }

    pub(super) fn expect(&self, objects: u64) {
        self.expected.store(objects, Relaxed);
    }
}

/// Receives the valid records when a log is opened.
pub(in crate::log) type Replay<'a> = dyn FnMut(Lsn, &Record<'_>) -> Result<(), LogError> + Send + 'a;
