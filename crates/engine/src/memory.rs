//! The node's memory budget: what `--memory` leaves for the pages of all partitions together.
//!
//! ```text
//!  0 ........ 1/4 ................ 3/4 ...... 31/32 .. limit
//!  unwritten: | a flush is due      | writers wait
//!  used:                                      | the sweeper evicts | who needs more evicts, or waits
//! ```
//!
//! What else the process takes (sessions and SQLite's values, what waits for the log, indexes, the program) is not counted where
//! it is taken: the kernel knows the sum. A node looks at it now and then ([`MemoryBudget::balance`]) and leaves so much less to
//! the pages, but half of what was asked for in any case.
//!
//! *Used* are the bytes of pages and of their versions. *Unwritten* of these are pages that are in no segment of the
//! store: they cannot be evicted before a flush has written them. How room is made is [`crate::cache`]'s.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

use crate::page_memory::Places;
use crate::{Error, sqlstate};

/// The most that the sweeper keeps free.
const MOST_HEADROOM_BYTES: u64 = 64 << 20;

/// A budget in bytes.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    asked_bytes: u64,
    /// What of it pages may take.
    limit_bytes: AtomicU64,
    used_bytes: AtomicU64,
    /// Of these what has been evicted, and waits for readers.
    leaving_bytes: AtomicU64,
    unwritten_bytes: AtomicU64,
    /// Those who wait for room.
    waiting: AtomicU64,
    /// Those who have room and do not use it yet.
    reserving: AtomicU64,
    /// The flusher's rounds that have ended, well or not.
    flushes: AtomicU64,
    /// Something has been given back, or a flush has ended.
    freed: Notify,
    /// The sweeper has work.
    crowded: Notify,
    /// The flusher has work.
    flush_due: Arc<Notify>,
}

impl MemoryBudget {
    pub(crate) fn new(asked_bytes: u64) -> Arc<Self> {
        Arc::new(MemoryBudget {
            asked_bytes,
            limit_bytes: AtomicU64::new(asked_bytes),
            used_bytes: AtomicU64::new(0),
            leaving_bytes: AtomicU64::new(0),
            unwritten_bytes: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            reserving: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
            freed: Notify::new(),
            crowded: Notify::new(),
            flush_due: Arc::default(),
        })
    }

    /// Takes bytes from the budget if there are as many left.
    pub(crate) fn reserve(&self, bytes: u64) -> bool {
        self.reserve_up_to(bytes, self.limit_bytes())
    }

    /// The same, but only what nobody has to be evicted for.
    pub(crate) fn reserve_spare(&self, bytes: u64) -> bool {
        self.reserve_up_to(bytes, self.high_water_bytes())
    }

    /// Whether [`MemoryBudget::reserve_spare`] would take them now.
    pub(crate) fn has_spare(&self, bytes: u64) -> bool {
        self.used_bytes() + bytes <= self.high_water_bytes()
    }

    /// The same as [`MemoryBudget::reserve`] for changed pages, which stay until they are written. Changes that do not make a
    /// database larger replace pages, which are freed soon: they may overdraw the budget by an eighth meanwhile. So deleting
    /// works when the memory is full.
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

    /// Takes bytes, come what may: of what cannot be done without.
    pub(crate) fn take(&self, bytes: u64) {
        let before = self.used_bytes.fetch_add(bytes, Ordering::AcqRel);
        if before + bytes > self.high_water_bytes() {
            self.crowded.notify_one();
        }
    }

