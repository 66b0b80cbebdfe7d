//! The snapshots of open transactions, carried over when their partition moves to another node.
//!
//! ```text
//!   source                                          destination
//!   closed: note the snapshot of each transaction
//!   collect the page versions that they see   --->  open: put them behind the current versions
//!                                                   a repeated transaction begins at its snapshot
//! ```
//!
//! The gateway repeats a transaction at the destination, and its statements must return what the
//! client has got. They do if they read at the same snapshot, with the same [`TransactionContext`].
//!
//! # A version means the same at both nodes
//! The destination opens the partition at the version that the source has released. Between the
//! close and the change of owner there is no commit, and the numbers of later commits begin with
//! the next epoch, so they are above all others. It gives these numbers to the pages that it opens:
//!
//! - A page that has changed since the oldest carried snapshot gets the number of its newest
//!   version at the source. Behind that are the versions that carried snapshots see.
//! - All other pages get the number of the oldest carried snapshot.
//!
//! So a lookup at a carried snapshot finds the same bytes as at the source, and a page is newer than
//! a carried snapshot if it was at the source, or if the destination has changed it since. The
//! validation of commits needs nothing else: it is as precise as at the source.
//!
//! The source knows the changed pages: as long as a snapshot is pinned, [`Commits::recent`] has all
//! commits after it.
//!
//! [`Commits::recent`]: super::commits::Commits
//!
//! # Which snapshot
//! That of the moment of the close: later, a transaction neither advances its snapshot
//! ([`super::snapshots::Snapshots::advance`]), nor does its first statement return an answer
//! ([`crate::Transaction::is_late`]). Transactions that end before they are sent are left out.
//!
//! # Bounds
//! The page versions have a maximum size. If they are larger, the newest snapshots are carried,
//! which need the fewest. The destination keeps a snapshot for [`CARRIED_MS`], or until it expires
//! like any other. A transaction without its snapshot is repeated at the newest version, and fails if
//! an answer differs.

use std::collections::BTreeMap;

use bytes::{Buf, BufMut};
use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::Lsn;

use super::commits::UncollectedCommit;
use super::snapshots::CarriedTransaction;
use super::table::PageTable;
use super::{Partition, Snapshot};
use crate::memory::Tally;
use crate::page_memory::PageBytes;
use crate::transaction::TransactionContext;

/// How long carried snapshots wait for their transactions.
pub(super) const CARRIED_MS: u64 = 30_000;
/// The encoded size of a transaction, of a page without its versions, and of a version without its
/// bytes.
const TRANSACTION_BYTES: usize = 8 + 1 + 12 + size_of::<TransactionContext>();
const ENTRY_BYTES: usize = 16;
const VERSION_BYTES: usize = 9;
/// How much of the limit a page without its versions counts: its memory here.
const PLANNED_BYTES: usize = 64;

/// Snapshots of transactions, and the page versions that they see and that are not current.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CarriedSnapshots {
    /// The version that the source has released.
    released: u64,
    transactions: Vec<CarriedTransaction>,
    /// The pages that have changed since the oldest of the snapshots, in ascending order.
    pages: Vec<CarriedPage>,
}

/// A page that has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CarriedPage {
    no: PageNo,
    /// The number of its newest version.
    newest: u64,
    /// The older versions that snapshots see, newest first.
    older: Vec<(u64, OldVersion)>,
}

/// The bytes of a page; `None` if the page was cut off in this version.
type OldVersion = Option<Box<Page>>;

/// A changed page whose versions are to be read.
struct Planned {
    newest: u64,
    /// The snapshot for which it was added.
    added_for: u64,
    older: Vec<PlannedVersion>,
}

struct PlannedVersion {
    number: u64,
    /// The newest snapshot that sees it.
    seen_by: Snapshot,
    is_end: bool,
}

impl CarriedSnapshots {
    /// Returns true if there is no transaction.
    pub fn is_empty(&self) -> bool {
        self.transactions.is_empty()
    }

