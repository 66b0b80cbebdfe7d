//! `fulmar.node_load`, `fulmar.load` and `fulmar.hot_keys`: the load reports of all nodes.

use std::sync::Arc;

use fulmar_control::report::{NodeReport, PartitionReport};
use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::Database;
use fulmar_meta::Tenant;
use fulmar_pages::PartitionId;
use fulmar_pgwire::types::datetime::timestamp_text;
use hashbrown::HashMap;

use super::viewer::{Table, Viewer};
use crate::Result;

const NODE_LOAD: &str = "fulmar.node_load";
const LOAD: &str = "fulmar.load";
const HOT_KEYS: &str = "fulmar.hot_keys";

pub(super) const TABLES: &[Table] = &[
    (
        table(
            NODE_LOAD,
            &[
                ("node", "TEXT"),
                ("at", "TIMESTAMPTZ"),
                ("window_s", "FLOAT8"),
                ("capacity", "FLOAT8"),
                ("cpu", "FLOAT8"),
                ("memory_bytes", "INT8"),
                ("used_memory_bytes", "INT8"),
                ("read_bytes_per_s", "FLOAT8"),
                ("written_bytes_per_s", "FLOAT8"),
                ("requests_per_s", "FLOAT8"),
                ("partitions", "INT8"),
                ("idle_partitions", "INT8"),
                ("error", "TEXT"),
            ],
        ),
        nodes,
    ),
    (
        table(
            LOAD,
            &[
                ("node", "TEXT"),
                ("partition", "INT8"),
                ("tenant", "NAME"),
                ("cpu", "FLOAT8"),
                ("requests_per_s", "FLOAT8"),
                ("reads_per_s", "FLOAT8"),
                ("writes_per_s", "FLOAT8"),
                ("errors_per_s", "FLOAT8"),
                ("log_bytes_per_s", "FLOAT8"),
                ("page_misses_per_s", "FLOAT8"),
                ("size_bytes", "INT8"),
                ("memory_bytes", "INT8"),
                ("latency_ms", "FLOAT8"),
                ("p50_ms", "FLOAT8"),
                ("p95_ms", "FLOAT8"),
                ("p99_ms", "FLOAT8"),
            ],
        ),
        partitions,
    ),
    (
        table(
            HOT_KEYS,
            &[
                ("node", "TEXT"),
                ("partition", "INT8"),
                ("tenant", "NAME"),
                ("table_name", "TEXT"),
                ("key", "TEXT"),
                ("share", "FLOAT8"),
                ("error", "FLOAT8"),
                ("sampled", "INT8"),
            ],
        ),
        hot_keys,
    ),
];

/// Whether a statement reads the loads, and if so, whether it reads the most accessed keys.
pub(crate) fn loads_needed(sql: &str) -> Option<bool> {
    let with_keys = sql.contains(HOT_KEYS);
    (with_keys || sql.contains(NODE_LOAD) || sql.contains(LOAD)).then_some(with_keys)
}

/// All nodes, for superusers. `error` is why a node has no report.
fn nodes(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    if !viewer.identity.superuser {
        return Ok(Rows::new());
    }
    let row = |(node, report): &(String, Result<NodeReport>)| {
        let (report, error) = match report {
            Ok(report) => (Some(report), None),
            Err(error) => (None, Some(error.message())),
        };
        row![
            node.as_str(),
            report.map(|of| timestamp_text(of.at_unix_ms)),
            report.map(|of| of.window_s),
            report.map(|of| of.capacity),
            report.map(|of| of.cpu),
            report.map(|of| of.memory as i64),
            report.map(|of| of.memory_used as i64),
            report.map(|of| of.read_bytes_per_s),
            report.map(|of| of.written_bytes_per_s),
            report.map(|of| of.requests_per_s),
            report.map(|of| of.partitions.len() as i64),
            report.map(|of| of.idle_partitions as i64),
            error
        ]
    };
    Ok(viewer.remote.loads.iter().map(row).collect())
}

/// The partitions of the tenants that the viewer may connect to, which were used or have pages in
/// memory, each with the name of its node.
fn visible(viewer: &Viewer) -> Vec<(&str, &PartitionReport)> {
    let tenants: HashMap<PartitionId, Arc<Tenant>> =
        viewer.tenants().into_iter().map(|tenant| (tenant.partition, tenant)).collect();
    let reports = viewer.remote.loads.iter().filter_map(|(node, report)| Some((node, report.as_ref().ok()?)));
    reports
        .flat_map(|(node, report)| report.partitions.iter().map(move |partition| (node.as_str(), partition)))
        .filter(|(_, partition)| tenants.contains_key(&PartitionId(partition.partition)))
        .collect()
}

fn partitions(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let row = |(node, of): (&str, &PartitionReport)| {
        row![
            node,
            of.partition as i64,
            of.tenant.as_str(),
            of.cpu,
            of.requests_per_s,
            of.reads_per_s,
            of.writes_per_s,
            of.errors_per_s,
            of.log_bytes_per_s,
            of.page_misses_per_s,
            of.size as i64,
            of.memory as i64,
            of.latency_ms,
            of.p50_ms,
            of.p95_ms,
            of.p99_ms
        ]
    };
    Ok(visible(viewer).into_iter().map(row).collect())
}

/// The most accessed keys. A row without a key has the share of the accesses by no primary key.
fn hot_keys(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let mut rows = Rows::new();
    for (node, partition) in visible(viewer) {
        let Some(of) = &partition.keys else { continue };
        let (number, tenant, sampled) = (partition.partition as i64, &*partition.tenant, of.sampled as i64);
        for key in &of.keys {
            let (table, shown) = (key.table.as_str(), key.key.as_str());
            rows.push(row![node, number, tenant, table, shown, key.share, key.error, sampled]);
        }
        let unkeyed = of.unkeyed as f64 / of.sampled.max(1) as f64;
        rows.push(row![node, number, tenant, (), (), unkeyed, 0.0, sampled]);
    }
    Ok(rows)
}
