//! Administration in SQL: tenants, point-in-time recovery ([`restore`]), users and rights
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

mod cluster;
mod context;
mod control;
mod durability;
mod machine;
mod restore;
mod tokens;
mod users;

use std::sync::Arc;

use fulmar_dialect::admin::{AdminStatement, Source};
use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{Limit, Limits, MetaError, SYSTEM_TENANT, Tenant};
use fulmar_pages::Durability;

pub(crate) use context::Context;

use crate::Result;
use crate::cluster::Move;
use crate::events::{Event, Kind};
use crate::identity::Identity;
use context::to_postgres_error;

/// Runs an administrative statement and records it as an event. Returns the secret of a new token.
pub(crate) async fn run(
    admin: &AdminStatement,
    context: &Context,
    identity: &Identity,
) -> Result<Option<String>> {
    check_right(admin.tag(), identity)?;
    context.engine.check_primary()?;
    match admin {
        AdminStatement::CreateToken { .. } => tokens::create(admin, context, identity).await,
        AdminStatement::DropToken { name, if_exists } => {
            tokens::drop(name, *if_exists, context, identity).await.map(|()| None)
        }
        AdminStatement::CreateUser { .. }
        | AdminStatement::AlterPassword { .. }
        | AdminStatement::DropUser { .. } => users::run(admin, context, identity).await.map(|()| None),
        AdminStatement::Grant { .. } | AdminStatement::Revoke { .. } => {
            users::rights(admin, context, identity).await.map(|()| None)
        }
        AdminStatement::DropNode { name } => cluster::forget_node(name, context).await.map(|()| None),
        AdminStatement::PinDatabase { .. }
        | AdminStatement::ForbidNode { .. }
        | AdminStatement::AlterSystem { .. }
        | AdminStatement::CancelPlan => control::run(admin, context, identity).await.map(|()| None),
        _ => databases(admin, context, identity).await.map(|()| None),
    }
}

/// A statement that moves a database, or all databases of a node. It can be cancelled.
pub(crate) struct MoveStatement<'a> {
    admin: &'a AdminStatement,
    context: &'a Context,
    identity: &'a Identity,
    running: cluster::Running,
}

impl<'a> MoveStatement<'a> {
    /// `None` for other statements.
    pub(crate) fn new(
        admin: &'a AdminStatement,
        context: &'a Context,
        identity: &'a Identity,
    ) -> Option<MoveStatement<'a>> {
        let is_move = matches!(admin, AdminStatement::MoveDatabase { .. } | AdminStatement::MoveNode { .. });
        is_move.then(|| MoveStatement { admin, context, identity, running: cluster::Running::default() })
    }

    /// Runs the statement, and records it as an event. Returns the report of the move of a node, as
    /// JSON.
    pub(crate) async fn run(&self) -> Result<Option<String>> {
        let MoveStatement { admin, context, identity, running } = self;
        check_right(admin.tag(), identity)?;
        context.engine.check_primary()?;
        let options = |mechanism: &Option<String>, limit: &Option<String>| -> Result<Move> {
            let max_bytes_per_s = limit.as_deref().map(cluster::rate).transpose()?;
            Ok(Move { mechanism: mechanism.clone(), max_bytes_per_s })
        };
        match admin {
            AdminStatement::MoveDatabase { name, node, mechanism, limit } => {
                let options = options(mechanism, limit)?;
                let tenant = cluster::move_database(name, node, options, context, running).await?;
                let moved = Event::new(Kind::DatabaseMoved).database(&tenant);
                context.record(moved.detail("node", node.as_str()), identity);
                Ok(None)
            }
            AdminStatement::MoveNode { name, node, mechanism, limit } => {
                let options = options(mechanism, limit)?;
                let report = machine::move_node(name, node, &options, context, running).await?;
                let moved = Event::new(Kind::NodeMoved)
                    .detail("node", report.source.as_str())
                    .detail("to", report.destination.as_str())
                    .detail("databases", report.databases)
                    .detail("bytes", report.bytes)
                    .detail("total_ms", report.total_ms)
                    .detail("pause_ms", report.pause_ms)
                    .detail("failed", report.failed);
                context.record(moved, identity);
                Ok(Some(serde_json::to_string(&report).unwrap_or_default()))
            }
            _ => Ok(None),
        }
    }

    /// After a cancel request or a timeout ended [`MoveStatement::run`] with this error: cancels
    /// the moves. Returns the error for the client.
    pub(crate) async fn cancel(&self, error: Error) -> Error {
        cluster::cancel_running(error, &self.running, self.context).await
    }
}

