//! SQLite's own memory: values, statements, its caches, and what Lua holds. All that they have beside pages of ours.
//!
//! One statement can ask for any amount of it: `SELECT max(hex(zeroblob(100000000)), ...)`. So it is counted where SQLite
//! asks for it, by the connection that runs, and charged to the tenant and to the node:
//!
//! ```text
//!  sqlite3_malloc --> Held, of a connection --(MiB by MiB, beyond the first)--> Heap of the partition --> Heap of the node
//!                                                                                  | full: SQLITE_NOMEM
//!  the statement is taken back (53200) <-------------------------------------------'
//! ```
//! An ordinary statement stays within the first MiB: it touches nothing that is shared, and goes on when its tenant has nothing
//! left. All that SQLite does for a connection is done in its name, so what it holds is known; one that holds much when its
//! transaction has ended is closed.
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

use crate::{Error, sqlstate, vfs};

/// What a connection may hold uncharged, and the step in which it charges more.
const STEP_BYTES: u64 = 1 << 20;
/// What it keeps charged when it holds less, so that it does not ask for every value anew.
const KEPT_BYTES: u64 = 4 << 20;
/// A connection that holds more between two transactions is closed.
const MOST_IDLE_BYTES: u64 = 16 << 20;

/// What a node allows at least, whatever its `--memory`: a tenant has room for two values of the greatest size.
const LEAST_OF_NODE_BYTES: u64 = 1 << 30;

/// What the connections of a partition, or of a node, may hold together.
#[derive(Debug)]
pub(crate) struct Heap {
    limit_bytes: u64,
    used_bytes: AtomicU64,
    above: Option<Arc<Heap>>,
}

impl Heap {
    /// Of a node with so much memory for pages: half as much.
    pub(crate) fn of_node(memory_bytes: u64) -> Arc<Heap> {
        let limit_bytes = (memory_bytes / 2).max(LEAST_OF_NODE_BYTES);
        Arc::new(Heap { limit_bytes, used_bytes: AtomicU64::new(0), above: None })
    }

    /// Of one of its partitions: half of that.
    pub(crate) fn of_partition(node: &Arc<Heap>) -> Heap {
        Heap { limit_bytes: node.limit_bytes / 2, used_bytes: AtomicU64::new(0), above: Some(node.clone()) }
    }

    fn take(&self, bytes: u64) -> bool {
        if self.above.as_ref().is_some_and(|above| !above.take(bytes)) {
            return false;
        }
        let used_bytes = self.used_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if used_bytes > self.limit_bytes {
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
}

impl Held {
    /// More is asked for; answers whether there is as much.
    fn take(&self, bytes: u64, heap: &Heap) -> bool {
        let held = self.bytes.get() + bytes;
        let lacking = held.saturating_sub(self.charged_bytes.get() + STEP_BYTES);
        if lacking > 0 {
            let step = lacking.next_multiple_of(STEP_BYTES);
            if !heap.take(step) {
                return false;
            }
            self.charged_bytes.set(self.charged_bytes.get() + step);
        }
        self.bytes.set(held);
        true
    }

    fn give(&self, bytes: u64, heap: &Heap) {
        let held = self.bytes.get().saturating_sub(bytes);
        self.bytes.set(held);
        let spare = self.charged_bytes.get().saturating_sub(held);
        if spare > KEPT_BYTES {
            let step = spare - spare % STEP_BYTES;
            heap.give(step);
            self.charged_bytes.set(self.charged_bytes.get() - step);
        }
    }

    /// Whether it is too much to wait for the next transaction with.
    pub(crate) fn is_much(&self) -> bool {
        self.bytes.get() > MOST_IDLE_BYTES
    }

    /// The connection has been closed.
    pub(crate) fn give_all(&self, heap: &Heap) {
        self.bytes.set(0);
        heap.give(self.charged_bytes.take());
    }
}

/// Called before each of SQLite's allocations. Returns false if the connection that runs on this thread has too little stack left
/// for it ([`crate::fiber::stack`]). A large allocation moves the connection's fiber to the offload pool first, so this may return on
/// another thread.
#[inline(never)]
pub(crate) fn admit(bytes: std::ffi::c_int) -> bool {
    // SAFETY: called by SQLite; the link is used by the fiber that runs.
    unsafe { vfs::current() }.is_none_or(|link| link.admit_allocation(bytes as usize))
}

/// What the connection that runs on this thread holds becomes another amount, in bytes; answers whether it may, else nothing has changed.
/// Nothing is counted where none runs (the metadata store).
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
    Error::new(sqlstate::OUT_OF_MEMORY, "out of memory: the values of the tenant's statements take too much")
        .hint("run smaller statements, or fewer at once; docs/sql.md says how much they may take")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_is_held_is_charged_and_given_back() {
        let node = Heap::of_node(0);
        let (one, other) = (Heap::of_partition(&node), Heap::of_partition(&node));
        let used = |heap: &Heap| heap.used_bytes.load(Ordering::Relaxed) / MIB;
        let (small, large, third) = (Held::default(), Held::default(), Held::default());
        assert!(small.take(MIB, &one) && used(&one) == 0, "the first MiB is free");
        assert!(small.take(1, &one) && used(&one) == 1 && used(&node) == 1);
        assert!(large.take(512 * MIB, &one) && used(&one) == 512);
        assert!(
            !small.take(2 * MIB, &one) && used(&one) == 512 && used(&node) == 512,
            "nothing is left of it"
        );
        assert!(third.take(513 * MIB, &other) && used(&node) == 1024);
        assert!(!large.take(MIB, &one) && Held::default().take(MIB, &one));

        third.give(510 * MIB, &other);
        assert!(used(&other) == 3 && used(&node) == 515, "{other:?}");
        assert!(!third.is_much() && large.is_much());
        for (held, heap) in [(&small, &one), (&large, &one), (&third, &other)] {
            held.give_all(heap);
        }
        assert_eq!([used(&one), used(&other), used(&node)], [0; 3]);
    }
}
