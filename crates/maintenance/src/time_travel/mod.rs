//! Time travel: historical versions of partitions, read by sessions that set `fulmar.as_of`.
//!
//! ```text
//!   time -> manifest ([`crate::restore_points`]) -> Partition with a read-only log
//!                                                |   shared by all sessions at this version
//!   session A: as_of 12:00:30 -> manifest of 12:00:17 ---+
//!   session B: as_of 12:00:59 ---------------------------'
//! ```
//!
//! A historical version is a normal [`Partition`], opened from an older manifest and without the
//! log's records. Snapshots, connections, the cache and read-ahead work as usual. Its log is
//! [`CommitLog::read_only`]: any write fails with 25006, and all commits count as durable.
//!
//! # Memory
//! Its pages are charged to `--memory` and can all be evicted, since none of them is dirty. Only
//! the table of their locations stays in memory. So a partition has at most
//! [`versions::MAX_OPEN_VERSIONS`] versions open, and a version without sessions is closed by the
//! background task once it has been idle for as long as any partition may be.
//!
//! # Protection from garbage collection
//! [`fulmar_mvcc::Node::old_manifests`] is held from the choice of the manifest until the version
//! is in the list of open ones. The collector deletes manifests while that lock is free, then
//! determines which segments open versions read, then which segments the remaining manifests
//! reference. There are three cases: the manifest was deleted before it could be chosen; or it
//! remains, and references the segments; or it is deleted after the version was opened, and the
//! segments are in use. A session can therefore continue to read a version whose manifest has been
//! thinned out or has expired. Dropping a partition closes its historical versions.

mod versions;

use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_mvcc::{Contents, Partition, with_partition_context};
use fulmar_pages::{PartitionId, Timeline};
use fulmar_sqlite::{Result, sqlstate};
use fulmar_store::{CommitLog, ManifestName};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::Instant;

pub use self::versions::{Past, PastVersion};
use crate::maintenance::Maintenance;
use crate::pins;
use crate::restore_points::RestorePoint;

/// How long opening a version waits for another one to become unused. Background tasks can hold a
/// released version for a moment.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Maintenance {
    /// Opens a partition as of a time (milliseconds since 1970): its last version with a manifest
    /// at or before it. Waits up to [`RELEASE_TIMEOUT`] if too many versions are in
    /// use. Nothing is locked meanwhile.
    pub async fn partition_at(&self, id: PartitionId, at_unix_ms: u64) -> Result<PastVersion> {
        let end = Instant::now() + RELEASE_TIMEOUT;
        loop {
            match self.try_partition_at(id, at_unix_ms).await {
                Err(error) if error.state() == sqlstate::CONFIGURATION_LIMIT && Instant::now() < end => {
                    tokio::time::sleep(RELEASE_POLL_INTERVAL).await;
                }
                outcome => return outcome,
            }
        }
    }

    fn try_partition_at(&self, id: PartitionId, at_unix_ms: u64) -> BoxFuture<'_, Result<PastVersion>> {
        async move {
            let node = self.node();
            let _past = node.old_manifests.read().await;
            self.partitions.check_not_dropped(id)?;
            let manifest = self.manifest_at(id, at_unix_ms).await?;
            let slot = self.historical_versions.slot(ManifestName::of(&manifest))?;
            if let Some(pins) = &self.pins
                && !pins.pin(node, ManifestName::of(&manifest)).await
            {
                return Err(pins::gone());
            }
            let era = Timeline { lineage: manifest.version.lineage, epoch: manifest.version.epoch };
            let (log, stats) = (CommitLog::read_only(), self.partitions.counted(id));
            let opened = slot
                .get_or_try_init(|| {
                    with_partition_context(
                        id,
                        Partition::open(node.clone(), log, stats, id, era, Contents::of(Some(&manifest))),
                    )
                })
                .await?;
            opened.used_ms.store(node.clock.monotonic_ms(), Ordering::Relaxed);
            // Checked after the opening: an earlier drop is seen here, a later one finds the
            // version in the list.
            if let Err(dropped) = self.partitions.check_not_dropped(id) {
                self.historical_versions.drop_partition(id);
                return Err(dropped);
            }
            let time_unix_ms = RestorePoint::of(&manifest).time_unix_ms;
            Ok(PastVersion { partition: opened.clone(), time_unix_ms })
        }
        .boxed()
    }
}
