//! The VFS: SQLite's files are our pages.
//!
//! One connection has one main file, its partition, and any number of temporary ones: rollback journal, statement
//! journal, sorter and temporary tables. Of the calls that SQLite makes, these carry the meaning:
//!
//! | SQLite | here |
//! | --- | --- |
//! | `xLock(SHARED)` | pin the newest version as this transaction's snapshot |
//! | `xFetch`, `xRead` | the page at that snapshot (or the transaction's own change); noted as read |
//! | `xWrite`, `xTruncate` | into the transaction's overlay; nobody else sees it |
//! | `xLock(RESERVED)` and above | granted to everybody: writers are optimistic |
//! | `SQLITE_FCNTL_SYNC` | the commit, see [`crate::partition`]; a conflict is `SQLITE_BUSY_SNAPSHOT` |
//! | `xUnlock(NONE)` | unpin, forget the overlay |
//!
//! A commit is told from a rollback (which syncs too) by the change counter of page 1: each SHARED lock hands out a new
//! one, a commit raises it, a rollback restores it. The new counter also makes SQLite drop the pages that it cached,
//! so that every page a transaction reads passes through here and is noted.
//!
//! A lone statement (one that is a transaction) whose snapshot is of the version that the cache is of is handed the old
//! counter, and SQLite keeps its cache. What is read from there is not noted. If it only reads, nothing needs to be: it is
//! serializable at its snapshot. If it writes, everything counts as read: any commit of others in between is a conflict.
//! After a commit the cache is of the new version, unless somebody else's came between; after anything else that had
//! begun to write (an error, a conflict, a rollback) it is of none.
//!
//! All `unsafe` that talks to SQLite lives in this module and in [`crate::connection`]. A panic in a callback is caught
//! and becomes an I/O error: it must not unwind through C.

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

/// The name under which the VFS is registered.
pub(crate) const NAME: &CStr = c"fulmar";

/// The clock is looked at once in so many pages.
const PAGES_PER_LOOK: u32 = 64;

/// What a connection's files, functions and handlers share. Boxed by the connection: its address is stable.
pub(crate) struct Link {
    pub suspender: Suspender,
    pub partition: Arc<Partition>,
    /// Inside of the partition's residence while the fiber runs.
    pub reader: Reader,
    pub ahead: Ahead,
    /// Of SQLite's own memory, and what else the connection holds.
    pub held: Held,
    /// Where its temporary files are, and the tenant that is charged for them.
    pub files: TemporaryFiles,
    pub transaction: RefCell<Transaction>,
    pub variables: RefCell<Variables>,
    pub cancel: RefCell<Arc<CancelFlag>>,
    /// A statement runs that may do what tenants' may not: VACUUM attaches a temporary database by itself, a new
    /// declaration raises the schema's version.
    pub trusted: Cell<bool>,
    /// BEGIN, COMMIT or ROLLBACK runs. What they do is done in one step; a cancel that is found behind it would make a failure of
    /// what has happened. (Where a COMMIT waits, it ends the wait.)
    pub controls: Cell<bool>,
    /// The transaction has run ANALYZE: its commit raises the schema cookie, so that all connections plan alike (a
    /// LIMIT may answer other rows under another plan). Reset when a transaction gets the connection.
    pub bump_schema: Cell<bool>,
    /// System tables, as the session sees them that has the connection.
    pub system: RefCell<crate::system::Slot>,
    /// Bytes in the connection's temporary files, those of its temporary tables included.
    buffered_bytes: Cell<u64>,
    /// An allocation failed because the stack was used up; the statement's error says so.
    stack_exhausted: Cell<bool>,
    /// The tenant's name, for the report of a stack overflow.
    pub tenant: RefCell<Arc<str>>,
    /// The text that is being prepared or run, for the same report.
    text: Cell<(*const u8, usize)>,
    /// A callback has failed since the statement began, or has ended it. Some of SQLite's checks make a row of that and go on
    /// (`PRAGMA integrity_check`); the statement fails all the same.
    pub failed: Cell<bool>,
    opened: Cell<bool>,
    /// Pages that SQLite has read and written, those of temporary files in a file among them.
    pages: Cell<u32>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.held.give_all(self.partition.heap());
    }
}

