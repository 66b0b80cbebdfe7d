//! The report of a migration: the four costs of ElasTraS (6.1), which are the time that the partition
//! is unavailable, failed operations, overhead on latency, and data transferred.

use serde::{Deserialize, Serialize};

/// A round of copying.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// Pages that the source has listed.
    pub pages: u64,
    /// Bytes of pages that the destination has read.
    pub bytes: u64,
    /// How long it took.
    pub ms: u64,
}

/// What a migration was expected to cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prediction {
    /// Bytes to copy.
    pub bytes: u64,
    /// Duration of copying.
    pub copy_ms: u64,
    /// The freeze.
    pub pause_ms: u64,
}

/// What a migration has cost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The partition.
    pub partition: u64,
    /// Which of its migrations.
    pub number: u64,
    /// The name of the mechanism.
    pub mechanism: String,
    /// Why the mechanism was chosen, if the request did not name one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The node that owned the partition.
    pub source: String,
    /// The node to move it to.
    pub destination: String,
    /// When it started, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// `moved` or `undone`.
    pub outcome: String,
    /// Why it was undone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// From the start to the destination's first answer.
    pub total_ms: u64,
    /// Duration of all rounds.
    pub copy_ms: u64,
    /// How long the partition accepted no statements.
    pub freeze_ms: u64,
    /// The longest wait of a client's statement because of the move.
    pub pause_ms: u64,
    /// Clients that had to wait.
    pub waited: u64,
    /// Open transactions that could not be continued.
    pub failed: u64,
    /// Whether the three numbers above are known: the clients' nodes are asked shortly after the end.
    #[serde(default)]
    pub knows_waits: bool,
    /// Bytes of pages that the destination has read before the handover.
    pub bytes: u64,
    /// The rounds, oldest first.
    pub rounds: Vec<Round>,
    /// What was expected.
    pub prediction: Prediction,
    /// How long the copy has waited because latencies exceeded their bounds.
    #[serde(default)]
    pub throttled_ms: u64,
    /// The lowest limit of the copy for that reason, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowest_bytes_per_s: Option<u64>,
    /// Smoothed execution time of statements when the migration started, in microseconds.
    pub latency_before_us: u64,
    /// The same when copying ended.
    pub latency_during_us: u64,
    /// The same at the destination 30 s after the handover. `None` until then.
    #[serde(default)]
    pub latency_after_us: Option<u64>,
}

/// What the move of all databases of a node has cost (ShuttleDB's migration of a machine).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineReport {
    /// `machine`.
    pub mechanism: String,
    /// The node that owned the databases.
    pub source: String,
    /// The node that owns them now.
    pub destination: String,
    /// The number of databases that were moved.
    pub databases: u64,
    /// From the start of the first migration to the end of the last one.
    pub total_ms: u64,
    /// The sum of the durations of all rounds of all databases.
    pub copy_ms: u64,
    /// The longest time that a database accepted no statements.
    pub freeze_ms: u64,
    /// The longest wait of a client's statement.
    pub pause_ms: u64,
    /// Clients that had to wait.
    pub waited: u64,
    /// Open transactions that could not be continued.
    pub failed: u64,
    /// Bytes of pages that the destination has read before the handovers.
    pub bytes: u64,
    /// The number of databases whose waits are not known, because a node has died.
    pub unknown: u64,
}

impl MachineReport {
    /// A report without databases.
    pub fn new(source: &str, destination: &str) -> MachineReport {
        MachineReport {
            mechanism: "machine".to_owned(),
            source: source.to_owned(),
            destination: destination.to_owned(),
            ..MachineReport::default()
        }
    }

    /// Adds a database that was moved, with its report if there is one.
    pub fn add(&mut self, report: Option<&Report>) {
        self.databases += 1;
        self.unknown += u64::from(report.is_none_or(|report| !report.knows_waits));
        let Some(report) = report else { return };
        self.copy_ms += report.copy_ms;
        self.freeze_ms = self.freeze_ms.max(report.freeze_ms);
        self.pause_ms = self.pause_ms.max(report.pause_ms);
        self.waited += report.waited;
        self.failed += report.failed;
        self.bytes += report.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_has_sums_and_the_longest_pause() {
        let mut whole = MachineReport::new("n1", "n2");
        let one = |pause_ms, bytes| Report {
            freeze_ms: pause_ms / 2,
            pause_ms,
            bytes,
            waited: 1,
            knows_waits: true,
            ..Report::default()
        };
        whole.add(Some(&one(40, 100)));
        whole.add(Some(&one(20, 50)));
        whole.add(None);
        let (mechanism, source, destination) = ("machine".into(), "n1".into(), "n2".into());
        let expected = MachineReport {
            mechanism,
            source,
            destination,
            databases: 3,
            freeze_ms: 20,
            pause_ms: 40,
            waited: 2,
            bytes: 150,
            unknown: 1,
            ..MachineReport::default()
        };
        assert_eq!(whole, expected);
    }
}
