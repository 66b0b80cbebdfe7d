//! The Prometheus text format.

use std::fmt::Write;

use fulmar_store::{DurationCounts, duration_bucket_us};

/// The declaration of a metric: its name, its help text, and its value in the statistics `S`.
pub(super) struct Metric<S: ?Sized> {
    name: &'static str,
    help: &'static str,
    kind: &'static str,
    value: fn(&S) -> u64,
}

/// Declares a counter.
pub(super) const fn counter<S: ?Sized>(
    name: &'static str,
    help: &'static str,
    value: fn(&S) -> u64,
) -> Metric<S> {
    Metric { name, help, kind: "counter", value }
}

/// Declares a gauge.
pub(super) const fn gauge<S: ?Sized>(
    name: &'static str,
    help: &'static str,
    value: fn(&S) -> u64,
) -> Metric<S> {
    Metric { name, help, kind: "gauge", value }
}

/// Writes metrics with their values.
pub(super) fn write<S: ?Sized>(out: &mut String, metrics: &[Metric<S>], source: &S) {
    for Metric { name, help, kind, value } in metrics {
        header(out, name, help, kind);
        line(out, format_args!("{name} {}", value(source)));
    }
}

pub(super) fn header(out: &mut String, name: &str, help: &str, kind: &str) {
    line(out, format_args!("# HELP {name} {help}"));
    line(out, format_args!("# TYPE {name} {kind}"));
}

pub(super) fn line(out: &mut String, line: std::fmt::Arguments<'_>) {
    let _ = writeln!(out, "{line}"); // writing to a String cannot fail
}

/// Writes a histogram of durations, in seconds. `label` is an additional label, or empty.
pub(super) fn durations(out: &mut String, name: &str, label: &str, counts: &DurationCounts) {
    let separator = if label.is_empty() { "" } else { "," };
    let mut total = 0;
    for (bucket, count) in counts.buckets.iter().enumerate() {
        total += count;
        let bound = duration_bucket_us(bucket).map_or("+Inf".to_owned(), |us| seconds(us).to_string());
        line(out, format_args!("{name}_bucket{{{label}{separator}le=\"{bound}\"}} {total}"));
    }
    let labels = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
    line(out, format_args!("{name}_sum{labels} {}", seconds(counts.total_us)));
    line(out, format_args!("{name}_count{labels} {total}"));
}

fn seconds(microseconds: u64) -> f64 {
    microseconds as f64 / 1e6
}

/// Escapes the value of a label.
pub(super) fn escape_label(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
