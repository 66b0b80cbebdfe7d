//! `branch-ms` and `restore-ms`: branching a large tenant at an earlier version, and restoring it
//! to one.

use std::path::PathBuf;
use std::time::Instant;

use super::cases::Case;
use super::rounds::Progress;
use super::store::{self, StoreArgs};
use crate::client::Client;
use crate::server::{Fulmar, Server};

/// Rows of the tenant, 1 KB each.
pub(super) const ROWS: u32 = 1_000_000;

const TENANT: &str = "big";

/// In each round a row is updated and flushed. Then the version before the update is branched, or
/// the tenant is restored to it. Measures the time from that statement to the first response of the
/// branched or restored database, in milliseconds.
pub(super) async fn measure(
    arguments: &StoreArgs,
    binary: PathBuf,
    case: &Case,
    rows: u32,
) -> anyhow::Result<Vec<f64>> {
    let progress = Progress::new();
    progress.step(&format!("{}: loading", case.name));
    let server = Server::start(Box::new(Fulmar::at(binary)), arguments.memory_mib << 20, 4).await?;
    store::load(&server, TENANT, rows).await?;
    let mut system = Client::connect(&server.target()).await?;
    // CREATE DATABASE ... BRANCH OF flushes the source.
    system.query(&format!("CREATE DATABASE loaded BRANCH OF {TENANT}")).await?;
    let mut times = Vec::new();
    for round in 1..=arguments.rounds {
        progress.step(&format!("{}: round {round} of {}", case.name, arguments.rounds));
        let mut client = Client::connect(&server.target().with_database(TENANT)).await?;
        let newest = "SELECT time FROM fulmar.history ORDER BY version DESC LIMIT 1";
        let time = client.query(newest).await?.into_iter().flatten().flatten().next();
        let time = time.ok_or_else(|| anyhow::anyhow!("tenant has no restore point"))?;
        client.query(&format!("UPDATE t SET v = randomblob(1000) WHERE id = {round}")).await?;
        client.close().await?;
        system.query(&format!("CREATE DATABASE flushed_{round} BRANCH OF {TENANT}")).await?;
        let (database, statement) = match case.name {
            "branch-ms" => {
                let database = format!("branch_{round}");
                let statement =
                    format!("CREATE DATABASE {database} BRANCH OF {TENANT} AT TIMESTAMP '{time}'");
                (database, statement)
            }
            _ => (TENANT.to_owned(), format!("ALTER DATABASE {TENANT} RESTORE TO TIMESTAMP '{time}'")),
        };
        let began = Instant::now();
        system.query(&statement).await?;
        let mut client = Client::connect(&server.target().with_database(&database)).await?;
        client.query(&format!("SELECT length(v) FROM t WHERE id = {}", rows / 2)).await?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
        client.close().await?;
    }
    Ok(times)
}
