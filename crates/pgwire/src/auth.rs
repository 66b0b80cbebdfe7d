//! SCRAM-SHA-256 authentication: the client proves that it knows the password without sending it,
//! and the server verifies the proof without storing the password.
//!
//! ```text
//! client                                       server (has salt, iterations, StoredKey, ServerKey)
//!   SASLInitialResponse: name, nonce      -->
//!                                         <--   SASLContinue: both nonces, salt, iterations
//!   SASLResponse: ClientProof             -->   SHA256(proof xor signature) = StoredKey ?
//!                                         <--   SASLFinal: ServerSignature
//! ```
//!
//! The crate `pgwire` computes the messages. A user that does not exist goes through the same
//! exchange, with keys that match no password, so that clients cannot probe for user names. Its
//! salt is derived from the name and a secret in the catalog. The salt is therefore stable across
//! restarts and nodes that read the same catalog, like the salt of an existing user.

use fulmar_meta::{SaltKey, ScramVerifier};
use fulmar_sqlite::{Error, sqlstate};
use pgwire::api::auth::sasl::SCRAM_SHA_256_METHOD;
use pgwire::api::auth::sasl::scram::{
    SCRAM_ITERATIONS, ScramSecret, ScramServerAuth, ScramServerAuthWaitingForClientFinal, gen_salted_password,
};
use pgwire::messages::Message;
use pgwire::messages::startup::Authentication;

use crate::Result;

/// Computes the verifier that the server stores instead of a password.
pub fn scram_verifier(password: &str) -> ScramVerifier {
    let salt = rand::random::<[u8; SALT_BYTES]>().to_vec();
    let salted = gen_salted_password(password, &salt, SCRAM_ITERATIONS);
    match ScramSecret::verifier_from_salted_password(salt, salted, SCRAM_ITERATIONS) {
        ScramSecret::Verifier { salt, iterations, stored_key, server_key } => {
            ScramVerifier { salt, iterations: iterations as u32, stored_key, server_key }
        }
        // Unreachable: a verifier was requested. Empty keys match no password.
        ScramSecret::SaltedPassword { salt, .. } => ScramVerifier {
            salt,
            iterations: SCRAM_ITERATIONS as u32,
            stored_key: Vec::new(),
            server_key: Vec::new(),
        },
    }
}

/// Separates derived salts from other hashes (domain separation).
const DECOY_SALT_PREFIX: &[u8] = b"fulmar scram salt\0";
const SALT_BYTES: usize = 16;

/// The secret against which a nonexistent user is authenticated. It always fails.
fn decoy(user: &str, key: &SaltKey) -> ScramSecret {
    let key = key.0.iter().fold(String::new(), |digits, byte| format!("{digits}{byte:02x}"));
    // PBKDF2 with one iteration is HMAC-SHA-256.
    let mut salt = gen_salted_password(&key, &[DECOY_SALT_PREFIX, user.as_bytes()].concat(), 1);
    salt.truncate(SALT_BYTES);
    ScramSecret::Verifier {
        salt,
        iterations: SCRAM_ITERATIONS,
        stored_key: rand::random::<[u8; 32]>().to_vec(),
        server_key: rand::random::<[u8; 32]>().to_vec(),
    }
}

/// An authentication exchange with a client.
pub struct ScramExchange {
    user: String,
    state: State,
}

enum State {
    Begun(ScramSecret),
    Challenged(ScramServerAuthWaitingForClientFinal),
    Ended,
}

/// The result of a step.
#[derive(Debug, PartialEq, Eq)]
pub enum ScramStep {
    /// The client must respond.
    Challenge,
    /// The client has proved its identity.
    Authenticated,
}

impl ScramExchange {
    /// Starts the exchange: requests SCRAM-SHA-256 from the client. `verifier` is `None` if the
    /// user does not exist or has no password. The exchange then fails at its end.
    pub fn begin(
        name: &str,
        verifier: Option<&ScramVerifier>,
        salt_key: &SaltKey,
        output: &mut Vec<u8>,
    ) -> Result<ScramExchange> {
        let secret = match verifier {
            Some(verifier) => ScramSecret::Verifier {
                salt: verifier.salt.clone(),
                iterations: verifier.iterations as usize,
                stored_key: verifier.stored_key.clone(),
                server_key: verifier.server_key.clone(),
            },
            None => decoy(name, salt_key),
        };
        put_message(output, &Authentication::SASL(vec![SCRAM_SHA_256_METHOD.to_owned()]))?;
        Ok(ScramExchange { user: name.to_owned(), state: State::Begun(secret) })
    }

