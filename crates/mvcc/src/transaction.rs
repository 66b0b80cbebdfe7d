//! The pages that one open transaction has read and changed, as the VFS sees them.

use std::io;

use fulmar_pages::{PAGE_SIZE, Page, PageNo, PartitionId};
use fulmar_sqlite::TemporaryFiles;
use fulmar_sqlite::spill::refused;
use hashbrown::HashMap;

use crate::page_memory::PageBytes;
use crate::partition::{Draft, Snapshot};
use crate::spilled_pages::{BUFFERS_BYTES, LOCATION_BYTES, PageLocation, SpilledPages, SpilledSegment};

/// A set of pages that mostly grows: a list that is sorted and deduplicated whenever it has
/// doubled. It therefore never holds much more than one entry per page of the partition.
///
/// Its memory is charged to the connection. A set that may not grow stands for all pages, which
/// causes more conflicts.
#[derive(Default, Debug)]
pub(crate) struct PageSet {
    pages: Vec<PageNo>,
    compact_at: usize,
    everything: bool,
    charged_bytes: u64,
}

/// Maximum entries of a [`PageSet`]: the pages of a 4 GiB database.
const MAX_PAGES: usize = 1 << 20;
/// Entries whose memory is not charged.
const UNCHARGED_PAGES: usize = 256;

impl PageSet {
    /// Adds a page. `charge` charges bytes of memory, and returns false if the connection has
    /// reached its memory limit.
    pub(crate) fn insert(&mut self, page: PageNo, charge: impl Fn(u64) -> bool) {
        if self.everything || self.pages.last() == Some(&page) {
            return;
        }
        if self.pages.len() >= self.compact_at {
            self.pages.sort_unstable();
            self.pages.dedup();
            self.compact_at = (2 * self.pages.len()).max(UNCHARGED_PAGES);
            // A vector may have capacity for twice its entries.
            let bytes = (2 * self.compact_at * size_of::<PageNo>()) as u64;
            let lacking = bytes.saturating_sub(self.charged_bytes);
            if self.compact_at > MAX_PAGES
                || (self.compact_at > UNCHARGED_PAGES && lacking > 0 && !charge(lacking))
            {
                self.everything = true;
                self.pages = Vec::new();
                return;
            }
            if self.compact_at > UNCHARGED_PAGES {
                self.charged_bytes += lacking;
            }
        }
        self.pages.push(page);
    }

    /// Adds a page that a commit writes without a change. Its memory is not charged: such pages are
    /// few (see `partition/large_commit`).
    pub(crate) fn insert_unchanged(&mut self, page: PageNo) {
        if !self.everything {
            self.pages.push(page);
        }
    }

    /// Makes the set stand for all pages.
    pub(crate) fn insert_everything(&mut self) {
        self.everything = true;
    }

