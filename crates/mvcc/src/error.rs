//! Errors that clients get if a partition rejects an operation, and conversions of errors of the
//! layers below.

use fulmar_pages::{FormatError, PartitionId};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{FullCause, LogError, StoreError};
use tracing::Instrument;

/// The error for a partition that was dropped.
pub fn dropped_error() -> Error {
    Error::new(sqlstate::DATABASE_DROPPED, "database was dropped")
}

/// The error for a partition that another node owns. Gateways handle it; clients never see it.
pub fn moved_error() -> Error {
    Error::new(sqlstate::PARTITION_MOVED, "database has moved to another node")
}

/// The error for a write in a historical session.
pub fn historical_session_is_read_only() -> Error {
    Error::new(sqlstate::READ_ONLY_TRANSACTION, "cannot write in a historical session")
        .detail("fulmar.as_of is set.")
        .hint("Run RESET fulmar.as_of to return to the current data.")
}

/// The error for a write on a read replica.
pub fn replica_is_read_only() -> Error {
    Error::new(sqlstate::READ_ONLY_TRANSACTION, "cannot write on a read-only node")
        .hint("Connect to the primary node.")
}

/// The error for data that the primary has deleted since the snapshot.
pub(crate) fn snapshot_deleted() -> Error {
    Error::new(sqlstate::SERIALIZATION_FAILURE, "snapshot too old")
        .detail("Its data was deleted from the store after the retention period of the database.")
        .hint("Retry the transaction.")
}

pub(crate) fn decided_aborted(id: u64) -> Error {
    Error::new(
        sqlstate::SERIALIZATION_FAILURE,
        format!("transaction {id} was aborted because its outcome was requested before it committed"),
    )
    .hint("Retry the transaction.")
}

pub(crate) fn corrupt(id: PartitionId, error: FormatError) -> Error {
    Error::new(sqlstate::DATA_CORRUPTED, format!("log record of partition {id} is damaged: {error}"))
        .hint("Restore the data directory from a backup.")
}

/// Converts a store error for clients. They get what failed; location and cause go to the
/// node's log only. The partition is derived from the object's name if possible; [`store_error_of`]
/// is for callers that know it.
pub fn store_error(error: StoreError) -> Error {
    report(error.partition(), &error)
}

/// The same for an object that a partition needs.
pub fn store_error_of(id: PartitionId, error: StoreError) -> Error {
    report(Some(id), &error)
}

/// Logs a store error, and converts it for clients.
fn report(id: Option<PartitionId>, error: &StoreError) -> Error {
    tracing::warn!(%error, partition = id.map(tracing::field::display), "object store request failed");
    let client_error =
        Error::new(sqlstate::IO_ERROR, error.for_tenants()).hint(match error.damaged_object() {
            Some(_) => {
                "Restore the object from a copy of the store. Run `fulmar verify` to find other damage."
            }
            None => "Check the object store. `fulmar verify` reads all of it; /metrics counts its failures.",
        });
    match id {
        Some(id) => client_error.detail(belongs_to(id)),
        None => client_error,
    }
}

fn belongs_to(id: PartitionId) -> String {
    format!("It belongs to partition {id}.")
}

/// Opens a partition. Store errors meanwhile are attributed to it, in the error's detail and in the
/// log.
pub async fn with_partition_context<T>(id: PartitionId, open: impl Future<Output = Result<T>>) -> Result<T> {
    let opened = open.instrument(tracing::error_span!("opening", partition = %id)).await;
    opened.map_err(|error| match error.state() == sqlstate::IO_ERROR && error.get_detail().is_none() {
        true => error.detail(belongs_to(id)),
        false => error,
    })
}

/// Converts a log error on a read replica. Clients get what failed; location and cause go to
/// the node's log only.
pub fn log_unreadable(error: LogError) -> Error {
    tracing::warn!(%error, "could not read the primary's log; the next read retries");
    let state = match error {
        LogError::Corrupt { .. } => sqlstate::DATA_CORRUPTED,
        _ => sqlstate::IO_ERROR,
    };
    Error::new(state, "could not read the primary's log").hint(
        "Retry the transaction. If the error persists, check the object store, or connect to the \
         primary node.",
    )
}

/// Converts a log error for clients.
pub fn log_error(error: LogError) -> Error {
    match error {
        LogError::Full(FullCause::Disk { .. }) => {
            Error::new(sqlstate::DISK_FULL, "disk is full: cannot extend the commit log")
                .detail(error.to_string())
                .hint(
                    "The transaction was rolled back. Free space on the disk of the data directory, \
                     then retry it.",
                )
        }
        LogError::Full(FullCause::Capacity { .. }) => {
            Error::new(sqlstate::DISK_FULL, "commit log is full: flushes to the store are behind")
                .detail(error.to_string())
                .hint(
                    "The transaction was rolled back and can be retried. Check that the object \
                     store accepts writes; see the node's log.",
                )
        }
        LogError::Busy => Error::new(sqlstate::OUT_OF_MEMORY, "commit log is overloaded").hint(
            "Retry the transaction. If the error persists, the disk (for a shared database: the \
             object store) is too slow for the load.",
        ),
        LogError::Unreachable { .. } | LogError::Store { .. } => {
            // Location and cause go to the node's log only. The log has already reported the first
            // of the two kinds.
            if matches!(error, LogError::Store { .. }) {
                tracing::warn!(%error, "could not access the commit log in the store");
            }
            Error::new(sqlstate::IO_ERROR, "could not access the commit log in the store")
                .hint("The transaction was rolled back. Retry it when the object store is available again.")
        }
        LogError::Fenced { .. } | LogError::Contended { .. } => {
            Error::new(sqlstate::IO_ERROR, "another process has taken over this node's log in the store")
                .detail(error.to_string())
                .hint("Start only one node with this data directory and store.")
        }
        LogError::ReadOnly => historical_session_is_read_only(),
        other => Error::new(sqlstate::IO_ERROR, format!("commit log failed: {other}"))
            .hint("The transaction was rolled back. Check the disk of the data directory."),
    }
}

/// The error of a process whose store is owned by another one.
pub(crate) fn taken_over() -> Error {
    Error::new(sqlstate::IO_ERROR, "another process has taken over the store")
        .detail("A node that was started later owns it now; this one no longer flushes, collects or commits.")
        .hint("Stop this node, and make sure that only one node uses this data directory and store.")
}

/// The error of a transaction that cannot be replayed with the same answers.
pub fn serialization_failure(detail: &str) -> Error {
    Error::new(sqlstate::SERIALIZATION_FAILURE, "could not serialize access due to concurrent update")
        .detail(detail)
        .hint("Retry the transaction. The next attempt acquires the write turn first.")
}

/// The error of a statement whose snapshot retained too much memory.
pub fn snapshot_too_old() -> Error {
    serialization_failure(
        "The snapshot was too old: the page versions replaced since then use too much memory.",
    )
}