    /// Gives bytes back.
    pub(crate) fn release(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn unwritten_bytes(&self) -> u64 {
        self.unwritten_bytes.load(Ordering::Relaxed)
    }

    /// What pages may take.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// The process takes so many bytes, of which so many are places for pages, not all of them in use. Answers by how much that
    /// is more than was asked for.
    pub(crate) fn balance(&self, process_bytes: u64, places: Places) -> u64 {
        // What is used beside places are the versions of pages, which are in memory or not.
        let versions_bytes = self.used_bytes().saturating_sub(places.in_use_bytes);
        let others_bytes = process_bytes.saturating_sub(places.bytes + versions_bytes);
        let limit_bytes = self.asked_bytes.saturating_sub(others_bytes).max(self.asked_bytes / 2);
        self.limit_bytes.store(limit_bytes, Ordering::Relaxed);
        process_bytes.saturating_sub(self.asked_bytes)
    }

    fn high_water_bytes(&self) -> u64 {
        let limit_bytes = self.limit_bytes();
        limit_bytes - (limit_bytes / 32).min(MOST_HEADROOM_BYTES)
    }

    /// Bytes that the sweeper should evict, so that those who need some find them. What has been evicted is free as soon as its
    /// readers have gone: evicting more would not be faster, and would cost them what they read next.
    pub(crate) fn excess_bytes(&self) -> u64 {
        let leaving = self.leaving_bytes.load(Ordering::Relaxed);
        self.used_bytes().saturating_sub(self.high_water_bytes() + leaving)
    }

    /// Waits until the sweeper has work.
    pub(crate) async fn crowded(&self) {
        self.crowded.notified().await;
    }

    /// To be told when something has been given back; begun before one looks.
    pub(crate) fn freed(&self) -> &Notify {
        &self.freed
    }

    fn flush_bytes(&self) -> u64 {
        self.limit_bytes() / 4
    }

    /// Somebody waits for room, until the answer is dropped: what can be written is flushed.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        self.flush_due.notify_one();
        Waiting(self)
    }

    /// Who is told when a flush may be due because of memory.
    pub(crate) fn flush_due(&self) -> Arc<Notify> {
        self.flush_due.clone()
    }

    /// Whether everything that has changed is to be flushed at once, of which there are so many bytes. (Of what is
    /// unwritten a flush can do nothing about the old versions that snapshots hold.)
    pub(crate) fn must_flush(&self, changed_bytes: u64) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
            || (self.unwritten_bytes() > self.flush_bytes() && changed_bytes > self.flush_bytes() / 2)
    }

    /// All that was due has been flushed, or could not be.
    pub(crate) fn flush_ended(&self) {
        self.flushes.fetch_add(1, Ordering::AcqRel);
        self.freed.notify_waiters();
    }

    /// Whether somebody has room that will be given back, or be used for what can be evicted.
    pub(crate) fn is_moving(&self) -> bool {
        self.reserving.load(Ordering::Acquire) > 0
    }

    /// The flusher's rounds that have ended.
    pub(crate) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::Acquire)
    }

    /// The error for who could not reserve.
    pub(crate) fn exhausted(&self) -> Error {
        let mib = |bytes: u64| bytes >> 20;
        Error::new(
            sqlstate::OUT_OF_MEMORY,
            format!("the node's memory of {} MiB for pages is full", mib(self.limit_bytes())),
        )
        .detail(format!(
            "{} MiB are changed pages that have not been written to the store yet.",
            mib(self.unwritten_bytes())
        ))
        .hint("run the transaction again; if it persists, see to the store (`fulmar status`), or start the node with a larger --memory")
    }
}

/// One who waits for room.
pub(crate) struct Waiting<'a>(&'a MemoryBudget);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Bytes that are taken from a budget, and given back unless they are kept.
pub(crate) struct Reservation {
    memory: Arc<MemoryBudget>,
    bytes: u64,
}

impl Reservation {
    /// Of bytes that cannot be done without.
    pub(crate) fn unasked(memory: Arc<MemoryBudget>, bytes: u64) -> Self {
        memory.take(bytes);
        Reservation::of(memory, bytes)
    }

    /// Of bytes that have been reserved.
    pub(crate) fn of(memory: Arc<MemoryBudget>, bytes: u64) -> Self {
        memory.reserving.fetch_add(1, Ordering::AcqRel);
        Reservation { memory, bytes }
    }

