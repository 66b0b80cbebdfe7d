//! Durable YCSB transactions, statement by statement and as one procedure call; the log bytes per
//! transaction; and the driver's own CPU time.

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::cases::{Case, case};
use super::result::CaseResult;
use super::rounds::Bench;
use crate::run::{Report, RunOptions, run};
use crate::server::Server;
use crate::tenants;
use crate::ycsb::Ycsb;

const DATABASE: &str = "ycsb";
const MAX_CLIENTS: u32 = 32;

/// The size of a full page image in the log: 4096 bytes and a header.
const PAGE_IMAGE_BYTES: f64 = 4134.0;

/// The maximum size of a server's metrics.
const MAX_METRICS_BYTES: u64 = 16 << 20;

pub(super) async fn measure(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let mut pair = bench.pair(MAX_CLIENTS).await?;
    pair.each(async |server| load(bench, server).await).await?;
    let mut results = Vec::new();
    let runs = [
        (8, false, "ycsb-8"),
        (MAX_CLIENTS, false, "ycsb-32"),
        (8, true, "proc-8"),
        (MAX_CLIENTS, true, "proc-32"),
    ];
    for (connections, procedure, name) in runs {
        if wanted.iter().any(|case| case.name == name) {
            let mut notes = Vec::new();
            let rounds = bench.alternate(&mut pair, [case(name)], async |server| {
                let report = transactions(bench, server, connections, procedure).await?;
                notes.push((server.name(), report.retries()));
                Ok([report.throughput_tps])
            });
            let mut results_of_case = rounds.await;
            for (server, retries) in notes.split_off(notes.len().saturating_sub(2)) {
                let note = format!("last round of {server}: {retries} retries");
                results_of_case = results_of_case.map(|result| result.with_note(&note));
            }
            results.extend(results_of_case);
        }
    }
    Ok(results)
}

pub(super) async fn measure_log(bench: &Bench, wanted: &[&'static Case]) -> anyhow::Result<Vec<CaseResult>> {
    let server = bench.fulmar(MAX_CLIENTS).await?;
    load(bench, &server).await?;
    let mut rounds = Vec::new();
    for round in 1..=bench.rounds {
        bench.begin_round("log-bytes-ratio", round, "");
        let before = LogCounters::of(&server).await?;
        transactions(bench, &server, 8, false).await?;
        let after = LogCounters::of(&server).await?;
        rounds.push((after.bytes - before.bytes) / ((after.pages - before.pages) * PAGE_IMAGE_BYTES));
    }
    Ok(wanted.iter().map(|case| CaseResult::value(case, rounds.clone())).collect())
}

/// Measures the driver's CPU time per statement in a closed loop of single point reads.
pub(super) async fn measure_driver(
    bench: &Bench,
    wanted: &[&'static Case],
) -> anyhow::Result<Vec<CaseResult>> {
    let server = bench.fulmar(MAX_CLIENTS).await?;
    load(bench, &server).await?;
    let mut rounds = Vec::new();
    for round in 1..=bench.rounds {
        bench.begin_round("driver-us", round, "");
        let reads = Ycsb { operations: 1, reads: 100.0, ..workload(bench, false) };
        let report = run(reads, options(bench, &server, MAX_CLIENTS)).await?;
        rounds.push(report.driver.cpu_us_per_statement);
    }
    Ok(wanted.iter().map(|case| CaseResult::value(case, rounds.clone())).collect())
}

fn workload(bench: &Bench, procedure: bool) -> Ycsb {
    Ycsb { records: bench.sizes.ycsb_records, procedure, ..Ycsb::default() }
}

fn options(bench: &Bench, server: &Server, connections: u32) -> RunOptions {
    RunOptions {
        connections: connections as usize,
        warm_up: bench.sizes.warm_up,
        measure: bench.time,
        seed: bench.seed(),
        ..RunOptions::new(server.target().with_database(DATABASE))
    }
}

async fn load(bench: &Bench, server: &Server) -> anyhow::Result<()> {
    bench.step(&format!("loading {} for YCSB", server.name()));
    tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await?;
    let brief = RunOptions { measure: bench.sizes.warm_up, ..options(bench, server, 8) };
    run(workload(bench, false), brief).await?;
    server.settle(DATABASE).await
}

async fn transactions(
    bench: &Bench,
    server: &Server,
    connections: u32,
    procedure: bool,
) -> anyhow::Result<Report> {
    let report = run(workload(bench, procedure), options(bench, server, connections)).await?.complete()?;
    anyhow::ensure!(report.transactions > 0, "no transaction committed");
    Ok(report)
}

/// The amount of log that a node has written since its start.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LogCounters {
    bytes: f64,
    /// Changed pages in commit records.
    pages: f64,
}

impl LogCounters {
    async fn of(server: &Server) -> anyhow::Result<LogCounters> {
        let metrics = http_get(server.http_port(), "/metrics").await;
        let metrics = metrics.context("could not read /metrics")?;
        LogCounters::parse(&metrics)
    }

    fn parse(metrics: &str) -> anyhow::Result<LogCounters> {
        let counter = |name: &str| {
            let values = metrics.lines().filter_map(|line| sample(line, name)).collect::<Vec<f64>>();
            anyhow::ensure!(!values.is_empty(), "/metrics has no {name}");
            Ok(values.into_iter().sum())
        };
        Ok(LogCounters {
            bytes: counter("fulmar_log_bytes_total")?,
            pages: counter("fulmar_log_pages_total")?,
        })
    }
}

/// Parses a line `name{labels} value` of the Prometheus text format.
fn sample(line: &str, name: &str) -> Option<f64> {
    let rest = line.strip_prefix(name)?;
    let rest = match rest.strip_prefix('{') {
        Some(labelled) => labelled.split_once('}')?.1,
        None => rest,
    };
    rest.strip_prefix(' ')?.split(' ').next()?.parse().ok()
}

async fn http_get(port: u16, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n").as_bytes()).await?;
    let mut response = String::new();
    stream.take(MAX_METRICS_BYTES).read_to_string(&mut response).await?;
    let (head, body) = response.split_once("\r\n\r\n").context("invalid HTTP response")?;
    let status = head.lines().next().unwrap_or_default();
    anyhow::ensure!(status.split(' ').nth(1) == Some("200"), "HTTP status {status}");
    Ok(body.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_parsed_with_and_without_labels() {
        let metrics = "# TYPE fulmar_log_bytes_total counter\n\
            fulmar_log_bytes_total 1200\nfulmar_log_bytes_total_other 5\n\
            fulmar_log_pages_total{log=\"a\"} 3\nfulmar_log_pages_total{log=\"b\"} 4 1700000000\n";
        assert_eq!(LogCounters::parse(metrics).unwrap(), LogCounters { bytes: 1200.0, pages: 7.0 });
        let error = LogCounters::parse("fulmar_log_bytes_total 1\n").unwrap_err();
        assert_eq!(error.to_string(), "/metrics has no fulmar_log_pages_total");
    }
}
