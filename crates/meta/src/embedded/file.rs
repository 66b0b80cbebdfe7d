//! The SQLite file: its schema, its validation at start, and the statements that the thread runs.
//!
//! ```sql
//! CREATE TABLE entry (key BLOB PRIMARY KEY, value BLOB NOT NULL,
//!                     modified INTEGER NOT NULL) WITHOUT ROWID;
//! CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1),
//!                    revision INTEGER NOT NULL, digest BLOB NOT NULL,
//!                    previous_revision INTEGER, previous_digest BLOB);
//! PRAGMA application_id = 0x46554c4d;  -- "FULM"
//! PRAGMA user_version = 2;             -- format version
//! ```
//!
//! Keys are blobs so that they compare by their bytes, as in etcd. `head` is written by every
//! SQLite transaction that changes something. `previous_...` is the head before that transaction,
//! NULL in a file without transactions. Digests are 16 bytes, little-endian ([`super::head`]).
//! Format version 1 had a table `store` with the revision instead; it is converted when it is
//! opened.
//!
//! SQLite does not checkpoint when a rejected file is closed, so the write-ahead log is left
//! unchanged.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, Row};

use super::head::{Digest, Head, HeadFile, HeadState};
use crate::{Compare, Entry, MetaError, Operation, Revision};

const APPLICATION_ID: i32 = 0x4655_4c4d;
const FORMAT_VERSION: i32 = 2;
/// Has no digests and no head file.
const FIRST_FORMAT_VERSION: i32 = 1;

/// The table definitions, exactly as SQLite stores them in its schema.
const ENTRY_TABLE: &str =
    "CREATE TABLE entry (key BLOB PRIMARY KEY, value BLOB NOT NULL, modified INTEGER NOT NULL) WITHOUT ROWID";
const HEAD_TABLE: &str = "CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL, \
     digest BLOB NOT NULL, previous_revision INTEGER, previous_digest BLOB)";

/// The open file. Its methods return SQLite's errors, which the caller interprets for the batch.
pub(super) struct File {
    connection: Connection,
    path: PathBuf,
    head_file: HeadFile,
    /// The last committed head.
    head: Head,
    /// The head after the operations of the running SQLite transaction.
    next: Head,
    /// All entries, as read by the validation at start. Taken by the first [`File::all`], and
    /// discarded when an entry changes.
    loaded: Option<Vec<Entry>>,
}

/// Whether an operator may accept a file that the head file does not confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Acceptance {
    /// No: the files must be restored.
    Never,
    /// At this revision, with `--accept-catalog`. `None`: errors offer the flag.
    At(Option<Revision>),
}

/// The head row.
struct Stored {
    head: Head,
    /// The head before the last transaction.
    previous: Option<Head>,
}

