//! The VFS: maps SQLite's files to pages of a partition.
//!
//! A connection has one main file, its partition, and any number of temporary files: rollback
//! journal, statement journal, sorter, temporary tables. These are the calls that matter:
//!
//! | SQLite | VFS |
//! | --- | --- |
//! | `xLock(SHARED)` | pins a snapshot: the newest version, or the newest durable one |
//! | `xFetch`, `xRead` | read the page at the snapshot, or the transaction's change; recorded |
//! | `xWrite`, `xTruncate` | go to the transaction's overlay, which other transactions do not see |
//! | `xLock(RESERVED)` and above | always granted: writers are optimistic |
//! | `SQLITE_FCNTL_SYNC` | commits ([`crate::partition`]); a conflict is `SQLITE_BUSY_SNAPSHOT` |
//! | `xUnlock(NONE)` | unpins the snapshot and drops the overlay |
//!
//! A rollback syncs as well. A commit is distinguished from it by the change counter of page 1:
//! each SHARED lock returns a new one, a commit increments it, a rollback restores it. The new
//! counter also makes SQLite drop its cached pages, so that every read of a transaction passes
//! through the VFS and is recorded.
//!
//! Exception: a single-statement transaction whose snapshot has the version of SQLite's cache gets
//! the old counter, and SQLite keeps its cache. Reads from the cache are not recorded. If the
//! statement only reads, that is not necessary: it is serializable at its snapshot. If it writes,
//! all pages count as read: any other commit in between is a conflict. After a commit the cache has
//! the new version, unless another commit came in between. After anything else that had begun to
//! write (an error, a conflict, a rollback) the cache has no valid version.
//!
//! All `unsafe` code that calls SQLite is in this module, in [`crate::connection`] and in
//! [`crate::heap`]. A panic in a callback is caught and becomes an I/O error: it must not unwind
//! through C.

mod buffer_file;
mod main_file;
mod pages;

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::Once;
use std::task::Poll;

use libsqlite3_sys as ffi;

use crate::cancel::CancelFlag;
use crate::fiber::offload::OFFLOAD_BYTES;
use crate::fiber::overflow::{self, Running};
use crate::fiber::{self, Suspender};
use crate::heap::Held;
use crate::partition::{Ahead, Partition, Reader};
use crate::spill::TemporaryFiles;
use crate::transaction::{Conflict, Transaction};
use crate::variables::Variables;

/// The name of the registered VFS.
pub(crate) const NAME: &CStr = c"fulmar";

/// The clock and the cancel flag are checked once per this many pages.
const PAGES_PER_CHECKPOINT: u32 = 64;

/// The state shared by a connection's files, functions and handlers. Boxed by the connection, so
/// its address is stable.
pub(crate) struct Link {
    pub suspender: Suspender,
    pub partition: Arc<Partition>,
    /// Inside the partition's residence while the fiber runs.
    pub reader: Reader,
    pub ahead: Ahead,
    /// Accounts SQLite's memory, and other memory of the connection.
    pub held: Held,
    /// The location of its temporary files, and the account that they are charged to.
    pub files: TemporaryFiles,
    pub transaction: RefCell<Transaction>,
    pub variables: RefCell<Variables>,
    pub cancel: RefCell<Arc<CancelFlag>>,
    /// The running statement may do more than a tenant's: VACUUM attaches a temporary database
    /// internally, and a declaration change increments the schema version.
    pub trusted: Cell<bool>,
    /// BEGIN, COMMIT or ROLLBACK is running. Each takes effect in one step; a cancel that is found
    /// after it would report a failure of something that has happened. (If a COMMIT waits, a cancel
    /// ends the wait.)
    pub controls: Cell<bool>,
    /// The transaction has run ANALYZE. Its commit increments the schema cookie, so that all
    /// connections use the same plans (a LIMIT may return other rows under another plan). Reset
    /// when a transaction gets the connection.
    pub bump_schema: Cell<bool>,
    /// The system tables, for the session that uses the connection.
    pub system: RefCell<crate::system::Slot>,
    /// Bytes in the connection's temporary files, including its temporary tables.
    buffered_bytes: Cell<u64>,
    /// An allocation failed because the stack was used up. Determines the statement's error.
    stack_exhausted: Cell<bool>,
    /// The tenant's name, for the report of a stack overflow.
    pub tenant: RefCell<Arc<str>>,
    /// The SQL text that is being prepared or run, for the same report.
    text: Cell<(*const u8, usize)>,
    /// A callback has failed since the statement began, or has ended it. Some of SQLite's checks
    /// return that as a row and continue (`PRAGMA integrity_check`); the statement fails
    /// nevertheless.
    pub failed: Cell<bool>,
    opened: Cell<bool>,
    /// Pages that SQLite has read and written, including those of temporary files on disk.
    pages: Cell<u32>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.held.give_all(self.partition.heap());
    }
}

