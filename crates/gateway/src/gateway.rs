//! The gateway: accepts connections, distributes them to [workers](crate::worker), and shuts down.
//!
//! A shutdown has three steps:
//!
//! 1. No new connections are accepted, and idle sessions are terminated (57P01).
//! 2. Running statements can complete within `shutdown_grace`.
//! 3. The remaining statements are cancelled.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::JoinHandle;
use std::time::Duration;

use fulmar_engine::Engine;
use fulmar_meta::{Catalog, SaltKey, Tenant};
use fulmar_pages::PartitionId;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

use crate::activity;
use crate::advisory::AdvisoryLocks;
use crate::crew::Crew;
use crate::crowd::Crowd;
use crate::events::{self, Journal};
use crate::failures::Failures;
use crate::memory::SessionMemory;
use crate::metrics::{self, TenantFigures, WorkerMetrics};
use crate::registry::Registry;
use crate::session::SlowLog;
use crate::tenants::{TenantCounts, Tenants};
use crate::tokens::{self, Refused, Scope};
use crate::worker::{self, Worker, Workers};

/// How long a shutdown waits for cancelled statements to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// The configuration of a gateway.
#[derive(Clone)]
pub struct GatewayConfig {
    /// The listen address for SQL clients. Port 0 selects a free port.
    pub sql_address: SocketAddr,
    /// The TLS configuration. `None` disables TLS.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// Disables authentication: every client is a superuser.
    pub insecure: bool,
    /// Worker threads that serve sessions. 50 % more are started as spare workers for times when
    /// sessions often wait for disk reads.
    pub workers: usize,
    /// The number of active workers, from 1 to `workers`. Set by tests; `None` scales with the
    /// load.
    pub active_workers: Option<Arc<AtomicUsize>>,
    /// Maximum number of concurrent sessions. Further sessions are rejected (53300). The last 10
    /// are reserved for superusers.
    pub max_sessions: usize,
    /// Maximum number of connections that are not sessions yet. If it is reached, the oldest are
    /// closed.
    pub max_logins: usize,
    /// Memory budget of all sessions for messages, statements and results. A database can use half
    /// of it.
    pub session_memory_bytes: u64,
    /// The directory of temporary files for large results. The files are unlinked.
    pub temporary_directory: PathBuf,
    /// How long running statements can continue at a shutdown before they are cancelled.
    pub shutdown_grace: Duration,
    /// The threshold of the slow query log. `None` disables it.
    pub slow_statement: Option<Duration>,
    /// Serves metrics without a token.
    pub public_metrics: bool,
    /// The event log.
    pub journal: Arc<Journal>,
}

impl GatewayConfig {
    /// The default configuration: one worker per CPU, password authentication, no TLS.
    pub fn new(sql_address: SocketAddr) -> GatewayConfig {
        GatewayConfig {
            sql_address,
            tls: None,
            insecure: false,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            active_workers: None,
            max_sessions: 20_000,
            max_logins: 2_000,
            session_memory_bytes: 256 << 20,
            temporary_directory: std::env::temp_dir(),
            shutdown_grace: Duration::from_secs(5),
            slow_statement: None,
            public_metrics: false,
            journal: Arc::new(Journal::in_memory()),
        }
    }
}

/// The state shared by all sessions.
pub(crate) struct Shared {
    pub(crate) config: GatewayConfig,
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) tenants: Tenants,
    pub(crate) memory: SessionMemory,
    pub(crate) advisory: AdvisoryLocks,
    pub(crate) slow: SlowLog,
    /// The start time, in milliseconds since 1970.
    pub(crate) started_ms: u64,
    /// Used if the catalog has no salt key, because the primary node runs an earlier version.
    pub(crate) fallback_salt_key: Arc<SaltKey>,
    pub(crate) failures: Failures,
    /// Connections that are not sessions yet.
    pub(crate) logins: Arc<Crowd>,
    /// Cancelled at shutdown: closes connections that are not sessions yet.
    pub(crate) closing: CancellationToken,
}

impl Shared {
    pub(crate) fn journal(&self) -> &Journal {
        &self.config.journal
    }
}

/// A running gateway.
pub struct Gateway {
    shared: Arc<Shared>,
    local_address: SocketAddr,
    acceptor: tokio::task::JoinHandle<()>,
    workers: Vec<JoinHandle<()>>,
    metrics: Arc<MetricsSource>,
}

/// The source of the gateway's metrics.
pub(crate) struct MetricsSource {
    shared: Arc<Shared>,
    crew: Arc<Crew>,
    workers: Arc<[Worker]>,
    worker_metrics: Vec<Arc<WorkerMetrics>>,
    /// The number of regular workers. The workers after them are spare.
    regular: usize,
}

/// A worker that does not respond to a ping within this time is considered stuck: sessions yield
/// every millisecond.
const WORKER_TIMEOUT: Duration = Duration::from_secs(2);

impl MetricsSource {
    /// Returns true if all regular workers respond to a ping.
    pub(crate) async fn workers_answer(&self) -> bool {
        let pings = self.workers[..self.regular].iter().map(|worker| worker.answers_within(WORKER_TIMEOUT));
        futures::future::join_all(pings).await.into_iter().all(|responded| responded)
    }

    /// Renders the metrics that the scope includes, in Prometheus's text format.
    pub(crate) fn render(&self, scope: Scope) -> String {
        let Shared { engine, registry, logins, memory, .. } = &*self.shared;
        match scope {
            Scope::Node => metrics::render(
                &self.worker_metrics,
                self.crew.active(),
                metrics::Connections {
                    sessions: registry.len(),
                    logins: logins.count(),
                    memory: memory.usage(),
                },
                &engine.statistics(),
                engine.beside_statistics().as_ref(),
                &engine.store_statistics(),
                &self.busiest_tenants(),
            ),
            Scope::Tenant(partition) => metrics::render_tenant(self.tenant(partition)),
        }
    }

