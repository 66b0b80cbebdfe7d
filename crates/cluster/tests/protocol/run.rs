//! One simulation run: a cluster, its clients and its faults, all derived from a seed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::records::{encode, owner_key};
use fulmar_cluster::{LogKind, PartitionRecord, Position, Rules, metadata};
use fulmar_meta::{MetadataStore, Transaction};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Network, Process, Simulation};
use parking_lot::Mutex;

use crate::checker;
use crate::cluster::Cluster;
use crate::faults::NO_NETWORK_FAULTS;
use crate::gateway::{Gateway, History};
use crate::node;
use crate::violation::{Kind, Violation};
use crate::world::{ClockError, Env, World};

const NODES: u32 = 3;
const GATEWAYS: u32 = 2;
/// Clients of each gateway.
const CLIENTS: u32 = 3;
/// The last one is private; the one before changes its durability.
pub const PARTITIONS: u64 = 4;
/// Faults happen up to this time.
const FAULTS_END: Duration = Duration::from_secs(10);
/// By this time every partition must have been read.
const END: Duration = Duration::from_secs(50);
/// Machines of gateways have numbers above those of nodes.
const FIRST_GATEWAY: u32 = 100;

/// The partitions in the common store.
pub fn common_partitions() -> Vec<PartitionId> {
    (1..PARTITIONS).map(PartitionId).collect()
}

/// The partitions whose pages only their owner has.
pub fn private_partitions() -> Vec<PartitionId> {
    vec![PartitionId(PARTITIONS)]
}

pub fn is_private(partition: PartitionId) -> bool {
    partition.0 == PARTITIONS
}

/// What happens in a run besides transactions, moves and failovers.
#[derive(Clone, Copy, Debug)]
pub struct Features {
    pub collection: bool,
    pub exports: bool,
    pub durability: bool,
    pub migrations: bool,
    pub poison: bool,
    /// Reads of few partitions, and only faults after which reads may be stale.
    pub is_hot: bool,
    /// How much more often partitions move and objects are deleted than usual.
    pub pace: u64,
}

impl Features {
    pub const NONE: Features = Features {
        collection: false,
        exports: false,
        durability: false,
        migrations: false,
        poison: false,
        is_hot: false,
        pace: 1,
    };

    /// A random selection, which also shows what happens without the others.
    fn random(simulation: &Simulation) -> Features {
        let is_on = || simulation.chance(2, 3);
        let collection = is_on();
        Features {
            collection,
            exports: collection && is_on(),
            durability: is_on(),
            migrations: is_on(),
            poison: simulation.chance(1, 3),
            is_hot: simulation.chance(1, 8),
            pace: if simulation.chance(1, 8) { 4 } else { 1 },
        }
    }
}

/// How to run a seed.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub rules: Rules,
    /// `None`: chosen by the seed.
    pub features: Option<Features>,
    pub clocks: ClockError,
    pub trace: bool,
}

impl Options {
    pub const DEFAULT: Options =
        Options { rules: Rules::ALL, features: None, clocks: ClockError::Tolerated, trace: false };
}

/// Counts of events in one or more runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub operations: usize,
    pub failovers: usize,
    pub moves: usize,
    pub fenced: usize,
    pub refused: usize,
    pub migrations: usize,
    pub durability_changes: usize,
    pub collected: usize,
    pub truncated: usize,
    pub exports: usize,
    pub killed: usize,
    pub quarantines: usize,
    pub polls: u64,
}

impl Totals {
    pub fn add(&mut self, other: &Totals) {
        self.operations += other.operations;
        self.failovers += other.failovers;
        self.moves += other.moves;
        self.fenced += other.fenced;
        self.refused += other.refused;
        self.migrations += other.migrations;
        self.durability_changes += other.durability_changes;
        self.collected += other.collected;
        self.truncated += other.truncated;
        self.exports += other.exports;
        self.killed += other.killed;
        self.quarantines += other.quarantines;
        self.polls += other.polls;
    }

    /// Events that a series of runs must have caused, because it tests nothing otherwise.
    pub fn missing(&self) -> Vec<&'static str> {
        let counts = [
            (self.operations, "operations"),
            (self.failovers, "failovers"),
            (self.moves, "moves"),
            (self.fenced, "fenced nodes"),
            (self.refused, "refused data directories"),
            (self.migrations, "migrations"),
            (self.durability_changes, "changes of durability"),
            (self.collected, "collected objects"),
            (self.truncated, "deleted objects of ended logs"),
            (self.exports, "exports"),
            (self.killed, "killed nodes"),
            (self.quarantines, "quarantines"),
        ];
        counts.iter().filter(|(count, _)| *count == 0).map(|(_, name)| *name).collect()
    }
}

pub struct Outcome {
    pub violations: Vec<Violation>,
    pub trace: Vec<String>,
    pub totals: Totals,
}

/// What the end of a run needs.
#[derive(Clone, Default)]
struct Results {
    history: History,
    finished_clients: Arc<Mutex<u32>>,
    /// The final contents.
    last: Arc<Mutex<BTreeMap<PartitionId, Vec<u64>>>>,
    is_over: Arc<Mutex<bool>>,
}

