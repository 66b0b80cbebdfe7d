//! System tables and functions: information about the node and the tenant's schema, in SQL.
//!
//! ```text
//! SELECT relname FROM pg_class WHERE relkind = 'r'
//!                     `- a virtual table, whose rows the session's [`System`] produces on demand
//! ```
//!
//! They are installed in a connection (`connection/system`) when a statement first uses them, which
//! on most connections never happens. They answer for the connection's current session; the
//! [`System`] decides about visibility. Views and triggers cannot use them: a database must mean the
//! same on every node. A user's table of the same name takes precedence over a table of `pg_catalog`,
//! but not over a table whose name includes its schema ([`module_name`]).
//!
//! Rows are produced while the statement reads them, one part of a table at a time: a tenant may
//! have millions of columns, and `pg_attribute` has a row for each. A statement caches up to 4 MiB
//! of rows for joins that read them again; larger tables are produced again. Rows in memory are
//! charged to the connection ([`crate::heap`]).

use std::borrow::Cow;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use hashbrown::HashMap;
use rusqlite::ErrorCode;
use rusqlite::types::ValueRef as SqlRef;

use crate::link::Link;
use crate::value::{Value, ValueRef};
use crate::{Error, Result, sqlstate};
use crate::{heap, lease};

/// A table that is computed when it is read.
#[derive(Clone, Copy, Debug)]
pub struct SystemTable {
    /// The table's name, which may include its schema: `information_schema.tables`.
    pub name: &'static str,
    /// Names and declared types of the columns.
    pub columns: &'static [(&'static str, &'static str)],
}

/// Part of the name of a module. SQLite permits no user's table, view or index with this prefix.
const MODULE_PREFIX: &str = "sqlite_system_";

/// The name of a system table in SQLite. Administrators trust what a table of the schema `fulmar`
/// says about a tenant, so the tenant must not be able to replace it.
pub fn module_name(table: &str) -> Cow<'_, str> {
    match table.contains('.') {
        true => format!("{MODULE_PREFIX}{table}").into(),
        false => table.into(),
    }
}

/// Replaces names of modules in a message of SQLite by those of the system tables.
pub(crate) fn with_table_names(message: String) -> String {
    match message.contains(MODULE_PREFIX) {
        true => message.replace(MODULE_PREFIX, ""),
        false => message,
    }
}

/// A function that a session provides.
#[derive(Debug)]
pub struct SystemFunction {
    /// The function's name.
    pub name: &'static str,
    /// Number of arguments; -1 for any number.
    pub arguments: i32,
    /// Whether the function aggregates: it then receives its first argument of all rows.
    pub aggregate: bool,
}

/// The system tables and functions of a session.
pub trait System: Send + Sync {
    /// The tables; the same for all sessions.
    fn tables(&self) -> &'static [SystemTable];

    /// The functions; the same for all sessions.
    fn functions(&self) -> &'static [SystemFunction];

    /// Called when a statement begins or is replayed: cached information of earlier statements may
    /// be outdated.
    fn begin(&self);

    /// Returns the rows of one part of a table, each with a value for every column; None after the
    /// last part. Parts are numbered from 0, and do not change during a statement.
    fn rows(&self, table: usize, part: usize, database: &Database<'_>) -> Result<Option<Vec<Vec<Value>>>>;

    /// The columns for which [`System::parts_with`] narrows the parts down.
    fn narrowing_columns(&self, table: usize) -> Vec<usize>;

    /// Returns the parts that can contain rows whose `column` equals `value`.
    fn parts_with(
        &self,
        table: usize,
        column: usize,
        value: ValueRef<'_>,
        database: &Database<'_>,
    ) -> Result<Parts>;

    /// Calls a function.
    fn call(&self, function: usize, arguments: &[ValueRef<'_>], database: &Database<'_>) -> Result<Value>;
}

/// The parts of a table to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// All parts.
    All,
    /// One part.
    One(usize),
    /// No part.
    None,
}

/// The tenant's database, as seen by the calling statement.
pub struct Database<'a> {
    pub(crate) connection: &'a rusqlite::Connection,
    pub(crate) link: &'a Link,
}

