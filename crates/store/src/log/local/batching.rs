//! Adaptive batching: how long a batch waits for more records.
//!
//! See "Appending" in the description of the local log.

use std::time::{Duration, Instant};

/// If syncs are faster than this, a batch does not linger: the next one starts soon.
const SLOW_SYNC: Duration = Duration::from_millis(1);

/// A batch lingers for at most a sync's duration divided by this ...
const LINGER_DIVISOR: u32 = 4;
/// ... and at most for this long.
const MAX_LINGER: Duration = Duration::from_millis(2);

/// Maximum time that a deferrable record waits for others.
pub(super) const MAX_COMMIT_DELAY: Duration = Duration::from_millis(6);
/// The commit delay is the time in which this many records are expected.
const COMMIT_DELAY_RECORDS: u32 = 3;
/// After this many successive batches of one record, commit delays are useless: a single client
/// commits, for one tenant after the other ...
const MAX_SINGLE_RECORD_BATCHES: u32 = 8;
/// ... and no commit delays are used for this many batches.
const BATCHES_WITHOUT_DELAY: u32 = 512;
/// A record is deferrable only if the appender's last commit was at least this many commit delays
/// ago, so that a delay takes at most a tenth of the time between two commits ...
const MIN_GAP_IN_DELAYS: u32 = 10;
/// ... and at least this long ago: with many frequent appenders, holding makes larger batches than
/// commit delays do.
const MIN_DEFERRABLE_GAP: Duration = Duration::from_millis(20);

/// Returns true if a record may be deferred, given the time since its appender's last commit.
pub(super) fn is_infrequent(since: Duration, commit_delay: Duration) -> bool {
    since >= MIN_DEFERRABLE_GAP.max(commit_delay * MIN_GAP_IN_DELAYS)
}

/// Maximum time that a record is held for the idle announcement of its thread: a few transactions.
pub(super) const MAX_HOLD: Duration = Duration::from_micros(250);
/// Batches are counted within a round. The first ones do not hold records ...
const PLAIN_ENDS: u32 = 8;
/// ... the next ones do ...
const TRIAL_ENDS: u32 = 16;
/// ... and the rest use the better variant: for a short time if that is holding, because trying
/// plain batches costs little ...
const HOLDING_ENDS: u32 = 256;
/// ... and for longer otherwise, because a useless trial of holding can double a batch's latency.
const ROUND_ENDS: u32 = 2048;
/// Number of records that must be expected within [`MAX_HOLD`].
const MIN_HELD_RECORDS: u32 = 2;
/// Holding must multiply the batch size by this factor; otherwise it only adds latency.
const MIN_HOLDING_GAIN: u64 = 2;

/// Decides by trial whether to hold records.
#[derive(Default)]
struct Trial {
    /// Batches of this round so far.
    batches: u32,
    /// Records in the trial batches of this round, without and with holding.
    plain: u64,
    held: u64,
}

impl Trial {
    /// Returns true if the records of the next batch are to be held.
    fn hold_until_idle(&self) -> bool {
        match self.batches {
            0..PLAIN_ENDS => false,
            PLAIN_ENDS..TRIAL_ENDS => true,
            _ => self.holding_pays(),
        }
    }

    fn holding_pays(&self) -> bool {
        self.held >= MIN_HOLDING_GAIN * self.plain
    }

    /// Records that a batch is complete.
    fn record_batch(&mut self, records: u64) {
        match self.batches {
            0..PLAIN_ENDS => self.plain += records,
            PLAIN_ENDS..TRIAL_ENDS => self.held += records,
            _ => {}
        }
        self.batches += 1;
        let ends = if self.holding_pays() { HOLDING_ENDS } else { ROUND_ENDS };
        if self.batches >= ends {
            *self = Trial::default();
        }
    }
}

/// Statistics of recent batches.
#[derive(Default)]
pub(super) struct Batching {
    /// Expected number of records in the next batch: a peak that decays by an eighth per batch.
    expected_records: u64,
    /// Smoothed time between two records.
    gap: Option<Duration>,
    /// Time at which the last batch was taken.
    last_batch_at: Option<Instant>,
    /// Successive batches of one record that a commit delay might have enlarged.
    single_record_batches: u32,
    /// Number of batches for which no commit delay is used.
    batches_without_delay: u32,
    trial: Trial,
}

impl Batching {
    /// Returns how long a batch of `records` may linger, given the duration of a sync.
    pub(super) fn linger_time(&self, records: u64, sync: Duration) -> Duration {
        match sync >= SLOW_SYNC && records < self.expected_records {
            true => (sync / LINGER_DIVISOR).min(MAX_LINGER),
            false => Duration::ZERO,
        }
    }

    /// Returns the commit delay for deferrable records, if more than one is expected within it.
    pub(super) fn commit_delay(&self) -> Option<Duration> {
        let gap = self.gap.filter(|_| self.batches_without_delay == 0);
        gap.filter(|gap| *gap < MAX_COMMIT_DELAY)
            .map(|gap| (gap * COMMIT_DELAY_RECORDS).min(MAX_COMMIT_DELAY))
    }

    /// Returns true if the records of the next batch are to be held. They are not if syncs are
    /// slow, because batches then grow anyway, or if records are too infrequent.
    pub(super) fn hold_until_idle(&mut self, sync: Duration) -> bool {
        let frequent = self.gap.is_some_and(|gap| gap * MIN_HELD_RECORDS <= MAX_HOLD);
        if sync >= SLOW_SYNC || !frequent {
            self.trial = Trial::default();
            return false;
        }
        self.trial.hold_until_idle()
    }

