//! How an engine is set up.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_store::{LogFiles, LogOptions, SharedLogOptions, Store};
use hashbrown::HashMap;

use crate::beside::Owner;
use crate::branch::Era;
use crate::clock::{SystemTime, TimeSource};
use crate::disk::SpaceSource;
use crate::fiber::stack::DEFAULT_STACK_BYTES;
use crate::history::{self, RetentionSource};
use crate::partition::SnapshotBounds;
use crate::slice::DEFAULT_TIME_SLICE;

/// The longest SQL text of one statement, in bytes, unless something else is configured.
pub const DEFAULT_STATEMENT_BYTES: usize = 1 << 20;
/// The least that can be configured.
pub const MIN_STATEMENT_BYTES: usize = 64 << 10;
/// The most that can be configured: SQLite's own limit, within which it must read the schema whatever is configured.
pub const MAX_STATEMENT_BYTES: usize = 16 << 20;

/// How an engine is set up. [`Config::new`] gives what a node on a machine of its own wants; the rest is for tests.
pub struct Config {
    /// Where log, store and temporary files live.
    pub data: PathBuf,
    /// The budget for the pages of all partitions together.
    pub memory_bytes: u64,
    /// Whether it is one for all that the process takes: pages get what others leave of it, at least half.
    pub whole_process: bool,
    /// The longest SQL text of one statement, in bytes; within [`MIN_STATEMENT_BYTES`] and [`MAX_STATEMENT_BYTES`].
    pub max_statement_bytes: usize,
    /// The partitions that exist, as the catalog has them; what the log holds of others is passed over. `None`: all.
    pub live: Option<HashSet<PartitionId>>,
    /// The partitions of which logs and store may hold data. A start is refused if they hold data of others. `None`: of all.
    pub known: Option<CatalogPartitions>,
    /// Of those that were restored: where they stand since.
    pub eras: HashMap<PartitionId, Era>,
    /// How long history is kept.
    pub retention: RetentionSource,
    /// Sizes of the log.
    pub log: LogOptions,
    /// Sizes of the log in the store.
    pub shared_log: SharedLogOptions,
    /// How long a partition may be changed without a manifest that says so.
    pub manifest_interval: Duration,
    /// How long a partition that nobody uses stays open.
    pub idle_after: Duration,
    /// Address space of a statement's stack, in bytes. A statement that needs more than a sixteenth of it gets 54001.
    pub statement_stack_bytes: usize,
    /// How long snapshots are held.
    pub snapshots: SnapshotBounds,
    /// Bytes of the data directory's file system that are kept free; 0 for none. `None`: 1 GiB, or 5 % if that is less.
    pub disk_reserve_bytes: Option<u64>,
    /// What of it may hold pieces of segments, for a store that is farther away; 0 for none.
    pub disk_cache_bytes: u64,
    /// Tells the space of that file system, if it shall not be asked itself.
    pub space: Option<SpaceSource>,
    /// Clocks.
    pub time: Arc<dyn TimeSource>,
    /// How long a statement computes before it yields its thread to other sessions. Tests set zero or [`Duration::MAX`], so that
    /// their results do not depend on the machine's speed.
    pub time_slice: Duration,
    /// The log's files, if they shall not lie in `data`.
    pub files: Option<Arc<dyn LogFiles>>,
    /// The store, if it shall not lie in `data`.
    pub store: Option<Arc<dyn Store>>,
    /// Whether no other process can have the store, nor have had it a moment ago: it lies where whoever looks holds the lock of `data`.
    /// (That is so if it is not given.)
    pub alone: bool,
    /// Names the node's log in the store.
    pub node_id: u128,
    /// The partitions whose commits are made durable in the store, as the catalog has them.
    pub shared: HashSet<PartitionId>,
    /// Who owns the partitions that the store holds, if they are only to be read: then there is no log, and `data` is for
    /// temporary files.
    pub beside: Option<Owner>,
}

/// The partitions that the catalog has, as existing or as dropped. Data of any other partition proves that the catalog is older than
/// the data; nothing may be deleted on its word.
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

    /// Returns true for a partition that may have data: a known one, or one that is accepted.
    pub(crate) fn admits(&self, id: PartitionId) -> bool {
        self.has(id) || (self.accepts)(id)
    }
}

/// What may wait in memory to be written to the log; as much again may be on its way. A sixteenth of the memory for pages:
/// `--memory` is said of a node's memory, so what it takes beside its pages is in proportion to them.
fn pending_bytes(memory_bytes: u64) -> usize {
    const LEAST: u64 = 8 << 20;
    const MOST: u64 = 64 << 20;
    (memory_bytes / 16).clamp(LEAST, MOST) as usize
}

/// Bytes that may be unflushed in the shared log. A start holds all of them in memory.
fn backlog_bytes(memory_bytes: u64) -> u64 {
    const LEAST: u64 = 32 << 20;
    (memory_bytes / 4).clamp(LEAST, SharedLogOptions::default().backlog_bytes)
}

impl Config {
    /// An engine on a directory.
    pub fn new(data: impl Into<PathBuf>, memory_bytes: u64) -> Self {
        Config {
            data: data.into(),
            memory_bytes,
            whole_process: false,
            max_statement_bytes: DEFAULT_STATEMENT_BYTES,
            live: None,
            known: None,
            eras: HashMap::new(),
            retention: history::a_day(),
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
            alone: false,
            node_id: 0,
            shared: HashSet::new(),
            beside: None,
        }
    }
}
