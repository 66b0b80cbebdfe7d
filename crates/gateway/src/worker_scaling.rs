//! Worker scaling: decides how many worker threads are active, and assigns sessions to them.
//!
//! A node starts one worker thread per CPU. Under light load, using all of them wastes CPU: two
//! workers at 25 % utilization wake up almost twice as often as one worker at 50 %, and share cache
//! lines, which costs about 12 % more CPU time for the same work. Sessions are therefore packed
//! onto the first `active` workers, and `active` follows the load:
//!
//! - Scale up: a worker was more than 75 % busy for three consecutive 20 ms windows, and a CPU is
//!   available for one more worker (see below).
//! - Scale down: the CPU time that all active workers use would keep one worker fewer below 50 %
//!   utilization, for 1 s.
//!
//! # CPU availability
//!
//! A CPU counts as available if, during the busy period, at least 25 % of one was idle, or the
//! busy worker itself spent at least 40 % of the time waiting to be scheduled. In the second case
//! other threads compete for the CPU, and two workers get a larger share than one. Otherwise the
//! CPUs are used by clients on the same machine and by the workers that serve them; one more worker
//! would only compete with them, and was measured to use 17 % more CPU time for the same
//! throughput.
//!
//! For the same reason, scaling down considers CPU time, not busy time: if CPUs are scarce, a busy
//! worker mostly waits to be scheduled.
//!
//! # Spare workers
//!
//! One worker per CPU is enough if sessions are always ready to run. It is not enough if sessions
//! often wait for disk reads. A session continues on the worker that it left, which may be busy
//! with another session or waiting to be scheduled behind a client, while all sessions of the next
//! worker are waiting for the disk. In a measurement, two workers on two CPUs left 20 % of both
//! idle, three left almost nothing idle. Therefore 50 % more workers are started as *spare*
//! workers, which are active only while the rate of blocking reads is high.
//!
//! # Placement of sessions
//!
//! The *home* of a session is one of the active workers, selected by the session's number. After a
//! response, a session that is not on its home worker, has no open transaction and has received no
//! further bytes migrates there: its state is sent to the other worker, which registers its socket.
//! An idle session therefore stays where it is. Sessions over TLS cannot migrate; they are
//! distributed over all regular workers when they are accepted.
//!
//! # Measurement
//!
//! Workers sample their own load while they work, so an idle node needs no timer. A worker that
//! could not sample for several windows, because a statement did not yield, was busy for all of
//! them. A worker that slept for several windows was idle for all of them.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::cpu_stats::{self, CpuTimes};
use crate::idle_time::{self, IdleTime};

/// The minimum length of a measurement window.
const WINDOW: Duration = Duration::from_millis(20);
/// A worker's load report is ignored after this time.
const REPORT_TTL: Duration = Duration::from_millis(200);
/// The number of consecutive busy windows before scaling up. More than one, because a single window
/// can be an artifact of scheduling.
const BUSY_WINDOWS: u32 = 3;
/// How long the load must be low before scaling down.
const SCALE_DOWN_DELAY: Duration = Duration::from_secs(1);
/// The busy share of a window above which the window is busy, in thousandths.
const BUSY_THRESHOLD: u32 = 750;
/// The CPU share per remaining worker below which one worker is deactivated, in thousandths.
const SCALE_DOWN_THRESHOLD: u32 = 500;
/// A CPU is available if the CPUs were idle for at least this share of the busy period, summed
/// over all CPUs. About 10 % of one CPU is idle even if clients on the same machine use all
/// they can get.
const MIN_IDLE_SHARE: f64 = 0.25;
/// A CPU is available if the busy worker waited to be scheduled for at least this share of the busy
/// period. A worker that shares two CPUs with two busy client threads waits for 33 %.
const MIN_RUN_QUEUE_SHARE: f64 = 0.4;
/// Spare workers are activated at this rate of blocking reads per CPU, and deactivated below half
/// of it.
const MIN_BLOCKING_READS_PER_SECOND: u32 = 2000;
/// The number of windows over which the rate of blocking reads is smoothed.
const SMOOTHED_WINDOWS: u32 = 8;

