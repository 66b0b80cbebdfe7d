//! The HTML page of a figure: charts and tables of the measured values and of the paper's numbers.

use super::papers::{self, Number};
use super::{Figure, FigureArgs, FigureRow, Measured};
use crate::report::chart::{Chart, Scale, Series, escape};
use crate::report::page::frame;

/// A measured quantity: its name in the paper's numbers, and its title and unit in the charts.
struct Measure {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&Measured) -> f64,
}

const THROUGHPUT: Measure = Measure {
    name: "throughput_tps",
    title: "Throughput",
    unit: "transactions/s",
    value: |measured| measured.throughput_tps,
};
const MEAN: Measure = Measure {
    name: "mean_ms",
    title: "Mean latency from the scheduled start",
    unit: "ms",
    value: |measured| measured.mean_ms,
};
const P99: Measure =
    Measure { name: "p99_ms", title: "99th percentile", unit: "ms", value: |measured| measured.p99_ms };

/// The quantities of charts relative to the first point.
const OVER_FIRST: [(Measure, &str, &str); 2] = [
    (THROUGHPUT, "throughput_over_first", "Throughput relative to the first point"),
    (MEAN, "mean_over_first", "Mean latency relative to the first point"),
];

pub(super) fn html(figure: &Figure, arguments: &FigureArgs, rows: &[FigureRow], notes: &[String]) -> String {
    let papers = papers::of(figure.name);
    let mut body = format!(
        "<p>Data and memory: {} times the paper's. {} s per point. Dashed lines are the paper's \
         numbers.</p>\n",
        arguments.scale,
        arguments.time().as_secs_f64()
    );
    notes.iter().for_each(|note| body.push_str(&format!("<p>{}</p>\n", escape(note))));
    charts(figure, rows, &papers).iter().for_each(|chart| body.push_str(&chart.svg()));
    body.push_str(&failures(rows));
    body.push_str(&measured_table(figure, rows));
    body.push_str(&papers_table(&papers));
    frame(figure.title, &body)
}

fn charts(figure: &Figure, rows: &[FigureRow], papers: &[Number]) -> Vec<Chart> {
    let chart = |title, unit, mut series: Vec<Series>, measure: &str| {
        if figure.paper_x_label.is_none() {
            series.extend(papers_lines(papers, measure, rows));
        }
        let (x, y) = ((figure.x, Scale::Linear), (unit, Scale::Linear));
        Chart { title, x, y, series, measured_from: None }
    };
    let mut charts = Vec::new();
    for Measure { name, title, unit, value } in [THROUGHPUT, MEAN, P99] {
        charts.push(chart(title, unit, lines(rows, "", value), name));
    }
    if figure.by_tenant {
        let mut both = lines(rows, ", lowest", |measured| measured.tenant_mean_ms[0]);
        both.extend(lines(rows, ", highest", |measured| measured.tenant_mean_ms[1]));
        charts.push(chart("Lowest and highest mean latency of a tenant", "ms", both, ""));
    }
    if figure.over_first {
        for (Measure { value, .. }, name, title) in OVER_FIRST {
            let series = lines(rows, "", value).into_iter().map(over_first);
            charts.push(chart(title, "times", series.collect(), name));
        }
    }
    charts.extend(figure.paper_x_label.map(|x| {
        let series = papers_lines(papers, P99.name, &[]);
        let (x, y) = ((x, Scale::Log), (P99.unit, Scale::Log));
        Chart { title: "99th percentile, the paper's", x, y, series, measured_from: None }
    }));
    charts
}

/// Returns a series per line, in the order of the rows.
fn lines(rows: &[FigureRow], suffix: &str, value: fn(&Measured) -> f64) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    for row in rows {
        let name = format!("{}{suffix}", row.line);
        let point = (row.x, row.measured.as_ref().map_or(f64::NAN, value));
        match series.iter_mut().find(|series| series.name == name) {
            Some(line) => line.points.push(point),
            None => series.push(Series::new(name, vec![point])),
        }
    }
    series
}

fn over_first(mut series: Series) -> Series {
    let first = series.points.first().map_or(f64::NAN, |(_, first)| *first);
    series.points.iter_mut().for_each(|(_, value)| *value /= first);
    series
}

/// Returns the paper's numbers as dashed series. A number without an x (a plateau, a peak) spans
/// the x axis.
fn papers_lines(papers: &[Number], measure: &str, rows: &[FigureRow]) -> Vec<Series> {
    let across = rows.iter().map(|row| row.x);
    let (from, to) = (across.clone().fold(f64::NAN, f64::min), across.fold(f64::NAN, f64::max));
    let mut series: Vec<Series> = Vec::new();
    for number in papers.iter().filter(|number| number.measure == measure) {
        let name = match number.line.as_str() {
            "" => "the paper".to_owned(),
            line => format!("{line}, the paper"),
        };
        let points = match number.x {
            Some(x) => vec![(x, number.value)],
            None => vec![(from, number.value), (to, number.value)],
        };
        match series.iter_mut().find(|series| series.name == name) {
            Some(line) => line.points.extend(points),
            None => series.push(Series::dashed(name, points)),
        }
    }
    series
}