/// A wait ended because the statement was cancelled, or its future dropped.
pub(crate) struct Interrupted;

impl Link {
    pub(crate) fn new(partition: Arc<Partition>) -> Box<Link> {
        let files = partition.temporary_files();
        let transaction = RefCell::new(Transaction::new(files.clone()));
        let reader = Reader::new(partition.residence.clone());
        Box::new(Link {
            suspender: Suspender::new().with_time_slice(partition.node.time_slice),
            partition,
            reader,
            ahead: Ahead::default(),
            held: Held::default(),
            files,
            transaction,
            variables: RefCell::default(),
            cancel: RefCell::default(),
            trusted: Cell::new(false),
            controls: Cell::new(false),
            bump_schema: Cell::new(false),
            system: RefCell::default(),
            buffered_bytes: Cell::new(0),
            stack_exhausted: Cell::new(false),
            tenant: RefCell::new(Arc::from("")),
            text: Cell::new((std::ptr::null(), 0)),
            failed: Cell::new(false),
            opened: Cell::new(false),
            pages: Cell::new(0),
        })
    }

    /// Waits for `future` without blocking the thread. A cancel ends the wait.
    pub(crate) fn wait<F: Future>(&self, future: F) -> Result<F::Output, Interrupted> {
        self.reader.step_aside();
        let mut future = std::pin::pin!(future);
        let cancel = self.cancel.borrow().clone();
        let waited = self.suspender.wait(std::future::poll_fn(|cx| {
            cancel.register(cx.waker());
            if cancel.is_set() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        }));
        waited.ok().flatten().ok_or(Interrupted)
    }

    /// Waits for a temporary file of the transaction, without blocking the thread. The wait is
    /// short, and a cancel does not end it: a statement that is being rolled back writes pages,
    /// too.
    pub(crate) fn wait_for_disk<F: Future>(&self, future: F) -> Result<F::Output, Interrupted> {
        self.reader.step_aside();
        self.suspender.wait(future).map_err(|_| Interrupted)
    }

    /// Called periodically by a statement that computes. Returns true if the statement must end.
    pub(crate) fn checkpoint(&self) -> bool {
        if self.cancel.borrow().is_set() || self.is_expired() {
            return true;
        }
        self.yield_if_due() || self.cancel.borrow().is_set()
    }

    /// Yields to other work on this thread if the time slice is over. Pages found in memory may be
    /// evicted meanwhile. Returns true if the statement has been abandoned.
    fn yield_if_due(&self) -> bool {
        if !self.suspender.slice_is_over() {
            return false;
        }
        self.reader.step_aside();
        self.suspender.yield_now().is_err()
    }

    /// Calls [`Link::yield_if_due`] for some of the pages. One step of SQLite may process a whole
    /// table (DROP TABLE, VACUUM, a full check), and reads that hit the system's file cache never
    /// wait. Returns true if the statement should end. Only reads of the main file use the result: a
    /// statement that is being rolled back writes pages, and reads its journal.
    fn yield_between_pages(&self) -> bool {
        let pages = self.pages.replace(self.pages.get().wrapping_add(1));
        pages.is_multiple_of(PAGES_PER_CHECKPOINT)
            && (self.yield_if_due() || self.cancel.borrow().is_set())
            && !self.controls.get()
    }

