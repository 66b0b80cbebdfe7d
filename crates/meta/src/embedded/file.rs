//! The SQLite file: its schema, and the few statements that the thread runs on it.
//!
//! ```sql
//! CREATE TABLE entry (key BLOB PRIMARY KEY, value BLOB NOT NULL, modified INTEGER NOT NULL) WITHOUT ROWID;
//! CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
//! PRAGMA application_id = 0x46554c4d;  -- "FULM"
//! PRAGMA user_version = 1;             -- format version
//! ```
//!
//! Keys are blobs so that they compare by their bytes, as etcd's do. `store.revision` is written by every
//! transaction that changes something: deleting the youngest entry must not make its revision come again.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row};

use crate::{Compare, Entry, MetaError, Operation, Revision};

const APPLICATION_ID: i32 = 0x4655_4c4d;
const FORMAT_VERSION: i32 = 1;

/// The open file. Its errors are SQLite's: the caller knows what they mean for a batch.
pub(super) struct File {
    connection: Connection,
    path: PathBuf,
}

impl File {
    pub(super) fn open(path: &Path) -> Result<Self, MetaError> {
        make_private(path).map_err(|error| unusable(path, &error))?;
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        // The VFS is named, because the engine registers one of its own in this process.
        let connection = Connection::open_with_flags_and_vfs(path, flags, c"unix")
            .map_err(|error| open_error(path, &error))?;
        let file = Self { connection, path: path.to_owned() };
        file.prepare_file().map_err(|error| open_error(path, &error))?;
        file.check_format()?;
        Ok(file)
    }

    fn prepare_file(&self) -> rusqlite::Result<()> {
        self.connection.busy_timeout(std::time::Duration::ZERO)?;
        self.connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        self.connection.pragma_update(None, "journal_mode", "WAL")?;
        self.connection.pragma_update(None, "synchronous", "FULL")?;
        if self.pragma("user_version")? == 0 && self.pragma("application_id")? == 0 && self.is_blank()? {
            self.connection.execute_batch(&format!(
                "BEGIN;
                 CREATE TABLE entry (key BLOB PRIMARY KEY, value BLOB NOT NULL, modified INTEGER NOT NULL) WITHOUT ROWID;
                 CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
                 INSERT INTO store VALUES (1, 0);
                 PRAGMA application_id = {APPLICATION_ID};
                 PRAGMA user_version = {FORMAT_VERSION};
                 COMMIT;"
            ))?;
        }
        Ok(())
    }

    fn is_blank(&self) -> rusqlite::Result<bool> {
        self.connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
    }

    fn pragma(&self, name: &str) -> rusqlite::Result<i32> {
        self.connection.pragma_query_value(None, name, |row| row.get(0))
    }

    fn check_format(&self) -> Result<(), MetaError> {
        let read = |name| self.pragma(name).map_err(|error| open_error(&self.path, &error));
        let (application, version) = (read("application_id")?, read("user_version")?);
        if application == APPLICATION_ID && version == FORMAT_VERSION {
            return Ok(());
        }
        let cause = if application == APPLICATION_ID {
            format!("it has format version {version}, and this Fulmar knows {FORMAT_VERSION}")
        } else {
            "it is an SQLite file, but not one of Fulmar's".to_owned()
        };
        Err(MetaError::Corrupt { place: self.path.display().to_string(), cause })
    }

