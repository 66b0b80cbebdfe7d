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
mod durations;
pub mod failpoint;
mod files;
mod log;
mod objects;
mod reads;
mod single_flight;
mod store;

pub use disk_cache::{DiskCache, DiskCacheOptions, DiskCacheStatistics, MAX_READ_COST, ReadHint};
pub use durations::{DURATION_BUCKETS, DurationCounts, duration_bucket_us};
pub use files::{Fault, FaultyFiles, LogFile, LogFiles, Operation, StdFiles};
pub use log::{
    CommitLog, FullCause, LogEnd, LogError, LogObject, LogOptions, LogPosition, LogSlot, LogSlots,
    LogStatistics, LogTail, Lsn, MAX_RETRY_DELAY, NextRecords, OnDiscard, OnFlushDue, RecoveryProgress,
    SealedLogs, SharedLogCheck, SharedLogOptions, Urgency, announce_idle, flush_on_idle,
};
pub use objects::{
    HoldName, HotPagesName, MAX_TERM, ManifestName, PIN_RENEWAL_INTERVAL, PageStore, PartitionObjects,
    PinOutcome, RawFrame, SegmentWriter, StoreError, Term, VERSION_BITS,
};
pub use reads::{blocking_reads, serve_reads};
pub use single_flight::SingleFlight;
pub use store::{
    Backend, Failure, FailureKind, Fallback, FallbackStore, FaultyStore, Limits, Listing,
    OperationStatistics, Piece, ReadOnlyStore, Reliable, Span, Store, StoreFault, StoreOperation, StoreUrl,
    StoreUrlError, Upload, UploadCounts,
};
