//! The load of ten shops rises tenfold: the controller adds a node and moves tenants to it. When the
//! load has fallen, it empties the node and stops it.
//!
//! The nodes are told that they have a fifth of a CPU each ([`CPUS`]), so that a load that any machine
//! can serve is too much for them.

use std::time::Duration;

use anyhow::ensure;
use fulmar_workload::Target;
use fulmar_workload::arrival::Arrival;
use fulmar_workload::client::Client;
use fulmar_workload::run::{RunOptions, run};
use fulmar_workload::server::AddedNodes;
use fulmar_workload::ycsb::Ycsb;
use tokio::time::{Instant, sleep};

use super::live::Screen;
use super::plural;
use super::shops::RECORDS;

/// What each node is told to have.
const CPUS: &str = "0.2";
/// Shops whose load rises.
const BUSY: usize = 10;
/// Transactions per second of all of them, at first.
const RATE: f64 = 200.0;
const GROWTH: f64 = 10.0;
const CALM: Duration = Duration::from_secs(3);
const HIGH: Duration = Duration::from_secs(20);
/// How long the controller may take to add a node, or to remove it.
const TIMEOUT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Decisions within seconds instead of minutes.
const SETTINGS: [(&str, &str); 12] = [
    ("policy", "thresholds"),
    ("min_nodes", "3"),
    ("max_nodes", "4"),
    // In this order, because low < target <= high must hold after each change.
    ("low", "0.2"),
    ("target", "0.3"),
    ("high", "0.35"),
    ("round", "500 ms"),
    ("node_start", "2 s"),
    ("hold_up", "1 s"),
    ("hold_down", "3 s"),
    ("cool_down", "2 s"),
    ("mode", "on"),
];

/// The arguments of nodes that the controller can add others to.
pub fn arguments(added: &AddedNodes) -> Vec<String> {
    let capacity = ["--cpus", CPUS].map(str::to_owned);
    capacity.into_iter().chain(added.arguments()).collect()
}

/// Shows the controller at work.
pub async fn grow_and_shrink(target: &Target, shops: &[String], screen: &Screen) -> anyhow::Result<()> {
    let mut admin = Client::connect(target).await?;
    for (name, value) in SETTINGS {
        admin.query(&format!("ALTER SYSTEM SET control.{name} = '{value}'")).await?;
    }
    let busy = &shops[..shops.len().min(BUSY)];
    screen.note(&format!(
        "Switched the controller on. The load of {} rises tenfold.",
        plural(busy.len() as u64, "shop")
    ));
    let load = async |rate_tps: f64, time: Duration| {
        let options = RunOptions {
            databases: busy.to_vec(),
            arrival: Arrival::poisson(rate_tps),
            measure: time,
            ..RunOptions::new(target.clone())
        };
        run(Ycsb { records: RECORDS, ..Ycsb::default() }, options).await
    };
    let began = Instant::now();
    let watching = async {
        let added = wait_for(&mut admin, ADDED, "add a node").await?;
        let after = began.elapsed();
        let moved = wait_for(&mut admin, OWNED_BY_ADDED, "move tenants to it").await?;
        anyhow::Ok((added, after, moved))
    };
    let loading = async {
        let calm = load(RATE, CALM).await?;
        let high = load(RATE * GROWTH, HIGH).await?;
        anyhow::Ok([calm, high])
    };
    let (reports, (added, after, moved)) = tokio::try_join!(loading, watching)?;
    screen.note(&format!(
        "The controller added {added} after {:.1} s, and moved {} to it under load.",
        after.as_secs_f64(),
        plural(moved.parse().unwrap_or_default(), "tenant"),
    ));
    let failed: u64 = reports.iter().map(|report| report.failed + report.lost_connections).sum();
    ensure!(failed == 0, "{} failed while tenants moved", plural(failed, "transaction"));
    let fallen = Instant::now();
    wait_for(&mut admin, REMOVED, "remove the node").await?;
    screen.note(&format!(
        "The load has fallen: {added} was emptied and stopped after {:.1} s. No transaction failed.",
        fallen.elapsed().as_secs_f64(),
    ));
    admin.query("ALTER SYSTEM SET control.mode = off").await?;
    Ok(admin.close().await?)
}

const ADDED: &str = "SELECT name FROM fulmar.nodes WHERE name LIKE 'auto-%' AND state = 'alive'";
const OWNED_BY_ADDED: &str =
    "SELECT count(*) FROM fulmar.partitions WHERE node LIKE 'auto-%' HAVING count(*) > 0";
const REMOVED: &str =
    "SELECT 'removed' WHERE NOT EXISTS (SELECT 1 FROM fulmar.nodes WHERE name LIKE 'auto-%')";

/// Waits until a query has a row. Returns its value.
async fn wait_for(admin: &mut Client, sql: &str, what: &str) -> anyhow::Result<String> {
    let begun = Instant::now();
    loop {
        let rows = admin.query(sql).await?;
        if let Some(value) = rows.first().and_then(|row| row.first().cloned().flatten()) {
            return Ok(value);
        }
        ensure!(begun.elapsed() < TIMEOUT, "the controller did not {what} within {TIMEOUT:?}");
        sleep(POLL_INTERVAL).await;
    }
}
