//! Durable storage: commit logs, segments and manifests in an object store, and a disk cache.
//!
//! ```text
//!   engine --- append --> CommitLog --> LogFiles   local disk: small records, synced in order
//!          --- put -----> PageStore --> Store      segments and manifests: large, immutable
//! ```
//!
//! A commit is appended to the log. It is durable once the log reports so
//! ([`CommitLog::wait_durable`]). Later, a flush writes the changed pages as a segment, references
//! the segment in a manifest, and releases the log's space ([`CommitLog::truncate`]). The order is
//! segment, manifest, truncation; each step is synced before the next.
//!
//! If the store is remote, parts of segments are also cached on the node's local disk
//! ([`DiskCache`]).
//!
//! This crate does not depend on SQLite, and interprets no log records except those that the log
//! itself writes. Disks are accessed through the trait [`LogFiles`], object stores through the
//! trait [`Store`]. Tests use this to inject power failures and disk errors ([`FaultyFiles`]), to
//! lose a store's responses ([`FaultyStore`]), and to kill the server at named points
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
