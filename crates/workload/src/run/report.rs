//! The report of a run as a serializable structure. [`super::table`] prints it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::RunOptions;
use super::prices::ServerUsage;
use super::record::{KindReport, TenantRecord, UsageRecord};
use crate::measure::{Latency, Meter};
use crate::workload::Kind;

/// The slot length for the throughput of the slowest tenant (the thesis's figure 23).
const WORST_SLOT_SECONDS: usize = 10;

/// Number of tenants that are listed as the worst.
const MAX_WORST_TENANTS: usize = 5;

/// A driver thread that uses more than this share of a CPU may limit the run.
const BOTTLENECK_CPU_SHARE: f64 = 0.8;

/// The report of a run. Counts are of the measured window, except `errors`, `retried_again`,
/// `failed` and `lost_connections`, which are of the whole run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The workload's name.
    pub workload: String,
    /// The workload's options.
    pub options: serde_json::Value,
    /// The server.
    pub target: String,
    /// Number of instances, one per database.
    pub tenants: usize,
    /// Connections per instance.
    pub connections: usize,
    /// Open loop: the mean number of transactions per second that were due.
    pub offered_tps: Option<f64>,
    /// Length of the measured window.
    pub seconds: f64,
    /// Transactions that committed, or were rolled back or had no effect as intended by the
    /// workload.
    pub transactions: u64,
    /// Those of them that were rolled back or had no effect.
    pub rolled_back: u64,
    /// Transactions per second.
    pub throughput_tps: f64,
    /// Latency from the first statement (open loop: from when the transaction was due) to the
    /// answer of COMMIT, including retries.
    pub latency: Latency,
    /// The lowest and the highest mean latency of a tenant.
    pub tenant_mean_ms: [f64; 2],
    /// Results by kind of transaction.
    pub kinds: Vec<KindReport>,
    /// Statements of the transactions, including BEGIN and COMMIT.
    pub statements: u64,
    /// Errors of the server by SQLSTATE. Transactions with 40001 and 40P01 were retried.
    pub errors: BTreeMap<String, u64>,
    /// Transactions that needed more than one retry.
    pub retried_again: u64,
    /// Transactions that failed.
    pub failed: u64,
    /// The error of the first transaction that failed.
    pub first_error: Option<String>,
    /// Transactions that were cancelled because they were too late.
    pub cancelled: u64,
    /// Lost work: the cancelled transactions in seconds of the offered load.
    pub lost_work_s: Option<f64>,
    /// Open loop: transactions that were due but had not been sent when the window closed.
    pub unsent: u64,
    /// Lost connections.
    pub lost_connections: u64,
    /// Availability of the tenants.
    pub availability: Availability,
    /// CPU usage of the driver.
    pub driver: Driver,
    /// Resource usage of the server's processes.
    pub server: Option<ServerUsage>,
}

/// The availability of the tenants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Availability {
    /// Outages of all tenants: periods of 1 s or more in which transactions of a tenant waited and
    /// none was answered.
    pub outages: u64,
    /// The total length of all outages, in seconds.
    pub unavailable_s: f64,
    /// The longest outage, in seconds.
    pub longest_outage_s: f64,
    /// Length of a slot for `down_intervals`, in seconds.
    pub down_interval_s: usize,
    /// Slots in which no transaction of a tenant ended, over all tenants.
    pub down_intervals: u64,
    /// The transactions per second of the slowest tenant in each 10 s.
    pub worst_tenant_tps: Vec<f64>,
    /// The tenants with the longest outages.
    pub worst: Vec<TenantRecord>,
}

/// The CPU usage of the driver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Driver {
    /// Number of driver threads.
    pub threads: usize,
    /// CPU time of all threads per statement, in microseconds.
    pub cpu_us_per_statement: f64,
    /// The share of a CPU that the busiest thread used.
    pub busiest_thread: f64,
}

impl Driver {
    pub(super) fn new(cpu: &[Duration], statements: u64, seconds: f64) -> Driver {
        let total: f64 = cpu.iter().map(Duration::as_secs_f64).sum();
        let busiest = cpu.iter().max().map_or(0.0, Duration::as_secs_f64);
        Driver {
            threads: cpu.len(),
            cpu_us_per_statement: ratio(total * 1e6, statements),
            busiest_thread: busiest / seconds,
        }
    }

