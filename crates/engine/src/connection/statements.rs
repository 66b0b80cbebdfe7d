//! Prepared statements of a connection: preparing, binding, stepping.

use std::ffi::{CStr, c_int};
use std::ptr;

use hashbrown::HashMap;
use libsqlite3_sys as ffi;

use super::{Connection, too_large};
use crate::fiber::offload::OFFLOAD_BYTES;
use crate::session::statement_too_long;
use crate::statement::{Nowhere, Row, RowSink};
use crate::value::{Value, ValueRef};
use crate::{Error, Result, heap, sqlstate};

/// Statements that one connection keeps, and their memory.
const KEPT: usize = 64;
const KEPT_BYTES: usize = 1 << 20;

/// A statement that takes more memory (an INSERT of many rows, say) is kept within a transaction, not beyond.
const BULKY_BYTES: usize = 48 << 10;

/// A statement of SQLite's, and how its parameters are numbered.
pub(super) struct Handle {
    pub(super) raw: *mut ffi::sqlite3_stmt,
    /// For each of SQLite's parameters, the client's number (from 1). SQLite numbers `$2, $1` by appearance.
    numbers: Box<[u16]>,
    used: u64,
    /// Memory that it took when it was put into the cache.
    bytes: usize,
}

impl Handle {
    pub(super) fn without_parameters(raw: *mut ffi::sqlite3_stmt) -> Self {
        Handle { raw, numbers: Box::default(), used: 0, bytes: 0 }
    }

    /// Memory that SQLite takes for the statement.
    fn memory_bytes(&self) -> c_int {
        if self.raw.is_null() {
            return 0;
        }
        // SAFETY: a valid statement.
        unsafe { ffi::sqlite3_stmt_status(self.raw, ffi::SQLITE_STMTSTATUS_MEMUSED, 0) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: owned, finalized once; null is allowed.
        unsafe { ffi::sqlite3_finalize(self.raw) };
    }
}

/// The statements that a connection used last, by the id of [`crate::Statement`].
#[derive(Default)]
pub(super) struct Cache {
    handles: HashMap<u64, Handle>,
    /// Memory of the handles.
    bytes: usize,
    clock: u64,
    bulky: bool,
    /// Ids of texts that have no [`crate::Statement`].
    texts: HashMap<Box<str>, u64>,
    text_bytes: usize,
}

impl Cache {
    pub(super) fn clear(&mut self) {
        self.handles.clear();
        self.bytes = 0;
    }

    /// Adds a statement. Those that were used longest ago make room for it.
    fn insert(&mut self, id: u64, mut handle: Handle) {
        handle.bytes = handle.memory_bytes() as usize;
        self.remove(id);
        while self.handles.len() >= KEPT || self.bytes + handle.bytes > KEPT_BYTES {
            let oldest = self.handles.iter().min_by_key(|(_, handle)| handle.used).map(|(id, _)| *id);
            let Some(oldest) = oldest else { break };
            self.remove(oldest);
        }
        self.bulky |= handle.bytes > BULKY_BYTES;
        self.bytes += handle.bytes;
        self.handles.insert(id, handle);
    }

    fn remove(&mut self, id: u64) {
        if let Some(handle) = self.handles.remove(&id) {
            self.bytes -= handle.bytes;
        }
    }

