//! The side of a relay that the client is connected to.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fulmar_engine::{Error, TransactionStatus, sqlstate};
use fulmar_pages::PartitionId;
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::wire::{Closed, Interrupts, Wire, give_buffer};
use tokio::io::{AsyncWrite, DuplexStream};
use tokio::time::{Instant, Sleep, sleep};

use super::charge::Charge;
use super::journal::{Journal, Mismatch, Told};
use super::message::Values;
use super::pump::poll_pooled;
use super::tables::FormerTables;
use crate::cluster::{Cluster, Owner};
use crate::identity::Identity;
use crate::registry::{Handle, RegistryEntry};
use crate::startup;

/// Bytes for the client from which on the front reads no further answers.
const MAX_OUTPUT_BYTES: usize = 64 << 10;
/// How many copies of the client's bytes the journal may hold: in an incomplete message, in a unit,
/// and to be sent.
const MAX_COPIES: usize = 3;
/// How many times a front works without waiting before other connections of the worker are polled.
const MAX_ROUNDS: usize = 32;
/// How long the front waits for answers of the former owner after the owner has changed.
const FORMER_OWNER_GRACE: Duration = Duration::from_secs(2);

/// A client's connection whose session runs elsewhere.
pub(crate) struct Front {
    pub(super) wire: Wire,
    pub(super) journal: Journal,
    /// The memory charge for the journal.
    pub(super) charge: Charge,
    pub(super) handle: Arc<Handle>,
    pub(super) identity: Identity,
    pub(super) context: Arc<startup::Context>,
    pub(super) cluster: Arc<dyn Cluster>,
    /// The parameters that the client set when it connected.
    pub(super) defaults: Values,
    /// The connection to the session.
    pub(super) upstream: DuplexStream,
    pub(super) owner: Owner,
    /// The epoch of the database's timeline when the client connected.
    pub(super) timeline: u32,
    /// The address of the owner that the client knows.
    pub(super) reported_owner: String,
    /// The error that the next statement gets, because the transaction could not be repeated.
    pub(super) doomed: Option<Error>,
    /// The temporary tables of the former session, until the next one has them.
    pub(super) former_tables: Option<FormerTables>,
    /// An open transaction has failed since its session was lost.
    pub(super) has_aborted: bool,
    /// Keeps the front registered.
    _entry: RegistryEntry,
    output_sent: usize,
}

/// A front that has lost its session.
struct Interrupted {
    at: Instant,
    /// The client waits for an answer.
    has_units: bool,
}

impl Interrupted {
    fn now(front: &Front) -> Interrupted {
        Interrupted { at: Instant::now(), has_units: !front.journal.units.is_empty() }
    }

    /// Records the wait of a client that has a session again.
    fn record(self, front: &mut Front) {
        let has_waited = self.has_units || !front.journal.units.is_empty();
        let has_failed = std::mem::take(&mut front.has_aborted);
        if has_waited || has_failed {
            let waited = has_waited.then(|| self.at.elapsed());
            front.context.registry.waits.record(front.identity.tenant.partition, waited, has_failed);
        }
    }
}

/// Why a front stops passing messages on.
pub(super) enum Stop {
    /// The client has disconnected.
    Client,
    /// The session has ended, and the client knows why.
    End,
    /// The connection ends with an error.
    Fatal(Error),
    /// Another node owns the partition. True if a part of the unfinished unit was committed.
    Moved { in_part: bool },
    /// The connection to the session broke.
    Broken,
    /// The session's answer differs from the one that the client has got.
    Mismatch,
}

impl Front {
    pub(super) fn new(
        wire: Wire,
        journal: Journal,
        parts: (RegistryEntry, Identity, Values),
        context: Arc<startup::Context>,
        cluster: Arc<dyn Cluster>,
        (upstream, owner, reported_owner): (DuplexStream, Owner, String),
    ) -> Front {
        let (entry, identity, defaults) = parts;
        let handle = entry.handle.clone();
        let charge = Charge::new(context.sessions.memory.of(identity.tenant.partition));
        let timeline = context.catalog.partition(identity.tenant.partition).map_or(0, |record| record.epoch);
        Front {
            wire,
            journal,
            charge,
            handle,
            identity,
            context,
            cluster,
            defaults,
            upstream,
            owner,
            timeline,
            reported_owner,
            doomed: None,
            former_tables: None,
            has_aborted: false,
            _entry: entry,
            output_sent: 0,
        }
    }

