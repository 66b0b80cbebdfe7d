//! `fulmar move` and `fulmar moves`: move a tenant to another node, and show what moves have cost.

use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use indicatif::ProgressFinish;
use tokio::time::Instant;
use tokio_postgres::{Client, Row};

use crate::cli::{MoveArgs, MoveMechanism, MovesArgs};
use crate::client::{connect, server_error};
use crate::output;
use crate::size::Bytes;
use crate::tenant::{SYSTEM_DATABASE, literal, quoted};

/// How often the progress is read.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// How long a report may take after a move has ended.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
const REPORT_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs `fulmar move`.
pub async fn run(arguments: MoveArgs) -> anyhow::Result<()> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let name = &arguments.name;
    let Some(to) = &arguments.to else {
        let cancelled = client.batch_execute(&format!("ALTER DATABASE {} CANCEL MOVE", quoted(name))).await;
        cancelled
            .map_err(|error| server_error(&error))
            .with_context(|| format!("the move of tenant \"{name}\" was not cancelled"))?;
        return match arguments.json {
            true => output::json(&serde_json::json!({ "tenant": name, "cancelled": true })),
            false => output::line(&format!("cancelled the move of {name}")),
        };
    };
    let clauses = clauses(arguments.using, arguments.max_rate);
    // A connection runs one statement at a time.
    let watching = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let is_there = owner(&watching, name).await?.as_deref() == Some(to);
    let started = reports(&watching, Some(name), 1).await?.first().map(started_ms);
    tokio::select! {
        moved = move_tenant(&client, name, to, &clauses) => moved?,
        never = show_progress(&watching, name) => never?,
    }
    let report = if is_there { None } else { new_report(&watching, name, started).await? };
    match (arguments.json, report) {
        (true, Some(report)) => output::json(&report),
        (true, None) => output::json(&serde_json::json!({ "tenant": name, "node": to })),
        (false, Some(report)) => output::line(&format!("moved {name} to {to}: {}", summary(&report))),
        (false, None) if is_there => output::line(&format!("{name} is at {to}")),
        (false, None) => output::line(&format!("moved {name} to {to}")),
    }
}

/// The clauses of a statement that moves databases.
pub fn clauses(using: Option<MoveMechanism>, max_rate: Option<Bytes>) -> String {
    let mut clauses = String::new();
    if let Some(using) = using.and_then(|using| using.to_possible_value()) {
        clauses += &format!(" USING {}", literal(using.get_name()));
    }
    if let Some(rate) = max_rate {
        // Rates below 1 kB are not useful.
        clauses += &format!(" LIMIT '{}kB'", (rate.0 / 1024).max(1));
    }
    clauses
}

/// The node that owns a tenant.
async fn owner(client: &Client, tenant: &str) -> anyhow::Result<Option<String>> {
    let sql = "SELECT node FROM fulmar.partitions WHERE tenant = $1";
    let row = client.query_opt(sql, &[&tenant]).await.map_err(|error| server_error(&error))?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// Waits for the report of a move that has ended, and for the waits of the clients in it. `before` is
/// the start of the move before that. `None` if they stay unknown: the source has died.
async fn new_report(
    client: &Client,
    tenant: &str,
    before: Option<u64>,
) -> anyhow::Result<Option<serde_json::Value>> {
    let deadline = Instant::now() + REPORT_TIMEOUT;
    while Instant::now() < deadline {
        let newest = reports(client, Some(tenant), 1).await?.into_iter().next();
        let is_new = |report: &serde_json::Value| {
            before != Some(started_ms(report))
                && report["outcome"] == "moved"
                && report["knows_waits"] == true
        };
        if let Some(report) = newest.filter(is_new) {
            return Ok(Some(report));
        }
        tokio::time::sleep(REPORT_POLL_INTERVAL).await;
    }
    Ok(None)
}

/// Moves a tenant to a node.
pub async fn move_tenant(client: &Client, tenant: &str, node: &str, clauses: &str) -> anyhow::Result<()> {
    let statement = format!("ALTER DATABASE {} MOVE TO {}{clauses}", quoted(tenant), literal(node));
    let moved = client.batch_execute(&statement).await.map_err(|error| server_error(&error));
    moved.with_context(|| format!("tenant \"{tenant}\" was not moved to node \"{node}\""))
}

/// Shows the progress of a tenant's move for as long as it is polled.
async fn show_progress(client: &Client, tenant: &str) -> anyhow::Result<()> {
    let bar = output::byte_progress("copied", Some(0)).with_finish(ProgressFinish::AndClear);
    let sql = "SELECT bytes, expected_bytes FROM fulmar.migrations WHERE tenant = $1 AND step = 'copying'";
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        let rows = client.query(sql, &[&tenant]).await.map_err(|error| server_error(&error))?;
        if let Some(row) = rows.first() {
            let (bytes, expected): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
            bar.set_length(expected.max(bytes) as u64);
            bar.set_position(bytes as u64);
        }
    }
}

