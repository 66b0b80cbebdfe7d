//! The messages between nodes: JSON, except for the streams of sessions and copies.
//!
//! The first message of a stream states its purpose:
//!
//! - `session`: everything after it is the gateway's.
//! - `heartbeat`: the caller sends any message, and gets a [`Heartbeat`], until it ends the stream.
//! - `copy`: a partition's pages ([`crate::migrations`]). Its other messages are binary.
//! - `snapshots`: the snapshots of open transactions ([`crate::migrations`]), also in binary messages.
//! - `segment`: a part of a segment ([`crate::page_servers`]).
//! - `control`: one [`Request`] and its [`Answer`].
//! - `metadata`: a request to the embedded metadata store ([`crate::metadata`]).

use std::time::Duration;

use bytes::Bytes;
use fulmar_cluster::election::RoleFence;
use fulmar_cluster::migration::{Action, Command, Fence, Mechanism};
use fulmar_control::forecast::series::SeriesReport;
use fulmar_control::report::NodeReport;
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_gateway::StatementReport;
use fulmar_gateway::cluster::{TransactionOutcome, Waits};
use fulmar_pages::Durability;
use fulmar_store::Span;
use serde::{Deserialize, Serialize};

use crate::slow_nodes::Latencies;

/// How long a request is repeated while the owner of its partition changes.
pub(crate) const ROUTING_TIMEOUT: Duration = Duration::from_secs(30);

/// The first message of a stream.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Opening {
    /// A relayed session.
    Session,
    /// Heartbeats.
    Heartbeat,
    /// A copy of a partition.
    Copy {
        /// The partition, and the place of the copy among others.
        copy: CopyOpening,
    },
    /// The snapshots of open transactions of a partition.
    Snapshots {
        /// The partition, and for which handover they are.
        snapshots: SnapshotsOpening,
    },
    /// Reading a part of a segment.
    Segment {
        /// The segment.
        segment: SegmentOpening,
    },
    /// A request to the metadata store.
    Metadata,
    /// A request.
    Control {
        /// The request.
        request: Request,
    },
}

/// The first message of a copy.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CopyOpening {
    pub(crate) partition: u64,
    pub(crate) attempt: Attempt,
    pub(crate) lineage: u64,
    /// The epoch of the timeline.
    pub(crate) timeline: u32,
    /// The size of the first round.
    pub(crate) bytes: u64,
    pub(crate) mode: CopyMode,
}

/// Orders the streams that copy a partition to a node: the migration, the source's incarnation, and a
/// number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Attempt {
    pub(crate) migration: u64,
    pub(crate) incarnation: u64,
    pub(crate) number: u64,
}

/// What a copy consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CopyMode {
    /// All pages.
    Pages,
    /// Those that differ from the destination's archive, whose hashes it sends first.
    Patch,
    /// The names of the source's segments. The destination copies them after the handover.
    Segments,
    /// All rows.
    Rows,
}

/// The first message of a stream with snapshots.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotsOpening {
    pub(crate) partition: u64,
    /// The epoch that begins with the handover.
    pub(crate) epoch: u32,
    /// The destination's incarnation.
    pub(crate) incarnation: u64,
    pub(crate) bytes: u64,
}

/// The first message of a stream that reads a part of a segment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SegmentOpening {
    pub(crate) segment: String,
    pub(crate) part: SegmentPart,
}

/// Which part of a segment.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SegmentPart {
    Whole,
    Range { offset: u64, bytes: u64 },
    Last { bytes: u64 },
}

impl From<Span> for SegmentPart {
    fn from(span: Span) -> SegmentPart {
        match span {
            Span::Whole => SegmentPart::Whole,
            Span::Range { offset, bytes } => SegmentPart::Range { offset, bytes },
            Span::Last(bytes) => SegmentPart::Last { bytes },
        }
    }
}

