//! `COPY t FROM STDIN`: rows from the client into a table. The formats are [`crate::copy`]'s. (And what it has in common
//! with the other thing that is copied in, a whole database: [`super::copy_database`].)
//!
//! ```text
//! client: COPY t FROM STDIN          server: CopyInResponse
//!         CopyData "1\tone\n2\tt"            lines are cut, unescaped, inserted some rows at a time
//!         CopyData "wo\n"                    (a line may come in pieces)
//!         CopyDone                           the last rows, the commit, COPY 2
//! ```
//!
//! The rows are inserted by ordinary prepared INSERTs in the client's transaction, or in an implicit one: an error
//! takes all of them back. They are run as they come, so TCP holds a client back that is faster than the engine.

use std::sync::Arc;

use fulmar_engine::{CommandTag, Error, ParameterInfo, Scope, Statement, Value, sqlstate};

use super::copy_database::Importing;
use super::held::Share;
use super::rows::{Collector, Output};
use super::simple::Rest;
use super::{Fault, Session};
use crate::Result;
use crate::copy::Format;
use crate::copy::read::Reader;
use crate::dialect::token::{Table, quote_name};
use crate::protocol::backend;
use crate::types::{self, Type};

/// Parameters of one INSERT at most.
const PARAMETERS: usize = 512;
/// Rows that wait for their batch are charged at this size, smaller ones at the end of each message.
const CHARGED_BYTES: usize = 64 << 10;
/// Bytes of rows that wait for the rest of their batch.
const GATHERED_BYTES: usize = 4 << 20;

/// A COPY that is going on.
pub(super) struct CopyIn {
    pub(super) target: Target,
    /// Of the text that the COPY stands in; `None` in the extended protocol.
    pub(super) rest: Option<Rest>,
    /// Charged for that text.
    pub(super) share: Share,
}

/// What is copied into.
pub(super) enum Target {
    Table(Rows),
    Database(Importing),
}

/// Rows on their way into a table.
pub(super) struct Rows {
    table: String,
    columns: usize,
    /// Inserts `batch` rows at once.
    insert_batch: Arc<Statement>,
    batch: usize,
    insert_one: Arc<Statement>,
    reader: Reader,
    /// Values of rows that have not been inserted.
    values: Vec<Value>,
    /// Bytes that they came in, about.
    bytes: usize,
    rows: u64,
    /// Charged for values and unfinished rows.
    share: Share,
}

impl Session {
    /// Prepares the INSERTs and asks for the rows.
    pub(super) async fn begin_copy(
        &mut self,
        table: &Table,
        columns: &[String],
        format: &Format,
        output: &mut Output,
    ) -> Result<()> {
        let columns = match columns.len() {
            0 => self.table_columns(table).await?,
            _ => columns.to_vec(),
        };
        if columns.is_empty() {
            let message = format!("relation \"{}\" does not exist", table.name);
            return Err(Error::new(sqlstate::UNDEFINED_TABLE, message));
        }
        format.check_columns(&columns)?;
        let batch = (PARAMETERS / columns.len()).max(1);
        let (insert_batch, _) = self.link.prepare(&insert(table, &columns, batch)).await?;
        let (insert_one, _) = self.link.prepare(&insert(table, &columns, 1)).await?;
        let declared =
            |info: &ParameterInfo| types::declared(info.declared_type.as_deref().unwrap_or("TEXT"));
        let kinds: Vec<Type> = insert_one
            .parameters
            .iter()
            .map(|info| declared(info).map_or(Type::Text, |known| known.kind))
            .collect();
        backend::copy_in(output, columns.len());
        let rows = Rows {
            table: table.name.clone(),
            columns: columns.len(),
            insert_batch,
            batch,
            insert_one,
            reader: Reader::new(format, columns, kinds),
            values: Vec::new(),
            bytes: 0,
            rows: 0,
            share: Share::default(),
        };
        self.begin_copy_in(Target::Table(rows), output).await
    }