    /// Returns a page of the set for which `changed` is true. If the set stands for all pages, it
    /// returns page 1: the caller knows that some page has changed.
    pub(crate) fn find_changed(&self, mut changed: impl FnMut(PageNo) -> bool) -> Option<PageNo> {
        match self.everything {
            true => Some(1),
            // Counters and allocation on page 1 change with every commit; the caller compares the
            // rest of it.
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

    /// Removes all pages. Returns the bytes of memory to release.
    #[must_use]
    pub(crate) fn clear(&mut self) -> u64 {
        self.pages.clear();
        self.pages.shrink_to(1024);
        self.compact_at = 0;
        self.everything = false;
        std::mem::take(&mut self.charged_bytes)
    }
}

enum Changed {
    Memory(PageBytes),
    Spilled(PageLocation),
}

/// The pages that a transaction has changed, private to it until it commits. Above the spill area's
/// threshold, all of them except page 1 go to temporary files ([`crate::spilled_pages`]).
///
/// Their memory is charged to the connection. If the connection has reached its memory limit,
/// further pages go to files immediately.
pub(crate) struct Overlay {
    files: TemporaryFiles,
    pages: HashMap<PageNo, Changed>,
    in_memory: usize,
    spilled: Option<SpilledPages>,
    /// Memory that is charged to the connection.
    charged_bytes: u64,
}

/// Memory of a changed page in addition to its bytes: one entry of a hash table that is half full.
const ENTRY_BYTES: u64 = 2 * size_of::<(PageNo, Changed)>() as u64 + LOCATION_BYTES;

impl Overlay {
    pub(crate) fn new(files: TemporaryFiles) -> Self {
        Overlay { files, pages: HashMap::new(), in_memory: 0, spilled: None, charged_bytes: 0 }
    }

    /// Takes all pages out. Their memory stays charged to the connection.
    pub(crate) fn take(&mut self) -> Overlay {
        let empty = Overlay::new(self.files.clone());
        std::mem::replace(self, empty)
    }

    pub(crate) fn contains(&self, page: PageNo) -> bool {
        !self.pages.is_empty() && self.pages.contains_key(&page)
    }

    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    /// Stores a changed page. If [`Overlay::is_full`] is true afterwards, the caller must call
    /// [`Overlay::flush_buffer`] before the next write. `charge` charges bytes of memory to the
    /// connection, and returns false if the connection has reached its memory limit.
    pub(crate) fn write(
        &mut self,
        page: PageNo,
        bytes: &Page,
        charge: impl Fn(u64) -> bool,
    ) -> io::Result<()> {
        match self.pages.get_mut(&page) {
            Some(Changed::Memory(old)) => **old = *bytes,
            Some(Changed::Spilled(place)) => {
                let Some(spilled) = &mut self.spilled else { return Err(io::ErrorKind::NotFound.into()) };
                *place = spilled.replace(*place, bytes)?;
            }
            None if (page == 1 || self.in_memory * PAGE_SIZE < self.files.area.threshold_bytes())
                && charge(PAGE_SIZE as u64 + ENTRY_BYTES) =>
            {
                self.charged_bytes += PAGE_SIZE as u64 + ENTRY_BYTES;
                self.pages.insert(page, Changed::Memory(PageBytes::copy_of(bytes)));
                self.in_memory += 1;
            }
            None if page == 1 => return Err(refused(fulmar_sqlite::exhausted())),
            None => {
                let buffers_bytes = if self.spilled.is_none() { BUFFERS_BYTES } else { 0 };
                if !charge(ENTRY_BYTES + buffers_bytes) {
                    return Err(refused(fulmar_sqlite::exhausted()));
                }
                self.charged_bytes += ENTRY_BYTES + buffers_bytes;
                let spilled = match &mut self.spilled {
                    Some(spilled) => spilled,
                    none => none.insert(SpilledPages::new(&self.files)?),
                };
                self.pages.insert(page, Changed::Spilled(spilled.push(bytes)?));
            }
        }
        Ok(())
    }

    pub(crate) fn has_spilled(&self) -> bool {
        self.spilled.is_some()
    }

    /// Returns true if pages are buffered that should be written to a file.
    pub(crate) fn is_full(&self) -> bool {
        self.spilled.as_ref().is_some_and(SpilledPages::is_full)
    }

    pub(crate) async fn flush_buffer(&mut self) -> io::Result<()> {
        match &mut self.spilled {
            Some(spilled) => spilled.hand_over().await,
            None => Ok(()),
        }
    }

    /// Returns a changed page if it is in memory. Page 1 always is.
    pub(crate) fn in_memory(&self, page: PageNo) -> Option<&Page> {
        match self.pages.get(&page)? {
            Changed::Memory(data) => Some(data),
            Changed::Spilled(_) => None,
        }
    }

    /// Copies a changed page into `bytes`. Returns false if the page has not been changed.
    pub(crate) async fn read(&mut self, page: PageNo, bytes: &mut Page) -> io::Result<bool> {
        match (self.pages.get(&page), &mut self.spilled) {
            (None, _) => return Ok(false),
            (Some(Changed::Memory(data)), _) => *bytes = **data,
            (Some(Changed::Spilled(place)), Some(spilled)) => spilled.read(*place, bytes).await?,
            (Some(Changed::Spilled(_)), None) => return Err(io::ErrorKind::NotFound.into()),
        }
        Ok(true)
    }

    /// Removes the pages beyond the first `page_count`.
    pub(crate) fn truncate(&mut self, page_count: u32) {
        self.pages.retain(|page, _| *page <= page_count);
        self.in_memory = self.pages.values().filter(|changed| matches!(changed, Changed::Memory(_))).count();
    }

    /// Charges the memory that the spilled pages will take once they are back in memory. Returns
    /// false if the connection's memory limit does not allow it.
    pub(crate) fn charge_spilled(&mut self, charge: impl Fn(u64) -> bool) -> bool {
        let bytes = ((self.pages.len() - self.in_memory) * PAGE_SIZE) as u64;
        let charged = charge(bytes);
        self.charged_bytes += if charged { bytes } else { 0 };
        charged
    }

    /// Reads the spilled pages back into memory. The caller has checked that they are few, and has
    /// charged their memory.
    pub(crate) async fn bring_back(&mut self) -> io::Result<()> {
        let Some(spilled) = &mut self.spilled else { return Ok(()) };
        for changed in self.pages.values_mut() {
            if let Changed::Spilled(place) = changed {
                let mut page = PageBytes::zeroed();
                spilled.read(*place, &mut page).await?;
                *changed = Changed::Memory(page);
                self.in_memory += 1;
            }
        }
        self.spilled = None;
        Ok(())
    }

    /// Removes and returns the changed pages in ascending order. Spilled pages must have been
    /// brought back before.
    pub(crate) fn drain(&mut self) -> io::Result<Vec<(PageNo, PageBytes)>> {
        self.in_memory = 0;
        let in_memory = |(no, changed)| match changed {
            Changed::Memory(page) => Ok((no, page)),
            Changed::Spilled(_) => Err(io::ErrorKind::NotFound.into()),
        };
        let mut pages = self.pages.drain().map(in_memory).collect::<io::Result<Vec<_>>>()?;
        pages.sort_unstable_by_key(|(page, _)| *page);
        Ok(pages)
    }

    /// Writes the changed pages up to `page_count`, except page 1, into a segment. The overlay is
    /// empty afterwards.
    pub(crate) async fn make_segment(
        &mut self,
        partition: PartitionId,
        page_count: u32,
    ) -> io::Result<SpilledSegment> {
        let mut pages: Vec<(PageNo, Changed)> = self.pages.drain().collect();
        pages.retain(|(no, _)| *no != 1 && *no <= page_count);
        pages.sort_unstable_by_key(|(no, _)| *no);
        self.in_memory = 0;
        let mut new = match self.spilled.take() {
            Some(spilled) => spilled,
            None => SpilledPages::new(&self.files)?,
        };
        let in_draft = |(_, changed): &&_| matches!(changed, Changed::Spilled(PageLocation::Draft(_)));
        let live = pages.iter().filter(in_draft).count();
        // If most of the draft is obsolete, rewrite all live pages into a new one.
        let mut old = None;
        if live * 2 < new.drafted() {
            old = Some(std::mem::replace(&mut new, SpilledPages::new(&self.files)?));
        }
        let mut frames = Vec::with_capacity(pages.len());
        let mut page = Box::new([0; PAGE_SIZE]);
        for (no, changed) in pages {
            let index = match (changed, &mut old) {
                (Changed::Memory(page), _) => new.draft(&page).await?,
                (Changed::Spilled(PageLocation::Draft(index)), None) => index,
                (Changed::Spilled(place), old) => {
                    old.as_mut().unwrap_or(&mut new).read(place, &mut page).await?;
                    new.draft(&page).await?
                }
            };
            frames.push((no, index));
        }
        new.finish(partition, frames).await
    }

    /// Removes all pages. Returns the bytes of memory to release.
    #[must_use]
    pub(crate) fn clear(&mut self) -> u64 {
        self.pages.clear();
        self.pages.shrink_to(64);
        self.in_memory = 0;
        self.spilled = None;
        std::mem::take(&mut self.charged_bytes)
    }
}

/// Why a commit, or a request to write, was rejected. The transaction can be retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// A page that the transaction read has changed since its snapshot.
    PageChanged(PageNo),
    /// Both transactions grew or shrank the file, or used the free list.
    Allocation,
    /// The snapshot's version was discarded after a failed log write.
    Discarded,
    /// A running statement held the snapshot for too long.
    Expired,
}

/// A commit that is visible to other transactions. It is durable once the log is durable up to its
/// position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The version that the commit made.
    pub snapshot: Snapshot,
}