/// A request to the owner of a partition, or to any node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Start to migrate the partition to another node. The default mechanism is the owner's choice.
    Migrate {
        partition: u64,
        to: u32,
        mechanism: Option<Mechanism>,
        max_bytes_per_s: Option<u64>,
        /// The term of the controller that requests it.
        #[serde(default)]
        requester: Option<RoleFence>,
    },
    /// Carry out a command of a migration's coordinator.
    Command { partition: u64, fence: Fence, epoch: u32, action: Action },
    /// Read pages of a partition that will be moved to this node.
    Warm { partition: u64, lineage: u64, epoch: u32, pages: Vec<u32> },
    /// Report how much of the partition, which another node owns, is in the archive of this node.
    Archive { partition: u64, lineage: u64, epoch: u32 },
    /// Copy the pages of a partition that was moved to this node, these first.
    Pull { partition: u64, pages: Vec<u32> },
    /// Keep the pages of a partition only as an archive: its owner has copied all of them.
    Tidy { partition: u64 },
    /// Open a partition that was moved to this node.
    Open { partition: u64 },
    /// Report how long clients of the partition have waited since the last such request.
    Waits { partition: u64 },
    /// Report the smoothed execution time of the partition's statements.
    Latency { partition: u64 },
    /// Report the smoothed execution times of the statements of the node's most used partitions, and of
    /// this one.
    Latencies { partition: u64 },
    /// Drop the partition.
    Drop { partition: u64 },
    /// Store the partition, as it is now or was at a time, as the first manifest of another one.
    Branch { source: u64, branch: u64, at_unix_ms: Option<u64> },
    /// Restore the partition, if its timeline has the epoch `from`, to a time.
    Restore { partition: u64, at_unix_ms: u64, from: u32, lineage: u64 },
    /// Change the log that the partition commits to.
    SetDurability {
        partition: u64,
        #[serde(with = "durability_name")]
        durability: Durability,
    },
    /// Report the number of clients of the partition at this node.
    Sessions { partition: u64 },
    /// Report the load of this node and its partitions, and the most accessed keys if `keys`. If
    /// `count`, also count accesses per key for a window from now.
    LoadReport {
        keys: bool,
        #[serde(default)]
        count: bool,
    },
    /// Report the statistics of the statements of these partitions, or of all.
    StatementReport { partitions: Option<Vec<u64>> },
    /// Report the forecasts of this node, if it is the controller.
    Forecasts,
    /// Report the outcome of a transaction.
    Outcome { partition: u64, transaction: u64 },
    /// Report which of these segments this incarnation does not need, and its time.
    Disown { incarnation: u64, segments: Vec<String> },
}

impl Request {
    /// The request for a command.
    pub(crate) fn command(command: Command) -> Request {
        let Command { partition, fence, epoch, action } = command;
        Request::Command { partition: partition.0, fence, epoch, action }
    }
}

/// The answer to a heartbeat.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Heartbeat {
    /// The incarnation that answers.
    pub incarnation: u64,
    /// Whether its lease is valid. If it is not, the node does not count as heard.
    pub is_valid: bool,
    /// Whether it serves partitions: it does not while it starts or is drained.
    #[serde(default)]
    pub serves: bool,
    /// Whether its partitions are handed over to others.
    #[serde(default)]
    pub is_draining: bool,
    /// The share of its capacity that it has used in the last ten seconds or so.
    #[serde(default)]
    pub utilisation: f64,
    /// What it measures.
    #[serde(default)]
    pub latencies: Latencies,
}

/// The answer to a request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// It was carried out.
    Done,
    /// A migration was started.
    Started { number: u64 },
    /// The number of pages that had not been in memory.
    Warmed { pages: u64 },
    /// The segment is not at this node.
    Missing,
    /// The part of a segment that follows in binary messages.
    Segment { offset: u64, bytes: u64 },
    /// The size of an archive; 0 if there is none.
    Archive { bytes: u64 },
    /// How long clients have waited.
    Waits { waits: Waits },
    /// A smoothed execution time.
    Latency { us: u64 },
    /// Smoothed execution times of partitions.
    Latencies { us: Vec<(u64, u64)> },
    /// The number of clients.
    Sessions { count: u64 },
    /// The load of the node.
    LoadReport(NodeReport),
    /// The statistics of statements.
    StatementReport(StatementReport),
    /// The controller's series and their forecasts.
    Forecasts { series: Vec<SeriesReport> },
    /// The transaction was committed.
    Committed,
    /// The transaction was not committed, and cannot be.
    Aborted,
    /// The outcome is no longer known.
    Forgotten,
    /// The segments that the incarnation does not need, and its time in milliseconds since 1970.
    Disowned { segments: Vec<String>, unix_ms: u64 },
    /// It failed.
    Error { state: String, message: String, detail: Option<String>, hint: Option<String> },
}

