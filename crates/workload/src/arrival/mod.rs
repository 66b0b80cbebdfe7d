//! When transactions are to start.
//!
//! - **Closed loop**: a terminal has one transaction under way, always. What the server can do is measured, and a
//!   stall of the server stops the load along with it.
//! - **Poisson**: transactions fall due at random moments, whatever the server does. A terminal that is late runs
//!   what is overdue at once; latency counts from the moment that a transaction was due, so that a stall cannot hide.
//! - **Schedule** (Karyakin's thesis, 4.2.3): as Poisson, but the pauses between two transactions of one kind are at
//!   most ten means long, and a transaction that could not be started within a tolerance is cancelled and
//!   counted. The tolerance is 1 s for what is bound by the processor, 5 s for what is bound by a disk.
//!
//! In both open loops each terminal has a schedule for each kind of transaction, in absolute times, and runs what is due
//! first (the thesis's figure 9): all terminals and kinds together come to the rate. Timers are good to a millisecond.

mod trace;

use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rand::RngExt;

pub(crate) use self::trace::Trace;
pub use self::trace::{Shape, ShapeError};
use crate::workload::{Kind, Random};

/// The longest pause of the thesis's schedule, in means.
const LONGEST_PAUSE: f64 = 10.0;

/// When transactions start.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// One after the other.
    Closed,
    /// At random moments.
    Open {
        /// Transactions per second over all tenants, where the trace's factor is 1.
        rate_tps: f64,
        /// The rate over time, warm-up included.
        shape: Shape,
        /// The thesis's schedule: how late a transaction may start. `None`: Poisson, and none is ever cancelled.
        tolerance: Option<Duration>,
    },
}

impl Arrival {
    /// A steady Poisson stream.
    pub fn poisson(rate_tps: f64) -> Arrival {
        Arrival::Open { rate_tps, shape: Shape::constant(), tolerance: None }
    }
}

impl fmt::Display for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Arrival::Open { rate_tps, shape, tolerance } = self else { return write!(f, "closed loop") };
        match tolerance {
            None => write!(f, "Poisson, {rate_tps} transactions/s, {shape}"),
            Some(tolerance) => {
                write!(f, "schedule, {rate_tps} transactions/s, {shape}, tolerance {tolerance:?}")
            }
        }
    }
}

/// What an open loop offers, to all terminals of a run.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) starts: Instant,
    pub(crate) trace: Trace,
    pub(crate) tolerance: Option<Duration>,
}

/// The schedules of one terminal: one for each kind of transaction.
pub(crate) struct Schedule {
    offer: Rc<Offer>,
    random: Random,
    kinds: Vec<Line>,
}

/// When the transactions of a kind are due.
struct Line {
    /// Per second, where the trace's factor is 1.
    rate: f64,
    /// The next one, in seconds since the start; infinite if there is none.
    next_s: f64,
    /// Where in the trace that is.
    piece: usize,
}

impl Schedule {
    /// For a terminal that is to get `rate` transactions a second of all these kinds.
    pub(crate) fn new(offer: Rc<Offer>, rate: f64, kinds: &[Kind], random: Random) -> Schedule {
        let total: f64 = kinds.iter().map(|kind| kind.weight).sum();
        let line = |kind: &Kind| Line { rate: rate * kind.weight / total, next_s: 0.0, piece: 0 };
        let mut schedule = Schedule { offer, random, kinds: kinds.iter().map(line).collect() };
        (0..kinds.len()).for_each(|kind| schedule.advance(kind));
        schedule
    }

    /// The kind of the next transaction, and when it is due; `None` if no more will be.
    pub(crate) fn next(&mut self) -> Option<(usize, Instant)> {
        let earliest = |(_, a): &(usize, &Line), (_, b): &(usize, &Line)| a.next_s.total_cmp(&b.next_s);
        let (kind, line) = self.kinds.iter().enumerate().min_by(earliest)?;
        let due = self.offer.starts.checked_add(Duration::try_from_secs_f64(line.next_s).ok()?)?;
        self.advance(kind);
        Some((kind, due))
    }

    /// Only absolute times are used, so that no schedule drifts with what the server or the driver takes.
    fn advance(&mut self, kind: usize) {
        let pause = -(1.0 - self.random.random::<f64>()).ln();
        let pause = if self.offer.tolerance.is_some() { pause.min(LONGEST_PAUSE) } else { pause };
        let line = &mut self.kinds[kind];
        let next = self.offer.trace.advance(line.next_s, pause / line.rate, &mut line.piece);
        line.next_s = next.unwrap_or(f64::INFINITY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::generator;

    const KINDS: [Kind; 2] = [Kind { name: "often", weight: 9.0 }, Kind { name: "seldom", weight: 1.0 }];

    fn schedule(shape: &str, tolerance: Option<Duration>, seconds: f64) -> Vec<(usize, f64)> {
        let trace = shape.parse::<Shape>().unwrap().over(seconds);
        let starts = Instant::now();
        let offer = Rc::new(Offer { starts, trace, tolerance });
        let mut schedule = Schedule::new(offer, 100.0, &KINDS, generator(1, &[]));
        let mut dues = Vec::new();
        while let Some((kind, due)) = schedule.next() {
            let at = (due - starts).as_secs_f64();
            if at > seconds {
                break;
            }
            dues.push((kind, at));
        }
        dues
    }

    #[test]
    fn all_kinds_together_come_to_the_rate_in_order() {
        let dues = schedule("constant", None, 1000.0);
        // Standard deviation 316.
        assert!((98_500..101_500).contains(&dues.len()), "{}", dues.len());
        let seldom = dues.iter().filter(|(kind, _)| *kind == 1).count();
        assert!((9_600..10_400).contains(&seldom), "{seldom}");
        assert!(dues.is_sorted_by_key(|(_, at)| *at));
    }

    #[test]
    fn pauses_have_the_shape_of_the_theory() {
        let dues = schedule("constant", None, 10_000.0);
        let seldom: Vec<f64> = dues.iter().filter(|(kind, _)| *kind == 1).map(|(_, at)| *at).collect();
        let pauses: Vec<f64> = seldom.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // The mean is 0.1 s. Of exponential pauses exp(-x) are longer than x means.
        for means in [0.5_f64, 1.0, 2.0, 4.0] {
            let longer = pauses.iter().filter(|pause| **pause > means * 0.1).count() as f64;
            let share = longer / pauses.len() as f64;
            assert!((share - (-means).exp()).abs() < 0.005, "{means}: {share}");
        }
    }

    #[test]
    fn the_thesis_schedule_pauses_for_ten_means_at_most() {
        let dues = schedule("constant", Some(Duration::from_secs(1)), 20_000.0);
        let seldom: Vec<f64> = dues.iter().filter(|(kind, _)| *kind == 1).map(|(_, at)| *at).collect();
        let longest = seldom.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
        assert!((0.999..=1.0 + 1e-9).contains(&longest), "of 200,000, about nine reach the cap: {longest}");
    }

    #[test]
    fn a_trace_moves_the_load() {
        let dues = schedule("steps:1,0,3", None, 300.0);
        let within = |from: f64, to: f64| dues.iter().filter(|(_, at)| (from..to).contains(at)).count();
        assert!((9_500..10_500).contains(&within(0.0, 100.0)));
        assert_eq!(within(100.0, 200.0), 0);
        assert!((29_000..31_000).contains(&within(200.0, 300.0)));
    }
}
