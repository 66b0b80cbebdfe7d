//! The prepared statements of a connection: preparing, binding, stepping, caching.

use std::ffi::{CStr, c_int};
use std::ptr;

use libsqlite3_sys as ffi;

use super::Connection;
use super::cache::Handle;
use super::errors::{statement_too_long, too_large};
use crate::fiber::offload::OFFLOAD_BYTES;
use crate::statement::{DiscardRows, Row, RowSink};
use crate::value::{Value, ValueRef};
use crate::{Error, Result, heap, sqlstate};

/// Column names, with their declared types if they have one.
pub type Columns = Vec<(String, Option<String>)>;

/// SQLite's description of a statement.
pub struct Prepared {
    /// Length of the first statement's text; the rest belongs to the next statement.
    pub length: usize,
    /// True if the text contains no statement.
    pub empty: bool,
    /// True if SQLite reports that the statement writes nothing.
    pub read_only: bool,
    /// 0, or 1 for EXPLAIN, 2 for EXPLAIN QUERY PLAN.
    pub explain: c_int,
    /// Number of parameters: the highest `$n`.
    pub parameters: usize,
    /// Names and declared types of the result columns.
    pub columns: Columns,
}

/// The result of running a statement.
pub enum Step {
    /// It succeeded, with this many rows given to the sink.
    Done(u64),
    /// It conflicted, and can be replayed.
    Conflict,
    /// It failed.
    Failed(Error),
}

/// The BEGIN of a transaction, with the id that it is cached under.
pub const BEGIN: (u64, &str) = (u64::MAX, "BEGIN");
/// The COMMIT of a transaction, with its id.
pub const COMMIT: (u64, &str) = (u64::MAX - 1, "COMMIT");
/// The ROLLBACK of a transaction, with its id.
pub const ROLLBACK: (u64, &str) = (u64::MAX - 2, "ROLLBACK");

/// Ids of SQL texts of procedures: above those of statements, below those of the engine's
/// statements.
const TEXT_IDS: u64 = 1 << 63;
/// Maximum bytes of procedures' SQL texts that a connection caches. A longer text is prepared on
/// each run.
const MAX_CACHED_TEXT_BYTES: usize = 64 << 10;

/// A statement to run: its id, its text, and the number of columns that was reported to the client,
/// if any.
pub struct Run<'a> {
    /// The id under which the statement is cached.
    pub id: u64,
    /// Its text.
    pub sql: &'a str,
    /// The number of columns that was reported to the client, if any.
    pub columns: Option<usize>,
    /// The values of its parameters.
    pub parameters: &'a [Value],
}

impl Connection {
    /// Prepares the first statement of `sql` and describes it; on the fiber. The handle is cached
    /// under `id`.
    pub fn describe_here(&mut self, id: u64, sql: &str) -> Result<Prepared> {
        let (raw, length) = self.prepare_raw(sql)?;
        let handle = Handle { raw, numbers: parameter_numbers(raw)?, used: 0, bytes: 0 };
        if raw.is_null() {
            let columns = Vec::new();
            return Ok(Prepared { length, empty: true, read_only: true, explain: 0, parameters: 0, columns });
        }
        let columns = declared_columns(raw)?;
        // SAFETY: a valid statement.
        let prepared = unsafe {
            Prepared {
                length,
                empty: false,
                read_only: ffi::sqlite3_stmt_readonly(raw) != 0,
                explain: ffi::sqlite3_stmt_isexplain(raw),
                parameters: handle.numbers.iter().copied().max().unwrap_or(0) as usize,
                columns,
            }
        };
        self.statements.insert(id, handle);
        Ok(prepared)
    }

