//! A SQLite connection on a partition: opened, kept and used by one session at a time.
//!
//! Sessions hold no connection between transactions: they take one from the partition's [`Pool`] and give it back, so
//! thousands of idle sessions cost no SQLite memory and a few connections stay warm. Prepared statements belong to
//! connections; each keeps those it used last ([`statements`]).

mod authorize;
mod declaration;
mod errors;
mod functions;
mod integrity;
mod statements;
mod system;

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use libsqlite3_sys as ffi;
use parking_lot::Mutex;

pub(crate) use errors::{sqlite_error, too_large};
pub(crate) use statements::{BEGIN, COMMIT, Columns, Prepared, ROLLBACK, Run, Step};

use crate::engine::MAX_STATEMENT_BYTES;
use crate::fiber::{self, Fiber};
use crate::partition::Partition;
use crate::procedure::Known;
use crate::variables::Variables;
use crate::vfs::{self, Link};
use crate::{Error, Result, TransactionLimits, heap, sqlstate};

/// Steps of SQLite's virtual machine between two looks at the clock and at the cancel flag.
const STEPS_PER_CHECKPOINT: c_int = 2000;

/// An open connection. All calls into SQLite go through [`Connection::run`], on a fiber.
pub(crate) struct Connection {
    db: *mut ffi::sqlite3,
    pub(crate) link: Box<Link>,
    statements: statements::Cache,
    pub(crate) procedures: Known,
    /// The session has left something in this connection that others must not see (temporary tables, settings).
    pub(crate) tainted: bool,
    /// Those of SQLite's limits that depend on the tenant, as they are set.
    limits: [c_int; TENANT_LIMITS],
}

// SAFETY: connections are opened NOMUTEX and used by one session at a time; see `fiber` for suspended ones.
unsafe impl Send for Connection {}

/// Settings of every connection. Why each: our own journal buffers never need to be durable, so synchronous is off;
/// TRUNCATE keeps the journal in a spillable buffer (MEMORY never spills); any mmap size makes SQLite read through
/// xFetch, without a copy.
const SETTINGS: &CStr = c"PRAGMA page_size=4096; PRAGMA mmap_size=1073741824; \
    PRAGMA synchronous=OFF; PRAGMA journal_mode=TRUNCATE; PRAGMA temp_store=FILE; PRAGMA foreign_keys=ON; \
    PRAGMA recursive_triggers=OFF";

/// Limits that keep the stack of a fiber within bounds, and lengths within reason.
const LIMITS: [(c_int, c_int); 5] = [
    // Of the schema's texts too. Statements keep to the node's limit before they come here.
    (ffi::SQLITE_LIMIT_SQL_LENGTH, MAX_STATEMENT_BYTES as c_int),
    (ffi::SQLITE_LIMIT_EXPR_DEPTH, 200),
    (ffi::SQLITE_LIMIT_COMPOUND_SELECT, 50),
    (ffi::SQLITE_LIMIT_TRIGGER_DEPTH, 50),
    (ffi::SQLITE_LIMIT_WORKER_THREADS, 0),
];

/// Limits that depend on the tenant, each with its upper bound: see [`TransactionLimits`].
const TENANT_LIMITS: usize = 3;
const LARGEST_VALUE_BYTES: u64 = 256 << 20;
const LONGEST_PATTERN_BYTES: u64 = 50_000;
const MOST_PARAMETERS: u64 = 32_766;

/// SQLite's cache holds only pages that are written, and spills to the overlay: on a small node sooner, so that a transaction that
/// writes is a small one to the heap.
const CACHE_BYTES: std::ops::RangeInclusive<u64> = 512 << 10..=2 << 20;
/// The part of the tenant's memory for statements that the cache of one connection may take.
const CACHE_PART: u64 = 64;

/// Changed pages that SQLite's cache keeps between transactions. They would be read anew all the same if another
/// connection wrote meanwhile.
const KEPT_CACHE_BYTES: c_int = 24 << 10;

impl Connection {
    /// Opens a connection on a partition.
    pub(crate) async fn open(partition: Arc<Partition>) -> Result<Box<Connection>> {
        vfs::register();
        let mut connection = Box::new(Connection {
            db: ptr::null_mut(),
            link: Link::new(partition),
            statements: statements::Cache::default(),
            procedures: Known::default(),
            tainted: false,
            limits: [0; TENANT_LIMITS],
        });
        connection.run(Connection::open_here)?.await?;
        Ok(connection)
    }

