//! Quarantined partitions, whose statements have killed two nodes ([`fulmar_cluster::quarantine`]).
//!
//! The handler of a fatal signal records the partition in the data directory. The next incarnation
//! reports it before it serves ([`Node::join`]). From then on no node opens the partition, and the
//! one that has it open closes it: its sessions end when they continue. `ALTER DATABASE ... RESUME`
//! ends the quarantine. The system database is exempt: that statement needs it.

use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::quarantine;
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_meta::SYSTEM_PARTITION;
use fulmar_pages::PartitionId;
use hashbrown::HashSet;
use tokio::time::timeout;

use crate::Node;
use crate::assignments::{METADATA_TIMEOUT, metadata_unavailable, protocol_error};

/// How often a node checks for quarantined partitions that it has open: one that was being opened
/// when the quarantine began.
const CLOSE_INTERVAL: Duration = Duration::from_secs(1);

impl Node {
    /// Fails if no node may open a partition. Read linearizably.
    pub(crate) async fn check_quarantine(&self, partition: PartitionId) -> Result<()> {
        if partition == SYSTEM_PARTITION {
            return Ok(());
        }
        let read = timeout(METADATA_TIMEOUT, quarantine::is_quarantined(self.environment(), partition)).await;
        match read.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))? {
            true => Err(quarantined()),
            false => Ok(()),
        }
    }

    /// Like [`Node::check_quarantine`], from memory.
    pub(crate) fn check_known_quarantine(&self, partition: PartitionId) -> Result<()> {
        match partition != SYSTEM_PARTITION && self.owners().is_quarantined(partition) {
            true => Err(quarantined()),
            false => Ok(()),
        }
    }

    /// Ends the quarantine of a partition.
    pub(crate) async fn resume_partition(&self, partition: PartitionId) -> Result<()> {
        let resumed = timeout(METADATA_TIMEOUT, quarantine::resume(self.environment(), partition)).await;
        match resumed.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))? {
            true => Ok(()),
            false => Err(Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, "the database is not quarantined")),
        }
    }

    /// Closes the partitions of this node that become quarantined.
    pub(crate) async fn close_quarantined(self: Arc<Self>) {
        let mut reported = HashSet::new();
        loop {
            let changed = self.owners().quarantine_changed();
            let mut quarantined = self.owners().quarantined_of(self.id());
            quarantined.retain(|partition| *partition != SYSTEM_PARTITION);
            reported.retain(|partition| quarantined.contains(partition));
            for partition in &quarantined {
                // Set before this task starts.
                let Ok(partitions) = self.partitions() else { continue };
                if reported.insert(*partition) {
                    tracing::error!(
                        partition = partition.0,
                        "database quarantined: its statements have killed two nodes"
                    );
                    partitions.record_quarantine(*partition);
                }
                // Fails if it is not open: then it stays closed.
                if let Ok(_moving) = self.begin_move(*partition)
                    && partitions.release_to_change(*partition).await.is_ok()
                {
                    let _ = self.take_back(*partition).await;
                }
            }
            match quarantined.is_empty() {
                true => changed.await,
                false => drop(timeout(CLOSE_INTERVAL, changed).await),
            }
        }
    }
}

fn quarantined() -> Error {
    Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, "the database is quarantined")
        .detail("Its statements have killed two nodes within ten minutes.")
        .hint("Find the statement, then run ALTER DATABASE ... RESUME.")
}
