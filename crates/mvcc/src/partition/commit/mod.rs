//! The commit queue: optimistic concurrency control with backward validation. A transaction's
//! changed pages become the next version, or the commit conflicts.
//!
//! # Steps of a commit
//! 1. Outside the commit lock: changed pages are compared with the transaction's snapshot.
//!    Unchanged ones are dropped; the diffs of the others are encoded into a log record.
//! 2. Under the commit lock:
//!    - Validation: every page that the transaction read must still be the newest version (page 1
//!      by field, see below).
//!    - The record gets its number and goes into the log's buffer. Space is reserved before. If the
//!      log has no space at the moment, the commit waits outside the lock, not yet visible to any
//!      reader, and retries.
//!    - The pages go to the front of their version chains, and the version becomes current.
//! 3. Outside the lock again: the answer waits until the log is durable up to the record.
//!
//! Records are in the log in the order of the partition's versions, since both are assigned under
//! the lock.
//!
//! # Why this is serializable
//! A transaction that commits as number n read only pages that did not change between its snapshot
//! and n - 1. It would have read the same had it run alone between n - 1 and n. Ranges are covered:
//! SQLite finds rows through pages (b-tree interior and leaf pages) that an insertion into the
//! range must change. A transaction that wrote nothing ran alone at its snapshot.
//!
//! # Page 1 by field
//! Page 1 holds counters that every commit changes, so it is validated by field:
//!
//! - Bytes 24-27 and 92-99 (change counter, version numbers) are no transaction's data: the commit
//!   sets them.
//! - Bytes 28-39 (file size, head and length of the free list) conflict only between two
//!   transactions that both allocate or free pages.
//! - The rest (schema cookie, the root page of `sqlite_schema` ...) conflicts with every
//!   transaction, since every statement depends on the schema.
//!
//! # Garbage and discards
//! A replaced version is freed once no snapshot sees it and the version that replaced it is
//! durable. Until then a failed log write may need it back, and new readers begin at it.
//! `Commits::recent` holds, oldest first, the commits whose replaced versions have not been
//! freed.

mod decide;
mod garbage;
pub mod page_one;

use std::sync::atomic::Ordering;

use fulmar_pages::record::{Patch, RecordBuilder, RecordHeader, RecordKind};
use fulmar_pages::{Outcome, PAGE_SIZE, Page, PageNo, Version};
use fulmar_sqlite::{Error, spill, sqlstate};
use fulmar_store::LogError;

use super::commits::{Commits, UncollectedCommit};
use super::{LargeCommit, Partition, Snapshot, Turn};
use crate::error::{decided_aborted, log_error};
use crate::memory::Tally;
use crate::page_memory::PageBytes;
use crate::store::Frame;
use crate::transaction::{Committed, Conflict, Transaction};

/// A resource that a commit waits for before it becomes visible.
pub enum CommitResource {
    /// Space in the log for a record of this many bytes.
    Log(usize),
    /// Memory for this many bytes of changed pages, and whether the database grows. Reserved when
    /// the wait ends.
    Memory(u64, bool),
}

/// Why a commit was rejected.
pub enum CommitError {
    /// The transaction can be replayed on a newer snapshot.
    Conflict(Conflict),
    /// The transaction cannot be retried by the engine.
    Failed(Error),
}

/// Why changes were not installed.
enum NotInstalled {
    Rejected(CommitError),
    /// The log has no space for a record of this many bytes at the moment. The changes are
    /// untouched.
    LogBusy(usize),
    /// Another transaction holds an exclusive turn. The changes are untouched.
    Excluded,
}

impl From<CommitError> for NotInstalled {
    fn from(refused: CommitError) -> NotInstalled {
        NotInstalled::Rejected(refused)
    }
}

/// How a commit waits, on its fiber.
pub trait CommitWaiter {
    /// Waits until the resource is available.
    fn wait_for_resource(&self, resource: CommitResource) -> Result<(), Error>;

    /// Waits for the partition's turn.
    fn wait_for_turn(&self) -> Result<Turn, Error>;
}

/// The pages in which a version differs from the one before.
pub(super) struct NewPages {
    pub pages: Vec<(PageNo, PageBytes)>,
    /// Pages that are in the store already.
    pub frames: Vec<(PageNo, Frame)>,
    /// Pages that do not exist until they are written, although they are within the size of the
    /// database.
    pub ended: Vec<PageNo>,
}

