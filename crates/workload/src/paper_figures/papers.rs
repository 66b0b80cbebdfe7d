//! The numbers that the papers state in their text (`papers.csv`).

/// The contents of `papers.csv`.
const PAPERS: &str = include_str!("papers.csv");

/// A number stated in a paper.
#[derive(Debug, PartialEq)]
pub(super) struct Number {
    pub(super) figure: String,
    /// The line of the figure. Empty if the paper has only one line.
    pub(super) line: String,
    /// The position on the x axis. `None` if the paper does not state one, as for a plateau or a
    /// peak.
    pub(super) x: Option<f64>,
    /// A column of the measured rows, or one of them relative to the first point.
    pub(super) measure: String,
    pub(super) value: f64,
    /// The section and its wording.
    pub(super) source: String,
}

/// The numbers of a figure.
pub(super) fn of(figure: &str) -> Vec<Number> {
    let lines = PAPERS.lines().filter(|line| !line.starts_with('#')).skip(1);
    lines.filter_map(number).filter(|number| number.figure == figure).collect()
}

fn number(line: &str) -> Option<Number> {
    let cells: [String; 6] = cells(line).try_into().ok()?;
    let [figure, line, x, measure, value, source] = cells;
    Some(Number { figure, line, x: x.parse().ok(), measure, value: value.parse().ok()?, source })
}

/// Splits a CSV line. Commas inside quotes do not separate cells.
fn cells(line: &str) -> Vec<String> {
    let (mut cells, mut quoted) = (vec![String::new()], false);
    for character in line.chars() {
        match character {
            '"' => quoted = !quoted,
            ',' if !quoted => cells.push(String::new()),
            _ => cells.last_mut().into_iter().for_each(|cell| cell.push(character)),
        }
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::super::figures;
    use super::*;

    #[test]
    fn every_line_is_parsed_and_names_a_known_figure() {
        let lines: Vec<_> = PAPERS.lines().filter(|line| !line.starts_with('#')).skip(1).collect();
        for line in &lines {
            let number = number(line).unwrap_or_else(|| panic!("{line}"));
            assert!(figures().any(|figure| figure.name == number.figure), "{line}");
            assert!(number.value > 0.0 && !number.source.is_empty(), "{line}");
        }
        let of_all: usize = figures().map(|figure| of(figure.name).len()).sum();
        assert_eq!(of_all, lines.len());
    }

    #[test]
    fn commas_in_quotes_are_text() {
        assert_eq!(cells("a,\"1,000, so\",,2"), ["a", "1,000, so", "", "2"]);
    }
}
