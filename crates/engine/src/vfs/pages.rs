//! The operations of the main file: the pages of a partition at a snapshot, overlaid with the
//! transaction's changes, from the SHARED lock that pins the snapshot to the sync that commits.
//! [`super::main_file`] has the callbacks for SQLite.

use std::ffi::c_int;

use fulmar_pages::{PAGE_SIZE, Page, PageNo};
use fulmar_store::Urgency;
use libsqlite3_sys as ffi;

use super::Link;
use super::main_file::page_at;
use crate::memory::Reservation;
use crate::page_memory::PageBytes;
use crate::partition::{PageVersion, Room, Snapshot, Turn, Waits, log_error, page_one};
use crate::transaction::{Conflict, Transaction};
use crate::{Error, spill};

#[cfg(target_arch = "x86_64")]
const CACHE_LINE_BYTES: usize = 64;

impl Link {
    /// Returns true if the transaction has recorded at most `pages` reads.
    pub(crate) fn reads_at_most(&self, pages: usize) -> bool {
        self.transaction.borrow().reads.len() <= pages
    }

    /// Returns true if a page that the transaction read has changed since its snapshot, so that its
    /// commit would conflict.
    pub(crate) fn is_stale(&self) -> bool {
        let transaction = self.transaction.borrow();
        let Some(snapshot) = transaction.snapshot else { return false };
        self.partition.current().number != snapshot.number
            && transaction
                .reads
                .find_changed(|page| !self.partition.unchanged_since(page, &snapshot))
                .is_some()
    }

