//! The command line of a run, whatever the workload.

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

/// The thesis's, where no disk is the limit.
const TOLERANCE_S: f64 = 1.0;

/// How an open loop's transactions fall due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArrivalName {
    /// At random moments; what is overdue is run late
    Poisson,
    /// Karyakin's: pauses of at most ten means; what is later than the tolerance is cancelled and counted
    Schedule,
}

/// `fulmar bench run WORKLOAD`: the arguments that all workloads share.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The server, e.g. postgres://postgres@127.0.0.1:5432/shop
    #[arg(long, value_name = "URL")]
    pub target: Target,
    /// Instances: 1 runs in the URL's database; more run in databases WORKLOAD_0000, WORKLOAD_0001 ..., made if absent
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub tenants: u32,
    /// Spreads the data over the instances, the first having most: uniform, zipfian[:S] or hotspot[:DATA%:TENANTS%]
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub tenant_sizes: Distribution,
    /// Spreads --rate over the instances in the same way
    #[arg(long, default_value = "uniform", value_name = "NAME", requires = "rate")]
    pub tenant_rates: Distribution,
    /// Connections of each instance
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub connections: u32,
    /// Transactions a second over all instances (open loop); without it, as many as go (closed loop)
    #[arg(long, value_name = "TPS")]
    pub rate: Option<f64>,
    /// How they fall due
    #[arg(long, default_value = "poisson", value_name = "NAME", requires = "rate")]
    pub arrival: ArrivalName,
    /// Seconds after which a transaction of a schedule is cancelled: 5 if a disk is the limit [default: 1]
    #[arg(long, value_name = "SECONDS", requires = "rate")]
    pub tolerance: Option<f64>,
    /// The rate over time, as factors: constant, steps:1,2,.., sine:PERIOD[:LOW], hockey-stick:AT:HIGH,
    /// spike:AT:FOR:HIGH, world-cup[:HIGH] or a file of `seconds,factor` (.csv)
    #[arg(long, default_value = "constant", value_name = "TRACE", requires = "rate")]
    pub trace: Shape,
    /// Seconds before the measured window
    #[arg(long, default_value_t = 2, value_name = "SECONDS")]
    pub warm_up: u64,
    /// Seconds of the measured window
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    pub seconds: u64,
    /// Seconds for which a lost connection is tried again (0: its loss ends the run)
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub patience: u64,
    /// Repeats the same data and the same choices
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Driver threads of each process, each with an event loop of its own: more where one cannot make the load
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
    /// Driver processes that share the connections: more where threads of one get into each other's way
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub processes: u32,
    /// This process is one of them, started by the one that measures
    #[arg(long, hide = true, value_name = "N")]
    pub part: Option<u32>,
    /// Seconds without a transaction that make a down interval of a tenant: 1, or 5 if a disk is the limit
    #[arg(long, default_value_t = 1, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=60))]
    pub down_interval: u32,
    /// A process of the server on this machine, whose use of CPU, memory and disk is measured; may be repeated
    #[arg(long, value_name = "PID", value_parser = process)]
    pub server_process: Vec<Pid>,
    /// Prices of what the server uses: lines `resource,dollars` [default: those of docs/benchmarks.md]
    #[arg(long, value_name = "FILE.csv", requires = "server_process")]
    pub prices: Option<PathBuf>,
    /// Write JSON lines with every interval and all samples, for `fulmar bench report`
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

fn process(text: &str) -> Result<Pid, String> {
    let number = text.parse::<i32>().ok().filter(|number| *number > 0);
    let pid = number.and_then(Pid::from_raw).ok_or("a process id is a number above zero")?;
    match test_kill_process(pid) {
        Err(Errno::SRCH) => Err(format!("there is no process {text}")),
        // It is there, even if it is somebody else's.
        _ => Ok(pid),
    }
}

impl RunArgs {
    /// The options of the run; makes the databases that it needs. A part has all databases, and measures no server.
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
            patience: Duration::from_secs(self.patience),
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

    /// Parts are started by this process's own command line.
    fn processes(&self) -> anyhow::Result<Processes> {
        let count = self.processes as usize;
        Ok(match self.part {
            Some(number) => {
                anyhow::ensure!(number < self.processes, "there is no part {number} of {count}");
                Processes::Part { number: number as usize, of: count }
            }
            None if count == 1 => Processes::One,
            None => {
                let program = std::env::current_exe().context("cannot find this very command")?;
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
                anyhow::bail!("--tolerance is for --arrival schedule: else nothing is cancelled")
            }
            (ArrivalName::Schedule, tolerance) => {
                let tolerance = Duration::try_from_secs_f64(tolerance.unwrap_or(TOLERANCE_S));
                Some(tolerance.context("a tolerance is a number of seconds, not below zero")?)
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
    async fn the_defaults_are_those_of_the_options() {
        let line = Line::try_parse_from(["bench", "--target", "postgres://a@b/c"]).unwrap();
        let options = line.arguments.into_options::<Ycsb>().await.unwrap();
        let defaults = RunOptions::new("postgres://a@b/c".parse().unwrap());
        assert_eq!(options.target, defaults.target);
        assert_eq!(options.connections, defaults.connections);
        assert_eq!((options.warm_up, options.measure), (defaults.warm_up, defaults.measure));
        assert_eq!((options.patience, options.seed), (defaults.patience, defaults.seed));
        assert_eq!((options.arrival, options.threads), (defaults.arrival, defaults.threads));
        assert_eq!(options.processes, defaults.processes);
        assert_eq!(options.down_interval_seconds, defaults.down_interval_seconds);
        assert_eq!(
            (options.tenant_sizes, options.tenant_rates),
            (defaults.tenant_sizes, defaults.tenant_rates)
        );
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            &["--tenants", "0"],
            &["--connections", "0"],
            &["--rate", "x"],
            &["--trace", "sine:60"],
            &["--arrival", "schedule"],
            &["--server-process", "-7"],
            // Beyond the kernel's largest.
            &["--server-process", "2147483647"],
        ] {
            let line = ["bench", "--target", "postgres://a@b/c"].iter().chain(bad.iter());
            assert!(Line::try_parse_from(line).is_err(), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_rate_that_nobody_can_send_is_refused() {
        let line = Line::try_parse_from("bench --target postgres://a@b/c --rate 1e9".split(' ')).unwrap();
        let options = line.arguments.into_options::<Ycsb>().await.unwrap();
        let error = crate::run::run(Ycsb::default(), options).await.unwrap_err();
        assert!(error.to_string().contains("a million at most"), "{error:#}");
    }

    #[tokio::test]
    async fn a_poisson_process_cancels_nothing() {
        let line = "bench --target postgres://a@b/c --rate 50 --tolerance 5";
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        let error = line.arguments.into_options::<Ycsb>().await.err().expect("it would be ignored");
        assert!(error.to_string().contains("--arrival schedule"), "{error}");
    }

    #[tokio::test]
    async fn a_schedule_has_a_tolerance() {
        let line =
            "bench --target postgres://a@b/c --rate 50 --arrival schedule --tolerance 5 --trace spike:1:2:3";
        let line = Line::try_parse_from(line.split(' ')).unwrap();
        let options = line.arguments.into_options::<Ycsb>().await.unwrap();
        let shape = "spike:1:2:3".parse().unwrap();
        let tolerance = Some(Duration::from_secs(5));
        assert_eq!(options.arrival, Arrival::Open { rate_tps: 50.0, shape, tolerance });
    }
}
