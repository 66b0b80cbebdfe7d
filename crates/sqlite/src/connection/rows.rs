//! Reading the rows of a query in parts, and running a statement for many rows: a copy of a database
//! as rows (`engine/membership/rows`).
//!
//! A query that is read in parts stays active in between, and its read transaction open.

use libsqlite3_sys as ffi;

use super::statements::{Run, StatementRow, bind_value};
use super::{Connection, too_large};
use crate::fiber::offload::OFFLOAD_BYTES;
use crate::statement::Row;
use crate::value::ValueRef;
use crate::{Error, Result, sqlstate};

/// Rows after which the clock is checked. A statement for a single row is too short for SQLite to do
/// so.
const ROWS_PER_CHECKPOINT: usize = 16;

impl Connection {
    /// Prepares the connection for filling a new database with the schema and the rows of another one;
    /// on the fiber. The rows were accepted there, so neither constraints nor triggers apply.
    pub fn prepare_to_load_here(&mut self) -> Result<()> {
        for (option, value) in [
            // Shadow tables of virtual tables, and entries of the schema.
            (ffi::SQLITE_DBCONFIG_DEFENSIVE, 0),
            (ffi::SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1),
            (ffi::SQLITE_DBCONFIG_ENABLE_FKEY, 0),
            (ffi::SQLITE_DBCONFIG_ENABLE_TRIGGER, 0),
            // SQLite accepts double-quoted texts in the schema of a file.
            (ffi::SQLITE_DBCONFIG_DQS_DDL, 1),
        ] {
            // SAFETY: a valid handle; the old value is not requested.
            let code = unsafe { ffi::sqlite3_db_config(self.db, option, value, std::ptr::null_mut::<i32>()) };
            if code != ffi::SQLITE_OK {
                return Err(self.error(code));
            }
        }
        self.link.trusted.set(true);
        let set = self.execute_here(c"PRAGMA ignore_check_constraints=ON");
        self.link.trusted.set(false);
        set
    }

    /// Removes a statement from the cache; on the fiber.
    pub fn forget_statement_here(&mut self, id: u64) {
        self.statements.remove(id);
    }

    /// Gives the next rows of a query to `row` until that returns false; on the fiber. Returns false at
    /// the end of the query.
    pub fn read_here(&mut self, run: &Run<'_>, row: &mut dyn FnMut(&dyn Row) -> bool) -> Result<bool> {
        self.link.failed.set(false);
        let raw = self.handle(run)?;
        let _noted = self.link.note_text(run.sql);
        loop {
            // SAFETY: a valid statement without parameters.
            let code = unsafe { ffi::sqlite3_step(raw) };
            let result = match code {
                ffi::SQLITE_ROW | ffi::SQLITE_DONE if self.link.failed.get() => Err(self.failure_here()),
                ffi::SQLITE_ROW if row(&StatementRow::of(raw)) => continue,
                ffi::SQLITE_ROW => return Ok(true),
                ffi::SQLITE_DONE => Ok(false),
                code => Err(self.error(code)),
            };
            // SAFETY: a valid statement. The reset returns the same code as the step.
            unsafe { ffi::sqlite3_reset(raw) };
            return result;
        }
    }

    /// Runs a statement once for each of these rows; on the fiber. `values` has `columns` values per
    /// row, one for each parameter of the statement in the order of their appearance.
    pub fn run_for_rows_here(
        &mut self,
        run: &Run<'_>,
        columns: usize,
        values: &[ValueRef<'_>],
    ) -> Result<()> {
        self.link.failed.set(false);
        let raw = self.handle(run)?;
        let _noted = self.link.note_text(run.sql);
        let mut done = Ok(());
        for (number, row) in values.chunks_exact(columns.max(1)).enumerate() {
            done = self.run_for_row(raw, row);
            if done.is_err() {
                break;
            }
            if number % ROWS_PER_CHECKPOINT == 0 && self.link.yield_if_due() {
                done = Err(self.link.cancel.borrow().error());
                break;
            }
        }
        // SAFETY: a valid statement.
        unsafe { ffi::sqlite3_clear_bindings(raw) };
        done
    }

    fn run_for_row(&mut self, raw: *mut ffi::sqlite3_stmt, row: &[ValueRef<'_>]) -> Result<()> {
        let largest = row.iter().map(|value| value.bytes()).max().unwrap_or(0);
        if largest > OFFLOAD_BYTES && !self.link.offload() {
            return Err(self.link.cancel.borrow().error());
        }
        for (index, value) in (1..).zip(row) {
            // SAFETY: a valid statement that is not active. The values outlive its run.
            let code = unsafe { bind_value(raw, index, *value) };
            if code == ffi::SQLITE_TOOBIG {
                return Err(too_large("value is too large".to_owned(), self.largest_value_bytes()));
            }
            if code != ffi::SQLITE_OK {
                return Err(self.error(code));
            }
        }
        // SAFETY: a valid statement, all of whose parameters are bound.
        let code = unsafe { ffi::sqlite3_step(raw) };
        let result = match code {
            ffi::SQLITE_DONE if self.link.failed.get() => Err(self.failure_here()),
            ffi::SQLITE_DONE => Ok(()),
            ffi::SQLITE_ROW => Err(Error::new(sqlstate::INTERNAL, "statement for a row has returned a row")),
            code => Err(self.error(code)),
        };
        // SAFETY: as above.
        unsafe { ffi::sqlite3_reset(raw) };
        result
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Database;
    use super::*;

    #[tokio::test]
    async fn rows_are_read_in_parts_and_inserted_as_they_are() {
        let database = Database::empty();
        let mut connection = database.connect().await;
        let rows = [
            [ValueRef::Integer(1), ValueRef::Text(b"\xff\0text"), ValueRef::Blob(b"")],
            [ValueRef::Integer(2), ValueRef::Real(-0.5), ValueRef::Null],
            [ValueRef::Integer(7), ValueRef::Text(b""), ValueRef::Blob(b"\0")],
        ];
        let insert = Run { id: 1, sql: "INSERT INTO t VALUES(?1, ?2, ?3)", columns: None, parameters: &[] };
        let fill = |connection: &mut Connection| {
            connection.execute_here(c"CREATE TABLE t(a INTEGER PRIMARY KEY, b, c)")?;
            connection.run_for_rows_here(&insert, 3, &rows.concat())
        };
        connection.run(fill).unwrap().await.unwrap();
        let select = Run { id: 2, sql: "SELECT a, b, c FROM t", columns: None, parameters: &[] };
        let mut read: Vec<Vec<Vec<u8>>> = Vec::new();
        for round in 0..4 {
            let part = |connection: &mut Connection| {
                connection.read_here(&select, &mut |row| {
                    let text = |at| format!("{:?}", row.get(at)).into_bytes();
                    read.push((0..row.len()).map(text).collect());
                    false
                })
            };
            assert_eq!(connection.run(part).unwrap().await.unwrap(), round < 3, "part {round}");
        }
        let expected: Vec<Vec<Vec<u8>>> =
            rows.iter().map(|row| row.iter().map(|of| format!("{of:?}").into_bytes()).collect()).collect();
        assert_eq!(read, expected);
        // The connection is not in a transaction any more.
        let again = |connection: &mut Connection| connection.run_for_rows_here(&insert, 3, &rows[0]);
        let error = connection.run(again).unwrap().await.unwrap_err();
        assert_eq!(error.state(), sqlstate::UNIQUE_VIOLATION);
    }
}