    /// Makes something fail later.
    #[cfg(test)]
    pub(super) fn sabotage(&self, sql: &str) {
        self.connection.execute_batch(sql).unwrap();
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn begin(&self) -> rusqlite::Result<()> {
        self.run("BEGIN")
    }

    pub(super) fn commit(&self) -> rusqlite::Result<()> {
        self.run("COMMIT")
    }

    /// Rolls back, unless SQLite has done so by itself.
    pub(super) fn rollback(&self) -> rusqlite::Result<()> {
        if self.connection.is_autocommit() { Ok(()) } else { self.run("ROLLBACK") }
    }

    fn run(&self, sql: &str) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql)?.execute([]).map(drop)
    }

    pub(super) fn revision(&self) -> rusqlite::Result<Revision> {
        let mut statement = self.connection.prepare_cached("SELECT revision FROM store")?;
        statement.query_row([], |row| revision_at(row, 0))
    }

    pub(super) fn set_revision(&self, revision: Revision) -> rusqlite::Result<()> {
        let mut statement = self.connection.prepare_cached("UPDATE store SET revision = ?1")?;
        statement.execute([as_integer(revision)]).map(drop)
    }

    pub(super) fn holds(&self, compare: &Compare) -> rusqlite::Result<bool> {
        let (key, expected) = match compare {
            Compare::Absent(key) => (key, None),
            Compare::Unchanged(key, revision) => (key, Some(*revision)),
        };
        let mut statement = self.connection.prepare_cached("SELECT modified FROM entry WHERE key = ?1")?;
        let modified = statement.query_row([key.as_bytes()], |row| revision_at(row, 0)).optional()?;
        Ok(modified == expected)
    }

    pub(super) fn apply(&self, operation: &Operation, revision: Revision) -> rusqlite::Result<()> {
        match operation {
            Operation::Put(key, value) => {
                let mut statement =
                    self.connection.prepare_cached("REPLACE INTO entry VALUES (?1, ?2, ?3)")?;
                statement.execute((key.as_bytes(), value, as_integer(revision))).map(drop)
            }
            Operation::Delete(key) => {
                let mut statement = self.connection.prepare_cached("DELETE FROM entry WHERE key = ?1")?;
                statement.execute([key.as_bytes()]).map(drop)
            }
        }
    }

    pub(super) fn get(&self, key: &str) -> rusqlite::Result<Option<Entry>> {
        let mut statement =
            self.connection.prepare_cached("SELECT key, value, modified FROM entry WHERE key = ?1")?;
        statement.query_row([key.as_bytes()], entry).optional()
    }

    pub(super) fn scan(&self, prefix: &str) -> rusqlite::Result<Vec<Entry>> {
        // No UTF-8 text holds the byte 0xff, so this bound is above all that begin with the prefix.
        let above = [prefix.as_bytes(), &[0xff]].concat();
        let mut statement = self.connection.prepare_cached(
            "SELECT key, value, modified FROM entry WHERE key >= ?1 AND key < ?2 ORDER BY key",
        )?;
        statement.query_map((prefix.as_bytes(), above), entry)?.collect()
    }
}

fn entry(row: &Row<'_>) -> rusqlite::Result<Entry> {
    let key = String::from_utf8(row.get(0)?).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Blob, Box::new(error))
    })?;
    Ok(Entry { key, value: row.get(1)?, modified: revision_at(row, 2)? })
}

fn revision_at(row: &Row<'_>, column: usize) -> rusqlite::Result<Revision> {
    row.get::<_, i64>(column).map(|number| Revision(number.cast_unsigned()))
}

fn as_integer(revision: Revision) -> i64 {
    revision.0.cast_signed()
}

/// Makes the file, if it is not there, so that nobody else can read it: it holds password verifiers. SQLite
/// gives its write-ahead log the mode of the file.
fn make_private(path: &Path) -> std::io::Result<()> {
    match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        made => made.map(drop),
    }
}

fn unusable(path: &Path, error: &dyn std::fmt::Display) -> MetaError {
    MetaError::Unavailable {
        cause: format!("in {} cannot be opened: {error}", path.display()),
        remedy: "see that the directory exists, that this user may write there, and that the disk has room",
    }
}

fn open_error(path: &Path, error: &rusqlite::Error) -> MetaError {
    let place = path.display().to_string();
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => MetaError::Unavailable {
            cause: format!("in {place} is open in another process"),
            remedy: "stop the other process, or choose another data directory",
        },
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            MetaError::Corrupt { place, cause: error.to_string() }
        }
        _ => unusable(path, error),
    }
}
