//! `fulmar.nodes` and `fulmar.partitions`: the nodes of a cluster, and which of them owns which
//! database. Both are empty on a node without a cluster.

use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::Database;

use super::viewer::{Table, Viewer};
use crate::Result;

pub(super) const TABLES: &[Table] = &[
    (
        table(
            "fulmar.nodes",
            &[
                ("id", "INT8"),
                ("name", "TEXT"),
                ("state", "TEXT"),
                ("incarnation", "INT8"),
                ("rpc", "TEXT"),
                ("sql", "TEXT"),
                ("partitions", "INT8"),
                ("heard_ms", "INT8"),
            ],
        ),
        nodes,
    ),
    (
        table(
            "fulmar.partitions",
            &[
                ("id", "INT8"),
                ("database", "NAME"),
                ("node", "TEXT"),
                ("epoch", "INT8"),
                ("durability", "TEXT"),
            ],
        ),
        partitions,
    ),
];

/// Only superusers see the nodes and their addresses.
fn nodes(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let cluster = viewer.sources.cluster.as_ref().filter(|_| viewer.identity.superuser);
    let Some(cluster) = cluster else { return Ok(Rows::default()) };
    let shown = cluster.nodes().into_iter().map(|node| {
        row![
            i64::from(node.id),
            node.name,
            node.state,
            node.incarnation as i64,
            node.rpc,
            node.sql,
            node.partitions as i64,
            node.heard.map(|heard| heard.as_millis() as i64),
        ]
    });
    Ok(shown.collect())
}

/// The databases that the viewer may connect to.
fn partitions(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let Some(cluster) = &viewer.sources.cluster else { return Ok(Rows::default()) };
    let tenants: hashbrown::HashMap<_, _> =
        viewer.tenants().into_iter().map(|tenant| (tenant.partition, tenant)).collect();
    let shown = cluster.partitions().into_iter().filter_map(|partition| {
        let tenant = tenants.get(&partition.id)?;
        Some(row![
            partition.id.0 as i64,
            tenant.name.as_str(),
            partition.owner,
            i64::from(partition.epoch),
            partition.durability.name(),
        ])
    });
    Ok(shown.collect())
}