    /// The number of transactions.
    pub fn len(&self) -> usize {
        self.transactions.len()
    }

    /// The version that the source has released.
    pub(super) fn released(&self) -> u64 {
        self.released
    }

    pub(super) fn transactions(&self) -> &[CarriedTransaction] {
        &self.transactions
    }

    fn snapshots(&self) -> impl Iterator<Item = Snapshot> {
        self.transactions.iter().filter_map(|transaction| transaction.snapshot)
    }

    /// Removes the transactions that have ended since.
    pub fn remove_ended(&mut self, partition: &Partition) {
        let snapshots = partition.snapshots.lock();
        let is_open = |origin| snapshots.departing().iter().any(|open| open.origin == origin);
        self.transactions.retain(|transaction| is_open(transaction.origin));
    }

    /// The size of [`CarriedSnapshots::encode`].
    pub fn encoded_bytes(&self) -> usize {
        let versions = self.pages.iter().flat_map(|page| &page.older);
        let bytes = versions.map(|(_, page)| VERSION_BYTES + page.as_ref().map_or(0, |_| PAGE_SIZE));
        let fixed = self.transactions.len() * TRANSACTION_BYTES + self.pages.len() * ENTRY_BYTES;
        ENTRY_BYTES + fixed + bytes.sum::<usize>()
    }

    /// Encodes them for the destination.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_bytes());
        out.put_u64(self.released);
        out.put_u32(self.transactions.len() as u32);
        for CarriedTransaction { origin, snapshot, context } in &self.transactions {
            out.put_u64(*origin);
            out.put_u8(snapshot.is_some().into());
            out.put_u64(snapshot.map_or(0, |snapshot| snapshot.number));
            out.put_u32(snapshot.map_or(0, |snapshot| snapshot.page_count));
            context.iter().for_each(|field| out.put_u64(*field));
        }
        out.put_u32(self.pages.len() as u32);
        for page in &self.pages {
            out.put_u32(page.no);
            out.put_u64(page.newest);
            out.put_u32(page.older.len() as u32);
            for (number, bytes) in &page.older {
                out.put_u64(*number);
                out.put_u8(bytes.is_some().into());
                out.put_slice(bytes.as_ref().map_or(&[][..], |page| &page[..]));
            }
        }
        out
    }

    /// Decodes them. Fails if they are not what [`CarriedSnapshots::encode`] returns.
    pub fn decode(bytes: &[u8]) -> Result<CarriedSnapshots> {
        let damaged = || Error::new(sqlstate::DATA_CORRUPTED, "received damaged snapshots of transactions");
        read(bytes).filter(CarriedSnapshots::is_consistent).ok_or_else(damaged)
    }

    /// Version numbers and page numbers must be ordered as the page table expects them.
    fn is_consistent(&self) -> bool {
        let in_order = |page: &CarriedPage| {
            let numbers = page.older.iter().map(|(number, _)| *number);
            let is_below = page.older.first().is_none_or(|(number, _)| *number < page.newest);
            page.no > 0 && page.newest <= self.released && is_below && numbers.is_sorted_by(|a, b| a > b)
        };
        self.pages.iter().all(in_order)
            && self.pages.is_sorted_by(|a, b| a.no < b.no)
            && self.snapshots().all(|snapshot| snapshot.number <= self.released)
            && self.transactions.iter().all(|transaction| transaction.origin != 0)
    }

    fn oldest(&self) -> u64 {
        self.snapshots().map(|snapshot| snapshot.number).min().unwrap_or(self.released)
    }

    /// Installs the older versions of a page. Returns the number of its newest version.
    pub(super) fn install_older(&self, no: PageNo, table: &PageTable, tally: &mut Tally) -> u64 {
        let Ok(at) = self.pages.binary_search_by_key(&no, |page| page.no) else { return self.oldest() };
        let page = &self.pages[at];
        for (number, bytes) in page.older.iter().rev() {
            let bytes = bytes.as_ref().map(|bytes| PageBytes::copy_of(bytes));
            table.install(no, *number, bytes, None, tally);
        }
        page.newest
    }

    /// Installs the pages that are not `current`: they were cut off since.
    pub(super) fn install_rest(
        &self,
        current: impl Fn(PageNo) -> bool,
        table: &PageTable,
        tally: &mut Tally,
    ) {
        for page in self.pages.iter().filter(|page| !page.older.is_empty() && !current(page.no)) {
            let newest = self.install_older(page.no, table, tally);
            table.install_end_marker(page.no, newest, tally);
        }
    }

    /// The commit that stands for all since the oldest snapshot: the older versions are freed when
    /// no snapshot below it is pinned.
    pub(super) fn replaced(&self, current: Snapshot) -> UncollectedCommit {
        let bytes = self.pages.iter().flat_map(|page| &page.older).filter(|(_, bytes)| bytes.is_some());
        UncollectedCommit {
            snapshot: current,
            pages: self.pages.iter().map(|page| page.no).filter(|no| *no <= current.page_count).collect(),
            page_count_before: self
                .snapshots()
                .map(|snapshot| snapshot.page_count)
                .chain(self.pages.last().map(|page| page.no))
                .fold(current.page_count, u32::max),
            replaced_bytes: (bytes.count() * PAGE_SIZE) as u64,
        }
    }
}