    /// Forgets statements that take much memory.
    pub(super) fn trim(&mut self) {
        if std::mem::take(&mut self.bulky) {
            self.handles.retain(|_, handle| handle.bytes <= BULKY_BYTES);
            self.bytes = self.handles.values().map(|handle| handle.bytes).sum();
        }
    }
}

/// Columns with their declared types, where they have one.
pub(crate) type Columns = Vec<(String, Option<String>)>;

/// What SQLite says of a statement's text.
pub(crate) struct Prepared {
    /// Length of the first statement's text; what follows is the next one's.
    pub length: usize,
    /// Whether there is a statement at all.
    pub empty: bool,
    pub read_only: bool,
    /// 0, or 1 for EXPLAIN, 2 for EXPLAIN QUERY PLAN.
    pub explain: c_int,
    /// Number of parameters: the highest `$n`.
    pub parameters: usize,
    /// Names and declared types of the answer's columns.
    pub columns: Columns,
}

/// How a statement's steps ended.
pub(crate) enum Step {
    /// To its end; rows given to the sink.
    Done(u64),
    /// With a conflict; it can be run again.
    Conflict,
    /// With an error.
    Failed(Error),
}

/// The engine's own texts, with the ids that they are kept under.
pub(crate) const BEGIN: (u64, &str) = (u64::MAX, "BEGIN");
pub(crate) const COMMIT: (u64, &str) = (u64::MAX - 1, "COMMIT");
pub(crate) const ROLLBACK: (u64, &str) = (u64::MAX - 2, "ROLLBACK");

/// Ids of texts that procedures run: above those that the engine gives to statements, below its own texts.
const TEXT_IDS: u64 = 1 << 63;
/// Bytes of the texts of procedures that a connection knows; a longer one is prepared each time that it is run.
const KNOWN_TEXT_BYTES: usize = 64 << 10;

/// A statement to be run: its id, its text, and how many columns the client was told of, if it was.
pub(crate) struct Run<'a> {
    pub id: u64,
    pub sql: &'a str,
    pub columns: Option<usize>,
    pub parameters: &'a [Value],
}

impl Connection {
    /// Prepares the first statement of `sql` and describes it; on the fiber. The handle is kept under `id`.
    pub(crate) fn describe_here(&mut self, id: u64, sql: &str) -> Result<Prepared> {
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
    pub(crate) fn columns_here(&mut self, tables: &[String]) -> Result<Vec<Columns>> {
        let mut columns: Vec<Columns> = Vec::new();
        let mut bytes = 0;
        for (number, table) in tables.iter().enumerate() {
            if bytes > NAME_BYTES {
                break;
            }
            if tables[..number].contains(table) {
                continue;
            }
            let sql = format!("SELECT * FROM \"{}\" LIMIT 0", table.replace('"', "\"\""));
            let raw = match self.prepare_raw(&sql) {
                Ok((raw, _)) => raw,
                // The description is kept, so it must not depend on a cancel or a lack of memory.
                Err(error) if !error.is_of_the_sql() => return Err(error),
                // A name of a common table expression is no table.
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
        let limit_bytes = self.link.partition.node.max_statement_bytes;
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
        self.link.held.begin_compiling();
        // SAFETY: the text is `length` bytes long; SQLite copies it.
        let code = unsafe {
            let flags = ffi::SQLITE_PREPARE_PERSISTENT;
            ffi::sqlite3_prepare_v3(self.db, start, length, flags, &mut raw, &mut tail)
        };
        self.link.held.end_compiling();
        if code != ffi::SQLITE_OK {
            return Err(self.error(code));
        }
        // SAFETY: the tail points into the same text, or to its end.
        let consumed = if tail.is_null() { sql.len() } else { unsafe { tail.offset_from(start) as usize } };
        Ok((raw, consumed.min(sql.len())))
    }

    /// Runs a statement to its end; on the fiber. The caller has put the transaction's context into the link.
    pub(crate) fn run_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
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
        // SAFETY: a valid statement. The reset's code repeats that of the step.
        unsafe {
            ffi::sqlite3_reset(raw);
            ffi::sqlite3_clear_bindings(raw);
        }
        self.link.held.end_compiling();
        step
    }

    fn handle(&mut self, run: &Run<'_>) -> Result<*mut ffi::sqlite3_stmt> {
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

    /// Runs an EXPLAIN; on the fiber. What is run finds out by itself whether others have changed the schema; what is
    /// explained is not run, so it is prepared anew, by a connection that has looked.
    pub(crate) fn explain_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
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
                // A row that reports a failure of ours as one of the data, or an end that passes over it.
                ffi::SQLITE_ROW | ffi::SQLITE_DONE if self.link.failed.get() && !self.has_committed() => {
                    let error = self.failure_here();
                    self.take_back(raw);
                    return self.failed(error);
                }
                ffi::SQLITE_ROW => {
                    let row = StatementRow::of(raw);
                    // SQLite prepares anew when the schema changes; the client was told of other columns.
                    let refused = match run.columns {
                        Some(columns) if row.columns as usize != columns => Err(plan_changed()),
                        _ => sink.row(&row),
                    };
                    rows += 1;
                    if let Err(error) = refused {
                        self.take_back(raw);
                        return Step::Failed(error);
                    }
                }
                ffi::SQLITE_DONE => return Step::Done(rows),
                // It looks at the clock once more when all is done, and takes a cancel then for a failure.
                _ if self.has_committed() => return Step::Done(rows),
                code => {
                    // SAFETY: as above; the message must be taken before the reset.
                    let error = self.error(code);
                    return self.failed(error);
                }
            }
        }
    }

