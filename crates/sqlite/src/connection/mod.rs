//! SQLite connections. A connection belongs to one database, and one session at a time uses it.
//! Prepared statements belong to connections; each caches the most recently used ones ([`cache`]).

mod authorize;
mod cache;
mod declaration;
mod errors;
mod functions;
mod integrity;
mod primary_key;
mod rows;
mod statements;
mod system;
mod temporary_tables;

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::rc::Rc;

use libsqlite3_sys as ffi;

pub use errors::statement_too_long;
pub(crate) use errors::{sqlite_error, too_large};
pub use statements::{BEGIN, COMMIT, Columns, Prepared, ROLLBACK, Run, Step};

use crate::fiber::{self, Fiber};
use crate::link::{Link, Settings};
use crate::pages::Pages;
use crate::variables::Variables;
use crate::vfs::{self, main_file};
use crate::{Error, MAX_STATEMENT_BYTES, Result, TransactionLimits, allocator, sqlstate};

/// Steps of SQLite's virtual machine between two checks of the clock and the cancel flag.
const STEPS_PER_CHECKPOINT: c_int = 2000;

/// An open connection. All calls into SQLite go through [`Connection::run`], on a fiber.
pub struct Connection {
    db: *mut ffi::sqlite3,
    /// The state shared with callbacks.
    pub link: Box<Link>,
    statements: cache::Cache,
    /// The session has left state in this connection that other sessions must not see (temporary
    /// tables, settings).
    pub tainted: bool,
    /// The current values of those SQLite limits that depend on the tenant.
    limits: [c_int; TENANT_LIMITS],
}

// SAFETY: connections are opened NOMUTEX and used by one session at a time; see `fiber` for
// suspended ones.
unsafe impl Send for Connection {}

/// Settings of every connection:
///
/// - synchronous is off, since the journal buffers of the VFS need no durability;
/// - the journal mode is TRUNCATE, which keeps the journal in a spillable buffer (MEMORY never
///   spills);
/// - an mmap size is set (any value), so that SQLite reads through xFetch without a copy.
const SETTINGS: &CStr = c"PRAGMA page_size=4096; PRAGMA mmap_size=1073741824; \
    PRAGMA synchronous=OFF; PRAGMA journal_mode=TRUNCATE; PRAGMA temp_store=FILE; PRAGMA foreign_keys=ON; \
    PRAGMA recursive_triggers=OFF";

/// Limits that bound the stack use of a fiber, and the length of SQL.
const LIMITS: [(c_int, c_int); 5] = [
    // Also applies to SQL in the schema. Statements are checked against the node's lower limit
    // before they get here.
    (ffi::SQLITE_LIMIT_SQL_LENGTH, MAX_STATEMENT_BYTES as c_int),
    (ffi::SQLITE_LIMIT_EXPR_DEPTH, 200),
    (ffi::SQLITE_LIMIT_COMPOUND_SELECT, 50),
    (ffi::SQLITE_LIMIT_TRIGGER_DEPTH, 50),
    (ffi::SQLITE_LIMIT_WORKER_THREADS, 0),
];

/// Limits that depend on the tenant, each with its upper bound: see [`TransactionLimits`].
const TENANT_LIMITS: usize = 3;
const MAX_VALUE_BYTES: u64 = 256 << 20;
const MAX_PATTERN_BYTES: u64 = 50_000;
const MAX_PARAMETERS: u64 = 32_766;

/// The size of SQLite's page cache. It holds only pages that are written, and spills to the
/// overlay. It is smaller on a small node, so that a writing transaction takes little of the heap.
const CACHE_BYTES: std::ops::RangeInclusive<u64> = 512 << 10..=2 << 20;
/// The page cache of one connection may take the tenant's statement memory divided by this.
const CACHE_DIVISOR: u64 = 64;

/// Maximum of changed pages that SQLite's cache keeps between transactions. SQLite would have to
/// read them again anyway if another connection has written meanwhile.
const MAX_IDLE_CACHE_BYTES: c_int = 24 << 10;

