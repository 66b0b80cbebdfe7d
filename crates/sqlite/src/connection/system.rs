//! System tables in a connection: SQLite virtual tables and functions that read from the session's
//! [`System`](crate::System).

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_int};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use libsqlite3_sys as ffi;
use rusqlite::functions::{Aggregate, Context, FunctionFlags};
use rusqlite::types::ToSqlOutput;
use rusqlite::vtab::{
    Context as ColumnContext, Filters, IndexConstraint, IndexConstraintOp, IndexInfo, Module, VTab,
    VTabConfig, VTabConnection, VTabCursor,
};

use crate::link::Link;
use crate::system::{Database, Key, Parts, Rows, System, SystemTable, borrowed, lent, module_name, owned};
use crate::value::{Value, ValueRef};
use crate::{Error, Result, heap, lease, sqlstate};

/// Prepares a connection for a statement that uses system tables; on the fiber.
///
/// # Safety
/// `db` is a valid handle that no other thread uses now, and `link` outlives it.
pub(super) unsafe fn enter(db: *mut ffi::sqlite3, link: &Link) -> Result<()> {
    let system = {
        let mut slot = link.system.borrow_mut();
        slot.row_cache.clear();
        slot.active = true;
        let Some(system) = slot.system.clone() else { return Ok(()) };
        system.begin();
        if slot.installed {
            return Ok(());
        }
        system
    };
    let source = Source { db, link };
    // SAFETY: the caller's contract; dropping this does not close the handle.
    let connection = unsafe { rusqlite::Connection::from_handle(db) };
    connection.and_then(|connection| install(&connection, source, &*system)).map_err(|cause| {
        Error::new(sqlstate::INTERNAL, format!("could not register the system tables: {cause}"))
    })?;
    link.system.borrow_mut().installed = true;
    Ok(())
}

/// Drops the cached rows of the statement.
pub(super) fn leave(link: &Link) {
    let mut slot = link.system.borrow_mut();
    slot.system = None;
    slot.active = false;
    slot.row_cache.clear();
}

fn install(connection: &rusqlite::Connection, source: Source, system: &dyn System) -> rusqlite::Result<()> {
    const MODULE: &Module<'static, Table> = &Module::eponymous_only_module();
    for (number, table) in system.tables().iter().enumerate() {
        let narrowing = system.narrowing_columns(number);
        let table_of = TableOf { source, number, table, narrowing };
        connection.create_module(&*module_name(table.name), MODULE, Some(table_of))?;
    }
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DIRECTONLY;
    for (number, function) in system.functions().iter().enumerate() {
        if function.aggregate {
            let aggregate = CollectAggregate { source, number };
            connection.create_aggregate_function(function.name, function.arguments, flags, aggregate)?;
        } else {
            let call = move |context: &Context<'_>| {
                let arguments: Vec<ValueRef<'_>> =
                    (0..context.len()).map(|index| borrowed(context.get_raw(index))).collect();
                source.call(number, &arguments)
            };
            connection.create_scalar_function(function.name, function.arguments, flags, call)?;
        }
    }
    Ok(())
}

/// The connection that a table or function is registered with.
#[derive(Clone, Copy)]
struct Source {
    db: *mut ffi::sqlite3,
    link: *const Link,
}

// SAFETY: registered with a connection, which one fiber at a time uses and which outlives the
// registration.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}
impl std::panic::RefUnwindSafe for Source {}
impl std::panic::UnwindSafe for Source {}

