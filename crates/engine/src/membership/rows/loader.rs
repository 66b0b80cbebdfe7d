//! The destination of a copy as rows.

use std::sync::Arc;

use fulmar_maintenance::IncomingCopy;
use fulmar_mvcc::{Contents, Draft, Partition, with_partition_context};
use fulmar_pages::{PartitionId, Timeline};
use fulmar_sqlite::{
    BEGIN, COMMIT, DiscardRows, Error, MAX_STATEMENT_BYTES, Result, Run, Step, TransactionLimits, ValueRef,
    exhausted, sqlstate,
};
use fulmar_store::CommitLog;

use super::items::{First, Kind, decode, first};
use super::{SCHEMA, Table, damaged, hash_here, quoted};
use crate::connection::Connection;
use crate::engine::Engine;

/// Incomplete items up to this size are not charged to the connection.
const UNCHARGED_BYTES: usize = 1 << 20;
/// Values that are decoded together.
const BATCH_VALUES: usize = 4096;
/// A table with a name that no statement of a client can create. It makes SQLite create
/// `sqlite_sequence`.
const CREATE_SEQUENCE: &str = "CREATE TABLE sqlite_stat_sequence(a INTEGER PRIMARY KEY AUTOINCREMENT)";
const DROP_SEQUENCE: &str = "DROP TABLE sqlite_stat_sequence";

/// Builds a database from the rows of another node's partition.
pub struct RowLoader {
    connection: Box<Connection>,
    /// Bytes of an incomplete item, and how many of them are charged.
    buffer: Vec<u8>,
    charged: u64,
    state: Loading,
}

/// A database that was built.
pub struct LoadedRows {
    draft: Draft,
    /// Memory of the draft is charged to it.
    connection: Box<Connection>,
}

#[derive(Default)]
struct Loading {
    /// The table whose rows are inserted, and the statement.
    table: Option<(Table, String)>,
    /// The tables that are complete, with the hashes of their rows.
    complete: Vec<(Table, u128)>,
    /// The statements so far.
    statements: u64,
    has_ended: bool,
}

impl Engine {
    /// Begins to build a database from rows.
    pub async fn load_rows(&self, id: PartitionId, timeline: Timeline) -> Result<RowLoader> {
        let (node, stats) = (self.node().clone(), self.partitions().counted(id));
        let log = CommitLog::read_only();
        let open = Partition::open(node, log, stats, id, timeline, Contents::of(None));
        let partition = with_partition_context(id, open).await?;
        let mut settings = self.connection_settings();
        settings.max_statement_bytes = MAX_STATEMENT_BYTES;
        let mut connection = Connection::open(partition, settings).await?;
        connection.set_limits(TransactionLimits::default());
        connection.pages.set_drafts();
        Ok(RowLoader { connection, buffer: Vec::new(), charged: 0, state: Loading::default() })
    }
}

impl RowLoader {
    /// Adds a part of the copy ([`super::RowReader::next`]).
    pub async fn push(&mut self, part: &[u8]) -> Result<()> {
        self.buffer.extend_from_slice(part);
        if let First::Partial(Some(bytes)) = first(&self.buffer)?
            && bytes > UNCHARGED_BYTES
        {
            let lacking = (bytes as u64).saturating_sub(self.charged);
            if !self.connection.link.charge(lacking) {
                return Err(exhausted());
            }
            self.charged += lacking;
            return Ok(());
        }
        let (state, buffer) = (&mut self.state, &self.buffer);
        let left = self.connection.run(|connection| state.load_here(connection, buffer))?.await?;
        self.buffer.drain(..self.buffer.len() - left);
        self.connection.link.release(std::mem::take(&mut self.charged));
        Ok(())
    }

    /// Ends the copy: all of it was added, and the database has the same rows and schema.
    pub async fn finish(mut self) -> Result<LoadedRows> {
        if !self.state.has_ended || !self.buffer.is_empty() {
            return Err(damaged());
        }
        let state = &mut self.state;
        self.connection.run(|connection| state.commit_here(connection))?.await?;
        let draft = self.connection.pages.take_draft();
        let draft = draft.ok_or_else(|| Error::new(sqlstate::INTERNAL, "copied rows were not kept"))?;
        Ok(LoadedRows { draft, connection: self.connection })
    }
}

impl LoadedRows {
    /// Makes the database the contents of a copy.
    pub async fn store(self, copy: &mut IncomingCopy) -> Result<()> {
        let LoadedRows { draft, connection } = self;
        let partition: Arc<Partition> = connection.partition().clone();
        copy.use_draft(&partition, draft).await
    }
}

impl Loading {
    /// Carries out all complete items; on the fiber. Returns the length of the rest.
    fn load_here(&mut self, connection: &mut Connection, mut buffer: &[u8]) -> Result<usize> {
        let mut values = Vec::new();
        while let First::Whole(kind, encoded, rest) = first(buffer)? {
            let is_row = kind == Kind::Row;
            if !is_row || values.len() >= BATCH_VALUES {
                self.insert_here(connection, &mut values)?;
            }
            decode(encoded, &mut values)?;
            if !is_row {
                self.item_here(connection, kind, &values)?;
                values.clear();
            }
            buffer = rest;
        }
        self.insert_here(connection, &mut values)?;
        Ok(buffer.len())
    }

