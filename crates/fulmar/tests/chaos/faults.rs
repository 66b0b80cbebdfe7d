//! Faults, one node at a time.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use fulmar_workload::server::Cluster;
use rand::RngExt;
use rand::rngs::StdRng;
use rustix::process::Signal;
use tokio::time::timeout;

use super::client::{ANSWER_TIMEOUT, describe};
use super::disk::Disk;
use super::store::{Proxy, Treatment};
use super::{connect, database};

/// How long a move may take while the store is slow or fails.
const MOVE_PATIENCE: Duration = Duration::from_secs(3);

/// Faults of a cluster, and their counts.
pub struct Faults<'a> {
    pub cluster: &'a mut Cluster,
    /// The proxy between each node and the store.
    pub proxies: &'a [Proxy],
    /// The disk of each node's data directory.
    pub disks: &'a [Disk],
    pub tenants: usize,
    pub random: StdRng,
    pub injected: Injected,
}

/// Counts of faults.
#[derive(Clone, Default, Debug)]
pub struct Injected {
    kills: usize,
    pauses: usize,
    stops: usize,
    cuts: usize,
    one_way_cuts: usize,
    moves: usize,
    refused_moves: usize,
    durability_changes: usize,
    refused_changes: usize,
    etcd_kills: usize,
    slow_stores: usize,
    failing_stores: usize,
    full_disks: usize,
}

impl Injected {
    pub fn cut_ends(&mut self) {
        self.one_way_cuts += 1;
    }

    /// All faults.
    pub fn total(&self) -> usize {
        let nodes = self.kills + self.pauses + self.stops + self.full_disks;
        let network = self.cuts + self.one_way_cuts + self.slow_stores + self.failing_stores;
        nodes + network + self.moves + self.durability_changes + self.etcd_kills
    }
}

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            ("kills", self.kills),
            ("pauses", self.pauses),
            ("stops", self.stops),
            ("cuts", self.cuts),
            ("one-way cuts", self.one_way_cuts),
            ("slow stores", self.slow_stores),
            ("failing stores", self.failing_stores),
            ("full disks", self.full_disks),
            ("kills of etcd members", self.etcd_kills),
            ("moves", self.moves),
            ("refused moves", self.refused_moves),
            ("changes of durability", self.durability_changes),
            ("refused changes", self.refused_changes),
        ];
        let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
        f.write_str(&counts.join(", "))
    }
}

