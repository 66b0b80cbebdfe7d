//! The faults of a run.

use std::time::Duration;

use fulmar_cluster::{LogKind, NodeId};
use fulmar_pages::PartitionId;
use fulmar_simulation::{NetworkFaults, Simulation};

use crate::cluster::Cluster;
use crate::node::Request;
use crate::run::{PARTITIONS, common_partitions, private_partitions};
use crate::world::{Direction, Directory, Service, StoreFaults};

pub const NO_NETWORK_FAULTS: NetworkFaults = NetworkFaults {
    delay: Duration::from_micros(200),
    max_delay: Duration::from_millis(1),
    lost_per_mille: 0,
    doubled_per_mille: 0,
    max_late_delay: Duration::from_millis(2500),
};

const SERVICES: [Service; 2] = [Service::Metadata, Service::Objects];
const DIRECTIONS: [Direction; 2] = [Direction::Requests, Direction::Answers];

#[derive(Clone, Copy, Debug)]
enum Fault {
    Restart,
    Pause,
    CutFromStores,
    CutFromNode,
    Stores,
    Network,
    Isolate,
    UncleanPartition,
    NoLeader,
    WrongDirectory,
    ClockStep,
}

const FAULTS: [Fault; 12] = [
    Fault::Restart,
    Fault::Restart,
    Fault::Pause,
    Fault::CutFromStores,
    Fault::CutFromNode,
    Fault::Stores,
    Fault::Network,
    Fault::Isolate,
    Fault::UncleanPartition,
    Fault::NoLeader,
    Fault::WrongDirectory,
    Fault::ClockStep,
];
/// Faults after which a node may answer reads that it must not answer.
const LEASE_FAULTS: [Fault; 4] =
    [Fault::Pause, Fault::CutFromStores, Fault::Isolate, Fault::UncleanPartition];

impl Cluster {
    fn next_fault(&self) -> Fault {
        let faults = if self.features.is_hot { &LEASE_FAULTS[..] } else { &FAULTS[..] };
        faults[self.simulation().below(faults.len() as u64) as usize]
    }

    /// Injects one fault after another until `end`, and then ends them all.
    pub async fn inject_faults(self, end: Duration) {
        let simulation = self.simulation().clone();
        if self.features.pace > 1 && simulation.chance(1, 2) {
            self.disturb_stores();
        }
        while simulation.now() < end {
            simulation.sleep(simulation.delay(Duration::from_millis(50), Duration::from_millis(1500))).await;
            let node = self.random_node();
            let short = simulation.delay(Duration::from_millis(20), Duration::from_millis(9000));
            match self.next_fault() {
                Fault::Restart => {
                    let after = simulation.delay(Duration::from_millis(20), Duration::from_millis(5000));
                    self.run(move |cluster| async move { cluster.restart(node, after).await });
                }
                Fault::Pause => self.run(move |cluster| async move { cluster.pause(node, short).await }),
                Fault::CutFromStores => {
                    self.run(move |cluster| async move { cluster.cut_from_stores(node, short).await });
                }
                Fault::CutFromNode => {
                    let other = self.random_node();
                    self.run(move |cluster| async move { cluster.cut_from_node(node, other, short).await });
                }
                Fault::Stores => self.disturb_stores(),
                Fault::Network => self.disturb_network(),
                Fault::Isolate => {
                    self.run(move |cluster| async move { cluster.isolate(node, short).await });
                }
                Fault::UncleanPartition => {
                    self.run(move |cluster| async move { cluster.partition_uncleanly(short).await });
                }
                Fault::NoLeader => {
                    self.run(|cluster| async move { cluster.elect_metadata_leader().await });
                }
                Fault::WrongDirectory => self.start_with_wrong_directory_once(node, simulation.chance(1, 2)),
                Fault::ClockStep => {
                    let step = simulation.delay(Duration::ZERO, Duration::from_secs(20));
                    self.clock(node).lock().step(simulation.chance(1, 2), step);
                }
            }
            for _ in 0..simulation.below(4 * self.features.pace) {
                self.request_change();
            }
        }
        // The cluster must recover.
        self.network.heal_all();
        self.network.set_faults(NO_NETWORK_FAULTS);
        self.world.heal_all();
        for service in SERVICES {
            self.world.set_faults(service, StoreFaults::NONE);
        }
    }