thread_local! {
    /// The start of the current window.
    static WINDOW_START: Cell<Option<LoadSample>> = const { Cell::new(None) };
    /// The start of this worker's current busy period: the end of its last window that was not
    /// busy, or its last request to scale up.
    static BUSY_PERIOD_START: Cell<Option<LoadSample>> = const { Cell::new(None) };
}

/// The load counters of a worker at a point in time.
#[derive(Clone, Copy)]
struct LoadSample {
    at: Instant,
    idle_time: IdleTime,
    /// Reads of this worker's sessions that waited for the disk.
    blocking_reads: u64,
    /// `None` if the kernel does not provide CPU times.
    cpu_times: Option<CpuTimes>,
}

/// The scaler of a gateway's workers, shared by all of them.
pub(crate) struct WorkerScaler {
    started: Instant,
    active: Arc<AtomicUsize>,
    /// `active` is set by the configuration and does not follow the load.
    is_fixed: bool,
    /// The first `regular` workers have a CPU each. The others are spare.
    regular: usize,
    slots: Box<[WorkerSlot]>,
    /// The start of the current period of low load, in microseconds since `started`. 0 if the load
    /// is not low.
    low_load_since_us: AtomicU64,
}

/// The last load report of a worker.
#[derive(Default)]
struct WorkerSlot {
    /// CPU time per window, in thousandths.
    used: AtomicU32,
    /// Blocking reads per second, smoothed.
    blocking_reads: AtomicU32,
    /// Consecutive busy windows.
    busy_windows: AtomicU32,
    /// The time of the report, in microseconds since `WorkerScaler::started`. 0 if there is none.
    reported_us: AtomicU64,
}

/// The load of a worker in one window.
#[derive(Clone, Copy)]
struct LoadReport {
    /// The share of the window in which the worker was awake, in thousandths.
    busy: u32,
    /// The share of the window in which the worker ran on a CPU, in thousandths.
    used: u32,
    /// Blocking reads per second.
    blocking_reads: u32,
    window: Duration,
    /// An idle CPU is available for another worker.
    cpu_idle: bool,
    /// CPUs are contended, and another worker would get a larger share of them.
    cpu_contended: bool,
}

impl LoadReport {
    /// The length of the window, in multiples of [`WINDOW`].
    fn windows(&self) -> u32 {
        (self.window.as_micros() / WINDOW.as_micros()).try_into().unwrap_or(u32::MAX)
    }
}

impl WorkerSlot {
    /// Updates the smoothed rate of blocking reads.
    fn smooth_blocking_reads(&self, reads: u32, windows: u32) {
        let new = windows.min(SMOOTHED_WINDOWS);
        let before =
            u64::from(self.blocking_reads.load(Ordering::Relaxed)) * u64::from(SMOOTHED_WINDOWS - new);
        let smoothed = (before + u64::from(reads) * u64::from(new)) / u64::from(SMOOTHED_WINDOWS);
        self.blocking_reads.store(smoothed as u32, Ordering::Relaxed);
    }
}

/// The share of a window, in thousandths.
fn thousandths(time: Duration, window: Duration) -> u32 {
    (time.as_micros() * 1000 / window.as_micros().max(1)).min(1000) as u32
}

impl LoadSample {
    fn now(at: Instant, idle_time: IdleTime) -> LoadSample {
        let blocking_reads = fulmar_store::blocking_reads();
        LoadSample { at, idle_time, blocking_reads, cpu_times: cpu_stats::read() }
    }

    /// The load of the window between this sample and `now`.
    fn report(&self, now: &LoadSample, busy_period_start: &LoadSample) -> LoadReport {
        let window = now.at.saturating_duration_since(self.at);
        let slept = now.idle_time.total.saturating_sub(self.idle_time.total);
        let busy = 1000 - thousandths(slept, window);
        let processors = self.cpu_times.zip(now.cpu_times);
        let used =
            processors.map(|(before, after)| thousandths(after.used.saturating_sub(before.used), window));
        let blocking_reads = (now.blocking_reads - self.blocking_reads) as f64 / window.as_secs_f64();
        let (cpu_idle, cpu_contended) = busy_period_start.cpu_available(now);
        LoadReport {
            busy,
            used: used.unwrap_or(busy),
            blocking_reads: blocking_reads as u32,
            window,
            cpu_idle,
            cpu_contended,
        }
    }

