//! The ownership records of a cluster, for a read-only node that is no member of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use fulmar_cluster::records::{decode, node_of_key, partition_of_key};
use fulmar_cluster::{Incarnation, LogKind, NodeId, NodeRecord, PartitionRecord};
use fulmar_engine::{Error, LogSource, Ownership, Ownerships, ReplayRange, Result, sqlstate};
use fulmar_meta::{Change, Entry, MetaError, MetadataStore, Observer, Transaction};
use fulmar_pages::{Durability, PartitionId};
use hashbrown::HashMap;
use parking_lot::RwLock;
use tokio::time::timeout;

use crate::assignments::{METADATA_TIMEOUT, metadata_unavailable};
use crate::logs::{log_node, log_position};
use crate::registration::CLUSTER_KEY;

/// The owners of all partitions, as far as this process has learned of changes.
pub struct ReplicaOwners {
    cluster: u128,
    metadata: Arc<dyn MetadataStore>,
    records: Arc<Records>,
}

#[derive(Default)]
struct Records(RwLock<State>);

#[derive(Default)]
struct State {
    partitions: HashMap<PartitionId, PartitionRecord>,
    /// The newest incarnation of each node.
    nodes: BTreeMap<NodeId, Incarnation>,
}

impl ReplicaOwners {
    /// Follows the records of a cluster.
    pub async fn follow(
        metadata: Arc<dyn MetadataStore>,
        cluster: u128,
    ) -> std::result::Result<Self, MetaError> {
        let records = Arc::new(Records::default());
        metadata.follow(records.clone()).await?;
        Ok(ReplicaOwners { cluster, metadata, records })
    }

    /// The durability of a partition's commits, if it has an owner.
    pub fn durability(&self, partition: PartitionId) -> Option<Durability> {
        let state = self.records.0.read();
        state.partitions.get(&partition).map(|record| match record.log() {
            LogKind::Shared => Durability::Shared,
            LogKind::Local => Durability::Local,
        })
    }
}

#[async_trait]
impl Ownerships for ReplicaOwners {
    async fn catch_up(&self) -> Result<()> {
        // The record exists, so this changes nothing. It conflicts at the newest revision, which all
        // observers have reached when the store returns.
        let conflicting = Transaction::new().absent(CLUSTER_KEY);
        let caught_up = timeout(METADATA_TIMEOUT, self.metadata.transact(conflicting)).await;
        match caught_up.map_err(|_| metadata_unavailable())? {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, error.to_string()).hint(error.remedy()))
            }
        }
    }

    fn ownership(&self, partition: PartitionId) -> Option<Ownership> {
        let state = self.records.0.read();
        let record = state.partitions.get(&partition)?;
        let (open, earlier) = record.ranges.split_last()?;
        let node = |node| log_node(self.cluster, node);
        let earlier = earlier.iter().filter(|range| range.log == LogKind::Shared);
        let range = |range: &fulmar_cluster::Range| {
            let (from, to) = (log_position(range.from), log_position(range.to?));
            Some(ReplayRange { log_node: node(range.node), from, to }).filter(|range| range.from < range.to)
        };
        Some(Ownership {
            source: LogSource { log_node: node(record.owner), epoch: record.epoch },
            incarnation: *state.nodes.get(&record.owner)?,
            from: log_position(open.from),
            earlier: earlier.filter_map(range).collect(),
        })
    }
}

impl State {
    fn put(&mut self, entry: &Entry) -> std::result::Result<(), MetaError> {
        let corrupt = |error: fulmar_cluster::Error| MetaError::Corrupt {
            place: entry.key.clone(),
            cause: error.to_string(),
        };
        if let Some(partition) = partition_of_key(&entry.key) {
            let record = decode(&entry.key, &entry.value).map_err(corrupt)?;
            self.partitions.insert(partition, record);
        } else if let Some(node) = node_of_key(&entry.key) {
            let record: NodeRecord = decode(&entry.key, &entry.value).map_err(corrupt)?;
            self.nodes.insert(node, record.incarnation);
        }
        Ok(())
    }

