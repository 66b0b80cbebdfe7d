//! The JSON lines of a run (`--output`), for writing and reading. Each line is an object whose type
//! is in `line`.
//!
//! ```text
//! {"line":"run", ...}         workload, seed, build, machine and server
//! {"line":"interval", ...}    one second: counts and latencies by kind with all samples, CPU
//!                             time of the driver, resource usage of the server
//! {"line":"tenant", ...}      transactions, outages and down intervals of a tenant in the window
//! {"line":"report", ...}      the report that is also printed
//! ```

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::report::Report;
use crate::measure::{Counts, Interval, Latencies, Latency, Sample};
use crate::workload::Kind;

/// A JSON line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "lowercase")]
pub enum Record {
    /// The first line.
    Run(RunRecord),
    /// One line per interval, including the warm-up.
    Interval(IntervalRecord),
    /// One line per tenant.
    Tenant(TenantRecord),
    /// The last line.
    Report(Box<Report>),
}

/// The parameters of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The workload's name.
    pub workload: String,
    /// Its options.
    pub options: serde_json::Value,
    /// The arrival process, as text.
    pub arrival: String,
    /// The server.
    pub target: String,
    /// The version string of the server.
    pub server: String,
    /// The random seed.
    pub seed: u64,
    /// Version and commit of the driver.
    pub build: String,
    /// The machine of the driver.
    pub machine: Machine,
    /// When the clock started, in seconds since 1970.
    pub started_unix_s: u64,
    /// Length of the warm-up.
    pub warm_up_s: f64,
    /// Length of the measured window.
    pub window_s: f64,
    /// Length of an interval.
    pub interval_s: f64,
}

/// The results of an interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IntervalRecord {
    /// When it ended, relative to the opening of the window. Zero or negative in the warm-up.
    pub ends_s: f64,
    /// Its length.
    pub seconds: f64,
    /// Results by kind of transaction.
    pub kinds: Vec<KindRecord>,
    /// Attempts that the server rejected.
    pub refused: u64,
    /// Lost connections.
    pub lost_connections: u64,
    /// The share of a CPU that each driver thread used.
    pub driver_cpu: Vec<f64>,
    /// The resource usage of the server's processes.
    pub usage: Option<UsageRecord>,
}

/// The results of one kind of transaction in an interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindRecord {
    /// Counts and latency.
    #[serde(flatten)]
    pub report: KindReport,
    /// All latencies: microseconds with three significant digits, and their counts.
    pub samples_us: Vec<Sample>,
}

/// The results of one kind of transaction, in an interval or in the whole window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KindReport {
    /// The name of the kind.
    pub kind: String,
    /// Committed transactions.
    pub committed: u64,
    /// Transactions that were rolled back, or had no effect, as intended by the workload.
    pub rolled_back: u64,
    /// Transactions that were cancelled because they were too late.
    pub cancelled: u64,
    /// Transactions that failed.
    pub failed: u64,
    /// Latency of the transactions that committed or rolled back as intended.
    pub latency: Latency,
}

/// The resource usage of the server's processes in an interval, and the network traffic of the
/// machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UsageRecord {
    /// User and system CPU time.
    pub cpu_s: f64,
    /// Memory (PSS) at the end of the interval.
    pub pss_bytes: u64,
    /// Bytes read from disks.
    pub read_bytes: u64,
    /// Bytes written to disks, including those not yet written back.
    pub written_bytes: u64,
    /// Bytes received by all network interfaces of the machine, including loopback.
    pub received_bytes: u64,
    /// Bytes sent by all network interfaces.
    pub sent_bytes: u64,
}

/// The results of a tenant in the window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its database.
    pub tenant: String,
    /// Transactions that committed or rolled back as intended.
    pub transactions: u64,
    /// Their mean latency.
    pub mean_ms: f64,
    /// Transactions that were cancelled because they were too late.
    pub cancelled: u64,
    /// The cancelled transactions in seconds of the load offered to this tenant. Open loops only.
    pub lost_work_s: Option<f64>,
    /// Slots in which no transaction ended.
    pub down_intervals: u64,
    /// The length of each outage of 1 s or more: a period in which a transaction waited and none
    /// was answered.
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

    /// Transactions that committed or rolled back as intended.
    pub(crate) fn succeeded(&self) -> u64 {
        self.committed + self.rolled_back
    }
}
