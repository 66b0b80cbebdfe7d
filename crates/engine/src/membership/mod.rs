//! Membership in a cluster: an engine that owns only the partitions that the cluster assigns to it.
//!
//! The engine of a single node owns every partition in its store. In a cluster the metadata store
//! records the owners. The engine asks for the assignment of a partition whenever it opens it
//! ([`Assignments`]), reads the log ranges that the assignment names, and commits to the log of its
//! own incarnation.
//!
//! | module | contents |
//! | --- | --- |
//! | [`member`] | the state of a member; opening of assigned partitions |
//! | [`moves`] | handing partitions over to other nodes |
//! | [`copies`] | copying partitions between stores |
//! | [`rows`] | copying partitions as rows |
//! | [`arrivals`] | partitions that are about to be moved to this node |
//! | [`carried`] | the snapshots of open transactions, which move with their partition |
//! | [`conversion`] | preparing a single node's partitions for a cluster |
//! | [`inherited`] | covering the records of earlier incarnations and owners by manifests |
//!
//! # Version numbers
//!
//! A version number has the epoch of the ownership in its upper 24 bits. All numbers of an epoch are
//! above all numbers of earlier epochs, so a manifest that a previous owner stores late is older than
//! every version of the new owner. Within an epoch, an incarnation of the owner starts at least
//! [`member::INCARNATION_NUMBERS`] above the newest version that it finds: more than an earlier
//! incarnation can have assigned to commits that were not durable, or to a manifest.
//!
//! # Crash points
//!
//! | killed | the next owner finds | why no acknowledged commit is lost, and none is doubled |
//! | --- | --- | --- |
//! | before a release is durable | manifests, and the records in the sealed log | a failover seals the log; the open range ends at the seal |
//! | after the release, before its flush | the same | the range is closed only after [`Engine::release`](crate::Engine::release) has returned, which is after the flush |
//! | after the flush, before the change of owner | a manifest with everything | records that the manifest covers are skipped by their number |
//! | after the change of owner | the same | the closed range is empty: the new owner reads no log of the source |
//! | in a release for a change of durability, before the record changes | a manifest with everything, and the old log | records that the manifest covers are skipped by their number |
//! | after the record has changed | the same manifest, and the new log from a durable position | the old log is in no range, or is the local log, whose records are skipped by their number |
//! | in a restore, before the record changes | a manifest of the next timeline | no timeline in the catalog names it |
//! | after the record has changed | that manifest | records of the earlier timeline are skipped |
//! | while inherited records are flushed | the records in the earlier logs | until all are flushed, the log states slot 0 of incarnation 0 as needed, so a failover keeps the whole range |
//! | after a manifest of inherited records, before their ranges are dropped | the manifest, and the ranges | records that the manifest covers are skipped by their number |
//! | while the process was suspended, after a failover | its late manifests, with lower numbers | such a manifest contains only versions that were durable before the seal, which the new owner has read too; its later commits find the seal |
//!
//! A partition that is given up leaves no state, so it is opened from the store if it comes back.
//! Records of its earlier stay may then be in the range of the new epoch, because a range begins at
//! slot 0 of the owner's incarnation. They are covered by the manifest of the release.

mod arrivals;
mod carried;
mod conversion;
mod copies;
mod inherited;
mod member;
mod moves;
mod rows;

pub(crate) use inherited::spawn_settling;
pub(crate) use member::{Member, shared_log};
pub use moves::{CachedPages, Closing, Released};
pub use rows::{LoadedRows, RowLoader, RowReader};

use async_trait::async_trait;
use fulmar_mvcc::IdReservation;
use fulmar_pages::{Durability, PartitionId, Timeline};
use fulmar_sqlite::Result;
use fulmar_store::LogPosition;
use std::sync::Arc;

/// The incarnation of a cluster's node that the engine runs for.
#[derive(Clone)]
pub struct Membership {
    /// Names the node's shared logs in the store.
    pub log_node: u128,
    /// The incarnation, which names the log.
    pub incarnation: u64,
    /// A number of the incarnation that is unique in the cluster. It is part of the names of
    /// segments and of version numbers.
    pub term: u32,
    /// The node's id, which makes transaction ids unique in the cluster. At most [`MAX_NODE`].
    pub node: u32,
    /// The transaction ids that the incarnation may assign.
    pub ids: Arc<IdReservation>,
    /// The other nodes write to the same store. Otherwise each has a store of its own, in which all
    /// data of its partitions is.
    pub has_common_store: bool,
    /// Where to ask for assignments.
    pub assignments: Arc<dyn Assignments>,
}

/// The greatest node id of a member.
pub const MAX_NODE: u32 = (1 << fulmar_mvcc::ID_NODE_BITS) - 1;

/// Says which partitions this node owns.
#[async_trait]
pub trait Assignments: Send + Sync + 'static {
    /// The assignment of a partition to this node, read linearizably. Fails with
    /// [`sqlstate::PARTITION_MOVED`](fulmar_sqlite::sqlstate::PARTITION_MOVED) if another node owns
    /// it.
    async fn assignment(&self, partition: PartitionId) -> Result<Assignment>;

    /// Where the first shared-log range of a partition that this node owns begins, read
    /// linearizably. `None`: it owns none.
    async fn inherited_from(&self) -> Result<Option<LogPosition>>;

    /// The partitions of this node whose records name ranges before this incarnation, as far as
    /// that is known.
    async fn uncovered(&self) -> Vec<PartitionId>;

    /// Drops the ranges before this incarnation from the records of partitions, each in the epoch
    /// in which this incarnation has stored a manifest that covers them. Tries once.
    async fn drop_ranges(&self, covered: Vec<(PartitionId, u32)>) -> Result<()>;
}

/// How to open a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The epoch of the ownership. Below 2^24, and above the term of every version that was committed
    /// before the partition was part of a cluster.
    pub epoch: u32,
    /// The timeline of the partition in the catalog.
    pub timeline: Timeline,
    /// The log that the partition commits to.
    pub durability: Durability,
    /// The parts of shared logs that may contain records since the newest manifest, oldest first.
    /// Those that end with a release may be left out: they contain none. The last one is of earlier
    /// incarnations of this node.
    pub ranges: Vec<ReplayRange>,
}

/// A part of a node's shared logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayRange {
    /// Names the node's logs.
    pub log_node: u128,
    /// The first position that counts.
    pub from: LogPosition,
    /// The first position that does not count.
    pub to: LogPosition,
}