impl Connection {
    /// Creates a connection on the pages of a database. It must be opened before it is used.
    pub fn new<P: Pages + 'static>(pages: Rc<P>, settings: Settings) -> Connection {
        vfs::register();
        Connection {
            db: ptr::null_mut(),
            link: Link::new(pages, main_file::open::<P>, settings),
            statements: cache::Cache::default(),
            tainted: false,
            limits: [0; TENANT_LIMITS],
        }
    }

    /// Opens the connection.
    pub async fn open(&mut self) -> Result<()> {
        self.run(Connection::open_here)?.await
    }

    /// Runs `body` on a fiber, where it may call SQLite.
    pub fn run<'a, T: 'a>(
        &'a mut self,
        body: impl FnOnce(&mut Connection) -> T + 'a,
    ) -> Result<Fiber<'a, T>> {
        Connection::run_with(self, |connection| connection, body)
    }

    /// Runs `body` on a fiber, where it may call SQLite. `owner` contains the connection, and
    /// `body` must not replace it.
    pub fn run_with<'a, O, T: 'a>(
        owner: &'a mut O,
        connection: impl FnOnce(&mut O) -> &mut Connection,
        body: impl FnOnce(&mut O) -> T + 'a,
    ) -> Result<Fiber<'a, T>> {
        let link: *const Link = &*connection(owner).link;
        // SAFETY: the link is part of the connection, which the fiber borrows until its end.
        let fiber = unsafe {
            Fiber::new(&raw const (*link).suspender, link.cast(), move || {
                let result = body(owner);
                (*link).pages.step_aside();
                (*link).cancel.borrow().may_finish();
                result
            })
        };
        fiber.map_err(|e| {
            Error::new(sqlstate::OUT_OF_MEMORY, format!("could not allocate a stack for a statement: {e}"))
                .hint("Run fewer concurrent statements, or raise vm.max_map_count.")
        })
    }

    fn open_here(&mut self) -> Result<()> {
        const FLAGS: c_int = ffi::SQLITE_OPEN_READWRITE
            | ffi::SQLITE_OPEN_CREATE
            | ffi::SQLITE_OPEN_NOMUTEX
            | ffi::SQLITE_OPEN_PRIVATECACHE
            | ffi::SQLITE_OPEN_EXRESCODE;
        // SAFETY: plain calls of SQLite's API with valid pointers. On failure `drop` closes the
        // handle.
        unsafe {
            let code = ffi::sqlite3_open_v2(c"partition".as_ptr(), &mut self.db, FLAGS, vfs::NAME.as_ptr());
            if code != ffi::SQLITE_OK {
                return Err(self.error(code));
            }
            // SQLite's small lookaside pool would be cold in a connection that was not in use; the
            // allocator's pool is warm.
            let no_pool = ptr::null_mut::<c_void>();
            ffi::sqlite3_db_config(self.db, ffi::SQLITE_DBCONFIG_LOOKASIDE, no_pool, 0, 0);
            for (option, value) in [
                (ffi::SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0),
                (ffi::SQLITE_DBCONFIG_DEFENSIVE, 1),
                (ffi::SQLITE_DBCONFIG_DQS_DML, 0),
                (ffi::SQLITE_DBCONFIG_DQS_DDL, 0),
                // Query plans must not depend on parameters. Otherwise a parameter with statistics
                // would cause a new preparation for each binding.
                (ffi::SQLITE_DBCONFIG_ENABLE_QPSG, 1),
            ] {
                ffi::sqlite3_db_config(self.db, option, value as c_int, ptr::null_mut::<c_int>());
            }
            for (limit, value) in LIMITS {
                ffi::sqlite3_limit(self.db, limit, value);
            }
            self.set_limits(TransactionLimits::default());
            let link: *const Link = &*self.link;
            ffi::sqlite3_progress_handler(self.db, STEPS_PER_CHECKPOINT, Some(progress), link as *mut c_void);
        }
        self.execute_here(SETTINGS)?;
        let cache_bytes = self.link.heap().limit_bytes() / CACHE_DIVISOR;
        let cache_kib = cache_bytes.clamp(*CACHE_BYTES.start(), *CACHE_BYTES.end()) >> 10;
        let cache = CString::new(format!("PRAGMA cache_size=-{cache_kib}")).unwrap_or_default();
        self.execute_here(&cache)?;
        functions::register(self.db, &self.link)?;
        authorize::install(self.db, &self.link);
        Ok(())
    }

    /// Runs statements that return no rows; on the fiber.
    pub fn execute_here(&mut self, sql: &CStr) -> Result<()> {
        // SAFETY: a valid handle and a C string.
        let code =
            unsafe { ffi::sqlite3_exec(self.db, sql.as_ptr(), None, ptr::null_mut(), ptr::null_mut()) };
        self.link.heap_account.end_compiling();
        if code == ffi::SQLITE_OK { Ok(()) } else { Err(self.error(code)) }
    }

    /// Sets the resource limits of the next transactions.
    pub fn set_limits(&mut self, limits: TransactionLimits) {
        self.link.set_limits(limits);
        let heap = self.link.heap();
        let wanted = [
            (
                ffi::SQLITE_LIMIT_LENGTH,
                limits.value_bytes.min(MAX_VALUE_BYTES.min(heap.largest_value_bytes())),
            ),
            (ffi::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, limits.pattern_bytes.min(MAX_PATTERN_BYTES)),
            (ffi::SQLITE_LIMIT_VARIABLE_NUMBER, limits.parameters.min(MAX_PARAMETERS)),
        ];
        for (current, (limit, value)) in self.limits.iter_mut().zip(wanted) {
            let value = value as c_int; // within its upper bound
            if *current != value {
                *current = value;
                // SAFETY: a valid handle that this connection alone uses.
                unsafe { ffi::sqlite3_limit(self.db, limit, value) };
            }
        }
    }

    /// Maximum bytes of a value or row.
    pub(crate) fn largest_value_bytes(&self) -> u64 {
        self.limits[0] as u64
    }

    /// Makes the system tables available to the next statement; on the fiber.
    pub fn enter_system_here(&mut self) -> Result<()> {
        // SAFETY: a valid handle that this connection alone uses, and its link.
        unsafe { system::enter(self.db, &self.link) }
    }

    /// Called on the fiber after a write to temporary tables was rejected. SQLite rolls the write
    /// back when the tables are next read; until then their file keeps its size.
    pub fn recover_temporary_here(&mut self) {
        // If this fails too, the next use of the tables repeats it.
        let _ = self.execute_here(c"SELECT 1 FROM sqlite_temp_schema LIMIT 1");
    }

    /// Returns true if no transaction is open in SQLite.
    pub fn is_autocommit(&self) -> bool {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_get_autocommit(self.db) != 0 }
    }

    /// Returns true if the open transaction holds SQLite's write lock: it has changed something, or
    /// was about to.
    pub fn is_writing(&self) -> bool {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_txn_state(self.db, c"main".as_ptr()) == ffi::SQLITE_TXN_WRITE }
    }

    /// Returns true if the open transaction has changed anything, including temporary tables.
    pub fn has_changes(&self) -> bool {
        // SAFETY: a valid handle; null means all of its databases.
        unsafe { ffi::sqlite3_txn_state(self.db, ptr::null()) == ffi::SQLITE_TXN_WRITE }
    }

    /// Resets the state that SQL functions read to the beginning of the transaction, for a replay.
    /// A transaction id that the client knows is kept. `total_changes` is the session's count from
    /// before the transaction.
    pub fn restore(&mut self, begun: &Variables, last_insert_rowid: i64, changes: i64, total_changes: i64) {
        let (_, total) = self.changes();
        {
            let mut variables = self.link.variables.borrow_mut();
            let id = variables.transaction_id;
            *variables = Variables {
                changes,
                total_changes_base: total_changes - total,
                transaction_id: id,
                ..begun.clone()
            };
        }
        self.set_last_insert_rowid(last_insert_rowid);
    }

    /// Rows changed by the last statement that changes rows, and by all statements of this
    /// connection.
    pub fn changes(&self) -> (i64, i64) {
        // SAFETY: a valid handle.
        unsafe { (ffi::sqlite3_changes64(self.db), ffi::sqlite3_total_changes64(self.db)) }
    }

    /// The rowid of the last inserted row.
    pub fn last_insert_rowid(&self) -> i64 {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_last_insert_rowid(self.db) }
    }

    /// Sets what `last_insert_rowid()` returns.
    pub fn set_last_insert_rowid(&mut self, rowid: i64) {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_set_last_insert_rowid(self.db, rowid) }
    }

    /// The error of the last call, which returned `code`. An error recorded by the VFS takes
    /// precedence over SQLite's.
    pub fn error(&self, code: c_int) -> Error {
        if let Some(failure) = self.link.failure() {
            return failure;
        }
        let no_memory = code & 0xff == ffi::SQLITE_NOMEM || code == ffi::SQLITE_IOERR_NOMEM;
        if self.link.take_stack_exhausted() && no_memory {
            return errors::stack_exhausted();
        }
        // SAFETY: a valid or null handle; the message is copied immediately.
        let (message, offset) = unsafe {
            let text = CStr::from_ptr(ffi::sqlite3_errmsg(self.db)).to_string_lossy().into_owned();
            (text, ffi::sqlite3_error_offset(self.db))
        };
        match code & 0xff {
            ffi::SQLITE_TOOBIG => too_large(message, self.largest_value_bytes()),
            _ => sqlite_error(code, message, offset),
        }
    }

    /// Releases memory that the next transaction is unlikely to need.
    pub fn trim(&mut self) {
        let link: *const Link = &*self.link;
        // SAFETY: the link is part of this connection.
        unsafe { fiber::within(link.cast(), || self.trim_here()) };
    }

    /// Runs without a fiber, since it never waits.
    fn trim_here(&mut self) {
        self.statements.trim();
        system::leave(&self.link);
        if self.link.pages.take_wrote() && self.cached_bytes() > MAX_IDLE_CACHE_BYTES {
            // SAFETY: a valid handle that no other thread uses now.
            unsafe { ffi::sqlite3_db_release_memory(self.db) };
        }
        self.link.heap_account.settle(self.link.heap());
    }

    /// Memory of SQLite's page cache: copies of the pages that were written.
    fn cached_bytes(&self) -> c_int {
        let (mut now, mut most) = (0, 0);
        // SAFETY: a valid handle, and out parameters.
        unsafe {
            ffi::sqlite3_db_status(self.db, ffi::SQLITE_DBSTATUS_CACHE_USED, &mut now, &mut most, 0);
        }
        now
    }

    fn close_here(&mut self) {
        self.statements.clear();
        // SAFETY: all statements are finalized; the handle is not used again.
        unsafe { ffi::sqlite3_close(std::mem::replace(&mut self.db, ptr::null_mut())) };
        allocator::free_cached_blocks();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.db.is_null() {
            return;
        }
        // Closing rolls back the open transaction. It never waits, but may yield; a fiber that is
        // dropped then runs to its end.
        if let Ok(fiber) = self.run(Connection::close_here) {
            let _ = futures::FutureExt::now_or_never(fiber);
        }
    }
}

unsafe extern "C" fn progress(link: *mut c_void) -> c_int {
    // SAFETY: the link outlives the handle. No panic can occur before the catch below.
    let link = unsafe { &*link.cast::<Link>() };
    let ends = || !link.controls.get() && link.checkpoint();
    let ends = std::panic::catch_unwind(std::panic::AssertUnwindSafe(ends)).unwrap_or(true);
    link.failed.set(link.failed.get() || ends);
    c_int::from(ends)
}

#[cfg(test)]
mod tests;
