//! Arrival processes: when the transactions of a run start.
//!
//! - **Closed loop**: each terminal always has exactly one transaction in progress. This measures
//!   the capacity of the server. A stall of the server also stops the load.
//! - **Poisson** (open loop): transactions are due at random times, independent of the server. A
//!   terminal that is behind schedule runs overdue transactions immediately. Latency is measured
//!   from the time at which a transaction was due, so a stall of the server shows in it.
//! - **Schedule** (Karyakin's thesis, 4.2.3; open loop): like Poisson, except that the interval
//!   between two transactions of one kind is at most ten times the mean, and a transaction that
//!   could not start within a tolerance is cancelled and counted. The tolerance is 1 s for
//!   CPU-bound loads and 5 s for disk-bound loads.
//!
//! In both open loops each terminal keeps one schedule of absolute times per kind of transaction
//! and runs the transaction that is due first (the thesis's figure 9). The rates of all terminals
//! and kinds add up to the requested rate. Timers are accurate to 1 ms.

mod trace;

use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rand::RngExt;

pub(crate) use self::trace::Trace;
pub use self::trace::{Shape, ShapeError};
use crate::workload::{Kind, Random};

/// The longest interval of the thesis's schedule, as a multiple of the mean interval.
const MAX_INTERVAL_MEANS: f64 = 10.0;

/// The arrival process of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// Each terminal starts its next transaction when the previous one has finished.
    Closed,
    /// Transactions are due at random times.
    Open {
        /// Transactions per second over all tenants while the trace's factor is 1.
        rate_tps: f64,
        /// The rate over time, including the warm-up.
        shape: Shape,
        /// The thesis's schedule: how late a transaction may start. `None` is Poisson, which never
        /// cancels a transaction.
        tolerance: Option<Duration>,
    },
}

impl Arrival {
    /// A Poisson process with a constant rate.
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

/// The parameters of an open loop, shared by all terminals of a run.
#[derive(Debug)]
pub(crate) struct OpenLoop {
    pub(crate) starts: Instant,
    pub(crate) trace: Trace,
    pub(crate) tolerance: Option<Duration>,
}

/// The schedules of one terminal, one per kind of transaction.
pub(crate) struct Schedule {
    offer: Rc<OpenLoop>,
    random: Random,
    kinds: Vec<KindSchedule>,
}

/// The schedule of one kind of transaction.
struct KindSchedule {
    /// Transactions per second while the trace's factor is 1.
    rate: f64,
    /// When the next transaction is due, in seconds since the start. Infinite if there is none.
    next_s: f64,
    /// The piece of the trace that contains `next_s`.
    piece: usize,
}

impl Schedule {
    /// Creates the schedules of a terminal that runs `rate` transactions per second over all
    /// `kinds`.
    pub(crate) fn new(offer: Rc<OpenLoop>, rate: f64, kinds: &[Kind], random: Random) -> Schedule {
        let total: f64 = kinds.iter().map(|kind| kind.weight).sum();
        let line = |kind: &Kind| KindSchedule { rate: rate * kind.weight / total, next_s: 0.0, piece: 0 };
        let mut schedule = Schedule { offer, random, kinds: kinds.iter().map(line).collect() };
        (0..kinds.len()).for_each(|kind| schedule.advance(kind));
        schedule
    }

    /// Returns the kind of the next transaction and the time at which it is due, or `None` if the
    /// trace has no more transactions.
    pub(crate) fn next(&mut self) -> Option<(usize, Instant)> {
        let earliest =
            |(_, a): &(usize, &KindSchedule), (_, b): &(usize, &KindSchedule)| a.next_s.total_cmp(&b.next_s);
        let (kind, line) = self.kinds.iter().enumerate().min_by(earliest)?;
        let due = self.offer.starts.checked_add(Duration::try_from_secs_f64(line.next_s).ok()?)?;
        self.advance(kind);
        Some((kind, due))
    }

    /// Advances the schedule of `kind` to its next transaction. All times are absolute, so delays
    /// in the server or the driver do not make the schedule drift.
    fn advance(&mut self, kind: usize) {
        let pause = -(1.0 - self.random.random::<f64>()).ln();
        let pause = match self.offer.tolerance {
            Some(_) => pause.min(MAX_INTERVAL_MEANS),
            None => pause,
        };
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
        let trace = shape.parse::<Shape>().unwrap().trace(seconds);
        let starts = Instant::now();
        let offer = Rc::new(OpenLoop { starts, trace, tolerance });
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
    fn rates_of_all_kinds_add_up_and_dues_are_ordered() {
        let dues = schedule("constant", None, 1000.0);
        // Standard deviation 316.
        assert!((98_500..101_500).contains(&dues.len()), "{}", dues.len());
        let seldom = dues.iter().filter(|(kind, _)| *kind == 1).count();
        assert!((9_600..10_400).contains(&seldom), "{seldom}");
        assert!(dues.is_sorted_by_key(|(_, at)| *at));
    }

    #[test]
    fn intervals_are_exponentially_distributed() {
        let dues = schedule("constant", None, 10_000.0);
        let seldom: Vec<f64> = dues.iter().filter(|(kind, _)| *kind == 1).map(|(_, at)| *at).collect();
        let pauses: Vec<f64> = seldom.windows(2).map(|pair| pair[1] - pair[0]).collect();
        // The mean interval is 0.1 s. A share of exp(-x) of exponential intervals exceeds x means.
        for means in [0.5_f64, 1.0, 2.0, 4.0] {
            let longer = pauses.iter().filter(|pause| **pause > means * 0.1).count() as f64;
            let share = longer / pauses.len() as f64;
            assert!((share - (-means).exp()).abs() < 0.005, "{means}: {share}");
        }
    }

    #[test]
    fn thesis_schedule_caps_intervals_at_ten_means() {
        let dues = schedule("constant", Some(Duration::from_secs(1)), 20_000.0);
        let seldom: Vec<f64> = dues.iter().filter(|(kind, _)| *kind == 1).map(|(_, at)| *at).collect();
        let longest = seldom.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
        // Of 200,000 intervals, about nine reach the cap.
        assert!((0.999..=1.0 + 1e-9).contains(&longest), "the longest interval must be ten means: {longest}");
    }

    #[test]
    fn rate_follows_the_trace() {
        let dues = schedule("steps:1,0,3", None, 300.0);
        let within = |from: f64, to: f64| dues.iter().filter(|(_, at)| (from..to).contains(at)).count();
        assert!((9_500..10_500).contains(&within(0.0, 100.0)));
        assert_eq!(within(100.0, 200.0), 0);
        assert!((29_000..31_000).contains(&within(200.0, 300.0)));
    }
}
