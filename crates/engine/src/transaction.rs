//! What one open transaction has read and changed, as the VFS sees it: pages.

use std::io;
use std::sync::Arc;

use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use hashbrown::HashMap;

use crate::Error;
use crate::limits::TransactionLimits;
use crate::partition::Snapshot;
use crate::spill::SpillArea;
use crate::spilled_pages::SpilledPages;

/// A set of pages that mostly grows: a list that is sorted and deduplicated whenever it has doubled, so that it never
/// holds much more than one entry for each page of the partition.
#[derive(Default, Debug)]
pub(crate) struct PageSet {
    pages: Vec<PageNo>,
    compact_at: usize,
    everything: bool,
}

impl PageSet {
    pub(crate) fn insert(&mut self, page: PageNo) {
        if self.everything || self.pages.last() == Some(&page) {
            return;
        }
        if self.pages.len() >= self.compact_at {
            self.pages.sort_unstable();
            self.pages.dedup();
            self.compact_at = (2 * self.pages.len()).max(256);
        }
        self.pages.push(page);
    }

    /// All pages there are.
    pub(crate) fn insert_everything(&mut self) {
        self.everything = true;
    }

    /// A page of the set that has changed, if any has. `changed` is asked of each; where the set is everything, page 1
    /// stands for it: the caller knows that some page has.
    pub(crate) fn find_changed(&self, mut changed: impl FnMut(PageNo) -> bool) -> Option<PageNo> {
        match self.everything {
            true => Some(1),
            // Counters and allocation on page 1 change with every commit; the rest of it is compared apart.
            false => self.pages.iter().copied().find(|page| *page != 1 && changed(*page)),
        }
    }

    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = PageNo> + '_ {
        self.pages.iter().copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.pages.shrink_to(1024);
        self.compact_at = 0;
        self.everything = false;
    }
}

enum Changed {
    Memory(Box<Page>),
    Spilled(u64),
}

/// The pages that a transaction has changed, private to it until it commits. Beyond the spill area's threshold they
/// go to a temporary file.
pub(crate) struct Overlay {
    area: Arc<SpillArea>,
    pages: HashMap<PageNo, Changed>,
    in_memory: usize,
    spilled: Option<SpilledPages>,
}

impl Overlay {
    pub(crate) fn new(area: Arc<SpillArea>) -> Self {
        Overlay { area, pages: HashMap::new(), in_memory: 0, spilled: None }
    }

    pub(crate) fn contains(&self, page: PageNo) -> bool {
        !self.pages.is_empty() && self.pages.contains_key(&page)
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    pub(crate) fn write(&mut self, page: PageNo, bytes: &Page) -> io::Result<()> {
        match self.pages.get_mut(&page) {
            Some(Changed::Memory(old)) => **old = *bytes,
            Some(Changed::Spilled(offset)) => {
                let Some(spilled) = &mut self.spilled else { return Err(io::ErrorKind::NotFound.into()) };
                spilled.write(*offset, bytes)?;
            }
            None if self.in_memory * PAGE_SIZE < self.area.threshold_bytes() => {
                self.pages.insert(page, Changed::Memory(Box::new(*bytes)));
                self.in_memory += 1;
            }
            None => {
                let spilled = match &mut self.spilled {
                    Some(spilled) => spilled,
                    none => none.insert(SpilledPages::new(&self.area)?),
                };
                self.pages.insert(page, Changed::Spilled(spilled.push(bytes)?));
            }
        }
        Ok(())
    }

    /// Copies a changed page out; answers whether there is one.
    pub(crate) fn read(&mut self, page: PageNo, bytes: &mut Page) -> io::Result<bool> {
        match self.pages.get(&page) {
            None => Ok(false),
            Some(Changed::Memory(data)) => {
                *bytes = **data;
                Ok(true)
            }
            Some(Changed::Spilled(offset)) => {
                let Some(spilled) = &mut self.spilled else { return Err(io::ErrorKind::NotFound.into()) };
                spilled.read(*offset, bytes)?;
                Ok(true)
            }
        }
    }

    /// A copy of a changed page, if it is one.
    pub(crate) fn copy(&mut self, page: PageNo) -> io::Result<Option<Box<Page>>> {
        if let Some(Changed::Memory(data)) = self.pages.get(&page) {
            return Ok(Some(data.clone()));
        }
        let mut data = Box::new([0; PAGE_SIZE]);
        Ok(self.read(page, &mut data)?.then_some(data))
    }

    /// Forgets what lies beyond the first `page_count` pages.
    pub(crate) fn truncate(&mut self, page_count: u32) {
        self.pages.retain(|page, _| *page <= page_count);
        self.in_memory = self.pages.values().filter(|changed| matches!(changed, Changed::Memory(_))).count();
    }

    /// The changed pages in order, taken out one by one.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = io::Result<(PageNo, Box<Page>)>> + '_ {
        let mut pages: Vec<(PageNo, Changed)> = self.pages.drain().collect();
        pages.sort_unstable_by_key(|(page, _)| *page);
        self.in_memory = 0;
        let mut spilled = self.spilled.take().map(SpilledPages::into_reader);
        pages.into_iter().map(move |(page, changed)| match (changed, &mut spilled) {
            (Changed::Memory(data), _) => Ok((page, data)),
            (Changed::Spilled(offset), Some(spilled)) => spilled.read(offset).map(|data| (page, data)),
            (Changed::Spilled(_), None) => Err(io::ErrorKind::NotFound.into()),
        })
    }

    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.pages.shrink_to(64);
        self.in_memory = 0;
        self.spilled = None;
    }
}

