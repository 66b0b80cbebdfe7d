//! System tables in a connection: SQLite's virtual tables and functions over what a session's
//! [`System`](crate::System) answers.

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

use crate::system::{Database, Key, Parts, Rows, System, SystemTable, borrowed, lent, owned};
use crate::value::{Value, ValueRef};
use crate::vfs::Link;
use crate::{Error, Result, heap, sqlstate};

/// Makes a connection ready for a statement that uses system tables; on the fiber.
///
/// # Safety
/// `db` is a valid handle, used by nobody else now, and `link` outlives it.
pub(super) unsafe fn enter(db: *mut ffi::sqlite3, link: &Link) -> Result<()> {
    let system = {
        let mut slot = link.system.borrow_mut();
        slot.kept.clear();
        slot.active = true;
        let Some(system) = slot.system.clone() else { return Ok(()) };
        system.begin();
        if slot.installed {
            return Ok(());
        }
        system
    };
    let source = Source { db, link };
    // SAFETY: the caller's promise; the handle is not closed when this goes.
    let connection = unsafe { rusqlite::Connection::from_handle(db) };
    connection.and_then(|connection| install(&connection, source, &*system)).map_err(|cause| {
        Error::new(sqlstate::INTERNAL, format!("the system tables cannot be registered: {cause}"))
    })?;
    link.system.borrow_mut().installed = true;
    Ok(())
}

/// Forgets the rows that a statement has asked for.
pub(super) fn leave(link: &Link) {
    let mut slot = link.system.borrow_mut();
    slot.system = None;
    slot.active = false;
    slot.kept.clear();
}

