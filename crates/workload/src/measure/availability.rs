//! Was a tenant served? Two answers, since the papers ask differently.
//!
//! ```text
//!  due        x  x   x  x    x  x     x
//!  answered   |  |                    ||||| |       |
//!  outage        [--------------------]                    somebody waits, nobody is answered: exact times
//!  slots      |..*..|.....|.....|.....|..*..|.....|..*..|  Karyakin 5.1: slots without a transaction, four here
//! ```
//! - **Outages**: from the moment that a transaction waits, and none has been answered since, to the next answer; those
//!   longer than a second count. A tenant whose clients want nothing is not out. Driver threads note when they were
//!   silent, and since when somebody waited in it; where all were silent at once is known when the run is over.
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
    /// Of the window, in order, not overlapping; those too short for an outage are left out.
    silences: Vec<Silence>,
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
    silences: Vec<Silence>,
    cancelled: u64,
    answered: u32,
    waited: Duration,
}

/// A time in which nobody was answered, as moments since the window opened.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Silence {
    begin: Duration,
    /// From when on somebody waited, to the end.
    waiting: Option<Duration>,
    end: Duration,
}

impl Silence {
    /// One that is long enough for an outage.
    fn new(begin: Duration, waiting: Option<Duration>, end: Duration) -> Option<Silence> {
        let waiting = waiting.map(|since| since.max(begin));
        let is_long = end.saturating_sub(begin) >= SHORTEST_OUTAGE;
        is_long.then_some(Silence { begin, waiting, end })
    }

    /// Where both are; who waits at one of them waits.
    fn both(self, other: Silence) -> Option<Silence> {
        let waiting = self.waiting.into_iter().chain(other.waiting).min();
        Silence::new(self.begin.max(other.begin), waiting, self.end.min(other.end))
    }

    fn outage(&self) -> Option<Duration> {
        let outage = self.end.saturating_sub(self.waiting?);
        (outage >= SHORTEST_OUTAGE).then_some(outage)
    }
}

impl Availability {
    pub(crate) fn new(window: Window) -> Availability {
        let seconds = (window.closes - window.opens).as_secs() as usize;
        Availability {
            window,
            by_second: vec![0; seconds],
            silences: Vec::new(),
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
        self.silent_until(end, Some(waiting));
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
        let waiting = self.waiting_since.take();
        self.silent_until(self.window.closes, waiting);
        self.last_answer = self.window.closes;
    }

    fn silent_until(&mut self, end: Instant, waiting: Option<Instant>) {
        let since = |moment: Instant| moment.saturating_duration_since(self.window.opens);
        let end = end.min(self.window.closes);
        self.silences.extend(Silence::new(since(self.last_answer), waiting.map(since), since(end)));
    }

    /// It is closed.
    pub(crate) fn served(&self) -> Served {
        let Availability { cancelled, answered, waited, .. } = *self;
        let (by_second, silences) = (self.by_second.clone(), self.silences.clone());
        Served { by_second, silences, cancelled, answered, waited }
    }

    /// Of another thread or process, whose window was this one.
    pub(crate) fn of(window: Window, served: Served) -> Availability {
        let Served { by_second, silences, cancelled, answered, waited } = served;
        let last_answer = window.closes;
        let new = Availability::new(window);
        Availability { by_second, silences, last_answer, cancelled, answered, waited, ..new }
    }

    /// Another driver thread has terminals of the same tenant: it is out when somebody waits at either, and nobody is
    /// answered at both. Both are closed.
    pub(crate) fn merge(&mut self, other: &Availability) {
        self.by_second.iter_mut().zip(&other.by_second).for_each(|(count, more)| *count += more);
        self.cancelled += other.cancelled;
        self.answered += other.answered;
        self.waited += other.waited;
        let pairs = self
            .silences
            .iter()
            .flat_map(|silence| other.silences.iter().filter_map(move |more| silence.both(*more)));
        self.silences = pairs.collect();
    }

    /// How long each outage was.
    pub(crate) fn outages(&self) -> impl Iterator<Item = Duration> {
        self.silences.iter().filter_map(Silence::outage)
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

    /// What two driver threads have seen of a tenant, merged both ways; the second is of another process.
    fn merged(seconds: u64, one: &[(i64, i64)], other: &[(i64, i64)]) -> Tenant {
        let (mut first, mut second) = (Tenant::new(seconds), Tenant::new(seconds));
        second.opens = first.opens;
        second.of.window = first.of.window;
        second.of.last_answer = first.of.last_answer;
        one.iter().for_each(|(due, end)| first.answered(*due, *end));
        other.iter().for_each(|(due, end)| second.answered(*due, *end));
        first.of.close();
        second.of.close();
        let mut reverse = second.of.clone();
        reverse.merge(&first.of);
        let told = serde_json::to_string(&second.of.served()).unwrap();
        first.of.merge(&Availability::of(first.of.window, serde_json::from_str(&told).unwrap()));
        assert!(first.of.outages().eq(reverse.outages()), "whichever comes first");
        assert_eq!(first.of.slots(seconds as usize).sum::<u64>(), (one.len() + other.len()) as u64);
        first
    }

    #[test]
    fn two_threads_see_an_outage_where_one_waits_and_neither_is_answered() {
        let tenant = merged(30, &[(2_000, 9_000)], &[(5_000, 12_000)]);
        assert_eq!((tenant.outages_ms(), tenant.of.mean_ms()), (vec![7_000, 3_000], 7_000.0));
        let tenant = merged(30, &[(2_000, 9_000)], &[(5_000, 5_100)]);
        assert_eq!((tenant.outages_ms(), tenant.of.mean_ms()), (vec![3_000 + 100, 3_900], 3_550.0));
    }

    #[test]
    fn a_thread_whose_terminals_want_nothing_denies_no_outage() {
        assert_eq!(merged(30, &[(2_000, 9_000)], &[]).outages_ms(), [7_000]);
        // It wants something for a moment, and is answered.
        assert_eq!(merged(30, &[(2_000, 9_000)], &[(4_900, 5_000)]).outages_ms(), [3_000, 4_000]);
    }
}
