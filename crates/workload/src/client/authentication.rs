//! The start of a session: who we are and how we prove it.

use bytes::Buf;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256};
use postgres_protocol::message::frontend;

use super::{Client, Error, Frame};
use crate::Target;

/// Authentication requests (the first four bytes of an `R` message).
const OK: u32 = 0;
const CLEARTEXT: u32 = 3;
const MD5: u32 = 5;
const SASL: u32 = 10;
const SASL_CONTINUE: u32 = 11;
const SASL_FINAL: u32 = 12;

impl Client {
    /// Sends the start-up message and answers what the server asks, up to ReadyForQuery.
    pub(super) async fn authenticate(&mut self, target: &Target) -> Result<(), Error> {
        let parameters = [
            ("user", target.user.as_str()),
            ("database", target.database.as_str()),
            ("application_name", "fulmar bench"),
            ("client_encoding", "UTF8"),
        ];
        frontend::startup_message(parameters, &mut self.output)?;
        self.send().await?;
        let mut scram = None;
        loop {
            let (request, data) = self.authentication_request().await?;
            match request {
                OK => return self.answer(|_| Ok(())).await,
                CLEARTEXT => frontend::password_message(password(target)?, &mut self.output)?,
                MD5 => {
                    let salt =
                        data.try_into().map_err(|_| Error::Protocol("an MD5 salt that is not four bytes"))?;
                    let hash = md5_hash(target.user.as_bytes(), password(target)?, salt);
                    frontend::password_message(hash.as_bytes(), &mut self.output)?;
                }
                SASL => {
                    if !data.split(|byte| *byte == 0).any(|name| name == SCRAM_SHA_256.as_bytes()) {
                        return Err(Error::Protocol("the server offers no SCRAM-SHA-256"));
                    }
                    let exchange =
                        scram.insert(ScramSha256::new(password(target)?, ChannelBinding::unsupported()));
                    frontend::sasl_initial_response(SCRAM_SHA_256, exchange.message(), &mut self.output)?;
                }
                SASL_CONTINUE => {
                    let exchange = scram.as_mut().ok_or(Error::Protocol("SCRAM out of turn"))?;
                    exchange.update(&data)?;
                    frontend::sasl_response(exchange.message(), &mut self.output)?;
                }
                SASL_FINAL => scram.as_mut().ok_or(Error::Protocol("SCRAM out of turn"))?.finish(&data)?,
                _ => {
                    return Err(Error::Protocol(
                        "the server asks for an authentication that is not spoken here",
                    ));
                }
            }
            self.send().await?;
        }
    }

    /// The next authentication request and its data.
    async fn authentication_request(&mut self) -> Result<(u32, Vec<u8>), Error> {
        loop {
            if let Some((frame, length)) = Frame::first(&self.input)? {
                let request = match frame.tag {
                    b'R' => {
                        let (kind, data) =
                            frame.body.split_first_chunk::<4>().ok_or(Error::Protocol("a short R"))?;
                        Some((u32::from_be_bytes(*kind), data.to_vec()))
                    }
                    b'E' => return Err(frame.server_error()),
                    _ => None,
                };
                self.input.advance(length);
                if let Some(request) = request {
                    return Ok(request);
                }
            } else {
                self.receive().await?;
            }
        }
    }
}

fn password(target: &Target) -> Result<&[u8], Error> {
    let password = target.password.as_ref();
    Ok(password
        .ok_or(Error::Protocol("the server asks for a password; put one into the target's URL"))?
        .as_bytes())
}
