//! The node's memory budget for the pages of all partitions: `--memory` minus all other memory of
//! the process.
//!
//! ```text
//!  0 ........ 1/4 ................ 3/4 ...... 31/32 .. limit
//!  unwritten: | a flush is due      | writers wait
//!  used:                                      | the sweeper evicts | reservations evict, or wait
//! ```
//!
//! All other memory (sessions, SQLite's values, log buffers, indexes, the program) is not counted
//! at its allocation: the kernel knows the sum. A node reads it periodically
//! ([`MemoryBudget::balance`]) and reduces the pages' limit accordingly, to no less than half of
//! `--memory`.
//!
//! *Used* bytes are those of pages and their versions. *Unwritten* bytes are the part that is in no
//! segment of the store: these pages cannot be evicted before a flush has written them.
//! [`crate::cache`] frees memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_sqlite::{Error, sqlstate};
use tokio::sync::Notify;

use crate::page_memory::SlotUsage;

/// Upper bound of the memory that the sweeper keeps free.
const MAX_HEADROOM_BYTES: u64 = 64 << 20;

/// A budget in bytes.
#[derive(Debug)]
pub struct MemoryBudget {
    budget_bytes: u64,
    /// The part of the budget available to pages.
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// The part of the used bytes that is evicted and waits for readers.
    leaving_bytes: AtomicU64,
    unwritten_bytes: AtomicU64,
    /// Number of tasks that wait for memory.
    waiters: AtomicU64,
    /// Number of reservations that are not used yet.
    reservations: AtomicU64,
    /// Flush rounds that have ended, successful or not.
    flushes: AtomicU64,
    /// Notified when memory was released or a flush round has ended.
    freed: Notify,
    /// Wakes the sweeper.
    crowded: Notify,
    /// Wakes the flusher.
    flush_due: Arc<Notify>,
}

impl MemoryBudget {
    /// Creates a budget.
    pub fn new(budget_bytes: u64) -> Arc<Self> {
        Arc::new(MemoryBudget {
            budget_bytes,
            limit_bytes: AtomicU64::new(budget_bytes),
            used_bytes: AtomicU64::new(0),
            leaving_bytes: AtomicU64::new(0),
            unwritten_bytes: AtomicU64::new(0),
            waiters: AtomicU64::new(0),
            reservations: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            freed: Notify::new(),
            crowded: Notify::new(),
            flush_due: Arc::default(),
        })
    }

    /// Reserves bytes if they are available.
    pub fn reserve(&self, bytes: u64) -> bool {
        self.reserve_up_to(bytes, self.limit_bytes())
    }

    /// Reserves bytes if that requires no eviction.
    pub(crate) fn reserve_spare(&self, bytes: u64) -> bool {
        self.reserve_up_to(bytes, self.high_water_bytes())
    }

    /// Whether [`MemoryBudget::reserve_spare`] would succeed now.
    pub fn has_spare(&self, bytes: u64) -> bool {
        self.used_bytes() + bytes <= self.high_water_bytes()
    }

    /// Like [`MemoryBudget::reserve`], for changed pages, which stay until they are written.
    /// Changes that do not make a database larger replace pages that are freed soon, so they may
    /// exceed the budget by an eighth. Deletes therefore work when memory is full.
    pub(crate) fn reserve_unwritten(&self, bytes: u64, grows: bool) -> bool {
        let limit_bytes = self.limit_bytes();
        let more = if grows { 0 } else { limit_bytes / 8 };
        self.unwritten_bytes() + bytes <= limit_bytes / 4 * 3 + more
            && self.reserve_up_to(bytes, limit_bytes + more)
    }

