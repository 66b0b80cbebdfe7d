//! Buffer residency of a partition: which pages are in memory, in which order they are evicted, and
//! when their memory is freed.
//!
//! # Eviction order
//! A page that was flushed, or was read from the store, is queued in one of 8 classes (32 if pages
//! have different costs). The node's clock ([`crate::cache`]) points at the class that is evicted
//! next. A page is queued at most once, however many versions it has.
//!
//! ```text
//!         clock
//!           v
//!   ... | 41 | 42 | 43 | 44 | 45 | 46 | 47 | 48 |      (modulo 8)
//!         |    ^--- a new page
//!         '--- checked: not accessed since -> evicted
//!                       accessed n times  -> class 41 + n, n multiplied by the page's cost
//! ```
//!
//! # When memory is freed
//! A reader finds a page's bytes without a lock and uses them for a while. SQLite keeps pointers to
//! some pages while it waits for others. Therefore eviction uses epoch-based reclamation: it takes
//! the bytes out of their version and puts them into *limbo* with the current epoch, then begins a
//! new epoch. The bytes are freed when every reader that is *inside* entered in a later epoch, and
//! no reader *holds* them:
//!
//! - A reader is inside while its fiber runs. It enters, which records the epoch, before it looks
//!   up bytes. A full fence between "record the epoch" and "look up", and between "take out" and
//!   "check the records", ensures that one side sees the other. Either the reader does not find the
//!   bytes that were taken out, or the thread that frees sees the reader inside, in that epoch or
//!   an earlier one.
//! - Before it waits, or ends, a reader steps aside. Pages that SQLite has fetched and not released
//!   become *held*, which is counted under the lock; only then the reader leaves. A held page stays
//!   in memory, whatever is evicted, until SQLite releases it.
//!
//! So a waiting reader retains only the pages that it holds, and a running reader is inside for at
//! most one time slice. Bytes that were found inside are not used outside, unless they are held.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use hashbrown::HashMap;
use parking_lot::Mutex;

use super::table::{Evicted, PageTable};
use super::version::{MAX_HEAT, PageVersion, Taken};
use crate::memory::Account;

/// Eviction classes if all pages have the same cost: the one to evict next, and one per number of
/// accesses.
pub(crate) const EVICTION_CLASSES: u64 = MAX_HEAT as u64 + 1;

/// Eviction classes if some pages cost more. Accesses to those lead further; those to a hot page
/// lead to the last class.
pub(crate) const TIERED_EVICTION_CLASSES: u64 = 4 * EVICTION_CLASSES;

/// Pages checked at most per page to evict, before the locks are released.
const MAX_CHECKS_PER_EVICTION: usize = 4;

/// The evictable pages of one partition that are in memory.
pub(crate) struct BufferResidency {
    account: Arc<Account>,
    /// Incremented by every eviction.
    epoch: AtomicU64,
    /// True if evicted bytes wait to be freed.
    limbo_pending: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    classes: Box<[VecDeque<PageNo>]>,
    queued: PageBits,
    /// Evicted bytes by the epoch of their eviction, oldest first.
    limbo: VecDeque<(u64, Vec<Taken>)>,
    /// Pages held by readers that stepped aside, by address.
    held: HashMap<usize, HeldPage>,
    readers: Vec<Arc<ReaderSlot>>,
    /// The hits of readers that have been dropped.
    earlier_hits: u64,
}

/// A page that readers hold.
#[derive(Default)]
struct HeldPage {
    readers: u32,
    /// Its bytes, if the page has been evicted meanwhile.
    taken: Option<Taken>,
}

/// One bit per page.
#[derive(Default)]
struct PageBits(Vec<u64>);

impl PageBits {
    /// Sets a page's bit. Returns true if it was not set.
    fn insert(&mut self, page: PageNo) -> bool {
        let (word, bit) = (page as usize / 64, 1 << (page % 64));
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        let fresh = self.0[word] & bit == 0;
        self.0[word] |= bit;
        fresh
    }

    fn remove(&mut self, page: PageNo) {
        if let Some(word) = self.0.get_mut(page as usize / 64) {
            *word &= !(1 << (page % 64));
        }
    }
}

/// The shared state of one reader. On a separate cache line; only the reader writes it.
#[repr(align(64))]
#[derive(Default)]
struct ReaderSlot {
    /// The epoch in which it entered; 0 while it is outside.
    epoch: AtomicU64,
    /// Pages that it found in memory.
    hits: AtomicU64,
}

impl Inner {
    /// The class that is evicted `rounds` rounds of the clock after the current one.
    fn class(&mut self, clock: u64, rounds: u64) -> &mut VecDeque<PageNo> {
        let classes = self.classes.len() as u64;
        &mut self.classes[((clock + rounds.min(classes - 1)) % classes) as usize]
    }
}

