//! The results of cases, and their output as a table, as lines and as JSON.

use std::fmt::Write;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

use super::cases::{Case, case};
use crate::measure::Spread;

/// The required result of a case (set by the issue that introduced the case).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The ratio or value must be at least this.
    AtLeast(f64),
    /// The ratio or value must be at most this.
    AtMost(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Bound::AtLeast(least) => value >= least,
            Bound::AtMost(most) => value <= most,
        }
    }

    fn text(self) -> String {
        match self {
            Bound::AtLeast(least) => format!(">= {}", decimal(least)),
            Bound::AtMost(most) => format!("<= {}", decimal(most)),
        }
    }
}

/// What Fulmar is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Peer {
    /// PostgreSQL.
    Postgres,
    /// Another build of Fulmar, usually an earlier one.
    Before,
}

/// The ratio to another build must be at least this, or at most its inverse if less is better. The
/// remaining 5 % allow for noise.
const MIN_RATIO_TO_BASELINE: f64 = 0.95;

impl Peer {
    /// The name in tables and messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Peer::Postgres => "postgres",
            Peer::Before => "before",
        }
    }

    /// The bound for the ratio of a case.
    fn bound(self, case: &Case) -> Bound {
        match (self, case.must_be) {
            (Peer::Postgres, bound) => bound,
            (Peer::Before, Bound::AtLeast(_)) => Bound::AtLeast(MIN_RATIO_TO_BASELINE),
            (Peer::Before, Bound::AtMost(_)) => Bound::AtMost(1.0 / MIN_RATIO_TO_BASELINE),
        }
    }
}

/// The outcome of a case.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Both servers were measured.
    Ratio {
        /// Fulmar's measurements.
        fulmar: Spread,
        /// The peer.
        peer: Peer,
        /// The peer's measurements.
        of_peer: Spread,
        /// Fulmar's median divided by the peer's.
        ratio: f64,
    },
    /// Only Fulmar was measured.
    Value {
        /// Fulmar's measurements.
        value: Spread,
    },
    /// The case could not be measured, or a server returned an error to a client.
    Failed {
        /// The error.
        reason: String,
    },
}

/// A case and its result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseResult {
    /// The name of the case.
    pub name: &'static str,
    /// What is measured.
    pub what: &'static str,
    /// The unit of the measurements. A ratio has none.
    pub unit: &'static str,
    /// The required result.
    pub must_be: Bound,
    /// The outcome.
    pub outcome: Outcome,
    /// True if the outcome is within the bound.
    pub holds: bool,
    /// Additional observations.
    pub notes: Vec<String>,
}

impl CaseResult {
    pub(super) fn ratio(case: &Case, fulmar: Vec<f64>, peer: Peer, of_peer: Vec<f64>) -> CaseResult {
        match (Spread::of(fulmar), Spread::of(of_peer)) {
            (Some(fulmar), Some(of_peer)) => CaseResult::of_both(case, fulmar, peer, of_peer),
            _ => CaseResult::failed(case, "no measurements"),
        }
    }

    fn of_both(case: &Case, fulmar: Spread, peer: Peer, of_peer: Spread) -> CaseResult {
        if of_peer.median <= 0.0 {
            return CaseResult::failed(case, format!("the measurement of {} is zero", peer.name()));
        }
        let (ratio, must_be) = (fulmar.median / of_peer.median, peer.bound(case));
        let outcome = Outcome::Ratio { fulmar, peer, of_peer, ratio };
        CaseResult { must_be, ..CaseResult::new(case, outcome, must_be.holds(ratio)) }
    }

    /// Combines the values of this build and of another one into a ratio.
    pub(super) fn over(self, before: CaseResult) -> CaseResult {
        let case = case(self.name);
        match (self.outcome, before.outcome) {
            (Outcome::Value { value }, Outcome::Value { value: of_peer }) => {
                let notes =
                    self.notes.into_iter().chain(before.notes.iter().map(|note| format!("before: {note}")));
                CaseResult {
                    notes: notes.collect(),
                    ..CaseResult::of_both(case, value, Peer::Before, of_peer)
                }
            }
            (_, Outcome::Failed { reason }) => CaseResult::failed(case, format!("before: {reason}")),
            (outcome, _) => CaseResult { outcome, holds: false, ..self },
        }
    }

    pub(super) fn value(case: &Case, rounds: Vec<f64>) -> CaseResult {
        let Some(value) = Spread::of(rounds) else {
            return CaseResult::failed(case, "no measurements");
        };
        let holds = case.must_be.holds(value.median);
        CaseResult::new(case, Outcome::Value { value }, holds)
    }

    pub(super) fn failed(case: &Case, reason: impl Into<String>) -> CaseResult {
        CaseResult::new(case, Outcome::Failed { reason: reason.into() }, false)
    }

    fn new(case: &Case, outcome: Outcome, holds: bool) -> CaseResult {
        let Case { name, what, unit, must_be, .. } = *case;
        CaseResult { name, what, unit, must_be, outcome, holds, notes: Vec::new() }
    }

    pub(super) fn with_note(mut self, note: impl Into<String>) -> CaseResult {
        self.notes.push(note.into());
        self
    }

    /// Returns true if the case could not be measured.
    pub fn is_failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed { .. })
    }

    /// The result as one line, for scripts.
    pub fn line(&self) -> String {
        let name = self.name;
        match &self.outcome {
            Outcome::Ratio { fulmar, peer, of_peer, ratio } => {
                let (fulmar, of_peer) = (decimal(fulmar.median), decimal(of_peer.median));
                let peer = peer.name();
                format!("case {name} fulmar {fulmar} {peer} {of_peer} ratio {ratio:.3}")
            }
            Outcome::Value { value } => format!("case {name} value {}", decimal(value.median)),
            Outcome::Failed { reason } => format!("case {name} failed {}", reason.replace('\n', " | ")),
        }
    }
}

