//! Monitors accesses per key: level 2 of the load monitor.
//!
//! ```text
//! statement --> sampler of the session: 1 of 16
//!                  |
//!               keys of its primary key, from the prepared statement
//!                  |
//!               SpaceSaving over all partitions of the node, for a window
//!                  |  end of the window
//!               KeyReport per partition, until the next one
//! ```
//!
//! A statement that is not sampled costs one load and one subtraction. Memory is bounded by the
//! number of counters, which all partitions share: a key with more than 1/10,000 of the node's
//! accesses is always found.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use fulmar_control::report::{KeyAccess, KeyReport};
use fulmar_control::space_saving::{Counter, SpaceSaving};
use fulmar_engine::{AccessedKeys, Value};
use fulmar_pages::PartitionId;
use hashbrown::HashMap;
use parking_lot::Mutex;

/// One of this many statements is sampled.
const SAMPLE_INTERVAL: u32 = 16;
/// Counters of sampled accesses.
const SAMPLE_COUNTERS: usize = 10_000;
/// Counters if every access is counted: exact up to this number of keys.
const FULL_COUNTERS: usize = 1 << 20;
/// Reports are kept for this many windows after their own.
const KEPT_WINDOWS: u32 = 10;

/// When accesses per key are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyMode {
    /// Never.
    Off,
    /// For a window when the node's CPU utilisation has reached the watermark or the controller
    /// asks for it, and again while that lasts (E-Store's second phase).
    #[default]
    Auto,
    /// Always.
    On,
    /// Always, and every access instead of a sample: E-Store's way.
    Full,
}

impl FromStr for KeyMode {
    type Err = String;

    fn from_str(text: &str) -> Result<KeyMode, String> {
        match text {
            "off" => Ok(KeyMode::Off),
            "auto" => Ok(KeyMode::Auto),
            "on" => Ok(KeyMode::On),
            "full" => Ok(KeyMode::Full),
            _ => Err("must be off, auto, on or full".to_owned()),
        }
    }
}

/// How accesses per key are counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyMonitoring {
    /// When.
    pub mode: KeyMode,
    /// E-Store's W: how long accesses are counted for a report.
    pub window: Duration,
    /// E-Store's k: the number of keys that a partition's report lists.
    pub keys: usize,
    /// The CPU utilisation that starts a window in [`KeyMode::Auto`].
    pub watermark: f64,
}

impl Default for KeyMonitoring {
    fn default() -> KeyMonitoring {
        KeyMonitoring { mode: KeyMode::Auto, window: Duration::from_secs(10), keys: 100, watermark: 0.8 }
    }
}

/// Selects the statements of a session that are sampled.
#[derive(Default)]
pub(crate) struct KeySampler {
    /// Statements up to the next sampled one. 0 before the first statement.
    left: u32,
}

impl KeySampler {
    /// Returns true if the next statement is sampled: one of `interval` on average, none if that is
    /// 0. Gaps are random, so that they do not coincide with a client's pattern.
    fn samples_next(&mut self, interval: u32) -> bool {
        if interval <= 1 {
            return interval == 1;
        }
        if self.left == 0 {
            self.left = rand::random_range(1..=interval);
        }
        self.left -= 1;
        if self.left > 0 {
            return false;
        }
        self.left = rand::random_range(1..2 * interval);
        true
    }
}

/// An accessed key.
struct Accessed {
    partition: PartitionId,
    table: Arc<str>,
    key: String,
}

/// The accesses of a partition in a window.
#[derive(Clone, Copy, Default)]
struct Total {
    sampled: u64,
    unkeyed: u64,
}

struct Window {
    begun: Instant,
    sketch: SpaceSaving<Accessed>,
    totals: HashMap<PartitionId, Total>,
}

/// Counts accesses per key.
pub(crate) struct KeyMonitor {
    settings: KeyMonitoring,
    /// One of this many statements is sampled; 0 while no window is open.
    interval: AtomicU32,
    /// A window was requested.
    requested: AtomicBool,
    window: Mutex<Window>,
    finished: Mutex<Finished>,
}

/// The reports of the last window.
struct Finished {
    at: Instant,
    reports: HashMap<PartitionId, KeyReport>,
}

