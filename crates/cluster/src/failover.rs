//! Replacing a node that has died.
//!
//! Any node can run a failover, so the death of the node that decides is no special case.
//! The steps are idempotent: a node that loses a race continues with the next step, and a failover
//! that stops halfway is completed by the next node that detects the failure.
//!
//! 1. End the incarnation: its record goes from `alive` to `ended`. It cannot renew its lease.
//! 2. Seal its log. From here on it cannot commit.
//! 3. Record the end: `sealed`.
//! 4. Assign its partitions, in transactions of up to [`BATCH_PARTITIONS`] that compare the
//!    partitions' records, the dead node's `sealed` and the new owner's `alive` (`compare_nodes`).
//!    If the dead node starts again meanwhile, the comparison fails and it keeps the remaining
//!    partitions. Partitions with a local log are not assigned: they wait for their node
//!    (`local_stays`).

use std::collections::BTreeMap;
use std::time::Duration;

use fulmar_pages::PartitionId;
use futures::stream::{self, StreamExt};

use crate::environment::Environment;
use crate::metadata::{self, Change};
use crate::seal::Sealed;
use crate::{
    Error, Incarnation, LogId, LogKind, NodeId, NodeRecord, NodeState, PartitionRecord, Position, Read,
    retry, seal,
};

/// Maximum number of partitions that one transaction assigns. It also compares two nodes' records;
/// a transaction has at most [`fulmar_meta::MAX_TRANSACTION_STEPS`] comparisons.
pub const BATCH_PARTITIONS: usize = 120;

/// Maximum number of concurrent transactions.
const CONCURRENT_BATCHES: usize = 8;
/// Limits of the pause between two scans.
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// How a failover ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The node no longer owns partitions, except those with a local log.
    Completed,
    /// A later incarnation of the node is alive. It serves the partitions that it still owns.
    Restarted,
}

/// An incarnation that has ended: its node's record, and the end of its log.
#[derive(Clone, Debug)]
pub struct Ended {
    read: Read<NodeRecord>,
    sealed: Sealed,
}

/// Fails over a node whose incarnation is suspected to be dead. `choose` returns the new owner of a
/// partition, or `None` if there is none. Completes when the node owns no partitions, or has
/// started again.
pub async fn fail_over<E: Environment>(
    env: &E,
    dead: NodeId,
    incarnation: Incarnation,
    mut choose: impl FnMut(PartitionId) -> Option<NodeId> + Send,
) -> Result<Outcome, Error> {
    let mut pace = Pace::default();
    loop {
        let Some(ended) = end(env, dead, incarnation).await? else { return Ok(Outcome::Restarted) };
        match assign(env, dead, &ended, &mut choose).await? {
            0 => return Ok(Outcome::Completed),
            unassigned => env.sleep(pace.pause(unassigned)).await,
        }
    }
}

/// The pauses between the scans of a failover. They grow while no partition is assigned, because no
/// other node is alive for example: a scan reads all records.
#[derive(Default)]
struct Pace {
    unassigned: usize,
    pause: Duration,
}

impl Pace {
    /// The pause after a scan that found this number of partitions.
    fn pause(&mut self, unassigned: usize) -> Duration {
        let has_progressed = unassigned < self.unassigned;
        self.unassigned = unassigned;
        self.pause = match has_progressed {
            true => MIN_PAUSE,
            false => (self.pause * 2).clamp(MIN_PAUSE, MAX_PAUSE),
        };
        self.pause
    }
}

