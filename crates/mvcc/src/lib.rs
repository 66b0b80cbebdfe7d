//! Multi-version pages: partitions whose pages have versions, snapshots, and optimistic commits.
//!
//! ```text
//!  PartitionPages     one transaction: snapshot, read set, changed pages     access, transaction
//!    |  of a
//!  Partition          page versions, commits, turns, row locks, outcomes     partition/
//!    |  found by
//!  Partitions         opens on first use, closes unused                      partitions
//!    |  of a
//!  Node               log, store, page memory and eviction, disk, clock      node, cache, memory
//! ```
//!
//! # What this crate is for
//! A partition is one database, stored as pages of 4 KiB. A commit makes the next version of the
//! pages that it changes; a transaction reads all pages at the version that it has pinned. So
//! readers never wait, and any number of transactions of one partition run concurrently. A
//! commit succeeds if no page that the transaction read has changed since its snapshot. That is
//! serializable, including phantoms, because the pages of indexes are pages too.
//!
//! A version is in memory, in the store, or both. A commit appends the differences of its pages to
//! the commit log, and is visible to other transactions immediately; it is durable when the log is.
//! Later a flush writes the pages to the store, and they can be evicted. A statement that needs an
//! evicted page waits on its fiber while the page is read, with the following ones if it is part of
//! a scan.
//!
//! # How it works
//! | module | purpose |
//! | --- | --- |
//! | [`partition`] | one partition: versions, commits, flush and replication state |
//! | [`access`] | implements [`fulmar_sqlite::Pages`] for a partition |
//! | [`transaction`] | the read set and the changed pages of a transaction |
//! | [`spilled_pages`], [`segment_draft`] | changed pages that do not fit into memory |
//! | [`partitions`] | all partitions of the node |
//! | [`node`] | what the partitions of a node share |
//! | [`memory`], [`page_memory`] | the budget and the memory of pages |
//! | [`cache`], [`reserve`], [`watch`] | eviction, reservations, the sweeper |
//! | [`disk`], [`clock`], [`ownership`] | disk space, time, ownership of the store |
//! | [`error`] | errors that clients get |
//!
//! # Interface
//! [`Partitions`] returns a [`Partition`] by its id; how it is opened, and which log it commits to,
//! is decided by the [`Opener`] of the layer above. A connection is created on
//! [`PartitionPages`]. The layer above also decides what happens after a conflict: it takes a
//! [`Turn`] and runs the transaction again. Flushes and compaction use the partition's own view of
//! its changes ([`Flush`], [`NamedSegment`]); replicas apply log records
//! ([`Partition::catch_up`]).
//!
//! # Layer
//! Above `fulmar-sqlite` and `fulmar-store`, below `fulmar-maintenance`. The crate knows no SQL and
//! no session. Of SQLite it knows the trait that it implements, and the fields of page 1 that every
//! commit changes ([`page_one`]).

mod access;
mod cache;
mod clock;
mod disk;
mod error;
mod memory;
mod node;
mod ownership;
mod page_memory;
mod partition;
mod partitions;
mod reserve;
mod segment_draft;
mod spilled_pages;
mod store;
#[cfg(test)]
mod tests;
mod transaction;
mod watch;

pub use access::PartitionPages;
pub use cache::Cache;
pub use clock::{Clock, ID_NODE_BITS, IdReservation, MAX_CLOCK_LEAD_MS, SystemTime, TimeSource};
pub use disk::{Disk, Space, SpaceSource, space_of};
pub use error::{
    dropped_error, historical_session_is_read_only, log_error, log_unreadable, moved_error,
    replica_is_read_only, serialization_failure, snapshot_too_old, store_error, store_error_of,
    with_partition_context,
};
pub use memory::{LongTermReservation, MemoryBudget, Reservation};
pub use node::{Buffers, Node, NodeStats, SegmentPublication};
pub use ownership::{StoreOwnership, term_of};
pub use partition::{
    ApplyResult, Attachment, CachedPage, CarriedSnapshots, Contents, CopiedFrame, Deadlock, Draft, Flush,
    HoldReason, LargeSegment, LogSource, Logged, MoveHold, MoveHolds, NamedSegment, PageRun, Partition,
    PartitionStats, PendingMove, Replay, ReplicaState, Snapshot, SnapshotBounds, Turn, TurnQueue, page_one,
    read_frames,
};
pub use partitions::{Found, Opener, Partitions, PrimaryEra, Slot, Unopened};
pub use store::{Frame, Segments};
pub use transaction::{Committed, Conflict, Transaction, TransactionContext};
pub use watch::{poll_disk, spawn_disk_poll, spawn_sweeper};
