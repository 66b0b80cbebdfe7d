//! A client's session: reads protocol messages, executes them and sends the responses.
//!
//! Each session is one loop ([`Session::serve`]) on one worker. Between two messages it can migrate
//! to another worker:
//!
//! ```text
//!      +--> read: one recv; idle sessions wait here and hold no buffer
//!      |       v
//!      |    each complete message in the buffer, in order:
//!      |       Query                      -> simple    several statements, one transaction
//!      |       Parse Bind Describe
//!      |         Execute Close            -> extended  responses are collected in `output`
//!      |       CopyData CopyDone CopyFail -> copy
//!      |       v
//!      +--- Sync, end of a Query, Flush: one send
//! ```
//!
//! - A statement of the extended protocol that is directly followed by Sync is autocommitted
//!   ([`Scope::Auto`]). Otherwise it joins the implicit transaction that Sync ends.
//! - After an error in the extended protocol, messages are skipped until Sync.

mod command;
mod copy;
mod copy_database;
mod copy_out;
mod extended;
mod held;
mod limits;
mod link;
mod look_back;
mod portals;
mod primary_key;
mod receive;
mod rights;
pub(crate) mod rows;
mod settings;
mod simple;
mod slow;
mod statements;

use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::ready;
use std::time::Instant;

use fulmar_engine::{
    CommandTag, Completion, Error, Scope, TemporarySpace, TransactionStatus, Value, sqlstate,
};
use fulmar_meta::{Access, LiveLimits, SYSTEM_PARTITION, Tenant, User};
use tokio::net::TcpStream;
use tokio::sync::mpsc::OwnedPermit;

pub(crate) use link::Link;
pub(crate) use settings::Settings;
pub(crate) use slow::SlowLog;

use crate::events::Actor;
use crate::fair::Gate;
use crate::gateway::Shared;
use crate::metrics::WorkerMetrics;
use crate::protocol::backend::{self, Severity};
use crate::protocol::frontend::{self, Malformed, Message};
use crate::tenants::TenantStats;
use crate::wire::{Closed, give_buffer, take_buffer};
use crate::worker::{Arrival, Post};
use copy::CopyIn;
use held::{Account, Share};
use rows::{Layout, Output, RowWriter, Spill};
use statements::{Plan, Statements};

/// Maximum size of a message. A message must fit in memory; a client that sends a larger one is
/// disconnected.
pub(crate) const MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// The responses of a pipeline are sent before its end once they exceed this size.
const OUTPUT_BYTES: usize = 64 * 1024;

/// The identity of a session: its user, client address and tenant.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) user: String,
    /// `None` if the operating system does not report the peer address.
    pub(crate) address: Option<IpAddr>,
    /// The user's catalog record at authentication. `None` if authentication is disabled.
    pub(crate) account: Option<Arc<User>>,
    pub(crate) superuser: bool,
    /// The user's access to the tenant.
    pub(crate) access: Access,
    pub(crate) tenant: Arc<Tenant>,
    /// The tenant's current limits.
    pub(crate) limits: Arc<LiveLimits>,
}

impl Identity {
    /// The actor to record in events that the session causes.
    pub(crate) fn actor(&self) -> Actor<'_> {
        Actor { user: Some(&self.user), address: self.address }
    }
}

/// Why a session ends.
#[derive(Debug)]
pub(crate) enum End {
    /// The client sent Terminate, or disconnected.
    Client,
    /// The server shuts down, or the session was terminated.
    Server,
    /// The client violated the protocol.
    Malformed(Malformed),
    /// A fatal error.
    Fatal(Error),
}

/// Why a session leaves its worker.
pub(crate) enum Leave {
    Ends(End),
    /// The session migrates to another worker, where a queue slot is reserved.
    Moves(OwnedPermit<Arrival>),
}

impl From<Closed> for End {
    fn from(closed: Closed) -> End {
        match closed {
            Closed::Client => End::Client,
            Closed::Server => End::Server,
            Closed::Idle => End::Fatal(
                Error::new(
                    sqlstate::IDLE_IN_TRANSACTION,
                    "terminating connection due to idle-in-transaction timeout",
                )
                .hint(
                    "Commit or roll back idle transactions, or increase idle_in_transaction_session_timeout.",
                ),
            ),
            Closed::Stalled => End::Fatal(receive::stalled()),
        }
    }
}

/// Why the handling of a message failed.
#[derive(Debug)]
enum Fault {
    /// An error to report to the client. The session continues.
    Statement(Error),
    /// The session ends.
    End(End),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        match error.state() {
            sqlstate::ADMIN_SHUTDOWN | sqlstate::DATABASE_DROPPED => Fault::End(End::Fatal(error)),
            _ => Fault::Statement(error),
        }
    }
}

