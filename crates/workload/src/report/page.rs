//! The HTML page of a run: parameters and results as tables around the charts.

use std::fmt::Write;

use super::chart::escape;
use super::{RunFile, series};
use crate::measure::Latency;
use crate::run::{Report, RunRecord, ServerUsage};

/// The colours of pages and charts. Those of series, `--c0` and following, are the
/// colour-blind-safe palette of Okabe and Ito, lighter on a dark page.
pub(super) const COLOURS: &str = "\
:root{color-scheme:light dark;--page:#fff;--text:#222;--label:#444;--rule:#ddd;--grid:#e4e4e4;--shade:#f2f2f2;--warning:#fff3cd;\
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#999;--c7:#b3a500}\
@media(prefers-color-scheme:dark){:root{--page:#15181c;--text:#dde1e6;--label:#a9b1ba;--rule:#363c44;--grid:#2a3038;--shade:#1f242b;\
--warning:#4a3d12;--c0:#4ba3e0;--c1:#ff8647;--c2:#2fc79a;--c3:#e39cc6;--c4:#f2b736;--c5:#9ad4f7;--c6:#a8a8a8;--c7:#d6c93a}}";

/// The style of charts.
pub(super) const CHART_STYLE: &str = "svg text{font-family:system-ui,sans-serif;font-size:11px;fill:var(--label)}.grid{stroke:var(--grid)}.warm-up{fill:var(--shade)}";

/// The style of a page.
const STYLE: &str = "\
body{font:14px/1.45 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:var(--text);background:var(--page)}\
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}\
table{border-collapse:collapse;margin:.5em 0}td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}\
td:first-child{white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\
figure{margin:1.5em 0}figcaption{font-weight:600}svg{width:100%;height:auto}\
.legend span{display:inline-block;margin-right:1em}\
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}.warning{background:var(--warning);padding:.5em .8em}";

/// The number of tenants in the table.
const MAX_TENANT_ROWS: usize = 20;

/// Renders a page with a title, which this function escapes, and an HTML body.
pub(crate) fn frame(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{COLOURS}{STYLE}{CHART_STYLE}</style></head><body>\n<h1>{title}</h1>\n{body}</body></html>\n"
    )
}

pub(super) fn html(file: &RunFile) -> String {
    let mut body = warnings(file);
    body.push_str(&facts(&file.run));
    if let Some(report) = &file.report {
        body.push_str(&outcome(report));
    }
    body.push_str("<h2>Over time</h2>\n<p>The warm-up is shaded.</p>\n");
    series::charts(file).iter().for_each(|chart| body.push_str(&chart.svg()));
    body.push_str(&tenants(file));
    frame(&format!("{} against {}", file.run.workload, file.run.target), &body)
}

fn warnings(file: &RunFile) -> String {
    match &file.report {
        None => "<p class=\"warning\">The run was interrupted: there is no report.</p>\n".to_owned(),
        Some(report) if report.driver.is_bottleneck() => format!(
            "<p class=\"warning\">The driver was the bottleneck: its busiest thread used \
             {:.0} % of a CPU.</p>\n",
            report.driver.busiest_thread * 100.0
        ),
        Some(_) => String::new(),
    }
}

/// Renders a table with rows of a name and a value.
fn pairs(rows: &[(&str, String)]) -> String {
    let row = |(name, value): &(&str, String)| {
        format!("<tr><th>{}</th><td>{}</td></tr>\n", escape(name), escape(value))
    };
    format!("<table>\n{}</table>\n", rows.iter().map(row).collect::<String>())
}

fn facts(run: &RunRecord) -> String {
    let options = run.options.as_object().into_iter().flatten();
    let options = options.map(|(name, value)| format!("{name} {}", value.to_string().trim_matches('"')));
    let machine = &run.machine;
    let gib = machine.memory_bytes as f64 / f64::from(1 << 30);
    let kernel = &machine.kernel;
    let rows = [
        ("workload", format!("{}: {}", run.workload, options.collect::<Vec<_>>().join(", "))),
        ("arrival", run.arrival.clone()),
        ("server", run.server.clone()),
        ("driver", run.build.clone()),
        ("seed", run.seed.to_string()),
        ("machine", format!("{} x {}, {gib:.1} GiB, Linux {kernel}", machine.processors, machine.processor)),
        ("window", format!("{} s after {} s of warm-up", run.window_s, run.warm_up_s)),
        ("started", utc(run.started_unix_s)),
    ];
    format!("<h2>Parameters</h2>\n{}", pairs(&rows))
}

