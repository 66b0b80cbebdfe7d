//! The node: its incarnation, its lease, and its parts.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fulmar_cluster::environment::{Environment, Uncertain};
use fulmar_cluster::incarnation::{self, Begun, Lease};
use fulmar_cluster::quarantine::report_crash;
use fulmar_cluster::{Incarnation, LogId, NodeId, failover, generation};
use fulmar_elastic::provisioner::Provisioner;
use fulmar_engine::{Assignments, Membership, Result as SqlResult, sqlstate};
use fulmar_gateway::events::{Event, Kind};
use fulmar_meta::{Catalog, MetadataStore, Revision};
use fulmar_pages::PartitionId;
use fulmar_store::Reliable;
use fulmar_transport::hello::{METADATA_CLIENT, VERSIONS};
use fulmar_transport::tls::NodeTls;
use fulmar_transport::{Error as TransportError, Identity, Peers, Stream};
use hashbrown::HashSet;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::collector::Collected;
use crate::control::Control;
use crate::directory::{DirectoryOwner, STAMP_FILE, StampFiles, record_deaths};
use crate::environment::{NodeEnvironment, boot_time};
use crate::logs::{StoreLogs, log_node};
use crate::messages::{self, Answer, Heartbeat, Opening, Request};
use crate::migrations::{self, Migrations};
use crate::owners::Owners;
use crate::page_servers::PageServers;
use crate::partitions::{Partitions, SessionHandler};
use crate::registration::{self, Place, Registration};
use crate::slow_nodes::{Latencies, Measurements, SlowNodes};
use crate::transaction_ids::TransactionIds;
use crate::{Error, metadata, pulse, rpc};

/// How long the first message of a stream may take.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a session that waits for the node's lease checks it. The interval doubles up to the
/// second value: while the metadata store is away, thousands of sessions may wait.
const LEASE_POLL_INTERVAL: Duration = Duration::from_millis(5);
const MAX_LEASE_POLL_INTERVAL: Duration = Duration::from_millis(80);
/// Delay after a failed request to the store, during the start.
const STORE_RETRY_DELAY: Duration = Duration::from_millis(200);
/// How long a node that was declared dead leaves its databases to the node that takes them over.
const MAX_FAILOVER_WAIT: Duration = Duration::from_secs(5);
/// How long ending the own incarnation may take at a planned stop.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// How a node takes part in its cluster.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The name of the node.
    pub name: String,
    /// Where it listens for other nodes. They must reach it at this address.
    pub rpc: SocketAddr,
    /// Where it listens for clients.
    pub sql: SocketAddr,
    /// The data directory, which this process has locked.
    pub data: PathBuf,
    /// TLS for connections between nodes. All nodes of a cluster use it, or none.
    pub tls: Option<Arc<NodeTls>>,
    /// Whether other nodes use the metadata store of this node.
    pub serves_metadata: bool,
    /// How much this node keeps of databases that were moved from its own store to other nodes.
    pub archive_bytes: u64,
    /// Where it is.
    pub place: Place,
    /// Adds nodes to the cluster and removes them, while this node is the controller.
    pub provisioner: Option<Arc<dyn Provisioner>>,
    /// The generation of this node at which an old metadata store is accepted.
    pub accepted_generation: Option<u64>,
}

/// The last heartbeat of a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heard {
    pub incarnation: Incarnation,
    pub at: Instant,
    /// Whether partitions can be given to the node.
    pub serves: bool,
    /// Whether its partitions are handed over to others.
    pub is_draining: bool,
    /// The share of its capacity that it has used in the last ten seconds or so.
    pub utilisation: f64,
    /// What it measures.
    pub latencies: Latencies,
}