    fn delete(&mut self, key: &str) {
        if let Some(partition) = partition_of_key(key) {
            self.partitions.remove(&partition);
        } else if let Some(node) = node_of_key(key) {
            self.nodes.remove(&node);
        }
    }
}

impl Observer for Records {
    fn snapshot(&self, entries: Vec<Entry>) -> std::result::Result<(), MetaError> {
        let mut state = State::default();
        for entry in &entries {
            state.put(entry)?;
        }
        *self.0.write() = state;
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        let mut state = self.0.write();
        for change in changes {
            let Some(value) = &change.value else {
                state.delete(&change.key);
                continue;
            };
            let entry = Entry { key: change.key.clone(), value: value.clone(), modified: change.revision };
            if let Err(error) = state.put(&entry) {
                tracing::error!(%error, "ignored an unreadable record of a partition or node");
                // An older record must not be used: another node may own the partition.
                state.delete(&change.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fulmar_cluster::records::{encode, node_key, owner_key};
    use fulmar_cluster::{NodeState, Position};
    use fulmar_meta::{Embedded, Revision};
    use fulmar_store::LogPosition;

    use super::*;

    const P: PartitionId = PartitionId(7);

    fn put(owners: &ReplicaOwners, key: String, value: Vec<u8>) {
        owners.records.changed(&[Change { key, value: Some(value), revision: Revision(1) }]);
    }

    fn put_node(owners: &ReplicaOwners, node: u32, incarnation: Incarnation) {
        let record = NodeRecord::new(incarnation, NodeState::Alive, 0);
        put(owners, node_key(NodeId(node)), encode(&record).unwrap());
    }

    fn at(incarnation: Incarnation, slot: u64) -> Position {
        Position { incarnation, slot }
    }

    #[tokio::test]
    async fn ownership_has_the_ranges_that_may_contain_records() {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn MetadataStore> =
            Arc::new(Embedded::open(&directory.path().join("meta.db")).unwrap());
        let owners = ReplicaOwners::follow(store, 100).await.unwrap();
        owners.catch_up().await.unwrap();
        assert_eq!(owners.ownership(P), None);
        let first = PartitionRecord::new(NodeId(1), LogKind::Shared, at(1, 0));
        put(&owners, owner_key(P), encode(&first).unwrap());
        assert_eq!(owners.ownership(P), None, "the node's record is not known yet");
        put_node(&owners, 1, 1);
        put_node(&owners, 2, 3);
        let ownership = owners.ownership(P).unwrap();
        assert_eq!(ownership.source, LogSource { log_node: 100, epoch: 1 });
        assert_eq!((ownership.incarnation, ownership.from), (1, LogPosition::new(1, 0)));

        // A handover leaves an empty range, a failover one with records.
        let moved = first.moved(at(1, 9), at(1, 9), NodeId(2), at(3, 0), false);
        put(&owners, owner_key(P), encode(&moved).unwrap());
        let ownership = owners.ownership(P).unwrap();
        assert_eq!(ownership.source, LogSource { log_node: 101, epoch: 2 });
        assert_eq!((ownership.incarnation, &ownership.earlier[..]), (3, &[][..]));
        let failed = moved.moved(at(3, 2), at(3, 8), NodeId(1), at(1, 0), true);
        put(&owners, owner_key(P), encode(&failed).unwrap());
        let (from, to) = (LogPosition::new(3, 2), LogPosition::new(3, 8));
        let ownership = owners.ownership(P).unwrap();
        assert_eq!(ownership.source, LogSource { log_node: 100, epoch: 3 });
        assert_eq!(ownership.earlier, [ReplayRange { log_node: 101, from, to }]);
        assert_eq!(owners.durability(P), Some(Durability::Shared));

        put(&owners, owner_key(P), b"{\"v\":2}".to_vec());
        assert_eq!(owners.ownership(P), None, "an unreadable record must not leave the old owner");
    }
}
