//! Runs PostgreSQL's unmodified `pgbench`, and parses its output.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use fulmar_workload::Target;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;

/// Number of connections that pgbench opens to its tenant.
pub const CONNECTIONS: u64 = 2;

/// Maximum number of stderr lines in an error message.
const MAX_ERROR_LINES: usize = 8;
/// Limit on pgbench's report, which has about 20 lines.
const MAX_REPORT_BYTES: u64 = 1 << 20;

/// A line of `pgbench --progress`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Transactions per second since the previous line.
    pub tps: f64,
    /// Their average latency.
    pub latency_ms: f64,
}

/// pgbench's final report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Number of acknowledged transactions.
    pub transactions: u64,
    /// Number of transactions that failed with a serialization failure or a deadlock.
    pub failed: u64,
    /// Average latency, if any transaction has completed.
    pub latency_ms: Option<f64>,
}

/// Returns an error with installation instructions if pgbench is not installed.
pub async fn check_installed() -> anyhow::Result<()> {
    let version = Command::new("pgbench").arg("--version").output().await;
    ensure!(
        version.is_ok_and(|output| output.status.success()),
        "the demo requires PostgreSQL's pgbench, which is not installed; on Debian or Ubuntu run \
         apt-get install postgresql-15 (any version works), elsewhere install the package with \
         PostgreSQL's server or contrib programs"
    );
    Ok(())
}

/// Runs pgbench's built-in TPC-B-like script for `duration`, or until the server is gone. Calls
/// `on_progress` every second.
pub async fn run(
    target: &Target,
    duration: Duration,
    on_progress: impl Fn(Progress),
) -> anyhow::Result<PgbenchRun> {
    let mut child = command(target, duration).spawn().context("cannot run pgbench")?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        bail!("cannot read the output of pgbench");
    };
    let read_stderr = async {
        let mut errors: Vec<String> = Vec::new();
        let mut lines = BufReader::new(stderr).lines();
        while let Some(line) = lines.next_line().await? {
            match Progress::parse(&line) {
                Some(progress) => on_progress(progress),
                None if errors.len() < MAX_ERROR_LINES => errors.push(line),
                None => {}
            }
        }
        std::io::Result::Ok(errors.join("\n"))
    };
    let read_report = async {
        let mut text = String::new();
        stdout.take(MAX_REPORT_BYTES).read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    let (said, text) =
        tokio::try_join!(read_stderr, read_report).context("cannot read the output of pgbench")?;
    let status = child.wait().await.context("cannot wait for pgbench")?;
    let report = Report::parse(&text)
        .with_context(|| format!("pgbench in {} printed no report ({status}):\n{said}", target.database))?;
    Ok(PgbenchRun { report, status, stderr: said })
}

fn command(target: &Target, duration: Duration) -> Command {
    let (port, seconds) = (target.port.to_string(), duration.as_secs().max(1).to_string());
    let mut command = Command::new("pgbench");
    command
        .args(["--host", &target.host, "--port", &port, "--username", &target.user])
        // Otherwise pgbench truncates its history table before each run, which the checks read.
        .arg("--no-vacuum")
        .args(["--progress=1", "--client", &CONNECTIONS.to_string(), "--time", &seconds])
        .arg(&target.database)
        // The output is parsed, so it must be in English.
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// The result of a pgbench run.
#[derive(Debug)]
pub struct PgbenchRun {
    /// The final report.
    pub report: Report,
    /// Exit code 2 means that connections were lost.
    pub status: ExitStatus,
    /// The first lines on stderr, without the progress lines.
    pub stderr: String,
}

impl Progress {
    /// `progress: 1.0 s, 1234.5 tps, lat 1.618 ms stddev 0.7, 0 failed`
    fn parse(line: &str) -> Option<Self> {
        let (_, tps) = line.strip_prefix("progress: ")?.split_once(" s, ")?;
        let (tps, latency) = tps.split_once(" tps, lat ")?;
        let (latency, _) = latency.split_once(" ms")?;
        // Without a completed transaction in that second, pgbench prints "-nan" or "0.000".
        let latency_ms = latency.parse().ok().filter(|latency: &f64| latency.is_finite()).unwrap_or(0.0);
        Some(Self { tps: tps.parse().ok()?, latency_ms })
    }
}

impl Report {
    fn parse(text: &str) -> Option<Self> {
        let find = |start: &str| text.lines().find_map(|line| line.strip_prefix(start));
        // With --time, the number has no "/planned" suffix.
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
    fn progress_lines_are_parsed() {
        let line = "progress: 1.0 s, 1234.5 tps, lat 1.618 ms stddev 0.717, 0 failed";
        assert_eq!(Progress::parse(line), Some(Progress { tps: 1234.5, latency_ms: 1.618 }));
        let idle = "progress: 9.0 s, 0.0 tps, lat -nan ms stddev -nan, 0 failed";
        assert_eq!(Progress::parse(idle), Some(Progress { tps: 0.0, latency_ms: 0.0 }));
        assert_eq!(Progress::parse("pgbench: error: client 0 aborted"), None);
    }

    #[test]
    fn reports_are_parsed() {
        let text = "transaction type: <builtin: TPC-B (sort of)>\nduration: 5 s\n\
                    number of transactions actually processed: 5678\n\
                    number of failed transactions: 3 (0.053%)\nlatency average = 1.761 ms\ntps = 1135.1\n";
        let report = Report { transactions: 5678, failed: 3, latency_ms: Some(1.761) };
        assert_eq!(Report::parse(text), Some(report));
        let empty =
            "number of transactions actually processed: 0\nnumber of failed transactions: 0 (-nan%)\n";
        assert_eq!(Report::parse(empty), Some(Report { transactions: 0, failed: 0, latency_ms: None }));
        assert_eq!(Report::parse("no report"), None);
    }
}
