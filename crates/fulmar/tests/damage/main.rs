//! Corruption of the files of a data directory, of a single node and of a cluster's node with
//! embedded metadata, tested with the real executable.
//!
//! - After a crash and after a clean shutdown, each file is corrupted: bits are flipped, a range is
//!   zeroed, the end is cut off, or the file is deleted.
//! - Either all data stays readable, or the node refuses to start or reports an error. The error
//!   names the file.
//! - After the file has been restored, all data is readable again.
//! - A start with an old copy of the catalog, or of the metadata store, is refused.

#[path = "../common/mod.rs"]
mod common;

mod catalog;
mod cluster;
mod files;
mod salts;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::Node;
use fulmar_workload::server::ReservedPort;
use rustix::process::Signal;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

/// The data directory of a stopped node, and its expected contents.
struct Rig {
    directory: tempfile::TempDir,
    contents: Vec<String>,
    /// Where a node of a cluster listens for other nodes. `None`: a single node.
    rpc: Option<Arc<ReservedPort>>,
}

impl Rig {
    fn new(rpc: Option<Arc<ReservedPort>>) -> Rig {
        Rig { directory: tempfile::tempdir().unwrap(), contents: Vec::new(), rpc }
    }

    fn data(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join("data")
    }

    /// The store of a cluster.
    fn store(&self) -> PathBuf {
        self.data().with_file_name("store")
    }

    /// Copies the data directory, and the store of a cluster.
    fn copy(&self) -> Rig {
        let to = Rig { contents: self.contents.clone(), ..Rig::new(self.rpc.clone()) };
        let mut copy = Command::new("cp");
        copy.args(["-a", "--sparse=always"]).arg(self.data());
        copy.args(self.rpc.is_some().then(|| self.store())).arg(to.directory.path());
        assert!(copy.status().unwrap().success());
        to
    }

    /// Returns the flags of the node of a cluster: its metadata store is embedded.
    fn cluster_flags(&self) -> Vec<String> {
        let Some(port) = &self.rpc else { return Vec::new() };
        let (rpc, store) =
            (format!("127.0.0.1:{}", port.number()), format!("file://{}", self.store().display()));
        let flags = ["--node", "n1", "--meta", "embedded", "--rpc", &rpc, "--store", &store];
        flags.map(str::to_owned).to_vec()
    }

    /// Restores a file from another copy.
    fn restore(&self, good: &Rig, file: &Path) {
        std::fs::copy(good.data().join(file), self.data().join(file)).unwrap();
    }

    /// Returns all files, as paths relative to the directory.
    fn files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut directories = vec![self.data()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => directories.push(path),
                    false => found.push(path.strip_prefix(self.data()).unwrap().to_owned()),
                }
            }
        }
        found.sort();
        found
    }

    /// Starts a node, or returns its error. Its log goes to a file next to the data directory.
    fn start(&self, flags: &[&str]) -> Result<Node, String> {
        let log = self.directory.path().join("stderr");
        let mut command = Node::command(&self.data(), flags);
        command.args(self.cluster_flags());
        command.stderr(std::fs::File::create(&log).unwrap()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let line = common::first_line(&mut process);
        if line.is_empty() {
            assert_eq!(common::wait(&mut process).code(), Some(1));
            return Err(self.stderr());
        }
        Ok(Node::ready(process, &line))
    }

    /// Returns the stderr output of the last node.
    fn stderr(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("stderr")).unwrap()
    }

    /// Starts a node and reads all contents. Returns the error that a client or the operator sees.
    async fn read(&self) -> Result<Vec<String>, String> {
        let node = self.start(&[])?;
        let contents = contents(&node, &self.password()).await;
        assert_eq!(node.stop_with(Signal::KILL), None);
        contents.map_err(|error| error + &self.stderr())
    }

    fn password(&self) -> String {
        // Prefer the password from an earlier start: the file may be corrupted.
        match self.contents.first().and_then(|line| line.strip_prefix("superuser ")) {
            Some(password) => password.to_owned(),
            None => {
                std::fs::read_to_string(self.data().join("superuser-password")).unwrap().trim().to_owned()
            }
        }
    }
}

async fn log_in(node: &Node, user: &str, password: &str, database: &str) -> Result<Client, String> {
    let url = format!("postgres://{user}:{password}@{}/{database}", node.sql);
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.map_err(text)?;
    tokio::spawn(connection);
    Ok(client)
}