    /// Called before each of SQLite's allocations. Returns true if it may be made.
    pub(crate) fn admit_allocation(&self, bytes: usize) -> bool {
        if !self.suspender.has_stack() {
            self.stack_exhausted.set(true);
            return false;
        }
        match bytes > OFFLOAD_BYTES || self.held.take_growth() {
            true => self.offload(),
            false => true,
        }
    }

    /// Moves the statement to the offload pool, because it handles so much data that a single call
    /// may take a long time. Returns false if the call must not be made: the statement was
    /// cancelled while it waited for a thread, or it was dropped. A dropped statement runs only to
    /// unwind, on a thread that serves other sessions.
    #[must_use]
    pub(crate) fn offload(&self) -> bool {
        if self.suspender.can_offload() {
            self.cancel.borrow().note_offloaded();
            self.reader.step_aside();
            self.suspender.offload(self.partition.id.0);
            if self.cancel.borrow().is_set() && !self.controls.get() {
                // SQLite survives some failed allocations; the statement must fail nevertheless.
                self.failed.set(true);
                return false;
            }
        }
        !self.suspender.is_abandoned()
    }

    /// Leaves the residence if the fiber is offloaded: a call there may take a long time, and must
    /// not delay the eviction of pages. Called when SQLite has got its page.
    fn step_aside_if_offloaded(&self) {
        if self.suspender.is_offloaded() {
            self.reader.step_aside();
        }
    }

    /// Returns true if the last error was caused by a lack of stack. Resets the flag.
    pub(crate) fn take_stack_exhausted(&self) -> bool {
        self.stack_exhausted.take()
    }

    /// Records the SQL text that is being prepared or run, until the result is dropped.
    pub(crate) fn note_text(&self, text: &str) -> NotedText {
        NotedText { link: self, previous: self.text.replace((text.as_ptr(), text.len())) }
    }

    /// Returns true if the transaction's snapshot has expired, and records that as its conflict.
    fn is_expired(&self) -> bool {
        let mut transaction = self.transaction.borrow_mut();
        let expired = transaction.snapshot.is_some_and(|snapshot| self.partition.is_expired(&snapshot));
        if expired {
            transaction.conflict = Some(Conflict::Expired);
        }
        expired
    }

    /// Returns true if the last statement was ended because its snapshot was held for too long.
    pub(crate) fn has_expired(&self) -> bool {
        self.transaction.borrow().conflict == Some(Conflict::Expired)
    }

    /// The error of the statement, if it was not found by SQLite.
    pub(crate) fn failure(&self) -> Option<crate::Error> {
        if let Some(failure) = self.transaction.borrow_mut().failure.take() {
            return Some(failure);
        }
        if self.has_expired() {
            return Some(crate::session::snapshot_too_old());
        }
        let cancel = self.cancel.borrow();
        cancel.is_set().then(|| cancel.error())
    }

    /// Called before a temporary file grows; `on_disk` if it is not in memory. Returns true if it
    /// may.
    fn grow_buffer(&self, bytes: u64, on_disk: bool) -> bool {
        let buffered_bytes = self.buffered_bytes.get();
        let mut transaction = self.transaction.borrow_mut();
        let may = transaction.may_hold(bytes, buffered_bytes)
            && (!on_disk || transaction.keeps_within(self.partition.node.disk.admit(false)));
        if may {
            self.buffered_bytes.set(buffered_bytes + bytes);
        }
        may
    }

    /// Called after a temporary file has shrunk or was closed.
    fn shrink_buffer(&self, bytes: u64) {
        self.buffered_bytes.set(self.buffered_bytes.get().saturating_sub(bytes));
    }

    /// Called when a statement begins: a previous statement that exceeded its limits has been
    /// rolled back.
    pub(crate) fn begin_statement(&self) {
        self.transaction.borrow_mut().set_beyond_limits(false);
    }
}

