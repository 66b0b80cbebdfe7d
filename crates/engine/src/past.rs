//! Time travel: historical versions of partitions, read by sessions that set `fulmar.as_of`.
//!
//! ```text
//!   time -> manifest ([`crate::history`]) -> Partition with a read-only log
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
//! the table of their locations stays in memory. So a partition has at most [`MAX_OPEN_VERSIONS`]
//! versions open, and a version without sessions is closed by the background task once it has been
//! idle for as long as any partition may be.
//!
//! # Protection from garbage collection
//! [`crate::node::Node::past`] is held from the choice of the manifest until the version is in the
//! list of open ones. The collector deletes manifests while that lock is free, then determines
//! which segments open versions read, then which segments the remaining manifests reference. There
//! are three cases: the manifest was deleted before it could be chosen; or it remains, and
//! references the segments; or it is deleted after the version was opened, and the segments are in
//! use. A session can therefore continue to read a version whose manifest has been thinned out or
//! has expired. Dropping a partition closes its historical versions.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_pages::PartitionId;
use fulmar_store::{CommitLog, ManifestName};
use futures::FutureExt;
use futures::future::BoxFuture;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::branch::Era;
use crate::engine::Slot;
use crate::history::RestorePoint;
use crate::partition::{Partition, opening};
use crate::{Engine, Error, Result, pins, sqlstate};

/// Maximum number of open historical versions per partition.
const MAX_OPEN_VERSIONS: usize = 8;

/// How long opening a version waits for another one to become unused. Background tasks can hold a
/// released version for a moment.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The open historical versions.
#[derive(Default)]
pub(crate) struct Past(Mutex<Versions>);

type Versions = HashMap<ManifestName, Slot>;

/// A historical version of a partition.
#[derive(Clone)]
pub(crate) struct PastVersion {
    pub partition: Arc<Partition>,
    /// When this version was current, in milliseconds since 1970.
    pub time_unix_ms: u64,
}

impl Past {
    pub(crate) fn open(&self) -> Vec<Arc<Partition>> {
        self.0.lock().values().filter_map(|slot| slot.get().cloned()).collect()
    }

    /// Returns the slot of a version, and creates it within the limit of open versions.
    fn slot(&self, name: ManifestName) -> Result<Slot> {
        let (slot, closed) = {
            let mut versions = self.0.lock();
            let count = |versions: &Versions| {
                versions.keys().filter(|other| other.partition == name.partition).count()
            };
            let is_full =
                |versions: &Versions| !versions.contains_key(&name) && count(versions) >= MAX_OPEN_VERSIONS;
            let mut closed = Vec::new();
            if is_full(&versions) {
                let unused =
                    |other: &ManifestName, slot: &Slot| other.partition == name.partition && is_unused(slot);
                closed = remove(&mut versions, unused);
            }
            ((!is_full(&versions)).then(|| versions.entry(name).or_default().clone()), closed)
        };
        let_go(closed);
        slot.ok_or_else(|| {
            let message = format!(
                "too many historical versions of the database are in use (limit \
                 {MAX_OPEN_VERSIONS})"
            );
            Error::new(sqlstate::CONFIGURATION_LIMIT, message).hint(
                "Run RESET fulmar.as_of in sessions that no longer need it, or use the same \
                 times in several sessions.",
            )
        })
    }

    /// Closes unused versions whose time of last use (milliseconds on the node's clock) satisfies
    /// `is_long_ago`.
    pub(crate) fn close_unused(&self, is_long_ago: impl Fn(u64) -> bool) {
        let idle = |slot: &Slot| {
            slot.get().is_none_or(|partition| is_long_ago(partition.used_ms.load(Ordering::Relaxed)))
        };
        let closed = remove(&mut self.0.lock(), |_, slot| is_unused(slot) && idle(slot));
        let_go(closed);
    }

    /// Closes all versions of a dropped partition.
    pub(crate) fn drop_partition(&self, id: PartitionId) {
        let closed = remove(&mut self.0.lock(), |name, _| name.partition == id);
        let_go(closed);
    }
}

/// Whether no session has the version and none is opening it.
fn is_unused(slot: &Slot) -> bool {
    Arc::strong_count(slot) == 1 && slot.get().is_none_or(|partition| partition.is_unused(1))
}

fn remove(versions: &mut Versions, which: impl Fn(&ManifestName, &Slot) -> bool) -> Vec<Slot> {
    versions.extract_if(|name, slot| which(name, slot)).map(|(_, slot)| slot).collect()
}

/// Closes versions that are not in the list any more. Sessions that still use them get errors.
fn let_go(versions: Vec<Slot>) {
    for partition in versions.iter().filter_map(|slot| slot.get()) {
        partition.close();
        partition.let_go();
    }
}

impl Engine {
    /// Opens a partition as of a time (milliseconds since 1970): its last version with a manifest
    /// at or before it. Waits up to [`RELEASE_TIMEOUT`] if too many versions are in
    /// use. Nothing is locked meanwhile.
    pub(crate) async fn partition_at(&self, id: PartitionId, at_unix_ms: u64) -> Result<PastVersion> {
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
            let _past = node.past.read().await;
            self.check_not_dropped(id)?;
            let manifest = self.manifest_at(id, at_unix_ms).await?;
            let slot = self.past.slot(ManifestName::of(&manifest))?;
            if let Some(beside) = &self.beside
                && !beside.pins.pin(node, ManifestName::of(&manifest)).await
            {
                return Err(pins::gone());
            }
            let era = Era { lineage: manifest.version.lineage, epoch: manifest.version.epoch };
            let (log, stats) = (CommitLog::read_only(), self.counted(id));
            let opened = slot
                .get_or_try_init(|| {
                    opening(id, Partition::open(node.clone(), log, stats, id, era, Some(&manifest), None))
                })
                .await?;
            opened.used_ms.store(node.clock.monotonic_ms(), Ordering::Relaxed);
            // Checked after the opening: an earlier drop is seen here, a later one finds the
            // version in the list.
            if let Err(dropped) = self.check_not_dropped(id) {
                self.past.drop_partition(id);
                return Err(dropped);
            }
            let time_unix_ms = RestorePoint::of(&manifest).time_unix_ms;
            Ok(PastVersion { partition: opened.clone(), time_unix_ms })
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    #[tokio::test(flavor = "multi_thread")]
    async fn version_is_opened_once_and_stays_open_while_sessions_use_it() {
        const ID: PartitionId = PartitionId(7);
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
        let mut writer = engine.session(ID);
        writer.run("CREATE TABLE t(x)").await;
        engine.flush().await.unwrap();
        let now_ms = engine.node().clock.unix_ms();
        let mut readers = [engine.session(ID), engine.session(ID)];
        for session in &mut readers {
            session.set_as_of(Some(now_ms));
            session.run("SELECT * FROM t").await;
        }
        let close_unused = || engine.past.close_unused(|_| true);
        close_unused();
        assert_eq!(engine.past.open().len(), 1);
        let [mut first, mut second] = readers;
        first.close().await;
        close_unused();
        assert_eq!(engine.past.open().len(), 1);
        second.set_as_of(None);
        engine.past.close_unused(|_| false);
        assert_eq!(engine.past.open().len(), 1, "a recently used version must stay open");
        close_unused();
        assert!(engine.past.open().is_empty());
        second.run("SELECT * FROM t").await;
        for mut session in [second, writer] {
            session.close().await;
        }
    }
}
