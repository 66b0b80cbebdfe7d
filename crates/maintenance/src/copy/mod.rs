//! Copies of a partition to the store of another node, which has a store of its own (the hot backup
//! and the rounds of ShuttleDB 3).
//!
//! ```text
//!   source   flush, newest manifest -> frames that were not sent yet -> ... end of the round
//!   destination                        new segment                      manifest with that segment
//! ```
//!
//! Frames are copied as they are: their checksums are verified, but they are not decompressed. Each
//! round makes one segment at the destination and one manifest, which names the segments of all
//! rounds. Its version number is that of the copy, above all numbers of the source, so the newest
//! manifest is that of the last round.
//!
//! If the destination has an [archive] of the partition, its first segments are those of the archive,
//! and the first round contains the pages that differ from them.
//!
//! # Protection from garbage collection
//! The source's segments, and those that the destination has stored, count as used until the copy is
//! dropped. After that only manifests protect them.
//!
//! # Crashes
//! A copy exists in the memory of both nodes. If one of them ends, the segments and manifests that
//! were stored are garbage: no record of the cluster names them.

mod archive;
mod batch;
mod incoming;
mod outgoing;
mod pull;

pub use archive::{Archive, ArchiveSize};
pub use incoming::IncomingCopy;
pub use outgoing::{OutgoingCopy, RoundSize};
