//! A session's two ends: the client's connection and the engine's session, and running one while watching the other.
//!
//! A future of the engine is always run to its end: it holds a coroutine of SQLite that nobody else can finish. Whoever
//! wants it to end sooner (the client has gone, the time is up, the server stops) *cancels*, and then waits like
//! everybody else:
//!
//! ```text
//! poll the statement --ready--> answer
//!        `-- pending: look at the connection and the clock; gone or late: cancel (once), go on polling
//! ```
//!
//! Nearly all statements are ready at the first poll and never get to the second line.
//!
//! A cancelled statement that is in a call of SQLite's which cannot be interrupted (it is on the engine's offload pool then)
//! may take minutes to notice. Its client does not wait for it: after [`OVERDUE_GRACE`] the client gets the statement's
//! error as a FATAL one and the connection is closed. The session ends when the call returns.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fulmar_engine::{
    CancelReason, Completion, Error, Known, RowSink, Scope, Statement, TransactionStatus, Value, Verified,
    sqlstate,
};
use tokio::time::{Sleep, sleep};

use super::rows::Collector;
use crate::protocol::backend::{self, Severity};
use crate::registry::Handle;
use crate::wire::{Closed, Wire};
use crate::{Result, fair};

/// Resolves when the client of a partly received message is to be disconnected.
pub(crate) type Stall = Pin<Box<dyn Future<Output = ()>>>;

/// The client's connection and the engine's session.
pub(crate) struct Link {
    pub(crate) engine: fulmar_engine::Session,
    pub(crate) wire: Wire,
    pub(crate) handle: Arc<Handle>,
    /// `statement_timeout`; `None` if there is none.
    pub(crate) timeout: Option<Duration>,
    /// `idle_in_transaction_session_timeout`; `None` if there is none.
    pub(crate) idle_timeout: Option<Duration>,
    /// Whether an implicit transaction may be open.
    pub(crate) implicit: bool,
    /// Others have been told of something that has ended since.
    pub(crate) noted: bool,
}

impl Link {
    /// Prepares the first statement of `sql`; answers the rest too.
    pub(crate) async fn prepare<'a>(&mut self, sql: &'a str) -> Result<(Arc<Statement>, &'a str)> {
        self.check_client()?;
        let Link { engine, wire, handle, timeout, .. } = self;
        drive(pin!(engine.prepare(sql)), wire, handle, *timeout).await
    }

    /// Prepares a statement of which more is known than its text.
    pub(crate) async fn prepare_as(&mut self, sql: &str, known: Known<'_>) -> Result<Arc<Statement>> {
        self.check_client()?;
        let Link { engine, wire, handle, timeout, .. } = self;
        drive(pin!(engine.prepare_as(sql, known)), wire, handle, *timeout)
            .await
            .map(|(statement, _)| statement)
    }

    /// Runs a statement to its end.
    pub(crate) async fn execute(
        &mut self,
        statement: &Arc<Statement>,
        values: &[Value],
        scope: Scope,
        sink: &mut dyn RowSink,
    ) -> Result<Completion> {
        self.check_client()?;
        self.implicit |= scope == Scope::Implicit;
        let Link { engine, wire, handle, timeout, .. } = self;
        let mut noted = false;
        let outcome = {
            let mut run = pin!(engine.execute(statement, values, scope, sink));
            let watched = poll_fn(|cx| {
                let polled = run.as_mut().poll(cx);
                if polled.is_pending() && !std::mem::replace(&mut noted, true) {
                    handle.activity.begin(statement);
                }
                polled
            });
            drive(pin!(watched), wire, handle, *timeout).await
        };
        self.noted |= noted;
        outcome
    }

    /// To be called before each of many statements that may have come together: lets others work, if it is time.
    pub(crate) async fn give_way(&mut self) -> Result<()> {
        if !fair::slice_is_over() {
            return Ok(());
        }
        let Link { engine, wire, handle, .. } = self;
        drive(pin!(engine.give_way()), wire, handle, None).await?;
        match handle.is_killed() {
            // It may have come between two statements, when there was nothing to cancel.
            true => Err(Error::new(
                sqlstate::ADMIN_SHUTDOWN,
                "terminating connection due to administrator command",
            )),
            false => Ok(()),
        }
    }

    /// Runs a query of the gateway's own in the client's transaction.
    pub(crate) async fn collect(&mut self, sql: &str, values: &[Value]) -> Result<Vec<Vec<Value>>> {
        let (statement, _) = self.prepare(sql).await?;
        let mut collector = Collector::default();
        self.execute(&statement, values, Scope::Implicit, &mut collector).await?;
        Ok(collector.rows)
    }

    /// Runs a query of the gateway's own, by itself.
    pub(crate) async fn run_alone(&mut self, sql: &str) -> Result<Vec<Vec<Value>>> {
        let (statement, _) = self.prepare(sql).await?;
        let mut collector = Collector::default();
        self.execute(&statement, &[], Scope::Auto, &mut collector).await?;
        Ok(collector.rows)
    }

    /// Opens the version of the past that the next transaction will see, if it sees one.
    pub(crate) async fn look_back(&mut self) -> Result<()> {
        let Link { engine, wire, handle, timeout, .. } = self;
        drive(pin!(engine.look_back()), wire, handle, *timeout).await
    }

    /// Verifies all that the node keeps.
    pub(crate) async fn verify(&mut self) -> Result<Verified> {
        let Link { engine, wire, handle, timeout, .. } = self;
        drive(pin!(engine.verify()), wire, handle, *timeout).await
    }

    /// Ends the implicit transaction, if there is one: commits it, or rolls it back if it has failed.
    pub(crate) async fn finish(&mut self) -> Result<()> {
        self.check_client()?;
        if !std::mem::take(&mut self.implicit) {
            return Ok(());
        }
        let Link { engine, wire, handle, timeout, .. } = self;
        drive(pin!(engine.finish_implicit()), wire, handle, *timeout).await
    }

    /// Waits for bytes of the client: in a transaction at most for `idle_timeout`, and at most until `stall` resolves.
    pub(crate) async fn read(&mut self, stall: Option<Stall>) -> Result<usize, Closed> {
        let status = self.status();
        let idle = self.implicit || status != TransactionStatus::Idle;
        if std::mem::replace(&mut self.noted, status != TransactionStatus::Idle) || self.noted {
            self.handle.activity.wait(status);
        }
        let Link { engine, wire, handle, idle_timeout, .. } = self;
        let read = wire.read(handle);
        let limit = idle_timeout.filter(|_| idle);
        if limit.is_none() && stall.is_none() {
            return wait_for_client(pin!(read), engine).await;
        }
        // Boxed: sessions that need no clock have no room for one.
        let mut read = Box::pin(async move {
            tokio::select! {
                biased;
                count = read => count,
                () = maybe(limit.map(sleep)) => Err(Closed::Idle),
                () = maybe(stall) => Err(Closed::Stalled),
            }
        });
        wait_for_client(read.as_mut(), engine).await
    }

    /// Sends `bytes`, waiting for the client to take them.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> Result<(), Closed> {
        let Link { engine, wire, handle, .. } = self;
        wait_for_client(pin!(wire.send(bytes, handle)), engine).await
    }

    /// Nothing is open, and nothing is received that has not been answered.
    pub(crate) fn is_at_rest(&self) -> bool {
        !self.implicit && self.status() == TransactionStatus::Idle && self.wire.is_at_rest()
    }

    /// Whether the client has begun a transaction.
    pub(crate) fn status(&self) -> TransactionStatus {
        self.engine.status()
    }

    /// Fails if the client was told that its statement is cancelled and was disconnected: nothing that it sent behind that
    /// statement is run, and the session ends.
    fn check_client(&self) -> Result<()> {
        match self.wire.is_aborted() {
            true => Err(Error::new(sqlstate::ADMIN_SHUTDOWN, "the connection was closed")),
            false => Ok(()),
        }
    }

    /// What Postgres answers to nearly everything in a failed transaction.
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

