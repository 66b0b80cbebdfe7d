//! Administration in SQL: tenants, point-in-time recovery ([`history`]), users and rights
//! ([`users`]), tokens ([`tokens`]). Only superusers can run these statements, connected to the
//! system tenant.
//!
//! A tenant is a record in the catalog and a partition in the engine. Creating or dropping one
//! takes three steps, each durable before the next:
//!
//! ```text
//! catalog: creating  -->  engine: partition created  -->  catalog: ready, clients can connect
//! catalog: dropping  -->  engine: partition dropped  -->  catalog: record deleted
//! ```
//!
//! - The record is created first and deleted last, so every partition has a record.
//! - A crash between the steps leaves a record that is not ready. It is invisible to clients; the
//!   next start drops its partition, if it exists, and then the record.
//! - After an error between the steps the same cleanup runs immediately. If it fails too, the next
//!   start repeats it.

mod durability;
mod history;
mod tokens;
mod users;

use std::sync::Arc;
use std::time::Duration;

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Limit, Limits, MetaError, SYSTEM_TENANT, Tenant, What};
use fulmar_pages::Durability;

use crate::Result;
use crate::dialect::admin::{Admin, Source};
use crate::events::{Event, Kind};
use crate::gateway::Shared;
use crate::session::Identity;

/// How long to wait for the sessions of a dropped or restored tenant to end.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs an administrative statement and records it as an event. Returns the secret of a new token.
pub(crate) async fn run(admin: &Admin, shared: &Shared, identity: &Identity) -> Result<Option<String>> {
    check_right(admin.tag(), identity)?;
    shared.engine.check_owner()?;
    match admin {
        Admin::CreateToken { name, database, lasts_ms } => {
            tokens::create(name, database.as_deref(), *lasts_ms, shared, identity).await.map(Some)
        }
        Admin::DropToken { name, if_exists } => {
            tokens::drop(name, *if_exists, shared, identity).await.map(|()| None)
        }
        Admin::CreateUser { .. } | Admin::AlterPassword { .. } | Admin::DropUser { .. } => {
            users::run(admin, shared, identity).await.map(|()| None)
        }
        Admin::Grant { .. } | Admin::Revoke { .. } => {
            users::rights(admin, shared, identity).await.map(|()| None)
        }
        _ => databases(admin, shared, identity).await.map(|()| None),
    }
}

/// Runs a statement about databases.
async fn databases(admin: &Admin, shared: &Shared, identity: &Identity) -> Result<()> {
    let catalog = &shared.catalog;
    let record = |event: Event| shared.journal().record(event.by(identity.actor()));
    match admin {
        Admin::CreateDatabase { name, owner, source, durability } => {
            let durability = durability::parse(durability.as_deref())?;
            create_database(name, owner.as_deref(), source.as_ref(), durability, shared, identity).await
        }
        Admin::DropDatabase { name, if_exists, force } => {
            if let Some(dropped) = drop_database(name, *if_exists, *force, shared).await? {
                record(Event::new(Kind::DatabaseDropped).database(&dropped));
            }
            Ok(())
        }
        Admin::RestoreDatabase { name, at_unix_ms } => {
            let tenant = history::restore(name, *at_unix_ms, shared).await?;
            let restored = Event::new(Kind::DatabaseRestored).database(&tenant);
            record(restored.detail("to_unix_ms", *at_unix_ms));
            Ok(())
        }
        Admin::RenameDatabase { from, to } => {
            let tenant = catalog.rename_tenant(from, to).await.map_err(|error| answer(&error))?;
            record(Event::new(Kind::DatabaseRenamed).database(&tenant).detail("from", from.as_str()));
            Ok(())
        }
        Admin::AlterLimit { database, name, value } if name == durability::NAME => {
            let durability = durability::parse(value.as_deref())?;
            let tenant = durability::alter(database, durability, shared).await?;
            record(
                Event::new(Kind::DurabilityChanged).database(&tenant).detail("durability", durability.name()),
            );
            Ok(())
        }
        Admin::AlterLimit { database, name, value } => {
            let tenant = alter_limit(database, name, value.as_deref(), shared).await?;
            let value = value.as_deref().unwrap_or("default");
            let changed = Event::new(Kind::LimitChanged).database(&tenant);
            record(changed.detail("limit", name.as_str()).detail("value", value));
            Ok(())
        }
        Admin::ResetLimits { database } => {
            let reset = catalog.alter_limits(database, |limits| *limits = Limits::default()).await;
            let tenant = reset.map_err(|error| answer(&error))?;
            let changed = Event::new(Kind::LimitChanged).database(&tenant);
            record(changed.detail("limit", "all").detail("value", "default"));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Checks that the user is a superuser connected to the system database.
pub(crate) fn check_right(tag: &str, identity: &Identity) -> Result<()> {
    if !identity.superuser {
        let message = format!("permission denied to run {tag}");
        return Err(Error::new(sqlstate::INSUFFICIENT_PRIVILEGE, message)
            .detail("Only superusers can run this command.")
            .hint("Connect as a superuser, for example \"fulmar\"."));
    }
    if identity.tenant.name != SYSTEM_TENANT {
        let message = format!("{tag} can only be run in the system database");
        return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
            .hint(format!("Connect to the database \"{SYSTEM_TENANT}\".")));
    }
    Ok(())
}

/// The session's user, if it exists in the catalog, otherwise the system user. With `--insecure`,
/// clients can connect under any name.
fn default_owner<'a>(shared: &Shared, identity: &'a Identity) -> &'a str {
    match shared.catalog.user(&identity.user) {
        Some(_) => &identity.user,
        None => fulmar_meta::SYSTEM_USER,
    }
}