/// The results as a table, followed by the notes and one line per case.
pub fn text(results: &[CaseResult]) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    let peer = results.iter().find_map(|result| match result.outcome {
        Outcome::Ratio { peer, .. } => Some(peer),
        _ => None,
    });
    let of_peer = format!("{} (min-max)", peer.unwrap_or(Peer::Postgres).name());
    table.set_header(["case", "unit", "fulmar (min-max)", &of_peer, "ratio", "must be", ""]);
    for result in results {
        let (fulmar, of_peer, ratio) = match &result.outcome {
            Outcome::Ratio { fulmar, of_peer, ratio, .. } => {
                (range(fulmar), range(of_peer), format!("{ratio:.3}"))
            }
            Outcome::Value { value } => (range(value), String::new(), String::new()),
            Outcome::Failed { .. } => ("failed".to_owned(), String::new(), String::new()),
        };
        let verdict = if result.holds { "holds" } else { "MISSED" };
        let right = |text| Cell::new(text).set_alignment(CellAlignment::Right);
        table.add_row([
            Cell::new(result.name),
            Cell::new(result.unit),
            right(fulmar),
            right(of_peer),
            right(ratio),
            right(result.must_be.text()),
            Cell::new(verdict),
        ]);
    }
    let mut text = format!("{table}\n");
    for result in results {
        for note in &result.notes {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{}: {note}", result.name);
        }
    }
    for result in results {
        let _ = writeln!(text, "{}", result.line());
    }
    text
}

fn range(spread: &Spread) -> String {
    format!("{} ({}-{})", decimal(spread.median), decimal(spread.min), decimal(spread.max))
}

/// Formats a number with two decimals, or more for small and none for large values.
fn decimal(value: f64) -> String {
    let decimals = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 1.0 => 2,
        _ => 4,
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::case;
    use super::*;

    #[test]
    fn ratio_uses_medians() {
        let result = CaseResult::ratio(
            case("read-8"),
            vec![90.0, 120.0, 400.0],
            Peer::Postgres,
            vec![100.0, 1.0, 101.0],
        );
        assert_eq!(result.line(), "case read-8 fulmar 120 postgres 100 ratio 1.200");
        assert!(result.holds, "1.2 satisfies the bound of at least 1.1");
        let json = serde_json::to_value(&result).unwrap();
        assert_eq!(json["outcome"]["ratio"]["fulmar"]["max"], 400.0);
        assert_eq!(json["must_be"]["at_least"], 1.1);
    }

    #[test]
    fn upper_bounds_are_checked() {
        let result = |fulmar| CaseResult::ratio(case("cpu-read-8"), vec![fulmar], Peer::Postgres, vec![10.0]);
        assert!(result(6.0).holds && !result(6.1).holds);
        let value = CaseResult::value(case("restart-ms"), vec![1500.0, 2500.0, 1700.4]);
        assert_eq!(value.line(), "case restart-ms value 1700");
        assert!(value.holds);
    }

    #[test]
    fn unmeasurable_cases_fail() {
        for result in [
            CaseResult::ratio(case("read-1"), vec![1.0], Peer::Postgres, vec![0.0]),
            CaseResult::ratio(case("read-1"), vec![], Peer::Postgres, vec![1.0]),
            CaseResult::value(case("restart-ms"), vec![f64::NAN]),
        ] {
            assert!(result.is_failed() && !result.holds);
        }
        let result = CaseResult::failed(case("tpcb-8"), "pgbench:\n3 transactions failed");
        assert_eq!(result.line(), "case tpcb-8 failed pgbench: | 3 transactions failed");
        assert!(text(&[result]).contains("MISSED"));
    }

    #[test]
    fn build_comparison_tolerates_five_percent() {
        let holds =
            |name, fulmar| CaseResult::ratio(case(name), vec![fulmar], Peer::Before, vec![100.0]).holds;
        assert!(holds("read-8", 95.0) && !holds("read-8", 94.0), "the ratio must be at least 0.95");
        assert!(
            holds("cpu-read-8", 105.0) && !holds("cpu-read-8", 106.0),
            "the ratio must be at most 1 / 0.95"
        );

        let value = |value, note| CaseResult::value(case("restart-ms"), vec![value]).with_note(note);
        let result = value(1800.0, "now").over(value(2000.0, "then"));
        assert_eq!(result.line(), "case restart-ms fulmar 1800 before 2000 ratio 0.900");
        assert!(result.holds && result.notes == ["now", "before: then"], "{result:?}");
        assert!(text(&[result]).contains("before (min-max)"));

        let failed = || CaseResult::failed(case("restart-ms"), "no disk");
        assert_eq!(failed().over(value(1.0, "")).line(), "case restart-ms failed no disk");
        assert_eq!(value(1.0, "").over(failed()).line(), "case restart-ms failed before: no disk");
    }

    #[test]
    fn numbers_are_formatted_briefly() {
        let numbers = [12_345.6, 100.0, 40.0, 1.5, 0.25, 1.0 / 3.0, 0.0, 1200.0];
        let texts = numbers.map(decimal);
        assert_eq!(texts, ["12346", "100", "40", "1.5", "0.25", "0.3333", "0", "1200"]);
    }
}