    /// Inserts rows.
    fn insert_here(&self, connection: &mut Connection, values: &mut Vec<ValueRef<'_>>) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let Some((table, sql)) = &self.table else { return Err(damaged()) };
        let (read, inserted) = (table.read(), table.inserted());
        if !values.len().is_multiple_of(read) {
            return Err(damaged());
        }
        if inserted < read {
            // Stored values of generated columns are only compared.
            let mut at = 0;
            values.retain(|_| {
                at += 1;
                (at - 1) % read < inserted
            });
        }
        let run = Run { id: insert_id(self.complete.len()), sql, columns: None, parameters: &[] };
        connection.run_for_rows_here(&run, inserted, values)?;
        values.clear();
        Ok(())
    }

    /// Carries out an item that is not a row.
    fn item_here(&mut self, connection: &mut Connection, kind: Kind, values: &[ValueRef<'_>]) -> Result<()> {
        match (kind, values) {
            (
                Kind::Settings,
                [
                    ValueRef::Integer(user_version),
                    ValueRef::Integer(application_id),
                    ValueRef::Integer(has_sequence),
                ],
            ) => {
                connection.prepare_to_load_here()?;
                done(connection.control_here(BEGIN.0, BEGIN.1))?;
                self.execute_here(connection, &format!("PRAGMA user_version = {user_version}"))?;
                self.execute_here(connection, &format!("PRAGMA application_id = {application_id}"))?;
                if *has_sequence != 0 {
                    self.execute_here(connection, CREATE_SEQUENCE)?;
                    self.execute_here(connection, DROP_SEQUENCE)?;
                }
                Ok(())
            }
            (Kind::Create, [ValueRef::Text(sql)]) => {
                let sql = text(sql)?;
                let is_definition = sql.get(..7).is_some_and(|verb| verb.eq_ignore_ascii_case("create "));
                if is_definition { self.execute_here(connection, &sql) } else { Err(damaged()) }
            }
            (Kind::Table, [ValueRef::Text(name), rowid, ValueRef::Integer(inserted), columns @ ..]) => {
                let rowid = match rowid {
                    ValueRef::Text(rowid) => Some(text(rowid)?),
                    _ => None,
                };
                let names = columns.iter().map(|column| match column {
                    ValueRef::Text(name) => text(name),
                    _ => Err(damaged()),
                });
                let mut columns = names.collect::<Result<Vec<String>>>()?;
                let inserted = usize::try_from(*inserted).map_err(|_| damaged())?;
                if inserted == 0 || inserted > columns.len() {
                    return Err(damaged());
                }
                let generated = columns.split_off(inserted);
                let table = Table { name: text(name)?, rowid, columns, generated };
                if table.name == "sqlite_sequence" {
                    self.execute_here(connection, "DELETE FROM main.sqlite_sequence")?;
                }
                let sql = table.insert();
                self.table = Some((table, sql));
                Ok(())
            }
            (Kind::EndOfTable, [ValueRef::Blob(hash)]) => {
                let Some((table, _)) = self.table.take() else { return Err(damaged()) };
                self.complete.push((table, hash_of(hash)?));
                Ok(())
            }
            (Kind::Entry, [_, _, _, _]) => {
                let sql = "INSERT INTO main.sqlite_schema(type, name, tbl_name, rootpage, sql) \
                           VALUES (?1, ?2, ?3, 0, ?4)";
                let run = Run { id: self.next_id(), sql, columns: None, parameters: &[] };
                connection.run_for_rows_here(&run, values.len(), values)
            }
            (Kind::End, [ValueRef::Blob(hash)]) => self.compare_here(connection, hash_of(hash)?),
            _ => Err(damaged()),
        }
    }

    /// Fails if the database differs from the source's.
    fn compare_here(&mut self, connection: &mut Connection, schema: u128) -> Result<()> {
        for (table, expected) in std::mem::take(&mut self.complete) {
            if hash_here(connection, self.next_id(), &table.select())? != expected {
                return Err(differs(&format!("the rows of table {}", quoted(&table.name))));
            }
        }
        if hash_here(connection, self.next_id(), SCHEMA)? != schema {
            return Err(differs("the schema"));
        }
        self.has_ended = true;
        Ok(())
    }

    fn commit_here(&mut self, connection: &mut Connection) -> Result<()> {
        done(connection.control_here(COMMIT.0, COMMIT.1))
    }

    /// Runs a statement.
    fn execute_here(&mut self, connection: &mut Connection, sql: &str) -> Result<()> {
        let run = Run { id: self.next_id(), sql, columns: None, parameters: &[] };
        done(connection.run_here(&run, &mut DiscardRows))
    }

    fn next_id(&mut self) -> u64 {
        self.statements += 1;
        2 * self.statements
    }
}

/// The id of the statement that inserts the rows of a table. Those of other statements are even.
fn insert_id(table: usize) -> u64 {
    2 * table as u64 + 1
}

fn done(step: Step) -> Result<()> {
    match step {
        Step::Done(_) => Ok(()),
        Step::Failed(error) => Err(error),
        Step::Conflict => Err(Error::new(sqlstate::INTERNAL, "loading rows has conflicted")),
    }
}

fn hash_of(bytes: &[u8]) -> Result<u128> {
    Ok(u128::from_le_bytes(bytes.try_into().map_err(|_| damaged())?))
}

fn text(bytes: &[u8]) -> Result<String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| damaged())
}

fn differs(what: &str) -> Error {
    Error::new(sqlstate::DATA_CORRUPTED, format!("{what} would differ after a copy with SQL"))
        .hint("Use another mechanism, such as \"bulk\".")
}
