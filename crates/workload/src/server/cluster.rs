//! Runs a Fulmar cluster on loopback: etcd, a common store unless each node has its own, and several
//! nodes, in a temporary directory.

use std::fs::File;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::control_group::ControlGroup;
use super::network::{HUB, Network};
use super::ports::ReservedPort;
use super::usage::ProcessTree;
use super::wan::{Wan, WanProxies};
use super::{Etcd, EtcdSetup, POLL_INTERVAL, S3Server, START_TIMEOUT, STOP_TIMEOUT, first_answer, tail};
use crate::Target;
use crate::client::Client;

/// The database that a node answers for when it is ready.
const SYSTEM_DATABASE: &str = "fulmar";
/// The file in the data directory of the first node with the superuser's password.
const PASSWORD_FILE: &str = "superuser-password";

/// The errors of a command whose metadata store has not answered within the product's limit: etcd,
/// and the metadata store embedded in another node.
const NO_ANSWER: [&str; 2] =
    ["no majority of etcd's members answered within", "does not answer: no connection within"];

/// Returns true if a command of Fulmar has failed only because the metadata store did not answer
/// within the product's limit, which a busy machine can exceed. `log` is its standard error.
pub fn metadata_did_not_answer(log: &str) -> bool {
    let error = log.lines().rev().find(|line| line.starts_with("fulmar: "));
    error.is_some_and(|error| NO_ANSWER.iter().any(|text| error.contains(text)))
}

/// Where a cluster keeps its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClusterStore {
    /// A directory that all nodes share.
    #[default]
    Directory,
    /// An S3 server.
    S3,
    /// Each node has its own, in its data directory.
    Private,
}

/// How a cluster is set up.
#[derive(Clone, Debug)]
pub struct ClusterSetup {
    /// The number of nodes: `n1`, `n2` ...
    pub nodes: usize,
    /// The number of members of etcd.
    pub etcd_members: usize,
    /// Additional arguments of each member of etcd.
    pub etcd_arguments: Vec<String>,
    /// Embeds the metadata store in the first node. etcd runs, but is not used.
    pub embedded_metadata: bool,
    /// The store.
    pub store: ClusterStore,
    /// Delays each PUT of the S3 server by a random time in this range.
    pub put_delay: Option<RangeInclusive<Duration>>,
    /// Memory for the pages of each node.
    pub memory_bytes: u64,
    /// Runs each node in its own network namespace, so that it can be cut off
    /// ([`Cluster::network`]). This process must be in a private namespace
    /// ([`run_in_private`](super::run_in_private)). Clients then log in with a password.
    pub isolated: bool,
    /// Two sites with a wide-area network between them. The nodes have to be isolated.
    pub wan: Option<Wan>,
    /// Additional arguments of `fulmar start`.
    pub arguments: Vec<String>,
}