/// A wait that ended because the statement was cancelled, or its future dropped.
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

    /// Waits for `future` without holding the thread; a cancel ends the wait.
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

    /// Waits for a file of the transaction's own, without holding the thread. Not for long, so a cancel does not end it: a
    /// statement that is being taken back writes pages, too.
    pub(crate) fn wait_for_disk<F: Future>(&self, future: F) -> Result<F::Output, Interrupted> {
        self.reader.step_aside();
        self.suspender.wait(future).map_err(|_| Interrupted)
    }

    /// Called now and then by a statement that computes; answers whether it shall end.
    pub(crate) fn checkpoint(&self) -> bool {
        if self.cancel.borrow().is_set() || self.is_expired() {
            return true;
        }
        self.give_way() || self.cancel.borrow().is_set()
    }

    /// Lets others on this thread work, if the statement has computed for long. What was found in memory may leave it. Answers whether
    /// the statement has been abandoned meanwhile.
    fn give_way(&self) -> bool {
        if !self.suspender.slice_is_over() {
            return false;
        }
        self.reader.step_aside();
        self.suspender.yield_now().is_err()
    }

    /// [`Link::give_way`] at some pages of many: one step of SQLite's may go through a whole table, as that of a DROP TABLE, a VACUUM or a
    /// full check does, and what the system has in memory of a file is here without a wait. Answers whether the statement
    /// shall end, which only reads heed: one that is being taken back writes pages, and reads those of its journal.
    fn give_way_among_pages(&self) -> bool {
        let pages = self.pages.replace(self.pages.get().wrapping_add(1));
        pages.is_multiple_of(PAGES_PER_LOOK)
            && (self.give_way() || self.cancel.borrow().is_set())
            && !self.controls.get()
    }

    /// Called before each of SQLite's allocations; returns whether it may be made.
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

    /// The statement handles so much data that a single call may take long: it continues on the
    /// offload pool. Returns false if the call must not be made: the statement was cancelled while
    /// it waited for a thread, or it was dropped. A dropped one runs only to unwind, on a thread that
    /// serves others.
    #[must_use]
    pub(crate) fn offload(&self) -> bool {
        if self.suspender.can_offload() {
            self.cancel.borrow().note_offloaded();
            self.reader.step_aside();
            self.suspender.offload(self.partition.id.0);
            if self.cancel.borrow().is_set() && !self.controls.get() {
                // SQLite survives some failed allocations. The statement fails all the same.
                self.failed.set(true);
                return false;
            }
        }
        !self.suspender.is_abandoned()
    }

    /// Off the workers a call may take long, and must not hold up the eviction of pages meanwhile. Called when SQLite has what it
    /// asked for.
    fn step_aside_if_offloaded(&self) {
        if self.suspender.is_offloaded() {
            self.reader.step_aside();
        }
    }

    /// Whether the last error was caused by a lack of stack. Resets it.
    pub(crate) fn take_stack_exhausted(&self) -> bool {
        self.stack_exhausted.take()
    }

    /// Notes the text that is being prepared or run, until the result is dropped.
    pub(crate) fn note_text(&self, text: &str) -> NotedText {
        NotedText { link: self, previous: self.text.replace((text.as_ptr(), text.len())) }
    }

    /// Whether the transaction is asked to let go of its snapshot; notes it as its conflict.
    fn is_expired(&self) -> bool {
        let mut transaction = self.transaction.borrow_mut();
        let expired = transaction.snapshot.is_some_and(|snapshot| self.partition.is_expired(&snapshot));
        if expired {
            transaction.conflict = Some(Conflict::Expired);
        }
        expired
    }

    /// Whether the last statement was ended since its snapshot had been held for too long.
    pub(crate) fn has_expired(&self) -> bool {
        self.transaction.borrow().conflict == Some(Conflict::Expired)
    }

    /// Why the statement failed, if it was not SQLite that found out.
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

    /// A temporary file is about to grow, `on_disk` if it is none in memory; answers whether it may.
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

    /// A temporary file has become smaller, or is gone.
    fn shrink_buffer(&self, bytes: u64) {
        self.buffered_bytes.set(self.buffered_bytes.get().saturating_sub(bytes));
    }

    /// A statement begins. What the last one was refused has been taken back by now.
    pub(crate) fn begin_statement(&self) {
        self.transaction.borrow_mut().set_beyond_limits(false);
    }
}

