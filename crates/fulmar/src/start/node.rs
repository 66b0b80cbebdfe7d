//! Assembles the components of a node: engine, catalog, gateway, HTTP server and event log.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use fulmar_certificates::Reload;
use fulmar_engine::{Config, Engine, RetentionSource, Timeline};
use fulmar_gateway::events::{Event, EventLog, Kind, PreviousRun};
use fulmar_gateway::http::{self, HttpServer, StartProgress};
use fulmar_gateway::{Gateway, GatewayConfig, session_memory_bytes};
use fulmar_meta::{
    Catalog, Embedded, Limit, Limits, MetadataStore, PartitionRecord, Publisher, Revision, Tenant,
};
use fulmar_node::EnginePartitions;
use fulmar_pages::Durability;
use futures::FutureExt;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

use super::catalog_check::{CatalogCheck, with_remedy};
use super::data::DataDirectory;
use super::store::NodeStore;
use super::tls::{Tls, reload_on_change};
use super::{disk_cache, store, superuser};
use crate::cli::{StartArgs, Switch};
use crate::size::Bytes;

/// The metadata store's file in the data directory.
pub const METADATA_FILE: &str = "meta.db";
/// The directory in the data directory for large results. The engine creates it, and puts its own
/// temporary files there.
pub(super) const TEMPORARY_DIRECTORY: &str = "tmp";
/// The directory of the event log in the data directory.
pub(super) const EVENTS_DIRECTORY: &str = "events";
/// How long a shutdown waits for open HTTP requests.
const HTTP_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// A node that accepts connections.
pub struct Node {
    engine: Arc<Engine>,
    role: Role,
    gateway: Gateway,
    http: HttpServer,
    event_log: Arc<EventLog>,
    /// The task that reloads certificates.
    tls: Option<JoinHandle<()>>,
}

/// The role of the node for its store.
pub(super) enum Role {
    /// The primary, which owns the store.
    Primary {
        store: NodeStore,
        /// Publishes the catalog in the store, for replicas.
        publisher: Publisher,
    },
    /// A node of a cluster.
    Member {
        /// Its part in the ownership protocol.
        node: Arc<fulmar_node::Node>,
    },
    /// A read-only replica on the store of another node.
    Replica {
        /// The task that applies new versions of the catalog, without a cluster.
        catalog_task: Option<JoinHandle<()>>,
        /// The directory for temporary files, deleted on shutdown.
        scratch: TempDir,
    },
}

/// The components of a node.
pub(super) struct NodeParts {
    pub engine: Arc<Engine>,
    pub catalog: Arc<Catalog>,
    pub event_log: Arc<EventLog>,
    pub role: Role,
    /// The directory for large results.
    pub temporary_directory: PathBuf,
    pub http: HttpServer,
}

impl Node {
    /// Recovers the node, and starts to accept connections.
    pub async fn start(
        arguments: &StartArgs,
        data: &DataDirectory,
        memory: Bytes,
        tls: Option<Arc<Tls>>,
    ) -> anyhow::Result<Self> {
        let config = Config::new(data.path(), memory.0);
        let http = listen(arguments, progress(&config)).await?;
        // Read the event log while the catalog is opened.
        let events = data.path().join(EVENTS_DIRECTORY);
        let event_log = tokio::task::spawn_blocking(move || {
            EventLog::open(&events)
                .with_context(|| format!("cannot open the event log in {}", events.display()))
        });
        let recovering = recover(arguments, config, data, store::open(data.path(), arguments.store.as_ref()));
        let Recovered { engine, catalog, metadata, store } = recovering.await?;
        let event_log = Arc::new(event_log.await.context("the task that reads the event log panicked")??);
        if !arguments.insecure {
            superuser::ensure_password(&catalog, data.path()).await?;
        }
        let publisher = Publisher::start(metadata, engine.store(), store.id());
        let role = Role::Primary { store, publisher };
        let temporary_directory = data.path().join(TEMPORARY_DIRECTORY);
        let parts = NodeParts { engine, catalog, event_log, role, temporary_directory, http };
        Self::serve(arguments, parts, memory, tls).await
    }

