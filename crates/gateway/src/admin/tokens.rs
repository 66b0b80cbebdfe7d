//! CREATE TOKEN and DROP TOKEN: tokens for HTTP access.

use fulmar_meta::{MetaError, Token};

use super::context::{Context, to_postgres_error};
use crate::Result;
use crate::events::{Event, Kind};
use crate::identity::Identity;
use crate::tokens;

/// Creates a token. Returns its secret, of which only a hash is stored.
pub(super) async fn create(
    name: &str,
    database: Option<&str>,
    lasts_ms: Option<u64>,
    context: &Context,
    identity: &Identity,
) -> Result<String> {
    let secret = tokens::new_secret();
    let created = context.catalog.create_token(name, tokens::hash(&secret), database, lasts_ms).await;
    let token = created.map_err(|error| to_postgres_error(&error))?;
    record(Kind::TokenCreated, &token, context, identity);
    Ok(secret)
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
    let tenant = token.partition.and_then(|partition| context.catalog.tenant_of(partition));
    context.event_log.record(match tenant {
        Some(tenant) => event.database(&tenant),
        None => event,
    });
}
