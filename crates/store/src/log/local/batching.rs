//! How long a batch waits for more records: see "Appending" in the log's description.

use std::time::{Duration, Instant};

/// Syncs that are faster are never waited for: the next batch is soon on its way.
const SLOW_SYNC: Duration = Duration::from_millis(1);

/// A batch waits for at most this part of a sync's time ...
const LINGER_PART: u32 = 4;
/// ... and at most so long.
const MAX_LINGER: Duration = Duration::from_millis(2);

/// The most that a patient record waits for company.
pub(super) const MAX_NAP: Duration = Duration::from_millis(6);
/// A nap is as long as so many records take to come, if it can be.
const NAP_RECORDS: u32 = 3;
/// After so many batches of one record naps are in vain: one client alone commits for one tenant after the other ...
const ALONE: u32 = 8;
/// ... and are not taken for so many batches.
const AWAKE: u32 = 512;
/// Only who appends less often than every so many naps is patient: a nap takes at most a tenth of the time between two ...
const SELDOM_NAPS: u32 = 10;
/// ... and less often than that: where many append so often gathering makes larger batches than naps do.
const SELDOM: Duration = Duration::from_millis(20);

/// Whether who has appended last so long ago does it so seldom that a nap does not hold him up.
pub(super) fn is_seldom(since: Duration, nap: Duration) -> bool {
    since >= SELDOM.max(nap * SELDOM_NAPS)
}

/// The most that a record of a thread that says when it rests waits for others: a few transactions.
pub(super) const MAX_GATHERING: Duration = Duration::from_micros(250);
/// The first batches of a round do not gather ...
const PLAIN_ENDS: u32 = 8;
/// ... the next ones do ...
const TRIAL_ENDS: u32 = 16;
/// ... and the rest do what was better: not for long if that is to gather, since plain batches cost little ...
const GATHERING_ENDS: u32 = 256;
/// ... and for longer if it is not: trying in vain, a batch may take twice as long as a plain one.
const ROUND_ENDS: u32 = 2048;
/// Records that must be due within that time.
const GATHERED_RECORDS: u32 = 2;
/// Gathering must make batches so many times as large: else it is latency for nothing.
const GATHERING_PAYS: u64 = 2;

/// Whether records should gather, found out by trying.
#[derive(Default)]
struct Trial {
    /// Batches of this round so far.
    batches: u32,
    /// Records in the batches of this round's trials, without and with gathering.
    plain: u64,
    gathered: u64,
}

impl Trial {
    /// Whether the next batch shall gather.
    fn gathers(&self) -> bool {
        match self.batches {
            0..PLAIN_ENDS => false,
            PLAIN_ENDS..TRIAL_ENDS => true,
            _ => self.pays(),
        }
    }

    fn pays(&self) -> bool {
        self.gathered >= GATHERING_PAYS * self.plain
    }

    /// A batch of so many records is complete.
    fn taken(&mut self, records: u64) {
        match self.batches {
            0..PLAIN_ENDS => self.plain += records,
            PLAIN_ENDS..TRIAL_ENDS => self.gathered += records,
            _ => {}
        }
        self.batches += 1;
        let ends = if self.pays() { GATHERING_ENDS } else { ROUND_ENDS };
        if self.batches >= ends {
            *self = Trial::default();
        }
    }
}

/// What the batches of late were like.
#[derive(Default)]
pub(super) struct Batching {
    /// The records that the next batch can be expected to have: a peak that decays by an eighth with each batch.
    expected_records: u64,
    /// The smoothed time between two records.
    gap: Option<Duration>,
    /// When the last batch was taken.
    taken: Option<Instant>,
    /// Successive batches of one record, of which a nap might have made more.
    alone: u32,
    /// Batches for which no nap is taken.
    awake: u32,
    trial: Trial,
}

impl Batching {
    /// How long a batch of so many records may wait for more, if a sync takes so long.
    pub(super) fn patience(&self, records: u64, sync: Duration) -> Duration {
        match sync >= SLOW_SYNC && records < self.expected_records {
            true => (sync / LINGER_PART).min(MAX_LINGER),
            false => Duration::ZERO,
        }
    }

    /// How long to wait for patient records, if they come so often that more than one can be expected.
    pub(super) fn nap(&self) -> Option<Duration> {
        let gap = self.gap.filter(|_| self.awake == 0);
        gap.filter(|gap| *gap < MAX_NAP).map(|gap| (gap * NAP_RECORDS).min(MAX_NAP))
    }

    /// Whether records of the next batch should gather, if a sync takes so long: where it takes long they do so by themselves, and
    /// where they come seldom it is in vain.
    pub(super) fn gathers(&mut self, sync: Duration) -> bool {
        let frequent = self.gap.is_some_and(|gap| gap * GATHERED_RECORDS <= MAX_GATHERING);
        if sync >= SLOW_SYNC || !frequent {
            self.trial = Trial::default();
            return false;
        }
        self.trial.gathers()
    }

