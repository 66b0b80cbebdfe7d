//! Was a tenant served? Two answers, since the papers ask differently.
//!
//! ```text
//!  due        x  x   x  x    x  x     x
//!  answered   |  |                    ||||| |       |
//!  outage        [--------------------]                    somebody waits, nobody is answered: exact times
//!  slots      |..*..|.....|.....|.....|..*..|.....|..*..|  Karyakin 5.1: slots without a transaction, four here
//! ```
//! - **Outages**: from the moment that a transaction waits, and none has been answered since, to the next answer; those
//!   longer than a second count. A tenant whose clients want nothing is not out.
//! - **Down intervals**: slots of the window (1 s; 5 s for what is bound by a disk) in which no transaction of
//!   the tenant ended, wanted or not.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Window;

/// A wait that is no outage yet.
pub(crate) const SHORTEST_OUTAGE: Duration = Duration::from_secs(1);

/// What became of one tenant's transactions, over time.
#[derive(Clone, Debug)]
pub(crate) struct Availability {
    window: Window,
    /// Transactions that ended as they should, by whole seconds of the window.
    by_second: Vec<u32>,
    /// Of the window, in order, not overlapping.
    outages: Vec<(Instant, Instant)>,
    last_answer: Instant,
    /// The first transaction since the last answer that was not answered well.
    waiting_since: Option<Instant>,
    pub(crate) cancelled: u64,
    /// Transactions that waited or ran in the window, and how long they did together.
    answered: u32,
    waited: Duration,
}

/// The same when the run is over, for another process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Served {
    by_second: Vec<u32>,
    /// From when to when, since the window opened.
    outages: Vec<(Duration, Duration)>,
    cancelled: u64,
    answered: u32,
    waited: Duration,
}

impl Availability {
    pub(crate) fn new(window: Window) -> Availability {
        let seconds = (window.closes - window.opens).as_secs() as usize;
        Availability {
            window,
            by_second: vec![0; seconds],
            outages: Vec::new(),
            last_answer: window.opens,
            waiting_since: None,
            cancelled: 0,
            answered: 0,
            waited: Duration::ZERO,
        }
    }

    /// Mean latency, in milliseconds; of nothing it is zero.
    pub(crate) fn mean_ms(&self) -> f64 {
        self.waited.as_secs_f64() * 1e3 / f64::from(self.answered.max(1))
    }

    /// A transaction that was due at `due` has ended as it should.
    pub(crate) fn answered(&mut self, due: Instant, end: Instant) {
        let waiting = self.waiting_since.take().map_or(due, |since| since.min(due));
        self.outage(waiting, end);
        self.last_answer = self.last_answer.max(end);
        if self.window.touches(due, end) {
            self.answered += 1;
            self.waited += end.saturating_duration_since(due);
        }
        if let Some(since) = end.checked_duration_since(self.window.opens)
            && let Some(count) = self.by_second.get_mut(since.as_secs() as usize)
        {
            *count += 1;
        }
    }

    /// A transaction that was due at `due` was cancelled, or failed, or is not answered yet.
    pub(crate) fn unanswered(&mut self, due: Instant) {
        self.waiting_since = Some(self.waiting_since.map_or(due, |since| since.min(due)));
    }

    /// The run is over: who waits still has waited until the window closed.
    pub(crate) fn close(&mut self) {
        if let Some(waiting) = self.waiting_since.take() {
            self.outage(waiting, self.window.closes);
        }
    }

    fn outage(&mut self, waiting: Instant, end: Instant) {
        let begin = waiting.max(self.last_answer);
        let end = end.min(self.window.closes);
        if end.saturating_duration_since(begin) >= SHORTEST_OUTAGE {
            self.outages.push((begin, end));
        }
    }

    pub(crate) fn served(&self) -> Served {
        let since = |moment: Instant| moment.saturating_duration_since(self.window.opens);
        let outages = self.outages.iter().map(|(begin, end)| (since(*begin), since(*end))).collect();
        let Availability { cancelled, answered, waited, .. } = *self;
        Served { by_second: self.by_second.clone(), outages, cancelled, answered, waited }
    }

    /// Of another thread or process, whose window was this one.
    pub(crate) fn of(window: Window, served: Served) -> Availability {
        let Served { by_second, outages, cancelled, answered, waited } = served;
        let moments = |(begin, end): (Duration, Duration)| (window.opens + begin, window.opens + end);
        let outages = outages.into_iter().map(moments).collect();
        Availability { by_second, outages, cancelled, answered, waited, ..Availability::new(window) }
    }

