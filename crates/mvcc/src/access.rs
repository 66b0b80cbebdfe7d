//! A partition's pages as SQLite sees them: at a snapshot, overlaid with the transaction's changes,
//! from the SHARED lock that pins the snapshot to the sync that commits.

use std::cell::RefCell;
use std::pin::pin;
use std::sync::Arc;

use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use fulmar_sqlite::{Error, Interrupted, Link, Pages, Refusal, TemporaryFiles, TransactionOutcome, spill};
use fulmar_store::{Urgency, failpoint};
use futures::future::{Either, select};

use crate::error::{log_error, moved_error, snapshot_too_old};
use crate::memory::Reservation;
use crate::page_memory::PageBytes;
use crate::partition::{
    CommitError, CommitResource, CommitWaiter, Draft, PageVersion, Partition, Readahead, Reader, Snapshot,
    Turn, page_one,
};
use crate::transaction::{Conflict, Transaction};

#[cfg(target_arch = "x86_64")]
const CACHE_LINE_BYTES: usize = 64;

/// The pages of a partition, as one connection's transactions read and change them.
pub struct PartitionPages {
    partition: Arc<Partition>,
    /// Inside the partition's residence while the fiber runs.
    reader: Reader,
    readahead: Readahead,
    transaction: RefCell<Transaction>,
}

impl PartitionPages {
    /// Creates the pages for a connection. Changed pages beyond the memory limit go to `files`.
    pub fn new(partition: Arc<Partition>, files: TemporaryFiles) -> Self {
        PartitionPages {
            reader: Reader::new(partition.residency.clone()),
            readahead: Readahead::default(),
            transaction: RefCell::new(Transaction::new(files)),
            partition,
        }
    }

    /// The partition.
    pub fn partition(&self) -> &Arc<Partition> {
        &self.partition
    }

    /// The transaction.
    pub fn transaction(&self) -> &RefCell<Transaction> {
        &self.transaction
    }

    /// The transactions of the connection build a database that is not committed.
    pub fn set_drafts(&self) {
        let mut transaction = self.transaction.borrow_mut();
        (transaction.drafts, transaction.track_reads) = (true, false);
    }

    /// Takes the draft of the last transaction out.
    pub fn take_draft(&self) -> Option<Draft> {
        self.transaction.borrow_mut().draft.take()
    }

    /// Returns true if the last statement was ended because its snapshot was held for too long.
    pub fn has_expired(&self) -> bool {
        self.transaction.borrow().conflict == Some(Conflict::Expired)
    }

    /// Returns true if the transaction has recorded at most `pages` reads.
    pub fn reads_at_most(&self, pages: usize) -> bool {
        self.transaction.borrow().reads.len() <= pages
    }

    /// Returns true if a page that the transaction read has changed since its snapshot, so that its
    /// commit would conflict.
    pub fn is_stale(&self) -> bool {
        let transaction = self.transaction.borrow();
        let Some(snapshot) = transaction.snapshot else { return false };
        self.partition.current().number != snapshot.number
            && transaction
                .reads
                .find_changed(|page| !self.partition.unchanged_since(page, &snapshot))
                .is_some()
    }

    /// Advances the snapshot to the current version (or the newest durable one, see
    /// [`Transaction`]) if nothing that the transaction read has changed.
    /// SQLite's cached pages stay valid, since they are among those. Only called between
    /// statements. Returns true if the transaction sees a version that was the newest during this
    /// call. Never advances while a transaction is repeated at a carried snapshot.
    pub fn advance(&self) -> bool {
        let mut transaction = self.transaction.borrow_mut();
        let Some(old) = transaction.snapshot else { return true };
        if transaction.is_repeated {
            return false;
        }
        if self.partition.current().number == old.number {
            return true;
        }
        if self.partition.is_discarded(&old) {
            return false;
        }
        let new = match transaction.current {
            true => self.partition.pin(),
            false => self.partition.pin_durable(),
        };
        if new.number <= old.number {
            self.partition.unpin(new);
            return true;
        }
        let changed = transaction.reads.find_changed(|page| !self.partition.unchanged_since(page, &old));
        let unchanged = changed.is_none()
            && self.partition.same_schema_page(&old, &new)
            && self.partition.same_allocation(&old, &new);
        if !unchanged {
            self.partition.unpin(new);
            return false;
        }
        if !self.partition.advance_snapshot(&transaction, old, new) {
            return false;
        }
        transaction.snapshot = Some(new);
        transaction.cached = None;
        true
    }

