//! Load traces: the load at every minute as a share of the highest.
//!
//! name | load at time `t`
//! --- | ---
//! `sine` | `0.2 + 0.8 (1 - cos(2 pi t / 24 h)) / 2`
//! `worldcup` | a daily cycle with match spikes, see below
//! `steps` | 0.3, 0.6, 1, 0.5, 0.8, 0.2 of the peak, each for a sixth of the time
//! `hockey-stick` | 0.3 until two thirds of the time, then a linear rise to 1
//! `spike` | 0.3, except 1 for 30 minutes from the middle
//! a CSV file | lines of `seconds,load`, interpolated linearly
//!
//! **worldcup** has the shape of the requests to the site of the World Cup of 1998 (Arlitt and Jin;
//! used by ShuttleDB 6.4), made from a formula because the data are not in the repository. On day
//! `d` at the hour `h`:
//!
//! ```text
//! cycle    0.15 + 0.2 (1 - cos(2 pi (h - 4) / 24)) / 2
//! match    from 16:00 on every day, and from 19:30 on every other day, for 5 hours:
//!          0.7 after 60 min, 0.85 at the break, then 0.7, 1 in the second half, and a fall to 0
//! load     cycle + (0.45 + 0.2 (d mod 4) / 3) * match, the higher of two matches, over its maximum
//! ```
//!
//! **Holes.** The interval of a file is its median. A distance of more than twice the interval, or
//! a line without a value, is a hole: the values in it are interpolated, and [`Hole`] reports it.
//! Anything else that is not a number, a negative load, or time that runs backwards is an error.

use serde::Serialize;

/// Seconds of a step of the simulation.
pub const STEP_S: f64 = 60.0;

const DAY_MINUTES: usize = 24 * 60;

/// The traces that are generated, by name.
pub const TRACES: [&str; 5] = ["worldcup", "sine", "steps", "hockey-stick", "spike"];

/// The maximum number of steps: two years of minutes.
pub const MAX_STEPS: usize = 2 * 365 * DAY_MINUTES;

/// A load over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The load of each minute as a share of the highest, from 0 to 1.
    pub load: Vec<f64>,
    /// Steps after which the load is expected to repeat.
    pub period: usize,
    /// What was missing in a file.
    pub holes: Vec<Hole>,
}

/// A hole in a trace file, which was filled by interpolation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Hole {
    /// The line before it.
    pub line: usize,
    /// Its start, in seconds.
    pub from_s: f64,
    /// Its end, in seconds.
    pub to_s: f64,
}

/// An error in a trace.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum TraceError {
    /// The name is none of [`TRACES`].
    #[error("unknown trace \"{0}\"; use {names} or a .csv file", names = TRACES.join(", "))]
    Unknown(String),
    /// A line is not `seconds,load`.
    #[error("line {line}: {rule}")]
    Line {
        /// The line, from 1.
        line: usize,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// The file has fewer than two values, or no load at all.
    #[error("the trace has no load; it needs at least two lines of \"seconds,load\", one of them above 0")]
    Empty,
    /// The file covers too long a time.
    #[error("the trace is longer than two years")]
    TooLong,
}

/// The spike of a match, from 0 to 1, over its five hours.
fn match_spike(minutes: f64) -> f64 {
    const POINTS: [(f64, f64); 8] = [
        (0.0, 0.0),
        (60.0, 0.7),
        (105.0, 0.85),
        (115.0, 0.7),
        (130.0, 0.95),
        (165.0, 1.0),
        (180.0, 0.9),
        (270.0, 0.0),
    ];
    let Some(after) = POINTS.iter().position(|(at, _)| *at > minutes).filter(|after| *after > 0) else {
        return 0.0;
    };
    let ((from, low), (to, high)) = (POINTS[after - 1], POINTS[after]);
    low + (high - low) * (minutes - from) / (to - from)
}

fn world_cup(minute: usize) -> f64 {
    let (day, of_day) = (minute / DAY_MINUTES, (minute % DAY_MINUTES) as f64);
    let angle = std::f64::consts::TAU * (of_day / 60.0 - 4.0) / 24.0;
    let cycle = 0.15 + 0.1 * (1.0 - angle.cos());
    let height = 0.45 + 0.2 * (day % 4) as f64 / 3.0;
    let afternoon = match_spike(of_day - 16.0 * 60.0);
    let evening = if day.is_multiple_of(2) { match_spike(of_day - 19.5 * 60.0) } else { 0.0 };
    cycle + height * afternoon.max(evening)
}

impl Trace {
    /// Generates a trace of a number of minutes.
    pub fn named(name: &str, minutes: usize) -> Result<Trace, TraceError> {
        let minutes = minutes.clamp(2, MAX_STEPS);
        let part = |minute: usize| minute as f64 / minutes as f64;
        let load = |minute: usize| match name {
            "sine" => {
                let angle = std::f64::consts::TAU * minute as f64 / DAY_MINUTES as f64;
                Some(0.2 + 0.4 * (1.0 - angle.cos()))
            }
            "worldcup" => Some(world_cup(minute)),
            "steps" => Some([0.3, 0.6, 1.0, 0.5, 0.8, 0.2][(part(minute) * 6.0) as usize]),
            "hockey-stick" => Some(0.3 + 0.7 * (part(minute) * 3.0 - 2.0).max(0.0)),
            "spike" => Some(if (0..30).contains(&(minute as i64 - minutes as i64 / 2)) { 1.0 } else { 0.3 }),
            _ => None,
        };
        let load: Option<Vec<f64>> = (0..minutes).map(load).collect();
        let load = load.ok_or_else(|| TraceError::Unknown(name.to_owned()))?;
        Ok(Trace { load: scaled(load), period: DAY_MINUTES, holes: Vec::new() })
    }