    /// Returns whether a CPU was available for another worker since this sample: because a CPU was
    /// idle, and because CPUs were contended. Both are true if the kernel does not provide CPU
    /// times.
    fn cpu_available(&self, now: &LoadSample) -> (bool, bool) {
        let Some((before, after)) = self.cpu_times.zip(now.cpu_times) else { return (true, true) };
        let time = now.at.saturating_duration_since(self.at);
        let idle = after.idle.saturating_sub(before.idle) >= time.mul_f64(MIN_IDLE_SHARE);
        let contended = after.waited.saturating_sub(before.waited) >= time.mul_f64(MIN_RUN_QUEUE_SHARE);
        (idle, contended)
    }
}

impl WorkerScaler {
    /// Creates the scaler of `regular` regular workers, and half as many spare workers.
    pub(crate) fn new(regular: usize) -> WorkerScaler {
        WorkerScaler {
            started: Instant::now(),
            active: Arc::new(AtomicUsize::new(1)),
            is_fixed: false,
            regular,
            slots: (0..regular + regular / 2).map(|_| WorkerSlot::default()).collect(),
            low_load_since_us: AtomicU64::new(0),
        }
    }

    /// If `active` is given, takes the number of active workers from it instead of following the
    /// load.
    pub(crate) fn with_active(self, active: Option<Arc<AtomicUsize>>) -> WorkerScaler {
        match active {
            Some(active) => WorkerScaler { active, is_fixed: true, ..self },
            None => self,
        }
    }

    /// The worker on which a session should run now.
    pub(crate) fn home(&self, session: i32) -> usize {
        session.cast_unsigned() as usize % self.active.load(Ordering::Relaxed)
    }

    /// The number of workers, including spare workers.
    pub(crate) fn workers(&self) -> usize {
        self.slots.len()
    }

