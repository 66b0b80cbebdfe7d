//! Runs a Fulmar cluster on loopback: etcd, a common store, and several nodes, in a temporary
//! directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::ports::ReservedPort;
use super::usage::ProcessTree;
use super::{Etcd, POLL_INTERVAL, S3Server, START_TIMEOUT, STOP_TIMEOUT, first_answer, tail};
use crate::Target;

/// The database that a node answers for when it is ready.
const SYSTEM_DATABASE: &str = "fulmar";

/// Where a cluster keeps its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClusterStore {
    /// A directory that all nodes share.
    #[default]
    Directory,
    /// An S3 server.
    S3,
}

/// How a cluster is set up.
#[derive(Clone, Debug)]
pub struct ClusterSetup {
    /// The number of nodes: `n1`, `n2` ...
    pub nodes: usize,
    /// The number of members of etcd.
    pub etcd_members: usize,
    /// The store.
    pub store: ClusterStore,
    /// Memory for the pages of each node.
    pub memory_bytes: u64,
    /// Additional arguments of `fulmar start`.
    pub arguments: Vec<String>,
}

impl Default for ClusterSetup {
    fn default() -> Self {
        ClusterSetup {
            nodes: 3,
            etcd_members: 1,
            store: ClusterStore::default(),
            memory_bytes: 64 << 20,
            arguments: Vec::new(),
        }
    }
}

/// A node, running or not.
struct ClusterNode {
    name: String,
    data: PathBuf,
    log: PathBuf,
    ports: [ReservedPort; 3],
    child: Option<Child>,
}

/// A cluster. Dropping it kills its processes, by their ids, and removes its data.
pub struct Cluster {
    binary: PathBuf,
    setup: ClusterSetup,
    nodes: Vec<ClusterNode>,
    etcd: Etcd,
    s3: Option<S3Server>,
    // Dropped last, after the processes have ended.
    directory: TempDir,
}

impl Cluster {
    /// Starts a cluster of the executable `binary`, and waits until all nodes answer.
    pub async fn start(binary: &Path, setup: ClusterSetup) -> anyhow::Result<Cluster> {
        let mut cluster = Self::prepare(binary, setup)?;
        // The first node founds the cluster.
        for number in 0..cluster.nodes.len() {
            cluster.start_node(number).await?;
        }
        Ok(cluster)
    }

    /// Starts etcd and the store, and no node yet.
    pub fn prepare(binary: &Path, setup: ClusterSetup) -> anyhow::Result<Cluster> {
        let directory = tempfile::Builder::new().prefix("fulmar-cluster-").tempdir();
        let directory = directory.context("could not create a temporary directory")?;
        let etcd = Etcd::start(setup.etcd_members)?;
        let s3 = (setup.store == ClusterStore::S3).then(S3Server::start).transpose()?;
        let mut cluster =
            Cluster { binary: binary.to_owned(), nodes: Vec::new(), etcd, s3, directory, setup };
        for _ in 0..cluster.setup.nodes {
            cluster.add_node()?;
        }
        Ok(cluster)
    }

    /// Adds a node, which does not run yet. Returns its number.
    pub fn add_node(&mut self) -> anyhow::Result<usize> {
        let number = self.nodes.len();
        let name = format!("n{}", number + 1);
        let ports =
            [ReservedPort::reserve_free()?, ReservedPort::reserve_free()?, ReservedPort::reserve_free()?];
        let (data, log) = (self.path(&name), self.path(&format!("{name}.log")));
        self.nodes.push(ClusterNode { name, data, log, ports, child: None });
        Ok(number)
    }

    /// The command that starts a node.
    pub fn command(&self, number: usize) -> Command {
        let node = &self.nodes[number];
        let [sql, http, rpc] = node.ports.each_ref().map(|port| format!("127.0.0.1:{}", port.number()));
        let mut command = Command::new(&self.binary);
        command.arg("start").arg("--data").arg(&node.data);
        command.args(["--sql", &sql, "--http", &http, "--rpc", &rpc, "--node", &node.name, "--insecure"]);
        command.arg("--meta").arg(format!("etcd://{}", self.etcd.endpoints().join(",")));
        command.arg("--memory").arg(self.setup.memory_bytes.to_string());
        match &self.s3 {
            Some(s3) => {
                command.arg("--store").arg(s3.url("cluster")).envs(s3.environment());
            }
            None => {
                command.arg("--store").arg(self.path("store"));
            }
        }
        command.args(&self.setup.arguments);
        command
    }