    /// Advances the snapshot to the current version (or the newest durable one, see
    /// [`crate::transaction::Transaction`]) if nothing that the transaction read has changed.
    /// SQLite's cached pages stay valid, since they are among those. Only called between
    /// statements. Returns true if the transaction sees a version that was the newest during this
    /// call.
    pub(crate) fn advance(&self) -> bool {
        let mut transaction = self.transaction.borrow_mut();
        let Some(old) = transaction.snapshot else { return true };
        if self.partition.current().number == old.number {
            return true;
        }
        if self.partition.is_doomed(&old) {
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
        self.partition.unpin(old);
        transaction.snapshot = Some(new);
        transaction.cached = None;
        true
    }

    /// SHARED: pins a snapshot and returns a new change counter to SQLite.
    pub(super) fn begin(&self) -> c_int {
        let mut transaction = self.transaction.borrow_mut();
        if transaction.snapshot.is_none() {
            let snapshot = match transaction.current {
                true => self.partition.pin(),
                false => self.partition.pin_durable(),
            };
            transaction.page_count = snapshot.page_count;
            transaction.snapshot = Some(snapshot);
            if !transaction.lone || transaction.cached != Some(snapshot.number) {
                // Invalidates the cache. Incremented by two: a commit increments it by one, and
                // must differ from the next one.
                transaction.counter = transaction.counter.wrapping_add(2);
            } else if transaction.track_reads {
                transaction.reads.insert_everything();
            }
            transaction.cached = Some(snapshot.number);
            transaction.committed = None;
        }
        ffi::SQLITE_OK
    }

    /// RESERVED: the transaction is about to write. If its snapshot is stale, the conflict is
    /// reported now.
    pub(super) fn reserve(&self) -> c_int {
        let mut transaction = self.transaction.borrow_mut();
        transaction.cached = None;
        transaction.wrote = true;
        let Some(snapshot) = transaction.snapshot else { return ffi::SQLITE_OK };
        if self.partition.current().number == snapshot.number {
            return ffi::SQLITE_OK;
        }
        let changed = transaction.reads.find_changed(|page| !self.partition.unchanged_since(page, &snapshot));
        match changed {
            Some(page) => {
                transaction.conflict = Some(Conflict::PageChanged(page));
                ffi::SQLITE_BUSY_SNAPSHOT
            }
            None => ffi::SQLITE_OK,
        }
    }

    /// NONE: the transaction has ended, by a commit or not.
    pub(super) fn end(&self) {
        let mut transaction = self.transaction.borrow_mut();
        if let Some(snapshot) = transaction.snapshot.take() {
            transaction.seen = Some(snapshot);
            self.partition.unpin(snapshot);
        }
        let bytes = transaction.overlay.clear() + transaction.reads.clear();
        if bytes > 0 {
            self.held.give(bytes, self.partition.heap());
        }
    }

    /// The bytes of a page at the snapshot, read from the store if necessary; `None` if the page
    /// does not exist. Valid until the reader steps aside: the caller copies or fetches them
    /// before.
    fn page(&self, page: PageNo, snapshot: &Snapshot) -> Result<Option<&Page>, c_int> {
        self.reader.enter();
        // SAFETY: this link's transaction pins the snapshot until SQLite unlocks, and SQLite does
        // not use its reads beyond that.
        let Some(version) = (unsafe { self.partition.find(page, snapshot) }) else { return Ok(None) };
        // SAFETY: the reader is inside.
        match unsafe { version.data() } {
            Some(data) => {
                version.touch();
                self.reader.hit();
                Ok(Some(data))
            }
            None => self.load(page, version, snapshot).map(Some),
        }
    }

    #[cold]
    fn load<'a>(
        &'a self,
        page: PageNo,
        version: &'a PageVersion,
        snapshot: &Snapshot,
    ) -> Result<&'a Page, c_int> {
        let ahead = self.ahead.missed(page);
        self.yield_if_due();
        loop {
            match self.wait(self.partition.load(page, version, ahead, snapshot)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    self.transaction.borrow_mut().failure = Some(error);
                    return Err(ffi::SQLITE_IOERR_READ);
                }
                // The session knows that it cancelled the statement; SQLite only has to unwind.
                Err(super::Interrupted) => return Err(ffi::SQLITE_IOERR_READ),
            }
            self.reader.enter();
            // SAFETY: the reader is inside. If the page was evicted before it entered, it is read
            // again.
            if let Some(data) = unsafe { version.data() } {
                return Ok(data);
            }
        }
    }

    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> c_int {
        if self.yield_between_pages() {
            return ffi::SQLITE_IOERR_READ;
        }
        let page = page_at(offset);
        let within = (offset % PAGE_SIZE as u64) as usize;
        if within + out.len() > PAGE_SIZE {
            return ffi::SQLITE_IOERR_READ;
        }
        let snapshot = {
            let mut transaction = self.transaction.borrow_mut();
            let Some(snapshot) = transaction.snapshot else { return self.read_unlocked(within, out) };
            if transaction.track_reads {
                transaction.reads.insert(page, |bytes| self.held.take(bytes, self.partition.heap()));
            }
            if transaction.overlay.contains(page) {
                return self.read_own(&mut transaction, page, within, out);
            }
            snapshot
        };
        match self.page(page, &snapshot) {
            Ok(Some(data)) => {
                out.copy_from_slice(&data[within..within + out.len()]);
                if page == 1 {
                    patch_counter(self.transaction.borrow().counter, within, out);
                }
                ffi::SQLITE_OK
            }
            Ok(None) => {
                out.fill(0);
                ffi::SQLITE_IOERR_SHORT_READ
            }
            Err(code) => code,
        }
    }

    /// Reads a page that the transaction has changed.
    fn read_own(&self, transaction: &mut Transaction, page: PageNo, within: usize, out: &mut [u8]) -> c_int {
        if let Some(own) = transaction.overlay.in_memory(page) {
            out.copy_from_slice(&own[within..within + out.len()]);
            return ffi::SQLITE_OK;
        }
        let mut own = Box::new([0; PAGE_SIZE]);
        match self.wait_for_disk(transaction.overlay.read(page, &mut own)) {
            Ok(Ok(_)) => {
                out.copy_from_slice(&own[within..within + out.len()]);
                return ffi::SQLITE_OK;
            }
            Ok(Err(cause)) => transaction.failure = Some(spill::error(&cause)),
            Err(super::Interrupted) => {}
        }
        ffi::SQLITE_IOERR_READ
    }

    /// Reads page 1 without a lock: SQLite reads the header before it locks, when it opens a file.
    fn read_unlocked(&self, within: usize, out: &mut [u8]) -> c_int {
        let snapshot = self.partition.pin();
        let code = match self.page(1, &snapshot) {
            Ok(Some(data)) => {
                out.copy_from_slice(&data[within..within + out.len()]);
                ffi::SQLITE_OK
            }
            Ok(None) => {
                out.fill(0);
                ffi::SQLITE_IOERR_SHORT_READ
            }
            Err(code) => code,
        };
        self.partition.unpin(snapshot);
        code
    }

    pub(super) fn fetch(&self, page: PageNo) -> Result<*const u8, c_int> {
        if self.yield_between_pages() {
            return Err(ffi::SQLITE_IOERR_READ);
        }
        let snapshot = {
            let mut transaction = self.transaction.borrow_mut();
            let Some(snapshot) = transaction.snapshot else { return Ok(std::ptr::null()) };
            if transaction.overlay.contains(page) {
                return Ok(std::ptr::null());
            }
            if transaction.track_reads {
                transaction.reads.insert(page, |bytes| self.held.take(bytes, self.partition.heap()));
            }
            snapshot
        };
        Ok(self.page(page, &snapshot)?.map_or(std::ptr::null(), |data| {
            prefetch(data);
            self.reader.fetched(data);
            data.as_ptr()
        }))
    }

    /// The version of SQLite's cache after a commit: the commit's, if no other commit came in
    /// between.
    fn cache_version(&self, transaction: &Transaction) -> Option<u64> {
        let before = transaction.snapshot?.number;
        let after = transaction.committed.map_or(before, |committed| committed.snapshot.number);
        (after <= before + 1 && !self.bump_schema.get()).then_some(after)
    }

    pub(super) fn write(&self, page: PageNo, data: &Page) -> c_int {
        self.yield_between_pages();
        let mut transaction = self.transaction.borrow_mut();
        let may = transaction.may_grow_to(page)
            && (transaction.overlay.contains(page)
                || transaction.may_hold(PAGE_SIZE as u64, self.buffered_bytes.get()));
        if !may {
            return ffi::SQLITE_IOERR_WRITE;
        }
        let charge = |bytes| self.held.take(bytes, self.partition.heap());
        let mut written = transaction.overlay.write(page, data, charge);
        if written.is_ok() && transaction.overlay.is_full() {
            if !transaction.keeps_within(self.partition.node.disk.admit(false)) {
                return ffi::SQLITE_IOERR_WRITE;
            }
            match self.wait_for_disk(transaction.overlay.relieve()) {
                Ok(relieved) => written = relieved,
                Err(super::Interrupted) => return ffi::SQLITE_IOERR_WRITE,
            }
        }
        match written {
            Ok(()) => {
                transaction.page_count = transaction.page_count.max(page);
                ffi::SQLITE_OK
            }
            Err(e) => {
                transaction.spill_failed(&e);
                ffi::SQLITE_IOERR_WRITE
            }
        }
    }

    /// Commits, unless this is the sync of a rollback.
    pub(super) fn sync(&self) -> c_int {
        let mut transaction = self.transaction.borrow_mut();
        if transaction.committed.is_some() {
            // SQLite rolls back a transaction that is committed already: the temporary table's part
            // of the commit failed after the partition's.
            return ffi::SQLITE_OK;
        }
        let mut page_one = match transaction.overlay.in_memory(1) {
            Some(page) if page_one::counter(page) != transaction.counter => PageBytes::copy_of(page),
            _ => return ffi::SQLITE_OK,
        };
        if self.bump_schema.get() {
            page_one::raise_schema_cookie(&mut page_one);
        }
        // Pages at the end that were allocated and freed again were never written.
        if !transaction.may_grow_to(page_one::page_count(&page_one)) {
            return ffi::SQLITE_IOERR;
        }
        let page_count = page_one::page_count(&page_one);
        let mut large = None;
        if transaction.overlay.has_spilled() {
            let charge = |bytes| self.held.take(bytes, self.partition.heap());
            let writing = self.partition.write_if_large(&mut transaction.overlay, page_count, charge);
            match self.wait(writing) {
                Ok(Ok(written)) => large = written,
                Ok(Err(error)) => {
                    transaction.failure = Some(error);
                    return ffi::SQLITE_IOERR;
                }
                Err(super::Interrupted) => return ffi::SQLITE_INTERRUPT,
            }
        }
        // The statement was abandoned: its client has received the cancellation error.
        if !self.cancel.borrow().may_finish() {
            return ffi::SQLITE_INTERRUPT;
        }
        self.reader.enter();
        match self.partition.commit(&mut transaction, page_one, large, self) {
            Ok(committed) => {
                transaction.committed = committed;
                transaction.cached = self.cache_version(&transaction);
                // SQLite has written the same into its page 1.
                transaction.counter = transaction.counter.wrapping_add(1);
                ffi::SQLITE_OK
            }
            Err(crate::partition::Refused::Conflict(conflict)) => {
                transaction.conflict = Some(conflict);
                ffi::SQLITE_BUSY_SNAPSHOT
            }
            Err(crate::partition::Refused::Failed(error)) => {
                transaction.failure = Some(error);
                ffi::SQLITE_IOERR
            }
        }
    }
}

impl Waits for Link {
    fn for_room(&self, room: Room) -> Result<(), Error> {
        let node = &self.partition.node;
        let waited = self.wait(async {
            match room {
                Room::Log(bytes) => {
                    self.partition.log.wait_for_space(bytes, Urgency::Immediate).await.map_err(log_error)
                }
                Room::Memory(bytes, grows) => {
                    node.room_for_changes(bytes, grows).await.map(Reservation::keep)
                }
            }
        });
        waited.unwrap_or_else(|super::Interrupted| Err(self.cancel.borrow().error()))
    }

    fn for_turn(&self) -> Result<Turn, Error> {
        self.wait(self.partition.turns.take()).map_err(|super::Interrupted| self.cancel.borrow().error())
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
