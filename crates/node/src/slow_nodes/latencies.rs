//! The latencies of nodes, and which nodes are slow.
//!
//! A latency is the median of the means of each of the last 10 s, so a single outlier does not
//! count. [`SlowNodes`] compares each node with the median of the others: the same load on a common
//! store makes all of them slow, which is not the fault of a node. A node is *slow* once a latency
//! has been at least [`SLOW_RATIO`] times that median, and above a minimum, for [`CHANGE_DELAY`]. It
//! ends once the latency has been below [`NORMAL_RATIO`] times, or half of the minimum, for as long.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use fulmar_cluster::NodeId;
use fulmar_gateway::cluster::Slowness;
use serde::{Deserialize, Serialize};

/// A latency that is this number of times that of the others is slow.
const SLOW_RATIO: u32 = 5;
/// A slow node is normal again below this number of times that of the others.
const NORMAL_RATIO: u32 = 3;
/// How long a node must be slow to be reported, or normal again.
const CHANGE_DELAY: Duration = Duration::from_secs(10);
/// The time that a latency is measured over, and the least number of samples in it.
const WINDOW: Duration = Duration::from_secs(10);
const MIN_SAMPLES: usize = 3;

/// What a latency is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Resource {
    /// Objects of the shared log.
    LogPuts,
    /// Reads of a small object.
    StoreReads,
    /// Syncs of the local log.
    DiskSyncs,
    /// Delays of a timer.
    Cpu,
}

impl Resource {
    const ALL: [Resource; 4] = [Resource::LogPuts, Resource::StoreReads, Resource::DiskSyncs, Resource::Cpu];

    fn name(self) -> &'static str {
        match self {
            Resource::LogPuts => "log puts",
            Resource::StoreReads => "store reads",
            Resource::DiskSyncs => "disk syncs",
            Resource::Cpu => "CPU",
        }
    }

    /// Lower latencies are not slow, whatever those of the others are.
    fn minimum(self) -> Duration {
        Duration::from_millis(match self {
            Resource::LogPuts | Resource::StoreReads => 100,
            Resource::DiskSyncs => 20,
            Resource::Cpu => 25,
        })
    }
}

/// The latencies of a node in microseconds, as far as it has measured them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Latencies {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    log_put_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    store_read_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk_sync_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpu_delay_us: Option<u64>,
}

impl Latencies {
    fn of(&self, resource: Resource) -> Option<Duration> {
        let us = match resource {
            Resource::LogPuts => self.log_put_us,
            Resource::StoreReads => self.store_read_us,
            Resource::DiskSyncs => self.disk_sync_us,
            Resource::Cpu => self.cpu_delay_us,
        };
        us.map(Duration::from_micros)
    }
}

/// The samples of a latency.
#[derive(Default)]
pub(super) struct Window(VecDeque<(Instant, Duration)>);

impl Window {
    pub(super) fn push(&mut self, now: Instant, latency: Duration) {
        self.expire(now);
        self.0.push_back((now, latency));
    }

    fn expire(&mut self, now: Instant) {
        while self.0.front().is_some_and(|(at, _)| now.duration_since(*at) > WINDOW) {
            self.0.pop_front();
        }
    }

    fn median_us(&mut self, now: Instant) -> Option<u64> {
        self.expire(now);
        if self.0.len() < MIN_SAMPLES {
            return None;
        }
        let latencies = self.0.iter().map(|(_, latency)| *latency).collect();
        median(latencies).map(|latency| latency.as_micros() as u64)
    }
}

/// What this node has measured.
#[derive(Default)]
pub(crate) struct Measurements {
    pub(super) log_puts: Window,
    pub(super) store_reads: Window,
    pub(super) disk_syncs: Window,
    pub(super) cpu: Window,
}

impl Measurements {
    /// The latencies now.
    pub(crate) fn latencies(&mut self, now: Instant) -> Latencies {
        Latencies {
            log_put_us: self.log_puts.median_us(now),
            store_read_us: self.store_reads.median_us(now),
            disk_sync_us: self.disk_syncs.median_us(now),
            cpu_delay_us: self.cpu.median_us(now),
        }
    }
}

