//! The charts of a run over time.

use super::RunFile;
use super::chart::{Chart, Scale, Series};
use crate::measure::{Latencies, Latency, Sample};
use crate::run::{IntervalRecord, KindRecord, KindReport, UsageRecord};

const TIME: (&str, Scale) = ("seconds since the window opened", Scale::Linear);

/// All charts for which the run has data.
pub(super) fn charts(file: &RunFile) -> Vec<Chart> {
    let mut charts = vec![throughput(file), latency(file), distribution(file)];
    charts.extend(errors(file));
    charts.extend(usage(file));
    charts.push(driver(file));
    charts.extend(worst_tenant(file));
    charts
}

fn over_time(title: &'static str, y: (&'static str, Scale), series: Vec<Series>) -> Chart {
    Chart { title, x: TIME, y, series, measured_from: Some(0.0) }
}

/// A series with a value per interval, at the middle of the interval.
fn line(file: &RunFile, name: &str, value: impl Fn(&IntervalRecord) -> f64) -> Series {
    let points = file.intervals.iter();
    let points = points.map(|interval| (interval.ends_s - interval.seconds / 2.0, value(interval))).collect();
    Series::new(name, points)
}

fn kinds(file: &RunFile) -> Vec<String> {
    let first = file.intervals.first();
    first.map_or_else(Vec::new, |first| first.kinds.iter().map(|kind| kind.report.kind.clone()).collect())
}

fn throughput(file: &RunFile) -> Chart {
    let ended = |kind: &KindRecord| kind.report.succeeded() as f64;
    let all = |interval: &IntervalRecord| interval.kinds.iter().map(ended).sum::<f64>() / interval.seconds;
    let mut series = vec![line(file, "all", all)];
    let names = kinds(file);
    if names.len() > 1 {
        for (number, name) in names.iter().enumerate() {
            series.push(line(file, name, |interval| {
                interval.kinds.get(number).map_or(0.0, |kind| ended(kind) / interval.seconds)
            }));
        }
    }
    over_time("Throughput", ("transactions/s", Scale::Linear), series)
}

/// The latency of an interval, all kinds together.
fn whole_latency(interval: &IntervalRecord) -> Latency {
    let mut latencies = Latencies::new();
    interval.kinds.iter().for_each(|kind| latencies.add(&kind.samples_us));
    latencies.summary()
}

fn latency(file: &RunFile) -> Chart {
    let summaries: Vec<_> = file
        .intervals
        .iter()
        .map(|interval| (interval.ends_s - interval.seconds / 2.0, whole_latency(interval)))
        .collect();
    let series = |name: &str, value: fn(&Latency) -> f64| {
        Series::new(name, summaries.iter().map(|(at, latency)| (*at, value(latency))).collect())
    };
    let series = vec![
        series("p50", |latency| latency.p50_ms),
        series("p95", |latency| latency.p95_ms),
        series("p99", |latency| latency.p99_ms),
        series("max", |latency| latency.max_ms),
    ];
    over_time("Latency of the transactions answered in each interval", ("ms", Scale::Log), series)
}

/// The latency that each share of the transactions did not exceed, by kind.
fn distribution(file: &RunFile) -> Chart {
    let window = || file.intervals.iter().filter(|interval| interval.ends_s > 0.0);
    let series = kinds(file).into_iter().enumerate().map(|(number, name)| {
        let samples = window().filter_map(|interval| interval.kinds.get(number));
        let mut all: Vec<Sample> = samples.flat_map(|kind| kind.samples_us.iter().copied()).collect();
        all.sort_unstable();
        Series::new(name, shares(&all))
    });
    Chart {
        title: "Latency by share of the transactions",
        x: ("share of the transactions that took at most this long", Scale::Nines),
        y: ("ms", Scale::Log),
        series: series.collect(),
        measured_from: None,
    }
}

fn shares(samples: &[Sample]) -> Vec<(f64, f64)> {
    let total: u64 = samples.iter().map(|(_, count)| count).sum();
    let mut before = 0;
    let point = |(microseconds, count): &Sample| {
        let share = before as f64 / total as f64;
        before += count;
        (share, *microseconds as f64 / 1e3)
    };
    samples.iter().map(point).collect()
}

fn errors(file: &RunFile) -> Option<Chart> {
    let of_kinds = |pick: fn(&KindReport) -> u64| {
        move |interval: &IntervalRecord| {
            interval.kinds.iter().map(|kind| pick(&kind.report)).sum::<u64>() as f64
        }
    };
    let series = vec![
        line(file, "cancelled", of_kinds(|kind| kind.cancelled)),
        line(file, "failed", of_kinds(|kind| kind.failed)),
        line(file, "rolled back as intended", of_kinds(|kind| kind.rolled_back)),
        line(file, "rejected attempts", |interval| interval.refused as f64),
        line(file, "lost connections", |interval| interval.lost_connections as f64),
    ];
    let happened = |series: &Series| series.points.iter().any(|(_, value)| *value > 0.0);
    let series: Vec<_> = series.into_iter().filter(happened).collect();
    (!series.is_empty())
        .then(|| over_time("Errors and cancellations", ("per interval", Scale::Linear), series))
}

fn usage(file: &RunFile) -> Vec<Chart> {
    if file.intervals.iter().all(|interval| interval.usage.is_none()) {
        return Vec::new();
    }
    let of = |name: &str, value: fn(&UsageRecord) -> f64, per_second: bool| {
        line(file, name, move |interval| {
            let value = interval.usage.as_ref().map_or(f64::NAN, value);
            if per_second { value / interval.seconds } else { value }
        })
    };
    vec![
        over_time(
            "CPU of the server's processes",
            ("CPUs", Scale::Linear),
            vec![of("user and system", |usage| usage.cpu_s, true)],
        ),
        over_time(
            "Memory of the server's processes (PSS)",
            ("MiB", Scale::Linear),
            vec![of("PSS", |usage| mebibytes(usage.pss_bytes), false)],
        ),
        over_time(
            "Disk I/O of the server's processes, and network traffic of the machine",
            ("MiB/s", Scale::Linear),
            vec![
                of("read", |usage| mebibytes(usage.read_bytes), true),
                of("written", |usage| mebibytes(usage.written_bytes), true),
                of("received", |usage| mebibytes(usage.received_bytes), true),
                of("sent", |usage| mebibytes(usage.sent_bytes), true),
            ],
        ),
    ]
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn driver(file: &RunFile) -> Chart {
    let threads = file.intervals.iter().map(|interval| interval.driver_cpu.len()).max().unwrap_or(0);
    let series = (0..threads).map(|thread| {
        line(file, &format!("thread {}", thread + 1), |interval| {
            interval.driver_cpu.get(thread).copied().unwrap_or(f64::NAN)
        })
    });
    over_time(
        "CPU of the driver's threads: above 0.8 the driver is the bottleneck",
        ("CPUs", Scale::Linear),
        series.collect(),
    )
}

fn worst_tenant(file: &RunFile) -> Option<Chart> {
    let availability = &file.report.as_ref().filter(|report| report.tenants > 1)?.availability;
    let points = availability.worst_tenant_tps.iter().enumerate();
    let points = points.map(|(slot, worst)| (slot as f64 * 10.0 + 5.0, *worst)).collect();
    let series = vec![Series::new("slowest tenant", points)];
    Some(over_time(
        "Throughput of the slowest tenant in each 10 s",
        ("transactions/s", Scale::Linear),
        series,
    ))
}
