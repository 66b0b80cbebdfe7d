//! Links the client's connection to the session's partition: runs a statement while watching the
//! connection for a disconnect, and the clock for `statement_timeout`.
//!
//! A future of the engine is always polled to completion, because it owns a fiber of SQLite that
//! cannot be dropped midway. To end it early (disconnect, timeout, shutdown), the session cancels
//! the statement and keeps polling:
//!
//! ```text
//! poll the statement --ready--> result
//!        `-- pending: check the connection and the timeout
//!                     disconnected or timed out: cancel once, continue polling
//! ```
//!
//! Nearly all statements are ready at the first poll and skip these checks.
//!
//! A cancelled statement can be inside a SQLite call that cannot be interrupted. It then runs on
//! the engine's offload pool and may take minutes to react. Its client does not wait for it: after
//! [`OVERDUE_GRACE`] the client gets the statement's error with severity FATAL and is disconnected.
//! The session ends when the call returns.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fulmar_engine::{
    CancelReason, Completion, Error, RowSink, Scope, Statement, StatementContext, TransactionStatus, Value,
    Verified, sqlstate,
};
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::wire::Interrupts;
use fulmar_pgwire::wire::{Closed, Wire};
use fulmar_service::{LocalPartition, PartitionService};
use parking_lot::Mutex;
use tokio::time::{Sleep, sleep};

use super::rows::Collector;
use crate::cluster::Cluster;
use crate::registry::Handle;
use crate::{Result, fair};

/// Resolves when a client that sent only part of a message must be disconnected.
pub(crate) type Stall = Pin<Box<dyn Future<Output = ()>>>;

/// A message for the front, sent while a statement still runs.
#[derive(Default)]
pub(crate) struct EarlyMessage {
    bytes: Vec<u8>,
    sent: usize,
}

/// The message that a [`RowSink`](fulmar_engine::RowSink) has written, which [`Link`] sends.
pub(crate) type EarlyMessages = Arc<Mutex<EarlyMessage>>;

impl EarlyMessage {
    /// Sends `bytes`, unless the statement ends before.
    pub(crate) fn put(&mut self, bytes: Vec<u8>) {
        if self.sent == 0 {
            self.bytes = bytes;
        }
    }

    /// Returns what must be sent before anything else: the rest of the message, if a part of it was
    /// sent.
    fn take_rest(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.bytes);
        match std::mem::take(&mut self.sent) {
            0 => Vec::new(),
            sent => bytes.split_off(sent),
        }
    }
}

/// Why work was interrupted.
pub(crate) struct Interrupted {
    pub(crate) error: Error,
    /// The client has disconnected.
    pub(crate) is_client_gone: bool,
}

/// The client's connection and the session's partition.
pub(crate) struct Link {
    pub(crate) partition: LocalPartition,
    pub(crate) wire: Wire,
    pub(crate) handle: Arc<Handle>,
    /// `statement_timeout`; `None` if there is none.
    pub(crate) timeout: Option<Duration>,
    /// `idle_in_transaction_session_timeout`; `None` if there is none.
    pub(crate) idle_timeout: Option<Duration>,
    /// True if an implicit transaction may be open.
    pub(crate) implicit: bool,
    /// True if the session's activity (`pg_stat_activity`) is not shown as idle.
    pub(crate) activity_shown: bool,
    /// The message to send while a statement runs, in the session of a front.
    pub(crate) early: Option<EarlyMessages>,
    /// The cluster, without whose lease no answer is sent.
    cluster: Option<Arc<dyn Cluster>>,
}

impl Link {
    /// Links a connection to a partition.
    pub(crate) fn new(
        partition: LocalPartition,
        wire: Wire,
        handle: Arc<Handle>,
        cluster: Option<Arc<dyn Cluster>>,
    ) -> Link {
        Link {
            partition,
            wire,
            handle,
            timeout: None,
            idle_timeout: None,
            implicit: false,
            activity_shown: false,
            early: None,
            cluster,
        }
    }

