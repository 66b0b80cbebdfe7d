//! Command-line arguments of a run, the same for all workloads.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use super::{Prices, Processes, RunOptions};
use crate::arrival::{Arrival, Shape};
use crate::keys::Distribution;
use crate::workload::Workload;
use crate::{Target, tenants};

/// The tolerance of the thesis for loads that are not disk-bound.
const TOLERANCE_S: f64 = 1.0;

/// The arrival process of an open loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArrivalName {
    /// Transactions are due at random times; overdue ones run late
    Poisson,
    /// As Poisson, with intervals of at most ten means; transactions later than the tolerance are
    /// cancelled (Karyakin's thesis)
    Schedule,
}

/// Arguments of `fulmar bench run WORKLOAD` that all workloads share.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// URL of the server, such as postgres://postgres@127.0.0.1:5432/shop
    #[arg(long, value_name = "URL")]
    pub target: Target,
    /// Number of instances. One runs in the database of the URL; more run in databases
    /// WORKLOAD_0000, WORKLOAD_0001 ..., which are created if missing
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub tenants: u32,
    /// Distribution of the data over the instances, the first having most: uniform, zipfian[:S] or
    /// hotspot[:DATA%:TENANTS%]
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub tenant_sizes: Distribution,
    /// Distribution of --rate over the instances, with the same values
    #[arg(long, default_value = "uniform", value_name = "NAME", requires = "rate")]
    pub tenant_rates: Distribution,
    /// Connections per instance
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub connections: u32,
    /// Transactions per second over all instances (open loop) [default: closed loop at full speed]
    #[arg(long, value_name = "TPS")]
    pub rate: Option<f64>,
    /// Arrival process of the transactions
    #[arg(long, default_value = "poisson", value_name = "NAME", requires = "rate")]
    pub arrival: ArrivalName,
    /// Seconds after which a late transaction of a schedule is cancelled [default: 1; use 5 for
    /// disk-bound loads]
    #[arg(long, value_name = "SECONDS", requires = "rate")]
    pub tolerance: Option<f64>,
    /// Factor of the rate over time: constant, steps:1,2,.., sine:PERIOD[:LOW],
    /// hockey-stick:AT:HIGH, spike:AT:FOR:HIGH, world-cup[:HIGH] or a .csv file of `seconds,factor`
    #[arg(long, default_value = "constant", value_name = "TRACE", requires = "rate")]
    pub trace: Shape,
    /// Length of the warm-up in seconds
    #[arg(long, default_value_t = 2, value_name = "SECONDS")]
    pub warm_up: u64,
    /// Length of the measured window in seconds
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    pub seconds: u64,
    /// Seconds for which lost connections are retried; with 0, a lost connection ends the run
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub patience: u64,
    /// Random seed; the same seed repeats the same data and choices
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Driver threads per process, each with its own event loop; use more if one is the bottleneck
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Driver processes that share the connections; use more if threads of one process slow each
    /// other down
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub processes: u32,
    /// The number of this driver process, passed by the parent process
    #[arg(long, hide = true, value_name = "N")]
    pub part: Option<u32>,
    /// Seconds without a transaction that count as a down interval of a tenant; use 5 for
    /// disk-bound loads
    #[arg(long, default_value_t = 1, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=60))]
    pub down_interval: u32,
    /// A process of the server on this machine, whose CPU, memory and disk use is measured
    /// (repeatable)
    #[arg(long, value_name = "PID", value_parser = process)]
    pub server_process: Vec<Pid>,
    /// Prices of the server's resources as lines `resource,dollars` [default: those in
    /// docs/benchmarks.md]
    #[arg(long, value_name = "FILE.csv", requires = "server_process")]
    pub prices: Option<PathBuf>,
    /// Write JSON lines with all intervals and samples to this file, for `fulmar bench report`
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

fn process(text: &str) -> Result<Pid, String> {
    let number = text.parse::<i32>().ok().filter(|number| *number > 0);
    let pid = number.and_then(Pid::from_raw).ok_or("process id must be a positive number")?;
    match test_kill_process(pid) {
        Err(Errno::SRCH) => Err(format!("process {text} does not exist")),
        // EPERM means that the process exists and belongs to another user.
        _ => Ok(pid),
    }
}

