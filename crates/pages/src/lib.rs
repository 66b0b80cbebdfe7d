//! Encoders and decoders of all stored formats. Bytes in, bytes out.
//!
//! | event | format | stored by `crates/store` as |
//! | --- | --- | --- |
//! | commit | page [`diff`]s in a [`record`] | a frame of the commit log |
//! | flush | pages in a [`segment`]; a [`manifest`] | objects of the store |
//! | close of a partition | page numbers in a list of [`hot_pages`] pages | an object |
//! | metadata change | keys and values in a [`catalog`] | an object |
//! | garbage collection | the [`manifest_hold`] of a manifest: pinned or condemned | an object |
//! | start or end of a store owner | a [`term`] | an object |
//!
//! The crate does no I/O, starts no thread and reads no clock, so golden files can test every
//! format. `docs/formats.md` describes the formats byte by byte. `tests/golden/` holds files that
//! earlier versions wrote.
//!
//! Decoders treat their input as untrusted, because it may come from a broken disk. A decoder:
//!
//! - checks every length before it uses it;
//! - allocates at most a small multiple of the input's length;
//! - returns a [`FormatError`] with the problem and its byte position; it never panics.

pub mod catalog;
mod codec;
pub mod diff;
mod error;
#[cfg(test)]
mod fuzz;
pub mod hot_pages;
pub mod manifest;
pub mod manifest_hold;
pub mod record;
pub mod segment;
pub mod term;

pub use catalog::{CatalogEntry, StoredCatalog};
pub use error::{FormatError, Problem};
pub use hot_pages::HotPages;
pub use manifest::{Manifest, SegmentRef};
pub use manifest_hold::{HoldState, StoredHold};
pub use record::{Record, RecordBuilder, RecordHeader, RecordKind};
pub use segment::{FrameLocation, SegmentBuilder, SegmentIndex};
pub use term::{StoredTerm, TermState};

/// Bytes in a page of a SQLite database.
pub const PAGE_SIZE: usize = 4096;

/// Number of a page within its partition; SQLite counts from 1.
pub type PageNo = u32;

/// The bytes of one page.
pub type Page = [u8; PAGE_SIZE];

/// A page of zeros: the contents of a page before its first write.
pub static ZERO_PAGE: Page = [0; PAGE_SIZE];

/// Identifies a partition: the unit of ownership, single-node transactions and caching. Never
/// reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct PartitionId(pub u64);

impl std::fmt::Display for PartitionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Identifies a segment. The upper 32 bits are the [`term`] in which it was written. The other
/// 96 bits are random, so ids need no coordination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SegmentId(pub u128);

impl SegmentId {
    /// The id of a segment of this term. The upper 32 bits of `random` are ignored.
    pub fn with_term(term: u32, random: u128) -> Self {
        SegmentId(u128::from(term) << 96 | random & (u128::MAX >> 32))
    }

    /// The term in which the segment was written.
    pub fn term(self) -> u32 {
        (self.0 >> 96) as u32
    }
}

impl std::fmt::Display for SegmentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Identifies a log; random. A node starts a new log at each start and after a failed write.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LogId(pub u128);

impl std::fmt::Display for LogId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Identifies a commit of a partition. Within a lineage, (epoch, number) grows. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Version {
    /// Restore, import and branch start a new lineage.
    pub lineage: u64,
    /// The partition's fencing number. Grows with every change of owner.
    pub epoch: u32,
    /// Counts commits. Grows across epochs, and continues in each [`term`] at a value above all
    /// earlier ones.
    pub number: u64,
}

/// The lineage and epoch of a partition's versions, as recorded in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// Changes with every restore.
    pub lineage: u64,
    /// Increases with every restore and every change of owner.
    pub epoch: u32,
}

impl Timeline {
    /// The era of a new partition.
    pub fn first(id: PartitionId) -> Self {
        Timeline { lineage: id.0, epoch: 1 }
    }
}

/// Where a tenant's commits are made durable before they are acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Durability {
    /// On the node's disk.
    #[default]
    Local,
    /// In the object store.
    Shared,
}

impl Durability {
    /// The name used in SQL and in the catalog.
    pub fn name(self) -> &'static str {
        match self {
            Durability::Local => "local",
            Durability::Shared => "shared",
        }
    }

    /// Finds a durability by its name.
    pub fn from_name(name: &str) -> Option<Durability> {
        [Durability::Local, Durability::Shared].into_iter().find(|known| known.name() == name)
    }
}

/// The outcome of a transaction, kept for clients that ask for it later.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Outcome {
    /// The transaction's id.
    pub transaction: u64,
    /// False if the transaction was aborted.
    pub committed: bool,
}
