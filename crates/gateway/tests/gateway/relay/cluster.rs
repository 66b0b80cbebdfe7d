//! Several gateways of one engine, each as a node of a cluster, connected by pipes. The pipes can
//! stop and break. The engine stands for the data that a real cluster moves between its nodes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_control::forecast::series::SeriesReport;
use fulmar_control::report::NodeReport;
use fulmar_engine::{Config, Engine, Error, TransactionOutcome as EngineOutcome, sqlstate};
use fulmar_gateway::cluster::{
    Cluster, CollectorStatistics, ControlChange, ControlInfo, DecisionInfo, ForecastError, MigrationInfo,
    Move, NodeInfo, Owner, PartitionInfo, TransactionOutcome,
};
use fulmar_gateway::{Gateway, GatewayConfig, RelayAcceptor, StatementReport};
use fulmar_meta::{Catalog, Embedded};
use fulmar_pages::{Durability, PartitionId};
use fulmar_transport::{Connection, Identity, Stream};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_postgres::Client;

use crate::common::connect;

type Result<T> = std::result::Result<T, Error>;

/// What the nodes of a cluster share.
pub struct Shared {
    engine: Arc<Engine>,
    runtime: Handle,
    owners: watch::Sender<HashMap<PartitionId, Owner>>,
    acceptors: Mutex<HashMap<u32, RelayAcceptor>>,
    connections: Mutex<Vec<Connection>>,
    /// Bytes of the sessions do not arrive at the fronts.
    pub stops_answers: AtomicBool,
    /// Bytes of the fronts do not arrive at the sessions.
    pub stops_requests: AtomicBool,
    pub may_answer: watch::Sender<bool>,
    /// Outcomes of transactions are told. Its receivers are questions without an answer.
    pub may_decide: watch::Sender<bool>,
    /// The number of times that an owner was searched.
    pub searches: AtomicU64,
    /// The number of pieces of the sessions' bytes that have arrived at the fronts.
    pub answers: AtomicU64,
    /// The number of answers that sessions may not send yet.
    pub withheld_answers: AtomicU64,
    /// The number of times that all connections were broken.
    breaks: AtomicU64,
    /// The number of pieces of the fronts' bytes that were stopped.
    pub stopped_requests: AtomicU64,
    /// The next session that asks whether its node may answer takes this receiver, and blocks its
    /// worker thread until the sender is dropped.
    pub blocked_worker: Mutex<Option<mpsc::Receiver<()>>>,
}

/// The cluster, as one node sees it.
struct Member {
    node: u32,
    shared: Arc<Shared>,
}

fn identity(node: u32) -> Identity {
    Identity { cluster: 1, node, incarnation: 1, versions: 1..=1 }
}

/// Copies bytes, unless they are stopped.
async fn copy(
    mut from: ReadHalf<DuplexStream>,
    mut to: WriteHalf<DuplexStream>,
    shared: Arc<Shared>,
    up: bool,
) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(count) = from.read(&mut buffer).await {
        let stops = if up { &shared.stops_requests } else { &shared.stops_answers };
        if stops.load(Ordering::Acquire) {
            let breaks = shared.breaks.load(Ordering::Acquire);
            shared.stopped_requests.fetch_add(u64::from(up), Ordering::AcqRel);
            while stops.load(Ordering::Acquire) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if shared.breaks.load(Ordering::Acquire) != breaks {
                // The connection broke meanwhile, so the bytes are lost.
                let _ = to.shutdown().await;
                break;
            }
        }
        if count == 0 || to.write_all(&buffer[..count]).await.is_err() {
            break;
        }
        shared.answers.fetch_add(u64::from(!up), Ordering::AcqRel);
    }
}

impl Shared {
    /// Breaks all connections between the nodes.
    pub fn break_connections(&self) {
        self.breaks.fetch_add(1, Ordering::AcqRel);
        self.connections.lock().drain(..).for_each(|connection| connection.close());
    }

