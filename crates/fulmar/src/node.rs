//! `fulmar node`: lists, drains, moves and removes the nodes of a cluster with SQL statements.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::stream::{self, StreamExt};
use indicatif::ProgressFinish;
use serde::Serialize;
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::cli::{NodeAction, NodeArgs, NodeMoveArgs};
use crate::client::{connect, from_row, server_error};
use crate::moves::{clauses, move_tenant};
use crate::output;
use crate::size::Bytes;
use crate::tenant::{SYSTEM_DATABASE, literal, quoted};

/// How often the progress of a move of a node is read.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Number of databases that a drain moves concurrently.
const CONCURRENT_MOVES: usize = 16;
/// Number of databases that an error names.
const MAX_NAMED: usize = 10;

/// A row of the node list.
#[derive(Serialize)]
struct NodeRow {
    name: String,
    state: String,
    incarnation: i64,
    partitions: i64,
    sql: String,
    rpc: String,
    /// In which respect the node is many times slower than the others.
    slow: Option<String>,
}

/// A drained database, for `--json`.
#[derive(Serialize)]
struct Moved {
    database: String,
    node: String,
}

/// Runs `fulmar node`.
pub async fn run(arguments: NodeArgs) -> anyhow::Result<()> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let nodes = nodes(&client).await?;
    ensure!(
        !nodes.is_empty(),
        "no nodes are visible: the node is not part of a cluster, or the user is not a superuser"
    );
    match &arguments.action {
        NodeAction::List => list(&nodes, arguments.json),
        NodeAction::Drain { name } => drain(&client, name, &nodes, &arguments).await,
        NodeAction::Move(of) => move_all(&client, of, &arguments).await,
        NodeAction::Forget { name } => forget(&client, name, arguments.json).await,
    }
}

async fn forget(client: &Client, name: &str, json: bool) -> anyhow::Result<()> {
    let dropped = client.batch_execute(&format!("DROP NODE {}", quoted(name))).await;
    dropped
        .map_err(|error| server_error(&error))
        .with_context(|| format!("node \"{name}\" was not removed"))?;
    match json {
        true => output::json(&serde_json::json!({ "node": name })),
        false => output::line(&format!("removed node {name}")),
    }
}

async fn nodes(client: &Client) -> anyhow::Result<Vec<NodeRow>> {
    let sql = "SELECT name, state, incarnation, partitions, sql, rpc, slow FROM fulmar.nodes ORDER BY name";
    let rows = client.query(sql, &[]).await.map_err(|error| server_error(&error))?;
    let node = |row: &tokio_postgres::Row| -> Result<NodeRow, tokio_postgres::Error> {
        Ok(from_row!(row => NodeRow { name, state, incarnation, partitions, sql, rpc, slow }))
    };
    Ok(rows.iter().map(node).collect::<Result<_, _>>()?)
}

fn list(nodes: &[NodeRow], json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(&nodes);
    }
    let mut table = output::table(["node", "state", "incarnation", "databases", "sql", "rpc", "slow"]);
    for node in nodes {
        let (incarnation, partitions) = (node.incarnation.to_string(), node.partitions.to_string());
        let slow = node.slow.as_deref().unwrap_or_default();
        let (sql, rpc) = (&*node.sql, &*node.rpc);
        table.add_row([&*node.name, &*node.state, &*incarnation, &*partitions, sql, rpc, slow]);
    }
    output::line(&table.to_string())
}

