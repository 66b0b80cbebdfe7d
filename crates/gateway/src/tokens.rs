//! Tokens: how clients of HTTP prove what they may see.
//!
//! A token is `fulmar_` and 160 random bits. It is shown once, when it is made; the catalog keeps a hash. Nobody guesses so
//! many bits, so the hash has no salt and is quick, and a token is found by it. Who comes with a token that is none waits
//! like who guesses passwords ([`crate::failures`]).

use std::net::IpAddr;
use std::time::Instant;

use fulmar_meta::SecretHash;
use fulmar_pages::PartitionId;
use pgwire::api::auth::sasl::scram::gen_salted_password;

use crate::events::{Actor, Event, Kind};
use crate::failures::{Crowded, Who};
use crate::gateway::Shared;

/// Says what it is to who finds one in a file.
const PREFIX: &str = "fulmar_";
const RANDOM_BYTES: usize = 20;
/// It keeps hashes apart from those of other things.
const SALT: &[u8] = b"fulmar token";

/// What a client may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Everything.
    Node,
    /// One tenant's figures.
    Tenant(PartitionId),
}

/// Why a client may see nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It came without a token.
    Missing,
    /// With one that is unknown, or has expired.
    Unknown,
    /// Others that come from where it does have tried too many of these.
    Crowded,
}

/// A new secret.
pub(crate) fn new_secret() -> String {
    let random = rand::random::<[u8; RANDOM_BYTES]>();
    random.iter().fold(PREFIX.to_owned(), |secret, byte| format!("{secret}{byte:02x}"))
}

/// What is kept of a secret: HMAC-SHA-256, which is what one round of PBKDF2 is.
pub(crate) fn hash(secret: &str) -> SecretHash {
    SecretHash(gen_salted_password(secret, SALT, 1))
}

/// What the bearer of a secret may see.
pub(crate) async fn authorize(
    secret: Option<&str>,
    address: Option<IpAddr>,
    shared: &Shared,
) -> Result<Scope, Refused> {
    if shared.config.insecure || shared.config.public_metrics {
        return Ok(Scope::Node);
    }
    let secret = secret.ok_or(Refused::Missing)?;
    let who = Who { user: None, address };
    let turn = shared.failures.turn(who).await.map_err(|Crowded| Refused::Crowded)?;
    // Of what is no token by its length no hash is computed.
    let is_one = secret.len() == PREFIX.len() + 2 * RANDOM_BYTES;
    let found = if is_one { shared.catalog.find_token(&hash(secret)) } else { None };
    match found {
        Some(token) => Ok(token.partition.map_or(Scope::Node, Scope::Tenant)),
        None => {
            turn.failed(Instant::now());
            shared.journal().gather(Event::new(Kind::TokenRefused).by(Actor { user: None, address }));
            Err(Refused::Unknown)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ_and_so_do_their_hashes() {
        let (one, other) = (new_secret(), new_secret());
        assert!(one != other && one.starts_with(PREFIX) && one.len() == 47, "{one}");
        assert!(hash(&one).matches(&hash(&one)) && !hash(&one).matches(&hash(&other)));
        assert_eq!(hash(&one).0.len(), 32);
    }
}