    /// Makes a node the owner of a partition.
    pub fn set_owner(&self, partition: PartitionId, node: u32) {
        self.owners.send_modify(|owners| {
            let epoch = owners.get(&partition).map_or(1, |owner| owner.epoch + 1);
            owners.insert(partition, Owner { node, epoch });
        });
    }

    pub fn remove_owner(&self, partition: PartitionId) {
        self.owners.send_if_modified(|owners| owners.remove(&partition).is_some());
    }
}

#[async_trait]
impl Cluster for Member {
    fn this_node(&self) -> u32 {
        self.node
    }

    fn owner(&self, partition: PartitionId) -> Option<Owner> {
        self.shared.owners.borrow().get(&partition).copied()
    }

    async fn find_owner(&self, partition: PartitionId) -> Result<Option<Owner>> {
        self.shared.searches.fetch_add(1, Ordering::AcqRel);
        Ok(self.owner(partition))
    }

    fn aborts_transactions(&self, _: PartitionId, _: u32) -> bool {
        false
    }

    async fn owner_changed(&self, partition: PartitionId, epoch: u32) {
        let mut owners = self.shared.owners.subscribe();
        let changed = |owners: &HashMap<PartitionId, Owner>| {
            owners.get(&partition).is_some_and(|owner| owner.epoch != epoch)
        };
        let _ = owners.wait_for(changed).await;
    }

    async fn load_reports(&self, _: bool) -> Vec<(String, Result<NodeReport>)> {
        Vec::new()
    }

    async fn statement_reports(&self, _: Option<&[u64]>) -> Vec<(String, Result<StatementReport>)> {
        Vec::new()
    }

    async fn open_session_stream(&self, node: u32) -> Result<Stream> {
        let lost = || Error::new(sqlstate::CONNECTION_FAILURE, "cannot connect");
        let acceptor = self.shared.acceptors.lock().get(&node).cloned().ok_or_else(lost)?;
        let (near, middle_near) = duplex(16 << 10);
        let (middle_far, far) = duplex(16 << 10);
        let ((near_reader, near_writer), (far_reader, far_writer)) = (split(near), split(far));
        let ((from_near, to_near), (from_far, to_far)) = (split(middle_near), split(middle_far));
        self.shared.runtime.spawn(copy(from_near, to_far, self.shared.clone(), true));
        self.shared.runtime.spawn(copy(from_far, to_near, self.shared.clone(), false));
        let (this, other) = (identity(self.node), identity(node));
        let (dialed, accepted) = tokio::join!(
            fulmar_transport::connect(near_reader, near_writer, &this, Some(node)),
            fulmar_transport::accept(far_reader, far_writer, &other)
        );
        let ((connection, driver), (mut incoming, far_driver)) =
            (dialed.map_err(|_| lost())?, accepted.map_err(|_| lost())?);
        self.shared.runtime.spawn(driver.run());
        self.shared.runtime.spawn(far_driver.run());
        self.shared.runtime.spawn(async move {
            while let Some(stream) = incoming.accept().await {
                acceptor.accept(stream).await;
            }
        });
        let stream = connection.open().map_err(|_| lost())?;
        self.shared.connections.lock().push(connection);
        Ok(stream)
    }

    fn may_answer(&self) -> bool {
        let blocked_worker = self.shared.blocked_worker.lock().take();
        if let Some(released) = blocked_worker {
            // Fails when the sender is dropped.
            let _ = released.recv();
        }
        *self.shared.may_answer.borrow()
    }

    async fn wait_to_answer(&self) -> Result<()> {
        self.shared.withheld_answers.fetch_add(1, Ordering::AcqRel);
        let _ = self.shared.may_answer.subscribe().wait_for(|may| *may).await;
        Ok(())
    }

    async fn outcome(&self, partition: PartitionId, transaction: u64) -> Result<TransactionOutcome> {
        let _ = self.shared.may_decide.subscribe().wait_for(|may| *may).await;
        Ok(match self.shared.engine.outcome(partition, transaction).await? {
            EngineOutcome::Ended(true) => TransactionOutcome::Committed,
            EngineOutcome::Ended(false) => TransactionOutcome::Aborted,
            EngineOutcome::Forgotten | EngineOutcome::Open => TransactionOutcome::Forgotten,
        })
    }

