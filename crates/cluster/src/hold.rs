//! Holds: objects that a node reads, and that must not be deleted although no manifest of the
//! newest state names them. A node holds the objects of an older manifest before it restores it,
//! creates a branch of it, or exports it.
//!
//! A hold is a record in the metadata store. It and the collector's batches exclude each other:
//! - a hold is created by a transaction that compares the collector's record, as read when its
//!   batch contained none of the objects;
//! - the collector registers a batch by a transaction that compares `holds`, a key that every new
//!   hold changes, as read before it chose the batch ([`crate::collection`]).
//!
//! An object that exists after the hold was created, and was not in the batch then, is therefore
//! not deleted while the hold stands. A hold counts as long as its holder's incarnation lives.

use fulmar_meta::Revision;
use serde::{Deserialize, Serialize};

use crate::collection::{COLLECTION_KEY, CollectionRecord, ObjectName};
use crate::environment::ObjectEnvironment;
use crate::metadata::{self, Change};
use crate::records::{VERSION, node_key, records};
use crate::{Error, Incarnation, NodeId, NodeRecord, NodeState, Read, retry};

/// Changed by every new hold.
pub(crate) const HOLDS_KEY: &str = "holds";

/// The metadata store's record of a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HoldRecord {
    v: u32,
    /// The holder.
    pub node: NodeId,
    /// Its incarnation. The hold ends with it.
    pub incarnation: Incarnation,
    /// The objects that are not deleted.
    pub objects: Vec<ObjectName>,
}

records!(HoldRecord);

impl HoldRecord {
    /// Returns false if the holder's incarnation has ended.
    pub(crate) fn counts(&self, holder: Option<&NodeRecord>) -> bool {
        holder.is_some_and(|holder| match holder.incarnation.cmp(&self.incarnation) {
            std::cmp::Ordering::Less => true,
            std::cmp::Ordering::Equal => holder.state == NodeState::Alive,
            std::cmp::Ordering::Greater => false,
        })
    }
}

/// A hold of this node.
#[derive(Clone, Debug)]
pub struct Hold {
    key: String,
    revision: Revision,
}

/// Holds objects. `number` must be new in this incarnation. Returns `None` if an
/// object has been deleted or will be.
pub async fn hold<E: ObjectEnvironment>(
    env: &E,
    (node, node_read): (NodeId, &Read<NodeRecord>),
    number: u64,
    objects: &[ObjectName],
) -> Result<Option<Hold>, Error> {
    let incarnation = node_read.record.incarnation;
    let key = format!("hold/{:08x}/{incarnation:016x}/{number:016x}", node.0);
    let record = HoldRecord { v: VERSION, node, incarnation, objects: objects.to_vec() };
    let hold = loop {
        let collection: Option<Read<CollectionRecord>> = metadata::read(env, COLLECTION_KEY).await?;
        if let Some(read) = metadata::read::<E, HoldRecord>(env, &key).await? {
            // An attempt of unknown outcome was applied.
            break Hold { key, revision: read.revision };
        }
        let mut transaction =
            metadata::replace(&key, None, &record)?.unchanged(node_key(node), node_read.revision);
        transaction = transaction.put(HOLDS_KEY, key.as_bytes());
        transaction = match &collection {
            Some(read) if objects.iter().any(|object| read.record.batch.contains(object)) => return Ok(None),
            Some(read) => transaction.unchanged(COLLECTION_KEY, read.revision),
            None => transaction.absent(COLLECTION_KEY),
        };
        if metadata::transact(env, transaction).await == Change::Conflict {
            let now = metadata::node(env, node).await?;
            if now.is_none_or(|now| now.revision != node_read.revision) {
                return Err(Error::Fenced { node, incarnation });
            }
        }
    };
    if exist(env, objects).await {
        return Ok(Some(hold));
    }
    release(env, hold).await;
    Ok(None)
}

/// Ends a hold. Tries once: a hold that remains ends with its incarnation.
pub async fn release<E: ObjectEnvironment>(env: &E, hold: Hold) {
    let transaction = fulmar_meta::Transaction::new().unchanged(hold.key.clone(), hold.revision);
    metadata::transact(env, transaction.delete(hold.key)).await;
}

/// Returns true if all objects exist.
async fn exist<E: ObjectEnvironment>(env: &E, objects: &[ObjectName]) -> bool {
    for object in objects {
        loop {
            let exists = match *object {
                ObjectName::Segment(segment) => env.objects().has_segment(segment).await,
                ObjectName::Manifest(partition, name) => env.objects().has_manifest(partition, name).await,
            };
            match exists {
                Ok(true) => break,
                Ok(false) => return false,
                Err(_) => retry::pause(env).await,
            }
        }
    }
    true
}
