//! SCRAM-SHA-256: a password is proved without being sent, and checked without being kept.
//!
//! ```text
//! client                                        server (knows salt, iterations, StoredKey, ServerKey)
//!   SASLInitialResponse: name, nonce      -->
//!                                         <--   SASLContinue: both nonces, salt, iterations
//!   SASLResponse: ClientProof             -->   SHA256(proof xor signature) = StoredKey ?
//!                                         <--   SASLFinal: ServerSignature
//! ```
//!
//! The computations are `pgwire`'s. A user that does not exist goes through the same exchange, with keys that no password has, so that
//! clients cannot find out which names exist. Its salt is derived from the name and a secret in the catalog. It is therefore the same
//! after a restart and on nodes that read the same catalog, like the salt of a user that exists.

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::{SaltKey, ScramVerifier, User};
use pgwire::api::auth::sasl::SCRAM_SHA_256_METHOD;
use pgwire::api::auth::sasl::scram::{
    SCRAM_ITERATIONS, ScramSecret, ScramServerAuth, ScramServerAuthWaitingForClientFinal, gen_salted_password,
};
use pgwire::messages::Message;
use pgwire::messages::startup::Authentication;

use crate::Result;

/// What a server keeps of a password.
pub fn scram_verifier(password: &str) -> ScramVerifier {
    let salt = rand::random::<[u8; SALT_BYTES]>().to_vec();
    let salted = gen_salted_password(password, &salt, SCRAM_ITERATIONS);
    match ScramSecret::verifier_from_salted_password(salt, salted, SCRAM_ITERATIONS) {
        ScramSecret::Verifier { salt, iterations, stored_key, server_key } => {
            ScramVerifier { salt, iterations: iterations as u32, stored_key, server_key }
        }
        // The other kind is never made from a verifier; keys of nothing let nobody in.
        ScramSecret::SaltedPassword { salt, .. } => ScramVerifier {
            salt,
            iterations: SCRAM_ITERATIONS as u32,
            stored_key: Vec::new(),
            server_key: Vec::new(),
        },
    }
}

/// Keeps derived salts apart from other hashes.
const DECOY_SALT: &[u8] = b"fulmar scram salt\0";
const SALT_BYTES: usize = 16;

/// What a user that does not exist is authenticated against: always in vain.
fn decoy(user: &str, key: &SaltKey) -> ScramSecret {
    let key = key.0.iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
    // One round of PBKDF2 is HMAC-SHA-256.
    let mut salt = gen_salted_password(&key, &[DECOY_SALT, user.as_bytes()].concat(), 1);
    salt.truncate(SALT_BYTES);
    ScramSecret::Verifier {
        salt,
        iterations: SCRAM_ITERATIONS,
        stored_key: rand::random::<[u8; 32]>().to_vec(),
        server_key: rand::random::<[u8; 32]>().to_vec(),
    }
}

/// An exchange with a client.
pub(crate) struct Exchange {
    user: String,
    state: State,
}

enum State {
    Begun(ScramSecret),
    Challenged(ScramServerAuthWaitingForClientFinal),
    Ended,
}

/// How far an exchange has come.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The client is to answer.
    Challenge,
    /// The client has proved who it is.
    Authenticated,
}

impl Exchange {
    /// Begins: tells the client how to prove itself.
    pub(crate) fn begin(
        name: &str,
        user: Option<&User>,
        salt_key: &SaltKey,
        output: &mut Vec<u8>,
    ) -> Result<Exchange> {
        let secret = match user.and_then(|user| user.verifier.as_ref()) {
            Some(verifier) => ScramSecret::Verifier {
                salt: verifier.salt.clone(),
                iterations: verifier.iterations as usize,
                stored_key: verifier.stored_key.clone(),
                server_key: verifier.server_key.clone(),
            },
            None => decoy(name, salt_key),
        };
        put(output, &Authentication::SASL(vec![SCRAM_SHA_256_METHOD.to_owned()]))?;
        Ok(Exchange { user: name.to_owned(), state: State::Begun(secret) })
    }

    /// Whether the client's proof comes next.
    pub(crate) fn is_challenged(&self) -> bool {
        matches!(self.state, State::Challenged(_))
    }

    /// Goes on with what the client has sent: the body of a message of kind `p`.
    pub(crate) fn step(&mut self, body: &[u8], output: &mut Vec<u8>) -> Result<Step> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Begun(secret) => {
                let first = initial_response(body)?;
                let (challenge, waiting) = ScramServerAuth::new()
                    .on_client_first_message_with_secret(first, secret)
                    .map_err(|cause| malformed(&cause.to_string()))?;
                self.state = State::Challenged(waiting);
                put(output, &Authentication::SASLContinue(challenge.into()))?;
                Ok(Step::Challenge)
            }
            State::Challenged(waiting) => {
                let signature = waiting.on_client_final_message(body).map_err(|_| self.refused())?;
                put(output, &Authentication::SASLFinal(signature.into()))?;
                put(output, &Authentication::Ok)?;
                Ok(Step::Authenticated)
            }
            State::Ended => Err(malformed("the exchange has ended")),
        }
    }

    fn refused(&self) -> Error {
        let message = format!("password authentication failed for user \"{}\"", self.user);
        Error::new(sqlstate::INVALID_PASSWORD, message)
    }
}