impl Default for ClusterSetup {
    fn default() -> Self {
        ClusterSetup {
            nodes: 3,
            etcd_members: 1,
            etcd_arguments: Vec::new(),
            embedded_metadata: false,
            store: ClusterStore::default(),
            put_delay: None,
            memory_bytes: 64 << 20,
            isolated: false,
            wan: None,
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
    /// Additional arguments of its next start.
    arguments: Vec<String>,
    /// Environment variables of its next start.
    environment: Vec<(String, String)>,
    child: Option<Child>,
    /// Bounds its CPU time. Dropped after the child has ended.
    group: Option<ControlGroup>,
}

/// A cluster. Dropping it kills its processes, by their ids, and removes its data.
pub struct Cluster {
    binary: PathBuf,
    setup: ClusterSetup,
    nodes: Vec<ClusterNode>,
    etcd: Etcd,
    s3: Option<S3Server>,
    wan: Option<WanProxies>,
    network: Option<Network>,
    // Dropped last, after the processes have ended.
    directory: TempDir,
}

impl Cluster {
    /// Starts a cluster of the executable `binary`, and waits until all nodes answer, and the first
    /// one has heard from all others.
    pub async fn start(binary: &Path, setup: ClusterSetup) -> anyhow::Result<Cluster> {
        let mut cluster = Self::prepare(binary, setup)?;
        // The first node founds the cluster.
        for number in 0..cluster.nodes.len() {
            cluster.start_node(number).await?;
        }
        cluster.wait_until_alive(cluster.nodes.len()).await?;
        Ok(cluster)
    }

    /// Waits until the first node knows that this number of nodes is alive.
    pub async fn wait_until_alive(&self, nodes: usize) -> anyhow::Result<()> {
        self.wait_until_hears(0, nodes).await
    }

    /// Waits until a node knows that this number of nodes is alive.
    pub async fn wait_until_hears(&self, number: usize, nodes: usize) -> anyhow::Result<()> {
        let begun = Instant::now();
        let mut client = Client::connect(&self.target(number)).await?;
        loop {
            let rows = client.query("SELECT count(*) FROM fulmar.nodes WHERE state = 'alive'").await?;
            let count = rows.first().and_then(|row| row.first()?.as_deref()?.parse().ok());
            if count == Some(nodes) {
                return Ok(client.close().await?);
            }
            ensure!(begun.elapsed() < START_TIMEOUT, "{count:?} of {nodes} nodes are alive");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Starts etcd and the store, and no node yet.
    pub fn prepare(binary: &Path, setup: ClusterSetup) -> anyhow::Result<Cluster> {
        let directory = tempfile::Builder::new().prefix("fulmar-cluster-").tempdir();
        let directory = directory.context("could not create a temporary directory")?;
        let network = setup.isolated.then(Network::create).transpose()?;
        let host = if setup.isolated { HUB } else { Ipv4Addr::LOCALHOST };
        let etcd = Etcd::start_with(
            setup.etcd_members,
            EtcdSetup { host, arguments: setup.etcd_arguments.clone(), ..EtcdSetup::default() },
        )?;
        let mut s3 = (setup.store == ClusterStore::S3).then(|| S3Server::start_on(host)).transpose()?;
        if let (Some(s3), Some(delay)) = (&mut s3, &setup.put_delay) {
            s3.delay_puts(host, delay.clone())?;
        }
        let (binary, nodes) = (binary.to_owned(), Vec::new());
        let mut cluster = Cluster { binary, nodes, etcd, s3, wan: None, network, directory, setup };
        for _ in 0..cluster.setup.nodes {
            cluster.add_node()?;
        }
        if let Some(wan) = cluster.setup.wan {
            let network = cluster.network.as_ref().context("the nodes are not isolated")?;
            let ports: Vec<u16> = (0..cluster.nodes()).map(|node| cluster.rpc_port(node)).collect();
            cluster.wan = Some(WanProxies::start(network, &ports, wan)?);
        }
        Ok(cluster)
    }

    /// Adds a node, which does not run yet. Returns its number.
    pub fn add_node(&mut self) -> anyhow::Result<usize> {
        let number = self.nodes.len();
        if let Some(network) = &mut self.network {
            network.add()?;
        }
        let name = format!("n{}", number + 1);
        let ports =
            [ReservedPort::reserve_free()?, ReservedPort::reserve_free()?, ReservedPort::reserve_free()?];
        let (data, log) = (self.path(&name), self.path(&format!("{name}.log")));
        let (arguments, environment) = (Vec::new(), Vec::new());
        self.nodes.push(ClusterNode {
            name,
            data,
            log,
            ports,
            arguments,
            environment,
            child: None,
            group: None,
        });
        Ok(number)
    }

    /// The command that starts a node.
    pub fn command(&self, number: usize) -> Command {
        let node = &self.nodes[number];
        let host = self.host(number);
        let [sql, http, rpc] = node.ports.each_ref().map(|port| format!("{host}:{}", port.number()));
        let mut command = match &self.network {
            Some(network) => {
                let mut command = network.command(number);
                command.arg(&self.binary);
                command
            }
            None => Command::new(&self.binary),
        };
        command.arg("start").arg("--data").arg(&node.data);
        command.args(["--sql", &sql, "--http", &http, "--rpc", &rpc, "--node", &node.name]);
        if self.network.is_none() {
            command.arg("--insecure");
        }
        match (self.setup.embedded_metadata, number) {
            (false, _) => command.arg("--meta").arg(format!("etcd://{}", self.etcd.endpoints().join(","))),
            (true, 0) => command.args(["--meta", "embedded"]),
            (true, _) => {
                // With TLS between nodes, which node arguments enable, the name is required.
                let name = if node.arguments.is_empty() { "" } else { "n1@" };
                command.arg("--join").arg(format!("{name}{}:{}", self.host(0), self.rpc_port(0)))
            }
        };
        command.arg("--memory").arg(self.setup.memory_bytes.to_string());
        match &self.s3 {
            _ if self.setup.store == ClusterStore::Private => {}
            Some(s3) => {
                command.arg("--store").arg(s3.url("cluster")).envs(s3.environment());
            }
            None => {
                let url = format!("file://{}", self.path("store").display());
                command.arg("--store").arg(url);
            }
        }
        command.args(&self.setup.arguments).args(&node.arguments);
        command.envs(node.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Sets the arguments of a node's next starts, besides those of all nodes.
    pub fn set_arguments(&mut self, number: usize, arguments: &[&str]) {
        self.nodes[number].arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    }

    /// Sets the environment variables of a node's next starts, besides those of this process.
    pub fn set_environment(&mut self, number: usize, variables: &[(&str, &str)]) {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.nodes[number].environment = variables.iter().map(own).collect();
    }

    /// Starts a node that does not run, and waits until it answers. Returns how long that took.
    pub async fn start_node(&mut self, number: usize) -> anyhow::Result<Duration> {
        self.spawn_node(number)?;
        self.wait_for_node(number).await
    }

    /// Waits until a node that was started answers. Returns how long that took. Repeats the start
    /// if the metadata store did not answer it in time.
    pub async fn wait_for_node(&mut self, number: usize) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        loop {
            let last = match first_answer(&self.target(number), "SELECT 1").await {
                Ok(()) => return Ok(begun.elapsed()),
                Err(error) => error,
            };
            self.check_start(number)?;
            if begun.elapsed() > START_TIMEOUT {
                let (name, log) = (self.name(number), self.log_tail(number));
                bail!("{name} did not answer within {START_TIMEOUT:?}: {last}; end of its log:\n{log}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Repeats the start of a node that has exited because the metadata store did not answer in
    /// time. Fails if the node has exited for another reason.
    pub fn check_start(&mut self, number: usize) -> anyhow::Result<()> {
        let node = &mut self.nodes[number];
        let Some(status) = node.child.as_mut().map(Child::try_wait).transpose()?.flatten() else {
            return Ok(());
        };
        node.child = None;
        let log = self.log_tail(number);
        ensure!(
            metadata_did_not_answer(&log),
            "{} exited before it answered: {status}; end of its log:\n{log}",
            self.name(number)
        );
        self.spawn_node(number)
    }

    /// Starts a node that does not run, without waiting.
    pub fn spawn_node(&mut self, number: usize) -> anyhow::Result<()> {
        let mut command = self.command(number);
        let node = &mut self.nodes[number];
        ensure!(node.child.is_none(), "{} is already running", node.name);
        let log =
            File::options().create(true).append(true).open(&node.log).context("could not open a log")?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("could not run {command:?}"))?;
        let pid = Pid::from_child(&child).as_raw_nonzero().get();
        node.child = Some(child);
        node.group.as_ref().map_or(Ok(()), |group| group.add_process(pid))
    }

    /// Limits the CPU time of a node, from now on.
    pub fn limit_cpus(&mut self, number: usize, cpus: f64) -> anyhow::Result<()> {
        let node = &mut self.nodes[number];
        let group = ControlGroup::with_cpus(&node.name, cpus)?;
        if let Some(child) = &node.child {
            group.add_process(Pid::from_child(child).as_raw_nonzero().get())?;
        }
        node.group = Some(group);
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

    /// Uses etcd from now on, after the metadata was moved to it.
    pub fn use_etcd(&mut self) {
        self.setup.embedded_metadata = false;
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
            host: self.host(number).to_string(),
            port: self.nodes[number].ports[0].number(),
            user: SYSTEM_DATABASE.to_owned(),
            password: self.password(),
            database: SYSTEM_DATABASE.to_owned(),
        }
    }

    /// The URL of a database through a node.
    pub fn url(&self, number: usize, database: &str) -> String {
        self.target(number).with_database(database).to_string()
    }

    /// The superuser's password, which the first node has generated.
    fn password(&self) -> Option<String> {
        self.network.as_ref()?;
        let text = std::fs::read_to_string(self.nodes[0].data.join(PASSWORD_FILE)).ok()?;
        Some(text.trim_end().to_owned())
    }

    /// Where a node listens.
    fn host(&self, number: usize) -> Ipv4Addr {
        self.network.as_ref().map_or(Ipv4Addr::LOCALHOST, |network| network.address(number))
    }

    /// The network, if the nodes are isolated.
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
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

    /// The log of a node.
    pub fn log(&self, number: usize) -> &Path {
        &self.nodes[number].log
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

    /// The S3 server, if that is the store.
    pub fn s3(&self) -> Option<&S3Server> {
        self.s3.as_ref()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_error_decides_whether_a_start_is_repeated() {
        let etcd = "fulmar: the metadata store is not available: no majority of etcd's members answered \
                    within 5s (timed out)\n  Check that a majority of etcd's members run\n";
        let embedded = "fulmar: the metadata store at 127.0.0.1:1 does not answer: no connection within 5s\n";
        let other = "fulmar: the data directory is in use by process 1\n";
        for (log, expected) in [
            (etcd.to_owned(), true),
            (embedded.to_owned(), true),
            (format!("{other}{etcd}"), true),
            (format!("{etcd}{other}"), false),
            ("WARN no majority of etcd's members answered within 5s".to_owned(), false),
        ] {
            assert_eq!(metadata_did_not_answer(&log), expected, "{log}");
        }
    }
}