/// The median. Of an even number, the mean of the middle two.
fn median(mut values: Vec<Duration>) -> Option<Duration> {
    values.sort_unstable();
    let upper = *values.get(values.len() / 2)?;
    match values.len() % 2 {
        1 => Some(upper),
        _ => Some((values[values.len() / 2 - 1] + upper) / 2),
    }
}

/// Whether a node is slow in one respect.
#[derive(Default)]
struct State {
    /// Its latency and that of the others, when it was last compared as a slow one.
    slow: Option<(Duration, Duration)>,
    /// When it became slow, or normal again.
    changed_at: Option<Instant>,
    /// Since when the opposite holds.
    changing_since: Option<Instant>,
}

/// A node that has become slow, or normal again.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) node: NodeId,
    pub(crate) resource: &'static str,
    /// The latencies of the node and of the others; `None` if the node is normal again.
    pub(crate) slow: Option<(Duration, Duration)>,
}

/// The nodes that are slow, as this node sees them.
#[derive(Default)]
pub(crate) struct SlowNodes(BTreeMap<(NodeId, Resource), State>);

impl SlowNodes {
    /// Compares the latencies of all nodes that live.
    pub(crate) fn compare(&mut self, now: Instant, measured: &BTreeMap<NodeId, Latencies>) -> Vec<Change> {
        let of = |node: NodeId| Resource::ALL.map(|resource| (node, resource));
        for key in measured.keys().flat_map(|node| of(*node)) {
            self.0.entry(key).or_default();
        }
        let mut changes = Vec::new();
        self.0.retain(|(node, resource), state| {
            let compared = compared(*node, *resource, measured);
            let exceeds =
                |(own, others): (Duration, Duration), ratio, minimum| own >= others * ratio && own >= minimum;
            let minimum = resource.minimum();
            let is_changing = match state.slow {
                None => compared.is_some_and(|of| exceeds(of, SLOW_RATIO, minimum)),
                Some(_) => !compared.is_some_and(|of| exceeds(of, NORMAL_RATIO, minimum / 2)),
            };
            if state.slow.is_some() {
                state.slow = compared.or(state.slow);
            }
            match is_changing {
                true => {
                    let since = *state.changing_since.get_or_insert(now);
                    if now.duration_since(since) >= CHANGE_DELAY {
                        let slow = if state.slow.is_none() { compared } else { None };
                        *state = State { slow, changed_at: Some(now), changing_since: None };
                        changes.push(Change { node: *node, resource: resource.name(), slow });
                    }
                }
                false => state.changing_since = None,
            }
            measured.contains_key(node) || state.slow.is_some()
        });
        changes
    }

    /// For how long a node has been slow in one respect, if it is.
    pub(crate) fn slow_for(&self, node: NodeId, now: Instant) -> Option<Duration> {
        let since = |resource| {
            let state = self.0.get(&(node, resource)).filter(|state| state.slow.is_some())?;
            state.changed_at
        };
        let first = Resource::ALL.into_iter().filter_map(since).min()?;
        Some(now.saturating_duration_since(first))
    }

    /// In which respect a node is slow, if it is: the one in which it differs most from the others.
    pub(crate) fn of(&self, node: NodeId) -> Option<Slowness> {
        let slow = Resource::ALL.into_iter().filter_map(|resource| {
            let (latency, others) = self.0.get(&(node, resource))?.slow?;
            Some(Slowness { resource: resource.name(), latency, others })
        });
        slow.max_by_key(|slow| slow.latency.as_micros() / slow.others.as_micros().max(1))
    }
}