    /// The scope of metrics that a token grants.
    pub(crate) async fn authorize(
        &self,
        secret: Option<&str>,
        address: Option<IpAddr>,
    ) -> Result<Scope, Refused> {
        tokens::authorize(secret, address, &self.shared).await
    }

    fn tenant(&self, partition: PartitionId) -> Option<TenantFigures> {
        let Shared { catalog, tenants, .. } = &*self.shared;
        let tenant = catalog.tenant_of(partition)?;
        Some(self.figures(&tenant, tenants.counts(partition).unwrap_or_default()))
    }

    fn figures(&self, tenant: &Tenant, counts: TenantCounts) -> TenantFigures {
        let Shared { engine, registry, memory, .. } = &*self.shared;
        TenantFigures {
            name: tenant.name.clone(),
            counts,
            commits: engine.partition_statistics(tenant.partition).unwrap_or_default().commits,
            sessions: registry.count(tenant.partition) as u64,
            session_memory_bytes: memory.used_bytes(tenant.partition),
        }
    }

    fn busiest_tenants(&self) -> Vec<TenantFigures> {
        let Shared { catalog, tenants, .. } = &*self.shared;
        let mut busiest = tenants.busiest(metrics::TENANTS);
        let named = catalog
            .tenants()
            .into_iter()
            .filter_map(|tenant| Some(self.figures(&tenant, busiest.remove(&tenant.partition)?)));
        named.collect()
    }

    /// Returns true if commits are accepted.
    pub(crate) fn is_healthy(&self) -> bool {
        self.shared.engine.accepts_commits()
    }

    /// Returns true if the node is a replica.
    pub(crate) fn reads_beside(&self) -> bool {
        self.shared.engine.reads_beside()
    }

    /// Returns true if the shared log accepts commits.
    pub(crate) fn is_shared_log_healthy(&self) -> bool {
        self.shared.engine.health().shared_log.accepts()
    }
}

impl Gateway {
    /// Starts listening and serving. Must be called inside a tokio runtime that outlives the
    /// gateway.
    pub fn start(config: GatewayConfig, engine: Arc<Engine>, catalog: Arc<Catalog>) -> io::Result<Gateway> {
        let listener = listen(config.sql_address)?;
        let local_address = listener.local_addr()?;
        let registry = Arc::new(Registry::new(config.max_sessions));
        let regular = config.workers.max(1);
        let shared = Arc::new(Shared {
            slow: SlowLog::new(config.slow_statement),
            logins: Crowd::new(config.max_logins),
            memory: SessionMemory::new(config.session_memory_bytes),
            config,
            engine,
            catalog,
            registry,
            tenants: Tenants::default(),
            advisory: AdvisoryLocks::default(),
            started_ms: activity::now_ms(),
            fallback_salt_key: Arc::new(SaltKey::random()),
            failures: Failures::new(),
            closing: CancellationToken::new(),
        });
        let Workers { all: workers, crew, threads } = worker::start(regular, &shared)?;
        let metrics = Arc::new(MetricsSource {
            shared: shared.clone(),
            crew,
            worker_metrics: workers.iter().map(|worker| worker.metrics.clone()).collect(),
            workers: workers.clone(),
            regular,
        });
        let acceptor = tokio::spawn(accept(listener, workers, regular, shared.clone()));
        tokio::spawn(events::watch(shared.clone()));
        Ok(Gateway { shared, local_address, acceptor, workers: threads, metrics })
    }

    /// The listen address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_address
    }

    /// The number of sessions.
    pub fn sessions(&self) -> usize {
        self.shared.registry.len()
    }

    pub(crate) fn metrics(&self) -> Arc<MetricsSource> {
        self.metrics.clone()
    }

    /// Ends all sessions: idle sessions immediately, others when their statement has completed, or
    /// is cancelled after `shutdown_grace`.
    pub async fn shutdown(self) {
        self.acceptor.abort();
        let _ = self.acceptor.await; // waits until the listener is closed
        let registry = &self.shared.registry;
        self.shared.closing.cancel();
        registry.close_all();
        if tokio::time::timeout(self.shared.config.shutdown_grace, registry.wait_empty(None)).await.is_err() {
            registry.kill_all();
            if tokio::time::timeout(CANCEL_TIMEOUT, registry.wait_empty(None)).await.is_err() {
                tracing::warn!(
                    sessions = registry.len(),
                    "sessions did not end after their statements were cancelled"
                );
                return;
            }
        }
        let threads = self.workers;
        let joined = tokio::task::spawn_blocking(move || {
            threads.into_iter().filter_map(|thread| thread.join().err()).count()
        });
        if !matches!(joined.await, Ok(0)) {
            tracing::error!("gateway worker panicked");
        }
    }
}

/// Opens the listener. Accepted connections inherit TCP keep-alive, so that a client whose machine
/// has failed is detected after some hours.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.set_keepalive(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// Accepts connections and hands each to the regular worker with the fewest connections. Spare
/// workers get none, because a session over TLS cannot migrate away from them later.
async fn accept(listener: TcpListener, workers: Arc<[Worker]>, regular: usize, shared: Arc<Shared>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "could not accept new connection");
                // The process is probably out of file descriptors; an immediate retry would fail
                // too.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Some(worker) = workers.iter().take(regular).min_by_key(|worker| worker.load()) else {
            return;
        };
        worker.hand(stream, shared.logins.enter(&shared.closing).await).await;
    }
}
