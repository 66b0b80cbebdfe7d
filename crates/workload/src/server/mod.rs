//! Starts, measures and stops the servers of benchmarks and tests.
//!
//! A [`Product`] describes how a kind of server is set up and started. A [`Server`] is a running
//! instance in a temporary directory, on free loopback ports, which clients connect to through TCP.
//! Dropping it ends its processes, by their ids, and removes the directory, also after an error, a
//! panic or Ctrl-C.

mod added;
mod certificate;
mod cluster;
mod control_group;
mod etcd;
mod fulmar;
mod network;
mod ports;
mod postgres;
mod s3;
mod slow_puts;
mod usage;
mod wan;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::future::BoxFuture;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub use self::added::AddedNodes;
pub use self::certificate::{Certificate, certificate};
pub use self::cluster::{Cluster, ClusterSetup, ClusterStore, metadata_did_not_answer};
pub use self::control_group::ControlGroup;
pub use self::etcd::{Etcd, EtcdCertificates, EtcdSetup};
pub use self::fulmar::Fulmar;
pub use self::network::{HUB, Network, run_in_private};
pub use self::ports::ReservedPort;
pub use self::postgres::Postgres;
pub use self::s3::S3Server;
pub use self::usage::{ProcessTree, Usage};
pub use self::wan::{Wan, WanProxies};
use crate::Target;
use crate::client::Client;
use crate::cpu_affinity::{CpuHalf, restrict_to};

/// Timeouts: from the start of a server to the response to its first query; from a signal to the
/// exit; and the same when a server is dropped.
const START_TIMEOUT: Duration = Duration::from_secs(120);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// The polling interval for a server that starts or stops, and so the resolution of its start-up
/// time.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The number of bytes at the end of a server's log that an error shows.
const LOG_TAIL_BYTES: u64 = 2_000;

/// The files, ports and resources of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The data directory, created by [`Product::initialise`].
    pub data: PathBuf,
    /// The port for SQL.
    pub sql_port: u16,
    /// The port for HTTP, if the product has one.
    pub http_port: u16,
    /// Memory for shared buffers or the page cache.
    pub memory_bytes: u64,
    /// Number of client connections that it must accept.
    pub connections: u32,
}

/// How a kind of server is set up and run.
pub trait Product: Send + Sync {
    /// The name in tables and messages.
    fn name(&self) -> &'static str;
    /// Creates an empty data directory.
    fn initialise<'a>(&'a self, config: &'a ServerConfig) -> BoxFuture<'a, anyhow::Result<()>>;
    /// The command that runs the server in the foreground until it is stopped.
    fn command(&self, config: &ServerConfig) -> Command;
    /// The administrative database, with the administrative user.
    fn target(&self, config: &ServerConfig) -> Target;
    /// The signal for a clean shutdown that does not wait for clients.
    fn stop_signal(&self) -> Signal;
    /// The signal that ends the server and all its processes immediately.
    fn abandon_signal(&self) -> Signal;
    /// Performs an administrator's work after loading a database (statistics, checkpoint). It is
    /// not measured.
    fn settle<'a>(&'a self, target: &'a Target) -> BoxFuture<'a, anyhow::Result<()>>;
}

/// A server that runs, or that was stopped and can be started again on its data.
pub struct Server {
    product: Box<dyn Product>,
    config: ServerConfig,
    child: Option<Child>,
    frozen: bool,
    /// It runs only on the server's half of the CPUs.
    separate_cpus: bool,
    // Dropped last, after the processes have ended.
    directory: TempDir,
    _ports: [ReservedPort; 2],
}

impl Server {
    /// Sets up a server in a new temporary directory and starts it.
    pub async fn start(
        product: Box<dyn Product>,
        memory_bytes: u64,
        connections: u32,
    ) -> anyhow::Result<Server> {
        Self::set_up(product, memory_bytes, connections, false).await
    }

    /// Like [`Server::start`], with only half of the CPUs, which leaves the other half to drivers.
    pub async fn start_on_separate_cpus(
        product: Box<dyn Product>,
        memory_bytes: u64,
        connections: u32,
    ) -> anyhow::Result<Server> {
        Self::set_up(product, memory_bytes, connections, true).await
    }

    async fn set_up(
        product: Box<dyn Product>,
        memory_bytes: u64,
        connections: u32,
        separate_cpus: bool,
    ) -> anyhow::Result<Server> {
        let directory = tempfile::Builder::new()
            .prefix("fulmar-bench-")
            .tempdir()
            .context("could not create a temporary directory")?;
        let ports = [ReservedPort::reserve_free()?, ReservedPort::reserve_free()?];
        let [sql_port, http_port] = ports.each_ref().map(ReservedPort::number);
        let data = directory.path().join("data");
        let config = ServerConfig { data, sql_port, http_port, memory_bytes, connections };
        product.initialise(&config).await.with_context(|| format!("could not set up {}", product.name()))?;
        let mut server =
            Server { product, config, child: None, frozen: false, separate_cpus, directory, _ports: ports };
        server.restart().await?;
        Ok(server)
    }

    /// Starts the stopped server on its data. Returns the time from exec to the response to its
    /// first query.
    pub async fn restart(&mut self) -> anyhow::Result<Duration> {
        let target = self.target();
        self.start_until(&target, "SELECT 1").await
    }

