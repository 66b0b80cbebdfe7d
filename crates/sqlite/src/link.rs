//! The state shared by a connection's files, functions and handlers, and the primitives by which
//! callbacks of SQLite wait, yield, and account for memory.
//!
//! The link of the connection that runs on a thread is the environment of its fiber: callbacks
//! without an argument for it, such as the allocator's, find it with [`current`].

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use libsqlite3_sys as ffi;

use crate::cancel::CancelFlag;
use crate::fiber::offload::OFFLOAD_BYTES;
use crate::fiber::overflow::Running;
use crate::fiber::{self, Suspender};
use crate::heap::{Heap, HeapAccount};
use crate::pages::{Pages, Refusal};
use crate::spill::{self, TemporaryFiles};
use crate::system::{Slot, System};
use crate::variables::Variables;
use crate::{Error, Result, TransactionLimits};

/// The clock and the cancel flag are checked once per this many pages.
const PAGES_PER_CHECKPOINT: u32 = 64;

/// What the owner of a connection decides about it.
pub struct Settings {
    /// Identifies the database: statements of one database share a thread of the offload pool, and
    /// a report of a stack overflow contains it.
    pub database: u64,
    /// The account of the memory of the database's connections.
    pub heap: Arc<Heap>,
    /// The location of temporary files, and the account that they are charged to.
    pub files: TemporaryFiles,
    /// CPU time after which a statement yields its thread.
    pub time_slice: Duration,
    /// Maximum length of one statement's SQL text.
    pub max_statement_bytes: usize,
}

/// The state shared by a connection's files, functions and handlers. Boxed by the connection, so
/// its address is stable.
pub struct Link {
    /// By this the connection's fiber waits.
    pub suspender: Suspender,
    pub(crate) pages: Rc<dyn Pages>,
    /// Opens the main file.
    pub(crate) open_main: unsafe fn(*mut ffi::sqlite3_file, &Link),
    pub(crate) settings: Settings,
    /// Accounts SQLite's memory, and other memory of the connection.
    pub heap_account: HeapAccount,
    /// Session state that SQL functions read.
    pub variables: RefCell<Variables>,
    /// The flag that cancels the running statement.
    pub cancel: RefCell<Arc<CancelFlag>>,
    /// The running statement may do more than a tenant's: VACUUM attaches a temporary database
    /// internally, and a declaration change increments the schema version.
    pub trusted: Cell<bool>,
    /// BEGIN, COMMIT or ROLLBACK is running. Each takes effect in one step; a cancel that is found
    /// after it would report a failure of something that has happened. (If a COMMIT waits, a cancel
    /// ends the wait.)
    pub(crate) controls: Cell<bool>,
    /// The transaction has run ANALYZE. Its commit increments the schema cookie, so that all
    /// connections use the same plans (a LIMIT may return other rows under another plan). Reset
    /// when a transaction gets the connection.
    pub bump_schema: Cell<bool>,
    /// The system tables, for the session that uses the connection.
    pub(crate) system: RefCell<Slot>,
    /// Set when a callback fails with an error; the client gets it in place of SQLite's.
    failure: RefCell<Option<Error>>,
    /// The resource limits of the transaction.
    limits: Cell<TransactionLimits>,
    /// The transaction has exceeded a limit. SQLite only rolls it back from here on, and may need
    /// slightly more for that.
    beyond_limits: Cell<bool>,
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
    pub(crate) failed: Cell<bool>,
    pub(crate) opened: Cell<bool>,
    /// Pages that SQLite has read and written, including those of temporary files on disk.
    page_calls: Cell<u32>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.heap_account.give_all(&self.settings.heap);
    }
}

/// A wait ended because the statement was cancelled, or its future dropped.
#[derive(Debug)]
pub struct Interrupted;

impl Link {
    pub(crate) fn new(
        pages: Rc<dyn Pages>,
        open_main: unsafe fn(*mut ffi::sqlite3_file, &Link),
        settings: Settings,
    ) -> Box<Link> {
        Box::new(Link {
            suspender: Suspender::new().with_time_slice(settings.time_slice),
            pages,
            open_main,
            settings,
            heap_account: HeapAccount::default(),
            variables: RefCell::default(),
            cancel: RefCell::default(),
            trusted: Cell::new(false),
            controls: Cell::new(false),
            bump_schema: Cell::new(false),
            system: RefCell::default(),
            failure: RefCell::default(),
            limits: Cell::default(),
            beyond_limits: Cell::new(false),
            buffered_bytes: Cell::new(0),
            stack_exhausted: Cell::new(false),
            tenant: RefCell::new(Arc::from("")),
            text: Cell::new((std::ptr::null(), 0)),
            failed: Cell::new(false),
            opened: Cell::new(false),
            page_calls: Cell::new(0),
        })
    }