impl KeyMonitor {
    pub(crate) fn new(settings: KeyMonitoring, now: Instant) -> KeyMonitor {
        let monitor = KeyMonitor {
            settings,
            interval: AtomicU32::new(0),
            requested: AtomicBool::new(false),
            window: Mutex::new(Window::new(settings.mode, now)),
            finished: Mutex::new(Finished { at: now, reports: HashMap::new() }),
        };
        if matches!(settings.mode, KeyMode::On | KeyMode::Full) {
            monitor.interval.store(monitor.full_interval(), Ordering::Relaxed);
        }
        monitor
    }

    fn full_interval(&self) -> u32 {
        if self.settings.mode == KeyMode::Full { 1 } else { SAMPLE_INTERVAL }
    }

    /// Counts a statement that accesses a partition's data, if it is sampled.
    pub(crate) fn record(
        &self,
        sampler: &mut KeySampler,
        partition: PartitionId,
        keys: Option<&AccessedKeys>,
        parameters: &[Value],
    ) {
        if sampler.samples_next(self.interval.load(Ordering::Relaxed)) {
            self.count(partition, keys, parameters);
        }
    }

    #[inline(never)]
    fn count(&self, partition: PartitionId, keys: Option<&AccessedKeys>, parameters: &[Value]) {
        let mut window = self.window.lock();
        let Window { sketch, totals, .. } = &mut *window;
        let total = totals.entry(partition).or_default();
        let mut accesses = 0;
        for (keys, key) in keys.into_iter().flat_map(|keys| keys.keys(parameters).map(move |key| (keys, key)))
        {
            accesses += 1;
            sketch.add(key.hash(partition.0), || Accessed {
                partition,
                table: keys.table().clone(),
                key: key.to_string(),
            });
        }
        total.sampled += accesses.max(1);
        total.unkeyed += u64::from(accesses == 0);
    }

    /// Requests a window in [`KeyMode::Auto`].
    pub(crate) fn request(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }

    /// Opens and closes windows. `utilisation` is the share of its CPUs that the node uses.
    pub(crate) fn tick(&self, now: Instant, utilisation: f64) {
        let KeyMonitoring { mode, window: length, watermark, .. } = self.settings;
        let is_open = self.interval.load(Ordering::Relaxed) > 0;
        if is_open && now.saturating_duration_since(self.window.lock().begun) < length {
            return;
        }
        let continues = match mode {
            KeyMode::Off => return,
            KeyMode::On | KeyMode::Full => true,
            KeyMode::Auto => self.requested.swap(false, Ordering::Relaxed) || utilisation >= watermark,
        };
        if !is_open {
            if continues {
                *self.window.lock() = Window::new(mode, now);
                self.interval.store(self.full_interval(), Ordering::Relaxed);
            } else {
                let mut finished = self.finished.lock();
                if now.saturating_duration_since(finished.at) > length * KEPT_WINDOWS {
                    finished.reports = HashMap::new();
                }
            }
            return;
        }
        if !continues {
            self.interval.store(0, Ordering::Relaxed);
        }
        let ended = std::mem::replace(&mut *self.window.lock(), Window::new(mode, now));
        *self.finished.lock() = Finished { at: now, reports: ended.reports(self.settings.keys) };
    }

    /// What was counted for a partition in the last window.
    pub(crate) fn report(&self, partition: PartitionId) -> Option<KeyReport> {
        self.finished.lock().reports.get(&partition).cloned()
    }
}

impl Window {
    fn new(mode: KeyMode, now: Instant) -> Window {
        let counters = if mode == KeyMode::Full { FULL_COUNTERS } else { SAMPLE_COUNTERS };
        Window { begun: now, sketch: SpaceSaving::new(counters), totals: HashMap::new() }
    }

