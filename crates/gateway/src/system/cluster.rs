//! `fulmar.nodes`, `fulmar.partitions`, `fulmar.migrations`, `fulmar.control` and `fulmar.decisions`.
//! They are empty without a cluster.

use std::sync::Arc;

use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::Database;
use fulmar_meta::Tenant;
use fulmar_pgwire::types::datetime::timestamp_text;
use hashbrown::HashMap;

use super::viewer::{Table, Viewer};
use crate::Result;
use crate::cluster::{ControlInfo, DecisionInfo, MigrationInfo, NodeInfo, PartitionInfo};

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
                ("site", "TEXT"),
                ("rack", "TEXT"),
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
    (
        table(
            "fulmar.migrations",
            &[
                ("partition", "INT8"),
                ("tenant", "NAME"),
                ("number", "INT8"),
                ("mechanism", "TEXT"),
                ("source", "TEXT"),
                ("destination", "TEXT"),
                ("step", "TEXT"),
                ("started", "TIMESTAMPTZ"),
                ("rounds", "INT8"),
                ("bytes", "INT8"),
                ("expected_bytes", "INT8"),
                ("total_ms", "INT8"),
                ("freeze_ms", "INT8"),
                ("pause_ms", "INT8"),
                ("expected_pause_ms", "INT8"),
                ("throttled_ms", "INT8"),
                ("failed", "INT8"),
                ("error", "TEXT"),
                ("report", "TEXT"),
            ],
        ),
        migrations,
    ),
    (
        table(
            "fulmar.control",
            &[("name", "TEXT"), ("value", "TEXT"), ("default", "TEXT"), ("about", "TEXT")],
        ),
        control,
    ),
    (
        table(
            "fulmar.decisions",
            &[
                ("number", "INT8"),
                ("time", "TIMESTAMPTZ"),
                ("controller", "TEXT"),
                ("mode", "TEXT"),
                ("action", "TEXT"),
                ("what", "TEXT"),
                ("why", "TEXT"),
                ("predicted", "TEXT"),
                ("outcome", "TEXT"),
                ("ended", "TIMESTAMPTZ"),
                ("report", "TEXT"),
            ],
        ),
        decisions,
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
            node.slow.map(|slow| slow.to_string()),
            node.site,
            node.rack
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

/// The running and the newest migrations, for superusers. `report` is JSON.
fn migrations(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let Some(cluster) = viewer.sources.cluster.as_ref().filter(|_| viewer.identity.superuser) else {
        return Ok(Rows::new());
    };
    let tenants: HashMap<_, Arc<Tenant>> =
        viewer.tenants().into_iter().map(|tenant| (tenant.partition, tenant)).collect();
    let row = |migration: MigrationInfo| {
        let report = serde_json::to_string(&migration.report).unwrap_or_default();
        let MigrationInfo { partition, step, report: of } = migration;
        row![
            partition.0 as i64,
            tenants.get(&partition).map(|tenant| tenant.name.as_str()),
            of.number as i64,
            of.mechanism,
            of.source,
            of.destination,
            step,
            timestamp_text(of.started_unix_ms),
            of.rounds.len() as i64,
            of.bytes as i64,
            of.prediction.bytes as i64,
            of.total_ms as i64,
            of.freeze_ms as i64,
            of.pause_ms as i64,
            of.prediction.pause_ms as i64,
            of.throttled_ms as i64,
            of.failed as i64,
            of.error,
            report
        ]
    };
    Ok(cluster.migrations().into_iter().map(row).collect())
}

/// The settings and the state of the controller, for superusers.
fn control(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let Some(cluster) = viewer.sources.cluster.as_ref().filter(|_| viewer.identity.superuser) else {
        return Ok(Rows::new());
    };
    let row = |info: ControlInfo| row![info.name, info.value, info.default, info.about];
    Ok(cluster.control_settings().into_iter().map(row).collect())
}

/// The newest decisions of the controller, for superusers. `report` is JSON.
fn decisions(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let Some(cluster) = viewer.sources.cluster.as_ref().filter(|_| viewer.identity.superuser) else {
        return Ok(Rows::new());
    };
    let row = |decision: DecisionInfo| {
        row![
            decision.number as i64,
            timestamp_text(decision.at_unix_ms),
            decision.controller,
            decision.mode,
            decision.action,
            decision.what,
            decision.why,
            decision.predicted,
            decision.outcome,
            decision.ended_unix_ms.map(timestamp_text),
            decision.report
        ]
    };
    Ok(cluster.decisions().into_iter().map(row).collect())
}
