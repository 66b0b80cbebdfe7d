//! The first records of a cluster that a single node becomes.
//!
//! The node gets the id [`FIRST_NODE`]. Id 1 would give its logs in the store the names of the single
//! node's logs ([`log_node`](crate::logs::log_node)), which are no logs of incarnations.
//!
//! The new records state that incarnation 1 of the node has ended after it owned every partition from
//! the beginning of its log, and wrote nothing. The node then begins incarnation 2 like after any
//! crash, or another node fails it over if it does not. Both start from the manifests.
//!
//! The segments of the single node count as those of incarnation 1, so they are kept until every
//! partition has a manifest of the cluster.
//!
//! Epochs and terms begin above the term in which the single node was flushed, the greatest in the
//! store: version numbers and names of segments of the cluster are above all earlier ones.

use std::sync::Arc;

use async_trait::async_trait;
use fulmar_cluster::records::{encode as encode_record, node_key, owner_key};
use fulmar_cluster::{NodeId, NodeRecord, NodeState, PartitionRecord, Position};
use fulmar_meta::{
    Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction, partition_of_key,
    value_in_cluster,
};

use crate::directory::Conversion;
use crate::registration::{CLUSTER_KEY, converted_terms, founding_records, member_key};

/// The id of the first node of a cluster that began as a single node.
const FIRST_NODE: NodeId = NodeId(2);

/// What a single node's metadata store becomes: its catalog, and the records of a cluster. Read-only.
pub struct ConvertedStore {
    source: Arc<dyn MetadataStore>,
    conversion: Conversion,
    /// The greatest term in the store.
    last_term: u32,
}

impl ConvertedStore {
    /// The contents for a cluster that `source`, the catalog of a single node, becomes.
    pub fn new(source: Arc<dyn MetadataStore>, conversion: Conversion, last_term: u32) -> Self {
        ConvertedStore { source, conversion, last_term }
    }

    fn owner_record(&self) -> Result<Vec<u8>, MetaError> {
        let from = Position { incarnation: 1, slot: 0 };
        encode(&PartitionRecord::converted(FIRST_NODE, self.last_term + 1, from))
    }

    fn new_records(&self) -> Result<Vec<(String, Vec<u8>)>, MetaError> {
        let Conversion { cluster, name, run, .. } = &self.conversion;
        let node = encode(&NodeRecord::new(1, NodeState::Ended, *run))?;
        let (cluster, member) = founding_records(cluster, FIRST_NODE, self.last_term + 1);
        Ok(vec![
            (CLUSTER_KEY.to_owned(), cluster),
            (member_key(name), member),
            (node_key(FIRST_NODE), node),
            converted_terms(FIRST_NODE, 1, self.last_term),
        ])
    }
}

fn encode<T: fulmar_cluster::records::Record>(record: &T) -> Result<Vec<u8>, MetaError> {
    let corrupt = |error| MetaError::Corrupt { place: "of a new cluster".to_owned(), cause: error };
    encode_record(record).map_err(|error| corrupt(error.to_string()))
}

#[async_trait]
impl MetadataStore for ConvertedStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        Ok(self.scan(key).await?.into_iter().find(|entry| entry.key == key))
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        let modified = Revision::default();
        let mut entries = Vec::new();
        for entry in self.source.scan("").await? {
            if let Some(partition) = partition_of_key(&entry.key)? {
                entries.push(Entry { key: owner_key(partition), value: self.owner_record()?, modified });
            }
            let value = value_in_cluster(&entry)?;
            entries.push(Entry { value, ..entry });
        }
        for (key, value) in self.new_records()? {
            entries.push(Entry { key, value, modified });
        }
        entries.retain(|entry| entry.key.starts_with(prefix));
        entries.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        Ok(entries)
    }

    async fn transact(&self, _: Transaction) -> Result<Outcome, MetaError> {
        Err(MetaError::ReadOnly)
    }

    async fn follow(&self, _: Arc<dyn Observer>) -> Result<(), MetaError> {
        Err(MetaError::ReadOnly)
    }
}
