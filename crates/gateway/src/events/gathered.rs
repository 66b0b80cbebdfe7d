//! Events that anybody can cause, as often as he likes: one at once, then one for all of the same kind in a while.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Event;

/// For how long events are gathered.
const PERIOD: Duration = Duration::from_secs(600);
/// Kinds of databases that are gathered at a time; more are taken together.
const KEYS: usize = 1000;
/// Names, and addresses, that are told.
const NAMED: usize = 10;

/// What is taken together: the kind, and the partition.
type Key = (String, Option<u64>);

/// What has been gathered.
#[derive(Default)]
pub(super) struct Gathered(HashMap<Key, More>);

/// What came since the last event of a key.
struct More {
    until: Instant,
    times: u64,
    /// The first of them; of no database, if they are of several.
    event: Event,
    users: BTreeSet<String>,
    addresses: BTreeSet<IpAddr>,
}

impl Gathered {
    /// Answers the event if it is the first.
    pub(super) fn add(&mut self, event: Event, now: Instant) -> Option<Event> {
        let mut key = (event.kind.to_string(), event.partition);
        if self.0.len() >= KEYS && !self.0.contains_key(&key) {
            key.1 = None;
        }
        if let Some(more) = self.0.get_mut(&key) {
            more.count(&event);
            return None;
        }
        let mut first = event.clone();
        if first.partition != key.1 {
            (first.partition, first.database) = (None, None);
        }
        let more = More {
            until: now + PERIOD,
            times: 0,
            event: first,
            users: BTreeSet::new(),
            addresses: BTreeSet::new(),
        };
        self.0.insert(key, more);
        Some(event)
    }

    /// The events of what was gathered for long enough; all of it, if there is no later.
    pub(super) fn due(&mut self, now: Option<Instant>) -> Vec<Event> {
        let mut due = Vec::new();
        self.0.retain(|_, more| {
            if now.is_some_and(|now| now < more.until) {
                return true;
            }
            let event = more.take();
            let goes_on = event.is_some();
            due.extend(event);
            more.until += PERIOD;
            goes_on
        });
        due
    }
}

impl More {
    fn count(&mut self, event: &Event) {
        self.times += 1;
        if self.users.len() < NAMED {
            self.users.extend(event.user.clone());
        }
        if self.addresses.len() < NAMED {
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
    use super::super::{Actor, Kind};
    use super::*;

    fn failed(user: &str) -> Event {
        Event::new(Kind::LoginFailed)
            .by(Actor { user: Some(user), address: Some(IpAddr::from([10, 0, 0, 1])) })
    }

    #[test]
    fn the_first_is_told_at_once_and_the_rest_together() {
        let (mut gathered, start) = (Gathered::default(), Instant::now());
        assert!(gathered.add(failed("anna"), start).is_some());
        for n in 0..1000 {
            assert!(gathered.add(failed(&format!("u{n:03}")), start).is_none());
        }
        assert!(gathered.due(Some(start + PERIOD - Duration::from_millis(1))).is_empty());
        let due = gathered.due(Some(start + PERIOD));
        assert_eq!((due.len(), &due[0].user, &due[0].details.to_map()["times"]), (1, &None, &1000.into()));
        assert_eq!(due[0].details.to_map()["roles"].as_array().map(Vec::len), Some(NAMED));
        assert_eq!(due[0].details.to_map()["addresses"], serde_json::json!(["10.0.0.1"]));
        // It goes on while there are more, and begins anew after a while without any.
        assert!(gathered.add(failed("anna"), start + PERIOD).is_none());
        assert_eq!(gathered.due(Some(start + 2 * PERIOD)).len(), 1);
        assert!(gathered.due(Some(start + 3 * PERIOD)).is_empty());
        assert!(gathered.add(failed("anna"), start + 3 * PERIOD).is_some());
        assert!(gathered.add(failed("anna"), start + 3 * PERIOD).is_none());
        assert_eq!(gathered.due(None).len(), 1, "the end");
    }

    #[test]
    fn what_is_gathered_is_bounded() {
        let (mut gathered, start) = (Gathered::default(), Instant::now());
        let of = |partition| {
            let database = Some(format!("d{partition}"));
            Event { partition: Some(partition), database, ..failed("anna") }
        };
        let told = (0..10 * KEYS as u64).filter(|n| gathered.add(of(*n), start).is_some()).count();
        assert_eq!((told, gathered.0.len()), (KEYS + 1, KEYS + 1));
        let due = gathered.due(None);
        assert_eq!(due.len(), 1, "of all the others together");
        assert_eq!((&due[0].database, due[0].partition), (&None, None));
        assert_eq!(due[0].details.to_map()["times"], 9 * KEYS as u64 - 1);
    }
}
