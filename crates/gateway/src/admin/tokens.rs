//! CREATE TOKEN and DROP TOKEN: tokens for HTTP access.

use fulmar_meta::{MetaError, Token};

use super::answer;
use crate::Result;
use crate::events::{Event, Kind};
use crate::gateway::Shared;
use crate::session::Identity;
use crate::tokens;

/// Creates a token. Returns its secret, of which only a hash is stored.
pub(super) async fn create(
    name: &str,
    database: Option<&str>,
    lasts_ms: Option<u64>,
    shared: &Shared,
    identity: &Identity,
) -> Result<String> {
    let secret = tokens::new_secret();
    let created = shared.catalog.create_token(name, tokens::hash(&secret), database, lasts_ms).await;
    let token = created.map_err(|error| answer(&error))?;
    record(Kind::TokenCreated, &token, shared, identity);
    Ok(secret)
}

/// Drops a token.
pub(super) async fn drop(name: &str, if_exists: bool, shared: &Shared, identity: &Identity) -> Result<()> {
    match shared.catalog.drop_token(name).await {
        Err(MetaError::Missing { .. }) if if_exists => Ok(()),
        Err(error) => Err(answer(&error)),
        Ok(token) => {
            record(Kind::TokenDropped, &token, shared, identity);
            Ok(())
        }
    }
}

fn record(kind: Kind, token: &Token, shared: &Shared, identity: &Identity) {
    let event = Event::new(kind).by(identity.actor()).detail("token", token.name.as_str());
    let tenant = token.partition.and_then(|partition| shared.catalog.tenant_of(partition));
    shared.journal().record(match tenant {
        Some(tenant) => event.database(&tenant),
        None => event,
    });
}