    /// Prepares the first statement of `sql`. Also returns the text that follows it.
    pub(crate) async fn prepare<'a>(&mut self, sql: &'a str) -> Result<(Arc<Statement>, &'a str)> {
        self.check_client()?;
        let Link { partition, wire, handle, timeout, .. } = self;
        drive(pin!(partition.prepare(sql, StatementContext::default())), wire, handle, *timeout).await
    }

    /// Prepares a statement with properties that are not part of its text.
    pub(crate) async fn prepare_as(
        &mut self,
        sql: &str,
        known: StatementContext<'_>,
    ) -> Result<Arc<Statement>> {
        self.check_client()?;
        let Link { partition, wire, handle, timeout, .. } = self;
        let prepared = drive(pin!(partition.prepare(sql, known)), wire, handle, *timeout).await;
        prepared.map(|(statement, _)| statement)
    }

    /// Runs a statement to completion.
    pub(crate) async fn execute(
        &mut self,
        statement: &Arc<Statement>,
        values: &[Value],
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        self.check_client()?;
        self.implicit |= scope == Scope::Implicit;
        let Link { partition, wire, handle, timeout, early, .. } = self;
        let mut noted = false;
        let outcome = {
            let mut run = pin!(partition.execute(statement, values, scope, sink));
            let watched = poll_fn(|cx| {
                let polled = run.as_mut().poll(cx);
                if polled.is_pending() && !std::mem::replace(&mut noted, true) {
                    handle.activity.begin(statement);
                }
                polled
            });
            let mut watch = Watch::new(wire, handle, *timeout);
            watch.early = early.as_deref();
            watch.drive(pin!(watched)).await
        };
        self.activity_shown |= noted;
        outcome
    }

    /// Yields to other sessions of the worker if the time slice is over. Called before each
    /// statement, because many statements can arrive with one read.
    pub(crate) async fn yield_if_slice_is_over(&mut self) -> Result<()> {
        if !fair::slice_is_over() {
            return Ok(());
        }
        let Link { partition, wire, handle, .. } = self;
        drive(pin!(partition.session_mut().yield_now()), wire, handle, None).await?;
        match handle.is_killed() {
            // The session may have been killed between two statements, when no statement could be
            // cancelled.
            true => Err(Error::new(
                sqlstate::ADMIN_SHUTDOWN,
                "terminating connection due to administrator command",
            )),
            false => Ok(()),
        }
    }

    /// Runs an internal query in the client's transaction.
    pub(crate) async fn collect(&mut self, sql: &str, values: &[Value]) -> Result<Vec<Vec<Value>>> {
        let (statement, _) = self.prepare(sql).await?;
        let mut collector = Collector::default();
        self.execute(&statement, values, Scope::Implicit, &mut collector).await?;
        Ok(collector.rows)
    }

    /// Runs an internal query in its own transaction.
    pub(crate) async fn run_alone(&mut self, sql: &str) -> Result<Vec<Vec<Value>>> {
        let (statement, _) = self.prepare(sql).await?;
        let mut collector = Collector::default();
        self.execute(&statement, &[], Scope::Auto, &mut collector).await?;
        Ok(collector.rows)
    }

    /// Opens the version that the next transaction reads, if that is not the newest one.
    pub(crate) async fn open_snapshot(&mut self) -> Result<()> {
        let Link { partition, wire, handle, timeout, .. } = self;
        drive(pin!(partition.session_mut().open_snapshot()), wire, handle, *timeout).await
    }

    /// Verifies the checksums of all stored data.
    pub(crate) async fn verify(&mut self) -> Result<Verified> {
        let Link { partition, wire, handle, timeout, .. } = self;
        drive(pin!(partition.session_mut().verify()), wire, handle, *timeout).await
    }

    /// Runs work that is not the partition's. A cancel request, `statement_timeout`, and a disconnect
    /// end it.
    pub(crate) async fn run_cancellable<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, Interrupted> {
        let Link { partition, wire, handle, timeout, .. } = self;
        let mut watch = Watch::new(wire, handle, *timeout);
        let ended = watch.drive(pin!(partition.session_mut().run_cancellable(work))).await;
        ended.map_err(|error| Interrupted { error, is_client_gone: watch.gone })
    }

    /// Ends the implicit transaction if one is open: commits it, or rolls it back if it has failed.
    pub(crate) async fn finish(&mut self) -> Result<()> {
        self.check_client()?;
        if !std::mem::take(&mut self.implicit) {
            return Ok(());
        }
        let Link { partition, wire, handle, timeout, .. } = self;
        drive(pin!(partition.commit_implicit()), wire, handle, *timeout).await
    }

    /// Waits for bytes from the client until `stall` resolves, and in a transaction for at most
    /// `idle_timeout`.
    pub(crate) async fn read(&mut self, stall: Option<Stall>) -> Result<usize, Closed> {
        let status = self.status();
        let idle = self.implicit || status != TransactionStatus::Idle;
        if std::mem::replace(&mut self.activity_shown, status != TransactionStatus::Idle)
            || self.activity_shown
        {
            self.handle.activity.set_waiting(status);
        }
        let Link { partition, wire, handle, idle_timeout, .. } = self;
        let read = wire.read(handle);
        let limit = idle_timeout.filter(|_| idle);
        if limit.is_none() && stall.is_none() {
            return wait_for_client(pin!(read), partition.session_mut()).await;
        }
        // Boxed, so that the futures of sessions without a timer stay small.
        let mut read = Box::pin(async move {
            tokio::select! {
                biased;
                count = read => count,
                () = resolve_or_pend(limit.map(sleep)) => Err(Closed::Idle),
                () = resolve_or_pend(stall) => Err(Closed::Stalled),
            }
        });
        wait_for_client(read.as_mut(), partition.session_mut()).await
    }

    /// Sends `bytes`. Waits until the client has accepted them, and before until the node may
    /// answer.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> Result<(), Closed> {
        if let Some(cluster) = &self.cluster
            && !cluster.may_answer()
        {
            cluster.wait_to_answer().await.map_err(|_| Closed::Fenced)?;
        }
        let rest = self.early.as_ref().map(|early| early.lock().take_rest()).unwrap_or_default();
        let Link { partition, wire, handle, .. } = self;
        let send = async {
            if !rest.is_empty() {
                wire.send(&rest, handle).await?;
            }
            wire.send(bytes, handle).await
        };
        wait_for_client(pin!(send), partition.session_mut()).await
    }

    /// Returns true if no transaction is open and no received bytes are unprocessed.
    pub(crate) fn can_migrate(&self) -> bool {
        !self.implicit && self.status() == TransactionStatus::Idle && self.wire.can_detach()
    }

    /// The status of the client's explicit transaction.
    pub(crate) fn status(&self) -> TransactionStatus {
        self.partition.status()
    }

    /// Fails if the client was disconnected because its cancelled statement was overdue. The
    /// session ends without running the messages that follow the statement.
    fn check_client(&self) -> Result<()> {
        match self.wire.is_aborted() {
            true => Err(Error::new(sqlstate::ADMIN_SHUTDOWN, "connection is closed")),
            false => Ok(()),
        }
    }

    /// Fails with PostgreSQL's error if the transaction has failed.
    pub(crate) fn check_not_failed(&self) -> Result<()> {
        if self.status() != TransactionStatus::Failed {
            return Ok(());
        }
        Err(Error::new(
            sqlstate::IN_FAILED_TRANSACTION,
            "current transaction is aborted, commands ignored until end of transaction block",
        ))
    }
}

