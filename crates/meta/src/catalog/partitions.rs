//! Assigns partition ids, which are never reused, and records which partitions exist or were
//! dropped.
//!
//! **Assignment.** A counter in the store is an upper bound of the assigned ids. A catalog raises
//! it durably by a block of 64 ids, then assigns the block's ids from memory. Concurrent creations
//! of tenants therefore do not contend on the counter. The unused ids of a block are lost in a
//! crash, which 2^64 ids can afford.
//!
//! **Detecting an outdated catalog.** Logs and stores may hold data of dropped partitions. Data of
//! a partition that the catalog knows neither as existing nor as dropped proves that the catalog is
//! older than the data.
//!
//! - A drop writes a tombstone `dropped/ID` in the transaction that deletes the partition's record.
//! - When a start has compared the catalog with log and store, all assigned ids are accounted for.
//!   It raises `counter/dropped` to the next id and deletes the tombstones below it
//!   ([`Catalog::settle_dropped`]).
//! - Ids at or above `counter/dropped` were assigned after that start, so an older copy of the
//!   catalog knows them neither as existing nor as dropped.

use std::ops::Range;
use std::sync::Arc;

use fulmar_pages::PartitionId;

use super::cache::State;
use super::records::{self, Key};
use super::{Catalog, PartitionRecord, SaltKey};
use crate::{MAX_TRANSACTION_STEPS, MetaError, ObjectKind, Revision, Transaction};

/// Number of ids per reservation.
const BLOCK_IDS: u64 = 64;

/// Reserved ids that are not assigned yet.
#[derive(Default)]
pub(super) struct IdBlock(Range<u64>);

impl Catalog {
    /// All existing partitions in order of id, including those of unfinished tenants. The engine
    /// gets this list at start. Data of any other partition is garbage.
    pub fn partitions(&self) -> Vec<PartitionRecord> {
        self.cache.state().partitions.values().copied().collect()
    }

    /// A partition, if it exists.
    pub fn partition(&self, id: PartitionId) -> Option<PartitionRecord> {
        self.cache.state().partitions.get(&id).copied()
    }

    /// Returns true if log and store may hold data of this partition: it exists or was dropped.
    pub fn knows_partition(&self, id: PartitionId) -> bool {
        let state = self.cache.state();
        let settled = state.dropped_before.is_some_and(|(before, _)| id.0 < before);
        settled || state.partitions.contains_key(&id) || state.dropped.contains(&id)
    }

    /// The smallest id for which [`Catalog::knows_partition`] can return false.
    pub fn first_unsettled_partition(&self) -> PartitionId {
        PartitionId(self.cache.state().dropped_before.map_or(0, |(before, _)| before))
    }

    /// Called after log and store were compared with the catalog. Records that every nonexistent
    /// partition with an id assigned so far was dropped. `found` is the greatest id of unknown
    /// partitions whose data the operator has abandoned; no later partition gets an id up to it.
    pub async fn settle_dropped(&self, found: Option<PartitionId>) -> Result<(), MetaError> {
        self.change(|state| {
            let (next, next_revision) = state.counter()?;
            let before = found.map_or(next, |found| next.max(found.0.saturating_add(1)));
            let mut transaction =
                Transaction::new().unchanged(Key::PartitionCounter.to_string(), next_revision);
            if before > next {
                transaction =
                    transaction.put(Key::PartitionCounter.to_string(), records::counter_value(before));
            }
            if state.dropped_before.is_some_and(|(known, _)| known == before) {
                return Ok((Transaction::new(), ()));
            }
            let key = Key::DroppedCounter.to_string();
            Ok((transaction.put(key, records::dropped_counter_value(before)), ()))
        })
        .await?;
        // No other transaction changes these records. Deleted concurrently, to share commits.
        let settled: Vec<_> = {
            let state = self.cache.state();
            let before = state.dropped_before.map_or(0, |(before, _)| before);
            state.dropped.range(..PartitionId(before)).copied().collect()
        };
        let deletions = settled.chunks(MAX_TRANSACTION_STEPS).map(|ids| {
            let keys = ids.iter().map(|id| Key::Dropped(*id).to_string());
            self.store.transact(keys.fold(Transaction::new(), Transaction::delete))
        });
        futures::future::try_join_all(deletions).await.map(drop)
    }

