//! Activity and statistics: `pg_stat_activity`, `pg_stat_database`, `fulmar.limits`,
//! `fulmar.history`.
//!
//! A superuser sees all rows. Other users see the rows of the tenants that they may connect to. The
//! statements of other users are shown only to the tenant's owner.

use std::sync::Arc;

use fulmar_engine::{Error, RestorePoint, Value, sqlstate};
use fulmar_meta::Tenant;
use fulmar_pages::Durability;

use super::cells::row;
use super::cluster::{oid, tenants, user_numbers};
use super::figures::{Figures, milliseconds};
use super::{Asked, By, Filled, FilledByGroup, Rows, Viewer, table};
use crate::Result;
use crate::events::{Event, Kind};
use crate::registry::Handle;

pub(super) const TABLES: &[Filled] = &[
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
        |asked| {
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
                        Durability::default().name(),
                        "Where commits are made durable: local (the node's disk) or shared (the store).",
                    ]])
                    .collect();
                rows
            };
            Ok(tenants(asked.viewer).into_iter().flat_map(rows).collect())
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

pub(super) const BY_GROUP: &[FilledByGroup] = &[(
    table(
        "pg_stat_user_tables",
        &[
            ("relid", "OID"),
            ("schemaname", "NAME"),
            ("relname", "NAME"),
            ("seq_scan", "INT8"),
            ("idx_scan", "INT8"),
            ("n_tup_ins", "INT8"),
            ("n_tup_upd", "INT8"),
            ("n_tup_del", "INT8"),
            ("n_live_tup", "INT8"),
            ("n_dead_tup", "INT8"),
            ("last_vacuum", "TIMESTAMPTZ"),
            ("last_analyze", "TIMESTAMPTZ"),
        ],
    ),
    &[("relid", By::Oid), ("relname", By::Name)],
    |_, schema| {
        let tables = schema.relations.iter().filter(|relation| !relation.is_view);
        Ok(tables
            .map(|table| row![table.oid, "public", table.name.as_str(), (), (), (), (), (), (), (), (), ()])
            .collect())
    },
)];

/// The versions that the viewer's database can be restored to.
fn history(asked: Asked<'_>) -> Result<Rows> {
    let viewer = asked.viewer;
    let points = asked.database.wait(viewer.shared.engine.history(viewer.identity.tenant.partition))??;
    let row = |point: RestorePoint| {
        let lineage = format!("{:016x}", point.lineage);
        row![moment(point.time_unix_ms), point.size_bytes as i64, point.version as i64, lineage]
    };
    Ok(points.into_iter().map(row).collect())
}

/// A point in time as SQLite text, which is converted to the client's format later.
pub(crate) fn moment(unix_ms: u64) -> Value {
    let mut text = Vec::new();
    let since_1970_us = i64::try_from(unix_ms).unwrap_or(i64::MAX).saturating_mul(1000);
    let since_2000_us = since_1970_us.saturating_sub(946_684_800_000_000);
    let written = crate::types::datetime::put_timestamp(&mut text, since_2000_us);
    String::from_utf8(text).ok().filter(|_| written).map_or(Value::Null, Value::Text)
}

/// The time at which the node started to accept connections.
pub(super) fn started(viewer: &Viewer) -> Value {
    moment(viewer.shared.started_ms)
}

fn activity(asked: Asked<'_>) -> Result<Rows> {
    let viewer = asked.viewer;
    let (visible, numbers) = (tenants(viewer), user_numbers(viewer));
    let rows = viewer.shared.registry.all().into_iter().filter_map(|handle| {
        let tenant = visible.iter().find(|tenant| tenant.partition == handle.partition)?;
        Some(session(&handle, tenant, numbers.get(&handle.who.user).copied(), viewer))
    });
    Ok(rows.collect())
}

fn session(handle: &Handle, tenant: &Tenant, user: Option<i64>, viewer: &Viewer) -> Vec<Value> {
    let now = handle.activity.now();
    let who = &handle.who;
    let own = who.user == viewer.identity.user || tenant.owner == viewer.identity.user;
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
        who.user.as_str(),
        &*now.application,
        who.address.map(|address| address.to_string()),
        (),
        (),
        moment(who.since_ms),
        now.transaction_ms.map(moment),
        query_ms.map(moment),
        moment(now.changed_ms.max(who.since_ms)),
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

fn databases(asked: Asked<'_>) -> Result<Rows> {
    let row = |tenant: &Arc<Tenant>| {
        let Figures { gateway, engine } = Figures::of(asked.viewer, tenant.partition);
        let (commits, rows, conflicts) =
            (engine.commits as i64, gateway.rows as i64, engine.conflicts as i64);
        row![
            oid(tenant),
            tenant.name.as_str(),
            asked.viewer.shared.registry.count(tenant.partition) as i64,
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
            started(asked.viewer),
        ]
    };
    Ok(tenants(asked.viewer).iter().map(row).collect())
}

/// `pg_cancel_backend` and `pg_terminate_backend`. Superusers can signal all sessions, other users
/// their own sessions.
pub(super) fn signal(pid: i64, viewer: &Viewer, kind: Kind, send: impl Fn(&Handle)) -> Result<Value> {
    let found = i32::try_from(pid).ok().and_then(|pid| viewer.shared.registry.find(pid));
    let Some(handle) = found else { return Ok(Value::Integer(0)) };
    if !viewer.identity.superuser && handle.who.user != viewer.identity.user {
        return Err(Error::new(
            sqlstate::INSUFFICIENT_PRIVILEGE,
            "permission denied to signal the session of another user",
        )
        .detail("Only superusers can signal sessions of other users."));
    }
    send(&handle);
    let event = Event::new(kind).by(viewer.identity.actor());
    let event = event.detail("role", handle.who.user.as_str()).detail("pid", handle.pid);
    let event = match viewer.shared.catalog.tenant_of(handle.partition) {
        Some(tenant) => event.database(&tenant),
        None => event,
    };
    let journal = viewer.shared.journal();
    // A user can signal their own sessions without limit, so these events are aggregated.
    if viewer.identity.superuser {
        journal.record(event)
    } else {
        journal.gather(event)
    }
    Ok(Value::Integer(1))
}
