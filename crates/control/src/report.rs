//! What a node measures: its load report, over the window since its previous one.
//!
//! A report has two levels. Level 1 is always on: CPU, I/O, memory, requests and latencies of the
//! node and of each partition. Level 2 counts accesses per key ([`KeyReport`]); a partition has it
//! only while its keys are monitored.

use serde::{Deserialize, Serialize};

/// What a node has measured of itself and of its partitions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Its name.
    pub node: String,
    /// When the window ended on its clock, in milliseconds since 1970. Only for display: clocks of
    /// nodes differ.
    pub at_unix_ms: u64,
    /// The length of the window, in seconds.
    pub window_s: f64,
    /// CPUs that the process can use.
    pub capacity: f64,
    /// CPUs that the process has used.
    pub cpu: f64,
    /// Memory budget, in bytes.
    pub memory: u64,
    /// Memory in use, in bytes.
    pub memory_used: u64,
    /// Bytes that the process has read from disks, per second.
    pub read_bytes_per_s: f64,
    /// Bytes that the process has written to disks, per second.
    pub written_bytes_per_s: f64,
    /// Statements per second.
    pub requests_per_s: f64,
    /// What moves of partitions away from it take.
    #[serde(default)]
    pub moves: MoveReport,
    /// The partitions of this node that were used in the window or have pages in memory.
    pub partitions: Vec<PartitionReport>,
    /// The number of its other partitions.
    pub idle_partitions: u64,
}

/// What moves of partitions away from a node take, as far as it has measured some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MoveReport {
    /// Duration of a move of no bytes, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed_s: Option<f64>,
    /// Rate within a site, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site_bytes_per_s: Option<f64>,
    /// Rate between sites, in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wan_bytes_per_s: Option<f64>,
}

/// What a node has measured of a partition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartitionReport {
    /// The partition.
    pub partition: u64,
    /// The name of its tenant.
    pub tenant: String,
    /// CPUs that its sessions have used.
    pub cpu: f64,
    /// Statements per second.
    pub requests_per_s: f64,
    /// Statements that read data, per second.
    pub reads_per_s: f64,
    /// Statements that may have changed data, per second.
    pub writes_per_s: f64,
    /// Bytes written to the log, per second.
    pub log_bytes_per_s: f64,
    /// Pages read from the store, per second: reads that memory did not have.
    pub page_misses_per_s: f64,
    /// Errors sent to clients, per second.
    pub errors_per_s: f64,
    /// Its size, in bytes. 0 if it is not open.
    pub size: u64,
    /// Its pages in memory, in bytes.
    pub memory: u64,
    /// Smoothed latency of its recent statements, in milliseconds. 0 if it has had none.
    pub latency_ms: f64,
    /// Median latency in the window, in milliseconds: an upper bound, less than twice the value.
    pub p50_ms: f64,
    /// 95th percentile of the latency in the window.
    pub p95_ms: f64,
    /// 99th percentile of the latency in the window.
    pub p99_ms: f64,
    /// Accesses per key, while they are monitored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<KeyReport>,
}

/// The most accessed keys of a partition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeyReport {
    /// The number of accesses that the shares are of: those of the sample.
    pub sampled: u64,
    /// The number of statements in the sample that access data by no primary key.
    pub unkeyed: u64,
    /// The keys with the largest shares, largest first.
    pub keys: Vec<KeyAccess>,
}

/// How often a key is accessed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeyAccess {
    /// The table.
    pub table: String,
    /// The values of the primary key, as SQL literals separated by `, `.
    pub key: String,
    /// Upper bound of its share of the accesses in the sample.
    pub share: f64,
    /// How much `share` may be too high: the true share in the sample is at least `share - error`.
    pub error: f64,
}

impl NodeReport {
    /// The share of its capacity that the node uses.
    pub fn utilisation(&self) -> f64 {
        if self.capacity > 0.0 { self.cpu / self.capacity } else { 0.0 }
    }
}
