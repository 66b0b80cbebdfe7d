//! Continues a front's session at the owner of its partition, after the owner has changed or the
//! connection broke.

use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Duration;

use fulmar_engine::{Error, TransactionStatus, sqlstate};
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::wire::Interrupts;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::connect::{Connected, NO_EPOCH, connect, owner_address};
use super::front::{Front, Stop, wait_for_change};
use super::message::{SessionHello, fingerprint};
use super::owner::password_changed;
use crate::cluster::Owner;
use crate::settings::OWNER;

/// How long to wait for an owner of the partition.
const OWNER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait for a node that no other one can replace: it may be restarting.
const RESTART_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for memory.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval of attempts, unless the owner changes before.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// The interval after an attempt at an owner that says that it does not own the partition.
const MOVING_INTERVAL: Duration = Duration::from_millis(20);

/// Why a resumption pauses.
pub(super) enum Pause {
    /// The client has cancelled its statement.
    Cancelled,
    /// Another attempt may succeed.
    Retry,
    Stop(Stop),
}

impl From<Stop> for Pause {
    fn from(stop: Stop) -> Pause {
        Pause::Stop(stop)
    }
}

/// A resumption.
struct Attempt {
    begun: Instant,
    /// The units without an answer may have been committed.
    is_in_doubt: bool,
}

impl Front {
    /// Continues with another session. Fails if the connection has to end.
    pub(super) async fn resume(&mut self, stop: Stop) -> Result<(), Stop> {
        let may_have_committed = self.may_have_committed();
        self.journal.reset();
        self.leave_tables(&stop).await;
        let mut attempt = Attempt { begun: Instant::now(), is_in_doubt: false };
        match stop {
            Stop::Moved { in_part: true } => {
                self.journal.transaction_over();
                self.answer_with(&executed_in_part(), TransactionStatus::Idle)?;
            }
            // A unit that is its own transaction, or ends one, may have been committed.
            Stop::Mismatch if may_have_committed => {
                self.has_aborted = self.journal.status != TransactionStatus::Idle;
                self.journal.transaction_over();
                self.answer_with(&unknown_outcome(0), TransactionStatus::Idle)?;
            }
            Stop::Mismatch => self.fail_transaction(&changed())?,
            Stop::Moved { .. } => {
                sleep(MOVING_INTERVAL).await;
                self.abort_if_moved()?;
            }
            // The client is idle, and this front has noticed the new owner before the session.
            Stop::Broken if !self.journal.has_unanswered() => self.abort_if_moved()?,
            _ => attempt.is_in_doubt = self.journal.has_unanswered(),
        }
        loop {
            match self.attempt(&mut attempt).await {
                Ok(()) => return Ok(()),
                Err(Pause::Retry) => {}
                Err(Pause::Cancelled) if attempt.is_in_doubt && self.journal.may_commit() => {
                    while self.journal.has_unanswered() {
                        self.answer_with(&cancelled_in_doubt(), TransactionStatus::Idle)?;
                    }
                    attempt.is_in_doubt = false;
                }
                Err(Pause::Cancelled) => {
                    self.feed()?;
                    if self.journal.has_unanswered() {
                        self.fail_transaction(&cancelled())?;
                    }
                }
                // 57P01 does not say whether the statement was committed either.
                Err(Pause::Stop(Stop::Fatal(error)))
                    if attempt.is_in_doubt
                        && self.journal.may_commit()
                        && error.state() != sqlstate::ADMIN_SHUTDOWN =>
                {
                    return Err(Stop::Fatal(in_doubt(&error)));
                }
                Err(Pause::Stop(stop)) => return Err(stop),
            }
        }
    }

    /// Attempts to continue at the present owner.
    async fn attempt(&mut self, attempt: &mut Attempt) -> Result<(), Pause> {
        let deadline = attempt.begun + OWNER_TIMEOUT;
        let partition = self.identity.tenant.partition;
        if let Err(error) = self.cluster.check_available(partition)
            && (error.state() != sqlstate::CANNOT_CONNECT_NOW || attempt.begun.elapsed() >= RESTART_TIMEOUT)
        {
            return Err(Pause::Stop(Stop::Fatal(error)));
        }
        let cluster = self.cluster.clone();
        let found = self.attend(deadline, async move { cluster.find_owner(partition).await }).await?;
        let owner = match found {
            Ok(Some(owner)) => owner,
            Ok(None) => {
                let message = format!("database \"{}\" was dropped", self.identity.tenant.name);
                return Err(Pause::Stop(Stop::Fatal(Error::new(sqlstate::DATABASE_DROPPED, message))));
            }
            Err(_) => return self.retry_later(deadline, NO_EPOCH).await,
        };
        if !self.check_timeline(deadline, owner).await? {
            return self.retry_later(deadline, NO_EPOCH).await;
        }
        if attempt.is_in_doubt {
            match self.settle(deadline).await {
                // The owner may have changed meanwhile.
                Ok(()) => {
                    attempt.is_in_doubt = false;
                    return Err(Pause::Retry);
                }
                Err(Pause::Retry) => return self.retry_later(deadline, owner.epoch).await,
                Err(pause) => return Err(pause),
            }
        }
        self.check_account()?;
        let more = self.journal.repetition_bytes();
        // All clients of the database are resumed at the same time.
        if !self.charge.try_cover(&self.journal, more) && attempt.begun.elapsed() < MEMORY_TIMEOUT {
            return self.retry_later(deadline, NO_EPOCH).await;
        }
        self.cover(more)?;
        self.give_up_lost()?;
        let address = owner_address(&*self.cluster, owner);
        let (hello, context, cluster) =
            (self.hello(address.clone()), self.context.clone(), self.cluster.clone());
        let connecting = async move {
            tokio::select! {
                connected = connect(&context, owner, hello) => connected,
                // A node that was cut off does not answer.
                () = wait_for_change(&*cluster, partition, owner.epoch) => Connected::Lost,
            }
        };
        match self.attend(deadline, connecting).await? {
            Connected::Accepted(upstream) => {
                self.upstream = self.carry_tables(deadline, upstream).await?;
                self.owner = owner;
                self.journal.begin_again();
                self.report_owner(address);
                Ok(())
            }
            Connected::Refused(message) => {
                if !self.journal.is_inside_answer() {
                    self.journal.output.extend_from_slice(&message);
                }
                Err(Pause::Stop(Stop::End))
            }
            Connected::Lost => self.retry_later(deadline, owner.epoch).await,
        }
    }

