//! Detects a metadata store that was restored from a backup.
//!
//! A backup lacks the partitions and the epochs that began after it was made. Their commits would be
//! treated as those of dropped partitions or of fenced owners, and would be deleted. Each node
//! therefore has a *generation*, a counter in the record `generation/NODE` and in the
//! [`Stamp`](crate::directory::Stamp) of its data directory:
//!
//! 1. A node accepts commits in an epoch of a partition only after it has read the partition's
//!    record, has then raised the generation in the metadata store ([`raise`]), and has then written
//!    it to the stamp.
//! 2. A node does not start if its stamp has a greater generation than the record ([`check`]).
//!
//! A backup without that epoch was made before the record was raised. So its generation is below
//! that of the stamp of every node with commits of the epoch.
//!
//! A revision of the metadata store would not do: other nodes that start with the restored store
//! change it, so its revision soon exceeds any that was seen before. The record of a generation is
//! changed only by its own node, by an incarnation that began after the check.
//!
//! A node raises the generation once for many partitions: the record's revision covers all records
//! with a lower one.
//!
//! | crash | effect |
//! | --- | --- |
//! | before the record is raised, or between record and stamp | no commit was accepted; the start is accepted |
//! | transaction applied late | it compares the record and the node's incarnation; the stamp stays below |

use fulmar_meta::Revision;
use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::incarnation::Begun;
use crate::metadata::{self, Change};
use crate::records::{VERSION, node_key, records};
use crate::{Error, NodeId, retry};

/// The record `generation/NODE`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GenerationRecord {
    v: u32,
    generation: u64,
}

records!(GenerationRecord);

fn generation_key(node: NodeId) -> String {
    format!("generation/{:08x}", node.0)
}

/// Checks, before a node begins an incarnation, that the metadata store is not older than its data
/// directory. An older one is accepted if its generation is `accepted`. Returns the revision up to
/// which records are covered.
pub async fn check<E: Environment>(env: &E, node: NodeId, accepted: Option<u64>) -> Result<Revision, Error> {
    let read = metadata::read::<E, GenerationRecord>(env, &generation_key(node)).await?;
    let (stored, revision) =
        read.map_or_else(Default::default, |read| (read.record.generation, read.revision));
    let known = env.directory().stamp().await?.unwrap_or_default().generation;
    if stored < known && accepted != Some(stored) {
        return Err(Error::MetadataTooOld { node, stored, known });
    }
    Ok(if stored == known { revision } else { Revision::default() })
}

/// Raises the generation of a node. Returns the revision up to which records are covered. Fails if
/// this incarnation has ended. Must not run concurrently in one process.
pub async fn raise<E: Environment>(env: &E, node: NodeId, begun: &Begun) -> Result<Revision, Error> {
    let key = generation_key(node);
    let mut stamp = env.directory().stamp().await?.unwrap_or_default();
    let mut raised: Option<u64> = None;
    loop {
        let read = metadata::read::<E, GenerationRecord>(env, &key).await?;
        let stored = read.as_ref().map_or(0, |read| read.record.generation);
        if let Some(read) = read.as_ref().filter(|_| raised.is_some_and(|raised| stored >= raised)) {
            stamp.generation = stored;
            env.directory().set_stamp(stamp).await?;
            return Ok(read.revision);
        }
        let generation = *raised.get_or_insert(stored.max(stamp.generation) + 1);
        let next = GenerationRecord { v: VERSION, generation };
        let change = metadata::replace(&key, read.as_ref(), &next)?;
        match metadata::transact(env, change.unchanged(node_key(node), begun.read.revision)).await {
            Change::Applied => {}
            Change::Conflict => {
                let current = metadata::node(env, node).await?;
                if current.is_none_or(|read| read.revision != begun.read.revision) {
                    return Err(Error::Fenced { node, incarnation: begun.incarnation });
                }
            }
            // The next read shows whether it was applied.
            Change::Unknown => retry::pause(env).await,
        }
    }
}
