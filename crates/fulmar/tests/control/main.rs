//! The controller on real nodes, with etcd and a common store: it balances, adds and removes nodes,
//! survives the death of its node, and is not misled by a provisioner that fails, hangs or lies.

#[path = "../common/mod.rs"]
mod common;

mod balance;
mod forecast;
mod keys;
mod kills;
mod nodes;
mod provisioners;
mod slow_nodes;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{run, stderr_of_failure, stdout, wait_until, with_timeout};
use fulmar_workload::server::{Cluster, ClusterSetup};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

/// Rounds and pauses in tenths of seconds.
const QUICK: &[(&str, &str)] = &[
    ("round", "100ms"),
    ("step", "200ms"),
    ("node_start", "1s"),
    ("hold_up", "200ms"),
    ("hold_down", "300ms"),
    ("cool_down", "300ms"),
    ("replace_after", "1h"),
];

/// Starts nodes with the stated capacity of a tenth of a CPU, which any busy client exceeds.
async fn start(nodes: usize, mut arguments: Vec<String>) -> Cluster {
    arguments.extend(["--cpus".to_owned(), "0.1".to_owned()]);
    let setup = ClusterSetup { nodes, arguments, ..ClusterSetup::default() };
    Cluster::start(Path::new(env!("CARGO_BIN_EXE_fulmar")), setup).await.unwrap()
}

async fn try_connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = with_timeout("a connection", tokio_postgres::connect(url, NoTls)).await?;
    tokio::spawn(connection);
    Ok(client)
}