    /// Creates records that a catalog of an earlier version lacks.
    pub(super) async fn add_missing_records(&self) -> Result<(), MetaError> {
        let salt_key = SaltKey::random();
        self.change(|state| {
            let mut transaction = Transaction::new();
            if state.dropped_before.is_none() {
                let (next, revision) = state.counter()?;
                let key = Key::DroppedCounter.to_string();
                transaction = transaction
                    .unchanged(Key::PartitionCounter.to_string(), revision)
                    .absent(key.as_str())
                    .put(key, records::dropped_counter_value(next));
            }
            if state.salt_key.is_none() {
                let key = Key::Salt.to_string();
                transaction = transaction.absent(key.as_str()).put(key, records::salt_key_value(&salt_key));
            }
            Ok((transaction, ()))
        })
        .await
        .map(drop)
    }

    /// The secret from which SCRAM salts for nonexistent users are derived. `None` if the catalog
    /// was published by an earlier version.
    pub fn salt_key(&self) -> Option<Arc<SaltKey>> {
        self.cache.state().salt_key.clone()
    }

    /// Records the restore of a partition: its later versions have this lineage and epoch.
    ///
    /// Errors: `Missing` (it was dropped), `InUse` (it is at that epoch or a later one), and those
    /// of the store.
    pub async fn begin_timeline(&self, id: PartitionId, lineage: u64, epoch: u32) -> Result<(), MetaError> {
        self.change(|state| Ok((timeline_change(state, Transaction::new(), id, lineage, epoch)?, ())))
            .await?;
        Ok(())
    }

    /// Adds [`Catalog::begin_timeline`] to a transaction that also changes other records. The caller
    /// runs it, and plans it again after a conflict. Errors: `Missing`, `InUse`.
    pub fn plan_timeline(
        &self,
        transaction: Transaction,
        id: PartitionId,
        lineage: u64,
        epoch: u32,
    ) -> Result<Transaction, MetaError> {
        timeline_change(&self.cache.state(), transaction, id, lineage, epoch)
    }

    /// Assigns an id that was never used before.
    pub(super) async fn new_partition_id(&self) -> Result<PartitionId, MetaError> {
        let mut block = self.ids.lock().await;
        if block.0.is_empty() {
            block.0 = self.reserve_ids().await?;
        }
        let id = block.0.start;
        block.0.start += 1;
        Ok(PartitionId(id))
    }

    async fn reserve_ids(&self) -> Result<Range<u64>, MetaError> {
        let key = Key::PartitionCounter.to_string();
        let (block, _) = self
            .change(|state| {
                let (start, revision) = state.counter()?;
                let end = start
                    .checked_add(BLOCK_IDS)
                    .ok_or_else(|| records::corrupt(&key, "the counter has reached its maximum"))?;
                let transaction = Transaction::new()
                    .unchanged(key.as_str(), revision)
                    .put(key.as_str(), records::counter_value(end));
                Ok((transaction, start..end))
            })
            .await?;
        Ok(block)
    }
}

fn timeline_change(
    state: &State,
    transaction: Transaction,
    id: PartitionId,
    lineage: u64,
    epoch: u32,
) -> Result<Transaction, MetaError> {
    let missing = || MetaError::missing(ObjectKind::Tenant, &id.to_string());
    let current = state.partitions.get(&id).ok_or_else(missing)?;
    if current.epoch >= epoch {
        return Err(MetaError::InUse {
            what: ObjectKind::Tenant,
            name: id.to_string(),
            reason: "was restored concurrently".to_owned(),
            remedy: "Check its contents and repeat the restore if needed.",
        });
    }
    let key = Key::Partition(id).to_string();
    let record = PartitionRecord { id, lineage, epoch, revision: current.revision };
    let value = records::partition_value(&record);
    Ok(transaction.unchanged(key.as_str(), current.revision).put(key, value))
}

impl State {
    /// The next partition id, and the revision of that record.
    fn counter(&self) -> Result<(u64, Revision), MetaError> {
        let missing = || records::corrupt(&Key::PartitionCounter.to_string(), "the record is missing");
        self.next_partition.ok_or_else(missing)
    }
}
