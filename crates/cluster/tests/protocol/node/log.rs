//! The logs of an incarnation. A log object holds one record.

use std::collections::BTreeSet;

use fulmar_cluster::environment::{Environment, LogObjects, Slot};
use fulmar_cluster::{LogId, LogKind, Position};
use futures::channel::oneshot;

use super::Node;
use crate::partition::Record;

const MAX_IN_FLIGHT: u64 = 16;

pub(super) struct Log {
    pub(super) next: u64,
    /// All slots before this one are durable.
    pub(super) durable: u64,
    done: BTreeSet<u64>,
    waiting: Vec<(u64, oneshot::Sender<()>)>,
    pub(super) kept_from: Position,
    /// Of the newest durable object.
    pub(super) durable_kept_from: Position,
}

impl Log {
    pub(super) fn new(kept_from: Position) -> Log {
        Log {
            next: 0,
            durable: 0,
            done: BTreeSet::new(),
            waiting: Vec::new(),
            kept_from,
            durable_kept_from: kept_from,
        }
    }

    /// Takes the next slot for a record.
    pub(super) fn append(&mut self, record: &Record) -> (u64, Slot) {
        let slot = self.next;
        self.next += 1;
        (slot, Slot::Records { kept_from: self.kept_from, body: record.encode() })
    }

    fn is_durable(&self, slot: u64, contiguous: bool) -> bool {
        slot < self.durable || (!contiguous && self.done.contains(&slot))
    }

    /// Records that a slot is stored.
    fn stored(&mut self, slot: u64, object: &Slot, contiguous: bool) {
        self.done.insert(slot);
        while self.done.remove(&self.durable) {
            self.durable += 1;
        }
        if let Slot::Records { kept_from, .. } = object
            && self.durable > slot
        {
            self.durable_kept_from = self.durable_kept_from.max(*kept_from);
        }
        for (of, sender) in std::mem::take(&mut self.waiting) {
            if self.is_durable(of, contiguous) {
                let _gone = sender.send(());
            } else {
                self.waiting.push((of, sender));
            }
        }
    }
}

impl Node {
    /// Waits until a slot and all slots before it are durable. Returns false if the process stops.
    pub(super) async fn durable(&self, kind: LogKind, slot: u64) -> bool {
        let receiver = {
            let mut shared = self.shared.lock();
            let log = shared.log(kind);
            if log.is_durable(slot, self.rules().contiguous) {
                return true;
            }
            let (sender, receiver) = oneshot::channel();
            log.waiting.push((slot, sender));
            receiver
        };
        receiver.await.is_ok()
    }

    /// Puts an object into a log. Retries until it is stored or the log is sealed.
    pub(super) async fn put(self, kind: LogKind, slot: u64, object: Slot) {
        // A local log is a file, to which records are appended one after the other.
        let in_flight = if kind == LogKind::Local { 1 } else { MAX_IN_FLIGHT };
        if let Some(before) = slot.checked_sub(in_flight) {
            // Without the rule a slot may be durable before earlier ones.
            while !self.durable(kind, before).await || before >= self.shared.lock().log(kind).durable {
                self.env.sleep(std::time::Duration::from_millis(5)).await;
            }
        }
        let log = LogId { node: self.id, incarnation: self.start().incarnation, kind };
        loop {
            if let Ok(true) = self.env.create(log, slot, object.clone()).await {
                break;
            }
            match LogObjects::read(&self.env, log, slot).await {
                Ok(Some(found)) if found == object => break,
                Ok(Some(found)) => {
                    let reason = if found == Slot::Seal { "its log is sealed" } else { "its slot was taken" };
                    return self.fenced(reason);
                }
                Ok(None) | Err(_) => self.env.sleep(std::time::Duration::from_millis(10)).await,
            }
        }
        self.simulation().note(|| format!("node {}: slot {slot} of {log:?} is stored", self.id));
        let mut shared = self.shared.lock();
        let contiguous = self.rules().contiguous;
        shared.log(kind).stored(slot, &object, contiguous);
        let durable = shared.log(kind).durable;
        for owned in shared.owned.values_mut().filter(|owned| owned.log() == kind) {
            owned.pending.retain(|(slot, _)| *slot >= durable);
        }
    }
}