    /// Whether the statement was a transaction of its own, and has been committed.
    fn has_committed(&self) -> bool {
        self.is_autocommit() && self.link.transaction.borrow().committed.is_some()
    }

    /// Why a callback has failed that SQLite did not report.
    fn failure_here(&self) -> Error {
        match self.link.failure() {
            Some(failure) => failure,
            None => Error::new(sqlstate::IO_ERROR, "could not read the database"),
        }
    }

    /// Ends a statement whose rows nobody takes. One that writes has made all its changes by its first row, and would keep
    /// them: it is interrupted, with which SQLite takes back the transaction that it is in.
    fn take_back(&mut self, raw: *mut ffi::sqlite3_stmt) {
        // SAFETY: a valid statement that has just answered a row.
        unsafe {
            if ffi::sqlite3_stmt_readonly(raw) == 0 {
                ffi::sqlite3_interrupt(self.db);
                ffi::sqlite3_step(raw);
            }
        }
    }

    /// A conflict that the VFS noted, or the error.
    pub(super) fn failed(&mut self, error: Error) -> Step {
        match self.link.transaction.borrow().conflict {
            Some(_) => Step::Conflict,
            None => Step::Failed(error),
        }
    }

    /// The id of a text that procedures run, if it has one.
    pub(crate) fn known_text(&self, sql: &str) -> Option<u64> {
        self.statements.texts.get(sql).copied()
    }

    /// Gives a text an id.
    pub(crate) fn know_text(&mut self, sql: &str) -> u64 {
        let cache = &mut self.statements;
        cache.clock += 1;
        let id = TEXT_IDS + cache.clock;
        if sql.len() <= KNOWN_TEXT_BYTES {
            cache.text_bytes += sql.len();
            if cache.text_bytes > KNOWN_TEXT_BYTES {
                cache.texts.clear();
                cache.text_bytes = sql.len();
            }
            cache.texts.insert(sql.into(), id);
        }
        id
    }

    /// Tells the names of a statement's columns, as of its last run; on the fiber.
    pub(crate) fn column_names_here(&self, id: u64, mut tell: impl FnMut(&[u8])) {
        let Some(handle) = self.statements.handles.get(&id) else { return };
        // SAFETY: a valid statement; a name lives until the next call about that column.
        unsafe {
            for column in 0..ffi::sqlite3_column_count(handle.raw) {
                let name = ffi::sqlite3_column_name(handle.raw, column);
                tell(if name.is_null() { b"" } else { CStr::from_ptr(name).to_bytes() });
            }
        }
    }

    /// Runs a text of the engine's own (BEGIN, COMMIT ...), kept prepared under `id`; on the fiber.
    pub(crate) fn control_here(&mut self, id: u64, sql: &str) -> Step {
        // A COMMIT writes, and keeps to the limits whatever was refused before. A ROLLBACK may need
        // the overdraft.
        if id == COMMIT.0 {
            self.link.begin_statement();
        }
        self.link.controls.set(true);
        let step = self.run_here(&Run { id, sql, columns: Some(0), parameters: &[] }, &mut Nowhere);
        self.link.controls.set(false);
        step
    }
}

/// Bytes of the names of a statement's columns, each of which may be the longest name of a table.
const NAME_BYTES: usize = 1 << 20;

