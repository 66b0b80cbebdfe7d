//! Servers that a bench starts for itself, measures and ends.
//!
//! A [`Product`] says how a server is set up and started; a [`Server`] is one that runs: in a temporary directory, on
//! free loopback ports, connected through TCP. Whatever happens to the bench (an error, a panic, ctrl-C), dropping the
//! `Server` ends its processes, by their ids, and removes the directory.

mod certificate;
mod fulmar;
mod memory_group;
mod ports;
mod postgres;
mod s3;
mod usage;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::future::BoxFuture;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub use self::certificate::{Certificate, certificate};
pub use self::fulmar::Fulmar;
pub use self::memory_group::MemoryGroup;
use self::ports::Port;
pub use self::postgres::Postgres;
pub use self::s3::S3Server;
pub use self::usage::{ProcessTree, Usage};
use crate::Target;
use crate::client::Client;
use crate::processors::{Half, keep_to};

/// How long a server may take to answer its first query, or to end.
const START_TIMEOUT: Duration = Duration::from_secs(120);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a server that starts is asked whether it answers: the resolution of its start-up time.
const POLL: Duration = Duration::from_millis(1);

/// How much of a server's log an error shows.
const LOG_TAIL_BYTES: u64 = 2_000;

/// Where a server runs and what it may use.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its data directory (made by [`Product::initialise`]).
    pub data: PathBuf,
    /// The port for SQL.
    pub sql_port: u16,
    /// The port for HTTP, if the product has any.
    pub http_port: u16,
    /// Its memory: shared buffers, page cache.
    pub memory_bytes: u64,
    /// Client connections that it must accept.
    pub connections: u32,
}

/// How one kind of server is run.
pub trait Product: Send + Sync {
    /// In tables and messages.
    fn name(&self) -> &'static str;
    /// Makes an empty data directory.
    fn initialise<'a>(&'a self, place: &'a Place) -> BoxFuture<'a, anyhow::Result<()>>;
    /// The command that runs in the foreground until it is told to end.
    fn command(&self, place: &Place) -> Command;
    /// The administrative database, as the administrative user.
    fn target(&self, place: &Place) -> Target;
    /// What asks it to end cleanly, without waiting for clients.
    fn stop_signal(&self) -> Signal;
    /// What makes it, and all its processes, end at once.
    fn abandon_signal(&self) -> Signal;
    /// After loading `database`: what its administrator would do (statistics, checkpoint), outside every measurement.
    fn settle<'a>(&'a self, target: &'a Target) -> BoxFuture<'a, anyhow::Result<()>>;
}

/// A server that runs (or was stopped, and can be started again on its data).
pub struct Server {
    product: Box<dyn Product>,
    place: Place,
    child: Option<Child>,
    frozen: bool,
    /// It keeps to its half of the processors.
    apart: bool,
    // Dropped last: the processes are gone by then.
    directory: TempDir,
    _ports: [Port; 2],
}

impl Server {
    /// Sets a server up in a new temporary directory and starts it.
    pub async fn start(
        product: Box<dyn Product>,
        memory_bytes: u64,
        connections: u32,
    ) -> anyhow::Result<Server> {
        Self::set_up(product, memory_bytes, connections, false).await
    }

    /// The same, with half of the processors, so that drivers can have the others for themselves.
    pub async fn start_apart(
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
        apart: bool,
    ) -> anyhow::Result<Server> {
        let directory =
            tempfile::Builder::new().prefix("fulmar-bench-").tempdir().context("no temporary directory")?;
        let ports = [Port::free()?, Port::free()?];
        let [sql_port, http_port] = ports.each_ref().map(Port::number);
        let data = directory.path().join("data");
        let place = Place { data, sql_port, http_port, memory_bytes, connections };
        product.initialise(&place).await.with_context(|| format!("cannot set up {}", product.name()))?;
        let mut server =
            Server { product, place, child: None, frozen: false, apart, directory, _ports: ports };
        server.start_again().await?;
        Ok(server)
    }

    /// Starts the stopped server on its data; answers the time from exec to the first answered query.
    pub async fn start_again(&mut self) -> anyhow::Result<Duration> {
        let target = self.target();
        self.start_until(&target, "SELECT 1").await
    }

