//! Accounts for the memory that sessions use at the gateway, and limits it per tenant and per node.
//!
//! Receive buffers, incomplete messages, bound parameters, prepared statements, unsent results, the
//! translation of SQL and the journals of fronts are charged before the memory is allocated:
//!
//! ```text
//! Share of a message,  -->  Account of the session  -->  Budget of   -->  Budget of
//! portal, result ...        16 KiB free,                  the tenant       the node
//!                           then 64 KiB steps
//! ```
//!
//! - The node's limit is a quarter of `--memory`, at least 32 MiB. The limit of a tenant is half of
//!   that.
//! - A session with at most 128 KiB of charges may exceed its tenant's limit by an eighth, and the
//!   node's by a quarter. Small messages therefore succeed while large ones fill the limits.
//! - Rows that could be written to a temporary file instead may only use a quarter of the limits.
//! - A charge that can never succeed is rejected with 54000, any other with 53200. A message waits
//!   up to 5 s for memory before it is rejected ([`crate::session`]).
//! - While a session waits for memory of the node, sessions whose clients stopped in the middle of
//!   a message are closed, until enough memory is free.
//!
//! `session::memory_quota` implements the per-session accounting.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use fulmar_engine::{Error, sqlstate};
use fulmar_pages::PartitionId;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Minimum limit of a node.
pub(crate) const MIN_NODE_BYTES: u64 = 32 << 20;
/// The divisor of `--memory` that gives the node's limit.
const MEMORY_DIVISOR: u64 = 4;

/// The node's limit for the given `--memory`.
pub fn session_memory_bytes(memory_bytes: u64) -> u64 {
    (memory_bytes / MEMORY_DIVISOR).max(MIN_NODE_BYTES)
}

/// The part of the limits that a charge may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// A session with few charges: the limits plus the reserve.
    Small,
    /// The limits.
    Large,
    /// Memory that the session can do without: a quarter of the limits.
    Optional,
}

/// The reason why a charge was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// The charge exceeds the tenant's limit by itself.
    TooLarge { bytes: u64, limit_bytes: u64 },
    /// The limit of the tenant is reached.
    Tenant { used_bytes: u64, limit_bytes: u64 },
    /// The limit of the node is reached.
    Node { used_bytes: u64, limit_bytes: u64 },
}

impl Shortage {
    /// Returns true if the charge can succeed after other sessions have released memory.
    pub(crate) fn is_temporary(self) -> bool {
        !matches!(self, Shortage::TooLarge { .. })
    }
}

impl Shortage {
    /// The error for the client.
    pub(crate) fn error(self) -> Error {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        const SMALLER: &str =
            "Send large values in parts, split the statement, or start the node with a larger --memory.";
        match self {
            Shortage::TooLarge { bytes, limit_bytes } => Error::new(
                sqlstate::PROGRAM_LIMIT,
                format!(
                    "request needs {} MiB of session memory, more than the limit of {} MiB per database",
                    mib(bytes),
                    mib(limit_bytes)
                ),
            )
            .hint(SMALLER),
            Shortage::Tenant { used_bytes, limit_bytes } => Error::new(
                sqlstate::OUT_OF_MEMORY,
                "out of session memory for this database",
            )
            .detail(format!(
                "Its sessions hold {} MiB of at most {} MiB: messages, prepared statements, portals, and \
                         results that have not been sent.",
                mib(used_bytes),
                mib(limit_bytes)
            ))
            .hint("Close portals and prepared statements, read results faster, or send smaller messages."),
            Shortage::Node { used_bytes, limit_bytes } => {
                Error::new(sqlstate::OUT_OF_MEMORY, "out of session memory on this node")
                    .detail(format!(
                        "The sessions of all databases hold {} MiB of at most {} MiB.",
                        mib(used_bytes),
                        mib(limit_bytes)
                    ))
                    .hint("Retry later, or start the node with a larger --memory.")
            }
        }
    }
}