    /// Another driver thread has terminals of the same tenant: it is out when both say so.
    pub(crate) fn merge(&mut self, other: &Availability) {
        self.by_second.iter_mut().zip(&other.by_second).for_each(|(count, more)| *count += more);
        self.cancelled += other.cancelled;
        self.answered += other.answered;
        self.waited += other.waited;
        let both = self.outages.iter().flat_map(|(begin, end)| {
            other.outages.iter().map(move |(from, to)| (*begin.max(from), *end.min(to)))
        });
        self.outages =
            both.filter(|(begin, end)| end.saturating_duration_since(*begin) >= SHORTEST_OUTAGE).collect();
    }

    /// How long each outage was.
    pub(crate) fn outages(&self) -> impl Iterator<Item = Duration> {
        self.outages.iter().map(|(begin, end)| *end - *begin)
    }

    /// Whole slots of the window in which nothing ended.
    pub(crate) fn down_intervals(&self, slot_seconds: usize) -> u64 {
        self.slots(slot_seconds).filter(|count| *count == 0).count() as u64
    }

    /// Transactions that ended in each whole slot of the window.
    pub(crate) fn slots(&self, slot_seconds: usize) -> impl Iterator<Item = u64> {
        self.by_second
            .chunks_exact(slot_seconds.max(1))
            .map(|slot| slot.iter().map(|count| u64::from(*count)).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tenant {
        opens: Instant,
        of: Availability,
    }

    impl Tenant {
        fn new(seconds: u64) -> Tenant {
            let opens = Instant::now() + Duration::from_secs(100);
            let of = Availability::new(Window { opens, closes: opens + Duration::from_secs(seconds) });
            Tenant { opens, of }
        }

        fn at(&self, ms: i64) -> Instant {
            let time = Duration::from_millis(ms.unsigned_abs());
            if ms < 0 { self.opens - time } else { self.opens + time }
        }

        fn answered(&mut self, due: i64, end: i64) {
            self.of.answered(self.at(due), self.at(end));
        }

        fn outages_ms(&self) -> Vec<u128> {
            self.of.outages().map(|outage| outage.as_millis()).collect()
        }
    }

    #[test]
    fn an_outage_is_when_somebody_waits_and_nobody_is_answered() {
        let mut tenant = Tenant::new(60);
        tenant.answered(-50, 10);
        // Nobody wants anything for 20 s, then all that fell due in 10 s is answered at once.
        for due in 0..100 {
            tenant.answered(20_000 + due * 100, 30_000);
        }
        assert_eq!(tenant.outages_ms(), [10_000]);
        tenant.answered(31_000, 31_900);
        assert_eq!(tenant.outages_ms(), [10_000], "0.9 s are none");
    }

    #[test]
    fn cancelled_transactions_have_waited_too() {
        let mut tenant = Tenant::new(60);
        tenant.of.unanswered(tenant.at(5_000));
        tenant.of.unanswered(tenant.at(6_000));
        tenant.answered(9_000, 9_010);
        assert_eq!(tenant.outages_ms(), [4_010]);
        tenant.of.unanswered(tenant.at(50_000));
        tenant.of.close();
        assert_eq!(tenant.outages_ms(), [4_010, 10_000], "to the end of the window");
    }

    #[test]
    fn only_the_window_counts() {
        let mut tenant = Tenant::new(10);
        tenant.answered(-5_000, 2_000);
        tenant.answered(8_000, 20_000);
        assert_eq!(tenant.outages_ms(), [2_000, 2_000]);
        assert_eq!(tenant.of.slots(1).sum::<u64>(), 1);
    }

    #[test]
    fn slots_without_a_transaction_are_down_wanted_or_not() {
        let mut tenant = Tenant::new(12);
        for end in [100, 200, 5_500] {
            tenant.answered(end - 10, end);
        }
        assert_eq!(tenant.of.down_intervals(1), 10);
        assert_eq!(tenant.of.down_intervals(5), 0, "two slots, and two seconds that make none");
        assert_eq!(tenant.of.slots(5).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn two_threads_see_an_outage_where_both_do() {
        let (mut one, mut other) = (Tenant::new(30), Tenant::new(30));
        other.opens = one.opens;
        other.of.window = one.of.window;
        one.answered(2_000, 9_000);
        other.answered(5_000, 12_000);
        let other = Availability::of(one.of.window, other.of.served());
        one.of.merge(&other);
        assert_eq!((one.outages_ms(), one.of.mean_ms()), (vec![4_000], 7_000.0));
        assert_eq!(one.of.slots(30).collect::<Vec<_>>(), [2]);
    }
}