async fn execute(cluster: &Cluster, node: usize, database: &str, sql: &str) {
    let client = try_connect(&cluster.url(node, database)).await.unwrap();
    with_timeout(sql, client.batch_execute(sql)).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// The first column of a query in the system database, as text.
async fn query(cluster: &Cluster, node: usize, sql: &str) -> Vec<String> {
    let read = async {
        loop {
            let client = try_connect(&cluster.url(node, "fulmar")).await.unwrap();
            match client.query(sql, &[]).await {
                Ok(rows) => return rows,
                // The owner of the system database has been killed or suspended.
                Err(error) if error.code() == Some(&SqlState::TRANSACTION_RESOLUTION_UNKNOWN) => {}
                Err(error) => panic!("{sql}: {error:?}"),
            }
        }
    };
    with_timeout(sql, read).await.iter().map(|row| row.get(0)).collect()
}

/// Runs `fulmar control`.
fn control(cluster: &Cluster, node: usize, arguments: &[&str]) -> String {
    let server = cluster.url(node, "fulmar");
    let command = [&["control"], arguments, &["--server", &server]].concat();
    stdout(&run(&command))
}

fn set(cluster: &Cluster, node: usize, settings: &[(&str, &str)]) {
    for (name, value) in settings {
        control(cluster, node, &["set", name, value]);
    }
}

/// The decisions, newest first, as `fulmar decisions --json` prints them.
fn decisions(cluster: &Cluster, node: usize) -> Vec<Value> {
    let server = cluster.url(node, "fulmar");
    let text = stdout(&run(&["decisions", "--limit", "1000", "--json", "--server", &server]));
    serde_json::from_str(&text).unwrap()
}

/// The outcome of the newest decision of a kind.
fn outcome(cluster: &Cluster, node: usize, action: &str) -> Option<Value> {
    let newest = decisions(cluster, node).into_iter().find(|decision| decision["action"] == action)?;
    newest.get("outcome").cloned()
}

/// A row of `fulmar.control`.
async fn shown(cluster: &Cluster, node: usize, name: &str) -> String {
    let sql = format!("SELECT value FROM fulmar.control WHERE name = '{name}'");
    query(cluster, node, &sql).await.remove(0)
}

/// Waits for a controller. Returns its name.
async fn elected(cluster: &Cluster) -> String {
    wait_until("a controller", async || !shown(cluster, 0, "controller").await.is_empty()).await;
    shown(cluster, 0, "controller").await
}

/// The events of a kind at all nodes that run.
async fn events(cluster: &Cluster, kind: &str) -> Vec<String> {
    let sql = format!("SELECT CAST(details AS TEXT) FROM fulmar.events WHERE kind = '{kind}'");
    let mut events = Vec::new();
    for node in (0..cluster.nodes()).filter(|node| cluster.is_running(*node)) {
        events.extend(query(cluster, node, &sql).await);
    }
    events
}

async fn node_states(cluster: &Cluster, through: usize) -> Vec<String> {
    query(cluster, through, "SELECT name || ' ' || state FROM fulmar.nodes ORDER BY name").await
}

async fn wait_for_nodes(cluster: &Cluster, through: usize, expected: &[&str]) {
    let what = format!("nodes: {expected:?}");
    wait_until(&what, async || node_states(cluster, through).await == expected).await;
}

/// The nodes that own databases other than the system's.
async fn owners(cluster: &Cluster, through: usize) -> Vec<String> {
    let sql = "SELECT node FROM fulmar.partitions WHERE tenant <> 'fulmar' ORDER BY tenant";
    query(cluster, through, sql).await
}

/// The directory of a provisioner `processes`. Dropping it kills the nodes that are left.
struct Provisioned {
    directory: PathBuf,
}

impl Provisioned {
    /// A directory beside the cluster's, and the flag for it.
    fn new(name: &str, first_port: u16) -> (Provisioned, Vec<String>) {
        let directory = std::env::temp_dir().join(format!("fulmar-control-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let directory = directory.canonicalize().unwrap();
        let flag = format!("processes:{}:{first_port}-{}", directory.display(), first_port + 29);
        (Provisioned { directory }, vec!["--provisioner".to_owned(), flag])
    }

    /// The processes of nodes in the directory.
    fn processes(&self) -> Vec<i32> {
        let text = self.directory.display().to_string();
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let is_own = |id: &i32| {
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            let arguments: Vec<String> = line
                .split(|byte| *byte == 0)
                .map(|argument| String::from_utf8_lossy(argument).into_owned())
                .collect();
            arguments.windows(2).any(|pair| pair[0] == "--data" && pair[1].starts_with(&text))
        };
        ids.filter(is_own).collect()
    }

    /// Kills them.
    fn kill(&self) {
        for id in self.processes() {
            if let Some(pid) = Pid::from_raw(id) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

impl Drop for Provisioned {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Inserts ascending values until it is stopped, with a pause after each. Returns their number.
fn write(url: String, pause: Duration, stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<i64> {
    tokio::spawn(async move {
        let client = try_connect(&url).await.unwrap();
        let mut written = 0_i64;
        while !stop.load(Ordering::Relaxed) {
            let values: [&(dyn tokio_postgres::types::ToSql + Sync); 1] = [&written];
            let insert = client.execute("INSERT INTO t VALUES ($1)", &values);
            with_timeout("an insert", insert).await.unwrap_or_else(|error| panic!("{written}: {error:?}"));
            written += 1;
            tokio::time::sleep(pause).await;
        }
        written
    })
}

/// Keeps a node busy with statements until it is stopped. Fails if one of them does.
fn burn(url: String, stop: Arc<AtomicBool>) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let client = try_connect(&url).await.unwrap();
        let sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) \
                   SELECT count(*) FROM n";
        while !stop.load(Ordering::Relaxed) {
            let query = client.query_one(sql, &[]);
            with_timeout("a query", query).await.unwrap_or_else(|error| panic!("a query failed: {error:?}"));
        }
    })
}

async fn create(cluster: &Cluster, databases: &[&str]) {
    for database in databases {
        execute(cluster, 0, "fulmar", &format!("CREATE DATABASE {database}")).await;
        execute(cluster, 0, database, "CREATE TABLE t(v INTEGER PRIMARY KEY)").await;
    }
}
