//! From a fresh connection to a session: TLS, who it is, which tenant.
//!
//! ```text
//! SSLRequest?  -> 'S' and a TLS handshake, or 'N'
//! CancelRequest -> cancel, and that is all
//! Startup: user, database, parameters -> SCRAM -> does the tenant exist, may the user connect -> session
//! ```
//!
//! Until a client has proved who it is it gets little: packets of 10,000 bytes, one minute in all, and less if many others come
//! ([`crate::crowd`]). Who guesses passwords waits for the answers ([`crate::failures`]).

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, BytesMut};
use fulmar_engine::{Error, TransactionStatus, sqlstate};
use fulmar_meta::{Access, User};
use pgwire::messages::cancel::CancelRequest;
use pgwire::messages::startup::{
    Authentication, BackendKeyData, GssEncRequest, SecretKey, SslRequest, Startup,
};
use pgwire::messages::{DecodeContext, Message, ProtocolVersion};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use crate::Result;
use crate::activity;
use crate::admission::{left_places, most_sessions, no_room, still_there, tenant};
use crate::auth::{self, Exchange, Step};
use crate::crowd::Place;
use crate::events::{Actor, Event, Kind};
use crate::failures::{Crowded, Who};
use crate::gateway::Shared;
use crate::metrics::WorkerMetrics;
use crate::protocol::backend::{self, Severity};
use crate::protocol::frontend;
use crate::registry::Entry;
use crate::session::{Identity, Link, Session, Settings};
use crate::wire::{Stream, Wire};

/// Bytes of a packet before the client is known.
const PACKET_BYTES: usize = 10_000;
/// How long a client may take to become a session.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes a session of a connection, if it is to be one. Until then it has a place among those that are none.
pub(crate) async fn serve(
    stream: TcpStream,
    place: Place,
    shared: Arc<Shared>,
    metrics: Arc<WorkerMetrics>,
) -> Option<(Session, Entry)> {
    // Small answers must not wait for the acknowledgement of earlier ones. Without it all still works, slower.
    let _ = stream.set_nodelay(true);
    // Boxed: what only the beginning needs is not to be held for as long as the session lasts.
    let greeted = tokio::time::timeout(PATIENCE, greet(stream, shared, metrics));
    Box::pin(place.stay(greeted)).await?.ok()?
}

/// A connection before it is a session.
struct Greeting {
    stream: Stream,
    /// Where the client is; `None` if the system does not say.
    address: Option<IpAddr>,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// Why a connection does not become a session.
enum Refusal {
    /// It is gone, or was only a cancel request.
    Silent,
    /// The client is told.
    Error(Error),
}

impl From<io::Error> for Refusal {
    fn from(_: io::Error) -> Refusal {
        Refusal::Silent
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Error(error)
    }
}

fn violation(what: impl Into<String>) -> Refusal {
    Refusal::Error(Error::new(sqlstate::PROTOCOL_VIOLATION, what))
}

async fn greet(
    stream: TcpStream,
    shared: Arc<Shared>,
    metrics: Arc<WorkerMetrics>,
) -> Option<(Session, Entry)> {
    let (input, output) = (Vec::new(), Vec::new());
    let address = stream.peer_addr().ok().map(|address| address.ip());
    let greeting = Greeting { stream: Stream::Plain(stream), address, input, output };
    let (mut greeting, packet) = greeting.first_packet(&shared).await?;
    match greeting.log_in(&packet, &shared).await {
        Ok((identity, settings)) => greeting.into_session(identity, settings, shared, metrics).await,
        Err(Refusal::Silent) => None,
        Err(Refusal::Error(error)) => {
            greeting.refuse(&error).await;
            None
        }
    }
}

impl Greeting {
    /// Negotiates TLS and takes cancel requests; answers the start-up packet.
    async fn first_packet(mut self, shared: &Shared) -> Option<(Greeting, Vec<u8>)> {
        loop {
            let packet = self.read_packet().await.ok()?;
            if CancelRequest::is_cancel_request_packet(&packet) {
                cancel(&packet, shared);
                // Some clients wait for the end of TLS, not only of the connection.
                let _ = self.stream.shutdown().await;
                return None;
            }
            let wants_tls = SslRequest::is_ssl_request_packet(&packet);
            if !wants_tls && !GssEncRequest::is_gss_enc_request_packet(&packet) {
                return Some((self, packet));
            }
            self = self.negotiate(wants_tls, shared).await?;
        }
    }

