//! Whether a client that has proved who it is gets a session: its right to the tenant, and room for one more.

use std::sync::Arc;

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Access, Limit, SYSTEM_TENANT, Tenant};

use crate::Result;
use crate::gateway::Shared;
use crate::registry::Full;
use crate::session::Identity;

/// The tenant that a client wants, and what it may do there.
pub(crate) fn tenant(database: &str, user: &str, shared: &Shared) -> Result<(Arc<Tenant>, Access)> {
    let tenant = shared.catalog.tenant(database).ok_or_else(|| {
        Error::new(sqlstate::INVALID_CATALOG_NAME, format!("database \"{database}\" does not exist"))
            .hint(format!("Create it with CREATE DATABASE in the database \"{SYSTEM_TENANT}\"."))
    })?;
    let access = match shared.config.insecure {
        true => Some(Access::ReadWrite),
        false => shared.catalog.user(user).and_then(|user| shared.catalog.access(&user, &tenant)),
    };
    if let Some(access) = access {
        return Ok((tenant, access));
    }
    let message = format!("permission denied for database \"{database}\"");
    Err(Error::new(sqlstate::INSUFFICIENT_PRIVILEGE, message)
        .detail("The user does not have the CONNECT privilege.")
        .hint(format!("A superuser can GRANT CONNECT ON DATABASE \"{database}\" TO the user.")))
}

/// How many sessions its tenant may have for this one to enter. As in Postgres superusers always may: somebody has to be
/// able to look after it.
pub(crate) fn most_sessions(identity: &Identity) -> usize {
    let limit = identity.limits.get(Limit::MaxConnections).filter(|_| !identity.superuser);
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// Places on the node that a session leaves to others: the last ones are for superusers, who have to see to it that there are more.
pub(crate) fn left_places(identity: &Identity) -> usize {
    const FOR_SUPERUSERS: usize = 10;
    if identity.superuser { 0 } else { FOR_SUPERUSERS }
}

/// What a client is told for whom there is no room.
pub(crate) fn no_room(full: Full, identity: &Identity, most: usize) -> Error {
    match full {
        Full::TooManyOfPartition => {
            let name = &identity.tenant.name;
            Error::new(sqlstate::TOO_MANY_CONNECTIONS, format!("too many connections for database \"{name}\""))
                .detail(format!("Its limit max_connections is {most}."))
                .hint(
                    "Use fewer connections, or a pool of them. A superuser can raise the limit with ALTER DATABASE \
                     ... SET max_connections.",
                )
        }
        Full::TooMany => Error::new(sqlstate::TOO_MANY_CONNECTIONS, "sorry, too many clients already")
            .hint("Use fewer connections, or a pool of them."),
        Full::Closed => Error::new(sqlstate::CANNOT_CONNECT_NOW, "the database system is shutting down"),
    }
}

/// A tenant that was dropped after it was looked up, and before the session was there to be ended.
pub(crate) fn still_there(identity: &Identity, shared: &Shared) -> Result<()> {
    let now = shared.catalog.tenant(&identity.tenant.name);
    if now.is_some_and(|tenant| tenant.partition == identity.tenant.partition) {
        return Ok(());
    }
    let message = format!("database \"{}\" has been dropped or renamed", identity.tenant.name);
    Err(Error::new(sqlstate::INVALID_CATALOG_NAME, message))
}
