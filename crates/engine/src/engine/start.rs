//! Startup of an engine: recovers the logs, takes over the store, and starts the background tasks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use fulmar_maintenance::{HotLists, Maintenance, Parts, Settings};
use fulmar_mvcc::{
    Buffers, Cache, Clock, Disk, Found, MemoryBudget, Node, NodeStats, Partitions, PrimaryEra, Replay,
    SegmentPublication, StoreOwnership, log_error, poll_disk, space_of, spawn_disk_poll, spawn_sweeper,
    store_error,
};
use fulmar_pages::PartitionId;
use fulmar_sqlite::{
    Error, Heap, MAX_STATEMENT_BYTES, NodeSpace, Result, SpillArea, UNKNOWN_PARTITION, set_stack_bytes,
    sqlstate,
};
use fulmar_store::{
    CommitLog, DiskCache, DiskCacheOptions, LogError, LogFiles, LogOptions, PageStore, SealedLogs,
    SharedLogOptions, StdFiles, Store,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::{OnceCell, RwLock};

use super::{CatalogPartitions, Config, Engine, MIN_STATEMENT_BYTES};
use crate::connection::ConnectionSettings;
use crate::health::Recovery;
use crate::log_routing::{LogRouter, refuse_unknown};
use crate::membership::{MAX_NODE, Member, Membership, spawn_settling};
use crate::opener::NodeOpener;
use crate::procedure::LuaPool;
use crate::replica::{self, Replica};

/// Maximum size of a transaction's journal, and of its changed pages, in memory. Beyond it they
/// move to a file.
const SPILL_BYTES: usize = 4 << 20;

/// The logs and the store of a node, opened and recovered.
struct Storage {
    log: Arc<CommitLog>,
    /// The log of `shared` partitions, if there are any.
    shared_log: Option<Arc<CommitLog>>,
    store: PageStore,
    tenure: Option<StoreOwnership>,
    places: LogRouter,
    replays: HashMap<PartitionId, Arc<Replay>>,
    clock: Clock,
    recovery: Recovery,
    member: Option<Arc<Member>>,
}

impl Engine {
    /// Opens the data directory, recovers the logs, and starts the background tasks. Must be called
    /// inside a tokio runtime that outlives the engine.
    ///
    /// Returns a boxed future instead of being async, like some other functions of this crate: a
    /// future is compiled where it is polled, so the whole startup would be compiled again in each
    /// program.
    pub fn start(mut config: Config) -> BoxFuture<'static, Result<Arc<Engine>>> {
        async move {
            set_stack_bytes(config.statement_stack_bytes);
            let temporary = config.data.join("tmp");
            create_directory(&temporary)?;
            let storage = Storage::open(&mut config).await?;
            let engine = assemble(config, storage, &temporary);
            for log in engine.node().logs() {
                engine.maintenance.register_callbacks(log);
            }
            poll_disk(engine.node());
            spawn_disk_poll(engine.node());
            spawn_sweeper(engine.node());
            if let Some(member) = engine.member() {
                spawn_settling(&engine, member.clone());
            }
            if engine.is_replica() {
                engine.maintenance.flush_task().spawn(&engine, replica::round);
            } else {
                engine.maintenance.spawn();
            }
            Ok(engine)
        }
        .boxed()
    }
}

