//! Replacing a node that has died.
//!
//! Any node can run a failover, so the death of the node that decides is no special case.
//! The steps are idempotent: a node that loses a race continues with the next step, and a failover
//! that stops halfway is completed by the next node that detects the failure.
//!
//! 1. End the incarnation: its record goes from `alive` to `ended`. It cannot renew its lease.
//! 2. Seal its log. From here on it cannot commit.
//! 3. Record the end: `sealed`.
//! 4. Assign its partitions, each by a transaction that compares the partition's record, the dead
//!    node's `sealed` and the new owner's `alive` (`compare_nodes`). If the dead node starts again
//!    meanwhile, the comparison fails and it keeps the remaining partitions. Partitions with a
//!    local log are not assigned: they wait for their node (`local_stays`).

use std::time::Duration;

use fulmar_pages::PartitionId;

use crate::environment::Environment;
use crate::metadata::{self, Change};
use crate::{Error, Incarnation, LogId, LogKind, NodeId, NodeRecord, NodeState, Position, Read, retry, seal};

/// How a failover ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The node owns no partitions any more, except those with a local log.
    Completed,
    /// A later incarnation of the node is alive. It serves the partitions that it still owns.
    Restarted,
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
    loop {
        let Some(read) = metadata::node(env, dead).await? else { return Ok(Outcome::Completed) };
        if read.record.incarnation != incarnation {
            return Ok(Outcome::Restarted);
        }
        let sealed = match read.record.state {
            NodeState::Alive => {
                let ended = read.record.with_state(NodeState::Ended);
                metadata::change_node(env, dead, Some(&read), &ended).await?;
                continue;
            }
            NodeState::Ended if env.rules().seal_before_assigning => {
                let sealed = seal::seal(env, LogId::shared(dead, incarnation)).await;
                let state = NodeState::Sealed { end: sealed.end, kept_from: sealed.kept_from };
                metadata::change_node(env, dead, Some(&read), &read.record.with_state(state)).await?;
                continue;
            }
            NodeState::Ended => unsealed(env, LogId::shared(dead, incarnation)).await,
            NodeState::Sealed { end, kept_from } => seal::Sealed { end, kept_from },
        };
        if assign(env, dead, &read, sealed, &mut choose).await? {
            return Ok(Outcome::Completed);
        }
        env.sleep(Duration::from_millis(10)).await;
    }
}

/// Assigns the partitions of a node. Returns true if it owns none any more.
async fn assign<E: Environment>(
    env: &E,
    dead: NodeId,
    dead_read: &Read<NodeRecord>,
    sealed: seal::Sealed,
    choose: &mut (impl FnMut(PartitionId) -> Option<NodeId> + Send),
) -> Result<bool, Error> {
    let to = Position { incarnation: dead_read.record.incarnation, slot: sealed.end };
    let mut is_complete = true;
    for (id, read) in metadata::partitions(env).await? {
        let waits = read.record.log() == LogKind::Local && env.rules().local_stays;
        if read.record.owner != dead || waits {
            continue;
        }
        is_complete = false;
        let Some(owner) = choose(id) else { continue };
        let Some(owner_read) = metadata::node(env, owner).await? else { continue };
        if owner_read.record.state != NodeState::Alive {
            continue;
        }
        let from = Position { incarnation: owner_read.record.incarnation, slot: 0 };
        let next = read.record.moved(sealed.kept_from, to, owner, from, true);
        let nodes = [(dead, dead_read), (owner, &owner_read)];
        if metadata::change_owner(env, id, &read, &nodes, &next).await? == Change::Conflict {
            return Ok(false);
        }
    }
    Ok(is_complete)
}

/// The current end of a log that was not sealed. (Only used without the rule.)
async fn unsealed<E: Environment>(env: &E, log: LogId) -> seal::Sealed {
    loop {
        if let Ok(slots) = env.logs().list(log).await {
            let end = slots.last().map_or(0, |last| last + 1);
            return seal::Sealed { end, kept_from: Position::default() };
        }
        retry::pause(env).await;
    }
}
