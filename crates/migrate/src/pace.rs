//! The limits on the bytes that a migration copies per second: a maximum, and the latency of the
//! databases at both nodes.
//!
//! ```text
//!   node: latency over its bound  --every 250 ms-->  Throttle  --bytes per second-->  Pace --> copy
//! ```
//!
//! ShuttleDB (3.2) limits the rate so that a copy does not disturb the tenant and its neighbours. The
//! node reports the highest ratio of a smoothed latency to its bound. As long as that is at most 1,
//! the copy has no limit but the maximum. When the ratio exceeds 1, a PI controller takes over, at
//! the mean rate of the copy so far:
//!
//! - The error is `1 - ratio`, at least [`MIN_ERROR`]. The controller changes the logarithm of the
//!   rate, because a rate may have to change by a factor of 100: by [`PROPORTIONAL`] times the
//!   change of the error, and [`INTEGRAL`] times the error per second.
//! - The rate stays between a floor, so that every migration ends, and the rate at which the controller
//!   took over. The rate itself is the integral, so a controller at either end has nothing to unwind.
//! - The limit ends when the rate is back where it began and the ratio is below 1.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

/// The lowest rate. A quarter of the maximum, if that is less.
const MIN_BYTES_PER_S: f64 = (1 << 20) as f64;
const MIN_SHARE_OF_MAX: f64 = 0.25;
/// The least error: latencies far above the bound do not count more than this.
const MIN_ERROR: f64 = -2.0;
const PROPORTIONAL: f64 = 0.25;
const INTEGRAL: f64 = 1.0;
/// The rate changes during a wait.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// The PI controller.
#[derive(Clone, Copy, Debug)]
struct Controller {
    floor: f64,
    /// The limit; `None` while no latency exceeds its bound.
    limit: Option<Limit>,
}

#[derive(Clone, Copy, Debug)]
struct Limit {
    bytes_per_s: f64,
    /// The rate at which it began.
    ceiling: f64,
    /// The last error.
    error: f64,
}

impl Controller {
    fn new(max_bytes_per_s: Option<u64>) -> Controller {
        let share = max_bytes_per_s.map(|max| (max as f64 * MIN_SHARE_OF_MAX).max(1.0));
        Controller { floor: share.map_or(MIN_BYTES_PER_S, |share| share.min(MIN_BYTES_PER_S)), limit: None }
    }

    /// `ratio` is the latency over its bound, `elapsed` the time since the last call, and `mean` the
    /// bytes per second of the copy so far.
    fn update(&mut self, ratio: f64, mean: f64, elapsed: Duration) {
        let mut limit = match self.limit {
            Some(limit) => limit,
            None if ratio > 1.0 && mean > 0.0 => {
                let rate = mean.max(self.floor);
                Limit { bytes_per_s: rate, ceiling: rate, error: 0.0 }
            }
            None => return,
        };
        let error = (1.0 - ratio).max(MIN_ERROR);
        let change = PROPORTIONAL * (error - limit.error) + INTEGRAL * error * elapsed.as_secs_f64();
        limit.bytes_per_s = (limit.bytes_per_s * change.exp()).clamp(self.floor, limit.ceiling);
        limit.error = error;
        let has_ended = error > 0.0 && limit.bytes_per_s >= limit.ceiling;
        self.limit = (!has_ended).then_some(limit);
    }
}

/// How a copy was slowed down because of latencies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttled {
    /// How long it has waited.
    pub ms: u64,
    /// The lowest limit; `None` if there was none.
    pub lowest_bytes_per_s: Option<u64>,
}

/// The limits of a migration's copy.
#[derive(Debug)]
pub struct Throttle {
    max_bytes_per_s: Option<u64>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    controller: Controller,
    /// When latencies were last reported.
    reported: Instant,
    /// When the copy began, and the bytes copied since.
    begun: Option<Instant>,
    bytes: u64,
    /// The bytes that were copied too early for the limit, as of a time.
    debt: (f64, Instant),
    waited: Duration,
    lowest: Option<f64>,
}

impl Throttle {
    /// The limits of a copy.
    pub fn new(max_bytes_per_s: Option<u64>) -> Throttle {
        let now = Instant::now();
        let state = State {
            controller: Controller::new(max_bytes_per_s),
            reported: now,
            begun: None,
            bytes: 0,
            debt: (0.0, now),
            waited: Duration::ZERO,
            lowest: None,
        };
        Throttle { max_bytes_per_s, state: Mutex::new(state) }
    }

    /// The maximum.
    pub fn max_bytes_per_s(&self) -> Option<u64> {
        self.max_bytes_per_s
    }

