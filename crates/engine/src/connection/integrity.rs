//! `PRAGMA integrity_check`, made to tell the truth of FTS5 tables.
//!
//! FTS5 keeps the list of its index's segments in memory from one transaction to the next. It compares
//! `PRAGMA data_version` and reads the list anew when a cursor is opened or a write begins, but not when
//! `integrity_check` or `quick_check` calls it (SQLite 3.54.1). So a connection that has used a table before calls it
//! corrupt as soon as another connection has changed it:
//!
//! ```text
//!  connection 1: SELECT ... FROM words WHERE words MATCH 'x'     keeps the list: segment 1
//!  connection 2: INSERT INTO words ...                           the list is now: segments 1, 2
//!  connection 1: PRAGMA integrity_check                          content of 1 and 2, index of 1: "checksum mismatch"
//! ```
//!
//! Stock SQLite does so with two connections on a file; our pool shows it to sessions that never touched the table.
//! The remedy is to open a cursor on each such table first, in the transaction of the check: the scan itself reads the
//! list, and one of an older snapshot would be no better than what it replaced.
//!
//! A check makes a row of every error that it meets, also of a cancel, an expired snapshot or a page that could not be read. The
//! statement fails with that error instead (`Link::failed`).

use libsqlite3_sys as ffi;

use super::statements::Handle;
use super::{Connection, Run, Step};
use crate::statement::{Row, RowSink};
use crate::value::ValueRef;
use crate::{Result, heap};

/// Text of the engine's own, kept prepared under its id.
const BEGIN: (u64, &str) = (u64::MAX - 3, "BEGIN");
const ROLLBACK: (u64, &str) = (u64::MAX - 4, "ROLLBACK");
/// Tables that may be FTS5's; one more that only looks like it costs nothing.
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
    /// Runs a statement that checks the partition's integrity; on the fiber. It changes nothing, so that a transaction
    /// that is opened here for it is rolled back.
    pub(crate) fn check_integrity_here(&mut self, run: &Run<'_>, sink: &mut dyn RowSink) -> Step {
        let alone = self.is_autocommit();
        if alone && let step @ (Step::Conflict | Step::Failed(_)) = self.control_here(BEGIN.0, BEGIN.1) {
            return step;
        }
        let step = match self.refresh_text_tables() {
            Step::Done(_) => {
                self.link.held.was_refused();
                self.run_here(run, sink)
            }
            other => other,
        };
        // A table's own check reports a lack of memory as damage.
        let step = match step {
            Step::Done(_) if self.link.held.was_refused() => Step::Failed(heap::exhausted()),
            step => step,
        };
        // SQLite may have rolled back by itself, after an I/O error.
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
            // A table that cannot be opened or read is the check's to report.
            if let Ok((raw, _)) = self.prepare_raw(&sql) {
                let handle = Handle::without_parameters(raw);
                // SAFETY: a valid statement, finalized by the handle.
                unsafe { ffi::sqlite3_step(handle.raw) };
            }
        }
        step
    }
}