/// A transaction's changes, ready to be installed.
struct Changes {
    record: RecordBuilder,
    pages: Vec<(PageNo, PageBytes)>,
    /// Pages that are in the store already.
    large: Option<LargeCommit>,
    /// Page 1 as the transaction leaves it; not in `pages`.
    page_one: PageBytes,
    changed_allocation: bool,
    changed_rest: bool,
}

impl Partition {
    /// Makes the transaction's changes the next version. Returns `None` if nothing has changed.
    ///
    /// - `page_one` is page 1 as SQLite wrote it.
    /// - `large` holds the other pages if they have been written to the store.
    /// - `waits` waits for space in the log, for memory, and for the end of another transaction's
    ///   exclusive turn. None of these is a conflict.
    ///
    /// The caller is inside the residency until the commit waits. After a wait only page 1 is read,
    /// which is always in memory.
    pub(crate) fn commit(
        &self,
        transaction: &mut Transaction,
        page_one: PageBytes,
        large: Option<LargeCommit>,
        waiter: &impl CommitWaiter,
    ) -> Result<Option<Committed>, CommitError> {
        let Some(snapshot) = transaction.snapshot else {
            return Err(CommitError::Failed(Error::new(sqlstate::INTERNAL, "commit without a snapshot")));
        };
        let mut changes = self.collect_changes(transaction, &snapshot, page_one, large)?;
        let same_pages = changes.pages.is_empty() && changes.large.is_none();
        if same_pages && !changes.changed_allocation && !changes.changed_rest && transaction.id == 0 {
            return Ok(None);
        }
        let bytes = (changes.pages.len() as u64 + 1) * PAGE_SIZE as u64;
        let grows = page_one::page_count(&changes.page_one) > snapshot.page_count;
        self.node.disk.admit(grows).map_err(CommitError::Failed)?;
        let reserve = || self.node.memory.reserve_unwritten(bytes, grows);
        // Versions that the last commits replaced are freed by the next commit, which is this one.
        let reserved = reserve() || {
            self.sweep();
            reserve()
        };
        if !reserved {
            waiter.wait_for_resource(CommitResource::Memory(bytes, grows)).map_err(CommitError::Failed)?;
        }
        let mut turn = None;
        let result = loop {
            match self.install(transaction, &snapshot, &mut changes, bytes) {
                Ok(committed) => break Ok(Some(committed)),
                Err(NotInstalled::Rejected(refused)) => break Err(refused),
                Err(NotInstalled::LogBusy(bytes)) => {
                    if let Err(error) = waiter.wait_for_resource(CommitResource::Log(bytes)) {
                        break Err(CommitError::Failed(error));
                    }
                }
                Err(NotInstalled::Excluded) => {
                    drop(turn.take());
                    match waiter.wait_for_turn() {
                        Ok(taken) => turn = Some(taken),
                        Err(error) => break Err(CommitError::Failed(error)),
                    }
                }
            }
        };
        drop(turn);
        match result {
            Ok(_) => _ = self.stats.commits.fetch_add(1, Ordering::Relaxed),
            Err(_) => self.node.memory.release(bytes),
        }
        result
    }

    /// Step 1: collects and encodes the changes.
    fn collect_changes(
        &self,
        transaction: &mut Transaction,
        snapshot: &Snapshot,
        page_one: PageBytes,
        large: Option<LargeCommit>,
    ) -> Result<Changes, CommitError> {
        let mut record = RecordBuilder::new(self.node.buffers.take());
        record.begin(&RecordHeader {
            kind: RecordKind::Commit,
            partition: self.id,
            version: Version { lineage: self.lineage, epoch: self.epoch, number: 0 },
            transaction: transaction.recorded_id(),
            timestamp: 0,
            page_count: 0,
            previous: None,
        });
        if let Some(large) = &large {
            record.push_segment(large.segment);
        }
        let mut pages = Vec::with_capacity(transaction.overlay.len());
        let page_count = page_one::page_count(&page_one);
        let drained = transaction.overlay.drain();
        for (no, data) in drained.map_err(|cause| CommitError::Failed(spill::error(&cause)))? {
            if no == 1 || no > page_count {
                continue;
            }
            // SAFETY: the transaction's snapshot is pinned, and its reader is inside. If the page
            // has been evicted since it was read, the record holds the whole page.
            let base = unsafe { self.resident(no, snapshot) };
            if base.is_some_and(|base| *base == *data) {
                // Nothing to write, but the page must not change before the commit: it may have
                // been taken from the free list without being read.
                transaction.reads.insert_unchanged(no);
                continue;
            }
            record.push_page(no, base, &data);
            pages.push((no, data));
        }
        // SAFETY: as above.
        let base_one = unsafe { self.resident(1, snapshot) }.unwrap_or(&[0; PAGE_SIZE]);
        let changed_allocation = !page_one::same_allocation(base_one, &page_one);
        let changed_rest = !page_one::same_rest(base_one, &page_one);
        Ok(Changes { record, pages, large, page_one, changed_allocation, changed_rest })
    }