/// A limit, and the bytes charged against it.
#[derive(Debug)]
pub(crate) struct Budget {
    limit_bytes: u64,
    /// The number of bytes by which small charges may exceed the limit.
    reserve_bytes: u64,
    used_bytes: AtomicU64,
    /// The node's budget, if this is a tenant's.
    node: Option<Arc<Budget>>,
    /// Number of rejected charges. Only used in the node's budget.
    rejected: AtomicU64,
    /// Number of sessions that wait for a release. Only used in the node's budget.
    waiting: AtomicU64,
    released: Notify,
    /// Number of sessions that wait because the node's limit is reached, not their tenant's. Only
    /// used in the node's budget.
    short_sessions: AtomicU64,
    /// Notified when `short_sessions` grows.
    shortage: Notify,
}

impl Budget {
    fn new(limit_bytes: u64, reserve_bytes: u64, node: Option<Arc<Budget>>) -> Arc<Budget> {
        Arc::new(Budget {
            limit_bytes,
            reserve_bytes,
            used_bytes: AtomicU64::new(0),
            node,
            rejected: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            released: Notify::new(),
            short_sessions: AtomicU64::new(0),
            shortage: Notify::new(),
        })
    }

    /// The budget of a node.
    pub(crate) fn of_node(limit_bytes: u64) -> Arc<Budget> {
        Budget::new(limit_bytes, limit_bytes / 4, None)
    }

    /// The budget of one of its tenants.
    pub(crate) fn of_tenant(node: &Arc<Budget>) -> Arc<Budget> {
        let limit_bytes = node.limit_bytes / 2;
        Budget::new(limit_bytes, limit_bytes / 8, Some(node.clone()))
    }

    fn root(&self) -> &Budget {
        self.node.as_deref().unwrap_or(self)
    }

    /// Charges bytes for a session that has already charged `held_bytes`.
    pub(crate) fn charge(&self, bytes: u64, held_bytes: u64, class: Class) -> Result<(), Shortage> {
        if held_bytes.saturating_add(bytes) > self.limit_bytes {
            let bytes = held_bytes.saturating_add(bytes);
            return Err(Shortage::TooLarge { bytes, limit_bytes: self.limit_bytes });
        }
        if let Some(node) = &self.node
            && let Err(used_bytes) = node.try_add(bytes, class)
        {
            return Err(Shortage::Node { used_bytes, limit_bytes: node.limit_bytes });
        }
        self.try_add(bytes, class).map_err(|used_bytes| {
            if let Some(node) = &self.node {
                node.subtract(bytes);
            }
            Shortage::Tenant { used_bytes, limit_bytes: self.limit_bytes }
        })
    }

    /// Adds to the used bytes. If that would exceed the limit, returns the used bytes.
    fn try_add(&self, bytes: u64, class: Class) -> Result<(), u64> {
        let limit_bytes = match class {
            Class::Small => self.limit_bytes + self.reserve_bytes,
            Class::Large => self.limit_bytes,
            Class::Optional => self.limit_bytes / 4,
        };
        let taken = self.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= limit_bytes)
        });
        taken.map(|_| ())
    }

    fn subtract(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Releases a charge, and wakes the sessions that wait for memory.
    pub(crate) fn release(&self, bytes: u64) {
        self.subtract(bytes);
        if let Some(node) = &self.node {
            node.subtract(bytes);
        }
        let root = self.root();
        if root.waiting.load(Ordering::Acquire) > 0 {
            root.released.notify_waiters();
        }
    }

    /// Counts a request that failed for lack of memory.
    pub(crate) fn count_rejection(&self) {
        self.root().rejected.fetch_add(1, Ordering::Relaxed);
    }

    /// Completes once `attempt` succeeds or fails permanently. It is repeated after every release
    /// on the node.
    pub(crate) async fn wait_for<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, Shortage>,
    ) -> Result<T, Shortage> {
        let root = self.root();
        root.waiting.fetch_add(1, Ordering::AcqRel);
        let _waiting = WaitingSession(root);
        loop {
            // Registered before the attempt, so that no release is missed.
            let mut released = std::pin::pin!(root.released.notified());
            released.as_mut().enable();
            match attempt() {
                Err(shortage) if shortage.is_temporary() => {
                    let of_node = matches!(shortage, Shortage::Node { .. });
                    let _short = of_node.then(|| ShortSession::new(root));
                    released.await;
                }
                result => return result,
            }
        }
    }

    /// Completes once a session waits for memory of the node.
    pub(crate) async fn node_shortage(&self) {
        let root = self.root();
        loop {
            // Registered before the counter is read, so that no notification is missed.
            let mut shortage = std::pin::pin!(root.shortage.notified());
            shortage.as_mut().enable();
            if root.short_sessions.load(Ordering::Acquire) > 0 {
                return;
            }
            shortage.await;
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }
}

