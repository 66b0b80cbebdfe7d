//! Throttle of compaction: limits the bytes written per second and the share of one CPU.
//!
//! ```text
//!   read, verify, copy, write a batch     sleep until the batch has taken its minimum time:
//!   '------- bytes, CPU time -------'       max(bytes / 32 MiB/s, CPU time * 4)
//! ```
//!
//! Each batch is considered by itself: a long wait for the store earns no credit for later batches.
//! CPU time is that of the thread while it polls the merge ([`measure_cpu`]): indexes, checksums,
//! copies. Work of other threads, mainly sending, is covered by the byte limit.
//!
//! A node has one throttle, held by the running compaction, so one merge's debt delays the next
//! merge. A single sleep is at most [`MAX_SLEEP`], and the rest of the debt is carried over.
//! Stopping the task waits for at most one sleep.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

/// Write rate: what a slower disk or network can spare next to the log.
const BYTES_PER_SECOND: u64 = 32 << 20;
/// Compaction may use 1/4 of one CPU.
const CPU_DIVISOR: u32 = 4;
/// Maximum duration of one sleep. The rest of the debt is carried over.
const MAX_SLEEP: Duration = Duration::from_millis(500);

/// CPU time used since the last sleep, in nanoseconds.
#[derive(Default)]
pub(crate) struct CpuTime(AtomicU64);

impl CpuTime {
    fn add(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn take(&self) -> Duration {
        Duration::from_nanos(self.0.swap(0, Ordering::Relaxed))
    }
}

/// Limits a compaction to both budgets.
pub(crate) struct CompactionThrottle {
    spent: Arc<CpuTime>,
    /// When the next batch begins; in the future while there is a debt.
    begun: Instant,
}

impl Default for CompactionThrottle {
    fn default() -> Self {
        CompactionThrottle { spent: Arc::default(), begun: Instant::now() }
    }
}

impl CompactionThrottle {
    /// The counter for [`measure_cpu`].
    pub(crate) fn cpu_time(&self) -> Arc<CpuTime> {
        self.spent.clone()
    }

    /// Begins a merge: time since the last batch does not count.
    pub(crate) fn begin(&mut self) {
        self.begun = self.begun.max(Instant::now());
    }

    /// Sleeps for the work done since the last call, including `bytes` written. With `in_a_hurry`
    /// it does not sleep, and clears the debt.
    pub(crate) async fn throttle(&mut self, bytes: u64, in_a_hurry: bool) {
        // The current poll's CPU time is added when the poll ends.
        tokio::task::yield_now().await;
        let due = min_duration(bytes, self.spent.take());
        if in_a_hurry {
            self.begun = Instant::now();
            return;
        }
        let until = self.begun + due;
        tokio::time::sleep_until(until.min(Instant::now() + MAX_SLEEP)).await;
        self.begun = until.max(Instant::now());
    }
}

/// Minimum duration of a batch.
fn min_duration(bytes: u64, cpu_time: Duration) -> Duration {
    let writing = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND as f64);
    writing.max(cpu_time * CPU_DIVISOR)
}

/// Runs a future, and adds the CPU time of its polls to `spent`.
pub(crate) async fn measure_cpu<T>(cpu_time: Arc<CpuTime>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    std::future::poll_fn(|context| poll_measured(&cpu_time, work.as_mut(), context)).await
}

fn poll_measured<T>(
    cpu_time: &CpuTime,
    work: Pin<&mut impl Future<Output = T>>,
    context: &mut Context<'_>,
) -> Poll<T> {
    let before = thread_time();
    let polled = work.poll(context);
    cpu_time.add(thread_time().saturating_sub(before));
    polled
}

/// CPU time of the calling thread, user and system.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// The clock advances only while the throttle sleeps; timers round up to milliseconds.
    async fn sleep_time(throttle: &mut CompactionThrottle, bytes: u64, cpu_time: Duration) -> Duration {
        throttle.spent.add(cpu_time);
        let began = Instant::now();
        throttle.throttle(bytes, false).await;
        began.elapsed()
    }

    fn assert_about(rested: Duration, expected: Duration) {
        assert!(
            rested + 2 * MS > expected && rested < expected + 2 * MS,
            "slept {rested:?}, expected {expected:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn batch_takes_the_time_of_the_scarcer_budget() {
        let mut throttle = CompactionThrottle::default();
        assert_about(sleep_time(&mut throttle, BYTES_PER_SECOND / 10, MS).await, 100 * MS);
        assert_about(sleep_time(&mut throttle, BYTES_PER_SECOND / 10, 50 * MS).await, 200 * MS);
        assert_about(sleep_time(&mut throttle, 0, 50 * MS).await, 200 * MS);
        // The batch's own duration counts, but only for this batch.
        tokio::time::sleep(150 * MS).await;
        assert_about(sleep_time(&mut throttle, 0, 50 * MS).await, 50 * MS);
        tokio::time::sleep(1000 * MS).await;
        assert_about(sleep_time(&mut throttle, 0, 50 * MS).await, Duration::ZERO);
        assert_about(sleep_time(&mut throttle, 0, 50 * MS).await, 200 * MS);
        // The time before a merge does not count.
        tokio::time::sleep(1000 * MS).await;
        throttle.begin();
        assert_about(sleep_time(&mut throttle, 0, 50 * MS).await, 200 * MS);
    }

    #[tokio::test(start_paused = true)]
    async fn sleep_is_bounded_and_the_debt_is_carried_over() {
        let mut throttle = CompactionThrottle::default();
        assert_about(sleep_time(&mut throttle, 0, 300 * MS).await, MAX_SLEEP);
        throttle.begin();
        assert_about(sleep_time(&mut throttle, 0, Duration::ZERO).await, MAX_SLEEP);
        assert_about(sleep_time(&mut throttle, 0, Duration::ZERO).await, 1200 * MS - 2 * MAX_SLEEP);
        assert_about(sleep_time(&mut throttle, 0, Duration::ZERO).await, Duration::ZERO);
        // In a hurry there is no debt, neither now nor later.
        throttle.spent.add(300 * MS);
        let began = Instant::now();
        throttle.throttle(BYTES_PER_SECOND, true).await;
        assert_about(sleep_time(&mut throttle, 0, Duration::ZERO).await, Duration::ZERO);
        assert_about(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn cpu_time_counts_and_waiting_does_not() {
        const WORK: Duration = Duration::from_millis(5);
        let cpu_time = Arc::new(CpuTime::default());
        measure_cpu(cpu_time.clone(), async {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            let until = thread_time() + WORK;
            while thread_time() < until {}
        })
        .await;
        let counted = cpu_time.take();
        assert!(counted >= WORK && counted < Duration::from_secs(60), "{counted:?}");
        assert_eq!(cpu_time.take(), Duration::ZERO);
    }
}
