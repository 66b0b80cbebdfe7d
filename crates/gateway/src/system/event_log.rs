//! `fulmar.events`, the node's event log, and `fulmar.tokens`, the tokens for HTTP access.
//!
//! Superusers see all rows. The owner of a tenant sees the events and tokens of that tenant,
//! without the names of other users.

use std::sync::Arc;

use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::Database;
use fulmar_meta::{Tenant, Token};
use fulmar_pgwire::types::datetime::timestamp_text;

use super::viewer::{Table, Viewer};
use crate::Result;
use crate::events::Event;

pub(super) const TABLES: &[Table] = &[
    (
        table(
            "fulmar.events",
            &[
                ("id", "INT8"),
                ("time", "TIMESTAMPTZ"),
                ("kind", "TEXT"),
                ("severity", "TEXT"),
                ("database", "NAME"),
                ("user", "NAME"),
                ("address", "TEXT"),
                ("text", "TEXT"),
                ("details", "JSON"),
            ],
        ),
        events,
    ),
    (
        table(
            "fulmar.tokens",
            &[
                ("name", "NAME"),
                ("database", "NAME"),
                ("created", "TIMESTAMPTZ"),
                ("expires", "TIMESTAMPTZ"),
                ("admin", "BOOL"),
            ],
        ),
        tokens,
    ),
];

/// The tenants that the viewer owns.
fn owned(viewer: &Viewer) -> Vec<Arc<Tenant>> {
    let mut tenants = viewer.tenants();
    tenants.retain(|tenant| tenant.owner == viewer.identity.user);
    tenants
}

fn events(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let identity = &viewer.identity;
    let events = viewer.sources.event_log.events();
    if identity.superuser {
        return Ok(events.iter().map(|event| shown(event)).collect());
    }
    let owned = owned(viewer);
    let own = events.iter().filter(|event| owned.iter().any(|tenant| event.concerns(tenant.partition)));
    Ok(own.map(|event| shown(&event.for_owner(&identity.user))).collect())
}

fn shown(event: &Event) -> Vec<fulmar_engine::Value> {
    let details =
        (!event.details.is_empty()).then(|| serde_json::Value::from(event.details.to_map()).to_string());
    row![
        event.id as i64,
        timestamp_text(event.time_unix_ms),
        event.kind.as_ref(),
        event.severity.name(),
        event.database.as_deref(),
        event.user.as_deref(),
        event.address.map(|address| address.to_string()),
        event.text.as_ref(),
        details,
    ]
}

fn tokens(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let (superuser, visible) = match viewer.identity.superuser {
        true => (true, viewer.tenants()),
        false => (false, owned(viewer)),
    };
    let tenant = |token: &Token| visible.iter().find(|tenant| Some(tenant.partition) == token.partition);
    let tokens = viewer.sources.catalog.tokens().into_iter();
    let shown = tokens.filter(|token| superuser || tenant(token).is_some()).map(|token| {
        row![
            token.name.as_str(),
            tenant(&token).map(|tenant| tenant.name.as_str()),
            timestamp_text(token.created_unix_ms),
            token.expires_unix_ms.map(timestamp_text),
            i64::from(token.is_admin),
        ]
    });
    Ok(shown.collect())
}
