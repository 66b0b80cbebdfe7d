//! Renders pages from JSON lines as a run writes them.

use super::*;
use crate::run::{KindRecord, UsageRecord};

/// The lines of a run of 10 s after 1 s of warm-up, without an answer in the fifth second.
fn lines() -> String {
    let mut records = vec![Record::Run(run())];
    records.extend((0..=10).map(|second| Record::Interval(interval(second))));
    records.extend(["t_0000", "t_0001"].map(|name| Record::Tenant(tenant(name))));
    records.push(Record::Report(Box::new(report())));
    records.iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect()
}

fn json<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn run() -> RunRecord {
    json(serde_json::json!({
        "workload": "test", "options": { "records": 7, "name": "<b>" }, "arrival": "closed loop",
        "target": "postgres://a@b:5432/c", "server": "PostgreSQL 15.18", "seed": 4711, "build": "0.1.0",
        "machine": { "processor": "P", "processors": 2, "memory_bytes": 8_000_000_000_u64, "kernel": "6.1" },
        "started_unix_s": 1_700_000_000, "warm_up_s": 1.0, "window_s": 10.0, "interval_s": 1.0,
    }))
}

fn interval(second: u32) -> IntervalRecord {
    let samples =
        if second == 5 { Vec::new() } else { vec![(1_000, 90), (u64::from(second + 1) * 10_000, 10)] };
    let kind = |name: &str| KindRecord::new(name, counts(samples.len() as u64 * 50), samples.clone());
    let usage = UsageRecord { cpu_s: 0.5, pss_bytes: 1 << 26, ..UsageRecord::default() };
    IntervalRecord {
        ends_s: f64::from(second),
        seconds: 1.0,
        kinds: vec![kind("read"), kind("write")],
        refused: u64::from(second),
        lost_connections: 0,
        driver_cpu: vec![0.25],
        // The server is not running for a moment.
        usage: (second != 5).then_some(usage),
    }
}

fn counts(committed: u64) -> crate::measure::Counts {
    crate::measure::Counts { committed, cancelled: 3, ..Default::default() }
}

fn tenant(name: &str) -> TenantRecord {
    json(serde_json::json!({
        "tenant": name, "transactions": 900, "mean_ms": 5.0, "cancelled": 15, "lost_work_s": 0.15, "down_intervals": 1,
        "outages_s": [1.25],
    }))
}

fn report() -> Report {
    let latency = serde_json::json!({
        "count": 1800, "mean_ms": 5.0, "p50_ms": 1.0, "p95_ms": 60.0, "p99_ms": 90.0, "p999_ms": 110.0, "max_ms": 110.0
    });
    let kind = |name: &str| {
        serde_json::json!({
            "kind": name, "committed": 900, "rolled_back": 0, "cancelled": 15, "failed": 0, "latency": latency
        })
    };
    json(serde_json::json!({
        "workload": "test", "options": {}, "target": "postgres://a@b:5432/c", "tenants": 2, "connections": 8,
        "offered_tps": 200.0, "seconds": 10.0, "transactions": 1800, "rolled_back": 0, "throughput_tps": 180.0,
        "latency": latency, "tenant_mean_ms": [4.0, 6.0], "kinds": [kind("read"), kind("write")], "statements": 1800, "errors": { "40001": 3 },
        "retried_again": 0, "failed": 0, "first_error": null, "cancelled": 30, "lost_work_s": 0.15, "unsent": 0, "lost_connections": 0,
        "availability": {
            "outages": 2, "unavailable_s": 2.5, "longest_outage_s": 1.25, "down_interval_s": 1, "down_intervals": 2,
            "worst_tenant_tps": [88.0], "worst": [tenant("t_0000")],
        },
        "driver": { "threads": 1, "cpu_us_per_statement": 9.5, "busiest_thread": 0.25 },
        "server": {
            "cpu_s": 5.0, "pss_bytes": 1 << 26, "read_bytes": 0, "written_bytes": 4096, "received_bytes": 1, "sent_bytes": 2,
            "cpu_us_per_transaction": 2777.8, "dollars_per_hour": 0.0205, "transactions_per_dollar": 31_610_000.0,
            "prices": { "cpu": 0.04, "memory": 0.008, "read": 0, "written": 0, "received": 0, "sent": 0 },
        },
    }))
}

#[test]
fn page_is_self_contained_and_shows_the_results() {
    let file = RunFile::read(lines().as_bytes()).unwrap();
    let page = file.html();
    for resource in ["http:", "https:", "src=", "href=", "url(", "<script", "@import"] {
        assert!(!page.contains(resource), "{resource}");
    }
    for text in [
        "4711",
        "PostgreSQL 15",
        "&lt;b&gt;",
        "t_0001",
        "Throughput",
        "p99.9",
        "lost work",
        "dollars per hour",
        "prefers-color-scheme:dark",
        "2023-11-14 22:13:20",
        "the warm-up is shaded",
    ] {
        assert!(page.to_lowercase().contains(&text.to_lowercase()), "{text}");
    }
    assert!(page.matches("<svg").count() >= 5);
    assert!(!page.contains("NaN") && !page.contains("inf\""), "every point must be in its chart");
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
}

#[test]
fn interrupted_run_has_a_warning() {
    let lines = lines();
    let cut: Vec<_> = lines.lines().filter(|line| !line.starts_with("{\"line\":\"report\"")).collect();
    let file = RunFile::read(cut.join("\n").as_bytes()).unwrap();
    assert!(file.report.is_none());
    assert!(file.html().contains("The run was interrupted"));
}

#[test]
fn invalid_lines_are_rejected_with_their_number() {
    let broken = format!("{}\n{{\"line\":\"interval\"}}\n", lines().lines().next().unwrap());
    let error = RunFile::read(broken.as_bytes()).unwrap_err();
    assert!(error.to_string().contains("line 2"), "{error:#}");
    assert!(RunFile::read(&b""[..]).unwrap_err().to_string().contains("--output"));
    let twice = lines().repeat(2);
    assert!(RunFile::read(twice.as_bytes()).unwrap_err().to_string().contains("second run"));
}
