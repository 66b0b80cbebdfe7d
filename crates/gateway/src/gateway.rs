//! The gateway: accepts connections, distributes them to [workers](crate::worker), and shuts down.
//!
//! A shutdown has three steps:
//!
//! 1. No new connections are accepted, and idle sessions are terminated (57P01).
//! 2. Running statements can complete within `shutdown_grace`.
//! 3. The remaining statements are cancelled.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fulmar_control::report::NodeReport;
use fulmar_engine::Engine;
use fulmar_meta::{Catalog, SaltKey};
use fulmar_pages::PartitionId;
use fulmar_transport::Stream;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;

use crate::advisory::AdvisoryLocks;
use crate::cluster::Cluster;
use crate::cluster::Waits;
use crate::connection_slots::ConnectionSlots;
use crate::events::{self, Event, EventLog, Kind};
use crate::load::{KeyMonitor, KeyMonitoring, LoadMonitor, Observed};
use crate::login_throttle::LoginThrottle;
use crate::memory::SessionMemory;
use crate::monitoring::MetricsSource;
use crate::registry::Registry;
use crate::session::{self, SlowLog};
use crate::statement_stats::StatementReport;
use crate::system::Sources;
use crate::tenant_stats::TenantStatsRegistry;
use crate::tokens::Authorizer;
use crate::worker::{self, Worker, Workers};
use crate::{activity, admin, startup};

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
    /// Memory budget of the node, for load reports.
    pub memory_bytes: u64,
    /// CPUs that load reports state as the node's capacity. `None`: those that the process can use.
    pub cpus: Option<f64>,
    /// Whether the load is measured. Without, load reports are empty.
    pub measures_load: bool,
    /// How accesses per key are counted.
    pub key_monitoring: KeyMonitoring,
    /// The directory of temporary files for large results. The files are unlinked.
    pub temporary_directory: PathBuf,
    /// How long running statements can continue at a shutdown before they are cancelled.
    pub shutdown_grace: Duration,
    /// The threshold of the slow query log. `None` disables it.
    pub slow_statement: Option<Duration>,
    /// Serves metrics without a token.
    pub public_metrics: bool,
    /// The event log.
    pub event_log: Arc<EventLog>,
    /// The cluster of the node. `None`: the node owns every partition.
    pub cluster: Option<Arc<dyn Cluster>>,
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
            memory_bytes: 0,
            cpus: None,
            measures_load: true,
            key_monitoring: KeyMonitoring::default(),
            temporary_directory: std::env::temp_dir(),
            shutdown_grace: Duration::from_secs(5),
            slow_statement: None,
            public_metrics: false,
            event_log: Arc::new(EventLog::in_memory()),
            cluster: None,
        }
    }
}

/// A running gateway.
pub struct Gateway {
    registry: Arc<Registry>,
    /// Cancelled at shutdown: closes connections that are not sessions yet.
    closing: CancellationToken,
    shutdown_grace: Duration,
    local_address: SocketAddr,
    acceptor: tokio::task::JoinHandle<()>,
    workers: Vec<JoinHandle<()>>,
    metrics: Arc<MetricsSource>,
    relays: RelayAcceptor,
    sessions_by_partition: GatewaySessions,
}

/// Accepts streams of other nodes for sessions.
#[derive(Clone)]
pub struct RelayAcceptor {
    workers: Arc<[Worker]>,
    regular: usize,
}

impl RelayAcceptor {
    /// Serves a stream that another node has opened with
    /// [`Cluster::open_session_stream`](crate::cluster::Cluster::open_session_stream). Returns when a
    /// worker has taken it.
    pub async fn accept(&self, stream: Stream) {
        let workers = self.workers.iter().take(self.regular);
        if let Some(worker) = workers.min_by_key(|worker| worker.load()) {
            worker.hand_over_relayed(stream).await;
        }
    }
}

/// The sessions of a gateway, by partition.
#[derive(Clone)]
pub struct GatewaySessions {
    registry: Arc<Registry>,
    catalog: Arc<Catalog>,
    event_log: Arc<EventLog>,
    tenants: Arc<TenantStatsRegistry>,
    load: Arc<LoadMonitor>,
}

impl GatewaySessions {
    /// What this node and its partitions did in the last second, with their most accessed keys if
    /// `with_keys` and if they are monitored.
    pub fn load_report(&self, with_keys: bool) -> NodeReport {
        self.load.report(with_keys)
    }

    /// The share of its capacity that this node has used in the last ten seconds or so.
    pub fn utilisation(&self) -> f64 {
        self.load.utilisation()
    }

