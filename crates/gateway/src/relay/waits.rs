//! How long clients wait because the owner of their partition changes.

use std::time::Duration;

use fulmar_pages::PartitionId;
use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::cluster::Waits;

/// Maximum number of partitions. Beyond it nothing is recorded for others: reports are incomplete.
const MAX_PARTITIONS: usize = 10_000;

/// The waits of the clients of this node, by partition.
#[derive(Default)]
pub(crate) struct WaitRegistry(Mutex<HashMap<PartitionId, Waits>>);

impl WaitRegistry {
    /// Records that a client has waited, and whether its transaction has failed.
    pub(crate) fn record(&self, partition: PartitionId, waited: Option<Duration>, has_failed: bool) {
        let mut all = self.0.lock();
        if all.len() >= MAX_PARTITIONS && !all.contains_key(&partition) {
            return;
        }
        all.entry(partition).or_default().add(Waits {
            longest_ms: waited.map_or(0, |waited| waited.as_millis() as u64),
            count: waited.is_some().into(),
            failed: has_failed.into(),
        });
    }

    /// Removes the waits of a partition, and returns them.
    pub(crate) fn take(&self, partition: PartitionId) -> Waits {
        self.0.lock().remove(&partition).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_added_until_they_are_taken() {
        let registry = WaitRegistry::default();
        let (one, other) = (PartitionId(1), PartitionId(2));
        registry.record(one, Some(Duration::from_millis(30)), false);
        registry.record(one, Some(Duration::from_millis(20)), true);
        registry.record(one, None, false);
        registry.record(other, Some(Duration::from_secs(9)), false);
        assert_eq!(registry.take(one), Waits { longest_ms: 30, count: 2, failed: 1 });
        assert_eq!(registry.take(one), Waits::default());
    }
}