/// Ends an incarnation and seals its log. Returns `None` if the node has a later incarnation, or
/// does not exist.
pub async fn end<E: Environment>(
    env: &E,
    node: NodeId,
    incarnation: Incarnation,
) -> Result<Option<Ended>, Error> {
    loop {
        let read = metadata::node(env, node).await?;
        let Some(read) = read.filter(|read| read.record.incarnation == incarnation) else { return Ok(None) };
        let sealed = match read.record.state {
            NodeState::Alive => {
                let ended = read.record.with_state(NodeState::Ended);
                metadata::change_node(env, node, Some(&read), &ended).await?;
                continue;
            }
            NodeState::Ended if env.rules().seal_before_assigning => {
                let Sealed { end, kept_from } = seal::seal(env, LogId::shared(node, incarnation)).await;
                let sealed = read.record.with_state(NodeState::Sealed { end, kept_from });
                metadata::change_node(env, node, Some(&read), &sealed).await?;
                continue;
            }
            NodeState::Ended => unsealed(env, LogId::shared(node, incarnation)).await,
            NodeState::Sealed { end, kept_from } => Sealed { end, kept_from },
        };
        return Ok(Some(Ended { read, sealed }));
    }
}

/// A partition to assign, and its current record.
type Unassigned = (PartitionId, Read<PartitionRecord>);

/// Assigns the partitions of a node. Returns how many it found.
async fn assign<E: Environment>(
    env: &E,
    dead: NodeId,
    ended: &Ended,
    choose: &mut (impl FnMut(PartitionId) -> Option<NodeId> + Send),
) -> Result<usize, Error> {
    let mut unassigned = 0;
    let mut by_owner: BTreeMap<NodeId, Vec<Unassigned>> = BTreeMap::new();
    for (id, read) in metadata::partitions(env).await? {
        let waits = read.record.log() == LogKind::Local && env.rules().local_stays;
        if read.record.owner != dead || waits {
            continue;
        }
        unassigned += 1;
        if let Some(owner) = choose(id) {
            by_owner.entry(owner).or_default().push((id, read));
        }
    }
    let mut batches = Vec::new();
    for (owner, partitions) in by_owner {
        let Some(owner_read) = metadata::node(env, owner).await? else { continue };
        if owner_read.record.state != NodeState::Alive {
            continue;
        }
        for batch in partitions.chunks(BATCH_PARTITIONS) {
            batches.push(assign_batch(env, (dead, ended), (owner, owner_read.clone()), batch.to_vec()));
        }
    }
    let mut changes = stream::iter(batches).buffer_unordered(CONCURRENT_BATCHES);
    while let Some(change) = changes.next().await {
        change?;
    }
    // Whether these changes were applied shows when the records are read again.
    Ok(unassigned)
}

/// Assigns partitions to one owner, by one transaction.
async fn assign_batch<E: Environment>(
    env: &E,
    (dead, ended): (NodeId, &Ended),
    (owner, owner_read): (NodeId, Read<NodeRecord>),
    partitions: Vec<Unassigned>,
) -> Result<Change, Error> {
    let Ended { read: dead_read, sealed } = ended;
    let to = Position { incarnation: dead_read.record.incarnation, slot: sealed.end };
    let from = Position { incarnation: owner_read.record.incarnation, slot: 0 };
    let next = |(_, read): &Unassigned| read.record.moved(sealed.kept_from, to, owner, from, true);
    let next: Vec<PartitionRecord> = partitions.iter().map(next).collect();
    let changes = partitions.iter().zip(&next).map(|((id, read), next)| (*id, read, next));
    let nodes = [(dead, dead_read), (owner, &owner_read)];
    Ok(metadata::transact(env, metadata::owner_changes(env, changes, &nodes)?).await)
}

/// The current end of a log that was not sealed. (Only used without the rule.)
async fn unsealed<E: Environment>(env: &E, log: LogId) -> Sealed {
    loop {
        if let Ok(slots) = env.logs().list(log).await {
            let end = slots.last().map_or(0, |last| last + 1);
            return Sealed { end, kept_from: Position::default() };
        }
        retry::pause(env).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_grows_to_a_second_while_no_partition_is_assigned() {
        let mut pace = Pace::default();
        let pauses: Vec<u128> = (0..9).map(|_| pace.pause(7).as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(pace.pause(6), MIN_PAUSE, "progress resets the pause");
        assert_eq!(pace.pause(6), MIN_PAUSE * 2);
    }
}