    /// Requests that accesses per key are counted for a window, if that is not done always or
    /// never.
    pub fn request_keys(&self) {
        self.load.request_keys();
    }

    /// The statistics of the statements of these partitions on this node, or of all.
    pub fn statement_report(&self, partitions: Option<&[u64]>) -> StatementReport {
        self.tenants.statement_report(partitions)
    }

    /// The partitions that executed statements on this node in the last second, those with most
    /// statements first, with the smoothed execution times of these in microseconds.
    pub fn latencies(&self) -> Vec<(PartitionId, u64)> {
        self.load.latencies()
    }

    /// How long the clients of a partition have waited since the last call.
    pub fn take_waits(&self, partition: PartitionId) -> Waits {
        self.registry.waits.take(partition)
    }

    /// The smoothed execution time of a partition's statements on this node, in microseconds.
    pub fn smoothed_us(&self, partition: PartitionId) -> u64 {
        self.tenants.counts(partition).map_or(0, |counts| counts.smoothed_us)
    }

    /// The number of clients of a partition that are connected to this node of a cluster. Their
    /// sessions may run on others.
    pub fn clients(&self, partition: PartitionId) -> usize {
        self.registry.count_fronts(partition)
    }

    /// Cancels the running statements of a partition's sessions on this node, and ends the sessions.
    pub fn end(&self, partition: PartitionId) {
        self.registry.kill(partition);
    }

    /// Records an event of the cluster in the event log.
    pub fn record(&self, event: Event) {
        self.event_log.record(event);
    }

    /// Records in the event log that a partition was quarantined.
    pub fn record_quarantine(&self, partition: PartitionId) {
        if let Some(tenant) = self.catalog.tenant_of(partition) {
            self.event_log.record(Event::new(Kind::DatabaseQuarantined).database(&tenant));
        }
    }
}

impl Gateway {
    /// Starts listening and serving. Must be called inside a tokio runtime that outlives the
    /// gateway.
    pub fn start(config: GatewayConfig, engine: Arc<Engine>, catalog: Arc<Catalog>) -> io::Result<Gateway> {
        let listener = listen(config.sql_address)?;
        let local_address = listener.local_addr()?;
        if let Some(cluster) = &config.cluster {
            cluster.listening(local_address);
        }
        let node = config.cluster.as_ref().map(|cluster| cluster.this_node());
        let registry = Arc::new(Registry::new(config.max_sessions, node));
        let regular = config.workers.max(1);
        let closing = CancellationToken::new();
        let logins = ConnectionSlots::new(config.max_logins);
        let components = Components::new(&config, engine, catalog, registry);
        let startup = Arc::new(components.startup(&config));
        let Workers { all: workers, scaler, threads } =
            worker::start(regular, config.active_workers.clone(), &startup, &closing)?;
        let Components {
            engine,
            catalog,
            registry,
            tenants,
            memory,
            login_throttle: failures,
            event_log,
            load,
            ..
        } = components;
        let public = config.insecure || config.public_metrics;
        let authorizer = Authorizer {
            catalog: catalog.clone(),
            login_throttle: failures,
            event_log: event_log.clone(),
            public,
        };
        let metrics = Arc::new(MetricsSource {
            engine: engine.clone(),
            catalog,
            registry: registry.clone(),
            tenants,
            memory,
            logins: logins.clone(),
            authorizer,
            scaler,
            cluster: config.cluster.clone(),
            workers: workers.clone(),
            regular,
        });
        let sessions_by_partition = GatewaySessions {
            registry: registry.clone(),
            catalog: metrics.catalog.clone(),
            event_log: event_log.clone(),
            tenants: metrics.tenants.clone(),
            load: load.clone(),
        };
        let relays = RelayAcceptor { workers: workers.clone(), regular };
        let acceptor = tokio::spawn(accept(listener, workers, regular, logins, closing.clone()));
        let cluster = config.cluster.clone();
        if config.measures_load {
            tokio::spawn(load.run(closing.clone()));
        }
        tokio::spawn(events::monitor_health(engine, cluster, event_log, closing.clone()));
        let shutdown_grace = config.shutdown_grace;
        Ok(Gateway {
            registry,
            closing,
            shutdown_grace,
            local_address,
            acceptor,
            workers: threads,
            metrics,
            relays,
            sessions_by_partition,
        })
    }

