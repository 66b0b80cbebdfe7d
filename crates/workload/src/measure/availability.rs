//! Availability of a tenant, measured in two ways because the papers define it differently.
//!
//! ```text
//!  due        x  x   x  x    x  x     x
//!  answered   |  |                    ||||| |       |
//!  outage        [--------------------]                    a transaction waits, none is answered
//!  slots      |..*..|.....|.....|.....|..*..|.....|..*..|  Karyakin 5.1: four slots without one
//! ```
//!
//! - **Outages**: an outage lasts from the time at which a transaction waits, with none answered
//!   since, to the next answer. Outages of 1 s or more count, with exact times. A tenant whose
//!   clients request nothing has no outage. Each driver thread records its silences (periods
//!   without an answer) and since when a transaction waited in each. At the end of the run the
//!   silences of all threads are intersected.
//! - **Down intervals**: slots of the window (1 s, or 5 s for disk-bound loads) in which no
//!   transaction of the tenant ended, whether or not one was requested.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Window;

/// The minimum length of an outage. Shorter waits are not counted.
pub(crate) const MIN_OUTAGE: Duration = Duration::from_secs(1);

/// The answered and unanswered transactions of one tenant over time.
#[derive(Clone, Debug)]
pub(crate) struct Availability {
    window: Window,
    /// Transactions that committed or rolled back as intended, per second of the window.
    by_second: Vec<u32>,
    /// The silences in the window, ordered and disjoint. Those shorter than an outage are left out.
    silences: Vec<Silence>,
    last_answer: Instant,
    /// When the first unanswered transaction since the last answer was due.
    waiting_since: Option<Instant>,
    pub(crate) cancelled: u64,
    /// Number of transactions that waited or ran in the window, and the sum of their latencies.
    answered: u32,
    waited: Duration,
}

/// The availability at the end of a run, sent to another process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AvailabilityRecord {
    by_second: Vec<u32>,
    silences: Vec<Silence>,
    cancelled: u64,
    answered: u32,
    waited: Duration,
}

/// A period without an answer, as times since the window opened.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Silence {
    begin: Duration,
    /// Since when a transaction was waiting. It waits until the end.
    waiting: Option<Duration>,
    end: Duration,
}

impl Silence {
    /// Creates a silence, or returns `None` if it is too short to contain an outage.
    fn new(begin: Duration, waiting: Option<Duration>, end: Duration) -> Option<Silence> {
        let waiting = waiting.map(|since| since.max(begin));
        let is_long = end.saturating_sub(begin) >= MIN_OUTAGE;
        is_long.then_some(Silence { begin, waiting, end })
    }

    /// The intersection of two silences. A transaction that waits in either of them waits in the
    /// result.
    fn both(self, other: Silence) -> Option<Silence> {
        let waiting = self.waiting.into_iter().chain(other.waiting).min();
        Silence::new(self.begin.max(other.begin), waiting, self.end.min(other.end))
    }

