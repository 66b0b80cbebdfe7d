//! The registry of sessions: for cancelling statements, closing sessions, and counting them.
//!
//! A cancel request arrives on its own connection, possibly at another worker. It identifies the
//! session by the process id and secret that the session's client received at startup.
//!
//! A session is ended in one of two ways: [`Handle::close`] lets the running statement complete,
//! [`Handle::kill`] cancels it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::task::Waker;

use fulmar_engine::{CancelReason, Canceller};
use fulmar_pages::PartitionId;
use fulmar_pgwire::wire::Interrupts;
use futures::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::activity::{Activity, SessionIdentity};

const OPEN: u8 = 0;
const CLOSING: u8 = 1;
const KILLED: u8 = 2;

/// A session, as seen by other components.
pub(crate) struct Handle {
    /// The process id that the client received.
    pub(crate) pid: i32,
    secret: i32,
    pub(crate) partition: PartitionId,
    canceller: Canceller,
    state: AtomicU8,
    waker: AtomicWaker,
    pub(crate) identity: SessionIdentity,
    pub(crate) activity: Activity,
}

impl Handle {
    /// The secret that only this client received.
    pub(crate) fn secret(&self) -> i32 {
        self.secret
    }

    /// Cancels the running statement.
    pub(crate) fn canceller(&self) -> &Canceller {
        &self.canceller
    }

    fn close(&self) {
        self.state.fetch_max(CLOSING, Ordering::AcqRel);
        self.waker.wake();
    }

    /// Cancels the running statement, and ends the session.
    pub(crate) fn kill(&self) {
        self.state.store(KILLED, Ordering::Release);
        self.canceller.cancel(CancelReason::Shutdown);
        self.waker.wake();
    }
}

impl Interrupts for Handle {
    /// Registers the waker of the session's task, which is woken when the session must close.
    fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Returns true if the session must end after the running statement.
    fn is_closing(&self) -> bool {
        self.state.load(Ordering::Acquire) != OPEN
    }

    /// Returns true if the session must end immediately.
    fn is_killed(&self) -> bool {
        self.state.load(Ordering::Acquire) == KILLED
    }
}

#[derive(Default)]
struct Sessions {
    by_pid: HashMap<i32, Arc<Handle>>,
    /// The number of sessions of each partition that has any.
    counts: HashMap<PartitionId, usize>,
    /// The gateway is shutting down and accepts no more sessions.
    closed: bool,
}

impl Sessions {
    fn count(&self, partition: PartitionId) -> usize {
        self.counts.get(&partition).copied().unwrap_or(0)
    }

    fn leave(&mut self, handle: &Handle) {
        self.by_pid.remove(&handle.pid);
        match self.count(handle.partition).saturating_sub(1) {
            0 => self.counts.remove(&handle.partition),
            left => self.counts.insert(handle.partition, left),
        };
    }
}

/// The reason why a session was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionError {
    /// The node's session limit is reached.
    NodeLimit,
    /// The partition's session limit is reached.
    PartitionLimit,
    /// The gateway is shutting down.
    ShuttingDown,
}

/// All sessions of a gateway.
pub(crate) struct Registry {
    sessions: Mutex<Sessions>,
    next_pid: AtomicI32,
    limit: usize,
    /// Notified when a session leaves.
    left: Notify,
}

impl Registry {
    /// A registry of at most `limit` sessions.
    pub(crate) fn new(limit: usize) -> Registry {
        Registry { sessions: Mutex::default(), next_pid: AtomicI32::new(1), limit, left: Notify::new() }
    }

    /// Admits a session, unless its partition has `most` sessions already, or fewer than `leaves`
    /// free slots would remain on the node afterwards.
    pub(crate) fn admit(
        self: &Arc<Self>,
        partition: PartitionId,
        partition_limit: usize,
        reserved_slots: usize,
        canceller: Canceller,
        identity: SessionIdentity,
    ) -> Result<RegistryEntry, AdmissionError> {
        let mut sessions = self.sessions.lock();
        if sessions.closed {
            return Err(AdmissionError::ShuttingDown);
        }
        if sessions.by_pid.len() + reserved_slots >= self.limit {
            return Err(AdmissionError::NodeLimit);
        }
        if sessions.count(partition) >= partition_limit {
            return Err(AdmissionError::PartitionLimit);
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
            identity,
            activity: Activity::default(),
        });
        sessions.by_pid.insert(pid, handle.clone());
        *sessions.counts.entry(partition).or_default() += 1;
        Ok(RegistryEntry { registry: self.clone(), handle })
    }

    /// Cancels the running statement of a session. Does nothing if the secret is wrong.
    pub(crate) fn cancel(&self, pid: i32, secret: i32) {
        let handle = self.sessions.lock().by_pid.get(&pid).filter(|handle| handle.secret == secret).cloned();
        if let Some(handle) = handle {
            handle.canceller.cancel(CancelReason::User);
            handle.waker.wake(); // a waiting session notices the cancellation only if it is polled
        }
    }

    /// The session with this process id.
    pub(crate) fn find(&self, pid: i32) -> Option<Arc<Handle>> {
        self.sessions.lock().by_pid.get(&pid).cloned()
    }

    /// All sessions, sorted by process id.
    pub(crate) fn all(&self) -> Vec<Arc<Handle>> {
        let mut handles: Vec<Arc<Handle>> = self.sessions.lock().by_pid.values().cloned().collect();
        handles.sort_by_key(|handle| handle.pid);
        handles
    }

    /// The number of sessions.
    pub(crate) fn len(&self) -> usize {
        self.sessions.lock().by_pid.len()
    }

    /// The number of sessions of a partition.
    pub(crate) fn count(&self, partition: PartitionId) -> usize {
        self.sessions.lock().count(partition)
    }

    /// Admits no more sessions, and asks all sessions to end after their running statement.
    pub(crate) fn close_all(&self) {
        let mut sessions = self.sessions.lock();
        sessions.closed = true;
        sessions.by_pid.values().for_each(|handle| handle.close());
    }

    /// Cancels the running statements of all sessions, and ends the sessions.
    pub(crate) fn kill_all(&self) {
        self.sessions.lock().by_pid.values().for_each(|handle| handle.kill());
    }

    /// Cancels the running statements of a partition, and ends its sessions.
    pub(crate) fn kill(&self, partition: PartitionId) {
        let sessions = self.sessions.lock();
        sessions
            .by_pid
            .values()
            .filter(|handle| handle.partition == partition)
            .for_each(|handle| handle.kill());
    }

    /// Waits until no session is left, or none of `partition`.
    pub(crate) async fn wait_empty(&self, partition: Option<PartitionId>) {
        loop {
            let mut notified = std::pin::pin!(self.left.notified());
            notified.as_mut().enable(); // registered before the count is read: no notification is missed
            if partition.map_or_else(|| self.len(), |partition| self.count(partition)) == 0 {
                return;
            }
            notified.await;
        }
    }
}

/// A session's entry in the registry. Dropping it removes the session.
pub(crate) struct RegistryEntry {
    registry: Arc<Registry>,
    /// The session, as seen by other components.
    pub(crate) handle: Arc<Handle>,
}

impl Drop for RegistryEntry {
    fn drop(&mut self) {
        self.registry.sessions.lock().leave(&self.handle);
        self.registry.left.notify_waiters();
    }
}