    /// From now on somebody else counts them.
    pub(crate) fn keep(mut self) {
        self.bytes = 0;
    }

    /// Keeps them for an unknown time.
    pub(crate) fn hold(mut self) -> Hold {
        Hold { memory: self.memory.clone(), bytes: std::mem::take(&mut self.bytes) }
    }
}

/// Bytes that are taken from a budget for an unknown time. Unlike a [`Reservation`] it does not make others wait for them.
pub(crate) struct Hold {
    memory: Arc<MemoryBudget>,
    bytes: u64,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.memory.release(self.bytes);
        self.memory.freed.notify_waiters();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.release(self.bytes);
        self.memory.reserving.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What one partition has taken from the budget. Gives it back when it is dropped.
#[derive(Debug)]
pub(crate) struct Account {
    memory: Arc<MemoryBudget>,
    resident_bytes: AtomicU64,
    /// What has been evicted, and waits for readers.
    leaving_bytes: AtomicU64,
    unwritten_bytes: AtomicU64,
}

/// What a few changes of pages add to an account and take from it, to be settled at once.
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

    /// Counts changes.
    pub(crate) fn settle(&self, tally: Tally) {
        self.settle_reserved(tally, 0);
    }

    /// Counts changes for which so many bytes were reserved. What is left of these is given back.
    pub(crate) fn settle_reserved(&self, tally: Tally, reserved_bytes: u64) {
        // Two's complement: adding the bits of a negative number takes away.
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
            // When it is passed, not by every commit beyond: the flusher looks around by itself, too.
            if before <= due && before.wrapping_add(unwritten_bytes as u64) > due {
                self.memory.flush_due.notify_one();
            }
        }
    }

    /// Counts what has been reserved.
    pub(crate) fn keep(&self, reservation: Reservation) {
        self.resident_bytes.fetch_add(reservation.bytes, Ordering::Relaxed);
        reservation.keep();
    }

    /// Bytes have been evicted, and are to be freed when their readers have gone.
    pub(crate) fn leave(&self, bytes: u64) {
        self.resident_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.leaving_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.memory.leaving_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Gives back what was evicted.
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

/// What this process takes of the machine's memory, files that it has mapped apart. `None` where the kernel does not tell.
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
    fn what_others_take_is_not_for_pages() {
        let memory = MemoryBudget::new(1000);
        let places = |bytes, in_use_bytes| Places { bytes, in_use_bytes };
        assert_eq!(memory.balance(100, places(0, 0)), 0);
        assert_eq!(memory.limit_bytes(), 900);
        assert!(!memory.reserve(901) && memory.reserve(800));
        // 750 bytes of pages, 50 of versions; 40 places are spare.
        assert_eq!(memory.balance(1000, places(790, 750)), 0);
        assert_eq!(memory.limit_bytes(), 840);
        assert_eq!(memory.balance(1300, places(790, 750)), 300);
        assert_eq!(memory.limit_bytes(), 540);
        assert!(memory.excess_bytes() >= 260 && !memory.reserve(1));
        assert_eq!(memory.balance(3000, places(800, 750)), 2000);
        assert_eq!(memory.limit_bytes(), 500, "half of it in any case");
        assert_eq!(memory.balance(810, places(760, 750)), 0);
        assert_eq!(memory.limit_bytes(), 1000);
        assert!(of_process().unwrap() > 1 << 20);
    }

    #[test]
    fn an_account_gives_everything_back() {
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
        let waiting = memory.wait();
        assert!(memory.must_flush(0));
        drop(waiting);
        assert!(!memory.must_flush(0));
        assert_eq!(account.resident_bytes(), 800);
        drop(account);
        assert_eq!(memory.used_bytes(), 0);
        assert!(memory.reserve(10));
        drop(Reservation::of(memory.clone(), 10));
        assert_eq!(memory.used_bytes(), 0);
    }
}