    /// Reports the highest ratio of a latency to its bound, as of now. 0 if there is none.
    pub fn report(&self, ratio: f64) {
        let mut state = self.state.lock();
        let now = Instant::now();
        let elapsed = now - state.reported;
        if elapsed.is_zero() {
            return;
        }
        let copying = state.begun.map_or(Duration::ZERO, |begun| now - begun);
        let mean = if copying.is_zero() { 0.0 } else { state.bytes as f64 / copying.as_secs_f64() };
        state.controller.update(ratio, mean, elapsed);
        state.reported = now;
        if let Some(limit) = state.controller.limit {
            state.lowest = Some(state.lowest.map_or(limit.bytes_per_s, |low| low.min(limit.bytes_per_s)));
        }
    }

    /// How the copy was slowed down by now.
    pub fn throttled(&self) -> Throttled {
        let state = self.state.lock();
        Throttled {
            ms: state.waited.as_millis() as u64,
            lowest_bytes_per_s: state.lowest.map(|lowest| lowest as u64),
        }
    }

    fn begin(&self) {
        self.state.lock().begun.get_or_insert_with(Instant::now);
    }

    fn delay(&self) -> Option<Duration> {
        self.state.lock().delay()
    }

    /// Waits until more may be copied, as far as latencies are concerned.
    async fn settle(&self) {
        while let Some(delay) = self.delay() {
            let begun = Instant::now();
            sleep(delay).await;
            self.state.lock().waited += begun.elapsed();
        }
    }
}

impl State {
    /// Records that `bytes` were copied.
    fn record(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.pay();
        // The time that they took counts; that of a longer pause does not.
        self.debt.0 = self.debt.0.max(-(bytes as f64)) + bytes as f64;
    }

    /// Reduces the debt by what may have been copied since it was last changed.
    fn pay(&mut self) {
        let now = Instant::now();
        let (before, since) = self.debt;
        let debt = match self.controller.limit {
            Some(limit) => before - limit.bytes_per_s * (now - since).as_secs_f64(),
            None => 0.0,
        };
        self.debt = (debt, now);
    }

    /// How long to wait; `None` if there is no limit, or if the copy is within it.
    fn delay(&mut self) -> Option<Duration> {
        self.pay();
        let limit = self.controller.limit?;
        let delay = Duration::from_secs_f64((self.debt.0 / limit.bytes_per_s).max(0.0));
        // A timer has a resolution of a millisecond.
        (delay >= Duration::from_millis(1)).then_some(delay.min(MAX_SLEEP))
    }
}

/// Delays a copy so that it stays within its limits.
#[derive(Debug)]
pub struct Pace<'a> {
    throttle: &'a Throttle,
    begun: Instant,
    bytes: u64,
}