/// Runs a cluster from this seed.
pub fn run(seed: u64, options: &Options) -> Outcome {
    let simulation = Simulation::new(seed, options.trace);
    let features = options.features.unwrap_or_else(|| Features::random(&simulation));
    simulation.note(|| format!("{features:?}"));
    let world = World::new(&simulation, options.rules);
    let network = Network::new(&simulation, NO_NETWORK_FAULTS);
    let cluster = Cluster::new(&world, &network, NODES, features, options.clocks);
    let results = Results::default();
    simulation.spawn(Simulation::WORLD, start(cluster.clone(), results.clone()));
    let is_over = results.is_over.clone();
    simulation.run(END, || *is_over.lock());
    let history = results.history.lock();
    let mut violations = world.violations();
    for partition in (1..=PARTITIONS).map(PartitionId) {
        match results.last.lock().get(&partition) {
            Some(last) => violations.extend(checker::check(partition, last, &history)),
            None => violations.push(Violation {
                kind: Kind::NoOwner,
                text: format!("partition {partition} has no owner that answers"),
            }),
        }
    }
    let mut trace = simulation.trace();
    if options.trace {
        trace.extend(world.describe());
    }
    let operations = history.iter().filter(|operation| operation.ended.is_some()).count();
    let totals = Totals { operations, polls: simulation.polls(), ..*cluster.totals.lock() };
    simulation.clear();
    network.clear();
    Outcome { violations, trace, totals }
}

/// Creates the partitions and starts the nodes, the faults and the clients.
async fn start(cluster: Cluster, results: Results) {
    let simulation = cluster.simulation().clone();
    let world_env = Env::without_node(&cluster.world, Simulation::WORLD);
    let partitions: Vec<PartitionId> = (1..=PARTITIONS).map(PartitionId).collect();
    for partition in &partitions {
        let log = if is_private(*partition) { LogKind::Local } else { LogKind::Shared };
        let record = PartitionRecord::new(cluster.random_node(), log, Position { incarnation: 1, slot: 0 });
        let create = Transaction::new().put(owner_key(*partition), encode(&record).unwrap());
        world_env.transact(create).await.unwrap();
    }
    for node in cluster.processes.nodes() {
        cluster.start(node);
    }
    simulation.spawn(Simulation::WORLD, cluster.clone().inject_faults(FAULTS_END));
    if cluster.features.poison {
        simulation.spawn(Simulation::WORLD, cluster.clone().resume_quarantined());
    }
    for number in 1..=GATEWAYS {
        let process = Process { machine: FIRST_GATEWAY + number, run: 1 };
        let gateway = Gateway {
            number,
            env: Env::without_node(&cluster.world, process),
            network: cluster.network.clone(),
            processes: cluster.processes.clone(),
            features: cluster.features,
            history: results.history.clone(),
            transactions: Arc::default(),
            routes: Arc::default(),
        };
        for client in 0..CLIENTS {
            // One client is mostly idle: it knows where partitions were some time ago.
            let think_time = Duration::from_millis(if client == 0 { 6000 } else { 60 });
            let client = Gateway { routes: Arc::default(), ..gateway.clone() };
            let (partitions, finished) = (partitions.clone(), results.finished_clients.clone());
            simulation.spawn(process, async move {
                client.client(partitions, think_time, FAULTS_END).await;
                *finished.lock() += 1;
            });
        }
        if number == 1 {
            simulation.spawn(process, finish(cluster.clone(), gateway, results.clone()));
        }
    }
}

/// Reads all partitions when the faults have ended and the clients have finished, and checks that
/// the stores alone contain as much.
async fn finish(cluster: Cluster, gateway: Gateway, results: Results) {
    let simulation = cluster.simulation();
    while *results.finished_clients.lock() < GATEWAYS * CLIENTS || simulation.now() < FAULTS_END {
        simulation.sleep(Duration::from_millis(50)).await;
    }
    for partition in (1..=PARTITIONS).map(PartitionId) {
        let list = gateway.read(partition).await;
        check_stores(&cluster, &gateway, partition, &list).await;
        results.last.lock().insert(partition, list);
    }
    *results.is_over.lock() = true;
}

/// Recovers a partition from the stores, as a new owner would, and compares it with what was read.
async fn check_stores(cluster: &Cluster, gateway: &Gateway, partition: PartitionId, list: &[u64]) {
    let world_env = Env::without_node(&cluster.world, Simulation::WORLD);
    // Its owner may change it meanwhile. Only what was needed throughout must have been there.
    for _ in 0..20 {
        let read = metadata::partition(&world_env, partition).await.unwrap().unwrap();
        let owner = read.record.owner;
        let node = metadata::node(&world_env, owner).await.unwrap().unwrap();
        let env = Env { process: Simulation::WORLD, ..cluster.env(owner, Simulation::WORLD) };
        let end = Position { incarnation: node.record.incarnation + 1, slot: 0 };
        let loaded = node::load(&env, partition, &read.record, end).await;
        let now = metadata::partition(&world_env, partition).await.unwrap().unwrap();
        let is_same_node =
            metadata::node(&world_env, owner).await.unwrap().is_some_and(|now| now.revision == node.revision);
        if read.record.page_server.is_some() {
            // The owner pulls the pages when it opens the partition.
            gateway.read(partition).await;
            continue;
        }
        if now.revision != read.revision || !is_same_node {
            env.sleep(Duration::from_millis(100)).await;
            continue;
        }
        match loaded {
            // A slot of a commit that is not acknowledged may be missing.
            Err((Kind::MissingLog, _)) => {
                env.sleep(Duration::from_millis(100)).await;
                continue;
            }
            Err((kind, text)) => cluster.world.violation(kind, format!("at the end, {text}")),
            Ok(loaded) if !loaded.state.values_at(loaded.state.version()).starts_with(list) => {
                let text = format!("partition {partition}: the stores lack commits that were read");
                cluster.world.violation(Kind::Lost, text);
            }
            Ok(_) => {}
        }
        return;
    }
    let text = format!("partition {partition} cannot be recovered from the stores");
    cluster.world.violation(Kind::MissingLog, text);
}
