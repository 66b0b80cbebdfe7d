//! Transaction ids that no two incarnations of a node assign.
//!
//! An id contains the time of its assignment and the node, but not the incarnation. A clock that was
//! set back while the node restarted would therefore repeat ids: a commit would fail because its id
//! was decided before, or would be reported although another transaction was committed. So an
//! incarnation assigns ids only of times that it has reserved in the record `ids/NODE`, and above all
//! that earlier incarnations have reserved.
//!
//! The record is read after the incarnation is `alive`, and changed only while it is: a late request of
//! an earlier incarnation changes nothing.

use std::time::Duration;

use fulmar_meta::Transaction;
use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::incarnation::Begun;
use crate::metadata::{self, Change};
use crate::records::{VERSION, node_key, records};
use crate::{Error, NodeId, retry};

/// How long before the end of the reserved time a node should reserve more.
pub const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);
/// How far ahead of its clock an incarnation reserves times. Ids are ahead of the clock by as much when
/// a node has restarted.
const AHEAD_MS: u64 = 30_000;
/// Times that every incarnation has. A node that starts again and again gets ahead of its clock by as
/// much each time.
const MIN_MS: u64 = 1_000;

/// The record `ids/NODE`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct IdsRecord {
    v: u32,
    /// Ids of times before this one may have been assigned, in ms since 1970.
    until_ms: u64,
}

records!(IdsRecord);

/// The times of ids that an incarnation may assign, in ms since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Earlier times were reserved before.
    pub from_ms: u64,
    /// The end.
    pub until_ms: u64,
}

/// The key of the record.
pub fn ids_key(node: NodeId) -> String {
    format!("ids/{:08x}", node.0)
}

/// Reserves times for an incarnation whose clock shows `now_ms`. Fails if it has ended.
pub async fn reserve<E: Environment>(
    env: &E,
    node: NodeId,
    begun: &Begun,
    now_ms: u64,
) -> Result<Reserved, Error> {
    let key = ids_key(node);
    loop {
        let read = metadata::read::<E, IdsRecord>(env, &key).await?;
        let from_ms = read.as_ref().map_or(0, |read| read.record.until_ms);
        let until_ms = (now_ms + AHEAD_MS).max(from_ms + MIN_MS);
        let next = IdsRecord { v: VERSION, until_ms };
        let own: Transaction = metadata::replace(&key, read.as_ref(), &next)?;
        match metadata::transact(env, own.unchanged(node_key(node), begun.read.revision)).await {
            Change::Applied => return Ok(Reserved { from_ms, until_ms }),
            Change::Conflict => {
                let current = metadata::node(env, node).await?;
                if current.is_none_or(|read| read.revision != begun.read.revision) {
                    return Err(Error::Fenced { node, incarnation: begun.incarnation });
                }
            }
            // If it was applied, its times are skipped.
            Change::Unknown => retry::pause(env).await,
        }
    }
}
