//! Connection startup: TLS negotiation, authentication, and selection of the tenant.
//!
//! ```text
//! SSLRequest    -> 'S' and a TLS handshake, or 'N'
//! CancelRequest -> cancel the statement, close the connection
//! Startup: user, database, parameters -> SCRAM -> check tenant, access and limits -> session
//! ```
//!
//! Resources of unauthenticated clients are limited:
//!
//! - A packet can have up to 10,000 bytes, and the startup can take up to 60 s.
//! - The number of connections in startup is limited; the oldest are closed first
//!   ([`crate::connection_slots`]).
//! - Failed logins delay further attempts ([`crate::login_throttle`]).

mod context;
mod parameters;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, BytesMut};
use fulmar_engine::{Error, TransactionStatus, sqlstate};
use fulmar_meta::{SYSTEM_USER, User};
use fulmar_pgwire::auth::{self, ScramExchange, ScramStep};
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::protocol::frontend;
use fulmar_pgwire::wire::{Stream, Wire};
use fulmar_service::{LocalPartition, PartitionService};
use pgwire::messages::cancel::CancelRequest;
use pgwire::messages::startup::{
    Authentication, BackendKeyData, GssEncRequest, SecretKey, SslRequest, Startup,
};
use pgwire::messages::{DecodeContext, Message, ProtocolVersion};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use crate::Result;
use crate::activity;
use crate::admission::{check_tenant_exists, limit_error, partition_session_limit, reserved_slots, tenant};
use crate::cluster::Cluster;
use crate::connection_slots::ConnectionSlot;
use crate::events::{Actor, Event, Kind};
use crate::identity::Identity;
use crate::login_throttle::{LoginOrigin, TooManyFailures};
use crate::metrics::WorkerMetrics;
use crate::registry::{Handle, RegistryEntry};
use crate::relay::{self, Front, Unavailable};
use crate::session::{Link, Session};
use crate::settings::{OWNER, Settings};
pub(crate) use context::Context;
pub(crate) use parameters::fixed_settings;
use parameters::settings;

/// Maximum size of a packet before authentication.
const MAX_PACKET_BYTES: usize = 10_000;
/// Maximum duration of the startup.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a login waits for changes of the catalog by other nodes.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// A client that is connected.
pub(crate) enum Client {
    /// Its session runs here, without a cluster.
    Session(Box<Session>, RegistryEntry),
    /// Its session runs at the owner of its database.
    Front(Box<Front>),
}

/// Performs the startup of a connection. Returns the session, or `None` if the connection does not
/// become one. Until then the connection holds its slot.
pub(crate) async fn serve(
    stream: TcpStream,
    slot: ConnectionSlot,
    context: Arc<Context>,
    metrics: Arc<WorkerMetrics>,
) -> Option<Client> {
    // Disables Nagle's algorithm, so that small responses are sent immediately. A failure only
    // costs latency.
    let _ = stream.set_nodelay(true);
    // Boxed, so that the memory of the startup is freed before the session starts.
    let startup = tokio::time::timeout(STARTUP_TIMEOUT, start(stream, context, metrics));
    Box::pin(slot.run(startup)).await?.ok()?
}

