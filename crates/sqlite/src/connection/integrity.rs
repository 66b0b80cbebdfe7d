//! `PRAGMA integrity_check` for databases with FTS5 tables: a workaround for false reports of
//! corruption.
//!
//! FTS5 caches the list of its index segments from one transaction to the next. When a cursor is
//! opened or a write begins, it checks `PRAGMA data_version` and reads the list again, but not for
//! `integrity_check` or `quick_check` (SQLite 3.54.1). A connection that has used a table before
//! therefore reports it as corrupt as soon as another connection has changed it:
//!
//! ```text
//!  connection 1: SELECT ... FROM words WHERE words MATCH 'x'     caches the list: segment 1
//!  connection 2: INSERT INTO words ...                           the list is now: segments 1, 2
//!  connection 1: PRAGMA integrity_check                          compares the content of 1 and 2
//!                                                with the index of 1: "checksum mismatch"
//! ```
//!
//! Stock SQLite does the same with two connections on a file. Through the pool, sessions that never
//! used the table would see it. The workaround opens a cursor on each such table first, in the
//! transaction of the check: the scan then reads the current list. A list from an older snapshot
//! would be stale again.
//!
//! A check returns each error that it meets as a row, including cancellation, an expired snapshot
//! or a page that could not be read. The statement fails with that error instead (`Link::failed`).

use libsqlite3_sys as ffi;

use super::Connection;
use super::cache::Handle;
use super::statements::{Run, Step};
use crate::statement::{Row, RowSink};
use crate::value::ValueRef;
use crate::{Result, heap};

/// The engine's statements, cached under these ids.
const BEGIN: (u64, &str) = (u64::MAX - 3, "BEGIN");
const ROLLBACK: (u64, &str) = (u64::MAX - 4, "ROLLBACK");
/// Tables that may be FTS5 tables. A false match costs nothing.
const TEXT_TABLES: Run<'static> = Run {
    id: u64::MAX - 5,
    sql: "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND rootpage = 0 AND sql LIKE '%fts5%'",
    columns: Some(1),
    parameters: &[],
};

#[derive(Default)]
struct Names(Vec<String>);

impl RowSink for Names {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        if let ValueRef::Text(name) = row.get(0) {
            self.0.push(String::from_utf8_lossy(name).into_owned());
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.0.clear();
    }
}

impl Connection {
    /// Runs a statement that checks the partition's integrity; on the fiber. It changes nothing, so
    /// a transaction that is opened here for it is rolled back.
    pub fn check_integrity_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
        let alone = self.is_autocommit();
        if alone && let step @ (Step::Conflict | Step::Failed(_)) = self.control_here(BEGIN.0, BEGIN.1) {
            return step;
        }
        let step = match self.refresh_text_tables() {
            Step::Done(_) => {
                self.link.heap_account.was_refused();
                self.run_here(run, sink)
            }
            other => other,
        };
        // A table's check reports a lack of memory as damage.
        let step = match step {
            Step::Done(_) if self.link.heap_account.was_refused() => Step::Failed(heap::exhausted()),
            step => step,
        };
        // SQLite may have rolled back already, after an I/O error.
        if alone && !self.is_autocommit() {
            self.control_here(ROLLBACK.0, ROLLBACK.1);
        }
        step
    }

    /// Opens a cursor on every FTS5 table.
    fn refresh_text_tables(&mut self) -> Step {
        let mut names = Names::default();
        let step = self.run_here(&TEXT_TABLES, &mut names);
        for name in names.0 {
            let sql = format!("SELECT 1 FROM main.\"{}\" LIMIT 1", name.replace('"', "\"\""));
            // A table that cannot be opened or read is reported by the check.
            if let Ok((raw, _)) = self.prepare_raw(&sql) {
                let handle = Handle::without_parameters(raw);
                // SAFETY: a valid statement, finalized by the handle.
                unsafe { ffi::sqlite3_step(handle.raw) };
            }
        }
        step
    }
}
