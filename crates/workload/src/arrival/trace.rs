//! How a rate goes up and down with time, as a factor of the rate that was asked for.
//!
//! ```text
//! constant                     1 throughout
//! steps:1,2,0.5                equal parts of the run
//! sine:PERIOD[:LOW]            from LOW (0) to 1 and back within PERIOD seconds
//! hockey-stick:AT:HIGH         1, then from AT seconds on rising steadily to HIGH at the end
//! spike:AT:FOR:HIGH            1, but HIGH for FOR seconds from AT on
//! world-cup[:HIGH]             a match day: quiet, rising to the match, HIGH (4) at its peak, falling back
//! FILE.csv                     lines `seconds,factor`; each holds until the next
//! ```
//! A trace is a list of pieces of equal rate, so that a schedule can be stretched through it exactly: the n-th
//! transaction falls due when the area under the trace has grown to its place ([`Trace::advance`]).

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// Pieces that a curve is cut into.
const PIECES: u32 = 600;

/// The most lines that are read of a file.
const MAX_LINES: usize = 1_000_000;

/// What a trace looks like, before it is known how long the run is.
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
    /// One rate throughout.
    pub fn constant() -> Shape {
        Shape { text: "constant".to_owned(), form: Form::Constant }
    }

    /// The trace of a run of this length.
    pub(crate) fn over(&self, seconds: f64) -> Trace {
        let curve = |factor: &dyn Fn(f64) -> f64| {
            let width = seconds / f64::from(PIECES);
            // The middle of a piece stands for it.
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

/// The shape of requests over a match day (Arlitt and Jin's World Cup trace, as ShuttleDB 6.4 uses it), from 0 to 1: a low
/// plateau, a rise of a sixth of the time, a dip at half-time, a second, higher peak, and a fall that takes longer
/// than the rise.
fn match_day(part: f64) -> f64 {
    const POINTS: [(f64, f64); 8] =
        [(0.0, 0.0), (0.3, 0.0), (0.45, 0.7), (0.5, 0.85), (0.53, 0.7), (0.6, 1.0), (0.65, 0.9), (0.9, 0.0)];
    let after = POINTS.iter().position(|(at, _)| *at > part).unwrap_or(POINTS.len());
    let Some((to, high)) = POINTS.get(after) else { return 0.0 };
    let (from, low) = POINTS[after.saturating_sub(1)];
    low + (high - low) * (part - from) / (to - from)
}

/// A factor for every moment of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trace {
    /// From when, in seconds since the start, and how much. The first begins at zero, the last holds for ever.
    pieces: Vec<(f64, f64)>,
}

impl Trace {
    /// When the area under the trace has grown by `area` since `from`, where `piece` is where it was found last. `None`:
    /// never.
    pub(crate) fn advance(&self, from: f64, area: f64, piece: &mut usize) -> Option<f64> {
        let (mut at, mut missing) = (from, area);
        loop {
            let (_, factor) = *self.pieces.get(*piece)?;
            let next = self.pieces.get(*piece + 1).map_or(f64::INFINITY, |(begin, _)| *begin);
            let here = (next - at).max(0.0) * factor;
            // Infinite time at factor zero is no area at all, and not a number.
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

    /// The mean factor between two moments.
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

/// A trace that could not be understood.
#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    /// No such form.
    #[error(
        "{0:?} is no trace; write constant, steps:1,2,.., sine:PERIOD[:LOW], hockey-stick:AT:HIGH, spike:AT:FOR:HIGH, \
         world-cup[:HIGH] or a file that ends in .csv, with times in seconds and factors from 0 to 1000"
    )]
    Form(String),
    /// A file that cannot be read.
    #[error("cannot read the trace {0}: {1}")]
    File(String, std::io::Error),
    /// A line that is none.
    #[error(
        "line {line} of the trace {file} is not `seconds,factor`, with times that rise from 0 and factors from 0 to 1000"
    )]
    Line {
        /// The file.
        file: String,
        /// From 1.
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

/// The points of a file; a first line without digits is its heading.
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
        let least = points.last().map_or(0.0, |(before, _)| *before);
        let in_order = if points.is_empty() { at == 0.0 } else { at > least && at.is_finite() };
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
        text.parse::<Shape>().unwrap().over(seconds)
    }

    #[test]
    fn a_schedule_is_stretched_by_the_area() {
        let steps = trace("steps:1,0,2", 30.0);
        let mut piece = 0;
        assert_eq!(steps.advance(0.0, 5.0, &mut piece), Some(5.0));
        assert_eq!(
            steps.advance(5.0, 9.0, &mut piece),
            Some(22.0),
            "5 at once, nothing for 10 s, 4 at twice the rate"
        );
        assert_eq!(steps.advance(22.0, 1.0, &mut piece), Some(22.5));
        assert_eq!(steps.advance(22.5, 1000.0, &mut piece), Some(522.5), "the last piece holds");
        assert_eq!(trace("steps:1,0", 10.0).advance(0.0, 6.0, &mut 0), None);
    }

    #[test]
    fn means_are_areas() {
        assert_eq!(trace("spike:10:5:3", 30.0).mean(0.0, 30.0), 40.0 / 30.0);
        assert_eq!(trace("constant", 30.0).mean(7.0, 9.0), 1.0);
        assert!((trace("sine:30", 30.0).mean(0.0, 30.0) - 0.5).abs() < 1e-3);
        assert!((trace("sine:15:0.5", 30.0).mean(0.0, 30.0) - 0.75).abs() < 1e-3);
        assert!((trace("hockey-stick:10:5", 30.0).mean(10.0, 30.0) - 3.0).abs() < 1e-3);
        assert_eq!(trace("hockey-stick:10:5", 30.0).mean(0.0, 9.0), 1.0);
    }

    #[test]
    fn a_match_day_begins_and_ends_quietly() {
        let day = trace("world-cup:5", 1000.0);
        assert!((day.mean(0.0, 300.0) - 1.0).abs() < 1e-9 && (day.mean(900.0, 1000.0) - 1.0).abs() < 1e-9);
        assert!(day.mean(595.0, 605.0) > 4.8);
        assert!(day.mean(525.0, 535.0) < day.mean(495.0, 505.0), "half-time");
    }

    #[test]
    fn files_are_read_and_bad_lines_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("day.csv");
        let parse = |text: &str| {
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().parse::<Shape>()
        };
        let day = parse("seconds,factor\n0,1\n60, 2.5\n\n90,0\n").unwrap().over(120.0);
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
    fn nonsense_is_refused() {
        for text in
            ["", "steps:", "steps:1,-1", "sine:0", "sine:9:2", "spike:1:1", "world-cup:x", "steps:nan"]
        {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
        assert_eq!("spike:10:5:3".parse::<Shape>().unwrap().to_string(), "spike:10:5:3");
    }
}
