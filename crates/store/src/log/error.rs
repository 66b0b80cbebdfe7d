//! Errors of a commit log.

use std::io;
use std::sync::Arc;

use super::Lsn;
use crate::store::Failure;

/// Why a log rejects a record, or what has happened to one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LogError {
    /// There is no space for the record. The log itself works and keeps trying to get space.
    #[error("commit log is full: {0}")]
    Full(FullCause),
    /// Too many bytes are pending in memory, or the next file is still being prepared. Wait
    /// ([`super::CommitLog::wait_for_space`]) and retry.
    #[error("commit log is busy: too much data is waiting to become durable; retry the transaction")]
    Busy,
    /// The record is longer than a log file can be.
    #[error(
        "log record of {bytes} bytes exceeds the maximum of {most} bytes; write less data in one \
         transaction"
    )]
    TooLong {
        /// The record's length.
        bytes: u64,
        /// The maximum length.
        most: u64,
    },
    /// A write or sync has failed. New records are rejected until a new log has started.
    #[error(
        "could not write commit log: {cause}; commits are rejected until a new log has started \
         (check the disk)"
    )]
    Failed {
        /// The failure.
        cause: Arc<str>,
    },
    /// The store has rejected the log's objects for some time. Appended records are still being
    /// retried.
    #[error(
        "could not write commit log to the object store: {cause}; commits are rejected until the \
         store accepts writes (check the store)"
    )]
    Unreachable {
        /// The failure.
        cause: Arc<str>,
    },
    /// Another process has closed this node's log in the store. The log accepts no more records.
    #[error(
        "commit log was taken over by another process with this node's identity: {object}; stop \
         this node"
    )]
    Fenced {
        /// The object that occupies the slot of the log's next object.
        object: String,
    },
    /// The record was permanently lost by a failed write: recovery will not restore it.
    #[error(
        "commit was lost: writing the log failed after position {after}; the transaction was \
         rolled back"
    )]
    Discarded {
        /// Records up to this position were kept.
        after: Lsn,
    },
    /// The log was closed before the record was known to be durable. Recovery decides.
    #[error("commit log is closed")]
    Closed,
    /// The log belongs to read-only data.
    #[error("commit log is read-only")]
    ReadOnly,
    /// A part of the log that had been durable cannot be read.
    #[error(
        "commit log is damaged: {file}, byte {offset}: {problem}; restore the file from a copy, \
         or move the log's files away and lose the commits that were not yet flushed"
    )]
    Corrupt {
        /// The file, with its path.
        file: String,
        /// The offset in the file.
        offset: u64,
        /// The inconsistency that was found.
        problem: String,
    },
    /// An operation on the log's files has failed.
    #[error("could not {operation} {file}: {cause}")]
    Io {
        /// The operation that failed.
        operation: &'static str,
        /// The file, with its path.
        file: String,
        /// The error.
        cause: Arc<io::Error>,
    },
    /// An operation on the log's objects has failed.
    #[error("could not {operation} {object}: {cause}; {}", cause.kind().remedy())]
    Store {
        /// The operation that failed.
        operation: &'static str,
        /// The object.
        object: String,
        /// The error.
        cause: Failure,
    },
    /// Other processes repeatedly opened the same log.
    #[error(
        "could not open commit log {directory}: other processes keep opening it; start only one \
         node with this identity"
    )]
    Contended {
        /// The directory of its objects.
        directory: String,
    },
    /// The caller's replay function returned an error.
    #[error("could not replay the log record that ends at position {position}: {cause}")]
    Replay {
        /// The record's end.
        position: Lsn,
        /// The error.
        cause: String,
    },
}

/// Why a log has no space.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FullCause {
    /// The disk provides no more space.
    #[error("{cause}; check that the log's disk works and has free space")]
    Disk {
        /// The disk's error.
        cause: Arc<str>,
    },
    /// The log has reached its capacity, because flushes are behind.
    #[error("its capacity of {capacity_bytes} bytes is used up; wait for the next flush")]
    Capacity {
        /// The capacity.
        capacity_bytes: u64,
    },
}
