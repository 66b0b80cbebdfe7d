//! Load traces: the rate over time as a factor of the requested rate.
//!
//! ```text
//! constant                 factor 1 throughout
//! steps:1,2,0.5            the run in equal parts, one factor each
//! sine:PERIOD[:LOW]        from LOW (default 0) to 1 and back, once per PERIOD seconds
//! hockey-stick:AT:HIGH     1 until AT seconds, then a linear rise to HIGH at the end
//! spike:AT:FOR:HIGH        1, except HIGH for FOR seconds from AT
//! world-cup[:HIGH]         a match day: a plateau, a rise to a peak of HIGH (default 4), a fall
//! FILE.csv                 lines of `seconds,factor`; each factor holds until the next line
//! ```
//!
//! A trace is a list of pieces of constant rate. [`Trace::advance`] can therefore stretch a
//! schedule through it exactly: the n-th transaction is due when the area under the trace has
//! reached its position.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// Number of pieces that approximate a curve.
const PIECES: u32 = 600;

/// The maximum number of lines that are read from a file.
const MAX_LINES: usize = 1_000_000;

/// The shape of a trace, independent of the length of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    text: String,
    form: Form,
}

#[derive(Clone, Debug, PartialEq)]
enum Form {
    Constant,
    Steps(Vec<f64>),
    Sine { period_s: f64, low: f64 },
    HockeyStick { at_s: f64, high: f64 },
    Spike { at_s: f64, for_s: f64, high: f64 },
    WorldCup { high: f64 },
    Points(Vec<(f64, f64)>),
}

impl Shape {
    /// Factor 1 throughout.
    pub fn constant() -> Shape {
        Shape { text: "constant".to_owned(), form: Form::Constant }
    }

    /// Returns the trace of a run of `seconds`.
    pub(crate) fn trace(&self, seconds: f64) -> Trace {
        let curve = |factor: &dyn Fn(f64) -> f64| {
            let width = seconds / f64::from(PIECES);
            // Each piece has the factor at its middle.
            (0..PIECES)
                .map(|piece| f64::from(piece) * width)
                .map(|begin| (begin, factor(begin + width / 2.0)))
                .collect::<Vec<_>>()
        };
        let pieces = match &self.form {
            Form::Constant => vec![(0.0, 1.0)],
            Form::Steps(factors) => {
                let width = seconds / factors.len() as f64;
                factors.iter().enumerate().map(|(step, factor)| (step as f64 * width, *factor)).collect()
            }
            Form::Sine { period_s, low } => curve(&|at| {
                let wave = (1.0 - (at / period_s * std::f64::consts::TAU).cos()) / 2.0;
                low + (1.0 - low) * wave
            }),
            Form::HockeyStick { at_s, high } => curve(&|at| {
                1.0 + (high - 1.0) * ((at - at_s) / (seconds - at_s).max(f64::MIN_POSITIVE)).max(0.0)
            }),
            Form::Spike { at_s, for_s, high } => vec![(0.0, 1.0), (*at_s, *high), (at_s + for_s, 1.0)],
            Form::WorldCup { high } => curve(&|at| 1.0 + (high - 1.0) * match_day(at / seconds)),
            Form::Points(points) => points.clone(),
        };
        Trace { pieces }
    }
}

/// The shape of the request rate over a match day (Arlitt and Jin's World Cup trace, as used in
/// ShuttleDB 6.4), scaled to 0 to 1: a low plateau, a rise over a sixth of the time, a dip at
/// half-time, a second and higher peak, and a fall that takes longer than the rise.
fn match_day(part: f64) -> f64 {
    const POINTS: [(f64, f64); 8] =
        [(0.0, 0.0), (0.3, 0.0), (0.45, 0.7), (0.5, 0.85), (0.53, 0.7), (0.6, 1.0), (0.65, 0.9), (0.9, 0.0)];
    let after = POINTS.iter().position(|(at, _)| *at > part).unwrap_or(POINTS.len());
    let Some((to, high)) = POINTS.get(after) else { return 0.0 };
    let (from, low) = POINTS[after.saturating_sub(1)];
    low + (high - low) * (part - from) / (to - from)
}