/// Counts a waiting session.
struct WaitingSession<'a>(&'a Budget);

impl Drop for WaitingSession<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Counts a session that waits for memory of the node, and notifies the others.
struct ShortSession<'a>(&'a Budget);

impl ShortSession<'_> {
    fn new(root: &Budget) -> ShortSession<'_> {
        root.short_sessions.fetch_add(1, Ordering::AcqRel);
        root.shortage.notify_waiters();
        ShortSession(root)
    }
}

impl Drop for ShortSession<'_> {
    fn drop(&mut self) {
        self.0.short_sessions.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The statistics for a scrape of the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) used_bytes: u64,
    pub(crate) limit_bytes: u64,
    pub(crate) rejected: u64,
}

/// The budgets of a node and of all tenants that have sessions.
pub(crate) struct SessionMemory {
    node: Arc<Budget>,
    tenants: Mutex<HashMap<PartitionId, Weak<Budget>>>,
}

impl SessionMemory {
    pub(crate) fn new(limit_bytes: u64) -> SessionMemory {
        SessionMemory { node: Budget::of_node(limit_bytes), tenants: Mutex::default() }
    }

    /// The budget that all sessions of a tenant share.
    pub(crate) fn of(&self, tenant: PartitionId) -> Arc<Budget> {
        let mut tenants = self.tenants.lock();
        if let Some(budget) = tenants.get(&tenant).and_then(Weak::upgrade) {
            return budget;
        }
        // Entries without sessions are removed when the map would otherwise grow.
        if tenants.len() == tenants.capacity() {
            tenants.retain(|_, budget| budget.strong_count() > 0);
        }
        let budget = Budget::of_tenant(&self.node);
        tenants.insert(tenant, Arc::downgrade(&budget));
        budget
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage {
            used_bytes: self.node.used_bytes(),
            limit_bytes: self.node.limit_bytes,
            rejected: self.node.rejected.load(Ordering::Relaxed),
        }
    }

