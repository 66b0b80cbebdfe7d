//! `idle-connection-kib`: the memory of an idle connection, with thousands of connections that have
//! run a query.

use std::time::Duration;

use super::cases::Case;
use super::result::CaseResult;
use super::rounds::Bench;
use crate::client::Client;

/// Connections opened before the measurement, because the first ones allocate shared memory.
const BASELINE_CONNECTIONS: u32 = 50;
/// Wait before a memory measurement, so that background work of the server can finish.
const SETTLE_TIME: Duration = Duration::from_secs(3);

const QUERY: &str = "SELECT 1";

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let mut results = Vec::new();
    for case in wanted {
        let mut each = Vec::new();
        for round in 1..=bench.rounds {
            bench.step(&format!("{}: round {round} of {}", case.name, bench.rounds));
            each.push(one_round(bench).await?);
        }
        results.push(CaseResult::value(case, each));
    }
    Ok(results)
}

/// The growth of the server's memory per connection, in KiB.
async fn one_round(bench: &Bench) -> anyhow::Result<f64> {
    let count = bench.sizes.idle_connections;
    let server = bench.fulmar(BASELINE_CONNECTIONS + count).await?;
    let mut connections = Vec::new();
    let mut before = 0;
    for number in 0..BASELINE_CONNECTIONS + count {
        if number == BASELINE_CONNECTIONS {
            tokio::time::sleep(SETTLE_TIME).await;
            before = server.processes()?.pss_bytes()?;
        }
        let mut client = Client::connect(&server.target()).await?;
        client.query(QUERY).await?;
        connections.push(client);
    }
    tokio::time::sleep(SETTLE_TIME).await;
    let after = server.processes()?.pss_bytes()?;
    Ok(after.saturating_sub(before) as f64 / 1024.0 / f64::from(count))
}