fn read(mut bytes: &[u8]) -> Option<CarriedSnapshots> {
    let mut carried = CarriedSnapshots { released: bytes.try_get_u64().ok()?, ..CarriedSnapshots::default() };
    for _ in 0..bytes.try_get_u32().ok()? {
        let (origin, has_snapshot) = (bytes.try_get_u64().ok()?, bytes.try_get_u8().ok()?);
        let (number, page_count) = (bytes.try_get_u64().ok()?, bytes.try_get_u32().ok()?);
        let snapshot = (has_snapshot != 0).then_some(Snapshot { number, lsn: Lsn(0), page_count });
        let mut context = TransactionContext::default();
        for field in &mut context {
            *field = bytes.try_get_u64().ok()?;
        }
        carried.transactions.push(CarriedTransaction { origin, snapshot, context });
    }
    for _ in 0..bytes.try_get_u32().ok()? {
        let (no, newest) = (bytes.try_get_u32().ok()?, bytes.try_get_u64().ok()?);
        let mut older = Vec::new();
        for _ in 0..bytes.try_get_u32().ok()? {
            let (number, has_bytes) = (bytes.try_get_u64().ok()?, bytes.try_get_u8().ok()?);
            let mut page = None;
            if has_bytes != 0 {
                let (first, rest) = bytes.split_first_chunk::<PAGE_SIZE>()?;
                (page, bytes) = (Some(Box::new(*first)), rest);
            }
            older.push((number, page));
        }
        carried.pages.push(CarriedPage { no, newest, older });
    }
    bytes.is_empty().then_some(carried)
}

impl Partition {
    /// The snapshots of its transactions when it was closed to move, with page versions of at most
    /// `limit_bytes`.
    pub async fn carried_snapshots(&self, limit_bytes: usize) -> Result<CarriedSnapshots> {
        let mut transactions = self.snapshots.lock().departing().to_vec();
        let number = |transaction: &CarriedTransaction| transaction.snapshot.map_or(0, |it| it.number);
        transactions.sort_unstable_by_key(|transaction| std::cmp::Reverse(number(transaction)));
        transactions.truncate(limit_bytes / TRANSACTION_BYTES);
        let mut versions: Vec<Snapshot> =
            transactions.iter().filter_map(|transaction| transaction.snapshot).collect();
        versions.dedup_by_key(|snapshot| snapshot.number);
        let planned = self.plan(&mut versions, limit_bytes - transactions.len() * TRANSACTION_BYTES);
        let oldest = versions.last().map_or(u64::MAX, |snapshot| snapshot.number);
        for CarriedTransaction { snapshot, .. } in &mut transactions {
            *snapshot = snapshot.filter(|it| it.number >= oldest).map(|it| Snapshot { lsn: Lsn(0), ..it });
        }
        let mut pages = Vec::with_capacity(planned.len());
        for (no, planned) in planned {
            let mut older = Vec::with_capacity(planned.older.len());
            for version in planned.older {
                let mut bytes = None;
                if !version.is_end {
                    let page: &mut Box<Page> = bytes.insert(Box::new([0; PAGE_SIZE]));
                    if !self.copy_page(no, &version.seen_by, page).await? {
                        return Err(Error::new(sqlstate::INTERNAL, "page of a pinned snapshot is missing"));
                    }
                }
                older.push((version.number, bytes));
            }
            pages.push(CarriedPage { no, newest: planned.newest, older });
        }
        Ok(CarriedSnapshots { released: self.current().number, transactions, pages })
    }