/// A node of a cluster. See the crate documentation.
pub struct Node {
    name: String,
    cluster: u128,
    id: NodeId,
    /// Each node of the cluster has a store of its own.
    is_private: bool,
    archive_bytes: u64,
    place: Place,
    pub(crate) provisioner: Option<Arc<dyn Provisioner>>,
    rpc: String,
    tls: Option<Arc<NodeTls>>,
    environment: NodeEnvironment,
    pub(crate) store: Reliable,
    logs: Arc<StoreLogs>,
    metadata: Arc<dyn MetadataStore>,
    /// The metadata store, if other nodes use it.
    served_metadata: Option<Arc<dyn MetadataStore>>,
    catalog: Arc<Catalog>,
    begun: Begun,
    term: u32,
    /// Records of the metadata store up to this revision are covered by the node's generation.
    pub(crate) covered: Arc<AtomicU64>,
    /// Held while the generation is raised.
    pub(crate) raising: Arc<tokio::sync::Mutex<()>>,
    ids: TransactionIds,
    lease: Lease,
    owners: Arc<Owners>,
    migrations: Arc<Migrations>,
    control: Arc<Control>,
    /// The migrations that this node runs.
    pub(crate) running: migrations::Running,
    /// The nodes that have pages of this node's partitions.
    pub(crate) page_servers: PageServers,
    peers: Peers,
    /// The runtime of the caller, for everything except [`crate::pulse`].
    pub(crate) runtime: Handle,
    pulse: Handle,
    pub(crate) heard: Mutex<std::collections::BTreeMap<NodeId, Heard>>,
    /// The latencies of this node, and the nodes that are slower than the others.
    pub(crate) measurements: Mutex<Measurements>,
    pub(crate) slow_nodes: Mutex<SlowNodes>,
    /// What this node has done as the garbage collector.
    pub(crate) collected: Mutex<Collected>,
    /// Partitions that are being moved or dropped.
    pub(crate) moving: Mutex<HashSet<PartitionId>>,
    /// Partitions whose records are being shortened.
    pub(crate) dropping_ranges: Mutex<HashSet<PartitionId>>,
    partitions: OnceLock<Arc<dyn Partitions>>,
    sessions: OnceLock<SessionHandler>,
    /// Why the incarnation was fenced.
    fenced: watch::Sender<Option<String>>,
    /// The partitions of this node are handed over to others.
    pub(crate) is_draining: AtomicBool,
}

