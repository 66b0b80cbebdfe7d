//! Runs PostgreSQL's `pgbench`, unmodified, as a load that is not tuned for Fulmar.
//!
//! Both servers get the same command line: `-M prepared`, `-n` (no VACUUM before the run, see
//! [`Product::settle`](crate::server::Product::settle)), and two threads, or one for a single
//! client.

use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use tokio::process::Command;

use crate::Target;

/// Timeouts of pgbench: beyond the length of a run, and for initialisation.
const RUN_GRACE: Duration = Duration::from_secs(60);
const INITIALISE_TIMEOUT: Duration = Duration::from_secs(600);

/// The number of lines of pgbench's messages that an error shows.
const MAX_SHOWN_LINES: usize = 8;

/// The builtin scripts that are used.
#[derive(Clone, Copy, Debug)]
pub enum Script {
    /// One SELECT by primary key.
    SelectOnly,
    /// Three updates (two of them on hot rows), a select and an insert.
    TpcbLike,
}

impl Script {
    fn name(self) -> &'static str {
        match self {
            Script::SelectOnly => "select-only",
            Script::TpcbLike => "tpcb-like",
        }
    }
}

/// The results that pgbench prints at its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Committed transactions.
    pub transactions: u64,
    /// Committed transactions per second, excluding the time to connect.
    pub throughput_tps: f64,
    /// Mean latency, in milliseconds.
    pub latency_ms: f64,
}

/// Creates pgbench's tables (`pgbench -i`) with `scale` times 100,000 accounts.
pub async fn initialise(target: &Target, scale: u32) -> anyhow::Result<()> {
    let mut command = pgbench(target);
    command.args(["-i", "-q", "-s"]).arg(scale.to_string()).arg(&target.database);
    output(command, INITIALISE_TIMEOUT).await.with_context(|| format!("pgbench -i on {target}")).map(drop)
}

/// Runs a script. Failed transactions are an error.
pub async fn run(target: &Target, script: Script, clients: u32, time: Duration) -> anyhow::Result<Outcome> {
    let mut command = pgbench(target);
    command.args(["-n", "-M", "prepared", "-b", script.name()]);
    command.arg("-c").arg(clients.to_string()).arg("-j").arg(clients.min(2).to_string());
    command.arg("-T").arg(time.as_secs().max(1).to_string()).arg(&target.database);
    let text = output(command, time + RUN_GRACE).await;
    let text = text.with_context(|| format!("pgbench -b {} -c {clients} on {target}", script.name()))?;
    parse(&text).with_context(|| format!("pgbench on {target}"))
}

fn pgbench(target: &Target) -> Command {
    let mut command = Command::new("pgbench");
    command.arg("-h").arg(&target.host).arg("-p").arg(target.port.to_string()).arg("-U").arg(&target.user);
    if let Some(password) = &target.password {
        command.env("PGPASSWORD", password);
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

async fn output(mut command: Command, time: Duration) -> anyhow::Result<String> {
    let output = tokio::time::timeout(time, command.output())
        .await
        .with_context(|| format!("pgbench did not finish within {time:?}"))?
        .context("could not run pgbench; install Debian's package postgresql-contrib")?;
    let messages = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{}:\n{}", output.status, first_lines(&messages));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn first_lines(text: &str) -> String {
    text.lines().take(MAX_SHOWN_LINES).collect::<Vec<_>>().join("\n")
}

fn parse(text: &str) -> anyhow::Result<Outcome> {
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let word = line.and_then(|line| line.split([' ', '/']).find(|word| !word.is_empty()));
        word.with_context(|| format!("no line {name:?} in the output of pgbench:\n{text}"))
    };
    let failed: u64 = value("number of failed transactions:")?.parse()?;
    anyhow::ensure!(failed == 0, "{failed} transactions failed");
    let transactions = value("number of transactions actually processed:")?.parse()?;
    // pgbench then prints neither a throughput nor a latency.
    anyhow::ensure!(transactions > 0, "no transaction committed");
    Ok(Outcome {
        transactions,
        throughput_tps: value("tps =")?.parse()?,
        latency_ms: value("latency average =")?.parse()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
pgbench (15.18 (Debian 15.18-0+deb12u1))
transaction type: <builtin: TPC-B (sort of)>
scaling factor: 1
query mode: prepared
number of clients: 8
number of threads: 2
maximum number of tries: 1
duration: 10 s
number of transactions actually processed: 6543
number of failed transactions: 0 (0.000%)
latency average = 12.224 ms
initial connection time = 9.113 ms
tps = 654.432100 (without initial connection time)
";

    #[test]
    fn output_is_parsed() {
        let outcome = Outcome { transactions: 6543, throughput_tps: 654.4321, latency_ms: 12.224 };
        assert_eq!(parse(OUTPUT).unwrap(), outcome);
    }

    #[test]
    fn run_without_a_transaction_is_an_error() {
        let text = OUTPUT.replace("processed: 6543", "processed: 0").replace("(0.000%)", "(NaN%)");
        let (text, _) = text.split_once("latency").unwrap();
        assert_eq!(parse(text).unwrap_err().to_string(), "no transaction committed");
    }

    #[test]
    fn failed_transactions_are_an_error() {
        let text = OUTPUT.replace("failed transactions: 0", "failed transactions: 3");
        assert_eq!(parse(&text).unwrap_err().to_string(), "3 transactions failed");
        assert!(parse("").unwrap_err().to_string().contains("failed transactions"));
    }
}
