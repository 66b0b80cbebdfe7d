//! Partition ids, never reused, and the partitions that exist.
//!
//! A counter in the store says below which number every id may have been given out. A catalog moves it up by a
//! block, durably, then gives out the block's ids from memory: creating many tenants at once meets no contended
//! record. What is left of a block at a crash is lost; 2^64 ids can bear it.

use std::ops::Range;

use fulmar_pages::PartitionId;

use super::records::{self, Key};
use super::{Catalog, PartitionRecord};
use crate::{MetaError, Transaction, What};

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
                let (start, revision) =
                    state.next_partition.ok_or_else(|| records::corrupt(&key, "it has disappeared"))?;
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