async fn create_database(
    name: &str,
    owner: Option<&str>,
    source: Option<&Source>,
    durability: Durability,
    shared: &Shared,
    identity: &Identity,
) -> Result<()> {
    let resolve =
        |source: &Source| Result::Ok((find(&source.database, shared)?.partition, source.at_unix_ms));
    let version = source.map(resolve).transpose()?;
    let tenant = begin_create(name, owner, shared, identity).await?;
    let created = match shared.engine.create_partition(tenant.partition, version).await {
        Ok(()) => durability::settle(&tenant, durability, shared).await,
        Err(error) => Err(error),
    };
    let created = match created {
        Ok(()) => finish_create(&tenant, shared).await,
        Err(error) => Err(error),
    };
    if created.is_err() {
        undo(&tenant, shared).await;
        return created;
    }
    let mut event =
        Event::new(Kind::DatabaseCreated).database(&tenant).detail("owner", tenant.owner.as_str());
    if let Some(Source { database, at_unix_ms }) = source {
        event = event.detail("template", database.as_str());
        if let Some(at_unix_ms) = at_unix_ms {
            event = event.detail("at_unix_ms", *at_unix_ms);
        }
    }
    if durability != Durability::default() {
        event = event.detail("durability", durability.name());
    }
    shared.journal().record(event.by(identity.actor()));
    Ok(())
}

/// The tenant with this name.
fn find(name: &str, shared: &Shared) -> Result<Arc<Tenant>> {
    let missing = || answer(&MetaError::Missing { what: What::Tenant, name: name.to_owned() });
    shared.catalog.tenant(name).ok_or_else(missing)
}

/// Like [`find`], but fails for the system tenant. `problem` continues the error message after the
/// database's name.
fn find_ordinary(name: &str, problem: &str, hint: &str, shared: &Shared) -> Result<Arc<Tenant>> {
    let tenant = find(name, shared)?;
    if tenant.name != SYSTEM_TENANT {
        return Ok(tenant);
    }
    let message = format!("system database \"{name}\" {problem}");
    Err(Error::new(sqlstate::OBJECT_IN_USE, message).hint(hint))
}

/// The first step of a creation: creates the record, which is not visible yet. The caller then
/// creates the partition and calls [`finish_create`], or [`undo`] after an error.
pub(crate) async fn begin_create(
    name: &str,
    owner: Option<&str>,
    shared: &Shared,
    identity: &Identity,
) -> Result<Arc<Tenant>> {
    let owner = owner.unwrap_or_else(|| default_owner(shared, identity));
    shared.catalog.create_tenant(name, owner).await.map_err(|error| answer(&error))
}

/// The last step of a creation: clients can connect.
pub(crate) async fn finish_create(tenant: &Tenant, shared: &Shared) -> Result<()> {
    shared.catalog.finish_create(tenant).await.map(|_| ()).map_err(|error| answer(&error))
}

