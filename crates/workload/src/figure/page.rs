//! The page of a figure: throughput and latency, with the paper's numbers.

use super::experiments::Figure;
use super::{FigureArgs, FigureRow, Measured};
use crate::report::chart::{Chart, Scale, Series, escape};
use crate::report::page::frame;

pub(super) fn html(figure: &Figure, arguments: &FigureArgs, rows: &[FigureRow], papers: &str) -> String {
    let chart = |title, unit, value: fn(&Measured) -> f64| Chart {
        title,
        x: (figure.x, Scale::Linear),
        y: (unit, Scale::Linear),
        series: lines(rows, value),
        measured_from: None,
    };
    let mut body = format!(
        "<p>Data and memory are {} of the paper's, {} s a point.</p>\n",
        arguments.scale, arguments.seconds
    );
    let charts = [
        chart("Throughput", "transactions/s", |measured| measured.throughput_tps),
        chart("Mean latency, from the scheduled start", "ms", |measured| measured.mean_ms),
        chart("99th percentile", "ms", |measured| measured.p99_ms),
    ];
    charts.iter().for_each(|chart| body.push_str(&chart.svg()));
    let failed = rows.iter().filter_map(|row| Some((row, row.measured.as_ref().err()?)));
    for (row, reason) in failed {
        body.push_str(&format!(
            "<p class=\"warning\">{} at {} could not be measured: {}</p>\n",
            escape(&row.line),
            row.x,
            escape(reason)
        ));
    }
    body.push_str("<h2>The paper's numbers</h2>\n<table>\n");
    let of_figure = |line: &&str| line.split(',').next() == Some(figure.name);
    let mut any = false;
    for line in papers.lines().skip(1).filter(of_figure) {
        let cells: Vec<_> = line.splitn(5, ',').map(|cell| escape(cell.trim_matches('"'))).collect();
        let [_, x, measure, value, source] = &cells[..] else { continue };
        body.push_str(&format!(
            "<tr><td>{measure}</td><td class=\"n\">{value}</td><td>{x}</td><td>{source}</td></tr>\n"
        ));
        any = true;
    }
    body.push_str("</table>\n");
    if !any {
        body.push_str("<p>Its text has none: they stood in the plot alone.</p>\n");
    }
    frame(figure.title, &body)
}

/// A series for each line, in the order of the rows.
fn lines(rows: &[FigureRow], value: fn(&Measured) -> f64) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    for row in rows {
        let point = (row.x, row.measured.as_ref().map_or(f64::NAN, value));
        match series.iter_mut().find(|series| series.name == row.line) {
            Some(line) => line.points.push(point),
            None => series.push(Series { name: row.line.clone(), points: vec![point] }),
        }
    }
    series
}

#[cfg(test)]
mod tests {
    use super::super::experiments::FIGURES;
    use super::*;

    #[test]
    fn the_page_has_both_numbers() {
        let arguments = FigureArgs {
            name: "elastras/4".to_owned(),
            scale: 0.1,
            line: None,
            memory_mib: None,
            seconds: 10,
            output: None,
        };
        let row = |x, measured| FigureRow { line: "uniform".to_owned(), x, measured };
        let measured = Measured { throughput_tps: 99.5, mean_ms: 1.5, p99_ms: 4.0 };
        let rows = [row(100.0, Ok(measured)), row(200.0, Err("memory is full".to_owned()))];
        let page = html(&FIGURES[0], &arguments, &rows, super::super::PAPERS);
        for told in ["uniform", "memory is full", "1100", "plateaus", "<svg"] {
            assert!(page.contains(told), "{told}");
        }
        assert!(!page.contains("NaN"));
        assert!(html(&FIGURES[1], &arguments, &[], super::super::PAPERS).contains("Its text has none"));
    }
}
