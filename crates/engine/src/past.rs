//! Partitions as they were: versions of the past that sessions look at (`fulmar.as_of`).
//!
//! ```text
//!   time -> manifest ([`crate::history`]) -> Partition with a log that takes nothing
//!                                                |            shared by all sessions that look at this version
//!   session A: as_of 12:00:30 -> manifest of 12:00:17 ---+
//!   session B: as_of 12:00:59 ---------------------------'
//! ```
//!
//! A version of the past is a [`Partition`] like any other, opened at an older manifest and without what the log holds. So
//! snapshots, connections, the cache and read-ahead are what they are elsewhere. Its log is
//! [`CommitLog::read_only`]: who would write gets 25006, wherever it is tried, and what has been committed
//! for good is durable at once.
//!
//! # Memory
//! Its pages are charged to `--memory` and evicted with all others: none of them has changed. What cannot be evicted is the
//! table of where they lie. So a partition has [`MOST_OPEN`] versions open at most, and one that nobody uses is closed with
//! the next look around, as soon as it has been idle for as long as a partition may be.
//!
//! # Why its segments stay
//! [`crate::node::Node::past`] is held from the choice of the manifest until the version is among those that are open. The
//! collector deletes manifests while nobody holds that lock, then asks who reads what, and then what the manifests name
//! that are left. So the manifest was gone before it could be chosen; or it is left, and names the segments; or it goes when
//! the version is open, and they are in use. Who looks goes on looking, though the manifest is thinned out or
//! older than the retention. A partition that is dropped takes its versions with it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fulmar_pages::PartitionId;
use fulmar_store::{CommitLog, ManifestName};
use futures::FutureExt;
use futures::future::BoxFuture;
use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::branch::Era;
use crate::engine::Slot;
use crate::history::RestorePoint;
use crate::partition::{Partition, opening};
use crate::{Engine, Error, Result, pins, sqlstate};

/// Versions of one partition that may be open at once.
const MOST_OPEN: usize = 8;

/// Versions of the past that are open.
#[derive(Default)]
pub(crate) struct Past(Mutex<Versions>);

type Versions = HashMap<ManifestName, Slot>;

/// A partition as it was.
#[derive(Clone)]
pub(crate) struct PastVersion {
    pub partition: Arc<Partition>,
    /// When it was the current version, in milliseconds since 1970.
    pub time_unix_ms: u64,
}

impl Past {
    pub(crate) fn open(&self) -> Vec<Arc<Partition>> {
        self.0.lock().values().filter_map(|slot| slot.get().cloned()).collect()
    }

    /// The place of a version, made if there is none and may be one more.
    fn slot(&self, name: ManifestName) -> Result<Slot> {
        let (slot, closed) = {
            let mut versions = self.0.lock();
            let count = |versions: &Versions| {
                versions.keys().filter(|other| other.partition == name.partition).count()
            };
            let is_full = |versions: &Versions| !versions.contains_key(&name) && count(versions) >= MOST_OPEN;
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
            let message = format!("{MOST_OPEN} versions of the database's past are in use already");
            Error::new(sqlstate::CONFIGURATION_LIMIT, message)
                .hint("RESET fulmar.as_of in sessions that need it no more, or look at the same times.")
        })
    }

    /// Closes what nobody uses and what was used last when `is_long_ago` (milliseconds on the node's clock) says.
    pub(crate) fn close_unused(&self, is_long_ago: impl Fn(u64) -> bool) {
        let idle = |slot: &Slot| {
            slot.get().is_none_or(|partition| is_long_ago(partition.used_ms.load(Ordering::Relaxed)))
        };
        let closed = remove(&mut self.0.lock(), |_, slot| is_unused(slot) && idle(slot));
        let_go(closed);
    }

    /// A partition was dropped.
    pub(crate) fn drop_partition(&self, id: PartitionId) {
        let closed = remove(&mut self.0.lock(), |name, _| name.partition == id);
        let_go(closed);
    }
}

/// Whether nobody has the version, and nobody is about to.
fn is_unused(slot: &Slot) -> bool {
    Arc::strong_count(slot) == 1 && slot.get().is_none_or(|partition| partition.is_unused(1))
}

fn remove(versions: &mut Versions, which: impl Fn(&ManifestName, &Slot) -> bool) -> Vec<Slot> {
    versions.extract_if(|name, slot| which(name, slot)).map(|(_, slot)| slot).collect()
}

/// Nobody finds these any more; who has one reads no further.
fn let_go(versions: Vec<Slot>) {
    for partition in versions.iter().filter_map(|slot| slot.get()) {
        partition.close();
        partition.let_go();
    }
}

impl Engine {
    /// A partition as it was at a time (milliseconds since 1970): its last version with a manifest at or before it.
    pub(crate) fn partition_at(
        &self,
        id: PartitionId,
        at_unix_ms: u64,
    ) -> BoxFuture<'_, Result<PastVersion>> {
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
            // Asked for after the opening: a drop that came before is seen here, one that comes later finds the version.
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
    async fn a_version_is_open_once_and_for_as_long_as_somebody_looks() {
        const ID: PartitionId = PartitionId(7);
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
        let mut writer = engine.session(ID);
        writer.run("CREATE TABLE t(x)").await;
        engine.flush().await.unwrap();
        let now_ms = engine.node().clock.unix_ms();
        let mut looking = [engine.session(ID), engine.session(ID)];
        for session in &mut looking {
            session.set_as_of(Some(now_ms));
            session.run("SELECT * FROM t").await;
        }
        let close_unused = || engine.past.close_unused(|_| true);
        close_unused();
        assert_eq!(engine.past.open().len(), 1);
        let [mut first, mut second] = looking;
        first.close().await;
        close_unused();
        assert_eq!(engine.past.open().len(), 1);
        second.set_as_of(None);
        engine.past.close_unused(|_| false);
        assert_eq!(engine.past.open().len(), 1, "it has been used just now");
        close_unused();
        assert!(engine.past.open().is_empty());
        second.run("SELECT * FROM t").await;
        for mut session in [second, writer] {
            session.close().await;
        }
    }
}