    /// The bytes of a page at the snapshot, read from the store if necessary; `None` if the page
    /// does not exist. Valid until the reader steps aside: the caller copies or fetches them
    /// before.
    fn page(&self, link: &Link, page: PageNo, snapshot: &Snapshot) -> Result<Option<&Page>, Refusal> {
        self.reader.enter();
        // SAFETY: the transaction pins the snapshot until SQLite unlocks, and SQLite does
        // not use its reads beyond that.
        let Some(version) = (unsafe { self.partition.find(page, snapshot) }) else { return Ok(None) };
        // SAFETY: the reader is inside.
        match unsafe { version.data() } {
            Some(data) => {
                version.touch();
                self.reader.hit();
                Ok(Some(data))
            }
            None => self.load(link, page, version, snapshot).map(Some),
        }
    }

    #[cold]
    fn load<'a>(
        &'a self,
        link: &Link,
        page: PageNo,
        version: &'a PageVersion,
        snapshot: &Snapshot,
    ) -> Result<&'a Page, Refusal> {
        let ahead = self.readahead.record_miss(page);
        link.yield_if_due();
        loop {
            match link.wait(self.partition.load(page, version, ahead, snapshot)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(Refusal::Failed(error)),
                // The session knows that it cancelled the statement; SQLite only has to unwind.
                Err(Interrupted) => return Err(Refusal::Interrupted),
            }
            self.reader.enter();
            // SAFETY: the reader is inside. If the page was evicted before it entered, it is read
            // again.
            if let Some(data) = unsafe { version.data() } {
                return Ok(data);
            }
        }
    }

    /// Reads a page that the transaction has changed.
    fn read_own(
        link: &Link,
        transaction: &mut Transaction,
        page: PageNo,
        within: usize,
        out: &mut [u8],
    ) -> Result<bool, Refusal> {
        if let Some(own) = transaction.overlay.in_memory(page) {
            out.copy_from_slice(&own[within..within + out.len()]);
            return Ok(true);
        }
        let mut own = Box::new([0; PAGE_SIZE]);
        match link.wait_for_disk(transaction.overlay.read(page, &mut own)) {
            Ok(Ok(_)) => {
                out.copy_from_slice(&own[within..within + out.len()]);
                Ok(true)
            }
            Ok(Err(cause)) => Err(Refusal::Failed(spill::error(&cause))),
            Err(Interrupted) => Err(Refusal::Interrupted),
        }
    }

    /// Reads page 1 without a lock: SQLite reads the header before it locks, when it opens a file.
    fn read_unlocked(&self, link: &Link, within: usize, out: &mut [u8]) -> Result<bool, Refusal> {
        let snapshot = self.partition.pin();
        let read = self
            .page(link, 1, &snapshot)
            .map(|page| page.map(|data| out.copy_from_slice(&data[within..within + out.len()])).is_some());
        self.partition.unpin(snapshot);
        read
    }

    /// The version of SQLite's cache after a commit: the commit's, if no other commit came in
    /// between.
    fn cache_version(link: &Link, transaction: &Transaction) -> Option<u64> {
        let before = transaction.snapshot?.number;
        let after = transaction.committed.map_or(before, |committed| committed.snapshot.number);
        (after <= before + 1 && !link.bump_schema.get()).then_some(after)
    }
}