impl Source {
    /// Calls the session's system. The error is recorded in full; SQLite only gets an error code.
    fn ask<T>(&self, ask: impl FnOnce(&dyn System, &Database<'_>) -> Result<T>) -> rusqlite::Result<T> {
        // SAFETY: the link outlives the connection, which is the caller.
        let link = unsafe { &*self.link };
        let system = {
            let slot = link.system.borrow();
            slot.system.clone().filter(|_| slot.active)
        };
        let answer = catch_unwind(AssertUnwindSafe(|| {
            let Some(system) = system else {
                let message = "system tables and functions can only be used in catalog queries";
                return Err(Error::new(sqlstate::UNDEFINED_FUNCTION, message));
            };
            // SAFETY: a valid handle; dropping this does not close it.
            let connection = unsafe { rusqlite::Connection::from_handle(self.db) };
            let connection = connection.map_err(|cause| Error::new(sqlstate::INTERNAL, cause.to_string()))?;
            ask(&*system, &Database { connection: &connection, link })
        }));
        let error = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error,
            Err(_) => Error::new(sqlstate::INTERNAL, "could not compute a system table"),
        };
        // A cancel must be reported as a cancel.
        if !link.cancel.borrow().is_set() {
            link.fail_first(error);
        }
        Err(failed(ffi::SQLITE_ERROR))
    }

    fn call(&self, function: usize, arguments: &[ValueRef<'_>]) -> rusqlite::Result<rusqlite::types::Value> {
        self.ask(|system, database| system.call(function, arguments, database)).map(owned)
    }

    /// Returns one part of a table; `None` behind the last one. Before it produces a part, it
    /// yields if the time slice is over, and checks for a cancel.
    fn part(&self, table: usize, part: usize) -> rusqlite::Result<Option<Rc<Rows>>> {
        // SAFETY: as in `ask`.
        let link = unsafe { &*self.link };
        if let Some(rows) = link.system.borrow().row_cache.get(table, part) {
            return Ok(rows);
        }
        if link.checkpoint() {
            return Err(failed(ffi::SQLITE_INTERRUPT));
        }
        let rows = self.ask(|system, database| {
            let rows = system.rows(table, part, database)?;
            rows.map(|rows| Rows::new(rows).map(Rc::new)).transpose()
        })?;
        link.system.borrow_mut().row_cache.put(table, part, rows.clone());
        Ok(rows)
    }
}

/// An error without a text: SQLite would have to allocate it, and if no memory is left (see
/// [`crate::heap`]) the rusqlite wrapper aborts the process.
fn failed(code: c_int) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
}

/// The registration data of a virtual table.
struct TableOf {
    source: Source,
    number: usize,
    table: &'static SystemTable,
    /// Columns that determine the part of the table that a row is in.
    narrowing: Vec<usize>,
}

#[repr(C)]
struct Table {
    base: ffi::sqlite3_vtab,
    source: Source,
    number: usize,
    narrowing: Vec<usize>,
}

#[repr(C)]
struct Cursor<'t> {
    base: ffi::sqlite3_vtab_cursor,
    source: Source,
    number: usize,
    /// The equality constraint to check here: column and value.
    wanted: Option<(usize, Key)>,
    /// The part to read next; `None` behind the last one.
    next: Option<usize>,
    /// No other part can have matching rows.
    only: bool,
    rows: Rc<Rows>,
    /// The matching rows of the part; `None` for all.
    chosen: Option<Vec<usize>>,
    at: usize,
    /// Rows returned so far.
    passed: i64,
    table: PhantomData<&'t Table>,
}

// SAFETY: `base` is the first field of both structures.
unsafe impl<'t> VTab<'t> for Table {
    type Aux = TableOf;
    type Cursor = Cursor<'t>;

    fn connect(
        db: &mut VTabConnection,
        aux: Option<&TableOf>,
        _module: &[u8],
        _database: &[u8],
        _table: &[u8],
        _arguments: &[&[u8]],
    ) -> rusqlite::Result<(Cow<'static, CStr>, Self)> {
        let of = aux.ok_or_else(|| failed(ffi::SQLITE_INTERNAL))?;
        db.config(VTabConfig::DirectOnly)?;
        let columns: Vec<String> =
            of.table.columns.iter().map(|(name, kind)| format!("\"{name}\" {kind}")).collect();
        let declaration = CString::new(format!("CREATE TABLE x({})", columns.join(", ")));
        let declaration = declaration.map_err(|_| failed(ffi::SQLITE_INTERNAL))?;
        let TableOf { source, number, ref narrowing, .. } = *of;
        let base = ffi::sqlite3_vtab::default();
        let table = Table { base, source, number, narrowing: narrowing.clone() };
        Ok((Cow::Owned(declaration), table))
    }