/// Awaits the future. Never resolves if there is none.
async fn resolve_or_pend(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Waits for the client, possibly forever. Meanwhile an open transaction releases its snapshot if
/// the snapshot expires.
async fn wait_for_client<F: Future>(
    mut waiting: Pin<&mut F>,
    engine: &mut fulmar_engine::Session,
) -> F::Output {
    if engine.holds_snapshot() {
        let done = {
            let mut expired = pin!(engine.snapshot_expired());
            poll_fn(|cx| match waiting.as_mut().poll(cx) {
                Poll::Ready(done) => Poll::Ready(Some(done)),
                Poll::Pending => expired.as_mut().poll(cx).map(|()| None),
            })
            .await
        };
        match done {
            Some(done) => return done,
            // An error here is ignored: the next statement fails with the same error and reports
            // it.
            None => drop(engine.release_snapshot().await),
        }
    }
    waiting.await
}

/// Polls a future of the engine to completion. The caller pins it in place: the engine's futures
/// have kilobytes of state, which passing by value would copy for every statement.
async fn drive<F: Future>(
    future: Pin<&mut F>,
    wire: &mut Wire,
    handle: &Handle,
    timeout: Option<Duration>,
) -> F::Output {
    Watch::new(wire, handle, timeout).drive(future).await
}

/// Watches for the events that end a statement early.
struct Watch<'a> {
    wire: &'a mut Wire,
    handle: &'a Handle,
    timeout: Option<Duration>,
    /// The message to send when the statement has written it.
    early: Option<&'a Mutex<EarlyMessage>>,
    /// The `statement_timeout` timer.
    sleep: Option<Pin<Box<Sleep>>>,
    /// The time of the next disconnect check while the receive buffer is full and nothing is read.
    probe_timer: Option<Pin<Box<Sleep>>>,
    /// The time at which the client of a cancelled statement that does not react is disconnected.
    overdue: Option<Pin<Box<Sleep>>>,
    /// The client has disconnected, or was disconnected.
    gone: bool,
}