    /// Serves the client until one side ends.
    pub(crate) async fn serve(mut self: Box<Self>) {
        loop {
            let stop = self.relay().await;
            let fatal = match stop {
                Stop::Client => break,
                Stop::End => None,
                Stop::Fatal(error) => Some(error),
                Stop::Moved { .. } | Stop::Broken | Stop::Mismatch => {
                    let interrupted = Interrupted::now(&self);
                    match Box::pin(self.resume(stop)).await {
                        Ok(()) => {
                            interrupted.record(&mut self);
                            continue;
                        }
                        Err(Stop::Fatal(error)) => Some(error),
                        Err(_) => None,
                    }
                }
            };
            if let Some(error) = fatal.filter(|_| !self.journal.is_inside_answer()) {
                backend::error(&mut self.journal.output, &error, Severity::Fatal);
            }
            let Front { wire, journal, handle, output_sent, .. } = &mut *self;
            let _ = poll_fn(|cx| wire.poll_send(cx, &journal.output, output_sent, handle)).await;
            wire.shutdown().await;
            break;
        }
    }

    /// Passes messages on in both directions.
    async fn relay(&mut self) -> Stop {
        let (cluster, partition, epoch) =
            (self.cluster.clone(), self.identity.tenant.partition, self.owner.epoch);
        let mut changed: Pin<Box<dyn Future<Output = ()>>> =
            Box::pin(async move { wait_for_change(&*cluster, partition, epoch).await });
        let mut grace: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            if let Poll::Ready(stop) = self.poll_relay(cx) {
                return Poll::Ready(stop);
            }
            if grace.is_none() && changed.as_mut().poll(cx).is_ready() {
                grace = Some(Box::pin(sleep(FORMER_OWNER_GRACE)));
            }
            let Some(grace) = &mut grace else { return Poll::Pending };
            // Answers that have arrived are passed on, however slowly the client reads.
            let is_over = grace.as_mut().poll(cx).is_ready() && self.journal.output.is_empty();
            match self.journal.units.is_empty() || is_over {
                true => Poll::Ready(Stop::Broken),
                false => Poll::Pending,
            }
        })
        .await
    }

    fn poll_relay(&mut self, cx: &mut Context<'_>) -> Poll<Stop> {
        self.handle.register(cx.waker());
        if self.handle.take_cancel_request() {
            self.pass_cancel_on();
        }
        for _ in 0..MAX_ROUNDS {
            let closes = self.handle.is_closing() && (self.journal.is_idle() || self.handle.is_killed());
            if closes {
                let message = "terminating connection due to administrator command";
                return Poll::Ready(Stop::Fatal(Error::new(sqlstate::ADMIN_SHUTDOWN, message)));
            }
            let sent = self.poll_to_session(cx);
            let received = self.poll_to_client(cx);
            match (sent, received) {
                (Poll::Ready(Err(stop)), _) | (_, Poll::Ready(Err(stop))) => return Poll::Ready(stop),
                (Poll::Pending, Poll::Pending) => return Poll::Pending,
                _ => {}
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Sends what the client has sent, and reads more when that is done.
    fn poll_to_session(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Stop>> {
        if !self.journal.unsent.is_empty() {
            let polled = Pin::new(&mut self.upstream).poll_write(cx, &self.journal.unsent);
            return match polled {
                Poll::Ready(Ok(count)) if count > 0 => {
                    self.journal.unsent.drain(..count);
                    if self.journal.unsent.is_empty() {
                        give_buffer(std::mem::take(&mut self.journal.unsent));
                        self.charge.adjust(&self.journal);
                    }
                    Poll::Ready(Ok(()))
                }
                // The other direction knows whether the session has ended or the connection broke.
                Poll::Ready(_) => self.poll_client_gone(cx),
                Poll::Pending => self.poll_client_gone(cx),
            };
        }
        // The error of the transaction is for the client's next unit, which must be the oldest.
        let waits = self.doomed.is_some() && self.journal.is_restoring();
        if self.journal.is_holding || waits || self.journal.is_full() {
            return self.poll_client_gone(cx);
        }
        match self.wire.poll_read(cx) {
            Poll::Pending if self.wire.input.is_empty() => Poll::Pending,
            Poll::Ready(Err(_)) if self.wire.input.is_empty() => Poll::Ready(Err(Stop::Client)),
            _ => match self.feed()? {
                true => Poll::Ready(Ok(())),
                // Answers release memory.
                false => self.poll_client_gone(cx),
            },
        }
    }

    /// Takes over what the client has sent, until the journal is full. Returns false if memory is short,
    /// and units that have not been answered occupy some: an error might be taken for their answer.
    pub(super) fn feed(&mut self) -> Result<bool, Stop> {
        let more = MAX_COPIES * self.wire.input.len();
        match self.cover(more) {
            Err(_) if self.journal.has_unanswered() => return Ok(false),
            covered => covered?,
        }
        let mut input = std::mem::take(&mut self.wire.input);
        let fed = self.journal.feed(&input);
        let fed = fed.map_err(|message| Stop::Fatal(Error::new(sqlstate::PROTOCOL_VIOLATION, message)))?;
        match fed < input.len() {
            true => {
                input.drain(..fed);
                self.wire.input = input;
            }
            false => give_buffer(input),
        }
        if self.journal.is_terminated {
            return Err(Stop::Client);
        }
        self.charge.adjust(&self.journal);
        self.fail_doomed()?;
        Ok(true)
    }

    /// Charges what the journal holds, and `more` bytes that it is about to hold.
    pub(super) fn cover(&mut self, more: usize) -> Result<(), Stop> {
        self.charge.cover(&mut self.journal, more).map_err(Stop::Fatal)
    }

    /// Notices a disconnect of the client while the session accepts nothing.
    fn poll_client_gone(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Stop>> {
        match self.wire.watch(cx) {
            Poll::Ready(()) => Poll::Ready(Err(Stop::Client)),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Sends what was answered.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Stop>> {
        if self.journal.output.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let Front { wire, journal, handle, output_sent, .. } = self;
        match ready!(wire.poll_send(cx, &journal.output, output_sent, handle)) {
            Err(Closed::Client) => return Poll::Ready(Err(Stop::Client)),
            Err(_) => return Poll::Ready(Err(Stop::End)),
            Ok(()) => {}
        }
        self.output_sent = 0;
        self.journal.output.clear();
        give_buffer(std::mem::take(&mut self.journal.output));
        Poll::Ready(Ok(()))
    }

    /// Sends what the session has answered, and receives more when that is done.
    fn poll_to_client(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Stop>> {
        let has_output = !self.journal.output.is_empty();
        ready!(self.poll_flush(cx))?;
        if has_output {
            self.charge.adjust(&self.journal);
        }
        let mut has_received = false;
        while self.journal.output.len() < MAX_OUTPUT_BYTES {
            let bytes = match poll_pooled(cx, &mut self.upstream) {
                Poll::Ready(Some(bytes)) => bytes,
                Poll::Ready(None) => return Poll::Ready(Err(Stop::Broken)),
                Poll::Pending if !has_received => return Poll::Pending,
                // What was received may let the other direction continue.
                Poll::Pending => return Poll::Ready(Ok(())),
            };
            has_received = true;
            let told = self.journal.answer(&bytes);
            give_buffer(bytes);
            match told {
                Ok(None) => {}
                Ok(Some(Told::End)) => return Poll::Ready(Err(Stop::End)),
                Ok(Some(Told::Moved { in_part })) => return Poll::Ready(Err(Stop::Moved { in_part })),
                Err(Mismatch) => return Poll::Ready(Err(Stop::Mismatch)),
            }
            // Further answers wait for memory until the client has got these.
            if !self.charge.adjust(&self.journal) {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Answers the client's next unit if the transaction could not be repeated. Nothing is sent to
    /// the session before that.
    fn fail_doomed(&mut self) -> Result<(), Stop> {
        if self.doomed.is_none() {
            return Ok(());
        }
        self.journal.unsent.clear();
        if let Some(is_commit) = self.answer_doomed()? {
            if self.journal.is_lost {
                // The messages of the other units are not kept.
                return self.give_up_lost();
            }
            self.journal.send_all();
            if is_commit {
                self.journal.send_failed_ended();
            }
        }
        Ok(())
    }

    /// Answers the oldest unit with the error of the transaction that could not be repeated, unless
    /// it is a rollback. A COMMIT that fails ends the transaction, as in PostgreSQL. Returns
    /// whether it is one; `None` if that is not known yet.
    pub(super) fn answer_doomed(&mut self) -> Result<Option<bool>, Stop> {
        self.journal.answer_closes();
        let Some(unit) = self.journal.units.front() else { return Ok(None) };
        if unit.is_undecided() || unit.is_discarded {
            return Ok(None);
        }
        let (is_commit, is_rollback) = (unit.is_commit, unit.is_rollback);
        if let Some(error) = self.doomed.take().filter(|_| !is_rollback) {
            let status = if is_commit { TransactionStatus::Idle } else { TransactionStatus::Failed };
            self.answer_with(&error, status)?;
        }
        Ok(Some(is_commit))
    }

    /// Passes a cancel request on to the session.
    fn pass_cancel_on(&self) {
        let (pid, secret) = (self.handle.pid, self.handle.secret());
        super::send_cancel(self.context.clone(), self.owner.node, pid, secret);
    }
}

/// Waits until the owner has changed. The system database may have no owner: then it never does.
pub(super) async fn wait_for_change(cluster: &dyn Cluster, partition: PartitionId, epoch: u32) {
    match epoch {
        super::connect::NO_EPOCH => std::future::pending().await,
        epoch => cluster.owner_changed(partition, epoch).await,
    }
}
