//! Starting a node, and the lease under which it answers reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_meta::Transaction;

use crate::environment::Environment;
use crate::metadata::Change;
use crate::records::node_key;
use crate::{
    Error, Incarnation, LogId, NodeId, NodeRecord, NodeState, Read, Rules, directory, metadata, retry, seal,
};

/// How long an incarnation may answer reads after it was confirmed.
pub const LEASE: Duration = Duration::from_secs(1);
/// How often the lease is renewed.
pub const RENEWAL_INTERVAL: Duration = Duration::from_millis(300);
/// How long others wait for the lease of an ended incarnation: clocks may run apart by 5 %.
const LEASE_WAIT: Duration = Duration::from_millis(1050);

/// How long a new owner, or a new incarnation, answers nothing after it has observed that another
/// incarnation ended (`wait_out_lease`).
pub fn lease_wait(rules: &Rules) -> Duration {
    match (rules.wait_out_lease, rules.lease_margin) {
        (true, true) => LEASE_WAIT,
        (true, false) => LEASE,
        (false, _) => Duration::ZERO,
    }
}

/// An incarnation that has begun.
#[derive(Clone, Debug)]
pub struct Begun {
    /// Its number.
    pub incarnation: Incarnation,
    /// Its node record, with the revision to compare.
    pub read: Read<NodeRecord>,
    /// It answers nothing before this time, because the previous incarnation's lease may still run.
    pub serve_from: Duration,
}

/// Begins the next incarnation of a node (`seal_own_log`).
///
/// A previous incarnation that is `alive` or `ended` is taken through `ended` and `sealed` first. A
/// crash at any step leaves a record from which the next start, or a failover, continues. `run` is
/// a random number of this process. Fails if the data directory is not the previous incarnation's
/// (`match_directory`).
pub async fn begin<E: Environment>(env: &E, node: NodeId, run: u64) -> Result<Begun, Error> {
    let mut serve_from = Duration::ZERO;
    let mut read = metadata::node(env, node).await?;
    directory::check_and_prepare(env, node, read.as_ref().map(|read| &read.record), run).await?;
    loop {
        let Some(current) = read.clone() else {
            let first = NodeRecord::new(1, NodeState::Alive, run);
            metadata::change_node(env, node, None, &first).await?;
            read = metadata::node(env, node).await?;
            continue;
        };
        let NodeRecord { incarnation, state, .. } = current.record;
        if state == NodeState::Alive && current.record.run == run {
            directory::complete(env, run).await?;
            return Ok(Begun { incarnation, read: current, serve_from });
        }
        let next = match state {
            NodeState::Alive => current.record.with_state(NodeState::Ended),
            _ if serve_from == Duration::ZERO => {
                // The previous incarnation is observed to have ended.
                serve_from = (env.now() + lease_wait(env.rules())).max(Duration::from_nanos(1));
                continue;
            }
            NodeState::Ended if env.rules().seal_own_log => {
                let seal::Sealed { end, kept_from } = seal::seal(env, LogId::shared(node, incarnation)).await;
                current.record.with_state(NodeState::Sealed { end, kept_from })
            }
            NodeState::Ended | NodeState::Sealed { .. } => {
                NodeRecord::new(incarnation + 1, NodeState::Alive, run)
            }
        };
        // Whatever the outcome is, the record is read again.
        metadata::change_node(env, node, Some(&current), &next).await?;
        read = metadata::node(env, node).await?;
    }
}

/// The lease of an incarnation.
#[derive(Debug, Default)]
pub struct Lease {
    valid_until_us: AtomicU64,
}

impl Lease {
    /// Returns true if the incarnation may answer reads at this time.
    pub fn is_valid(&self, now: Duration) -> bool {
        (now.as_micros() as u64) < self.valid_until_us.load(Ordering::Acquire)
    }

    /// Renews the lease until the incarnation is fenced. Returns [`Error::Fenced`] then (`lease`).
    ///
    /// A renewal compares the node's record and writes nothing, so a full metadata store does not
    /// stop reads, and an ended incarnation cannot renew.
    pub async fn keep<E: Environment>(&self, env: &E, node: NodeId, begun: &Begun) -> Error {
        loop {
            let sent = env.now();
            let compared = Transaction::new().unchanged(node_key(node), begun.read.revision);
            match metadata::transact(env, compared).await {
                Change::Applied => {
                    let until = (sent + LEASE).as_micros() as u64;
                    self.valid_until_us.fetch_max(until, Ordering::AcqRel);
                    env.sleep(RENEWAL_INTERVAL).await;
                }
                Change::Conflict => {
                    return Error::Fenced { node, incarnation: begun.incarnation };
                }
                Change::Unknown => retry::pause(env).await,
            }
        }
    }
}