impl Storage {
    async fn open(config: &mut Config) -> Result<Storage> {
        let is_replica = config.replica_of.is_some();
        let membership = config.membership.take();
        let is_alone = config.is_exclusive || config.store.is_none() || membership.is_some();
        let store = open_store(config.store.take(), &config.data)?;
        let clock = clock(config, membership.as_ref())?;
        let begun = Instant::now();
        let (live, shared) = (config.live.take(), std::mem::take(&mut config.shared));
        let known = config.known.take();
        let log_router = LogRouter::new(config.node_id, &shared, config.shared_log.clone(), known.clone());
        let is_local = move |id: &PartitionId| {
            live.as_ref().is_none_or(|live| live.contains(id)) && !shared.contains(id)
        };
        let (log, mut replays, clock) = match is_replica {
            true => (CommitLog::read_only(), HashMap::new(), clock),
            false => {
                let files = log_files(config.files.take(), &config.data)?;
                let recovered = recover(config.log.clone(), files, is_local, known.clone(), clock);
                futures::try_join!(recovered, refuse_unknown_in(&store, known.as_ref()))?.0
            }
        };
        // The process that has locked the log owns the directory.
        let cache = config.data.join("cache");
        let store = with_disk_cache(store, cache, config.disk_cache_bytes, config.memory_bytes).await?;
        let ownership = match is_alone || is_replica {
            true => None,
            false => Some(StoreOwnership::begin(&store, &clock).await?),
        };
        let store = match &ownership {
            Some(ownership) => store.in_term(ownership.term()),
            None => store,
        };
        let (mut shared_log, mut member) = (None, None);
        let store = match membership {
            Some(membership) => {
                let store = store.in_assigned_term(membership.term);
                let log = open_assigned_log(config.shared_log.clone(), &store, &membership).await;
                shared_log = Some(log.map_err(log_error)?);
                let sealed = SealedLogs::new(store.store().clone(), config.shared_log.backlog_bytes);
                member = Some(Arc::new(Member::new(membership, sealed)));
                store
            }
            None => store,
        };
        if !log_router.all_local() && member.is_none() {
            match log_router.open_log(&store, &clock).await {
                Ok((log, found)) => {
                    replays.extend(found);
                    shared_log = Some(log);
                }
                Err(damage @ LogError::Corrupt { .. }) => log_router.mark_damaged(&damage),
                Err(error) => return Err(log_error(error)),
            }
        }
        let recovery = Recovery::of(&replays, begun.elapsed());
        Ok(Storage {
            log,
            shared_log,
            store,
            tenure: ownership,
            places: log_router,
            replays,
            clock,
            recovery,
            member,
        })
    }
}

/// Makes an engine of its parts. No task runs yet.
fn assemble(config: Config, storage: Storage, temporary: &Path) -> Arc<Engine> {
    let Storage { log, shared_log, store, tenure: ownership, places: log_router, .. } = storage;
    let Storage { replays, clock, recovery, member, .. } = storage;
    let node = Arc::new(Node {
        log,
        shared_log: OnceCell::new_with(shared_log),
        cache: Cache::new(store.disk_cache().is_some()),
        store: Arc::new(store),
        spill: SpillArea::new(temporary, SPILL_BYTES),
        temporary: NodeSpace::new(),
        memory: MemoryBudget::new(config.memory_bytes),
        whole_process: config.whole_process,
        heap: Heap::of_node(config.memory_bytes),
        disk: Disk::new(config.space.unwrap_or_else(|| space_of(config.data)), config.disk_reserve_bytes),
        clock,
        buffers: Buffers::default(),
        stats: NodeStats::default(),
        publication: SegmentPublication::default(),
        old_manifests: RwLock::default(),
        ownership,
        is_member: member.is_some(),
        has_common_store: member.as_ref().is_some_and(|member| member.has_common_store()),
        is_replica: config.replica_of.is_some(),
        exported: Mutex::default(),
    });
    let seed = node.clock.unix_ms() ^ std::process::id() as u64;
    let replica = config.replica_of.map(|owner| Replica::new(owner, &node));
    let parts = Parts {
        scheduler: Arc::default(),
        hot: Arc::new(HotLists::new(node.store.clone())),
        pins: replica.as_ref().map(|replica| replica.pins.clone()),
    };
    let found = Found {
        replays,
        timelines: config.timelines,
        primary: replica.clone().map(|replica| -> PrimaryEra {
            Arc::new(move |id| replica.catalog_state(id).map(|standing| standing.timeline))
        }),
    };
    let opener = Arc::new(NodeOpener { log_router, member, replica, parts: parts.clone() });
    let partitions = Arc::new(Partitions::new(node.clone(), opener.clone(), found));
    let settings = Settings {
        manifest_interval: config.manifest_interval,
        idle_after: config.idle_after,
        snapshots: config.snapshots,
        retention: config.retention,
    };
    Arc::new(Engine {
        maintenance: Arc::new(Maintenance::new(partitions.clone(), parts, settings)),
        partitions,
        opener,
        lua_pool: LuaPool::new(&node.heap),
        connections: ConnectionSettings {
            time_slice: config.time_slice,
            max_statement_bytes: config.max_statement_bytes.clamp(MIN_STATEMENT_BYTES, MAX_STATEMENT_BYTES),
        },
        recovery,
        tickets: AtomicU64::new(1),
        seeds: AtomicU64::new(seed.wrapping_mul(0x2545_F491_4F6C_DD1D)),
    })
}

/// The node's clock.
fn clock(config: &Config, membership: Option<&Membership>) -> Result<Clock> {
    let clock = Clock::new(config.time.clone());
    match membership {
        None => Ok(clock),
        Some(Membership { node, ids, .. }) if *node <= MAX_NODE => Ok(clock.for_node(*node, ids.clone())),
        Some(Membership { node, .. }) => Err(Error::new(
            sqlstate::PROGRAM_LIMIT,
            format!("node id {node} exceeds the maximum of {MAX_NODE}"),
        )
        .hint("The cluster has reached the maximum number of nodes that ever joined it.")),
    }
}