/// Runs a statement about databases.
async fn databases(admin: &AdminStatement, context: &Context, identity: &Identity) -> Result<()> {
    let catalog = &context.catalog;
    let record = |event: Event| context.record(event, identity);
    match admin {
        AdminStatement::CreateDatabase { name, owner, source, durability } => {
            let given = durability.as_deref();
            let mut durability = durability::parse(given)?;
            if let Some(cluster) = &context.cluster {
                durability = cluster::durability(given, durability, &**cluster)?;
            }
            create_database(name, owner.as_deref(), source.as_ref(), durability, context, identity).await
        }
        AdminStatement::DropDatabase { name, if_exists, force } => {
            if let Some(dropped) = drop_database(name, *if_exists, *force, context).await? {
                record(Event::new(Kind::DatabaseDropped).database(&dropped));
            }
            Ok(())
        }
        AdminStatement::RestoreDatabase { name, at_unix_ms } => {
            let tenant = restore::restore(name, *at_unix_ms, context).await?;
            let restored = Event::new(Kind::DatabaseRestored).database(&tenant);
            record(restored.detail("to_unix_ms", *at_unix_ms));
            Ok(())
        }
        AdminStatement::ResumeDatabase { name } => {
            let tenant = cluster::resume(name, context).await?;
            record(Event::new(Kind::DatabaseResumed).database(&tenant));
            Ok(())
        }
        AdminStatement::RenameDatabase { from, to } => {
            let tenant = catalog.rename_tenant(from, to).await.map_err(|error| to_postgres_error(&error))?;
            record(Event::new(Kind::DatabaseRenamed).database(&tenant).detail("from", from.as_str()));
            Ok(())
        }
        AdminStatement::AlterLimit { database, name, value } if name == durability::NAME => {
            let parsed = durability::parse(value.as_deref())?;
            let durability = match &context.cluster {
                Some(cluster) => cluster::durability(value.as_deref(), parsed, &**cluster)?,
                None => parsed,
            };
            let tenant = durability::alter(database, durability, context).await?;
            record(
                Event::new(Kind::DurabilityChanged).database(&tenant).detail("durability", durability.name()),
            );
            Ok(())
        }
        AdminStatement::CancelMove { name } => cluster::cancel_move(name, context).await,
        AdminStatement::AlterLimit { database, name, value } => {
            let tenant = alter_limit(database, name, value.as_deref(), context).await?;
            let value = value.as_deref().unwrap_or("default");
            let changed = Event::new(Kind::LimitChanged).database(&tenant);
            record(changed.detail("limit", name.as_str()).detail("value", value));
            Ok(())
        }
        AdminStatement::ResetLimits { database } => {
            let reset = catalog.alter_limits(database, |limits| *limits = Limits::default()).await;
            let tenant = reset.map_err(|error| to_postgres_error(&error))?;
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
fn default_owner<'a>(context: &Context, identity: &'a Identity) -> &'a str {
    match context.catalog.user(&identity.user) {
        Some(_) => &identity.user,
        None => fulmar_meta::SYSTEM_USER,
    }
}

async fn create_database(
    name: &str,
    owner: Option<&str>,
    source: Option<&Source>,
    durability: Durability,
    context: &Context,
    identity: &Identity,
) -> Result<()> {
    let resolve =
        |source: &Source| Result::Ok((context.find(&source.database)?.partition, source.at_unix_ms));
    let version = source.map(resolve).transpose()?;
    let tenant = begin_create(name, owner, context, identity).await?;
    let created = match &context.cluster {
        Some(cluster) => cluster::create(&tenant, version, durability, context, &**cluster).await,
        None => match context.engine.create_partition(tenant.partition, version).await {
            Ok(()) => durability::initialize(&tenant, durability, context).await,
            Err(error) => Err(error),
        },
    };
    let created = match created {
        Ok(()) => finish_create(&tenant, context).await,
        Err(error) => Err(error),
    };
    if created.is_err() {
        undo(&tenant, context).await;
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
    context.record(event, identity);
    Ok(())
}

/// The first step of a creation: creates the record, which is not visible yet. The caller then
/// creates the partition and calls [`finish_create`], or [`undo`] after an error.
pub(crate) async fn begin_create(
    name: &str,
    owner: Option<&str>,
    context: &Context,
    identity: &Identity,
) -> Result<Arc<Tenant>> {
    let owner = owner.unwrap_or_else(|| default_owner(context, identity));
    context.catalog.create_tenant(name, owner).await.map_err(|error| to_postgres_error(&error))
}

/// Gives the partition of a new database, which this node has stored, to this node.
pub(crate) async fn own_created(tenant: &Tenant, context: &Context) -> Result<()> {
    let Some(cluster) = &context.cluster else { return Ok(()) };
    let durability = cluster::durability(None, tenant.durability, &**cluster)?;
    if durability != tenant.durability {
        let changed = context.catalog.set_durability(tenant, durability).await;
        changed.map_err(|error| to_postgres_error(&error))?;
    }
    cluster.own_partition(tenant.partition, durability).await
}

/// The last step of a creation: clients can connect.
pub(crate) async fn finish_create(tenant: &Tenant, context: &Context) -> Result<()> {
    context.catalog.finish_create(tenant).await.map(|_| ()).map_err(|error| to_postgres_error(&error))
}

/// Rolls a creation back. If this fails, the next start repeats it.
pub(crate) async fn undo(tenant: &Tenant, context: &Context) {
    let undone = match &context.cluster {
        Some(cluster) => cluster::undo(tenant, context, &**cluster).await,
        None => context.engine.undo_creation(tenant.partition).await,
    };
    if let Err(error) = undone {
        tracing::warn!(tenant = tenant.name, %error, "could not drop the partition of a database whose creation failed; the next start drops it");
        return;
    }
    if let Err(error) = context.catalog.finish_drop(tenant).await {
        tracing::warn!(tenant = tenant.name, %error, "could not delete the record of a database whose creation failed; the next start deletes it");
    }
}

/// Changes a limit of a tenant. `None` resets it to the default.
async fn alter_limit(
    database: &str,
    name: &str,
    value: Option<&str>,
    context: &Context,
) -> Result<Arc<Tenant>> {
    let limit = Limit::find(name).map_err(|error| to_postgres_error(&error))?;
    let parsed =
        value.map(|value| limit.parse(value)).transpose().map_err(|error| to_postgres_error(&error))?;
    let altered = context.catalog.alter_limits(database, |limits| limits.set(limit, parsed.flatten())).await;
    altered.map_err(|error| to_postgres_error(&error))
}

/// Drops a database. Returns its tenant, or `None` if it did not exist.
async fn drop_database(
    name: &str,
    if_exists: bool,
    force: bool,
    context: &Context,
) -> Result<Option<Arc<Tenant>>> {
    if let Some(tenant) = context.catalog.tenant(name).filter(|_| !force) {
        context.check_unused(&tenant, "Use DROP DATABASE ... WITH (FORCE) to terminate them.").await?;
    }
    let tenant = match context.catalog.begin_drop(name).await {
        Err(MetaError::Missing { .. }) if if_exists => return Ok(None),
        begun => begun.map_err(|error| to_postgres_error(&error))?,
    };
    if !context.end_sessions(&tenant).await {
        let message = format!("sessions of database \"{name}\" have not ended");
        return Err(Error::new(sqlstate::OBJECT_IN_USE, message)
            .detail("The database is marked as dropped and accepts no new connections.")
            .hint("Run DROP DATABASE again after they have ended."));
    }
    match &context.cluster {
        Some(cluster) => cluster.drop_partition(tenant.partition).await?,
        None => context.engine.drop_partition(tenant.partition).await?,
    }
    context.tenants.forget(tenant.partition);
    context.catalog.finish_drop(&tenant).await.map_err(|error| to_postgres_error(&error))?;
    Ok(Some(tenant))
}
