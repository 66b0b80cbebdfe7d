//! YCSB in ElasTraS's transactional form (2013 paper, 7.2.1 and table III), against any Postgres-protocol server.
//!
//! A tenant has three tables of ten 100-byte columns. A transaction is a number of single-row operations by primary
//! key, by default nine reads and one update, each a statement of its own between BEGIN and COMMIT: the logic runs at
//! the client, as in the paper. Several tenants are several instances side by side.
//!
//! ```text
//!  load what is missing -> connect all -> warm up |  measured window  | close
//!                                                 ^ Opens      Ticks  ^ Closes
//! ```
//! Closed loop by default: every connection has one transaction under way, always. With a rate it is an open loop:
//! transactions fall due at random (Poisson) moments whatever the server does, and latency counts from the moment
//! that they were due, so that a stall is not hidden by the load that it stopped. (Timers are good to a millisecond.)

mod arguments;
mod procedure;
mod report;
mod run;
mod schema;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

pub use self::arguments::YcsbArgs;
pub use self::report::YcsbReport;
use crate::Target;
use crate::keys::Distribution;

/// What to run.
#[derive(Clone)]
pub struct YcsbOptions {
    /// The server; its database is used only if `databases` is empty.
    pub target: Target,
    /// One instance runs in each of these databases (which must exist). Empty: in the target's.
    pub databases: Vec<String>,
    /// Connections per database.
    pub connections: usize,
    /// Keys; a table has this many rows, a database three times as many of a kilobyte each.
    pub records: u32,
    /// How keys are chosen.
    pub distribution: Distribution,
    /// Operations of a transaction; one operation is a transaction without BEGIN and COMMIT.
    pub operations: u32,
    /// Per cent of the operations that read; the others update one field.
    pub read_percent: f64,
    /// A transaction is one call of a procedure (Lua at Fulmar, PL/pgSQL at PostgreSQL).
    pub procedure: bool,
    /// Before the measured window.
    pub warm_up: Duration,
    /// The measured window.
    pub measure: Duration,
    /// Open loop: transactions per second over all databases. `None`: closed loop.
    pub rate_tps: Option<f64>,
    /// How long a connection that was lost is tried again; zero: its loss ends the run with an error.
    pub patience: Duration,
    /// For keys and the order of operations (not for the values written, which never repeat).
    pub seed: u64,
    /// Between two ticks.
    pub tick: Duration,
    /// Is told how the run goes, on the driver's thread: it must be quick.
    pub watcher: Option<Watcher>,
}

impl YcsbOptions {
    /// The paper's defaults (table III) at a size that loads in a moment.
    pub fn new(target: Target) -> YcsbOptions {
        YcsbOptions {
            target,
            databases: Vec::new(),
            connections: 8,
            records: 10_000,
            distribution: Distribution::HOT_90_20,
            operations: 10,
            read_percent: 90.0,
            procedure: false,
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
pub type Watcher = Arc<dyn Fn(&YcsbEvent) + Send + Sync>;

/// What a watcher is told.
#[derive(Clone, Debug)]
pub enum YcsbEvent {
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
    Tick(YcsbTick),
    /// The measured window has closed; the connections are still there.
    Closes,
}

/// How a run goes: what happened since the tick before.
#[derive(Clone, Debug)]
pub struct YcsbTick {
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

/// Loads what is missing, warms up, measures. Dropping the future ends the run.
pub async fn run(options: YcsbOptions) -> anyhow::Result<YcsbReport> {
    anyhow::ensure!(options.connections > 0, "a run needs at least one connection per database");
    anyhow::ensure!((1..=1000).contains(&options.operations), "a transaction has 1 to 1000 operations");
    anyhow::ensure!(
        (1..=i32::MAX as u32).contains(&options.records),
        "a table has 1 to {} records",
        i32::MAX
    );
    anyhow::ensure!(
        (0.0..=100.0).contains(&options.read_percent),
        "reads are 0 to 100 per cent of the operations"
    );
    anyhow::ensure!(
        options.rate_tps.is_none_or(|rate| rate > 0.0),
        "a rate is more than zero transactions a second"
    );
    anyhow::ensure!(!options.measure.is_zero(), "a run measures for some time: give it seconds");
    crate::driver::on_own_thread(move || run::run(options)).await
}
