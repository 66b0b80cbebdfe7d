//! Activity and statistics: `pg_stat_activity`, `pg_stat_database`, `fulmar.limits`,
//! `fulmar.history`.
//!
//! A superuser sees all rows. Other users see the rows of the tenants that they may connect to. The
//! statements of other users are shown only to the tenant's owner.

use std::sync::Arc;

use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, oid, table, user_numbers};
use fulmar_engine::{Database, RestorePoint, Value};
use fulmar_meta::Tenant;
use fulmar_pages::Durability;
use fulmar_pgwire::types::datetime::timestamp_text;

use super::stats::{PartitionStats, milliseconds};
use super::viewer::{Table, Viewer};
use crate::Result;
use crate::registry::Handle;

pub(super) const TABLES: &[Table] = &[
    (
        table(
            "pg_stat_activity",
            &[
                ("datid", "OID"),
                ("datname", "NAME"),
                ("pid", "INT4"),
                ("leader_pid", "INT4"),
                ("usesysid", "OID"),
                ("usename", "NAME"),
                ("application_name", "TEXT"),
                ("client_addr", "TEXT"),
                ("client_hostname", "TEXT"),
                ("client_port", "INT4"),
                ("backend_start", "TIMESTAMPTZ"),
                ("xact_start", "TIMESTAMPTZ"),
                ("query_start", "TIMESTAMPTZ"),
                ("state_change", "TIMESTAMPTZ"),
                ("wait_event_type", "TEXT"),
                ("wait_event", "TEXT"),
                ("state", "TEXT"),
                ("backend_xid", "OID"),
                ("backend_xmin", "OID"),
                ("query_id", "INT8"),
                ("query", "TEXT"),
                ("backend_type", "TEXT"),
            ],
        ),
        activity,
    ),
    (
        table(
            "pg_stat_database",
            &[
                ("datid", "OID"),
                ("datname", "NAME"),
                ("numbackends", "INT4"),
                ("xact_commit", "INT8"),
                ("xact_rollback", "INT8"),
                ("blks_read", "INT8"),
                ("blks_hit", "INT8"),
                ("tup_returned", "INT8"),
                ("tup_fetched", "INT8"),
                ("tup_inserted", "INT8"),
                ("tup_updated", "INT8"),
                ("tup_deleted", "INT8"),
                ("conflicts", "INT8"),
                ("temp_files", "INT8"),
                ("temp_bytes", "INT8"),
                ("deadlocks", "INT8"),
                ("active_time", "FLOAT8"),
                ("stats_reset", "TIMESTAMPTZ"),
            ],
        ),
        databases,
    ),
    (
        table(
            "fulmar.limits",
            &[
                ("tenant", "NAME"),
                ("name", "TEXT"),
                ("value", "TEXT"),
                ("default", "TEXT"),
                ("about", "TEXT"),
            ],
        ),
        |viewer, _| {
            let cluster = viewer.sources.cluster.as_ref();
            let default = cluster.map_or(Durability::default(), |cluster| cluster.default_durability());
            let rows = |tenant: Arc<Tenant>| {
                let rows: Rows = tenant
                    .limits
                    .shown()
                    .map(|limit| {
                        row![tenant.name.as_str(), limit.name, limit.value, limit.default, limit.description]
                    })
                    .chain([row![
                        tenant.name.as_str(),
                        "durability",
                        tenant.durability.name(),
                        default.name(),
                        "Where commits are made durable: local (the node's disk) or shared (the store).",
                    ]])
                    .collect();
                rows
            };
            Ok(viewer.tenants().into_iter().flat_map(rows).collect())
        },
    ),
    (
        table(
            "fulmar.history",
            &[("time", "TIMESTAMPTZ"), ("size_bytes", "INT8"), ("version", "INT8"), ("lineage", "TEXT")],
        ),
        history,
    ),
];

/// The versions that the viewer's database can be restored to.
fn history(viewer: &Viewer, database: &Database<'_>) -> Result<Rows> {
    let points = database.wait(viewer.sources.engine.history(viewer.identity.tenant.partition))??;
    let row = |point: RestorePoint| {
        let lineage = format!("{:016x}", point.lineage);
        row![timestamp_text(point.time_unix_ms), point.size_bytes as i64, point.version as i64, lineage]
    };
    Ok(points.into_iter().map(row).collect())
}

fn activity(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let (visible, numbers) = (viewer.tenants(), user_numbers(viewer));
    let rows = viewer.sources.registry.all().into_iter().filter_map(|handle| {
        let tenant = visible.iter().find(|tenant| tenant.partition == handle.partition)?;
        Some(session(&handle, tenant, numbers.get(&handle.identity.user).copied(), viewer))
    });
    Ok(rows.collect())
}

fn session(handle: &Handle, tenant: &Tenant, user: Option<i64>, viewer: &Viewer) -> Vec<Value> {
    let now = handle.activity.snapshot();
    let identity = &handle.identity;
    let own = identity.user == viewer.identity.user || tenant.owner == viewer.identity.user;
    let (query, query_ms) = match &now.statement {
        Some((statement, since)) if own || viewer.identity.superuser => (statement.to_string(), Some(*since)),
        Some(_) => ("<insufficient privilege>".to_owned(), None),
        None => (String::new(), None),
    };
    row![
        oid(tenant),
        tenant.name.as_str(),
        i64::from(handle.pid),
        (),
        user,
        identity.user.as_str(),
        &*now.application,
        identity.address.map(|address| address.to_string()),
        (),
        (),
        timestamp_text(identity.since_ms),
        now.transaction_ms.map(timestamp_text),
        query_ms.map(timestamp_text),
        timestamp_text(now.changed_ms.max(identity.since_ms)),
        (),
        (),
        now.state.name(),
        (),
        (),
        (),
        query,
        "client backend",
    ]
}

fn databases(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let row = |tenant: &Arc<Tenant>| {
        let PartitionStats { gateway, engine } = PartitionStats::of(viewer, tenant.partition);
        let (commits, rows, conflicts) =
            (engine.commits as i64, gateway.rows as i64, engine.conflicts as i64);
        row![
            oid(tenant),
            tenant.name.as_str(),
            viewer.sources.registry.count(tenant.partition) as i64,
            commits,
            (),
            engine.page_misses as i64,
            engine.page_hits as i64,
            rows,
            rows,
            (),
            (),
            (),
            conflicts,
            (),
            (),
            (),
            milliseconds(gateway.time_us),
            timestamp_text(viewer.sources.started_ms),
        ]
    };
    Ok(viewer.tenants().iter().map(row).collect())
}
