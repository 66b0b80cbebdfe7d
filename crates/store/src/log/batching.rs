//! How long a batch waits for more records: see "Appending" in the log's description.

use std::time::Duration;

/// Syncs that are faster are never waited for: the next batch is soon on its way.
const SLOW_SYNC: Duration = Duration::from_millis(1);

/// A batch waits for at most this part of a sync's time ...
const LINGER_PART: u32 = 4;
/// ... and at most so long.
const MAX_LINGER: Duration = Duration::from_millis(2);

/// What the batches of late were like.
#[derive(Default)]
pub(super) struct Batching {
    /// The records that the next batch can be expected to have: a peak that decays by an eighth with each batch.
    expected_records: u64,
}

impl Batching {
    /// How long a batch of so many records may wait for more, if a sync takes so long.
    pub(super) fn patience(&self, records: u64, sync: Duration) -> Duration {
        match sync >= SLOW_SYNC && records < self.expected_records {
            true => (sync / LINGER_PART).min(MAX_LINGER),
            false => Duration::ZERO,
        }
    }

    /// A batch of so many records is on its way.
    pub(super) fn taken(&mut self, records: u64) {
        let decayed = self.expected_records - self.expected_records.div_ceil(8);
        self.expected_records = records.max(decayed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slow_syncs_and_small_batches_wait_and_not_for_long() {
        let mut batching = Batching::default();
        assert!(batching.patience(1, SLOW_SYNC).is_zero(), "nothing is known yet");
        batching.taken(32);
        assert!(batching.patience(1, SLOW_SYNC / 2).is_zero());
        assert!(batching.patience(32, SLOW_SYNC * 4).is_zero());
        assert_eq!(batching.patience(31, SLOW_SYNC * 4), SLOW_SYNC);
        assert_eq!(batching.patience(1, Duration::from_secs(1)), MAX_LINGER);
    }

    #[test]
    fn who_is_left_alone_soon_waits_no_more() {
        let mut batching = Batching::default();
        batching.taken(1000);
        for _ in 0..50 {
            batching.taken(1);
        }
        assert!(batching.patience(1, SLOW_SYNC).is_zero());
    }
}