    /// Waits for a future of a resumption, and sends the client what was answered. Fails at the
    /// deadline, if the client disconnects or cancels its statement, and if the connection must
    /// end.
    pub(super) async fn attend<T>(
        &mut self,
        deadline: Instant,
        future: impl Future<Output = T>,
    ) -> Result<T, Pause> {
        let interrupted = poll_fn(|cx| {
            if let Poll::Ready(Err(stop)) = self.poll_flush(cx) {
                return Poll::Ready(Pause::Stop(stop));
            }
            self.handle.register(cx.waker());
            if self.handle.is_closing() {
                let message = "terminating connection due to administrator command";
                let error = Error::new(sqlstate::ADMIN_SHUTDOWN, message);
                return Poll::Ready(Pause::Stop(Stop::Fatal(error)));
            }
            if self.handle.take_cancel_request() {
                return Poll::Ready(Pause::Cancelled);
            }
            self.wire.watch(cx).map(|()| Pause::Stop(Stop::Client))
        });
        let result = tokio::select! {
            biased;
            pause = interrupted => return Err(pause),
            result = timeout_at(deadline, future) => result,
        };
        result.map_err(|_| Pause::Stop(Stop::Fatal(no_owner(&self.identity.tenant.name))))
    }

    /// Waits until another attempt makes sense: for the change of an owner with this epoch, if there is
    /// one.
    async fn retry_later(&mut self, deadline: Instant, epoch: u32) -> Result<(), Pause> {
        let (cluster, partition) = (self.cluster.clone(), self.identity.tenant.partition);
        let changed = async move {
            // Retries in either case.
            let _ = timeout(RETRY_INTERVAL, wait_for_change(&*cluster, partition, epoch)).await;
        };
        self.attend(deadline, changed).await?;
        Err(Pause::Retry)
    }

    /// Fails if the database was restored since the client connected: what it has read does not exist
    /// any more. A restore changes the owner's record too, in one transaction, so nothing was restored
    /// if that is the same. Returns false if the catalog cannot be read now.
    async fn check_timeline(&mut self, deadline: Instant, owner: Owner) -> Result<bool, Pause> {
        if owner.epoch == self.owner.epoch {
            return Ok(true);
        }
        let context = self.context.clone();
        if self.attend(deadline, async move { context.catalog.catch_up().await }).await?.is_err() {
            return Ok(false);
        }
        let partition = self.identity.tenant.partition;
        let Some(record) = self.context.catalog.partition(partition) else { return Ok(true) };
        if record.epoch == self.timeline {
            return Ok(true);
        }
        let message = "terminating connection because the database was restored";
        let error = Error::new(sqlstate::ADMIN_SHUTDOWN, message).hint("Connect again.");
        Err(Pause::Stop(Stop::Fatal(error)))
    }

    /// Fails if the client's password was changed since it authenticated: the new session does not
    /// know with which password.
    fn check_account(&self) -> Result<(), Stop> {
        let Some(account) = &self.identity.account else { return Ok(()) };
        let user = self.context.catalog.user(&account.name);
        if user.is_some_and(|user| user.verifier == account.verifier) {
            return Ok(());
        }
        Err(Stop::Fatal(password_changed(&account.name)))
    }

    /// Returns true if the oldest unit may have been committed before its answer was compared.
    fn may_have_committed(&self) -> bool {
        let is_idle = self.journal.status == TransactionStatus::Idle;
        // While the open transaction is repeated, the units that follow it are not sent.
        let unit = self.journal.units.front().filter(|unit| !unit.is_answered && !unit.is_discarded);
        unit.is_some_and(|unit| unit.ends_transaction || is_idle)
    }

