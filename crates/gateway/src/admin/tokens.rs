//! CREATE TOKEN and DROP TOKEN: tokens for HTTP access.

use fulmar_dialect::admin::AdminStatement;
use fulmar_meta::{MetaError, Token};

use super::context::{Context, to_postgres_error};
use crate::Result;
use crate::events::{Event, Kind};
use crate::identity::Identity;
use crate::tokens;

/// Creates a token. Returns its secret, of which only a hash is stored.
pub(super) async fn create(
    admin: &AdminStatement,
    context: &Context,
    identity: &Identity,
) -> Result<Option<String>> {
    let AdminStatement::CreateToken { name, database, is_admin, lasts_ms } = admin else { return Ok(None) };
    let secret = tokens::new_secret();
    let (catalog, hash) = (&context.catalog, tokens::hash(&secret));
    let created = match is_admin {
        true => catalog.create_admin_token(name, hash, *lasts_ms).await,
        false => catalog.create_token(name, hash, database.as_deref(), *lasts_ms).await,
    };
    let token = created.map_err(|error| to_postgres_error(&error))?;
    record(Kind::TokenCreated, &token, context, identity);
    Ok(Some(secret))
}

/// Drops a token.
pub(super) async fn drop(name: &str, if_exists: bool, context: &Context, identity: &Identity) -> Result<()> {
    match context.catalog.drop_token(name).await {
        Err(MetaError::Missing { .. }) if if_exists => Ok(()),
        Err(error) => Err(to_postgres_error(&error)),
        Ok(token) => {
            record(Kind::TokenDropped, &token, context, identity);
            Ok(())
        }
    }
}

fn record(kind: Kind, token: &Token, context: &Context, identity: &Identity) {
    let event = Event::new(kind).by(identity.actor()).detail("token", token.name.as_str());
    let event = if token.is_admin { event.detail("admin", true) } else { event };
    let tenant = token.partition.and_then(|partition| context.catalog.tenant_of(partition));
    context.event_log.record(match tenant {
        Some(tenant) => event.database(&tenant),
        None => event,
    });
}