    /// The number of active workers.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::Relaxed)
    }

    /// Called by each worker between requests. Ends the current window if it is over.
    pub(crate) fn sample(&self, worker: usize, now: Instant) {
        if self.is_fixed {
            return;
        }
        let idle_time = idle_time::read();
        let Some(window_start) = WINDOW_START.get() else {
            let sample = Some(LoadSample::now(now, idle_time));
            WINDOW_START.set(sample);
            return BUSY_PERIOD_START.set(sample);
        };
        if now.saturating_duration_since(window_start.at) < WINDOW {
            return;
        }
        let sample = LoadSample::now(now, idle_time);
        let report = window_start.report(&sample, &BUSY_PERIOD_START.get().unwrap_or(window_start));
        WINDOW_START.set(Some(sample));
        if self.report(worker, report, now.saturating_duration_since(self.started)) {
            BUSY_PERIOD_START.set(Some(sample));
        }
    }

    /// Records a worker's load for one window, and scales up or down. Returns true if the worker's
    /// busy period, if there was one, has ended.
    fn report(&self, worker: usize, report: LoadReport, now: Duration) -> bool {
        let now_us = now.as_micros() as u64;
        let Some(slot) = self.slots.get(worker) else { return true };
        slot.used.store(report.used, Ordering::Relaxed);
        slot.reported_us.store(now_us.max(1), Ordering::Relaxed);
        let windows = report.windows();
        slot.smooth_blocking_reads(report.blocking_reads, windows);
        let is_busy = report.busy > BUSY_THRESHOLD;
        let busy_windows =
            if is_busy { slot.busy_windows.load(Ordering::Relaxed) + windows.min(BUSY_WINDOWS) } else { 0 };
        let too_busy = busy_windows >= BUSY_WINDOWS;
        slot.busy_windows.store(if too_busy { 0 } else { busy_windows }, Ordering::Relaxed);
        let active = self.active();
        let can_scale_up = if active < self.regular {
            report.cpu_idle || report.cpu_contended
        } else {
            report.cpu_idle
                && active < self.slots.len()
                && self.blocking_reads(now_us) >= MIN_BLOCKING_READS_PER_SECOND
        };
        if too_busy && can_scale_up && worker < active {
            self.low_load_since_us.store(0, Ordering::Relaxed);
            self.try_resize(active, active + 1);
        } else if active > 1 {
            let began_us = now_us.saturating_sub(report.window.as_micros() as u64);
            self.consider_scale_down(active, began_us, now_us);
        }
        too_busy || !is_busy
    }

    /// The sum of a value over the recent reports of all workers.
    fn sum(&self, now_us: u64, value: impl Fn(&WorkerSlot) -> &AtomicU32) -> u32 {
        let is_recent = |slot: &&WorkerSlot| {
            let reported_us = slot.reported_us.load(Ordering::Relaxed);
            reported_us > 0 && now_us.saturating_sub(reported_us) < REPORT_TTL.as_micros() as u64
        };
        let values = self.slots.iter().filter(is_recent).map(|slot| value(slot).load(Ordering::Relaxed));
        values.fold(0, u32::saturating_add)
    }

    /// Blocking reads per second and CPU.
    fn blocking_reads(&self, now_us: u64) -> u32 {
        self.sum(now_us, |slot| &slot.blocking_reads) / self.regular as u32
    }

    /// Deactivates a worker if the load has been low for [`SCALE_DOWN_DELAY`].
    fn consider_scale_down(&self, active: usize, began_us: u64, now_us: u64) {
        let used = self.sum(now_us, |slot| &slot.used);
        let spare_not_needed =
            active > self.regular && self.blocking_reads(now_us) < MIN_BLOCKING_READS_PER_SECOND / 2;
        if used >= (active as u32 - 1) * SCALE_DOWN_THRESHOLD && !spare_not_needed {
            return self.low_load_since_us.store(0, Ordering::Relaxed);
        }
        let since_us = match self.low_load_since_us.load(Ordering::Relaxed) {
            0 => began_us,
            since_us => since_us,
        };
        let over = now_us.saturating_sub(since_us) >= SCALE_DOWN_DELAY.as_micros() as u64;
        self.low_load_since_us.store(if over { 0 } else { since_us.max(1) }, Ordering::Relaxed);
        if over {
            self.try_resize(active, active - 1);
        }
    }

    /// Changes the number of active workers. Of concurrent calls exactly one succeeds.
    fn try_resize(&self, from: usize, to: usize) {
        let _ = self.active.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(busy: u32, windows: u32) -> LoadReport {
        let (blocking_reads, window) = (0, windows * WINDOW);
        LoadReport { busy, used: busy, blocking_reads, window, cpu_idle: true, cpu_contended: true }
    }

    #[test]
    fn scales_up_immediately_and_down_after_a_delay() {
        let scaler = WorkerScaler::new(4);
        let mut now = Duration::ZERO;
        let mut report = |loads: &[u32]| {
            now += WINDOW;
            for (worker, busy) in loads.iter().enumerate() {
                scaler.report(worker, load(*busy, 1), now);
            }
            scaler.active()
        };
        assert_eq!(report(&[700]), 1);
        assert_eq!(
            (report(&[900]), report(&[900]), report(&[300])),
            (1, 1, 1),
            "two busy windows must not trigger scale-up"
        );
        assert_eq!((report(&[900]), report(&[900]), report(&[900])), (1, 1, 2));
        assert_eq!(report(&[600, 600]), 2);
        assert_eq!((report(&[600, 900]), report(&[600, 900]), report(&[600, 900])), (2, 2, 3));
        for _ in 0..40 {
            assert_eq!(report(&[200, 200, 200]), 3, "the delay is not over yet");
        }
        assert_eq!(report(&[400, 400, 400]), 3, "load above the threshold must reset the delay");
        for _ in 0..40 {
            assert_eq!(report(&[200, 200, 200]), 3);
        }
        for _ in 0..12 {
            report(&[200, 200, 200]);
        }
        assert_eq!(report(&[300, 300]), 2);
        for _ in 0..100 {
            assert_eq!(report(&[300, 300]), 2, "the load is too high for one worker");
        }
        for _ in 0..52 {
            report(&[200, 200]);
        }
        assert_eq!(scaler.active(), 1);
    }

    #[test]
    fn idle_worker_does_not_block_scale_down() {
        let scaler = WorkerScaler::new(2);
        for ms in [20, 40, 60] {
            scaler.report(0, load(1000, 1), Duration::from_millis(ms));
            scaler.report(1, load(1000, 1), Duration::from_millis(ms));
        }
        assert_eq!(scaler.active(), 2);
        for ms in (1000..3000).step_by(20) {
            scaler.report(0, load(100, 1), Duration::from_millis(ms));
        }
        assert_eq!(scaler.active(), 1);
    }

    #[test]
    fn long_window_counts_as_several() {
        let scaler = WorkerScaler::new(2);
        scaler.report(0, load(1000, 2), 2 * WINDOW);
        assert_eq!(scaler.active(), 1);
        scaler.report(0, load(1000, BUSY_WINDOWS), 10 * WINDOW);
        assert_eq!(scaler.active(), 2);
        // No worker has reported for 2 s, because all of them slept.
        scaler.report(0, load(10, 100), 110 * WINDOW);
        assert_eq!(scaler.active(), 1);
    }

    #[test]
    fn does_not_scale_up_without_an_available_cpu() {
        let scaler = WorkerScaler::new(2);
        let no_cpu = LoadReport { cpu_idle: false, cpu_contended: false, ..load(1000, 1) };
        let ended = [1, 2, 3, 4].map(|window| scaler.report(0, no_cpu, window * WINDOW));
        assert_eq!(
            (ended, scaler.active()),
            ([false, false, true, false], 1),
            "the worker must retry after every busy period"
        );
        scaler.report(0, load(1000, 1), 5 * WINDOW);
        scaler.report(0, load(1000, 1), 6 * WINDOW);
        assert_eq!(scaler.active(), 2);
    }

    #[test]
    fn waiting_for_a_cpu_does_not_count_as_load() {
        let scaler = WorkerScaler::new(2);
        scaler.report(0, load(1000, BUSY_WINDOWS), 10 * WINDOW);
        assert_eq!(scaler.active(), 2);
        for window in 11..70 {
            scaler.report(0, LoadReport { used: 200, ..load(700, 1) }, window * WINDOW);
            scaler.report(1, LoadReport { used: 200, ..load(700, 1) }, window * WINDOW);
        }
        assert_eq!(scaler.active(), 1);
    }

    #[test]
    fn spare_workers_are_active_while_sessions_wait_for_the_disk() {
        let scaler = WorkerScaler::new(2);
        let now = Cell::new(Duration::ZERO);
        // All active workers report the same load for `windows` windows.
        let report = |windows: u32, load: LoadReport| {
            for _ in 0..windows {
                now.set(now.get() + WINDOW);
                (0..scaler.active()).for_each(|worker| _ = scaler.report(worker, load, now.get()));
            }
            scaler.active()
        };
        let blocking_reads = |blocking_reads| LoadReport { blocking_reads, ..load(900, 1) };
        assert_eq!(report(40, blocking_reads(1900)), 2, "the rate of blocking reads is too low");
        let (no_cpu, not_busy) = (
            LoadReport { cpu_idle: false, ..blocking_reads(9000) },
            LoadReport { busy: 600, ..blocking_reads(9000) },
        );
        assert_eq!(report(20, no_cpu), 2, "no CPU is idle");
        assert_eq!(report(20, not_busy), 2, "the workers are not busy");
        assert_eq!(report(10, blocking_reads(9000)), 3, "a spare worker must be activated");
        assert_eq!(
            report(100, blocking_reads(800)),
            3,
            "1,200 reads per second and CPU exceed the deactivation rate"
        );
        assert_eq!(report(40, blocking_reads(100)), 3, "the delay is not over yet");
        assert_eq!(report(40, blocking_reads(100)), 2);
        assert_eq!(report(10, blocking_reads(9000)), 3);
        assert_eq!(
            (report(40, load(900, 1)), report(1, blocking_reads(2000)), report(40, load(900, 1))),
            (3, 3, 2)
        );
    }

    #[test]
    fn session_home_is_an_active_worker() {
        let scaler = WorkerScaler::new(3);
        assert!((0..10).chain([i32::MIN, -1, i32::MAX]).all(|session| scaler.home(session) == 0));
        scaler.report(0, load(1000, BUSY_WINDOWS), 10 * WINDOW);
        let homes: Vec<usize> = (0..4).map(|session| scaler.home(session)).collect();
        assert_eq!(homes, [0, 1, 0, 1]);
    }
}