impl Database<'_> {
    /// Waits for a future without holding the thread. Fails if the statement is cancelled.
    pub fn wait<F: Future>(&self, future: F) -> Result<F::Output> {
        self.link.wait(future).map_err(|_| self.link.cancel.borrow().error())
    }

    /// Runs a query, and collects its rows.
    pub fn query(&self, sql: &str, parameters: &[&str]) -> Result<Vec<Vec<Value>>> {
        let mut rows = Vec::new();
        self.each(sql, parameters, |row| {
            rows.push(row.iter().map(|value| ValueRef::to_owned(*value)).collect())
        })?;
        Ok(rows)
    }

    /// Runs a query, and calls `take` for each row.
    pub fn each(&self, sql: &str, parameters: &[&str], mut take: impl FnMut(&[ValueRef<'_>])) -> Result<()> {
        let failed = |cause: rusqlite::Error| match cause.sqlite_error_code() {
            Some(ErrorCode::OutOfMemory) => heap::exhausted(),
            Some(ErrorCode::OperationInterrupted) => self.link.cancel.borrow().error(),
            _ => Error::new(sqlstate::INTERNAL, format!("could not read the schema: {cause}")),
        };
        let mut statement = self.connection.prepare(sql).map_err(failed)?;
        let count = statement.column_count();
        let mut rows = statement.query(rusqlite::params_from_iter(parameters)).map_err(failed)?;
        while let Some(row) = rows.next().map_err(failed)? {
            let values = (0..count).map(|column| row.get_ref(column).map(borrowed));
            take(&values.collect::<rusqlite::Result<Vec<_>>>().map_err(failed)?);
        }
        Ok(())
    }
}

/// State of the system tables in a connection.
#[derive(Default)]
pub(crate) struct Slot {
    /// The system of the connection's current session.
    pub(crate) system: Option<Arc<dyn System>>,
    pub(crate) installed: bool,
    /// Whether the running statement may use system tables. If not, they do not exist for it.
    pub(crate) active: bool,
    /// Rows that the running statement has read.
    pub(crate) row_cache: RowCache,
}

/// Maximum size of the cached rows of a statement.
const MAX_CACHED_BYTES: u64 = 4 << 20;

/// Cached parts of tables; None after the last part of a table.
#[derive(Default)]
pub(crate) struct RowCache {
    parts: HashMap<(usize, usize), Option<Rc<Rows>>>,
    bytes: u64,
}

impl RowCache {
    pub(crate) fn get(&self, table: usize, part: usize) -> Option<Option<Rc<Rows>>> {
        self.parts.get(&(table, part)).cloned()
    }

    /// Caches a part, unless it is too large. If the cache is full it is emptied first.
    pub(crate) fn put(&mut self, table: usize, part: usize, rows: Option<Rc<Rows>>) {
        let bytes = rows.as_ref().map_or(0, |rows| rows.bytes);
        if self.bytes + bytes > MAX_CACHED_BYTES {
            self.clear();
        }
        if bytes <= MAX_CACHED_BYTES {
            self.bytes += bytes;
            self.parts.insert((table, part), rows);
        }
    }

    pub(crate) fn clear(&mut self) {
        if !self.parts.is_empty() {
            self.parts.clear();
        }
        self.bytes = 0;
    }
}

/// The rows of a part of a table during one statement. They are created and dropped on the
/// statement's fiber, whose connection is charged for them.
#[derive(Default)]
pub(crate) struct Rows {
    pub(crate) all: Vec<Vec<Value>>,
    bytes: u64,
    /// Indexes of columns that were looked up.
    indexes: RefCell<HashMap<usize, Option<Index>>>,
}

impl Rows {
    /// Charges the rows.
    pub(crate) fn new(all: Vec<Vec<Value>>) -> Result<Rows> {
        let value = |value: &Value| match value {
            Value::Text(text) => text.capacity(),
            Value::Blob(bytes) => bytes.capacity(),
            _ => 0,
        };
        let row = |row: &Vec<Value>| {
            size_of::<Vec<Value>>()
                + row.capacity() * size_of::<Value>()
                + row.iter().map(value).sum::<usize>()
        };
        let bytes = all.iter().map(row).sum::<usize>() as u64;
        if !lease::change(0, bytes) {
            return Err(heap::exhausted());
        }
        Ok(Rows { all, bytes, indexes: RefCell::default() })
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        if self.bytes > 0 {
            lease::change(self.bytes, 0);
        }
    }
}

/// Row numbers by value. All values of a column have the same type: otherwise SQLite's comparison
/// could match more rows than the index.
pub(crate) type Index = HashMap<Key, Vec<usize>>;

/// A value that can be looked up.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Integer(i64),
    Text(Vec<u8>),
}

