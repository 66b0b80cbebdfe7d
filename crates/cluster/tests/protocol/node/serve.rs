//! Serving clients: transactions, reads and questions for outcomes.

use fulmar_cluster::LogKind;
use fulmar_cluster::directory::CrashReport;
use fulmar_cluster::environment::Environment;
use fulmar_pages::PartitionId;

use super::{Answer, Append, Believed, Node, Owned, Report};
use crate::partition::{Record, Transaction};
use crate::violation::Kind;

/// Number of fatal statements in ten that leave a report. The others are like a `kill -9`.
const REPORTED_OF_10: u64 = 8;

impl Node {
    pub(super) async fn append(&self, append: Append) -> Answer {
        let Append { partition, believed, transaction, value, kills } = append;
        if let Err(answer) = self.ready(partition).await {
            return answer;
        }
        let accepted = {
            let mut shared = self.shared.lock();
            let shared = &mut *shared;
            let incarnation = shared.begun.incarnation;
            let Some(owned) = shared.owned.get_mut(&partition) else { return Answer::Elsewhere };
            let (epoch, kind) = (owned.read.record.epoch, owned.log());
            let here = Believed { owner: self.id, incarnation, epoch };
            let is_refused =
                self.rules().refuse_asked && (believed != here || owned.refused.contains(&transaction));
            if !owned.accepts || is_refused {
                return Answer::Elsewhere;
            }
            if kills {
                if !std::mem::replace(&mut shared.is_fenced, true) {
                    self.die(partition, incarnation, value, owned.is_quarantined);
                }
                None
            } else if let Some(version) = owned.state.outcome(transaction) {
                Some((kind, pending_slot(owned, version), None))
            } else {
                let version = owned.state.version() + 1;
                let record = Record { partition, epoch, version, transaction, value, is_release: false };
                owned.state.append(transaction, value);
                let log = match kind {
                    LogKind::Shared => &mut shared.shared_log,
                    LogKind::Local => &mut shared.local_log,
                };
                let (slot, object) = log.append(&record);
                owned.pending.push((slot, version));
                Some((kind, Some(slot), Some(object)))
            }
        };
        // A process that dies answers nothing.
        let Some((kind, slot, object)) = accepted else { return std::future::pending().await };
        let Some(slot) = slot else { return Answer::Done };
        if let Some(object) = object {
            self.spawn(self.clone().put(kind, slot, object));
        }
        match self.durable(kind, slot).await {
            true => Answer::Done,
            false => Answer::Elsewhere,
        }
    }

    /// A statement kills this process.
    fn die(&self, partition: PartitionId, incarnation: u64, value: u64, is_quarantined: bool) {
        let world = &self.env.world;
        if is_quarantined {
            let text = format!("partition {partition} killed node {} although it is quarantined", self.id);
            world.violation(Kind::QuarantineIgnored, text);
        }
        let is_reported = self.simulation().chance(REPORTED_OF_10, 10);
        if is_reported {
            self.env.directory.lock().crash_report = Some(CrashReport { partition, incarnation });
        }
        world.killed(partition, value, is_reported);
        (self.report)(self.env.process, Report::Killed);
    }

    pub(super) async fn read(&self, partition: PartitionId) -> Answer {
        if let Err(answer) = self.ready(partition).await {
            return answer;
        }
        let list = {
            let mut shared = self.shared.lock();
            let shared = &mut *shared;
            let Some(owned) = shared.owned.get(&partition).filter(|owned| owned.accepts) else {
                return Answer::Elsewhere;
            };
            let durable = match owned.log() {
                LogKind::Shared => shared.shared_log.durable,
                LogKind::Local => shared.local_log.durable,
            };
            owned.state.values_at(match self.rules().contiguous {
                true => owned.durable_version(durable),
                false => owned.state.version(),
            })
        };
        match !self.rules().lease || self.lease.is_valid(self.env.now()) {
            true => Answer::List(list),
            false => Answer::Elsewhere,
        }
    }

    pub(super) async fn outcome(&self, partition: PartitionId, transaction: Transaction) -> Answer {
        if let Err(answer) = self.ready(partition).await {
            return answer;
        }
        if !self.lease.is_valid(self.env.now()) {
            return Answer::Elsewhere;
        }
        let (kind, slot) = {
            let mut shared = self.shared.lock();
            let owned = shared.owned.get_mut(&partition).filter(|owned| owned.accepts);
            let Some(owned) = owned else { return Answer::Elsewhere };
            match owned.state.outcome(transaction) {
                Some(version) => (owned.log(), pending_slot(owned, version)),
                None => {
                    owned.refused.insert(transaction);
                    return Answer::NotCommitted;
                }
            }
        };
        match slot {
            Some(slot) if !self.durable(kind, slot).await => Answer::Elsewhere,
            _ => Answer::Committed,
        }
    }
}

/// The slot of a version that is not durable yet.
fn pending_slot(owned: &Owned, version: u64) -> Option<u64> {
    owned.pending.iter().find(|(_, of)| *of == version).map(|(slot, _)| *slot)
}