impl From<End> for Fault {
    fn from(end: End) -> Fault {
        Fault::End(end)
    }
}

impl From<Closed> for Fault {
    fn from(closed: Closed) -> Fault {
        Fault::End(closed.into())
    }
}

/// A client's session.
pub(crate) struct Session {
    link: Link,
    /// Responses that have not been sent.
    output: Output,
    /// The memory charge for the message that is being received or handled.
    received: Share,
    /// The receive progress of that message.
    progress: receive::Progress,
    /// A rejected message that is discarded while it arrives.
    rejected: Option<Box<receive::Rejected>>,
    shared: Arc<Shared>,
    metrics: Arc<WorkerMetrics>,
    identity: Identity,
    stats: Arc<TenantStats>,
    /// The generation of the tenant's limits that are applied.
    limits_seen: u64,
    /// The generation of the access rights that were checked.
    rights_seen: u64,
    settings: Settings,
    /// The memory charge for `settings`.
    settings_share: Share,
    statements: Statements,
    /// Charges temporary files of results to the tenant.
    temporary: TemporarySpace,
    /// True after an error in the extended protocol: messages are skipped until Sync.
    skipping: bool,
    copy: Option<Box<CopyIn>>,
}

/// The outcome of running a plan.
enum Ran {
    /// All rows have been written to the output.
    Done {
        tag: CommandTag,
        rows: u64,
        /// The spilled part of the rows, and its position in the output.
        spill: Option<(usize, Spill)>,
    },
    /// A COPY has begun. The client sends the data next.
    Copying,
}

impl Session {
    /// Creates the session of an authenticated client.
    pub(crate) fn new(
        link: Link,
        shared: Arc<Shared>,
        metrics: Arc<WorkerMetrics>,
        identity: Identity,
        settings: Settings,
    ) -> Session {
        let stats = shared.tenants.of(identity.tenant.partition);
        let memory = shared.memory.of(identity.tenant.partition);
        let temporary = link.engine.temporary_space();
        let mut session = Session {
            link,
            output: Output::default(),
            received: Share::default(),
            progress: receive::Progress::default(),
            rejected: None,
            shared,
            metrics,
            identity,
            stats,
            limits_seen: 0,
            rights_seen: 0,
            settings,
            settings_share: Share::default(),
            statements: Statements::new(Account::of_memory(memory)),
            temporary,
            skipping: false,
            copy: None,
        };
        session.apply_settings();
        session
    }

    /// Ends the session: notifies the client and releases all resources.
    pub(crate) async fn end(mut self, end: End) {
        // An incomplete message is dropped. Its memory is released before the error is sent, so
        // that other sessions do not wait for this client to receive the error.
        self.link.wire.input = Vec::new();
        self.received.release();
        if let Some(mut copy) = self.copy.take() {
            copy.give_up(&self).await;
        }
        self.send_shutdown_notice(end).await;
        self.link.engine.close().await;
        self.shared.advisory.unlock_all(self.link.handle.pid);
        self.link.wire.shutdown().await;
    }

    /// Detaches the socket for the migration to another worker. `None` if it cannot be detached.
    pub(crate) fn depart(&mut self) -> Option<std::net::TcpStream> {
        self.link.wire.detach()
    }

    /// Attaches the socket after the migration to a worker.
    pub(crate) fn arrive(&mut self, stream: Option<TcpStream>, metrics: Arc<WorkerMetrics>) {
        self.link.wire.attach(stream);
        self.metrics = metrics;
    }

    /// Serves the client until the session ends or migrates.
    pub(crate) async fn serve(&mut self, post: &Post) -> Leave {
        let stats = self.stats.clone();
        let mut gate = Gate::new(self.identity.tenant.partition, &self.identity.limits);
        loop {
            // Not boxed although its state is large: boxing made no measurable difference with 500
            // tenants.
            let handled = {
                let mut work = pin!(self.handle_input());
                poll_fn(|cx| {
                    let began = Instant::now();
                    post.crew.look(post.number, began);
                    ready!(gate.poll_pass(cx, began));
                    let polled = work.as_mut().poll(cx);
                    let time = began.elapsed();
                    gate.worked(time);
                    // Updated after each poll, so that statistics include running statements.
                    stats.worked(time);
                    polled
                })
                .await
            };
            match handled {
                Ok(true) => continue,
                Ok(false) => {}
                Err(end) => return Leave::Ends(end),
            }
            if let Some(slot) = self.migration_slot(post) {
                return Leave::Moves(slot);
            }
            let stall = self.stall();
            match self.link.read(stall).await {
                Ok(count) => self.metrics.received(count),
                Err(closed) => return Leave::Ends(closed.into()),
            }
        }
    }