    /// As [`Server::start_again`], where the first answer must be to `query` in the target's database.
    pub async fn start_until(&mut self, target: &Target, query: &str) -> anyhow::Result<Duration> {
        anyhow::ensure!(self.child.is_none(), "{} runs already", self.name());
        let log = File::options().create(true).append(true).open(self.log_path()).context("no log file")?;
        let mut command = self.product.command(&self.place);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let begin = Instant::now();
        let child = if self.apart { spawn_apart(&mut command)? } else { command.spawn() };
        self.child = Some(child.with_context(|| format!("cannot run {command:?}"))?);
        loop {
            let last = match first_answer(target, query).await {
                Ok(()) => return Ok(begin.elapsed()),
                Err(error) => error,
            };
            if let Some(status) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                self.child = None;
                anyhow::bail!(
                    "{} ended at once, {status}; its log ends with:\n{}",
                    self.name(),
                    self.log_tail()
                );
            }
            if begin.elapsed() > START_TIMEOUT {
                anyhow::bail!(
                    "{} does not answer: {last}; its log ends with:\n{}",
                    self.name(),
                    self.log_tail()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// In tables and messages.
    pub fn name(&self) -> &'static str {
        self.product.name()
    }

    /// The administrative database.
    pub fn target(&self) -> Target {
        self.product.target(&self.place)
    }

    /// The port that answers HTTP, if the product has one.
    pub fn http_port(&self) -> u16 {
        self.place.http_port
    }

    /// See [`Product::settle`].
    pub async fn settle(&self, database: &str) -> anyhow::Result<()> {
        self.product.settle(&self.target().with_database(database)).await
    }

    /// Its processes.
    pub fn processes(&self) -> anyhow::Result<ProcessTree> {
        let child = self.child.as_ref().with_context(|| format!("{} does not run", self.name()))?;
        Ok(ProcessTree::of(Pid::from_child(child)))
    }

    /// Stops all its processes in their tracks (SIGSTOP), so that another server has the machine for itself.
    pub fn freeze(&mut self) -> anyhow::Result<()> {
        self.signal_all(Signal::STOP)?;
        self.frozen = true;
        Ok(())
    }

    /// Lets its processes go on.
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

    /// Asks the server to end cleanly and waits until it has.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let status = self.end(self.product.stop_signal()).await?;
        anyhow::ensure!(status.success(), "{} ended with {status} when asked to stop", self.name());
        Ok(())
    }

    /// Kills the server as a crash would, with nothing written after this moment.
    /// All its processes are gone afterwards: PostgreSQL's children outlive their parent for a moment, and hold on to
    /// its shared memory.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        let mut pids = self.processes()?.pids()?;
        let killed = self.end(Signal::KILL).await;
        // The children's turn: nobody is left to start others in their place.
        for pid in pids.iter().copied().filter(|pid| usage::runs(*pid)).filter_map(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        let begin = Instant::now();
        while !pids.is_empty() {
            pids.retain(|pid| usage::runs(*pid));
            anyhow::ensure!(
                begin.elapsed() < STOP_TIMEOUT,
                "processes of {} cannot be killed: {pids:?}",
                self.name()
            );
            tokio::time::sleep(POLL).await;
        }
        killed.map(drop)
    }

    async fn end(&mut self, signal: Signal) -> anyhow::Result<std::process::ExitStatus> {
        let name = self.product.name();
        if self.frozen {
            self.thaw()?;
        }
        let child = self.child.as_mut().with_context(|| format!("{name} does not run"))?;
        kill_process(Pid::from_child(child), signal)?;
        let begin = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                self.child = None;
                return Ok(status);
            }
            anyhow::ensure!(
                begin.elapsed() < STOP_TIMEOUT,
                "{name} has not ended {STOP_TIMEOUT:?} after {signal:?}"
            );
            tokio::time::sleep(POLL).await;
        }
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    fn log_tail(&self) -> String {
        tail(&self.log_path()).unwrap_or_else(|error| format!("(cannot be read: {error})"))
    }
}

impl Drop for Server {
    /// Ends all processes, at most after a few seconds of waiting for them.
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
        // It has been killed: this wait is short.
        drop(child.wait());
    }
}

/// Starts a process that keeps to the server's half of the processors: it inherits them from the thread that starts it.
fn spawn_apart(command: &mut Command) -> anyhow::Result<std::io::Result<Child>> {
    let spawn = || {
        keep_to(Half::Server)?;
        Ok(command.spawn())
    };
    let spawned = std::thread::scope(|scope| scope.spawn(spawn).join());
    spawned.unwrap_or_else(|_| anyhow::bail!("starting {command:?} panicked"))
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
