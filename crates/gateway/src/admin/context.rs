//! The components that administrative statements change, and steps that several statements share.

use std::sync::Arc;
use std::time::Duration;

use fulmar_engine::{Engine, Error, sqlstate};
use fulmar_meta::{Catalog, MetaError, ObjectKind, SYSTEM_TENANT, Tenant};

use crate::Result;
use crate::cluster::Cluster;
use crate::events::{Event, EventLog};
use crate::identity::Identity;
use crate::registry::Registry;
use crate::tenant_stats::TenantStatsRegistry;

/// How long to wait for the sessions of a dropped or restored tenant to end.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(10);

/// The components that administrative statements change.
pub(crate) struct Context {
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) tenants: Arc<TenantStatsRegistry>,
    pub(crate) event_log: Arc<EventLog>,
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
}

impl Context {
    /// Records an event that the session caused.
    pub(super) fn record(&self, event: Event, identity: &Identity) {
        self.event_log.record(event.by(identity.actor()));
    }

    /// The tenant with this name.
    pub(super) fn find(&self, name: &str) -> Result<Arc<Tenant>> {
        let missing =
            || to_postgres_error(&MetaError::Missing { what: ObjectKind::Tenant, name: name.to_owned() });
        self.catalog.tenant(name).ok_or_else(missing)
    }

    /// Like [`Context::find`], but fails for the system tenant. `problem` continues the error
    /// message after the database's name.
    pub(super) fn find_ordinary(&self, name: &str, problem: &str, hint: &str) -> Result<Arc<Tenant>> {
        let tenant = self.find(name)?;
        if tenant.name != SYSTEM_TENANT {
            return Ok(tenant);
        }
        let message = format!("system database \"{name}\" {problem}");
        Err(Error::new(sqlstate::OBJECT_IN_USE, message).hint(hint))
    }

    /// Terminates the sessions of a tenant. Returns false if they do not end within
    /// [`SESSION_END_TIMEOUT`].
    pub(super) async fn end_sessions(&self, tenant: &Tenant) -> bool {
        self.registry.kill(tenant.partition);
        let gone = self.registry.wait_empty(Some(tenant.partition));
        tokio::time::timeout(SESSION_END_TIMEOUT, gone).await.is_ok()
    }

    /// Fails if the tenant has sessions, at any node of a cluster. `hint` is the error's hint.
    pub(super) async fn check_unused(&self, tenant: &Tenant, hint: &str) -> Result<()> {
        if let Some(cluster) = &self.cluster {
            return super::cluster::check_unused(tenant, &**cluster, hint).await;
        }
        match self.registry.count(tenant.partition) {
            0 => Ok(()),
            sessions => Err(in_use(tenant, sessions as u64, hint)),
        }
    }
}

/// The error for a tenant that has sessions.
pub(super) fn in_use(tenant: &Tenant, sessions: u64, hint: &str) -> Error {
    let message = format!("database \"{}\" is being accessed by other users", tenant.name);
    Error::new(sqlstate::OBJECT_IN_USE, message)
        .detail(format!("There are {sessions} other sessions using the database."))
        .hint(hint)
}

/// Converts a metadata error to PostgreSQL's error.
pub(crate) fn to_postgres_error(error: &MetaError) -> Error {
    const UNDEFINED_OBJECT: &str = "42704";
    const INVALID_NAME: &str = "42602";
    const OUTCOME_UNKNOWN: &str = "08007";
    let message = error.to_string();
    let (state, message) = match error {
        MetaError::Exists { what: ObjectKind::Tenant, name } => {
            (sqlstate::DUPLICATE_DATABASE, format!("database \"{name}\" already exists"))
        }
        MetaError::Exists { what: ObjectKind::User, name } => {
            (sqlstate::DUPLICATE_OBJECT, format!("role \"{name}\" already exists"))
        }
        MetaError::Exists { what: ObjectKind::Token, .. } => (sqlstate::DUPLICATE_OBJECT, message),
        MetaError::Missing { what: ObjectKind::Token, .. } => (UNDEFINED_OBJECT, message),
        MetaError::Missing { what: ObjectKind::Tenant, name } => {
            (sqlstate::INVALID_CATALOG_NAME, format!("database \"{name}\" does not exist"))
        }
        MetaError::Missing { what: ObjectKind::User, name } => {
            (UNDEFINED_OBJECT, format!("role \"{name}\" does not exist"))
        }
        MetaError::UnknownLimit { .. } => (UNDEFINED_OBJECT, message),
        MetaError::InvalidLimit { .. } => (sqlstate::INVALID_PARAMETER_VALUE, message),
        MetaError::InvalidName { .. } => (INVALID_NAME, message),
        MetaError::InUse { .. } => (sqlstate::OBJECT_IN_USE, message),
        MetaError::ReadOnly => (sqlstate::READ_ONLY_TRANSACTION, message),
        MetaError::Unavailable { .. }
        | MetaError::CacheStale { .. }
        | MetaError::PermissionDenied { .. }
        | MetaError::Unsupported { .. } => (sqlstate::IO_ERROR, message),
        MetaError::OutcomeUnknown { .. } => (OUTCOME_UNKNOWN, message),
        MetaError::OutOfSpace { .. } => (sqlstate::DISK_FULL, message),
        MetaError::Damaged { .. } | MetaError::Corrupt { .. } => (sqlstate::DATA_CORRUPTED, message),
    };
    Error::new(state, message).hint(error.remedy())
}
