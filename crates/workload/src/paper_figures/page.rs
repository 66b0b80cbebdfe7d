//! The HTML page of a figure: charts and tables of the measured values and of the paper's numbers.

use super::papers::{self, Number};
use super::{Course, Figure, FigureArgs, FigureRow, Measure};
use crate::report::chart::{Chart, Scale, Series, escape};
use crate::report::page::frame;

/// The quantities that may be shown relative to the first point: their measure, the name in the
/// paper's numbers, and the title.
const OVER_FIRST: [(&str, &str, &str); 2] = [
    ("throughput_tps", "throughput_over_first", "Throughput relative to the first point"),
    ("mean_ms", "mean_over_first", "Mean latency relative to the first point"),
];

/// The measure of charts of the paper's numbers alone.
const P99: &str = "p99_ms";

pub(super) fn html(figure: &Figure, arguments: &FigureArgs, course: &Course) -> String {
    let papers = papers::of(figure.name);
    let mut body = "<p>Dashed lines are the paper's numbers.</p>\n".to_owned();
    if !figure.experiment.is_computed() {
        let seconds = arguments.time().as_secs_f64();
        body = format!(
            "<p>Data and memory: {} times the paper's, if nothing else is stated. {seconds} s per point or \
             phase.</p>\n{body}",
            arguments.scale,
        );
    }
    course.notes.iter().for_each(|note| body.push_str(&format!("<p>{}</p>\n", escape(note))));
    charts(figure, course, &papers).iter().for_each(|chart| body.push_str(&chart.svg()));
    body.push_str(&failures(&course.rows));
    body.push_str(&measured_table(figure, &course.rows));
    body.push_str(&papers_table(&papers));
    frame(figure.title, &body)
}

fn charts(figure: &Figure, course: &Course, papers: &[Number]) -> Vec<Chart> {
    let rows = &course.rows;
    let chart = |title, unit, mut series: Vec<Series>, measure: &str| {
        if figure.paper_x_label.is_none() {
            series.extend(papers_lines(papers, measure, rows));
        }
        let (x, y) = ((figure.x, Scale::Linear), (unit, Scale::Linear));
        Chart { title, x, y, series, measured_from: None }
    };
    let mut charts = Vec::new();
    for (number, measure) in figure.measures.iter().enumerate() {
        charts.push(chart(measure.title, measure.unit, lines(course, number), measure.name));
    }
    for (measure, name, title) in OVER_FIRST.into_iter().filter(|_| figure.over_first) {
        if let Some(number) = figure.measures.iter().position(|of| of.name == measure) {
            let series = lines(course, number).into_iter().map(over_first);
            charts.push(chart(title, "times", series.collect(), name));
        }
    }
    charts.extend(figure.paper_x_label.map(|x| {
        let series = papers_lines(papers, P99, &[]);
        let (x, y) = ((x, Scale::Log), ("ms", Scale::Log));
        Chart { title: "99th percentile, the paper's", x, y, series, measured_from: None }
    }));
    charts
}

/// Returns a series per line that has values of a measure, in the order of the rows.
fn lines(course: &Course, measure: usize) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    for row in &course.rows {
        let point = (row.x, row.values.as_ref().map_or(f64::NAN, |values| values[measure]));
        match series.iter_mut().find(|series| series.name == row.line) {
            Some(line) => line.points.push(point),
            None => {
                let of_line = course.spans.iter().filter(|(line, ..)| *line == row.line);
                let spans = of_line.map(|(_, from, to)| (*from, *to)).collect();
                series.push(Series { spans, ..Series::new(row.line.clone(), vec![point]) });
            }
        }
    }
    series.retain(|series| series.points.iter().any(|(_, value)| value.is_finite()));
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
    let failed = rows.iter().filter_map(|row| Some((row, row.values.as_ref().err()?)));
    let warning = |(row, reason): (&FigureRow, &String)| {
        let (line, reason) = (escape(&row.line), escape(reason));
        format!("<p class=\"warning\">{line} at {} could not be measured: {reason}</p>\n", row.x)
    };
    failed.map(warning).collect()
}