/// Writes a message of the codec's: those around logging in.
pub(crate) fn put(output: &mut Vec<u8>, message: &impl Message) -> Result<()> {
    let mut bytes = bytes::BytesMut::new();
    message.encode(&mut bytes).map_err(|cause| Error::new(sqlstate::INTERNAL, cause.to_string()))?;
    output.extend_from_slice(&bytes);
    Ok(())
}

fn malformed(what: &str) -> Error {
    Error::new(sqlstate::PROTOCOL_VIOLATION, format!("malformed SCRAM message: {what}"))
}

/// The client's first message, out of a SASLInitialResponse: mechanism, length, message.
fn initial_response(body: &[u8]) -> Result<&[u8]> {
    let end = body.iter().position(|&byte| byte == 0).ok_or_else(|| malformed("no mechanism"))?;
    let (mechanism, rest) = (&body[..end], &body[end + 1..]);
    if mechanism != SCRAM_SHA_256_METHOD.as_bytes() {
        return Err(malformed("the mechanism is not SCRAM-SHA-256"));
    }
    let (length, message) = rest.split_first_chunk::<4>().ok_or_else(|| malformed("no length"))?;
    if u32::from_be_bytes(*length) as usize != message.len() {
        return Err(malformed("the length is wrong"));
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use postgres_protocol::authentication::sasl::{ChannelBinding, ScramSha256};
    use proptest::prelude::*;

    use super::*;

    fn exchange(verifier: Option<&ScramVerifier>) -> Exchange {
        let mut exchange = Exchange::begin("anna", None, &SaltKey(vec![7; 32]), &mut Vec::new()).unwrap();
        if let Some(verifier) = verifier.cloned() {
            exchange.state = State::Begun(ScramSecret::Verifier {
                salt: verifier.salt,
                iterations: verifier.iterations as usize,
                stored_key: verifier.stored_key,
                server_key: verifier.server_key,
            });
        }
        exchange
    }

    fn initial(message: &[u8]) -> Vec<u8> {
        [b"SCRAM-SHA-256\0", &(message.len() as u32).to_be_bytes()[..], message].concat()
    }

    /// A client library logs in; its own check of the server's signature included.
    fn log_in(verifier: Option<&ScramVerifier>, password: &str) -> Result<()> {
        let mut exchange = exchange(verifier);
        let mut client = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
        let mut output = Vec::new();
        assert_eq!(exchange.step(&initial(client.message()), &mut output)?, Step::Challenge);
        client.update(&output[9..]).unwrap();
        output.clear();
        assert_eq!(exchange.step(client.message(), &mut output)?, Step::Authenticated);
        let length = u32::from_be_bytes([output[1], output[2], output[3], output[4]]) as usize;
        client.finish(&output[9..length + 1]).unwrap();
        assert_eq!(&output[length + 1..], b"R\0\0\0\x08\0\0\0\0");
        Ok(())
    }

    #[test]
    fn the_right_password_and_no_other() {
        let verifier = scram_verifier("pencil \u{e9}");
        log_in(Some(&verifier), "pencil \u{e9}").unwrap();
        assert_eq!(log_in(Some(&verifier), "pen").unwrap_err().state(), sqlstate::INVALID_PASSWORD);
        assert_eq!(log_in(None, "pencil").unwrap_err().state(), sqlstate::INVALID_PASSWORD);
    }

    #[test]
    fn the_salt_of_an_unknown_user_depends_on_its_name_and_the_key_only() {
        let salt = |name, key| match decoy(name, &SaltKey(vec![key; 32])) {
            ScramSecret::Verifier { salt, .. } => salt,
            ScramSecret::SaltedPassword { .. } => panic!(),
        };
        assert_eq!(salt("anna", 1).len(), scram_verifier("pencil").salt.len());
        assert_eq!(salt("anna", 1), salt("anna", 1));
        assert_ne!(salt("anna", 1), salt("bert", 1));
        assert_ne!(salt("anna", 1), salt("anna", 2));
    }

    proptest! {
        #[test]
        fn survives_anything(first in "[ -~]{0,60}", last in "[ -~]{0,60}", raw in proptest::collection::vec(any::<u8>(), 0..60)) {
            let verifier = ScramVerifier { salt: vec![1; 16], iterations: 4096, stored_key: vec![2; 32], server_key: vec![3; 32] };
            let mut output = Vec::new();
            prop_assert!(exchange(Some(&verifier)).step(&raw, &mut output).is_err());
            let mut begun = exchange(Some(&verifier));
            let first = format!("n,,{first}");
            if begun.step(&initial(first.as_bytes()), &mut output).is_ok() {
                prop_assert!(begun.step(last.as_bytes(), &mut output).is_err());
            }
            let mut begun = exchange(Some(&verifier));
            begun.step(&initial(b"n,,n=,r=abc"), &mut output).unwrap();
            prop_assert!(begun.step(&raw, &mut output).is_err());
        }
    }
}
