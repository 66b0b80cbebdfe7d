//! Runs a workload against a server: loads what is missing, connects all terminals, warms up, measures, checks.
//!
//! ```text
//!  load what is missing -> connect all -> warm up |  measured window  | close -> check
//!                                                 ^ Opens      Ticks  ^ Closes
//!
//!  driver thread 1   terminals --> meter --+                     +--> watcher (a display)
//!  driver thread 2   terminals --> meter --+--> collector -------+--> JSON lines (--output)
//!  sampler           /proc, once an interval +                   +--> report
//! ```
//! Several tenants are several instances of the workload side by side, each in a database of its own. The
//! terminals of all are spread over the driver's threads (one, unless more are asked for); every thread counts for
//! itself ([`crate::measure`]) and hands an interval to the collector when it is over. How transactions arrive is said in
//! [`crate::arrival`]. Threads may be those of other processes (`part`, `remote`).

mod arguments;
mod collector;
mod database;
mod driver;
mod machine;
mod part;
mod prices;
mod record;
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
pub use self::report::{Availability, Driver, Report};
use crate::Target;
use crate::arrival::Arrival;
use crate::keys::Distribution;
use crate::workload::Workload;

/// How to run a workload.
#[derive(Clone)]
pub struct RunOptions {
    /// The server; its database is used only if `databases` is empty.
    pub target: Target,
    /// One instance runs in each of these databases (which must exist). Empty: in the target's.
    pub databases: Vec<String>,
    /// Connections per database.
    pub connections: usize,
    /// How the data is spread over the tenants, the first having most.
    pub tenant_sizes: Distribution,
    /// How an open loop's rate is spread over them.
    pub tenant_rates: Distribution,
    /// When transactions start.
    pub arrival: Arrival,
    /// Before the measured window.
    pub warm_up: Duration,
    /// The measured window.
    pub measure: Duration,
    /// How long a connection that was lost is tried again; zero: its loss ends the run with an error.
    pub patience: Duration,
    /// Of everything that is drawn.
    pub seed: u64,
    /// Driver threads of each process, each with an event loop of its own.
    pub threads: usize,
    /// Whether there are other processes that drive.
    pub processes: Processes,
    /// The driver's threads let all others of the machine go first.
    pub gives_way: bool,
    /// They keep to the half of the processors that a server leaves them which was started [`crate::server::Server::start_apart`].
    pub apart: bool,
    /// A slot of the window in which no transaction of a tenant ends is a down interval.
    pub down_interval_seconds: usize,
    /// An interval of the report, between two ticks.
    pub tick: Duration,
    /// Processes of the server: what they and their children use is measured too.
    pub server_processes: Vec<Pid>,
    /// What that costs.
    pub prices: Prices,
    /// Where the JSON lines go.
    pub output: Option<PathBuf>,
    /// What made this driver, for the JSON lines.
    pub build: &'static str,
    /// Is told how the run goes, on a driver thread: it must be quick.
    pub watcher: Option<Watcher>,
}

impl RunOptions {
    /// The defaults of the command line.
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
            patience: Duration::ZERO,
            seed: 1,
            threads: 1,
            processes: Processes::One,
            gives_way: false,
            apart: false,
            down_interval_seconds: 1,
            tick: Duration::from_secs(1),
            server_processes: Vec::new(),
            prices: Prices::default(),
            output: None,
            build: env!("CARGO_PKG_VERSION"),
            watcher: None,
        }
    }

    /// The databases of the tenants, in their order.
    fn targets(&self) -> Vec<Target> {
        match &self.databases[..] {
            [] => vec![self.target.clone()],
            databases => databases.iter().map(|database| self.target.with_database(database)).collect(),
        }
    }

    /// Driver threads of all processes.
    fn all_threads(&self) -> usize {
        self.threads * self.processes.count()
    }

    /// What this process waits for to drive: its threads, or its parts.
    fn drivers(&self) -> usize {
        match self.processes {
            Processes::Parent { count, .. } => count,
            _ => self.threads,
        }
    }

    fn validate(&self) -> anyhow::Result<()> {
        anyhow::ensure!(self.connections > 0, "a run needs at least one connection per database");
        anyhow::ensure!(!self.measure.is_zero(), "a run measures for some time: give it seconds");
        anyhow::ensure!(self.threads > 0, "a run needs a driver thread");
        anyhow::ensure!(self.tick >= SHORTEST_TICK, "an interval is at least {SHORTEST_TICK:?} long");
        match &self.arrival {
            Arrival::Open { rate_tps, .. } => {
                anyhow::ensure!(
                    *rate_tps > 0.0 && *rate_tps <= MOST_TPS,
                    "a rate is more than zero transactions a second, and a million at most"
                );
            }
            Arrival::Closed => anyhow::ensure!(
                self.tenant_rates == Distribution::Uniform,
                "without a rate there is none to spread over the tenants"
            ),
        }
        Ok(())
    }
}

/// The processes that share a run's terminals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Processes {
    /// This one alone.
    One,
    /// So many others, by this command with `--part NUMBER` behind it; this one measures, and drives nothing.
    Parent {
        /// The program and its arguments.
        command: Vec<OsString>,
        /// How many.
        count: usize,
    },
    /// This is one of them: see [`run_part`].
    Part {
        /// Which, from zero.
        number: usize,
        /// Of how many.
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

/// More than any driver can send, and little enough that what it cannot is counted quickly.
const MOST_TPS: f64 = 1e6;

const SHORTEST_TICK: Duration = Duration::from_millis(10);

/// Somebody who is told how a run goes.
pub type Watcher = Arc<dyn Fn(&RunEvent) + Send + Sync>;

/// What a watcher is told.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// Rows that are in place, of all that will be.
    Loading {
        /// So far.
        rows: u64,
        /// In the end.
        of: u64,
    },
    /// All are connected; the warm-up begins.
    WarmUp,
    /// The measured window opens.
    Opens,
    /// Some time has gone by.
    Tick(RunTick),
    /// The measured window has closed; the connections are still there.
    Closes,
}

/// How a run goes: what happened since the tick before.
#[derive(Clone, Debug)]
pub struct RunTick {
    /// Since the warm-up began.
    pub elapsed: Duration,
    /// Warm-up and measured window together.
    pub of: Duration,
    /// Transactions per second that ended as they should.
    pub throughput_tps: f64,
    /// Median latency, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of latency, in milliseconds.
    pub p99_ms: f64,
    /// Connections lost since the run began.
    pub lost_connections: u64,
}

/// Runs a load, and beside it another one, which begins before the window of the first opens and goes on until it has closed.
/// The second one's driver gives way, unless it shares processors with the server (it would be the first to starve): it is to take the server's time, and not that of the first one's driver on
/// the same machine.
pub(crate) async fn run_beside<W: Workload>(
    (workload, options): (W, RunOptions),
    (other, mut beside): (W, RunOptions),
) -> anyhow::Result<(Report, Report)> {
    beside.measure = options.measure + 2 * options.warm_up;
    beside.gives_way = beside.apart;
    tokio::try_join!(run(workload, options), run(other, beside))
}

/// Loads what is missing, warms up, measures, checks. Dropping the future ends the run.
pub async fn run<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<Report> {
    options.validate()?;
    workload.validate()?;
    stages::run(workload, options).await
}

/// Runs the terminals of one of several processes, as the process that has started it says on stdin, which is told on stdout.
pub async fn run_part<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<()> {
    options.validate()?;
    workload.validate()?;
    part::run(workload, options).await
}
