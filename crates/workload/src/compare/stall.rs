//! `flush-stall`: commit latency while flushes and compactions run, over the latency without them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::rounds::Progress;
use super::store::{self, StoreArgs};
use crate::client::Client;
use crate::measure::Latencies;
use crate::server::{Fulmar, Server};

const BULK: &str = "bulk";
const SMALL: &str = "small";
/// Rows of the flushed tenant, 1 KB each, and rows changed by each of its transactions.
const ROWS: u32 = 50_000;
const CHANGED_ROWS: u32 = 500;
/// Length of a measurement of commits.
const PHASE: Duration = Duration::from_secs(8);

/// Returns, for each round, the p99.9 of one tenant's commits while another tenant is written,
/// flushed and so compacted continuously, over the p99.9 while the other tenant is only written.
/// The two phases alternate.
pub(super) async fn measure(arguments: &StoreArgs, binary: PathBuf) -> anyhow::Result<Vec<f64>> {
    let progress = Progress::new();
    progress.step("flush-stall: loading");
    let server = Server::start(Box::new(Fulmar::at(binary)), arguments.memory_mib << 20, 8).await?;
    store::load(&server, BULK, ROWS).await?;
    let mut system = Client::connect(&server.target()).await?;
    system.query(&format!("CREATE DATABASE {SMALL}")).await?;
    let mut small = Client::connect(&server.target().with_database(SMALL)).await?;
    small.query("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER); INSERT INTO t VALUES (1, 0)").await?;
    let mut bulk = Client::connect(&server.target().with_database(BULK)).await?;
    let mut ratios = Vec::new();
    for round in 1..=arguments.rounds {
        let mut p999_ms = [0.0; 2];
        for (flushing, p999_ms) in [false, true].into_iter().zip(&mut p999_ms) {
            let what = if flushing { "with flushes" } else { "without" };
            progress.step(&format!("flush-stall: round {round} of {}, {what}", arguments.rounds));
            let until = Instant::now() + PHASE;
            let flush = async {
                while flushing && Instant::now() < until {
                    // CREATE DATABASE ... BRANCH OF flushes the source.
                    system.query(&format!("CREATE DATABASE flushed BRANCH OF {BULK}")).await?;
                    system.query("DROP DATABASE flushed").await?;
                }
                anyhow::Ok(())
            };
            let (latencies, (), ()) =
                tokio::try_join!(commits(&mut small, until), write(&mut bulk, until), flush)?;
            *p999_ms = latencies.summary().p999_ms;
        }
        let [without, with] = p999_ms;
        ratios.push(with / without);
    }
    Ok(ratios)
}

async fn commits(client: &mut Client, until: Instant) -> anyhow::Result<Latencies> {
    let mut latencies = Latencies::new();
    while Instant::now() < until {
        let began = Instant::now();
        client.query("UPDATE t SET n = n + 1 WHERE id = 1").await?;
        latencies.record(began.elapsed());
    }
    Ok(latencies)
}

async fn write(client: &mut Client, until: Instant) -> anyhow::Result<()> {
    let mut first = 1;
    while Instant::now() < until {
        let last = first + CHANGED_ROWS - 1;
        client
            .query(&format!("UPDATE t SET v = randomblob(1000) WHERE id BETWEEN {first} AND {last}"))
            .await?;
        first = last % ROWS + 1;
    }
    Ok(())
}
