//! `fulmar forecast`: what the controller has forecast for a load, and what happened.

use std::path::Path;

use anyhow::{Context, bail};
use fulmar_workload::report::line_chart;
use serde::Serialize;
use tokio_postgres::{Client, Row};

use crate::cli::ForecastArgs;
use crate::client::{connect, from_row, server_error};
use crate::output;
use crate::plan::align_numbers;
use crate::tenant::SYSTEM_DATABASE;

/// Characters of the past and of the future in a line.
const PAST_WIDTH: usize = 60;
const AHEAD_WIDTH: usize = 12;
/// Heights of a line's characters.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// A step of a series.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Point {
    /// In seconds since 1970.
    at: f64,
    load: Option<f64>,
    forecast: Option<f64>,
}

/// A method on a series.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Method {
    method: String,
    step_s: f64,
    horizon: i64,
    error: Option<f64>,
    ratio: Option<f64>,
    judged: i64,
    is_used: bool,
}

/// A series.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Series {
    series: &'static str,
    name: String,
    points: Vec<Point>,
    methods: Vec<Method>,
}

/// Runs `fulmar forecast`.
pub async fn run(arguments: ForecastArgs) -> anyhow::Result<()> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let (kind, name) = match (&arguments.tenant, &arguments.node) {
        (Some(tenant), _) => ("tenant", tenant.as_str()),
        (None, Some(node)) => ("node", node.as_str()),
        (None, None) => ("cluster", ""),
    };
    let series = read(&client, kind, name).await?;
    if let Some(file) = &arguments.svg {
        write_chart(&series, file)?;
    }
    if arguments.json {
        return output::json(&series);
    }
    output::line(&text(&series))?;
    let mut table = output::table(["method", "error", "of the mean load", "judged", "used"]);
    for of in &series.methods {
        table.add_row([
            of.method.clone(),
            of.error.map_or_else(String::new, |error| format!("{error:.4} CPUs")),
            of.ratio.map_or_else(String::new, |ratio| format!("{:.1} %", ratio * 100.0)),
            of.judged.to_string(),
            if of.is_used { "yes".to_owned() } else { String::new() },
        ]);
    }
    align_numbers(&mut table, 1);
    output::line(&table.to_string())
}

async fn read(client: &Client, series: &'static str, name: &str) -> anyhow::Result<Series> {
    let parameters: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&series, &name];
    let sql = "SELECT CAST(unixepoch(at, 'subsec') AS FLOAT8) AS at, load, forecast FROM fulmar.forecast \
               WHERE series = $1::text AND name = $2::text ORDER BY 1";
    let rows = client.query(sql, &parameters).await.map_err(|error| server_error(&error))?;
    if rows.is_empty() {
        let what = if name.is_empty() { "the cluster".to_owned() } else { format!("{series} \"{name}\"") };
        bail!(
            "there is no forecast of {what} yet: a controller must run (\"fulmar control set mode advise\") for one \
             step, or five for nodes and tenants; idle tenants have none"
        );
    }
    let point = |row: &Row| Ok(from_row!(row => Point { at, load, forecast }));
    let points = rows.iter().map(point).collect::<Result<_, tokio_postgres::Error>>()?;
    let sql = "SELECT method, step_s, horizon, error, ratio, judged, is_used FROM fulmar.forecast_errors \
               WHERE series = $1::text AND name = $2::text";
    let rows = client.query(sql, &parameters).await.map_err(|error| server_error(&error))?;
    let method =
        |row: &Row| Ok(from_row!(row => Method { method, step_s, horizon, error, ratio, judged, is_used }));
    let methods = rows.iter().map(method).collect::<Result<_, tokio_postgres::Error>>()?;
    Ok(Series { series, name: name.to_owned(), points, methods })
}

/// The series as two lines of bars, with a summary.
fn text(series: &Series) -> String {
    let past: Vec<&Point> = series.points.iter().filter(|point| point.load.is_some()).collect();
    let ahead: Vec<&Point> = series.points.iter().filter(|point| point.load.is_none()).collect();
    let name = if series.name.is_empty() { series.series } else { series.name.as_str() };
    let number = |value: Option<f64>| value.map_or_else(|| "unknown".to_owned(), |load| format!("{load:.3}"));
    let now = number(past.last().and_then(|point| point.load));
    let mut text = format!("{name}: {now} CPUs");
    if let (Some(last), Some(newest)) = (ahead.last(), past.last()) {
        text += &format!(", {} in {}", number(last.forecast), time(last.at - newest.at));
    }
    let used = series.methods.iter().find(|of| of.is_used);
    if let Some(of) = used {
        let error = of.error.map_or_else(String::new, |error| format!(", mean error {error:.4} CPUs"));
        text += &format!(" ({}{error})", of.method);
    }
    let load: Vec<Option<f64>> = buckets(past.iter().map(|point| point.load), PAST_WIDTH);
    let judged = buckets(past.iter().map(|point| point.forecast), PAST_WIDTH);
    let future = buckets(ahead.iter().map(|point| point.forecast), AHEAD_WIDTH);
    let all = load.iter().chain(&judged).chain(&future).flatten();
    let max = all.copied().fold(0.0, f64::max);
    let line = |values: &[Option<f64>]| values.iter().map(|value| bar(*value, max)).collect::<String>();
    text += &format!("\nload      {}", line(&load));
    text += &format!("\nforecast  {}|{}", line(&judged), line(&future));
    if let Some(of) = used {
        let (step, before) = (time(of.step_s), time(of.step_s * of.horizon as f64));
        let shown = past.first().zip(past.last()).map_or(0.0, |(first, last)| last.at - first.at + of.step_s);
        text += &format!("\n{} in steps of {step}; forecasts were made {before} before", time(shown));
    }
    text
}

