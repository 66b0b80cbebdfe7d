//! `fulmar status`: shows `/healthz` and `/metrics` of a node as a table.
//!
//! Parses the Prometheus text format. Counters and gauges are shown as they are, histograms and
//! summaries as their count and average. Buckets and quantiles are omitted.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::cli::StatusArgs;
use crate::output;

/// Timeout of one HTTP request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit on the size of a response. The rest is ignored.
const MAX_RESPONSE_BYTES: u64 = 16 << 20;

/// What is printed with `--json`.
#[derive(Debug, Serialize)]
struct Status {
    healthy: bool,
    health: String,
    /// `None` if the node did not return them.
    metrics: Option<Vec<Metric>>,
}

/// One sample of the node's metrics.
#[derive(Debug, PartialEq, Serialize)]
struct Metric {
    name: String,
    labels: String,
    value: f64,
}

/// Runs `fulmar status`. Prints the status first, then returns an error if the node is unhealthy.
pub async fn run(arguments: StatusArgs) -> anyhow::Result<()> {
    let token = arguments.token_file.as_deref().map(read_token).transpose()?;
    let (code, health) = get(&arguments.http, "/healthz", None).await?;
    let metrics = fetch_metrics(&arguments.http, token.as_deref()).await;
    let (metrics, problem) = match metrics {
        Ok(metrics) => (metrics, Ok(())),
        Err(problem) => (None, Err(problem)),
    };
    let status = Status { healthy: code == 200, health: health.trim().to_owned(), metrics };
    if arguments.json {
        output::json(&status)?;
    } else {
        print(&arguments.http, &status)?;
    }
    ensure!(status.healthy, "the node at {} is not healthy: {}", arguments.http, status.health);
    problem
}

/// Fetches the node's metrics. Returns `None` if they require a token and none was given:
/// `/healthz` requires none, so the command can still show the health.
async fn fetch_metrics(address: &str, token: Option<&str>) -> anyhow::Result<Option<Vec<Metric>>> {
    let (code, text) = get(address, "/metrics", token).await?;
    match code {
        200 => Ok(Some(summarize(&text))),
        401 if token.is_none() => {
            eprintln!(
                "fulmar: metrics require a token; create one with `fulmar token create` and use \
                 --token-file"
            );
            Ok(None)
        }
        401 => bail!("the token is invalid or has expired; list the tokens with `fulmar token list`"),
        code => bail!("/metrics returned HTTP status {code}; check that --http is the node's HTTP address"),
    }
}

fn print(address: &str, status: &Status) -> anyhow::Result<()> {
    output::line(&format!("{address}: {}", status.health))?;
    let Some(metrics) = &status.metrics else { return Ok(()) };
    let mut table = output::table(["metric", "labels", "value"]);
    for metric in metrics {
        table.add_row([metric.name.as_str(), metric.labels.as_str(), &format_value(metric.value)]);
    }
    output::line(&table.to_string())
}

/// Formats integers in full, and other values with four significant digits.
fn format_value(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        return format!("{value:.0}");
    }
    let magnitude = value.abs().log10().floor();
    // Between 0 and 12 digits, for any magnitude.
    let digits = (3.0 - magnitude).clamp(0.0, 12.0) as usize;
    format!("{value:.digits$}")
}

/// Returns the metrics to show, in the node's order. Replaces the sums of histograms and summaries
/// by averages, and drops buckets and quantiles.
fn summarize(text: &str) -> Vec<Metric> {
    let samples: Vec<Metric> = text.lines().filter_map(parse).collect();
    let find = |name: &str, labels: &str| {
        samples
            .iter()
            .find(|metric| metric.name == name && metric.labels == labels)
            .map(|metric| metric.value)
    };
    let mut shown = Vec::new();
    for metric in &samples {
        let Metric { name, labels, value } = metric;
        if name.ends_with("_bucket") || labels.contains("quantile=") {
            continue;
        }
        if let Some(base) = name.strip_suffix("_sum")
            && let Some(count) = find(&format!("{base}_count"), labels)
        {
            let average = if count > 0.0 { value / count } else { 0.0 };
            shown.push(Metric { name: format!("{base} (average)"), labels: labels.clone(), value: average });
            continue;
        }
        shown.push(Metric { name: name.clone(), labels: labels.clone(), value: *value });
    }
    shown
}

