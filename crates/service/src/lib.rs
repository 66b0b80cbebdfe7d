//! The partition service: the interface between a client's session and the partition that runs its
//! statements.
//!
//! ```text
//! gateway session --> PartitionService --> LocalPartition --> engine session --> partition
//! ```
//!
//! A session prepares statements, executes them into a row sink, and ends or abandons its
//! transaction. [`LocalPartition`] is the only implementation: in a cluster, the session itself runs
//! at the node that owns the partition, and the gateway's relay passes the messages of the client
//! there. Callers select the implementation statically, and a call of [`LocalPartition`] returns the
//! engine's own future, without a wrapper or an allocation.
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
//! A request fails with the engine's error. Two situations are specific to a cluster:
//!
//! - *Another node owns the partition*, or it is being released to one: the error has the state
//!   [`PARTITION_MOVED`](fulmar_engine::sqlstate::PARTITION_MOVED), and the request has had no effect.
//!   The caller ends the session; the relay waits for the new owner, and repeats the request there.
//! - *This node becomes the owner*: the request waits until the partition is open.
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

use std::sync::Arc;

use fulmar_engine::Error;
pub use fulmar_engine::{
    CancelReason, Completion, RowSink, Scope, Statement, StatementContext, TransactionStatus, Value,
};
pub use local::LocalPartition;

/// A session's partition.
pub trait PartitionService {
    /// A handle that cancels statements.
    type Canceller: Cancel;
    /// A stream of the pages of one version.
    type Export: ExportStream;

    /// Prepares the first statement of `sql` without running it. Returns it and the rest of the
    /// text. `known` is what the caller knows in addition to the text; the same text must always
    /// come with the same information.
    fn prepare<'a>(
        &mut self,
        sql: &'a str,
        known: StatementContext<'_>,
    ) -> impl Future<Output = Result<(Arc<Statement>, &'a str), Error>>;

    /// Runs a statement to completion and waits until its answer is durable. `scope` is the
    /// transaction of a statement that runs outside of the client's own transaction.
    fn execute(
        &mut self,
        statement: &Arc<Statement>,
        parameters: &[Value],
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> impl Future<Output = Result<Completion, Error>>;

    /// Commits the implicit transaction, if there is one, or rolls it back if it has failed.
    fn commit_implicit(&mut self) -> impl Future<Output = Result<(), Error>>;

    /// Marks the open transaction as failed.
    fn fail(&mut self);

    /// The status of the client's explicit transaction.
    fn status(&self) -> TransactionStatus;

    /// A handle that cancels this session's statements.
    fn canceller(&self) -> Self::Canceller;

    /// Begins to read all pages as of a time (milliseconds since 1970), or as they are now.
    fn export(&self, at_unix_ms: Option<u64>) -> impl Future<Output = Result<Self::Export, Error>>;

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
    /// Appends the next pages to `out`. Returns false at the end.
    fn next_pages(&mut self, out: &mut Vec<u8>) -> impl Future<Output = Result<bool, Error>>;
}
