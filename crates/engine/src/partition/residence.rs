//! Which pages of a partition are in memory, in which order they leave, and when their bytes may be freed.
//!
//! # Order
//! A page that a flush has written, or that was read from the store, is queued in one of eight classes (of 32 where pages do not
//! all cost the same); the node's clock ([`crate::cache`]) points at the class that leaves next. A page is queued once at
//! most, whatever it has of versions.
//!
//! ```text
//!         clock
//!           v
//!   ... | 41 | 42 | 43 | 44 | 45 | 46 | 47 | 48 |      (modulo 8)
//!         |    ^--- a new page
//!         '--- looked at: untouched since -> evicted; touched n times -> class 41 + n, times what it costs
//! ```
//!
//! # When bytes are freed
//! A reader finds bytes without a lock and uses them for a while; SQLite keeps pointers to some pages while it waits for
//! others. Who evicts takes the bytes out of their version and puts them into *limbo*, with the era, which then ends. They
//! are freed when every reader that is *inside* came in a later era, and nobody *holds* them:
//! - A reader is inside while its fiber runs: it enters, which notes the era, before it looks for bytes; a full fence on
//!   either side of "note, look" and "take out, read the notes" makes one of the two see the other. So either the reader
//!   does not find what was taken out, or whoever frees finds the reader inside, in that era or an earlier one.
//! - Before it waits, or ends, a reader steps aside: what SQLite has fetched and not given back is *held*, which is
//!   counted under the lock, and only then it leaves. It stays held, whatever is evicted, until SQLite gives it back.
//!
//! So nobody who waits keeps back more than what it holds, and a reader that runs is inside for a time slice at most. What
//! was found inside is not used outside, unless it is held.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use hashbrown::HashMap;
use parking_lot::Mutex;

use super::table::{Evicted, PageTable};
use super::version::{HOTTEST, PageVersion, Taken};
use crate::memory::Account;

/// Classes of pages in memory, where all cost the same: the one that leaves next, and those that touches lead to.
pub(crate) const CLASSES: u64 = HOTTEST as u64 + 1;

/// Where some cost more: their touches lead farther, those of a hot one to the last class.
pub(crate) const CLASSES_OF_TIERS: u64 = 4 * CLASSES;

/// Pages that are looked at, at most, for each one that is to be evicted, before others may have the locks.
const LOOKS: usize = 4;

/// The pages of one partition that are in memory and may leave it.
pub(crate) struct Residence {
    account: Arc<Account>,
    /// Grows with every eviction.
    era: AtomicU64,
    /// Something waits to be freed.
    waits: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    classes: Box<[VecDeque<PageNo>]>,
    queued: PageBits,
    /// What was evicted in which era, oldest first.
    limbo: VecDeque<(u64, Vec<Taken>)>,
    /// What readers hold that stepped aside, by address.
    held: HashMap<usize, Held>,
    readers: Vec<Arc<Seat>>,
    /// Of readers that are gone.
    earlier_hits: u64,
}

/// Bytes that readers hold.
#[derive(Default)]
struct Held {
    readers: u32,
    /// If they have been evicted meanwhile.
    taken: Option<Taken>,
}

/// A bit for each page.
#[derive(Default)]
struct PageBits(Vec<u64>);

impl PageBits {
    /// Sets a page's bit; answers whether it was not set.
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

/// What a reader tells others. On a cache line of its own; only the reader writes.
#[repr(align(64))]
#[derive(Default)]
struct Seat {
    /// The era in which it came in; 0 while it is outside.
    era: AtomicU64,
    /// Pages that it found in memory.
    hits: AtomicU64,
}

impl Inner {
    /// The class that leaves so many rounds of the clock later than the one that it points at.
    fn class(&mut self, clock: u64, rounds: u64) -> &mut VecDeque<PageNo> {
        let classes = self.classes.len() as u64;
        &mut self.classes[((clock + rounds.min(classes - 1)) % classes) as usize]
    }
}

impl Residence {
    /// Of a partition on a node whose cache has so many classes.
    pub(crate) fn new(account: Arc<Account>, classes: u64) -> Arc<Self> {
        let (era, waits) = (AtomicU64::new(1), AtomicBool::new(false));
        let classes = (0..classes).map(|_| VecDeque::new()).collect();
        Arc::new(Residence { account, era, waits, inner: Mutex::new(Inner { classes, ..Inner::default() }) })
    }

