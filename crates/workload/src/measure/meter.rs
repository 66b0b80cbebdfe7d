//! Counts the transactions of a driver thread, with their latencies and errors, by kind, tenant and
//! interval.
//!
//! ```text
//!                opens                              closes
//!  warm-up  | -2 | -1 |  0  |  1  |  2  |  3  | ...    |   intervals of the whole run
//!                     |<------- window -------------->|
//! ```
//!
//! - Intervals are numbered from the opening of the window.
//! - A commit counts for the window if it ended inside it.
//! - A latency counts for the window if its transaction waited or ran inside it, so that a
//!   transaction that is answered only after the window is not hidden.
//! - An interval ends exactly on the clock, with the first event after its end, even if the
//!   driver's timers are late.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::availability::{Availability, AvailabilityRecord};
use super::latency::{Latencies, Sample};
use crate::workload::TransactionOutcome;

/// The maximum number of distinct SQLSTATEs that are counted.
const MAX_SQLSTATES: usize = 64;

/// When a run starts and stops measuring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) opens: Instant,
    pub(crate) closes: Instant,
}

impl Window {
    fn contains(&self, moment: Instant) -> bool {
        (self.opens..=self.closes).contains(&moment)
    }

    /// The end of an interval. The first interval of the window has number 0.
    pub(crate) fn interval_end(&self, tick: Duration, number: i64) -> Instant {
        let after = tick * u32::try_from((number + 1).unsigned_abs()).unwrap_or(u32::MAX);
        if number < -1 { self.opens - after } else { self.opens + after }
    }

    pub(super) fn touches(&self, begin: Instant, end: Instant) -> bool {
        begin <= self.closes && end >= self.opens
    }
}

/// The number of the first interval of a run that starts `warm_up` before its window.
pub(crate) fn first_interval(warm_up: Duration, tick: Duration) -> i64 {
    -i64::try_from(warm_up.as_nanos().div_ceil(tick.as_nanos())).unwrap_or(0)
}

/// Numbers of transactions of one kind by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) committed: u64,
    pub(crate) rolled_back: u64,
    pub(crate) cancelled: u64,
    pub(crate) failed: u64,
}

impl Counts {
    /// Transactions that ended as intended: committed, or rolled back on purpose.
    pub(crate) fn succeeded(self) -> u64 {
        self.committed + self.rolled_back
    }

    fn add(&mut self, other: Counts) {
        self.committed += other.committed;
        self.rolled_back += other.rolled_back;
        self.cancelled += other.cancelled;
        self.failed += other.failed;
    }
}

/// The counts and latencies of one kind of transaction.
pub(crate) struct Tally {
    pub(crate) counts: Counts,
    pub(crate) latencies: Latencies,
}

impl Tally {
    fn new() -> Tally {
        Tally { counts: Counts::default(), latencies: Latencies::new() }
    }
}

/// The events of one interval of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Interval {
    /// The number of the interval: 0 for the first one of the window, negative in the warm-up.
    pub(crate) number: i64,
    /// Counts and latencies by kind.
    pub(crate) kinds: Vec<(Counts, Vec<Sample>)>,
    /// Attempts that the server rejected.
    pub(crate) refused: u64,
    pub(crate) lost_connections: u64,
}

impl Interval {
    /// Adds the events of another driver thread.
    pub(crate) fn merge(&mut self, other: Interval) {
        for ((counts, samples), (more, more_samples)) in self.kinds.iter_mut().zip(other.kinds) {
            counts.add(more);
            samples.extend(more_samples);
        }
        self.refused += other.refused;
        self.lost_connections += other.lost_connections;
    }
}

/// The totals of a driver thread, sent to another one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeterRecord {
    kinds: Vec<(Counts, Vec<Sample>)>,
    tenants: Vec<Option<AvailabilityRecord>>,
    statements: u64,
    lost_connections: u64,
    unsent: u64,
    retried_again: u64,
    failed: u64,
    errors: BTreeMap<String, u64>,
    first_error: Option<String>,
}

/// The counters of one run at one driver thread.
pub(crate) struct Meter {
    window: Window,
    tick: Duration,
    /// Counts and latencies of the window, by kind.
    pub(crate) window_tallies: Vec<Tally>,
    recent: Vec<Tally>,
    current: Interval,
    finished: Vec<Interval>,
    /// Availability by tenant, in the order of their databases. `None` for tenants without
    /// terminals at this thread.
    pub(crate) tenants: Vec<Option<Availability>>,
    pub(crate) statements: u64,
    pub(crate) lost_connections: u64,
    /// Transactions that were due in the window and had not been sent when it closed.
    pub(crate) unsent: u64,
    /// Transactions that needed more than one retry, in the whole run.
    pub(crate) retried_again: u64,
    /// Transactions that failed, in the whole run.
    pub(crate) failed: u64,
    pub(crate) errors: BTreeMap<String, u64>,
    pub(crate) first_error: Option<String>,
}

