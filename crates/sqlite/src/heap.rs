//! Accounting of statement memory: SQLite's heap (values, prepared statements, schemas, caches),
//! and other memory of connections except pages (buffers of temporary files, changed pages before
//! they spill, Lua).
//!
//! One statement can request any amount of it: `SELECT max(hex(zeroblob(100000000)), ...)`. Memory
//! is counted where the running connection allocates it, and is charged to the tenant and to the
//! node before it is allocated:
//!
//! ```text
//!  sqlite3_malloc --> HeapAccount of a connection --(in steps)--> Heap of partition --> Heap of node
//!                                                                     | full: SQLITE_NOMEM
//!  the statement is rolled back (53200) <-----------------------------'
//! ```
//!
//! - The node's limit is three eighths of `--memory`, and at least [`MIN_NODE_BYTES`]. A tenant may
//!   use half of it.
//! - The first [`SMALL_BYTES`] of a connection may use the whole limit. Memory of a connection
//!   beyond that may use three quarters of it. So statements that hold much memory leave a quarter
//!   to those that hold little, in the same tenant and in others.
//! - Charging steps are small for the first MiB, and 1 MiB beyond. An ordinary statement stays
//!   within the amount that its connection has charged before, and accesses no shared state.
//! - While more than half of a limit is in use, connections are closed after their transaction
//!   instead of being pooled ([`Heap::is_crowded`]). A connection that holds more than
//!   [`MAX_IDLE_BYTES`] is always closed.
//!
//! SQLite's allocator is wrapped in [`crate::allocator`]. Other memory of the connection that runs
//! on a thread is charged with a [`crate::lease`].

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, sqlstate};

/// A connection that holds no more than this is small.
const SMALL_BYTES: u64 = 1 << 20;
/// The charging step of a small connection, and of a larger one.
const SMALL_STEP_BYTES: u64 = 64 << 10;
const STEP_BYTES: u64 = 1 << 20;
/// Unused memory that stays charged to a connection during a transaction, so that it does not
/// charge for each value.
const MAX_SPARE_BYTES: u64 = 1 << 20;
/// The same between two transactions.
const MAX_IDLE_SPARE_BYTES: u64 = 256 << 10;
/// A statement whose compilation has taken more memory continues on the offload pool
/// ([`HeapAccount::begin_compiling`]).
const OFFLOAD_COMPILE_BYTES: u64 = 1 << 20;
/// A connection that holds more between two transactions is closed.
const MAX_IDLE_BYTES: u64 = 16 << 20;

/// The lower bound of a node's limit: the limit with 256 MiB of memory, the smallest useful budget.
const MIN_NODE_BYTES: u64 = 96 << 20;
/// A value may take the tenant's limit divided by this. A statement that computes a value often
/// holds a second and a third one.
const VALUE_DIVISOR: u64 = 4;

/// The memory limit of the connections of a partition, or of a node, and its use.
#[derive(Debug)]
pub struct Heap {
    limit_bytes: u64,
    used_bytes: AtomicU64,
    parent: Option<Arc<Heap>>,
}

impl Heap {
    /// The heap of a node with a memory budget of `memory_bytes`.
    pub fn of_node(memory_bytes: u64) -> Arc<Heap> {
        let limit_bytes = (memory_bytes / 8 * 3).max(MIN_NODE_BYTES);
        Arc::new(Heap { limit_bytes, used_bytes: AtomicU64::new(0), parent: None })
    }

    /// The heap of one of the node's partitions.
    pub fn of_partition(node: &Arc<Heap>) -> Heap {
        Heap {
            limit_bytes: node.partition_limit_bytes(),
            used_bytes: AtomicU64::new(0),
            parent: Some(node.clone()),
        }
    }

    /// The limit of one partition, for a node's heap.
    pub fn partition_limit_bytes(&self) -> u64 {
        self.limit_bytes / 2
    }

    /// The maximum size of a value or row, for a partition's heap.
    pub(crate) fn largest_value_bytes(&self) -> u64 {
        self.limit_bytes / VALUE_DIVISOR
    }

