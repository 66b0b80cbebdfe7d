//! Partition ids, never reused, and the partitions that exist.
//!
//! A counter in the store says below which number every id may have been given out. A catalog moves it up by a
//! block, durably, then gives out the block's ids from memory: creating many tenants at once meets no contended
//! record. What is left of a block at a crash is lost; 2^64 ids can bear it.
//!
//! Logs and stores may hold data of partitions that were dropped. Data of a partition that the catalog has neither as existing nor as
//! dropped proves that the catalog is older than the data. A drop therefore leaves a record `dropped/ID` in the transaction that deletes
//! the partition's record. When a start has compared the catalog with log and store, all ids that were given out are accounted for:
//! `counter/dropped` is raised to the next id, and the records below it are deleted ([`Catalog::settle_dropped`]). Ids at or above
//! `counter/dropped` were given out after that start, so an older copy of the catalog knows them neither way.

use std::ops::Range;
use std::sync::Arc;

use fulmar_pages::PartitionId;

use super::cache::State;
use super::records::{self, Key};
use super::{Catalog, PartitionRecord, SaltKey};
use crate::{MAX_TRANSACTION_STEPS, MetaError, Revision, Transaction, What};

/// Ids that are reserved at once.
const BLOCK_IDS: u64 = 64;

/// Reserved ids that were not given out yet.
#[derive(Default)]
pub(super) struct IdBlock(Range<u64>);

impl Catalog {
    /// Every partition that exists, in order of id, those of unfinished tenants included: what an engine is
    /// given at start. Data of any other partition is garbage.
    pub fn partitions(&self) -> Vec<PartitionRecord> {
        self.cache.state().partitions.values().copied().collect()
    }

    /// A partition, if it exists.
    pub fn partition(&self, id: PartitionId) -> Option<PartitionRecord> {
        self.cache.state().partitions.get(&id).copied()
    }

    /// Whether log and store may hold data of this partition: it exists or was dropped.
    pub fn knows_partition(&self, id: PartitionId) -> bool {
        let state = self.cache.state();
        let settled = state.dropped_before.is_some_and(|(before, _)| id.0 < before);
        settled || state.partitions.contains_key(&id) || state.dropped.contains(&id)
    }

    /// The smallest id that [`Catalog::knows_partition`] may deny.
    pub fn first_unsettled_partition(&self) -> PartitionId {
        PartitionId(self.cache.state().dropped_before.map_or(0, |(before, _)| before))
    }

    /// Log and store were compared with the catalog: every partition up to now that does not exist was dropped. With `found`, the
    /// greatest id of partitions there that the catalog does not know and that are given up, no later partition gets such an id.
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
        // Nobody else changes these: at the same time, so that they share commits.
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

    /// Adds what a catalog of an earlier version does not have.
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

    /// The secret from which salts for users that do not exist are derived. `None`: the catalog is that of an owner of an earlier version.
    pub fn salt_key(&self) -> Option<Arc<SaltKey>> {
        self.cache.state().salt_key.clone()
    }

    /// A partition was restored: from now on its versions are of this lineage and epoch.
    ///
    /// Errors: `Missing` (it was dropped), `InUse` (it is at that epoch or a later one), and what the store says.
    pub async fn begin_era(&self, id: PartitionId, lineage: u64, epoch: u32) -> Result<(), MetaError> {
        let key = Key::Partition(id).to_string();
        self.change(|state| {
            let missing = || MetaError::missing(What::Tenant, &id.to_string());
            let current = state.partitions.get(&id).ok_or_else(missing)?;
            if current.epoch >= epoch {
                return Err(MetaError::InUse {
                    what: What::Tenant,
                    name: id.to_string(),
                    reason: "has been restored by somebody else".to_owned(),
                    remedy: "look at what is there, and restore it again",
                });
            }
            let record = PartitionRecord { id, lineage, epoch, revision: current.revision };
            let transaction = Transaction::new()
                .unchanged(key.as_str(), current.revision)
                .put(key.as_str(), records::partition_value(&record));
            Ok((transaction, ()))
        })
        .await?;
        Ok(())
    }

    /// An id that was never given out before.
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
                    .ok_or_else(|| records::corrupt(&key, "it has reached the largest number"))?;
                let transaction = Transaction::new()
                    .unchanged(key.as_str(), revision)
                    .put(key.as_str(), records::counter_value(end));
                Ok((transaction, start..end))
            })
            .await?;
        Ok(block)
    }
}

impl State {
    /// The next partition id, and the revision of that record.
    fn counter(&self) -> Result<(u64, Revision), MetaError> {
        let missing = || records::corrupt(&Key::PartitionCounter.to_string(), "it has disappeared");
        self.next_partition.ok_or_else(missing)
    }
}