/// A connection in startup.
struct PendingConnection {
    stream: Stream,
    /// The client's address. `None` if the operating system does not report it.
    address: Option<IpAddr>,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// Why a connection does not become a session.
enum Refusal {
    /// The client has disconnected, or sent only a cancel request.
    Silent,
    /// The error is reported to the client.
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

/// Waits for the changes of the catalog that other nodes of the cluster have made, if the catalog in
/// memory lacks the user or the database.
async fn catch_up(user: &str, database: &str, context: &Context) {
    let is_known = (context.insecure || context.catalog.user(user).is_some())
        && context.catalog.tenant(database).is_some();
    if is_known || context.cluster.is_none() {
        return;
    }
    match tokio::time::timeout(CATCH_UP_TIMEOUT, context.catalog.catch_up()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot read the newest catalog for a login"),
        Err(_) => tracing::warn!("the metadata store does not answer; a login uses the catalog in memory"),
    }
}

fn protocol_violation(message: impl Into<String>) -> Refusal {
    Refusal::Error(Error::new(sqlstate::PROTOCOL_VIOLATION, message))
}

/// Performs the startup without the timeout.
async fn start(stream: TcpStream, context: Arc<Context>, metrics: Arc<WorkerMetrics>) -> Option<Client> {
    let (input, output) = (Vec::new(), Vec::new());
    let address = stream.peer_addr().ok().map(|address| address.ip());
    let connection = PendingConnection { stream: Stream::Plain(stream), address, input, output };
    let (mut connection, packet) = connection.startup_packet(&context).await?;
    match connection.log_in(&packet, &context).await {
        Ok((identity, settings)) => connection.into_client(identity, settings, context, metrics).await,
        Err(Refusal::Silent) => None,
        Err(Refusal::Error(error)) => {
            connection.refuse(&error).await;
            None
        }
    }
}

/// A part of the node that runs statements as the superuser [`SYSTEM_USER`].
pub(crate) struct InternalClient {
    pub(crate) database: String,
    /// The address of the client of that part, for events.
    pub(crate) address: Option<IpAddr>,
    /// The parameters of the session.
    pub(crate) parameters: BTreeMap<String, String>,
    /// The connection, which speaks the client protocol after the startup.
    pub(crate) pipe: DuplexStream,
}

/// Connects a part of the node, as [`serve`] does a client, without authentication.
pub(crate) async fn serve_internal(
    client: InternalClient,
    context: Arc<Context>,
    metrics: Arc<WorkerMetrics>,
) -> Option<Client> {
    let InternalClient { database, address, parameters, pipe } = client;
    let (input, output) = (Vec::new(), Vec::new());
    let mut connection = PendingConnection { stream: Stream::Pipe(pipe), address, input, output };
    let found =
        tenant(&database, SYSTEM_USER, &context.catalog, context.insecure).and_then(|(tenant, access)| {
            let (user, account) = (SYSTEM_USER.to_owned(), context.catalog.user(SYSTEM_USER));
            let limits = context.catalog.live_limits(&tenant);
            let identity = Identity { user, address, account, superuser: true, access, tenant, limits };
            let fixed = fixed_settings(&identity, context.engine.is_replica());
            Ok((identity, settings(&parameters, fixed)?))
        });
    match found {
        Ok((identity, settings)) => connection.into_client(identity, settings, context, metrics).await,
        Err(error) => {
            connection.refuse(&error).await;
            None
        }
    }
}

impl PendingConnection {
    /// Starts the session of an authenticated client, here or at the owner of its database.
    async fn into_client(
        self,
        identity: Identity,
        settings: Settings,
        context: Arc<Context>,
        metrics: Arc<WorkerMetrics>,
    ) -> Option<Client> {
        match context.cluster.clone() {
            None => self
                .into_session(identity, settings, context, metrics)
                .await
                .map(|(session, entry)| Client::Session(session, entry)),
            Some(cluster) => self.into_front(identity, settings, context, cluster).await,
        }
    }

    /// Negotiates TLS and handles cancel requests. Returns the startup packet.
    async fn startup_packet(mut self, context: &Arc<Context>) -> Option<(PendingConnection, Vec<u8>)> {
        loop {
            let packet = self.read_packet().await.ok()?;
            if CancelRequest::is_cancel_request_packet(&packet) {
                cancel(&packet, context);
                // Some clients wait for the end of the TLS session, not only of the connection.
                let _ = self.stream.shutdown().await;
                return None;
            }
            let wants_tls = SslRequest::is_ssl_request_packet(&packet);
            if !wants_tls && !GssEncRequest::is_gss_enc_request_packet(&packet) {
                return Some((self, packet));
            }
            self = self.negotiate(wants_tls, context).await?;
        }
    }

    async fn negotiate(self, wants_tls: bool, context: &Context) -> Option<PendingConnection> {
        // Bytes that follow the request in plain text are rejected. Accepting them would let a
        // man-in-the-middle inject messages before the TLS handshake (CVE-2021-23214).
        if !self.input.is_empty() {
            return None;
        }
        let PendingConnection { stream, address, input, output } = self;
        let stream = match (stream, &context.tls) {
            (Stream::Plain(mut stream), Some(tls)) if wants_tls => {
                stream.write_all(b"S").await.ok()?;
                Stream::Tls(Box::new(TlsAcceptor::from(tls.clone()).accept(stream).await.ok()?))
            }
            (mut stream, _) => {
                stream.write_all(b"N").await.ok()?;
                stream
            }
        };
        Some(PendingConnection { stream, address, input, output })
    }

