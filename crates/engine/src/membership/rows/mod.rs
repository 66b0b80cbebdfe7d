//! Copies of partitions as rows (`sql`, the application-level mechanism of the thesis, 2.3): the source
//! reads the rows with SQL, the destination inserts them into an empty database.
//!
//! ```text
//!   source, released                            destination
//!   settings, tables                      ->    BEGIN on an empty database, CREATE TABLE
//!   rows of a table, their hash ...       ->    INSERT
//!   indexes                               ->    CREATE INDEX
//!   virtual tables, views, triggers       ->    entries of the schema
//!   hash of the schema                    ->    SELECT: the rows and the schema have the same hashes
//!                                               COMMIT: a draft, from which a segment is made
//! ```
//!
//! The source reads a [`Partition`](fulmar_mvcc::Partition) object of the manifest of the release, like
//! a historical version. The destination has an object without contents, whose transaction is not
//! committed to a log (`mvcc/partition/draft`). Nothing else of either node sees these objects.
//!
//! # What is copied
//! The steps are those of SQLite's `VACUUM`, which builds a database from another one with SQL as well:
//!
//! - Tables are created from their SQL text, and filled in the order of their keys. Rowids are
//!   copied, unless columns hide all three names of the rowid: then no statement can see them.
//! - Virtual tables (FTS5, R-tree) consist of shadow tables, which are copied like others. Their own
//!   entry in the schema is copied without a call of the module.
//! - Generated columns are computed again. Stored ones are compared with the source's.
//! - `sqlite_sequence` and the statistics of ANALYZE are tables. Comments, declared types and
//!   sequences are in the schema's texts or in tables.
//! - `user_version` and `application_id` are copied. A database with `auto_vacuum`, which only an
//!   imported file can have, is refused.
//! - Constraints are not checked: the source has accepted the rows.
//! - Outcomes of transactions are in the source's manifest, from which that of the copy is made.
//!
//! What differs afterwards is the order of pages and the free space in them. If anything else differs,
//! the hashes do, and the move is undone.

mod items;
mod loader;
mod reader;

use fulmar_sqlite::{Error, Result, Run, sqlstate};

use self::items::append_value;
use crate::connection::Connection;

pub use self::loader::{LoadedRows, RowLoader};
pub use self::reader::RowReader;

/// Every entry of the schema, and whether it has pages.
const SCHEMA: &str = "SELECT type, name, tbl_name, sql, coalesce(rootpage, 0) > 0 FROM main.sqlite_schema \
                      ORDER BY type, name";

/// A table, and how its rows are read and inserted.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Table {
    name: String,
    /// A name of the rowid that no column has.
    rowid: Option<String>,
    columns: Vec<String>,
    /// Generated columns whose values are stored.
    generated: Vec<String>,
}

impl Table {
    /// Number of values that are inserted.
    fn inserted(&self) -> usize {
        self.columns.len() + usize::from(self.rowid.is_some())
    }

    /// Number of values that are read: those that are inserted, then the generated ones.
    fn read(&self) -> usize {
        self.inserted() + self.generated.len()
    }

    /// The query that reads its rows in the order of its key.
    fn select(&self) -> String {
        let names = self.rowid.iter().cloned();
        let names = names.chain(self.columns.iter().chain(&self.generated).map(|name| quoted(name)));
        let names: Vec<String> = names.collect();
        format!("SELECT {} FROM main.{} NOT INDEXED", names.join(", "), quoted(&self.name))
    }

    /// The statement that inserts a row.
    fn insert(&self) -> String {
        let names = self.rowid.iter().cloned().chain(self.columns.iter().map(|name| quoted(name)));
        let names: Vec<String> = names.collect();
        let parameters: Vec<String> = (1..=names.len()).map(|number| format!("?{number}")).collect();
        let (names, parameters) = (names.join(", "), parameters.join(", "));
        format!("INSERT INTO main.{}({names}) VALUES ({parameters})", quoted(&self.name))
    }
}

/// A name in SQL.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The hash of all rows of a query; on the fiber.
fn hash_here(connection: &mut Connection, id: u64, sql: &str) -> Result<u128> {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let mut encoded = Vec::new();
    let run = Run { id, sql, columns: None, parameters: &[] };
    connection.read_here(&run, &mut |row| {
        encoded.clear();
        (0..row.len()).for_each(|column| append_value(&mut encoded, row.get(column)));
        hash.update(&encoded);
        true
    })?;
    Ok(hash.digest128())
}

fn damaged() -> Error {
    Error::new(sqlstate::DATA_CORRUPTED, "received damaged rows of a copy")
}

#[cfg(test)]
mod tests;
