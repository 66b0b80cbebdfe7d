//! Outcomes: of a session, of the handling of a message, of running a statement.

use fulmar_engine::{CommandTag, Error, sqlstate};
use fulmar_pgwire::protocol::frontend::Malformed;
use fulmar_pgwire::wire::Closed;

use super::rows::Spill;
use super::stall;

/// Why a session ends.
#[derive(Debug)]
pub(crate) enum End {
    /// The client sent Terminate, or disconnected.
    Client,
    /// The server shuts down, or the session was terminated.
    Server,
    /// Another node owns the partition. Requests without an answer had no effect.
    Moved,
    /// The node must not answer, because its incarnation has ended.
    Fenced,
    /// The client violated the protocol.
    Malformed(Malformed),
    /// A fatal error.
    Fatal(Error),
}

impl From<Closed> for End {
    fn from(closed: Closed) -> End {
        match closed {
            Closed::Client => End::Client,
            Closed::Server => End::Server,
            Closed::Fenced => End::Fenced,
            Closed::Idle => End::Fatal(
                Error::new(
                    sqlstate::IDLE_IN_TRANSACTION,
                    "terminating connection due to idle-in-transaction timeout",
                )
                .hint(
                    "Commit or roll back idle transactions, or increase idle_in_transaction_session_timeout.",
                ),
            ),
            Closed::Stalled => End::Fatal(stall::stalled()),
        }
    }
}

/// Why the handling of a message failed.
#[derive(Debug)]
pub(super) enum MessageError {
    /// An error to report to the client. The session continues.
    Statement(Error),
    /// The session ends.
    End(End),
}

impl From<Error> for MessageError {
    fn from(error: Error) -> MessageError {
        match error.state() {
            sqlstate::PARTITION_MOVED => MessageError::End(End::Moved),
            sqlstate::ADMIN_SHUTDOWN | sqlstate::DATABASE_DROPPED => MessageError::End(End::Fatal(error)),
            _ => MessageError::Statement(error),
        }
    }
}

impl From<End> for MessageError {
    fn from(end: End) -> MessageError {
        MessageError::End(end)
    }
}

impl From<Closed> for MessageError {
    fn from(closed: Closed) -> MessageError {
        MessageError::End(closed.into())
    }
}

/// The outcome of running a plan.
pub(super) enum PlanOutcome {
    /// All rows have been written to the output.
    Done {
        tag: CommandTag,
        rows: u64,
        /// The spilled part of the rows, and its position in the output.
        spill: Option<(usize, Spill)>,
    },
    /// A COPY has begun. The client sends the data next.
    Copying,
}
