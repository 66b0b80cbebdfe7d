//! Statements about users, their passwords and their access rights.

use fulmar_dialect::admin::AdminStatement;
use fulmar_meta::{Access, MetaError};
use fulmar_pgwire::auth::scram_verifier;

use super::context::{Context, to_postgres_error};
use crate::Result;
use crate::events::{Event, Kind};
use crate::identity::Identity;

/// Runs CREATE USER, ALTER USER or DROP USER.
pub(super) async fn run(admin: &AdminStatement, context: &Context, identity: &Identity) -> Result<()> {
    let catalog = &context.catalog;
    let record = |kind: Kind, name: &str| {
        context.record(Event::new(kind).detail("role", name), identity);
    };
    match admin {
        AdminStatement::CreateUser { name, superuser, password } => {
            let verifier = password.as_deref().map(scram_verifier);
            catalog
                .create_user(name, *superuser, verifier)
                .await
                .map_err(|error| to_postgres_error(&error))?;
            record(Kind::UserCreated, name);
        }
        AdminStatement::AlterPassword { name, password } => {
            let verifier = password.as_deref().map(scram_verifier);
            catalog.alter_user_password(name, verifier).await.map_err(|error| to_postgres_error(&error))?;
            record(Kind::PasswordChanged, name);
        }
        AdminStatement::DropUser { names, if_exists } => {
            for name in names {
                match catalog.drop_user(name).await {
                    Err(MetaError::Missing { .. }) if *if_exists => {}
                    Err(error) => return Err(to_postgres_error(&error)),
                    Ok(()) => record(Kind::UserDropped, name),
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// Runs GRANT or REVOKE.
pub(super) async fn rights(admin: &AdminStatement, context: &Context, identity: &Identity) -> Result<()> {
    let catalog = &context.catalog;
    let record = |kind: Kind, database: &str, user: &str, access: Access| {
        let right = if access == Access::ReadOnly { "SELECT" } else { "CONNECT" };
        let event = Event::new(kind).by(identity.actor()).detail("role", user).detail("right", right);
        context.event_log.record(match catalog.tenant(database) {
            Some(tenant) => event.database(&tenant),
            None => event.database_name(database),
        });
    };
    match admin {
        AdminStatement::Grant { access, databases, users } => {
            for (database, user) in pairs(databases, users) {
                catalog.grant(database, user, *access).await.map_err(|error| to_postgres_error(&error))?;
                record(Kind::RightGranted, database, user, *access);
            }
        }
        AdminStatement::Revoke { access, databases, users } => {
            for (database, user) in pairs(databases, users) {
                catalog.revoke(database, user, *access).await.map_err(|error| to_postgres_error(&error))?;
                record(Kind::RightRevoked, database, user, *access);
            }
        }
        _ => {}
    }
    Ok(())
}

fn pairs<'a>(databases: &'a [String], users: &'a [String]) -> impl Iterator<Item = (&'a str, &'a str)> {
    databases
        .iter()
        .flat_map(move |database| users.iter().map(move |user| (database.as_str(), user.as_str())))
}
