//! Readers, a writer, a flusher and one who evicts, on threads: whoever reads sees the bytes of the version that it found.

use std::collections::VecDeque;

use fulmar_pages::{FrameLocation, SegmentId};
use fulmar_store::Lsn;

use super::*;
use crate::memory::{MemoryBudget, Reservation, Tally};
use crate::page_memory::PageBytes;
use crate::partition::Snapshot;
use crate::partition::snapshots::Snapshots;
use crate::partition::version::PageVersion;
use crate::store::Frame;

const PAGES: u32 = 40;
/// Pages that change while the others are only read.
const CHANGING: u64 = 10;
/// Rounds in which all are at work at once, and what each does in one of them.
const ROUNDS: u64 = 50;
const ROUND_COMMITS: u64 = 100;
const ROUND_FLUSHES: u64 = 25;
const ROUND_EVICTIONS: u64 = 200;
const ROUND_SNAPSHOTS: u64 = 100;
const READERS: u64 = 3;
/// The number of the last version.
const COMMITS: u64 = PAGES as u64 + 1 + ROUNDS * ROUND_COMMITS;

/// The bytes of a version: nothing else has them, freed memory least of all.
fn bytes(page: PageNo, number: u64) -> PageBytes {
    let mut bytes = [0; PAGE_SIZE];
    for (part, bytes) in (0..).zip(bytes.chunks_exact_mut(512)) {
        bytes.fill((u64::from(page) * 31 + number * 7 + part) as u8);
    }
    PageBytes::copy_of(&bytes)
}

struct House {
    memory: Arc<MemoryBudget>,
    account: Arc<Account>,
    table: PageTable,
    residence: Arc<Residence>,
    snapshots: Mutex<Snapshots>,
    /// The commit lock; commits whose garbage is not collected.
    commits: Mutex<VecDeque<(u64, PageNo)>>,
    clock: AtomicU64,
    loads: AtomicU64,
    /// Pages that readers found in memory.
    found: AtomicU64,
    segment: u32,
}

/// Numbers that look random.
fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) % below
}

impl House {
    fn new() -> House {
        House::of(CLASSES)
    }

    fn of(classes: u64) -> House {
        let memory = MemoryBudget::new(1 << 30);
        let account = Account::new(memory.clone());
        let table = PageTable::new(account.clone());
        let segment = table.segments().index_of(SegmentId(1));
        let at = Snapshot { number: 0, lsn: Lsn(0), page_count: PAGES };
        House {
            residence: Residence::new(account.clone(), classes),
            snapshots: Mutex::new(Snapshots::new(at)),
            commits: Mutex::default(),
            clock: AtomicU64::new(0),
            loads: AtomicU64::new(0),
            found: AtomicU64::new(0),
            memory,
            account,
            table,
            segment,
        }
    }

    fn commit(&self, number: u64, page: PageNo) {
        let mut tally = Tally::default();
        let mut commits = self.commits.lock();
        self.table.install(page, number, Some(bytes(page, number)), None, &mut tally);
        let lsn = Lsn(number);
        self.snapshots.lock().push(Snapshot { number, lsn, page_count: PAGES });
        commits.push_back((number, page));
        let oldest = self.snapshots.lock().oldest_from(lsn);
        while commits.front().is_some_and(|(number, _)| *number <= oldest) {
            if let Some((number, page)) = commits.pop_front() {
                self.table.prune(page, number, &mut tally);
            }
        }
        self.account.settle(tally);
    }

    fn write(&self, round: u64) {
        let mut state = round;
        let before = u64::from(PAGES) + 1 + round * ROUND_COMMITS;
        for number in before + 1..=before + ROUND_COMMITS {
            self.commit(number, random(&mut state, CHANGING) as PageNo + 2);
            std::thread::yield_now();
        }
    }

    fn flush(&self) {
        for _ in 0..ROUND_FLUSHES {
            self.flush_all();
            std::thread::yield_now();
        }
    }

    fn flush_all(&self) {
        let snapshot = self.snapshots.lock().pin();
        let mut tally = Tally::default();
        for page in 2..PAGES + 2 {
            // SAFETY: pinned.
            if let Some(version) = unsafe { self.table.find(page, snapshot.number) } {
                let location = FrameLocation { offset: version.number(), length: 1 };
                self.table.set_frame(version, Frame { segment: self.segment, location }, &mut tally);
            }
        }
        self.account.settle(tally);
        self.residence.queue(2..PAGES + 2, self.clock.load(Ordering::Relaxed));
        self.snapshots.lock().unpin(snapshot.number);
    }

