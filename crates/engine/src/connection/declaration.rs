//! Changing what a declaration says, where the rows stay as they are.
//!
//! Some changes of a table are changes of its text alone: rows that stand in the order of a column *are* declared with it
//! as their key. SQLite lets nobody change the texts of `sqlite_schema` unless it is told to; here it is told so for
//! one statement at a time, which the gateway has made and no tenant has written ([`crate::Known::declares`]).
//!
//! The change is one of pages like any other: it is part of its transaction, taken back with it, and conflicts
//! with what others do to the schema. That all connections read the texts anew, this one too, is the schema's version's
//! doing, which is raised in the same transaction.

use std::ffi::{CString, c_int};
use std::ptr;

use libsqlite3_sys as ffi;

use super::Connection;
use super::statements::{Handle, Run, Step};
use crate::statement::RowSink;
use crate::{Error, Result, sqlstate};

impl Connection {
    /// Runs `body`, which may change texts of `sqlite_schema`; on the fiber.
    pub(crate) fn with_open_schema<T>(&mut self, body: impl FnOnce(&mut Connection) -> T) -> T {
        self.open_schema(true);
        let done = body(self);
        self.open_schema(false);
        done
    }

    fn open_schema(&mut self, open: bool) {
        let options = [(ffi::SQLITE_DBCONFIG_DEFENSIVE, !open), (ffi::SQLITE_DBCONFIG_WRITABLE_SCHEMA, open)];
        for (option, value) in options {
            // SAFETY: a valid handle, and options that take a number and a place for the answer, which may be null.
            unsafe { ffi::sqlite3_db_config(self.db, option, c_int::from(value), ptr::null_mut::<c_int>()) };
        }
    }

    /// Runs a statement that changes texts of `sqlite_schema`, within a transaction; on the fiber.
    pub(crate) fn declare_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
        self.with_open_schema(|connection| match connection.run_here(run, sink) {
            Step::Done(rows) => match connection.raise_schema_version_here() {
                Ok(()) => Step::Done(rows),
                Err(error) => connection.failed(error),
            },
            other => other,
        })
    }

    fn raise_schema_version_here(&mut self) -> Result<()> {
        let (raw, _) = self.prepare_raw("PRAGMA main.schema_version")?;
        let handle = Handle::without_parameters(raw);
        // SAFETY: a valid statement, which answers one number.
        let (code, version) =
            unsafe { (ffi::sqlite3_step(handle.raw), ffi::sqlite3_column_int(handle.raw, 0)) };
        if code != ffi::SQLITE_ROW {
            return Err(self.error(code));
        }
        drop(handle);
        let raise = CString::new(format!("PRAGMA main.schema_version = {}", version.wrapping_add(1)));
        self.execute_here(&raise.map_err(|error| Error::new(sqlstate::INTERNAL, error.to_string()))?)
    }
}
