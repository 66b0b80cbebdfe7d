//! What clients are told that meet a partition which cannot do what they ask.

use fulmar_pages::{FormatError, PartitionId};
use fulmar_store::{FullCause, LogError, StoreError};
use tracing::Instrument;

use crate::{Error, Result, sqlstate};

pub(crate) fn dropped_error() -> Error {
    Error::new(sqlstate::DATABASE_DROPPED, "the database was dropped").hint("connect to another database")
}

/// The error of who wants to write where the past is shown.
pub(crate) fn past_is_read_only() -> Error {
    Error::new(sqlstate::READ_ONLY_TRANSACTION, "cannot write to the database as it was in the past")
        .detail("fulmar.as_of is set: the session sees the database as it was then.")
        .hint("RESET fulmar.as_of, and write to the database as it is now.")
}

/// The error of who would write to what somebody else owns.
pub(crate) fn owner_writes() -> Error {
    Error::new(sqlstate::READ_ONLY_TRANSACTION, "this node only reads the databases of another one")
        .hint("Connect to the node that owns the store for that.")
}

/// The error of who needs what the owner has deleted since.
pub(super) fn left_behind() -> Error {
    let message = "what the transaction's snapshot was made of is not in the store any more";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message)
        .detail("The node that owns the store keeps it for as long as the database's retention says, and no longer.")
        .hint("Run the transaction again: it sees a newer snapshot then.")
}

pub(super) fn decided_aborted(id: u64) -> Error {
    Error::new(
        sqlstate::SERIALIZATION_FAILURE,
        format!("transaction {id} was aborted: its outcome was asked for before it committed"),
    )
    .hint("run the transaction again")
}

pub(super) fn corrupt(id: PartitionId, error: FormatError) -> Error {
    Error::new(sqlstate::DATA_CORRUPTED, format!("a log record of partition {id} is damaged: {error}"))
        .hint("restore the data directory from a backup")
}

/// Clients are told what could not be done; where, and what the store has said, only the log. Whose object it is its name says, or nobody
/// knows here: [`store_error_of`] for who does.
pub(crate) fn store_error(error: StoreError) -> Error {
    told(error.partition(), &error)
}

/// The same for an object that a partition needs.
pub(crate) fn store_error_of(id: PartitionId, error: StoreError) -> Error {
    told(Some(id), &error)
}

fn told(id: Option<PartitionId>, error: &StoreError) -> Error {
    tracing::warn!(%error, partition = id.map(tracing::field::display), "the store does not do its work");
    let told = Error::new(sqlstate::IO_ERROR, error.for_tenants()).hint(match error.damaged_object() {
        Some(_) => "restore the object from a copy of the store; `fulmar verify` tells what else is damaged",
        None => "see to the store; `fulmar verify` reads all of it, and /metrics counts its failures",
    });
    match id {
        Some(id) => told.detail(belongs_to(id)),
        None => told,
    }
}

fn belongs_to(id: PartitionId) -> String {
    format!("It belongs to partition {id}.")
}

/// Opens a partition. What of the store cannot be read meanwhile is told with whose it is, here and in the log.
pub(crate) async fn opening<T>(id: PartitionId, open: impl Future<Output = Result<T>>) -> Result<T> {
    let opened = open.instrument(tracing::error_span!("opening", partition = %id)).await;
    opened.map_err(|error| match error.state() == sqlstate::IO_ERROR && error.get_detail().is_none() {
        true => error.detail(belongs_to(id)),
        false => error,
    })
}

/// Clients are told what could not be done; where, and what the store has said, only the log.
pub(crate) fn log_unreadable(error: LogError) -> Error {
    tracing::warn!(%error, "the log of the node that owns the store cannot be read; who reads next tries again");
    let state = match error {
        LogError::Corrupt { .. } => sqlstate::DATA_CORRUPTED,
        _ => sqlstate::IO_ERROR,
    };
    Error::new(state, "the log of the node that owns the store cannot be read").hint(
        "Run the transaction again; if it persists, see to the store, or connect to the node that owns it.",
    )
}

pub(crate) fn log_error(error: LogError) -> Error {
    match error {
        LogError::Full(FullCause::Disk { .. }) => {
            Error::new(sqlstate::DISK_FULL, "the disk is full: the commit log cannot grow")
                .detail(error.to_string())
                .hint("free space on the disk that holds the data directory; the transaction was rolled back and can be run again")
        }
        LogError::Full(FullCause::Capacity { .. }) => {
            Error::new(sqlstate::DISK_FULL, "the commit log is full: flushes to the store are behind")
                .detail(error.to_string())
                .hint("see whether the store takes them (the node's log says why not); the transaction was rolled back and can be run again")
        }
        LogError::Busy => Error::new(sqlstate::OUT_OF_MEMORY, "the commit log cannot keep up")
            .hint("run the transaction again; if it persists, the disk (of a database that is shared: the store) is too slow for the load"),
        LogError::Unreachable { .. } | LogError::Store { .. } => {
            // Where the store is, and what it has said, only the node's log tells; of the first it has been told.
            if matches!(error, LogError::Store { .. }) {
                tracing::warn!(%error, "the commit log in the store cannot be written or read");
            }
            Error::new(sqlstate::IO_ERROR, "the commit log in the store cannot be written or read")
                .hint("the transaction was rolled back and can be run again when the store answers")
        }
        LogError::Fenced { .. } | LogError::Contended { .. } => {
            Error::new(sqlstate::IO_ERROR, "another process has taken over this node's log in the store")
                .detail(error.to_string())
                .hint("see that one node only is started with this data directory and this store")
        }
        LogError::ReadOnly => past_is_read_only(),
        other => Error::new(sqlstate::IO_ERROR, format!("the commit log failed: {other}"))
            .hint("the transaction was rolled back; check the disk that holds the data directory"),
    }
}