/// Moves all databases of a node, each to the node that has the fewest by then. Fails after that if
/// databases stay because they are local to the node, while others are in the common store.
async fn drain(client: &Client, name: &str, nodes: &[NodeRow], arguments: &NodeArgs) -> anyhow::Result<()> {
    ensure!(nodes.iter().any(|node| node.name == name), "node \"{name}\" does not exist");
    let others: Vec<_> = nodes.iter().filter(|node| node.name != name && node.state == "alive").collect();
    let has_fast = others.iter().any(|node| node.slow.is_none());
    let others = others.iter().filter(|node| !has_fast || node.slow.is_none());
    let mut counts: BTreeMap<&str, i64> = others.map(|node| (node.name.as_str(), node.partitions)).collect();
    ensure!(!counts.is_empty(), "no other node is alive; start one first");
    let (databases, local) = databases(client, name).await?;
    let mut moves = Vec::with_capacity(databases.len());
    for database in databases {
        let least = counts.iter_mut().min_by_key(|(_, count)| **count);
        let (node, count) = least.context("no other node is alive; start one first")?;
        *count += 1;
        moves.push(Moved { database, node: (*node).to_owned() });
    }
    let bar = output::progress("moved", moves.len() as u64);
    // A connection runs one statement at a time.
    let mut clients = Vec::new();
    for _ in 0..CONCURRENT_MOVES.min(moves.len()) {
        clients.push(connect(&arguments.server, SYSTEM_DATABASE).await?);
    }
    let queue = std::sync::Mutex::new(moves.iter());
    let workers = clients.iter().map(|client| {
        let (queue, bar) = (&queue, &bar);
        async move {
            loop {
                let next = queue.lock().ok().and_then(|mut queue| queue.next());
                let Some(Moved { database, node }) = next else { return Ok(()) };
                move_tenant(client, database, node, "").await?;
                bar.inc(1);
            }
        }
    });
    let results: Vec<anyhow::Result<()>> =
        stream::iter(workers).buffer_unordered(CONCURRENT_MOVES).collect().await;
    bar.finish_and_clear();
    results.into_iter().collect::<anyhow::Result<()>>()?;
    match arguments.json {
        true => output::json(&moves)?,
        false => output::line(&format!("moved {} databases from {name}", moves.len()))?,
    }
    ensure!(
        local.is_empty(),
        "{} databases of node {name} have durability = 'local' and cannot be moved: {}; move them into the \
         store first, with ALTER DATABASE ... SET durability = 'shared'",
        local.len(),
        local[..local.len().min(MAX_NAMED)].join(", ")
    );
    Ok(())
}

/// The databases of a node that can be moved, and those that cannot.
async fn databases(client: &Client, node: &str) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let sql = "SELECT \"default\" FROM fulmar.limits WHERE tenant = $1 AND name = 'durability'";
    let row = client.query_one(sql, &[&SYSTEM_DATABASE]).await.map_err(|error| server_error(&error))?;
    let has_private_stores = row.try_get::<_, String>(0)? == "local";
    let sql = "SELECT tenant, durability FROM fulmar.partitions WHERE node = $1 ORDER BY partition";
    let rows = client.query(sql, &[&node]).await.map_err(|error| server_error(&error))?;
    let (mut movable, mut local) = (Vec::new(), Vec::new());
    for row in &rows {
        let (database, durability): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        match has_private_stores {
            // Each node has an empty system database of its own.
            true if database == SYSTEM_DATABASE => {}
            false if durability == "local" => local.push(database),
            _ => movable.push(database),
        }
    }
    Ok((movable, local))
}

/// Moves all databases of a node to another one.
async fn move_all(client: &Client, of: &NodeMoveArgs, arguments: &NodeArgs) -> anyhow::Result<()> {
    let (name, to) = (&of.name, &of.to);
    let clauses = clauses(of.using, of.max_rate);
    let statement = format!("ALTER NODE {} MOVE TO {}{clauses}", quoted(name), literal(to));
    // A connection runs one statement at a time.
    let watching = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let moved = tokio::select! {
        moved = client.simple_query(&statement) => moved.map_err(|error| server_error(&error)),
        never = show_moved(&watching, name) => never,
    };
    let messages = moved.with_context(|| format!("node \"{name}\" was not moved to node \"{to}\""))?;
    let report = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    });
    let report: serde_json::Value = serde_json::from_str(report.context("the node has sent no report")?)?;
    if arguments.json {
        return output::json(&report);
    }
    let number = |field: &str| report[field].as_u64().unwrap_or_default();
    output::line(&format!(
        "moved {} databases from {name} to {to} in {} ms: {} copied, longest freeze {} ms, longest wait of a \
         client {} ms, {} transactions failed",
        number("databases"),
        number("total_ms"),
        Bytes(number("bytes")),
        number("freeze_ms"),
        number("pause_ms"),
        number("failed")
    ))
}

/// Shows how many databases have left a node, for as long as it is polled.
async fn show_moved(client: &Client, node: &str) -> anyhow::Result<Vec<SimpleQueryMessage>> {
    let sql = "SELECT count(*) FROM fulmar.partitions WHERE node = $1 AND tenant <> 'fulmar'";
    let count = async || -> anyhow::Result<u64> {
        let row = client.query_one(sql, &[&node]).await.map_err(|error| server_error(&error))?;
        Ok(row.try_get::<_, i64>(0)? as u64)
    };
    let total = count().await?;
    let bar = output::progress("moved", total).with_finish(ProgressFinish::AndClear);
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        bar.set_position(total.saturating_sub(count().await?));
    }
}
