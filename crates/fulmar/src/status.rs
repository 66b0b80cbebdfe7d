//! `fulmar status`: `/healthz` and `/metrics` of a node, put into a table.
//!
//! A node says all it knows of itself in Prometheus' text format. This shows its counters and gauges, and of
//! each histogram or summary how often and how much on average, and leaves the rest to Prometheus.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::cli::StatusArgs;
use crate::output;

/// A node that lives answers in less.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest answer that is read.
const MAX_ANSWER_BYTES: u64 = 16 << 20;

/// What is printed with `--json`.
#[derive(Debug, Serialize)]
struct Status {
    healthy: bool,
    health: String,
    /// `None`: the node did not show them.
    metrics: Option<Vec<Metric>>,
}

/// One line of the node's metrics.
#[derive(Debug, PartialEq, Serialize)]
struct Metric {
    name: String,
    labels: String,
    value: f64,
}

/// Runs `fulmar status`. A node that is not healthy is an error, after what is known has been printed.
pub async fn run(arguments: StatusArgs) -> anyhow::Result<()> {
    let token = arguments.token_file.as_deref().map(token).transpose()?;
    let (code, health) = get(&arguments.http, "/healthz", None).await?;
    let metrics = shown_metrics(&arguments.http, token.as_deref()).await;
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

/// The node's metrics, unless it wants a token for them and there is none: health is for everybody.
async fn shown_metrics(address: &str, token: Option<&str>) -> anyhow::Result<Option<Vec<Metric>>> {
    let (code, text) = get(address, "/metrics", token).await?;
    match code {
        200 => Ok(Some(metrics(&text))),
        401 if token.is_none() => {
            eprintln!(
                "fulmar: no metrics: they want a token; `fulmar token create` makes one for --token-file"
            );
            Ok(None)
        }
        401 => bail!("the node does not know this token, or it has expired; `fulmar token list` shows all"),
        code => bail!("the node answered {code} to /metrics; is --http its HTTP address?"),
    }
}

fn print(address: &str, status: &Status) -> anyhow::Result<()> {
    output::line(&format!("{address}: {}", status.health))?;
    let Some(metrics) = &status.metrics else { return Ok(()) };
    let mut table = output::table(["metric", "labels", "value"]);
    for metric in metrics {
        table.add_row([metric.name.as_str(), metric.labels.as_str(), &rounded(metric.value)]);
    }
    output::line(&table.to_string())
}

/// Whole numbers as they are, others with four digits.
fn rounded(value: f64) -> String {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        return format!("{value:.0}");
    }
    let magnitude = value.abs().log10().floor();
    // Between 0 and 12 digits, whatever the magnitude is.
    let digits = (3.0 - magnitude).clamp(0.0, 12.0) as usize;
    format!("{value:.digits$}")
}

/// The lines worth a person's look, in the node's order.
fn metrics(text: &str) -> Vec<Metric> {
    let lines: Vec<Metric> = text.lines().filter_map(parse).collect();
    let find = |name: &str, labels: &str| {
        lines.iter().find(|metric| metric.name == name && metric.labels == labels).map(|metric| metric.value)
    };
    let mut shown = Vec::new();
    for metric in &lines {
        let Metric { name, labels, value } = metric;
        if name.ends_with("_bucket") || labels.contains("quantile=") {
            continue;
        }
        if let Some(of) = name.strip_suffix("_sum")
            && let Some(count) = find(&format!("{of}_count"), labels)
        {
            let average = if count > 0.0 { value / count } else { 0.0 };
            shown.push(Metric { name: format!("{of} (average)"), labels: labels.clone(), value: average });
            continue;
        }
        shown.push(Metric { name: name.clone(), labels: labels.clone(), value: *value });
    }
    shown
}

/// `name{labels} value`; comments and what is not understood are left out.
fn parse(line: &str) -> Option<Metric> {
    if line.starts_with('#') {
        return None;
    }
    // Label values may hold spaces and braces; the value may not, and comes last.
    let (series, value) = line.trim_end().rsplit_once(' ')?;
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.trim_end().strip_suffix('}')?),
        None => (series, ""),
    };
    Some(Metric { name: name.trim().to_owned(), labels: labels.to_owned(), value: value.parse().ok()? })
}

/// The token in a file.
fn token(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read the token file {}", file.display()))?;
    let token = text.trim();
    ensure!(
        !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()),
        "the file {} holds no token",
        file.display()
    );
    Ok(token.to_owned())
}

/// Asks over HTTP/1.0, so that the answer ends where the connection does.
async fn get(address: &str, path: &str, token: Option<&str>) -> anyhow::Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let bearer = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
        let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n{bearer}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(MAX_ANSWER_BYTES).read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = match tokio::time::timeout(TIMEOUT, exchange).await {
        Ok(answer) => answer.with_context(|| {
            format!("cannot ask http://{address}{path}; is the node running, and is --http its HTTP address?")
        })?,
        Err(_) => bail!("http://{address}{path} did not answer within {} s", TIMEOUT.as_secs()),
    };
    split_answer(&String::from_utf8_lossy(&answer))
        .with_context(|| format!("http://{address}{path} spoke no HTTP"))
}

/// The status code and the body.
fn split_answer(answer: &str) -> Option<(u16, String)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
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
    fn metrics_are_condensed() {
        let text = "# HELP a_total Things.\n# TYPE a_total counter\na_total 7\nb{t=\"x y}\"} 1.5\n\
                    s_bucket{le=\"1\"} 2\ns_sum 6\ns_count 4\nq{quantile=\"0.5\"} 1\nempty_sum 0\nempty_count 0\nbad\n";
        assert_eq!(
            metrics(text),
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
    fn answers_are_split() {
        assert_eq!(
            split_answer("HTTP/1.1 503 No\r\nA: b\r\n\r\nnot\r\n\r\nwell"),
            Some((503, "not\r\n\r\nwell".to_owned()))
        );
        assert_eq!(split_answer("SSH-2.0"), None);
        assert_eq!(split_answer("HTTP/1.1\r\n\r\n"), None);
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in
            [(7.0, "7"), (1.23456, "1.235"), (0.000_123_456, "0.0001235"), (98_765.4, "98765")]
        {
            assert_eq!(rounded(value), text);
        }
        assert_eq!(rounded(f64::INFINITY), "inf");
    }
}