    /// Reads lines of `seconds,load`. Empty lines and lines that start with `#` are skipped.
    pub fn from_csv(text: &str) -> Result<Trace, TraceError> {
        let mut points: Vec<(usize, f64, f64)> = Vec::new();
        let mut without_value = Vec::new();
        for (line, text) in
            (1..).zip(text.lines()).filter(|(_, text)| !text.is_empty() && !text.starts_with('#'))
        {
            let rule = "expected \"seconds,load\" with two numbers";
            let (at, load) = text.split_once(',').ok_or(TraceError::Line { line, rule })?;
            let at: f64 = at.trim().parse().map_err(|_| TraceError::Line { line, rule })?;
            if !at.is_finite() || points.last().is_some_and(|(_, before, _)| at <= *before) {
                return Err(TraceError::Line {
                    line,
                    rule: "the time must be later than that of the line before",
                });
            }
            if load.trim().is_empty() {
                without_value.push(line);
                continue;
            }
            let load: f64 = load.trim().parse().map_err(|_| TraceError::Line { line, rule })?;
            if !load.is_finite() || load < 0.0 {
                return Err(TraceError::Line { line, rule: "the load must be a number of at least 0" });
            }
            points.push((line, at, load));
        }
        let peak = points.iter().map(|(.., load)| *load).fold(0.0, f64::max);
        let (Some(first), Some(last)) = (points.first(), points.last()) else {
            return Err(TraceError::Empty);
        };
        let (start, seconds) = (first.1, last.1 - first.1);
        if points.len() < 2 || peak == 0.0 {
            return Err(TraceError::Empty);
        }
        if seconds / STEP_S > MAX_STEPS as f64 {
            return Err(TraceError::TooLong);
        }
        let mut intervals: Vec<f64> = points.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
        intervals.sort_by(f64::total_cmp);
        let median = intervals[intervals.len() / 2];
        let holes = points.windows(2).filter_map(|pair| {
            let ((line, from_s, _), (next, to_s, _)) = (pair[0], pair[1]);
            let lacks = without_value.iter().any(|missing| (line..next).contains(missing));
            (lacks || to_s - from_s > 2.0 * median).then_some(Hole { line, from_s, to_s })
        });
        let holes = holes.collect();
        let mut load = Vec::new();
        let mut next = 1;
        for step in 0..=(seconds / STEP_S) as usize {
            let at = start + step as f64 * STEP_S;
            while next + 1 < points.len() && points[next].1 < at {
                next += 1;
            }
            let ((_, from, low), (_, to, high)) = (points[next - 1], points[next]);
            load.push(low + (high - low) * ((at - from) / (to - from)).clamp(0.0, 1.0));
        }
        Ok(Trace { load: scaled(load), period: DAY_MINUTES, holes })
    }
}

/// Divides by the maximum.
fn scaled(mut load: Vec<f64>) -> Vec<f64> {
    let peak = load.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    load.iter_mut().for_each(|load| *load /= peak);
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_between_zero_and_one() {
        for name in TRACES {
            let trace = Trace::named(name, 3 * DAY_MINUTES).expect("it is a trace");
            assert_eq!(trace.load.len(), 3 * DAY_MINUTES);
            assert!(trace.load.iter().all(|load| (0.0..=1.0).contains(load)), "{name}");
            assert!(trace.load.contains(&1.0), "{name} reaches its peak");
        }
        assert!(matches!(Trace::named("cosine", 10), Err(TraceError::Unknown(_))));
    }

    #[test]
    fn files_are_interpolated_and_holes_reported() {
        let trace = Trace::from_csv("# seconds,load\n0,10\n60,20\n120,\n180,40\n240,20\n600,20\n")
            .expect("it is valid");
        assert_eq!(trace.load[..5], [0.25, 0.5, 0.75, 1.0, 0.5]);
        let holes: Vec<(f64, f64)> = trace.holes.iter().map(|hole| (hole.from_s, hole.to_s)).collect();
        assert_eq!(holes, [(60.0, 180.0), (240.0, 600.0)], "a missing value, and a gap of six intervals");
        assert_eq!(trace.load.len(), 11);
    }

    #[test]
    fn damaged_files_are_errors_with_their_line() {
        let line = |text| match Trace::from_csv(text) {
            Err(TraceError::Line { line, .. }) => line,
            other => panic!("{text:?}: {other:?}"),
        };
        assert_eq!(line("0,1\n60;2\n"), 2);
        assert_eq!(line("0,1\n60,two\n"), 2);
        assert_eq!(line("0,1\n60,2\n60,3\n"), 3);
        assert_eq!(line("0,-1\n"), 1);
        assert_eq!(line("0,nan\n"), 1);
        assert_eq!(Trace::from_csv(""), Err(TraceError::Empty));
        assert_eq!(Trace::from_csv("0,0\n60,0\n"), Err(TraceError::Empty));
        assert_eq!(Trace::from_csv("0,1\n1e12,1\n"), Err(TraceError::TooLong));
    }
}