impl Pages for PartitionPages {
    fn begin(&self) {
        failpoint::hit_in(failpoint::STATEMENT, self.partition.id.0);
        let mut transaction = self.transaction.borrow_mut();
        if transaction.snapshot.is_none() {
            let begun = self.partition.begin_snapshot(&transaction);
            let snapshot = begun.snapshot;
            transaction.is_repeated = begun.is_carried && !transaction.single_statement;
            transaction.is_late = begun.is_late;
            transaction.page_count = snapshot.page_count;
            transaction.snapshot = Some(snapshot);
            if !transaction.single_statement || transaction.cached != Some(snapshot.number) {
                // Invalidates the cache. Incremented by two: a commit increments it by one, and
                // must differ from the next one.
                transaction.counter = transaction.counter.wrapping_add(2);
            } else if transaction.track_reads {
                transaction.reads.insert_everything();
            }
            transaction.cached = Some(snapshot.number);
            transaction.committed = None;
        }
    }

    /// If the snapshot is stale, the conflict is reported now.
    fn reserve(&self) -> Result<(), Refusal> {
        let mut transaction = self.transaction.borrow_mut();
        transaction.cached = None;
        transaction.wrote = true;
        let Some(snapshot) = transaction.snapshot else { return Ok(()) };
        if self.partition.current().number == snapshot.number {
            return Ok(());
        }
        let changed = transaction.reads.find_changed(|page| !self.partition.unchanged_since(page, &snapshot));
        match changed {
            Some(page) => {
                transaction.conflict = Some(Conflict::PageChanged(page));
                Err(Refusal::Conflict)
            }
            None => Ok(()),
        }
    }

    fn commit(&self, link: &Link) -> Result<(), Refusal> {
        let mut transaction = self.transaction.borrow_mut();
        if transaction.committed.is_some() {
            // SQLite rolls back a transaction that is committed already: the temporary table's part
            // of the commit failed after the partition's.
            return Ok(());
        }
        let mut page_one = match transaction.overlay.in_memory(1) {
            Some(page) if page_one::counter(page) != transaction.counter => PageBytes::copy_of(page),
            _ => return Ok(()),
        };
        if link.bump_schema.get() {
            page_one::raise_schema_cookie(&mut page_one);
        }
        let page_count = page_one::page_count(&page_one);
        // Pages at the end that were allocated and freed again were never written.
        if !link.may_grow(transaction.first_page_count(), page_count) {
            return Err(Refusal::Recorded);
        }
        if transaction.drafts {
            let overlay = transaction.overlay.take();
            transaction.draft = Some(Draft { overlay, page_one, page_count });
            return Ok(());
        }
        let mut large = None;
        if transaction.overlay.has_spilled() {
            let charge = |bytes| link.charge(bytes);
            let writing = self.partition.write_if_large(&mut transaction.overlay, page_count, charge);
            match link.wait(writing) {
                Ok(Ok(written)) => large = written,
                Ok(Err(error)) => return Err(Refusal::Failed(error)),
                Err(Interrupted) => return Err(Refusal::Interrupted),
            }
        }
        // The statement was abandoned: its client has received the cancellation error.
        if !link.cancel.borrow().may_finish() {
            return Err(Refusal::Interrupted);
        }
        self.reader.enter();
        let waits = CommitWaits { partition: &self.partition, link };
        match self.partition.commit(&mut transaction, page_one, large, &waits) {
            Ok(committed) => {
                transaction.committed = committed;
                transaction.cached = PartitionPages::cache_version(link, &transaction);
                // SQLite has written the same into its page 1.
                transaction.counter = transaction.counter.wrapping_add(1);
                Ok(())
            }
            Err(CommitError::Conflict(conflict)) => {
                transaction.conflict = Some(conflict);
                Err(Refusal::Conflict)
            }
            Err(CommitError::Failed(error)) => Err(Refusal::Failed(error)),
        }
    }