    /// Names and declared types of the columns of tables; on the fiber.
    pub fn columns_here(&mut self, tables: &[String]) -> Result<Vec<Columns>> {
        let mut columns: Vec<Columns> = Vec::new();
        let mut bytes = 0;
        for (number, table) in tables.iter().enumerate() {
            if bytes > MAX_COLUMN_NAME_BYTES {
                break;
            }
            if tables[..number].contains(table) {
                continue;
            }
            let sql = format!("SELECT * FROM \"{}\" LIMIT 0", table.replace('"', "\"\""));
            let raw = match self.prepare_raw(&sql) {
                Ok((raw, _)) => raw,
                // The description is cached, so it must not depend on a cancel or a lack of memory.
                Err(error) if !error.is_of_the_sql() => return Err(error),
                // The name of a common table expression is not a table.
                Err(_) => continue,
            };
            let handle = Handle::without_parameters(raw);
            let Ok(of_table) = declared_columns(handle.raw) else { continue };
            bytes += of_table.iter().map(|(name, _)| name.len()).sum::<usize>();
            columns.push(of_table);
        }
        Ok(columns)
    }

    pub(super) fn prepare_raw(&mut self, sql: &str) -> Result<(*mut ffi::sqlite3_stmt, usize)> {
        let limit_bytes = self.link.settings.max_statement_bytes;
        if sql.len() > limit_bytes {
            return Err(statement_too_long(limit_bytes));
        }
        let _noted = self.link.note_text(sql);
        if sql.len() > OFFLOAD_BYTES && !self.link.offload() {
            return Err(self.link.cancel.borrow().error());
        }
        let mut raw = ptr::null_mut();
        let mut tail = ptr::null();
        let (start, length) = (sql.as_ptr().cast(), sql.len() as c_int);
        self.link.heap_account.begin_compiling();
        // SAFETY: the text is `length` bytes long; SQLite copies it.
        let code = unsafe {
            let flags = ffi::SQLITE_PREPARE_PERSISTENT;
            ffi::sqlite3_prepare_v3(self.db, start, length, flags, &mut raw, &mut tail)
        };
        self.link.heap_account.end_compiling();
        if code != ffi::SQLITE_OK {
            return Err(self.error(code));
        }
        // SAFETY: the tail points into the same text, or to its end.
        let consumed = if tail.is_null() { sql.len() } else { unsafe { tail.offset_from(start) as usize } };
        Ok((raw, consumed.min(sql.len())))
    }

