//! Ownership of partitions: which node may write, and how that changes without losing a commit.
//!
//! Every partition has one owner, a node. The metadata store alone determines the owner
//! ([`records`]); logs and manifests hold the committed data. This crate is the protocol that
//! changes owners: a node starts ([`incarnation`]) with its data directory ([`directory`]), is
//! declared dead and replaced ([`failover`]), hands a partition over ([`handover`], [`migration`]),
//! is restored to an earlier version ([`restore`]), changes its durability ([`durability`]), and reads
//! the commits of earlier owners ([`recovery`]). One elected node ([`election`]) deletes what no
//! manifest needs ([`collection`], [`hold`]), and logs that no partition needs ([`truncation`]). A
//! partition whose statements kill nodes is quarantined ([`quarantine`]). Transaction ids do not repeat
//! ([`ids`]). A node does not start with an old metadata store ([`generation`]).
//!
//! # How it is built
//! The protocols are `async` functions that reach the clock, the metadata store and the log objects
//! only through [`environment`]. The server runs them on real ones. The simulator
//! (`tests/protocol`) runs whole clusters on virtual time, from a seed: it delays, loses,
//! duplicates and reorders every request, and kills or pauses processes at every await.
//!
//! # The argument
//! 1. **One log per incarnation, slots written once.** A slot is created only if it is absent, and
//!    holds the object that was put first. The log of an ended incarnation is sealed: a seal takes
//!    the next slot, so the old writer's put fails, whatever its clock shows ([`seal`]).
//! 2. **A change of owner is one transaction** that compares the partition's record and the states
//!    of both nodes. It is applied only while the old owner's release still stands (its incarnation
//!    is the same) or its log is sealed, and only if the new owner lives.
//! 3. **Records count only within a range.** The partition's record names, for each epoch, the part
//!    of the owner's logs that contains its records. Records that an earlier owner stores late are
//!    outside of it.
//! 4. **Reads need a lease.** An owner answers reads only while its incarnation was confirmed
//!    within the lease; a new owner answers nothing until the lease of an ended incarnation has run
//!    out.
//! 5. **A decision to delete stays right.** An object is deleted only if nothing can need it again,
//!    so a collector that is late does no harm ([`collection`]).
//!
//! A clock that is wrong by more than the margin can therefore make a read stale, but cannot lose a
//! commit. `docs/architecture/ownership.md` has the rules in full. [`Rules`] switches each of them
//! off, for the tests that show that it is needed.
//!
//! This crate does not decide when a partition moves, or where to: its callers do.

pub mod collection;
pub mod directory;
pub mod durability;
pub mod election;
pub mod environment;
mod error;
pub mod failover;
pub mod generation;
pub mod handover;
pub mod hold;
pub mod ids;
pub mod incarnation;
pub mod metadata;
pub mod migration;
pub mod quarantine;
pub mod records;
pub mod recovery;
pub mod restore;
mod retry;
mod rules;
pub mod seal;
pub mod truncation;

pub use error::Error;
pub use records::{
    Incarnation, LogId, LogKind, ManifestName, NodeId, NodeRecord, NodeState, PartitionRecord, Position,
    Range, Read, SegmentName,
};
pub use rules::Rules;
