//! One simulation run: a cluster, its clients and its faults, all derived from a seed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::records::{encode, owner_key};
use fulmar_cluster::{NodeId, PartitionRecord, Position, Rules};
use fulmar_meta::{MetadataStore, Transaction};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Network, NetworkFaults, Process, Simulation};
use parking_lot::Mutex;

use crate::checker;
use crate::gateway::{Gateway, History};
use crate::node::{Node, Reports, Request};
use crate::world::{Env, StoreFaults, World};

const NODES: u32 = 3;
const GATEWAYS: u32 = 2;
/// Clients of each gateway.
const CLIENTS: u32 = 3;
const PARTITIONS: u64 = 4;
/// Faults happen up to this time.
const FAULTS_END: Duration = Duration::from_secs(20);
/// By this time every partition must have been read.
const END: Duration = Duration::from_secs(60);

/// Counts of events in one or more runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub operations: usize,
    pub failovers: usize,
    pub moves: usize,
    pub fenced: usize,
}

impl Totals {
    pub fn add(&mut self, other: &Totals) {
        self.operations += other.operations;
        self.failovers += other.failovers;
        self.moves += other.moves;
        self.fenced += other.fenced;
    }
}

pub struct Outcome {
    pub violations: Vec<String>,
    pub trace: Vec<String>,
    pub totals: Totals,
}

/// A running cluster.
#[derive(Clone)]
struct Cluster {
    simulation: Simulation,
    world: World,
    network: Network<Request, crate::node::Answer>,
    nodes: Arc<Vec<(NodeId, Arc<Mutex<Process>>)>>,
    next_process: Arc<Mutex<u32>>,
    reports: Reports,
    fenced: Arc<Mutex<usize>>,
}

impl Cluster {
    fn start(&self, node: NodeId) {
        let process = {
            let mut next = self.next_process.lock();
            *next += 1;
            Process(*next)
        };
        let mine = self.nodes.iter().find(|(id, _)| *id == node).unwrap();
        *mine.1.lock() = process;
        let env = Env { world: self.world.clone(), process };
        let peers = self.nodes.iter().filter(|(id, _)| *id != node).cloned().collect();
        let run = Node::run(node, env, self.network.clone(), peers, self.reports.clone());
        self.simulation.spawn(process, run);
    }

    fn process(&self, node: NodeId) -> Process {
        *self.nodes.iter().find(|(id, _)| *id == node).unwrap().1.lock()
    }

    async fn restart(&self, node: NodeId, after: Duration) {
        let process = self.process(node);
        self.simulation.note(|| format!("node {node}: killed ({process:?})"));
        self.network.close(process);
        self.simulation.kill(process);
        self.simulation.sleep(after).await;
        if self.process(node) == process {
            self.start(node);
        }
    }

    /// Stops fenced processes and restarts their nodes.
    async fn supervise(self) {
        loop {
            let fenced = std::mem::take(&mut *self.reports.fenced.lock());
            for process in fenced {
                let node =
                    self.nodes.iter().find(|(_, current)| *current.lock() == process).map(|(node, _)| *node);
                if let Some(node) = node {
                    *self.fenced.lock() += 1;
                    let cluster = self.clone();
                    let after = self.simulation.delay(Duration::from_millis(50), Duration::from_millis(1500));
                    self.simulation
                        .spawn(Simulation::WORLD, async move { cluster.restart(node, after).await });
                }
            }
            self.simulation.sleep(Duration::from_millis(10)).await;
        }
    }

    fn random_node(&self) -> NodeId {
        NodeId(1 + self.simulation.below(u64::from(NODES)) as u32)
    }