/// A future that may be missing; it never resolves then.
async fn maybe(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Waits for the client, which may never come. A transaction that is open meanwhile lets go of its snapshot if it is asked
/// to.
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
            // What goes wrong here goes wrong again with the next statement, which tells the client.
            None => drop(engine.let_snapshot_go().await),
        }
    }
    waiting.await
}

/// Runs a future of the engine to its end. It is pinned where it was made: the engine's futures have kilobytes of state,
/// and handing one over by value would copy them for every statement.
async fn drive<F: Future>(
    mut future: Pin<&mut F>,
    wire: &mut Wire,
    handle: &Handle,
    timeout: Option<Duration>,
) -> F::Output {
    let mut watch = Watch { wire, handle, timeout, sleep: None, look: None, overdue: None, gone: false };
    poll_fn(|cx| {
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            watch.poll(cx);
        }
        polled
    })
    .await
}

/// What may end a statement early.
struct Watch<'a> {
    wire: &'a mut Wire,
    handle: &'a Handle,
    timeout: Option<Duration>,
    sleep: Option<Pin<Box<Sleep>>>,
    /// Until the connection is looked at again, of which nothing more is read.
    look: Option<Pin<Box<Sleep>>>,
    /// Until the client of a cancelled statement that does not notice is disconnected.
    overdue: Option<Pin<Box<Sleep>>>,
    gone: bool,
}

/// How long a cancelled statement on the offload pool has to end by itself.
const OVERDUE_GRACE: Duration = Duration::from_secs(1);

/// How often a client is looked at that has said as much ahead as is kept.
const LOOK: Duration = Duration::from_secs(1);

impl Watch<'_> {
    fn has_gone(&mut self, cx: &mut Context<'_>) -> bool {
        if self.wire.watch(cx).is_ready() {
            return true;
        }
        while self.wire.is_full() {
            let look = self.look.get_or_insert_with(|| Box::pin(sleep(LOOK)));
            if look.as_mut().poll(cx).is_pending() {
                return false;
            }
            self.look = None;
            if self.wire.look_for_end() {
                return true;
            }
        }
        false
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        if !self.gone && self.has_gone(cx) {
            self.gone = true;
            self.handle.canceller().cancel(CancelReason::User);
        }
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

    /// Disconnects the client of a statement that was cancelled and is in a call that cannot be interrupted.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) {
        let canceller = self.handle.canceller();
        if !canceller.is_offloaded() {
            return;
        }
        // Whoever cancels the statement wakes this task through the handle; the engine's waker is on the pool.
        self.handle.register(cx.waker());
        if self.gone || !canceller.is_overdue() {
            return;
        }
        let grace = self.overdue.get_or_insert_with(|| Box::pin(sleep(OVERDUE_GRACE)));
        if grace.as_mut().poll(cx).is_ready()
            && let Some(error) = canceller.give_up()
        {
            self.gone = true;
            let error = error
                .detail("The statement is in a call that cannot be interrupted; the connection is closed.");
            let mut message = Vec::new();
            backend::error(&mut message, &error, Severity::Fatal);
            self.wire.abort(cx, &message);
        }
    }
}
