//! The maintenance of partitions: everything that happens to stored data besides commits and reads.
//!
//! ```text
//!   commits --> log, memory --flush--> segment, manifest --compact--> fewer segments
//!                                          |                              |
//!                                 restore points (history)          collect: deletes what no
//!                                 branch, restore, past, export     manifest references
//! ```
//!
//! # What this crate is for
//! A partition's commits are in its log and in memory. A *flush* writes changed pages as a segment
//! and a manifest, so that the log can be truncated and pages can be evicted. *Compaction* merges
//! segments that contain much dead data. Old manifests are restore points until their retention
//! period ends: a partition can be restored to one, branched from one, or read as of one. The
//! *collector* deletes expired manifests, and segments that nothing references. Exports, imports
//! and verification read and write stored data as a whole.
//!
//! None of this blocks a transaction. Most modules argue, in their heads, why a crash between any
//! two steps loses nothing, and why nothing that is needed is deleted.
//!
//! # How it works
//! | module | purpose |
//! | --- | --- |
//! | [`maintenance`], [`tasks`] | the state, the background tasks |
//! | [`flush`], [`flusher`] | writes changes to the store, truncates the logs |
//! | [`compact`], [`throttle`], [`scheduler`] | merges segments within a budget of bytes and CPU time |
//! | [`collect`], [`segment_refs`], [`schedule`] | garbage collection |
//! | [`common_store`] | the same for the collector of a cluster |
//! | [`restore_points`], [`lookup`], [`pins`] | restore points, and their protection |
//! | [`branch`], [`time_travel`] | branches, restores, historical versions |
//! | [`export`], [`import`], [`verify`] | whole databases |
//! | [`copy`] | copies to the store of another node |
//! | [`hot`] | lists of hot pages, prewarming |
//!
//! # Interface
//! [`Maintenance`] is created for the [`Partitions`](fulmar_mvcc::Partitions) of a node. Its tasks
//! flush, compact and collect by themselves ([`Maintenance::spawn`]); all other operations are
//! methods. [`Parts`] contains what the opener of partitions uses.
//!
//! # Layer
//! Above `fulmar-mvcc`, below `fulmar-engine`. The crate knows no SQL and no session. On a replica
//! only [`time_travel`], [`hot`] and [`restore_points`] are used, since only the owner of a store
//! changes it.

mod background;
mod branch;
mod collect;
mod common_store;
mod compact;
mod copy;
mod export;
mod flush;
mod flusher;
mod hot;
mod import;
mod lookup;
mod maintenance;
mod pins;
mod restore_points;
mod schedule;
mod scheduler;
mod segment_refs;
mod tasks;
#[cfg(test)]
mod tests;
mod throttle;
mod time_travel;
mod verify;

pub use background::Background;
pub use branch::DecisionError;
pub use common_store::{CommonStore, PartitionManifests};
pub use copy::{Archive, ArchiveSize, IncomingCopy, OutgoingCopy, RoundSize};
pub use export::Export;
pub use hot::HotLists;
pub use import::Import;
pub use maintenance::{Maintenance, Parts, Settings};
pub use pins::Pins;
pub use restore_points::{RestorePoint, RetentionSource, default_retention};
pub use scheduler::Scheduler;
pub use time_travel::{Past, PastVersion};
pub use verify::{Damage, KnownPartitions, Verified, verify_directory, verify_store};