    async fn negotiate(self, wants_tls: bool, shared: &Shared) -> Option<Greeting> {
        // Bytes that came with the request were not encrypted: to take them for the client's would let a stranger in
        // between put words into its mouth.
        if !self.input.is_empty() {
            return None;
        }
        let Greeting { stream, address, input, output } = self;
        let stream = match (stream, &shared.config.tls) {
            (Stream::Plain(mut stream), Some(tls)) if wants_tls => {
                stream.write_all(b"S").await.ok()?;
                Stream::Tls(Box::new(TlsAcceptor::from(tls.clone()).accept(stream).await.ok()?))
            }
            (mut stream, _) => {
                stream.write_all(b"N").await.ok()?;
                stream
            }
        };
        Some(Greeting { stream, address, input, output })
    }

    /// Reads a packet that has a length but no kind.
    async fn read_packet(&mut self) -> io::Result<Vec<u8>> {
        self.fill(8).await?;
        let length = (&self.input[..4]).get_u32() as usize;
        if !(8..=PACKET_BYTES).contains(&length) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.fill(length).await?;
        Ok(self.input.drain(..length).collect())
    }

    async fn fill(&mut self, bytes: usize) -> io::Result<()> {
        while self.input.len() < bytes {
            if self.stream.read_buf(&mut self.input).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    async fn send(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.output).await?;
        self.stream.flush().await?;
        self.output.clear();
        Ok(())
    }

    async fn refuse(&mut self, error: &Error) {
        backend::error(&mut self.output, error, Severity::Fatal);
        if self.send().await.is_ok() {
            let _ = self.stream.shutdown().await; // the client may be gone already
        }
    }

    /// From the start-up packet to who the client is.
    async fn log_in(&mut self, packet: &[u8], shared: &Shared) -> Result<(Identity, Settings), Refusal> {
        let startup =
            Startup::decode(&mut BytesMut::from(packet), &DecodeContext::new(ProtocolVersion::PROTOCOL3_0))
                .ok()
                .flatten()
                .ok_or_else(|| violation("unsupported frontend protocol, or a malformed start-up packet"))?;
        self.negotiate_version(&startup);
        let parameters = startup.parameters;
        let user = parameters.get("user").filter(|user| !user.is_empty());
        let user = user.ok_or_else(|| {
            Error::new(sqlstate::INVALID_AUTHORIZATION, "no PostgreSQL user name specified in startup packet")
        })?;
        let account = self.authenticate(user, shared).await?;
        // Nobody has an account who needs none.
        let superuser = account.as_ref().is_none_or(|account| account.superuser);
        let database = parameters.get("database").filter(|name| !name.is_empty()).unwrap_or(user);
        let (tenant, access) = tenant(database, user, shared)?;
        let limits = shared.catalog.live_limits(&tenant);
        let (user, address) = (user.clone(), self.address);
        let identity = Identity { user, address, account, superuser, access, tenant, limits };
        let reads_beside = shared.engine.reads_beside();
        let settings = settings(&parameters, fixed_settings(&identity, reads_beside))?;
        Ok((identity, settings))
    }

    /// A client that wants a newer protocol, or options of one, is told that it gets 3.0.
    fn negotiate_version(&mut self, startup: &Startup) {
        let unknown: Vec<&String> =
            startup.parameters.keys().filter(|name| name.starts_with("_pq_.")).collect();
        if startup.protocol_number_minor == 0 && unknown.is_empty() {
            return;
        }
        let length = 12 + unknown.iter().map(|name| name.len() + 1).sum::<usize>();
        self.output.put_u8(b'v');
        self.output.put_u32(length as u32);
        self.output.put_u32(0); // the newest minor version that we speak
        self.output.put_u32(unknown.len() as u32);
        for name in unknown {
            self.output.put_slice(name.as_bytes());
            self.output.put_u8(0);
        }
    }

    /// Lets the client prove who it is; answers that, or nothing where all are let in.
    async fn authenticate(&mut self, name: &str, shared: &Shared) -> Result<Option<Arc<User>>, Refusal> {
        if shared.config.insecure {
            auth::put(&mut self.output, &Authentication::Ok)?;
            return Ok(None);
        }
        let user = shared.catalog.user(name);
        let salt_key = shared.catalog.salt_key().unwrap_or_else(|| shared.fallback_salt_key.clone());
        let mut exchange = Exchange::begin(name, user.as_deref(), &salt_key, &mut self.output)?;
        loop {
            self.send().await?;
            let body = self.read_password().await?;
            if self.step(&mut exchange, &body, name, shared).await? == Step::Authenticated {
                // Nobody proves to be somebody who is not there.
                let user =
                    user.ok_or_else(|| Error::new(sqlstate::INVALID_PASSWORD, "there is no such user"))?;
                return Ok(Some(user));
            }
        }
    }

    /// Goes on with the exchange; after failures the client's proof, right or wrong, has to wait for its turn.
    async fn step(
        &mut self,
        exchange: &mut Exchange,
        body: &[u8],
        user: &str,
        shared: &Shared,
    ) -> Result<Step> {
        if !exchange.is_challenged() {
            return exchange.step(body, &mut self.output);
        }
        let who = Who { user: Some(user), address: self.address };
        let turn = shared.failures.turn(who).await.map_err(|Crowded| crowded(user))?;
        let step = exchange.step(body, &mut self.output);
        if step.as_ref().is_err_and(|error| error.state() == sqlstate::INVALID_PASSWORD) {
            turn.failed(Instant::now());
            let actor = Actor { user: Some(user), address: self.address };
            shared.journal().gather(Event::new(Kind::LoginFailed).by(actor));
        }
        step
    }

    /// Reads a message of kind `p`.
    async fn read_password(&mut self) -> Result<Vec<u8>, Refusal> {
        loop {
            match frontend::frame(&self.input, PACKET_BYTES).map_err(|malformed| violation(malformed.0))? {
                Some(frame) if frame.kind == b'p' => {
                    let (body, size) = (frame.body.to_vec(), frame.size);
                    self.input.drain(..size);
                    return Ok(body);
                }
                Some(_) => return Err(violation("expected an answer to the password request")),
                None => self.fill(self.input.len() + 1).await?,
            }
        }
    }

    /// Makes the session and tells the client what it needs to know.
    async fn into_session(
        mut self,
        identity: Identity,
        mut settings: Settings,
        shared: Arc<Shared>,
        metrics: Arc<WorkerMetrics>,
    ) -> Option<(Session, Entry)> {
        let mut engine = shared.engine.session(identity.tenant.partition);
        engine.set_tenant(&identity.tenant.name);
        let most = most_sessions(&identity);
        let who = activity::Who {
            user: identity.user.clone(),
            address: self.address,
            since_ms: activity::now_ms(),
        };
        let (partition, leaves) = (identity.tenant.partition, left_places(&identity));
        let entered = shared.registry.enter(partition, most, leaves, engine.canceller(), who);
        let entry = match entered
            .map_err(|full| no_room(full, &identity, most))
            .and_then(|entry| still_there(&identity, &shared).map(|()| entry))
        {
            Ok(entry) => entry,
            Err(error) => {
                engine.close().await;
                self.refuse(&error).await;
                return None;
            }
        };
        engine.set_may_write(identity.access == Access::ReadWrite);
        settings.take_reports();
        for (name, value) in settings.reported() {
            backend::parameter_status(&mut self.output, name, value);
        }
        let handle = entry.handle.clone();
        handle.activity.name(settings.get("application_name").unwrap_or_default());
        let key = BackendKeyData::new(handle.pid, SecretKey::I32(handle.secret()));
        let told = auth::put(&mut self.output, &key).is_ok();
        backend::ready(&mut self.output, TransactionStatus::Idle);
        if !told || self.send().await.is_err() {
            engine.close().await;
            return None;
        }
        let wire = Wire::new(self.stream, self.input);
        let link =
            Link { engine, wire, handle, timeout: None, idle_timeout: None, implicit: false, noted: false };
        Some((Session::new(link, shared, metrics, identity, settings), entry))
    }
}

fn crowded(user: &str) -> Error {
    let message = format!("too many logins of user \"{user}\" have failed lately, and others wait already");
    Error::new(sqlstate::TOO_MANY_CONNECTIONS, message).hint(
        "Try again in a minute. Who keeps trying a wrong password is an event: SELECT * FROM fulmar.events.",
    )
}

fn cancel(packet: &[u8], shared: &Shared) {
    let context = DecodeContext::new(ProtocolVersion::PROTOCOL3_0);
    // Such a packet has exactly 16 bytes in the protocol that we speak.
    if packet.len() == 16
        && let Ok(Some(request)) = CancelRequest::decode(&mut BytesMut::from(packet), &context)
        && let Some(secret) = request.secret_key.as_i32()
    {
        shared.registry.cancel(request.pid, secret);
    }
}

/// The parameters that say who the client is and what it may set.
fn fixed_settings(identity: &Identity, reads_beside: bool) -> Settings {
    let mut settings = Settings::default();
    settings.set_bounds(&identity.limits, identity.access);
    settings.set_fixed("is_superuser", if identity.superuser { "on" } else { "off" });
    settings.set_fixed("session_authorization", &identity.user);
    if reads_beside {
        settings.set_fixed("in_hot_standby", "on");
        settings.set_fixed("transaction_read_only", "on");
    }
    settings
}

/// The same with the parameters that the client sets when it connects.
fn settings(parameters: &BTreeMap<String, String>, mut settings: Settings) -> Result<Settings> {
    for (name, value) in parameters {
        match name.as_str() {
            "user" | "database" => {}
            "replication" if matches!(value.as_str(), "false" | "off" | "no" | "0") => {}
            "replication" => {
                return Err(Error::new(
                    sqlstate::FEATURE_NOT_SUPPORTED,
                    "replication connections are not supported",
                ));
            }
            "options" => {
                for (name, value) in options(value)? {
                    settings.set(&name, Some(&value))?;
                }
            }
            name if name.starts_with("_pq_.") => {}
            name => settings.set(name, Some(value))?,
        }
    }
    settings.keep_as_defaults();
    Ok(settings)
}

/// `-c name=value --name=value`; a backslash keeps a blank.
fn options(text: &str) -> Result<Vec<(String, String)>> {
    let mut words: Vec<String> = Vec::new();
    let mut word = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => word.extend(characters.next()),
            ' ' | '\t' | '\n' => words.push(std::mem::take(&mut word)),
            other => word.push(other),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    let mut options = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        let setting =
            match word.strip_prefix("--").or_else(|| word.strip_prefix("-c").filter(|rest| !rest.is_empty()))
            {
                Some(setting) => Some(setting.to_owned()),
                None if word == "-c" => words.next(),
                None => None,
            };
        let setting = setting.as_deref().and_then(|setting| setting.split_once('='));
        let (name, value) = setting.ok_or_else(|| {
            Error::new(sqlstate::INVALID_PARAMETER_VALUE, format!("invalid command-line argument: {word}"))
                .hint("options takes -c name=value.")
        })?;
        options.push((name.replace('-', "_"), value.to_owned()));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_as_libpq_passes_them() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let parsed = options("-c statement_timeout=5s  -capp.a=x\\ y --extra-float-digits=3").unwrap();
        let expected =
            [pair("statement_timeout", "5s"), pair("app.a", "x y"), pair("extra_float_digits", "3")];
        assert_eq!(parsed, expected);
        assert!(options("-c").is_err());
        assert!(options("-B 5").is_err());
    }

    #[test]
    fn parameters_of_a_client() {
        let map = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(name, value)| (name.to_string(), value.to_string()))
                .collect::<BTreeMap<_, _>>()
        };
        let parameters = map(&[("user", "anna"), ("application_name", "psql"), ("client_encoding", "UTF8")]);
        let settings = settings(&parameters, Settings::default()).unwrap();
        assert_eq!(settings.get("application_name").unwrap(), "psql");
        let refused = super::settings(&map(&[("nonsense", "1")]), Settings::default());
        assert_eq!(refused.err().map(|error| error.state()), Some("42704"));
        assert!(super::settings(&map(&[("replication", "database")]), Settings::default()).is_err());
    }
}