impl Faults<'_> {
    /// Injects faults until the deadline. Then all nodes and members run, and store and disks work.
    pub async fn inject(&mut self, deadline: Instant) {
        while Instant::now() < deadline {
            let node = self.random.random_range(0..self.cluster.nodes());
            match self.random.random_range(0..100) {
                0..18 => self.kill(node).await,
                18..28 => self.pause(node).await,
                28..36 => self.cut(node).await,
                36..43 => self.cut_one_way(node).await,
                43..50 => self.stop(node).await,
                50..57 => self.kill_etcd().await,
                57..66 => self.delay_store(node).await,
                66..73 => self.fail_store(node).await,
                73..79 => self.fill_disk(node).await,
                79..84 => self.change_durability().await,
                _ => self.move_tenant().await,
            }
            self.sleep(0, 1500).await;
        }
    }

    /// Sleeps for a random time in ms.
    pub async fn sleep(&mut self, from: u64, to: u64) {
        tokio::time::sleep(Duration::from_millis(self.random.random_range(from..to))).await;
    }

    pub async fn kill(&mut self, node: usize) {
        self.cluster.kill(node).unwrap();
        self.sleep(0, 4000).await;
        self.cluster.start_node(node).await.unwrap();
        self.injected.kills += 1;
    }

    pub async fn pause(&mut self, node: usize) {
        self.cluster.signal(node, Signal::STOP).unwrap();
        self.sleep(200, 4000).await;
        self.cluster.signal(node, Signal::CONT).unwrap();
        self.injected.pauses += 1;
    }

    pub async fn cut(&mut self, node: usize) {
        self.cluster.network().expect("the nodes are isolated").cut(node).unwrap();
        self.sleep(200, 6000).await;
        self.cluster.network().expect("the nodes are isolated").heal(node).unwrap();
        self.injected.cuts += 1;
    }

    pub async fn cut_one_way(&mut self, node: usize) {
        let to = (node + self.random.random_range(1..self.cluster.nodes())) % self.cluster.nodes();
        self.cluster.network().expect("the nodes are isolated").cut_between(node, to).unwrap();
        self.sleep(200, 6000).await;
        self.cluster.network().expect("the nodes are isolated").heal_between(node, to).unwrap();
        self.injected.one_way_cuts += 1;
    }

    pub async fn stop(&mut self, node: usize) {
        let status = self.cluster.stop(node).await.unwrap();
        let log = std::fs::read_to_string(self.cluster.log(node)).unwrap();
        // A process that has just replaced itself does not handle the signal yet.
        let was_restarting = status.signal() == Some(Signal::TERM.as_raw())
            && log.rfind("it restarts and joins the cluster") > log.rfind("fulmar ready:");
        let tail = self.cluster.log_tail(node);
        assert!(status.success() || was_restarting, "a graceful stop failed: {status}\n{tail}");
        self.sleep(0, 1000).await;
        self.cluster.start_node(node).await.unwrap();
        self.injected.stops += 1;
    }

    pub async fn kill_etcd(&mut self) {
        let member = self.random.random_range(0..3);
        self.cluster.etcd().kill(member).unwrap();
        self.sleep(0, 3000).await;
        self.cluster.etcd().start_again(member).unwrap();
        self.injected.etcd_kills += 1;
    }

    /// The store answers a node, or all nodes, late.
    pub async fn delay_store(&mut self, node: usize) {
        let delay = Duration::from_millis(self.random.random_range(100..3000));
        self.treat_store(node, Treatment::Delay(delay)).await;
        self.injected.slow_stores += 1;
    }

    /// The store answers a node, or all nodes, with errors.
    pub async fn fail_store(&mut self, node: usize) {
        self.treat_store(node, Treatment::Refuse).await;
        self.injected.failing_stores += 1;
    }

    async fn treat_store(&mut self, node: usize, treatment: Treatment) {
        let treated = match self.random.random_bool(0.5) {
            true => self.proxies,
            false => &self.proxies[node..=node],
        };
        treated.iter().for_each(|proxy| proxy.set(treatment));
        self.sleep(500, 3000).await;
        if self.random.random_bool(0.3) {
            // It may wait for the store.
            let _ = timeout(MOVE_PATIENCE, self.move_tenant()).await;
        }
        self.sleep(0, 3000).await;
        // A node may have to start again meanwhile.
        if self.random.random_bool(0.3) {
            self.cluster.kill(node).unwrap();
            self.cluster.spawn_node(node).unwrap();
            self.sleep(0, 2000).await;
        }
        treated.iter().for_each(|proxy| proxy.set(Treatment::Pass));
        self.cluster.wait_for_node(node).await.unwrap();
    }

    async fn fill_disk(&mut self, node: usize) {
        self.disks[node].fill();
        self.sleep(500, 6000).await;
        self.disks[node].free();
        // A node that was declared dead meanwhile has exited: it cannot join again with a full disk.
        if let Err(error) = self.cluster.wait_for_node(node).await {
            assert!(error.to_string().contains("No space left on device"), "{error}");
            self.cluster.start_node(node).await.unwrap();
        }
        self.injected.full_disks += 1;
    }

    async fn move_tenant(&mut self) {
        let to = self.random.random_range(0..self.cluster.nodes());
        let to = self.cluster.name(to).to_owned();
        match self.alter_in_time(&format!("MOVE TO '{to}'")).await {
            Ok(()) => self.injected.moves += 1,
            Err(error) => {
                println!("a move was refused: {}", describe(&error));
                self.injected.refused_moves += 1;
            }
        }
    }

    async fn change_durability(&mut self) {
        let durability = if self.random.random_bool(0.5) { "local" } else { "shared" };
        match self.alter_in_time(&format!("SET durability = {durability}")).await {
            Ok(()) => self.injected.durability_changes += 1,
            Err(error) => {
                println!("a change of durability was refused: {}", describe(&error));
                self.injected.refused_changes += 1;
            }
        }
    }

    async fn alter_in_time(&mut self, change: &str) -> Result<(), tokio_postgres::Error> {
        let altered = timeout(ANSWER_TIMEOUT, self.alter(change)).await;
        altered.unwrap_or_else(|_| panic!("{change} was neither carried out nor refused"))
    }

    /// Changes a random tenant through a random node.
    async fn alter(&mut self, change: &str) -> Result<(), tokio_postgres::Error> {
        let through = self.random.random_range(0..self.cluster.nodes());
        let tenant = database(self.random.random_range(0..self.tenants));
        let admin = connect(&self.cluster.target(through), "fulmar").await?;
        admin.batch_execute(&format!("ALTER DATABASE {tenant} {change}")).await
    }
}