    /// Runs a statement; on the fiber. The caller has put the transaction's context into the link.
    pub fn run_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
        self.link.failed.set(false);
        let raw = match self.handle(run) {
            Ok(raw) => raw,
            Err(error) => return self.failed(error),
        };
        let _noted = self.link.note_text(run.sql);
        if run.parameters.iter().any(|value| value.bytes() > OFFLOAD_BYTES) && !self.link.offload() {
            return Step::Failed(self.link.cancel.borrow().error());
        }
        let numbers = &self.statements.handles[&run.id].numbers;
        let step = match bind(raw, numbers, run.parameters, self.largest_value_bytes()) {
            Ok(()) => self.step_to_end(raw, run, sink),
            Err(error) => Step::Failed(error),
        };
        // SAFETY: a valid statement. The reset returns the same code as the step.
        unsafe {
            ffi::sqlite3_reset(raw);
            ffi::sqlite3_clear_bindings(raw);
        }
        self.link.heap_account.end_compiling();
        step
    }

    pub(super) fn handle(&mut self, run: &Run<'_>) -> Result<*mut ffi::sqlite3_stmt> {
        self.statements.clock += 1;
        let used = self.statements.clock;
        if let Some(handle) = self.statements.handles.get_mut(&run.id) {
            handle.used = used;
            return Ok(handle.raw);
        }
        let (raw, _) = self.prepare_raw(run.sql)?;
        let handle = Handle { raw, numbers: parameter_numbers(raw)?, used, bytes: 0 };
        self.statements.insert(run.id, handle);
        Ok(raw)
    }

    /// Runs an EXPLAIN; on the fiber. SQLite checks for schema changes only when it runs a
    /// statement, not when it explains one. So the statement is prepared again, after a read of the
    /// schema.
    pub fn explain_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
        self.statements.remove(run.id);
        match self.execute_here(c"SELECT 1 FROM sqlite_schema LIMIT 1") {
            Ok(()) => self.run_here(run, sink),
            Err(error) => self.failed(error),
        }
    }

    fn step_to_end(&mut self, raw: *mut ffi::sqlite3_stmt, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
        let mut rows = 0;
        loop {
            // SAFETY: a valid, bound statement.
            match unsafe { ffi::sqlite3_step(raw) } {
                // A row that hides a failed callback, or an end that ignores it.
                ffi::SQLITE_ROW | ffi::SQLITE_DONE if self.link.failed.get() && !self.has_committed() => {
                    let error = self.failure_here();
                    self.interrupt(raw);
                    return self.failed(error);
                }
                ffi::SQLITE_ROW => {
                    let row = StatementRow::of(raw);
                    // SQLite prepares the statement again after a schema change; the client knows
                    // the old columns.
                    let refused = match run.columns {
                        Some(columns) if row.columns as usize != columns => Err(plan_changed()),
                        _ => sink.row(&row),
                    };
                    rows += 1;
                    if let Err(error) = refused {
                        self.interrupt(raw);
                        return Step::Failed(error);
                    }
                }
                ffi::SQLITE_DONE => return Step::Done(rows),
                // SQLite checks the clock once more after a commit, and reports a cancel at that
                // moment as a failure.
                _ if self.has_committed() => return Step::Done(rows),
                code => {
                    // SAFETY: as above. The message must be read before the reset.
                    let error = self.error(code);
                    return self.failed(error);
                }
            }
        }
    }

    /// Returns true if the statement ran in its own transaction, and that has been committed.
    fn has_committed(&self) -> bool {
        self.is_autocommit() && self.link.pages.has_committed()
    }

    /// The error of a callback whose failure SQLite did not report.
    pub(super) fn failure_here(&self) -> Error {
        match self.link.failure() {
            Some(failure) => failure,
            None => Error::new(sqlstate::IO_ERROR, "could not read the database"),
        }
    }

    /// Ends a statement whose rows are rejected. A statement that writes has made all its changes
    /// before its first row. It is interrupted, so that SQLite rolls back the transaction.
    fn interrupt(&mut self, raw: *mut ffi::sqlite3_stmt) {
        // SAFETY: a valid statement that has just returned a row.
        unsafe {
            if ffi::sqlite3_stmt_readonly(raw) == 0 {
                ffi::sqlite3_interrupt(self.db);
                ffi::sqlite3_step(raw);
            }
        }
    }

    /// A conflict if the VFS has recorded one, otherwise the error.
    pub(super) fn failed(&mut self, error: Error) -> Step {
        match self.link.pages.has_conflicted() {
            true => Step::Conflict,
            false => Step::Failed(error),
        }
    }

    /// The id of a procedure's SQL text, if it is cached.
    pub fn cached_text_id(&self, sql: &str) -> Option<u64> {
        self.statements.texts.get(sql).copied()
    }

    /// Assigns an id to a procedure's SQL text.
    pub fn cache_text(&mut self, sql: &str) -> u64 {
        let cache = &mut self.statements;
        cache.clock += 1;
        let id = TEXT_IDS + cache.clock;
        if sql.len() <= MAX_CACHED_TEXT_BYTES {
            cache.text_bytes += sql.len();
            if cache.text_bytes > MAX_CACHED_TEXT_BYTES {
                cache.texts.clear();
                cache.text_bytes = sql.len();
            }
            cache.texts.insert(sql.into(), id);
        }
        id
    }

    /// Reports the column names of a statement, as of its last run; on the fiber.
    pub fn column_names_here(&self, id: u64, mut report: impl FnMut(&[u8])) {
        let Some(handle) = self.statements.handles.get(&id) else { return };
        // SAFETY: a valid statement; a name is valid until the next call for that column.
        unsafe {
            for column in 0..ffi::sqlite3_column_count(handle.raw) {
                let name = ffi::sqlite3_column_name(handle.raw, column);
                report(if name.is_null() { b"" } else { CStr::from_ptr(name).to_bytes() });
            }
        }
    }

    /// Runs one of the engine's statements (BEGIN, COMMIT ...), cached under `id`; on the fiber.
    pub fn control_here(&mut self, id: u64, sql: &str) -> Step {
        // A COMMIT writes, and must respect the limits even if something was rejected before. A
        // ROLLBACK may need the overdraft.
        if id == COMMIT.0 {
            self.link.begin_statement();
        }
        self.link.controls.set(true);
        let step = self.run_here(&Run { id, sql, columns: Some(0), parameters: &[] }, &mut DiscardRows);
        self.link.controls.set(false);
        step
    }
}

