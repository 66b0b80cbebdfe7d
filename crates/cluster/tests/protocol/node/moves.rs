//! Changes of owner and of durability that the owner makes itself.

use fulmar_cluster::environment::Environment;
use fulmar_cluster::handover::{self, Release, Transfer};
use fulmar_cluster::{LogKind, NodeId, PartitionRecord, Position, Read, durability, restore};
use fulmar_pages::PartitionId;

use super::{Answer, Node, Report};
use crate::partition::Record;
use crate::run::is_private;

/// A partition that the owner has released.
pub(super) struct Released {
    pub(super) read: Read<PartitionRecord>,
    /// The slot of the release.
    pub(super) slot: Position,
    kind: LogKind,
    kept: Position,
}

impl Node {
    /// Stops accepting statements for a partition and writes its release. `None`: this node cannot
    /// release it.
    pub(super) async fn release(
        &self,
        partition: PartitionId,
        accept: impl FnOnce(&PartitionRecord) -> bool,
    ) -> Option<Released> {
        let (slot, object, released) = {
            let mut shared = self.shared.lock();
            let shared = &mut *shared;
            let owned = shared.owned.get_mut(&partition)?;
            if owned.is_busy || self.env.now() < owned.serve_from || !accept(&owned.read.record) {
                return None;
            }
            owned.is_busy = true;
            owned.accepts = !self.rules().release;
            let epoch = owned.read.record.epoch;
            let record = Record::release(partition, epoch, owned.state.version());
            let (read, kind) = (owned.read.clone(), owned.log());
            let kept = if kind == LogKind::Shared { owned.kept } else { Position::default() };
            let (slot, object) = shared.log(kind).append(&record);
            let slot_of_release = Position { incarnation: shared.begun.incarnation, slot };
            (slot, object, Released { read, slot: slot_of_release, kind, kept })
        };
        self.spawn(self.clone().put(released.kind, slot, object));
        self.durable(released.kind, slot).await.then_some(released)
    }

    /// Hands a released partition over. Returns false if it was kept.
    pub(super) async fn hand_over(
        &self,
        partition: PartitionId,
        to: Option<NodeId>,
        released: Released,
        transfer: Transfer,
    ) -> bool {
        let begun = self.begun();
        let Released { read, slot, kept, .. } = released;
        let release = Release { partition, read, slot, kept_from: kept, transfer };
        let outcome = match to {
            Some(to) => handover::hand_over(&self.env, self.id, &begun.read, to, &release).await,
            None => handover::take_back(&self.env, self.id, &begun.read, &release).await,
        };
        let id = self.id;
        self.simulation().note(|| format!("node {id}: moves {partition} to {to:?}: {outcome:?}"));
        match outcome {
            Ok(handover::Outcome::HandedOver) => {
                let mut shared = self.shared.lock();
                shared.owned.remove(&partition);
                shared.unopened.remove(&partition);
                true
            }
            Ok(handover::Outcome::Kept(read)) => {
                self.resume(partition, read);
                false
            }
            Err(error) => {
                self.fenced(&error.to_string());
                false
            }
        }
    }

    /// Accepts statements again, under this record.
    fn resume(&self, partition: PartitionId, read: Read<PartitionRecord>) {
        if let Some(owned) = self.shared.lock().owned.get_mut(&partition) {
            owned.read = read;
            owned.accepts = true;
            owned.is_busy = false;
        }
    }

    pub(super) async fn move_to(&self, partition: PartitionId, to: NodeId) -> Answer {
        if is_private(partition) {
            return Answer::Elsewhere;
        }
        if let Err(answer) = self.ready(partition).await {
            return answer;
        }
        // A partition with a local log cannot be read by another node.
        let accept = |record: &PartitionRecord| to == self.id || record.log() == LogKind::Shared;
        let Some(released) = self.release(partition, accept).await else { return Answer::Elsewhere };
        if to == self.id {
            return self.restore(partition, released).await;
        }
        if self.hand_over(partition, Some(to), released, Transfer::Store).await {
            (self.report)(self.env.process, Report::Moved);
        }
        Answer::Done
    }

    /// Restores the released partition to its own contents.
    async fn restore(&self, partition: PartitionId, released: Released) -> Answer {
        let Released { read, slot, kind, .. } = released;
        let from = Position { slot: slot.slot + 1, ..slot };
        let draft = Some((read.record.epoch + 1, from));
        let Some((name, _)) = self.store_manifest(partition, draft, false).await else {
            // Nothing was changed, except that the draft may be stored.
            self.resume(partition, read);
            return Answer::Elsewhere;
        };
        let begun = self.begun();
        let node = (self.id, &begun.read);
        match restore::change(&self.env, partition, &read, node, name, (kind, from), Ok).await {
            Ok(read) => {
                let id = self.id;
                self.simulation().note(|| format!("node {id}: has restored {partition}"));
                self.resume(partition, read);
                Answer::Done
            }
            Err(error) => {
                self.fenced(&error.to_string());
                Answer::Elsewhere
            }
        }
    }

    /// Changes the durability of a partition.
    pub(super) async fn set_log(&self, partition: PartitionId, to: LogKind) -> Answer {
        if let Err(answer) = self.ready(partition).await {
            return answer;
        }
        let (kind, last) = {
            let mut shared = self.shared.lock();
            let Some(owned) = shared.owned.get_mut(&partition) else { return Answer::Elsewhere };
            if owned.is_busy || owned.log() == to {
                return Answer::Elsewhere;
            }
            owned.is_busy = true;
            owned.accepts = !self.rules().hold_during_change;
            (owned.log(), owned.pending.last().map(|(slot, _)| *slot))
        };
        if let Some(last) = last
            && !self.durable(kind, last).await
        {
            return Answer::Elsewhere;
        }
        let Some((manifest, _)) = self.store_manifest(partition, None, true).await else {
            return Answer::Elsewhere;
        };
        let (begun, from, read) = {
            let mut shared = self.shared.lock();
            let slot = shared.log(to).durable;
            let from = Position { incarnation: shared.begun.incarnation, slot };
            let Some(owned) = shared.owned.get(&partition) else { return Answer::Elsewhere };
            (shared.begun.clone(), from, owned.read.clone())
        };
        let node = (self.id, &begun.read);
        let changed = durability::change(&self.env, partition, &read, node, manifest, (to, from), Ok).await;
        let id = self.id;
        self.simulation().note(|| format!("node {id}: the log of {partition} is now {to:?}: {changed:?}"));
        match changed {
            Ok(read) => {
                let mut shared = self.shared.lock();
                let next = Position { incarnation: begun.incarnation, slot: shared.shared_log.next };
                if let Some(owned) = shared.owned.get_mut(&partition) {
                    // All records are in the manifest.
                    owned.kept = next;
                    owned.pending.clear();
                }
                drop(shared);
                self.resume(partition, read);
                (self.report)(self.env.process, Report::ChangedLog);
                Answer::Done
            }
            Err(error) => {
                self.fenced(&error.to_string());
                Answer::Elsewhere
            }
        }
    }
}