    /// Queues pages whose bytes may leave: they lie in the store. Page 1 stays.
    pub(crate) fn queue(&self, pages: impl IntoIterator<Item = PageNo>, clock: u64) {
        let inner = &mut *self.inner.lock();
        for page in pages {
            if page != 1 && inner.queued.insert(page) {
                inner.class(clock, 1).push_back(page);
            }
        }
    }

    /// Evicts pages of the class that the clock points at, `most` of them. Answers how many, and whether that class has
    /// more. `cost` is asked what it costs to read a version back, if that was touched. The caller holds the commit lock.
    pub(super) fn evict(
        &self,
        clock: u64,
        most: usize,
        table: &PageTable,
        cost: impl Fn(&PageVersion) -> u64,
    ) -> (usize, bool) {
        let inner = &mut *self.inner.lock();
        let mut taken = Vec::new();
        let mut looks = LOOKS * most;
        while taken.len() < most && looks > 0 {
            let class = inner.class(clock, 0);
            let Some(page) = class.pop_front() else {
                // It is filled anew from nothing: else each class would keep the room for all pages.
                *class = VecDeque::new();
                break;
            };
            looks -= 1;
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
            let era = self.era.load(Ordering::Relaxed);
            self.account.leave((evicted * PAGE_SIZE) as u64);
            inner.limbo.push_back((era, taken));
            self.era.store(era + 1, Ordering::Release);
        }
        self.free(inner);
        (evicted, !inner.class(clock, 0).is_empty())
    }

    /// The queued pages of which `heat` knows how often they were touched, those first that would leave last, `most` at most.
    pub(super) fn hottest(
        &self,
        clock: u64,
        most: usize,
        heat: impl Fn(PageNo) -> Option<u8>,
    ) -> Vec<PageNo> {
        let mut inner = self.inner.lock();
        let classes = inner.classes.len();
        let mut later: Vec<Vec<PageNo>> = vec![Vec::new(); classes + CLASSES as usize];
        for rounds in 0..classes {
            let class = inner.class(clock, rounds as u64);
            for (page, heat) in class.iter().filter_map(|page| Some((*page, heat(*page)?))) {
                later[rounds + usize::from(heat.min(HOTTEST))].push(page);
            }
        }
        drop(inner);
        // Of one class neighbours together: they are read with one request.
        later.iter_mut().for_each(|pages| pages.sort_unstable());
        later.into_iter().rev().flatten().take(most).collect()
    }

    /// Frees what nobody can use any more.
    fn free(&self, inner: &mut Inner) {
        fence(Ordering::SeqCst);
        let inside =
            inner.readers.iter().map(|seat| seat.era.load(Ordering::Acquire)).filter(|era| *era != 0);
        let oldest = inside.min().unwrap_or(u64::MAX);
        let mut freed = 0;
        while inner.limbo.front().is_some_and(|(era, _)| *era < oldest) {
            for taken in inner.limbo.pop_front().map(|(_, taken)| taken).unwrap_or_default() {
                match inner.held.get_mut(&(taken.as_ptr() as usize)) {
                    Some(held) => held.taken = Some(taken),
                    None => freed += PAGE_SIZE as u64,
                }
            }
        }
        self.waits.store(!inner.limbo.is_empty(), Ordering::Relaxed);
        self.account.free(freed);
    }