/// The latency of a node, and the median of the others.
fn compared(
    node: NodeId,
    resource: Resource,
    measured: &BTreeMap<NodeId, Latencies>,
) -> Option<(Duration, Duration)> {
    let own = measured.get(&node)?.of(resource)?;
    let others = measured.iter().filter(|(other, _)| **other != node);
    Some((own, median(others.filter_map(|(_, latencies)| latencies.of(resource)).collect())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeId = NodeId(1);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Store reads of nodes 1, 2 and so on; `None` for one that has not measured any.
    fn reads(latencies: &[Option<u64>]) -> BTreeMap<NodeId, Latencies> {
        let node = |(number, ms): (u32, &Option<u64>)| {
            let store_read_us = ms.map(|ms| ms * 1000);
            (NodeId(number), Latencies { store_read_us, cpu_delay_us: Some(1000), ..Latencies::default() })
        };
        (1..).zip(latencies).map(node).collect()
    }

    /// Compares once per second for some time. Returns the changes with the second of each.
    fn compare_for(
        slow: &mut SlowNodes,
        from: Instant,
        seconds: std::ops::Range<u64>,
        latencies: &[Option<u64>],
    ) -> Vec<(u64, Change)> {
        let at = |second| {
            let changes = slow.compare(from + Duration::from_secs(second), &reads(latencies));
            changes.into_iter().map(move |change| (second, change)).collect::<Vec<_>>()
        };
        seconds.flat_map(at).collect()
    }

    #[test]
    fn slow_node_is_reported_after_a_delay_and_ends_with_hysteresis() {
        let (mut slow, start) = (SlowNodes::default(), Instant::now());
        let change = |slow| Change { node: ONE, resource: "store reads", slow };
        let began = compare_for(&mut slow, start, 0..20, &[Some(500), Some(10), Some(20)]);
        assert_eq!(began, [(10, change(Some((ms(500), ms(15)))))]);
        let of = slow.of(ONE).unwrap();
        assert_eq!((of.resource, of.latency, of.others), ("store reads", ms(500), ms(15)));
        assert_eq!(slow.of(NodeId(2)), None);
        let slow_for = |slow: &SlowNodes, node| slow.slow_for(node, start + Duration::from_secs(60));
        assert_eq!([slow_for(&slow, ONE), slow_for(&slow, NodeId(2))], [Some(Duration::from_secs(50)), None]);
        let between = [Some(100), Some(25), Some(25)];
        assert_eq!(compare_for(&mut slow, start, 20..60, &between), [], "4 times is still slow");
        let normal = [Some(20), Some(10), Some(10)];
        assert_eq!(compare_for(&mut slow, start, 60..70, &normal), [], "it must be normal for 10 s");
        assert_eq!(compare_for(&mut slow, start, 70..71, &between), [], "slow again resets the delay");
        assert_eq!(compare_for(&mut slow, start, 71..90, &normal), [(81, change(None))]);
        assert_eq!((slow.of(ONE), slow_for(&slow, ONE)), (None, None));
    }

    #[test]
    fn node_is_not_slow_below_the_minimum_or_if_all_are_slow() {
        for latencies in [
            [Some(99), Some(1), Some(1)],
            [Some(500), Some(500), Some(500)],
            [Some(500), None, None],
            [None, Some(10), Some(10)],
            // Two of three: the store may be slow for all but one.
            [Some(500), Some(500), Some(10)],
        ] {
            let changes = compare_for(&mut SlowNodes::default(), Instant::now(), 0..60, &latencies);
            assert_eq!(changes, [], "{latencies:?}");
        }
    }

    #[test]
    fn one_of_two_nodes_can_be_slow_and_an_ended_one_is_forgotten() {
        let (mut slow, start) = (SlowNodes::default(), Instant::now());
        assert_eq!(compare_for(&mut slow, start, 0..20, &[Some(500), Some(10)]).len(), 1);
        let mut rest = reads(&[Some(500), Some(10)]);
        rest.remove(&ONE);
        assert!(slow.compare(start + Duration::from_secs(20), &rest).is_empty());
        let ended = slow.compare(start + Duration::from_secs(30), &rest);
        assert_eq!(ended, [Change { node: ONE, resource: "store reads", slow: None }]);
        assert_eq!(slow.of(ONE), None);
    }

    #[test]
    fn single_outlier_does_not_count() {
        let (mut window, start) = (Window::default(), Instant::now());
        window.push(start, ms(10));
        window.push(start, ms(10));
        assert_eq!(window.median_us(start), None, "too few samples");
        window.push(start, ms(60_000));
        assert_eq!(window.median_us(start), Some(10_000));
        assert_eq!(window.median_us(start + Duration::from_secs(11)), None, "samples must expire");
    }

    #[test]
    fn latencies_of_other_versions_can_be_read() {
        let read: Latencies = serde_json::from_str(r#"{"cpu_delay_us":7,"later_us":8}"#).unwrap();
        assert_eq!(read, Latencies { cpu_delay_us: Some(7), ..Latencies::default() });
        let sent = serde_json::to_string(&read).unwrap();
        assert_eq!(sent, r#"{"cpu_delay_us":7}"#);
    }
}