impl<'a> Pace<'a> {
    /// A pace within these limits, from now on.
    pub fn new(throttle: &'a Throttle) -> Pace<'a> {
        throttle.begin();
        Pace { throttle, begun: Instant::now(), bytes: 0 }
    }

    /// Records that `bytes` were copied, and waits until more may be.
    pub async fn copied(&mut self, bytes: u64) {
        self.bytes += bytes;
        // The wait for the maximum counts for the other limit as well.
        self.throttle.state.lock().record(bytes);
        if let Some(bytes_per_s) = self.throttle.max_bytes_per_s {
            let spent_s = self.bytes as f64 / bytes_per_s.max(1) as f64;
            // A day is longer than any migration.
            sleep_until(self.begun + Duration::from_secs_f64(spent_s.min(86_400.0))).await;
        }
        self.throttle.settle().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = (1 << 20) as f64;
    const INTERVAL: Duration = Duration::from_millis(250);
    /// The bytes of a batch.
    const BATCH: u64 = 256 << 10;

    /// A server of which a copy takes a share: the latency is `1 / (1 - utilisation)`, smoothed.
    struct Server {
        /// The utilisation without the copy.
        load: f64,
        /// The rate of a copy that would use all of it.
        capacity: f64,
        smoothed: f64,
    }

    impl Server {
        fn new(load: f64, capacity: f64) -> Server {
            Server { load, capacity, smoothed: 1.0 / (1.0 - load) }
        }

        /// The smoothed latency after an interval with a copy at this rate.
        fn latency(&mut self, bytes_per_s: f64) -> f64 {
            let utilisation = (self.load + bytes_per_s / self.capacity).min(0.98);
            self.smoothed += 0.8 * (1.0 / (1.0 - utilisation) - self.smoothed);
            self.smoothed
        }
    }

    /// Copies for a time from a disk of 125 MiB/s. Returns the mean rate, and the highest and lowest
    /// ratio of the last half.
    async fn copy(throttle: &Throttle, server: &mut Server, (bound, seconds): (f64, u64)) -> (f64, f64, f64) {
        let begun = Instant::now();
        let end = begun + Duration::from_secs(seconds);
        let bytes = std::cell::Cell::new(0u64);
        let copying = async {
            let mut pace = Pace::new(throttle);
            loop {
                sleep(Duration::from_millis(2)).await;
                bytes.set(bytes.get() + BATCH);
                pace.copied(BATCH).await;
            }
        };
        let (mut low, mut high) = (f64::MAX, f64::MIN);
        let reporting = async {
            let mut before = 0;
            while Instant::now() < end {
                sleep(INTERVAL).await;
                let rate = (bytes.get() - before) as f64 / INTERVAL.as_secs_f64();
                before = bytes.get();
                let ratio = server.latency(rate) / bound;
                throttle.report(ratio);
                if begun.elapsed() > Duration::from_secs(seconds / 2) {
                    (low, high) = (low.min(ratio), high.max(ratio));
                }
            }
        };
        tokio::select! {
            () = copying => {}
            () = reporting => {}
        }
        (bytes.get() as f64 / begun.elapsed().as_secs_f64(), low, high)
    }

    #[tokio::test(start_paused = true)]
    async fn copies_at_the_rate() {
        let begun = Instant::now();
        let limited = Throttle::new(Some(1_000));
        let mut pace = Pace::new(&limited);
        for _ in 0..4 {
            pace.copied(500).await;
        }
        assert_eq!(begun.elapsed(), Duration::from_secs(2));
        let unlimited = Throttle::new(None);
        let mut pace = Pace::new(&unlimited);
        pace.copied(u64::MAX / 2).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(2));
    }

    #[tokio::test(start_paused = true)]
    async fn copy_is_not_slowed_down_below_the_bound() {
        let throttle = Throttle::new(None);
        let (rate, ..) = copy(&throttle, &mut Server::new(0.1, 1000.0 * MIB), (5.0, 20)).await;
        assert!(rate > 110.0 * MIB, "{rate}");
        assert_eq!(throttle.throttled(), Throttled::default());
    }

    /// The rate at which the latency equals its bound is known for each of these servers.
    #[tokio::test(start_paused = true)]
    async fn copy_is_as_fast_as_the_bound_allows() {
        for (load, capacity, bound, expected) in
            [(0.3, 200.0, 2.5, 60.0), (0.5, 400.0, 3.0, 66.7), (0.2, 100.0, 5.0, 60.0), (0.6, 30.0, 4.0, 4.5)]
        {
            let throttle = Throttle::new(None);
            let mut server = Server::new(load, capacity * MIB);
            copy(&throttle, &mut server, (bound, 20)).await;
            let (rate, low, high) = copy(&throttle, &mut server, (bound, 40)).await;
            assert!((rate / MIB / expected - 1.0).abs() < 0.1, "{rate} at {load}, {capacity}, {bound}");
            assert!(low > 0.75 && high < 1.3, "{low} to {high} at {load}, {capacity}, {bound}");
            assert!(throttle.throttled().ms > 10_000, "{:?}", throttle.throttled());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rate_has_a_floor_and_recovers_without_delay() {
        let throttle = Throttle::new(None);
        // The latency exceeds the bound also without the copy.
        let mut server = Server::new(0.9, 200.0 * MIB);
        copy(&throttle, &mut server, (2.0, 60)).await;
        let (rate, ..) = copy(&throttle, &mut server, (2.0, 60)).await;
        assert!((rate / MIN_BYTES_PER_S - 1.0).abs() < 0.1, "{rate}");
        assert_eq!(throttle.throttled().lowest_bytes_per_s, Some(MIN_BYTES_PER_S as u64));
        // After two minutes at the floor there is nothing to unwind.
        server.load = 0.0;
        copy(&throttle, &mut server, (200.0, 10)).await;
        let before = throttle.throttled().ms;
        let (rate, ..) = copy(&throttle, &mut server, (200.0, 10)).await;
        assert!(rate > 110.0 * MIB, "{rate}");
        assert_eq!(throttle.throttled().ms, before, "the limit must have ended");
    }

    #[tokio::test(start_paused = true)]
    async fn maximum_holds_and_lowers_the_floor() {
        let throttle = Throttle::new(Some(2 << 20));
        let mut server = Server::new(0.9, 200.0 * MIB);
        let (rate, ..) = copy(&throttle, &mut server, (1e6, 30)).await;
        assert!((rate / (2.0 * MIB) - 1.0).abs() < 0.1, "{rate}");
        copy(&throttle, &mut server, (2.0, 30)).await;
        let (rate, ..) = copy(&throttle, &mut server, (2.0, 60)).await;
        assert!((rate / (0.5 * MIB) - 1.0).abs() < 0.1, "{rate}");
    }
}
