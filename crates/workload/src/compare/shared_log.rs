//! `shared-log`: throughput of durable YCSB with the log in an S3 server on loopback, over
//! throughput with the log on the node's disk.
//!
//! Both tenants are on the same node and are measured alternately, so that everything else is
//! equal.

use std::path::Path;
use std::time::Duration;

use super::cases::Case;
use super::rounds::Progress;
use super::store::{StoreArgs, s3_server};
use crate::client::Client;
use crate::run::{RunOptions, run};
use crate::server::{Fulmar, Server};
use crate::ycsb::Ycsb;

const CONNECTIONS: u32 = 32;
const WARM_UP: Duration = Duration::from_secs(1);
const MEASURE: Duration = Duration::from_secs(5);
/// Values of `ALTER DATABASE ... SET durability`. The tenants have the same names.
const DURABILITIES: [&str; 2] = ["local", "shared"];

/// Returns the ratio of each round.
pub(super) async fn measure(arguments: &StoreArgs, binary: &Path, case: &Case) -> anyhow::Result<Vec<f64>> {
    let progress = Progress::new();
    let s3 = s3_server(arguments)?;
    let fulmar = Fulmar::at(binary.to_owned()).with_store(s3.url("bench"), s3.environment());
    let mut server = Server::start(Box::new(fulmar), arguments.memory_mib << 20, CONNECTIONS).await?;
    let mut system = Client::connect(&server.target()).await?;
    for durability in DURABILITIES {
        progress.step(&format!("{}: loading {durability}", case.name));
        system.query(&format!("CREATE DATABASE \"{durability}\" DURABILITY {durability}")).await?;
        transactions(&server, durability, WARM_UP).await?;
    }
    system.close().await?;
    let mut ratios = Vec::new();
    for round in 1..=arguments.rounds {
        progress.step(&format!("{}: round {round} of {}", case.name, arguments.rounds));
        let local = transactions(&server, DURABILITIES[0], MEASURE).await?;
        let shared = transactions(&server, DURABILITIES[1], MEASURE).await?;
        ratios.push(shared / local);
    }
    server.stop().await?;
    Ok(ratios)
}

/// Returns transactions per second.
async fn transactions(server: &Server, database: &str, measure: Duration) -> anyhow::Result<f64> {
    let options = RunOptions {
        connections: CONNECTIONS as usize,
        warm_up: WARM_UP,
        measure,
        ..RunOptions::new(server.target().with_database(database))
    };
    Ok(run(Ycsb::default(), options).await?.complete()?.throughput_tps)
}