/// Opens the shared log of the incarnation that the cluster has assigned.
async fn open_assigned_log(
    options: SharedLogOptions,
    store: &PageStore,
    membership: &Membership,
) -> std::result::Result<Arc<CommitLog>, LogError> {
    let Membership { log_node, incarnation, .. } = *membership;
    CommitLog::open_incarnation(options, store.store().clone(), log_node, incarnation).await
}

/// The configured store, or the one in the data directory.
fn open_store(configured: Option<Arc<dyn Store>>, data: &Path) -> Result<PageStore> {
    if let Some(store) = configured {
        return Ok(PageStore::open(store));
    }
    let directory = data.join("store");
    create_directory(&directory)?;
    PageStore::open_directory(&directory).map_err(store_error)
}

/// Puts a disk cache in front of the store, or removes the cache of an earlier start.
async fn with_disk_cache(
    store: PageStore,
    directory: PathBuf,
    bytes: u64,
    memory_bytes: u64,
) -> Result<PageStore> {
    let opened = tokio::task::spawn_blocking(move || {
        if bytes > 0 {
            let opened = DiskCache::open(&directory, DiskCacheOptions { bytes, memory_bytes });
            return opened.map(Some).map_err(|e| io_error("open", &directory, &e));
        }
        if let Err(error) = DiskCache::remove(&directory) {
            tracing::warn!(directory = %directory.display(), %error, "could not remove an old disk cache");
        }
        Ok(None)
    });
    match opened.await {
        Ok(opened) => Ok(match opened? {
            Some(cache) => store.with_disk_cache(cache),
            None => store,
        }),
        Err(e) => Err(Error::new(sqlstate::INTERNAL, format!("panic while opening the disk cache: {e}"))),
    }
}

/// The files of the log: in the data directory, unless others are configured.
fn log_files(files: Option<Arc<dyn LogFiles>>, data: &Path) -> Result<Arc<dyn LogFiles>> {
    if let Some(files) = files {
        return Ok(files);
    }
    let directory = data.join("log");
    Ok(Arc::new(StdFiles::open(&directory).map_err(|e| io_error("open", &directory, &e))?))
}

/// Opens the log, and sorts its records by partition.
async fn recover(
    options: LogOptions,
    files: Arc<dyn LogFiles>,
    counts: impl Fn(&PartitionId) -> bool + Send + 'static,
    known: Option<CatalogPartitions>,
    clock: Clock,
) -> Result<(Arc<CommitLog>, HashMap<PartitionId, Arc<Replay>>, Clock)> {
    let opened = tokio::task::spawn_blocking(move || {
        let mut replays: HashMap<PartitionId, Replay> = HashMap::new();
        let log = CommitLog::open(options, files, &mut |end, record| {
            let header = &record.header;
            clock.observe(header.timestamp);
            clock.observe_id(header.transaction);
            refuse_unknown(known.as_ref(), header.partition, end)?;
            if counts(&header.partition) {
                replays.entry(header.partition).or_default().push(end, record);
            }
            Ok(())
        })?;
        let replays = replays.into_iter().map(|(id, replay)| (id, Arc::new(replay))).collect();
        Ok((log, replays, clock))
    });
    match opened.await {
        Ok(result) => result.map_err(log_error),
        Err(e) => Err(Error::new(sqlstate::INTERNAL, format!("panic while reading the log: {e}"))),
    }
}

/// Fails if the store contains manifests of a partition that the catalog does not know.
async fn refuse_unknown_in(store: &PageStore, known: Option<&CatalogPartitions>) -> Result<()> {
    let Some(known) = known else { return Ok(()) };
    let found = store.find_partition(known.from, &|id| !known.has(id), &|id| !known.admits(id)).await;
    let found = found.map_err(store_error)?;
    match found {
        None => Ok(()),
        Some(id) => Err(Error::new(
            sqlstate::DATA_CORRUPTED,
            format!("the store contains data of partition {id}, {UNKNOWN_PARTITION}"),
        )),
    }
}

fn create_directory(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).map_err(|e| io_error("create", directory, &e))
}

fn io_error(verb: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::new(sqlstate::IO_ERROR, format!("could not {verb} \"{}\": {error}", path.display()))
        .hint("Check that the directory exists and is owned by the user that runs the node.")
}
