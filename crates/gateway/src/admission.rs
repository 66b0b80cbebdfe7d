//! Admission of authenticated clients: checks the privilege on the tenant and the connection
//! limits.

use std::sync::Arc;

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Access, Catalog, Limit, SYSTEM_TENANT, Tenant};

use crate::Result;
use crate::identity::Identity;
use crate::registry::AdmissionError;

/// Looks up the tenant that a client requests, and the client's access to it. If `insecure`, every
/// client has full access.
pub(crate) fn tenant(
    database: &str,
    user: &str,
    catalog: &Catalog,
    insecure: bool,
) -> Result<(Arc<Tenant>, Access)> {
    let tenant = catalog.tenant(database).ok_or_else(|| {
        Error::new(sqlstate::INVALID_CATALOG_NAME, format!("database \"{database}\" does not exist"))
            .hint(format!("Create it with CREATE DATABASE in the database \"{SYSTEM_TENANT}\"."))
    })?;
    let access = match insecure {
        true => Some(Access::ReadWrite),
        false => catalog.user(user).and_then(|user| catalog.access(&user, &tenant)),
    };
    if let Some(access) = access {
        return Ok((tenant, access));
    }
    let message = format!("permission denied for database \"{database}\"");
    Err(Error::new(sqlstate::INSUFFICIENT_PRIVILEGE, message)
        .detail("The user does not have the CONNECT privilege.")
        .hint(format!("A superuser can run GRANT CONNECT ON DATABASE \"{database}\" TO \"{user}\".")))
}

/// The connection limit of the tenant for this session. As in PostgreSQL, the limit does not apply
/// to superusers, so that they can always connect to fix problems.
pub(crate) fn partition_session_limit(identity: &Identity) -> usize {
    let limit = identity.limits.get(Limit::MaxConnections).filter(|_| !identity.superuser);
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// The number of connection slots of the node that this session must leave free. The last ones are
/// reserved for superusers.
pub(crate) fn reserved_slots(identity: &Identity) -> usize {
    const RESERVED_CONNECTIONS: usize = 10;
    if identity.superuser { 0 } else { RESERVED_CONNECTIONS }
}

/// The error for a client that is rejected because of a limit.
pub(crate) fn limit_error(error: AdmissionError, identity: &Identity, limit: usize) -> Error {
    match error {
        AdmissionError::PartitionLimit => {
            let name = &identity.tenant.name;
            Error::new(
                sqlstate::TOO_MANY_CONNECTIONS,
                format!("too many connections for database \"{name}\""),
            )
            .detail(format!("The database's max_connections is {limit}."))
            .hint(
                "Use fewer connections or a connection pool, or raise the limit with ALTER DATABASE ... \
                     SET max_connections.",
            )
        }
        AdmissionError::NodeLimit => {
            Error::new(sqlstate::TOO_MANY_CONNECTIONS, "sorry, too many clients already")
                .hint("Use fewer connections or a connection pool.")
        }
        AdmissionError::ShuttingDown => {
            Error::new(sqlstate::CANNOT_CONNECT_NOW, "the database system is shutting down")
        }
    }
}

/// Fails if the tenant was dropped or renamed after it was looked up, before the session was
/// registered.
pub(crate) fn check_tenant_exists(identity: &Identity, catalog: &Catalog) -> Result<()> {
    let now = catalog.tenant(&identity.tenant.name);
    if now.is_some_and(|tenant| tenant.partition == identity.tenant.partition) {
        return Ok(());
    }
    let message = format!("database \"{}\" has been dropped or renamed", identity.tenant.name);
    Err(Error::new(sqlstate::INVALID_CATALOG_NAME, message))
}