    /// Runs `body` on a fiber, where it may call SQLite.
    pub(crate) fn run<'a, T: 'a>(
        &'a mut self,
        body: impl FnOnce(&mut Connection) -> T + 'a,
    ) -> Result<Fiber<'a, T>> {
        let link: *const Link = &*self.link;
        // SAFETY: the link lives in this connection, which the fiber borrows until its end.
        let fiber = unsafe {
            Fiber::new(&raw const (*link).suspender, link.cast(), move || {
                let result = body(self);
                (*link).reader.step_aside();
                (*link).cancel.borrow().may_finish();
                result
            })
        };
        fiber.map_err(|e| {
            Error::new(sqlstate::OUT_OF_MEMORY, format!("no stack for a statement: {e}"))
                .hint("too many statements wait at once; run fewer, or raise vm.max_map_count")
        })
    }

    fn open_here(&mut self) -> Result<()> {
        const FLAGS: c_int = ffi::SQLITE_OPEN_READWRITE
            | ffi::SQLITE_OPEN_CREATE
            | ffi::SQLITE_OPEN_NOMUTEX
            | ffi::SQLITE_OPEN_PRIVATECACHE
            | ffi::SQLITE_OPEN_EXRESCODE;
        // SAFETY: plain calls of SQLite's interface with valid pointers; on failure the handle is closed by `drop`.
        unsafe {
            let code = ffi::sqlite3_open_v2(c"partition".as_ptr(), &mut self.db, FLAGS, vfs::NAME.as_ptr());
            if code != ffi::SQLITE_OK {
                return Err(self.error(code));
            }
            // SQLite's small pool of every connection would be cold whenever the connection is used; the allocator's is warm.
            let no_pool = ptr::null_mut::<c_void>();
            ffi::sqlite3_db_config(self.db, ffi::SQLITE_DBCONFIG_LOOKASIDE, no_pool, 0, 0);
            for (option, value) in [
                (ffi::SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0),
                (ffi::SQLITE_DBCONFIG_DEFENSIVE, 1),
                (ffi::SQLITE_DBCONFIG_DQS_DML, 0),
                (ffi::SQLITE_DBCONFIG_DQS_DDL, 0),
                // Plans do not depend on parameters: else each binding of one that statistics speak of prepares anew.
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
        let cache_bytes = self.link.partition.heap().limit_bytes() / CACHE_PART;
        let cache_kib = cache_bytes.clamp(*CACHE_BYTES.start(), *CACHE_BYTES.end()) >> 10;
        let cache = CString::new(format!("PRAGMA cache_size=-{cache_kib}")).unwrap_or_default();
        self.execute_here(&cache)?;
        functions::register(self.db, &self.link)?;
        authorize::install(self.db, &self.link);
        Ok(())
    }

    /// Runs statements without answers; on the fiber.
    pub(crate) fn execute_here(&mut self, sql: &CStr) -> Result<()> {
        // SAFETY: a valid handle and a C string.
        let code =
            unsafe { ffi::sqlite3_exec(self.db, sql.as_ptr(), None, ptr::null_mut(), ptr::null_mut()) };
        self.link.held.end_compiling();
        if code == ffi::SQLITE_OK { Ok(()) } else { Err(self.error(code)) }
    }

    /// Sets what the next transactions may take.
    pub(crate) fn set_limits(&mut self, limits: TransactionLimits) {
        self.link.transaction.borrow_mut().limits = limits;
        self.link.files.quota.set_limit(limits.temporary_bytes);
        let heap = self.link.partition.heap();
        let wanted = [
            (
                ffi::SQLITE_LIMIT_LENGTH,
                limits.value_bytes.min(LARGEST_VALUE_BYTES.min(heap.largest_value_bytes())),
            ),
            (ffi::SQLITE_LIMIT_LIKE_PATTERN_LENGTH, limits.pattern_bytes.min(LONGEST_PATTERN_BYTES)),
            (ffi::SQLITE_LIMIT_VARIABLE_NUMBER, limits.parameters.min(MOST_PARAMETERS)),
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

    /// Bytes that a value or row may have.
    pub(crate) fn largest_value_bytes(&self) -> u64 {
        self.limits[0] as u64
    }

    /// Makes the system tables available to the next statement; on the fiber.
    pub(crate) fn enter_system_here(&mut self) -> Result<()> {
        // SAFETY: a valid handle that this connection alone uses, and its link.
        unsafe { system::enter(self.db, &self.link) }
    }

    /// After a write to temporary tables was refused; on the fiber. SQLite takes it back when it is asked for them again,
    /// and until then their file is as large as it was.
    pub(crate) fn recover_temporary_here(&mut self) {
        // If that fails too, it is tried again by who uses them next.
        let _ = self.execute_here(c"SELECT 1 FROM sqlite_temp_schema LIMIT 1");
    }

    /// Whether no transaction is open in SQLite.
    pub(crate) fn is_autocommit(&self) -> bool {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_get_autocommit(self.db) != 0 }
    }

    /// Whether the open transaction holds SQLite's write lock: it has changed something, or was about to.
    pub(crate) fn is_writing(&self) -> bool {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_txn_state(self.db, c"main".as_ptr()) == ffi::SQLITE_TXN_WRITE }
    }

    /// Whether the open transaction has changed anything, temporary tables included.
    pub(crate) fn has_changes(&self) -> bool {
        // SAFETY: a valid handle; no name means all of its databases.
        unsafe { ffi::sqlite3_txn_state(self.db, ptr::null()) == ffi::SQLITE_TXN_WRITE }
    }

    /// Puts what functions see back to where the transaction began, for a replay. A transaction id that the client knows
    /// stays. `total_changes` is what the session had counted before.
    pub(crate) fn restore(
        &mut self,
        begun: &Variables,
        last_insert_rowid: i64,
        changes: i64,
        total_changes: i64,
    ) {
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

    /// Rows changed by the last statement that changes rows, and by all of this connection.
    pub(crate) fn changes(&self) -> (i64, i64) {
        // SAFETY: a valid handle.
        unsafe { (ffi::sqlite3_changes64(self.db), ffi::sqlite3_total_changes64(self.db)) }
    }

    pub(crate) fn last_insert_rowid(&self) -> i64 {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_last_insert_rowid(self.db) }
    }

    pub(crate) fn set_last_insert_rowid(&mut self, rowid: i64) {
        // SAFETY: a valid handle.
        unsafe { ffi::sqlite3_set_last_insert_rowid(self.db, rowid) }
    }

    /// The error of the last call, which answered `code`. What the VFS noted goes before SQLite's view of it.
    pub(crate) fn error(&self, code: c_int) -> Error {
        if let Some(failure) = self.link.failure() {
            return failure;
        }
        let no_memory = code & 0xff == ffi::SQLITE_NOMEM || code == ffi::SQLITE_IOERR_NOMEM;
        if self.link.take_stack_exhausted() && no_memory {
            return errors::stack_exhausted();
        }
        // SAFETY: a valid or null handle; the message is copied at once.
        let (message, offset) = unsafe {
            let text = CStr::from_ptr(ffi::sqlite3_errmsg(self.db)).to_string_lossy().into_owned();
            (text, ffi::sqlite3_error_offset(self.db))
        };
        match code & 0xff {
            ffi::SQLITE_TOOBIG => too_large(message, self.largest_value_bytes()),
            _ => sqlite_error(code, message, offset),
        }
    }

    /// Gives back memory that the next transaction most likely has no use for.
    pub(crate) fn trim(&mut self) {
        let link: *const Link = &*self.link;
        // SAFETY: the link lives in this connection, as long as it does.
        unsafe { fiber::within(link.cast(), || self.trim_here()) };
    }

    /// It waits for nothing, so it is on no fiber of its own.
    fn trim_here(&mut self) {
        self.statements.trim();
        system::leave(&self.link);
        let wrote = std::mem::take(&mut self.link.transaction.borrow_mut().wrote);
        if wrote && self.cached_bytes() > KEPT_CACHE_BYTES {
            // SAFETY: a valid handle, used by nobody else now.
            unsafe { ffi::sqlite3_db_release_memory(self.db) };
        }
        self.link.held.settle(self.link.partition.heap());
    }

    /// What SQLite's page cache holds: copies of the pages that were written.
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
        heap::let_go();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.db.is_null() {
            return;
        }
        // Closing rolls back what is open and waits for nothing. It may want to give way; dropped then, it goes on to its end.
        if let Ok(fiber) = self.run(Connection::close_here) {
            let _ = futures::FutureExt::now_or_never(fiber);
        }
    }
}