    /// A queue slot at another worker, if the session should migrate there and is idle.
    fn migration_slot(&self, post: &Post) -> Option<OwnedPermit<Arrival>> {
        let slot = post.elsewhere(self.link.handle.pid)?;
        (self.link.is_at_rest() && self.copy.is_none()).then_some(slot)
    }

    /// Sends a FATAL error with the reason why the session ends, unless the client ended it.
    async fn send_shutdown_notice(&mut self, end: End) {
        let error = match end {
            End::Client => return,
            End::Server => {
                Error::new(sqlstate::ADMIN_SHUTDOWN, "terminating connection due to administrator command")
            }
            End::Malformed(Malformed(message)) => Error::new(sqlstate::PROTOCOL_VIOLATION, message),
            End::Fatal(error) => error,
        };
        backend::error(&mut self.output, &error, Severity::Fatal);
        let _ = self.link.send(&self.output).await; // the client may have disconnected already
    }

    /// Handles all complete messages that have been received. Returns true if more bytes arrived
    /// meanwhile.
    async fn handle_input(&mut self) -> Result<bool, End> {
        if self.output.capacity() == 0 {
            self.output = take_buffer().into();
        }
        let mut input = std::mem::take(&mut self.link.wire.input);
        let mut used = 0;
        let mut outcome = loop {
            if self.rejected.is_some() {
                let outcome = Box::pin(self.discard(&input, &mut used)).await;
                if outcome.is_err() || used == input.len() {
                    break outcome;
                }
            }
            match frontend::frame(&input[used..], MESSAGE_BYTES) {
                Ok(None) => break Ok(()),
                Err(malformed) => break Err(End::Malformed(malformed)),
                Ok(Some(frame)) => {
                    used += frame.size;
                    let outcome = match frontend::message(&frame) {
                        Ok(message) => self.handle(message, &input[used..]).await,
                        Err(malformed) => Err(End::Malformed(malformed)),
                    };
                    if outcome.is_err() {
                        break outcome;
                    }
                }
            }
        };
        input.drain(..used); // the rest is an incomplete message
        if used > 0 && self.received.bytes() > 0 {
            self.received.release();
            receive::shrink(&mut input);
        }
        if outcome.is_ok() && !input.is_empty() {
            outcome = Box::pin(self.admit(&mut input)).await;
        }
        // Bytes that arrived while statements ran follow the incomplete message.
        let ahead = std::mem::replace(&mut self.link.wire.input, input);
        let more = !ahead.is_empty();
        self.link.wire.input.extend_from_slice(&ahead);
        give_buffer(ahead);
        if self.output.is_empty() {
            give_buffer(std::mem::take(&mut self.output).into_parts().0);
        }
        outcome.map(|()| more)
    }

    async fn handle(&mut self, message: Message<'_>, next: &[u8]) -> Result<(), End> {
        self.follow_rights()?;
        self.follow_limits();
        let fault = match message {
            Message::Terminate => return Err(End::Client),
            Message::CopyData(bytes) => Box::pin(self.copy_data(bytes)).await,
            Message::CopyDone => Box::pin(self.copy_done()).await,
            Message::CopyFail { reason } => self.copy_failed(reason).await,
            Message::Flush | Message::Sync if self.copy.is_some() => Ok(()),
            _ if self.copy.is_some() => self.copy_interrupted().await,
            Message::Sync => self.sync().await,
            Message::Flush => self.flush().await.map_err(Fault::from),
            _ if self.skipping => Ok(()),
            Message::Query { sql } => Box::pin(self.query(sql)).await,
            extended => match self.extended(extended, next).await {
                Err(Fault::Statement(error)) => {
                    self.extended_failed(&error);
                    Ok(())
                }
                other => other,
            },
        };
        match fault {
            Ok(()) => Ok(()),
            Err(Fault::End(end)) => Err(end),
            Err(Fault::Statement(error)) => {
                self.report(&error);
                Ok(())
            }
        }
    }

    /// Writes an error response, and counts the error.
    fn report(&mut self, error: &Error) {
        self.metrics.failed();
        self.stats.failed();
        backend::error(&mut self.output, error, Severity::Error);
    }

    /// Sends the collected responses.
    async fn flush(&mut self) -> Result<(), Closed> {
        self.metrics.sent(self.output.len());
        self.link.send(&self.output).await?;
        self.output.clear();
        Ok(())
    }

    /// Sends the collected responses if they exceed [`OUTPUT_BYTES`] or their memory cannot be
    /// charged.
    async fn flush_if_large(&mut self) -> Result<(), Closed> {
        let is_large = self.output.len() > OUTPUT_BYTES || !self.output.grow(0, self.statements.memory());
        if is_large { self.flush().await } else { Ok(()) }
    }