/// Rolls a creation back. If this fails, the next start repeats it.
pub(crate) async fn undo(tenant: &Tenant, shared: &Shared) {
    if let Err(error) = shared.engine.undo_creation(tenant.partition).await {
        tracing::warn!(tenant = tenant.name, %error, "could not drop the partition of a database whose creation failed; the next start drops it");
        return;
    }
    if let Err(error) = shared.catalog.finish_drop(tenant).await {
        tracing::warn!(tenant = tenant.name, %error, "could not delete the record of a database whose creation failed; the next start deletes it");
    }
}

/// Changes a limit of a tenant. `None` resets it to the default.
async fn alter_limit(
    database: &str,
    name: &str,
    value: Option<&str>,
    shared: &Shared,
) -> Result<Arc<Tenant>> {
    let limit = Limit::find(name).map_err(|error| answer(&error))?;
    let parsed = value.map(|value| limit.parse(value)).transpose().map_err(|error| answer(&error))?;
    let altered = shared.catalog.alter_limits(database, |limits| limits.set(limit, parsed.flatten())).await;
    altered.map_err(|error| answer(&error))
}

/// Terminates the sessions of a tenant. Returns false if they do not end within
/// [`SESSION_END_TIMEOUT`].
async fn end_sessions(tenant: &Tenant, shared: &Shared) -> bool {
    shared.registry.kill(tenant.partition);
    let gone = shared.registry.wait_empty(Some(tenant.partition));
    tokio::time::timeout(SESSION_END_TIMEOUT, gone).await.is_ok()
}

/// Fails if the tenant has sessions. `hint` is the error's hint.
fn check_unused(tenant: &Tenant, hint: &str, shared: &Shared) -> Result<()> {
    let sessions = shared.registry.count(tenant.partition);
    if sessions == 0 {
        return Ok(());
    }
    let message = format!("database \"{}\" is being accessed by other users", tenant.name);
    Err(Error::new(sqlstate::OBJECT_IN_USE, message)
        .detail(format!("There are {sessions} other sessions using the database."))
        .hint(hint))
}

/// Drops a database. Returns its tenant, or `None` if it did not exist.
async fn drop_database(
    name: &str,
    if_exists: bool,
    force: bool,
    shared: &Shared,
) -> Result<Option<Arc<Tenant>>> {
    if let Some(tenant) = shared.catalog.tenant(name).filter(|_| !force) {
        check_unused(&tenant, "Use DROP DATABASE ... WITH (FORCE) to terminate them.", shared)?;
    }
    let tenant = match shared.catalog.begin_drop(name).await {
        Err(MetaError::Missing { .. }) if if_exists => return Ok(None),
        begun => begun.map_err(|error| answer(&error))?,
    };
    if !end_sessions(&tenant, shared).await {
        let message = format!("sessions of database \"{name}\" have not ended");
        return Err(Error::new(sqlstate::OBJECT_IN_USE, message)
            .detail("The database is marked as dropped and accepts no new connections.")
            .hint("Run DROP DATABASE again after they have ended."));
    }
    shared.engine.drop_partition(tenant.partition).await?;
    shared.tenants.forget(tenant.partition);
    shared.catalog.finish_drop(&tenant).await.map_err(|error| answer(&error))?;
    Ok(Some(tenant))
}

/// Converts a metadata error to PostgreSQL's error.
pub(crate) fn answer(error: &MetaError) -> Error {
    const UNDEFINED_OBJECT: &str = "42704";
    const INVALID_NAME: &str = "42602";
    const OUTCOME_UNKNOWN: &str = "08007";
    let message = error.to_string();
    let (state, message) = match error {
        MetaError::Exists { what: What::Tenant, name } => {
            (sqlstate::DUPLICATE_DATABASE, format!("database \"{name}\" already exists"))
        }
        MetaError::Exists { what: What::User, name } => {
            (sqlstate::DUPLICATE_OBJECT, format!("role \"{name}\" already exists"))
        }
        MetaError::Exists { what: What::Token, .. } => (sqlstate::DUPLICATE_OBJECT, message),
        MetaError::Missing { what: What::Token, .. } => (UNDEFINED_OBJECT, message),
        MetaError::Missing { what: What::Tenant, name } => {
            (sqlstate::INVALID_CATALOG_NAME, format!("database \"{name}\" does not exist"))
        }
        MetaError::Missing { what: What::User, name } => {
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