    /// Tells the client another address of the owner.
    fn report_owner(&mut self, address: String) {
        if address != self.reported_owner && !self.journal.is_inside_answer() {
            backend::parameter_status(&mut self.journal.output, OWNER, &address);
            self.reported_owner = address;
        }
    }

    fn hello(&self, owner: String) -> SessionHello {
        SessionHello {
            partition: self.identity.tenant.partition.0,
            user: self.identity.user.clone(),
            authenticated: self.identity.account.is_some(),
            password: self.identity.account.as_deref().and_then(fingerprint),
            address: self.identity.address,
            pid: self.handle.pid,
            secret: self.handle.secret(),
            defaults: self.defaults.clone(),
            values: self.journal.values.clone(),
            owner,
        }
    }

    /// Answers the units that cannot be repeated, because the journal is too long or their
    /// transaction contains the end of another one.
    pub(super) fn give_up_lost(&mut self) -> Result<(), Stop> {
        let in_transaction = self.journal.status != TransactionStatus::Idle && !self.journal.has_failed;
        if self.journal.is_lost {
            self.fail_transaction(&not_repeated())?;
            while self.journal.has_unanswered() {
                let status = match self.doomed.take() {
                    Some(_) => TransactionStatus::Failed,
                    None => self.journal.status,
                };
                self.answer_with(&not_repeated(), status)?;
            }
            self.journal.is_lost = false;
        } else if self.journal.is_unrepeatable && in_transaction {
            self.fail_transaction(&not_repeated())?;
        }
        Ok(())
    }

    /// Answers the oldest unit with an error. If a transaction was open, it has failed: without a
    /// unit, the next one gets the error.
    pub(super) fn fail_transaction(&mut self, error: &Error) -> Result<(), Stop> {
        if self.journal.status == TransactionStatus::Idle {
            return match self.journal.units.is_empty() {
                true => Ok(()),
                false => self.answer_with(error, TransactionStatus::Idle),
            };
        }
        self.has_aborted |= self.journal.status == TransactionStatus::InTransaction;
        self.journal.transaction_failed();
        self.doomed = Some(error.clone());
        self.answer_doomed().map(drop)
    }

    /// Fails the open transaction, of which nothing was committed, and its COMMIT if that was sent, if
    /// the database has moved by a mechanism that aborts transactions.
    fn abort_if_moved(&mut self) -> Result<(), Stop> {
        let (partition, epoch) = (self.identity.tenant.partition, self.owner.epoch);
        let is_open = self.journal.status != TransactionStatus::Idle;
        if !is_open || !self.cluster.aborts_transactions(partition, epoch) {
            return Ok(());
        }
        self.fail_transaction(&aborted_by_move())
    }

    pub(super) fn answer_with(&mut self, error: &Error, status: TransactionStatus) -> Result<(), Stop> {
        let mut message = Vec::new();
        backend::error(&mut message, error, Severity::Error);
        match self.journal.fail(&message, status) {
            true => Ok(()),
            // The client waits for the rest of a message that no session can send any more.
            false => Err(Stop::End),
        }
    }
}

fn not_repeated() -> Error {
    let message = "could not continue the transaction, because the database was moved to another node";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message).hint("Retry the transaction.")
}

fn aborted_by_move() -> Error {
    let message = "the transaction was aborted, because the database was moved to another node";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message)
        .detail("The mechanisms \"stop\" and \"flush\" abort open transactions.")
        .hint("Retry the transaction.")
}

fn changed() -> Error {
    let message = "could not repeat the transaction after the database was moved to another node";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message)
        .detail("A statement returned something else than before.")
        .hint("Retry the transaction.")
}

const OUTCOME_UNKNOWN: &str = "08007";

/// A transaction within the query was committed, then the database was moved.
fn executed_in_part() -> Error {
    let message = "the database was moved to another node after a part of the query was committed";
    Error::new(OUTCOME_UNKNOWN, message)
        .detail("The transactions that the query has committed are durable. The rest was not executed.")
        .hint("Query the data for the result.")
}

pub(super) fn unknown_outcome(id: u64) -> Error {
    let message = "the connection to the database's node was lost before its answer arrived";
    let error = Error::new(OUTCOME_UNKNOWN, message);
    match id {
        0 => in_doubt(&error),
        id => error
            .detail(format!("Transaction {id} was committed. Its result is lost."))
            .hint("Do not retry the statement. Query the data for the result."),
    }
}

fn cancelled() -> Error {
    Error::new(sqlstate::QUERY_CANCELED, "canceling statement due to user request")
}

fn cancelled_in_doubt() -> Error {
    in_doubt(&cancelled())
}

/// The error for a client that does not learn whether its statement was committed.
fn in_doubt(error: &Error) -> Error {
    Error::new(OUTCOME_UNKNOWN, error.message())
        .detail("It is not known whether the statement was committed.")
        .hint("Check the data before you retry the statement.")
}

pub(super) fn no_owner(database: &str) -> Error {
    let message = format!("database \"{database}\" is not available");
    Error::new(sqlstate::CANNOT_CONNECT_NOW, message)
        .detail("No node of the cluster has taken it over within 30 s.")
        .hint("Check the nodes in the table fulmar.nodes, and connect again.")
}
