//! Migrations of partitions: the source, the destination and the coordinator.

use std::time::Duration;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::handover::Transfer;
use fulmar_cluster::migration::{
    self, Action, Command, Fence, Journal, Mechanism, Participants, Reply, Step,
};
use fulmar_cluster::{LogKind, ManifestName, NodeId, PartitionRecord, Read, metadata};
use fulmar_pages::PartitionId;

use super::{Answer, Node, Report, Request};
use crate::partition::State;
use crate::run::is_private;

impl Participants for Node {
    async fn command(&self, node: NodeId, command: Command) -> Option<Reply> {
        match self.call(node, Request::Command(command)).await? {
            Answer::Reply(reply) => Some(reply),
            _ => None,
        }
    }
}

impl Node {
    /// Starts a migration of a partition that this node owns, and coordinates it.
    pub(super) async fn migrate(&self, partition: PartitionId, to: NodeId, on_demand: bool) -> Answer {
        if to == self.id {
            return Answer::Elsewhere;
        }
        if let Err(answer) = self.ready(partition).await {
            return answer;
        }
        let record = self.shared.lock().owned.get(&partition).map(|owned| owned.read.record.clone());
        let Some(record) = record else { return Answer::Elsewhere };
        let mechanism = match (is_private(partition), on_demand) {
            (true, true) => Mechanism::OnDemand,
            (true, false) => Mechanism::Live,
            (false, true) => Mechanism::Flush,
            (false, false) => Mechanism::Albatross,
        };
        if mechanism.needs_common_store() && record.log() != LogKind::Shared {
            return Answer::Elsewhere;
        }
        migration::start(&self.env, partition, &record, to, mechanism.into(), None).await.unwrap();
        migration::coordinate(&self.env, partition, self).await.unwrap();
        Answer::Done
    }

    /// Continues migrations whose coordinator has died.
    pub(super) async fn resume_migrations(self, partitions: Vec<PartitionId>) {
        loop {
            let max_jitter = Duration::from_millis(3000);
            self.env.sleep(Duration::from_millis(1500) + self.env.jitter(max_jitter)).await;
            for partition in &partitions {
                migration::coordinate(&self.env, *partition, &self).await.unwrap();
            }
        }
    }

    pub(super) async fn command(&self, command: Command) -> Reply {
        let id = self.id;
        let reply = match command.action {
            Action::Drop => self.drop_copy(command).await,
            Action::Copy | Action::HandOver => self.source_command(command).await.unwrap_or(Reply::Refused),
        };
        self.simulation().note(|| format!("node {id}: {command:?}: {reply:?}"));
        reply
    }

    /// A command for the source. `None`: it is refused.
    async fn source_command(&self, command: Command) -> Option<Reply> {
        let Command { partition, fence, epoch, action } = command;
        self.ready(partition).await.ok()?;
        let journal = migration::journal(&self.env, partition).await.unwrap()?;
        if !migration::is_current(self.rules(), &journal.record, &command) {
            return None;
        }
        let read = {
            let mut shared = self.shared.lock();
            let shared = &mut *shared;
            let newest = shared.commands.get(&partition).copied();
            let owned = shared.owned.get(&partition)?;
            if owned.read.record.epoch != epoch || migration::is_stale(self.rules(), newest, fence) {
                return None;
            }
            shared.commands.insert(partition, fence);
            let durable = shared.local_log.durable;
            owned.state.at(owned.durable_version(durable))
        };
        match action {
            // The destination fills its cache, which is not modelled.
            Action::Copy if journal.record.options.mechanism.needs_common_store() => Some(Reply::Done),
            Action::Copy => self.send_copy(&journal.record, partition, 1, read).await,
            _ => self.source_hand_over(command, journal).await,
        }
    }

    /// Stores a copy at the destination.
    async fn send_copy(
        &self,
        journal: &Journal,
        partition: PartitionId,
        sequence: u64,
        state: State,
    ) -> Option<Reply> {
        let fence = Fence { number: journal.number, step: journal.step, sequence };
        let request = Request::StoreCopy { partition, fence, name: journal.copy(), state };
        if !self.rules().copy_before_change {
            let (node, to) = (self.clone(), journal.destination);
            self.spawn(async move { drop(node.call(to, request).await) });
            return Some(Reply::Done);
        }
        match self.call(journal.destination, request).await? {
            Answer::Reply(reply) => Some(reply),
            _ => None,
        }
    }

