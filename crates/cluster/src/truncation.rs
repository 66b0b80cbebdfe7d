//! Deletes the logs of incarnations that have ended, and drops the ranges that keep them.
//!
//! # Ranges
//! A partition's record names the ranges of earlier owners and incarnations until its owner has
//! stored a manifest in the current epoch and incarnation that covers their records. The owner then
//! drops them ([`drop_ranges`]), many partitions in one transaction. Each partition needs such a
//! manifest, even if the ranges contain no record of it: it also supersedes every manifest that an
//! earlier incarnation may still store, so the collector may delete that incarnation's segments
//! ([`crate::collection`]).
//!
//! | crash, or late request | effect |
//! | --- | --- |
//! | after the manifest, before the transaction | the ranges stay; the next owner or incarnation repeats both |
//! | transaction applied late | it compares the records, so the epoch and the owner are the same, and the manifest covers the ranges |
//!
//! # Logs
//! The log of an incarnation is deleted when it is sealed and no range needs it
//! (`keep_closed_ranges`). That stays so: an incarnation that has ended gets no new range, because
//! every range begins in the log of a living one, and ranges only become shorter. So any node may
//! delete the log at any time, however late.
//!
//! Seals are kept. A writer that was declared dead and is still running can therefore put only
//! objects below the seal, where it repeats what the log contained. It may however find a late seal
//! in a free slot. It must not conclude that its object never existed, so before anything is
//! deleted a mark is put after all slots, which states that no slot is needed.
//!
//! | crash | effect |
//! | --- | --- |
//! | before the mark | the log is complete |
//! | after the mark, or between deletions | no node reads the log; the next truncation deletes the rest |

use std::collections::BTreeSet;

use fulmar_pages::PartitionId;
use futures::stream::{self, StreamExt};

use crate::environment::{Environment, LogObjects, Slot, Uncertain};
use crate::failover::BATCH_PARTITIONS;
use crate::metadata::{self, Change};
use crate::records::{NodeState, Position};
use crate::{
    Error, Incarnation, LogId, LogKind, ManifestName, NodeId, NodeRecord, PartitionRecord, Read, retry,
};

/// Maximum number of concurrent deletions.
const CONCURRENT_DELETIONS: usize = 8;

/// A partition whose owner has stored a manifest that covers all records before `from`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Covered {
    /// The partition.
    pub partition: PartitionId,
    /// The epoch in which the manifest was stored.
    pub epoch: u32,
    /// The manifest, if records name manifests.
    pub base: Option<ManifestName>,
    /// A position in this incarnation's log.
    pub from: Position,
}

/// Drops the ranges before the covered positions from the records of partitions that this node
/// owns. Tries once. Returns the partitions whose records were changed, or need no change.
pub async fn drop_ranges<E: Environment>(
    env: &E,
    (node, node_read): (NodeId, &Read<NodeRecord>),
    covered: &[Covered],
) -> Result<Vec<PartitionId>, Error> {
    let mut dropped = Vec::new();
    for batch in covered.chunks(BATCH_PARTITIONS) {
        let mut changes = Vec::new();
        for covered in batch {
            let Some(read) = metadata::partition(env, covered.partition).await? else { continue };
            let Read { record, .. } = &read;
            if record.owner != node || record.epoch != covered.epoch || record.page_server.is_some() {
                continue;
            }
            let next = record.covered(covered.base.or(record.base), covered.from);
            if next == *record {
                dropped.push(covered.partition);
            } else {
                changes.push((covered.partition, read, next));
            }
        }
        if changes.is_empty() {
            continue;
        }
        let steps = changes.iter().map(|(partition, read, next)| (*partition, read, next));
        let transaction = metadata::owner_changes(env, steps, &[(node, node_read)])?;
        if metadata::transact(env, transaction).await == Change::Applied {
            dropped.extend(changes.iter().map(|(partition, ..)| *partition));
        }
    }
    Ok(dropped)
}

/// Deletes the shared logs of ended incarnations that no range needs. `done` are those without
/// objects to delete; it is empty at first. Returns the number of deleted objects. Stops at the
/// first failure: the next call continues.
pub async fn truncate_ended<E: Environment>(
    env: &E,
    done: &mut BTreeSet<(NodeId, Incarnation)>,
) -> Result<usize, Error> {
    // Nodes before partitions: an incarnation that has ended gets no range after that.
    let nodes = metadata::nodes(env).await?;
    let ended = nodes.iter().flat_map(|(node, record)| {
        let is_sealed = matches!(record.state, NodeState::Sealed { .. });
        let last = if is_sealed { record.incarnation } else { record.incarnation.saturating_sub(1) };
        (1..=last).map(|incarnation| (*node, incarnation))
    });
    let ended: Vec<_> = ended.filter(|log| !done.contains(log)).collect();
    if ended.is_empty() {
        return Ok(0);
    }
    let partitions = metadata::partitions(env).await?;
    let mut deleted = 0;
    for (node, incarnation) in ended {
        let needs = |record: &PartitionRecord| needs(record, node, incarnation);
        if env.rules().keep_closed_ranges && partitions.iter().any(|(_, read)| needs(&read.record)) {
            continue;
        }
        match delete_log(env.logs(), LogId::shared(node, incarnation)).await {
            Ok(objects) => {
                deleted += objects;
                done.insert((node, incarnation));
            }
            Err(Uncertain) => {
                retry::pause(env).await;
                return Ok(deleted);
            }
        }
    }
    Ok(deleted)
}

/// Returns true if a range of the partition may contain records in this incarnation's shared log.
fn needs(record: &PartitionRecord, node: NodeId, incarnation: Incarnation) -> bool {
    let shared = record.ranges.iter().filter(|range| range.log == LogKind::Shared);
    shared.into_iter().any(|range| !range.is_empty() && range.needs(node, incarnation))
}

/// Deletes all objects of a log except seals. Returns their number.
async fn delete_log(logs: &dyn LogObjects, log: LogId) -> Result<usize, Uncertain> {
    let slots = logs.list(log).await?;
    let reads = slots.iter().map(|slot| async move { (*slot, logs.read(log, *slot).await) });
    let mut reads = stream::iter(reads.collect::<Vec<_>>()).buffered(CONCURRENT_DELETIONS);
    let mut records = Vec::new();
    while let Some((slot, contents)) = reads.next().await {
        if matches!(contents?, Some(Slot::Records { .. })) {
            records.push(slot);
        }
    }
    drop(reads);
    let Some(last) = slots.last().filter(|_| !records.is_empty()) else { return Ok(0) };
    logs.create_end_mark(log, last + 1).await?;
    let deletions = records.iter().map(|slot| logs.delete(log, *slot));
    let mut deletions = stream::iter(deletions.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_DELETIONS);
    while let Some(deleted) = deletions.next().await {
        deleted?;
    }
    Ok(records.len())
}