    fn evict(&self) {
        for _ in 0..ROUND_EVICTIONS {
            self.evict_some();
            std::thread::yield_now();
        }
    }

    /// All that could leave does.
    fn sweep(&self) {
        self.flush_all();
        // All of them may be in one class, of which each round takes eight.
        for _ in 0..u64::from(PAGES) * CLASSES {
            while self.evict_some() > 0 {}
        }
    }

    fn evict_some(&self) -> usize {
        let clock = self.clock.fetch_add(1, Ordering::Relaxed);
        let _commits = self.commits.lock();
        self.residence.evict(clock, 8, &self.table, |_| 1).0
    }

    /// As a connection does: looks at some pages at one snapshot, keeps pointers to some of them, waits now and then.
    fn read(&self, mut state: u64) {
        let reader = Reader::new(self.residence.clone());
        for _ in 0..ROUND_SNAPSHOTS {
            let snapshot = self.snapshots.lock().pin();
            let mut kept: Vec<(*const Page, PageBytes)> = Vec::new();
            for _ in 0..random(&mut state, 12) {
                let page = random(&mut state, PAGES.into()) as PageNo + 2;
                // SAFETY: pinned.
                let Some(version) = (unsafe { self.table.find(page, snapshot.number) }) else { continue };
                reader.enter();
                // SAFETY: inside.
                match unsafe { version.data() } {
                    Some(data) => {
                        self.found.fetch_add(1, Ordering::Relaxed);
                        version.touch();
                        assert!(*data == *bytes(page, version.number()));
                        reader.fetched(data);
                        kept.push((data, bytes(page, version.number())));
                    }
                    None => {
                        reader.step_aside();
                        self.load(page, version);
                    }
                }
                if random(&mut state, 4) == 0 {
                    reader.step_aside();
                }
                // What is kept is as it was, whatever has been evicted meanwhile.
                for (data, bytes) in &kept {
                    // SAFETY: fetched, and not released.
                    assert!(unsafe { **data == **bytes });
                }
                if kept.len() > 3 {
                    reader.released(kept.swap_remove(random(&mut state, 3) as usize).0);
                }
            }
            kept.iter().for_each(|(data, _)| reader.released(*data));
            reader.step_aside();
            self.snapshots.lock().unpin(snapshot.number);
        }
    }

