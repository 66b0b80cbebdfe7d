//! Faults, one node at a time.

use std::fmt;
use std::time::{Duration, Instant};

use fulmar_workload::server::Cluster;
use rand::RngExt;
use rand::rngs::StdRng;
use rustix::process::Signal;

use super::{TENANTS, connect, database};

/// Counts of faults.
#[derive(Default, Debug)]
pub struct Injected {
    kills: usize,
    pauses: usize,
    stops: usize,
    cuts: usize,
    one_way_cuts: usize,
    moves: usize,
    refused_moves: usize,
    etcd_kills: usize,
}

impl Injected {
    /// All faults.
    pub fn total(&self) -> usize {
        let cuts = self.cuts + self.one_way_cuts;
        self.kills + self.pauses + self.stops + cuts + self.moves + self.etcd_kills
    }
}

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Injected { kills, pauses, stops, cuts, one_way_cuts, moves, refused_moves, etcd_kills } = self;
        write!(
            f,
            "{kills} kills, {pauses} pauses, {stops} stops, {cuts} cuts, {one_way_cuts} one-way cuts, {moves} \
             moves ({refused_moves} refused), {etcd_kills} kills of etcd members"
        )
    }
}

/// Injects faults until the deadline. Then all nodes and members run.
pub async fn inject(cluster: &mut Cluster, random: &mut StdRng, deadline: Instant) -> Injected {
    let mut injected = Injected::default();
    while Instant::now() < deadline {
        let node = random.random_range(0..cluster.nodes());
        let pause =
            |random: &mut StdRng, from: u64, to: u64| Duration::from_millis(random.random_range(from..to));
        let network = cluster.network().expect("the nodes are isolated");
        match random.random_range(0..100) {
            0..20 => {
                cluster.kill(node).unwrap();
                tokio::time::sleep(pause(random, 0, 4000)).await;
                cluster.start_node(node).await.unwrap();
                injected.kills += 1;
            }
            20..32 => {
                cluster.signal(node, Signal::STOP).unwrap();
                tokio::time::sleep(pause(random, 200, 4000)).await;
                cluster.signal(node, Signal::CONT).unwrap();
                injected.pauses += 1;
            }
            32..42 => {
                network.cut(node).unwrap();
                tokio::time::sleep(pause(random, 200, 6000)).await;
                network.heal(node).unwrap();
                injected.cuts += 1;
            }
            42..50 => {
                let to = (node + random.random_range(1..cluster.nodes())) % cluster.nodes();
                network.cut_between(node, to).unwrap();
                tokio::time::sleep(pause(random, 200, 6000)).await;
                network.heal_between(node, to).unwrap();
                injected.one_way_cuts += 1;
            }
            50..58 => {
                let status = cluster.stop(node).await.unwrap();
                assert!(status.success(), "a graceful stop failed: {status}\n{}", cluster.log_tail(node));
                tokio::time::sleep(pause(random, 0, 1000)).await;
                cluster.start_node(node).await.unwrap();
                injected.stops += 1;
            }
            58..66 => {
                let member = random.random_range(0..3);
                cluster.etcd().kill(member).unwrap();
                tokio::time::sleep(pause(random, 0, 3000)).await;
                cluster.etcd().start_again(member).unwrap();
                injected.etcd_kills += 1;
            }
            _ => match move_tenant(cluster, random).await {
                Ok(()) => injected.moves += 1,
                Err(error) => {
                    println!("a move was refused: {error}");
                    injected.refused_moves += 1;
                }
            },
        }
        tokio::time::sleep(pause(random, 0, 1500)).await;
    }
    injected
}

async fn move_tenant(cluster: &Cluster, random: &mut StdRng) -> Result<(), tokio_postgres::Error> {
    let through = random.random_range(0..cluster.nodes());
    let (tenant, to) = (random.random_range(0..TENANTS), random.random_range(0..cluster.nodes()));
    let admin = connect(&cluster.target(through), "fulmar").await?;
    admin.batch_execute(&format!("ALTER DATABASE {} MOVE TO '{}'", database(tenant), cluster.name(to))).await
}