/// The factor at every time of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trace {
    /// Pairs of start time, in seconds since the start of the run, and factor. The first piece
    /// starts at zero and the last one never ends.
    pieces: Vec<(f64, f64)>,
}

impl Trace {
    /// Returns the time at which the area under the trace since `from` reaches `area`, or `None` if
    /// it never does. `piece` is the index of the piece at which the previous call stopped; the
    /// call updates it.
    pub(crate) fn advance(&self, from: f64, area: f64, piece: &mut usize) -> Option<f64> {
        let (mut at, mut missing) = (from, area);
        loop {
            let (_, factor) = *self.pieces.get(*piece)?;
            let next = self.pieces.get(*piece + 1).map_or(f64::INFINITY, |(begin, _)| *begin);
            let here = (next - at).max(0.0) * factor;
            // At factor zero the area is zero. An infinite duration times zero would be NaN.
            if factor > 0.0 && here >= missing {
                return Some(at + missing / factor);
            }
            if factor > 0.0 {
                missing -= here;
            }
            at = at.max(next);
            *piece += 1;
        }
    }

    /// The mean factor between `from` and `to`, in seconds since the start.
    pub(crate) fn mean(&self, from: f64, to: f64) -> f64 {
        let ends = self.pieces.iter().skip(1).map(|(begin, _)| *begin).chain([f64::INFINITY]);
        let area = self
            .pieces
            .iter()
            .zip(ends)
            .map(|((begin, factor), end)| (end.min(to) - begin.max(from)).max(0.0) * factor);
        area.sum::<f64>() / (to - from)
    }
}

/// Why a trace could not be parsed.
#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    /// The text names no known form.
    #[error(
        "invalid trace {0:?}; use constant, steps:1,2,.., sine:PERIOD[:LOW], hockey-stick:AT:HIGH, \
         spike:AT:FOR:HIGH, world-cup[:HIGH] or the name of a .csv file; times are in seconds and \
         factors between 0 and 1000"
    )]
    Form(String),
    /// The file cannot be read.
    #[error("could not read trace file {0}: {1}")]
    File(String, std::io::Error),
    /// A line of the file is invalid.
    #[error(
        "{file}, line {line}: expected `seconds,factor`; seconds must start at 0 and increase, \
         and factors must be between 0 and 1000"
    )]
    Line {
        /// The file.
        file: String,
        /// The line number, from 1.
        line: usize,
    },
}

impl FromStr for Shape {
    type Err = ShapeError;

    fn from_str(text: &str) -> Result<Shape, ShapeError> {
        let form = match text.ends_with(".csv") {
            true => Form::Points(read(text)?),
            false => form(text).ok_or_else(|| ShapeError::Form(text.to_owned()))?,
        };
        Ok(Shape { text: text.to_owned(), form })
    }
}

fn form(text: &str) -> Option<Form> {
    let parts: Vec<&str> = text.split(':').collect();
    let time = |text: &str| text.parse::<f64>().ok().filter(|time| (0.0..=1e9).contains(time));
    Some(match parts[..] {
        ["constant"] => Form::Constant,
        ["steps", factors] => Form::Steps(factors.split(',').map(factor).collect::<Option<_>>()?),
        ["sine", period] => Form::Sine { period_s: time(period).filter(|period| *period > 0.0)?, low: 0.0 },
        ["sine", period, low] => Form::Sine {
            period_s: time(period).filter(|period| *period > 0.0)?,
            low: factor(low).filter(|low| *low <= 1.0)?,
        },
        ["hockey-stick", at, high] => Form::HockeyStick { at_s: time(at)?, high: factor(high)? },
        ["spike", at, length, high] => {
            Form::Spike { at_s: time(at)?, for_s: time(length)?, high: factor(high)? }
        }
        ["world-cup"] => Form::WorldCup { high: 4.0 },
        ["world-cup", high] => Form::WorldCup { high: factor(high)? },
        _ => return None,
    })
}

fn factor(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|factor| (0.0..=1000.0).contains(factor))
}