impl File {
    /// Opens the file, or creates it if neither it nor a head file exists, and compares it with the
    /// head file.
    pub(super) fn open(path: &Path, acceptance: Acceptance) -> Result<Self, MetaError> {
        let head_path = HeadFile::path_of(path);
        let recorded = HeadFile::read(&head_path).map_err(|error| unusable(&head_path, &error))?;
        let opening = Opening { path, head_path, recorded, acceptance };
        opening.refuse_missing()?;
        create_private(path).map_err(|error| unusable(path, &error))?;
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        // Names the VFS explicitly, because the engine registers another one in this process.
        let connection = Connection::open_with_flags_and_vfs(path, flags, c"unix")
            .map_err(|error| opening.failed(&error))?;
        let prepare = || -> rusqlite::Result<()> {
            connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
            connection.busy_timeout(std::time::Duration::ZERO)?;
            connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "synchronous", "FULL")
        };
        prepare().map_err(|error| opening.failed(&error))?;
        let (stored, loaded) = opening.check(&connection)?;
        let head_file = opening.reconcile(&stored)?;
        connection
            .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)
            .map_err(|error| opening.failed(&error))?;
        let head = stored.head;
        Ok(Self { connection, path: path.to_owned(), head_file, head, next: head, loaded: Some(loaded) })
    }

    /// Runs SQL that makes a later statement fail.
    #[cfg(test)]
    pub(super) fn sabotage(&self, sql: &str) {
        self.connection.execute_batch(sql).unwrap();
    }

    /// Makes writes of the head file fail.
    #[cfg(test)]
    pub(super) fn sabotage_head(&mut self) {
        self.head_file.make_read_only();
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn head_path(&self) -> &Path {
        self.head_file.path()
    }

    pub(super) fn begin(&mut self) -> rusqlite::Result<()> {
        self.next = self.head;
        self.run("BEGIN")
    }

    /// Writes the new head within the SQLite transaction, if it changes something.
    pub(super) fn stamp(&self) -> rusqlite::Result<()> {
        if self.next == self.head {
            return Ok(());
        }
        let mut statement = self.connection.prepare_cached(
            "UPDATE head SET revision = ?1, digest = ?2, previous_revision = ?3, previous_digest = ?4",
        )?;
        let (next, head) = (self.next, self.head);
        statement
            .execute((
                as_integer(next.revision),
                as_blob(next.digest),
                as_integer(head.revision),
                as_blob(head.digest),
            ))
            .map(drop)
    }

    pub(super) fn commit(&self) -> rusqlite::Result<()> {
        self.run("COMMIT")
    }

    /// Writes the committed head to the head file. Callers must not be answered before this
    /// returns.
    pub(super) fn acknowledge(&mut self) -> std::io::Result<()> {
        if self.next != self.head {
            self.head_file.write(self.next)?;
            self.head = self.next;
        }
        Ok(())
    }

    /// Rolls back, unless SQLite has already done so.
    pub(super) fn rollback(&mut self) -> rusqlite::Result<()> {
        self.next = self.head;
        if self.connection.is_autocommit() { Ok(()) } else { self.run("ROLLBACK") }
    }

    fn run(&self, sql: &str) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql)?.execute([]).map(drop)
    }

    /// The revision after the operations of the running SQLite transaction.
    pub(super) fn revision(&self) -> Revision {
        self.next.revision
    }

    /// Begins the next revision.
    pub(super) fn next_revision(&mut self) {
        self.next.revision.0 += 1;
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

    /// Applies an operation at the current revision.
    pub(super) fn apply(&mut self, operation: &Operation) -> rusqlite::Result<()> {
        self.loaded = None;
        let (Operation::Put(key, _) | Operation::Delete(key)) = operation;
        if let Some(before) = self.get(key)? {
            self.next.digest.remove(key.as_bytes(), &before.value, before.modified);
        }
        match operation {
            Operation::Put(key, value) => {
                let revision = self.next.revision;
                self.next.digest.add(key.as_bytes(), value, revision);
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

    /// All entries.
    pub(super) fn all(&mut self) -> rusqlite::Result<Vec<Entry>> {
        match self.loaded.take() {
            Some(loaded) => Ok(loaded),
            None => self.scan(""),
        }
    }

    pub(super) fn get(&self, key: &str) -> rusqlite::Result<Option<Entry>> {
        let mut statement =
            self.connection.prepare_cached("SELECT key, value, modified FROM entry WHERE key = ?1")?;
        statement.query_row([key.as_bytes()], entry).optional()
    }

    pub(super) fn scan(&self, prefix: &str) -> rusqlite::Result<Vec<Entry>> {
        // UTF-8 text never contains the byte 0xff, so this bound is above all keys with the prefix.
        let above = [prefix.as_bytes(), &[0xff]].concat();
        let mut statement = self.connection.prepare_cached(
            "SELECT key, value, modified FROM entry WHERE key >= ?1 AND key < ?2 ORDER BY key",
        )?;
        statement.query_map((prefix.as_bytes(), above), entry)?.collect()
    }
}

/// The state of opening a file, before it is validated.
struct Opening<'a> {
    path: &'a Path,
    head_path: PathBuf,
    recorded: HeadState,
    acceptance: Acceptance,
}

impl Opening<'_> {
    /// Rejects a missing or empty metadata file before SQLite opens it, because SQLite would delete
    /// the write-ahead log of an empty file.
    fn refuse_missing(&self) -> Result<(), MetaError> {
        let bytes = match std::fs::metadata(self.path) {
            Ok(file) => Some(file.len()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(unusable(self.path, &error)),
        };
        if bytes.is_some_and(|bytes| bytes > 0) || self.may_create() {
            return Ok(());
        }
        Err(self.older(Revision(0), if bytes.is_none() { "is missing" } else { "is empty" }))
    }

    /// Returns true if an absent or empty file may become a new store.
    fn may_create(&self) -> bool {
        matches!(self.recorded, HeadState::Missing) || self.accepts(Revision(0))
    }

    fn accepts(&self, revision: Revision) -> bool {
        self.acceptance == Acceptance::At(Some(revision))
    }

    /// Reads and validates the whole file. Creates the tables in an empty file, and converts one of
    /// format version 1.
    fn check(&self, connection: &Connection) -> Result<(Stored, Vec<Entry>), MetaError> {
        let sqlite = |error| self.failed(&error);
        let pragma = |name: &str| {
            connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0)).map_err(sqlite)
        };
        let (application, version) = (pragma("application_id")?, pragma("user_version")?);
        if (application, version) == (0, 0) && is_blank(connection).map_err(sqlite)? {
            if !self.may_create() {
                return Err(self.older(Revision(0), "has no tables"));
            }
            create(connection).map_err(sqlite)?;
        } else if application != APPLICATION_ID {
            return Err(self.corrupt("it is an SQLite file, but not a Fulmar metadata file"));
        } else if version == FIRST_FORMAT_VERSION {
            self.check_structure(connection, &[("entry", ENTRY_TABLE)])?;
            self.convert(connection)?;
        } else if version != FORMAT_VERSION {
            return Err(
                self.corrupt(&format!("unsupported format version {version} (supported: {FORMAT_VERSION})"))
            );
        }
        self.check_structure(connection, &[("entry", ENTRY_TABLE), ("head", HEAD_TABLE)])?;
        let stored = connection.query_row("SELECT * FROM head", [], stored).map_err(sqlite)?;
        let (entries, digest) = read_all(connection).map_err(sqlite)?;
        if digest != stored.head.digest {
            let problem =
                format!("its contents do not match the checksum of revision {}", stored.head.revision.0);
            return Err(self.corrupt(&problem));
        }
        Ok((stored, entries))
    }

    /// Runs SQLite's check of the pages, and compares the table definitions.
    fn check_structure(&self, connection: &Connection, tables: &[(&str, &str)]) -> Result<(), MetaError> {
        let sqlite = |error| self.failed(&error);
        let found: String =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(sqlite)?;
        if found != "ok" {
            return Err(self.corrupt(&found));
        }
        for (name, sql) in tables {
            let found: Option<String> = connection
                .query_row("SELECT sql FROM sqlite_schema WHERE name = ?1", [name], |row| row.get(0))
                .optional()
                .map_err(sqlite)?;
            if found.as_deref() != Some(*sql) {
                return Err(self.corrupt(&format!("unexpected definition of table \"{name}\"")));
            }
        }
        Ok(())
    }

    /// Converts a file of format version 1. Such a file has no head file; one with a head file is
    /// an old copy.
    fn convert(&self, connection: &Connection) -> Result<(), MetaError> {
        let sqlite = |error| self.failed(&error);
        let revision: Revision = connection
            .query_row("SELECT revision FROM store", [], |row| revision_at(row, 0))
            .map_err(sqlite)?;
        if !matches!(self.recorded, HeadState::Missing) && !self.accepts(revision) {
            return Err(self.older(revision, "is a copy from before an upgrade"));
        }
        let (_, digest) = read_all(connection).map_err(sqlite)?;
        let convert = || {
            connection.execute_batch(&format!("BEGIN; DROP TABLE store; {HEAD_TABLE};"))?;
            insert_head(connection, Head { revision, digest })?;
            connection.execute_batch(&format!("PRAGMA user_version = {FORMAT_VERSION}; COMMIT;"))
        };
        convert().map_err(sqlite)?;
        tracing::info!(file = %self.path.display(), revision = revision.0, "metadata file upgraded to format version 2");
        Ok(())
    }

    /// Compares the file with the head file, and updates the head file.
    fn reconcile(&self, stored: &Stored) -> Result<HeadFile, MetaError> {
        let Stored { head, previous } = stored;
        let io = |error| unusable(&self.head_path, &error);
        match &self.recorded {
            HeadState::Present(recorded, count) if recorded == head => {
                return HeadFile::open(&self.head_path, *count).map_err(io);
            }
            // A crash occurred between the commit and the write of the head file.
            HeadState::Present(recorded, count) if Some(*recorded) == *previous => {
                let mut file = HeadFile::open(&self.head_path, *count).map_err(io)?;
                file.write(*head).map_err(io)?;
                return Ok(file);
            }
            // A crash occurred between the creation or conversion of the file and the creation of
            // the head file.
            HeadState::Missing if previous.is_none() => {}
            _ if self.accepts(head.revision) => {
                tracing::warn!(
                    file = %self.path.display(),
                    revision = head.revision.0,
                    "catalog accepted as it is; later changes, if there were any, are lost"
                );
            }
            HeadState::Present(recorded, _) if recorded.revision > head.revision => {
                return Err(self.older(head.revision, "is damaged or an old copy"));
            }
            HeadState::Present(recorded, _) => {
                let cause = format!("is damaged or an old copy: it is at revision {}", recorded.revision.0);
                return Err(self.head_damaged(&cause, head.revision));
            }
            HeadState::Missing => return Err(self.head_damaged("is missing", head.revision)),
            HeadState::Damaged(problem) => {
                return Err(self.head_damaged(&format!("is damaged: {problem}"), head.revision));
            }
        }
        HeadFile::create(&self.head_path, *head).map_err(io)
    }

    /// The error of a metadata file that lacks acknowledged changes.
    fn older(&self, found: Revision, cause: &str) -> MetaError {
        let path = self.path.display();
        let expected = match &self.recorded {
            HeadState::Present(recorded, _) => format!("expected revision {}, found ", recorded.revision.0),
            _ => String::new(),
        };
        let remedy = match self.acceptance {
            Acceptance::Never => self.restore_all(),
            Acceptance::At(_) => format!(
                "Restore {path} and {path}-wal as the node left them. Alternatively, start once with \
                 --accept-catalog {} to continue without all later changes of tenants, users and privileges.",
                found.0
            ),
        };
        let cause = format!("{cause}: {expected}revision {}", found.0);
        MetaError::Damaged { place: path.to_string(), cause, remedy }
    }

    fn head_damaged(&self, cause: &str, revision: Revision) -> MetaError {
        let (path, revision) = (self.path.display(), revision.0);
        let remedy = match self.acceptance {
            Acceptance::Never => self.restore_all(),
            Acceptance::At(_) => format!(
                "Restore it as the node left it. If {path} and {path}-wal are as the node left them, start \
                 once with --accept-catalog {revision} instead."
            ),
        };
        let cause = format!("{cause}, and {path} is at revision {revision}");
        MetaError::Damaged { place: self.head_path.display().to_string(), cause, remedy }
    }

    /// The remedy that does not depend on `--accept-catalog`.
    fn restore_all(&self) -> String {
        let (path, head) = (self.path.display(), self.head_path.display());
        format!("Restore {path}, {path}-wal and {head} from a backup, all three from the same moment.")
    }

    fn corrupt(&self, problem: &str) -> MetaError {
        MetaError::Damaged {
            place: self.path.display().to_string(),
            cause: format!("cannot be read: {problem}"),
            remedy: format!(
                "{} After a downgrade, start the version of Fulmar that wrote them.",
                self.restore_all()
            ),
        }
    }

    /// The error of an SQLite operation on the file.
    fn failed(&self, error: &rusqlite::Error) -> MetaError {
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => self.corrupt(&error.to_string()),
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => MetaError::Unavailable {
                cause: format!("in {} is open in another process", self.path.display()),
                remedy: "Stop the other process, or choose another data directory.",
            },
            _ => unusable(self.path, error),
        }
    }
}