impl Meter {
    /// Creates the counters for `kinds` kinds of transactions in a run that starts `warm_up` before
    /// its window. `tenants` yields for each tenant whether it has terminals at this thread.
    pub(crate) fn new(
        window: Window,
        warm_up: Duration,
        tick: Duration,
        kinds: usize,
        tenants: impl Iterator<Item = bool>,
    ) -> Meter {
        let first = first_interval(warm_up, tick);
        Meter {
            window,
            tick,
            window_tallies: (0..kinds).map(|_| Tally::new()).collect(),
            recent: (0..kinds).map(|_| Tally::new()).collect(),
            current: Interval { number: first, ..Interval::default() },
            finished: Vec::new(),
            tenants: tenants.map(|here| here.then(|| Availability::new(window))).collect(),
            statements: 0,
            lost_connections: 0,
            unsent: 0,
            retried_again: 0,
            failed: 0,
            errors: BTreeMap::new(),
            first_error: None,
        }
    }

    /// Counts a transaction that ended as intended. It was due at `due` and its last statement was
    /// answered at `end`.
    pub(crate) fn done(&mut self, event: Event, done: TransactionOutcome, end: Instant, statements: u64) {
        let Event { tenant, kind, due } = event;
        let mut counts = Counts::default();
        match done {
            TransactionOutcome::Committed => counts.committed = 1,
            TransactionOutcome::RolledBack => counts.rolled_back = 1,
        }
        self.count(kind, counts, end);
        if self.window.contains(end) {
            self.statements += statements;
        }
        let latency = end.saturating_duration_since(due);
        self.recent[kind].latencies.record(latency);
        if self.window.touches(due, end) {
            self.window_tallies[kind].latencies.record(latency);
        }
        if let Some(tenant) = &mut self.tenants[tenant] {
            tenant.answered(due, end);
        }
    }

    /// Counts a transaction that was cancelled because it was too late.
    pub(crate) fn cancelled(&mut self, event: Event, now: Instant) {
        self.count(event.kind, Counts { cancelled: 1, ..Counts::default() }, now);
        self.unanswered(event);
        if self.window.contains(now)
            && let Some(tenant) = &mut self.tenants[event.tenant]
        {
            tenant.cancelled += 1;
        }
    }

    /// Counts a transaction that was due in the window but is not sent because the window closed.
    pub(crate) fn unsent(&mut self, event: Event) {
        if self.window.contains(event.due) {
            self.unsent += 1;
            self.unanswered(event);
        }
    }

    fn unanswered(&mut self, event: Event) {
        if let Some(tenant) = &mut self.tenants[event.tenant] {
            tenant.unanswered(event.due);
        }
    }

    /// Counts a transaction that failed.
    pub(crate) fn record_failure(&mut self, event: Event, now: Instant, error: &dyn std::error::Error) {
        self.count(event.kind, Counts { failed: 1, ..Counts::default() }, now);
        self.unanswered(event);
        self.failed += 1;
        self.first_error.get_or_insert_with(|| error.to_string());
    }

    fn count(&mut self, kind: usize, counts: Counts, now: Instant) {
        self.roll(now);
        self.recent[kind].counts.add(counts);
        if self.window.contains(now) {
            self.window_tallies[kind].counts.add(counts);
        }
    }

    /// Counts an error of the server. A retry may follow.
    pub(crate) fn refused(&mut self, sqlstate: &str) {
        self.current.refused += 1;
        if let Some(count) = self.errors.get_mut(sqlstate) {
            *count += 1;
        } else if self.errors.len() < MAX_SQLSTATES {
            self.errors.insert(sqlstate.to_owned(), 1);
        }
    }

    /// Counts a lost connection.
    pub(crate) fn lost(&mut self) {
        self.current.lost_connections += 1;
        self.lost_connections += 1;
    }

    /// Ends the intervals that are over.
    fn roll(&mut self, now: Instant) {
        while now >= self.current_end() {
            let next = Interval { number: self.current.number + 1, ..Interval::default() };
            let mut ended = std::mem::replace(&mut self.current, next);
            let recent = self.recent.iter_mut();
            ended.kinds =
                recent.map(|tally| (std::mem::take(&mut tally.counts), tally.latencies.take())).collect();
            self.finished.push(ended);
        }
    }

    /// The end of the current interval.
    pub(crate) fn current_end(&self) -> Instant {
        self.window.interval_end(self.tick, self.current.number)
    }

    /// Removes and returns the ended intervals.
    pub(crate) fn take_finished(&mut self, now: Instant) -> Vec<Interval> {
        self.roll(now);
        std::mem::take(&mut self.finished)
    }

    /// The totals, for another thread or process.
    pub(crate) fn counted(&self) -> MeterRecord {
        MeterRecord {
            kinds: self
                .window_tallies
                .iter()
                .map(|tally| (tally.counts, tally.latencies.samples()))
                .collect(),
            tenants: self.tenants.iter().map(|tenant| tenant.as_ref().map(Availability::export)).collect(),
            statements: self.statements,
            lost_connections: self.lost_connections,
            unsent: self.unsent,
            retried_again: self.retried_again,
            failed: self.failed,
            errors: self.errors.clone(),
            first_error: self.first_error.clone(),
        }
    }

