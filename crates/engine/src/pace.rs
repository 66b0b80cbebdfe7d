//! How much of the machine merging takes at most: bytes that are written in a second, and a share of one processor.
//!
//! ```text
//!   read, check, copy, write a piece      rest, until the piece has had the time that it is worth, the greater of
//!   '--- bytes, processor time ---'         its bytes / 32 MiB a second   and   its processor time * 4
//! ```
//!
//! Each piece is looked at for itself: who has waited for the store for a minute does not make up for it. The processor time is that
//! of the thread while the merge is polled ([`measured`]): indexes, checksums, copies. What other threads do for it, sending
//! above all, goes with the bytes.
//!
//! A node has one pace, which whoever compacts holds. So what one merge owes the next one rests for, and pauses stay short
//! ([`LONGEST_REST`]) without being forgiven: a stop waits for one of them at most.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

/// Bytes that are written in a second: what a disk or a network of the slower kind has to spare beside the log.
const BYTES_PER_SECOND: u64 = 32 << 20;
/// One part in so many of a processor's time.
const PROCESSOR_SHARE: u32 = 4;
/// One pause. The rest of what is owed comes with the next ones.
const LONGEST_REST: Duration = Duration::from_millis(500);

/// Processor time that has been spent and not been rested for, nanoseconds.
#[derive(Default)]
pub(crate) struct Spent(AtomicU64);

impl Spent {
    fn add(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn take(&self) -> Duration {
        Duration::from_nanos(self.0.swap(0, Ordering::Relaxed))
    }
}

/// Keeps who merges within both budgets.
pub(crate) struct Pace {
    spent: Arc<Spent>,
    /// When the next piece begins. In the future if that is owed still.
    begun: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { spent: Arc::default(), begun: Instant::now() }
    }
}

impl Pace {
    /// For [`measured`].
    pub(crate) fn spent(&self) -> Arc<Spent> {
        self.spent.clone()
    }

    /// Begins anew: what has passed since the last piece was none of anybody's.
    pub(crate) fn begin(&mut self) {
        self.begun = self.begun.max(Instant::now());
    }

    /// Rests for what has been done since the last time, `bytes` written among it. Who is in a hurry owes nothing.
    pub(crate) async fn rest(&mut self, bytes: u64, in_a_hurry: bool) {
        // What this poll has taken counts when it ends.
        tokio::task::yield_now().await;
        let due = worth(bytes, self.spent.take());
        if in_a_hurry {
            self.begun = Instant::now();
            return;
        }
        let until = self.begun + due;
        tokio::time::sleep_until(until.min(Instant::now() + LONGEST_REST)).await;
        self.begun = until.max(Instant::now());
    }
}

/// How long work may take at least.
fn worth(bytes: u64, spent: Duration) -> Duration {
    let writing = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND as f64);
    writing.max(spent * PROCESSOR_SHARE)
}

/// Does something, and counts what it takes of the threads that poll it.
pub(crate) async fn measured<T>(spent: Arc<Spent>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    std::future::poll_fn(|context| poll_measured(&spent, work.as_mut(), context)).await
}

fn poll_measured<T>(
    spent: &Spent,
    work: Pin<&mut impl Future<Output = T>>,
    context: &mut Context<'_>,
) -> Poll<T> {
    let before = thread_time();
    let polled = work.poll(context);
    spent.add(thread_time().saturating_sub(before));
    polled
}

/// What the calling thread has used of processors, user and system.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Time stands still but for rests, which timers round up to milliseconds.
    async fn rests(pace: &mut Pace, bytes: u64, spent: Duration) -> Duration {
        pace.spent.add(spent);
        let began = Instant::now();
        pace.rest(bytes, false).await;
        began.elapsed()
    }

    fn is_about(rested: Duration, expected: Duration) {
        assert!(rested + 2 * MS > expected && rested < expected + 2 * MS, "{rested:?}, not {expected:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_piece_takes_the_time_of_the_scarcer_budget() {
        let mut pace = Pace::default();
        is_about(rests(&mut pace, BYTES_PER_SECOND / 10, MS).await, 100 * MS);
        is_about(rests(&mut pace, BYTES_PER_SECOND / 10, 50 * MS).await, 200 * MS);
        is_about(rests(&mut pace, 0, 50 * MS).await, 200 * MS);
        // What the piece has taken by itself counts, and no more than for that piece.
        tokio::time::sleep(150 * MS).await;
        is_about(rests(&mut pace, 0, 50 * MS).await, 50 * MS);
        tokio::time::sleep(1000 * MS).await;
        is_about(rests(&mut pace, 0, 50 * MS).await, Duration::ZERO);
        is_about(rests(&mut pace, 0, 50 * MS).await, 200 * MS);
        // Before a merge there was none.
        tokio::time::sleep(1000 * MS).await;
        pace.begin();
        is_about(rests(&mut pace, 0, 50 * MS).await, 200 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_short_and_what_is_owed_is_rested_for() {
        let mut pace = Pace::default();
        is_about(rests(&mut pace, 0, 300 * MS).await, LONGEST_REST);
        pace.begin();
        is_about(rests(&mut pace, 0, Duration::ZERO).await, LONGEST_REST);
        is_about(rests(&mut pace, 0, Duration::ZERO).await, 1200 * MS - 2 * LONGEST_REST);
        is_about(rests(&mut pace, 0, Duration::ZERO).await, Duration::ZERO);
        // Who is in a hurry owes nothing, now or later.
        pace.spent.add(300 * MS);
        let began = Instant::now();
        pace.rest(BYTES_PER_SECOND, true).await;
        is_about(rests(&mut pace, 0, Duration::ZERO).await, Duration::ZERO);
        is_about(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_thread_does_counts_and_waiting_does_not() {
        const WORK: Duration = Duration::from_millis(5);
        let spent = Arc::new(Spent::default());
        measured(spent.clone(), async {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            let until = thread_time() + WORK;
            while thread_time() < until {}
        })
        .await;
        let counted = spent.take();
        assert!(counted >= WORK && counted < Duration::from_secs(60), "{counted:?}");
        assert_eq!(spent.take(), Duration::ZERO);
    }
}