/// Parses `name{labels} value`. Returns `None` for comments and invalid lines.
fn parse(line: &str) -> Option<Metric> {
    if line.starts_with('#') {
        return None;
    }
    // Label values may contain spaces and braces. The sample's value comes last and contains none.
    let (series, value) = line.trim_end().rsplit_once(' ')?;
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.trim_end().strip_suffix('}')?),
        None => (series, ""),
    };
    Some(Metric { name: name.trim().to_owned(), labels: labels.to_owned(), value: value.parse().ok()? })
}

/// Reads the token in a file.
fn read_token(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read the token file {}", file.display()))?;
    let token = text.trim();
    ensure!(
        !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()),
        "the token file {} does not contain a token",
        file.display()
    );
    Ok(token.to_owned())
}

/// Sends a GET request over HTTP/1.0, so that the response ends at the end of the connection.
/// Returns the status code and the body.
async fn get(address: &str, path: &str, token: Option<&str>) -> anyhow::Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let bearer = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n{bearer}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut response = Vec::new();
        stream.take(MAX_RESPONSE_BYTES).read_to_end(&mut response).await?;
        std::io::Result::Ok(response)
    };
    let response = match tokio::time::timeout(REQUEST_TIMEOUT, exchange).await {
        Ok(response) => response.with_context(|| {
            format!(
                "cannot get http://{address}{path}; check that the node is running and that --http \
                 is its HTTP address"
            )
        })?,
        Err(_) => bail!("http://{address}{path} did not respond within {} s", REQUEST_TIMEOUT.as_secs()),
    };
    split_response(&String::from_utf8_lossy(&response))
        .with_context(|| format!("http://{address}{path} returned an invalid HTTP response"))
}

/// Splits a response into the status code and the body.
fn split_response(response: &str) -> Option<(u16, String)> {
    let (head, body) = response.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    Some((code, body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metric(name: &str, labels: &str, value: f64) -> Metric {
        Metric { name: name.to_owned(), labels: labels.to_owned(), value }
    }

    #[test]
    fn histograms_and_summaries_are_reduced_to_count_and_average() {
        let text = "# HELP a_total Things.\n# TYPE a_total counter\na_total 7\nb{t=\"x y}\"} 1.5\n\
                    s_bucket{le=\"1\"} 2\ns_sum 6\ns_count 4\nq{quantile=\"0.5\"} 1\nempty_sum 0\nempty_count 0\nbad\n";
        assert_eq!(
            summarize(text),
            [
                metric("a_total", "", 7.0),
                metric("b", "t=\"x y}\"", 1.5),
                metric("s (average)", "", 1.5),
                metric("s_count", "", 4.0),
                metric("empty (average)", "", 0.0),
                metric("empty_count", "", 0.0),
            ]
        );
    }

    #[test]
    fn response_is_split_into_status_code_and_body() {
        assert_eq!(
            split_response("HTTP/1.1 503 No\r\nA: b\r\n\r\nnot\r\n\r\nwell"),
            Some((503, "not\r\n\r\nwell".to_owned()))
        );
        assert_eq!(split_response("SSH-2.0"), None);
        assert_eq!(split_response("HTTP/1.1\r\n\r\n"), None);
    }

    #[test]
    fn values_have_four_significant_digits() {
        for (value, text) in
            [(7.0, "7"), (1.23456, "1.235"), (0.000_123_456, "0.0001235"), (98_765.4, "98765")]
        {
            assert_eq!(format_value(value), text);
        }
        assert_eq!(format_value(f64::INFINITY), "inf");
    }
}