    /// Sends the spilled part of a result, and the output before it.
    async fn send_spilled(&mut self, spill: Option<(usize, Spill)>) -> Result<(), Closed> {
        let Some((mark, spill)) = spill else { return Ok(()) };
        self.link.send(&self.output[..mark]).await?;
        self.output.drain(..mark);
        let (mut piece, mut sent) = (Vec::new(), 0);
        while spill.read_at(sent, &mut piece).map_err(|_| Closed::Server)? > 0 {
            self.link.send(&piece).await?;
            sent += piece.len() as u64;
            piece.clear();
        }
        Ok(())
    }

    /// Sends changed parameters and ReadyForQuery.
    async fn ready(&mut self) -> Result<(), Fault> {
        for name in self.settings.take_reports() {
            let value = self.settings.get(name).unwrap_or_default();
            backend::parameter_status(&mut self.output, name, value);
            if name == "application_name" {
                self.link.handle.activity.name(value);
            }
        }
        let status = self.link.status();
        if status == TransactionStatus::Idle {
            self.statements.close_portals();
        }
        backend::ready(&mut self.output, status);
        Ok(self.flush().await?)
    }

    /// Runs a plan and writes its rows to `output`.
    async fn run_plan(
        &mut self,
        plan: &Plan,
        values: &[Value],
        scope: Scope,
        layout: Layout<'_>,
        output: &mut Output,
    ) -> Result<Ran, Fault> {
        let started = Instant::now();
        let ran = match plan {
            Plan::Engine(statement) => {
                let viewer = statement.uses_system().then(|| self.viewer());
                if let Some(viewer) = &viewer {
                    self.link.engine.set_system(viewer.clone());
                }
                let spills = self.statements.spills(&self.shared.config.temporary_directory, &self.temporary);
                let mut writer = RowWriter::new(output, layout, spills);
                let outcome = self.link.execute(statement, values, scope, &mut writer).await;
                match outcome {
                    Ok(completion) => {
                        let (rows, spill) = writer.finish();
                        if let Some(viewer) = viewer {
                            let changes = std::mem::take(&mut *viewer.changes.lock());
                            if !changes.is_empty() {
                                Box::pin(self.configure(changes, output)).await?;
                            }
                        }
                        self.completed(&completion, output);
                        Ok(Ran::Done { tag: completion.tag, rows, spill })
                    }
                    Err(error) => {
                        fulmar_engine::RowSink::reset(&mut writer);
                        self.end_of_transaction(false);
                        Err(error.into())
                    }
                }
            }
            // Boxed because it is rare. Unboxed, it would enlarge the future of every session.
            Plan::Command { command, .. } => Box::pin(self.command(command, layout, output)).await,
        };
        let (time, rows) = (started.elapsed(), if let Ok(Ran::Done { rows, .. }) = &ran { *rows } else { 0 });
        self.metrics.ran(time, rows);
        self.stats.ran(plan.uses(), time, rows);
        self.log_if_slow(plan, time, rows, &ran);
        ran
    }

    /// Applies the changes of `set_config` calls.
    async fn configure(
        &mut self,
        changes: Vec<(String, String, bool)>,
        output: &mut Output,
    ) -> crate::Result<()> {
        for (name, value, local) in changes {
            self.set(&name, Some(&value), local, output).await?;
        }
        Ok(())
    }

    /// Sends the notices of a completed statement, and ends the transaction's settings if it has
    /// ended.
    fn completed(&mut self, completion: &Completion, output: &mut Output) {
        for (state, message) in &completion.notices {
            backend::notice(output, state, message);
        }
        self.end_of_transaction(completion.tag == CommandTag::Plain("COMMIT"));
    }

    /// If the transaction has ended, commits or rolls back its changes of parameters.
    fn end_of_transaction(&mut self, committed: bool) {
        if self.settings.is_changed() && self.link.status() == TransactionStatus::Idle {
            self.settings.end_transaction(committed);
            self.apply_settings();
        }
    }

    /// Applies the parameters that affect the connection or the engine session.
    fn apply_settings(&mut self) {
        self.settings_share.shrink(self.settings.bytes() as u64);
        self.link.timeout = self.settings.statement_timeout();
        self.link.idle_timeout = self.settings.idle_in_transaction_timeout();
        self.link.engine.set_default_read_only(self.settings.is_read_only());
        self.link.engine.set_as_of(self.settings.as_of());
        // The system database holds no tenant data and must always accept connections, so staleness
        // does not apply to it.
        let is_system = self.identity.tenant.partition == SYSTEM_PARTITION;
        self.link.engine.set_staleness((!is_system).then(|| self.settings.staleness()));
    }
}