fn text(error: tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(error) => {
            let parts = [Some(error.message()), error.detail(), error.hint()];
            parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
        }
        None => error.to_string(),
    }
}

const TENANTS: [&str; 3] = ["crm", "shop", "wiki"];

/// Returns the first column of a result.
async fn column(client: &Client, sql: &str) -> Result<Vec<String>, String> {
    let messages = client.simple_query(sql).await.map_err(text)?;
    let value = |message| match message {
        SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
        _ => None,
    };
    Ok(messages.into_iter().filter_map(value).collect())
}

/// Reads tenants, users, privileges and rows.
async fn contents(node: &Node, password: &str) -> Result<Vec<String>, String> {
    let mut lines = vec![format!("superuser {password}")];
    let system = log_in(node, "fulmar", password, "fulmar").await?;
    lines.extend(column(&system, "SELECT 'database ' || datname FROM pg_database ORDER BY 1").await?);
    lines.extend(column(&system, "SELECT 'user ' || rolname FROM pg_roles ORDER BY 1").await?);
    for tenant in TENANTS {
        let client = log_in(node, "fulmar", password, tenant).await?;
        for rows in column(&client, "SELECT count(*) || ' rows of ' || sum(length(x)) FROM t").await? {
            lines.push(format!("{tenant}: {rows}"));
        }
    }
    for (user, tenant) in [("ada", "shop"), ("ada", "crm"), ("bob", "crm"), ("bob", "shop"), ("eve", "shop")]
    {
        let privilege = match log_in(node, user, &format!("secret-of-{user}"), tenant).await {
            Err(_) => "nothing",
            Ok(client) => match client.execute("DELETE FROM t WHERE false", &[]).await {
                Ok(_) => "write",
                Err(_) => "read",
            },
        };
        lines.push(format!("privilege of {user} in {tenant}: {privilege}"));
    }
    Ok(lines)
}

/// A single node.
async fn rig(end: Signal) -> Rig {
    fill(Rig::new(None), end).await
}

/// Creates tenants with rows in segments and in the log, users and privileges, and drops and
/// revokes some.
async fn fill(rig: Rig, end: Signal) -> Rig {
    let node = rig.start(&[]).unwrap();
    let password = rig.password();
    let system = log_in(&node, "fulmar", &password, "fulmar").await.unwrap();
    let run =
        async |sql: &str| system.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    for user in ["ada", "bob", "eve"] {
        run(&format!("CREATE USER {user} PASSWORD 'secret-of-{user}'")).await;
    }
    for tenant in TENANTS {
        run(&format!("CREATE DATABASE {tenant}")).await;
        let client = log_in(&node, "fulmar", &password, tenant).await.unwrap();
        client.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (hex(zeroblob(9000)))").await.unwrap();
        // A branch flushes its source.
        run(&format!("CREATE DATABASE branch TEMPLATE {tenant}")).await;
        run("DROP DATABASE branch").await;
        client.batch_execute("INSERT INTO t VALUES ('in the log')").await.unwrap();
    }
    for sql in [
        "GRANT CONNECT ON DATABASE shop TO ada, eve",
        "GRANT CONNECT ON DATABASE crm TO ada",
        "GRANT SELECT ON DATABASE crm TO bob",
        "REVOKE CONNECT ON DATABASE crm FROM ada",
        "REVOKE CONNECT ON DATABASE shop FROM eve",
        "DROP USER eve",
    ] {
        run(sql).await;
    }
    let contents = contents(&node, &password).await.unwrap();
    for (user, privilege) in [
        ("ada in shop", "write"),
        ("ada in crm", "nothing"),
        ("bob in crm", "read"),
        ("bob in shop", "nothing"),
        ("eve in shop", "nothing"),
    ] {
        let line = format!("privilege of {user}: {privilege}");
        assert!(contents.contains(&line), "{line} is expected: {contents:?}");
    }
    // Corruption of the last record of an unsealed log cannot be distinguished from a torn write,
    // so the last commit must not be part of the expected contents.
    let shop = log_in(&node, "fulmar", &password, "shop").await.unwrap();
    for _ in 0..2 {
        shop.batch_execute("CREATE TABLE IF NOT EXISTS last(x); INSERT INTO last VALUES (1)").await.unwrap();
    }
    drop((system, shop));
    assert_eq!(node.stop_with(end), (end == Signal::TERM).then_some(0));
    Rig { contents, ..rig }
}