    /// Frees what waited for readers that have left since. Answers whether something still waits.
    pub(crate) fn free_limbo(&self) -> bool {
        if self.waits.load(Ordering::Relaxed) {
            self.free(&mut self.inner.lock());
        }
        self.waits.load(Ordering::Relaxed)
    }

    /// Pages that readers found in memory.
    pub(crate) fn hits(&self) -> u64 {
        let inner = self.inner.lock();
        inner.earlier_hits + inner.readers.iter().map(|seat| seat.hits.load(Ordering::Relaxed)).sum::<u64>()
    }

    /// Runs `body` while nothing is taken out or freed.
    pub(super) fn undisturbed<T>(&self, body: impl FnOnce() -> T) -> T {
        let _inner = self.inner.lock();
        body()
    }

    /// One who held bytes has given them back.
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

/// One who looks at pages: a connection. It is used by one thread at a time.
pub(crate) struct Reader {
    residence: Arc<Residence>,
    seat: Arc<Seat>,
    inside: Cell<bool>,
    hits: Cell<u64>,
    /// What SQLite has fetched and not given back, and whether it is held.
    fetched: RefCell<Vec<(*const Page, bool)>>,
}

impl Reader {
    pub(crate) fn new(residence: Arc<Residence>) -> Self {
        let seat = Arc::<Seat>::default();
        residence.inner.lock().readers.push(seat.clone());
        Reader {
            residence,
            seat,
            inside: Cell::default(),
            hits: Cell::default(),
            fetched: RefCell::default(),
        }
    }

    /// From here on bytes that are found stay good, until it steps aside.
    #[inline]
    pub(crate) fn enter(&self) {
        if !self.inside.get() {
            // What it read in earlier stays has been read when others see that it is in this one.
            self.seat.era.store(self.residence.era.load(Ordering::Acquire), Ordering::Release);
            fence(Ordering::SeqCst);
            self.inside.set(true);
        }
    }

    /// Counts a page that was found in memory.
    #[inline]
    pub(crate) fn hit(&self) {
        self.hits.set(self.hits.get() + 1);
    }

    /// Bytes are handed out that were found inside; they stay good until they are released.
    #[inline]
    pub(crate) fn fetched(&self, page: &Page) {
        self.fetched.borrow_mut().push((page, false));
    }

    /// Bytes that were handed out are given back.
    #[inline]
    pub(crate) fn released(&self, page: *const Page) {
        let mut fetched = self.fetched.borrow_mut();
        // What was fetched last is mostly given back first.
        let Some(at) = fetched.iter().rposition(|(other, _)| *other == page) else { return };
        let (_, held) = fetched.swap_remove(at);
        if held {
            self.residence.give_back(&mut self.residence.inner.lock(), page);
        }
    }

    /// It is about to wait, or has ended.
    pub(crate) fn step_aside(&self) {
        if !self.inside.get() {
            return;
        }
        let mut fetched = self.fetched.borrow_mut();
        if fetched.iter().any(|(_, held)| !held) {
            let inner = &mut *self.residence.inner.lock();
            for (page, held) in fetched.iter_mut().filter(|(_, held)| !held) {
                inner.held.entry(*page as usize).or_default().readers += 1;
                *held = true;
            }
        }
        self.seat.hits.store(self.hits.get(), Ordering::Relaxed);
        self.seat.era.store(0, Ordering::Release);
        self.inside.set(false);
        // Whoever else is at it may not have seen that this one has left; the next one will.
        if self.residence.waits.load(Ordering::Relaxed)
            && let Some(mut inner) = self.residence.inner.try_lock()
        {
            self.residence.free(&mut inner);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let inner = &mut *self.residence.inner.lock();
        inner.readers.retain(|seat| !Arc::ptr_eq(seat, &self.seat));
        inner.earlier_hits += self.hits.get();
        for (page, _) in self.fetched.get_mut().iter().filter(|(_, held)| *held) {
            self.residence.give_back(inner, *page);
        }
    }
}

#[cfg(test)]
mod tests;
