//! Follows the logs of one node, by polls on demand.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fulmar_mvcc::{Node, log_unreadable};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{LogEnd, LogTail};
use tokio::sync::watch;
use tokio::time::timeout;

use super::{Ownerships, POLL_TIMEOUT};

/// Age of the last log poll beyond which a read starts another one.
const POLL_INTERVAL_MS: u64 = 200;

/// The logs of a node, as a replica follows them.
pub(super) struct LogFollower {
    /// Names the logs.
    pub(super) log_node: u128,
    /// The tail begins with this incarnation.
    pub(super) since: u64,
    pub(super) tail: LogTail,
    /// In a cluster, the ownerships, which are brought up to date before each poll.
    ownerships: Option<Arc<dyn Ownerships>>,
    /// Number of polls begun.
    begun: AtomicU64,
    polling: AtomicBool,
    last: watch::Sender<LastPoll>,
}

/// Result of the last log poll.
#[derive(Clone, Default)]
struct LastPoll {
    /// Number of the poll, from 1.
    number: u64,
    /// The last successful poll.
    poll: Option<LogPoll>,
    /// The error of the last poll, if it failed.
    error: Option<Error>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LogPoll {
    number: u64,
    pub(super) end: LogEnd,
    /// When the poll began.
    monotonic_ms: u64,
    pub(super) unix_ms: u64,
}

/// Guard of a running poll. Clears the flag however the poll ends.
struct PollGuard<'a>(&'a AtomicBool);

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Counters of a follower.
pub(super) struct FollowerStatistics {
    pub(super) polls: u64,
    /// When the last successful poll began (monotonic milliseconds).
    pub(super) polled_ms: Option<u64>,
    pub(super) is_failing: bool,
}

impl LogFollower {
    pub(super) fn new(
        log_node: u128,
        since: u64,
        tail: LogTail,
        ownerships: Option<Arc<dyn Ownerships>>,
    ) -> Self {
        LogFollower {
            log_node,
            since,
            tail,
            ownerships,
            begun: AtomicU64::new(0),
            polling: AtomicBool::new(false),
            last: watch::Sender::new(LastPoll::default()),
        }
    }

    /// Returns a log poll that began at most `staleness` ago; any poll if None.
    pub(super) async fn end(
        self: &Arc<Self>,
        node: &Arc<Node>,
        staleness: Option<Duration>,
    ) -> Result<LogPoll> {
        let now_ms = node.clock.monotonic_ms();
        let begun = self.begun.load(Ordering::Acquire);
        let is_recent = |poll: &LogPoll, staleness: Duration| {
            // The clock has millisecond resolution, so a staleness of zero always waits for a poll
            // that begins later.
            staleness > Duration::ZERO
                && u128::from(now_ms.saturating_sub(poll.monotonic_ms)) <= staleness.as_millis()
        };
        let is_sufficient = |poll: &LogPoll| {
            poll.number > begun || staleness.is_none_or(|staleness| is_recent(poll, staleness))
        };
        let known = self.last.borrow().poll.filter(is_sufficient);
        let poll = match known {
            Some(poll) => poll,
            None => timeout(POLL_TIMEOUT, self.next_poll(node, begun, is_sufficient))
                .await
                .unwrap_or_else(|_| Err(no_answer()))?,
        };
        if now_ms.saturating_sub(poll.monotonic_ms) > POLL_INTERVAL_MS {
            self.poll(node);
        }
        Ok(poll)
    }

    /// Waits for a sufficient poll. Fails if a poll fails that began after the first `begun` ones.
    async fn next_poll(
        self: &Arc<Self>,
        node: &Arc<Node>,
        begun: u64,
        is_sufficient: impl Fn(&LogPoll) -> bool,
    ) -> Result<LogPoll> {
        let mut last = self.last.subscribe();
        loop {
            {
                let last = last.borrow_and_update();
                if let Some(poll) = last.poll.filter(&is_sufficient) {
                    return Ok(poll);
                }
                if let Some(error) = last.error.clone().filter(|_| last.number > begun) {
                    return Err(error);
                }
            }
            self.poll(node);
            // Cannot fail: `self` owns the sender.
            let _ = last.changed().await;
        }
    }

    /// Starts a poll unless one is running. It continues if the caller is dropped.
    fn poll(self: &Arc<Self>, node: &Arc<Node>) {
        if self.polling.swap(true, Ordering::AcqRel) {
            return;
        }
        let (follower, node) = (self.clone(), node.clone());
        let runtime = node.spill.runtime().clone();
        runtime.spawn(async move {
            let polling = PollGuard(&follower.polling);
            let number = follower.begun.fetch_add(1, Ordering::AcqRel) + 1;
            let (monotonic_ms, unix_ms) = (node.clock.monotonic_ms(), node.clock.unix_ms());
            let found = follower.find_end().await;
            // Before the result is published: a session that receives it may start the next poll.
            drop(polling);
            follower.last.send_modify(|last| {
                last.number = number;
                match found {
                    Ok(end) => {
                        last.poll = Some(LogPoll { number, end, monotonic_ms, unix_ms });
                        last.error = None;
                    }
                    Err(error) => last.error = Some(error),
                }
            });
        });
    }

    async fn find_end(&self) -> Result<LogEnd> {
        if let Some(ownerships) = &self.ownerships {
            ownerships.catch_up().await?;
        }
        self.tail.poll().await.map_err(log_unreadable)
    }

    pub(super) fn is_failing(&self) -> bool {
        self.last.borrow().error.is_some()
    }

    pub(super) fn statistics(&self) -> FollowerStatistics {
        let last = self.last.borrow();
        FollowerStatistics {
            polls: self.begun.load(Ordering::Relaxed),
            polled_ms: last.poll.map(|poll| poll.monotonic_ms),
            is_failing: last.error.is_some(),
        }
    }
}

fn no_answer() -> Error {
    let message = format!("could not read the primary's log within {} s", POLL_TIMEOUT.as_secs());
    Error::new(sqlstate::IO_ERROR, message).hint(
        "Retry the transaction, check the latency of the object store, or allow an older \
         snapshot with SET fulmar.staleness.",
    )
}
