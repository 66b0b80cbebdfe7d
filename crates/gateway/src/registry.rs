//! The registry of sessions: for cancelling statements, closing sessions, and counting them.
//!
//! A cancel request arrives on its own connection, possibly at another worker. It identifies the
//! session by the process id and secret that the session's client received at startup.
//!
//! In a cluster, a client's connection is a *front* ([`crate::relay`]) at its own node, and a session
//! at the node that owns its partition. Both have the same process id, whose upper bits name the
//! front's node, so that a cancel request can arrive at any node. Fronts have their own entries:
//! they are closed and cancelled like sessions, but system tables show only sessions.
//!
//! A session is ended in one of two ways: [`Handle::close`] lets the running statement complete,
//! [`Handle::kill`] cancels it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::task::Waker;

use fulmar_engine::{CancelReason, Canceller};
use fulmar_pages::PartitionId;
use fulmar_pgwire::wire::Interrupts;
use futures::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::activity::{Activity, SessionIdentity};
use crate::relay::WaitRegistry;

const OPEN: u8 = 0;
const CLOSING: u8 = 1;
const KILLED: u8 = 2;

/// Bits of a process id that count the connections of a node. The bits above are the node's id.
const PID_BITS: u32 = 20;
/// Mask of the node's id in a process id. Ids beyond it share process ids with other nodes: a cancel
/// request can then reach the wrong node, where its secret does not match.
const NODE_MASK: u32 = (1 << (31 - PID_BITS)) - 1;

/// A session, as seen by other components.
pub(crate) struct Handle {
    /// The process id that the client received.
    pub(crate) pid: i32,
    secret: i32,
    pub(crate) partition: PartitionId,
    canceller: Canceller,
    /// A cancel request has arrived that the front has not passed on.
    cancel_requested: AtomicBool,
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

    /// Takes the cancel request that has arrived, if any.
    pub(crate) fn take_cancel_request(&self) -> bool {
        self.cancel_requested.swap(false, Ordering::AcqRel)
    }

