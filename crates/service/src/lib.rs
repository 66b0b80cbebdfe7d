//! The partition service: the interface between a client's session and the partition that runs its
//! statements.
//!
//! ```text
//! gateway session --> PartitionService --> LocalPartition --> engine session --> partition
//! ```
//!
//! A session prepares statements, executes them into a row sink, and ends or abandons its
//! transaction. It does not depend on where the partition is: an implementation for a partition of
//! another node answers the same calls. [`LocalPartition`] is the implementation for a partition of
//! this node. Callers select the implementation statically, and a call of [`LocalPartition`]
//! returns the engine's own future, without a wrapper or an allocation.
//!
//! # Requests
//!
//! | request | method |
//! | --- | --- |
//! | prepare and describe a statement | [`prepare`]; [`Statement`] is the description |
//! | run a statement | [`execute`], with the rows passed to a [`RowSink`] |
//! | begin, commit, roll back, savepoints | [`execute`] of the SQL statement |
//! | commit the implicit transaction | [`commit_implicit`] |
//! | fail the open transaction | [`fail`], after an error outside of the partition |
//! | cancel | [`canceller`], usable from other threads |
//! | export | [`export`], a stream of the pages of one version |
//!
//! [`prepare`]: PartitionService::prepare
//! [`execute`]: PartitionService::execute
//! [`commit_implicit`]: PartitionService::commit_implicit
//! [`fail`]: PartitionService::fail
//! [`canceller`]: PartitionService::canceller
//! [`export`]: PartitionService::export
//!
//! Transaction control has no methods of its own: clients send it as SQL, and its answers (command
//! tags, notices) are those of statements.
//!
//! # Answers
//!
//! Rows of a statement are valid once its future has returned: until then the partition may call
//! [`RowSink::reset`] and pass them again, because it replays a statement after a conflict. A
//! successful answer of a commit is durable.
//!
//! A request can be refused in three ways ([`Refusal`]):
//!
//! - *Failed*: an error of the statement. It is the client's answer.
//! - *Owned elsewhere*: another node owns the partition. The request has had no effect; the caller
//!   can send it there.
//! - *Moving*: the partition changes its owner now. The request has had no effect; the caller waits
//!   and repeats it.
//!
//! An implementation has its own error type that converts to [`Refusal`]. A local partition always
//! fails with the engine's error, so the conversion costs nothing.
//!
//! # An example
//!
//! A client sends `BEGIN`, `UPDATE t SET n = n + 1`, `COMMIT`. Each is prepared, which returns the
//! [`Statement`] with its columns and parameters, and executed with [`Scope::Auto`]. The status
//! after each is `Idle -> InTransaction -> InTransaction -> Idle`. If the client disconnects before
//! COMMIT, [`PartitionService::close`] rolls the transaction back.
//!
//! # Rules for callers
//!
//! A future of a request should be polled to completion; to end it early, cancel the statement and
//! keep polling. Dropping it rolls the transaction back, and may block the thread
//! ([`fulmar_engine::Session`]). One request at a time: methods take `&mut self`.
//!
//! # Outside of this interface
//!
//! Settings of a session (limits, time travel, access rights), the provider of system tables, the
//! release of expired snapshots, and charges of temporary files are calls of the engine's session
//! ([`LocalPartition::session_mut`]): they change or observe state of this process.

mod local;
mod refusal;

use std::sync::Arc;

pub use fulmar_engine::{
    CancelReason, Completion, RowSink, Scope, Statement, StatementContext, TransactionStatus, Value,
};
pub use local::LocalPartition;
pub use refusal::Refusal;

/// A session's partition.
pub trait PartitionService {
    /// Why a request was refused.
    type Error: Into<Refusal>;
    /// A handle that cancels statements.
    type Canceller: Cancel;
    /// A stream of the pages of one version.
    type Export: ExportStream<Error = Self::Error>;

    /// Prepares the first statement of `sql` without running it. Returns it and the rest of the
    /// text. `known` is what the caller knows in addition to the text; the same text must always
    /// come with the same information.
    fn prepare<'a>(
        &mut self,
        sql: &'a str,
        known: StatementContext<'_>,
    ) -> impl Future<Output = Result<(Arc<Statement>, &'a str), Self::Error>>;

    /// Runs a statement to completion and waits until its answer is durable. `scope` is the
    /// transaction of a statement that runs outside of the client's own transaction.
    fn execute(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> impl Future<Output = Result<Completion, Self::Error>>;

    /// Commits the implicit transaction, if there is one, or rolls it back if it has failed.
    fn commit_implicit(&mut self) -> impl Future<Output = Result<(), Self::Error>>;

    /// Marks the open transaction as failed.
    fn fail(&mut self);

    /// The status of the client's explicit transaction.
    fn status(&self) -> TransactionStatus;

    /// A handle that cancels this session's statements.
    fn canceller(&self) -> Self::Canceller;

    /// Begins to read all pages as of a time (milliseconds since 1970), or as they are now.
    fn export(&self, at_unix_ms: Option<u64>) -> impl Future<Output = Result<Self::Export, Self::Error>>;

    /// Rolls the open transaction back and releases all resources.
    fn close(&mut self) -> impl Future<Output = ()>;
}

/// Cancels the statements of a session.
pub trait Cancel: Clone + Send + Sync + 'static {
    /// Cancels the running statement, if there is one.
    fn cancel(&self, reason: CancelReason);
}

/// The pages of one version of a partition, in order.
pub trait ExportStream {
    /// Why the stream failed.
    type Error;

    /// Appends the next pages to `out`. Returns false at the end.
    fn next_pages(&mut self, out: &mut Vec<u8>) -> impl Future<Output = Result<bool, Self::Error>>;
}
