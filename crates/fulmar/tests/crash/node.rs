//! The node: a child process, killed when its guard is dropped.

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

/// Timeout for the startup and for the exit of a node.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A running node. Killed on drop.
pub struct Node {
    process: Child,
    pub sql: SocketAddr,
    /// Time from the start of the process to its ready line.
    pub ready_after: Duration,
}

fn spawn(directory: &Path, failpoints: Option<&str>) -> anyhow::Result<Child> {
    let log = File::options().create(true).append(true).open(directory.join("node.log"))?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulmar"));
    command
        .args(["start", "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0", "--insecure"])
        .args(["--memory", "128MB", "--log-level", "info", "--data"])
        .arg(directory.join("data"))
        .env_remove("RUST_LOG")
        .env_remove("FULMAR_FAILPOINTS")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .kill_on_drop(true);
    if let Some(failpoints) = failpoints {
        command.env("FULMAR_FAILPOINTS", failpoints);
    }
    command.spawn().with_context(|| format!("cannot run {command:?}"))
}

/// Starts a node and kills it after this time, whatever its state.
pub async fn start_and_kill(directory: &Path, after: Duration) -> anyhow::Result<()> {
    let mut process = spawn(directory, None)?;
    let ended = tokio::time::timeout(after, process.wait()).await;
    ensure!(ended.is_err(), "the node exited during recovery: {ended:?}{}", log_tail(directory));
    process.kill().await.context("cannot kill the node")
}

impl Node {
    /// Starts a node on `directory` and waits until it is ready. Returns `None` if it has killed
    /// itself at a failpoint before that.
    pub async fn start(directory: &Path, failpoints: Option<&str>) -> anyhow::Result<Option<Node>> {
        let began = Instant::now();
        let mut process = spawn(directory, failpoints)?;
        let stdout = process.stdout.take().context("no stdout")?;
        let mut line = String::new();
        tokio::time::timeout(TIMEOUT, BufReader::new(stdout).read_line(&mut line))
            .await
            .with_context(|| format!("the node is not ready after {TIMEOUT:?}{}", log_tail(directory)))??;
        let ready_after = began.elapsed();
        // fulmar ready: sql 127.0.0.1:1, http 127.0.0.1:2, data DIR; try: COMMAND
        let sql = line.strip_prefix("fulmar ready: sql ").and_then(|rest| rest.split(',').next());
        match sql {
            Some(sql) => {
                let sql = sql.parse().with_context(|| format!("the ready line has no address: {line}"))?;
                Ok(Some(Node { process, sql, ready_after }))
            }
            None => {
                let status = wait(&mut process).await?;
                ensure!(
                    failpoints.is_some() && is_kill(status),
                    "the node did not start: {status}{}",
                    log_tail(directory)
                );
                Ok(None)
            }
        }
    }

    /// Waits up to `time`. Returns true if the node has killed itself, and false if it is still
    /// running or has exited successfully.
    pub async fn is_killed_within(&mut self, time: Duration) -> anyhow::Result<bool> {
        match tokio::time::timeout(time, self.process.wait()).await {
            Err(_) => Ok(false),
            Ok(status) => match status? {
                status if is_kill(status) => Ok(true),
                status if status.success() => Ok(false),
                status => bail!("the node exited unexpectedly: {status}"),
            },
        }
    }

    /// Sends SIGTERM.
    pub fn ask_to_stop(&self) -> anyhow::Result<()> {
        let pid = self.process.id().and_then(|id| Pid::from_raw(id as i32)).context("the node has exited")?;
        kill_process(pid, Signal::TERM).context("cannot signal the node")
    }

    /// Sends SIGKILL, unless the node has already exited, and waits for its exit.
    pub async fn end_by_kill(&mut self) -> anyhow::Result<()> {
        self.process.start_kill().or_else(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => Ok(()),
            _ => Err(error),
        })?;
        wait(&mut self.process).await.map(|_| ())
    }

    /// Kills the node.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        self.end_by_kill().await
    }

    /// Shuts the node down cleanly.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        self.ask_to_stop()?;
        let status = wait(&mut self.process).await?;
        ensure!(status.success(), "the node exited with {status} on SIGTERM");
        Ok(())
    }
}

async fn wait(process: &mut Child) -> anyhow::Result<ExitStatus> {
    let ended = tokio::time::timeout(TIMEOUT, process.wait()).await;
    Ok(ended.with_context(|| format!("the node has not exited after {TIMEOUT:?}"))??)
}

fn is_kill(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::KILL.as_raw())
}

fn log_tail(directory: &Path) -> String {
    let log = std::fs::read_to_string(directory.join("node.log")).unwrap_or_default();
    let lines: Vec<&str> = log.lines().rev().take(5).collect();
    lines.into_iter().rev().fold("; its log ends with:".to_owned(), |text, line| text + "\n  " + line)
}