    /// Uses one equality constraint, preferably on a column that determines the part of the table.
    /// SQLite checks the others.
    fn best_index(&self, info: &mut IndexInfo) -> rusqlite::Result<bool> {
        const ALL_ROWS: f64 = 1000.0;
        const SOME_ROWS: f64 = 10.0;
        let equals = |(place, constraint): &(usize, IndexConstraint<'_>)| {
            constraint.is_usable()
                && constraint.column() >= 0
                && constraint.operator() == IndexConstraintOp::SQLITE_INDEX_CONSTRAINT_EQ
                && info.collation(*place) == Ok("BINARY")
        };
        let narrows = |constraint: &IndexConstraint<'_>| {
            usize::try_from(constraint.column()).is_ok_and(|column| self.narrowing.contains(&column))
        };
        let place = info
            .constraints()
            .enumerate()
            .filter(equals)
            .min_by_key(|(_, constraint)| !narrows(constraint))
            .map(|(place, _)| place);
        let Some(place) = place else {
            info.set_estimated_cost(ALL_ROWS);
            return Ok(true);
        };
        let column = info.constraints().nth(place).map_or(0, |constraint| constraint.column());
        info.constraint_usage(place).set_argv_index(1);
        info.set_idx_num(column + 1);
        info.set_estimated_cost(SOME_ROWS);
        info.set_estimated_rows(SOME_ROWS as i64);
        Ok(true)
    }

    fn open(&'t mut self) -> rusqlite::Result<Cursor<'t>> {
        Ok(Cursor {
            base: ffi::sqlite3_vtab_cursor::default(),
            source: self.source,
            number: self.number,
            wanted: None,
            next: None,
            only: false,
            rows: Rc::default(),
            chosen: None,
            at: 0,
            passed: 0,
            table: PhantomData,
        })
    }
}

impl Cursor<'_> {
    /// The index of the current row.
    fn row(&self) -> Option<usize> {
        match &self.chosen {
            Some(chosen) => chosen.get(self.at).copied(),
            None => (self.at < self.rows.all.len()).then_some(self.at),
        }
    }

    /// Advances to the next part with matching rows, unless there is a current row.
    fn advance(&mut self) -> rusqlite::Result<()> {
        while self.row().is_none() {
            // Freed before the next part is produced.
            self.rows = Rc::default();
            (self.chosen, self.at) = (None, 0);
            let Some(number) = self.next else { return Ok(()) };
            let part = self.source.part(self.number, number)?;
            self.next = (part.is_some() && !self.only).then_some(number + 1);
            let Some(part) = part else { return Ok(()) };
            let wanted = self.wanted.as_ref();
            self.chosen = wanted.and_then(|(column, wanted)| part.matching(*column, wanted));
            self.rows = part;
        }
        Ok(())
    }
}