impl RunArgs {
    /// Returns the options of the run and creates the databases that it needs. A part neither
    /// creates databases nor measures a server.
    pub async fn into_options<W: Workload>(self) -> anyhow::Result<RunOptions> {
        let arrival = self.arrival()?;
        let databases = match self.tenants {
            1 => Vec::new(),
            count => tenants::names(&format!("{}_", W::NAME), count),
        };
        let processes = self.processes()?;
        let prices = self.prices.as_deref().map_or_else(Prices::listed, Prices::read)?;
        let is_part = matches!(processes, Processes::Part { .. });
        if !is_part {
            tenants::create(&self.target, &databases, |_| ()).await?;
        }
        Ok(RunOptions {
            databases,
            connections: self.connections as usize,
            tenant_sizes: self.tenant_sizes,
            tenant_rates: self.tenant_rates,
            arrival,
            warm_up: Duration::from_secs(self.warm_up),
            measure: Duration::from_secs(self.seconds),
            reconnect_timeout: Duration::from_secs(self.patience),
            seed: self.seed,
            threads: self.threads as usize,
            processes,
            down_interval_seconds: self.down_interval as usize,
            server_processes: if is_part { Vec::new() } else { self.server_process },
            prices,
            output: self.output.filter(|_| !is_part),
            ..RunOptions::new(self.target)
        })
    }

    /// The parent starts its parts with its own command line.
    fn processes(&self) -> anyhow::Result<Processes> {
        let count = self.processes as usize;
        Ok(match self.part {
            Some(number) => {
                anyhow::ensure!(number < self.processes, "--part must be less than --processes ({count})");
                Processes::Part { number: number as usize, of: count }
            }
            None if count == 1 => Processes::One,
            None => {
                let program =
                    std::env::current_exe().context("could not determine the path of the executable")?;
                let command = [program.into()].into_iter().chain(std::env::args_os().skip(1)).collect();
                Processes::Parent { command, count }
            }
        })
    }

    fn arrival(&self) -> anyhow::Result<Arrival> {
        let Some(rate_tps) = self.rate else { return Ok(Arrival::Closed) };
        let tolerance = match (self.arrival, self.tolerance) {
            (ArrivalName::Poisson, None) => None,
            (ArrivalName::Poisson, Some(_)) => {
                anyhow::bail!("--tolerance requires --arrival schedule")
            }
            (ArrivalName::Schedule, tolerance) => {
                let tolerance = Duration::try_from_secs_f64(tolerance.unwrap_or(TOLERANCE_S));
                Some(tolerance.context("--tolerance must be a non-negative number of seconds")?)
            }
        };
        Ok(Arrival::Open { rate_tps, shape: self.trace.clone(), tolerance })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ycsb::Ycsb;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: RunArgs,
    }

    #[tokio::test]
    async fn argument_defaults_equal_option_defaults() {
        let line = Line::try_parse_from(["bench", "--target", "postgres://a@b/c"]).unwrap();
        let options = line.arguments.into_options::<Ycsb>().await.unwrap();
        let defaults = RunOptions::new("postgres://a@b/c".parse().unwrap());
        assert_eq!(options.target, defaults.target);
        assert_eq!(options.connections, defaults.connections);
        assert_eq!((options.warm_up, options.measure), (defaults.warm_up, defaults.measure));
        assert_eq!((options.reconnect_timeout, options.seed), (defaults.reconnect_timeout, defaults.seed));
        assert_eq!((options.arrival, options.threads), (defaults.arrival, defaults.threads));
        assert_eq!(options.processes, defaults.processes);
        assert_eq!(options.down_interval_seconds, defaults.down_interval_seconds);
        assert_eq!(
            (options.tenant_sizes, options.tenant_rates),
            (defaults.tenant_sizes, defaults.tenant_rates)
        );
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        for bad in [
            &["--tenants", "0"],
            &["--connections", "0"],
            &["--rate", "x"],
            &["--trace", "sine:60"],
            &["--arrival", "schedule"],
            &["--server-process", "-7"],
            // Larger than any process id of the kernel.
            &["--server-process", "2147483647"],
        ] {
            let line = ["bench", "--target", "postgres://a@b/c"].iter().chain(bad.iter());
            assert!(Line::try_parse_from(line).is_err(), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn excessive_rate_is_rejected() {
        let line = Line::try_parse_from("bench --target postgres://a@b/c --rate 1e9".split(' ')).unwrap();
        let options = line.arguments.into_options::<Ycsb>().await.unwrap();
        let error = crate::run::run(Ycsb::default(), options).await.unwrap_err();
        assert!(error.to_string().contains("at most 1000000"), "{error:#}");
    }

    #[tokio::test]
    async fn tolerance_is_rejected_for_poisson() {
        let line = "bench --target postgres://a@b/c --rate 50 --tolerance 5";
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        let error = line.arguments.into_options::<Ycsb>().await.err();
        let error = error.expect("a tolerance without effect must be rejected");
        assert!(error.to_string().contains("--arrival schedule"), "{error}");
    }

    #[tokio::test]
    async fn schedule_has_a_tolerance() {
        let line =
            "bench --target postgres://a@b/c --rate 50 --arrival schedule --tolerance 5 --trace spike:1:2:3";
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        let options = line.arguments.into_options::<Ycsb>().await.unwrap();
        let shape = "spike:1:2:3".parse().unwrap();
        let tolerance = Some(Duration::from_secs(5));
        assert_eq!(options.arrival, Arrival::Open { rate_tps: 50.0, shape, tolerance });
    }
}