/// While this exists, a report of a stack overflow contains the text.
pub(crate) struct NotedText {
    link: *const Link,
    previous: (*const u8, usize),
}

impl Drop for NotedText {
    fn drop(&mut self) {
        // SAFETY: the connection that created it owns the link, and outlives the call of which it
        // is a local variable.
        unsafe { (*self.link).text.set(self.previous) };
    }
}

/// Describes the statement of a fiber, for the report of a stack overflow at an address.
///
/// # Safety
/// `environment` must be that of a fiber of this crate, or null. Called in a signal handler.
unsafe fn describe(environment: *const (), address: usize) -> Option<Running> {
    // SAFETY: the environment of a fiber is its connection's link. The fiber is stopped inside a
    // function of C or of this crate, so the cell is read without a borrow.
    unsafe {
        let link = environment.cast::<Link>().as_ref()?;
        let tenant = &*link.tenant.as_ptr();
        link.suspender.is_in_guard(address).then(|| Running {
            tenant: (tenant.as_ptr(), tenant.len()),
            partition: link.partition.id.0,
            text: link.text.get(),
        })
    }
}

/// The link of the connection that runs on this thread's fiber.
///
/// # Safety
/// May only be called from callbacks of SQLite; the result must not be kept.
pub(crate) unsafe fn current<'a>() -> Option<&'a Link> {
    // SAFETY: every fiber of this crate that runs SQLite has its connection's link as environment.
    unsafe { fiber::current().cast::<Link>().as_ref() }
}

/// [`Link::checkpoint`] of the connection that runs on this thread's fiber, for code that SQLite
/// does not call.
pub(crate) fn checkpoint_here() -> bool {
    // SAFETY: the result is not kept.
    unsafe { current() }.is_some_and(Link::checkpoint)
}

/// Registers the VFS, once per process.
pub(crate) fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let vfs = Box::leak(Box::new(ffi::sqlite3_vfs {
            iVersion: 2,
            szOsFile: main_file::SIZE.max(buffer_file::SIZE),
            mxPathname: 64,
            pNext: std::ptr::null_mut(),
            zName: NAME.as_ptr(),
            pAppData: std::ptr::null_mut(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_pathname),
            xDlOpen: None,
            xDlError: None,
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: None,
            xCurrentTimeInt64: Some(current_time_int64),
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        }));
        // SAFETY: the structure lives as long as the process.
        unsafe { ffi::sqlite3_vfs_register(vfs, 0) };
        if let Err(error) = overflow::install(describe) {
            tracing::warn!(%error, "could not install the stack overflow handler");
        }
    });
}

/// Runs the body of a callback. A panic becomes `SQLITE_IOERR`.
fn guarded(body: impl FnOnce() -> c_int) -> c_int {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        tracing::error!("caught a panic in a SQLite callback; the statement fails");
        ffi::SQLITE_IOERR
    })
}

/// The same for a file of a connection; failures are recorded in its link.
fn guarded_for(link: &Link, body: impl FnOnce() -> c_int) -> c_int {
    let code = guarded(body);
    if !matches!(code, ffi::SQLITE_OK | ffi::SQLITE_IOERR_SHORT_READ | ffi::SQLITE_NOTFOUND) {
        link.failed.set(true);
    }
    code
}

const TEMPORARY: c_int = ffi::SQLITE_OPEN_MAIN_JOURNAL
    | ffi::SQLITE_OPEN_SUBJOURNAL
    | ffi::SQLITE_OPEN_TEMP_DB
    | ffi::SQLITE_OPEN_TEMP_JOURNAL
    | ffi::SQLITE_OPEN_TRANSIENT_DB;

