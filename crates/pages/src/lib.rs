//! Formats: pages, page diffs, log records, segments, manifests and their fates, lists of hot pages, catalogs, terms. Bytes in,
//! bytes out.
//!
//! ```text
//!   a commit            diff --> record --------------------> (a log frame, crates/store)
//!   a flush             page --> segment, manifest ---------> (objects, crates/store)
//!   the end of a life   page numbers --> hot pages ---------> (the same)
//!   a change of names   keys, values --> catalog -----------> (the same)
//!   who may do what     fate, term -------------------------> (the same)
//! ```
//!
//! This crate does no I/O, starts no thread and reads no clock, so every format can be tested with
//! golden files (`docs/formats.md` describes them byte by byte; `tests/golden/` holds what earlier code wrote).
//!
//! Everything that is decoded here may come from a broken disk. So each decoder checks every length before it
//! trusts it, allocates no more than a small multiple of the bytes it was given, and answers a [`FormatError`]
//! that says what was wrong and at which byte. None of them panics.

pub mod catalog;
mod codec;
pub mod diff;
mod error;
pub mod fate;
#[cfg(test)]
mod fuzz;
pub mod hot;
pub mod manifest;
pub mod record;
pub mod segment;
pub mod term;

pub use catalog::{CatalogEntry, StoredCatalog};
pub use error::{FormatError, Problem};
pub use fate::{Fate, StoredFate};
pub use hot::HotPages;
pub use manifest::{Manifest, SegmentRef};
pub use record::{Record, RecordBuilder, RecordHeader, RecordKind};
pub use segment::{FrameLocation, SegmentBuilder, SegmentIndex};
pub use term::{StoredTerm, TermState};

/// Bytes in a page of a SQLite database.
pub const PAGE_SIZE: usize = 4096;

/// Number of a page within its partition; SQLite counts from 1.
pub type PageNo = u32;

/// The bytes of one page.
pub type Page = [u8; PAGE_SIZE];

/// A page of zeros: what a page was before it was first written.
pub static ZERO_PAGE: Page = [0; PAGE_SIZE];

/// Names a partition: the unit of ownership, of single-node transactions and of caching. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct PartitionId(pub u64);

impl std::fmt::Display for PartitionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Names a segment. The upper 32 bits are the term ([`term`]) in which it was written, the others are random, so that nobody has to
/// hand them out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SegmentId(pub u128);

impl SegmentId {
    /// That with these random bits, of which the upper 32 do not count.
    pub fn of_term(term: u32, random: u128) -> Self {
        SegmentId(u128::from(term) << 96 | random & (u128::MAX >> 32))
    }

    /// In which term it was written.
    pub fn term(self) -> u32 {
        (self.0 >> 96) as u32
    }
}

impl std::fmt::Display for SegmentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Names a log; random. A node begins a new one each time it starts, and after a failed write.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LogId(pub u128);

impl std::fmt::Display for LogId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A commit of a partition. Within a lineage, (epoch, number) grows; a version is never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Version {
    /// Restore, import and branch start a new lineage.
    pub lineage: u64,
    /// The partition's fencing number: grows with every change of owner.
    pub epoch: u32,
    /// Counts commits; grows across epochs too, and begins anew, above all before, in each term ([`term`]).
    pub number: u64,
}

/// Where a tenant's commits are made durable before they are acknowledged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Durability {
    /// On the disk of the node.
    #[default]
    Local,
    /// In the store.
    Shared,
}

impl Durability {
    /// As SQL and the catalog call it.
    pub fn name(self) -> &'static str {
        match self {
            Durability::Local => "local",
            Durability::Shared => "shared",
        }
    }

    /// The one of that name.
    pub fn of_name(name: &str) -> Option<Durability> {
        [Durability::Local, Durability::Shared].into_iter().find(|known| known.name() == name)
    }
}

/// How a transaction ended, for clients that ask later.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Outcome {
    /// The transaction's id.
    pub transaction: u64,
    /// Committed, or aborted.
    pub committed: bool,
}