    fn cancel(&self) {
        self.cancel_requested.store(true, Ordering::Release);
        self.canceller.cancel(CancelReason::User);
        self.waker.wake(); // a waiting session notices the cancellation only if it is polled
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

impl Handle {
    fn new(
        (pid, secret): (i32, i32),
        partition: PartitionId,
        canceller: Canceller,
        identity: SessionIdentity,
    ) -> Handle {
        Handle {
            pid,
            secret,
            partition,
            canceller,
            cancel_requested: AtomicBool::new(false),
            state: AtomicU8::new(OPEN),
            waker: AtomicWaker::new(),
            identity,
            activity: Activity::default(),
        }
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
    /// The fronts of relayed sessions.
    fronts: HashMap<i32, Arc<Handle>>,
    /// The number of sessions of each partition that has any.
    counts: HashMap<PartitionId, usize>,
    /// The gateway is shutting down and accepts no more sessions.
    closed: bool,
}

impl Sessions {
    fn count(&self, partition: PartitionId) -> usize {
        self.counts.get(&partition).copied().unwrap_or(0)
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Handle>> {
        self.by_pid.values().chain(self.fronts.values())
    }

    fn leave(&mut self, handle: &Arc<Handle>) {
        if self.fronts.get(&handle.pid).is_some_and(|front| Arc::ptr_eq(front, handle)) {
            self.fronts.remove(&handle.pid);
            return;
        }
        if !self.by_pid.get(&handle.pid).is_some_and(|session| Arc::ptr_eq(session, handle)) {
            return; // replaced by the session's next connection
        }
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
    /// The node's part of process ids; 0 without a cluster.
    node_bits: i32,
    limit: usize,
    /// Notified when a session leaves.
    left: Notify,
    /// How long clients wait because the owner of their partition changes.
    pub(crate) waits: WaitRegistry,
}

impl Registry {
    /// A registry of at most `limit` sessions. `node` is the node's id in its cluster.
    pub(crate) fn new(limit: usize, node: Option<u32>) -> Registry {
        let node_bits = node.map_or(0, |node| (node & NODE_MASK) << PID_BITS);
        Registry {
            sessions: Mutex::default(),
            next_pid: AtomicI32::new(1),
            node_bits: node_bits as i32,
            limit,
            left: Notify::new(),
            waits: WaitRegistry::default(),
        }
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
        self.check_session(&sessions, partition, partition_limit, reserved_slots)?;
        let key = (self.free_pid(&sessions), rand::random());
        let handle = Arc::new(Handle::new(key, partition, canceller, identity));
        sessions.by_pid.insert(key.0, handle.clone());
        *sessions.counts.entry(partition).or_default() += 1;
        Ok(RegistryEntry { registry: self.clone(), handle })
    }

    /// Admits a session whose front has the process id and the secret `key`. A session that the
    /// front had before, and that has not ended yet, is no longer found.
    pub(crate) fn admit_relayed(
        self: &Arc<Self>,
        key: (i32, i32),
        partition: PartitionId,
        partition_limit: usize,
        reserved_slots: usize,
        canceller: Canceller,
        identity: SessionIdentity,
    ) -> Result<RegistryEntry, AdmissionError> {
        let mut sessions = self.sessions.lock();
        // An entry with another secret is of a node whose id shares the bits of process ids.
        if let Some(earlier) = sessions.by_pid.get(&key.0).cloned() {
            if earlier.secret == key.1 {
                earlier.kill();
            }
            sessions.leave(&earlier);
        }
        self.check_session(&sessions, partition, partition_limit, reserved_slots)?;
        let handle = Arc::new(Handle::new(key, partition, canceller, identity));
        sessions.by_pid.insert(key.0, handle.clone());
        *sessions.counts.entry(partition).or_default() += 1;
        Ok(RegistryEntry { registry: self.clone(), handle })
    }

    /// Admits the front of a session.
    pub(crate) fn admit_front(
        self: &Arc<Self>,
        partition: PartitionId,
        reserved_slots: usize,
        canceller: Canceller,
        identity: SessionIdentity,
    ) -> Result<RegistryEntry, AdmissionError> {
        let mut sessions = self.sessions.lock();
        if sessions.closed {
            return Err(AdmissionError::ShuttingDown);
        }
        if sessions.fronts.len() + reserved_slots >= self.limit {
            return Err(AdmissionError::NodeLimit);
        }
        let key = (self.free_pid(&sessions), rand::random());
        let handle = Arc::new(Handle::new(key, partition, canceller, identity));
        sessions.fronts.insert(key.0, handle.clone());
        Ok(RegistryEntry { registry: self.clone(), handle })
    }

    fn check_session(
        &self,
        sessions: &Sessions,
        partition: PartitionId,
        partition_limit: usize,
        reserved_slots: usize,
    ) -> Result<(), AdmissionError> {
        if sessions.closed {
            return Err(AdmissionError::ShuttingDown);
        }
        if sessions.by_pid.len() + reserved_slots >= self.limit {
            return Err(AdmissionError::NodeLimit);
        }
        match sessions.count(partition) >= partition_limit {
            true => Err(AdmissionError::PartitionLimit),
            false => Ok(()),
        }
    }

    fn free_pid(&self, sessions: &Sessions) -> i32 {
        let mask = if self.node_bits == 0 { i32::MAX } else { (1 << PID_BITS) - 1 };
        loop {
            let number = self.next_pid.fetch_add(1, Ordering::Relaxed) & mask;
            let pid = self.node_bits | number;
            let is_used = sessions.by_pid.contains_key(&pid) || sessions.fronts.contains_key(&pid);
            if number != 0 && !is_used {
                return pid;
            }
        }
    }

    /// The node at which the client with a process id is connected. `None` if that is this node.
    pub(crate) fn other_node(&self, pid: i32) -> Option<u32> {
        let of_this_node = self.node_bits == 0 || pid >> PID_BITS == self.node_bits >> PID_BITS;
        (!of_this_node).then_some(pid as u32 >> PID_BITS)
    }

    /// Cancels the running statement of a session, through its front if that is here. Does nothing if
    /// the secret is wrong.
    pub(crate) fn cancel(&self, pid: i32, secret: i32) {
        let sessions = self.sessions.lock();
        let found = sessions.fronts.get(&pid).or_else(|| sessions.by_pid.get(&pid));
        if let Some(handle) = found.filter(|handle| handle.secret == secret) {
            handle.cancel();
        }
    }

    /// Like [`Registry::cancel`], for a front of this node.
    pub(crate) fn cancel_session(&self, pid: i32, secret: i32) {
        let sessions = self.sessions.lock();
        if let Some(handle) = sessions.by_pid.get(&pid).filter(|handle| handle.secret == secret) {
            handle.cancel();
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

    /// The number of sessions and fronts.
    pub(crate) fn len(&self) -> usize {
        let sessions = self.sessions.lock();
        sessions.by_pid.len() + sessions.fronts.len()
    }

    /// The number of sessions of a partition.
    pub(crate) fn count(&self, partition: PartitionId) -> usize {
        self.sessions.lock().count(partition)
    }

    /// The number of fronts of a partition.
    pub(crate) fn count_fronts(&self, partition: PartitionId) -> usize {
        self.sessions.lock().fronts.values().filter(|front| front.partition == partition).count()
    }

    /// Admits no more sessions, and asks all sessions to end after their running statement.
    pub(crate) fn close_all(&self) {
        let mut sessions = self.sessions.lock();
        sessions.closed = true;
        sessions.all().for_each(|handle| handle.close());
    }

    /// Cancels the running statements of all sessions, and ends the sessions.
    pub(crate) fn kill_all(&self) {
        self.sessions.lock().all().for_each(|handle| handle.kill());
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