/// What the answers of a transaction depend on besides the data. The layer above defines the fields.
pub type TransactionContext = [u64; 5];

/// The state of an open transaction at the level of pages.
pub struct Transaction {
    /// The pinned snapshot, from SQLite's SHARED lock until its release.
    pub snapshot: Option<Snapshot>,
    /// If true, the snapshot is the current version, because the transaction is about to write.
    /// Otherwise it is the newest durable one.
    pub current: bool,
    /// If true, reads are recorded. Not needed for a single read-only statement: it is serializable
    /// without.
    pub track_reads: bool,
    pub(crate) reads: PageSet,
    pub(crate) overlay: Overlay,
    /// Size of the partition as this transaction sees it.
    pub page_count: u32,
    /// The change counter that SQLite was last given. It is new each time, so that SQLite drops its
    /// cache.
    pub counter: u32,
    /// The transaction is a single statement. SQLite may then keep its cache if that has the
    /// snapshot's version. Reads from the cache cannot be recorded, so all pages count as read; the
    /// statement commits only if no other commit came in between.
    pub single_statement: bool,
    /// The version of the pages in SQLite's cache. A single statement at the same version is given
    /// the same counter, so SQLite keeps the cache.
    pub cached: Option<u64>,
    /// SQLite's cache may hold changed pages. Cleared by the code that manages the cache.
    pub wrote: bool,
    /// The turn that the session holds; 0 if none.
    pub turn: u64,
    /// The transaction id that the client requested; 0 if it did not request one.
    pub id: u64,
    /// The transaction id that a gateway has assigned; 0 if there is none. The outcome of a
    /// transaction that changes nothing is not recorded under it.
    pub assigned_id: u64,
    /// Identifies the transaction when it is repeated at another node: the id that it had at first.
    /// 0 if it is never repeated there.
    pub origin: u64,
    /// Kept for a repetition, together with the snapshot.
    pub context: TransactionContext,
    /// It is repeated at the snapshot that it had at another node. Until that is complete, it must
    /// not see another version.
    pub is_repeated: bool,
    /// It has begun after its partition was closed to move: its snapshot is not carried over, so it
    /// must not return an answer.
    pub is_late: bool,
    /// The snapshot of the last transaction, kept for the session that waits until it is durable.
    pub seen: Option<Snapshot>,
    /// Set by the commit.
    pub committed: Option<Committed>,
    /// Set when the VFS refuses with SQLITE_BUSY_SNAPSHOT.
    pub conflict: Option<Conflict>,
    /// A COMMIT keeps the changed pages as a draft.
    pub drafts: bool,
    pub(crate) draft: Option<Draft>,
}

