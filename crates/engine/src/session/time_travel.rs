//! Time travel: transactions that read the partition as of a time (`fulmar.as_of`,
//! `time_travel` in `fulmar_maintenance`), and transactions on replicas.
//!
//! The session keeps the historical version from the first transaction that reads it until
//! `fulmar.as_of` changes, so all its transactions read the same version. An open transaction keeps
//! the version that it has read.
//!
//! On a replica ([`crate::replica`]) each transaction reads a snapshot that is at most
//! `fulmar.staleness` old when the transaction begins.

use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::Partition;
use fulmar_sqlite::Result;

use super::Session;
use super::state::HistoricalView;
use crate::replica::Replica;

impl Session {
    /// Sets the time as of which the session reads its partition (milliseconds since 1970), from
    /// its next transaction on. These transactions are read-only. None selects the current version.
    pub fn set_as_of(&mut self, at_unix_ms: Option<u64>) {
        if self.as_of() != at_unix_ms {
            self.historical_view = at_unix_ms.map(|at_unix_ms| HistoricalView { at_unix_ms, version: None });
        }
    }

    /// The requested time.
    pub fn as_of(&self) -> Option<u64> {
        self.historical_view.as_ref().map(|past| past.at_unix_ms)
    }

    /// Whether an open transaction has read something. It then keeps the version that it has read.
    pub fn has_read(&self) -> bool {
        self.seen_partition().is_some()
    }

    /// The partition, or the historical version, that the open transaction reads.
    pub(super) fn seen_partition(&self) -> Option<&Arc<Partition>> {
        self.open.as_ref().and_then(|open| open.seen_partition())
    }

    /// When the version that the session's transactions read was current (milliseconds since 1970);
    /// on a replica a lower bound of that time. None if they read the newest version, or have not
    /// read yet.
    pub fn snapshot_time(&self) -> Option<u64> {
        match &self.historical_view {
            Some(past) => past.version.as_ref().map(|version| version.time_unix_ms),
            None => self.seen_unix_ms,
        }
    }

    /// Maximum age of the data that the session's transactions read; zero for the newest version.
    pub fn snapshot_age(&self) -> Duration {
        let now_ms = self.engine.node().clock.unix_ms();
        Duration::from_millis(self.snapshot_time().map_or(0, |time_ms| now_ms.saturating_sub(time_ms)))
    }

    /// Sets the maximum age of a snapshot on a replica, from the next transaction on. None allows
    /// any age.
    pub fn set_staleness(&mut self, staleness: Option<Duration>) {
        self.staleness = staleness;
    }

    /// Opens the version that the session's next transaction would read, if that is a historical
    /// version or on a replica.
    pub async fn open_snapshot(&mut self) -> Result<()> {
        let _running = self.start();
        if self.as_of().is_none() && !self.engine.is_replica() {
            return Ok(());
        }
        self.partition().await.map(drop)
    }

    /// Returns a replica's partition within the session's staleness.
    pub(super) async fn replica_partition(&mut self, replica: Arc<Replica>) -> Result<Arc<Partition>> {
        let (engine, id, staleness) = (self.engine.clone(), self.id, self.staleness);
        let coming = Box::pin(async move { engine.replica_partition(&replica, id, staleness).await });
        let seen = self.cancellable(coming).await??;
        self.partition = Some(seen.partition.clone());
        // An open transaction keeps the version that it has read, even if the partition is
        // requested meanwhile.
        if !self.has_read() {
            self.seen_unix_ms = seen.unix_ms;
        }
        Ok(seen.partition)
    }

    /// Returns the partition as of a time, opened on first use.
    pub(super) async fn partition_at(&mut self, at_unix_ms: u64) -> Result<Arc<Partition>> {
        let version = self.historical_view.as_ref().and_then(|past| past.version.as_ref());
        if let Some(version) = version.filter(|version| !version.partition.is_closed()) {
            return Ok(version.partition.clone());
        }
        let (engine, id) = (self.engine.clone(), self.id);
        // Boxed: opening has kilobytes of state, which would enlarge every session's future.
        let opening = Box::pin(async move { engine.maintenance().partition_at(id, at_unix_ms).await });
        let version = self.cancellable(opening).await??;
        let partition = version.partition.clone();
        self.historical_view = Some(HistoricalView { at_unix_ms, version: Some(version) });
        Ok(partition)
    }
}