unsafe extern "C" fn open(
    _vfs: *mut ffi::sqlite3_vfs,
    _name: ffi::sqlite3_filename,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    guarded(|| {
        // SAFETY: SQLite provides `szOsFile` bytes, and calls from the connection's fiber.
        unsafe {
            (*file).pMethods = std::ptr::null();
            let Some(link) = current() else { return ffi::SQLITE_CANTOPEN };
            // A second main file of a connection would be an attached one: there is no other file
            // to open.
            if flags & ffi::SQLITE_OPEN_MAIN_DB != 0 && !link.opened.replace(true) {
                main_file::open(file, link);
            } else if flags & TEMPORARY != 0 {
                buffer_file::open(file, link);
            } else {
                return ffi::SQLITE_CANTOPEN;
            }
            if !out_flags.is_null() {
                *out_flags = flags;
            }
        }
        ffi::SQLITE_OK
    })
}

unsafe extern "C" fn delete(_vfs: *mut ffi::sqlite3_vfs, _name: *const c_char, _sync: c_int) -> c_int {
    ffi::SQLITE_OK
}

/// No file ever exists: journals are private to their connection, so there are no hot journals.
unsafe extern "C" fn access(
    _vfs: *mut ffi::sqlite3_vfs,
    _name: *const c_char,
    _flags: c_int,
    answer: *mut c_int,
) -> c_int {
    // SAFETY: SQLite's out parameter.
    unsafe { *answer = 0 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn full_pathname(
    _vfs: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    length: c_int,
    out: *mut c_char,
) -> c_int {
    // SAFETY: `name` is a C string, `out` has room for `length` bytes.
    let bytes = unsafe { CStr::from_ptr(name) }.to_bytes_with_nul();
    if bytes.len() > length as usize {
        return ffi::SQLITE_CANTOPEN;
    }
    // SAFETY: checked above.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len()) };
    ffi::SQLITE_OK
}

/// Seeds SQLite's generator, which the engine's `random()` and `randomblob()` replace.
unsafe extern "C" fn randomness(_vfs: *mut ffi::sqlite3_vfs, length: c_int, out: *mut c_char) -> c_int {
    // SAFETY: `out` has room for `length` bytes; the call fills it or fails.
    let filled = unsafe { libc::getrandom(out as *mut c_void, length as usize, 0) };
    filled.max(0) as c_int
}

unsafe extern "C" fn sleep(_vfs: *mut ffi::sqlite3_vfs, microseconds: c_int) -> c_int {
    microseconds
}

/// The time of the transaction: it does not change while the transaction runs, nor in a replay.
unsafe extern "C" fn current_time_int64(_vfs: *mut ffi::sqlite3_vfs, out: *mut ffi::sqlite3_int64) -> c_int {
    const JULIAN_1970_MS: i64 = 210_866_760_000_000;
    // SAFETY: called by SQLite on the connection's fiber, or elsewhere (`current` is null then).
    let unix_ms = unsafe { current() }.map_or(0, |link| link.variables.borrow().clock_ms);
    // SAFETY: SQLite's out parameter.
    unsafe { *out = unix_ms as i64 + JULIAN_1970_MS };
    ffi::SQLITE_OK
}

unsafe extern "C" fn current_time(vfs: *mut ffi::sqlite3_vfs, out: *mut f64) -> c_int {
    let mut ms = 0;
    // SAFETY: as above.
    unsafe {
        current_time_int64(vfs, &mut ms);
        *out = ms as f64 / 86_400_000.0;
    }
    ffi::SQLITE_OK
}

/// The smallest size that SQLite accepts: a journal begins with a sector of header, which is not
/// needed here.
unsafe extern "C" fn sector_size(_file: *mut ffi::sqlite3_file) -> c_int {
    512
}

unsafe extern "C" fn device_characteristics(_file: *mut ffi::sqlite3_file) -> c_int {
    0
}

unsafe extern "C" fn sync(_file: *mut ffi::sqlite3_file, _flags: c_int) -> c_int {
    ffi::SQLITE_OK
}

unsafe extern "C" fn no_lock(_file: *mut ffi::sqlite3_file, _level: c_int) -> c_int {
    ffi::SQLITE_OK
}

unsafe extern "C" fn no_reserved_lock(_file: *mut ffi::sqlite3_file, answer: *mut c_int) -> c_int {
    // SAFETY: SQLite's out parameter.
    unsafe { *answer = 0 };
    ffi::SQLITE_OK
}
