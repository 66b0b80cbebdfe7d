//! Transactions that see the partition as it was at a time (`fulmar.as_of`, [`crate::past`]).
//!
//! The session has the version from the first transaction that sees it until it looks elsewhere, so all its
//! transactions see the same one. An open transaction stays with what it has seen.
//!
//! Where another node owns the partition ([`crate::beside`]) each transaction sees what is not older than the session allows
//! (`fulmar.staleness`) when it begins.

use std::sync::Arc;
use std::time::Duration;

use super::Session;
use crate::Result;
use crate::beside::Beside;
use crate::partition::Partition;
use crate::past::PastVersion;

/// Where a session looks.
pub(super) struct LookBack {
    at_unix_ms: u64,
    /// Once it is open.
    version: Option<PastVersion>,
}

impl Session {
    /// From its next transaction on the session sees its partition as it was at a time (milliseconds since 1970), and
    /// writes nothing; `None`: as it is now.
    pub fn set_as_of(&mut self, at_unix_ms: Option<u64>) {
        if self.as_of() != at_unix_ms {
            self.past = at_unix_ms.map(|at_unix_ms| LookBack { at_unix_ms, version: None });
        }
    }

    /// The time that was asked for.
    pub fn as_of(&self) -> Option<u64> {
        self.past.as_ref().map(|past| past.at_unix_ms)
    }

    /// Whether there is an open transaction that has seen something: it stays with the version that it sees.
    pub fn has_seen_something(&self) -> bool {
        self.seen_partition().is_some()
    }

    /// The partition, or the version of the past, that the open transaction sees.
    pub(super) fn seen_partition(&self) -> Option<&Arc<Partition>> {
        self.open.as_ref().and_then(|open| open.seen_partition())
    }

    /// When what its transactions see was the current version (milliseconds since 1970); of what another node owns: when it was
    /// at least. `None` if they see the newest one, or if none has looked yet.
    pub fn snapshot_time(&self) -> Option<u64> {
        match &self.past {
            Some(past) => past.version.as_ref().map(|version| version.time_unix_ms),
            None => self.seen_unix_ms,
        }
    }

    /// How old what its transactions see is, at most; nothing where it is the newest version.
    pub fn snapshot_age(&self) -> Duration {
        let now_ms = self.engine.node().clock.unix_ms();
        Duration::from_millis(self.snapshot_time().map_or(0, |time_ms| now_ms.saturating_sub(time_ms)))
    }

    /// How old what its transactions see may be, from the next one on, where another node owns the partition; `None`: as old as
    /// it likes.
    pub fn set_staleness(&mut self, staleness: Option<Duration>) {
        self.staleness = staleness;
    }

    /// Opens the version that its next transaction would see, if that is not the newest one here.
    pub async fn look_back(&mut self) -> Result<()> {
        let _running = self.start();
        if self.as_of().is_none() && !self.engine.reads_beside() {
            return Ok(());
        }
        self.partition().await.map(drop)
    }

    /// What another node owns, as young as the session wants it.
    pub(super) async fn partition_beside(&mut self, beside: Arc<Beside>) -> Result<Arc<Partition>> {
        let (engine, id, staleness) = (self.engine.clone(), self.id, self.staleness);
        let coming = Box::pin(async move { engine.partition_beside(&beside, id, staleness).await });
        let seen = self.cancellable(coming).await??;
        self.partition = Some(seen.partition.clone());
        // What is open stays with what it has seen, whoever asks for the partition meanwhile.
        if !self.has_seen_something() {
            self.seen_unix_ms = seen.unix_ms;
        }
        Ok(seen.partition)
    }

    /// The partition as it was then, opened on first use.
    pub(super) async fn partition_at(&mut self, at_unix_ms: u64) -> Result<Arc<Partition>> {
        let version = self.past.as_ref().and_then(|past| past.version.as_ref());
        if let Some(version) = version.filter(|version| !version.partition.is_closed()) {
            return Ok(version.partition.clone());
        }
        let (engine, id) = (self.engine.clone(), self.id);
        // Boxed: opening has kilobytes of state, which every session's future would have to have room for.
        let opening = Box::pin(async move { engine.partition_at(id, at_unix_ms).await });
        let version = self.cancellable(opening).await??;
        let partition = version.partition.clone();
        self.past = Some(LookBack { at_unix_ms, version: Some(version) });
        Ok(partition)
    }
}