    /// Step 2: validation, log, pages. `reserved_bytes` of memory are reserved for the pages.
    fn install(
        &self,
        transaction: &mut Transaction,
        snapshot: &Snapshot,
        changes: &mut Changes,
        reserved_bytes: u64,
    ) -> Result<Committed, NotInstalled> {
        let Changes { record, pages, large, page_one, .. } = changes;
        let (changed_allocation, changed_rest) = (changes.changed_allocation, changes.changed_rest);
        let mut commits = self.commits.lock();
        if let Some(error) = self.commit_error() {
            return Err(CommitError::Failed(error).into());
        }
        let holder = self.turns.holder();
        if holder != 0 && holder != transaction.turn {
            return Err(NotInstalled::Excluded);
        }
        let current = self.validate(transaction, snapshot)?;
        // A page that was written without being read (taken from the free list) is covered by the
        // allocation fields of page 1. But its diff is relative to the snapshot's version, so check
        // that too.
        if let Some((page, _)) = pages.iter().find(|(page, _)| !self.unchanged_since(*page, snapshot)) {
            return Err(CommitError::Conflict(Conflict::PageChanged(*page)).into());
        }
        let id = transaction.recorded_id();
        if id != 0 && !self.outcomes.may_commit(id) {
            return Err(CommitError::Failed(decided_aborted(id)).into());
        }
        let frames = large.as_ref().map(|large| large.frames(self)).unwrap_or_default();
        if let Some((page, _)) = frames.iter().find(|(page, _)| !self.unchanged_since(*page, snapshot)) {
            return Err(CommitError::Conflict(Conflict::PageChanged(*page)).into());
        }
        let number = commits.last_number + 1;
        let unmerged_bytes = record.len();
        let mut page_count = current.page_count;
        let mut merged = None;
        if changed_allocation || changed_rest {
            let mut page = PageBytes::copy_of(page_one);
            self.merge_page_one(snapshot, &current, &mut page, changed_allocation, changed_rest)?;
            page_count = page_one::page_count(&page);
            page_one::stamp(&mut page, number);
            // SAFETY: the commit lock is held, so no current version is freed.
            let newest = unsafe { self.resident(1, &current) };
            record.push_page(1, newest, &page);
            merged = Some((1, page));
        }
        if id != 0 {
            record.push_outcome(Outcome { transaction: id, committed: true });
        }
        let timestamp = self.node.clock.tick();
        record.patch(Patch { number, previous: current.number, timestamp, page_count });
        let body = record.finish();
        // At or before the beginning of the record: other threads append too.
        let start = self.log.appended();
        let body_bytes = body.len();
        let lsn = match self.log.append(body, commits.urgency(timestamp)) {
            Ok(lsn) => lsn,
            Err(LogError::Busy) => {
                record.truncate(unmerged_bytes);
                return Err(NotInstalled::LogBusy(body_bytes));
            }
            Err(other) => {
                let error = self.write_error().unwrap_or_else(|| log_error(other));
                return Err(CommitError::Failed(error).into());
            }
        };
        let mut pages = std::mem::take(pages);
        pages.extend(merged);
        self.node.count_record(body_bytes, pages.len());
        self.stats.log_bytes.fetch_add(body_bytes as u64, Ordering::Relaxed);
        self.stats.log_pages.fetch_add(pages.len() as u64, Ordering::Relaxed);
        self.node.buffers.give(std::mem::replace(record, RecordBuilder::new(Vec::new())).into_buffer());

        if id != 0 {
            self.outcomes.decided(id, true, lsn);
        }
        let snapshot = Snapshot { number, lsn, page_count };
        if let Some(large) = large {
            commits.large.push(large.manifest_entry(self, number));
        }
        commits.dirty_since.get_or_insert_with(|| (start, self.node.clock.monotonic_ms()));
        commits.last_timestamp = timestamp;
        let mut tally = Tally::default();
        self.put_version(&mut commits, snapshot, NewPages { pages, frames, ended: Vec::new() }, &mut tally);
        self.pages.account().settle_reserved(tally, reserved_bytes);
        Ok(Committed { snapshot })
    }