impl Node {
    /// Begins the next incarnation of a registered node: checks the data directory, seals the
    /// previous incarnation's log, and starts to renew the lease and to answer heartbeats.
    pub async fn join(
        options: NodeOptions,
        registration: Registration,
        listener: TcpListener,
        metadata: Arc<dyn MetadataStore>,
        catalog: Arc<Catalog>,
        store: Reliable,
    ) -> Result<Arc<Node>, Error> {
        let Registration { cluster, node: id, is_private, .. } = registration;
        check_directory(&options, cluster)?;
        let logs = Arc::new(StoreLogs::new(store.clone(), cluster));
        let directory = Arc::new(StampFiles::new(&options.data));
        let environment = NodeEnvironment::new(metadata.clone(), logs.clone(), directory);
        let owners = Arc::new(Owners::default());
        let migrations = Arc::new(Migrations::default());
        let control = Arc::new(Control::default());
        let following = async {
            metadata.follow(owners.clone()).await?;
            metadata.follow(migrations.clone()).await?;
            metadata.follow(control.clone()).await.map_err(Error::from)
        };
        // A term that is taken and not used costs nothing.
        let (covered, (), term) = tokio::try_join!(
            check_not_restored(&environment, id, options.accepted_generation),
            following,
            registration::next_term(&*metadata)
        )?;
        check_peers(&options, id, cluster, &owners).await?;
        owners.wait_for_failover(id, MAX_FAILOVER_WAIT).await;
        let begun = incarnation::begin(&environment, id, rand::random()).await?;
        DirectoryOwner::new(cluster, &options.name).write(&options.data)?;
        let ids = TransactionIds::reserve(&environment, id, &begun).await?;
        report_crash(&environment, id).await?;
        record_deaths(&options.data, begun.incarnation);
        let (rpc, sql) = (options.rpc.to_string(), options.sql.to_string());
        let identity = Identity { cluster, node: id.0, incarnation: begun.incarnation, versions: VERSIONS };
        let (runtime, pulse) = (Handle::current(), pulse::start()?);
        let peering = rpc::Peering::new(identity, options.tls.clone(), owners.clone());
        let dial = rpc::TcpDial { peering: peering.clone(), runtime: pulse.clone() };
        let node = Arc::new(Node {
            name: options.name,
            cluster,
            id,
            is_private,
            archive_bytes: options.archive_bytes,
            place: options.place,
            provisioner: options.provisioner,
            rpc,
            tls: options.tls,
            environment,
            store,
            logs,
            served_metadata: options.serves_metadata.then(|| metadata.clone()),
            metadata,
            catalog,
            begun,
            term,
            covered: Arc::new(AtomicU64::new(covered.0)),
            raising: Arc::default(),
            ids,
            lease: Lease::default(),
            owners,
            migrations,
            control,
            running: migrations::Running::default(),
            page_servers: PageServers::default(),
            peers: Peers::new(dial),
            runtime,
            pulse: pulse.clone(),
            heard: Mutex::default(),
            measurements: Mutex::default(),
            slow_nodes: Mutex::default(),
            collected: Mutex::default(),
            moving: Mutex::default(),
            dropping_ranges: Mutex::default(),
            partitions: OnceLock::new(),
            sessions: OnceLock::new(),
            fenced: watch::Sender::new(None),
            is_draining: AtomicBool::new(false),
        });
        pulse.spawn(node.clone().keep_lease());
        tokio::spawn(node.clone().reserve_ids());
        let serving = node.clone();
        let serve = Arc::new(move |peer, stream| {
            serving.pulse.spawn(serving.clone().serve_stream(peer, stream));
        });
        rpc::spawn_accept(&pulse, listener, peering, serve)?;
        // Nothing uses the term before this function returns.
        tokio::try_join!(
            registration::record_term(&*node.metadata, term, id, node.incarnation()),
            registration::publish_addresses(&*node.metadata, &node.name, (&node.rpc, &sql), &node.place)
        )?;
        tracing::info!(
            node = node.name,
            id = id.0,
            incarnation = node.incarnation(),
            cluster = format!("{cluster:032x}"),
            "joined the cluster"
        );
        Ok(node)
    }

    /// TLS for connections between nodes, to reload its certificates.
    pub fn tls(&self) -> Option<Arc<NodeTls>> {
        self.tls.clone()
    }

    /// The engine's part of the cluster.
    pub fn membership(self: &Arc<Self>) -> Membership {
        Membership {
            log_node: log_node(self.cluster, self.id),
            incarnation: self.incarnation(),
            term: self.term,
            node: self.id.0,
            ids: self.ids.reservation(),
            has_common_store: !self.is_private,
            assignments: self.clone() as Arc<dyn Assignments>,
        }
    }

    /// Serves partitions and sessions, watches the other nodes, and fails over those that die.
    pub fn serve(self: &Arc<Self>, partitions: Arc<dyn Partitions>, sessions: SessionHandler) {
        let _ = self.partitions.set(partitions.clone());
        let _ = self.sessions.set(sessions);
        let node = self.clone();
        match self.is_private {
            true => {
                tokio::spawn(self.clone().pull_partitions());
                tokio::spawn(self.clone().keep_archives())
            }
            false => tokio::spawn(self.clone().collect_garbage(partitions.clone())),
        };
        tokio::spawn(self.clone().control_cluster(partitions.clone()));
        tokio::spawn(self.clone().watch_latencies(partitions.clone()));
        tokio::spawn(self.clone().report_damaged_logs(partitions.clone()));
        tokio::spawn(async move {
            partitions.fenced().await;
            node.fence("its log was sealed by another node");
        });
        self.pulse.spawn(self.clone().detect());
        tokio::spawn(self.clone().close_quarantined());
        tokio::spawn(self.clone().run_migrations());
    }

