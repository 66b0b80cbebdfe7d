//! Engine configuration.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fulmar_maintenance::RetentionSource;
use fulmar_mvcc::{SnapshotBounds, SpaceSource, SystemTime, TimeSource};
use fulmar_pages::{PartitionId, Timeline};
use fulmar_sqlite::{DEFAULT_STACK_BYTES, DEFAULT_TIME_SLICE};
use fulmar_store::{LogFiles, LogOptions, SharedLogOptions, Store};
use hashbrown::HashMap;

use crate::membership::Membership;
use crate::replica::Primary;

/// Default maximum length of one statement's SQL text in bytes.
pub const DEFAULT_STATEMENT_BYTES: usize = 1 << 20;
/// Smallest configurable maximum.
pub const MIN_STATEMENT_BYTES: usize = 64 << 10;

/// Engine configuration. [`Config::new`] has the defaults for a node on its own machine; the other
/// fields are mostly for tests.
pub struct Config {
    /// Directory of log, store and temporary files.
    pub data: PathBuf,
    /// Memory budget for the pages of all partitions.
    pub memory_bytes: u64,
    /// Whether the budget covers the whole process: pages then get what other memory leaves of it,
    /// at least half.
    pub whole_process: bool,
    /// Maximum length of one statement's SQL text in bytes, within [`MIN_STATEMENT_BYTES`] and
    /// [`MAX_STATEMENT_BYTES`](fulmar_sqlite::MAX_STATEMENT_BYTES).
    pub max_statement_bytes: usize,
    /// The partitions that exist in the catalog. Log records of other partitions are skipped. None:
    /// all exist.
    pub live: Option<HashSet<PartitionId>>,
    /// The partitions of which logs and store may contain data. The start fails if they contain
    /// data of others. None: any partition.
    pub known: Option<CatalogPartitions>,
    /// Current timelines of the restored partitions.
    pub timelines: HashMap<PartitionId, Timeline>,
    /// Retention period of the history.
    pub retention: RetentionSource,
    /// Options of the local log.
    pub log: LogOptions,
    /// Options of the shared log in the store.
    pub shared_log: SharedLogOptions,
    /// Maximum time that a partition is dirty without a new manifest.
    pub manifest_interval: Duration,
    /// Time after which an unused partition is closed.
    pub idle_after: Duration,
    /// Address space of a statement's stack in bytes. A statement that needs more than 1/16 of it
    /// fails with 54001.
    pub statement_stack_bytes: usize,
    /// Bounds of snapshots.
    pub snapshots: SnapshotBounds,
    /// Bytes to keep free in the data directory's file system; 0 for none. None: 1 GiB, or 5 % if
    /// that is less.
    pub disk_reserve_bytes: Option<u64>,
    /// Maximum size of the disk cache for a remote store; 0 for none.
    pub disk_cache_bytes: u64,
    /// Reads the space of that file system; None asks the operating system.
    pub space: Option<SpaceSource>,
    /// Time source.
    pub time: Arc<dyn TimeSource>,
    /// CPU time after which a statement yields its thread to other sessions. Tests set zero or
    /// [`Duration::MAX`], so that their results do not depend on the machine's speed.
    pub time_slice: Duration,
    /// The log's files; None for files in `data`.
    pub files: Option<Arc<dyn LogFiles>>,
    /// The store; None for a directory in `data`.
    pub store: Option<Arc<dyn Store>>,
    /// Whether no other process can own the store, now or recently, because it is protected by the
    /// lock of `data`. (Always true if `store` is None.)
    pub is_exclusive: bool,
    /// Identifies the node's log in the store.
    pub node_id: u128,
    /// Partitions with `shared` durability in the catalog.
    pub shared: HashSet<PartitionId>,
    /// Makes the node a read replica of this primary: it has no log, and `data` contains only
    /// temporary files.
    pub replica_of: Option<Primary>,
    /// Makes the engine one of a cluster, which owns only what the cluster assigns to it.
    pub membership: Option<Membership>,
}

/// The partitions in the catalog, existing or dropped. Data of any other partition proves that the
/// catalog is older than the data; nothing may be deleted based on such a catalog.
#[derive(Clone)]
pub struct CatalogPartitions {
    /// All partitions with smaller ids are known.
    pub from: PartitionId,
    /// Returns true for a known partition.
    pub knows: Arc<dyn Fn(PartitionId) -> bool + Send + Sync>,
    /// Called for each unknown partition that has data. Returns true if the start may continue.
    pub accepts: Arc<dyn Fn(PartitionId) -> bool + Send + Sync>,
}

impl CatalogPartitions {
    /// Returns true for a known partition.
    pub(crate) fn has(&self, id: PartitionId) -> bool {
        id < self.from || (self.knows)(id)
    }

    /// Returns true for a partition that may have data: a known or an accepted one.
    pub(crate) fn admits(&self, id: PartitionId) -> bool {
        self.has(id) || (self.accepts)(id)
    }
}

/// Maximum size of the records that wait to be written to the log; the same amount may be in
/// flight. 1/16 of the page memory, since `--memory` is a node's total budget and other memory
/// should be in proportion.
fn pending_bytes(memory_bytes: u64) -> usize {
    const MIN_BYTES: u64 = 8 << 20;
    const MAX_BYTES: u64 = 64 << 20;
    (memory_bytes / 16).clamp(MIN_BYTES, MAX_BYTES) as usize
}

/// Intended maximum size of unflushed records in the shared log
/// ([`SharedLogOptions::backlog_bytes`]). A start holds all of them in memory.
fn backlog_bytes(memory_bytes: u64) -> u64 {
    const MIN_BYTES: u64 = 32 << 20;
    (memory_bytes / 4).clamp(MIN_BYTES, SharedLogOptions::default().backlog_bytes)
}

impl Config {
    /// The default configuration of an engine in a directory.
    pub fn new(data: impl Into<PathBuf>, memory_bytes: u64) -> Self {
        Config {
            data: data.into(),
            memory_bytes,
            whole_process: false,
            max_statement_bytes: DEFAULT_STATEMENT_BYTES,
            live: None,
            known: None,
            timelines: HashMap::new(),
            retention: fulmar_maintenance::default_retention(),
            log: LogOptions { pending_bytes: pending_bytes(memory_bytes), ..LogOptions::default() },
            shared_log: SharedLogOptions {
                backlog_bytes: backlog_bytes(memory_bytes),
                ..SharedLogOptions::default()
            },
            manifest_interval: Duration::from_secs(60),
            idle_after: Duration::from_secs(20),
            statement_stack_bytes: DEFAULT_STACK_BYTES,
            snapshots: SnapshotBounds::default(),
            disk_reserve_bytes: None,
            disk_cache_bytes: 0,
            space: None,
            time: Arc::new(SystemTime::default()),
            time_slice: DEFAULT_TIME_SLICE,
            files: None,
            store: None,
            is_exclusive: false,
            node_id: 0,
            shared: HashSet::new(),
            replica_of: None,
            membership: None,
        }
    }
}