    /// Runs a fault in the background.
    fn run<F: Future<Output = ()> + Send + 'static>(&self, fault: impl FnOnce(Cluster) -> F) {
        self.simulation().spawn(Simulation::WORLD, fault(self.clone()));
    }

    /// Cuts the ways between a node and one or both stores, in one or both directions.
    async fn cut_from_stores(&self, node: NodeId, duration: Duration) {
        let simulation = self.simulation();
        let is_both = |simulation: &Simulation| simulation.chance(1, 2);
        let (both_stores, both_directions) = (is_both(simulation), is_both(simulation));
        let (service, direction) =
            (SERVICES[simulation.below(2) as usize], DIRECTIONS[simulation.below(2) as usize]);
        let services = SERVICES.into_iter().filter(move |other| both_stores || *other == service);
        let ways: Vec<_> = services
            .flat_map(|service| DIRECTIONS.map(|direction| (service, direction)))
            .filter(|(_, other)| both_directions || *other == direction)
            .collect();
        simulation.note(|| format!("node {node}: cut off from {ways:?} for {duration:?}"));
        for (service, direction) in &ways {
            self.world.cut(node.0, *service, *direction);
        }
        simulation.sleep(duration).await;
        for (service, direction) in &ways {
            self.world.heal(node.0, *service, *direction);
        }
    }

    /// Cuts the way between two nodes, in one or both directions.
    async fn cut_from_node(&self, from: NodeId, to: NodeId, duration: Duration) {
        self.simulation().note(|| format!("cut from node {from} to node {to} for {duration:?}"));
        let is_both = self.simulation().chance(1, 2);
        self.network.cut(from.0, to.0);
        if is_both {
            self.network.cut(to.0, from.0);
        }
        self.simulation().sleep(duration).await;
        self.network.heal(from.0, to.0);
        if is_both {
            self.network.heal(to.0, from.0);
        }
    }

    /// Cuts a node off from the other nodes, and then from the stores. Clients can still reach it.
    async fn isolate(&self, node: NodeId, duration: Duration) {
        let simulation = self.simulation();
        let later = simulation.delay(Duration::ZERO, Duration::from_millis(1300));
        simulation.note(|| format!("node {node}: isolated for {duration:?}"));
        let others: Vec<_> = self.processes.nodes().filter(|other| *other != node).collect();
        for other in &others {
            self.network.cut(node.0, other.0);
            self.network.cut(other.0, node.0);
        }
        simulation.sleep(later).await;
        for service in SERVICES {
            self.world.cut(node.0, service, Direction::Requests);
        }
        simulation.sleep(duration).await;
        for service in SERVICES {
            self.world.heal(node.0, service, Direction::Requests);
        }
        for other in &others {
            self.network.heal(node.0, other.0);
            self.network.heal(other.0, node.0);
        }
    }

    /// Two nodes cannot reach each other, but both reach the third one and the stores (CloudTPS,
    /// figure 3). Each of them suspects the other.
    async fn partition_uncleanly(&self, duration: Duration) {
        let center = self.random_node();
        let others: Vec<_> = self.processes.nodes().filter(|other| *other != center).collect();
        self.simulation().note(|| format!("only node {center} reaches all others for {duration:?}"));
        let ways = || others.iter().flat_map(|from| others.iter().map(move |to| (from.0, to.0)));
        for (from, to) in ways().filter(|(from, to)| from != to) {
            self.network.cut(from, to);
        }
        self.simulation().sleep(duration).await;
        for (from, to) in ways().filter(|(from, to)| from != to) {
            self.network.heal(from, to);
        }
    }

    /// The metadata store has no leader for a while. Requests that it has received may be applied.
    async fn elect_metadata_leader(&self) {
        let simulation = self.simulation();
        let duration = simulation.delay(Duration::from_millis(100), Duration::from_millis(3000));
        simulation.note(|| format!("the metadata store has no leader for {duration:?}"));
        self.world.set_faults(Service::Metadata, StoreFaults::UNAVAILABLE);
        simulation.sleep(duration).await;
        self.world.set_faults(Service::Metadata, StoreFaults::NONE);
    }

    fn disturb_stores(&self) {
        let simulation = self.simulation();
        for service in SERVICES {
            let faults = StoreFaults {
                lost_per_mille: simulation.below(80),
                late_per_mille: simulation.below(80),
                doubled_per_mille: simulation.below(80),
                max_delay: simulation.delay(Duration::from_millis(5), Duration::from_millis(200)),
                ..StoreFaults::NONE
            };
            self.world.set_faults(service, faults);
        }
    }

    fn disturb_network(&self) {
        let simulation = self.simulation();
        self.network.set_faults(NetworkFaults {
            lost_per_mille: simulation.below(80),
            doubled_per_mille: simulation.below(80),
            max_delay: simulation.delay(Duration::from_millis(1), Duration::from_millis(900)),
            ..NO_NETWORK_FAULTS
        });
    }

    /// Starts a node with an empty data directory, or with a copy that is older than its last
    /// start.
    fn start_with_wrong_directory_once(&self, node: NodeId, is_empty: bool) {
        let copy = self.directory(node).lock().clone();
        let simulation = self.simulation().clone();
        self.run(move |cluster| async move {
            if !is_empty {
                cluster.restart(node, Duration::from_millis(50)).await;
                simulation.sleep(simulation.delay(Duration::from_millis(300), Duration::from_secs(5))).await;
            }
            // The node has not started at all, or not since the copy was made: nothing shows that
            // the directory is wrong.
            let begun = |directory: &Directory| directory.stamp.as_ref().and_then(|stamp| stamp.begun);
            let (of_copy, of_node) = (begun(&copy), begun(&cluster.directory(node).lock()));
            if of_node.is_none() || (!is_empty && of_copy == of_node) {
                return;
            }
            simulation.note(|| format!("node {node}: starts with a wrong directory, empty: {is_empty}"));
            let wrong = if is_empty { Directory::default() } else { copy };
            cluster.start_with_wrong_directory(node, wrong).await;
        });
    }

    /// Requests a move, a restore, a change of durability or a migration.
    fn request_change(&self) {
        let simulation = self.simulation();
        let to = self.random_node();
        let common = common_partitions();
        let partition = common[simulation.below(common.len() as u64) as usize];
        let (partition, request) = match simulation.below(6) {
            0 if self.features.migrations => {
                let all = [private_partitions(), common].concat();
                let partition = all[simulation.below(all.len() as u64) as usize];
                (partition, Request::Migrate { partition, to, on_demand: simulation.chance(1, 2) })
            }
            1 if self.features.durability => {
                let log = if simulation.chance(1, 2) { LogKind::Shared } else { LogKind::Local };
                let partition = PartitionId(PARTITIONS - 1);
                (partition, Request::SetLog { partition, log })
            }
            _ => (partition, Request::Move { partition, to }),
        };
        self.run(move |cluster| async move {
            let Some(owner) = cluster.world.owner(partition) else { return };
            let (owner, timeout) = (cluster.processes.current(owner), Duration::from_secs(1));
            cluster.network.call(Simulation::WORLD, owner, request, timeout).await;
        });
    }
}