impl Transaction {
    pub(crate) fn new(files: TemporaryFiles) -> Self {
        Transaction {
            snapshot: None,
            current: true,
            track_reads: true,
            reads: PageSet::default(),
            overlay: Overlay::new(files),
            page_count: 0,
            counter: 0,
            single_statement: false,
            cached: None,
            wrote: false,
            turn: 0,
            id: 0,
            assigned_id: 0,
            origin: 0,
            context: TransactionContext::default(),
            is_repeated: false,
            is_late: false,
            seen: None,
            committed: None,
            conflict: None,
            drafts: false,
            draft: None,
        }
    }

    /// Prepares for a transaction of another session.
    pub fn reset(&mut self) {
        self.id = 0;
        self.assigned_id = 0;
        (self.origin, self.context) = (0, TransactionContext::default());
        (self.is_repeated, self.is_late) = (false, false);
        self.turn = 0;
        self.seen = None;
        self.committed = None;
        self.conflict = None;
        self.track_reads = true;
        self.single_statement = false;
        self.current = true;
    }

    /// The id under which the outcome of a commit is recorded; 0 if it is not recorded.
    pub(crate) fn recorded_id(&self) -> u64 {
        if self.id == 0 { self.assigned_id } else { self.id }
    }

    /// The size of the partition at its snapshot.
    pub(crate) fn first_page_count(&self) -> u32 {
        self.snapshot.map_or(0, |snapshot| snapshot.page_count)
    }

