//! PostgreSQL's own `pgbench`, run as it is, and what it says read as it says it.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use fulmar_workload::Target;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;

/// Connections that pgbench opens to its tenant.
pub const CONNECTIONS: u64 = 2;

/// How much of what pgbench says on stderr is kept for an error message.
const KEPT_LINES: usize = 8;
/// Its report is some twenty lines.
const MAX_REPORT_BYTES: u64 = 1 << 20;

/// A line of `pgbench --progress`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Transactions per second since the line before.
    pub tps: f64,
    /// Their average latency.
    pub latency_ms: f64,
}

/// What pgbench says at its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Transactions whose COMMIT was answered.
    pub transactions: u64,
    /// Transactions that ended with a serialization failure or a deadlock.
    pub failed: u64,
    /// Average latency, if any transaction ended.
    pub latency_ms: Option<f64>,
}

/// Refuses a machine without pgbench, and says how to install it.
pub async fn check_installed() -> anyhow::Result<()> {
    let version = Command::new("pgbench").arg("--version").output().await;
    ensure!(
        version.is_ok_and(|output| output.status.success()),
        "the demo needs PostgreSQL's pgbench, which is not installed; on Debian or Ubuntu: apt-get install \
         postgresql-15 (any other version will do), elsewhere: the package with PostgreSQL's server or contrib programs"
    );
    Ok(())
}

/// Its built-in TPC-B-like script, for that long or until the server is gone. `watch` is told every second.
pub async fn run(target: &Target, duration: Duration, watch: impl Fn(Progress)) -> anyhow::Result<Ended> {
    let mut child = command(target, duration).spawn().context("cannot run pgbench")?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        bail!("pgbench has no output");
    };
    let watching = async {
        let mut said: Vec<String> = Vec::new();
        let mut lines = BufReader::new(stderr).lines();
        while let Some(line) = lines.next_line().await? {
            match Progress::parse(&line) {
                Some(progress) => watch(progress),
                None if said.len() < KEPT_LINES => said.push(line),
                None => {}
            }
        }
        std::io::Result::Ok(said.join("\n"))
    };
    let reading = async {
        let mut text = String::new();
        stdout.take(MAX_REPORT_BYTES).read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    let (said, text) = tokio::try_join!(watching, reading).context("cannot read what pgbench says")?;
    let status = child.wait().await.context("cannot wait for pgbench")?;
    let report = Report::parse(&text)
        .with_context(|| format!("pgbench in {} gave no report ({status}):\n{said}", target.database))?;
    Ok(Ended { report, status, said })
}

fn command(target: &Target, duration: Duration) -> Command {
    let (port, seconds) = (target.port.to_string(), duration.as_secs().max(1).to_string());
    let mut command = Command::new("pgbench");
    command
        .args(["--host", &target.host, "--port", &port, "--username", &target.user])
        // Without it, pgbench would empty its history before each run, which the checks still need.
        .arg("--no-vacuum")
        .args(["--progress=1", "--client", &CONNECTIONS.to_string(), "--time", &seconds])
        .arg(&target.database)
        // What it says is read, so it must be said in English.
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// How a run of pgbench ended.
#[derive(Debug)]
pub struct Ended {
    /// Its report.
    pub report: Report,
    /// 2 if connections were lost.
    pub status: ExitStatus,
    /// The first lines that it said on stderr beside its progress.
    pub said: String,
}

impl Progress {
    /// `progress: 1.0 s, 1234.5 tps, lat 1.618 ms stddev 0.7, 0 failed`
    fn parse(line: &str) -> Option<Self> {
        let (_, tps) = line.strip_prefix("progress: ")?.split_once(" s, ")?;
        let (tps, latency) = tps.split_once(" tps, lat ")?;
        let (latency, _) = latency.split_once(" ms")?;
        // Nothing was answered in that second: pgbench says "-nan" or "0.000".
        let latency_ms = latency.parse().ok().filter(|latency: &f64| latency.is_finite()).unwrap_or(0.0);
        Some(Self { tps: tps.parse().ok()?, latency_ms })
    }
}

impl Report {
    fn parse(text: &str) -> Option<Self> {
        let find = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
        // With a duration there is no "/planned" behind the number.
        let transactions = find("number of transactions actually processed: ")?.split('/').next()?;
        let failed = find("number of failed transactions: ").and_then(|rest| rest.split(' ').next());
        let latency = find("latency average = ").and_then(|rest| rest.strip_suffix(" ms"));
        Some(Self {
            transactions: transactions.trim().parse().ok()?,
            failed: failed.map_or(Some(0), |failed| failed.parse().ok())?,
            latency_ms: latency
                .and_then(|latency| latency.parse().ok())
                .filter(|latency: &f64| latency.is_finite()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read() {
        let line = "progress: 1.0 s, 1234.5 tps, lat 1.618 ms stddev 0.717, 0 failed";
        assert_eq!(Progress::parse(line), Some(Progress { tps: 1234.5, latency_ms: 1.618 }));
        let idle = "progress: 9.0 s, 0.0 tps, lat -nan ms stddev -nan, 0 failed";
        assert_eq!(Progress::parse(idle), Some(Progress { tps: 0.0, latency_ms: 0.0 }));
        assert_eq!(Progress::parse("pgbench: error: client 0 aborted"), None);
    }

    #[test]
    fn reports_are_read() {
        let text = "transaction type: <builtin: TPC-B (sort of)>\nduration: 5 s\n\
                    number of transactions actually processed: 5678\n\
                    number of failed transactions: 3 (0.053%)\nlatency average = 1.761 ms\ntps = 1135.1\n";
        let report = Report { transactions: 5678, failed: 3, latency_ms: Some(1.761) };
        assert_eq!(Report::parse(text), Some(report));
        let nothing =
            "number of transactions actually processed: 0\nnumber of failed transactions: 0 (-nan%)\n";
        assert_eq!(Report::parse(nothing), Some(Report { transactions: 0, failed: 0, latency_ms: None }));
        assert_eq!(Report::parse("no report"), None);
    }
}
