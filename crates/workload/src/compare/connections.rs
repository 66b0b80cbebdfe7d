//! Thousands of connections that have asked something and now say nothing: what one costs in memory.

use std::time::Duration;

use super::cases::Case;
use super::result::CaseResult;
use super::turns::Bench;
use crate::client::Client;

/// Connections that are made before: the first ones make what all share.
const EARLIER: u32 = 50;
/// How long the server is given to come to rest.
const REST: Duration = Duration::from_secs(3);

const QUESTION: &str = "SELECT 1";

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

/// KiB that the server has grown by with each connection.
async fn one_round(bench: &Bench) -> anyhow::Result<f64> {
    let count = bench.sizes.idle_connections;
    let server = bench.fulmar(EARLIER + count).await?;
    let mut connections = Vec::new();
    let mut before = 0;
    for number in 0..EARLIER + count {
        if number == EARLIER {
            tokio::time::sleep(REST).await;
            before = server.processes()?.pss_bytes()?;
        }
        let mut client = Client::connect(&server.target()).await?;
        client.query(QUESTION).await?;
        connections.push(client);
    }
    tokio::time::sleep(REST).await;
    let after = server.processes()?.pss_bytes()?;
    Ok(after.saturating_sub(before) as f64 / 1024.0 / f64::from(count))
}
