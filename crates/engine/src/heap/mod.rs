//! Memory of statements: SQLite's own (values, prepared statements, schemas, caches), and what else a connection holds beside pages
//! (buffers of temporary files, changed pages before they spill, Lua).
//!
//! One statement can ask for any amount of it: `SELECT max(hex(zeroblob(100000000)), ...)`. It is counted where it is
//! allocated, by the connection that runs, and charged to the tenant and to the node before it is allocated:
//!
//! ```text
//!  sqlite3_malloc --> Held, of a connection --(in steps)--> Heap of the partition --> Heap of the node
//!                                                               | full: SQLITE_NOMEM
//!  the statement is rolled back (53200) <-----------------------'
//! ```
//!
//! - The node's limit is three eighths of `--memory`, and at least [`MIN_NODE_BYTES`]. A tenant may use half of it.
//! - The first [`SMALL_BYTES`] of a connection may use the whole limit. What a connection holds beyond may use three quarters of it.
//!   So statements that hold much leave a quarter to those that hold little, in the same tenant and in others.
//! - Steps are small for the first MiB, and 1 MiB beyond. An ordinary statement stays within what its connection has charged
//!   before, and touches nothing that is shared.
//! - While more than half of a limit is in use, connections are closed after their transaction instead of waiting for the next one
//!   ([`Heap::is_crowded`]). A connection that holds more than [`MAX_IDLE_BYTES`] is always closed.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`allocator`] | stands between SQLite and its allocator, and counts |
//! | [`blocks`] | blocks that a thread keeps for its next statement |

mod allocator;
mod blocks;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use blocks::let_go;

use crate::{Error, Result, sqlstate, vfs};

/// A connection that holds no more than this is a small one.
const SMALL_BYTES: u64 = 1 << 20;
/// The step in which a small connection charges, and a larger one.
const SMALL_STEP_BYTES: u64 = 64 << 10;
const STEP_BYTES: u64 = 1 << 20;
/// What a connection keeps charged during a transaction when it holds less, so that it does not charge for each value.
const KEPT_BYTES: u64 = 1 << 20;
/// The same between two transactions.
const KEPT_IDLE_BYTES: u64 = 256 << 10;
/// A statement whose compilation has taken more memory continues on the offload pool
/// ([`Held::begin_compiling`]).
const COMPILED_BYTES: u64 = 1 << 20;
/// A connection that holds more between two transactions is closed.
const MAX_IDLE_BYTES: u64 = 16 << 20;

/// The lower bound of a node's limit: that of a node with 256 MiB, which is the smallest useful budget.
const MIN_NODE_BYTES: u64 = 96 << 20;
/// A value may take this part of its tenant's limit. A statement that computes one often has a second and a third in hand.
const VALUE_PART: u64 = 4;

/// What the connections of a partition, or of a node, may hold together.
#[derive(Debug)]
pub(crate) struct Heap {
    limit_bytes: u64,
    used_bytes: AtomicU64,
    above: Option<Arc<Heap>>,
}

impl Heap {
    /// Of a node with a memory budget of `memory_bytes`.
    pub(crate) fn of_node(memory_bytes: u64) -> Arc<Heap> {
        let limit_bytes = (memory_bytes / 8 * 3).max(MIN_NODE_BYTES);
        Arc::new(Heap { limit_bytes, used_bytes: AtomicU64::new(0), above: None })
    }

    /// Of one of its partitions.
    pub(crate) fn of_partition(node: &Arc<Heap>) -> Heap {
        Heap {
            limit_bytes: node.partition_limit_bytes(),
            used_bytes: AtomicU64::new(0),
            above: Some(node.clone()),
        }
    }

    /// What one partition may hold, of a node's heap.
    pub(crate) fn partition_limit_bytes(&self) -> u64 {
        self.limit_bytes / 2
    }

    /// Bytes that one value or row may have, of a partition's heap.
    pub(crate) fn largest_value_bytes(&self) -> u64 {
        self.limit_bytes / VALUE_PART
    }