    /// Injects one fault after another until [`FAULTS_END`].
    async fn inject_faults(self) {
        let simulation = &self.simulation;
        while simulation.now() < FAULTS_END {
            simulation.sleep(simulation.delay(Duration::from_millis(50), Duration::from_millis(1500))).await;
            let (cluster, node) = (self.clone(), self.random_node());
            let short = simulation.delay(Duration::from_millis(20), Duration::from_millis(9000));
            match simulation.below(9) {
                0 | 1 => {
                    let after = simulation.delay(Duration::from_millis(20), Duration::from_millis(5000));
                    simulation.spawn(Simulation::WORLD, async move { cluster.restart(node, after).await });
                }
                2 => {
                    let process = self.process(node);
                    simulation.note(|| format!("node {node}: paused for {short:?}"));
                    simulation.pause(process);
                    simulation.spawn(Simulation::WORLD, async move {
                        cluster.simulation.sleep(short).await;
                        cluster.simulation.resume(process);
                    });
                }
                3 => {
                    let process = self.process(node);
                    simulation.note(|| format!("node {node}: cut off from the stores for {short:?}"));
                    self.world.cut(process, true);
                    simulation.spawn(Simulation::WORLD, async move {
                        cluster.simulation.sleep(short).await;
                        cluster.world.cut(process, false);
                    });
                }
                4 => {
                    let (from, to) = (self.process(node), self.process(self.random_node()));
                    simulation.note(|| format!("cut from {from:?} to {to:?} for {short:?}"));
                    self.network.cut(from, to);
                    if simulation.chance(1, 2) {
                        self.network.cut(to, from);
                    }
                    simulation.spawn(Simulation::WORLD, async move {
                        cluster.simulation.sleep(short).await;
                        cluster.network.heal();
                    });
                }
                5 => {
                    let faults = StoreFaults {
                        lost_per_mille: simulation.below(80),
                        late_per_mille: simulation.below(80),
                        max_delay: simulation.delay(Duration::from_millis(5), Duration::from_millis(200)),
                        ..StoreFaults::NONE
                    };
                    self.world.set_faults(faults);
                }
                6 => {
                    self.network.set_faults(NetworkFaults {
                        lost_per_mille: simulation.below(80),
                        doubled_per_mille: simulation.below(80),
                        max_delay: simulation.delay(Duration::from_millis(1), Duration::from_millis(900)),
                        ..NO_FAULTS
                    });
                }
                7 => {
                    // Cut off from the other nodes first, then from the stores. Clients can still
                    // reach it.
                    let process = self.process(node);
                    let later = simulation.delay(Duration::ZERO, Duration::from_millis(1300));
                    simulation.note(|| format!("node {node}: isolated for {short:?}"));
                    for (other, _) in self.nodes.iter().filter(|(other, _)| *other != node) {
                        let other = self.process(*other);
                        self.network.cut(process, other);
                        self.network.cut(other, process);
                    }
                    simulation.spawn(Simulation::WORLD, async move {
                        cluster.simulation.sleep(later).await;
                        cluster.world.cut(process, true);
                        cluster.simulation.sleep(short).await;
                        cluster.world.cut(process, false);
                        cluster.network.heal();
                    });
                }
                _ => self.move_random(),
            }
            for _ in 0..simulation.below(3) {
                self.move_random();
            }
        }
        // The faults end: the cluster must recover.
        self.network.heal();
        self.network.set_faults(NO_FAULTS);
        self.world.set_faults(StoreFaults::NONE);
    }

    fn move_random(&self) {
        let (cluster, to) = (self.clone(), self.random_node());
        let partition = PartitionId(1 + self.simulation.below(PARTITIONS));
        self.simulation.spawn(Simulation::WORLD, async move {
            // Every node is asked; only the owner moves the partition.
            for (_, process) in cluster.nodes.iter() {
                let process = *process.lock();
                let request = Request::Move { partition, to };
                cluster.network.call(Simulation::WORLD, process, request, Duration::from_secs(1)).await;
            }
        });
    }
}

const NO_FAULTS: NetworkFaults = NetworkFaults {
    delay: Duration::from_micros(200),
    max_delay: Duration::from_millis(1),
    lost_per_mille: 0,
    doubled_per_mille: 0,
};

