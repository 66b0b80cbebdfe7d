//! Tokens: bearer credentials of HTTP clients.
//!
//! A token's secret is shown once, when the token is created. Only its hash is stored. A request is
//! authenticated by comparing the hash of its secret.

use std::sync::Arc;

use fulmar_pages::PartitionId;

use super::records::{self, Key};
use super::{Catalog, SecretHash, Tenant, TenantState, Token, names};
use crate::{MetaError, ObjectKind, Revision, Transaction};

impl Catalog {
    /// All tokens, including expired ones, sorted by name.
    pub fn tokens(&self) -> Vec<Arc<Token>> {
        self.cache.state().tokens.values().cloned().collect()
    }

    /// The token with this hash, unless it has expired. Compares all tokens completely, so the run
    /// time does not reveal how close a guess is.
    pub fn find_token(&self, hash: &SecretHash) -> Option<Arc<Token>> {
        let state = self.cache.state();
        let matching = state.tokens.values().fold(None, |found, token| {
            let matches = token.hash.matches(hash);
            if matches { Some(token) } else { found }
        });
        let now_unix_ms = (self.now_unix_ms)();
        matching.filter(|token| token.expires_unix_ms.is_none_or(|expires| now_unix_ms < expires)).cloned()
    }

    /// The tenant of a partition, if it is ready.
    pub fn tenant_of(&self, partition: PartitionId) -> Option<Arc<Tenant>> {
        let state = self.cache.state();
        state.by_partition.get(&partition).filter(|tenant| tenant.state == TenantState::Ready).cloned()
    }

    /// Creates a token for a tenant or for the whole node. It expires after `lasts_ms`
    /// milliseconds, or never.
    ///
    /// Errors: `InvalidName`, `Exists`, `Missing` (the tenant), and those of the store.
    pub async fn create_token(
        &self,
        name: &str,
        hash: SecretHash,
        tenant: Option<&str>,
        lasts_ms: Option<u64>,
    ) -> Result<Arc<Token>, MetaError> {
        self.add_token(name, hash, tenant, false, lasts_ms).await
    }

    /// Creates a token that administers, as a superuser does.
    ///
    /// Errors: as [`Catalog::create_token`].
    pub async fn create_admin_token(
        &self,
        name: &str,
        hash: SecretHash,
        lasts_ms: Option<u64>,
    ) -> Result<Arc<Token>, MetaError> {
        self.add_token(name, hash, None, true, lasts_ms).await
    }

    async fn add_token(
        &self,
        name: &str,
        hash: SecretHash,
        tenant: Option<&str>,
        is_admin: bool,
        lasts_ms: Option<u64>,
    ) -> Result<Arc<Token>, MetaError> {
        names::check(ObjectKind::Token, name)?;
        let created_unix_ms = (self.now_unix_ms)();
        let (token, revision) = self
            .change(|state| {
                if state.tokens.contains_key(name) {
                    return Err(MetaError::exists(ObjectKind::Token, name));
                }
                let tenant = tenant.map(|tenant| state.ready_tenant(tenant)).transpose()?;
                let token = Token {
                    name: name.to_owned(),
                    hash: hash.clone(),
                    partition: tenant.map(|tenant| tenant.partition),
                    is_admin,
                    created_unix_ms,
                    expires_unix_ms: lasts_ms.map(|lasts| created_unix_ms.saturating_add(lasts)),
                    revision: Revision::default(),
                };
                let key = Key::Token(name).to_string();
                let mut transaction =
                    Transaction::new().absent(key.as_str()).put(key, records::token_value(&token));
                if let Some(tenant) = tenant {
                    transaction =
                        transaction.unchanged(Key::Tenant(&tenant.name).to_string(), tenant.revision);
                }
                Ok((transaction, token))
            })
            .await?;
        Ok(Arc::new(Token { revision, ..token }))
    }

    /// Drops a token, which invalidates its secret. Returns the token.
    ///
    /// Errors: `Missing`, and those of the store.
    pub async fn drop_token(&self, name: &str) -> Result<Arc<Token>, MetaError> {
        let (token, _) = self
            .change(|state| {
                let token =
                    state.tokens.get(name).ok_or_else(|| MetaError::missing(ObjectKind::Token, name))?;
                let key = Key::Token(name).to_string();
                Ok((Transaction::new().unchanged(key.as_str(), token.revision).delete(key), token.clone()))
            })
            .await?;
        Ok(token)
    }
}
