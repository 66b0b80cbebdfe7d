//! Statistics of tenants and partitions, counted by the gateway and the engine:
//! `fulmar.tenant_stats`, `fulmar.partition_stats`, `fulmar.latency_histogram`.
//!
//! All statistics are counted per partition, by partition id; ids are never reused. The statistics
//! of a tenant are the sum over its partitions. Currently a tenant has one partition.

use std::sync::Arc;

use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::{Database, PartitionStatistics, Value};
use fulmar_meta::Tenant;
use fulmar_pages::PartitionId;

use super::viewer::{Table, Viewer};
use crate::Result;
use crate::histogram::{BUCKETS, bucket_bound_us};
use crate::tenant_stats::TenantCounts;

/// The name and the declared type of a column.
type Column = (&'static str, &'static str);

/// The value of a column.
type Cell = fn(&PartitionStats) -> Value;

/// The statistics of a partition: the column, its type, and its value.
const FIGURES: [(&str, &str, Cell); 23] = [
    ("statements", "INT8", |of| integer(of.gateway.statements)),
    ("reads", "INT8", |of| integer(of.gateway.reads)),
    ("writes", "INT8", |of| integer(of.gateway.writes)),
    ("rows", "INT8", |of| integer(of.gateway.rows)),
    ("errors", "INT8", |of| integer(of.gateway.errors)),
    ("busy_ms", "FLOAT8", |of| milliseconds(of.gateway.busy_us)),
    ("time_ms", "FLOAT8", |of| milliseconds(of.gateway.time_us)),
    ("recent_ms", "FLOAT8", |of| milliseconds(of.gateway.smoothed_us)),
    ("p50_ms", "FLOAT8", |of| milliseconds(of.gateway.quantile_us(50))),
    ("p99_ms", "FLOAT8", |of| milliseconds(of.gateway.quantile_us(99))),
    ("commits", "INT8", |of| integer(of.engine.commits)),
    ("conflicts", "INT8", |of| integer(of.engine.conflicts)),
    ("replays", "INT8", |of| integer(of.engine.replays)),
    ("turns", "INT8", |of| integer(of.engine.turns)),
    ("log_bytes", "INT8", |of| integer(of.engine.log_bytes)),
    ("pages_written", "INT8", |of| integer(of.engine.log_pages)),
    ("memory_bytes", "INT8", |of| of.engine.memory_bytes.map_or(Value::Null, integer)),
    ("size_bytes", "INT8", |of| of.engine.size_bytes.map_or(Value::Null, integer)),
    ("page_hits", "INT8", |of| integer(of.engine.page_hits)),
    ("page_misses", "INT8", |of| integer(of.engine.page_misses)),
    ("pages_read_ahead", "INT8", |of| integer(of.engine.pages_read_ahead)),
    ("pages_warmed", "INT8", |of| integer(of.engine.pages_warmed)),
    ("pages_evicted", "INT8", |of| integer(of.engine.pages_evicted)),
];

/// The columns of a table of statistics: its key, followed by [`FIGURES`].
const fn columns<const KEY: usize, const ALL: usize>(key: [Column; KEY]) -> [Column; ALL] {
    let mut columns = [("", ""); ALL];
    let mut index = 0;
    while index < ALL {
        columns[index] = match index < KEY {
            true => key[index],
            false => (FIGURES[index - KEY].0, FIGURES[index - KEY].1),
        };
        index += 1;
    }
    columns
}

const TENANT: [Column; 2 + FIGURES.len()] = columns([("tenant", "NAME"), ("sessions", "INT8")]);
const PARTITION: [Column; 2 + FIGURES.len()] = columns([("partition", "INT8"), ("tenant", "NAME")]);

pub(super) const TABLES: &[Table] = &[
    (table("fulmar.tenant_stats", &TENANT), |viewer, _| {
        let row = |tenant: &Arc<Tenant>| {
            let sessions = viewer.sources.registry.count(tenant.partition) as i64;
            let key = row![tenant.name.as_str(), sessions];
            [key, PartitionStats::of(viewer, tenant.partition).cells()].concat()
        };
        Ok(viewer.tenants().iter().map(row).collect())
    }),
    (table("fulmar.partition_stats", &PARTITION), |viewer, _| {
        let row = |tenant: &Arc<Tenant>| {
            let key = row![tenant.partition.0 as i64, tenant.name.as_str()];
            [key, PartitionStats::of(viewer, tenant.partition).cells()].concat()
        };
        Ok(viewer.tenants().iter().map(row).collect())
    }),
    (
        table(
            "fulmar.latency_histogram",
            &[("partition", "INT8"), ("tenant", "NAME"), ("up_to_ms", "FLOAT8"), ("statements", "INT8")],
        ),
        histogram,
    ),
];

/// The statistics of a partition.
pub(super) struct PartitionStats {
    pub(super) gateway: TenantCounts,
    pub(super) engine: PartitionStatistics,
}

impl PartitionStats {
    pub(super) fn of(viewer: &Viewer, partition: PartitionId) -> PartitionStats {
        let sources = &viewer.sources;
        PartitionStats {
            gateway: sources.tenants.counts(partition).unwrap_or_default(),
            engine: sources.engine.partition_statistics(partition).unwrap_or_default(),
        }
    }

    fn cells(&self) -> Vec<Value> {
        FIGURES.iter().map(|(.., value)| value(self)).collect()
    }
}

/// The number of statements per latency bucket. Empty buckets are omitted.
fn histogram(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let rows = |tenant: &Arc<Tenant>| {
        let counts = viewer.sources.tenants.counts(tenant.partition).unwrap_or_default();
        let buckets = counts.buckets.into_iter().enumerate().filter(|(_, statements)| *statements > 0);
        let row = |(bucket, statements)| {
            let up_to = (bucket < BUCKETS).then(|| milliseconds(bucket_bound_us(bucket)));
            row![tenant.partition.0 as i64, tenant.name.as_str(), up_to, statements as i64]
        };
        buckets.map(row).collect::<Rows>()
    };
    Ok(viewer.tenants().iter().flat_map(rows).collect())
}

fn integer(count: u64) -> Value {
    Value::Integer(count as i64)
}

pub(super) fn milliseconds(time_us: u64) -> Value {
    Value::Real(time_us as f64 / 1000.0)
}