/// Formats a time as UTC.
fn utc(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    // Counts years from 1 March, so that the leap day is the last day of a year. A cycle of 400
    // such years began 719,468 days before 1970.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let march = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * march + 2) / 5 + 1, if march < 10 { march + 3 } else { march - 9 });
    let year = 400 * era + year + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

fn outcome(report: &Report) -> String {
    let mut rows = vec![
        ("instances x connections", format!("{} x {}", report.tenants, report.connections)),
        ("transactions", format!("{} ({:.1}/s)", report.transactions, report.throughput_tps)),
        ("rolled back as intended", report.rolled_back.to_string()),
    ];
    if let Some(offered) = report.offered_tps {
        rows.push(("offered", format!("{offered:.1}/s")));
    }
    if let Some(lost) = report.lost_work_s {
        let text = format!("{}, {lost:.2} s of the offered load", report.cancelled);
        rows.push(("cancelled, lost work", text));
    }
    let availability = &report.availability;
    rows.push((
        "outages",
        format!(
            "{}, {:.1} s in total, longest {:.1} s",
            availability.outages, availability.unavailable_s, availability.longest_outage_s
        ),
    ));
    let down = format!("{} of {} s", availability.down_intervals, availability.down_interval_s);
    rows.push(("down intervals", down));
    let errors = report.errors.iter().map(|(sqlstate, count)| format!("{sqlstate}: {count}"));
    let errors = errors.collect::<Vec<_>>().join(", ");
    let errors = if errors.is_empty() { "none".to_owned() } else { errors };
    rows.push(("errors by SQLSTATE", errors));
    rows.push(("retries, failed", format!("{}, {}", report.retries(), report.failed)));
    rows.extend(report.server.iter().flat_map(ServerUsage::lines));
    let driver_us = report.driver.cpu_us_per_statement;
    rows.push(("driver CPU time per statement", format!("{driver_us:.1} us")));
    format!("<h2>Results</h2>\n{}{}", pairs(&rows), latencies(report))
}

fn latencies(report: &Report) -> String {
    let mut table = "<h2>Latency, ms</h2>\n<table>\n<tr><th>transactions</th>".to_owned();
    for head in ["count", "mean", "p50", "p95", "p99", "p99.9", "max"] {
        let _ = write!(table, "<th class=\"n\">{head}</th>");
    }
    table.push_str("</tr>\n");
    let mut row = |name: &str, latency: &Latency| {
        let Latency { count, mean_ms, p50_ms, p95_ms, p99_ms, p999_ms, max_ms } = latency;
        let _ = write!(table, "<tr><td>{}</td><td class=\"n\">{count}</td>", escape(name));
        for value in [mean_ms, p50_ms, p95_ms, p99_ms, p999_ms, max_ms] {
            let _ = write!(table, "<td class=\"n\">{value:.2}</td>");
        }
        table.push_str("</tr>\n");
    };
    row("all", &report.latency);
    if report.kinds.len() > 1 {
        report.kinds.iter().for_each(|kind| row(&kind.kind, &kind.latency));
    }
    table.push_str("</table>\n");
    table
}

fn tenants(file: &RunFile) -> String {
    if file.tenants.len() < 2 {
        return String::new();
    }
    let mut worst: Vec<_> =
        file.tenants.iter().map(|tenant| (tenant.outages_s.iter().sum::<f64>(), tenant)).collect();
    worst.sort_by(|(a, one), (b, other)| b.total_cmp(a).then(other.down_intervals.cmp(&one.down_intervals)));
    let mut table = format!(
        "<h2>Tenants</h2>\n<p>The {} of {} tenants with the longest outages.</p>\n\
         <table>\n<tr><th>tenant</th>",
        worst.len().min(MAX_TENANT_ROWS),
        worst.len()
    );
    for head in [
        "transactions",
        "mean, ms",
        "unavailable, s",
        "outages",
        "down intervals",
        "cancelled",
        "lost work, s",
    ] {
        let _ = write!(table, "<th class=\"n\">{head}</th>");
    }
    table.push_str("</tr>\n");
    for (unavailable, tenant) in worst.iter().take(MAX_TENANT_ROWS) {
        let lost = tenant.lost_work_s.map_or_else(String::new, |lost| format!("{lost:.2}"));
        let _ = writeln!(
            table,
            "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{:.2}</td>\
             <td class=\"n\">{unavailable:.1}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{lost}</td></tr>",
            escape(&tenant.tenant),
            tenant.transactions,
            tenant.mean_ms,
            tenant.outages_s.len(),
            tenant.down_intervals,
            tenant.cancelled,
        );
    }
    table.push_str("</table>\n");
    table
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn times_are_formatted_as_utc() {
        let moments = [0, 951_782_400, 1_700_000_000, 4_107_542_399].map(utc);
        assert_eq!(
            moments,
            [
                "1970-01-01 00:00:00 UTC",
                "2000-02-29 00:00:00 UTC",
                "2023-11-14 22:13:20 UTC",
                "2100-02-28 23:59:59 UTC"
            ]
        );
    }
}
