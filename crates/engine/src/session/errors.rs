//! Errors of transactions.

use fulmar_mvcc::log_error;
use fulmar_sqlite::{Error, sqlstate};
use fulmar_store::{CommitLog, LogError};

/// The error of an answer whose version was discarded, or whose durability is unknown.
pub(super) fn lost(error: LogError, log: &CommitLog) -> Error {
    match (error, log.fenced()) {
        (LogError::Discarded { .. }, _) => discarded(log),
        (_, Some(fenced)) => {
            log_error(fenced).detail("It is unknown whether the writes of this transaction were preserved.")
        }
        (other, None) => {
            Error::new(sqlstate::IO_ERROR, format!("could not confirm that the result is durable: {other}"))
                .hint("Query the outcome with pg_xact_status when the node is available again.")
        }
    }
}

/// The error of an answer whose version was discarded.
pub(super) fn discarded(log: &CommitLog) -> Error {
    let error = match log.check_available() {
        Err(fenced @ LogError::Fenced { .. }) => log_error(fenced),
        _ => Error::new(sqlstate::IO_ERROR, "could not write the commit log")
            .hint("Retry the transaction, and check the disk of the data directory."),
    };
    error.detail("The data that this transaction read or wrote was discarded; nothing of it remains.")
}

pub(super) fn failed_transaction() -> Error {
    Error::new(
        sqlstate::IN_FAILED_TRANSACTION,
        "current transaction is aborted, commands ignored until end of transaction block",
    )
    .hint("Run ROLLBACK, or ROLLBACK TO a savepoint.")
}

pub(super) fn no_transaction() -> Error {
    Error::new(sqlstate::NO_ACTIVE_TRANSACTION, "there is no transaction in progress")
}