    /// Adds the totals of another thread or process.
    pub(crate) fn add(&mut self, counted: MeterRecord) {
        for (tally, (counts, samples)) in self.window_tallies.iter_mut().zip(counted.kinds) {
            tally.counts.add(counts);
            tally.latencies.add(&samples);
        }
        self.statements += counted.statements;
        self.lost_connections += counted.lost_connections;
        self.unsent += counted.unsent;
        self.retried_again += counted.retried_again;
        self.failed += counted.failed;
        for (sqlstate, count) in counted.errors {
            *self.errors.entry(sqlstate).or_default() += count;
        }
        for (tenant, more) in self.tenants.iter_mut().zip(counted.tenants) {
            let more = more.map(|more| Availability::of(self.window, more));
            match (tenant, more) {
                (Some(tenant), Some(more)) => tenant.merge(&more),
                (tenant, Some(more)) => *tenant = Some(more),
                (_, None) => {}
            }
        }
        self.first_error = self.first_error.take().or(counted.first_error);
    }

    /// The sum of all kinds.
    pub(crate) fn all(&self) -> Tally {
        let mut all = Tally::new();
        for tally in &self.window_tallies {
            all.counts.add(tally.counts);
            all.latencies.merge(&tally.latencies);
        }
        all
    }
}

/// Identifies the transaction of an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) tenant: usize,
    pub(crate) kind: usize,
    pub(crate) due: Instant,
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Run {
        opens: Instant,
        meter: Meter,
    }

    impl Run {
        /// Creates a window of 100 ms after a warm-up of 20 ms, with intervals of 50 ms.
        fn new() -> Run {
            let opens = Instant::now() + Duration::from_secs(10);
            let window = Window { opens, closes: opens + Duration::from_millis(100) };
            let tick = Duration::from_millis(50);
            Run {
                opens,
                meter: Meter::new(window, Duration::from_millis(20), tick, 2, std::iter::once(true)),
            }
        }

        fn at(&self, ms: i64) -> Instant {
            let time = Duration::from_millis(ms.unsigned_abs());
            if ms < 0 { self.opens - time } else { self.opens + time }
        }

        fn done(&mut self, kind: usize, due: i64, end: i64) {
            let event = Event { tenant: 0, kind, due: self.at(due) };
            self.meter.done(event, TransactionOutcome::Committed, self.at(end), 12);
        }
    }

    #[test]
    fn commits_count_at_their_end_and_latencies_while_they_wait() {
        let mut run = Run::new();
        for (due, end) in [(-10, -1), (-5, 5), (50, 70), (90, 101), (102, 103)] {
            run.done(0, due, end);
        }
        let all = run.meter.all();
        assert_eq!((all.counts.committed, run.meter.statements), (2, 24));
        let latency = all.latencies.summary();
        assert_eq!(latency.count, 3, "transactions before and after the window are not counted");
        assert!((latency.max_ms - 20.0).abs() < 0.1, "{latency:?}");
    }

    #[test]
    fn intervals_end_on_the_clock() {
        let mut run = Run::new();
        for (kind, end) in [(0, -3), (1, 49), (1, 50), (0, 220)] {
            run.done(kind, end - 1, end);
        }
        let finished = run.meter.take_finished(run.at(230));
        let numbers: Vec<_> = finished.iter().map(|interval| interval.number).collect();
        assert_eq!(numbers, [-1, 0, 1, 2, 3], "empty intervals are included, and interval 4 has not ended");
        let committed = |interval: &Interval, kind: usize| interval.kinds[kind].0.committed;
        let by_kind: Vec<_> =
            finished.iter().map(|ended| (committed(ended, 0), committed(ended, 1))).collect();
        assert_eq!(by_kind, [(1, 0), (0, 1), (0, 1), (0, 0), (0, 0)]);
        assert_eq!(finished[1].kinds[1].1, [(1_000, 1)], "the interval has its samples");
        assert!(run.meter.take_finished(run.at(240)).is_empty());
        assert_eq!(run.meter.current_end(), run.at(250));
    }

    #[test]
    fn counts_of_threads_are_added() {
        let (mut one, mut other) = (Run::new(), Run::new());
        one.done(0, 10, 20);
        other.done(0, 10, 90);
        other.meter.refused("40001");
        other.meter.lost();
        one.meter.add(other.meter.counted());
        let all = one.meter.all();
        assert_eq!((all.counts.committed, one.meter.errors["40001"], one.meter.lost_connections), (2, 1, 1));
        assert!(all.latencies.summary().max_ms > 79.0);
        let mut interval = one.meter.take_finished(one.at(101)).remove(1);
        interval.merge(other.meter.take_finished(other.at(101)).remove(1));
        assert_eq!((interval.kinds[0].0.committed, interval.kinds[0].1.len()), (1, 1));
    }

    #[test]
    fn errors_are_counted_by_sqlstate_within_bounds() {
        let mut meter = Run::new().meter;
        meter.refused("40001");
        meter.refused("40001");
        (0..200).for_each(|n| meter.refused(&format!("{n:05}")));
        assert_eq!(meter.errors["40001"], 2);
        assert_eq!(meter.errors.len(), MAX_SQLSTATES);
    }
}
