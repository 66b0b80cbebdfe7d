//! Replacing the contents of a partition by a manifest: a restore.
//!
//! The owner no longer accepts commits, has made the accepted ones part of a manifest, and has
//! stored the restored version as a draft: a manifest of the next epoch. Then one transaction begins
//! that epoch, with the draft as its base. It changes the catalog too, which names the lineage of the
//! contents, so that owner and contents change together.
//!
//! # Crash points
//! - Before the transaction, or if it is not applied: the partition's record does not name the draft,
//!   so recovery ignores it (`named_manifests`). The next owner has the contents as they were.
//! - The owner was failed over, and its transaction is applied late: it compares the partition's
//!   record and the node's, and fails. So an overtaken restore does not replace newer commits.
//! - After the transaction: every owner begins with the draft. Records before `from` are in no range,
//!   so none of the discarded commits reappears.
//! - The outcome is unknown: the owner repeats the transaction until it is known, and serves nothing
//!   meanwhile. If it dies, the record shows its successor which contents count.

use fulmar_meta::Transaction;
use fulmar_pages::PartitionId;

use crate::environment::Environment;
use crate::{Error, LogKind, ManifestName, NodeId, NodeRecord, PartitionRecord, Position, Read, metadata};

/// Makes a stored draft the contents of a partition that this node owns. Records from the position
/// `from` of the log `log` on follow it; everything before `from` is durable. `catalog` adds the
/// change of the catalog to the transaction, as in [`metadata::change_own_and`]. Fails if this
/// incarnation has ended.
pub async fn change<E: Environment>(
    env: &E,
    partition: PartitionId,
    read: &Read<PartitionRecord>,
    node: (NodeId, &Read<NodeRecord>),
    draft: ManifestName,
    (log, from): (LogKind, Position),
    catalog: impl Fn(Transaction) -> Result<Transaction, Error>,
) -> Result<Read<PartitionRecord>, Error> {
    let next = |record: &PartitionRecord| record.rebased(draft, log, from);
    metadata::change_own_and(env, partition, read, node, next, catalog).await
}
