//! Partitions that are about to be moved to this node: their pages are in memory before it owns them
//! (the destination's part of Albatross, ElasTraS 6).
//!
//! ```text
//!   source: flush, list the cached pages   destination: open the newest manifest, read the pages
//!   source: flush, list those that changed destination: open it again, take the others over, ...
//!   handover                               destination: open as owner, take the pages over
//! ```
//!
//! An arrival is a hint. It is dropped when it was not used for [`MAX_AGE`], and nothing depends on
//! it: if it was dropped, or is of another partition's timeline, the pages are read when statements
//! need them. The number of arrivals is bounded, and their pages are evicted like others.

use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::{Contents, Node, Partition, PartitionStats, store_error, with_partition_context};
use fulmar_pages::{PartitionId, Timeline};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::CommitLog;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Maximum number of arrivals of a node.
const MAX_ARRIVALS: usize = 64;
/// How long an arrival is kept after its last use.
const MAX_AGE: Duration = Duration::from_secs(60);

/// The partitions that are about to be moved to this node.
#[derive(Default)]
pub(crate) struct Arrivals(Mutex<HashMap<PartitionId, Arrival>>);

struct Arrival {
    partition: Arc<Partition>,
    used: Instant,
}

impl Arrivals {
    /// Opens the newest version of a partition in the store, with the pages in memory of an earlier
    /// call that have not changed. `None` if the partition is empty: nothing of it is stored.
    pub(super) async fn prepare(
        &self,
        node: &Arc<Node>,
        stats: Arc<PartitionStats>,
        id: PartitionId,
        timeline: Timeline,
    ) -> Result<Option<Arc<Partition>>> {
        let (manifest, _) = node.store.latest(id, timeline.epoch, None).await.map_err(store_error)?;
        let Some(manifest) = manifest else { return Ok(None) };
        let number = manifest.version.number;
        if let Some(known) = self.get(id).filter(|known| known.manifest_number() == number) {
            return Ok(Some(known));
        }
        let log = CommitLog::read_only();
        let open = Partition::open(node.clone(), log, stats, id, timeline, Contents::of(Some(&manifest)));
        let opened = with_partition_context(id, open).await?;
        if let Some(earlier) = self.take(id) {
            opened.adopt_pages(&earlier);
        }
        let arrival = Arrival { partition: opened.clone(), used: Instant::now() };
        let mut arrivals = self.0.lock();
        arrivals.retain(|_, arrival| arrival.used.elapsed() < MAX_AGE);
        if arrivals.len() >= MAX_ARRIVALS {
            let message = format!("too many databases are being moved to this node (limit {MAX_ARRIVALS})");
            return Err(Error::new(sqlstate::CONFIGURATION_LIMIT, message).hint("Retry later."));
        }
        arrivals.insert(id, arrival);
        Ok(Some(opened))
    }

    fn get(&self, id: PartitionId) -> Option<Arc<Partition>> {
        let mut arrivals = self.0.lock();
        let arrival = arrivals.get_mut(&id)?;
        arrival.used = Instant::now();
        Some(arrival.partition.clone())
    }

    /// Removes a partition.
    pub(super) fn take(&self, id: PartitionId) -> Option<Arc<Partition>> {
        self.0.lock().remove(&id).map(|arrival| arrival.partition)
    }

    /// Drops partitions whose migration has ended without a word.
    pub(crate) fn drop_old(&self) {
        self.0.lock().retain(|_, arrival| arrival.used.elapsed() < MAX_AGE);
    }
}
