//! The transactional engine: sessions on partitions.
//!
//! ```text
//!  Session            statements, transactions, replay                   session/
//!    |  uses a
//!  Connection         SQLite, on a fiber                                 connection, fulmar-sqlite
//!    |  reads its files through the
//!  PartitionPages     pages at a snapshot, and the transaction's own     fulmar-mvcc
//!    |  of a
//!  Partition          page versions, commits, turns, row locks           fulmar-mvcc
//!    |  which is flushed, compacted, restored by the
//!  Maintenance        segments and manifests in the store                fulmar-maintenance
//! ```
//!
//! SQLite is used unmodified. It parses, plans and runs the SQL; the pages belong to `fulmar-mvcc`.
//! This crate puts the parts together, and decides what a client sees.
//!
//! # The life of an update
//! `UPDATE t SET n = n + 1 WHERE id = 7` in autocommit mode:
//!
//! 1. The session takes a connection from the partition's pool and runs the statement on a fiber.
//! 2. SQLite locks the database file: a snapshot is pinned.
//! 3. SQLite reads pages, which are recorded. It writes a page, which goes to the overlay.
//! 4. SQLite syncs the file: this is the commit.
//!    - If a page that was read has changed since the snapshot, the statement is replayed in a
//!      turn. No other transaction can overtake it there.
//!    - Otherwise the page's diff goes into the log's buffer, the page goes to the front of its
//!      version chain, and the version becomes current.
//! 5. The answer waits until the log is durable. The thread does other work meanwhile.
//!
//! # How it works
//! | module | purpose |
//! | --- | --- |
//! | [`session`] | statements, transactions, the journal and its replay |
//! | [`connection`], [`idle`] | connections on partitions, and their pool |
//! | [`procedure`] | stored procedures in Lua |
//! | [`engine`] | start, shutdown, statistics |
//! | [`opener`] | opens partitions |
//! | [`log_routing`] | which log a partition commits to |
//! | [`membership`] | a node of a cluster owns what the cluster assigns to it |
//! | [`replica`] | read replicas |
//! | [`health`], [`temporary`] | health of a node; temporary files of the layers above |
//!
//! # Interface
//! [`Engine::start`] recovers the logs and starts the background tasks. [`Engine::session`] creates
//! a [`Session`], which prepares and executes statements. Operations on whole partitions are
//! methods of [`Engine`].
//!
//! # Layer
//! Above `fulmar-maintenance`, below `fulmar-gateway`. The crate knows no network and no wire
//! protocol.

mod connection;
mod engine;
mod health;
mod idle;
mod log_routing;
mod membership;
mod opener;
mod procedure;
mod replica;
mod session;
mod table_keys;
mod temporary;
#[cfg(test)]
mod tests;

pub use engine::{
    CatalogPartitions, Config, DEFAULT_STATEMENT_BYTES, Engine, EngineStatistics, LogDurations,
    MIN_STATEMENT_BYTES, PartitionStatistics,
};
pub use fulmar_maintenance::{
    Archive, ArchiveSize, CommonStore, Damage, DecisionError, Export, Import, IncomingCopy, KnownPartitions,
    OutgoingCopy, PartitionManifests, RestorePoint, RetentionSource, Verified, verify_directory,
    verify_store,
};
pub use fulmar_mvcc::{
    CachedPage, CarriedSnapshots, HoldReason, IdReservation, LogSource, MoveHold, PendingMove,
    SnapshotBounds, Space, SpaceSource, SystemTime, TimeSource,
};
pub use fulmar_pages::Timeline;
pub use fulmar_sqlite::sql::AccessedKeys;
pub use fulmar_sqlite::{
    CancelReason, Canceller, ColumnInfo, CommandTag, Completion, Database, Error, MAX_STATEMENT_BYTES,
    ParameterInfo, Parts, Result, Row, RowSink, STALE_PLAN, Scope, Statement, StatementContext,
    StatementKind, System, SystemFunction, SystemTable, TemporaryCharge, TransactionLimits,
    TransactionOutcome, TransactionStatus, Value, ValueRef, array, calendar, record_crashes, sqlstate,
    statement_too_long,
};
pub use health::{Health, LogHealth, Recovery};
pub use log_routing::DurabilityChangeError;
pub use membership::{
    Assignment, Assignments, CachedPages, Closing, LoadedRows, MAX_NODE, Membership, Released, ReplayRange,
    RowLoader, RowReader,
};
pub use procedure::{CREATE_TABLE as CREATE_PROCEDURES, Definition, TABLE as PROCEDURES};
pub use replica::{CatalogState, CatalogStateSource, Ownership, Ownerships, Primary, ReplicaStatistics};
pub use session::{Session, TemporaryTables, WriteAccess};
pub use temporary::TemporarySpace;
