//! The rooms of a node, put together.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use fulmar_engine::{Config, Engine, Era, RetentionSource};
use fulmar_gateway::events::{Before, Event, Journal, Kind};
use fulmar_gateway::http::{self, HttpServer, StartProgress};
use fulmar_gateway::{Gateway, GatewayConfig, session_memory_bytes};
use fulmar_meta::{Catalog, Embedded, Limit, Limits, MetadataStore, Publisher, Revision, Tenant};
use fulmar_pages::Durability;
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

use super::census::{Census, with_remedy};
use super::data::DataDirectory;
use super::store::OwnStore;
use super::tls::Tls;
use super::{disk_cache, store, superuser};
use crate::cli::StartArgs;
use crate::size::Bytes;

/// The metadata store's file in the data directory.
pub const METADATA_FILE: &str = "meta.db";
/// Where large answers wait; the engine makes it, and keeps its own temporary files there.
const TEMPORARY_DIRECTORY: &str = "tmp";
/// Where the journal of events is kept in the data directory.
const EVENTS_DIRECTORY: &str = "events";
/// How long a slow reader of metrics can hold up the end of the node.
const HTTP_GRACE: Duration = Duration::from_secs(2);

/// A node that takes connections.
pub struct Node {
    engine: Arc<Engine>,
    role: Role,
    gateway: Gateway,
    http: HttpServer,
    journal: Arc<Journal>,
    /// Reads certificates again.
    tls: Option<JoinHandle<()>>,
}

/// What a node is to the store, and what it has for that.
pub(super) enum Role {
    /// It is its own.
    Owner {
        store: OwnStore,
        /// Puts the catalog there, for readers.
        publisher: Publisher,
    },
    /// It is another node's.
    Reader {
        /// Follows the catalog.
        following: JoinHandle<()>,
        /// For temporary files; gone with the process.
        scratch: TempDir,
    },
}

/// What is served, and with what.
pub(super) struct Rooms {
    pub engine: Arc<Engine>,
    pub catalog: Arc<Catalog>,
    pub journal: Arc<Journal>,
    pub role: Role,
    /// Where large answers wait.
    pub temporary_directory: PathBuf,
    pub http: HttpServer,
}

impl Node {
    /// Recovers and begins to listen.
    pub async fn start(
        arguments: &StartArgs,
        data: &DataDirectory,
        memory: Bytes,
        tls: Option<Arc<Tls>>,
    ) -> anyhow::Result<Self> {
        let mut config = Config::new(data.path(), memory.0);
        let http = listen(arguments, progress(&config)).await?;
        // Read while the catalog is.
        let events = data.path().join(EVENTS_DIRECTORY);
        let journal = tokio::task::spawn_blocking(move || {
            Journal::open(&events)
                .with_context(|| format!("cannot open the journal of events in {}", events.display()))
        });
        let metadata_path = data.path().join(METADATA_FILE);
        let accepted = arguments.accept_catalog.map(Revision);
        let embedded = Embedded::open_accepting(&metadata_path, accepted).map_err(with_remedy)?;
        let census_accepts = accepted == Some(embedded.revision());
        let embedded = Arc::new(embedded);
        let metadata: Arc<dyn MetadataStore> = embedded.clone();
        let catalog = Catalog::open(metadata.clone()).await.map_err(with_remedy)?;
        let census = Census::new(catalog.clone(), census_accepts);
        let journal = Arc::new(journal.await.context("reading the journal of events panicked")??);
        let store = store::open(data.path(), arguments.store.as_ref()).await?;
        config.whole_process = true;
        config.max_statement_bytes = arguments.max_statement_size.0 as usize;
        config.live = Some(catalog.partitions().iter().map(|partition| partition.id).collect());
        config.known = Some(census.known());
        config.eras = catalog
            .partitions()
            .iter()
            .map(|of| (of.id, Era { lineage: of.lineage, epoch: of.epoch }))
            .collect();
        config.retention = retention(catalog.clone());
        config.store = Some(store.store());
        config.alone = store.is_below();
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
        forget_unfinished(&engine, &catalog).await?;
        if !arguments.insecure {
            superuser::ensure_password(&catalog, data.path()).await?;
        }
        let publisher = Publisher::start(metadata, engine.store(), store.id());
        let role = Role::Owner { store, publisher };
        let temporary_directory = data.path().join(TEMPORARY_DIRECTORY);
        let rooms = Rooms { engine, catalog, journal, role, temporary_directory, http };
        Self::serve(arguments, rooms, memory, tls).await
    }

