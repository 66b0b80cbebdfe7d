//! Runs a workload against a server: loads missing data, connects all terminals, warms up,
//! measures, and checks the data.
//!
//! ```text
//!  load what is missing -> connect all -> warm up |  measured window  | close -> check
//!                                                 ^ Opens      Ticks  ^ Closes
//!
//!  driver thread 1   terminals --> meter --+                     +--> watcher (a display)
//!  driver thread 2   terminals --> meter --+--> collector -------+--> JSON lines (--output)
//!  sampler           /proc, once an interval +                   +--> report
//! ```
//!
//! - Tenants are instances of the workload that run concurrently, each in its own database.
//! - The terminals of all tenants are distributed over the driver threads (default: one). Each
//!   thread has its own counters ([`crate::measure`]) and passes an interval to the collector when
//!   it ends.
//! - [`crate::arrival`] describes when transactions start.
//! - Driver threads may be in other processes (`part`, `remote`).

mod arguments;
mod collector;
mod database;
mod driver;
mod machine;
mod message;
mod part;
mod prices;
mod record;
mod recorder;
mod remote;
mod report;
mod sampler;
mod session;
mod stages;
mod table;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Pid;

pub use self::arguments::RunArgs;
pub use self::machine::Machine;
pub use self::prices::{Prices, ServerUsage};
pub use self::record::{
    IntervalRecord, KindRecord, KindReport, Record, RunRecord, TenantRecord, UsageRecord,
};
pub(crate) use self::recorder::{Moment, Moments, Recorder, run_while};
pub use self::report::{Availability, Driver, Report};
use crate::Target;
use crate::arrival::Arrival;
use crate::keys::Distribution;
use crate::measure::Sample;
use crate::workload::Workload;

/// Options of a run.
#[derive(Clone)]
pub struct RunOptions {
    /// The server. Its database is used only if `databases` is empty.
    pub target: Target,
    /// The databases, which must exist. One instance runs in each. Empty: one instance in the
    /// database of `target`.
    pub databases: Vec<String>,
    /// Connections per database.
    pub connections: usize,
    /// Distribution of the data over the tenants. The first has most.
    pub tenant_sizes: Distribution,
    /// Distribution of an open loop's rate over the tenants.
    pub tenant_rates: Distribution,
    /// The arrival process.
    pub arrival: Arrival,
    /// Length of the warm-up before the measured window.
    pub warm_up: Duration,
    /// Length of the measured window.
    pub measure: Duration,
    /// How long a lost connection is retried. With zero, a lost connection ends the run with an
    /// error.
    pub reconnect_timeout: Duration,
    /// The random seed.
    pub seed: u64,
    /// Driver threads per process, each with its own event loop.
    pub threads: usize,
    /// The driver processes.
    pub processes: Processes,
    /// Runs the driver threads at the lowest priority (`SCHED_IDLE`).
    pub idle_priority: bool,
    /// Restricts the driver threads to the half of the CPUs that a server leaves free if it was
    /// started with [`crate::server::Server::start_on_separate_cpus`].
    pub separate_cpus: bool,
    /// Seconds per slot of the window. A slot in which no transaction of a tenant ends is a down
    /// interval.
    pub down_interval_seconds: usize,
    /// Length of an interval, and so the time between two ticks.
    pub tick: Duration,
    /// Processes of the server. The resource usage of them and their children is measured.
    pub server_processes: Vec<Pid>,
    /// Prices of that usage.
    pub prices: Prices,
    /// The file for the JSON lines.
    pub output: Option<PathBuf>,
    /// Version and commit of the driver, for the JSON lines.
    pub build: &'static str,
    /// Receives the events of the run. It is called on a driver thread and must return quickly.
    pub watcher: Option<Watcher>,
}

impl RunOptions {
    /// Returns the defaults of the command line.
    pub fn new(target: Target) -> RunOptions {
        RunOptions {
            target,
            databases: Vec::new(),
            connections: 8,
            tenant_sizes: Distribution::Uniform,
            tenant_rates: Distribution::Uniform,
            arrival: Arrival::Closed,
            warm_up: Duration::from_secs(2),
            measure: Duration::from_secs(10),
            reconnect_timeout: Duration::ZERO,
            seed: 1,
            threads: 1,
            processes: Processes::One,
            idle_priority: false,
            separate_cpus: false,
            down_interval_seconds: 1,
            tick: Duration::from_secs(1),
            server_processes: Vec::new(),
            prices: Prices::default(),
            output: None,
            build: env!("CARGO_PKG_VERSION"),
            watcher: None,
        }
    }

