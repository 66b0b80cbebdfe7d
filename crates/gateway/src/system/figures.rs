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

use super::viewer::{Filled, Viewer};
use crate::Result;
use crate::histogram::{BUCKETS, bucket_bound_us};
use crate::tenants::TenantCounts;

/// A table with these columns, followed by the columns of [`Figures::cells`].
macro_rules! statistics_table {
    ($name:literal, $($column:expr),+) => {
        table(
            $name,
            &[
                $($column,)+
                ("statements", "INT8"),
                ("reads", "INT8"),
                ("writes", "INT8"),
                ("rows", "INT8"),
                ("errors", "INT8"),
                ("busy_ms", "FLOAT8"),
                ("time_ms", "FLOAT8"),
                ("recent_ms", "FLOAT8"),
                ("p50_ms", "FLOAT8"),
                ("p99_ms", "FLOAT8"),
                ("commits", "INT8"),
                ("conflicts", "INT8"),
                ("replays", "INT8"),
                ("turns", "INT8"),
                ("log_bytes", "INT8"),
                ("pages_written", "INT8"),
                ("memory_bytes", "INT8"),
                ("size_bytes", "INT8"),
                ("page_hits", "INT8"),
                ("page_misses", "INT8"),
                ("pages_read_ahead", "INT8"),
                ("pages_warmed", "INT8"),
                ("pages_evicted", "INT8"),
            ],
        )
    };
}

pub(super) const TABLES: &[Filled] = &[
    (statistics_table!("fulmar.tenant_stats", ("tenant", "NAME"), ("sessions", "INT8")), |viewer, _| {
        let row = |tenant: &Arc<Tenant>| {
            let sessions = viewer.sources.registry.count(tenant.partition) as i64;
            let key = row![tenant.name.as_str(), sessions];
            [key, Figures::of(viewer, tenant.partition).cells()].concat()
        };
        Ok(viewer.tenants().iter().map(row).collect())
    }),
    (statistics_table!("fulmar.partition_stats", ("partition", "INT8"), ("tenant", "NAME")), |viewer, _| {
        let row = |tenant: &Arc<Tenant>| {
            let key = row![tenant.partition.0 as i64, tenant.name.as_str()];
            [key, Figures::of(viewer, tenant.partition).cells()].concat()
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
pub(super) struct Figures {
    pub(super) gateway: TenantCounts,
    pub(super) engine: PartitionStatistics,
}

impl Figures {
    pub(super) fn of(viewer: &Viewer, partition: PartitionId) -> Figures {
        let sources = &viewer.sources;
        Figures {
            gateway: sources.tenants.counts(partition).unwrap_or_default(),
            engine: sources.engine.partition_statistics(partition).unwrap_or_default(),
        }
    }

    fn cells(&self) -> Vec<Value> {
        let Figures { gateway, engine } = self;
        row![
            gateway.statements as i64,
            gateway.reads as i64,
            gateway.writes as i64,
            gateway.rows as i64,
            gateway.errors as i64,
            milliseconds(gateway.busy_us),
            milliseconds(gateway.time_us),
            milliseconds(gateway.smoothed_us),
            milliseconds(gateway.quantile_us(50)),
            milliseconds(gateway.quantile_us(99)),
            engine.commits as i64,
            engine.conflicts as i64,
            engine.replays as i64,
            engine.turns as i64,
            engine.log_bytes as i64,
            engine.log_pages as i64,
            engine.memory_bytes.map(|bytes| bytes as i64),
            engine.size_bytes.map(|bytes| bytes as i64),
            engine.page_hits as i64,
            engine.page_misses as i64,
            engine.pages_read_ahead as i64,
            engine.pages_warmed as i64,
            engine.pages_evicted as i64,
        ]
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

pub(super) fn milliseconds(time_us: u64) -> Value {
    Value::Real(time_us as f64 / 1000.0)
}