impl BufferResidency {
    /// Creates the residency of a partition whose node's cache has `classes` classes.
    pub(crate) fn new(account: Arc<Account>, classes: u64) -> Arc<Self> {
        let (epoch, limbo_pending) = (AtomicU64::new(1), AtomicBool::new(false));
        let classes = (0..classes).map(|_| VecDeque::new()).collect();
        Arc::new(BufferResidency {
            account,
            epoch,
            limbo_pending,
            inner: Mutex::new(Inner { classes, ..Inner::default() }),
        })
    }

    /// Queues pages for eviction: their bytes are in the store. Page 1 is never evicted.
    pub(crate) fn queue(&self, pages: impl IntoIterator<Item = PageNo>, clock: u64) {
        let inner = &mut *self.inner.lock();
        for page in pages {
            if page != 1 && inner.queued.insert(page) {
                inner.class(clock, 1).push_back(page);
            }
        }
    }

    /// Evicts up to `most` pages of the class that the clock points at. Returns how many, and
    /// whether that class has more. `cost` returns the cost of reading a version back, if it was
    /// accessed. The caller holds the commit lock.
    pub(super) fn evict(
        &self,
        clock: u64,
        most: usize,
        table: &PageTable,
        cost: impl Fn(&PageVersion) -> u64,
    ) -> (usize, bool) {
        let inner = &mut *self.inner.lock();
        let mut taken = Vec::new();
        let mut checks = MAX_CHECKS_PER_EVICTION * most;
        while taken.len() < most && checks > 0 {
            let class = inner.class(clock, 0);
            let Some(page) = class.pop_front() else {
                // Start with an empty allocation: otherwise each class would keep capacity for all
                // pages.
                *class = VecDeque::new();
                break;
            };
            checks -= 1;
            match table.evict(page, &mut taken) {
                Evicted::Out => inner.queued.remove(page),
                Evicted::Touched(heat, version) => {
                    inner.class(clock, u64::from(heat) * cost(version)).push_back(page);
                }
            }
        }
        let evicted = taken.len();
        if evicted > 0 {
            fence(Ordering::SeqCst);
            let epoch = self.epoch.load(Ordering::Relaxed);
            self.account.leave((evicted * PAGE_SIZE) as u64);
            inner.limbo.push_back((epoch, taken));
            self.epoch.store(epoch + 1, Ordering::Release);
        }
        self.free(inner);
        (evicted, !inner.class(clock, 0).is_empty())
    }

    /// The queued pages whose accesses `heat` knows, hottest first (those that would be evicted
    /// last), at most `most`.
    pub(super) fn hottest(
        &self,
        clock: u64,
        most: usize,
        heat: impl Fn(PageNo) -> Option<u8>,
    ) -> Vec<PageNo> {
        let mut inner = self.inner.lock();
        let classes = inner.classes.len();
        let mut later: Vec<Vec<PageNo>> = vec![Vec::new(); classes + EVICTION_CLASSES as usize];
        for rounds in 0..classes {
            let class = inner.class(clock, rounds as u64);
            for (page, heat) in class.iter().filter_map(|page| Some((*page, heat(*page)?))) {
                later[rounds + usize::from(heat.min(MAX_HEAT))].push(page);
            }
        }
        drop(inner);
        // Pages of one class are sorted by number: neighbors are read with one request.
        later.iter_mut().for_each(|pages| pages.sort_unstable());
        later.into_iter().rev().flatten().take(most).collect()
    }

    /// The pages that are queued for eviction.
    pub(super) fn queued(&self) -> Vec<PageNo> {
        let inner = self.inner.lock();
        inner.classes.iter().flatten().copied().collect()
    }

    /// Frees the bytes in limbo that no reader can use any more.
    fn free(&self, inner: &mut Inner) {
        fence(Ordering::SeqCst);
        let inside =
            inner.readers.iter().map(|slot| slot.epoch.load(Ordering::Acquire)).filter(|epoch| *epoch != 0);
        let oldest = inside.min().unwrap_or(u64::MAX);
        let mut freed = 0;
        while inner.limbo.front().is_some_and(|(epoch, _)| *epoch < oldest) {
            for taken in inner.limbo.pop_front().map(|(_, taken)| taken).unwrap_or_default() {
                match inner.held.get_mut(&(taken.as_ptr() as usize)) {
                    Some(held) => held.taken = Some(taken),
                    None => freed += PAGE_SIZE as u64,
                }
            }
        }
        self.limbo_pending.store(!inner.limbo.is_empty(), Ordering::Relaxed);
        self.account.free(freed);
    }