    fn reserve_up_to(&self, bytes: u64, limit_bytes: u64) -> bool {
        let reserved = self.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= limit_bytes)
        });
        if reserved.is_ok_and(|before| before + bytes > self.high_water_bytes()) {
            self.crowded.notify_one();
        }
        reserved.is_ok()
    }

    /// Takes bytes without a check, for memory that cannot be refused.
    pub fn take(&self, bytes: u64) {
        let before = self.used_bytes.fetch_add(bytes, Ordering::AcqRel);
        if before + bytes > self.high_water_bytes() {
            self.crowded.notify_one();
        }
    }

    /// Releases bytes.
    pub fn release(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Bytes of pages in memory and their versions.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// The part of the used bytes that is in no segment of the store.
    pub fn unwritten_bytes(&self) -> u64 {
        self.unwritten_bytes.load(Ordering::Relaxed)
    }

    /// The limit for pages.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// Adjusts the limit to the process's memory: `process_bytes` in total, of which `places` are
    /// page slots, used and spare. Returns by how much the process exceeds `--memory`.
    pub(crate) fn balance(&self, process_bytes: u64, places: SlotUsage) -> u64 {
        // Used bytes outside of page slots are page versions, whether resident or not.
        let versions_bytes = self.used_bytes().saturating_sub(places.in_use_bytes);
        let others_bytes = process_bytes.saturating_sub(places.bytes + versions_bytes);
        let limit_bytes = self.budget_bytes.saturating_sub(others_bytes).max(self.budget_bytes / 2);
        self.limit_bytes.store(limit_bytes, Ordering::Relaxed);
        process_bytes.saturating_sub(self.budget_bytes)
    }

    fn high_water_bytes(&self) -> u64 {
        let limit_bytes = self.limit_bytes();
        limit_bytes - (limit_bytes / 32).min(MAX_HEADROOM_BYTES)
    }

    /// Bytes that the sweeper should evict, so that reservations find free memory. Evicted pages
    /// are free as soon as their readers have left; evicting more would not be faster, and would
    /// cost the readers pages they need next.
    pub(crate) fn excess_bytes(&self) -> u64 {
        let leaving = self.leaving_bytes.load(Ordering::Relaxed);
        self.used_bytes().saturating_sub(self.high_water_bytes() + leaving)
    }

    /// Waits until the sweeper has work.
    pub async fn crowded(&self) {
        self.crowded.notified().await;
    }

    /// Notified when memory was released. Waiters must register before they check.
    pub(crate) fn freed(&self) -> &Notify {
        &self.freed
    }

    fn flush_bytes(&self) -> u64 {
        self.limit_bytes() / 4
    }

    /// Registers a task that waits for memory, until the guard is dropped. Triggers a flush of all
    /// that can be written.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        self.flush_due.notify_one();
        Waiting(self)
    }

    /// The notification that wakes the flusher.
    pub fn flush_due(&self) -> Arc<Notify> {
        self.flush_due.clone()
    }

    /// Whether all changed pages are to be flushed immediately; `changed_bytes` is their size.
    /// (Unwritten bytes also contain old versions retained by snapshots, which a flush cannot
    /// release.)
    pub fn must_flush(&self, changed_bytes: u64) -> bool {
        self.waiters.load(Ordering::Acquire) > 0
            || (self.unwritten_bytes() > self.flush_bytes() && changed_bytes > self.flush_bytes() / 2)
    }

    /// Records the end of a flush round, successful or not.
    pub fn flush_ended(&self) {
        self.flushes.fetch_add(1, Ordering::AcqRel);
        self.freed.notify_waiters();
    }

    /// Whether any reservation is about to be released, or used for evictable pages.
    pub(crate) fn is_moving(&self) -> bool {
        self.reservations.load(Ordering::Acquire) > 0
    }

    /// Number of flush rounds that have ended.
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Acquire)
    }

    /// The error of a failed reservation.
    pub fn exhausted(&self) -> Error {
        let mib = |bytes: u64| bytes >> 20;
        Error::new(
            sqlstate::OUT_OF_MEMORY,
            format!("out of memory: the page cache has reached its limit of {} MiB", mib(self.limit_bytes())),
        )
        .detail(format!(
            "{} MiB are changed pages that have not been written to the store yet.",
            mib(self.unwritten_bytes())
        ))
        .hint(
            "Retry the transaction. If the error persists, check the object store (fulmar \
             status), or restart the node with a larger --memory.",
        )
    }
}

