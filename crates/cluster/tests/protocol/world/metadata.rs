//! A model of the metadata store: etcd.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::NodeId;
use fulmar_cluster::quarantine::QuarantineRecord;
use fulmar_cluster::records::decode;
use fulmar_meta::{
    Compare, Entry, MetaError, MetadataStore, Observer, Operation, Outcome, Revision, Transaction,
};
use fulmar_pages::PartitionId;

use super::{Env, Service, World};
use crate::violation::Kind;

/// A past value of a key; `None` if it was deleted.
struct Past {
    at: Duration,
    key: String,
    value: Option<(Vec<u8>, u64)>,
}

#[derive(Default)]
pub struct Contents {
    keys: BTreeMap<String, (Vec<u8>, u64)>,
    revision: u64,
    /// All changes, if members that lag may be read.
    history: Vec<Past>,
}

impl Contents {
    pub fn describe(&self) -> Vec<String> {
        let show = |(key, (value, revision)): (&String, &(Vec<u8>, u64))| {
            format!("{key} @{revision} {}", String::from_utf8_lossy(value))
        };
        self.keys.iter().map(show).collect()
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::Absent(key) => !self.keys.contains_key(key),
            Compare::Unchanged(key, revision) => {
                self.keys.get(key).is_some_and(|(_, modified)| *modified == revision.0)
            }
        }
    }

    /// The value of a key at a time, for a member that lags.
    fn value_at(&self, key: &str, at: Duration) -> Option<&(Vec<u8>, u64)> {
        let past = self.history.iter().rev().find(|past| past.at <= at && past.key == key)?;
        past.value.as_ref()
    }

    /// Copies all keys: a backup.
    pub fn backup(&self) -> BTreeMap<String, (Vec<u8>, u64)> {
        self.keys.clone()
    }

    /// Replaces all keys by those of a backup.
    pub fn restore(&mut self, backup: BTreeMap<String, (Vec<u8>, u64)>) {
        self.keys = backup;
    }
}

fn unknown<T>(_: T) -> MetaError {
    MetaError::Unavailable { cause: "no answer: the outcome is not known".to_owned(), remedy: "ask again" }
}

fn entry(key: &str, (value, revision): &(Vec<u8>, u64)) -> Entry {
    Entry { key: key.to_owned(), value: value.clone(), modified: Revision(*revision) }
}

/// How far the members lag that serve reads without the rule.
const MAX_LAG: Duration = Duration::from_millis(1500);

impl Env {
    /// The time whose values a member returns that lags.
    fn read_at(&self) -> Option<Duration> {
        let simulation = &self.world.simulation;
        let lags = !self.world.rules.linearizable_reads && self.process.machine != 0;
        lags.then(|| simulation.now().saturating_sub(simulation.delay(Duration::ZERO, MAX_LAG)))
    }
}

#[async_trait]
impl MetadataStore for Env {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        let (key, at) = (key.to_owned(), self.read_at());
        let read = move |contents: &mut super::Contents| {
            let contents = &contents.metadata;
            let found = match at {
                Some(at) => contents.value_at(&key, at),
                None => contents.keys.get(&key),
            };
            found.map(|found| entry(&key, found))
        };
        self.request(Service::Metadata, read).await.map_err(unknown)
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        let (prefix, at) = (prefix.to_owned(), self.read_at());
        let read = move |contents: &mut super::Contents| {
            let contents = &contents.metadata;
            let keys = contents.keys.range(prefix.clone()..);
            let keys = keys.take_while(|(key, _)| key.starts_with(&prefix));
            let found = keys.filter_map(|(key, current)| match at {
                Some(at) => Some(entry(key, contents.value_at(key, at)?)),
                None => Some(entry(key, current)),
            });
            found.collect()
        };
        self.request(Service::Metadata, read).await.map_err(unknown)
    }

    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        let world = self.world.clone();
        let apply = move |contents: &mut super::Contents| {
            let contents = &mut contents.metadata;
            if !transaction.compares.iter().all(|compare| contents.holds(compare)) {
                return Outcome::Conflict(Revision(contents.revision));
            }
            if !transaction.operations.is_empty() {
                contents.revision += 1;
            }
            for operation in &transaction.operations {
                let (key, value) = match operation {
                    Operation::Put(key, value) => (key, Some((value.clone(), contents.revision))),
                    Operation::Delete(key) => (key, None),
                };
                if !world.rules.linearizable_reads {
                    let at = world.simulation.now();
                    contents.history.push(Past { at, key: key.clone(), value: value.clone() });
                }
                match value {
                    Some(value) => {
                        world.observe_later(key, &value.0);
                        contents.keys.insert(key.clone(), value);
                    }
                    None => drop(contents.keys.remove(key)),
                }
            }
            Outcome::Committed(Revision(contents.revision))
        };
        self.request(Service::Metadata, apply).await.map_err(unknown)
    }

    async fn follow(&self, _: Arc<dyn Observer>) -> Result<(), MetaError> {
        let cause = "the simulated metadata store has no watch: its nodes scan".to_owned();
        Err(MetaError::Unavailable { cause, remedy: "scan" })
    }
}

fn quarantine_key(partition: PartitionId) -> String {
    format!("quarantine/{:016x}", partition.0)
}

impl World {
    /// Checks a quarantine that is being recorded.
    fn observe_later(&self, key: &str, value: &[u8]) {
        let Some(id) = key.strip_prefix("quarantine/") else { return };
        let partition = PartitionId(u64::from_str_radix(id, 16).unwrap());
        let record: QuarantineRecord = decode(key, value).unwrap();
        if record.is_quarantined {
            let world = self.clone();
            self.simulation.after(Duration::ZERO, move || {
                let kills = world.state.lock().reported_kills(partition);
                if kills < 2 {
                    let text = format!("partition {partition} is quarantined after {kills} reported deaths");
                    world.violation(Kind::WronglyQuarantined, text);
                }
            });
        }
    }

    /// Returns true if a partition is quarantined now, whatever processes know.
    pub fn is_quarantined(&self, partition: PartitionId) -> bool {
        let key = quarantine_key(partition);
        let state = self.state.lock();
        let value = state.contents.metadata.keys.get(&key);
        value.is_some_and(|(value, _)| decode::<QuarantineRecord>(&key, value).unwrap().is_quarantined)
    }

    /// The owner of a partition, whatever processes know.
    pub fn owner(&self, partition: PartitionId) -> Option<NodeId> {
        self.state.lock().contents.partition_record(partition).map(|record| record.owner)
    }

    /// A copy of the metadata store.
    pub fn backup(&self) -> BTreeMap<String, (Vec<u8>, u64)> {
        self.state.lock().contents.metadata.backup()
    }

    /// Replaces the contents of the metadata store by a backup.
    pub fn restore(&self, backup: BTreeMap<String, (Vec<u8>, u64)>) {
        self.state.lock().contents.metadata.restore(backup);
    }
}

impl super::Contents {
    pub fn partition_record(&self, partition: PartitionId) -> Option<fulmar_cluster::PartitionRecord> {
        let key = fulmar_cluster::records::owner_key(partition);
        let (value, _) = self.metadata.keys.get(&key)?;
        Some(decode(&key, value).unwrap())
    }
}