    /// Returns true if memory is short: connections are then not pooled.
    pub fn is_crowded(&self) -> bool {
        self.used_bytes.load(Ordering::Relaxed) > self.limit_bytes / 2
            || self.parent.as_ref().is_some_and(|parent| parent.is_crowded())
    }

    /// Bytes that are charged.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// The limit.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Charges bytes of a connection. `small` is true if the connection is still small with them.
    fn take(&self, bytes: u64, small: bool) -> bool {
        if self.parent.as_ref().is_some_and(|parent| !parent.take(bytes, small)) {
            return false;
        }
        let limit_bytes = if small { self.limit_bytes } else { self.limit_bytes / 4 * 3 };
        let used_bytes = self.used_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if used_bytes > limit_bytes {
            self.give(bytes);
            return false;
        }
        true
    }

    fn give(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            parent.give(bytes);
        }
    }
}

/// The memory that a connection holds, and the part that is charged. Used by one thread at a time,
/// like the connection.
#[derive(Debug, Default)]
pub struct HeapAccount {
    bytes: Cell<u64>,
    charged_bytes: Cell<u64>,
    refused: Cell<bool>,
    /// The memory that was held when SQLite began to compile a statement, while it does.
    compiles_from: Cell<Option<u64>>,
    /// The compilation has taken more than [`OFFLOAD_COMPILE_BYTES`].
    grew: Cell<bool>,
}

impl HeapAccount {
    /// Charges more bytes. Returns false if the limit of the tenant or the node is reached.
    pub fn take(&self, bytes: u64, heap: &Heap) -> bool {
        let account = self.bytes.get() + bytes;
        let lacking = account.saturating_sub(self.charged_bytes.get());
        if lacking > 0 {
            let compiled = self.compiles_from.get().map_or(0, |from| account.saturating_sub(from));
            self.grew.set(self.grew.get() || compiled > OFFLOAD_COMPILE_BYTES);
            let small = account <= SMALL_BYTES;
            let step = lacking.next_multiple_of(if small { SMALL_STEP_BYTES } else { STEP_BYTES });
            if !heap.take(step, small) {
                self.refused.set(true);
                return false;
            }
            self.charged_bytes.set(self.charged_bytes.get() + step);
        }
        self.bytes.set(account);
        true
    }

    /// Called when SQLite begins to compile a statement. Compilation cannot be interrupted
    /// everywhere. A short text may expand to an expression of any size (if each of a chain of
    /// common table expressions uses the previous one twice), which is built of small allocations.
    /// So [`HeapAccount::take`] watches the memory of the compilation when it charges. Ordinary
    /// statements take a few KiB and are not affected.
    pub(crate) fn begin_compiling(&self) {
        if self.compiles_from.get().is_none() {
            self.compiles_from.set(Some(self.bytes.get()));
        }
    }

    /// Called when SQLite has compiled a statement.
    pub(crate) fn end_compiling(&self) {
        self.compiles_from.set(None);
        self.grew.set(false);
    }

    /// Returns true if compilation has taken much memory since the last call.
    pub(crate) fn take_growth(&self) -> bool {
        self.grew.get() && self.grew.take()
    }

    /// Releases bytes that [`HeapAccount::take`] has charged.
    pub fn give(&self, bytes: u64, heap: &Heap) {
        self.bytes.set(self.bytes.get().saturating_sub(bytes));
        self.release(MAX_SPARE_BYTES, heap);
    }

    /// Releases charged memory that is not held, in whole steps, except `max_spare_bytes`.
    fn release(&self, max_spare_bytes: u64, heap: &Heap) {
        let spare = self.charged_bytes.get().saturating_sub(self.bytes.get());
        if spare > max_spare_bytes {
            let step = spare - spare % SMALL_STEP_BYTES;
            heap.give(step);
            self.charged_bytes.set(self.charged_bytes.get() - step);
        }
    }

    /// Called at the end of a transaction: little unused memory stays charged for the next one.
    pub fn settle(&self, heap: &Heap) {
        self.release(MAX_IDLE_SPARE_BYTES, heap);
    }

    /// Returns true if a charge was rejected since the last call.
    pub(crate) fn was_refused(&self) -> bool {
        self.refused.take()
    }