/// Reads the points of a file. A first line without digits is a header and is skipped.
fn read(file: &str) -> Result<Vec<(f64, f64)>, ShapeError> {
    let text =
        std::fs::read_to_string(Path::new(file)).map_err(|error| ShapeError::File(file.to_owned(), error))?;
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let heading = number == 0 && !line.contains(|c: char| c.is_ascii_digit());
        if heading || line.trim().is_empty() {
            continue;
        }
        let bad = || ShapeError::Line { file: file.to_owned(), line: number + 1 };
        let (at, height) = line.split_once(',').ok_or_else(bad)?;
        let at: f64 = at.trim().parse().map_err(|_| bad())?;
        let previous_s = points.last().map_or(0.0, |(before, _)| *before);
        let in_order = if points.is_empty() { at == 0.0 } else { at > previous_s && at.is_finite() };
        if !in_order || points.len() >= MAX_LINES {
            return Err(bad());
        }
        points.push((at, factor(height).ok_or_else(bad)?));
    }
    match points.is_empty() {
        true => Err(ShapeError::Line { file: file.to_owned(), line: 1 }),
        false => Ok(points),
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(text: &str, seconds: f64) -> Trace {
        text.parse::<Shape>().unwrap().trace(seconds)
    }

    #[test]
    fn advance_stretches_a_schedule_by_the_area() {
        let steps = trace("steps:1,0,2", 30.0);
        let mut piece = 0;
        assert_eq!(steps.advance(0.0, 5.0, &mut piece), Some(5.0));
        assert_eq!(
            steps.advance(5.0, 9.0, &mut piece),
            Some(22.0),
            "area 5 in the first piece, 10 s at factor 0, then area 4 at factor 2"
        );
        assert_eq!(steps.advance(22.0, 1.0, &mut piece), Some(22.5));
        assert_eq!(steps.advance(22.5, 1000.0, &mut piece), Some(522.5), "the last factor holds forever");
        assert_eq!(trace("steps:1,0", 10.0).advance(0.0, 6.0, &mut 0), None);
    }

    #[test]
    fn mean_is_area_over_time() {
        assert_eq!(trace("spike:10:5:3", 30.0).mean(0.0, 30.0), 40.0 / 30.0);
        assert_eq!(trace("constant", 30.0).mean(7.0, 9.0), 1.0);
        assert!((trace("sine:30", 30.0).mean(0.0, 30.0) - 0.5).abs() < 1e-3);
        assert!((trace("sine:15:0.5", 30.0).mean(0.0, 30.0) - 0.75).abs() < 1e-3);
        assert!((trace("hockey-stick:10:5", 30.0).mean(10.0, 30.0) - 3.0).abs() < 1e-3);
        assert_eq!(trace("hockey-stick:10:5", 30.0).mean(0.0, 9.0), 1.0);
    }

    #[test]
    fn match_day_starts_and_ends_at_the_base_rate() {
        let day = trace("world-cup:5", 1000.0);
        assert!((day.mean(0.0, 300.0) - 1.0).abs() < 1e-9 && (day.mean(900.0, 1000.0) - 1.0).abs() < 1e-9);
        assert!(day.mean(595.0, 605.0) > 4.8);
        assert!(day.mean(525.0, 535.0) < day.mean(495.0, 505.0), "the rate must dip at half-time");
    }

    #[test]
    fn errors_in_files_name_the_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("day.csv");
        let parse = |text: &str| {
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().parse::<Shape>()
        };
        let day = parse("seconds,factor\n0,1\n60, 2.5\n\n90,0\n").unwrap().trace(120.0);
        assert_eq!(day.mean(0.0, 90.0), (60.0 + 75.0) / 90.0);
        for (text, line) in
            [("0,1\n0,2", "line 2"), ("5,1", "line 1"), ("0,1\n1,x", "line 2"), ("", "line 1")]
        {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(line), "{text:?}: {error}");
        }
        assert!("nowhere.csv".parse::<Shape>().unwrap_err().to_string().contains("nowhere.csv"));
    }

    #[test]
    fn invalid_traces_are_rejected() {
        for text in
            ["", "steps:", "steps:1,-1", "sine:0", "sine:9:2", "spike:1:1", "world-cup:x", "steps:nan"]
        {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
        assert_eq!("spike:10:5:3".parse::<Shape>().unwrap().to_string(), "spike:10:5:3");
    }
}