    /// Bytes of its changed pages.
    pub fn changed_bytes(&self) -> u64 {
        (self.overlay.len() * PAGE_SIZE) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enough that some pages are in memory, some in files, and some buffered in between.
    const PAGES: u32 = 400;

    fn overlay(directory: &std::path::Path) -> Overlay {
        Overlay::new(crate::tests::files(directory, 3 * PAGE_SIZE, u64::MAX))
    }

    async fn write(overlay: &mut Overlay, no: u32, fill: u32) {
        overlay.write(no, &[fill as u8; PAGE_SIZE], |_| true).unwrap();
        if overlay.is_full() {
            overlay.flush_buffer().await.unwrap();
        }
    }

    async fn check(overlay: &mut Overlay, expected: impl Fn(u32) -> u32) {
        let mut bytes = [0; PAGE_SIZE];
        for no in 1..=PAGES {
            assert!(overlay.read(no, &mut bytes).await.unwrap());
            assert_eq!(bytes, [expected(no) as u8; PAGE_SIZE], "{no}");
        }
        assert!(!overlay.read(PAGES + 1, &mut bytes).await.unwrap());
    }

    /// Makes a segment of the overlay. Returns its pages, each with its fill value, and its size in
    /// bytes.
    async fn segment(overlay: &mut Overlay, page_count: u32) -> (Vec<(u32, u32)>, u64) {
        use std::os::unix::fs::FileExt;
        let made = overlay.make_segment(PartitionId(9), page_count).await.unwrap();
        let mut segment = vec![0; made.bytes as usize];
        made.file.read_exact_at(&mut segment, 0).unwrap();
        let index = fulmar_pages::segment::verify(&segment).unwrap();
        let mut page = [0; PAGE_SIZE];
        let pages = index.frames(PartitionId(9)).map(|(no, location)| {
            let start = location.offset as usize;
            fulmar_pages::segment::decode_frame(&segment[start..start + location.length as usize], &mut page)
                .unwrap();
            (no, page[77].into())
        });
        (pages.collect(), made.bytes)
    }

    #[tokio::test]
    async fn overlay_spills_and_returns_written_pages() {
        let directory = tempfile::tempdir().unwrap();
        let mut overlay = overlay(directory.path());
        for no in (1..=PAGES).rev() {
            write(&mut overlay, no, no).await;
        }
        let rewritten = [1, 100, 200, PAGES];
        for no in rewritten {
            write(&mut overlay, no, 7).await;
        }
        let expected = |no: u32| if rewritten.contains(&no) { 7 } else { no };
        overlay.truncate(PAGES);
        check(&mut overlay, expected).await;
        overlay.bring_back().await.unwrap();
        assert!(overlay.in_memory(PAGES / 2).is_some());
        check(&mut overlay, expected).await;
        let drained: Vec<(u32, u8)> =
            overlay.drain().unwrap().iter().map(|(no, page)| (*no, page[9])).collect();
        assert_eq!(drained, (1..=PAGES).map(|no| (no, expected(no) as u8)).collect::<Vec<_>>());
        assert_eq!(overlay.len(), 0);
    }

    #[tokio::test]
    async fn overlay_segment_contains_the_latest_version_of_each_page() {
        let directory = tempfile::tempdir().unwrap();
        let once = |no: u32| no;
        let some_again = |no: u32| if no.is_multiple_of(50) { no + 1 } else { no };
        let all_again = |no: u32| no + 2;
        let mut sizes = Vec::new();
        for fill in [&once as &dyn Fn(u32) -> u32, &some_again, &all_again] {
            let mut overlay = overlay(directory.path());
            for no in 1..=PAGES {
                write(&mut overlay, no, no).await;
            }
            for no in (1..=PAGES).filter(|no| fill(*no) != *no) {
                write(&mut overlay, no, 0).await;
                write(&mut overlay, no, fill(no)).await;
            }
            let (pages, bytes) = segment(&mut overlay, PAGES - 10).await;
            assert_eq!(pages, (2..=PAGES - 10).map(|no| (no, fill(no) & 255)).collect::<Vec<_>>());
            assert_eq!(overlay.len(), 0);
            sizes.push(bytes);
        }
        assert!(sizes[1] > sizes[0], "a few replaced frames must stay in the draft: {sizes:?}");
        assert!(
            sizes[2] < sizes[0] * 3 / 2,
            "a draft of mostly obsolete frames must be rewritten: {sizes:?}"
        );
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn rewritten_pages_reuse_their_space() {
        let directory = tempfile::tempdir().unwrap();
        let mut overlay = overlay(directory.path());
        for round in 0..20 {
            for no in 1..=PAGES {
                write(&mut overlay, no, no + round).await;
            }
        }
        let spilled = overlay.spilled.as_ref().unwrap();
        assert!(spilled.drafted() <= PAGES as usize);
        assert!(spilled.plain_pages() <= PAGES);
        check(&mut overlay, |no| no + 19).await;
    }

    #[tokio::test]
    async fn overlay_without_memory_spills_immediately_and_releases_its_charge() {
        let directory = tempfile::tempdir().unwrap();
        let mut overlay = Overlay::new(crate::tests::files(directory.path(), 1 << 20, u64::MAX));
        let in_memory = PAGE_SIZE as u64 + ENTRY_BYTES;
        let [pages_left, places_left] = [2, 8].map(std::cell::Cell::new);
        let charge = |bytes| {
            let left = if bytes == in_memory { &pages_left } else { &places_left };
            left.get() > 0 && left.replace(left.get() - 1) > 0
        };
        for no in 2..12 {
            overlay.write(no, &[no as u8; PAGE_SIZE], charge).unwrap();
        }
        assert!(overlay.in_memory(3).is_some() && overlay.in_memory(4).is_none());
        let error = overlay.write(12, &[1; PAGE_SIZE], charge).unwrap_err();
        assert_eq!(fulmar_sqlite::spill::error(&error).state(), "53200");
        // A page that is already there can still be changed.
        overlay.write(11, &[1; PAGE_SIZE], charge).unwrap();
        assert!(!overlay.charge_spilled(|bytes| bytes < 8 * PAGE_SIZE as u64));
        assert!(overlay.charge_spilled(|bytes| bytes == 8 * PAGE_SIZE as u64));
        assert_eq!(overlay.clear(), 10 * in_memory + BUFFERS_BYTES);
        assert_eq!(overlay.clear(), 0);
    }

    #[test]
    fn page_set_is_deduplicated() {
        let mut set = PageSet::default();
        for round in 0..10_000u32 {
            set.insert(round % 10, |_| panic!("a small set must not be charged"));
        }
        assert!(set.pages.len() <= 512);
        let distinct: std::collections::BTreeSet<_> = set.iter().collect();
        assert_eq!((distinct.len(), set.clear()), (10, 0));
    }

    #[test]
    fn page_set_without_memory_stands_for_all_pages() {
        let mut set = PageSet::default();
        let charged = std::cell::Cell::new(0);
        let charge = |bytes| charged.replace(charged.get() + bytes) + bytes <= 100_000;
        for page in 2..5000 {
            set.insert(page, charge);
        }
        assert!(!set.everything && set.pages.capacity() * 4 <= charged.get() as usize);
        assert_eq!(set.find_changed(|page| page == 4999), Some(4999));
        for page in 5000..100_000 {
            set.insert(page, charge);
        }
        assert!(set.everything && set.pages.capacity() == 0 && set.find_changed(|_| false).is_some());
        assert!((1..=100_000).contains(&set.clear()) && set.find_changed(|_| true).is_none());
    }
}