    /// Bytes charged by the sessions of a tenant.
    pub(crate) fn used_bytes(&self, tenant: PartitionId) -> u64 {
        let budget = self.tenants.lock().get(&tenant).and_then(Weak::upgrade);
        budget.map_or(0, |budget| budget.used_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use futures::FutureExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn node_limit_is_a_quarter_of_its_memory() {
        assert_eq!(session_memory_bytes(256 * MIB), 64 * MIB);
        assert_eq!(session_memory_bytes(64 * MIB), MIN_NODE_BYTES);
    }

    #[test]
    fn charges_count_against_tenant_and_node() {
        let memory = SessionMemory::new(64 * MIB);
        let [one, two, three] = [1, 2, 3].map(|id| memory.of(PartitionId(id)));
        assert_eq!(
            one.charge(33 * MIB, 0, Class::Large),
            Err(Shortage::TooLarge { bytes: 33 * MIB, limit_bytes: 32 * MIB })
        );
        one.charge(30 * MIB, 0, Class::Large).unwrap();
        assert_eq!(
            one.charge(3 * MIB, 0, Class::Large),
            Err(Shortage::Tenant { used_bytes: 30 * MIB, limit_bytes: 32 * MIB })
        );
        assert_eq!(memory.usage().used_bytes, 30 * MIB, "a rejected charge must not remain on the node");
        two.charge(32 * MIB, 0, Class::Large).unwrap();
        assert_eq!(
            three.charge(3 * MIB, 0, Class::Large),
            Err(Shortage::Node { used_bytes: 62 * MIB, limit_bytes: 64 * MIB })
        );
        three.charge(3 * MIB, 0, Class::Small).unwrap();
        assert_eq!(memory.used_bytes(PartitionId(2)), 32 * MIB);
        one.release(30 * MIB);
        two.release(32 * MIB);
        three.release(3 * MIB);
        assert_eq!(memory.usage().used_bytes, 0);
    }

    #[test]
    fn small_charges_have_a_bounded_reserve() {
        let memory = SessionMemory::new(64 * MIB);
        let tenant = memory.of(PartitionId(1));
        tenant.charge(32 * MIB, 0, Class::Large).unwrap();
        tenant.charge(4 * MIB, 0, Class::Small).unwrap();
        assert!(tenant.charge(1, 0, Class::Small).is_err());
        let other = memory.of(PartitionId(2));
        assert!(other.charge(1, 0, Class::Optional).is_err(), "a quarter of the node's limit is in use");
        other.charge(MIB, 0, Class::Large).unwrap();
    }

    #[test]
    fn budgets_of_tenants_without_sessions_are_removed() {
        let memory = SessionMemory::new(64 * MIB);
        for id in 0..10_000 {
            memory.of(PartitionId(id)).charge(MIB, 0, Class::Large).unwrap();
            memory.node.release(MIB);
        }
        assert!(memory.tenants.lock().len() < 100);
        let kept = memory.of(PartitionId(1));
        assert!(Arc::ptr_eq(&kept, &memory.of(PartitionId(1))));
    }

    #[test]
    fn a_waiting_charge_succeeds_after_a_release() {
        let memory = SessionMemory::new(64 * MIB);
        let (one, two) = (memory.of(PartitionId(1)), memory.of(PartitionId(1)));
        one.charge(32 * MIB, 0, Class::Large).unwrap();
        let mut waiting = Box::pin(two.wait_for(|| two.charge(MIB, 0, Class::Large)));
        let waker = futures::task::noop_waker();
        let mut cx = std::task::Context::from_waker(&waker);
        assert_eq!(waiting.poll_unpin(&mut cx), Poll::Pending);
        one.release(2 * MIB);
        assert_eq!(waiting.poll_unpin(&mut cx), Poll::Ready(Ok(())));
        drop(waiting);
        assert_eq!(memory.node.waiting.load(Ordering::Relaxed), 0);
        let too_large = two.wait_for(|| two.charge(33 * MIB, 0, Class::Large)).now_or_never();
        assert!(matches!(too_large, Some(Err(Shortage::TooLarge { .. }))));
    }

    #[test]
    fn only_a_wait_for_the_node_is_a_shortage_of_the_node() {
        let memory = SessionMemory::new(64 * MIB);
        let [one, two, three] = [1, 2, 3].map(|id| memory.of(PartitionId(id)));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let mut shortage = Box::pin(one.node_shortage());
        one.charge(32 * MIB, 0, Class::Large).unwrap();
        let mut of_tenant = Box::pin(one.wait_for(|| one.charge(MIB, 0, Class::Large)));
        assert!(of_tenant.poll_unpin(&mut cx).is_pending());
        assert!(shortage.poll_unpin(&mut cx).is_pending(), "the node's limit is not reached");
        two.charge(32 * MIB, 0, Class::Large).unwrap();
        let mut of_node = Box::pin(three.wait_for(|| three.charge(MIB, 0, Class::Large)));
        assert!(of_node.poll_unpin(&mut cx).is_pending());
        assert!(shortage.poll_unpin(&mut cx).is_ready());
        drop(of_node);
        let mut later = Box::pin(two.node_shortage());
        assert!(later.poll_unpin(&mut cx).is_pending(), "no session waits any more");
    }

    #[test]
    fn errors_name_the_limit_and_the_remedy() {
        let too_large = Shortage::TooLarge { bytes: 33 * MIB, limit_bytes: 32 * MIB }.error();
        assert_eq!(too_large.state(), sqlstate::PROGRAM_LIMIT);
        assert!(too_large.message().contains("32 MiB"), "{}", too_large.message());
        for shortage in [
            Shortage::Tenant { used_bytes: MIB, limit_bytes: 32 * MIB },
            Shortage::Node { used_bytes: MIB, limit_bytes: 64 * MIB },
        ] {
            assert_eq!(shortage.error().state(), sqlstate::OUT_OF_MEMORY);
        }
    }
}
