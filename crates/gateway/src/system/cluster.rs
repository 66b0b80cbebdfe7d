//! `fulmar.nodes` and `fulmar.partitions`. A node without a cluster shows neither nodes nor
//! partitions.

use std::sync::Arc;

use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::Database;
use fulmar_meta::Tenant;
use hashbrown::HashMap;

use super::viewer::{Table, Viewer};
use crate::Result;
use crate::cluster::{NodeInfo, PartitionInfo};

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
                ("is_this", "BOOL"),
                ("slow", "TEXT"),
            ],
        ),
        nodes,
    ),
    (
        table(
            "fulmar.partitions",
            &[
                ("partition", "INT8"),
                ("tenant", "NAME"),
                ("node", "TEXT"),
                ("epoch", "INT8"),
                ("durability", "TEXT"),
            ],
        ),
        partitions,
    ),
];

/// All nodes, for superusers.
fn nodes(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let Some(cluster) = viewer.sources.cluster.as_ref().filter(|_| viewer.identity.superuser) else {
        return Ok(Rows::new());
    };
    let this = cluster.this_node();
    let row = |node: NodeInfo| {
        let heard_ms = node.heard.map(|heard| heard.as_millis() as i64);
        row![
            i64::from(node.id),
            node.name,
            node.state,
            node.incarnation as i64,
            node.rpc,
            node.sql,
            node.partitions as i64,
            heard_ms,
            i64::from(node.id == this),
            node.slow.map(|slow| slow.to_string())
        ]
    };
    Ok(cluster.nodes().into_iter().map(row).collect())
}

/// The partitions of the tenants that the viewer may connect to.
fn partitions(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let Some(cluster) = &viewer.sources.cluster else { return Ok(Rows::new()) };
    let tenants: HashMap<_, Arc<Tenant>> =
        viewer.tenants().into_iter().map(|tenant| (tenant.partition, tenant)).collect();
    let row = |partition: PartitionInfo| {
        let tenant = tenants.get(&partition.id)?;
        Some(row![
            partition.id.0 as i64,
            tenant.name.as_str(),
            partition.owner,
            i64::from(partition.epoch),
            partition.durability.name()
        ])
    };
    Ok(cluster.partitions().into_iter().filter_map(row).collect())
}
