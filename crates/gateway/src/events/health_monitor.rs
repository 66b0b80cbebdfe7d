//! Health monitor: polls the node's health every second and records changes as events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_engine::{Engine, Health, LogHealth};
use tokio_util::sync::CancellationToken;

use super::event::Event;
use super::kinds::Kind;
use super::log::EventLog;
use crate::cluster::{Cluster, Slowness};

/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The assumed health before the first poll.
const HEALTHY: Health = Health { disk_level: 0, log: LogHealth::HEALTHY, shared_log: LogHealth::HEALTHY };

/// The events of a log: failed, works again, full, has space again.
const LOG: [Kind; 4] = [Kind::LogFailed, Kind::LogWorks, Kind::LogFull, Kind::LogFree];
const SHARED_LOG: [Kind; 4] =
    [Kind::SharedLogFailed, Kind::SharedLogWorks, Kind::SharedLogFull, Kind::SharedLogFree];

/// Polls until `closing` is cancelled.
pub(crate) async fn monitor_health(
    engine: Arc<Engine>,
    cluster: Option<Arc<dyn Cluster>>,
    journal: Arc<EventLog>,
    closing: CancellationToken,
) {
    let mut seen = HEALTHY;
    let mut slow = BTreeMap::new();
    loop {
        let now = engine.health();
        changes(seen, now).for_each(|kind| journal.record(Event::new(kind)));
        seen = now;
        if let Some(cluster) = &cluster {
            let nodes = cluster.nodes().into_iter().filter_map(|node| Some((node.name, node.slow?)));
            let now_slow = nodes.collect();
            slow_changes(&slow, &now_slow).for_each(|event| journal.record(event));
            slow = now_slow;
        }
        journal.flush_aggregated(Instant::now());
        if closing.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_none() {
            return;
        }
    }
}

/// The events of nodes that have become slow, or normal again, between two polls.
fn slow_changes(
    before: &BTreeMap<String, Slowness>,
    now: &BTreeMap<String, Slowness>,
) -> impl Iterator<Item = Event> {
    let began = now.iter().filter(|(name, _)| !before.contains_key(*name)).map(|(name, slow)| {
        Event::new(Kind::NodeSlow)
            .detail("node", name.as_str())
            .detail("resource", slow.resource)
            .detail("latency_ms", slow.latency.as_millis() as u64)
            .detail("others_ms", slow.others.as_millis() as u64)
    });
    let ended = before.keys().filter(|name| !now.contains_key(*name));
    began.chain(ended.map(|name| Event::new(Kind::NodeNotSlow).detail("node", name.as_str())))
}

/// The events between two polls.
fn changes(before: Health, now: Health) -> impl Iterator<Item = Kind> {
    let disk = (now.disk_level != before.disk_level).then_some(match now.disk_level {
        0 => Kind::DiskFree,
        1 => Kind::DiskLow,
        _ => Kind::DiskFull,
    });
    let log = log_changes(before.log, now.log, LOG);
    log.chain(log_changes(before.shared_log, now.shared_log, SHARED_LOG)).chain(disk)
}

fn log_changes(before: LogHealth, now: LogHealth, kinds: [Kind; 4]) -> impl Iterator<Item = Kind> {
    let [failed, works, full, free] = kinds;
    let has_failed = now.failures > before.failures || (before.works && !now.works);
    // The log may have failed and restarted since the last poll.
    let works_again = now.works && (!before.works || has_failed);
    let failed = has_failed.then_some(failed);
    let works = works_again.then_some(works);
    let full = (now.full != before.full).then_some(if now.full { full } else { free });
    [failed, works, full].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_nodes_are_events_when_they_begin_and_end() {
        let of = |names: &[&str]| -> BTreeMap<String, Slowness> {
            let slow = |latency| Slowness { resource: "CPU", latency, others: Duration::ZERO };
            names
                .iter()
                .zip(1..)
                .map(|(name, ms)| (name.to_string(), slow(Duration::from_millis(ms))))
                .collect()
        };
        let events = |before: &[&str], now: &[&str]| -> Vec<(String, String)> {
            let node = |event: &Event| event.details.to_map()["node"].as_str().map(str::to_owned);
            let events = slow_changes(&of(before), &of(now)).collect::<Vec<_>>();
            events.iter().map(|event| (event.kind.to_string(), node(event).unwrap())).collect()
        };
        let pair = |kind: &str, node: &str| (kind.to_owned(), node.to_owned());
        assert_eq!(events(&[], &["n1"]), [pair("node.slow", "n1")]);
        assert_eq!(events(&["n1", "n2"], &["n2", "n1"]), []);
        let both = [pair("node.slow", "n2"), pair("node.not_slow", "n1")];
        assert_eq!(events(&["n1"], &["n2"]), both);
    }

    #[test]
    fn disk_level_changes_are_events() {
        let events = |before, now| changes(before, now).collect::<Vec<_>>();
        let healthy = HEALTHY;
        assert_eq!(events(healthy, healthy), []);
        assert_eq!(events(healthy, Health { disk_level: 2, ..healthy }), [Kind::DiskFull]);
        let (full, low) = (Health { disk_level: 2, ..healthy }, Health { disk_level: 1, ..healthy });
        assert_eq!(events(full, low), [Kind::DiskLow]);
        assert_eq!(events(Health { disk_level: 1, ..healthy }, healthy), [Kind::DiskFree]);
    }

    #[test]
    fn log_health_changes_are_events() {
        let healthy = LogHealth::HEALTHY;
        let failing = LogHealth { failures: 1, works: false, ..healthy };
        let full = LogHealth { full: true, ..healthy };
        let again = LogHealth { works: true, ..failing };
        // Writes are delayed but nothing is lost, so no failure is counted.
        let waiting = LogHealth { works: false, ..healthy };
        type Of = fn(LogHealth) -> Health;
        let local: Of = |log| Health { log, ..HEALTHY };
        let shared: Of = |shared_log| Health { shared_log, ..HEALTHY };
        for (of, kinds) in [(local, LOG), (shared, SHARED_LOG)] {
            let [failed, works, filled, free] = kinds;
            let events = |before, now| changes(of(before), of(now)).collect::<Vec<_>>();
            assert_eq!(events(healthy, failing), [failed]);
            assert_eq!(events(failing, failing), []);
            assert_eq!(events(failing, again), [works]);
            assert_eq!(events(healthy, again), [failed, works]);
            assert_eq!((events(healthy, waiting), events(waiting, healthy)), (vec![failed], vec![works]));
            assert_eq!(events(waiting, failing), [failed], "a failure after a delay must be recorded");
            assert_eq!((events(healthy, full), events(full, full)), (vec![filled], vec![]));
            assert_eq!(events(full, healthy), [free]);
        }
    }
}
