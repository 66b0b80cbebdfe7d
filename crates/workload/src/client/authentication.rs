//! Session startup: the startup message and authentication.

use bytes::Buf;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256};
use postgres_protocol::message::frontend;

use super::{Client, Error, Frame};
use crate::Target;

/// Authentication requests (the first four bytes of the body of an `R` message).
const OK: u32 = 0;
const CLEARTEXT: u32 = 3;
const MD5: u32 = 5;
const SASL: u32 = 10;
const SASL_CONTINUE: u32 = 11;
const SASL_FINAL: u32 = 12;

impl Client {
    /// Sends the startup message and answers the server's authentication requests, then reads up to
    /// ReadyForQuery.
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
                OK => return self.read_response(|_| Ok(())).await,
                CLEARTEXT => frontend::password_message(password(target)?, &mut self.output)?,
                MD5 => {
                    let salt =
                        data.try_into().map_err(|_| Error::Protocol("MD5 salt is not four bytes long"))?;
                    let hash = md5_hash(target.user.as_bytes(), password(target)?, salt);
                    frontend::password_message(hash.as_bytes(), &mut self.output)?;
                }
                SASL => {
                    if !data.split(|byte| *byte == 0).any(|name| name == SCRAM_SHA_256.as_bytes()) {
                        return Err(Error::Protocol("server does not offer SCRAM-SHA-256"));
                    }
                    let exchange =
                        scram.insert(ScramSha256::new(password(target)?, ChannelBinding::unsupported()));
                    frontend::sasl_initial_response(SCRAM_SHA_256, exchange.message(), &mut self.output)?;
                }
                SASL_CONTINUE => {
                    let exchange = scram.as_mut().ok_or(Error::Protocol("unexpected SASL message"))?;
                    exchange.update(&data)?;
                    frontend::sasl_response(exchange.message(), &mut self.output)?;
                }
                SASL_FINAL => {
                    scram.as_mut().ok_or(Error::Protocol("unexpected SASL message"))?.finish(&data)?
                }
                _ => {
                    return Err(Error::Protocol(
                        "server requested an authentication method that is not supported",
                    ));
                }
            }
            self.send().await?;
        }
    }

    /// Reads the next authentication request and returns its code and data.
    async fn authentication_request(&mut self) -> Result<(u32, Vec<u8>), Error> {
        loop {
            if let Some((frame, length)) = Frame::first(&self.input)? {
                let request = match frame.tag {
                    b'R' => {
                        let (kind, data) = frame
                            .body
                            .split_first_chunk::<4>()
                            .ok_or(Error::Protocol("invalid authentication request"))?;
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
    Ok(password.ok_or(Error::Protocol("server requires a password; add one to the target URL"))?.as_bytes())
}
