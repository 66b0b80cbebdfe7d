//! SQLite on fibers: unmodified SQLite whose callbacks can wait without holding a thread, on
//! pages that the layer above provides.
//!
//! ```text
//!  the session's future
//!    |  polls a
//!  Fiber              a stack that can be suspended inside SQLite        fiber/
//!    |  runs
//!  Connection         prepares, binds, steps; functions, authorizer      connection/
//!    |  calls SQLite, which calls back
//!  Link               waits, yields, cancels, accounts for memory        link, lease, allocator/
//!    |  used by the
//!  VFS                the main file, temporary files                     vfs/
//!    |  reads and writes
//!  Pages              a trait: one transaction on the database's pages   pages
//! ```
//!
//! # What this crate is for
//! SQLite is a library that blocks: it calls `xRead` and expects the bytes on return. A server with
//! thousands of databases cannot give each statement a thread. Here a statement runs on a *fiber*;
//! a callback that has to wait suspends the fiber, and the thread serves other sessions. The same
//! mechanism yields the thread when a time slice is over, moves calls that cannot be interrupted to
//! an offload pool, and ends a statement that was cancelled.
//!
//! The crate also contains everything else that makes SQLite fit for a shared server:
//!
//! - memory: SQLite's allocator is wrapped, and every byte is charged to the connection, its
//!   database and the node before it is allocated ([`Heap`]);
//! - temporary files: journals, sorts and temporary tables are buffers that spill to unnamed files,
//!   within quotas ([`TemporaryFiles`]);
//! - determinism: SQL functions read clock, randomness and counters from [`Variables`], so that a
//!   transaction can be replayed with the same results;
//! - isolation: the authorizer rejects what reaches outside the database, and limits bound the
//!   stack ([`TransactionLimits`]);
//! - system tables: virtual tables and functions that a session provides ([`System`]);
//! - errors with SQLSTATEs ([`Error`]), and a scanner of SQL texts ([`sql`]).
//!
//! # Interface
//! The owner of a database implements [`Pages`] and creates a [`Connection`] on it. It calls
//! [`Connection::run`] with a closure, which may use the connection's `_here` methods, and polls
//! the returned [`Fiber`]. Implementations of [`Pages`] wait with [`Link::wait`]. Methods ending in
//! `_here` must be called on the fiber.
//!
//! # Layer
//! Above `fulmar-pages`, below `fulmar-mvcc`. The crate knows pages only through [`Pages`]. It
//! knows no partition, commit log or object store, and no snapshot: whether a transaction
//! conflicts, and when it is durable, is decided above.

mod allocator;
pub mod array;
pub mod calendar;
mod cancel;
mod connection;
mod error;
mod fiber;
mod heap;
pub mod lease;
mod limits;
mod link;
#[cfg(test)]
mod memory_pages;
mod pages;
mod slice;
pub mod spill;
pub mod sql;
mod statement;
mod statement_cache;
mod system;
mod temporary;
mod value;
mod variables;
mod vfs;

pub use cancel::{CancelFlag, CancelReason, Canceller};
pub use connection::{BEGIN, COMMIT, Columns, Connection, Prepared, ROLLBACK, Run, Step, statement_too_long};
pub use error::{Error, Result, UNKNOWN_PARTITION, sqlstate};
pub use fiber::overflow::record_to as record_crashes;
pub use fiber::stack::{DEFAULT_STACK_BYTES, FiberStack, set_stack_bytes};
pub use fiber::{Fiber, Suspender};
pub use heap::{Charge, Heap, HeapAccount, exhausted};
pub use lease::Lease;
pub use limits::TransactionLimits;
pub use link::{Interrupted, Link, Settings, checkpoint_here};
pub use pages::{Pages, Refusal, TransactionOutcome};
pub use slice::DEFAULT_TIME_SLICE;
pub use spill::{SpillArea, TemporaryFiles};
pub use sql::StatementKind;
pub use statement::{
    ColumnInfo, CommandTag, Completion, DiscardRows, ParameterInfo, Row, RowSink, STALE_PLAN, Scope,
    Statement, StatementContext, TransactionStatus,
};
pub use statement_cache::StatementCache;
pub use system::{Database, Parts, System, SystemFunction, SystemTable, module_name};
pub use temporary::{NodeSpace, Quota, TemporaryCharge, TenantSpace};
pub use value::{Value, ValueRef};
pub use variables::Variables;

/// The largest SQL text that SQLite accepts. It must allow reading the schema at any configured
/// limit.
pub const MAX_STATEMENT_BYTES: usize = 16 << 20;