    /// Starts to accept connections.
    pub(super) async fn serve(
        arguments: &StartArgs,
        parts: NodeParts,
        memory: Bytes,
        tls: Option<Arc<Tls>>,
    ) -> anyhow::Result<Self> {
        let NodeParts { engine, catalog, event_log, role, temporary_directory, http } = parts;
        let mut config = GatewayConfig::new(arguments.sql);
        config.tls = tls.as_ref().map(Tls::server);
        config.public_metrics = arguments.public_metrics;
        config.event_log = event_log.clone();
        config.insecure = arguments.insecure;
        config.slow_statement = non_zero_duration(arguments.slow_statement);
        config.temporary_directory = temporary_directory;
        config.memory_bytes = memory.0;
        config.cpus = arguments.load.cpus;
        config.measures_load = arguments.load.load_monitor == Switch::On;
        config.key_monitoring = arguments.load.key_monitoring();
        config.session_memory_bytes = session_memory_bytes(memory.0);
        if let Role::Member { node } = &role {
            config.cluster = Some(node.clone());
        }
        let gateway = Gateway::start(config, engine.clone(), catalog)
            .with_context(|| format!("cannot listen on --sql {}", arguments.sql))?;
        if let Role::Member { node } = &role {
            let relays = gateway.relays();
            let accept = move |stream| {
                let relays = relays.clone();
                tokio::spawn(async move { relays.accept(stream).await });
            };
            let partitions = EnginePartitions::new(engine.clone(), gateway.partition_sessions());
            node.serve(Arc::new(partitions), Arc::new(accept));
        }
        http.ready(&gateway);
        let node_tls = match &role {
            Role::Member { node } => node.tls(),
            Role::Primary { .. } | Role::Replica { .. } => None,
        };
        let mut certificates: Vec<Arc<dyn Reload>> = Vec::new();
        certificates.extend(tls.map(|tls| tls as Arc<dyn Reload>));
        certificates.extend(node_tls.map(|tls| tls as Arc<dyn Reload>));
        let tls = match certificates.is_empty() {
            true => None,
            false => Some(spawn_tls_reload(certificates, event_log.clone())?),
        };
        tracing::info!(%memory, insecure = arguments.insecure, "node is ready to accept connections");
        event_log.record(started_event(&event_log, &engine, arguments));
        Ok(Self { engine, role, gateway, http, event_log, tls })
    }

    /// The listen address for SQL. If port 0 was requested, it has the actual port.
    pub fn sql_addr(&self) -> SocketAddr {
        self.gateway.local_addr()
    }

    /// The listen address of /metrics and /healthz.
    pub fn http_addr(&self) -> SocketAddr {
        self.http.local_addr()
    }

    /// Records in the event log that a signal shuts the node down.
    pub fn record_shutdown(&self, signal: &'static str) {
        self.event_log.record(Event::new(Kind::NodeStopping).detail("signal", signal));
    }

    /// Completes when the node's incarnation in its cluster has ended, with the reason.
    pub async fn fenced(&self) -> String {
        match &self.role {
            Role::Member { node } => node.fenced().await,
            _ => std::future::pending().await,
        }
    }

    /// Hands databases over to other nodes of a cluster, stops accepting connections, lets running statements finish within the gateway's grace
    /// period, flushes and stops.
    pub async fn shutdown(self) -> anyhow::Result<()> {
        if let Role::Member { node } = &self.role {
            let kept = node.drain().await;
            if kept > 0 {
                tracing::warn!(
                    databases = kept,
                    "databases remain on this node until another one takes over"
                );
            }
        }
        self.gateway.shutdown().await;
        match tokio::time::timeout(HTTP_SHUTDOWN_TIMEOUT, self.http.shutdown()).await {
            Ok(stopped) => stopped.context("HTTP server shutdown failed")?,
            Err(_) => tracing::warn!("HTTP connections did not close in time and were terminated"),
        }
        if let Some(tls) = self.tls {
            tls.abort();
        }
        let recorded = match self.role {
            Role::Primary { store, publisher } => {
                publisher.stop().await;
                let stopped = self.engine.shutdown().await;
                stopped.context("engine shutdown failed; no acknowledged commit is lost")?;
                store.record_clean_shutdown().await
            }
            Role::Member { node } => {
                match self.engine.shutdown().await {
                    Ok(()) => node.leave().await,
                    // The others have noticed that it no longer answers before it had finished.
                    Err(_) if self.engine.fenced().now_or_never().is_some() => {
                        tracing::warn!("another node took the databases over during the shutdown");
                    }
                    stopped => {
                        stopped.context("engine shutdown failed; no acknowledged commit is lost")?;
                    }
                }
                Ok(())
            }
            Role::Replica { catalog_task, scratch } => {
                if let Some(task) = catalog_task {
                    task.abort();
                }
                self.engine.shutdown().await.context("engine shutdown failed; no data is lost")?;
                drop(scratch);
                Ok(())
            }
        };
        self.event_log.record(Event::new(Kind::NodeStopped));
        let event_log = self.event_log;
        let closed = tokio::task::spawn_blocking(move || event_log.close()).await;
        closed.context("cannot close the event log")?;
        recorded.context(
            "cannot record the clean shutdown in the store; no data is lost, but the store cannot \
             be moved",
        )
    }
}

/// A single node that has recovered.
pub(super) struct Recovered {
    pub engine: Arc<Engine>,
    pub catalog: Arc<Catalog>,
    pub metadata: Arc<dyn MetadataStore>,
    pub store: NodeStore,
}