    fn end(&self, link: &Link) {
        let mut transaction = self.transaction.borrow_mut();
        if let Some(snapshot) = transaction.snapshot.take() {
            transaction.seen = Some(snapshot);
            self.partition.end_snapshot(&transaction, snapshot);
            transaction.is_repeated = false;
        }
        let bytes = transaction.overlay.clear() + transaction.reads.clear();
        if bytes > 0 {
            link.release(bytes);
        }
    }

    fn page_count(&self) -> u32 {
        let transaction = self.transaction.borrow();
        match transaction.snapshot {
            Some(_) => transaction.page_count,
            None => self.partition.current().page_count,
        }
    }

    fn read(&self, link: &Link, page: PageNo, within: usize, out: &mut [u8]) -> Result<bool, Refusal> {
        let snapshot = {
            let mut transaction = self.transaction.borrow_mut();
            let Some(snapshot) = transaction.snapshot else {
                return self.read_unlocked(link, within, out);
            };
            if transaction.track_reads {
                transaction.reads.insert(page, |bytes| link.charge(bytes));
            }
            if transaction.overlay.contains(page) {
                return PartitionPages::read_own(link, &mut transaction, page, within, out);
            }
            snapshot
        };
        let Some(data) = self.page(link, page, &snapshot)? else { return Ok(false) };
        out.copy_from_slice(&data[within..within + out.len()]);
        if page == 1 {
            patch_counter(self.transaction.borrow().counter, within, out);
        }
        Ok(true)
    }

    fn fetch(&self, link: &Link, page: PageNo) -> Result<Option<&Page>, Refusal> {
        let snapshot = {
            let mut transaction = self.transaction.borrow_mut();
            let Some(snapshot) = transaction.snapshot else { return Ok(None) };
            if transaction.overlay.contains(page) {
                return Ok(None);
            }
            if transaction.track_reads {
                transaction.reads.insert(page, |bytes| link.charge(bytes));
            }
            snapshot
        };
        let fetched = self.page(link, page, &snapshot)?;
        if let Some(data) = fetched {
            prefetch(data);
            self.reader.fetched(data);
        }
        Ok(fetched)
    }

    fn unfetch(&self, page: *const Page) {
        self.reader.released(page);
    }

    fn write(&self, link: &Link, page: PageNo, data: &Page) -> Result<(), Refusal> {
        let mut transaction = self.transaction.borrow_mut();
        let may = link.may_grow(transaction.first_page_count(), page)
            && (transaction.overlay.contains(page)
                || link.may_hold(transaction.changed_bytes(), PAGE_SIZE as u64));
        if !may {
            return Err(Refusal::Recorded);
        }
        let mut written = transaction.overlay.write(page, data, |bytes| link.charge(bytes));
        if written.is_ok() && transaction.overlay.is_full() {
            if !link.keeps_within(self.partition.node.disk.admit(false)) {
                return Err(Refusal::Recorded);
            }
            match link.wait_for_disk(transaction.overlay.flush_buffer()) {
                Ok(relieved) => written = relieved,
                Err(Interrupted) => return Err(Refusal::Interrupted),
            }
        }
        match written {
            Ok(()) => {
                transaction.page_count = transaction.page_count.max(page);
                Ok(())
            }
            Err(cause) => {
                link.spill_failed(&cause);
                Err(Refusal::Recorded)
            }
        }
    }

    fn truncate(&self, page_count: u32) {
        let mut transaction = self.transaction.borrow_mut();
        transaction.overlay.truncate(page_count);
        transaction.page_count = page_count;
    }

    fn step_aside(&self) {
        self.reader.step_aside();
    }

    fn changed_bytes(&self) -> u64 {
        self.transaction.borrow().changed_bytes()
    }

