//! Adds the gateway's tables to the system catalog, and runs the functions that act on sessions.

use std::sync::{Arc, LazyLock};

use fulmar_dialect::system::{self, Action, Rows, Tables};
use fulmar_engine::{CancelReason, Database, Error, Value, sqlstate};
use fulmar_meta::{Tenant, User};

use super::viewer::{Table, Viewer};
use super::{cluster, event_log, forecast, load, statements, statistics, stats};
use crate::Result;
use crate::events::{Event, Kind};
use crate::registry::Handle;

/// The gateway's own tables.
static OWN: LazyLock<Vec<Table>> = LazyLock::new(|| {
    [
        statistics::TABLES,
        stats::TABLES,
        statements::TABLES,
        event_log::TABLES,
        cluster::TABLES,
        load::TABLES,
        forecast::TABLES,
    ]
    .concat()
});

/// All system tables.
static TABLES: LazyLock<Tables> = LazyLock::new(|| Tables::with(OWN.iter().map(|(table, _)| *table)));

/// Maximum number of parameters that a statement can set with `set_config`.
const MAX_CHANGES: usize = 100;

impl system::Viewer for Viewer {
    fn tables(&self) -> &'static Tables {
        &TABLES
    }

    fn rows(&self, table: usize, database: &Database<'_>) -> Result<Rows> {
        OWN.get(table).map_or_else(|| Ok(Rows::new()), |(_, fill)| fill(self, database))
    }

    fn tenant(&self) -> &Tenant {
        &self.identity.tenant
    }

    fn tenants(&self) -> Vec<Arc<Tenant>> {
        Viewer::tenants(self)
    }

    fn users(&self) -> Vec<(i64, Arc<User>)> {
        Viewer::users(self)
    }

    fn settings(&self) -> Vec<[&str; 3]> {
        self.settings.all()
    }

    fn setting(&self, name: &str) -> Result<&str> {
        self.settings.get(name)
    }

    fn is_replica(&self) -> bool {
        self.sources.engine.is_replica()
    }

    fn started_ms(&self) -> u64 {
        self.sources.started_ms
    }

    fn act(&self, action: Action<'_>) -> Result<Value> {
        let (locks, tenant, pid) = (&self.sources.advisory, self.identity.tenant.partition, self.pid);
        match action {
            Action::SetConfig { name, value, local } => set_config(name, value, local, self),
            Action::Cancel(pid) => signal(pid, self, Kind::SessionCancelled, |handle| {
                handle.canceller().cancel(CancelReason::User);
            }),
            Action::Terminate(pid) => signal(pid, self, Kind::SessionTerminated, Handle::kill),
            Action::Lock(key) => locks.lock(tenant, key, pid).map(|()| Value::Null),
            Action::TryLock(key) => {
                locks.try_lock(tenant, key, pid).map(|taken| Value::Integer(taken.into()))
            }
            Action::Unlock(key) => Ok(Value::Integer(locks.unlock(tenant, key, pid).into())),
            Action::UnlockAll => {
                locks.unlock_all(pid);
                Ok(Value::Null)
            }
        }
    }
}

/// Records a requested change of a parameter. The session applies it after the statement has
/// completed.
fn set_config(name: &str, value: &str, local: bool, viewer: &Viewer) -> Result<Value> {
    let (name, value) = viewer.settings.checked(name, Some(value))?;
    let value = String::from(value.unwrap_or_default());
    let mut changes = viewer.changes.lock();
    if changes.len() == MAX_CHANGES {
        let message = format!("a statement cannot set more than {MAX_CHANGES} parameters");
        return Err(Error::new(sqlstate::PROGRAM_LIMIT, message));
    }
    changes.push((name.into(), value.clone(), local));
    Ok(Value::Text(value))
}

/// `pg_cancel_backend` and `pg_terminate_backend`. Superusers can signal all sessions, other users
/// their own sessions.
fn signal(pid: i64, viewer: &Viewer, kind: Kind, send: impl Fn(&Handle)) -> Result<Value> {
    let found = i32::try_from(pid).ok().and_then(|pid| viewer.sources.registry.find(pid));
    let Some(handle) = found else { return Ok(Value::Integer(0)) };
    if !viewer.identity.superuser && handle.identity.user != viewer.identity.user {
        return Err(Error::new(
            sqlstate::INSUFFICIENT_PRIVILEGE,
            "permission denied to signal the session of another user",
        )
        .detail("Only superusers can signal sessions of other users."));
    }
    send(&handle);
    let event = Event::new(kind).by(viewer.identity.actor());
    let event = event.detail("role", handle.identity.user.as_str()).detail("pid", handle.pid);
    let event = match viewer.sources.catalog.tenant_of(handle.partition) {
        Some(tenant) => event.database(&tenant),
        None => event,
    };
    let journal = &viewer.sources.event_log;
    // A user can signal their own sessions without limit, so these events are aggregated.
    if viewer.identity.superuser {
        journal.record(event)
    } else {
        journal.record_aggregated(event)
    }
    Ok(Value::Integer(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_are_unique() {
        let mut names: Vec<&str> = TABLES.names().collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