    /// Completes when this incarnation was fenced, with the reason. The process must start again.
    pub async fn fenced(&self) -> String {
        let mut fenced = self.fenced.subscribe();
        match fenced.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            // The sender is part of this node.
            Err(_) => std::future::pending().await,
        }
    }

    pub(crate) fn fence(&self, reason: &str) {
        self.fenced.send_if_modified(|fenced| {
            let is_first = fenced.is_none();
            fenced.get_or_insert_with(|| reason.to_owned());
            is_first
        });
    }

    /// Ends this incarnation, at a planned stop: other nodes need not wait until they miss its
    /// heartbeats. Call it when nothing is served any more.
    pub async fn leave(&self) {
        let ending = async {
            // Covers users and privileges, too. Commits are covered without it.
            let _ = self.cover(Revision(u64::MAX)).await;
            failover::end(&self.environment, self.id, self.incarnation()).await
        };
        match timeout(LEAVE_TIMEOUT, ending).await {
            Ok(Ok(_)) => tracing::info!(node = self.name, "left the cluster"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot record the stop of this node"),
            Err(_) => tracing::warn!(
                "the metadata store or the store did not answer; other nodes will miss this node's heartbeats"
            ),
        }
    }

    /// Records damaged objects of logs in the event log.
    async fn report_damaged_logs(self: Arc<Self>, partitions: Arc<dyn Partitions>) {
        let mut damaged = self.logs.damaged();
        loop {
            if let Some(error) = damaged.borrow_and_update().clone() {
                partitions.record(Event::new(Kind::NodeLogDamaged).detail("error", error));
            }
            if damaged.changed().await.is_err() {
                return;
            }
        }
    }

    async fn keep_lease(self: Arc<Self>) {
        let error = self.lease.keep(&self.environment, self.id, &self.begun).await;
        self.fence(&error.to_string());
    }

    /// Reserves transaction ids while this incarnation lives.
    async fn reserve_ids(self: Arc<Self>) {
        let error = self.ids.keep(&self.environment, self.id, &self.begun).await;
        self.fence(&error.to_string());
    }

    /// Returns true if this node may answer: its lease is valid.
    pub fn has_lease(&self) -> bool {
        self.lease.is_valid(boot_time()) && self.fenced.borrow().is_none()
    }

    /// Waits until this node may answer. Fails if it was fenced.
    pub(crate) async fn wait_for_lease(&self) -> SqlResult<()> {
        let mut pause = LEASE_POLL_INTERVAL;
        loop {
            if let Some(reason) = &*self.fenced.borrow() {
                return Err(fulmar_engine::Error::new(
                    sqlstate::CANNOT_CONNECT_NOW,
                    format!("node \"{}\" was fenced: {reason}", self.name),
                )
                .hint("Retry: the node is restarting."));
            }
            if self.has_lease() {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_LEASE_POLL_INTERVAL);
        }
    }

    /// The id of the node.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// The name of the node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether each node of the cluster has a store of its own.
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// How much this node keeps of databases that were moved to other nodes.
    pub(crate) fn archive_bytes(&self) -> u64 {
        self.archive_bytes
    }

    /// Where this node is.
    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    /// The id of the cluster.
    pub fn cluster_id(&self) -> u128 {
        self.cluster
    }

    /// The incarnation.
    pub fn incarnation(&self) -> Incarnation {
        self.begun.incarnation
    }

    /// The owners of partitions, in memory.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    /// The migrations of all partitions, in memory.
    pub(crate) fn migrations(&self) -> &Migrations {
        &self.migrations
    }

    /// The controller's records, in memory.
    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    pub(crate) fn begun(&self) -> &Begun {
        &self.begun
    }

    pub(crate) fn environment(&self) -> &NodeEnvironment {
        &self.environment
    }

    pub(crate) fn metadata(&self) -> &Arc<dyn MetadataStore> {
        &self.metadata
    }

    pub(crate) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    pub(crate) fn rpc_address(&self) -> &str {
        &self.rpc
    }

    pub(crate) fn partitions(&self) -> SqlResult<&Arc<dyn Partitions>> {
        self.partitions.get().ok_or_else(|| {
            let text = format!("node \"{}\" is starting", self.name);
            fulmar_engine::Error::new(sqlstate::CANNOT_CONNECT_NOW, text).hint("Retry.")
        })
    }

    /// Opens a stream to a node.
    pub(crate) async fn open_stream(
        &self,
        node: NodeId,
        opening: &Opening,
    ) -> Result<Stream, TransportError> {
        let address = match node == self.id {
            true => self.rpc.clone(),
            false => self.owners.node(node).map(|known| known.rpc).unwrap_or_default(),
        };
        if address.is_empty() {
            return Err(TransportError::Refused(format!("node {node} has not started yet")));
        }
        let mut stream = self.peers.connection(node.0, &address).await?.open()?;
        stream.send(&messages::encode(opening)).await?;
        Ok(stream)
    }

    /// Closes the connection to a node.
    pub(crate) fn disconnect(&self, node: NodeId) {
        self.peers.disconnect(node.0);
    }

    /// Sends a request to a node. `Ok(Err(..))` is the node's error.
    pub(crate) async fn call(
        &self,
        node: NodeId,
        request: Request,
    ) -> Result<SqlResult<Answer>, TransportError> {
        let mut stream = self.open_stream(node, &Opening::Control { request }).await?;
        let answer = stream.receive().await?.ok_or(TransportError::Protocol("a request got no answer"))?;
        let answer = messages::decode::<Answer>(&answer).map_err(TransportError::Refused)?;
        Ok(answer.into_result())
    }

    /// Serves a stream of another node. Everything but heartbeats continues on the caller's runtime.
    async fn serve_stream(self: Arc<Self>, peer: u32, mut stream: Stream) {
        let Ok(Ok(Some(opening))) = timeout(OPENING_TIMEOUT, stream.receive()).await else { return };
        match messages::decode::<Opening>(&opening) {
            Ok(Opening::Heartbeat) if peer != METADATA_CLIENT => self.answer_heartbeats(stream).await,
            Ok(opening) => drop(self.runtime.clone().spawn(self.serve_opened(peer, opening, stream))),
            Err(error) => stream.reset(&error),
        }
    }

    async fn serve_opened(self: Arc<Self>, peer: u32, opening: Opening, mut stream: Stream) {
        match opening {
            Opening::Metadata => match &self.served_metadata {
                Some(store) => metadata::server::serve(store.clone(), stream).await,
                None => metadata::server::refuse(&self.name, stream).await,
            },
            _ if peer == METADATA_CLIENT => stream.reset("the caller is not a node of the cluster"),
            Opening::Session => match self.sessions.get() {
                Some(serve) => serve(stream),
                None => stream.reset("the node is starting"),
            },
            Opening::Heartbeat => self.answer_heartbeats(stream).await,
            Opening::Copy { copy } => self.receive_copy(copy, stream).await,
            Opening::Snapshots { snapshots } => self.receive_snapshots(snapshots, stream).await,
            Opening::Segment { segment } => self.send_segment(segment, stream).await,
            Opening::Control { request } => {
                let answer = Answer::of(self.carry_out(request).await);
                // If the caller is gone, it asks again.
                if stream.send(&messages::encode(&answer)).await.is_ok() {
                    stream.finish();
                    // Dropping the stream before the caller has finished would reset it.
                    let _ = timeout(OPENING_TIMEOUT, stream.receive()).await;
                }
            }
        }
    }

    /// Returns true if partitions can be given to this node.
    pub(crate) fn serves(&self) -> bool {
        self.sessions.get().is_some() && !self.is_draining.load(Ordering::Relaxed)
    }

    async fn answer_heartbeats(&self, mut stream: Stream) {
        while let Ok(Some(_)) = stream.receive().await {
            let heartbeat = Heartbeat {
                incarnation: self.incarnation(),
                is_valid: self.has_lease(),
                serves: self.serves(),
                is_draining: self.is_draining.load(Ordering::Relaxed),
                utilisation: self.own_utilisation(),
                latencies: self.measurements.lock().latencies(Instant::now()),
            };
            if stream.send(&messages::encode(&heartbeat)).await.is_err() {
                return;
            }
        }
    }
}

