//! The source of a copy as rows.

use std::collections::VecDeque;

use fulmar_mvcc::{Contents, Partition, with_partition_context};
use fulmar_pages::{Manifest, Timeline};
use fulmar_sqlite::{Error, Result, Row, Run, TransactionLimits, Value, ValueRef, sqlstate};
use fulmar_store::CommitLog;
use xxhash_rust::xxh3::Xxh3;

use super::items::{Kind, append, append_value};
use super::{SCHEMA, Table, hash_here, quoted};
use crate::connection::Connection;
use crate::engine::Engine;

/// The id of the first query of a table's rows. Those of other statements are 1.
const FIRST_SELECT_ID: u64 = 2;
const OTHER_ID: u64 = 1;

/// Bytes of a message. A larger row is cut.
const MESSAGE_BYTES: usize = 256 << 10;

/// The tables with pages, `sqlite_sequence` last: inserting into others changes it.
const TABLES: &str = "SELECT name, sql FROM main.sqlite_schema WHERE type = 'table' AND rootpage > 0 \
                      ORDER BY name = 'sqlite_sequence', rowid";
/// The indexes that no table definition contains.
const INDEXES: &str =
    "SELECT sql FROM main.sqlite_schema WHERE type = 'index' AND sql IS NOT NULL ORDER BY rowid";
/// The entries without pages.
const ENTRIES: &str = "SELECT type, name, tbl_name, sql FROM main.sqlite_schema \
                       WHERE coalesce(rootpage, 0) = 0 ORDER BY rowid";

/// Reads a partition as rows.
pub struct RowReader {
    connection: Box<Connection>,
    /// The tables whose rows were not read yet.
    tables: VecDeque<Table>,
    /// The query that is being read, its id, and the hash of its rows so far.
    reading: Option<(String, u64, Box<Xxh3>)>,
    next_id: u64,
    has_ended: bool,
    /// The items that were not sent yet, from `sent` on.
    items: Vec<u8>,
    sent: usize,
}

impl Engine {
    /// Begins to read a version of a partition as rows. The caller protects its segments from the
    /// collector.
    pub async fn read_rows(&self, manifest: &Manifest) -> Result<RowReader> {
        let (id, node) = (manifest.partition, self.node().clone());
        let timeline = Timeline { lineage: manifest.version.lineage, epoch: manifest.version.epoch };
        let (log, stats) = (CommitLog::read_only(), self.partitions().counted(id));
        let open = Partition::open(node, log, stats, id, timeline, Contents::of(Some(manifest)));
        let partition = with_partition_context(id, open).await?;
        let mut connection = Connection::open(partition, self.connection_settings()).await?;
        connection.set_limits(TransactionLimits::default());
        connection.pages.transaction().borrow_mut().track_reads = false;
        let mut reader = RowReader {
            connection,
            tables: VecDeque::new(),
            reading: None,
            next_id: FIRST_SELECT_ID,
            has_ended: false,
            items: Vec::new(),
            sent: 0,
        };
        let (tables, items) = (&mut reader.tables, &mut reader.items);
        reader.connection.run(|connection| begin_here(connection, tables, items))?.await?;
        Ok(reader)
    }
}

impl RowReader {
    /// Appends a part of the copy to `out`. Returns false at the end.
    pub async fn next(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        if self.sent == self.items.len() {
            self.items.clear();
            self.sent = 0;
            while !self.has_ended && self.items.len() < MESSAGE_BYTES {
                self.read().await?;
            }
        }
        let end = self.items.len().min(self.sent + MESSAGE_BYTES);
        out.extend_from_slice(&self.items[self.sent..end]);
        let has_more = end > self.sent;
        self.sent = end;
        Ok(has_more)
    }

    /// Reads more items.
    async fn read(&mut self) -> Result<()> {
        let items = &mut self.items;
        if self.reading.is_none() {
            let Some(table) = self.tables.pop_front() else {
                self.has_ended = true;
                return self.connection.run(|connection| end_here(connection, items))?.await;
            };
            append_table(items, &table);
            self.reading = Some((table.select(), self.next_id, Box::default()));
            self.next_id += 1;
        }
        let Some((sql, id, hash)) = &mut self.reading else { return Ok(()) };
        let mut encoded = Vec::new();
        let mut row = |row: &dyn Row| {
            let values = || (0..row.len()).map(move |column| row.get(column));
            encoded.clear();
            values().for_each(|value| append_value(&mut encoded, value));
            hash.update(&encoded);
            append(items, Kind::Row, values());
            items.len() < MESSAGE_BYTES
        };
        let run = Run { id: *id, sql, columns: None, parameters: &[] };
        let has_more = self.connection.run(|connection| connection.read_here(&run, &mut row))?.await?;
        if !has_more {
            let hash = hash.digest128().to_le_bytes();
            append(&mut self.items, Kind::EndOfTable, [ValueRef::Blob(&hash)]);
            self.reading = None;
        }
        Ok(())
    }
}

