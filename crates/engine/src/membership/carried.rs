//! The snapshots of open transactions, on their way from a partition's owner to the next one
//! ([`CarriedSnapshots`]).
//!
//! ```text
//!   source: release              closes the partition, collects the snapshots
//!           take_snapshots  -->  destination: expect_snapshots      (before the change of owner)
//!                                             opens the partition   (after it)
//! ```
//!
//! They belong to an epoch: the one that begins with the handover. Only the first opening of the
//! partition in that epoch uses them, because later ones may contain commits of this node. If they
//! are lost, late, or too many, transactions are repeated at the newest version.

use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::{CarriedSnapshots, LongTermReservation, MemoryBudget, Partition, Reservation};
use fulmar_pages::PartitionId;
use fulmar_sqlite::Result;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use crate::engine::Engine;

/// Maximum size of the page versions of a partition. They are sent while it is frozen.
const MAX_BYTES: usize = 8 << 20;
/// How long the source may take to read them.
const COLLECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long they wait.
const MAX_AGE: Duration = Duration::from_secs(60);

/// The snapshots that wait at this node for their partitions.
#[derive(Default)]
pub(crate) struct ExpectedSnapshots(Mutex<HashMap<PartitionId, Expected>>);

struct Expected {
    epoch: u32,
    snapshots: CarriedSnapshots,
    since: Instant,
    _memory: LongTermReservation,
}

impl ExpectedSnapshots {
    /// Adds the snapshots of a partition, which replace those of an earlier epoch. Returns false if
    /// there is no memory, or if there are newer ones.
    fn add(
        &self,
        memory: &Arc<MemoryBudget>,
        id: PartitionId,
        (epoch, snapshots): (u32, CarriedSnapshots),
    ) -> bool {
        if self.0.lock().get(&id).is_some_and(|expected| expected.epoch > epoch) {
            return false;
        }
        self.forget(id);
        let bytes = snapshots.encoded_bytes() as u64;
        if !memory.reserve(bytes) {
            return false;
        }
        let memory = Reservation::of(memory.clone(), bytes).into_long_term();
        let expected = Expected { epoch, snapshots, since: Instant::now(), _memory: memory };
        self.0.lock().insert(id, expected);
        true
    }

    /// Drops the snapshots of a partition that is not moved to this node after all.
    pub(super) fn forget(&self, id: PartitionId) {
        drop(self.0.lock().remove(&id));
    }

    /// Takes the snapshots of a partition in an epoch out.
    pub(super) fn take(&self, id: PartitionId, epoch: u32) -> Option<CarriedSnapshots> {
        let expected = self.0.lock().remove(&id)?;
        let is_it = expected.epoch == epoch && expected.since.elapsed() < MAX_AGE;
        is_it.then_some(expected.snapshots)
    }

    /// Drops snapshots whose partitions have not arrived.
    pub(crate) fn drop_old(&self) {
        self.0.lock().retain(|_, expected| expected.since.elapsed() < MAX_AGE);
    }
}

/// The snapshots of a partition that was closed to move. None if they cannot be read.
pub(super) async fn collect(partition: &Partition) -> CarriedSnapshots {
    match timeout(COLLECT_TIMEOUT, partition.carried_snapshots(MAX_BYTES)).await {
        Ok(Ok(snapshots)) => snapshots,
        Ok(Err(error)) => {
            tracing::info!(partition = partition.id.0, %error, "cannot read the snapshots of transactions");
            CarriedSnapshots::default()
        }
        Err(_) => CarriedSnapshots::default(),
    }
}

impl Engine {
    /// The snapshots of a released partition's transactions. A second call returns none.
    pub fn take_snapshots(&self, id: PartitionId) -> CarriedSnapshots {
        let moving = self.member().and_then(|member| member.moves.lock().get(&id).cloned());
        moving.map(|moving| std::mem::take(&mut *moving.snapshots.lock())).unwrap_or_default()
    }

    /// Keeps the snapshots for the opening of a partition in an epoch in which this node has not opened
    /// it yet. Returns false if it does not.
    pub fn expect_snapshots(&self, id: PartitionId, epoch: u32, snapshots: CarriedSnapshots) -> Result<bool> {
        let member = self.require_member()?;
        let is_opened = member.epoch_of(id).is_some_and(|(opened, _)| opened >= epoch);
        Ok(!is_opened && member.snapshots.add(&self.node().memory, id, (epoch, snapshots)))
    }
}