    /// Returns true if the driver may have limited the run.
    pub fn is_bottleneck(&self) -> bool {
        self.busiest_thread > BOTTLENECK_CPU_SHARE
    }
}

/// The minimum and maximum of `values`, or zeros if there are none.
fn min_and_max(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let wider = |range: Option<[f64; 2]>, value: f64| {
        Some(range.map_or([value; 2], |[min, max]| [min.min(value), max.max(value)]))
    };
    values.fold(None, wider).unwrap_or_default()
}

fn ratio(of: f64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { of / count as f64 }
}

/// The inputs of a report.
pub(super) struct ReportInput<'a> {
    pub(super) workload: &'static str,
    pub(super) workload_options: serde_json::Value,
    pub(super) kinds: &'a [Kind],
    pub(super) options: &'a RunOptions,
    pub(super) meter: &'a Meter,
    pub(super) tenants: &'a [TenantRecord],
    pub(super) offered_tps: Option<f64>,
    pub(super) driver_cpu: &'a [Duration],
    pub(super) usage: Option<UsageRecord>,
}

impl Report {
    /// Returns the report, or an error if transactions failed: a run that did not do all of its
    /// work is not a measurement.
    pub(crate) fn complete(self) -> anyhow::Result<Report> {
        let error = self.first_error.as_deref().unwrap_or_default();
        anyhow::ensure!(self.failed == 0, "{} transactions failed: {error}", self.failed);
        Ok(self)
    }

    pub(super) fn new(findings: ReportInput<'_>) -> Report {
        let ReportInput { workload, workload_options, kinds, options, meter, tenants, offered_tps, .. } =
            findings;
        let all = meter.all();
        let seconds = options.measure.as_secs_f64();
        let kinds = kinds.iter().zip(&meter.window_tallies);
        let kinds = kinds.map(|(kind, tally)| KindReport::new(kind.name, tally.counts, &tally.latencies));
        Report {
            workload: workload.to_owned(),
            options: workload_options,
            target: options.target.to_string(),
            tenants: tenants.len(),
            connections: options.connections,
            offered_tps,
            seconds,
            transactions: all.counts.succeeded(),
            rolled_back: all.counts.rolled_back,
            throughput_tps: all.counts.succeeded() as f64 / seconds,
            latency: all.latencies.summary(),
            tenant_mean_ms: min_and_max(tenants.iter().map(|tenant| tenant.mean_ms)),
            kinds: kinds.collect(),
            statements: meter.statements,
            errors: meter.errors.clone(),
            retried_again: meter.retried_again,
            failed: meter.failed,
            first_error: meter.first_error.clone(),
            cancelled: all.counts.cancelled,
            lost_work_s: offered_tps
                .filter(|offered| *offered > 0.0)
                .map(|offered| all.counts.cancelled as f64 / offered),
            unsent: meter.unsent,
            lost_connections: meter.lost_connections,
            availability: Availability::new(options, meter, tenants),
            driver: Driver::new(findings.driver_cpu, meter.statements, seconds),
            server: findings
                .usage
                .map(|usage| ServerUsage::new(usage, all.counts.succeeded(), seconds, options.prices)),
        }
    }

    /// Attempts that were rejected with a serialization failure or a deadlock, and retried.
    pub fn retries(&self) -> u64 {
        ["40001", "40P01"].iter().filter_map(|sqlstate| self.errors.get(*sqlstate)).sum()
    }
}

