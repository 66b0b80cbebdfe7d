//! Aggregation of events that unprivileged clients can cause at any rate: the first event is
//! recorded immediately, and further events of the same kind and database are summarized every 10
//! minutes.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::event::Event;

/// The aggregation interval.
const INTERVAL: Duration = Duration::from_secs(600);
/// Maximum number of keys. Events of further databases are aggregated per kind.
const MAX_KEYS: usize = 1000;
/// Maximum number of user names, and of addresses, in a summary.
const MAX_NAMES: usize = 10;

/// The aggregation key: the kind and the partition.
type Key = (String, Option<u64>);

/// The aggregated events.
#[derive(Default)]
pub(super) struct Aggregator(HashMap<Key, Summary>);

/// The events of a key since the last one that was recorded.
struct Summary {
    until: Instant,
    times: u64,
    /// The first event. Without a database if the key covers several.
    event: Event,
    users: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
}

impl Aggregator {
    /// Adds an event. Returns it if it is the first of its key, to be recorded immediately.
    pub(super) fn add(&mut self, event: Event, now: Instant) -> Option<Event> {
        let mut key = (event.kind.to_string(), event.partition);
        if self.0.len() >= MAX_KEYS && !self.0.contains_key(&key) {
            key.1 = None;
        }
        if let Some(summary) = self.0.get_mut(&key) {
            summary.count(&event);
            return None;
        }
        let mut first = event.clone();
        if first.partition != key.1 {
            (first.partition, first.database) = (None, None);
        }
        let summary = Summary {
            until: now + INTERVAL,
            times: 0,
            event: first,
            users: BTreeSet::new(),
            addresses: BTreeSet::new(),
        };
        self.0.insert(key, summary);
        Some(event)
    }

    /// Takes the summaries whose interval has ended by `now`, or all summaries if `now` is `None`.
    pub(super) fn due(&mut self, now: Option<Instant>) -> Vec<Event> {
        let mut due = Vec::new();
        self.0.retain(|_, summary| {
            if now.is_some_and(|now| now < summary.until) {
                return true;
            }
            let event = summary.take();
            let keep = event.is_some();
            due.extend(event);
            summary.until += INTERVAL;
            keep
        });
        due
    }
}

impl Summary {
    fn count(&mut self, event: &Event) {
        self.times += 1;
        if self.users.len() < MAX_NAMES {
            self.users.extend(event.user.clone());
        }
        if self.addresses.len() < MAX_NAMES {
            self.addresses.extend(event.address);
        }
    }

    fn take(&mut self) -> Option<Event> {
        let times = std::mem::take(&mut self.times);
        let users: Vec<String> = std::mem::take(&mut self.users).into_iter().collect();
        let addresses = std::mem::take(&mut self.addresses);
        let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let event = Event { user: None, address: None, ..self.event.clone() };
        (times > 0)
            .then(|| event.detail("times", times).detail("roles", users).detail("addresses", addresses))
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::Actor;
    use super::super::kinds::Kind;
    use super::*;

    fn failed(user: &str) -> Event {
        Event::new(Kind::LoginFailed)
            .by(Actor { user: Some(user), address: Some(IpAddr::from([10, 0, 0, 1])) })
    }

    #[test]
    fn first_event_is_recorded_immediately_and_others_are_summarized() {
        let (mut aggregator, start) = (Aggregator::default(), Instant::now());
        assert!(aggregator.add(failed("anna"), start).is_some());
        for n in 0..1000 {
            assert!(aggregator.add(failed(&format!("u{n:03}")), start).is_none());
        }
        assert!(aggregator.due(Some(start + INTERVAL - Duration::from_millis(1))).is_empty());
        let due = aggregator.due(Some(start + INTERVAL));
        assert_eq!((due.len(), &due[0].user, &due[0].details.to_map()["times"]), (1, &None, &1000.into()));
        assert_eq!(due[0].details.to_map()["roles"].as_array().map(Vec::len), Some(MAX_NAMES));
        assert_eq!(due[0].details.to_map()["addresses"], serde_json::json!(["10.0.0.1"]));
        // Aggregation continues while events arrive, and ends after an interval without events.
        assert!(aggregator.add(failed("anna"), start + INTERVAL).is_none());
        assert_eq!(aggregator.due(Some(start + 2 * INTERVAL)).len(), 1);
        assert!(aggregator.due(Some(start + 3 * INTERVAL)).is_empty());
        assert!(aggregator.add(failed("anna"), start + 3 * INTERVAL).is_some());
        assert!(aggregator.add(failed("anna"), start + 3 * INTERVAL).is_none());
        assert_eq!(aggregator.due(None).len(), 1, "closing must return all summaries");
    }

    #[test]
    fn number_of_keys_is_bounded() {
        let (mut aggregator, start) = (Aggregator::default(), Instant::now());
        let of = |partition| {
            let database = Some(format!("d{partition}"));
            Event { partition: Some(partition), database, ..failed("anna") }
        };
        let recorded = (0..10 * MAX_KEYS as u64).filter(|n| aggregator.add(of(*n), start).is_some()).count();
        assert_eq!((recorded, aggregator.0.len()), (MAX_KEYS + 1, MAX_KEYS + 1));
        let due = aggregator.due(None);
        assert_eq!(due.len(), 1, "databases above the limit must share one summary");
        assert_eq!((&due[0].database, due[0].partition), (&None, None));
        assert_eq!(due[0].details.to_map()["times"], 9 * MAX_KEYS as u64 - 1);
    }
}