/// Maximum bytes of the column names of a result. Each can be as long as the longest name in the
/// schema.
const MAX_COLUMN_NAME_BYTES: usize = 1 << 20;

/// Names and declared types of a statement's columns.
fn declared_columns(raw: *mut ffi::sqlite3_stmt) -> Result<Columns> {
    let mut columns = Columns::new();
    let mut left_bytes = MAX_COLUMN_NAME_BYTES;
    // SAFETY: a valid statement; names are copied immediately.
    unsafe {
        let text = |pointer: *const std::ffi::c_char| {
            (!pointer.is_null()).then(|| CStr::from_ptr(pointer).to_string_lossy().into_owned())
        };
        for column in 0..ffi::sqlite3_column_count(raw) {
            let name = text(ffi::sqlite3_column_name(raw, column)).unwrap_or_default();
            let declared = text(ffi::sqlite3_column_decltype(raw, column));
            let bytes = name.len() + declared.as_ref().map_or(0, String::len);
            left_bytes = left_bytes.checked_sub(bytes).ok_or_else(|| {
                let message = format!("column names of the result exceed {MAX_COLUMN_NAME_BYTES} bytes");
                Error::new(sqlstate::PROGRAM_LIMIT, message).hint("Give the columns shorter names with AS.")
            })?;
            columns.push((name, declared));
        }
    }
    Ok(columns)
}

fn plan_changed() -> Error {
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, crate::STALE_PLAN)
        .hint("The table was altered after the statement was prepared. Prepare the statement again.")
}

/// The client's number of each SQLite parameter.
fn parameter_numbers(raw: *mut ffi::sqlite3_stmt) -> Result<Box<[u16]>> {
    // SAFETY: a valid statement, or null.
    let count = if raw.is_null() { 0 } else { unsafe { ffi::sqlite3_bind_parameter_count(raw) } };
    let mut numbers = Vec::with_capacity(count as usize);
    for index in 1..=count {
        // SAFETY: a valid statement; the name is used immediately.
        let name = unsafe {
            let name = ffi::sqlite3_bind_parameter_name(raw, index);
            if name.is_null() { &[][..] } else { CStr::from_ptr(name).to_bytes() }
        };
        let number = match name.split_first() {
            None => Some(index as u16),
            Some((b'$' | b'?', digits)) => std::str::from_utf8(digits).ok().and_then(|d| d.parse().ok()),
            Some(_) => None,
        };
        let Some(number) = number.filter(|n| *n > 0) else {
            let name = String::from_utf8_lossy(name).into_owned();
            return Err(Error::new(sqlstate::SYNTAX_ERROR, format!("parameter \"{name}\" is not numbered"))
                .hint("Name the parameters $1, $2, ..."));
        };
        numbers.push(number);
    }
    Ok(numbers.into())
}