/// Why a commit (or the wish to write) was turned down; the transaction can be run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conflict {
    /// A page that the transaction read has changed since its snapshot.
    PageChanged(PageNo),
    /// Both grew or shrank the file, or used the free list.
    Allocation,
    /// Somebody else holds the partition's turn.
    Turn,
    /// The snapshot's version was discarded after a failed log write.
    Discarded,
    /// The snapshot was held for too long, by a statement that runs.
    Expired,
}

/// A commit that is visible to others; durable once the log is durable up to its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Committed {
    pub snapshot: Snapshot,
}

/// The pages' side of an open transaction.
pub(crate) struct Transaction {
    /// The pinned snapshot: from SQLite's SHARED lock until its release.
    pub snapshot: Option<Snapshot>,
    /// Whether the snapshot is to be the current version: the transaction is about to write. Else the newest durable one.
    pub current: bool,
    /// Whether reads are noted. Not for a lone read-only statement: it is serializable as it is.
    pub track_reads: bool,
    pub reads: PageSet,
    pub overlay: Overlay,
    /// Size of the partition as this transaction sees it.
    pub page_count: u32,
    /// The change counter that SQLite was last told; a new one each time, so that it drops its cache.
    pub counter: u32,
    /// The transaction is one statement. Then SQLite may keep its cache, if that is of the snapshot's version: what is read
    /// from there cannot be noted, but then everything counts as read, and nobody else's commit comes between.
    pub lone: bool,
    /// The version that SQLite's cache holds pages of. At the same version a lone statement is told the same counter and
    /// keeps them.
    pub cached: Option<u64>,
    /// SQLite's cache may hold pages that were changed; cleared by who looks after the cache.
    pub wrote: bool,
    /// The turn that the session holds; 0 if none.
    pub turn: u64,
    /// The id that the client may ask about; 0 if it never asked for it.
    pub id: u64,
    /// The snapshot that the last transaction saw, kept for who waits for its durability.
    pub seen: Option<Snapshot>,
    /// Set by the commit.
    pub committed: Option<Committed>,
    /// Set when the VFS refuses with SQLITE_BUSY_SNAPSHOT.
    pub conflict: Option<Conflict>,
    /// Set when the VFS fails with an error of its own; goes to the client in place of SQLite's.
    pub failure: Option<Error>,
    /// What it may take.
    pub limits: TransactionLimits,
    /// It was refused more, and all that SQLite does from there is to roll it back, for which it may need a little more.
    pub beyond_limits: bool,
}

impl Transaction {
    pub(crate) fn new(area: Arc<SpillArea>) -> Self {
        Transaction {
            snapshot: None,
            current: true,
            track_reads: true,
            reads: PageSet::default(),
            overlay: Overlay::new(area),
            page_count: 0,
            counter: 0,
            lone: false,
            cached: None,
            wrote: false,
            turn: 0,
            id: 0,
            seen: None,
            committed: None,
            conflict: None,
            failure: None,
            limits: TransactionLimits::default(),
            beyond_limits: false,
        }
    }

    /// Whether it may hold so many bytes more, beside `buffered_bytes` in temporary files; notes it as its failure if not.
    pub(crate) fn may_hold(&mut self, more_bytes: u64, buffered_bytes: u64) -> bool {
        let overlay_bytes = (self.overlay.len() * PAGE_SIZE) as u64;
        self.keeps_within(self.limits.check_held(overlay_bytes + buffered_bytes + more_bytes))
    }

    /// Whether the database may have so many pages; notes it as its failure if not.
    pub(crate) fn may_grow_to(&mut self, pages: u32) -> bool {
        let from = self.snapshot.map_or(0, |snapshot| snapshot.page_count);
        self.keeps_within(self.limits.check_size(from, pages))
    }

    fn keeps_within(&mut self, checked: Result<(), Error>) -> bool {
        match checked {
            Err(error) if !self.beyond_limits => {
                self.failure = Some(error);
                self.beyond_limits = true;
                false
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_spills_and_gives_back_what_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let mut overlay = Overlay::new(SpillArea::new(directory.path(), 3 * PAGE_SIZE));
        // So many that some are in memory, some in the file, and some on their way there.
        for page in (1..=200).rev() {
            overlay.write(page, &[page as u8; PAGE_SIZE]).unwrap();
        }
        let rewritten = [1, 100, 200];
        for page in rewritten {
            overlay.write(page, &[7; PAGE_SIZE]).unwrap();
        }
        overlay.truncate(200);
        let expected = |page: u32| if rewritten.contains(&page) { 7 } else { page as u8 };
        let mut bytes = [0; PAGE_SIZE];
        for page in 1..=200 {
            assert!(overlay.read(page, &mut bytes).unwrap());
            assert_eq!(bytes, [expected(page); PAGE_SIZE]);
        }
        assert!(!overlay.read(201, &mut bytes).unwrap());
        let drained: Vec<(u32, u8)> =
            overlay.drain().map(|p| p.map(|(no, data)| (no, data[9])).unwrap()).collect();
        assert_eq!(drained, (1..=200).map(|page| (page, expected(page))).collect::<Vec<_>>());
        assert_eq!(overlay.len(), 0);
    }

    #[test]
    fn a_page_set_stays_small() {
        let mut set = PageSet::default();
        for round in 0..10_000u32 {
            set.insert(round % 10);
        }
        assert!(set.pages.len() <= 512);
        let distinct: std::collections::BTreeSet<_> = set.iter().collect();
        assert_eq!(distinct.len(), 10);
    }
}
