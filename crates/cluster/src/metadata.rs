//! Typed reads and compare-and-set of the ownership records.

use std::collections::BTreeMap;

use fulmar_meta::{Entry, Outcome, Transaction};
use fulmar_pages::PartitionId;

use crate::environment::Environment;
use crate::records::{Record, decode, encode, node_key, owner_key, partition_of_key};
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

/// The record of a key. Repeats the request until the store answers.
pub async fn read<E: Environment, T: Record>(env: &E, key: &str) -> Result<Option<Read<T>>, Error> {
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

/// All keys that begin with `prefix`, in order, and their values. Repeats the request until the store
/// answers.
pub async fn entries<E: Environment>(env: &E, prefix: &str) -> Vec<Entry> {
    loop {
        match env.metadata().scan(prefix).await {
            Ok(entries) => return entries,
            Err(_) => retry::pause(env).await,
        }
    }
}

/// The records of all keys that begin with `prefix`. Repeats the request until the store answers.
pub async fn scan<E: Environment, T: Record>(env: &E, prefix: &str) -> Result<Vec<(String, Read<T>)>, Error> {
    let decoded = |entry: Entry| {
        let record = decode(&entry.key, &entry.value)?;
        Ok((entry.key, Read { record, revision: entry.modified }))
    };
    entries(env, prefix).await.into_iter().map(decoded).collect()
}

/// The records of all partitions. Repeats the request until the store answers.
pub async fn partitions<E: Environment>(env: &E) -> Result<Vec<(PartitionId, Read<PartitionRecord>)>, Error> {
    let records = scan(env, "owner/").await?.into_iter();
    Ok(records.filter_map(|(key, read)| Some((partition_of_key(&key)?, read))).collect())
}

/// The records of all nodes. Repeats the request until the store answers.
pub async fn nodes<E: Environment>(env: &E) -> Result<BTreeMap<NodeId, NodeRecord>, Error> {
    let records = scan::<E, NodeRecord>(env, "node/").await?.into_iter();
    let node = |key: &str| u32::from_str_radix(key.strip_prefix("node/")?, 16).ok().map(NodeId);
    Ok(records.filter_map(|(key, read)| Some((node(&key)?, read.record))).collect())
}

/// A transaction that replaces a key's record if it is still the one that was read (`None`:
/// absent).
pub(crate) fn replace<T: Record>(key: &str, from: Option<&Read<T>>, to: &T) -> Result<Transaction, Error> {
    let compared = match from {
        Some(read) => Transaction::new().unchanged(key, read.revision),
        None => Transaction::new().absent(key),
    };
    Ok(compared.put(key, encode(to)?))
}

/// Replaces a node's record if it is still the one that was read (`None`: absent).
pub async fn change_node<E: Environment>(
    env: &E,
    node: NodeId,
    from: Option<&Read<NodeRecord>>,
    to: &NodeRecord,
) -> Result<Change, Error> {
    Ok(transact(env, replace(&node_key(node), from, to)?).await)
}

/// Replaces a partition's record if it and the records of these nodes are still those that were
/// read. (`compare_nodes`; without that rule only the partition's record is compared.)
pub async fn change_owner<E: Environment>(
    env: &E,
    partition: PartitionId,
    from: &Read<PartitionRecord>,
    nodes: &[(NodeId, &Read<NodeRecord>)],
    to: &PartitionRecord,
) -> Result<Change, Error> {
    Ok(transact(env, owner_change(env, partition, from, nodes, to)?).await)
}

/// The transaction of [`change_owner`].
pub(crate) fn owner_change<E: Environment>(
    env: &E,
    partition: PartitionId,
    from: &Read<PartitionRecord>,
    nodes: &[(NodeId, &Read<NodeRecord>)],
    to: &PartitionRecord,
) -> Result<Transaction, Error> {
    owner_changes(env, [(partition, from, to)], nodes)
}

/// The transaction that replaces the records of several partitions, each if it is still the one
/// that was read.
pub(crate) fn owner_changes<'a, E: Environment>(
    env: &E,
    changes: impl IntoIterator<Item = (PartitionId, &'a Read<PartitionRecord>, &'a PartitionRecord)>,
    nodes: &[(NodeId, &Read<NodeRecord>)],
) -> Result<Transaction, Error> {
    let mut transaction = Transaction::new();
    for (partition, from, to) in changes {
        let key = owner_key(partition);
        transaction = transaction.unchanged(key.as_str(), from.revision).put(key, encode(to)?);
    }
    if env.rules().compare_nodes {
        for (node, read) in nodes {
            transaction = transaction.unchanged(node_key(*node), read.revision);
        }
    }
    Ok(transaction)
}

/// Changes the record of a partition that this node owns, and repeats the change until it is known
/// to be applied. Fails if this incarnation has ended.
///
/// An earlier change by this node of unknown outcome may be applied first. `next` is then applied
/// to the record that it left.
pub async fn change_own<E: Environment>(
    env: &E,
    partition: PartitionId,
    read: &Read<PartitionRecord>,
    node: (NodeId, &Read<NodeRecord>),
    next: impl Fn(&PartitionRecord) -> PartitionRecord,
) -> Result<Read<PartitionRecord>, Error> {
    change_own_and(env, partition, read, node, next, Ok).await
}

/// Like [`change_own`]; `extend` adds changes of other records to the same transaction. It is called
/// for each attempt, compares the records that it changes, and fails if one of them has changed such
/// that no earlier attempt can still be applied.
pub async fn change_own_and<E: Environment>(
    env: &E,
    partition: PartitionId,
    read: &Read<PartitionRecord>,
    (node, node_read): (NodeId, &Read<NodeRecord>),
    next: impl Fn(&PartitionRecord) -> PartitionRecord,
    extend: impl Fn(Transaction) -> Result<Transaction, Error>,
) -> Result<Read<PartitionRecord>, Error> {
    let mut read = read.clone();
    let fenced = Error::Fenced { node, incarnation: node_read.record.incarnation };
    loop {
        let wanted = next(&read.record);
        let change = owner_change(env, partition, &read, &[(node, node_read)], &wanted)?;
        let extended = extend(change);
        let failure = match extended {
            Ok(change) => {
                transact(env, change).await;
                None
            }
            Err(error) => Some(error),
        };
        let Some(now) = self::partition(env, partition).await? else { return Err(fenced) };
        if now.record == wanted {
            // Also if it is an earlier attempt of unknown outcome that has made `extend` fail.
            return Ok(now);
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let is_current = self::node(env, node).await?.is_some_and(|node| node.revision == node_read.revision);
        if !is_current || now.record.owner != node {
            return Err(fenced);
        }
        read = now;
        retry::pause(env).await;
    }
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
