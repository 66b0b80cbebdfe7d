//! The limit on the bytes that a migration copies per second.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Delays a copy so that it stays below a rate.
#[derive(Debug)]
pub struct Pace {
    bytes_per_s: Option<u64>,
    begun: Instant,
    bytes: u64,
}

impl Pace {
    /// A pace of at most `bytes_per_s`, from now on. `None`: without a limit.
    pub fn new(bytes_per_s: Option<u64>) -> Pace {
        Pace { bytes_per_s, begun: Instant::now(), bytes: 0 }
    }

    /// Records that `bytes` were copied, and waits until more may be.
    pub async fn copied(&mut self, bytes: u64) {
        self.bytes += bytes;
        if let Some(bytes_per_s) = self.bytes_per_s {
            let spent_s = self.bytes as f64 / bytes_per_s.max(1) as f64;
            // A day is longer than any migration.
            sleep_until(self.begun + Duration::from_secs_f64(spent_s.min(86_400.0))).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn copies_at_the_rate() {
        let begun = Instant::now();
        let mut pace = Pace::new(Some(1_000));
        for _ in 0..4 {
            pace.copied(500).await;
        }
        assert_eq!(begun.elapsed(), Duration::from_secs(2));
        let mut pace = Pace::new(None);
        pace.copied(u64::MAX).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(2));
    }
}
