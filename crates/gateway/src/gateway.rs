//! The gateway as a whole: acceptor, [workers](crate::worker), shutdown.
//!
//! A shutdown has three steps: no new connections, and sessions that wait are told to go (57P01); statements that run
//! get a while to end; what still runs then is cancelled.

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

/// How long cancelled statements get to end before a shutdown goes on without them.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// How a gateway is set up.
#[derive(Clone)]
pub struct GatewayConfig {
    /// Where clients connect; port 0 takes a free one.
    pub sql_address: SocketAddr,
    /// The certificate, if clients may ask for TLS.
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// Everybody is a superuser and needs no password.
    pub insecure: bool,
    /// Threads that serve sessions; half as many again help while sessions wait for the disk.
    pub workers: usize,
    /// How many of them are active. `None`: as many as the load needs. Tests set it, from 1 to `workers`.
    pub active_workers: Option<Arc<AtomicUsize>>,
    /// Sessions at once; more are refused (53300). The last ten places are for superusers.
    pub max_sessions: usize,
    /// Connections at once that are no sessions yet; then the oldest make room.
    pub max_logins: usize,
    /// Memory that all sessions may hold for messages, statements and results; a database may use half of it.
    pub session_memory_bytes: u64,
    /// Where answers go that do not fit in memory; the files are unlinked.
    pub temporary_directory: PathBuf,
    /// How long running statements get to end at a shutdown.
    pub shutdown_grace: Duration,
    /// Statements that take longer are logged; `None`: none are.
    pub slow_statement: Option<Duration>,
    /// Metrics are told without a token.
    pub public_metrics: bool,
    /// Where it is noted what happens.
    pub journal: Arc<Journal>,
}

impl GatewayConfig {
    /// The usual set-up: a worker for each processor, passwords, no TLS.
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

/// What all sessions share.
pub(crate) struct Shared {
    pub(crate) config: GatewayConfig,
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) tenants: Tenants,
    pub(crate) memory: SessionMemory,
    pub(crate) advisory: AdvisoryLocks,
    pub(crate) slow: SlowLog,
    /// Milliseconds since 1970.
    pub(crate) started_ms: u64,
    /// Used while the catalog has none: it is that of an owner of an earlier version.
    pub(crate) fallback_salt_key: Arc<SaltKey>,
    pub(crate) failures: Failures,
    /// Connections that are no sessions yet.
    pub(crate) logins: Arc<Crowd>,
    /// The gateway shuts down: connections that are no sessions yet end.
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

/// Where the figures for a scrape come from.
pub(crate) struct MetricsSource {
    shared: Arc<Shared>,
    crew: Arc<Crew>,
    workers: Arc<[Worker]>,
    worker_metrics: Vec<Arc<WorkerMetrics>>,
    /// The first so many workers have a CPU each.
    regular: usize,
}

/// A worker that does not answer within this time counts as stuck: sessions yield every millisecond.
const WORKER_TIMEOUT: Duration = Duration::from_secs(2);

impl MetricsSource {
    /// Whether all regular workers answer.
    pub(crate) async fn workers_answer(&self) -> bool {
        let asked = self.workers[..self.regular].iter().map(|worker| worker.answers_within(WORKER_TIMEOUT));
        futures::future::join_all(asked).await.into_iter().all(|answers| answers)
    }

    /// The figures that may be seen, as Prometheus reads them.
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

    /// What the bearer of a token may see.
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

    /// Whether commits are accepted.
    pub(crate) fn is_healthy(&self) -> bool {
        self.shared.engine.accepts_commits()
    }

    /// Whether it reads the databases of another node.
    pub(crate) fn reads_beside(&self) -> bool {
        self.shared.engine.reads_beside()
    }

    /// Whether those of databases that are shared are, as far as it is up to their log.
    pub(crate) fn is_shared_log_healthy(&self) -> bool {
        self.shared.engine.health().shared_log.accepts()
    }
}

impl Gateway {
    /// Listens and serves. Must be called inside a tokio runtime, which is to outlive the gateway.
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

    /// Where clients connect.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_address
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        self.shared.registry.len()
    }

    pub(crate) fn metrics(&self) -> Arc<MetricsSource> {
        self.metrics.clone()
    }

    /// Ends all sessions: those that wait at once, those that run a statement when it has ended, or when the grace is
    /// over.
    pub async fn shutdown(self) {
        self.acceptor.abort();
        let _ = self.acceptor.await; // it was aborted; its listener is closed now
        let registry = &self.shared.registry;
        self.shared.closing.cancel();
        registry.close_all();
        if tokio::time::timeout(self.shared.config.shutdown_grace, registry.wait_empty(None)).await.is_err() {
            registry.kill_all();
            if tokio::time::timeout(LAST_WAIT, registry.wait_empty(None)).await.is_err() {
                tracing::warn!(sessions = registry.len(), "sessions did not end when they were cancelled");
                return;
            }
        }
        let threads = self.workers;
        let joined = tokio::task::spawn_blocking(move || {
            threads.into_iter().filter_map(|thread| thread.join().err()).count()
        });
        if !matches!(joined.await, Ok(0)) {
            tracing::error!("a worker of the gateway has panicked");
        }
    }
}

/// Accepted connections inherit keep-alive: a client whose machine vanished is noticed within hours, not never.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.set_keepalive(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// Hands connections to the regular workers, for ever. Who cannot move would stay with a spare one.
async fn accept(listener: TcpListener, workers: Arc<[Worker]>, regular: usize, shared: Arc<Shared>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                // Out of file descriptors, most likely: it would fail again at once.
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
