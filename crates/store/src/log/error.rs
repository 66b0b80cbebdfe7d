//! What can go wrong with a log.

use std::io;
use std::sync::Arc;

use super::Lsn;
use crate::store::Failure;

/// Why a log refuses, or what became of a record.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LogError {
    /// There is no space for the record. Nothing is broken: the log goes on trying to get space.
    #[error("the log has no space for the commit: {0}")]
    Full(FullCause),
    /// More is pending than the log holds in memory, or its next file is still being made. Wait
    /// ([`super::CommitLog::wait_room`]) and try again.
    #[error(
        "the log is busy: more is waiting to be durable than may be held in memory; try again in a moment"
    )]
    Busy,
    /// The record is longer than any log file may be.
    #[error(
        "a log record of {bytes} bytes is longer than the most that is possible, {most} bytes; write less in one transaction"
    )]
    TooLong {
        /// The record's length.
        bytes: u64,
        /// The greatest length.
        most: u64,
    },
    /// A write or sync has failed. New records are refused until a new log has begun.
    #[error(
        "the log cannot be written: {cause}; new commits are refused until a new log has begun (check the disk)"
    )]
    Failed {
        /// The failure.
        cause: Arc<str>,
    },
    /// The store has not taken the log's objects for a while. What was appended is still being put.
    #[error(
        "the log in the store cannot be written: {cause}; new commits are refused until it can be (check the store)"
    )]
    Unreachable {
        /// The failure.
        cause: Arc<str>,
    },
    /// Somebody else has closed this node's log in the store. It takes nothing any more.
    #[error(
        "the log in the store was closed by another process, which goes on in this node's name: {object}; stop this node"
    )]
    Fenced {
        /// The object that stands where the log's next one should be.
        object: String,
    },
    /// The record was lost by a failed write, for good: it will not come back at recovery.
    #[error("the commit was lost: writing the log failed beyond position {after}; the commit did not happen")]
    Discarded {
        /// Everything up to here was kept.
        after: Lsn,
    },
    /// The log was closed before the record was known to be durable; recovery will tell.
    #[error("the log is closed")]
    Closed,
    /// What had been durable cannot be read any more.
    #[error(
        "the log is damaged: {file}, byte {offset}: {problem}; restore the file from a copy, or move the log's files away and lose what its last flushes do not hold"
    )]
    Corrupt {
        /// The file, with its path.
        file: String,
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        problem: String,
    },
    /// An operation on the log's files has failed.
    #[error("cannot {operation} {file}: {cause}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On which file, with its path.
        file: String,
        /// Why it failed.
        cause: Arc<io::Error>,
    },
    /// An operation on the log's objects has failed.
    #[error("cannot {operation} {object}: {cause}; {}", cause.kind().remedy())]
    Store {
        /// What was tried.
        operation: &'static str,
        /// On which object.
        object: String,
        /// Why it failed.
        cause: Failure,
    },
    /// Others kept opening the same log.
    #[error(
        "the log {directory} cannot be opened: other processes open it too; start one node with this identity"
    )]
    Contended {
        /// Where its objects lie.
        directory: String,
    },
    /// Whoever reads the log at its opening could not use a record.
    #[error("the log record that ends at position {position} cannot be replayed: {cause}")]
    Replay {
        /// The record's end.
        position: Lsn,
        /// Why.
        cause: String,
    },
}

/// Why there is no space.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FullCause {
    /// The disk refuses to give more.
    #[error("{cause}; see that the log's disk works and has free space")]
    Disk {
        /// What the disk says.
        cause: Arc<str>,
    },
    /// The log has reached its own bound, since flushes are behind.
    #[error("it has reached its bound of {capacity_bytes} bytes; wait for the flush that is under way")]
    Capacity {
        /// The bound.
        capacity_bytes: u64,
    },
}
