//! `COPY t FROM STDIN`: inserts rows that the client sends into a table. [`fulmar_pgwire::copy`]
//! parses the formats. The COPY-in protocol handling here also serves [`super::copy_database`].
//!
//! ```text
//! client: COPY t FROM STDIN          server: CopyInResponse
//!         CopyData "1\tone\n2\tt"            lines are split, unescaped, inserted in batches
//!         CopyData "wo\n"                    (a line may span messages)
//!         CopyDone                           the last rows, the commit, COPY 2
//! ```
//!
//! - Rows are inserted by ordinary prepared INSERTs in the client's transaction, or in an implicit
//!   one. An error rolls all of them back.
//! - The database stays at its node until the COPY has ended ([`CopyHold`]).
//! - Each message is processed before the next one is read, so TCP flow control slows down a client
//!   that is faster than the engine.

use fulmar_dialect::token::{TableName, is_blank, quote_name};
use fulmar_engine::{CommandTag, Error, MoveHold, ParameterInfo, Scope, TransactionStatus, Value, sqlstate};
use fulmar_pgwire::copy::Format;
use fulmar_pgwire::copy::read::Reader;
use fulmar_pgwire::protocol::backend;
use fulmar_pgwire::types::{self, Type};

use super::copy_in::{CopyIn, RemainingText, Rows, Target};
use super::memory_quota::Reservation;
use super::outcome::MessageError;
use super::rows::{Collector, Output};
use super::state::Session;
use crate::Result;

/// Maximum number of parameters of one INSERT.
const MAX_PARAMETERS: usize = 512;
/// Buffered rows are charged once they exceed this size. Smaller amounts are charged at the end of
/// each message.
const CHARGE_THRESHOLD_BYTES: usize = 64 << 10;
/// How much data of a COPY the client's node can repeat in a transaction at another node: it keeps
/// the messages of an open transaction, up to a size.
const MAX_REPEATABLE_BYTES: usize = 512 << 10;
/// An incomplete batch is inserted once its rows exceed this size.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// Keeps the partition at this node during a COPY.
pub(super) struct CopyHold {
    _hold: MoveHold,
    /// Bytes that the client has sent.
    bytes: usize,
}

impl Session {
    /// Keeps the partition at this node until the COPY that begins has ended ([`MoveHold`]). Waits
    /// if the partition is about to move.
    pub(super) async fn hold_for_copy(&mut self) -> Result<()> {
        if self.relayed && self.copy_hold.is_none() {
            let hold = self.link.partition.session().hold_for_copy();
            let hold = Box::pin(self.link.run_cancellable(hold)).await;
            let hold = hold.map_err(|interrupted| interrupted.error)?;
            self.copy_hold = Some(Box::new(CopyHold { _hold: hold, bytes: 0 }));
        }
        Ok(())
    }

    /// Called after ReadyForQuery was sent. A COPY that cannot be repeated holds the partition
    /// until its transaction has ended.
    pub(super) fn release_after_copy(&mut self, status: TransactionStatus) {
        self.copy_hold
            .take_if(|copy| status == TransactionStatus::Idle || copy.bytes <= MAX_REPEATABLE_BYTES);
    }