    fn outage(&self) -> Option<Duration> {
        let outage = self.end.saturating_sub(self.waiting?);
        (outage >= MIN_OUTAGE).then_some(outage)
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

    /// The mean latency in milliseconds, or zero without transactions.
    pub(crate) fn mean_ms(&self) -> f64 {
        self.waited.as_secs_f64() * 1e3 / f64::from(self.answered.max(1))
    }

    /// Records that a transaction that was due at `due` committed or rolled back as intended.
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

    /// Records that a transaction that was due at `due` was cancelled, failed, or has no answer
    /// yet.
    pub(crate) fn unanswered(&mut self, due: Instant) {
        self.waiting_since = Some(self.waiting_since.map_or(due, |since| since.min(due)));
    }

    /// Ends the run. A transaction that still waits has waited until the window closed.
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

    /// Exports a closed availability.
    pub(crate) fn export(&self) -> AvailabilityRecord {
        let Availability { cancelled, answered, waited, .. } = *self;
        let (by_second, silences) = (self.by_second.clone(), self.silences.clone());
        AvailabilityRecord { by_second, silences, cancelled, answered, waited }
    }

    /// Imports the availability of another thread or process with the same window.
    pub(crate) fn of(window: Window, served: AvailabilityRecord) -> Availability {
        let AvailabilityRecord { by_second, silences, cancelled, answered, waited } = served;
        let last_answer = window.closes;
        let new = Availability::new(window);
        Availability { by_second, silences, last_answer, cancelled, answered, waited, ..new }
    }

    /// Merges the availability at another driver thread with terminals of the same tenant. The
    /// tenant has an outage when a transaction waits at either thread and neither receives an
    /// answer. Both must be closed.
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

    /// The length of each outage.
    pub(crate) fn outages(&self) -> impl Iterator<Item = Duration> {
        self.silences.iter().filter_map(Silence::outage)
    }

    /// The number of complete slots of the window in which no transaction ended.
    pub(crate) fn down_intervals(&self, slot_seconds: usize) -> u64 {
        self.slots(slot_seconds).filter(|count| *count == 0).count() as u64
    }

    /// The number of transactions that ended in each complete slot of the window.
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
    fn outage_requires_a_waiting_transaction_and_no_answer() {
        let mut tenant = Tenant::new(60);
        tenant.answered(-50, 10);
        // No transaction is due for 20 s. Those due in the next 10 s are all answered at its end.
        for due in 0..100 {
            tenant.answered(20_000 + due * 100, 30_000);
        }
        assert_eq!(tenant.outages_ms(), [10_000]);
        tenant.answered(31_000, 31_900);
        assert_eq!(tenant.outages_ms(), [10_000], "a wait of 0.9 s is not an outage");
    }

    #[test]
    fn cancelled_transactions_count_as_waiting() {
        let mut tenant = Tenant::new(60);
        tenant.of.unanswered(tenant.at(5_000));
        tenant.of.unanswered(tenant.at(6_000));
        tenant.answered(9_000, 9_010);
        assert_eq!(tenant.outages_ms(), [4_010]);
        tenant.of.unanswered(tenant.at(50_000));
        tenant.of.close();
        assert_eq!(tenant.outages_ms(), [4_010, 10_000], "an open outage ends with the window");
    }

    #[test]
    fn only_the_window_is_measured() {
        let mut tenant = Tenant::new(10);
        tenant.answered(-5_000, 2_000);
        tenant.answered(8_000, 20_000);
        assert_eq!(tenant.outages_ms(), [2_000, 2_000]);
        assert_eq!(tenant.of.slots(1).sum::<u64>(), 1);
    }

    #[test]
    fn slots_without_a_transaction_are_down_intervals() {
        let mut tenant = Tenant::new(12);
        for end in [100, 200, 5_500] {
            tenant.answered(end - 10, end);
        }
        assert_eq!(tenant.of.down_intervals(1), 10);
        assert_eq!(tenant.of.down_intervals(5), 0, "the last 2 s are no complete slot");
        assert_eq!(tenant.of.slots(5).collect::<Vec<_>>(), [2, 1]);
    }

    /// Merges the availability at two driver threads in both orders. The second one is serialized,
    /// as from another process.
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
        let exported = serde_json::to_string(&second.of.export()).unwrap();
        let imported = serde_json::from_str(&exported).unwrap();
        first.of.merge(&Availability::of(first.of.window, imported));
        assert!(first.of.outages().eq(reverse.outages()), "the order of the merge must not matter");
        assert_eq!(first.of.slots(seconds as usize).sum::<u64>(), (one.len() + other.len()) as u64);
        first
    }

    #[test]
    fn merged_outage_requires_silence_at_both_threads() {
        let tenant = merged(30, &[(2_000, 9_000)], &[(5_000, 12_000)]);
        assert_eq!((tenant.outages_ms(), tenant.of.mean_ms()), (vec![7_000, 3_000], 7_000.0));
        let tenant = merged(30, &[(2_000, 9_000)], &[(5_000, 5_100)]);
        assert_eq!((tenant.outages_ms(), tenant.of.mean_ms()), (vec![3_000 + 100, 3_900], 3_550.0));
    }

    #[test]
    fn idle_thread_does_not_end_an_outage() {
        assert_eq!(merged(30, &[(2_000, 9_000)], &[]).outages_ms(), [7_000]);
        // A transaction at the other thread is due and answered in between.
        assert_eq!(merged(30, &[(2_000, 9_000)], &[(4_900, 5_000)]).outages_ms(), [3_000, 4_000]);
    }
}