/// Names and declared types of a statement's columns.
fn declared_columns(raw: *mut ffi::sqlite3_stmt) -> Result<Columns> {
    let mut columns = Columns::new();
    let mut left_bytes = NAME_BYTES;
    // SAFETY: a valid statement; names are copied at once.
    unsafe {
        let text = |pointer: *const std::ffi::c_char| {
            (!pointer.is_null()).then(|| CStr::from_ptr(pointer).to_string_lossy().into_owned())
        };
        for column in 0..ffi::sqlite3_column_count(raw) {
            let name = text(ffi::sqlite3_column_name(raw, column)).unwrap_or_default();
            let declared = text(ffi::sqlite3_column_decltype(raw, column));
            let bytes = name.len() + declared.as_ref().map_or(0, String::len);
            left_bytes = left_bytes.checked_sub(bytes).ok_or_else(|| {
                let message = format!("the column names of a result exceed {NAME_BYTES} bytes");
                Error::new(sqlstate::PROGRAM_LIMIT, message).hint("Name the columns with AS.")
            })?;
            columns.push((name, declared));
        }
    }
    Ok(columns)
}

fn plan_changed() -> Error {
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, crate::STALE_PLAN)
        .hint("the table was altered since the statement was prepared: prepare it again")
}

/// The client's number of each of SQLite's parameters.
fn parameter_numbers(raw: *mut ffi::sqlite3_stmt) -> Result<Box<[u16]>> {
    // SAFETY: a valid statement, or null.
    let count = if raw.is_null() { 0 } else { unsafe { ffi::sqlite3_bind_parameter_count(raw) } };
    let mut numbers = Vec::with_capacity(count as usize);
    for index in 1..=count {
        // SAFETY: a valid statement; the name is looked at at once.
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
                .hint("parameters are $1, $2, ..."));
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
                format!("there is no value for parameter ${number}"),
            ));
        };
        // SAFETY: a valid statement. The values outlive the run (bindings are cleared before it returns), so SQLite
        // need not copy them.
        let code = unsafe {
            match value {
                Value::Null => ffi::sqlite3_bind_null(raw, index),
                Value::Integer(i) => ffi::sqlite3_bind_int64(raw, index, *i),
                Value::Real(r) => ffi::sqlite3_bind_double(raw, index, *r),
                Value::Text(t) => {
                    let utf8 = ffi::SQLITE_UTF8 as u8;
                    ffi::sqlite3_bind_text64(raw, index, t.as_ptr().cast(), t.len() as u64, None, utf8)
                }
                Value::Blob(b) if b.is_empty() => ffi::sqlite3_bind_zeroblob(raw, index, 0),
                Value::Blob(b) => {
                    ffi::sqlite3_bind_blob64(raw, index, b.as_ptr().cast(), b.len() as u64, None)
                }
            }
        };
        if code != ffi::SQLITE_OK {
            return Err(match code {
                ffi::SQLITE_NOMEM => heap::exhausted(),
                ffi::SQLITE_TOOBIG => {
                    too_large(format!("parameter ${number} is too large"), largest_value_bytes)
                }
                code => {
                    let message = format!("parameter ${number} cannot be bound (SQLite code {code})");
                    Error::new(sqlstate::INTERNAL, message)
                }
            });
        }
    }
    Ok(())
}

/// The row that SQLite has just produced.
struct StatementRow {
    raw: *mut ffi::sqlite3_stmt,
    columns: c_int,
}

impl StatementRow {
    fn of(raw: *mut ffi::sqlite3_stmt) -> Self {
        // SAFETY: a valid statement that has just answered a row.
        StatementRow { raw, columns: unsafe { ffi::sqlite3_data_count(raw) } }
    }
}

impl Row for StatementRow {
    fn len(&self) -> usize {
        self.columns as usize
    }

    fn get(&self, column: usize) -> ValueRef<'_> {
        assert!(column < self.len(), "column {column} of {}", self.columns);
        let column = column as c_int;
        // SAFETY: a column of the current row; the pointers stay valid until the next step, which needs this row gone.
        unsafe {
            match ffi::sqlite3_column_type(self.raw, column) {
                ffi::SQLITE_INTEGER => ValueRef::Integer(ffi::sqlite3_column_int64(self.raw, column)),
                ffi::SQLITE_FLOAT => ValueRef::Real(ffi::sqlite3_column_double(self.raw, column)),
                ffi::SQLITE_TEXT => {
                    // As a blob: a text would be copied out of its page to be ended with a zero. Partitions are UTF-8.
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
/// `pointer` is null or points to `length` bytes that live long enough.
unsafe fn bytes<'a>(pointer: *const u8, length: c_int) -> &'a [u8] {
    if pointer.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(pointer, length as usize) }
}
