//! Tokens: what clients of HTTP prove their rights with.
//!
//! A token's secret is shown to who makes it, once; only its hash is kept. Whoever comes with a secret is known by that.

use std::sync::Arc;

use fulmar_pages::PartitionId;

use super::records::{self, Key};
use super::{Catalog, SecretHash, Tenant, TenantState, Token, names};
use crate::{MetaError, Revision, Transaction, What};

impl Catalog {
    /// All tokens, sorted by name; those too that have expired.
    pub fn tokens(&self) -> Vec<Arc<Token>> {
        self.cache.state().tokens.values().cloned().collect()
    }

    /// The token of a secret, unless it has expired. All are compared, and each as a whole: how long this takes says
    /// nothing of which is near.
    pub fn find_token(&self, hash: &SecretHash) -> Option<Arc<Token>> {
        let state = self.cache.state();
        let matching = state.tokens.values().fold(None, |found, token| {
            let matches = token.hash.matches(hash);
            if matches { Some(token) } else { found }
        });
        let now_unix_ms = (self.now_unix_ms)();
        matching.filter(|token| token.expires_unix_ms.is_none_or(|expires| now_unix_ms < expires)).cloned()
    }

    /// The tenant of a partition, if clients can connect to it.
    pub fn tenant_of(&self, partition: PartitionId) -> Option<Arc<Tenant>> {
        let state = self.cache.state();
        state.by_partition.get(&partition).filter(|tenant| tenant.state == TenantState::Ready).cloned()
    }

    /// Makes a token, for a tenant or for the whole node, that lasts for so many milliseconds or for ever.
    ///
    /// Errors: `InvalidName`, `Exists`, `Missing` (the tenant), and what the store says.
    pub async fn create_token(
        &self,
        name: &str,
        hash: SecretHash,
        tenant: Option<&str>,
        lasts_ms: Option<u64>,
    ) -> Result<Arc<Token>, MetaError> {
        names::check(What::Token, name)?;
        let created_unix_ms = (self.now_unix_ms)();
        let (token, revision) = self
            .change(|state| {
                if state.tokens.contains_key(name) {
                    return Err(MetaError::exists(What::Token, name));
                }
                let tenant = tenant.map(|tenant| state.ready_tenant(tenant)).transpose()?;
                let token = Token {
                    name: name.to_owned(),
                    hash: hash.clone(),
                    partition: tenant.map(|tenant| tenant.partition),
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

    /// Drops a token: its secret is worth nothing from now on. Answers what it was.
    ///
    /// Errors: `Missing`, and what the store says.
    pub async fn drop_token(&self, name: &str) -> Result<Arc<Token>, MetaError> {
        let (token, _) = self
            .change(|state| {
                let token = state.tokens.get(name).ok_or_else(|| MetaError::missing(What::Token, name))?;
                let key = Key::Token(name).to_string();
                Ok((Transaction::new().unchanged(key.as_str(), token.revision).delete(key), token.clone()))
            })
            .await?;
        Ok(token)
    }
}