/// Guard of a task that waits for memory.
pub(crate) struct Waiting<'a>(&'a MemoryBudget);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Bytes taken from the budget, released on drop unless they are kept.
pub struct Reservation {
    memory: Arc<MemoryBudget>,
    bytes: u64,
}

impl Reservation {
    /// Takes bytes that cannot be refused.
    pub fn unconditional(memory: Arc<MemoryBudget>, bytes: u64) -> Self {
        memory.take(bytes);
        Reservation::of(memory, bytes)
    }

    /// Wraps bytes that are already reserved.
    pub fn of(memory: Arc<MemoryBudget>, bytes: u64) -> Self {
        memory.reservations.fetch_add(1, Ordering::AcqRel);
        Reservation { memory, bytes }
    }

    /// Transfers the bytes to another account.
    pub fn keep(mut self) {
        self.bytes = 0;
    }

    /// Takes a part of the bytes out of this reservation. `None` if it has fewer.
    pub(crate) fn split(&mut self, bytes: u64) -> Option<Reservation> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Reservation::of(self.memory.clone(), bytes))
    }

    /// Converts the reservation for long-term use.
    pub fn into_long_term(mut self) -> LongTermReservation {
        LongTermReservation { memory: self.memory.clone(), bytes: std::mem::take(&mut self.bytes) }
    }
}

/// Bytes taken from the budget for an unknown time. Unlike with a [`Reservation`], other tasks do
/// not wait for their release.
pub struct LongTermReservation {
    memory: Arc<MemoryBudget>,
    bytes: u64,
}

impl Drop for LongTermReservation {
    fn drop(&mut self) {
        self.memory.release(self.bytes);
        self.memory.freed.notify_waiters();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.release(self.bytes);
        self.memory.reservations.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Bytes that one partition has taken from the budget. Released on drop.
#[derive(Debug)]
pub(crate) struct Account {
    memory: Arc<MemoryBudget>,
    resident_bytes: AtomicU64,
    /// Evicted bytes that wait for readers.
    leaving_bytes: AtomicU64,
    unwritten_bytes: AtomicU64,
}

/// The sum of several changes to an account, applied together.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(crate) struct Tally {
    pub bytes: i64,
    pub unwritten_bytes: i64,
}

impl Account {
    pub(crate) fn new(memory: Arc<MemoryBudget>) -> Arc<Self> {
        Arc::new(Account {
            memory,
            resident_bytes: AtomicU64::new(0),
            leaving_bytes: AtomicU64::new(0),
            unwritten_bytes: AtomicU64::new(0),
        })
    }

    /// Applies changes.
    pub(crate) fn settle(&self, tally: Tally) {
        self.settle_reserved(tally, 0);
    }