/// Runs `fulmar moves`.
pub async fn list(arguments: MovesArgs) -> anyhow::Result<()> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    if arguments.json {
        return output::json(&reports(&client, arguments.name.as_deref(), arguments.limit).await?);
    }
    let sql = "SELECT coalesce(tenant, 'partition ' || partition), mechanism, source, destination, step, bytes, \
               total_ms, freeze_ms, pause_ms, failed, coalesce(error, '') FROM fulmar.migrations \
               WHERE $1 = '' OR tenant = $1 ORDER BY started DESC LIMIT $2::bigint";
    let (name, limit) = (arguments.name.as_deref().unwrap_or_default(), i64::from(arguments.limit));
    let rows = client.query(sql, &[&name, &limit]).await.map_err(|error| server_error(&error))?;
    let mut table = output::table([
        "tenant",
        "mechanism",
        "from",
        "to",
        "state",
        "copied",
        "total",
        "freeze",
        "pause",
        "failed",
        "error",
    ]);
    for row in &rows {
        table.add_row(cells(row)?);
    }
    output::line(&table.to_string())
}

fn cells(row: &Row) -> anyhow::Result<[String; 11]> {
    let text = |at: usize| row.try_get::<_, String>(at);
    let number = |at: usize| row.try_get::<_, i64>(at);
    let ms = |at: usize| number(at).map(|ms| format!("{ms} ms"));
    Ok([
        text(0)?,
        text(1)?,
        text(2)?,
        text(3)?,
        text(4)?,
        Bytes(number(5)? as u64).to_string(),
        ms(6)?,
        ms(7)?,
        ms(8)?,
        number(9)?.to_string(),
        text(10)?,
    ])
}

/// The newest reports, newest first.
async fn reports(
    client: &Client,
    tenant: Option<&str>,
    limit: u32,
) -> anyhow::Result<Vec<serde_json::Value>> {
    let sql = "SELECT report FROM fulmar.migrations WHERE $1 = '' OR tenant = $1 ORDER BY started DESC \
               LIMIT $2::bigint";
    let parameters: (&str, i64) = (tenant.unwrap_or_default(), i64::from(limit));
    let rows = client.query(sql, &[&parameters.0, &parameters.1]).await;
    let rows = rows.map_err(|error| server_error(&error))?;
    let report = |row: &Row| Ok(serde_json::from_str(&row.try_get::<_, String>(0)?)?);
    rows.iter().map(report).collect()
}

fn started_ms(report: &serde_json::Value) -> u64 {
    report["started_unix_ms"].as_u64().unwrap_or_default()
}

fn summary(report: &serde_json::Value) -> String {
    let number = |name: &str| report[name].as_u64().unwrap_or_default();
    let throttled = match number("throttled_ms") {
        0 => String::new(),
        ms => format!(" ({ms} ms of them waiting, to keep latencies within their bounds)"),
    };
    format!(
        "{} copied in {} ms{throttled}, frozen for {} ms, longest wait of a client {} ms",
        Bytes(number("bytes")),
        number("copy_ms"),
        number("freeze_ms"),
        number("pause_ms")
    )
}