    /// Returns true if the connection holds too much to be pooled.
    pub fn exceeds_idle_limit(&self) -> bool {
        self.bytes.get() > MAX_IDLE_BYTES
    }

    /// Releases everything when the connection is closed.
    pub fn give_all(&self, heap: &Heap) {
        self.bytes.set(0);
        heap.give(self.charged_bytes.take());
    }
}

/// Memory of a tenant that no connection holds, such as descriptions of its statements. Dropping
/// this releases the charge.
#[derive(Debug, Default)]
pub struct Charge {
    bytes: u64,
    heap: Option<Arc<Heap>>,
}

impl Charge {
    /// Charges more bytes. Returns false if the limit of the tenant or the node is reached.
    pub fn grow_by(&mut self, bytes: u64, heap: &Arc<Heap>) -> bool {
        let taken = heap.take(bytes, false);
        if taken {
            self.bytes += bytes;
            self.heap.get_or_insert_with(|| heap.clone());
        }
        taken
    }

    /// Bytes that are charged.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(heap) = &self.heap {
            heap.give(self.bytes);
        }
    }
}

/// The error for a statement that exceeds the memory limit of its tenant or the node.
pub fn exhausted() -> Error {
    Error::new(sqlstate::OUT_OF_MEMORY, "out of memory")
        .detail(
            "The statements of the database, or of all databases together, have reached their memory limit.",
        )
        .hint("Run smaller or fewer concurrent statements, or start the node with a larger --memory.")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn heaps() -> (Arc<Heap>, Heap, Heap) {
        let node = Heap::of_node(256 * MIB);
        let (one, other) = (Heap::of_partition(&node), Heap::of_partition(&node));
        (node, one, other)
    }

    fn used(heap: &Heap) -> u64 {
        heap.used_bytes() / (64 << 10)
    }

    #[test]
    fn held_memory_is_charged_and_released() {
        let (node, one, _) = heaps();
        assert_eq!(
            (node.limit_bytes, one.limit_bytes, one.largest_value_bytes()),
            (96 * MIB, 48 * MIB, 12 * MIB)
        );
        let (small, large) = (HeapAccount::default(), HeapAccount::default());
        assert!(
            small.take(1, &one) && used(&one) == 1 && used(&node) == 1,
            "the first byte must charge a step"
        );
        assert!(small.take(SMALL_STEP_BYTES, &one) && used(&one) == 2);
        assert!(large.take(5 * MIB, &one) && used(&one) == 82);
        large.give(4 * MIB, &one);
        assert_eq!(used(&one), 18, "memory that is no longer held must be released");
        large.give(MIB / 2, &one);
        assert_eq!(used(&one), 18, "some spare memory must stay charged");
        large.settle(&one);
        assert_eq!(used(&one), 10);
        for account in [&small, &large] {
            account.give_all(&one);
        }
        assert_eq!((used(&one), used(&node)), (0, 0));
    }

    #[test]
    fn large_statements_leave_memory_to_small_ones() {
        let (node, one, other) = heaps();
        let large: Vec<_> = (0..50).map(|_| HeapAccount::default()).collect();
        let most = |heap: &Heap, large: &[HeapAccount]| {
            large.iter().take_while(|account| account.take(2 * MIB, heap)).count()
        };
        assert_eq!(most(&one, &large[..25]), 18, "three quarters of the tenant's 48 MiB");
        assert!(large[18].was_refused() && !large[18].was_refused() && one.is_crowded());
        assert_eq!(most(&other, &large[25..]), 18, "three quarters of the node's 96 MiB");
        let small: Vec<_> = (0..100).map(|_| HeapAccount::default()).collect();
        let most_small = |heap: &Heap, small: &[HeapAccount]| {
            small.iter().take_while(|account| account.take(MIB / 2, heap)).count()
        };
        assert_eq!((most_small(&one, &small[..50]), most_small(&other, &small[50..])), (24, 24));
        assert_eq!(node.used_bytes(), node.limit_bytes, "the limit must not be exceeded");
        // The minimum on a small node, and in proportion to the budget on a larger one.
        assert_eq!(Heap::of_node(0).limit_bytes, 96 * MIB);
        assert_eq!(Heap::of_node(8 << 30).limit_bytes, 3 << 30);
    }
}
