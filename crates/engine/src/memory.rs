//! The node's memory budget: what `--memory` allows for the pages of all partitions together.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, sqlstate};

/// A budget in bytes.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    limit_bytes: u64,
    used_bytes: AtomicU64,
}

impl MemoryBudget {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        MemoryBudget { limit_bytes, used_bytes: AtomicU64::new(0) }
    }

    /// Takes bytes from the budget if there are as many left.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        self.reserve_up_to(bytes, self.limit_bytes)
    }

    /// The same for changes that do not make a database larger: they replace pages, which are freed soon, and may
    /// overdraw the budget by an eighth meanwhile. So deleting works when the memory is full.
    pub(crate) fn reserve_to_replace(&self, bytes: u64) -> bool {
        self.reserve_up_to(bytes, self.limit_bytes + self.limit_bytes / 8)
    }

    fn reserve_up_to(&self, bytes: u64, limit_bytes: u64) -> bool {
        self.used_bytes
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|sum| *sum <= limit_bytes)
            })
            .is_ok()
    }

    /// Gives bytes back.
    pub(crate) fn release(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// The error for who could not reserve.
    pub(crate) fn exhausted(&self) -> Error {
        Error::new(
            sqlstate::OUT_OF_MEMORY,
            format!(
                "the data of all databases would exceed the node's memory of {} MiB",
                self.limit_bytes >> 20
            ),
        )
        .hint("delete data, or start the node with a larger --memory")
    }
}
