//! `resident`: a node's memory (PSS) over its budget, while 1,000 diverged copies of one tenant are
//! in use.

use std::path::Path;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use rand::{Rng, RngExt};

use super::super::cases::Case;
use super::super::rounds::Progress;
use super::{StoreArgs, load};
use crate::client::Client;
use crate::server::{Fulmar, Server};
use crate::tenants;

const TENANTS: u32 = 1_000;
/// Rows of the tenant that is copied: 50 MB.
const ROWS: u32 = 50_000;
/// Rows that a client reads in one range: a tenth of the tenant.
const SCAN_ROWS: u32 = ROWS / 10;
/// Number of tenants that run a transaction concurrently.
const CONCURRENCY: usize = 16;
/// How often the node's memory is measured.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(500);
/// How much is read in total, as a multiple of the budget, so that all of the memory is used and
/// reused.
const READ_BUDGETS: u32 = 3;

pub(super) async fn measure(arguments: &StoreArgs, binary: &Path, case: &Case) -> anyhow::Result<Vec<f64>> {
    let progress = Progress::new();
    let memory_bytes = 2 * (arguments.memory_mib << 20);
    progress.step(&format!("{}: creating {TENANTS} tenants", case.name));
    let server = Server::start(Box::new(Fulmar::at(binary.to_owned())), memory_bytes, TENANTS).await?;
    load(&server, super::TENANT, ROWS).await?;
    let mut system = Client::connect(&server.target()).await?;
    let names = tenants::names("copy", TENANTS);
    for name in &names {
        system.query(&format!("CREATE DATABASE {name} TEMPLATE {}", super::TENANT)).await?;
    }
    system.close().await?;
    let mut clients = Vec::new();
    for name in &names {
        clients.push(Client::connect(&server.target().with_database(name.as_str())).await?);
    }
    let rounds_per_budget = memory_bytes / u64::from(TENANTS) / (u64::from(SCAN_ROWS) * 1024);
    let rounds = READ_BUDGETS * rounds_per_budget.max(1) as u32;
    let mut max_bytes = 0;
    for round in 1..=rounds {
        progress.step(&format!("{}: round {round} of {rounds}", case.name));
        let mut working = stream::iter(clients.iter_mut())
            .map(|client| work(client, rand::rng().next_u32()))
            .buffer_unordered(CONCURRENCY)
            .try_collect::<()>();
        loop {
            tokio::select! {
                done = &mut working => break done?,
                () = tokio::time::sleep(SAMPLE_INTERVAL) => {}
            }
            max_bytes = server.processes()?.pss_bytes()?.max(max_bytes);
        }
    }
    for client in clients {
        client.close().await?;
    }
    Ok(vec![max_bytes as f64 / memory_bytes as f64])
}

/// Reads a tenth of a tenant's rows and updates five of them.
async fn work(client: &mut Client, seed: u32) -> anyhow::Result<()> {
    let first = seed % (ROWS - SCAN_ROWS);
    client
        .query(&format!("SELECT sum(length(v)) FROM t WHERE id BETWEEN {first} AND {}", first + SCAN_ROWS))
        .await?;
    for _ in 0..5 {
        let id = rand::rng().random_range(1..=ROWS);
        client.query(&format!("UPDATE t SET v = randomblob(1000) WHERE id = {id}")).await?;
    }
    Ok(())
}