    /// Begins to listen.
    pub(super) async fn serve(
        arguments: &StartArgs,
        rooms: Rooms,
        memory: Bytes,
        tls: Option<Arc<Tls>>,
    ) -> anyhow::Result<Self> {
        let Rooms { engine, catalog, journal, role, temporary_directory, http } = rooms;
        let mut config = GatewayConfig::new(arguments.sql);
        config.tls = tls.as_ref().map(Tls::server);
        config.public_metrics = arguments.public_metrics;
        config.journal = journal.clone();
        config.insecure = arguments.insecure;
        config.slow_statement = limit(arguments.slow_statement);
        config.temporary_directory = temporary_directory;
        config.session_memory_bytes = session_memory_bytes(memory.0);
        let gateway = Gateway::start(config, engine.clone(), catalog)
            .with_context(|| format!("cannot listen on --sql {}", arguments.sql))?;
        http.ready(&gateway);
        let tls = tls.map(|tls| follow(tls, journal.clone())).transpose()?;
        tracing::info!(%memory, insecure = arguments.insecure, "the node takes connections");
        journal.record(started(&journal, &engine, arguments));
        Ok(Self { engine, role, gateway, http, journal, tls })
    }

    /// Where clients connect; the port is the real one if 0 was asked for.
    pub fn sql_addr(&self) -> SocketAddr {
        self.gateway.local_addr()
    }

    /// Where /metrics and /healthz are.
    pub fn http_addr(&self) -> SocketAddr {
        self.http.local_addr()
    }

    /// Notes that it will stop, and why.
    pub fn stopping(&self, signal: &'static str) {
        self.journal.record(Event::new(Kind::NodeStopping).detail("signal", signal));
    }

    /// Takes no more connections, lets running statements end within the gateway's bound, flushes, stops.
    pub async fn shutdown(self) -> anyhow::Result<()> {
        self.gateway.shutdown().await;
        match tokio::time::timeout(HTTP_GRACE, self.http.shutdown()).await {
            Ok(stopped) => stopped.context("the HTTP server did not stop cleanly")?,
            Err(_) => tracing::warn!("a client of the HTTP server was cut off"),
        }
        if let Some(tls) = self.tls {
            tls.abort();
        }
        let noted = match self.role {
            Role::Owner { store, publisher } => {
                publisher.stop().await;
                let stopped = self.engine.shutdown().await;
                stopped.context("the engine did not stop cleanly; nothing acknowledged is lost")?;
                store.stopped().await
            }
            Role::Reader { following, scratch } => {
                following.abort();
                self.engine.shutdown().await.context("the engine did not stop cleanly; nothing is lost")?;
                drop(scratch);
                Ok(())
            }
        };
        self.journal.record(Event::new(Kind::NodeStopped));
        let journal = self.journal;
        tokio::task::spawn_blocking(move || journal.close()).await.context("the journal did not close")?;
        noted.context("the stop could not be noted in the store; nothing is lost, but the store cannot move")
    }
}

/// Listens on `--http` before the node is ready.
pub(super) async fn listen(arguments: &StartArgs, progress: StartProgress) -> anyhow::Result<HttpServer> {
    let listening = http::listen(arguments.http, progress).await;
    listening.with_context(|| format!("cannot listen on --http {}", arguments.http))
}

/// The progress of a start. Its only part that can take seconds is reading the shared log.
fn progress(config: &Config) -> StartProgress {
    let shared_log = config.shared_log.progress.clone();
    Arc::new(move || match shared_log.expected() {
        0 => "opening the store and the logs".to_owned(),
        expected => format!("read {} of {expected} objects of the shared log", shared_log.read()),
    })
}

/// From now on the signal does not end the process: only where there is something to read again.
fn follow(tls: Arc<Tls>, journal: Arc<Journal>) -> anyhow::Result<JoinHandle<()>> {
    let hangups = signal(SignalKind::hangup()).context("cannot listen for signals")?;
    Ok(tokio::spawn(tls.follow(hangups, journal)))
}

/// How the node has started.
fn started(journal: &Journal, engine: &Engine, arguments: &StartArgs) -> Event {
    let after = match journal.before() {
        Before::Nothing => "nothing",
        Before::Stop => "a stop",
        Before::Crash => "a crash",
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

/// What the catalog says; the default for what it does not know (any more, or yet).
pub(super) fn retention(catalog: Arc<Catalog>) -> RetentionSource {
    let default = Limits::default().get(Limit::Retention);
    Arc::new(move |partition| {
        let kept_ms = catalog.limit_of(partition, Limit::Retention).or(default);
        Duration::from_millis(kept_ms.unwrap_or(u64::MAX))
    })
}

/// A time of 0 is none.
fn limit(milliseconds: u64) -> Option<Duration> {
    (milliseconds > 0).then(|| Duration::from_millis(milliseconds))
}

/// Drops what a crash left half made or half dropped: nobody was ever told that it is there.
async fn forget_unfinished(engine: &Engine, catalog: &Catalog) -> anyhow::Result<()> {
    for tenant in catalog.unfinished() {
        tracing::info!(tenant = tenant.name, state = ?tenant.state, "dropping what a crash left behind");
        engine.drop_partition(tenant.partition).await?;
        catalog.finish_drop(&tenant).await?;
    }
    Ok(())
}
