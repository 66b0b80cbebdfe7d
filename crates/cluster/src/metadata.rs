//! Typed reads and compare-and-set of the ownership records.

use fulmar_meta::{Outcome, Transaction};
use fulmar_pages::PartitionId;

use crate::environment::Environment;
use crate::records::{decode, encode, node_key, owner_key, partition_of_key};
use crate::{Error, NodeId, NodeRecord, PartitionRecord, Read, retry};

/// How a compare-and-set ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was applied.
    Applied,
    /// A record had changed; nothing was applied.
    Conflict,
    /// No answer came. It may have been applied, or may still be.
    Unknown,
}

/// The record of a node. Repeats the request until the store answers.
pub async fn node<E: Environment>(env: &E, node: NodeId) -> Result<Option<Read<NodeRecord>>, Error> {
    read(env, &node_key(node)).await
}

/// The record of a partition. Repeats the request until the store answers.
pub async fn partition<E: Environment>(
    env: &E,
    partition: PartitionId,
) -> Result<Option<Read<PartitionRecord>>, Error> {
    read(env, &owner_key(partition)).await
}

async fn read<E: Environment, T: for<'a> serde::Deserialize<'a>>(
    env: &E,
    key: &str,
) -> Result<Option<Read<T>>, Error> {
    loop {
        match env.metadata().get(key).await {
            Ok(None) => return Ok(None),
            Ok(Some(entry)) => {
                return Ok(Some(Read { record: decode(key, &entry.value)?, revision: entry.modified }));
            }
            Err(_) => retry::pause(env).await,
        }
    }
}

/// The records of all partitions. Repeats the request until the store answers.
pub async fn partitions<E: Environment>(env: &E) -> Result<Vec<(PartitionId, Read<PartitionRecord>)>, Error> {
    loop {
        let Ok(entries) = env.metadata().scan("owner/").await else {
            retry::pause(env).await;
            continue;
        };
        let mut partitions = Vec::new();
        for entry in entries {
            let Some(id) = partition_of_key(&entry.key) else { continue };
            let record = decode(&entry.key, &entry.value)?;
            partitions.push((id, Read { record, revision: entry.modified }));
        }
        return Ok(partitions);
    }
}

/// Replaces a node's record if it is still the one that was read (`None`: absent).
pub async fn change_node<E: Environment>(
    env: &E,
    node: NodeId,
    from: Option<&Read<NodeRecord>>,
    to: &NodeRecord,
) -> Result<Change, Error> {
    let key = node_key(node);
    let compared = match from {
        Some(read) => Transaction::new().unchanged(key.clone(), read.revision),
        None => Transaction::new().absent(key.clone()),
    };
    Ok(transact(env, compared.put(key, encode(to)?)).await)
}

/// Replaces a partition's record if it and the records of these nodes are still those that were
/// read. (Rule 2; without the rule only the partition's record is compared.)
pub async fn change_owner<E: Environment>(
    env: &E,
    partition: PartitionId,
    from: &Read<PartitionRecord>,
    nodes: &[(NodeId, &Read<NodeRecord>)],
    to: &PartitionRecord,
) -> Result<Change, Error> {
    let key = owner_key(partition);
    let mut transaction = Transaction::new().unchanged(key.clone(), from.revision);
    if env.rules().compare_nodes {
        for (node, read) in nodes {
            transaction = transaction.unchanged(node_key(*node), read.revision);
        }
    }
    Ok(transact(env, transaction.put(key, encode(to)?)).await)
}

/// Runs a transaction once.
pub async fn transact<E: Environment>(env: &E, transaction: Transaction) -> Change {
    // The protocols read records from the store, so a stale copy of them does not matter.
    let outcome = env.metadata().transact(transaction).await.or_else(|error| error.outcome().ok_or(error));
    match outcome {
        Ok(Outcome::Committed(_)) => Change::Applied,
        Ok(Outcome::Conflict(_)) => Change::Conflict,
        Err(_) => Change::Unknown,
    }
}