fn install(connection: &rusqlite::Connection, source: Source, system: &dyn System) -> rusqlite::Result<()> {
    const MODULE: &Module<'static, Table> = &Module::eponymous_only_module();
    for (number, table) in system.tables().iter().enumerate() {
        let narrowing = system.narrowing_columns(number);
        connection.create_module(table.name, MODULE, Some(TableOf { source, number, table, narrowing }))?;
    }
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DIRECTONLY;
    for (number, function) in system.functions().iter().enumerate() {
        if function.aggregate {
            let gather = Gather { source, number };
            connection.create_aggregate_function(function.name, function.arguments, flags, gather)?;
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

/// Where a table or function belongs.
#[derive(Clone, Copy)]
struct Source {
    db: *mut ffi::sqlite3,
    link: *const Link,
}

// SAFETY: registered with a connection, which is used by one fiber at a time and outlives what was registered.
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Sync for Source {}
impl std::panic::RefUnwindSafe for Source {}
impl std::panic::UnwindSafe for Source {}

impl Source {
    /// Asks the session's system. What goes wrong is remembered as it is; SQLite only knows that something did.
    fn ask<T>(&self, ask: impl FnOnce(&dyn System, &Database<'_>) -> Result<T>) -> rusqlite::Result<T> {
        // SAFETY: the link outlives the connection, which calls.
        let link = unsafe { &*self.link };
        let system = {
            let slot = link.system.borrow();
            slot.system.clone().filter(|_| slot.active)
        };
        let answer = catch_unwind(AssertUnwindSafe(|| {
            let Some(system) = system else {
                let message = "no such function or table here: it is there for questions to the catalog";
                return Err(Error::new(sqlstate::UNDEFINED_FUNCTION, message));
            };
            // SAFETY: a valid handle, which is not closed when this goes.
            let connection = unsafe { rusqlite::Connection::from_handle(self.db) };
            let connection = connection.map_err(|cause| Error::new(sqlstate::INTERNAL, cause.to_string()))?;
            ask(&*system, &Database { connection: &connection, link })
        }));
        let error = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error,
            Err(_) => Error::new(sqlstate::INTERNAL, "a system table could not be computed"),
        };
        // A cancel is told as what it is.
        if !link.cancel.borrow().is_set() {
            link.transaction.borrow_mut().failure.get_or_insert(error);
        }
        Err(failed(ffi::SQLITE_ERROR))
    }

    fn call(&self, function: usize, arguments: &[ValueRef<'_>]) -> rusqlite::Result<rusqlite::types::Value> {
        self.ask(|system, database| system.call(function, arguments, database)).map(owned)
    }

    /// A part of a table; `None` behind the last one. Each part that has to be produced ends the time slice if it is over, and
    /// heeds a cancel.
    fn part(&self, table: usize, part: usize) -> rusqlite::Result<Option<Rc<Rows>>> {
        // SAFETY: as in `ask`.
        let link = unsafe { &*self.link };
        if let Some(rows) = link.system.borrow().kept.get(table, part) {
            return Ok(rows);
        }
        if link.checkpoint() {
            return Err(failed(ffi::SQLITE_INTERRUPT));
        }
        let rows = self.ask(|system, database| {
            let rows = system.rows(table, part, database)?;
            rows.map(|rows| Rows::new(rows).map(Rc::new)).transpose()
        })?;
        link.system.borrow_mut().kept.put(table, part, rows.clone());
        Ok(rows)
    }
}

/// A failure without a text: SQLite would be asked for memory for that, and when it has none left (see [`crate::heap`]) the
/// wrapper around it ends the process.
fn failed(code: c_int) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
}

/// What a virtual table is registered with.
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
    /// The column that must equal something, and what.
    wanted: Option<(usize, Key)>,
    /// The part to be read next; `None` behind the last.
    next: Option<usize>,
    /// No other part has rows that are wanted.
    only: bool,
    rows: Rc<Rows>,
    /// Those of the part that the statement wants; `None` for all.
    chosen: Option<Vec<usize>>,
    at: usize,
    /// Rows that were passed.
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

    /// Uses one equality constraint, preferably on a column that determines the part of the table. SQLite checks the others.
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
    /// The row that it stands on.
    fn row(&self) -> Option<usize> {
        match &self.chosen {
            Some(chosen) => chosen.get(self.at).copied(),
            None => (self.at < self.rows.all.len()).then_some(self.at),
        }
    }

    /// Goes to the next part that has wanted rows, unless it stands on one.
    fn settle(&mut self) -> rusqlite::Result<()> {
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
            // A text that was given without a zero at its end is copied for it, for which there may be no memory: the wrapper panics.
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
        self.settle()
    }

    fn next(&mut self) -> rusqlite::Result<()> {
        self.at += 1;
        self.passed += 1;
        self.settle()
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

/// An aggregate function: the values of its argument, in order.
struct Gather {
    source: Source,
    number: usize,
}

/// The values of one group, which are charged to the connection.
#[derive(Default)]
struct Gathered {
    values: Vec<Value>,
    bytes: u64,
}

impl Gathered {
    fn push(&mut self, value: Value, bytes: usize) -> Result<()> {
        // The result is made of them while they are held.
        let bytes = 2 * (size_of::<Value>() + bytes) as u64;
        if !heap::change(0, bytes) {
            return Err(heap::exhausted());
        }
        self.bytes += bytes;
        self.values.push(value);
        Ok(())
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        heap::change(self.bytes, 0);
    }
}

/// Values that one aggregate gathers at most.
const GATHERED: usize = 100_000;
/// Bytes of one of them.
const LONGEST_GATHERED_BYTES: usize = 1 << 10;

impl Aggregate<Gathered, rusqlite::types::Value> for Gather {
    fn init(&self, _: &mut Context<'_>) -> rusqlite::Result<Gathered> {
        Ok(Gathered::default())
    }

    fn step(&self, context: &mut Context<'_>, gathered: &mut Gathered) -> rusqlite::Result<()> {
        let bytes = match context.get_raw(0) {
            rusqlite::types::ValueRef::Text(bytes) | rusqlite::types::ValueRef::Blob(bytes) => bytes.len(),
            _ => 0,
        };
        if gathered.values.len() == GATHERED || bytes > LONGEST_GATHERED_BYTES {
            let message =
                format!("an array has at most {GATHERED} elements of {LONGEST_GATHERED_BYTES} bytes");
            return self.source.ask(|_, _| Err(Error::new(sqlstate::PROGRAM_LIMIT, message)));
        }
        let value = borrowed(context.get_raw(0)).to_owned();
        self.source.ask(|_, _| gathered.push(value, bytes))
    }

    fn finalize(
        &self,
        _: &mut Context<'_>,
        gathered: Option<Gathered>,
    ) -> rusqlite::Result<rusqlite::types::Value> {
        let Some(gathered) = gathered else { return Ok(rusqlite::types::Value::Null) };
        let arguments: Vec<ValueRef<'_>> = gathered.values.iter().map(Value::as_ref).collect();
        self.source.call(self.number, &arguments)
    }
}