    fn has_private_stores(&self) -> bool {
        false
    }

    async fn create_partition(&self, partition: PartitionId, _: Durability) -> Result<()> {
        self.shared.engine.create_partition(partition, None).await?;
        self.shared.set_owner(partition, self.node);
        Ok(())
    }

    async fn own_partition(&self, partition: PartitionId, _: Durability) -> Result<()> {
        self.shared.set_owner(partition, self.node);
        Ok(())
    }

    async fn branch_partition(
        &self,
        source: PartitionId,
        branch: PartitionId,
        at_unix_ms: Option<u64>,
    ) -> Result<()> {
        self.shared.engine.create_partition(branch, Some((source, at_unix_ms))).await
    }

    async fn restore_partition(&self, _: PartitionId, _: u64) -> Result<()> {
        Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "this cluster restores nothing"))
    }

    async fn set_durability(&self, _: PartitionId, _: Durability) -> Result<()> {
        Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "this cluster has one log"))
    }

    async fn sessions(&self, _: PartitionId) -> Result<u64> {
        Ok(0)
    }

    async fn resume_partition(&self, _: PartitionId) -> Result<()> {
        Ok(())
    }

    fn check_available(&self, _: PartitionId) -> Result<()> {
        Ok(())
    }

    async fn drop_partition(&self, partition: PartitionId) -> Result<()> {
        self.shared.remove_owner(partition);
        self.shared.engine.drop_partition(partition).await
    }

    async fn forget_node(&self, _node: &str) -> Result<()> {
        Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "this cluster keeps its nodes"))
    }

    async fn wait_for_move(&self, _: PartitionId, _: u64) -> Result<()> {
        Ok(())
    }

    async fn cancel_move(&self, _: PartitionId, _: Option<u64>) -> Result<()> {
        Ok(())
    }

    fn migrations(&self) -> Vec<MigrationInfo> {
        Vec::new()
    }

    async fn change_control(&self, _: ControlChange) -> Result<()> {
        Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "this cluster has no controller"))
    }

    fn control_settings(&self) -> Vec<ControlInfo> {
        Vec::new()
    }

    fn decisions(&self) -> Vec<DecisionInfo> {
        Vec::new()
    }

    async fn start_move(&self, partition: PartitionId, node: &str, _: Move) -> Result<Option<u64>> {
        let node = node.strip_prefix("node").and_then(|number| number.parse().ok());
        let node = node.ok_or_else(|| Error::new(sqlstate::INVALID_PARAMETER_VALUE, "no such node"))?;
        self.shared.set_owner(partition, node);
        Ok(None)
    }

    fn nodes(&self) -> Vec<NodeInfo> {
        let nodes = self.shared.acceptors.lock();
        let mut nodes: Vec<u32> = nodes.keys().copied().collect();
        nodes.sort_unstable();
        let owners = self.shared.owners.borrow();
        let info = |id| NodeInfo {
            id,
            name: format!("node{id}"),
            state: "alive",
            incarnation: 1,
            rpc: String::new(),
            sql: format!("127.0.0.1:{id}"),
            site: String::new(),
            rack: String::new(),
            partitions: owners.values().filter(|owner| owner.node == id).count() as u64,
            slow: None,
            heard: None,
        };
        nodes.into_iter().map(info).collect()
    }

    async fn forecasts(&self) -> Result<Vec<SeriesReport>> {
        Ok(Vec::new())
    }

    fn forecast_errors(&self) -> Vec<ForecastError> {
        Vec::new()
    }

    fn collector(&self) -> CollectorStatistics {
        CollectorStatistics::default()
    }

    fn partitions(&self) -> Vec<PartitionInfo> {
        let owners = self.shared.owners.borrow();
        let info = |(id, owner): (&PartitionId, &Owner)| PartitionInfo {
            id: *id,
            owner: format!("node{}", owner.node),
            epoch: owner.epoch,
            durability: Durability::Shared,
        };
        owners.iter().map(info).collect()
    }

    fn listening(&self, _: SocketAddr) {}
}