fn measured_table(figure: &Figure, rows: &[FigureRow]) -> String {
    let head = |measure: &Measure| {
        let unit = if measure.unit.is_empty() { String::new() } else { format!(", {}", measure.unit) };
        format!("<th class=\"n\">{}{}</th>", escape(measure.title), escape(&unit))
    };
    let mut table = format!(
        "<h2>Measured values</h2>\n<table>\n<tr><th>line</th><th class=\"n\">{}</th>{}</tr>\n",
        escape(figure.x),
        figure.measures.iter().map(head).collect::<String>()
    );
    for (row, values) in rows.iter().filter_map(|row| Some((row, row.values.as_ref().ok()?))) {
        let cell = |value: &f64| match value.is_finite() {
            true => format!("<td class=\"n\">{value:.2}</td>"),
            false => "<td class=\"n\"></td>".to_owned(),
        };
        let (line, cells) = (escape(&row.line), values.iter().map(cell).collect::<String>());
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
    use super::super::{figures, tests::arguments};
    use super::*;

    fn page(name: &str, rows: &[FigureRow]) -> String {
        let figure = figures().find(|figure| figure.name == name).unwrap();
        let course = Course { rows: rows.to_vec(), ..Course::default() };
        html(figure, &arguments(&[name, "--seconds", "10"]), &course)
    }

    fn row(x: f64, mean_ms: f64) -> FigureRow {
        FigureRow { line: "uniform".to_owned(), x, values: Ok(vec![99.5, mean_ms, 4.0]) }
    }

    #[test]
    fn page_has_measured_and_published_numbers() {
        let failed = FigureRow { values: Err("memory is full".to_owned()), ..row(200.0, 0.0) };
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
        assert!(no_numbers.contains("Data and memory: 0.1 times") && no_numbers.contains("10 s per point"));
        let by_tenant =
            |x, mean_ms| FigureRow { values: Ok(vec![99.5, mean_ms, 4.0, 1.0, 2.0]), ..row(x, 0.0) };
        let noisy = page("elastras/12", &[by_tenant(1.0, 2.0), by_tenant(5.0, 2.2), by_tenant(10.0, 3.0)]);
        for text in ["Highest mean latency", "Mean latency relative to the first point", "1.4", "about 40%"] {
            assert!(noisy.contains(text), "{text}");
        }
        let two = FigureRow { values: Ok(vec![3.1, 8.1]), ..row(2.0, 0.0) };
        let computed = page("estore/10", &[two]);
        assert!(
            computed.contains("increasing throughput by up to 4x") && !computed.contains("Data and memory")
        );
        let memory = page("cloudtps/13", &[row(5.0, 2.0)]);
        assert!(
            memory.contains("10,000 items, the paper") && memory.contains("items in memory at each of 20")
        );
        assert!(!memory.contains("NaN"));
    }

    #[test]
    fn values_that_do_not_apply_are_left_out() {
        let figure = figures().find(|figure| figure.name == "elastras/4").unwrap();
        let values = |values: [f64; 3]| Ok(values.to_vec());
        let row = |line: &str, values| FigureRow { line: line.to_owned(), x: 1.0, values };
        let rows = vec![row("a", values([1.0, 2.0, f64::NAN])), row("b", values([f64::NAN, 3.0, f64::NAN]))];
        let course = Course { rows, spans: vec![("b".to_owned(), 0.5, 0.7)], ..Course::default() };
        let names = |measure| lines(&course, measure).into_iter().map(|line| line.name).collect::<Vec<_>>();
        assert_eq!((names(0), names(1)), (vec!["a".to_owned()], vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(lines(&course, 1)[1].spans, [(0.5, 0.7)]);
        let page = html(figure, &arguments(&["elastras/4"]), &course);
        assert!(page.contains("class=\"span\"") && !page.contains("NaN"));
    }
}