    /// The listen address.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_address
    }

    /// Accepts streams of other nodes.
    pub fn relays(&self) -> RelayAcceptor {
        self.relays.clone()
    }

    /// The sessions of this gateway.
    pub fn partition_sessions(&self) -> GatewaySessions {
        self.sessions_by_partition.clone()
    }

    /// Serves a stream of another node, as [`RelayAcceptor::accept`].
    pub async fn serve_relayed(&self, stream: Stream) {
        self.relays.accept(stream).await;
    }

    /// The number of sessions.
    pub fn sessions(&self) -> usize {
        self.registry.len()
    }

    pub(crate) fn metrics(&self) -> Arc<MetricsSource> {
        self.metrics.clone()
    }

    /// Ends all sessions: idle sessions immediately, others when their statement has completed, or
    /// is cancelled after `shutdown_grace`.
    pub async fn shutdown(self) {
        self.acceptor.abort();
        let _ = self.acceptor.await; // waits until the listener is closed
        let registry = &self.registry;
        self.closing.cancel();
        registry.close_all();
        if tokio::time::timeout(self.shutdown_grace, registry.wait_empty(None)).await.is_err() {
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

/// The components that several contexts share. Each context gets the ones that it needs.
struct Components {
    engine: Arc<Engine>,
    catalog: Arc<Catalog>,
    registry: Arc<Registry>,
    tenants: Arc<TenantStatsRegistry>,
    memory: Arc<SessionMemory>,
    advisory: Arc<AdvisoryLocks>,
    login_throttle: Arc<LoginThrottle>,
    event_log: Arc<EventLog>,
    keys: Arc<KeyMonitor>,
    load: Arc<LoadMonitor>,
}

impl Components {
    fn new(
        config: &GatewayConfig,
        engine: Arc<Engine>,
        catalog: Arc<Catalog>,
        registry: Arc<Registry>,
    ) -> Components {
        let tenants: Arc<TenantStatsRegistry> = Arc::default();
        let memory = Arc::new(SessionMemory::new(config.session_memory_bytes));
        let keys = Arc::new(KeyMonitor::new(config.key_monitoring, Instant::now()));
        let observed = Observed {
            engine: engine.clone(),
            catalog: catalog.clone(),
            tenants: tenants.clone(),
            sessions: memory.clone(),
            cluster: config.cluster.clone(),
            cpus: config.cpus,
            memory_bytes: config.memory_bytes,
        };
        Components {
            engine,
            catalog,
            registry,
            tenants,
            memory,
            advisory: Arc::default(),
            login_throttle: Arc::new(LoginThrottle::new()),
            event_log: config.event_log.clone(),
            load: Arc::new(LoadMonitor::new(observed, keys.clone())),
            keys,
        }
    }

    fn startup(&self, config: &GatewayConfig) -> startup::Context {
        startup::Context {
            tls: config.tls.clone(),
            insecure: config.insecure,
            engine: self.engine.clone(),
            catalog: self.catalog.clone(),
            registry: self.registry.clone(),
            login_throttle: self.login_throttle.clone(),
            fallback_salt_key: Arc::new(SaltKey::random()),
            event_log: self.event_log.clone(),
            sessions: Arc::new(self.sessions(config)),
            cluster: config.cluster.clone(),
        }
    }

    fn sessions(&self, config: &GatewayConfig) -> session::Context {
        session::Context {
            engine: self.engine.clone(),
            catalog: self.catalog.clone(),
            tenants: self.tenants.clone(),
            memory: self.memory.clone(),
            advisory: self.advisory.clone(),
            event_log: self.event_log.clone(),
            keys: self.keys.clone(),
            slow: SlowLog::new(config.slow_statement),
            temporary_directory: config.temporary_directory.clone(),
            administration: admin::Context {
                engine: self.engine.clone(),
                catalog: self.catalog.clone(),
                registry: self.registry.clone(),
                tenants: self.tenants.clone(),
                event_log: self.event_log.clone(),
                cluster: config.cluster.clone(),
            },
            sources: Arc::new(Sources {
                engine: self.engine.clone(),
                catalog: self.catalog.clone(),
                registry: self.registry.clone(),
                tenants: self.tenants.clone(),
                advisory: self.advisory.clone(),
                event_log: self.event_log.clone(),
                cluster: config.cluster.clone(),
                load: self.load.clone(),
                started_ms: activity::now_ms(),
            }),
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
async fn accept(
    listener: TcpListener,
    workers: Arc<[Worker]>,
    regular: usize,
    logins: Arc<ConnectionSlots>,
    closing: CancellationToken,
) {
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
        worker.hand_over(stream, logins.acquire(&closing).await).await;
    }
}
