//! The cluster of a run: its nodes' processes, and the faults that strike them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::{NodeId, quarantine};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Network, Process, Simulation};
use parking_lot::Mutex;

use crate::node::{Answer, Node, Processes, Report, Request};
use crate::run::{Features, PARTITIONS, Totals};
use crate::world::{Clock, ClockError, Directory, Env, World};

/// What belongs to a machine, and outlives its processes.
struct Machine {
    clock: Arc<Mutex<Clock>>,
    directory: Arc<Mutex<Directory>>,
}

#[derive(Clone)]
pub struct Cluster {
    pub world: World,
    pub network: Network<Request, Answer>,
    pub processes: Processes,
    pub features: Features,
    machines: Arc<BTreeMap<NodeId, Machine>>,
    pub totals: Arc<Mutex<Totals>>,
}

impl Cluster {
    pub fn new(
        world: &World,
        network: &Network<Request, Answer>,
        nodes: u32,
        features: Features,
        clocks: ClockError,
    ) -> Cluster {
        let processes = Processes::new(nodes);
        let machine = |node| {
            let clock = Clock::new(clocks, world.simulation.chance(1, 2));
            (node, Machine { clock: Arc::new(Mutex::new(clock)), directory: Arc::default() })
        };
        Cluster {
            world: world.clone(),
            network: network.clone(),
            machines: Arc::new(processes.nodes().map(machine).collect()),
            processes,
            features,
            totals: Arc::default(),
        }
    }

    pub fn simulation(&self) -> &Simulation {
        &self.world.simulation
    }

    /// A node as a process of its machine sees the world.
    pub fn env(&self, node: NodeId, process: Process) -> Env {
        let Machine { clock, directory } = &self.machines[&node];
        Env { world: self.world.clone(), process, clock: clock.clone(), directory: directory.clone() }
    }

    pub fn clock(&self, node: NodeId) -> &Mutex<Clock> {
        &self.machines[&node].clock
    }

    pub fn directory(&self, node: NodeId) -> &Mutex<Directory> {
        &self.machines[&node].directory
    }

    pub fn random_node(&self) -> NodeId {
        let nodes = self.machines.len() as u64;
        NodeId(1 + self.simulation().below(nodes) as u32)
    }

    /// Starts a process of a node.
    pub fn start(&self, node: NodeId) {
        let env = self.env(node, self.processes.next(node));
        self.start_as(node, env);
    }

    fn start_as(&self, node: NodeId, env: Env) {
        let (process, cluster) = (env.process, self.clone());
        let report = Arc::new(move |process, report| cluster.reported(node, process, report));
        let (network, processes) = (self.network.clone(), self.processes.clone());
        self.simulation().spawn(process, Node::run(node, env, network, processes, self.features, report));
    }

    /// Kills the process that runs a node, and starts another one.
    pub async fn restart(&self, node: NodeId, after: Duration) {
        let process = self.processes.current(node);
        self.stop(node, process);
        self.simulation().sleep(after).await;
        if self.processes.current(node) == process {
            self.start(node);
        }
    }

    fn stop(&self, node: NodeId, process: Process) {
        self.simulation().note(|| format!("node {node}: killed ({process:?})"));
        self.network.close(process);
        self.simulation().kill(process);
    }

    /// Kills the process that runs a node, starts it with a wrong data directory, and later with
    /// the right one.
    pub async fn start_with_wrong_directory(&self, node: NodeId, directory: Directory) {
        let process = self.processes.current(node);
        self.stop(node, process);
        let env = self.env(node, self.processes.next(node));
        let wrong = Env { directory: Arc::new(Mutex::new(directory)), ..env };
        self.start_as(node, wrong);
    }

    /// Suspends a machine.
    pub async fn pause(&self, node: NodeId, duration: Duration) {
        let process = self.processes.current(node);
        self.simulation().note(|| format!("node {node}: paused for {duration:?}"));
        self.simulation().pause(process);
        self.simulation().sleep(duration).await;
        self.clock(node).lock().suspend(duration);
        self.simulation().resume(process);
    }

    /// A process reports something. Called by a task of that process.
    fn reported(&self, node: NodeId, process: Process, report: Report) {
        let mut totals = self.totals.lock();
        match report {
            Report::Fenced => totals.fenced += 1,
            Report::Killed => totals.killed += 1,
            Report::Refused => totals.refused += 1,
            Report::FailedOver => totals.failovers += 1,
            Report::Moved => totals.moves += 1,
            Report::Migrated => totals.migrations += 1,
            Report::ChangedLog => totals.durability_changes += 1,
            Report::Collected(deleted) => totals.collected += deleted,
            Report::Truncated(deleted) => totals.truncated += deleted,
            Report::Exported => totals.exports += 1,
        }
        drop(totals);
        if matches!(report, Report::Fenced | Report::Killed | Report::Refused)
            && self.processes.current(node) == process
        {
            let cluster = self.clone();
            let after = self.simulation().delay(Duration::from_millis(50), Duration::from_millis(1500));
            // A dead process sends nothing more; a fenced one may run for a moment.
            let lives = match report {
                Report::Killed => Duration::ZERO,
                _ => self.simulation().delay(Duration::ZERO, Duration::from_millis(10)),
            };
            let simulation = self.simulation().clone();
            self.simulation().spawn(Simulation::WORLD, async move {
                simulation.sleep(lives).await;
                if cluster.processes.current(node) == process {
                    cluster.restart(node, after).await;
                }
            });
        }
    }

    /// An operator who resumes quarantined partitions, as long as the run lasts.
    pub async fn resume_quarantined(self) {
        let env = Env::without_node(&self.world, Simulation::WORLD);
        loop {
            let delay = self.simulation().delay(Duration::from_millis(500), Duration::from_millis(4000));
            self.simulation().sleep(delay).await;
            for partition in (1..=PARTITIONS).map(PartitionId) {
                if self.world.is_quarantined(partition) {
                    self.simulation().note(|| format!("partition {partition} is resumed"));
                    self.totals.lock().quarantines += 1;
                    quarantine::resume(&env, partition).await.unwrap();
                }
            }
        }
    }
}