    /// Sends what asks for the data.
    pub(super) async fn begin_copy_in(&mut self, target: Target, output: &mut Output) -> Result<()> {
        self.copy = Some(Box::new(CopyIn { target, rest: None, share: Share::default() }));
        let sent = self.link.send(output).await;
        output.clear();
        if sent.is_err()
            && let Some(mut copy) = self.copy.take()
        {
            copy.give_up(self).await;
        }
        let lost = |_| Error::new(sqlstate::CONNECTION_FAILURE, "the connection was lost when COPY began");
        sent.map_err(lost)
    }

    /// The columns of a table that take values: those that are generated do not. None if there is no such table.
    pub(super) async fn table_columns(&mut self, table: &Table) -> Result<Vec<String>> {
        let schema = table.schema.clone().map_or(Value::Null, Value::Text);
        let sql = "SELECT name FROM pragma_table_xinfo($1, $2) WHERE hidden = 0 ORDER BY cid";
        let names = self.link.collect(sql, &[Value::Text(table.name.clone()), schema]).await?;
        let text = |name| match name {
            Value::Text(name) => Some(name),
            _ => None,
        };
        Ok(names.into_iter().flatten().filter_map(text).collect())
    }

    /// Takes rows. Without a COPY they are the rest of one that failed, and ignored.
    pub(super) async fn copy_data(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        match copy.target.take(bytes, self).await {
            Ok(()) => {
                self.copy = Some(copy);
                Ok(())
            }
            Err(error) => self.end_of_copy(copy, Err(error)).await,
        }
    }

    /// The rows are complete.
    pub(super) async fn copy_done(&mut self) -> Result<(), Fault> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        let outcome = copy.target.finish(self).await;
        self.end_of_copy(copy, outcome).await
    }

    /// The client gives up.
    pub(super) async fn copy_failed(&mut self, reason: &[u8]) -> Result<(), Fault> {
        let Some(copy) = self.copy.take() else { return Ok(()) };
        let message = format!("COPY from stdin failed: {}", String::from_utf8_lossy(reason));
        let error = Error::new(sqlstate::QUERY_CANCELED, message);
        self.end_of_copy(copy, Err(error)).await
    }

    /// Rows came in a message that does not fit in memory. Without a COPY they are the rest of one that failed.
    pub(super) async fn copy_rejected(&mut self, error: Error) -> Result<(), Fault> {
        match self.copy.take() {
            Some(copy) => self.end_of_copy(copy, Err(error)).await,
            None => Ok(()),
        }
    }

    /// The client sends something else.
    pub(super) async fn copy_interrupted(&mut self) -> Result<(), Fault> {
        let Some(copy) = self.copy.take() else { return Ok(()) };
        let error = Error::new(sqlstate::PROTOCOL_VIOLATION, "unexpected message during COPY from stdin");
        self.end_of_copy(copy, Err(error)).await
    }

    /// `outcome` tells how many rows there were.
    async fn end_of_copy(&mut self, mut copy: Box<CopyIn>, outcome: Result<u64>) -> Result<(), Fault> {
        if outcome.is_err() {
            copy.give_up(self).await;
        }
        let Some(Rest(rest)) = copy.rest else {
            return match outcome.map_err(Fault::from) {
                Ok(rows) => {
                    backend::command_complete(&mut self.output, CommandTag::Copy(rows));
                    Ok(())
                }
                Err(Fault::Statement(error)) => {
                    self.extended_failed(&error);
                    Ok(())
                }
                Err(end) => Err(end),
            };
        };
        let outcome = match outcome {
            Ok(rows) => self.go_on_after_copy(rows, &rest).await,
            Err(error) => Err(error.into()),
        };
        Box::pin(self.end_of_text(outcome)).await
    }

    async fn go_on_after_copy(&mut self, rows: u64, rest: &str) -> Result<(), Fault> {
        if super::simple::is_blank(rest) {
            self.link.finish().await?;
        }
        backend::command_complete(&mut self.output, CommandTag::Copy(rows));
        Box::pin(self.run_text(rest)).await
    }
}