impl Availability {
    fn new(options: &RunOptions, meter: &Meter, tenants: &[TenantRecord]) -> Availability {
        let outages = || tenants.iter().flat_map(|tenant| tenant.outages_s.iter().copied());
        let unavailable = |tenant: &TenantRecord| tenant.outages_s.iter().sum::<f64>();
        let mut worst: Vec<_> =
            tenants.iter().filter(|tenant| !tenant.outages_s.is_empty()).cloned().collect();
        worst.sort_by(|a, b| unavailable(b).total_cmp(&unavailable(a)));
        worst.truncate(MAX_WORST_TENANTS);
        let mut worst_tenant: Vec<u64> = Vec::new();
        for (number, tenant) in meter.tenants.iter().flatten().enumerate() {
            let slots: Vec<u64> = tenant.slots(WORST_SLOT_SECONDS).collect();
            if number == 0 {
                worst_tenant = slots;
            } else {
                worst_tenant.iter_mut().zip(slots).for_each(|(min, count)| *min = count.min(*min));
            }
        }
        Availability {
            outages: outages().count() as u64,
            // The sum of an empty iterator of floats is -0.
            unavailable_s: outages().fold(0.0, |sum, outage| sum + outage),
            longest_outage_s: outages().fold(0.0, f64::max),
            down_interval_s: options.down_interval_seconds,
            down_intervals: tenants.iter().map(|tenant| tenant.down_intervals).sum(),
            worst_tenant_tps: worst_tenant
                .into_iter()
                .map(|count| count as f64 / WORST_SLOT_SECONDS as f64)
                .collect(),
            worst,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Event, Window};
    use crate::workload::TransactionOutcome;
    use std::time::Instant;

    const KINDS: [Kind; 2] = [Kind { name: "read", weight: 1.0 }, Kind { name: "write", weight: 1.0 }];

    fn meter(opens: Instant, seconds: u64) -> Meter {
        let window = Window { opens, closes: opens + Duration::from_secs(seconds) };
        Meter::new(window, Duration::ZERO, Duration::from_secs(1), KINDS.len(), std::iter::once(true))
    }

    fn report(meter: &Meter, seconds: u64, cpu: Duration) -> Report {
        let mut options = RunOptions::new("postgres://a:secret@b/c".parse().unwrap());
        options.measure = Duration::from_secs(seconds);
        Report::new(ReportInput {
            workload: "test",
            workload_options: serde_json::json!({ "records": 7 }),
            kinds: &KINDS,
            options: &options,
            meter,
            tenants: &[],
            offered_tps: Some(100.0),
            driver_cpu: &[cpu],
            usage: None,
        })
    }

    #[test]
    fn rates_are_measured_in_the_window() {
        let opens = Instant::now();
        let mut meter = meter(opens, 4);
        for number in 1..=200 {
            let end = opens + Duration::from_millis(number * 10);
            let event = Event { tenant: 0, kind: 1, due: end - Duration::from_millis(5) };
            meter.done(event, TransactionOutcome::Committed, end, 12);
        }
        let event = Event { tenant: 0, kind: 0, due: opens };
        (0..50).for_each(|_| meter.cancelled(event, opens + Duration::from_secs(3)));
        meter.refused("40001");
        meter.refused("40P01");
        meter.refused("23505");
        let report = report(&meter, 4, Duration::from_millis(24));
        assert_eq!((report.transactions, report.statements, report.retries()), (200, 2400, 2));
        assert_eq!(report.throughput_tps, 50.0);
        assert_eq!((report.cancelled, report.lost_work_s), (50, Some(0.5)), "50 of 100 per second");
        assert_eq!((report.kinds[0].cancelled, report.kinds[1].committed), (50, 200));
        assert!((report.driver.cpu_us_per_statement - 10.0).abs() < 1e-9 && !report.driver.is_bottleneck());
        let text = format!("{report}{}", serde_json::to_string(&report).unwrap());
        assert!(text.contains("50.0") && text.contains("23505: 1") && !text.contains("secret"), "{text}");
    }

    #[test]
    fn report_without_transactions_has_zero_rates() {
        let report = report(&meter(Instant::now(), 1), 1, Duration::ZERO);
        assert_eq!((report.throughput_tps, report.driver.cpu_us_per_statement), (0.0, 0.0));
    }

    #[test]
    fn busy_driver_is_reported_as_bottleneck() {
        let report = report(&meter(Instant::now(), 10), 10, Duration::from_millis(8_500));
        assert!(report.driver.is_bottleneck());
        assert!(report.to_string().contains("85 % of a CPU; raise --threads"), "{report}");
    }
}