    /// The databases of the tenants, in order.
    fn targets(&self) -> Vec<Target> {
        match &self.databases[..] {
            [] => vec![self.target.clone()],
            databases => databases.iter().map(|database| self.target.with_database(database)).collect(),
        }
    }

    /// Number of driver threads in all processes.
    fn all_threads(&self) -> usize {
        self.threads * self.processes.count()
    }

    /// Number of drivers that this process waits for: its threads, or its parts.
    fn drivers(&self) -> usize {
        match self.processes {
            Processes::Parent { count, .. } => count,
            _ => self.threads,
        }
    }

    fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.connections > 0, "at least one connection per database is required");
        anyhow::ensure!(!self.measure.is_zero(), "the measured window must not be empty");
        anyhow::ensure!(self.threads > 0, "at least one driver thread is required");
        anyhow::ensure!(self.tick >= MIN_TICK, "an interval must be at least {MIN_TICK:?} long");
        match &self.arrival {
            Arrival::Open { rate_tps, .. } => {
                anyhow::ensure!(
                    *rate_tps > 0.0 && *rate_tps <= MAX_RATE_TPS,
                    "--rate must be greater than 0 and at most {MAX_RATE_TPS}"
                );
            }
            Arrival::Closed => {
                anyhow::ensure!(self.tenant_rates == Distribution::Uniform, "--tenant-rates requires --rate")
            }
        }
        Ok(())
    }
}

/// The driver processes of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Processes {
    /// Only this process.
    One,
    /// `count` other processes, started with `command` and `--part NUMBER`. This process measures,
    /// but runs no terminals.
    Parent {
        /// The program and its arguments.
        command: Vec<OsString>,
        /// Number of driver processes.
        count: usize,
    },
    /// This process is a driver process. See [`run_part`].
    Part {
        /// Its number, from zero.
        number: usize,
        /// Number of driver processes.
        of: usize,
    },
}

impl Processes {
    fn count(&self) -> usize {
        match self {
            Processes::One => 1,
            Processes::Parent { count, .. } => *count,
            Processes::Part { of, .. } => *of,
        }
    }
}

/// The maximum rate: more than any driver can send, but low enough that transactions that are not
/// sent are counted quickly.
const MAX_RATE_TPS: f64 = 1e6;

const MIN_TICK: Duration = Duration::from_millis(10);

/// A callback for the events of a run.
pub type Watcher = Arc<dyn Fn(&RunEvent) + Send + Sync>;

/// An event of a run.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// Rows have been loaded.
    Loading {
        /// Rows loaded so far.
        rows: u64,
        /// Rows in total.
        of: u64,
    },
    /// All terminals are connected, and the warm-up starts.
    WarmUp,
    /// The measured window opens.
    Opens,
    /// An interval has ended.
    Tick(RunTick),
    /// The measured window has closed. The connections are still open.
    Closes,
}

/// The progress of a run since the previous tick.
#[derive(Clone, Debug)]
pub struct RunTick {
    /// Time since the start of the warm-up.
    pub elapsed: Duration,
    /// Length of the warm-up and the measured window.
    pub of: Duration,
    /// Transactions per second that committed or rolled back as intended.
    pub throughput_tps: f64,
    /// Mean latency, in milliseconds.
    pub mean_ms: f64,
    /// Median latency, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of latency, in milliseconds.
    pub p99_ms: f64,
    /// All latencies of the interval: microseconds with three significant digits, and their counts.
    pub samples_us: Vec<Sample>,
    /// Transactions that failed in the interval.
    pub failed: u64,
    /// Attempts that the server rejected in the interval.
    pub rejected: u64,
    /// Connections lost since the start of the run.
    pub lost_connections: u64,
}

/// Runs a load and, concurrently, a second one that starts before the window of the first opens and
/// ends after it has closed.
///
/// The second driver runs at the lowest priority, so that it takes the time of the server but not
/// that of the first driver on the same machine. It does not if it shares CPUs with the server,
/// where it would be the first to starve.
pub(crate) async fn run_with_background_load<W: Workload>(
    (workload, options): (W, RunOptions),
    (other, mut background): (W, RunOptions),
) -> anyhow::Result<(Report, Report)> {
    background.measure = options.measure + 2 * options.warm_up;
    background.idle_priority = background.separate_cpus;
    tokio::try_join!(run(workload, options), run(other, background))
}

/// Loads missing data, warms up, measures, and checks the data. Dropping the future stops the run.
pub async fn run<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<Report> {
    options.validate()?;
    workload.validate()?;
    stages::run(workload, options).await
}

/// Runs the terminals of one of several driver processes. The parent process controls it through
/// stdin and receives its counts on stdout.
pub async fn run_part<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<()> {
    options.validate()?;
    workload.validate()?;
    part::run(workload, options).await
}
