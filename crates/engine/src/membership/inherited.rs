//! Flushing the records that earlier incarnations of the node have left.
//!
//! A restarted node still owns its partitions, unless it was failed over. Their unflushed records
//! are in the logs of earlier incarnations. A task finds the partitions that have some, opens and
//! flushes them, and then lets the log state that its own objects are all that is needed
//! ([`CommitLog::settle_inherited`](fulmar_store::CommitLog::settle_inherited)). Until then a
//! failover reads the earlier logs too.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::log_error;
use fulmar_pages::PartitionId;
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::LogPosition;
use futures::stream::{self, StreamExt};

use super::member::{Member, shared_log};
use crate::engine::Engine;

/// Delay after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// A sealed log is kept in memory for one to two of these intervals after its last use.
const FORGET_INTERVAL: Duration = Duration::from_secs(60);
/// Number of partitions that are opened and flushed together.
const BATCH: usize = 64;
/// How many of these are opened concurrently.
const CONCURRENT_OPENINGS: usize = 8;

/// Starts the task. Afterwards it frees the memory of sealed logs that are not read any more.
pub(crate) fn spawn_settling(engine: &Arc<Engine>, member: Arc<Member>) {
    let engine = Arc::downgrade(engine);
    tokio::spawn(async move {
        let (mut left, mut is_settled) = (None, false);
        // The engine is held only during a round, so that it can be dropped.
        while let Some(engine) = engine.upgrade() {
            if is_settled {
                member.sealed.forget_unused();
            } else if let Err(error) = engine.settle_inherited(&member, &mut left).await {
                tracing::warn!(%error, "could not flush records of earlier runs; will retry");
            } else {
                is_settled = true;
            }
            drop(engine);
            tokio::time::sleep(if is_settled { FORGET_INTERVAL } else { RETRY_DELAY }).await;
        }
    });
}

impl Engine {
    /// Flushes all inherited records. `left` are the partitions that have some, once known.
    async fn settle_inherited(&self, member: &Member, left: &mut Option<HashSet<PartitionId>>) -> Result<()> {
        let left = match left {
            Some(left) => left,
            None => {
                let membership = &member.membership;
                let (from, to) = (LogPosition::new(1, 0), LogPosition::new(membership.incarnation, 0));
                let found = member.sealed.partitions_in(membership.log_node, from, to).await;
                left.insert(found.map_err(log_error)?.into_iter().filter(|id| id.0 != 0).collect())
            }
        };
        let all: Vec<PartitionId> = left.iter().copied().collect();
        let mut result = Ok(());
        for batch in all.chunks(BATCH) {
            let opening = batch.iter().map(|id| async move { (*id, self.partitions().partition(*id).await) });
            let mut opening = stream::iter(opening.collect::<Vec<_>>()).buffer_unordered(CONCURRENT_OPENINGS);
            let mut opened = Vec::new();
            while let Some((id, partition)) = opening.next().await {
                match partition {
                    Ok(partition) => opened.push(partition),
                    // The new owner reads the log of this range.
                    Err(error) if error.state() == sqlstate::PARTITION_MOVED => drop(left.remove(&id)),
                    Err(error) => result = Err(error),
                }
            }
            drop(opening);
            let flushed = self.maintenance().flush(opened.clone()).await;
            for partition in opened.iter().filter(|partition| partition.is_settled()) {
                left.remove(&partition.id);
            }
            result = result.and(flushed);
        }
        if !left.is_empty() {
            let unflushed = || Error::new(sqlstate::IO_ERROR, "some partitions could not be flushed");
            return result.and_then(|()| Err(unflushed()));
        }
        shared_log(self.node())?.settle_inherited();
        Ok(())
    }
}
