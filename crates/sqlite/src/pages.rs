//! The interface to the pages of a database. The layer above implements it.
//!
//! A connection has one [`Pages`] object for all its transactions. The object stands for a whole
//! transaction: it pins the snapshot, keeps the changed pages, records what was read, and commits.
//! So a call of SQLite is one call here, and the object needs no lock: like its connection, it is
//! used by one thread at a time.
//!
//! Reads are by far the most frequent calls. The callbacks of the main file are therefore compiled
//! for each implementation and call it directly. All other calls go through `dyn Pages`.

use fulmar_pages::{Page, PageNo};

use crate::link::Link;
use crate::{Error, Result};

/// Why an operation on the pages was not done.
#[derive(Debug)]
pub enum Refusal {
    /// The transaction conflicts with another one and can be replayed.
    Conflict,
    /// An error for the client.
    Failed(Error),
    /// The error is already recorded in the [`Link`].
    Recorded,
    /// The statement was cancelled, or its future dropped.
    Interrupted,
}

/// The outcome of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransactionOutcome {
    /// Not decided yet.
    Open,
    /// Committed (true) or aborted (false).
    Ended(bool),
    /// Too old: its outcome is no longer recorded.
    Forgotten,
}

/// The pages of a database, as one connection's transactions read and change them.
///
/// Methods that may wait are called on the connection's fiber and wait with [`Link::wait`].
pub trait Pages {
    /// SHARED: pins a snapshot, unless one is pinned.
    fn begin(&self);

    /// RESERVED: the transaction is about to write.
    fn reserve(&self) -> std::result::Result<(), Refusal>;

    /// Sync: commits, unless SQLite is rolling back.
    fn commit(&self, link: &Link) -> std::result::Result<(), Refusal>;

    /// NONE: the transaction has ended. Releases its snapshot and its changed pages.
    fn end(&self, link: &Link);

    /// The size of the database in pages, as the transaction sees it.
    fn page_count(&self) -> u32;

    /// Copies a part of a page, from the byte `within` on. Returns false if the page does not
    /// exist.
    fn read(
        &self,
        link: &Link,
        page: PageNo,
        within: usize,
        out: &mut [u8],
    ) -> std::result::Result<bool, Refusal>;

    /// Returns a pointer to a page that stays valid until [`Pages::unfetch`]. `None` if the page
    /// must be read instead.
    ///
    /// The 256 bytes after the page must be readable too, because SQLite may read beyond the end of
    /// a record, as far as its own VFS permits it to. What they contain does not matter.
    fn fetch(&self, link: &Link, page: PageNo) -> std::result::Result<Option<&Page>, Refusal>;

    /// SQLite has released a page that it fetched; `None` if it only asks to drop its mapping.
    fn unfetch(&self, page: *const Page);

    /// Changes a page.
    fn write(&self, link: &Link, page: PageNo, data: &Page) -> std::result::Result<(), Refusal>;

    /// Changes the size of the database.
    fn truncate(&self, page_count: u32);

    /// The fiber is about to wait, or may be busy for long: pages that SQLite has not fetched may
    /// be evicted from now on.
    fn step_aside(&self);

    /// Bytes of the transaction's changed pages.
    fn changed_bytes(&self) -> u64;

    /// Returns true if the transaction must end because its snapshot is too old.
    fn is_expired(&self) -> bool;

    /// The error of a transaction that was ended by the pages, if it was not returned by a call.
    fn failure(&self) -> Option<Error>;

    /// Returns true if the transaction has conflicted.
    fn has_conflicted(&self) -> bool;

    /// Returns true if the transaction has been committed.
    fn has_committed(&self) -> bool;

    /// Returns true if SQLite's cache may hold changed pages, and resets that.
    fn take_wrote(&self) -> bool;

    /// Fails if temporary files may not grow because the disk is nearly full.
    fn admit_files(&self) -> Result<()>;

    /// Fails if the pages are read-only here.
    fn check_writable(&self) -> Result<()>;

    /// Returns a new unique id for a transaction.
    fn new_transaction_id(&self) -> u64;

    /// Sets the id under which the outcome of the open transaction is recorded.
    fn set_transaction_id(&self, id: u64);

    /// The outcome of a transaction. If `decides`, an undecided one becomes aborted.
    fn outcome(
        &self,
        link: &Link,
        id: u64,
        decides: bool,
    ) -> std::result::Result<TransactionOutcome, Refusal>;
}
