//! Which nodes have pages of which partitions, in memory.

use std::collections::BTreeMap;

use fulmar_cluster::{NodeId, PartitionRecord};
use fulmar_pages::{PageNo, PartitionId};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The nodes that have pages of this node's partitions.
#[derive(Default)]
pub(crate) struct PageServers {
    nodes: Mutex<BTreeMap<PartitionId, NodeId>>,
    /// Partitions to copy, and their pages to begin with.
    pub(super) requested: Mutex<BTreeMap<PartitionId, Vec<PageNo>>>,
    pub(super) wake: Notify,
}

impl PageServers {
    /// Records the page server of a partition that this node opens.
    pub fn set(&self, partition: PartitionId, record: &PartitionRecord) {
        let mut nodes = self.nodes.lock();
        match record.page_server {
            Some(server) => nodes.insert(partition, server),
            None => nodes.remove(&partition),
        };
    }

    /// Begins to copy the pages of a partition, these first.
    pub fn request(&self, partition: PartitionId, hottest: Vec<PageNo>) {
        self.requested.lock().insert(partition, hottest);
        self.wake.notify_one();
    }

    /// Forgets a dropped partition.
    pub fn forget(&self, partition: PartitionId) {
        self.nodes.lock().remove(&partition);
    }

    /// The page servers.
    pub(super) fn distinct(&self) -> Vec<NodeId> {
        let mut all: Vec<NodeId> = self.nodes.lock().values().copied().collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}