    /// The report of each partition, with its `most` most accessed keys.
    fn reports(self, most: usize) -> HashMap<PartitionId, KeyReport> {
        let report = |(partition, Total { sampled, unkeyed }): (PartitionId, Total)| {
            (partition, KeyReport { sampled, unkeyed, keys: Vec::new() })
        };
        let mut reports: HashMap<PartitionId, KeyReport> = self.totals.into_iter().map(report).collect();
        for Counter { item: Accessed { partition, table, key }, count, error } in self.sketch.into_sorted() {
            let Some(report) = reports.get_mut(&partition).filter(|report| report.keys.len() < most) else {
                continue;
            };
            // A count may be above the partition's own accesses if other partitions' keys had the
            // counter before.
            let keyed = (report.sampled - report.unkeyed) as f64;
            let sampled = report.sampled as f64;
            let highest = (count as f64).min(keyed);
            let lowest = (count - error) as f64;
            let (share, error) = (highest / sampled, (highest - lowest).max(0.0) / sampled);
            report.keys.push(KeyAccess { table: table.to_string(), key, share, error });
        }
        reports
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOP: PartitionId = PartitionId(7);

    fn monitor(mode: KeyMode, now: Instant) -> KeyMonitor {
        KeyMonitor::new(KeyMonitoring { mode, ..KeyMonitoring::default() }, now)
    }

    #[test]
    fn samplers_take_one_of_the_interval_in_the_mean() {
        let mut sampler = KeySampler::default();
        assert!((0..100).all(|_| !sampler.samples_next(0)) && (0..100).all(|_| sampler.samples_next(1)));
        let sampled = (0..160_000).filter(|_| sampler.samples_next(16)).count();
        // The standard deviation is below 60.
        assert!((9_400..10_600).contains(&sampled), "{sampled}");
        // Short sessions are sampled as often as long ones.
        let firsts = (0..16_000).filter(|_| KeySampler::default().samples_next(16)).count();
        assert!((800..1200).contains(&firsts), "{firsts}");
    }

    #[test]
    fn auto_opens_a_window_at_the_watermark() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let monitor = monitor(KeyMode::Auto, start);
        let mut sampler = KeySampler::default();
        let mut use_it = || (0..100).for_each(|_| monitor.record(&mut sampler, SHOP, None, &[]));
        use_it();
        monitor.tick(at(1), 0.79);
        use_it();
        monitor.tick(at(20), 0.8);
        assert_eq!(monitor.report(SHOP), None, "no window was open");
        use_it();
        monitor.tick(at(29), 0.1);
        assert_eq!(monitor.report(SHOP), None, "the window is not over");
        monitor.tick(at(30), 0.1);
        let report = monitor.report(SHOP).unwrap();
        assert!(report.sampled > 0 && report.unkeyed == report.sampled && report.keys.is_empty());
        use_it();
        monitor.tick(at(130), 0.1);
        assert_eq!(monitor.report(SHOP), Some(report), "no window was open, and reports are kept");
        monitor.tick(at(131), 0.1);
        assert_eq!(monitor.report(SHOP), None);
    }

    #[test]
    fn requests_open_one_window_each() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let monitor = monitor(KeyMode::Auto, start);
        let mut sampler = KeySampler::default();
        let mut use_it = || (0..100).for_each(|_| monitor.record(&mut sampler, SHOP, None, &[]));
        monitor.tick(at(1), 0.1);
        monitor.request();
        monitor.tick(at(2), 0.1);
        use_it();
        // A request during a window continues it.
        monitor.request();
        monitor.tick(at(5), 0.1);
        monitor.tick(at(12), 0.1);
        let first = monitor.report(SHOP).unwrap();
        (0..10).for_each(|_| use_it());
        monitor.tick(at(22), 0.1);
        let second = monitor.report(SHOP).unwrap();
        assert!(second.sampled > first.sampled, "{first:?}, {second:?}");
        use_it();
        monitor.tick(at(32), 0.1);
        assert_eq!(monitor.report(SHOP), Some(second), "no window was open");
    }

    #[test]
    fn off_never_counts() {
        let start = Instant::now();
        let monitor = monitor(KeyMode::Off, start);
        monitor.tick(start, 1.0);
        (0..100).for_each(|_| monitor.record(&mut KeySampler::default(), SHOP, None, &[]));
        monitor.tick(start + Duration::from_secs(100), 1.0);
        assert_eq!(monitor.report(SHOP), None);
    }
}