    /// Starts a node that does not run, and waits until it answers. Returns how long that took.
    pub async fn start_node(&mut self, number: usize) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        self.spawn_node(number)?;
        loop {
            let last = match first_answer(&self.target(number), "SELECT 1").await {
                Ok(()) => return Ok(begun.elapsed()),
                Err(error) => error,
            };
            let node = &mut self.nodes[number];
            let name = node.name.clone();
            if let Some(status) = node.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                node.child = None;
                bail!(
                    "{name} exited before it answered: {status}; end of its log:\n{}",
                    self.log_tail(number)
                );
            }
            if begun.elapsed() > START_TIMEOUT {
                let log = self.log_tail(number);
                bail!("{name} did not answer within {START_TIMEOUT:?}: {last}; end of its log:\n{log}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Starts a node that does not run, without waiting.
    pub fn spawn_node(&mut self, number: usize) -> anyhow::Result<()> {
        let mut command = self.command(number);
        let node = &mut self.nodes[number];
        ensure!(node.child.is_none(), "{} is already running", node.name);
        let log =
            File::options().create(true).append(true).open(&node.log).context("could not open a log")?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        node.child = Some(command.spawn().with_context(|| format!("could not run {command:?}"))?);
        Ok(())
    }

    /// Kills a node with SIGKILL.
    pub fn kill(&mut self, number: usize) -> anyhow::Result<()> {
        let node = &mut self.nodes[number];
        let mut child = node.child.take().with_context(|| format!("{} is not running", node.name))?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Stops a node with SIGTERM, and waits until it has exited.
    pub async fn stop(&mut self, number: usize) -> anyhow::Result<ExitStatus> {
        self.signal(number, Signal::TERM)?;
        self.wait_for_exit(number).await
    }

    /// Waits until a node has exited.
    pub async fn wait_for_exit(&mut self, number: usize) -> anyhow::Result<ExitStatus> {
        let node = &mut self.nodes[number];
        let child = node.child.as_mut().with_context(|| format!("{} is not running", node.name))?;
        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                node.child = None;
                return Ok(status);
            }
            ensure!(begun.elapsed() < STOP_TIMEOUT, "{} did not exit within {STOP_TIMEOUT:?}", node.name);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Sends a signal to a node, for example [`Signal::STOP`] and [`Signal::CONT`].
    pub fn signal(&self, number: usize, signal: Signal) -> anyhow::Result<()> {
        let node = &self.nodes[number];
        let child = node.child.as_ref().with_context(|| format!("{} is not running", node.name))?;
        kill_process(Pid::from_child(child), signal)?;
        Ok(())
    }

    /// The number of nodes, running or not.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// The name of a node.
    pub fn name(&self, number: usize) -> &str {
        &self.nodes[number].name
    }

    /// Returns true if the node has been started, and not killed or stopped.
    pub fn is_running(&self, number: usize) -> bool {
        self.nodes[number].child.is_some()
    }

    /// The administrative database through a node.
    pub fn target(&self, number: usize) -> Target {
        Target {
            host: "127.0.0.1".to_owned(),
            port: self.nodes[number].ports[0].number(),
            user: SYSTEM_DATABASE.to_owned(),
            password: None,
            database: SYSTEM_DATABASE.to_owned(),
        }
    }

    /// The URL of a database through a node.
    pub fn url(&self, number: usize, database: &str) -> String {
        let port = self.nodes[number].ports[0].number();
        format!("postgres://{SYSTEM_DATABASE}@127.0.0.1:{port}/{database}")
    }

    /// The port of a node for HTTP.
    pub fn http_port(&self, number: usize) -> u16 {
        self.nodes[number].ports[1].number()
    }

    /// The port of a node for other nodes.
    pub fn rpc_port(&self, number: usize) -> u16 {
        self.nodes[number].ports[2].number()
    }

    /// The processes of a node.
    pub fn processes(&self, number: usize) -> anyhow::Result<ProcessTree> {
        let node = &self.nodes[number];
        let child = node.child.as_ref().with_context(|| format!("{} is not running", node.name))?;
        Ok(ProcessTree::of(Pid::from_child(child)))
    }

    /// The data directory of a node.
    pub fn data(&self, number: usize) -> &Path {
        &self.nodes[number].data
    }

    /// The end of a node's log.
    pub fn log_tail(&self, number: usize) -> String {
        let read = tail(&self.nodes[number].log);
        read.unwrap_or_else(|error| format!("(could not read it: {error})"))
    }

    /// etcd.
    pub fn etcd(&mut self) -> &mut Etcd {
        &mut self.etcd
    }

    /// A path in the temporary directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            if let Some(mut child) = node.child.take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
