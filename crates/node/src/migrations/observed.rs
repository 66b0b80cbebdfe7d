//! The migrations of all partitions, in memory: journals, progress, and reports.

use std::collections::BTreeMap;

use fulmar_cluster::migration::{self, Journal, Outcome, Step};
use fulmar_cluster::records::decode;
use fulmar_meta::{Change, MetaError, Observer};
use fulmar_migrate::report::Report;
use fulmar_pages::PartitionId;
use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::progress::Progress;

/// The prefix of the keys of reports.
pub(super) const REPORT_PREFIX: &str = "migrated/";

/// The key of a report. Keys are in order of the migrations' starts.
pub(super) fn report_key(report: &Report) -> String {
    format!("{REPORT_PREFIX}{:013}-{:016x}", report.started_unix_ms, report.partition)
}

#[derive(Default)]
struct State {
    journals: BTreeMap<PartitionId, Journal>,
    progress: BTreeMap<PartitionId, Progress>,
    reports: BTreeMap<String, Report>,
}

/// The migrations, kept up to date by the metadata store.
#[derive(Default)]
pub(crate) struct Migrations {
    state: RwLock<State>,
    changed: Notify,
}

impl Migrations {
    /// The newest migration of a partition.
    pub fn journal(&self, partition: PartitionId) -> Option<Journal> {
        self.state.read().journals.get(&partition).cloned()
    }

    /// The migrations that have not ended, with their progress.
    pub fn running(&self) -> Vec<(PartitionId, Journal, Option<Progress>)> {
        let state = self.state.read();
        let running = state.journals.iter().filter(|(_, journal)| journal.step != Step::Finished);
        running.map(|(id, journal)| (*id, journal.clone(), state.progress.get(id).cloned())).collect()
    }

    /// The partitions whose newest migration has moved them, and when that began, in milliseconds since
    /// 1970.
    pub fn moved(&self) -> Vec<(PartitionId, u64)> {
        let state = self.state.read();
        let moved = state.journals.iter().filter(|(_, journal)| journal.outcome == Some(Outcome::Moved));
        moved.map(|(id, journal)| (*id, journal.started_unix_ms)).collect()
    }

    /// The reports, oldest first.
    pub fn reports(&self) -> Vec<Report> {
        self.state.read().reports.values().cloned().collect()
    }

    /// The report of a partition's migration.
    pub fn report(&self, partition: PartitionId, number: u64) -> Option<Report> {
        let is_of = |report: &&Report| report.partition == partition.0 && report.number == number;
        self.state.read().reports.values().rev().find(is_of).cloned()
    }

    /// The keys of the reports, oldest first.
    pub fn report_keys(&self) -> Vec<String> {
        self.state.read().reports.keys().cloned().collect()
    }

    /// Completes at the next change. Changes are not missed after the call of this function.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }
}

impl State {
    /// Applies a change. Returns true if it concerns migrations.
    fn apply(&mut self, key: &str, value: Option<&[u8]>) -> bool {
        if let Some(partition) = migration::partition_of_key(key) {
            match value.map(|value| decode::<Journal>(key, value)) {
                Some(Ok(journal)) => drop(self.journals.insert(partition, journal)),
                Some(Err(error)) => tracing::error!(%error, "ignored an unreadable record of a migration"),
                None => drop(self.journals.remove(&partition)),
            }
        } else if let Some(partition) = Progress::partition_of_key(key) {
            match value.and_then(|value| serde_json::from_slice(value).ok()) {
                Some(progress) => drop(self.progress.insert(partition, progress)),
                None => drop(self.progress.remove(&partition)),
            }
        } else if key.starts_with(REPORT_PREFIX) {
            match value.and_then(|value| serde_json::from_slice(value).ok()) {
                Some(report) => drop(self.reports.insert(key.to_owned(), report)),
                None => drop(self.reports.remove(key)),
            }
        } else {
            return false;
        }
        true
    }
}

impl Observer for Migrations {
    fn snapshot(&self, entries: Vec<fulmar_meta::Entry>) -> Result<(), MetaError> {
        let mut next = State::default();
        for entry in &entries {
            next.apply(&entry.key, Some(&entry.value));
        }
        *self.state.write() = next;
        self.changed.notify_waiters();
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        let mut state = self.state.write();
        let mut touched = false;
        for change in changes {
            touched |= state.apply(&change.key, change.value.as_deref());
        }
        drop(state);
        if touched {
            self.changed.notify_waiters();
        }
    }
}