    /// A batch of so many records is on its way.
    pub(super) fn taken(&mut self, records: u64, now: Instant) {
        let decayed = self.expected_records - self.expected_records.div_ceil(8);
        self.expected_records = records.max(decayed);
        self.trial.taken(records);
        (self.alone, self.awake) = match (self.awake, self.nap().is_some() && records <= 1) {
            (0, true) if self.alone + 1 == ALONE => (0, AWAKE),
            (0, true) => (self.alone + 1, 0),
            (awake, _) => (0, awake.saturating_sub(1)),
        };
        if let Some(last) = self.taken.replace(now) {
            // A long silence counts for no more than it must: that the next record will be alone.
            let gap = (now - last).min(8 * MAX_NAP) / u32::try_from(records).unwrap_or(u32::MAX).max(1);
            self.gap = Some(self.gap.map_or(gap, |before| before - before / 8 + gap / 8));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slow_syncs_and_small_batches_wait_and_not_for_long() {
        let (mut batching, now) = (Batching::default(), Instant::now());
        assert!(batching.patience(1, SLOW_SYNC).is_zero(), "nothing is known yet");
        batching.taken(32, now);
        assert!(batching.patience(1, SLOW_SYNC / 2).is_zero());
        assert!(batching.patience(32, SLOW_SYNC * 4).is_zero());
        assert_eq!(batching.patience(31, SLOW_SYNC * 4), SLOW_SYNC);
        assert_eq!(batching.patience(1, Duration::from_secs(1)), MAX_LINGER);
    }

    #[test]
    fn who_is_left_alone_soon_waits_no_more() {
        let (mut batching, now) = (Batching::default(), Instant::now());
        batching.taken(1000, now);
        for _ in 0..50 {
            batching.taken(1, now);
        }
        assert!(batching.patience(1, SLOW_SYNC).is_zero());
    }

    #[test]
    fn records_gather_where_that_makes_batches_twice_as_large() {
        let sync = SLOW_SYNC / 20;
        let gathering = |plain, gathered, gap| {
            let (mut batching, mut now) = (Batching::default(), Instant::now());
            let mut all = 0;
            for _ in 0..2 * ROUND_ENDS {
                let gathers = batching.gathers(sync);
                all += u32::from(gathers);
                let records = if gathers { gathered } else { plain };
                now += gap * records as u32;
                batching.taken(records, now);
            }
            all
        };
        let (often, seldom) = (Duration::from_micros(50), Duration::from_micros(200));
        let (trials, plain) = (2 * (TRIAL_ENDS - PLAIN_ENDS), 2 * ROUND_ENDS / GATHERING_ENDS * PLAIN_ENDS);
        // (The gap is not known before the first batch, so the first round begins with the second.)
        assert_eq!(gathering(2, 3, often), trials);
        assert_eq!(gathering(2, 5, often), 2 * ROUND_ENDS - plain - 1);
        assert_eq!(gathering(2, 5, seldom), 0);
        let (mut batching, now) = (Batching::default(), Instant::now());
        for _ in 0..100 {
            batching.taken(20, now);
            assert!(!batching.gathers(SLOW_SYNC), "the next batch grows while the disk is busy");
        }
    }

    #[test]
    fn naps_are_for_records_that_come_often() {
        let (mut batching, mut now) = (Batching::default(), Instant::now());
        assert_eq!(batching.nap(), None, "nothing is known yet");
        let mut come = |records, gap| {
            for _ in 0..100 {
                now += gap;
                batching.taken(records, now);
            }
            batching.nap()
        };
        let ms = Duration::from_millis;
        assert_eq!(come(1, ms(10)), None, "nobody else would come");
        assert_eq!(come(2, ms(6)), Some(MAX_NAP));
        let nap = come(10, ms(1)).expect("ten in a millisecond");
        assert!((Duration::from_micros(290)..Duration::from_micros(310)).contains(&nap), "{nap:?}");
        assert_eq!(come(1, ms(8)), None, "as soon as they come less often");
    }

    #[test]
    fn who_commits_alone_is_not_held_up() {
        let (mut batching, mut now) = (Batching::default(), Instant::now());
        let mut naps = |records, batches: u32| {
            let mut naps = 0;
            for _ in 0..batches {
                naps += u32::from(batching.nap().is_some());
                now += Duration::from_millis(1);
                batching.taken(records, now);
            }
            naps
        };
        let in_a_row = naps(1, 10_000);
        assert!((ALONE..10_000 / 50).contains(&in_a_row), "{in_a_row} naps");
        naps(2, AWAKE);
        assert_eq!(naps(2, 1000), 1000, "others have come");
        for _ in 0..1000 {
            assert_eq!(naps(1, ALONE / 2), ALONE / 2, "one alone now and then is nothing");
            naps(3, 1);
        }
    }
}