impl Target {
    async fn take(&mut self, bytes: &[u8], session: &mut Session) -> Result<()> {
        match self {
            Target::Table(rows) => rows.take(bytes, session).await,
            Target::Database(importing) => importing.take(bytes).await,
        }
    }

    async fn finish(&mut self, session: &mut Session) -> Result<u64> {
        match self {
            Target::Table(rows) => rows.finish(session).await,
            Target::Database(importing) => importing.finish(session).await,
        }
    }
}

impl Rows {
    async fn take(&mut self, mut bytes: &[u8], session: &mut Session) -> Result<()> {
        loop {
            let before = bytes.len();
            let taken = self.reader.take(&mut bytes, &mut self.values);
            let complete = taken.map_err(|error| self.at_line(error))?;
            self.bytes += before - bytes.len().min(before);
            if !complete || self.bytes > CHARGED_BYTES {
                self.hold(session)?;
            }
            if !complete {
                return Ok(());
            }
            if self.values.len() >= self.batch * self.columns {
                self.insert(self.batch, session).await?;
            } else if self.bytes > GATHERED_BYTES {
                self.insert_all(session).await?;
            }
        }
    }

    /// Charges unfinished rows and batches.
    fn hold(&mut self, session: &Session) -> Result<()> {
        let held = self.reader.held_bytes() + self.bytes + self.values.len() * size_of::<Value>();
        self.share.set(session.statements.memory(), held as u64)
    }

    async fn finish(&mut self, session: &mut Session) -> Result<u64> {
        let finished = self.reader.finish(&mut self.values);
        finished.map_err(|error| self.at_line(error))?;
        self.insert_all(session).await?;
        Ok(self.rows)
    }

    /// Inserts the rows that are fewer than a batch, one by one.
    async fn insert_all(&mut self, session: &mut Session) -> Result<()> {
        while !self.values.is_empty() {
            self.insert(1, session).await?;
        }
        Ok(())
    }

    async fn insert(&mut self, rows: usize, session: &mut Session) -> Result<()> {
        session.link.give_way().await?;
        let statement = if rows == 1 { &self.insert_one } else { &self.insert_batch };
        let values = &self.values[..rows * self.columns];
        let run = session.link.execute(statement, values, Scope::Implicit, &mut Collector::default()).await;
        run.map_err(|error| self.at_line(error))?;
        self.values.drain(..rows * self.columns);
        self.rows += rows as u64;
        self.bytes = 0;
        Ok(())
    }

    /// Says where in the rows an error was met: up to the line that was read last.
    fn at_line(&self, error: Error) -> Error {
        match error.get_detail() {
            Some(_) => error,
            None => error.detail(format!("COPY {}, up to line {}", self.table, self.reader.lines)),
        }
    }
}

fn insert(table: &Table, columns: &[String], rows: usize) -> String {
    let names: Vec<String> = columns.iter().map(|column| quote_name(column)).collect();
    let mut sql = format!("INSERT INTO {} ({}) VALUES ", table.sql(), names.join(", "));
    for row in 0..rows {
        sql.push_str(if row == 0 { "(" } else { ", (" });
        for column in 0..columns.len() {
            let comma = if column == 0 { "" } else { ", " };
            sql.push_str(&format!("{comma}${}", row * columns.len() + column + 1));
        }
        sql.push(')');
    }
    sql
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_insert_numbers_its_parameters() {
        let table = Table { schema: None, name: "t".into() };
        let sql = insert(&table, &["a".into(), "b".into()], 2);
        assert_eq!(sql, r#"INSERT INTO "t" ("a", "b") VALUES ($1, $2), ($3, $4)"#);
    }
}
