//! What is counted of tenants and of their partitions, by the gateway and by the engine: `fulmar.tenant_stats`,
//! `fulmar.partition_stats`, `fulmar.latency_histogram`.
//!
//! All figures are those of a partition, under its number, which is never used again. What is told of a tenant is the sum over its
//! partitions, of which it has one.

use std::sync::Arc;

use fulmar_engine::{PartitionStatistics, Value};
use fulmar_meta::Tenant;
use fulmar_pages::PartitionId;

use super::cells::row;
use super::cluster::tenants;
use super::{Asked, Filled, Rows, Viewer, table};
use crate::Result;
use crate::metrics::{BUCKETS, bucket_bound_us};
use crate::tenants::TenantCounts;

/// A table with these columns, and behind them all of [`Figures::cells`].
macro_rules! table_of_figures {
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
    (table_of_figures!("fulmar.tenant_stats", ("tenant", "NAME"), ("sessions", "INT8")), |asked| {
        let row = |tenant: &Arc<Tenant>| {
            let sessions = asked.viewer.shared.registry.count(tenant.partition) as i64;
            let of = row![tenant.name.as_str(), sessions];
            [of, Figures::of(asked.viewer, tenant.partition).cells()].concat()
        };
        Ok(tenants(asked.viewer).iter().map(row).collect())
    }),
    (table_of_figures!("fulmar.partition_stats", ("partition", "INT8"), ("tenant", "NAME")), |asked| {
        let row = |tenant: &Arc<Tenant>| {
            let of = row![tenant.partition.0 as i64, tenant.name.as_str()];
            [of, Figures::of(asked.viewer, tenant.partition).cells()].concat()
        };
        Ok(tenants(asked.viewer).iter().map(row).collect())
    }),
    (
        table(
            "fulmar.latency_histogram",
            &[("partition", "INT8"), ("tenant", "NAME"), ("up_to_ms", "FLOAT8"), ("statements", "INT8")],
        ),
        histogram,
    ),
];

/// What is counted of a partition.
pub(super) struct Figures {
    pub(super) gateway: TenantCounts,
    pub(super) engine: PartitionStatistics,
}

impl Figures {
    pub(super) fn of(viewer: &Viewer, partition: PartitionId) -> Figures {
        let shared = &viewer.shared;
        Figures {
            gateway: shared.tenants.counts(partition).unwrap_or_default(),
            engine: shared.engine.partition_statistics(partition).unwrap_or_default(),
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

/// Statements by how long they took; classes in which there are none are left out.
fn histogram(asked: Asked<'_>) -> Result<Rows> {
    let of = |tenant: &Arc<Tenant>| {
        let counts = asked.viewer.shared.tenants.counts(tenant.partition).unwrap_or_default();
        let classes = counts.buckets.into_iter().enumerate().filter(|(_, statements)| *statements > 0);
        let row = |(bucket, statements)| {
            let up_to = (bucket < BUCKETS).then(|| milliseconds(bucket_bound_us(bucket)));
            row![tenant.partition.0 as i64, tenant.name.as_str(), up_to, statements as i64]
        };
        classes.map(row).collect::<Rows>()
    };
    Ok(tenants(asked.viewer).iter().flat_map(of).collect())
}

pub(super) fn milliseconds(time_us: u64) -> Value {
    Value::Real(time_us as f64 / 1000.0)
}