    /// Records the expiry as the transaction's conflict.
    fn is_expired(&self) -> bool {
        let mut transaction = self.transaction.borrow_mut();
        let expired = transaction.snapshot.is_some_and(|snapshot| self.partition.is_expired(&snapshot));
        if expired {
            transaction.conflict = Some(Conflict::Expired);
        }
        expired
    }

    fn failure(&self) -> Option<Error> {
        self.has_expired().then(|| match self.partition.has_moved() {
            true => moved_error(),
            false => snapshot_too_old(),
        })
    }

    fn has_conflicted(&self) -> bool {
        self.transaction.borrow().conflict.is_some()
    }

    fn has_committed(&self) -> bool {
        self.transaction.borrow().committed.is_some()
    }

    fn take_wrote(&self) -> bool {
        std::mem::take(&mut self.transaction.borrow_mut().wrote)
    }

    fn admit_files(&self) -> fulmar_sqlite::Result<()> {
        self.partition.node.disk.admit(false)
    }

    fn check_writable(&self) -> fulmar_sqlite::Result<()> {
        self.partition.write_error().map_or(Ok(()), Err)
    }

    fn new_transaction_id(&self) -> u64 {
        match self.transaction.borrow().assigned_id {
            0 => self.partition.node.clock.transaction_id(),
            assigned => assigned,
        }
    }

    fn set_transaction_id(&self, id: u64) {
        self.transaction.borrow_mut().id = id;
    }

    fn outcome(&self, link: &Link, id: u64, decides: bool) -> Result<TransactionOutcome, Refusal> {
        match link.wait(self.partition.resolve_outcome(id, decides)) {
            Ok(asked) => asked.map_err(Refusal::Failed),
            Err(Interrupted) => Err(Refusal::Interrupted),
        }
    }
}

/// How a commit waits, on its fiber.
struct CommitWaits<'a> {
    partition: &'a Partition,
    link: &'a Link,
}

impl CommitWaits<'_> {
    fn cancelled(&self) -> Error {
        self.link.cancel.borrow().error()
    }
}

impl CommitWaiter for CommitWaits<'_> {
    fn wait_for_resource(&self, room: CommitResource) -> Result<(), Error> {
        let waited = self.link.wait(async {
            match room {
                CommitResource::Log(bytes) => {
                    self.partition.log.wait_for_space(bytes, Urgency::Immediate).await.map_err(log_error)
                }
                CommitResource::Memory(bytes, grows) => {
                    self.partition.node.room_for_changes(bytes, grows).await.map(Reservation::keep)
                }
            }
        });
        waited.unwrap_or_else(|Interrupted| Err(self.cancelled()))
    }

    fn wait_for_turn(&self) -> Result<Turn, Error> {
        let taken = self.link.wait(async {
            let (turn, moved) = (pin!(self.partition.turns.take()), pin!(self.partition.wait_moved()));
            match select(turn, moved).await {
                Either::Left((turn, _)) => Ok(turn),
                Either::Right(_) => Err(moved_error()),
            }
        });
        taken.unwrap_or_else(|Interrupted| Err(self.cancelled()))
    }
}

/// Replaces the change counter in the bytes that SQLite reads from page 1 by the virtual one.
fn patch_counter(counter: u32, within: usize, out: &mut [u8]) {
    let bytes = counter.to_be_bytes();
    for field in [page_one::COUNTER.start, page_one::VALID_FOR.start] {
        for (i, byte) in bytes.iter().enumerate() {
            if let Some(slot) = (field + i).checked_sub(within).and_then(|at| out.get_mut(at)) {
                *slot = *byte;
            }
        }
    }
}

/// Prefetches a page into the CPU cache before SQLite's binary search in it, which would wait for
/// one cache line after another. In a partition that is larger than the CPU caches this is most of
/// the time of a point read.
fn prefetch(page: &Page) {
    #[cfg(target_arch = "x86_64")]
    for line in page.chunks(CACHE_LINE_BYTES) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the address is valid; nothing is read.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = page; // no stable intrinsic
}