    async fn source_hand_over(&self, command: Command, journal: Read<Journal>) -> Option<Reply> {
        let Command { partition, epoch, .. } = command;
        let log = match journal.record.options.mechanism.needs_common_store() {
            true => LogKind::Shared,
            false => LogKind::Local,
        };
        let is_same = |record: &PartitionRecord| record.epoch == epoch && record.log() == log;
        let released = self.release(partition, is_same).await?;
        let state = self.shared.lock().owned.get(&partition).map(|owned| owned.state.clone())?;
        let (to, mechanism) = (journal.record.destination, journal.record.options.mechanism);
        let (to, transfer) = match mechanism {
            Mechanism::Stop | Mechanism::Flush | Mechanism::Albatross => {
                (Some(to), Transfer::Migrated(journal))
            }
            Mechanism::Live | Mechanism::Delta | Mechanism::Bulk | Mechanism::Sql => {
                let stored = self.send_copy(&journal.record, partition, 2, state).await;
                (Some(to).filter(|_| stored == Some(Reply::Done)), Transfer::Copied(journal))
            }
            Mechanism::OnDemand => {
                self.env.write(|directory| directory.pinned.insert((partition, epoch + 1), state)).await;
                (Some(to), Transfer::Pinned(journal))
            }
        };
        if !self.hand_over(partition, to, released, transfer).await {
            return Some(Reply::Refused);
        }
        if !self.rules().pin_pages {
            self.env.directory.lock().pinned.clear();
        }
        (self.report)(self.env.process, Report::Migrated);
        Some(Reply::Done)
    }

    /// The destination stores a copy.
    pub(super) async fn store_copy(
        &self,
        partition: PartitionId,
        fence: Fence,
        name: ManifestName,
        state: State,
    ) -> Reply {
        let rules = *self.rules();
        let stored = self.env.write(|directory| {
            let newest = directory.fences.get(&partition).copied();
            if migration::is_stale(&rules, newest, fence) {
                return Reply::Refused;
            }
            directory.fences.insert(partition, fence);
            directory.copies.insert((partition, name), state);
            Reply::Done
        });
        let reply = stored.await;
        let id = self.id;
        self.simulation().note(|| format!("node {id}: copy {fence:?} of {partition}: {reply:?}"));
        reply
    }

    /// The destination deletes the copy of a migration that was undone.
    async fn drop_copy(&self, command: Command) -> Reply {
        let Command { partition, fence, epoch, .. } = command;
        let rules = *self.rules();
        let dropped = self.env.write(|directory| {
            let newest = directory.fences.get(&partition).copied();
            if migration::is_stale(&rules, newest, fence) {
                return Reply::Refused;
            }
            directory.fences.insert(partition, Fence { step: Step::Undoing, ..fence });
            let is_copy = |name: &ManifestName| name.covered == fence.number && name.epoch == epoch + 1;
            directory.copies.retain(|(id, name), _| *id != partition || !is_copy(name));
            Reply::Done
        });
        dropped.await
    }

    /// The pages that are pinned for the destination's first epoch.
    pub(super) fn pages(&self, partition: PartitionId, epoch: u32) -> Answer {
        Answer::Pages(self.env.directory.lock().pinned.get(&(partition, epoch)).cloned())
    }

    /// Periodically drops pages that no record needs any more.
    pub(super) async fn unpin(self) {
        loop {
            self.env.sleep(Duration::from_millis(700)).await;
            let pinned: Vec<_> = self.env.directory.lock().pinned.keys().copied().collect();
            for (partition, epoch) in pinned {
                let read = metadata::partition(&self.env, partition).await.unwrap();
                let is_pinned = read.is_some_and(|read| migration::is_pinned(&read.record, self.id, epoch));
                if !is_pinned {
                    self.env.directory.lock().pinned.remove(&(partition, epoch));
                }
            }
        }
    }
}