fn is_blank(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
}

fn create(connection: &Connection) -> rusqlite::Result<()> {
    connection.execute_batch(&format!("BEGIN; {ENTRY_TABLE}; {HEAD_TABLE};"))?;
    insert_head(connection, Head::default())?;
    connection.execute_batch(&format!(
        "PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT_VERSION}; COMMIT;"
    ))
}

fn insert_head(connection: &Connection, head: Head) -> rusqlite::Result<()> {
    let values = (as_integer(head.revision), as_blob(head.digest));
    connection.execute("INSERT INTO head VALUES (1, ?1, ?2, NULL, NULL)", values).map(drop)
}

fn stored(row: &Row<'_>) -> rusqlite::Result<Stored> {
    let head = Head { revision: revision_at(row, 1)?, digest: Digest(u128::from_le_bytes(row.get(2)?)) };
    let previous = match (row.get::<_, Option<i64>>(3)?, row.get::<_, Option<[u8; 16]>>(4)?) {
        (Some(revision), Some(digest)) => Some(Head {
            revision: Revision(revision.cast_unsigned()),
            digest: Digest(u128::from_le_bytes(digest)),
        }),
        _ => None,
    };
    Ok(Stored { head, previous })
}

/// All entries, and their digest.
fn read_all(connection: &Connection) -> rusqlite::Result<(Vec<Entry>, Digest)> {
    let mut statement = connection.prepare("SELECT key, value, modified FROM entry ORDER BY key")?;
    let mut digest = Digest::default();
    let entries = statement.query_map([], |row| {
        let entry = entry(row)?;
        digest.add(entry.key.as_bytes(), &entry.value, entry.modified);
        Ok(entry)
    })?;
    let entries = entries.collect::<rusqlite::Result<Vec<Entry>>>()?;
    Ok((entries, digest))
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

fn as_blob(digest: Digest) -> [u8; 16] {
    digest.0.to_le_bytes()
}

/// Creates the file, if it does not exist, with mode 0600, because it contains password verifiers.
/// SQLite creates its write-ahead log with the same mode.
fn create_private(path: &Path) -> std::io::Result<()> {
    match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        created => created.map(drop),
    }
}

fn unusable(path: &Path, error: &dyn std::fmt::Display) -> MetaError {
    MetaError::Unavailable {
        cause: format!("in {} cannot be opened: {error}", path.display()),
        remedy: "Check that the directory exists and is writable, and that the disk has space.",
    }
}