    /// Records that a batch was taken.
    pub(super) fn record_batch(&mut self, records: u64, now: Instant) {
        let decayed = self.expected_records - self.expected_records.div_ceil(8);
        self.expected_records = records.max(decayed);
        self.trial.record_batch(records);
        (self.single_record_batches, self.batches_without_delay) =
            match (self.batches_without_delay, self.commit_delay().is_some() && records <= 1) {
                (0, true) if self.single_record_batches + 1 == MAX_SINGLE_RECORD_BATCHES => {
                    (0, BATCHES_WITHOUT_DELAY)
                }
                (0, true) => (self.single_record_batches + 1, 0),
                (batches_without_delay, _) => (0, batches_without_delay.saturating_sub(1)),
            };
        if let Some(last) = self.last_batch_at.replace(now) {
            // A long pause needs no more weight than this: the next record is expected to be alone.
            let gap =
                (now - last).min(8 * MAX_COMMIT_DELAY) / u32::try_from(records).unwrap_or(u32::MAX).max(1);
            self.gap = Some(self.gap.map_or(gap, |before| before - before / 8 + gap / 8));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_batches_linger_for_slow_syncs_up_to_a_limit() {
        let (mut batching, now) = (Batching::default(), Instant::now());
        assert!(batching.linger_time(1, SLOW_SYNC).is_zero(), "a log without history must not linger");
        batching.record_batch(32, now);
        assert!(batching.linger_time(1, SLOW_SYNC / 2).is_zero());
        assert!(batching.linger_time(32, SLOW_SYNC * 4).is_zero());
        assert_eq!(batching.linger_time(31, SLOW_SYNC * 4), SLOW_SYNC);
        assert_eq!(batching.linger_time(1, Duration::from_secs(1)), MAX_LINGER);
    }

    #[test]
    fn a_client_that_is_left_alone_stops_lingering() {
        let (mut batching, now) = (Batching::default(), Instant::now());
        batching.record_batch(1000, now);
        for _ in 0..50 {
            batching.record_batch(1, now);
        }
        assert!(batching.linger_time(1, SLOW_SYNC).is_zero());
    }

    #[test]
    fn records_are_held_if_that_doubles_the_batch_size() {
        let sync = SLOW_SYNC / 20;
        let gathering = |plain, held, gap| {
            let (mut batching, mut now) = (Batching::default(), Instant::now());
            let mut all = 0;
            for _ in 0..2 * ROUND_ENDS {
                let hold_until_idle = batching.hold_until_idle(sync);
                all += u32::from(hold_until_idle);
                let records = if hold_until_idle { held } else { plain };
                now += gap * records as u32;
                batching.record_batch(records, now);
            }
            all
        };
        let (often, seldom) = (Duration::from_micros(50), Duration::from_micros(200));
        let (trials, plain) = (2 * (TRIAL_ENDS - PLAIN_ENDS), 2 * ROUND_ENDS / HOLDING_ENDS * PLAIN_ENDS);
        // The gap is not known before the first batch, so the first round begins with the second
        // batch.
        assert_eq!(gathering(2, 3, often), trials);
        assert_eq!(gathering(2, 5, often), 2 * ROUND_ENDS - plain - 1);
        assert_eq!(gathering(2, 5, seldom), 0);
        let (mut batching, now) = (Batching::default(), Instant::now());
        for _ in 0..100 {
            batching.record_batch(20, now);
            assert!(!batching.hold_until_idle(SLOW_SYNC), "records must not be held if syncs are slow");
        }
    }

    #[test]
    fn commit_delay_requires_frequent_records() {
        let (mut batching, mut now) = (Batching::default(), Instant::now());
        assert_eq!(batching.commit_delay(), None, "a log without history must not delay commits");
        let mut add_batches = |records, gap| {
            for _ in 0..100 {
                now += gap;
                batching.record_batch(records, now);
            }
            batching.commit_delay()
        };
        let ms = Duration::from_millis;
        assert_eq!(add_batches(1, ms(10)), None, "no other record is expected within the delay");
        assert_eq!(add_batches(2, ms(6)), Some(MAX_COMMIT_DELAY));
        let commit_delay = add_batches(10, ms(1)).expect("ten records per millisecond must cause a delay");
        assert!(
            (Duration::from_micros(290)..Duration::from_micros(310)).contains(&commit_delay),
            "{commit_delay:?}"
        );
        assert_eq!(add_batches(1, ms(8)), None, "the delay must end when records become infrequent");
    }

    #[test]
    fn a_single_client_is_not_delayed() {
        let (mut batching, mut now) = (Batching::default(), Instant::now());
        let mut delays = |records, batches: u32| {
            let mut delays = 0;
            for _ in 0..batches {
                delays += u32::from(batching.commit_delay().is_some());
                now += Duration::from_millis(1);
                batching.record_batch(records, now);
            }
            delays
        };
        let in_a_row = delays(1, 10_000);
        assert!((MAX_SINGLE_RECORD_BATCHES..10_000 / 50).contains(&in_a_row), "{in_a_row} naps");
        delays(2, BATCHES_WITHOUT_DELAY);
        assert_eq!(delays(2, 1000), 1000, "delays must resume when there are other clients");
        for _ in 0..1000 {
            assert_eq!(
                delays(1, MAX_SINGLE_RECORD_BATCHES / 2),
                MAX_SINGLE_RECORD_BATCHES / 2,
                "a few batches of one record must not disable delays"
            );
            delays(3, 1);
        }
    }
}
