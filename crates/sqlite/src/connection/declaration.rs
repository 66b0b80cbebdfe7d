//! Declaration changes: edits the text of the schema without touching rows.
//!
//! Some changes of a table change only its declaration. For example, rows that are in the order of
//! a column can be *declared* with that column as their key. SQLite rejects changes to the text in
//! `sqlite_schema` unless they are enabled. Here they are enabled for one statement at a time,
//! which the gateway has written, not a tenant ([`crate::StatementContext::declares`]).
//!
//! The change is a change of pages like any other: it is part of its transaction, is rolled back
//! with it, and conflicts with other changes of the schema. The schema version is incremented in
//! the same transaction, so that all connections, including this one, parse the schema again.

use std::ffi::{CString, c_int};
use std::ptr;

use libsqlite3_sys as ffi;

use super::Connection;
use super::cache::Handle;
use super::statements::{Run, Step};
use crate::statement::RowSink;
use crate::{Error, Result, sqlstate};

impl Connection {
    /// Runs `body`, which may change the text in `sqlite_schema`; on the fiber.
    pub fn with_open_schema<T>(&mut self, body: impl FnOnce(&mut Connection) -> T) -> T {
        self.open_schema(true);
        let done = body(self);
        self.open_schema(false);
        done
    }

    fn open_schema(&mut self, open: bool) {
        let options = [(ffi::SQLITE_DBCONFIG_DEFENSIVE, !open), (ffi::SQLITE_DBCONFIG_WRITABLE_SCHEMA, open)];
        for (option, value) in options {
            // SAFETY: a valid handle, and options that take a number and an output pointer, which
            // may be null.
            unsafe { ffi::sqlite3_db_config(self.db, option, c_int::from(value), ptr::null_mut::<c_int>()) };
        }
    }

    /// Runs a statement that changes the text in `sqlite_schema`, inside a transaction; on the
    /// fiber.
    pub fn declare_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
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
        // SAFETY: a valid statement that returns one number.
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
