//! Election of the node that fills a role, such as the collector.
//!
//! The record of a role names a node's incarnation. A node takes the role by a transaction that
//! compares the role's record and its own node record (`alive`), when the holder's incarnation has
//! ended. There is no lease: a holder that has ended cannot change the metadata store in the role's
//! name, because its transactions compare the role's record ([`Term::compare`]). Whatever it does
//! outside of the metadata store must stay right after its term: see [`crate::collection`].

use fulmar_meta::{Revision, Transaction};
use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::metadata::{self, Change};
use crate::records::{VERSION, node_key, records};
use crate::{Error, Incarnation, NodeId, NodeRecord, NodeState, Read};

/// The metadata store's record of a role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleRecord {
    v: u32,
    /// The holder.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Incremented at each election.
    pub term: u64,
}

records!(RoleRecord);

/// The record of a role at one time. A change that compares it is applied only while the role's
/// term has not ended, whichever node makes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleFence {
    key: String,
    revision: u64,
}

impl RoleFence {
    /// The transaction, which is applied only if the term has not ended.
    pub fn compare(&self, transaction: Transaction) -> Transaction {
        transaction.unchanged(self.key.clone(), Revision(self.revision))
    }
}

/// A role that this node holds.
#[derive(Clone, Debug)]
pub struct Term {
    key: String,
    read: Read<RoleRecord>,
}

impl Term {
    /// The transaction, which is applied only if the term has not ended.
    pub fn compare(&self, transaction: Transaction) -> Transaction {
        transaction.unchanged(self.key.clone(), self.read.revision)
    }

    /// The fence of this term, for requests to other nodes.
    pub fn fence(&self) -> RoleFence {
        RoleFence { key: self.key.clone(), revision: self.read.revision.0 }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.read.record.term
    }
}

/// The key of a role's record.
fn role_key(role: &str) -> String {
    format!("role/{role}")
}

/// Takes a role if no living incarnation holds it. `None`: another node holds it.
pub async fn campaign<E: Environment>(
    env: &E,
    role: &str,
    (node, node_read): (NodeId, &Read<NodeRecord>),
) -> Result<Option<Term>, Error> {
    let key = role_key(role);
    let incarnation = node_read.record.incarnation;
    loop {
        let read: Option<Read<RoleRecord>> = metadata::read(env, &key).await?;
        if let Some(read) = &read {
            let RoleRecord { node: holder, incarnation: held, .. } = read.record;
            if (holder, held) == (node, incarnation) {
                return Ok(Some(Term { key, read: read.clone() }));
            }
            let holder = metadata::node(env, holder).await?;
            let is_alive = holder.is_some_and(|holder| {
                holder.record.incarnation == held && holder.record.state == NodeState::Alive
            });
            if is_alive {
                return Ok(None);
            }
        }
        let term = read.as_ref().map_or(1, |read| read.record.term + 1);
        let next = RoleRecord { v: VERSION, node, incarnation, term };
        let transaction = metadata::replace(&key, read.as_ref(), &next)?;
        let transaction = transaction.unchanged(node_key(node), node_read.revision);
        // An unknown outcome is settled by reading the record again: only this node writes it in
        // this incarnation's name.
        if metadata::transact(env, transaction).await == Change::Conflict {
            return Ok(None);
        }
    }
}
