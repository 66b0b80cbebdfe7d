//! `resident`: what a node takes of the machine's memory while a thousand tenants, copies of one that have diverged, are
//! in use, over the budget that it was given.

use std::path::Path;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use rand::{Rng, RngExt};

use super::super::cases::Case;
use super::super::turns::Progress;
use super::{StoreArgs, load};
use crate::client::Client;
use crate::server::{Fulmar, Server};
use crate::tenants;

const TENANTS: u32 = 1_000;
/// Of the tenant that the others are copies of: 50 MB.
const ROWS: u32 = 50_000;
/// Rows that a tenant looks at in a row: a tenth.
const LOOK: u32 = ROWS / 10;
/// Tenants that are at work at the same time.
const AT_ONCE: usize = 16;
/// How often the memory is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Budgets that are read, so that all of the memory has been used and used again.
const BUDGETS: u32 = 3;

pub(super) async fn measure(arguments: &StoreArgs, binary: &Path, case: &Case) -> anyhow::Result<Vec<f64>> {
    let progress = Progress::new();
    let memory_bytes = 2 * (arguments.memory_mib << 20);
    progress.step(&format!("{}: making {TENANTS} tenants", case.name));
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
    let rounds = BUDGETS * (memory_bytes / u64::from(TENANTS) / (u64::from(LOOK) * 1024)).max(1) as u32;
    let mut most_bytes = 0;
    for round in 1..=rounds {
        progress.step(&format!("{}: round {round} of {rounds}", case.name));
        let mut working = stream::iter(clients.iter_mut())
            .map(|client| work(client, rand::rng().next_u32()))
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>();
        loop {
            tokio::select! {
                done = &mut working => break done?,
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            most_bytes = server.processes()?.pss_bytes()?.max(most_bytes);
        }
    }
    for client in clients {
        client.close().await?;
    }
    Ok(vec![most_bytes as f64 / memory_bytes as f64])
}

/// A tenant changes some of its rows, and looks at a tenth of them.
async fn work(client: &mut Client, seed: u32) -> anyhow::Result<()> {
    let first = seed % (ROWS - LOOK);
    client
        .query(&format!("SELECT sum(length(v)) FROM t WHERE id BETWEEN {first} AND {}", first + LOOK))
        .await?;
    for _ in 0..5 {
        let id = rand::rng().random_range(1..=ROWS);
        client.query(&format!("UPDATE t SET v = randomblob(1000) WHERE id = {id}")).await?;
    }
    Ok(())
}