    /// Like [`Server::restart`], with `query` in the database of `target` as the first query.
    pub async fn start_until(&mut self, target: &Target, query: &str) -> anyhow::Result<Duration> {
        anyhow::ensure!(self.child.is_none(), "{} is already running", self.name());
        let log = File::options().create(true).append(true).open(self.log_path());
        let log = log.context("could not open the log file")?;
        let mut command = self.product.command(&self.config);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let begin = Instant::now();
        let child = if self.separate_cpus { spawn_apart(&mut command)? } else { command.spawn() };
        self.child = Some(child.with_context(|| format!("could not run {command:?}"))?);
        loop {
            let last = match first_answer(target, query).await {
                Ok(()) => return Ok(begin.elapsed()),
                Err(error) => error,
            };
            if let Some(status) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                self.child = None;
                anyhow::bail!(
                    "{} exited before it answered: {status}; end of its log:\n{}",
                    self.name(),
                    self.log_tail()
                );
            }
            if begin.elapsed() > START_TIMEOUT {
                anyhow::bail!(
                    "{} did not answer within {START_TIMEOUT:?}: {last}; end of its log:\n{}",
                    self.name(),
                    self.log_tail()
                );
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The name in tables and messages.
    pub fn name(&self) -> &'static str {
        self.product.name()
    }

    /// The administrative database.
    pub fn target(&self) -> Target {
        self.product.target(&self.config)
    }

    /// The HTTP port, if the product has one.
    pub fn http_port(&self) -> u16 {
        self.config.http_port
    }

    /// See [`Product::settle`].
    pub async fn settle(&self, database: &str) -> anyhow::Result<()> {
        self.product.settle(&self.target().with_database(database)).await
    }

    /// The processes of the server.
    pub fn processes(&self) -> anyhow::Result<ProcessTree> {
        let child = self.child.as_ref().with_context(|| format!("{} is not running", self.name()))?;
        Ok(ProcessTree::of(Pid::from_child(child)))
    }

    /// Stops all processes with SIGSTOP, so that another server has the machine to itself.
    pub fn freeze(&mut self) -> anyhow::Result<()> {
        self.signal_all(Signal::STOP)?;
        self.frozen = true;
        Ok(())
    }

    /// Resumes all processes with SIGCONT.
    pub fn thaw(&mut self) -> anyhow::Result<()> {
        self.frozen = false;
        self.signal_all(Signal::CONT)
    }

    fn signal_all(&self, signal: Signal) -> anyhow::Result<()> {
        for pid in self.processes()?.pids()?.into_iter().filter_map(Pid::from_raw) {
            // A process that has just ended needs no signal.
            let _ = kill_process(pid, signal);
        }
        Ok(())
    }

    /// Shuts the server down cleanly and waits until it has exited.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let status = self.end(self.product.stop_signal()).await?;
        let name = self.name();
        anyhow::ensure!(status.success(), "{name} exited with {status} after a stop signal");
        Ok(())
    }

    /// Kills the server like a crash, so that it writes nothing after this moment.
    ///
    /// All its processes have exited when this returns. PostgreSQL's child processes outlive their
    /// parent for a moment and keep its shared memory.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        let mut pids = self.processes()?.pids()?;
        let killed = self.end(Signal::KILL).await;
        // The parent has exited, so it cannot replace the children that are killed here.
        for pid in pids.iter().copied().filter(|pid| usage::is_running(*pid)).filter_map(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        let begin = Instant::now();
        while !pids.is_empty() {
            pids.retain(|pid| usage::is_running(*pid));
            anyhow::ensure!(
                begin.elapsed() < STOP_TIMEOUT,
                "could not kill processes of {}: {pids:?}",
                self.name()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        killed.map(drop)
    }

    async fn end(&mut self, signal: Signal) -> anyhow::Result<std::process::ExitStatus> {
        let name = self.product.name();
        if self.frozen {
            self.thaw()?;
        }
        let child = self.child.as_mut().with_context(|| format!("{name} is not running"))?;
        kill_process(Pid::from_child(child), signal)?;
        let begin = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Ok(status);
            }
            anyhow::ensure!(
                begin.elapsed() < STOP_TIMEOUT,
                "{name} did not exit within {STOP_TIMEOUT:?} after {signal:?}"
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn log_tail(&self) -> String {
        tail(&self.log_path()).unwrap_or_else(|error| format!("(could not read it: {error})"))
    }
}

impl Drop for Server {
    /// Ends all processes. Waits at most [`DROP_TIMEOUT`] before it kills them.
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let tree = ProcessTree::of(Pid::from_child(&child)).pids().unwrap_or_default();
        let all = |signal| {
            for pid in tree.iter().copied().filter_map(Pid::from_raw) {
                let _ = kill_process(pid, signal);
            }
        };
        if self.frozen {
            all(Signal::CONT);
        }
        let _ = kill_process(Pid::from_child(&child), self.product.abandon_signal());
        let begin = Instant::now();
        while begin.elapsed() < DROP_TIMEOUT {
            if !matches!(child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        all(Signal::KILL);
        // It has been killed, so this wait is short.
        drop(child.wait());
    }
}

/// Starts a process on the server's half of the CPUs. It inherits them from the thread that starts
/// it.
fn spawn_apart(command: &mut Command) -> anyhow::Result<std::io::Result<Child>> {
    let spawn = || {
        restrict_to(CpuHalf::Server)?;
        Ok(command.spawn())
    };
    let spawned = std::thread::scope(|scope| scope.spawn(spawn).join());
    spawned.unwrap_or_else(|_| anyhow::bail!("panic while starting {command:?}"))
}

async fn first_answer(target: &Target, query: &str) -> Result<(), crate::client::Error> {
    let mut client = Client::connect(target).await?;
    client.query(query).await?;
    client.close().await
}

fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