    /// Reads a packet that has a length but no type byte.
    async fn read_packet(&mut self) -> io::Result<Vec<u8>> {
        self.fill(8).await?;
        let length = (&self.input[..4]).get_u32() as usize;
        if !(8..=MAX_PACKET_BYTES).contains(&length) {
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

    /// Authenticates the client of a startup packet. Returns its identity and parameters.
    async fn log_in(&mut self, packet: &[u8], context: &Context) -> Result<(Identity, Settings), Refusal> {
        let startup =
            Startup::decode(&mut BytesMut::from(packet), &DecodeContext::new(ProtocolVersion::PROTOCOL3_0))
                .ok()
                .flatten()
                .ok_or_else(|| {
                    protocol_violation("unsupported frontend protocol or invalid startup packet")
                })?;
        self.negotiate_version(&startup);
        let parameters = startup.parameters;
        let user = parameters.get("user").filter(|user| !user.is_empty());
        let user = user.ok_or_else(|| {
            Error::new(sqlstate::INVALID_AUTHORIZATION, "no PostgreSQL user name specified in startup packet")
        })?;
        let database = parameters.get("database").filter(|name| !name.is_empty()).unwrap_or(user);
        catch_up(user, database, context).await;
        let account = self.authenticate(user, context).await?;
        // Without authentication there is no account, and every client is a superuser.
        let superuser = account.as_ref().is_none_or(|account| account.superuser);
        let (tenant, access) = tenant(database, user, &context.catalog, context.insecure)?;
        let limits = context.catalog.live_limits(&tenant);
        let (user, address) = (user.clone(), self.address);
        let identity = Identity { user, address, account, superuser, access, tenant, limits };
        let reads_beside = context.engine.is_replica();
        let settings = settings(&parameters, fixed_settings(&identity, reads_beside))?;
        Ok((identity, settings))
    }

    /// Responds with NegotiateProtocolVersion to a client that requests a newer protocol or
    /// protocol options. Only version 3.0 is supported.
    fn negotiate_version(&mut self, startup: &Startup) {
        let unknown: Vec<&String> =
            startup.parameters.keys().filter(|name| name.starts_with("_pq_.")).collect();
        if startup.protocol_number_minor == 0 && unknown.is_empty() {
            return;
        }
        let length = 12 + unknown.iter().map(|name| name.len() + 1).sum::<usize>();
        self.output.put_u8(b'v');
        self.output.put_u32(length as u32);
        self.output.put_u32(0); // the newest supported minor version
        self.output.put_u32(unknown.len() as u32);
        for name in unknown {
            self.output.put_slice(name.as_bytes());
            self.output.put_u8(0);
        }
    }

    /// Authenticates the client. Returns its user, or `None` if authentication is disabled.
    async fn authenticate(&mut self, name: &str, context: &Context) -> Result<Option<Arc<User>>, Refusal> {
        if context.insecure {
            auth::put_message(&mut self.output, &Authentication::Ok)?;
            return Ok(None);
        }
        let user = context.catalog.user(name);
        let salt_key = context.catalog.salt_key().unwrap_or_else(|| context.fallback_salt_key.clone());
        let verifier = user.as_ref().and_then(|user| user.verifier.as_ref());
        let mut exchange = ScramExchange::begin(name, verifier, &salt_key, &mut self.output)?;
        loop {
            self.send().await?;
            let body = self.read_password().await?;
            if self.step(&mut exchange, &body, name, context).await? == ScramStep::Authenticated {
                // Not reachable: authentication as a user that does not exist always fails.
                let user =
                    user.ok_or_else(|| Error::new(sqlstate::INVALID_PASSWORD, "user does not exist"))?;
                return Ok(Some(user));
            }
        }
    }

    /// Performs a step of the authentication exchange. After failed logins, the check of the
    /// client's proof is delayed, whether the proof is right or wrong.
    async fn step(
        &mut self,
        exchange: &mut ScramExchange,
        body: &[u8],
        user: &str,
        context: &Context,
    ) -> Result<ScramStep> {
        if !exchange.is_challenged() {
            return exchange.step(body, &mut self.output);
        }
        let who = LoginOrigin { user: Some(user), address: self.address };
        let attempt =
            context.login_throttle.wait_for_slot(who).await.map_err(|TooManyFailures| throttled(user))?;
        let step = exchange.step(body, &mut self.output);
        if step.as_ref().is_err_and(|error| error.state() == sqlstate::INVALID_PASSWORD) {
            attempt.failed(Instant::now());
            let actor = Actor { user: Some(user), address: self.address };
            context.event_log.record_aggregated(Event::new(Kind::LoginFailed).by(actor));
        }
        step
    }

    /// Reads a message of kind `p`.
    async fn read_password(&mut self) -> Result<Vec<u8>, Refusal> {
        loop {
            let frame = frontend::frame(&self.input, MAX_PACKET_BYTES);
            match frame.map_err(|malformed| protocol_violation(malformed.0))? {
                Some(frame) if frame.kind == b'p' => {
                    let (body, size) = (frame.body.to_vec(), frame.size);
                    self.input.drain(..size);
                    return Ok(body);
                }
                Some(_) => return Err(protocol_violation("expected password response")),
                None => self.fill(self.input.len() + 1).await?,
            }
        }
    }

    /// Creates the session, and sends the parameters, the cancellation key and ReadyForQuery.
    async fn into_session(
        mut self,
        identity: Identity,
        mut settings: Settings,
        context: Arc<Context>,
        metrics: Arc<WorkerMetrics>,
    ) -> Option<(Box<Session>, RegistryEntry)> {
        let mut partition = LocalPartition::new(context.engine.clone(), identity.tenant.partition);
        partition.session_mut().set_tenant(&identity.tenant.name);
        let partition_limit = partition_session_limit(&identity);
        let who = activity::SessionIdentity {
            user: identity.user.clone(),
            address: self.address,
            since_ms: activity::now_ms(),
        };
        let (id, reserved_slots) = (identity.tenant.partition, reserved_slots(&identity));
        let entered = context.registry.admit(id, partition_limit, reserved_slots, partition.canceller(), who);
        let entry = match entered
            .map_err(|full| limit_error(full, &identity, partition_limit))
            .and_then(|entry| check_tenant_exists(&identity, &context.catalog).map(|()| entry))
        {
            Ok(entry) => entry,
            Err(error) => {
                partition.close().await;
                self.refuse(&error).await;
                return None;
            }
        };
        partition.session_mut().set_writes(identity.writes(None));
        settings.take_reports();
        let handle = entry.handle.clone();
        handle.activity.set_application(settings.get("application_name").unwrap_or_default());
        if self.greet(&settings, &handle).await.is_none() {
            partition.close().await;
            return None;
        }
        let wire = Wire::new(self.stream, self.input);
        let link = Link::new(partition, wire, handle, None);
        let session = Session::new(link, context.sessions.clone(), metrics, identity, settings);
        Some((Box::new(session), entry))
    }

    /// Connects the client to a session at the owner of its database, and greets it.
    async fn into_front(
        mut self,
        identity: Identity,
        settings: Settings,
        context: Arc<Context>,
        cluster: Arc<dyn Cluster>,
    ) -> Option<Client> {
        let id = identity.tenant.partition;
        let who = activity::SessionIdentity {
            user: identity.user.clone(),
            address: self.address,
            since_ms: activity::now_ms(),
        };
        let canceller = context.engine.session(id).canceller();
        let entry = match context.registry.admit_front(id, reserved_slots(&identity), canceller, who) {
            Ok(entry) => entry,
            Err(full) => {
                self.refuse(&limit_error(full, &identity, usize::MAX)).await;
                return None;
            }
        };
        let handle = entry.handle.clone();
        // The greeting is sent when the session is there: a refusal is the answer to the startup.
        let opened = relay::open_front(entry, identity, settings.save(), context, cluster).await;
        match opened {
            Ok((owner, opened)) => {
                backend::parameter_status(&mut self.output, OWNER, &owner);
                self.greet(&settings, &handle).await?;
                Some(Client::Front(Box::new(opened(Wire::new(self.stream, self.input)))))
            }
            Err(Unavailable::Error(error)) => {
                self.refuse(&error).await;
                None
            }
            Err(Unavailable::Message(message)) => {
                self.output.extend_from_slice(&message);
                if self.send().await.is_ok() {
                    let _ = self.stream.shutdown().await; // the client may be gone already
                }
                None
            }
        }
    }

    /// Sends the parameters, the cancellation key and ReadyForQuery.
    async fn greet(&mut self, settings: &Settings, handle: &Handle) -> Option<()> {
        for (name, value) in settings.reported() {
            backend::parameter_status(&mut self.output, name, value);
        }
        let key = BackendKeyData::new(handle.pid, SecretKey::I32(handle.secret()));
        auth::put_message(&mut self.output, &key).ok()?;
        backend::ready(&mut self.output, TransactionStatus::Idle);
        self.send().await.ok()
    }
}

fn throttled(user: &str) -> Error {
    let message = format!("too many failed login attempts for user \"{user}\"");
    Error::new(sqlstate::TOO_MANY_CONNECTIONS, message)
        .detail("Other login attempts of this user are already waiting.")
        .hint("Try again in a minute. The table fulmar.events shows the addresses of failed logins.")
}

fn cancel(packet: &[u8], gateway: &Arc<Context>) {
    let context = DecodeContext::new(ProtocolVersion::PROTOCOL3_0);
    // In protocol version 3.0 the packet has exactly 16 bytes.
    if packet.len() == 16
        && let Ok(Some(request)) = CancelRequest::decode(&mut BytesMut::from(packet), &context)
        && let Some(secret) = request.secret_key.as_i32()
    {
        relay::cancel(gateway, request.pid, secret);
    }
}
