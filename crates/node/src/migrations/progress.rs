//! The progress of a migration: a record that is only shown, and that no step depends on.

use fulmar_migrate::report::{Prediction, Round};
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

const PREFIX: &str = "migrating/";

/// How far a migration has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Progress {
    /// The rounds that have ended.
    pub rounds: Vec<Round>,
    /// What it is expected to cost.
    pub prediction: Prediction,
}

impl Progress {
    /// The key of a partition's progress.
    pub fn key(partition: PartitionId) -> String {
        format!("{PREFIX}{:016x}", partition.0)
    }

    /// The partition of a key made by [`Progress::key`].
    pub fn partition_of_key(key: &str) -> Option<PartitionId> {
        Some(PartitionId(u64::from_str_radix(key.strip_prefix(PREFIX)?, 16).ok()?))
    }

    /// The bytes copied by now.
    pub fn bytes(&self) -> u64 {
        self.rounds.iter().map(|round| round.bytes).sum()
    }
}