    /// Frees the bytes in limbo whose readers have left. Returns true if some are still in use.
    pub(crate) fn free_limbo(&self) -> bool {
        if self.limbo_pending.load(Ordering::Relaxed) {
            self.free(&mut self.inner.lock());
        }
        self.limbo_pending.load(Ordering::Relaxed)
    }

    /// Pages that readers found in memory.
    pub(crate) fn hits(&self) -> u64 {
        let inner = self.inner.lock();
        inner.earlier_hits + inner.readers.iter().map(|slot| slot.hits.load(Ordering::Relaxed)).sum::<u64>()
    }

    /// Runs `body` while no page is evicted or freed.
    pub(super) fn with_eviction_blocked<T>(&self, body: impl FnOnce() -> T) -> T {
        let _inner = self.inner.lock();
        body()
    }

    /// Releases a page that one reader held.
    fn give_back(&self, inner: &mut Inner, page: *const Page) {
        if let Some(held) = inner.held.get_mut(&(page as usize)) {
            held.readers -= 1;
            if held.readers == 0 {
                let was_taken = inner.held.remove(&(page as usize)).is_some_and(|held| held.taken.is_some());
                self.account.free(if was_taken { PAGE_SIZE as u64 } else { 0 });
            }
        }
    }
}

/// A reader of pages: a connection. Used by one thread at a time.
pub(crate) struct Reader {
    residency: Arc<BufferResidency>,
    slot: Arc<ReaderSlot>,
    inside: Cell<bool>,
    hits: Cell<u64>,
    /// Pages that SQLite has fetched and not released, and whether each is held.
    fetched: RefCell<Vec<(*const Page, bool)>>,
}

impl Reader {
    pub(crate) fn new(residency: Arc<BufferResidency>) -> Self {
        let slot = Arc::<ReaderSlot>::default();
        residency.inner.lock().readers.push(slot.clone());
        Reader {
            residency,
            slot,
            inside: Cell::default(),
            hits: Cell::default(),
            fetched: RefCell::default(),
        }
    }

    /// Enters: bytes that are found from here on stay valid until the reader steps aside.
    #[inline]
    pub(crate) fn enter(&self) {
        if !self.inside.get() {
            // Reads of earlier stays are complete before other threads see the new epoch.
            self.slot.epoch.store(self.residency.epoch.load(Ordering::Acquire), Ordering::Release);
            fence(Ordering::SeqCst);
            self.inside.set(true);
        }
    }

    /// Counts a page that was found in memory.
    #[inline]
    pub(crate) fn hit(&self) {
        self.hits.set(self.hits.get() + 1);
    }

    /// Records that bytes were handed out. They stay valid until they are released.
    #[inline]
    pub(crate) fn fetched(&self, page: &Page) {
        self.fetched.borrow_mut().push((page, false));
    }

    /// Records that bytes were released.
    #[inline]
    pub(crate) fn released(&self, page: *const Page) {
        let mut fetched = self.fetched.borrow_mut();
        // Pages are mostly released in reverse order.
        let Some(at) = fetched.iter().rposition(|(other, _)| *other == page) else { return };
        let (_, held) = fetched.swap_remove(at);
        if held {
            self.residency.give_back(&mut self.residency.inner.lock(), page);
        }
    }

    /// Steps aside: the reader is about to wait, or has ended.
    pub(crate) fn step_aside(&self) {
        if !self.inside.get() {
            return;
        }
        let mut fetched = self.fetched.borrow_mut();
        if fetched.iter().any(|(_, held)| !held) {
            let inner = &mut *self.residency.inner.lock();
            for (page, held) in fetched.iter_mut().filter(|(_, held)| !held) {
                inner.held.entry(*page as usize).or_default().readers += 1;
                *held = true;
            }
        }
        self.slot.hits.store(self.hits.get(), Ordering::Relaxed);
        self.slot.epoch.store(0, Ordering::Release);
        self.inside.set(false);
        // A thread that holds the lock now may not have seen that this reader has left; the next
        // one will.
        if self.residency.limbo_pending.load(Ordering::Relaxed)
            && let Some(mut inner) = self.residency.inner.try_lock()
        {
            self.residency.free(&mut inner);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let inner = &mut *self.residency.inner.lock();
        inner.readers.retain(|slot| !Arc::ptr_eq(slot, &self.slot));
        inner.earlier_hits += self.hits.get();
        for (page, _) in self.fetched.get_mut().iter().filter(|(_, held)| *held) {
            self.residency.give_back(inner, *page);
        }
    }
}

#[cfg(test)]
mod tests;