    fn load(&self, page: PageNo, version: &PageVersion) {
        let (_, location) = self.table.frame(version).unwrap().unwrap();
        assert_eq!(location.offset, version.number());
        let room = Reservation::unasked(self.memory.clone(), PAGE_SIZE as u64);
        if version.fill(bytes(page, version.number())) {
            self.account.keep(room);
            self.residence.queue([page], self.clock.load(Ordering::Relaxed));
            self.loads.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn readers_see_what_they_found_whoever_evicts() {
    let house = House::new();
    (2..PAGES + 2).for_each(|page| house.commit(page.into(), page));
    for round in 0..ROUNDS {
        // So that there is something to read for all, whoever of them comes first.
        house.sweep();
        std::thread::scope(|scope| {
            let house = &house;
            scope.spawn(|| house.flush());
            scope.spawn(|| house.evict());
            (1..=READERS).for_each(|reader| drop(scope.spawn(move || house.read(round * READERS + reader))));
            scope.spawn(move || house.write(round));
        });
    }
    // The pages that do not change were all read in each round, by some of some 1,600 looks at 40 pages.
    let least = ROUNDS * (u64::from(PAGES) - CHANGING);
    let [found, loads] = [&house.found, &house.loads].map(|counter| counter.load(Ordering::Relaxed));
    assert!(loads >= least && found >= least, "{loads} {found}");

    // When all have ended and everything is written nothing stays that could leave.
    house.commit(1 << 40, 2); // collects what the others have left
    house.sweep();
    let mut tally = Tally::default();
    (2..PAGES + 2).for_each(|page| house.table.remove(page, u64::MAX, &mut tally));
    assert!(tally.bytes.unsigned_abs() < PAGE_SIZE as u64, "{tally:?}");
    house.account.settle(tally);
    let buckets = 64 * size_of::<usize>() as u64;
    assert_eq!((house.account.resident_bytes(), house.memory.unwritten_bytes()), (buckets, 0));
}

#[test]
fn a_reader_that_waits_keeps_back_what_it_holds_and_no_more() {
    let house = House::new();
    let reader = Reader::new(house.residence.clone());
    (2..12).for_each(|page| house.commit(u64::from(page), page));
    house.flush_all();
    let before = house.memory.used_bytes();
    let snapshot = house.snapshots.lock().pin();
    reader.enter();
    // SAFETY: pinned, and inside.
    let held = unsafe { house.table.find(7, snapshot.number).unwrap().data().unwrap() };
    reader.fetched(held);
    while house.evict_some() > 0 || house.clock.load(Ordering::Relaxed) < 20 {}
    assert_eq!(house.memory.used_bytes(), before, "it is inside");
    // Or else who evicts would go on until nothing is left.
    assert_eq!(
        house.account.resident_bytes(),
        before - 10 * PAGE_SIZE as u64,
        "what leaves is not in the cache"
    );
    reader.step_aside();
    assert_eq!(house.memory.used_bytes(), before - 9 * PAGE_SIZE as u64);
    assert!(*held == *bytes(7, 7));
    reader.released(held);
    assert_eq!(house.memory.used_bytes(), before - 10 * PAGE_SIZE as u64);
}

/// Pages are looked at once for each that goes and once for each that was touched, not all for each.
#[test]
fn what_is_touched_stays_while_others_come_and_go() {
    let house = House::new();
    (2..12).for_each(|page| house.commit(u64::from(page), page));
    house.flush_all();
    // SAFETY: one thread; nothing is pruned.
    let version = |page| unsafe { house.table.find(page, COMMITS) }.unwrap();
    for _ in 0..50 {
        (2..5).for_each(|page| version(page).touch());
        house.evict_some();
        // The others come again, as in a scan.
        for page in 5..12 {
            if !version(page).is_resident() {
                house.load(page, version(page));
            }
        }
        assert!((2..5).all(|page| version(page).is_resident()));
    }
}

/// What leaves last is the hottest, neighbours stay together, and what nobody has asked for is not among it.
#[test]
fn the_hottest_are_those_that_would_leave_last() {
    let house = House::new();
    (2..12).for_each(|page| house.commit(u64::from(page), page));
    house.flush_all();
    // SAFETY: one thread; nothing is pruned.
    let find = |page| unsafe { house.table.find(page, COMMITS) };
    let version = |page| find(page).unwrap();
    let hottest = |most| house.residence.hottest(0, most, |page| find(page)?.heat());
    assert_eq!(hottest(100), (2..12).collect::<Vec<_>>());
    for (page, touches) in [(9, 3), (11, 1), (5, 1), (8, 3), (6, 100)] {
        (0..touches).for_each(|_| version(page).touch());
    }
    version(2).comes_along();
    drop(version(3).take());
    assert_eq!(hottest(100), [6, 8, 9, 5, 11, 4, 7, 10]);
    assert_eq!(hottest(4), [6, 8, 9, 5]);
    version(2).touch();
    assert_eq!(hottest(6), [6, 8, 9, 5, 11, 2]);
}

/// The rounds after which pages leave, two for each number of touches. What it costs to read the second ones back is given.
fn rounds(classes: u64, dear: u64) -> [[u64; 2]; 4] {
    let house = House::of(classes);
    (2..10).for_each(|page| house.commit(u64::from(page), page));
    house.flush_all();
    // SAFETY: one thread; nothing is pruned.
    let version = |page| unsafe { house.table.find(page, COMMITS) }.unwrap();
    let touches = [0, 1, 3, 100];
    for (pair, touches) in (0..).zip(touches) {
        (0..touches).for_each(|_| [2, 3].into_iter().for_each(|page| version(page + 2 * pair).touch()));
    }
    let cost = |version: &PageVersion| if version.number() % 2 == 1 { dear } else { 1 };
    let mut rounds = [[0; 2]; 4];
    for clock in 1..=2 * classes {
        while house.residence.evict(clock, 8, &house.table, cost).1 {}
        for (page, left) in (2..).zip(rounds.as_flattened_mut()) {
            if *left == 0 && !version(page).is_resident() {
                *left = clock;
            }
        }
    }
    rounds
}

/// Of two that were touched alike the one goes first that is cheaper to read back, and it goes when it would if all were cheap.
/// What nobody has touched again goes in its round, whatever it costs.
#[test]
fn what_is_dearer_to_read_back_stays_longer() {
    let alike = [[1, 1], [2, 2], [4, 4], [8, 8]];
    assert_eq!(rounds(CLASSES, 1), alike);
    assert_eq!(rounds(CLASSES_OF_TIERS, 1), alike);
    assert_eq!(rounds(CLASSES_OF_TIERS, 8), [[1, 1], [2, 9], [4, 25], [8, 32]]);
}
