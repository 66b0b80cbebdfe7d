//! Runs a workload against a server: loads what is missing, connects all terminals, warms up, measures, checks.
//!
//! ```text
//!  load what is missing -> connect all -> warm up |  measured window  | close -> check
//!                                                 ^ Opens      Ticks  ^ Closes
//! ```
//! Several tenants are several instances of the workload side by side, each in a database of its own.
//!
//! Closed loop by default: every connection has one transaction under way, always. With a rate it is an open loop:
//! transactions fall due at random (Poisson) moments whatever the server does, and latency counts from the moment
//! that they were due, so that a stall is not hidden by the load that it stopped. (Timers are good to a millisecond.)

mod arguments;
mod report;
mod session;
mod stages;

use std::sync::Arc;
use std::time::Duration;

pub use self::arguments::RunArgs;
pub use self::report::Report;
use crate::Target;
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
    /// Before the measured window.
    pub warm_up: Duration,
    /// The measured window.
    pub measure: Duration,
    /// Open loop: transactions per second over all databases. `None`: closed loop.
    pub rate_tps: Option<f64>,
    /// How long a connection that was lost is tried again; zero: its loss ends the run with an error.
    pub patience: Duration,
    /// Of everything that is drawn.
    pub seed: u64,
    /// Between two ticks.
    pub tick: Duration,
    /// Is told how the run goes, on the driver's thread: it must be quick.
    pub watcher: Option<Watcher>,
}

impl RunOptions {
    /// The defaults of the command line.
    pub fn new(target: Target) -> RunOptions {
        RunOptions {
            target,
            databases: Vec::new(),
            connections: 8,
            warm_up: Duration::from_secs(2),
            measure: Duration::from_secs(10),
            rate_tps: None,
            patience: Duration::ZERO,
            seed: 1,
            tick: Duration::from_secs(1),
            watcher: None,
        }
    }
}

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
    /// Committed transactions per second.
    pub throughput_tps: f64,
    /// Median latency, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile of latency, in milliseconds.
    pub p99_ms: f64,
    /// Connections lost since the run began.
    pub lost_connections: u64,
}

/// Loads what is missing, warms up, measures, checks. Dropping the future ends the run.
pub async fn run<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<Report> {
    anyhow::ensure!(options.connections > 0, "a run needs at least one connection per database");
    anyhow::ensure!(
        options.rate_tps.is_none_or(|rate| rate > 0.0),
        "a rate is more than zero transactions a second"
    );
    anyhow::ensure!(!options.measure.is_zero(), "a run measures for some time: give it seconds");
    workload.validate()?;
    crate::driver::on_own_thread(move || stages::run(workload, options)).await
}