/// How long a cancelled statement on the offload pool has to end before its client is disconnected.
const OVERDUE_GRACE: Duration = Duration::from_secs(1);

/// The interval of disconnect checks while the receive buffer is full.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

impl<'a> Watch<'a> {
    fn new(wire: &'a mut Wire, handle: &'a Handle, timeout: Option<Duration>) -> Watch<'a> {
        Watch {
            wire,
            handle,
            timeout,
            early: None,
            sleep: None,
            probe_timer: None,
            overdue: None,
            gone: false,
        }
    }

    /// Polls a future to completion, and watches while it is pending.
    async fn drive<F: Future>(&mut self, mut future: Pin<&mut F>) -> F::Output {
        poll_fn(|cx| {
            let polled = future.as_mut().poll(cx);
            if polled.is_pending() {
                self.poll(cx);
            }
            polled
        })
        .await
    }

    /// Sends the early message as far as possible.
    fn poll_early(&mut self, cx: &mut Context<'_>) {
        let Some(early) = self.early else { return };
        let EarlyMessage { bytes, sent } = &mut *early.lock();
        if *sent < bytes.len() {
            // If the front is gone, the check for a disconnect detects it.
            let _ = self.wire.poll_send(cx, bytes, sent, self.handle);
        }
    }

    fn is_disconnected(&mut self, cx: &mut Context<'_>) -> bool {
        if self.wire.watch(cx).is_ready() {
            return true;
        }
        while self.wire.is_full() {
            let timer = self.probe_timer.get_or_insert_with(|| Box::pin(sleep(PROBE_INTERVAL)));
            if timer.as_mut().poll(cx).is_pending() {
                return false;
            }
            self.probe_timer = None;
            if self.wire.detect_disconnect() {
                return true;
            }
        }
        false
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        if !self.gone && self.is_disconnected(cx) {
            self.gone = true;
            self.handle.canceller().cancel(CancelReason::User);
        }
        self.poll_early(cx);
        self.poll_timeout(cx);
        self.poll_overdue(cx);
    }

    fn poll_timeout(&mut self, cx: &mut Context<'_>) {
        let Some(timeout) = self.timeout else { return };
        let timer = self.sleep.get_or_insert_with(|| Box::pin(sleep(timeout)));
        if let Poll::Ready(()) = timer.as_mut().poll(cx) {
            (self.timeout, self.sleep) = (None, None);
            self.handle.canceller().cancel(CancelReason::Timeout);
        }
    }

    /// Disconnects the client of a cancelled statement that is in a call that cannot be
    /// interrupted.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) {
        let canceller = self.handle.canceller();
        if !canceller.is_offloaded() {
            return;
        }
        // A cancel request wakes this task through the handle, because the engine's waker is used
        // by the offload pool.
        self.handle.register(cx.waker());
        if self.gone || !canceller.is_overdue() {
            return;
        }
        let grace = self.overdue.get_or_insert_with(|| Box::pin(sleep(OVERDUE_GRACE)));
        if grace.as_mut().poll(cx).is_ready()
            && let Some(error) = canceller.give_up()
        {
            self.gone = true;
            let error = error.detail(
                "The statement is in a call that cannot be interrupted, so the connection is closed.",
            );
            let mut message = Vec::new();
            backend::error(&mut message, &error, Severity::Fatal);
            self.wire.abort(cx, &message);
        }
    }
}
