//! Handing a partition over to another node, with the owner's consent.
//!
//! The owner has stopped accepting statements for the partition, and its `release` record, which
//! follows all of the partition's commits, is durable. Then one transaction changes the owner (rule
//! 2). If it fails, or if its outcome is unknown, the owner takes the partition back by another
//! transaction. A read would not be enough: a transaction of unknown outcome may still be applied
//! after the read (`settle_by_writing`).

use fulmar_pages::PartitionId;

use crate::environment::Environment;
use crate::metadata::{self, Change};
use crate::migration::Journal;
use crate::{Error, NodeId, NodeRecord, NodeState, PartitionRecord, Position, Read, retry};

/// How a handover ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The destination owns the partition.
    HandedOver,
    /// This node owns the partition again, under this record (of a new epoch).
    Kept(Read<PartitionRecord>),
}

/// How the destination gets the contents.
#[derive(Clone, Debug)]
pub enum Transfer {
    /// It reads the manifests and the shared log.
    Store,
    /// As [`Transfer::Store`], in a migration with this journal.
    Migrated(Read<Journal>),
    /// It has stored every page, as [`Journal::copy`] of this journal.
    Copied(Read<Journal>),
    /// It pulls the pages from the source, which has pinned them.
    Pinned(Read<Journal>),
}

impl Transfer {
    /// The epoch that the partition had when its migration began.
    pub fn epoch(&self) -> Option<u32> {
        match self {
            Transfer::Store => None,
            Transfer::Migrated(journal) | Transfer::Copied(journal) | Transfer::Pinned(journal) => {
                Some(journal.record.epoch)
            }
        }
    }
}

/// A released partition.
#[derive(Clone, Debug)]
pub struct Release {
    /// The partition.
    pub partition: PartitionId,
    /// Its record.
    pub read: Read<PartitionRecord>,
    /// The slot of the `release` record. The range ends after it.
    pub slot: Position,
    /// Records before this position are in manifests.
    pub kept_from: Position,
    /// How the destination gets the contents.
    pub transfer: Transfer,
}

impl Release {
    /// Where the range of the owner's epoch ends.
    fn end(&self) -> Position {
        Position { slot: self.slot.slot + 1, ..self.slot }
    }

    /// The record after the handover from `source` to `destination`, whose log begins at `from`.
    fn next(&self, source: NodeId, destination: NodeId, from: Position) -> PartitionRecord {
        let record = &self.read.record;
        match &self.transfer {
            Transfer::Store | Transfer::Migrated(_) => {
                record.moved(self.kept_from, self.end(), destination, from, false)
            }
            Transfer::Copied(journal) => {
                record.migrated(destination, Some(journal.record.copy()), None, from)
            }
            Transfer::Pinned(_) => record.migrated(destination, None, Some(source), from),
        }
    }
}

/// Hands a released partition over from `source`, this node, to `destination`. Fails if this
/// incarnation has ended meanwhile.
pub async fn hand_over<E: Environment>(
    env: &E,
    source: NodeId,
    source_read: &Read<NodeRecord>,
    destination: NodeId,
    release: &Release,
) -> Result<Outcome, Error> {
    let Release { partition, read, .. } = release;
    let destination_read = metadata::node(env, destination).await?;
    if let Some(destination_read) = destination_read.filter(|read| read.record.state == NodeState::Alive) {
        let from = Position { incarnation: destination_read.record.incarnation, slot: 0 };
        let next = release.next(source, destination, from);
        let nodes = [(source, source_read), (destination, &destination_read)];
        let mut transaction = metadata::owner_change(env, *partition, read, &nodes, &next)?;
        match &release.transfer {
            Transfer::Migrated(journal) | Transfer::Copied(journal) | Transfer::Pinned(journal)
                if env.rules().compare_journal =>
            {
                transaction = Journal::compare(journal, *partition, transaction);
            }
            _ => {}
        }
        let changed = metadata::transact(env, transaction).await;
        if changed == Change::Applied {
            return Ok(Outcome::HandedOver);
        }
        if changed == Change::Unknown && !env.rules().settle_by_writing {
            let now = metadata::partition(env, *partition).await?;
            return Ok(match now {
                Some(now) if now.record.owner == source => Outcome::Kept(now),
                _ => Outcome::HandedOver,
            });
        }
    }
    take_back(env, source, source_read, release).await
}

/// Takes the partition back, unless the transaction of unknown outcome has been applied.
pub async fn take_back<E: Environment>(
    env: &E,
    source: NodeId,
    source_read: &Read<NodeRecord>,
    release: &Release,
) -> Result<Outcome, Error> {
    let Release { partition, kept_from, .. } = release;
    let end = release.end();
    let mut read = release.read.clone();
    let fenced = Error::Fenced { node: source, incarnation: source_read.record.incarnation };
    loop {
        let next = read.record.moved(*kept_from, end, source, end, false);
        metadata::change_owner(env, *partition, &read, &[(source, source_read)], &next).await?;
        let Some(now) = metadata::partition(env, *partition).await? else { return Err(fenced) };
        if now.record == next {
            return Ok(Outcome::Kept(now));
        }
        let node = metadata::node(env, source).await?;
        if node.is_none_or(|node| node.revision != source_read.revision) {
            return Err(fenced);
        }
        if now.record.epoch != read.record.epoch {
            // A partition leaves a living node only with its consent, so the handover was applied.
            return Ok(Outcome::HandedOver);
        }
        // Neither transaction was applied. The record may have changed: this node drops closed
        // ranges from it, and such a change may also be applied late.
        read = now;
        retry::pause(env).await;
    }
}