    /// Returns true if the next message contains the client's proof.
    pub fn is_challenged(&self) -> bool {
        matches!(self.state, State::Challenged(_))
    }

    /// Continues with the client's response: the body of a message of kind `p`.
    pub fn step(&mut self, body: &[u8], output: &mut Vec<u8>) -> Result<ScramStep> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Begun(secret) => {
                let first = initial_response(body)?;
                let (challenge, waiting) = ScramServerAuth::new()
                    .on_client_first_message_with_secret(first, secret)
                    .map_err(|cause| malformed(&cause.to_string()))?;
                self.state = State::Challenged(waiting);
                put_message(output, &Authentication::SASLContinue(challenge.into()))?;
                Ok(ScramStep::Challenge)
            }
            State::Challenged(waiting) => {
                let signature = waiting.on_client_final_message(body).map_err(|_| self.invalid_password())?;
                put_message(output, &Authentication::SASLFinal(signature.into()))?;
                put_message(output, &Authentication::Ok)?;
                Ok(ScramStep::Authenticated)
            }
            State::Ended => Err(malformed("exchange already completed")),
        }
    }

    fn invalid_password(&self) -> Error {
        let message = format!("password authentication failed for user \"{}\"", self.user);
        Error::new(sqlstate::INVALID_PASSWORD, message)
    }
}

/// Writes a message of the crate `pgwire`: those of startup and authentication.
pub fn put_message(output: &mut Vec<u8>, message: &impl Message) -> Result<()> {
    let mut bytes = bytes::BytesMut::new();
    message.encode(&mut bytes).map_err(|cause| Error::new(sqlstate::INTERNAL, cause.to_string()))?;
    output.extend_from_slice(&bytes);
    Ok(())
}

fn malformed(problem: &str) -> Error {
    Error::new(sqlstate::PROTOCOL_VIOLATION, format!("malformed SCRAM message: {problem}"))
}

/// Extracts the client's first message from a SASLInitialResponse: mechanism, length, message.
fn initial_response(body: &[u8]) -> Result<&[u8]> {
    let end = body.iter().position(|&byte| byte == 0).ok_or_else(|| malformed("missing mechanism"))?;
    let (mechanism, rest) = (&body[..end], &body[end + 1..]);
    if mechanism != SCRAM_SHA_256_METHOD.as_bytes() {
        return Err(malformed("mechanism is not SCRAM-SHA-256"));
    }
    let (length, message) = rest.split_first_chunk::<4>().ok_or_else(|| malformed("missing length"))?;
    if u32::from_be_bytes(*length) as usize != message.len() {
        return Err(malformed("incorrect length"));
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use postgres_protocol::authentication::sasl::{ChannelBinding, ScramSha256};
    use proptest::prelude::*;

    use super::*;

    fn exchange(verifier: Option<&ScramVerifier>) -> ScramExchange {
        let mut exchange =
            ScramExchange::begin("anna", None, &SaltKey(vec![7; 32]), &mut Vec::new()).unwrap();
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

    /// Logs in with a client library, which also verifies the server's signature.
    fn log_in(verifier: Option<&ScramVerifier>, password: &str) -> Result<()> {
        let mut exchange = exchange(verifier);
        let mut client = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
        let mut output = Vec::new();
        assert_eq!(exchange.step(&initial(client.message()), &mut output)?, ScramStep::Challenge);
        client.update(&output[9..]).unwrap();
        output.clear();
        assert_eq!(exchange.step(client.message(), &mut output)?, ScramStep::Authenticated);
        let length = u32::from_be_bytes([output[1], output[2], output[3], output[4]]) as usize;
        client.finish(&output[9..length + 1]).unwrap();
        assert_eq!(&output[length + 1..], b"R\0\0\0\x08\0\0\0\0");
        Ok(())
    }

    #[test]
    fn accepts_only_the_correct_password() {
        let verifier = scram_verifier("pencil \u{e9}");
        log_in(Some(&verifier), "pencil \u{e9}").unwrap();
        assert_eq!(log_in(Some(&verifier), "pen").unwrap_err().state(), sqlstate::INVALID_PASSWORD);
        assert_eq!(log_in(None, "pencil").unwrap_err().state(), sqlstate::INVALID_PASSWORD);
    }

    #[test]
    fn salt_of_an_unknown_user_depends_only_on_its_name_and_the_key() {
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
        fn rejects_arbitrary_messages(
            first in "[ -~]{0,60}",
            last in "[ -~]{0,60}",
            raw in proptest::collection::vec(any::<u8>(), 0..60),
        ) {
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
