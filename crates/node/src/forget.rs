//! Removing a lost node, so that its name can be used again.
//!
//! One transaction deletes the node's member record, and compares it and the node's record, which
//! must be `sealed`. The node's record stays, because its seal and the maker of its segments are still
//! needed. It gets a new random number, so the old data directory does not match it
//! ([`fulmar_cluster::directory`]): a process of the node that has read its member record before the
//! transaction cannot begin an incarnation after it.
//!
//! Partitions are assigned only to nodes that are `alive`, which the same comparison excludes. So the
//! node gets none after they were read. Its id is not used again.

use fulmar_cluster::election::RoleFence;
use fulmar_cluster::metadata::{self, Change};
use fulmar_cluster::records::{encode, node_key};
use fulmar_cluster::{LogKind, NodeId, NodeRecord, NodeState, PartitionRecord, Read};
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_meta::{Entry, Transaction};
use fulmar_pages::PartitionId;

use crate::Node;
use crate::assignments::{metadata_unavailable, protocol_error};
use crate::control::forbidden_key;
use crate::registration::{MemberRecord, member_key};

/// Number of databases that an error lists.
const MAX_LISTED: usize = 5;

impl Node {
    /// Removes a node from the cluster, if the term of the `requester` has not ended.
    pub(crate) async fn forget(&self, name: &str, requester: Option<&RoleFence>) -> Result<()> {
        let member = self.metadata().get(&member_key(name)).await.map_err(|_| metadata_unavailable())?;
        let missing = || {
            Error::new(sqlstate::INVALID_CATALOG_NAME, format!("node \"{name}\" does not exist"))
                .hint("\"fulmar node list\" lists the nodes.")
        };
        let member = member.ok_or_else(missing)?;
        let id = NodeId(decoded(&member)?.id);
        let node = metadata::node(self.environment(), id).await.map_err(|error| protocol_error(&error))?;
        if let Some(node) = &node {
            check_ended(name, &node.record)?;
        }
        let partitions = metadata::partitions(self.environment()).await;
        self.check_unused(name, id, &partitions.map_err(|error| protocol_error(&error))?)?;
        let mut forget =
            Transaction::new().unchanged(member.key.as_str(), member.modified).delete(member.key);
        // Another node with this name may be used.
        forget = forget.delete(forbidden_key(name));
        forget = match node {
            Some(Read { record, revision }) => {
                let next = NodeRecord::new(record.incarnation, record.state, rand::random());
                let value = encode(&next).map_err(|error| protocol_error(&error))?;
                forget.unchanged(node_key(id), revision).put(node_key(id), value)
            }
            // It has never started.
            None => forget.absent(node_key(id)),
        };
        if let Some(fence) = requester {
            forget = fence.compare(forget);
        }
        match metadata::transact(self.environment(), forget).await {
            Change::Applied => {
                tracing::info!(node = name, id = id.0, "removed a node from the cluster");
                Ok(())
            }
            Change::Conflict => Err(not_ended(name, "it has started in the meantime")),
            Change::Unknown => Err(metadata_unavailable()),
        }
    }

    /// Fails if a partition needs the node or its logs.
    fn check_unused(
        &self,
        name: &str,
        id: NodeId,
        partitions: &[(PartitionId, Read<PartitionRecord>)],
    ) -> Result<()> {
        let select = |needs: &dyn Fn(&PartitionRecord) -> bool| {
            let needing = partitions.iter().filter(|(_, read)| needs(&read.record));
            needing.map(|(partition, _)| *partition).collect::<Vec<_>>()
        };
        let in_use = |text: &str, partitions: &[PartitionId], hint: &str| {
            let names = self.listed(partitions);
            Err(Error::new(sqlstate::OBJECT_IN_USE, format!("node \"{name}\" {text}: {names}")).hint(hint))
        };
        let owned = select(&|record| record.owner == id);
        if !owned.is_empty() {
            let is_local = |(partition, read): &(PartitionId, Read<PartitionRecord>)| {
                owned.contains(partition) && read.record.log() == LogKind::Local
            };
            let hint = match partitions.iter().any(is_local) {
                true => {
                    "Databases with durability = 'local' exist only in the node's data directory: start the \
                         node and move them, or drop them."
                }
                false => "Wait until they have been failed over, and retry.",
            };
            return in_use("owns databases", &owned, hint);
        }
        let needed = select(&|record| {
            record.page_server == Some(id) || record.ranges.iter().any(|range| range.node == id)
        });
        if !needed.is_empty() {
            let hint =
                "Move them to another node (ALTER DATABASE ... MOVE TO), which flushes them, and retry.";
            return in_use("has logs that databases need", &needed, hint);
        }
        Ok(())
    }

    /// The first databases of these partitions, for an error.
    fn listed(&self, partitions: &[PartitionId]) -> String {
        let tenants = self.catalog().all_tenants();
        let name = |id: &PartitionId| {
            let tenant = tenants.iter().find(|tenant| tenant.partition == *id);
            tenant.map_or_else(|| format!("partition {id}"), |tenant| tenant.name.clone())
        };
        let names: Vec<String> = partitions.iter().take(MAX_LISTED).map(name).collect();
        match partitions.len().saturating_sub(MAX_LISTED) {
            0 => names.join(", "),
            more => format!("{} and {more} more", names.join(", ")),
        }
    }
}

fn decoded(member: &Entry) -> Result<MemberRecord> {
    MemberRecord::decode(member).map_err(|error| Error::new(sqlstate::INTERNAL, error.to_string()))
}

fn check_ended(name: &str, record: &NodeRecord) -> Result<()> {
    match record.state {
        NodeState::Sealed { .. } => Ok(()),
        NodeState::Alive => Err(not_ended(name, "its state is alive")),
        NodeState::Ended => Err(not_ended(name, "its log is not sealed yet")),
    }
}

fn not_ended(name: &str, reason: &str) -> Error {
    Error::new(sqlstate::OBJECT_IN_USE, format!("node \"{name}\" has not ended: {reason}"))
        .hint("Stop the node, wait until \"fulmar node list\" shows it as sealed, and retry.")
}