    /// The account of the memory of the database's connections.
    pub fn heap(&self) -> &Arc<Heap> {
        &self.settings.heap
    }

    pub(crate) fn files(&self) -> &TemporaryFiles {
        &self.settings.files
    }

    /// Charges memory to the connection. Returns false if the limit of the tenant or the node is
    /// reached.
    #[inline]
    pub fn charge(&self, bytes: u64) -> bool {
        self.heap_account.take(bytes, &self.settings.heap)
    }

    /// Releases memory that [`Link::charge`] has charged.
    pub fn release(&self, bytes: u64) {
        self.heap_account.give(bytes, &self.settings.heap);
    }

    /// Waits for `future` without blocking the thread. A cancel ends the wait.
    pub fn wait<F: Future>(&self, future: F) -> std::result::Result<F::Output, Interrupted> {
        self.pages.step_aside();
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
    pub fn wait_for_disk<F: Future>(&self, future: F) -> std::result::Result<F::Output, Interrupted> {
        self.pages.step_aside();
        self.suspender.wait(future).map_err(|_| Interrupted)
    }

    /// Called periodically by a statement that computes. Returns true if the statement must end.
    pub fn checkpoint(&self) -> bool {
        if self.cancel.borrow().is_set() || self.pages.is_expired() {
            return true;
        }
        self.yield_if_due() || self.cancel.borrow().is_set()
    }

    /// Yields to other work on this thread if the time slice is over. Pages found in memory may be
    /// evicted meanwhile. Returns true if the statement has been abandoned.
    pub fn yield_if_due(&self) -> bool {
        if !self.suspender.slice_is_over() {
            return false;
        }
        self.pages.step_aside();
        self.suspender.yield_now().is_err()
    }

    /// Calls [`Link::yield_if_due`] for some of the pages. One step of SQLite may process a whole
    /// table (DROP TABLE, VACUUM, a full check), and reads that hit the system's file cache never
    /// wait. Returns true if the statement should end. Only reads of the main file use the result:
    /// a statement that is being rolled back writes pages, and reads its journal.
    #[inline]
    pub(crate) fn yield_between_pages(&self) -> bool {
        let calls = self.page_calls.replace(self.page_calls.get().wrapping_add(1));
        calls.is_multiple_of(PAGES_PER_CHECKPOINT)
            && (self.yield_if_due() || self.cancel.borrow().is_set())
            && !self.controls.get()
    }

    /// Called before each of SQLite's allocations. Returns true if it may be made.
    pub(crate) fn admit_allocation(&self, bytes: usize) -> bool {
        if !self.suspender.has_stack() {
            self.stack_exhausted.set(true);
            return false;
        }
        match bytes > OFFLOAD_BYTES || self.heap_account.take_growth() {
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
            self.pages.step_aside();
            self.suspender.offload(self.settings.database);
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
    #[inline]
    pub(crate) fn step_aside_if_offloaded(&self) {
        if self.suspender.is_offloaded() {
            self.pages.step_aside();
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

    /// The error of the statement, if it was not found by SQLite.
    pub(crate) fn failure(&self) -> Option<Error> {
        if let Some(failure) = self.failure.take().or_else(|| self.pages.failure()) {
            return Some(failure);
        }
        let cancel = self.cancel.borrow();
        cancel.is_set().then(|| cancel.error())
    }

    /// Called before a temporary file grows; `on_disk` if it is not in memory. Returns true if it
    /// may.
    pub(crate) fn grow_buffer(&self, bytes: u64, on_disk: bool) -> bool {
        let may = self.may_hold(self.pages.changed_bytes(), bytes)
            && (!on_disk || self.keeps_within(self.pages.admit_files()));
        if may {
            self.buffered_bytes.set(self.buffered_bytes.get() + bytes);
        }
        may
    }

    /// Called after a temporary file has shrunk or was closed.
    pub(crate) fn shrink_buffer(&self, bytes: u64) {
        self.buffered_bytes.set(self.buffered_bytes.get().saturating_sub(bytes));
    }

    /// Bytes in the connection's temporary files. Between transactions: of its temporary tables,
    /// without what is in SQLite's cache.
    pub fn buffered_bytes(&self) -> u64 {
        self.buffered_bytes.get()
    }

    /// Sets the error that the client gets in place of SQLite's.
    pub fn fail(&self, error: Error) {
        *self.failure.borrow_mut() = Some(error);
    }

    /// The same, unless there is an error already.
    pub(crate) fn fail_first(&self, error: Error) {
        self.failure.borrow_mut().get_or_insert(error);
    }

    /// Forgets the state of earlier transactions and sessions.
    pub fn reset(&self) {
        self.failure.take();
        self.bump_schema.set(false);
    }

    /// Records why the pages refused an operation, and returns SQLite's code for it. `otherwise` is
    /// the code of an error.
    pub(crate) fn refused(&self, refusal: Refusal, otherwise: c_int) -> c_int {
        match refusal {
            Refusal::Conflict => return ffi::SQLITE_BUSY_SNAPSHOT,
            Refusal::Failed(error) => self.fail(error),
            Refusal::Recorded | Refusal::Interrupted => {}
        }
        otherwise
    }

    pub(crate) fn set_limits(&self, limits: TransactionLimits) {
        self.limits.set(limits);
        self.files().quota.set_limit(limits.temporary_bytes);
    }

    /// Returns true if a transaction with `changed_bytes` of changed pages may hold `more_bytes`
    /// more. Otherwise records the error.
    pub fn may_hold(&self, changed_bytes: u64, more_bytes: u64) -> bool {
        let bytes = changed_bytes + self.buffered_bytes.get() + more_bytes;
        self.keeps_within(self.limits.get().check_held(bytes))
    }

    /// Returns true if the database may grow from one number of pages to another. Otherwise records
    /// the error.
    pub fn may_grow(&self, from_pages: u32, to_pages: u32) -> bool {
        self.keeps_within(self.limits.get().check_size(from_pages, to_pages))
    }

    /// Returns true if a limit check succeeded, or its failure only delays a rollback. Otherwise
    /// records the error.
    pub fn keeps_within(&self, checked: Result<()>) -> bool {
        match checked {
            Err(error) if !self.beyond_limits.get() => {
                self.fail(error);
                self.set_beyond_limits(true);
                false
            }
            _ => true,
        }
    }

    /// Records whether a limit was exceeded. Until the statement has been rolled back it may exceed
    /// its limits.
    fn set_beyond_limits(&self, beyond: bool) {
        self.beyond_limits.set(beyond);
        self.files().quota.set_overdraft(beyond);
    }

    /// Returns true if the transaction has exceeded a limit and is being rolled back.
    pub fn is_beyond_limits(&self) -> bool {
        self.beyond_limits.get()
    }

    /// Records that a temporary file of the transaction could not be written.
    pub fn spill_failed(&self, cause: &io::Error) {
        match spill::refusal(cause) {
            Some(refusal) => drop(self.keeps_within(Err(refusal.clone()))),
            None => self.fail(spill::error(cause)),
        }
    }

    /// Sets the provider of system tables for the session that uses the connection.
    pub fn set_system(&self, system: Option<Arc<dyn System>>) {
        self.system.borrow_mut().system = system;
    }

    /// System tables do not exist for the next statement, unless they are made available to it.
    pub fn hide_system(&self) {
        self.system.borrow_mut().active = false;
    }

    /// Called when a statement begins: a previous statement that exceeded its limits has been
    /// rolled back.
    pub fn begin_statement(&self) {
        self.set_beyond_limits(false);
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

/// Describes the statement of a fiber, for the report of a fatal signal, which a fault at `address`
/// has raised.
///
/// # Safety
/// `environment` must be that of a fiber of this crate, or null. Called in a signal handler.
pub(crate) unsafe fn describe(environment: *const (), address: usize) -> Option<Running> {
    // SAFETY: the environment of a fiber is its connection's link. The fiber is stopped inside a
    // function of C or of this crate, so the cell is read without a borrow.
    unsafe {
        let link = environment.cast::<Link>().as_ref()?;
        let tenant = &*link.tenant.as_ptr();
        Some(Running {
            tenant: (tenant.as_ptr(), tenant.len()),
            partition: link.settings.database,
            text: link.text.get(),
            has_overflowed: link.suspender.is_in_guard(address),
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
pub fn checkpoint_here() -> bool {
    // SAFETY: the result is not kept.
    unsafe { current() }.is_some_and(Link::checkpoint)
}