    /// Whether memory is short: connections are not kept for the next transaction.
    pub(crate) fn is_crowded(&self) -> bool {
        self.used_bytes.load(Ordering::Relaxed) > self.limit_bytes / 2
            || self.above.as_ref().is_some_and(|above| above.is_crowded())
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Charges bytes of a connection, which is a `small` one with them or not.
    fn take(&self, bytes: u64, small: bool) -> bool {
        if self.above.as_ref().is_some_and(|above| !above.take(bytes, small)) {
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
        if let Some(above) = &self.above {
            above.give(bytes);
        }
    }
}

/// What a connection holds, and what of that is charged. It is used by one thread at a time, as the connection is.
#[derive(Debug, Default)]
pub(crate) struct Held {
    bytes: Cell<u64>,
    charged_bytes: Cell<u64>,
    refused: Cell<bool>,
    /// What was held when SQLite began to compile a statement, while it does.
    compiles_from: Cell<Option<u64>>,
    /// Compilation has taken more than [`COMPILED_BYTES`] since.
    grew: Cell<bool>,
}

impl Held {
    /// Charges more bytes. Returns false if the tenant, or the node, may hold no more.
    pub(crate) fn take(&self, bytes: u64, heap: &Heap) -> bool {
        let held = self.bytes.get() + bytes;
        let lacking = held.saturating_sub(self.charged_bytes.get());
        if lacking > 0 {
            let compiled = self.compiles_from.get().map_or(0, |from| held.saturating_sub(from));
            self.grew.set(self.grew.get() || compiled > COMPILED_BYTES);
            let small = held <= SMALL_BYTES;
            let step = lacking.next_multiple_of(if small { SMALL_STEP_BYTES } else { STEP_BYTES });
            if !heap.take(step, small) {
                self.refused.set(true);
                return false;
            }
            self.charged_bytes.set(self.charged_bytes.get() + step);
        }
        self.bytes.set(held);
        true
    }

    /// SQLite compiles a statement. That cannot be interrupted everywhere, and a short text may
    /// stand for an expression of any size (each of a chain of common table expressions uses the
    /// one before twice), which is built of small allocations. So the memory that it takes is
    /// watched, where [`Held::take`] charges: ordinary statements take some KiB and cost nothing.
    pub(crate) fn begin_compiling(&self) {
        if self.compiles_from.get().is_none() {
            self.compiles_from.set(Some(self.bytes.get()));
        }
    }

    pub(crate) fn end_compiling(&self) {
        self.compiles_from.set(None);
        self.grew.set(false);
    }

    /// Whether compilation has taken much memory since this was asked last.
    pub(crate) fn take_growth(&self) -> bool {
        self.grew.get() && self.grew.take()
    }

    pub(crate) fn give(&self, bytes: u64, heap: &Heap) {
        self.bytes.set(self.bytes.get().saturating_sub(bytes));
        self.release(KEPT_BYTES, heap);
    }

    /// Releases what is charged and not held, but for `kept_bytes`, in whole steps.
    fn release(&self, kept_bytes: u64, heap: &Heap) {
        let spare = self.charged_bytes.get().saturating_sub(self.bytes.get());
        if spare > kept_bytes {
            let step = spare - spare % SMALL_STEP_BYTES;
            heap.give(step);
            self.charged_bytes.set(self.charged_bytes.get() - step);
        }
    }

    /// The transaction has ended: little stays charged for the next one.
    pub(crate) fn settle(&self, heap: &Heap) {
        self.release(KEPT_IDLE_BYTES, heap);
    }

    /// Whether a charge was refused since this was asked last.
    pub(crate) fn was_refused(&self) -> bool {
        self.refused.take()
    }

    /// Whether it is too much to wait for the next transaction with.
    pub(crate) fn is_much(&self) -> bool {
        self.bytes.get() > MAX_IDLE_BYTES
    }

    /// The connection has been closed.
    pub(crate) fn give_all(&self, heap: &Heap) {
        self.bytes.set(0);
        heap.give(self.charged_bytes.take());
    }
}

/// Called before each of SQLite's allocations. Returns false if the connection that runs on this thread has too little stack left
/// for it ([`crate::fiber::stack`]), or its fiber was dropped. A large allocation moves the
/// connection's fiber to the offload pool first, so this may return on another thread.
#[inline(never)]
pub(crate) fn admit(bytes: std::ffi::c_int) -> bool {
    // SAFETY: called by SQLite; the link is used by the fiber that runs.
    unsafe { vfs::current() }.is_none_or(|link| link.admit_allocation(bytes as usize))
}

/// Bytes that the connection which runs on this thread holds outside of SQLite, until this is dropped (on its fiber).
#[derive(Debug, Default)]
pub(crate) struct Lease(u64);

impl Lease {
    /// Fails with 53200 if the connection may hold no more.
    pub(crate) fn new(bytes: u64) -> Result<Lease> {
        let mut lease = Lease(0);
        lease.set(bytes)?;
        Ok(lease)
    }

    /// Changes how much is held.
    pub(crate) fn set(&mut self, bytes: u64) -> Result<()> {
        if !change(self.0, bytes) {
            return Err(exhausted());
        }
        self.0 = bytes;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        change(self.0, 0);
    }
}

/// Memory of a tenant that no connection holds, such as descriptions of its statements. Dropping it releases the charge.
#[derive(Debug, Default)]
pub(crate) struct Charge {
    bytes: u64,
    heap: Option<Arc<Heap>>,
}

impl Charge {
    /// Charges more bytes. Returns false if the tenant, or the node, may hold no more.
    pub(crate) fn grow_by(&mut self, bytes: u64, heap: &Arc<Heap>) -> bool {
        let taken = heap.take(bytes, false);
        if taken {
            self.bytes += bytes;
            self.heap.get_or_insert_with(|| heap.clone());
        }
        taken
    }

    pub(crate) fn bytes(&self) -> u64 {
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

/// Changes what the connection that runs on this thread holds, in bytes. Returns false, and changes nothing, if it may not hold
/// more. Nothing is counted where no connection runs (the metadata store).
pub(crate) fn change(before: u64, now: u64) -> bool {
    // SAFETY: called by SQLite, or by what a connection has called; the answer is not kept.
    let Some(link) = (unsafe { vfs::current() }) else { return true };
    let heap = link.partition.heap();
    if now > before {
        return link.held.take(now - before, heap);
    }
    link.held.give(before - now, heap);
    true
}

/// The error of a statement that would have to hold more than its tenant, or the node, may.
pub(crate) fn exhausted() -> Error {
    Error::new(sqlstate::OUT_OF_MEMORY, "out of memory")
        .detail(
            "The statements of the database, or of all databases together, hold as much memory as they may.",
        )
        .hint("Run smaller or fewer statements at a time, or start the node with a larger --memory.")
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
    fn what_is_held_is_charged_and_released() {
        let (node, one, _) = heaps();
        assert_eq!(
            (node.limit_bytes, one.limit_bytes, one.largest_value_bytes()),
            (96 * MIB, 48 * MIB, 12 * MIB)
        );
        let (small, large) = (Held::default(), Held::default());
        assert!(small.take(1, &one) && used(&one) == 1 && used(&node) == 1, "the first byte counts");
        assert!(small.take(SMALL_STEP_BYTES, &one) && used(&one) == 2);
        assert!(large.take(5 * MIB, &one) && used(&one) == 82);
        large.give(4 * MIB, &one);
        assert_eq!(used(&one), 18, "what is not held any more is released");
        large.give(MIB / 2, &one);
        assert_eq!(used(&one), 18, "but for some that the next value will take");
        large.settle(&one);
        assert_eq!(used(&one), 10);
        for held in [&small, &large] {
            held.give_all(&one);
        }
        assert_eq!((used(&one), used(&node)), (0, 0));
    }

    #[test]
    fn large_statements_leave_room_for_small_ones() {
        let (node, one, other) = heaps();
        let large: Vec<_> = (0..50).map(|_| Held::default()).collect();
        let most =
            |heap: &Heap, large: &[Held]| large.iter().take_while(|held| held.take(2 * MIB, heap)).count();
        assert_eq!(most(&one, &large[..25]), 18, "three quarters of the tenant's 48 MiB");
        assert!(large[18].was_refused() && !large[18].was_refused() && one.is_crowded());
        assert_eq!(most(&other, &large[25..]), 18, "three quarters of the node's 96 MiB");
        let small: Vec<_> = (0..100).map(|_| Held::default()).collect();
        let most_small =
            |heap: &Heap, small: &[Held]| small.iter().take_while(|held| held.take(MIB / 2, heap)).count();
        assert_eq!((most_small(&one, &small[..50]), most_small(&other, &small[50..])), (24, 24));
        assert_eq!(node.used_bytes(), node.limit_bytes, "nothing is beyond the limit");
        // Memory on a small node is what it is, and in proportion to the budget on a larger one.
        assert_eq!(Heap::of_node(0).limit_bytes, 96 * MIB);
        assert_eq!(Heap::of_node(8 << 30).limit_bytes, 3 << 30);
    }
}
