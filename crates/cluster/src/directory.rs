//! The data directory of a node: which incarnation used it last, and what that incarnation recorded
//! before it died.
//!
//! Local logs and private partitions exist only in the data directory. A node that started with an
//! empty one, or with an old copy, would serve them without their last commits. The directory
//! therefore carries a [`Stamp`], and a node starts only if its record in the metadata store was
//! written by a process that used this directory (`match_directory`):
//!
//! 1. Before a process changes the node's record, it adds its random number to the stamp.
//! 2. The record carries the number of the process that began the incarnation. The next process
//!    requires it in the stamp.
//! 3. When the incarnation has begun, its number is the only one in the stamp.
//!
//! A copy that is older than the newest start therefore does not match. A copy that was made since
//! that start, and then replaces the original, does match: nothing outside of the directory changes
//! with each commit.

use std::fmt;

use async_trait::async_trait;
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::records::partition_number;
use crate::{Error, Incarnation, NodeId, NodeRecord};

/// The processes that have used a data directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The random number of the process that began the newest incarnation.
    pub begun: Option<u64>,
    /// The numbers of processes that tried to begin an incarnation since then.
    pub attempts: Vec<u64>,
    /// The generation of the metadata store ([`crate::generation`]).
    pub generation: u64,
}

/// What a fatal signal's handler recorded: the thread that died was executing this partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrashReport {
    /// The partition.
    #[serde(with = "partition_number")]
    pub partition: PartitionId,
    /// The incarnation that died.
    pub incarnation: Incarnation,
}

/// The files of a data directory that the protocols use. Changes are durable when they return.
#[async_trait]
pub trait DataDirectory: Send + Sync {
    /// The stamp; `None` if the directory is empty.
    async fn stamp(&self) -> Result<Option<Stamp>, Error>;

    /// Replaces the stamp.
    async fn set_stamp(&self, stamp: Stamp) -> Result<(), Error>;

    /// What the previous incarnation recorded when it died.
    async fn crash_report(&self) -> Result<Option<CrashReport>, Error>;

    /// Removes the crash report.
    async fn clear_crash_report(&self) -> Result<(), Error>;
}

/// How a data directory differs from the one that the node's record requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// It is empty, but the node has started before.
    Empty,
    /// Another process has started the node since this directory was used.
    Outdated,
    /// It was used, but the metadata store does not know the node.
    Unknown,
}

impl Mismatch {
    /// What the operator can do.
    pub fn remedy(self) -> &'static str {
        match self {
            Mismatch::Empty => {
                "Start the node with its own data directory, or give the new node another name. If the \
                 directory is lost, run \"fulmar node forget\", then start the node again."
            }
            Mismatch::Outdated => "Start the node with the directory that it used last, not with a copy.",
            Mismatch::Unknown => {
                "If the node was removed by \"fulmar node forget\", start it with an empty data directory. \
                 Otherwise check that --meta names the metadata store of this cluster, and that it was not \
                 restored from an old backup."
            }
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mismatch::Empty => "it is empty, but the node has started before",
            Mismatch::Outdated => "the node was started with another directory since this one was used",
            Mismatch::Unknown => "it was used before, but the metadata store does not know the node",
        })
    }
}

/// How a directory with this stamp differs from the one that the record requires.
pub fn mismatch(record: Option<&NodeRecord>, stamp: Option<&Stamp>) -> Option<Mismatch> {
    match (record, stamp) {
        (None, None) => None,
        (None, Some(stamp)) => stamp.begun.map(|_| Mismatch::Unknown),
        (Some(_), None) => Some(Mismatch::Empty),
        (Some(record), Some(stamp)) => {
            let mut runs = stamp.begun.iter().chain(&stamp.attempts);
            (!runs.any(|run| *run == record.run)).then_some(Mismatch::Outdated)
        }
    }
}

/// Checks that the directory is the node's, and adds this process to its stamp.
pub(crate) async fn check_and_prepare<E: Environment>(
    env: &E,
    node: NodeId,
    record: Option<&NodeRecord>,
    run: u64,
) -> Result<(), Error> {
    let stamp = env.directory().stamp().await?;
    if env.rules().match_directory
        && let Some(mismatch) = mismatch(record, stamp.as_ref())
    {
        return Err(Error::WrongDirectory { node, mismatch });
    }
    let mut stamp = stamp.unwrap_or_default();
    stamp.attempts.push(run);
    env.directory().set_stamp(stamp).await
}

/// Records that this process has begun an incarnation.
pub(crate) async fn complete<E: Environment>(env: &E, run: u64) -> Result<(), Error> {
    let stamp = env.directory().stamp().await?.unwrap_or_default();
    env.directory().set_stamp(Stamp { begun: Some(run), attempts: Vec::new(), ..stamp }).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeState;

    fn stamp(begun: Option<u64>, attempts: &[u64]) -> Stamp {
        Stamp { begun, attempts: attempts.to_vec(), generation: 0 }
    }

    #[test]
    fn only_the_directory_of_the_newest_start_matches() {
        let record = NodeRecord::new(8, NodeState::Alive, 80);
        let check = |stamp: Option<Stamp>| mismatch(Some(&record), stamp.as_ref());
        assert_eq!(check(Some(stamp(Some(80), &[]))), None, "the newest process used it");
        assert_eq!(check(Some(stamp(Some(70), &[79, 80, 81]))), None, "it died before it completed");
        assert_eq!(check(Some(stamp(Some(70), &[]))), Some(Mismatch::Outdated), "an old copy");
        assert_eq!(check(None), Some(Mismatch::Empty));
    }

    #[test]
    fn unknown_node_starts_only_with_an_unused_directory() {
        assert_eq!(mismatch(None, None), None);
        assert_eq!(mismatch(None, Some(&stamp(None, &[1]))), None, "its first start has failed");
        assert_eq!(mismatch(None, Some(&stamp(Some(1), &[]))), Some(Mismatch::Unknown));
    }
}
