//! The transactional engine: SQLite over multi-version pages.
//!
//! SQLite is used unmodified, through a custom VFS. SQLite parses, plans and runs the SQL; the
//! engine owns the pages.
//!
//! ```text
//!  Session            statements, transactions, replay                 session/
//!    |  uses a
//!  Connection         SQLite, on a fiber                               connection/, fiber
//!    |  reads its files through the
//!  VFS                pages at a snapshot, and the transaction's own   vfs/, transaction
//!    |  of a
//!  Partition          page versions, commits, turns, row locks         partition/
//!    |  shares its
//!  Node               log, store, memory, clock                        node, flush
//! ```
//!
//! # The life of an update
//! `UPDATE t SET n = n + 1 WHERE id = 7` in autocommit mode:
//!
//! 1. The session takes a connection from the partition's pool and runs the statement on a fiber.
//! 2. SQLite locks the database file: the VFS pins a snapshot.
//! 3. SQLite reads pages: the VFS records them. It writes a page: the VFS puts it into the overlay.
//! 4. SQLite syncs the file: this is the commit.
//!    - If a page that was read has changed since the snapshot, the statement is replayed in a
//!      turn. No other transaction can overtake it there.
//!    - Otherwise the page's diff goes into the log's buffer, the page goes to the front of its
//!      version chain, and the version becomes current.
//! 5. The answer waits until the log is durable. The thread does other work meanwhile.

pub mod array;
mod background;
mod beside;
mod branch;
mod cache;
pub mod calendar;
mod cancel;
mod clock;
mod collect;
mod compact;
mod connection;
mod disk;
mod draft;
mod engine;
mod error;
mod export;
mod fiber;
mod flush;
mod health;
mod heap;
mod history;
mod hot;
pub mod huge_pages;
mod import;
mod limits;
mod maintenance;
mod marks;
mod memory;
mod node;
mod pace;
mod page_memory;
mod partition;
mod past;
mod pins;
mod places;
mod procedure;
mod session;
mod slice;
mod spill;
mod spilled_pages;
mod sql;
mod statement;
mod store;
mod system;
mod temporary;
mod tenure;
mod transaction;
mod value;
mod variables;
mod verify;
mod vfs;

pub use beside::{BesideStatistics, Owner, Standing, StandingSource};
pub use branch::Era;
pub use cancel::{CancelReason, Canceller};
pub use clock::{SystemTime, TimeSource};
pub use disk::{Space, SpaceSource};
pub use engine::{
    CatalogPartitions, Config, DEFAULT_STATEMENT_BYTES, Engine, EngineStatistics, MAX_STATEMENT_BYTES,
    MIN_STATEMENT_BYTES, PartitionStatistics,
};
pub use error::{Error, Result, sqlstate};
pub use export::Export;
pub use health::{Health, LogHealth, Recovery};
pub use history::{RestorePoint, RetentionSource};
pub use import::Import;
pub use limits::TransactionLimits;
pub use partition::SnapshotBounds;
pub use places::NotChanged;
pub use procedure::{CREATE_TABLE as CREATE_PROCEDURES, Definition, TABLE as PROCEDURES};
pub use session::{Session, statement_too_long};
pub use statement::{
    ColumnInfo, CommandTag, Completion, Known, ParameterInfo, Row, RowSink, STALE_PLAN, Scope, Statement,
    StatementKind, TransactionStatus,
};
pub use system::{Database, Parts, System, SystemFunction, SystemTable};
pub use temporary::{TemporaryCharge, TemporarySpace};
pub use value::{Value, ValueRef};
pub use verify::{Damage, KnownPartitions, Verified, verify_directory, verify_store};