    /// Finds the page versions that pinned snapshots see, newest snapshot first. Removes the oldest
    /// snapshots if they exceed the limit.
    fn plan(&self, snapshots: &mut Vec<Snapshot>, limit_bytes: usize) -> BTreeMap<PageNo, Planned> {
        let mut pages = BTreeMap::<PageNo, Planned>::new();
        let mut bytes = 0;
        let commits = self.commits.lock();
        let mut recent = commits.recent.iter().rev().peekable();
        let fits = snapshots.iter().position(|at| {
            // Only the pages of commits between this snapshot and the one before can look different.
            while let Some(commit) = recent.next_if(|commit| commit.snapshot.number > at.number) {
                let cut = commit.snapshot.page_count + 1..=commit.page_count_before;
                for no in commit.pages.iter().copied().chain(cut) {
                    bytes += self.plan_page(no, at, &mut pages);
                    if bytes > limit_bytes {
                        return true;
                    }
                }
            }
            false
        });
        if let Some(end) = fits {
            let left_out = snapshots[end].number;
            snapshots.truncate(end);
            pages.retain(|_, page| {
                page.older.retain(|version| version.seen_by.number != left_out);
                page.added_for != left_out
            });
        }
        pages
    }

    /// Adds a page that has changed since a snapshot, and the version that the snapshot sees.
    /// Returns the bytes added. The caller holds the commit lock; the snapshot is pinned.
    fn plan_page(&self, no: PageNo, at: &Snapshot, pages: &mut BTreeMap<PageNo, Planned>) -> usize {
        let newest = self.pages.newest_number(no);
        if newest <= at.number {
            return 0;
        }
        let mut added = 0;
        let planned = pages.entry(no).or_insert_with(|| {
            added += PLANNED_BYTES;
            Planned { newest, added_for: at.number, older: Vec::new() }
        });
        if no > at.page_count {
            return added;
        }
        // SAFETY: the snapshot is pinned.
        let Some(version) = (unsafe { self.pages.find_any(no, at.number) }) else { return added };
        let (number, is_end) = (version.number(), version.is_end());
        if planned.older.last().is_none_or(|last| last.number != number) {
            added += VERSION_BYTES + if is_end { 0 } else { PAGE_SIZE };
            planned.older.push(PlannedVersion { number, seen_by: *at, is_end });
        }
        added
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Database;

    fn carried() -> CarriedSnapshots {
        let snapshot = Snapshot { number: 5, lsn: Lsn(0), page_count: 9 };
        let with = CarriedTransaction { origin: 1, snapshot: Some(snapshot), context: [1, 2, 3, 4, 5] };
        let without = CarriedTransaction { origin: 2, snapshot: None, context: [6, 7, 8, 9, 10] };
        let page = |fill| Some(Box::new([fill; PAGE_SIZE]));
        let pages = vec![
            CarriedPage { no: 3, newest: 6, older: vec![(5, page(1)), (4, None), (2, page(2))] },
            CarriedPage { no: 9, newest: 7, older: Vec::new() },
        ];
        CarriedSnapshots { released: 8, transactions: vec![with, without], pages }
    }

    #[test]
    fn encoded_snapshots_are_decoded_or_refused() {
        let encoded = carried().encode();
        assert_eq!(encoded.len(), carried().encoded_bytes());
        assert_eq!(CarriedSnapshots::decode(&encoded).unwrap(), carried());
        for length in 0..encoded.len() {
            assert!(CarriedSnapshots::decode(&encoded[..length]).is_err(), "{length} bytes");
        }
        assert!(CarriedSnapshots::decode(&[&encoded[..], &[0]].concat()).is_err());
        let damages: [fn(&mut CarriedSnapshots); 6] = [
            |it| it.pages[0].older.swap(0, 2),
            |it| it.pages[0].newest = 5,
            |it| it.pages.swap(0, 1),
            |it| it.released = 4,
            |it| it.pages[0].no = 0,
            |it| it.transactions[0].origin = 0,
        ];
        for (index, damage) in damages.into_iter().enumerate() {
            let mut damaged = carried();
            damage(&mut damaged);
            assert!(CarriedSnapshots::decode(&damaged.encode()).is_err(), "damage {index}");
        }
    }

    #[tokio::test]
    async fn carries_the_versions_that_snapshots_see_and_no_others() {
        let mut database = Database::new().await;
        let fill = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40) \
                    INSERT INTO t SELECT i, randomblob(3000) FROM n";
        database.run(&format!("CREATE TABLE t(id INTEGER PRIMARY KEY, x); {fill}")).await;
        let partition = database.partition.clone();
        let begin = |origin| partition.snapshots.lock().begin(origin, [origin; 5], None).snapshot;
        let first = begin(1);
        // Two commits between the snapshots: no snapshot sees the version in between.
        database.run("UPDATE t SET x = randomblob(3000) WHERE id = 1").await;
        database.run("UPDATE t SET x = randomblob(3000) WHERE id = 1").await;
        let second = begin(2);
        database.run("UPDATE t SET x = randomblob(3000) WHERE id IN (1, 30)").await;
        let third = begin(3);
        assert!(partition.close_to_move());
        assert_eq!(begin(4), third, "it has begun too late");
        let all = partition.carried_snapshots(1 << 20).await.unwrap();
        let of = |carried: &CarriedSnapshots| -> Vec<(u64, Option<u64>)> {
            let number = |it: &CarriedTransaction| (it.origin, it.snapshot.map(|snapshot| snapshot.number));
            carried.transactions().iter().map(number).collect()
        };
        let numbers = [first, second, third].map(|snapshot| Some(snapshot.number));
        assert_eq!(of(&all), [(3, numbers[2]), (2, numbers[1]), (1, numbers[0])]);
        assert_eq!(all.released(), third.number);
        let mut expected = [0; PAGE_SIZE];
        let mut counts = Vec::new();
        for page in all.pages.iter().filter(|page| page.no != 1) {
            assert_eq!(page.newest, third.number);
            counts.push(page.older.len());
            for (snapshot, (_, bytes)) in [second, first].iter().zip(&page.older) {
                assert!(partition.copy_page(page.no, snapshot, &mut expected).await.unwrap());
                assert_eq!(**bytes.as_ref().unwrap(), expected);
            }
        }
        counts.sort_unstable();
        assert_eq!(counts, [1, 2], "row 30 has changed once, row 1 for both snapshots");

        // Without room for both versions of row 1 the oldest snapshot is left out.
        let limit = all.encoded_bytes() - PAGE_SIZE / 2;
        let some = partition.carried_snapshots(limit).await.unwrap();
        assert_eq!(of(&some), [(3, numbers[2]), (2, numbers[1]), (1, None)]);
        assert!(some.encoded_bytes() <= limit);
        assert!(some.pages.iter().all(|page| page.older.len() <= 1));
        let none = partition.carried_snapshots(4 * TRANSACTION_BYTES).await.unwrap();
        assert_eq!(of(&none), [(3, numbers[2]), (2, None), (1, None)]);
        assert!(none.pages.is_empty());
    }
}