    /// Prepares the INSERTs and requests the rows from the client.
    pub(super) async fn begin_copy(
        &mut self,
        table: &TableName,
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
        let batch = (MAX_PARAMETERS / columns.len()).max(1);
        let (insert_batch, _) = self.link.prepare(&insert(table, &columns, batch)).await?;
        let (insert_one, _) = self.link.prepare(&insert(table, &columns, 1)).await?;
        let declared =
            |info: &ParameterInfo| types::declared_type(info.declared_type.as_deref().unwrap_or("TEXT"));
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
            reservation: Reservation::default(),
        };
        self.begin_copy_in(Target::Table(rows), output).await
    }

    /// Sends `output`, which ends with the CopyInResponse.
    pub(super) async fn begin_copy_in(&mut self, target: Target, output: &mut Output) -> Result<()> {
        self.copy = Some(Box::new(CopyIn { target, rest: None, reservation: Reservation::default() }));
        let sent = self.link.send(output).await;
        output.clear();
        if sent.is_err()
            && let Some(mut copy) = self.copy.take()
        {
            copy.abort(self).await;
        }
        sent.map_err(|_| {
            Error::new(sqlstate::CONNECTION_FAILURE, "connection to client lost while starting COPY")
        })
    }

    /// The columns of a table, without generated columns. Empty if the table does not exist.
    pub(super) async fn table_columns(&mut self, table: &TableName) -> Result<Vec<String>> {
        let schema = table.schema.clone().map_or(Value::Null, Value::Text);
        let sql = "SELECT name FROM pragma_table_xinfo($1, $2) WHERE hidden = 0 ORDER BY cid";
        let names = self.link.collect(sql, &[Value::Text(table.name.clone()), schema]).await?;
        let text = |name| match name {
            Value::Text(name) => Some(name),
            _ => None,
        };
        Ok(names.into_iter().flatten().filter_map(text).collect())
    }

    /// Handles CopyData. Without a COPY in progress, the data belongs to a COPY that has failed,
    /// and is ignored.
    pub(super) async fn copy_data(&mut self, bytes: &[u8]) -> Result<(), MessageError> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        if let Some(hold) = &mut self.copy_hold {
            hold.bytes += bytes.len();
        }
        match copy.target.take(bytes, self).await {
            Ok(()) => {
                self.copy = Some(copy);
                Ok(())
            }
            Err(error) => self.end_of_copy(copy, Err(error)).await,
        }
    }

    /// Handles CopyDone.
    pub(super) async fn copy_done(&mut self) -> Result<(), MessageError> {
        let Some(mut copy) = self.copy.take() else { return Ok(()) };
        let outcome = copy.target.finish(self).await;
        self.end_of_copy(copy, outcome).await
    }

    /// Handles CopyFail.
    pub(super) async fn copy_failed(&mut self, reason: &[u8]) -> Result<(), MessageError> {
        let Some(copy) = self.copy.take() else { return Ok(()) };
        let message = format!("COPY from stdin failed: {}", String::from_utf8_lossy(reason));
        let error = Error::new(sqlstate::QUERY_CANCELED, message);
        self.end_of_copy(copy, Err(error)).await
    }

    /// Handles a CopyData or CopyFail message whose memory charge was rejected. Without a COPY in
    /// progress, it belongs to a COPY that has failed.
    pub(super) async fn copy_rejected(&mut self, error: Error) -> Result<(), MessageError> {
        match self.copy.take() {
            Some(copy) => self.end_of_copy(copy, Err(error)).await,
            None => Ok(()),
        }
    }

    /// Handles a message that is not allowed during COPY.
    pub(super) async fn copy_interrupted(&mut self) -> Result<(), MessageError> {
        let Some(copy) = self.copy.take() else { return Ok(()) };
        let error = Error::new(sqlstate::PROTOCOL_VIOLATION, "unexpected message during COPY from stdin");
        self.end_of_copy(copy, Err(error)).await
    }

    /// Ends a COPY. `outcome` is the number of rows.
    async fn end_of_copy(&mut self, mut copy: Box<CopyIn>, outcome: Result<u64>) -> Result<(), MessageError> {
        if outcome.is_err() {
            copy.abort(self).await;
        }
        let Some(RemainingText(rest)) = copy.rest else {
            return match outcome.map_err(MessageError::from) {
                Ok(rows) => {
                    backend::command_complete(&mut self.output, CommandTag::Copy(rows));
                    Ok(())
                }
                Err(MessageError::Statement(error)) => {
                    self.extended_failed(&error);
                    Ok(())
                }
                Err(end) => Err(end),
            };
        };
        let outcome = match outcome {
            Ok(rows) => self.run_rest_of_query(rows, &rest).await,
            Err(error) => Err(error.into()),
        };
        Box::pin(self.end_of_text(outcome)).await
    }

    async fn run_rest_of_query(&mut self, rows: u64, rest: &str) -> Result<(), MessageError> {
        if is_blank(rest) {
            self.finish().await?;
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
            if !complete || self.bytes > CHARGE_THRESHOLD_BYTES {
                self.charge(session)?;
            }
            if !complete {
                return Ok(());
            }
            if self.values.len() >= self.batch * self.columns {
                self.insert(self.batch, session).await?;
            } else if self.bytes > MAX_BATCH_BYTES {
                self.insert_all(session).await?;
            }
        }
    }

    /// Charges the incomplete row and the buffered values.
    fn charge(&mut self, session: &Session) -> Result<()> {
        let held = self.reader.held_bytes() + self.bytes + self.values.len() * size_of::<Value>();
        self.reservation.resize(session.statements.memory(), held as u64)
    }

    async fn finish(&mut self, session: &mut Session) -> Result<u64> {
        let finished = self.reader.finish(&mut self.values);
        finished.map_err(|error| self.at_line(error))?;
        self.insert_all(session).await?;
        Ok(self.rows)
    }

    /// Inserts the buffered rows one by one.
    async fn insert_all(&mut self, session: &mut Session) -> Result<()> {
        while !self.values.is_empty() {
            self.insert(1, session).await?;
        }
        Ok(())
    }

    async fn insert(&mut self, rows: usize, session: &mut Session) -> Result<()> {
        session.link.yield_if_slice_is_over().await?;
        let statement = if rows == 1 { &self.insert_one } else { &self.insert_batch };
        let values = &self.values[..rows * self.columns];
        let run = session.link.execute(statement, values, Scope::Implicit, &mut Collector::default()).await;
        run.map_err(|error| self.at_line(error))?;
        self.values.drain(..rows * self.columns);
        self.rows += rows as u64;
        self.bytes = 0;
        Ok(())
    }

    /// Adds the last line that was read as the error's detail.
    fn at_line(&self, error: Error) -> Error {
        match error.get_detail() {
            Some(_) => error,
            None => error.detail(format!(
                "The error occurred in COPY {}, at or before line {}.",
                self.table, self.reader.lines
            )),
        }
    }
}

fn insert(table: &TableName, columns: &[String], rows: usize) -> String {
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
    fn insert_numbers_its_parameters_across_rows() {
        let table = TableName { schema: None, name: "t".into() };
        let sql = insert(&table, &["a".into(), "b".into()], 2);
        assert_eq!(sql, r#"INSERT INTO "t" ("a", "b") VALUES ($1, $2), ($3, $4)"#);
    }
}
