//! `COPY ... TO STDOUT`: sends the rows of a query as lines.
//!
//! ```text
//! client: COPY t TO STDOUT (FORMAT csv)
//! server: CopyOutResponse, one CopyData per row, CopyDone, COPY n
//! ```
//!
//! Like all results ([`Buffer`]), the lines are buffered until the query has ended, and spill to a
//! temporary file if they are large.

use fulmar_dialect::copy::select;
use fulmar_dialect::token::{TableName, is_blank};
use fulmar_engine::{CommandTag, Error, Row, RowSink, Scope, sqlstate};
use fulmar_pgwire::copy::Format;
use fulmar_pgwire::copy::write::Writer;
use fulmar_pgwire::protocol::backend;
use fulmar_pgwire::types::Type;

use super::outcome::{MessageError, PlanOutcome};
use super::rows::{Buffer, Output, encoded_bytes};
use super::state::Session;
use super::statements::{Plan, columns};
use crate::Result;

impl Session {
    /// The query that selects all rows of a table.
    pub(super) async fn table_query(&mut self, table: &TableName) -> Result<String> {
        let of_tenant = |schema: &String| ["main", "temp"].contains(&schema.as_str());
        let columns = match table.schema.as_ref().is_none_or(of_tenant) {
            true => self.table_columns(table).await?,
            false => Vec::new(),
        };
        Ok(match columns.is_empty() {
            // A system table, or a table that does not exist.
            true => format!("SELECT * FROM {}", table.sql()),
            false => select(table, &columns),
        })
    }

    /// Runs the query and writes its lines to `output`.
    pub(super) async fn copy_out(
        &mut self,
        query: &str,
        format: &Format,
        output: &mut Output,
    ) -> Result<PlanOutcome, MessageError> {
        let (plan, rest) = self.plan(query).await?;
        let Plan::Engine(statement) = &plan else { return Err(not_a_query().into()) };
        if statement.columns.is_empty() || !is_blank(rest) {
            return Err(not_a_query().into());
        }
        if !statement.parameters.is_empty() {
            let message = "COPY query cannot have parameters";
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message).into());
        }
        let columns = columns(&plan);
        let names: Vec<String> = columns.iter().map(|column| column.name.clone()).collect();
        format.check_columns(&names)?;
        let lines =
            Buffer::new(output, self.statements.spills(&self.context.temporary_directory, &self.temporary));
        let mut lines = Lines { lines, writer: Writer::new(format, &columns), rows: 0, begun: false };
        match self.link.execute(statement, &[], Scope::Implicit, &mut lines).await {
            Ok(_) => {
                lines.begin();
                backend::copy_done(lines.lines.bytes);
                let tag = CommandTag::Copy(lines.rows);
                Ok(PlanOutcome::Done { tag, rows: lines.rows, spill: lines.lines.finish() })
            }
            Err(error) => {
                lines.reset();
                Err(error.into())
            }
        }
    }
}

fn not_a_query() -> Error {
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "COPY requires a single query that returns rows")
        .hint("Use COPY (SELECT ...) TO STDOUT.")
}

/// Writes rows as CopyData messages.
struct Lines<'a> {
    lines: Buffer<'a>,
    writer: Writer,
    rows: u64,
    begun: bool,
}

impl Lines<'_> {
    /// Writes CopyOutResponse and the header line before the first row.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            backend::copy_out(self.lines.bytes, self.writer.columns());
            let mut header = Vec::new();
            if self.writer.header(&mut header) {
                backend::copy_data(self.lines.bytes, |out| out.extend_from_slice(&header));
            }
        }
    }
}

impl RowSink for Lines<'_> {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        self.begin();
        let mut start = self.lines.bytes.len();
        let head = backend::begin_copy_data(self.lines.bytes) - start;
        for index in 0..row.len() {
            let value = row.get(index);
            // In the worst case every character is escaped.
            start = self.lines.make_room_for(2 * encoded_bytes(value, Type::Text), start)?;
            self.writer.value(index, value, self.lines.bytes)?;
        }
        self.writer.end_line(self.lines.bytes);
        backend::end_row(self.lines.bytes, start + head);
        self.rows += 1;
        self.lines.spill_if_large()
    }

    fn reset(&mut self) {
        self.lines.reset();
        (self.rows, self.begun) = (0, false);
    }
}