fn failures(rows: &[FigureRow]) -> String {
    let failed = rows.iter().filter_map(|row| Some((row, row.measured.as_ref().err()?)));
    let warning = |(row, reason): (&FigureRow, &String)| {
        let (line, reason) = (escape(&row.line), escape(reason));
        format!("<p class=\"warning\">{line} at {} could not be measured: {reason}</p>\n", row.x)
    };
    failed.map(warning).collect()
}

fn measured_table(figure: &Figure, rows: &[FigureRow]) -> String {
    let heads =
        ["transactions/s", "mean, ms", "p99, ms", "lowest tenant mean, ms", "highest tenant mean, ms"];
    let shown = if figure.by_tenant { &heads[..] } else { &heads[..3] };
    let head = |head: &&str| format!("<th class=\"n\">{head}</th>");
    let mut table = format!(
        "<h2>Measured values</h2>\n<table>\n<tr><th>line</th><th class=\"n\">{}</th>{}</tr>\n",
        escape(figure.x),
        shown.iter().map(head).collect::<String>()
    );
    for (row, measured) in rows.iter().filter_map(|row| Some((row, row.measured.as_ref().ok()?))) {
        let Measured { throughput_tps, mean_ms, p99_ms, tenant_mean_ms: [least, most] } = *measured;
        let cells = [throughput_tps, mean_ms, p99_ms, least, most];
        let cells = cells.iter().take(shown.len()).map(|value| format!("<td class=\"n\">{value:.2}</td>"));
        let (line, cells) = (escape(&row.line), cells.collect::<String>());
        table.push_str(&format!("<tr><td>{line}</td><td class=\"n\">{}</td>{cells}</tr>\n", row.x));
    }
    table + "</table>\n"
}

fn papers_table(papers: &[Number]) -> String {
    if papers.is_empty() {
        return "<h2>The paper's numbers</h2>\n<p>The text of the paper has no numbers for this \
                figure.</p>\n"
            .to_owned();
    }
    let row = |number: &Number| {
        let x = number.x.map_or_else(String::new, |x| x.to_string());
        let [line, measure, source] =
            [&number.line, &number.measure, &number.source].map(|text| escape(text));
        format!(
            "<tr><td>{line}</td><td class=\"n\">{x}</td><td>{measure}</td>\
             <td class=\"n\">{}</td><td>{source}</td></tr>\n",
            number.value
        )
    };
    let rows: String = papers.iter().map(row).collect();
    let head = "<tr><th>line</th><th class=\"n\">x</th><th>measure</th>\
                <th class=\"n\">value</th><th>source</th></tr>\n";
    format!("<h2>The paper's numbers</h2>\n<table>\n{head}{rows}</table>\n")
}

#[cfg(test)]
mod tests {
    use super::super::figures;
    use super::*;

    fn page(name: &str, rows: &[FigureRow]) -> String {
        let figure = figures().find(|figure| figure.name == name).unwrap();
        let arguments = FigureArgs {
            name: name.to_owned(),
            scale: 0.1,
            line: None,
            memory_mib: None,
            seconds: Some(10),
            output: None,
        };
        html(figure, &arguments, rows, &[])
    }

    fn row(x: f64, mean_ms: f64) -> FigureRow {
        let measured = Measured { throughput_tps: 99.5, mean_ms, p99_ms: 4.0, tenant_mean_ms: [1.0, 2.0] };
        FigureRow { line: "uniform".to_owned(), x, measured: Ok(measured) }
    }

    #[test]
    fn page_has_measured_and_published_numbers() {
        let failed = FigureRow { measured: Err("memory is full".to_owned()), ..row(200.0, 0.0) };
        let page = page("elastras/4", &[row(100.0, 1.5), failed]);
        for text in ["uniform", "memory is full", "1100", "plateaus", "<svg", "stroke-dasharray", "99.50"] {
            assert!(page.contains(text), "{text}");
        }
        assert!(!page.contains("NaN"));
    }

    #[test]
    fn pages_have_the_charts_of_their_figure() {
        let no_numbers = page("elastras/5", &[row(5.0, 1.5)]);
        assert!(no_numbers.contains("The text of the paper has no numbers"));
        let noisy = page("elastras/12", &[row(1.0, 2.0), row(5.0, 2.2), row(10.0, 3.0)]);
        for text in ["uniform, highest", "Mean latency relative to the first point", "1.4", "about 40%"] {
            assert!(noisy.contains(text), "{text}");
        }
        let memory = page("cloudtps/13", &[row(5.0, 2.0)]);
        assert!(
            memory.contains("10,000 items, the paper") && memory.contains("items in memory at each of 20")
        );
        assert!(!memory.contains("NaN"));
    }
}