/// Gateways with the numbers from 1, with one engine.
pub struct TestCluster {
    pub shared: Arc<Shared>,
    pub catalog: Arc<Catalog>,
    pub gateways: HashMap<u32, Gateway>,
    _directory: tempfile::TempDir,
}

impl TestCluster {
    /// A cluster with the database `shop`, which node `owner` owns.
    pub async fn start(nodes: u32, owner: u32) -> TestCluster {
        Self::start_with(nodes, owner, true).await
    }

    /// Like [`TestCluster::start`]. Unless `insecure`, users log in with their name as the password.
    pub async fn start_with(nodes: u32, owner: u32, insecure: bool) -> TestCluster {
        let directory = tempfile::tempdir().unwrap();
        let store = Embedded::open(&directory.path().join("meta.db")).unwrap();
        let catalog = Catalog::open(Arc::new(store)).await.unwrap();
        let engine = Engine::start(Config::new(directory.path(), 4 << 30)).await.unwrap();
        let shared = Arc::new(Shared {
            engine: engine.clone(),
            runtime: Handle::current(),
            owners: watch::Sender::new(HashMap::new()),
            acceptors: Mutex::default(),
            connections: Mutex::default(),
            stops_answers: AtomicBool::new(false),
            stops_requests: AtomicBool::new(false),
            may_answer: watch::Sender::new(true),
            may_decide: watch::Sender::new(true),
            searches: AtomicU64::new(0),
            answers: AtomicU64::new(0),
            withheld_answers: AtomicU64::new(0),
            breaks: AtomicU64::new(0),
            stopped_requests: AtomicU64::new(0),
            blocked_worker: Mutex::default(),
        });
        let mut gateways = HashMap::new();
        for node in 1..=nodes {
            let mut config = GatewayConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
            config.workers = 2;
            config.insecure = insecure;
            config.temporary_directory = directory.path().to_owned();
            config.cluster = Some(Arc::new(Member { node, shared: shared.clone() }));
            let gateway = Gateway::start(config, engine.clone(), catalog.clone()).unwrap();
            shared.acceptors.lock().insert(node, gateway.relays());
            gateways.insert(node, gateway);
        }
        let cluster = TestCluster { shared, catalog, gateways, _directory: directory };
        let verifier = fulmar_gateway::scram_verifier("fulmar");
        cluster.catalog.alter_user_password("fulmar", Some(verifier)).await.unwrap();
        let admin = cluster.admin(1).await;
        admin
            .batch_execute("CREATE USER anna PASSWORD 'anna'; CREATE DATABASE shop OWNER anna")
            .await
            .unwrap();
        cluster.shared.set_owner(cluster.partition("shop"), owner);
        cluster
    }

    pub fn partition(&self, database: &str) -> PartitionId {
        self.catalog.tenant(database).unwrap().partition
    }

    /// Makes a node the owner of the database `shop`.
    pub fn move_to(&self, node: u32) {
        self.shared.set_owner(self.partition("shop"), node);
    }

    pub fn config(&self, node: u32, database: &str) -> tokio_postgres::Config {
        let mut config = tokio_postgres::Config::new();
        let port = self.gateways[&node].local_addr().port();
        config.host("127.0.0.1").port(port).dbname(database).user("anna").password("anna");
        config
    }

    /// The superuser's client of the system database.
    pub async fn admin(&self, node: u32) -> Client {
        connect(self.config(node, "fulmar").user("fulmar").password("fulmar")).await.unwrap()
    }

    /// A client that is connected to a node.
    pub async fn client(&self, node: u32, database: &str) -> Client {
        connect(&self.config(node, database)).await.unwrap()
    }

    /// Stops a node's gateway, as a shutdown does.
    pub async fn stop(&mut self, node: u32) {
        self.shared.acceptors.lock().remove(&node);
        self.gateways.remove(&node).unwrap().shutdown().await;
    }
}