// SAFETY: `base` is the first field.
unsafe impl VTabCursor for Cursor<'_> {
    fn filter(&mut self, column: c_int, _: Option<&str>, values: &Filters<'_>) -> rusqlite::Result<()> {
        self.rows = Rc::default();
        (self.wanted, self.chosen, self.at, self.passed) = (None, None, 0, 0);
        (self.next, self.only) = (Some(0), false);
        if column > 0 {
            let column = column as usize - 1;
            // A text without a terminating zero is copied to add one. Without memory for the copy
            // the wrapper panics.
            let wanted = catch_unwind(AssertUnwindSafe(|| {
                values.iter().next().and_then(|value| Key::of(borrowed(value)))
            }));
            if let Some(wanted) = wanted.map_err(|_| failed(ffi::SQLITE_NOMEM))? {
                let ask = |system: &dyn System, database: &Database<'_>| {
                    system.parts_with(self.number, column, wanted.as_ref(), database)
                };
                (self.next, self.only) = match self.source.ask(ask)? {
                    Parts::All => (Some(0), false),
                    Parts::One(part) => (Some(part), true),
                    Parts::None => (None, true),
                };
                self.wanted = Some((column, wanted));
            }
        }
        self.advance()
    }

    fn next(&mut self) -> rusqlite::Result<()> {
        self.at += 1;
        self.passed += 1;
        self.advance()
    }

    fn eof(&self) -> bool {
        self.row().is_none()
    }

    fn column(&self, context: &mut ColumnContext, column: c_int) -> rusqlite::Result<()> {
        let row = self.row().and_then(|row| self.rows.all.get(row));
        let value = row.and_then(|row| row.get(column as usize)).unwrap_or(&Value::Null);
        context.set_result(ToSqlOutput::Borrowed(lent(value)))
    }

    fn rowid(&self) -> rusqlite::Result<i64> {
        Ok(self.passed)
    }
}

/// An aggregate function that collects the values of its argument, in order.
struct CollectAggregate {
    source: Source,
    number: usize,
}

/// The values of one group. Their memory is charged to the connection.
#[derive(Default)]
struct CollectedValues {
    values: Vec<Value>,
    bytes: u64,
}

impl CollectedValues {
    fn push(&mut self, value: Value, bytes: usize) -> Result<()> {
        // Twice: the result is built while the values are still held.
        let bytes = 2 * (size_of::<Value>() + bytes) as u64;
        if !lease::change(0, bytes) {
            return Err(heap::exhausted());
        }
        self.bytes += bytes;
        self.values.push(value);
        Ok(())
    }
}

impl Drop for CollectedValues {
    fn drop(&mut self) {
        lease::change(self.bytes, 0);
    }
}

/// Maximum of values that one aggregate collects.
const MAX_COLLECTED_VALUES: usize = 100_000;
/// Maximum bytes of one of them.
const MAX_COLLECTED_VALUE_BYTES: usize = 1 << 10;

impl Aggregate<CollectedValues, rusqlite::types::Value> for CollectAggregate {
    fn init(&self, _: &mut Context<'_>) -> rusqlite::Result<CollectedValues> {
        Ok(CollectedValues::default())
    }

    fn step(&self, context: &mut Context<'_>, collected: &mut CollectedValues) -> rusqlite::Result<()> {
        let bytes = match context.get_raw(0) {
            rusqlite::types::ValueRef::Text(bytes) | rusqlite::types::ValueRef::Blob(bytes) => bytes.len(),
            _ => 0,
        };
        if collected.values.len() == MAX_COLLECTED_VALUES || bytes > MAX_COLLECTED_VALUE_BYTES {
            let message = format!(
                "array size exceeds the maximum of {MAX_COLLECTED_VALUES} elements of {MAX_COLLECTED_VALUE_BYTES} bytes"
            );
            return self.source.ask(|_, _| Err(Error::new(sqlstate::PROGRAM_LIMIT, message)));
        }
        let value = borrowed(context.get_raw(0)).to_owned();
        self.source.ask(|_, _| collected.push(value, bytes))
    }

    fn finalize(
        &self,
        _: &mut Context<'_>,
        collected: Option<CollectedValues>,
    ) -> rusqlite::Result<rusqlite::types::Value> {
        let Some(collected) = collected else { return Ok(rusqlite::types::Value::Null) };
        let arguments: Vec<ValueRef<'_>> = collected.values.iter().map(Value::as_ref).collect();
        self.source.call(self.number, &arguments)
    }
}
