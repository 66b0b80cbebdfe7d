//! Where commits and pages are kept.
//!
//! ```text
//!   engine --- append ---> CommitLog ------> LogFiles       the node's own disk: small, synced, in order
//!          --- put ------> PageStore ------> Store          segments and manifests: big, immutable
//! ```
//!
//! A commit goes to the log and is durable when the log says so ([`CommitLog::wait_durable`]). Later a flush writes
//! the changed pages as a segment, names the segment in a manifest, and gives the log's space back
//! ([`CommitLog::truncate`]): segment before manifest before truncation, each synced.
//!
//! Where the store is far, pieces of segments are kept on the node's own disk too ([`DiskCache`]).
//!
//! This crate knows nothing of SQLite, and of records only what the log itself writes. What it needs of a disk is the
//! trait [`LogFiles`], of a place for objects the trait [`Store`], so that tests can cut the power, break the disk
//! ([`FaultyFiles`]) and lose a store's answers ([`FaultyStore`]), and the server can be killed at named places
//! ([`failpoint`]).

mod disk_cache;
pub mod failpoint;
mod files;
mod log;
mod objects;
mod reads;
mod single_flight;
mod store;

pub use disk_cache::{DiskCache, DiskCacheOptions, DiskCacheStatistics, MOST_COST, Reading};
pub use files::{Fault, FaultyFiles, LogFile, LogFiles, Operation, StdFiles};
pub use log::{
    Ahead, CommitLog, FullCause, LogEnd, LogError, LogObject, LogOptions, LogPlace, LogStatistics, LogTail,
    Lsn, MAX_RETRY_DELAY, OnDiscard, OnFlushDue, RecoveryProgress, SharedLogCheck, SharedLogOptions, Urgency,
    say_when_this_thread_rests, this_thread_rests,
};
pub use objects::{
    FateName, HotPagesName, Listed, MOST_TERMS, ManifestName, PIN_AGAIN, PageStore, Pinned, RawFrame,
    SegmentWriter, StoreError, Term, VERSION_BITS,
};
pub use reads::{reads_at_the_disk, serve_reads};
pub use single_flight::SingleFlight;
pub use store::{
    Backend, Failure, FailureKind, FaultyStore, Limits, Listing, OperationStatistics, Piece, ReadOnlyStore,
    Reliable, Span, Store, StoreFault, StoreOperation, StoreUrl, StoreUrlError, TIME_BUCKETS, Upload,
    Uploads, time_bucket_us,
};
