//! What a node keeps in memory of the migrations that it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_cluster::NodeId;
use fulmar_engine::{OutgoingCopy, PendingMove, RowReader};
use fulmar_migrate::prediction::Predictors;
use fulmar_pages::PartitionId;
use fulmar_transport::Stream;
use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::messages::{Attempt, CopyOpening};

/// Number of partitions that a node copies at a time.
pub(super) const CONCURRENT: usize = 4;

/// The migrations that a node runs.
pub(crate) struct Running {
    /// The partitions.
    pub(super) partitions: Mutex<HashSet<PartitionId>>,
    pub(super) slots: Semaphore,
    pub(super) predictors: Mutex<Predictors>,
    /// The copies that wait for their handover.
    pub(super) copies: Mutex<HashMap<PartitionId, CopyStream>>,
    /// The partitions in which no transaction is open, and their migrations.
    pub(super) locked: Mutex<HashMap<PartitionId, (u64, PendingMove)>>,
    attempts: AtomicU64,
    /// The partitions that were copied to this node.
    arriving: Mutex<HashMap<PartitionId, Arc<Arriving>>>,
}

impl Running {
    /// The number of the next attempt to copy a partition.
    pub(super) fn next_attempt(&self) -> u64 {
        self.attempts.fetch_add(1, Ordering::Relaxed)
    }

    /// The state of the copies of a partition to this node.
    pub(super) fn arriving(&self, partition: PartitionId) -> Arc<Arriving> {
        self.arriving.lock().entry(partition).or_default().clone()
    }

    /// Takes the copy of a migration out.
    pub(super) fn take_copy(&self, partition: PartitionId, migration: u64) -> Option<CopyStream> {
        self.copies.lock().remove(&partition).filter(|copy| copy.migration() == migration)
    }

    /// Takes the lock of a migration out.
    pub(super) fn take_lock(&self, partition: PartitionId, migration: u64) -> Option<PendingMove> {
        let locked = self.locked.lock().remove(&partition).filter(|(number, _)| *number == migration);
        locked.map(|(_, pending)| pending)
    }

    /// Drops what a migration has left.
    pub(super) fn forget(&self, partition: PartitionId) {
        drop(self.copies.lock().remove(&partition));
        drop(self.locked.lock().remove(&partition));
    }
}

impl Default for Running {
    fn default() -> Self {
        Running {
            partitions: Mutex::default(),
            slots: Semaphore::new(CONCURRENT),
            predictors: Mutex::default(),
            copies: Mutex::default(),
            locked: Mutex::default(),
            attempts: AtomicU64::default(),
            arriving: Mutex::default(),
        }
    }
}

/// The source's side of a copy.
pub(crate) struct CopyStream {
    pub(super) outgoing: OutgoingCopy,
    /// Reads the version of the round, in a copy as rows.
    pub(super) rows: Option<Mutex<RowReader>>,
    pub(super) destination: NodeId,
    pub(super) opening: CopyOpening,
    /// `None` before the first round.
    pub(super) stream: Option<Stream>,
    pub(super) message: Vec<u8>,
    /// Bytes received that were not counted yet.
    pub(super) received_bytes: u64,
}

impl CopyStream {
    /// The migration that it belongs to.
    pub(super) fn migration(&self) -> u64 {
        self.opening.attempt.migration
    }
}

/// A partition that is, or was, copied to this node.
#[derive(Default)]
pub(super) struct Arriving {
    pub(super) newest: Mutex<Attempt>,
    /// Held while something is stored or deleted.
    pub(super) storing: tokio::sync::Mutex<()>,
}