    /// Installs pages as the current version. The version's record is in the log. Callers hold the
    /// commit lock.
    pub(super) fn put_version(
        &self,
        commits: &mut Commits,
        snapshot: Snapshot,
        new: NewPages,
        tally: &mut Tally,
    ) {
        let (number, before) = (snapshot.number, self.current());
        let mut changed = Vec::with_capacity(new.pages.len() + new.frames.len() + new.ended.len());
        let mut replaced = 0;
        for (no, data) in new.pages {
            replaced += u64::from(self.pages.install(no, number, Some(data), None, tally));
            commits.dirty.insert(no);
            changed.push(no);
        }
        for (no, frame) in new.frames {
            replaced += u64::from(self.pages.install(no, number, None, Some(frame), tally));
            commits.dirty.remove(&no);
            changed.push(no);
        }
        for no in new.ended {
            self.pages.install_end_marker(no, number, tally);
            commits.dirty.remove(&no);
            changed.push(no);
        }
        for no in snapshot.page_count + 1..=before.page_count {
            self.pages.install_end_marker(no, number, tally);
        }
        commits.last_number = number;
        commits.push_recent(UncollectedCommit {
            snapshot,
            pages: changed.into_boxed_slice(),
            page_count_before: before.page_count,
            replaced_bytes: replaced * PAGE_SIZE as u64,
        });
        self.snapshots.lock().push(snapshot);
        self.collect_garbage(commits, tally);
    }

    /// Checks that everything the transaction read is still current. Returns the current version.
    fn validate(&self, transaction: &Transaction, snapshot: &Snapshot) -> Result<Snapshot, CommitError> {
        if self.is_discarded(snapshot) {
            return Err(CommitError::Conflict(Conflict::Discarded));
        }
        let current = self.current();
        if current.number == snapshot.number {
            return Ok(current);
        }
        match transaction.reads.find_changed(|page| !self.unchanged_since(page, snapshot)) {
            Some(page) => Err(CommitError::Conflict(Conflict::PageChanged(page))),
            None if !self.same_schema_page(snapshot, &current) => {
                Err(CommitError::Conflict(Conflict::PageChanged(1)))
            }
            None => Ok(current),
        }
    }

    /// Returns true if page 1 is the same at both versions, except for counters and allocation.
    /// Both are pinned, or current under the commit lock.
    pub(crate) fn same_schema_page(&self, a: &Snapshot, b: &Snapshot) -> bool {
        // SAFETY: the caller's contract.
        match unsafe { (self.find(1, a), self.find(1, b)) } {
            (None, None) => true,
            (Some(a), Some(b)) if a.number() == b.number() => true,
            // SAFETY: page 1 stays in memory.
            (Some(a), Some(b)) => match unsafe { (a.data(), b.data()) } {
                (Some(a), Some(b)) => page_one::same_rest(a, b),
                // Page 1 of a version that was opened is in memory. If it is not, assume a change.
                _ => false,
            },
            _ => false,
        }
    }

    /// Returns true if the size and the free list are the same at both versions. Same contract.
    pub(crate) fn same_allocation(&self, a: &Snapshot, b: &Snapshot) -> bool {
        // SAFETY: the caller's contract.
        match unsafe { (self.resident(1, a), self.resident(1, b)) } {
            (Some(a), Some(b)) => page_one::same_allocation(a, b),
            (None, None) => true,
            _ => false,
        }
    }

    /// Merges the transaction's page 1 with that of the current version.
    fn merge_page_one(
        &self,
        snapshot: &Snapshot,
        current: &Snapshot,
        page_one: &mut Page,
        changed_allocation: bool,
        changed_rest: bool,
    ) -> Result<(), CommitError> {
        // SAFETY: the snapshot is pinned, and the commit lock is held.
        let (Some(base), Some(newest)) = (unsafe { (self.resident(1, snapshot), self.resident(1, current)) })
        else {
            return Ok(()); // The partition was empty at the snapshot, and still is (validated).
        };
        if changed_allocation && !page_one::same_allocation(base, newest) {
            return Err(CommitError::Conflict(Conflict::Allocation));
        }
        if !changed_allocation {
            page_one[page_one::ALLOCATION].copy_from_slice(&newest[page_one::ALLOCATION]);
        }
        debug_assert!(changed_rest || page_one::same_rest(page_one, newest));
        Ok(())
    }
}