/// The means of at most `width` groups of values. A group without values has none.
fn buckets(values: impl Iterator<Item = Option<f64>>, width: usize) -> Vec<Option<f64>> {
    let values: Vec<Option<f64>> = values.collect();
    let size = values.len().div_ceil(width).max(1);
    let mean = |group: &[Option<f64>]| {
        let known: Vec<f64> = group.iter().flatten().copied().collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    };
    values.chunks(size).map(mean).collect()
}

fn bar(value: Option<f64>, max: f64) -> char {
    let Some(value) = value else { return ' ' };
    let share = if max > 0.0 { (value / max).clamp(0.0, 1.0) } else { 0.0 };
    BARS[((share * BARS.len() as f64) as usize).min(BARS.len() - 1)]
}

fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 120.0 => format!("{} s", (seconds * 10.0).round() / 10.0),
        seconds if seconds < 7200.0 => format!("{:.0} min", seconds / 60.0),
        seconds => format!("{:.1} h", seconds / 3600.0),
    }
}

fn write_chart(series: &Series, file: &Path) -> anyhow::Result<()> {
    let past = series.points.iter().filter(|point| point.load.is_some());
    let now = past.map(|point| point.at).fold(f64::NEG_INFINITY, f64::max);
    let points = |value: fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        series.points.iter().filter_map(|point| Some(((point.at - now) / 60.0, value(point)?))).collect()
    };
    let lines = vec![
        ("load".to_owned(), points(|point| point.load)),
        ("forecast".to_owned(), points(|point| point.forecast)),
    ];
    let chart = line_chart("Load and forecast", ("minutes from now", "CPUs"), lines);
    std::fs::write(file, chart).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series() -> Series {
        let past = (0..120).map(|step| Point {
            at: 1000.0 + f64::from(step) * 60.0,
            load: Some(f64::from(step) / 120.0),
            forecast: (step >= 15).then(|| f64::from(step - 15) / 120.0),
        });
        let ahead = (120..135).map(|step| Point {
            at: 1000.0 + f64::from(step) * 60.0,
            load: None,
            forecast: Some(f64::from(step) / 120.0),
        });
        let method = Method {
            method: "arima".to_owned(),
            step_s: 60.0,
            horizon: 15,
            error: Some(0.125),
            ratio: Some(0.25),
            judged: 105,
            is_used: true,
        };
        Series {
            series: "tenant",
            name: "shop".to_owned(),
            points: past.chain(ahead).collect(),
            methods: vec![method],
        }
    }

    #[test]
    fn text_has_past_forecasts_and_the_future() {
        let text = text(&series());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "shop: 0.992 CPUs, 1.117 in 15 min (arima, mean error 0.1250 CPUs)");
        assert!(lines[1].starts_with("load      ▁") && lines[1].chars().count() == 10 + 60, "{text}");
        let (past, ahead) = lines[2].split_once('|').unwrap();
        assert_eq!((past.chars().count(), ahead.chars().count()), (70, 8), "{text}");
        assert!(past.starts_with("forecast         ▁") && ahead.ends_with('█'), "{text}");
        assert_eq!(lines[3], "2.0 h in steps of 60 s; forecasts were made 15 min before");
    }

    #[test]
    fn charts_have_both_lines() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("shop.svg");
        write_chart(&series(), &file).unwrap();
        let chart = std::fs::read_to_string(file).unwrap();
        assert!(
            chart.starts_with("<svg") && chart.contains("load") && chart.contains("forecast"),
            "{chart:.200}"
        );
    }

    #[test]
    fn empty_and_idle_series_are_shown() {
        let mut idle = series();
        idle.points.iter_mut().for_each(|point| {
            point.load = point.load.map(|_| 0.0);
            point.forecast = point.forecast.map(|_| 0.0);
        });
        assert!(text(&idle).contains("load      ▁▁"));
        let empty = Series { points: Vec::new(), methods: Vec::new(), ..idle };
        assert!(text(&empty).starts_with("shop: unknown CPUs"));
    }
}
