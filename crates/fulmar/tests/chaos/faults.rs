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
    moves: usize,
    refused_moves: usize,
    etcd_kills: usize,
}

impl Injected {
    /// All faults.
    pub fn total(&self) -> usize {
        self.kills + self.pauses + self.stops + self.moves + self.etcd_kills
    }
}

impl fmt::Display for Injected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Injected { kills, pauses, stops, moves, refused_moves, etcd_kills } = self;
        write!(
            f,
            "{kills} kills, {pauses} pauses, {stops} stops, {moves} moves ({refused_moves} refused), \
             {etcd_kills} kills of etcd members"
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
        match random.random_range(0..100) {
            0..25 => {
                cluster.kill(node).unwrap();
                tokio::time::sleep(pause(random, 0, 4000)).await;
                cluster.start_node(node).await.unwrap();
                injected.kills += 1;
            }
            25..45 => {
                cluster.signal(node, Signal::STOP).unwrap();
                tokio::time::sleep(pause(random, 200, 4000)).await;
                cluster.signal(node, Signal::CONT).unwrap();
                injected.pauses += 1;
            }
            45..55 => {
                let status = cluster.stop(node).await.unwrap();
                assert!(status.success(), "a graceful stop failed: {status}\n{}", cluster.log_tail(node));
                tokio::time::sleep(pause(random, 0, 1000)).await;
                cluster.start_node(node).await.unwrap();
                injected.stops += 1;
            }
            55..65 => {
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
    let admin = connect(cluster.target(through).port, "fulmar").await?;
    admin
        .batch_execute(&format!("ALTER DATABASE {} SET node = '{}'", database(tenant), cluster.name(to)))
        .await
}