/// The rows of a query, which has few.
fn query_here(connection: &mut Connection, sql: &str) -> Result<Vec<Vec<Value>>> {
    let mut rows = Vec::new();
    let run = Run { id: OTHER_ID, sql, columns: None, parameters: &[] };
    connection.read_here(&run, &mut |row| {
        rows.push((0..row.len()).map(|column| row.get(column).to_owned()).collect());
        true
    })?;
    connection.forget_statement_here(OTHER_ID);
    Ok(rows)
}

/// Reads the settings and the definitions of tables.
fn begin_here(connection: &mut Connection, tables: &mut VecDeque<Table>, items: &mut Vec<u8>) -> Result<()> {
    connection.link.trusted.set(true);
    let auto_vacuum = query_here(connection, "PRAGMA main.auto_vacuum");
    connection.link.trusted.set(false);
    if auto_vacuum? != [[Value::Integer(0)]] {
        return Err(unreadable("a database with auto_vacuum"));
    }
    let mut settings = Vec::new();
    for pragma in ["PRAGMA main.user_version", "PRAGMA main.application_id"] {
        settings.extend(query_here(connection, pragma)?.into_iter().flatten());
    }
    let mut created = Vec::new();
    for row in query_here(connection, TABLES)? {
        let [Value::Text(name), Value::Text(sql)] = row.as_slice() else { return Err(unreadable("a table")) };
        if name != "sqlite_sequence" {
            created.push(sql.clone());
        }
        tables.push_back(describe_here(connection, name)?);
    }
    let has_sequence = tables.back().is_some_and(|table| table.name == "sqlite_sequence");
    settings.push(Value::Integer(has_sequence.into()));
    append(items, Kind::Settings, settings.iter().map(Value::as_ref));
    for sql in &created {
        append(items, Kind::Create, [ValueRef::Text(sql.as_bytes())]);
    }
    Ok(())
}

/// Reads the indexes, the other entries of the schema, and the hash of all.
fn end_here(connection: &mut Connection, items: &mut Vec<u8>) -> Result<()> {
    for (kind, sql) in [(Kind::Create, INDEXES), (Kind::Entry, ENTRIES)] {
        for row in query_here(connection, sql)? {
            append(items, kind, row.iter().map(Value::as_ref));
        }
    }
    let hash = hash_here(connection, OTHER_ID, SCHEMA)?.to_le_bytes();
    append(items, Kind::End, [ValueRef::Blob(&hash)]);
    Ok(())
}

/// The columns of a table.
fn describe_here(connection: &mut Connection, name: &str) -> Result<Table> {
    let literal = name.replace('\'', "''");
    let is_without_rowid = format!(
        "SELECT wr FROM pragma_table_list('{literal}') WHERE schema = 'main' AND type IN ('table', 'shadow')"
    );
    let listed = query_here(connection, &is_without_rowid)?;
    let [listed] = listed.as_slice() else { return Err(unreadable(&quoted(name))) };
    // Hidden is 2 for generated columns, and 3 if they are stored.
    let sql = format!("SELECT name, hidden FROM pragma_table_xinfo('{literal}', 'main') ORDER BY cid");
    let mut table = Table { name: name.to_owned(), rowid: None, columns: Vec::new(), generated: Vec::new() };
    let mut names = Vec::new();
    for row in query_here(connection, &sql)? {
        let [Value::Text(column), Value::Integer(hidden)] = row.as_slice() else {
            return Err(unreadable(&quoted(name)));
        };
        names.push(column.to_ascii_lowercase());
        match hidden {
            0 => table.columns.push(column.clone()),
            3 => table.generated.push(column.clone()),
            _ => {}
        }
    }
    if listed.as_slice() == [Value::Integer(0)] {
        let free = ["rowid", "_rowid_", "oid"].into_iter().find(|of| !names.iter().any(|name| name == of));
        table.rowid = free.map(str::to_owned);
    }
    Ok(table)
}

fn append_table(items: &mut Vec<u8>, table: &Table) {
    let rowid = table.rowid.as_deref().map_or(ValueRef::Null, text);
    let head = [text(&table.name), rowid, ValueRef::Integer(table.columns.len() as i64)];
    let columns = table.columns.iter().chain(&table.generated).map(|name| text(name));
    append(items, Kind::Table, head.into_iter().chain(columns));
}

fn text(text: &str) -> ValueRef<'_> {
    ValueRef::Text(text.as_bytes())
}

fn unreadable(what: &str) -> Error {
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, format!("cannot copy the definition of {what} with SQL"))
        .hint("Use another mechanism, such as \"bulk\".")
}
