//! The JSON lines of a run (`--output`), written and read here: one object a line, told apart by `line`.
//!
//! ```text
//! {"line":"run", ...}         what was run, with which seed, by which build, on which machine, against which server
//! {"line":"interval", ...}    a second: counts and latencies by kind with all samples, the driver's CPU, the server's use
//! {"line":"tenant", ...}      each tenant's transactions, outages and down intervals in the window
//! {"line":"report", ...}      what it came to: the report that is printed
//! ```

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::report::Report;
use crate::measure::{Counts, Interval, Latencies, Latency, Sample};
use crate::workload::Kind;

/// A line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "lowercase")]
pub enum Record {
    /// The first.
    Run(RunRecord),
    /// One for each interval, warm-up included.
    Interval(IntervalRecord),
    /// One for each tenant.
    Tenant(TenantRecord),
    /// The last.
    Report(Box<Report>),
}

/// What was run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The workload's name.
    pub workload: String,
    /// Its options.
    pub options: serde_json::Value,
    /// How transactions arrived, in words.
    pub arrival: String,
    /// The server.
    pub target: String,
    /// What it says of itself.
    pub server: String,
    /// Of everything that was drawn.
    pub seed: u64,
    /// What made the driver: its version and commit.
    pub build: String,
    /// Where the driver ran.
    pub machine: Machine,
    /// When the clock started, in seconds since 1970.
    pub started_unix_s: u64,
    /// Before the measured window.
    pub warm_up_s: f64,
    /// The measured window.
    pub window_s: f64,
    /// An interval.
    pub interval_s: f64,
}

/// What happened in an interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IntervalRecord {
    /// When it ended, from the window's opening: not above zero in the warm-up.
    pub ends_s: f64,
    /// How long it was.
    pub seconds: f64,
    /// By kind of transaction.
    pub kinds: Vec<KindRecord>,
    /// Tries that the server refused.
    pub refused: u64,
    /// Connections that were lost.
    pub lost_connections: u64,
    /// The share of a processor that each driver thread used.
    pub driver_cpu: Vec<f64>,
    /// What the server's processes used.
    pub usage: Option<UsageRecord>,
}

/// One kind of transaction in an interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindRecord {
    /// What it came to.
    #[serde(flatten)]
    pub report: KindReport,
    /// All latencies: microseconds to three digits, and how many.
    pub samples_us: Vec<Sample>,
}

/// One kind of transaction, in an interval or in all of the window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindReport {
    /// Its name.
    pub kind: String,
    /// Committed.
    pub committed: u64,
    /// Ended without effect, as the workload foresees.
    pub rolled_back: u64,
    /// Too late to be started.
    pub cancelled: u64,
    /// Given up.
    pub failed: u64,
    /// Of those that ended as they should.
    pub latency: Latency,
}

/// What the server's processes, and for the network the machine, used in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UsageRecord {
    /// CPU time, user and system.
    pub cpu_s: f64,
    /// Memory at the interval's end (PSS).
    pub pss_bytes: u64,
    /// Read from disks.
    pub read_bytes: u64,
    /// Written to disks, or to be.
    pub written_bytes: u64,
    /// Received by all network interfaces of the machine, loopback included.
    pub received_bytes: u64,
    /// Sent by them.
    pub sent_bytes: u64,
}

/// What became of a tenant in the window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its database.
    pub tenant: String,
    /// Transactions that ended as they should.
    pub transactions: u64,
    /// Their mean latency.
    pub mean_ms: f64,
    /// Transactions that were too late to be started.
    pub cancelled: u64,
    /// Those, in seconds of what was offered to this tenant; only of an open loop.
    pub lost_work_s: Option<f64>,
    /// Slots in which no transaction ended.
    pub down_intervals: u64,
    /// How long each time lasted in which somebody waited and nobody was answered, from a second on.
    pub outages_s: Vec<f64>,
}

impl IntervalRecord {
    pub(super) fn new(
        interval: Interval,
        kinds: &[Kind],
        ends_s: f64,
        seconds: f64,
        driver_cpu: &[Duration],
        usage: Option<UsageRecord>,
    ) -> IntervalRecord {
        let share = |cpu: &Duration| cpu.as_secs_f64() / seconds;
        let record = |((counts, samples), kind): ((_, Vec<Sample>), &Kind)| {
            KindRecord::new(kind.name, counts, samples)
        };
        IntervalRecord {
            ends_s,
            seconds,
            kinds: interval.kinds.into_iter().zip(kinds).map(record).collect(),
            refused: interval.refused,
            lost_connections: interval.lost_connections,
            driver_cpu: driver_cpu.iter().map(share).collect(),
            usage,
        }
    }
}

impl KindRecord {
    pub(crate) fn new(kind: &str, counts: Counts, samples: Vec<Sample>) -> KindRecord {
        let mut latencies = Latencies::new();
        latencies.add(&samples);
        KindRecord { report: KindReport::new(kind, counts, &latencies), samples_us: latencies.take() }
    }
}

impl KindReport {
    pub(super) fn new(kind: &str, counts: Counts, latencies: &Latencies) -> KindReport {
        KindReport {
            kind: kind.to_owned(),
            committed: counts.committed,
            rolled_back: counts.rolled_back,
            cancelled: counts.cancelled,
            failed: counts.failed,
            latency: latencies.summary(),
        }
    }

    /// Transactions that ended as they should.
    pub(crate) fn ended_well(&self) -> u64 {
        self.committed + self.rolled_back
    }
}