    /// Applies changes for which `reserved_bytes` were reserved. The unused rest is released.
    pub(crate) fn settle_reserved(&self, tally: Tally, reserved_bytes: u64) {
        // Two's complement: adding the bits of a negative number subtracts.
        let Tally { bytes, unwritten_bytes } = tally;
        let more = bytes - reserved_bytes as i64;
        if more > 0 {
            self.memory.take(more as u64);
        } else if more < 0 {
            self.memory.release(more.unsigned_abs());
        }
        if bytes != 0 {
            self.resident_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        if unwritten_bytes != 0 {
            self.unwritten_bytes.fetch_add(unwritten_bytes as u64, Ordering::Relaxed);
            let before = self.memory.unwritten_bytes.fetch_add(unwritten_bytes as u64, Ordering::Relaxed);
            let due = self.memory.flush_bytes();
            // Notified only when the threshold is crossed, not by every later commit: the flusher
            // also runs periodically.
            if before <= due && before.wrapping_add(unwritten_bytes as u64) > due {
                self.memory.flush_due.notify_one();
            }
        }
    }

    /// Adds a reservation to the account.
    pub(crate) fn keep(&self, reservation: Reservation) {
        self.resident_bytes.fetch_add(reservation.bytes, Ordering::Relaxed);
        reservation.keep();
    }

    /// Gives bytes to another account.
    pub(crate) fn give(&self, bytes: u64) -> Reservation {
        self.resident_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Reservation::of(self.memory.clone(), bytes)
    }

    /// Marks bytes as evicted. They are freed when their readers have left.
    pub(crate) fn leave(&self, bytes: u64) {
        self.resident_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.leaving_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.memory.leaving_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Releases evicted bytes.
    pub(crate) fn free(&self, bytes: u64) {
        if bytes > 0 {
            self.leaving_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.memory.leaving_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.memory.release(bytes);
            self.memory.freed.notify_waiters();
        }
    }

    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let leaving_bytes = *self.leaving_bytes.get_mut();
        self.memory.leaving_bytes.fetch_sub(leaving_bytes, Ordering::Relaxed);
        self.memory.release(*self.resident_bytes.get_mut() + leaving_bytes);
        self.memory.unwritten_bytes.fetch_sub(*self.unwritten_bytes.get_mut(), Ordering::Relaxed);
        self.memory.freed.notify_waiters();
    }
}

/// Resident memory of this process, without mapped files. None if the kernel does not report it.
pub(crate) fn of_process() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = pages.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    let (resident, of_files) = (pages.next()?.ok()?, pages.next()?.ok()?);
    Some(resident.saturating_sub(of_files) * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_memory_reduces_the_page_limit() {
        let memory = MemoryBudget::new(1000);
        let places = |bytes, in_use_bytes| SlotUsage { bytes, in_use_bytes };
        assert_eq!(memory.balance(100, places(0, 0)), 0);
        assert_eq!(memory.limit_bytes(), 900);
        assert!(!memory.reserve(901) && memory.reserve(800));
        // 750 bytes of pages, 50 of versions, 40 of spare slots.
        assert_eq!(memory.balance(1000, places(790, 750)), 0);
        assert_eq!(memory.limit_bytes(), 840);
        assert_eq!(memory.balance(1300, places(790, 750)), 300);
        assert_eq!(memory.limit_bytes(), 540);
        assert!(memory.excess_bytes() >= 260 && !memory.reserve(1));
        assert_eq!(memory.balance(3000, places(800, 750)), 2000);
        assert_eq!(memory.limit_bytes(), 500, "the limit must not fall below half of the budget");
        assert_eq!(memory.balance(810, places(760, 750)), 0);
        assert_eq!(memory.limit_bytes(), 1000);
    }

    #[test]
    fn memory_of_the_process_includes_what_was_written() {
        let written = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(of_process().unwrap() >= 64 << 20);
        drop(written);
    }

    #[test]
    fn account_releases_all_bytes() {
        let memory = MemoryBudget::new(1000);
        let account = Account::new(memory.clone());
        assert!(memory.reserve(700));
        account.settle_reserved(Tally { bytes: 600, unwritten_bytes: 500 }, 700);
        assert!(memory.must_flush(500) && !memory.must_flush(100) && !memory.reserve(401));
        assert!(!memory.reserve_unwritten(251, true) && memory.reserve_unwritten(250, true));
        account.keep(Reservation::of(memory.clone(), 250));
        account.settle(Tally { bytes: -50, unwritten_bytes: -500 });
        assert_eq!((memory.used_bytes(), memory.unwritten_bytes()), (800, 0));
        assert!(!memory.must_flush(0));
        let waiters = memory.wait();
        assert!(memory.must_flush(0));
        drop(waiters);
        assert!(!memory.must_flush(0));
        assert_eq!(account.resident_bytes(), 800);
        drop(account);
        assert_eq!(memory.used_bytes(), 0);
        assert!(memory.reserve(10));
        drop(Reservation::of(memory.clone(), 10));
        assert_eq!(memory.used_bytes(), 0);
    }
}
