//! Who is connected: to cancel statements, to close sessions, to count them.
//!
//! A client cancels from another connection, which another worker may serve, with the process id and secret that it
//! was told at the start. Closing has two steps: [`Handle::close`] lets what runs come to its end,
//! [`Handle::kill`] does not.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::task::Waker;

use fulmar_engine::{CancelReason, Canceller};
use fulmar_pages::PartitionId;
use futures::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::activity::{Activity, Who};

const OPEN: u8 = 0;
const CLOSING: u8 = 1;
const KILLED: u8 = 2;

/// A session, as seen from outside.
pub(crate) struct Handle {
    /// What the client knows the session by.
    pub(crate) pid: i32,
    secret: i32,
    pub(crate) partition: PartitionId,
    canceller: Canceller,
    state: AtomicU8,
    waker: AtomicWaker,
    pub(crate) who: Who,
    pub(crate) activity: Activity,
}

impl Handle {
    /// What only this client knows.
    pub(crate) fn secret(&self) -> i32 {
        self.secret
    }

    /// Cancels what the session runs.
    pub(crate) fn canceller(&self) -> &Canceller {
        &self.canceller
    }

    /// The session's task is woken through this when the session is to close.
    pub(crate) fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Whether the session should end when it has answered what runs.
    pub(crate) fn is_closing(&self) -> bool {
        self.state.load(Ordering::Acquire) != OPEN
    }

    /// Whether the session should end at once.
    pub(crate) fn is_killed(&self) -> bool {
        self.state.load(Ordering::Acquire) == KILLED
    }

    fn close(&self) {
        self.state.fetch_max(CLOSING, Ordering::AcqRel);
        self.waker.wake();
    }

    /// Cancels what runs, and ends the session.
    pub(crate) fn kill(&self) {
        self.state.store(KILLED, Ordering::Release);
        self.canceller.cancel(CancelReason::Shutdown);
        self.waker.wake();
    }
}

#[derive(Default)]
struct Sessions {
    by_pid: HashMap<i32, Arc<Handle>>,
    /// How many sessions each partition has that has any.
    counts: HashMap<PartitionId, usize>,
    /// The gateway shuts down: nobody enters any more.
    closed: bool,
}

impl Sessions {
    fn count(&self, partition: PartitionId) -> usize {
        self.counts.get(&partition).copied().unwrap_or(0)
    }

    fn leave(&mut self, handle: &Handle) {
        self.by_pid.remove(&handle.pid);
        let left = self.count(handle.partition).saturating_sub(1);
        match left {
            0 => self.counts.remove(&handle.partition),
            left => self.counts.insert(handle.partition, left),
        };
    }
}

/// Why a session cannot be entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// There are as many as there may be.
    TooMany,
    /// There are as many of the partition as it may have.
    TooManyOfPartition,
    /// The gateway shuts down.
    Closed,
}

/// All sessions of a gateway.
pub(crate) struct Registry {
    sessions: Mutex<Sessions>,
    next_pid: AtomicI32,
    limit: usize,
    /// Told when a session leaves.
    left: Notify,
}

impl Registry {
    /// A registry that takes so many sessions at most.
    pub(crate) fn new(limit: usize) -> Registry {
        Registry { sessions: Mutex::default(), next_pid: AtomicI32::new(1), limit, left: Notify::new() }
    }

    /// Enters a session, unless its partition has `most` already, or it would leave less than so many places to others.
    pub(crate) fn enter(
        self: &Arc<Self>,
        partition: PartitionId,
        most: usize,
        leaves: usize,
        canceller: Canceller,
        who: Who,
    ) -> Result<Entry, Full> {
        let mut sessions = self.sessions.lock();
        if sessions.closed {
            return Err(Full::Closed);
        }
        if sessions.by_pid.len() + leaves >= self.limit {
            return Err(Full::TooMany);
        }
        if sessions.count(partition) >= most {
            return Err(Full::TooManyOfPartition);
        }
        let pid = loop {
            let pid = self.next_pid.fetch_add(1, Ordering::Relaxed) & i32::MAX;
            if pid != 0 && !sessions.by_pid.contains_key(&pid) {
                break pid;
            }
        };
        let handle = Arc::new(Handle {
            pid,
            secret: rand::random(),
            partition,
            canceller,
            state: AtomicU8::new(OPEN),
            waker: AtomicWaker::new(),
            who,
            activity: Activity::default(),
        });
        sessions.by_pid.insert(pid, handle.clone());
        *sessions.counts.entry(partition).or_default() += 1;
        Ok(Entry { registry: self.clone(), handle })
    }

    /// Cancels what a session runs, if the secret is right; says nothing if it is not.
    pub(crate) fn cancel(&self, pid: i32, secret: i32) {
        let handle = self.sessions.lock().by_pid.get(&pid).filter(|handle| handle.secret == secret).cloned();
        if let Some(handle) = handle {
            handle.canceller.cancel(CancelReason::User);
            handle.waker.wake(); // the session's task may be the only one that can notice soon
        }
    }

    /// A session.
    pub(crate) fn find(&self, pid: i32) -> Option<Arc<Handle>> {
        self.sessions.lock().by_pid.get(&pid).cloned()
    }

    /// All of them, by their numbers.
    pub(crate) fn all(&self) -> Vec<Arc<Handle>> {
        let mut handles: Vec<Arc<Handle>> = self.sessions.lock().by_pid.values().cloned().collect();
        handles.sort_by_key(|handle| handle.pid);
        handles
    }

    /// How many sessions there are.
    pub(crate) fn len(&self) -> usize {
        self.sessions.lock().by_pid.len()
    }

    /// How many sessions a partition has.
    pub(crate) fn count(&self, partition: PartitionId) -> usize {
        self.sessions.lock().count(partition)
    }

    /// Takes no more sessions, and asks all to end when they have answered what runs.
    pub(crate) fn close_all(&self) {
        let mut sessions = self.sessions.lock();
        sessions.closed = true;
        sessions.by_pid.values().for_each(|handle| handle.close());
    }

    /// Cancels what runs, everywhere, and ends all sessions.
    pub(crate) fn kill_all(&self) {
        self.sessions.lock().by_pid.values().for_each(|handle| handle.kill());
    }

    /// Cancels what runs on a partition, and ends its sessions.
    pub(crate) fn kill(&self, partition: PartitionId) {
        let sessions = self.sessions.lock();
        sessions
            .by_pid
            .values()
            .filter(|handle| handle.partition == partition)
            .for_each(|handle| handle.kill());
    }

    /// Waits until there are none at all, or none on `partition`.
    pub(crate) async fn wait_empty(&self, partition: Option<PartitionId>) {
        loop {
            let mut left = std::pin::pin!(self.left.notified());
            left.as_mut().enable(); // from here on a leave is not missed
            if partition.map_or_else(|| self.len(), |partition| self.count(partition)) == 0 {
                return;
            }
            left.await;
        }
    }
}

/// A session's place in the registry; it leaves when this is dropped.
pub(crate) struct Entry {
    registry: Arc<Registry>,
    /// The session, as others see it.
    pub(crate) handle: Arc<Handle>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.registry.sessions.lock().leave(&self.handle);
        self.registry.left.notify_waiters();
    }
}