/// Opens the catalog and the store of a single node, recovers its engine from the log, and drops
/// tenants that a crash left incomplete.
pub(super) async fn recover(
    arguments: &StartArgs,
    mut config: Config,
    data: &DataDirectory,
    store: impl Future<Output = anyhow::Result<NodeStore>>,
) -> anyhow::Result<Recovered> {
    let metadata_path = data.path().join(METADATA_FILE);
    let accepted = arguments.accept_catalog.map(Revision);
    let embedded = Embedded::open_accepting(&metadata_path, accepted).map_err(with_remedy)?;
    let census_accepts = accepted == Some(embedded.revision());
    let embedded = Arc::new(embedded);
    let metadata: Arc<dyn MetadataStore> = embedded.clone();
    let catalog = Catalog::open(metadata.clone()).await.map_err(with_remedy)?;
    let census = CatalogCheck::new(catalog.clone(), census_accepts);
    let store = store.await?;
    config.whole_process = true;
    config.max_statement_bytes = arguments.max_statement_size.0 as usize;
    config.live = Some(catalog.partitions().iter().map(|partition| partition.id).collect());
    config.known = Some(census.partition_callbacks());
    let partitions = catalog.partitions();
    config.timelines = partitions.iter().map(|partition| (partition.id, timeline(partition))).collect();
    config.retention = retention(catalog.clone());
    config.store = Some(store.store());
    config.is_exclusive = store.is_default();
    config.node_id = store.id();
    let shared = |tenant: &&Arc<Tenant>| tenant.durability == Durability::Shared;
    config.shared = catalog.all_tenants().iter().filter(shared).map(|tenant| tenant.partition).collect();
    config.disk_reserve_bytes = arguments.disk_reserve.map(|reserve| reserve.0);
    config.statement_stack_bytes = arguments.statement_stack.0 as usize;
    config.disk_cache_bytes = disk_cache::bytes(arguments.disk_cache, arguments.store.as_ref())?;
    let engine = Engine::start(config).await.map_err(|error| {
        let refusal = census.refusal(&error, &metadata_path, embedded.revision());
        refusal.unwrap_or_else(|| anyhow::Error::new(error).context("cannot start the engine"))
    })?;
    census.settle().await.map_err(with_remedy)?;
    drop_unfinished(&engine, &catalog).await?;
    Ok(Recovered { engine, catalog, metadata, store })
}

/// The current timeline of a partition.
pub(super) fn timeline(partition: &PartitionRecord) -> Timeline {
    Timeline { lineage: partition.lineage, epoch: partition.epoch }
}

/// Listens on `--http` before the node is ready.
pub(super) async fn listen(arguments: &StartArgs, progress: StartProgress) -> anyhow::Result<HttpServer> {
    let listening = http::listen(arguments.http, progress).await;
    listening.with_context(|| format!("cannot listen on --http {}", arguments.http))
}

/// Returns the startup progress for HTTP clients. Only reading the shared log can take seconds.
fn progress(config: &Config) -> StartProgress {
    let shared_log = config.shared_log.progress.clone();
    Arc::new(move || match shared_log.expected() {
        0 => "opening the store and the logs".to_owned(),
        expected => format!("read {} of {expected} objects of the shared log", shared_log.read()),
    })
}

/// Starts to reload certificates on SIGHUP. The signal then no longer ends the process, so this is
/// called only if there are certificates.
fn spawn_tls_reload(
    certificates: Vec<Arc<dyn Reload>>,
    event_log: Arc<EventLog>,
) -> anyhow::Result<JoinHandle<()>> {
    let hangups = signal(SignalKind::hangup()).context("cannot listen for signals")?;
    Ok(tokio::spawn(reload_on_change(certificates, hangups, event_log)))
}

/// Returns the event for the start of the node.
fn started_event(event_log: &EventLog, engine: &Engine, arguments: &StartArgs) -> Event {
    let after = match event_log.previous_run() {
        PreviousRun::None => "nothing",
        PreviousRun::Stop => "a stop",
        PreviousRun::Crash => "a crash",
    };
    let recovery = engine.recovery();
    Event::new(Kind::NodeStarted)
        .detail("version", env!("CARGO_PKG_VERSION"))
        .detail("after", after)
        .detail("insecure", arguments.insecure)
        .detail("read_only", arguments.read_only)
        .detail("log_records", recovery.records)
        .detail("log_bytes", recovery.bytes)
        .detail("log_partitions", recovery.partitions)
        .detail("recovery_ms", recovery.time.as_millis() as u64)
}

/// Returns the retention of partitions, from the catalog. Partitions that the catalog does not
/// contain, or no longer contains, get the default.
pub(super) fn retention(catalog: Arc<Catalog>) -> RetentionSource {
    let default = Limits::default().get(Limit::Retention);
    Arc::new(move |partition| {
        let retention_ms = catalog.limit_of(partition, Limit::Retention).or(default);
        Duration::from_millis(retention_ms.unwrap_or(u64::MAX))
    })
}

/// Returns `None` for 0.
fn non_zero_duration(milliseconds: u64) -> Option<Duration> {
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
}

/// Drops tenants whose creation or drop was interrupted by a crash. Their existence was never
/// acknowledged to a client, or their drop had begun.
async fn drop_unfinished(engine: &Engine, catalog: &Catalog) -> anyhow::Result<()> {
    for tenant in catalog.unfinished() {
        tracing::info!(
            tenant = tenant.name,
            state = ?tenant.state,
            "dropping a tenant left incomplete by a crash"
        );
        engine.drop_partition(tenant.partition).await?;
        catalog.finish_drop(&tenant).await?;
    }
    Ok(())
}
