//! The state of a COPY FROM STDIN, between two messages of the client.

use std::sync::Arc;

use fulmar_engine::{Import, Statement, Value};
use fulmar_meta::Tenant;
use fulmar_pgwire::copy::read::Reader;

use super::memory_quota::Reservation;

/// The text that follows a COPY in a Query message.
#[derive(Debug, Default)]
pub(super) struct RemainingText(pub(super) String);

/// A COPY in progress.
pub(super) struct CopyIn {
    pub(super) target: Target,
    /// The statements that follow the COPY in its Query message. `None` in the extended protocol.
    pub(super) rest: Option<RemainingText>,
    /// The memory charge for `rest`.
    pub(super) reservation: Reservation,
}

/// The destination of a COPY.
pub(super) enum Target {
    Table(Rows),
    Database(Importing),
}

/// Rows to be inserted into a table.
pub(super) struct Rows {
    pub(super) table: String,
    pub(super) columns: usize,
    /// Inserts `batch` rows.
    pub(super) insert_batch: Arc<Statement>,
    pub(super) batch: usize,
    pub(super) insert_one: Arc<Statement>,
    pub(super) reader: Reader,
    /// Values of rows that have not been inserted yet.
    pub(super) values: Vec<Value>,
    /// Approximate size of their text in the messages.
    pub(super) bytes: usize,
    /// Rows inserted so far.
    pub(super) rows: u64,
    /// The memory charge for `values` and the incomplete row.
    pub(super) reservation: Reservation,
}

/// An import in progress.
pub(super) struct Importing {
    pub(super) tenant: Arc<Tenant>,
    /// `None` once all pages have arrived, or the import was aborted.
    pub(super) import: Option<Import>,
}