/// Runs a cluster from this seed under these rules.
pub fn run(seed: u64, rules: Rules, trace: bool) -> Outcome {
    let simulation = Simulation::new(seed, trace);
    let world = World::new(&simulation, rules);
    let network = Network::new(&simulation, NO_FAULTS);
    let nodes = (1..=NODES).map(|node| (NodeId(node), Arc::new(Mutex::new(Process(node))))).collect();
    let cluster = Cluster {
        simulation: simulation.clone(),
        world: world.clone(),
        network: network.clone(),
        nodes: Arc::new(nodes),
        next_process: Arc::new(Mutex::new(1000)),
        reports: Reports::default(),
        fenced: Arc::default(),
    };
    let history = History::default();
    let last: Arc<Mutex<BTreeMap<PartitionId, Vec<u64>>>> = Arc::default();
    let (starting, world_env) = (cluster.clone(), Env { world: world.clone(), process: Simulation::WORLD });
    let (histories, lasts) = (history.clone(), last.clone());
    simulation.spawn(Simulation::WORLD, async move {
        let partitions: Vec<PartitionId> = (1..=PARTITIONS).map(PartitionId).collect();
        for partition in &partitions {
            let owner = starting.random_node();
            let record = PartitionRecord::new(owner, Position { incarnation: 1, slot: 0 });
            let create = Transaction::new().put(owner_key(*partition), encode(&record).unwrap());
            world_env.transact(create).await.unwrap();
        }
        for (node, _) in starting.nodes.iter() {
            starting.start(*node);
        }
        let simulation = starting.simulation.clone();
        simulation.spawn(Simulation::WORLD, starting.clone().supervise());
        simulation.spawn(Simulation::WORLD, starting.clone().inject_faults());
        let finished: Arc<Mutex<u32>> = Arc::default();
        for number in 1..=GATEWAYS {
            let process = Process(100 + number);
            let gateway = Gateway {
                number,
                env: Env { world: starting.world.clone(), process },
                network: starting.network.clone(),
                processes: starting.nodes.clone(),
                history: histories.clone(),
                transactions: Arc::default(),
                routes: Arc::default(),
            };
            for _ in 0..CLIENTS {
                let client = Gateway { routes: Arc::default(), ..gateway.clone() };
                let (partitions, finished) = (partitions.clone(), finished.clone());
                simulation.spawn(process, async move {
                    client.client(partitions, FAULTS_END).await;
                    *finished.lock() += 1;
                });
            }
            if number == 1 {
                let lasts = lasts.clone();
                let (partitions, finished) = (partitions.clone(), finished.clone());
                simulation.spawn(process, async move {
                    let simulation = &gateway.env.world.simulation;
                    while *finished.lock() < GATEWAYS * CLIENTS {
                        simulation.sleep(Duration::from_millis(100)).await;
                    }
                    for partition in partitions {
                        let list = gateway.read(partition).await;
                        lasts.lock().insert(partition, list);
                    }
                });
            }
        }
    });
    let is_over = || last.lock().len() as u64 == PARTITIONS;
    simulation.run(END, is_over);
    let history = history.lock();
    let mut violations = cluster.reports.violations.lock().clone();
    for partition in (1..=PARTITIONS).map(PartitionId) {
        match last.lock().get(&partition) {
            Some(last) => violations.extend(checker::check(partition, last, &history)),
            None => violations.push(format!("partition {partition} has no owner that answers")),
        }
    }
    let mut lines = simulation.trace();
    if trace {
        lines.extend(world.describe());
    }
    let totals = Totals {
        operations: history.iter().filter(|operation| operation.ended.is_some()).count(),
        failovers: world.count("\"by_failover\":true"),
        moves: world.moves(),
        fenced: *cluster.fenced.lock(),
    };
    Outcome { violations, trace: lines, totals }
}