/// Refuses a metadata store that was restored from an old backup. Returns the revision up to which the
/// node's generation covers records.
///
/// The backup has a lower generation than the data directory, or does not know the node's newest
/// incarnation. A log of a later incarnation than the node's record names shows that: the record is
/// written first.
async fn check_not_restored(
    environment: &NodeEnvironment,
    id: NodeId,
    accepted_generation: Option<u64>,
) -> Result<Revision, Error> {
    let covered = generation::check(environment, id, accepted_generation).await?;
    let read = fulmar_cluster::metadata::node(environment, id).await?;
    let known = read.map_or(0, |read| read.record.incarnation);
    loop {
        match environment.logs().list(LogId::shared(id, known + 1)).await {
            Ok(slots) if slots.is_empty() => return Ok(covered),
            Ok(_) => return Err(Error::Restored { node: id, known }),
            Err(Uncertain) => tokio::time::sleep(STORE_RETRY_DELAY).await,
        }
    }
}

/// Refuses to join if another process runs as this node, or if the nodes that live refuse this one:
/// it has a wrong certificate or another protocol version. It could not hear the others, and would
/// fail them over. If at least one accepts it, the fault is with the others.
async fn check_peers(options: &NodeOptions, id: NodeId, cluster: u128, owners: &Owners) -> Result<(), Error> {
    let own = options.rpc.to_string();
    // A process at the own address has ended: this one listens there.
    let nodes = owners.nodes().into_iter().filter(|known| !known.rpc.is_empty() && known.rpc != own);
    let alive: Vec<_> = nodes.filter_map(|known| Some((known.alive()?, known))).collect();
    let ask = |(incarnation, known): &(_, crate::owners::KnownNode)| {
        let (incarnation, known, tls) = (*incarnation, known.clone(), options.tls.clone());
        async move {
            let answer = rpc::introduce(&known.rpc, &known.name, cluster, tls.as_deref()).await;
            (incarnation, known, answer)
        }
    };
    let (mut accepted, mut rejected) = (false, None);
    for (incarnation, known, answer) in futures::future::join_all(alive.iter().map(ask)).await {
        let (name, address) = (known.name, known.rpc);
        match answer {
            Ok(Some(peer)) if known.id == id && (peer.node, peer.incarnation) == (id.0, incarnation) => {
                return Err(Error::Running { name, address });
            }
            Ok(answer) => accepted |= answer.is_some_and(|peer| peer.node != id.0),
            Err(_) if known.id == id => {}
            Err(error) => rejected = Some(Error::Rejected { name, address, cause: error.to_string() }),
        }
    }
    rejected.filter(|_| !accepted).map_or(Ok(()), Err)
}

/// Refuses a data directory that belongs to another node or cluster, or has lost its stamp.
fn check_directory(options: &NodeOptions, cluster: u128) -> Result<(), Error> {
    let expected = DirectoryOwner::new(cluster, &options.name);
    match DirectoryOwner::read(&options.data)? {
        Some(found) if found != expected => {
            let (name, data) = (&found.name, options.data.display());
            Err(Error::WrongDirectory(match found.cluster == expected.cluster {
                true => format!(
                    "{data} is the data directory of node \"{name}\"; start with --node {name}, or use another \
                     --data"
                ),
                false => format!(
                    "{data} belongs to node \"{name}\" of cluster {}, but --meta names cluster {}; use the \
                     cluster's own --meta, or another --data",
                    found.cluster, expected.cluster
                ),
            }))
        }
        // The stamp is written first.
        Some(_) if !options.data.join(STAMP_FILE).exists() => Err(Error::WrongDirectory(format!(
            "{} is missing; restore it from a backup of this data directory that was made since the node's last \
             start, or run \"fulmar node forget\" and start the node with an empty --data",
            options.data.join(STAMP_FILE).display()
        ))),
        _ => Ok(()),
    }
}