/// While it lives, a report of a stack overflow contains the text.
pub(crate) struct NotedText {
    link: *const Link,
    previous: (*const u8, usize),
}

impl Drop for NotedText {
    fn drop(&mut self) {
        // SAFETY: the connection that made it owns the link, and outlives the call that it is a local variable of.
        unsafe { (*self.link).text.set(self.previous) };
    }
}

/// What a fiber runs, for the report of a stack overflow at an address.
///
/// # Safety
/// `environment` must be that of a fiber of this crate, or null. Called in a signal handler.
unsafe fn describe(environment: *const (), address: usize) -> Option<Running> {
    // SAFETY: the environment of a fiber is its connection's link. The fiber is stopped in the middle of a C function or of one of
    // ours, so the cell is read without a borrow.
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
/// Only from callbacks of SQLite; the answer must not be kept.
pub(crate) unsafe fn current<'a>() -> Option<&'a Link> {
    // SAFETY: every fiber of this crate that runs SQLite has its connection's link as environment.
    unsafe { fiber::current().cast::<Link>().as_ref() }
}

/// [`Link::checkpoint`] of the connection that runs on this thread's fiber; for code that SQLite does not call.
pub(crate) fn checkpoint_here() -> bool {
    // SAFETY: the answer is not kept.
    unsafe { current() }.is_some_and(Link::checkpoint)
}

/// Registers the VFS, once a process.
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
            tracing::warn!(%error, "a stack overflow would not be reported");
        }
    });
}

/// Runs a callback's body; a panic becomes `SQLITE_IOERR`.
fn guarded(body: impl FnOnce() -> c_int) -> c_int {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        tracing::error!("a panic in a callback of SQLite was caught; the statement fails");
        ffi::SQLITE_IOERR
    })
}

/// The same for a file of a connection, whose link notes failures.
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
        // SAFETY: SQLite gives room for `szOsFile` bytes, and calls from the connection's fiber.
        unsafe {
            (*file).pMethods = std::ptr::null();
            let Some(link) = current() else { return ffi::SQLITE_CANTOPEN };
            // The second main file of a connection would be an attached one: there is no other file to open.
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

/// No file is ever found: journals are private to their connection, so none is hot.
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

/// Seeds SQLite's own generator, which our functions `random()` and `randomblob()` stand in front of.
unsafe extern "C" fn randomness(_vfs: *mut ffi::sqlite3_vfs, length: c_int, out: *mut c_char) -> c_int {
    // SAFETY: `out` has room for `length` bytes; the call fills it or fails.
    let filled = unsafe { libc::getrandom(out as *mut c_void, length as usize, 0) };
    filled.max(0) as c_int
}

unsafe extern "C" fn sleep(_vfs: *mut ffi::sqlite3_vfs, microseconds: c_int) -> c_int {
    microseconds
}

/// "now" is the transaction's: it does not change while the transaction runs, nor when it is replayed.
unsafe extern "C" fn current_time_int64(_vfs: *mut ffi::sqlite3_vfs, out: *mut ffi::sqlite3_int64) -> c_int {
    const JULIAN_1970_MS: i64 = 210_866_760_000_000;
    // SAFETY: called by SQLite on the connection's fiber, or elsewhere (then `current` is null).
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

/// The smallest that SQLite takes: a journal begins with a sector of header, which is of no use to us.
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

unsafe extern "C" fn nobody_reserves(_file: *mut ffi::sqlite3_file, answer: *mut c_int) -> c_int {
    // SAFETY: SQLite's out parameter.
    unsafe { *answer = 0 };
    ffi::SQLITE_OK
}