fn bind(
    raw: *mut ffi::sqlite3_stmt,
    numbers: &[u16],
    parameters: &[Value],
    largest_value_bytes: u64,
) -> Result<()> {
    for (index, number) in (1..).zip(numbers) {
        let Some(value) = parameters.get(*number as usize - 1) else {
            return Err(Error::new(
                sqlstate::PROTOCOL_VIOLATION,
                format!("no value found for parameter ${number}"),
            ));
        };
        // SAFETY: a valid statement. The values outlive the run: bindings are cleared before it returns.
        let code = unsafe { bind_value(raw, index, value.as_ref()) };
        if code != ffi::SQLITE_OK {
            return Err(match code {
                ffi::SQLITE_NOMEM => heap::exhausted(),
                ffi::SQLITE_TOOBIG => {
                    too_large(format!("parameter ${number} is too large"), largest_value_bytes)
                }
                code => {
                    let message = format!("could not bind parameter ${number} (SQLite code {code})");
                    Error::new(sqlstate::INTERNAL, message)
                }
            });
        }
    }
    Ok(())
}

/// Binds a value, which SQLite does not copy. Returns SQLite's code.
///
/// # Safety
/// `raw` is a valid statement that is not active. The value lives until another one is bound.
pub(super) unsafe fn bind_value(raw: *mut ffi::sqlite3_stmt, index: c_int, value: ValueRef<'_>) -> c_int {
    // SAFETY: the caller's contract.
    unsafe {
        match value {
            ValueRef::Null => ffi::sqlite3_bind_null(raw, index),
            ValueRef::Integer(i) => ffi::sqlite3_bind_int64(raw, index, i),
            ValueRef::Real(r) => ffi::sqlite3_bind_double(raw, index, r),
            ValueRef::Text(t) => {
                let utf8 = ffi::SQLITE_UTF8 as u8;
                ffi::sqlite3_bind_text64(raw, index, t.as_ptr().cast(), t.len() as u64, None, utf8)
            }
            ValueRef::Blob([]) => ffi::sqlite3_bind_zeroblob(raw, index, 0),
            ValueRef::Blob(b) => {
                ffi::sqlite3_bind_blob64(raw, index, b.as_ptr().cast(), b.len() as u64, None)
            }
        }
    }
}

/// The row that SQLite has just produced.
pub(super) struct StatementRow {
    raw: *mut ffi::sqlite3_stmt,
    columns: c_int,
}

impl StatementRow {
    pub(super) fn of(raw: *mut ffi::sqlite3_stmt) -> Self {
        // SAFETY: a valid statement that has just returned a row.
        StatementRow { raw, columns: unsafe { ffi::sqlite3_data_count(raw) } }
    }
}

impl Row for StatementRow {
    fn len(&self) -> usize {
        self.columns as usize
    }

    fn get(&self, column: usize) -> ValueRef<'_> {
        assert!(column < self.len(), "column {column} out of range for a row of {} columns", self.columns);
        let column = column as c_int;
        // SAFETY: a column of the current row. The pointers are valid until the next step, and this
        // row does not outlive it.
        unsafe {
            match ffi::sqlite3_column_type(self.raw, column) {
                ffi::SQLITE_INTEGER => ValueRef::Integer(ffi::sqlite3_column_int64(self.raw, column)),
                ffi::SQLITE_FLOAT => ValueRef::Real(ffi::sqlite3_column_double(self.raw, column)),
                ffi::SQLITE_TEXT => {
                    // Read as a blob: SQLite would copy a text out of its page to add a terminating
                    // zero. Partitions are UTF-8.
                    let text = ffi::sqlite3_column_blob(self.raw, column);
                    ValueRef::Text(bytes(text.cast(), ffi::sqlite3_column_bytes(self.raw, column)))
                }
                ffi::SQLITE_BLOB => {
                    let blob = ffi::sqlite3_column_blob(self.raw, column);
                    ValueRef::Blob(bytes(blob.cast(), ffi::sqlite3_column_bytes(self.raw, column)))
                }
                _ => ValueRef::Null,
            }
        }
    }
}

/// # Safety
/// `pointer` is null or points to `length` bytes that are valid for `'a`.
unsafe fn bytes<'a>(pointer: *const u8, length: c_int) -> &'a [u8] {
    if pointer.is_null() {
        return &[];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(pointer, length as usize) }
}
