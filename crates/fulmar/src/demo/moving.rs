//! Moves a tenant to each node and back, under load.

use std::time::Duration;

use anyhow::Context;
use fulmar_workload::Target;
use fulmar_workload::client::Client;
use fulmar_workload::server::Cluster;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::live::Screen;

/// How long the report of a move may take to be complete.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);
const REPORT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Moves a tenant to each of the other nodes, and back. Shows what its clients noticed.
pub async fn move_around(
    cluster: &Cluster,
    target: &Target,
    tenant: &str,
    screen: &Screen,
) -> anyhow::Result<()> {
    let mut admin = Client::connect(target).await?;
    let sql = format!("SELECT node FROM fulmar.partitions WHERE tenant = '{tenant}'");
    let home = text(&mut admin, &sql).await?.context("the tenant has no owner")?;
    let is_home = |node: &usize| cluster.name(*node) == home;
    let home = (0..cluster.nodes()).find(is_home).context("the owner is not a node of the cluster")?;
    for step in 1..=cluster.nodes() {
        let to = cluster.name((home + step) % cluster.nodes());
        admin.query(&format!("ALTER DATABASE {tenant} MOVE TO '{to}'")).await?;
        let report = report(&mut admin, tenant, to).await?;
        screen.note(&format!(
            "Moved {tenant} from {} to {to} under load: the longest wait of a client was {} ms, {} transactions \
             failed.",
            report["source"].as_str().unwrap_or_default(),
            report["pause_ms"],
            report["failed"],
        ));
    }
    Ok(admin.close().await?)
}

/// The report of the tenant's newest move. The waits of its clients are known a little later.
async fn report(admin: &mut Client, tenant: &str, to: &str) -> anyhow::Result<Value> {
    let sql = format!(
        "SELECT report FROM fulmar.migrations WHERE tenant = '{tenant}' AND destination = '{to}' \
         ORDER BY started DESC LIMIT 1"
    );
    let begun = Instant::now();
    loop {
        let report = text(admin, &sql).await?.context("the move has no report")?;
        let report: Value = serde_json::from_str(&report)?;
        if report["knows_waits"] == true {
            return Ok(report);
        }
        anyhow::ensure!(begun.elapsed() < REPORT_TIMEOUT, "the report of the move is incomplete");
        sleep(REPORT_POLL_INTERVAL).await;
    }
}

/// The only value of a query.
async fn text(admin: &mut Client, sql: &str) -> anyhow::Result<Option<String>> {
    let rows = admin.query(sql).await?;
    Ok(rows.first().and_then(|row| row.first().cloned().flatten()))
}