impl Key {
    pub(crate) fn as_ref(&self) -> ValueRef<'_> {
        match self {
            Key::Integer(integer) => ValueRef::Integer(*integer),
            Key::Text(text) => ValueRef::Text(text),
        }
    }

    pub(crate) fn of(value: ValueRef<'_>) -> Option<Key> {
        match value {
            ValueRef::Integer(integer) => Some(Key::Integer(integer)),
            ValueRef::Text(text) => Some(Key::Text(text.to_vec())),
            _ => None,
        }
    }
}

impl Rows {
    /// The rows whose column equals `wanted`, in order. None if the column cannot be indexed and
    /// its rows must be compared one by one.
    pub(crate) fn matching(&self, column: usize, wanted: &Key) -> Option<Vec<usize>> {
        let mut indexes = self.indexes.borrow_mut();
        let index = indexes.entry(column).or_insert_with(|| self.index(column)).as_ref()?;
        let same_kind = |key: &Key| std::mem::discriminant(key) == std::mem::discriminant(wanted);
        index.keys().next().is_none_or(same_kind).then(|| index.get(wanted).cloned().unwrap_or_default())
    }

    fn index(&self, column: usize) -> Option<Index> {
        let mut index = Index::new();
        let mut kind = None;
        for (number, row) in self.all.iter().enumerate() {
            let Some(value) = row.get(column).filter(|value| **value != Value::Null) else { continue };
            let key = Key::of(value.as_ref())?;
            if *kind.get_or_insert(std::mem::discriminant(&key)) != std::mem::discriminant(&key) {
                return None;
            }
            index.entry(key).or_default().push(number);
        }
        Some(index)
    }
}

pub(crate) fn borrowed(value: SqlRef<'_>) -> ValueRef<'_> {
    match value {
        SqlRef::Null => ValueRef::Null,
        SqlRef::Integer(integer) => ValueRef::Integer(integer),
        SqlRef::Real(real) => ValueRef::Real(real),
        SqlRef::Text(text) => ValueRef::Text(text),
        SqlRef::Blob(blob) => ValueRef::Blob(blob),
    }
}

pub(crate) fn lent(value: &Value) -> SqlRef<'_> {
    match value {
        Value::Null => SqlRef::Null,
        Value::Integer(integer) => SqlRef::Integer(*integer),
        Value::Real(real) => SqlRef::Real(*real),
        Value::Text(text) => SqlRef::Text(text.as_bytes()),
        Value::Blob(blob) => SqlRef::Blob(blob),
    }
}

pub(crate) fn owned(value: Value) -> rusqlite::types::Value {
    match value {
        Value::Null => rusqlite::types::Value::Null,
        Value::Integer(integer) => rusqlite::types::Value::Integer(integer),
        Value::Real(real) => rusqlite::types::Value::Real(real),
        Value::Text(text) => rusqlite::types::Value::Text(text),
        Value::Blob(blob) => rusqlite::types::Value::Blob(blob),
    }
}
