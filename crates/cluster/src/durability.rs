//! Changing the durability of a partition: the kind of log that its owner writes.
//!
//! The owner holds new commits, waits until the accepted ones are durable, and stores a manifest
//! that covers all of them. Then one transaction begins a new epoch: that manifest is its base, and
//! its only range begins in the other log. A commit that was accepted in between would be in
//! neither, so the owner accepts nothing until the outcome is known. Sessions stay connected and
//! wait.
//!
//! A crash before the transaction is applied leaves the partition as it was, with one manifest
//! more. A crash after it leaves the new epoch without commits.

use fulmar_meta::Transaction;
use fulmar_pages::PartitionId;

use crate::environment::Environment;
use crate::{Error, LogKind, ManifestName, NodeId, NodeRecord, PartitionRecord, Position, Read, metadata};

/// Changes the log of a partition that this node owns to `log`, from the position `from` of that
/// log on. `manifest` is stored and covers every commit. Everything before `from` is durable: the
/// log may be sealed before a later position, and recovery would then expect the objects up to
/// it. `catalog` adds the change of the catalog to the transaction, as in
/// [`metadata::change_own_and`]. Fails if this incarnation has ended.
pub async fn change<E: Environment>(
    env: &E,
    partition: PartitionId,
    read: &Read<PartitionRecord>,
    node: (NodeId, &Read<NodeRecord>),
    manifest: ManifestName,
    (log, from): (LogKind, Position),
    catalog: impl Fn(Transaction) -> Result<Transaction, Error>,
) -> Result<Read<PartitionRecord>, Error> {
    let next = |record: &PartitionRecord| record.rebased(manifest, log, from);
    metadata::change_own_and(env, partition, read, node, next, catalog).await
}