unsafe extern "C" fn progress(link: *mut c_void) -> c_int {
    // SAFETY: the link outlives the handle. A panic cannot happen before the catch in `checkpoint`'s callees.
    let link = unsafe { &*link.cast::<Link>() };
    let ends = || !link.controls.get() && link.checkpoint();
    let ends = std::panic::catch_unwind(std::panic::AssertUnwindSafe(ends)).unwrap_or(true);
    link.failed.set(link.failed.get() || ends);
    c_int::from(ends)
}

/// Connections of a partition that wait for a session.
#[derive(Default)]
#[expect(
    clippy::vec_box,
    reason = "a connection changes hands for every statement: its pointer does, not its bytes"
)]
pub(crate) struct Pool(Mutex<Vec<Box<Connection>>>);

/// Connections that a partition keeps open at most (some 50 KiB each, for as long as it is used); more may be in use. As
/// many are in use as transactions are open at once, and opening one costs as much as a dozen statements.
const KEPT_CONNECTIONS: usize = 64;

impl Pool {
    /// The connection that was used last, so that few stay warm.
    pub(crate) fn take(&self) -> Option<Box<Connection>> {
        self.0.lock().pop()
    }

    pub(crate) fn give(&self, connection: Box<Connection>) {
        let keeps = !connection.tainted
            && !connection.link.held.is_much()
            && !connection.link.partition.heap().is_crowded();
        let mut kept = self.0.lock();
        if keeps && kept.len() < KEPT_CONNECTIONS {
            kept.push(connection);
        } else {
            drop(kept);
            drop(connection);
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Closes all that wait.
    pub(crate) fn clear(&self) {
        let connections = std::mem::take(&mut *self.0.lock());
        drop(connections);
    }
}

#[cfg(test)]
mod tests;
