//! Tokens that authorize HTTP clients.
//!
//! A token consists of `fulmar_` and 160 random bits. It is shown once, when it is created; the
//! catalog stores a hash. 160 bits cannot be guessed, so the hash is fast and has no per-token
//! salt, and tokens are looked up by it. A client that sends an unknown token is slowed down like
//! one that sends a wrong password ([`crate::login_throttle`]).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::http::{HeaderMap, header};
use fulmar_meta::{Catalog, SecretHash, Token};
use fulmar_pages::PartitionId;
use pgwire::api::auth::sasl::scram::gen_salted_password;

use crate::events::{Actor, Event, EventLog, Kind};
use crate::login_throttle::{LoginOrigin, LoginThrottle, TooManyFailures};

/// Makes a leaked token recognizable, for example by secret scanners.
const PREFIX: &str = "fulmar_";
const RANDOM_BYTES: usize = 20;
/// Separates these hashes from hashes of other secrets (domain separation).
const SALT: &[u8] = b"fulmar token";

/// The data that a client may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All data of the node.
    Node,
    /// The statistics of one tenant.
    Tenant(PartitionId),
}

/// The reason why access was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuthorizationError {
    /// The request has no token.
    Missing,
    /// The token is unknown or expired.
    Unknown,
    /// Too many unknown tokens have been sent from the client's address.
    TooManyFailures,
    /// The token shows statistics only.
    NotAdmin,
}

/// A token that administers.
#[derive(Clone)]
pub(crate) struct AdminToken {
    pub(crate) name: String,
    hash: SecretHash,
}

/// The token of a request.
pub(crate) fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, secret) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(secret.trim())
}

/// Generates a secret.
pub(crate) fn new_secret() -> String {
    let random = rand::random::<[u8; RANDOM_BYTES]>();
    random.iter().fold(PREFIX.to_owned(), |secret, byte| format!("{secret}{byte:02x}"))
}

/// The stored hash of a secret: HMAC-SHA-256, which is PBKDF2 with one iteration.
pub(crate) fn hash(secret: &str) -> SecretHash {
    SecretHash(gen_salted_password(secret, SALT, 1))
}

/// Decides what an HTTP client may see.
pub(crate) struct Authorizer {
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) login_throttle: Arc<LoginThrottle>,
    pub(crate) event_log: Arc<EventLog>,
    /// Every client may see all data, without a token.
    pub(crate) public: bool,
}

impl Authorizer {
    /// Returns the scope of a token.
    pub(crate) async fn authorize(
        &self,
        secret: Option<&str>,
        address: Option<IpAddr>,
    ) -> Result<Scope, AuthorizationError> {
        if self.public {
            return Ok(Scope::Node);
        }
        let token = self.find(secret, address).await?;
        Ok(token.partition.map_or(Scope::Node, Scope::Tenant))
    }

    /// Returns a token that administers. It is required even if everything is public: requests of
    /// other sites' pages have none.
    pub(crate) async fn authorize_admin(
        &self,
        secret: Option<&str>,
        address: Option<IpAddr>,
    ) -> Result<AdminToken, AuthorizationError> {
        let token = self.find(secret, address).await?;
        match token.is_admin {
            true => Ok(AdminToken { name: token.name.clone(), hash: token.hash.clone() }),
            false => Err(AuthorizationError::NotAdmin),
        }
    }

    /// Whether a token is still valid.
    pub(crate) fn is_valid(&self, token: &AdminToken) -> bool {
        self.catalog.find_token(&token.hash).is_some_and(|found| found.is_admin)
    }

    async fn find(
        &self,
        secret: Option<&str>,
        address: Option<IpAddr>,
    ) -> Result<Arc<Token>, AuthorizationError> {
        let secret = secret.ok_or(AuthorizationError::Missing)?;
        let origin = LoginOrigin { user: None, address };
        let attempt = self
            .login_throttle
            .wait_for_slot(origin)
            .await
            .map_err(|TooManyFailures| AuthorizationError::TooManyFailures)?;
        // Avoids hashing a text that cannot be a token.
        let has_token_length = secret.len() == PREFIX.len() + 2 * RANDOM_BYTES;
        let found = if has_token_length { self.catalog.find_token(&hash(secret)) } else { None };
        match found {
            Some(token) => Ok(token),
            None => {
                attempt.failed(Instant::now());
                self.event_log
                    .record_aggregated(Event::new(Kind::TokenRefused).by(Actor { user: None, address }));
                Err(AuthorizationError::Unknown)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_their_hashes_are_distinct() {
        let (one, other) = (new_secret(), new_secret());
        assert!(one != other && one.starts_with(PREFIX) && one.len() == 47, "{one}");
        assert!(hash(&one).matches(&hash(&one)) && !hash(&one).matches(&hash(&other)));
        assert_eq!(hash(&one).0.len(), 32);
    }
}