impl Answer {
    /// The answer for a result.
    pub(crate) fn of(result: Result<Answer>) -> Answer {
        result.unwrap_or_else(|error| Answer::Error {
            state: error.state().to_owned(),
            message: error.message().to_owned(),
            detail: error.get_detail().map(str::to_owned),
            hint: error.get_hint().map(str::to_owned),
        })
    }

    /// The result that the peer has sent.
    pub(crate) fn into_result(self) -> Result<Answer> {
        let Answer::Error { state, message, detail, hint } = self else { return Ok(self) };
        let mut error = Error::new(known_state(&state), message);
        if let Some(detail) = detail {
            error = error.detail(detail);
        }
        if let Some(hint) = hint {
            error = error.hint(hint);
        }
        Err(error)
    }

    /// The answer for an outcome.
    pub(crate) fn outcome(outcome: TransactionOutcome) -> Answer {
        match outcome {
            TransactionOutcome::Committed => Answer::Committed,
            TransactionOutcome::Aborted => Answer::Aborted,
            TransactionOutcome::Forgotten => Answer::Forgotten,
        }
    }
}

/// The states that requests of this module fail with. Others become `XX000`.
fn known_state(state: &str) -> &'static str {
    let known = [
        sqlstate::PARTITION_MOVED,
        sqlstate::FEATURE_NOT_SUPPORTED,
        sqlstate::INVALID_PARAMETER_VALUE,
        sqlstate::PROGRAM_LIMIT,
        sqlstate::CONFIGURATION_LIMIT,
        sqlstate::SERIALIZATION_FAILURE,
        sqlstate::INVALID_CATALOG_NAME,
        sqlstate::DISK_FULL,
        sqlstate::OUT_OF_MEMORY,
        sqlstate::NOT_IN_PREREQUISITE_STATE,
        sqlstate::OBJECT_IN_USE,
        sqlstate::QUERY_CANCELED,
        sqlstate::ADMIN_SHUTDOWN,
        sqlstate::CANNOT_CONNECT_NOW,
        sqlstate::DATABASE_DROPPED,
        sqlstate::IO_ERROR,
        sqlstate::DATA_CORRUPTED,
    ];
    known.into_iter().find(|known| *known == state).unwrap_or(sqlstate::INTERNAL)
}

/// A durability by its name, for serde.
mod durability_name {
    use fulmar_pages::Durability;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(durability: &Durability, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(durability.name())
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Durability, D::Error> {
        let name = String::deserialize(deserializer)?;
        Durability::from_name(&name).ok_or_else(|| D::Error::custom("unknown durability"))
    }
}

/// Encodes a message.
pub(crate) fn encode<T: Serialize>(message: &T) -> Bytes {
    // The types of this module have no maps with keys that are not text, the only possible error.
    serde_json::to_vec(message).unwrap_or_default().into()
}

/// Decodes a message. The error names the peer's fault.
pub(crate) fn decode<'a, T: Deserialize<'a>>(message: &'a [u8]) -> std::result::Result<T, String> {
    serde_json::from_slice(message).map_err(|error| format!("invalid message: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_state_and_texts() {
        let error = Error::new(sqlstate::OBJECT_IN_USE, "m").detail("d").hint("h");
        let sent = encode(&Answer::of(Err(error.clone())));
        let received: Answer = decode(&sent).unwrap();
        assert_eq!(received.into_result().unwrap_err(), error);
        let unknown = Answer::Error { state: "ZZ999".into(), message: "m".into(), detail: None, hint: None };
        assert_eq!(unknown.into_result().unwrap_err().state(), sqlstate::INTERNAL);
    }

    #[test]
    fn openings_are_one_line_of_json() {
        assert_eq!(&encode(&Opening::Session)[..], br#"{"kind":"session"}"#);
        let opening = Opening::Control { request: Request::Drop { partition: 2 } };
        assert_eq!(&encode(&opening)[..], br#"{"kind":"control","request":{"do":"drop","partition":2}}"#);
    }
}
