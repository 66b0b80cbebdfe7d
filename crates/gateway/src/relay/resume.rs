//! Continues a front's session at the owner of its partition, after the owner has changed or the
//! connection broke.

use std::time::Duration;

use fulmar_engine::{Error, TransactionStatus, sqlstate};
use fulmar_meta::SYSTEM_PARTITION;
use fulmar_pgwire::protocol::backend::{self, Severity};
use fulmar_pgwire::wire::Interrupts;
use tokio::time::{Instant, sleep, timeout};

use super::connect::{Connected, connect, owner_address};
use super::front::{Front, Stop, wait_for_change};
use super::journal::Mismatch;
use super::message::SessionHello;
use crate::cluster::{Owner, TransactionOutcome};
use crate::settings::OWNER;

/// How long to wait for an owner of the partition.
const OWNER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait for a node that no other one can replace: it may be restarting.
const RESTART_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval of attempts, unless the owner changes before.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// The interval after an attempt at an owner that says that it does not own the partition.
const MOVING_INTERVAL: Duration = Duration::from_millis(20);
/// How often a unit is repeated after its node has failed while executing it.
const MAX_REPEATS: u32 = 1;

impl Front {
    /// Continues with another session. Fails if the connection has to end.
    pub(super) async fn resume(&mut self, stop: Stop) -> Result<(), Stop> {
        let may_have_committed = self.may_have_committed();
        self.journal.reset();
        let mut is_in_doubt = false;
        match stop {
            Stop::Moved { in_part: true } => {
                self.journal.transaction_committed();
                self.answer_with(&executed_in_part(), TransactionStatus::Idle)?;
            }
            // A unit that is its own transaction, or ends one, may have been committed.
            Stop::Mismatch if may_have_committed => {
                self.fail_transaction(&unknown_outcome(0))?;
            }
            Stop::Mismatch => self.fail_transaction(&changed())?,
            Stop::Moved { .. } => sleep(MOVING_INTERVAL).await,
            _ => is_in_doubt = !self.journal.units.is_empty(),
        }
        let begun = Instant::now();
        let deadline = begun + OWNER_TIMEOUT;
        loop {
            if let Err(error) = self.cluster.check_available(self.identity.tenant.partition)
                && (error.state() != sqlstate::CANNOT_CONNECT_NOW || begun.elapsed() >= RESTART_TIMEOUT)
            {
                return Err(Stop::Fatal(error));
            }
            if Instant::now() >= deadline {
                return Err(Stop::Fatal(no_owner(&self.identity.tenant.name)));
            }
            if self.handle.is_closing() {
                let message = "terminating connection due to administrator command";
                return Err(Stop::Fatal(Error::new(sqlstate::ADMIN_SHUTDOWN, message)));
            }
            let partition = self.identity.tenant.partition;
            let owner = match self.cluster.find_owner(partition).await {
                Ok(Some(owner)) => owner,
                Ok(None) => {
                    let message = format!("database \"{}\" was dropped", self.identity.tenant.name);
                    return Err(Stop::Fatal(Error::new(sqlstate::DATABASE_DROPPED, message)));
                }
                Err(_) => {
                    sleep(RETRY_INTERVAL).await;
                    continue;
                }
            };
            if !self.check_timeline(owner).await? {
                sleep(RETRY_INTERVAL).await;
                continue;
            }
            if is_in_doubt {
                match self.settle().await {
                    // The owner may have changed meanwhile.
                    Ok(()) => {
                        is_in_doubt = false;
                        continue;
                    }
                    Err(Settle::Stop(stop)) => return Err(stop),
                    Err(Settle::Retry) => {
                        self.wait_for_owner(owner.epoch).await;
                        continue;
                    }
                }
            }
            self.check_account()?;
            self.give_up_lost()?;
            let address = owner_address(&*self.cluster, owner);
            let hello = self.hello(address.clone());
            let connected = tokio::select! {
                connected = connect(&self.context, owner, hello) => connected,
                // A node that was cut off does not answer.
                () = wait_for_change(&*self.cluster, partition, owner.epoch) => Connected::Lost,
            };
            match connected {
                Connected::Accepted(upstream) => {
                    (self.upstream, self.owner) = (upstream, owner);
                    self.journal.begin_again();
                    self.report_owner(address);
                    return Ok(());
                }
                Connected::Refused(message) => {
                    if !self.journal.is_inside_answer() {
                        self.journal.output.extend_from_slice(&message);
                    }
                    return Err(Stop::End);
                }
                Connected::Lost => self.wait_for_owner(owner.epoch).await,
            }
        }
    }

    /// Fails if the database was restored since the client connected: what it has read does not exist
    /// any more. A restore changes the owner's record too, in one transaction, so nothing was restored
    /// if that is the same. Returns false if the catalog cannot be read now.
    async fn check_timeline(&self, owner: Owner) -> Result<bool, Stop> {
        if owner.epoch == self.owner.epoch {
            return Ok(true);
        }
        if self.context.catalog.catch_up().await.is_err() {
            return Ok(false);
        }
        let partition = self.identity.tenant.partition;
        let Some(record) = self.context.catalog.partition(partition) else { return Ok(true) };
        if record.epoch == self.timeline {
            return Ok(true);
        }
        let message = "terminating connection because the database was restored";
        Err(Stop::Fatal(Error::new(sqlstate::ADMIN_SHUTDOWN, message).hint("Connect again.")))
    }

    /// Fails if the client's password was changed since it authenticated: the new session does not
    /// know with which password.
    fn check_account(&self) -> Result<(), Stop> {
        let Some(account) = &self.identity.account else { return Ok(()) };
        let user = self.context.catalog.user(&account.name);
        if user.is_some_and(|user| user.verifier == account.verifier) {
            return Ok(());
        }
        let name = &account.name;
        let message = format!("terminating connection because the password of user \"{name}\" was changed");
        let error = Error::new(sqlstate::INVALID_AUTHORIZATION, message);
        Err(Stop::Fatal(error.hint("Connect with the new password.")))
    }

    /// Returns true if the oldest unit may have been committed before its answer was compared.
    fn may_have_committed(&self) -> bool {
        let is_idle = self.journal.status == TransactionStatus::Idle;
        // While the open transaction is repeated, the units that follow it are not sent.
        let unit = self.journal.units.front().filter(|unit| !unit.is_answered);
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
            address: self.identity.address,
            pid: self.handle.pid,
            secret: self.handle.secret(),
            defaults: self.defaults.clone(),
            values: self.journal.values.clone(),
            owner,
        }
    }

    async fn wait_for_owner(&self, epoch: u32) {
        let changed = self.cluster.owner_changed(self.identity.tenant.partition, epoch);
        let _ = timeout(RETRY_INTERVAL, changed).await; // tries again in either case
    }

    /// Finds out the outcome of the units without an answer, whose session is lost. Answers those
    /// that were committed; the others are repeated.
    async fn settle(&mut self) -> Result<(), Settle> {
        let ids = self.journal.transactions_in_doubt();
        let is_system = self.identity.tenant.partition == SYSTEM_PARTITION;
        let mut outcomes = Vec::with_capacity(ids.len());
        for id in ids.iter().copied() {
            outcomes.push(match id {
                // Statements about databases and users are no transactions of the engine.
                _ if is_system => TransactionOutcome::Forgotten,
                0 => TransactionOutcome::Forgotten,
                id => {
                    let partition = self.identity.tenant.partition;
                    self.cluster.outcome(partition, id).await.map_err(|_| Settle::Retry)?
                }
            });
        }
        // The last unit whose transaction may have been committed, and the end of that transaction:
        // all units up to it were executed.
        let last = outcomes.iter().rposition(|outcome| *outcome != TransactionOutcome::Aborted);
        let answered = last.map_or(0, |last| self.journal.end_of_transaction(last) + 1);
        if answered == 1 && outcomes[0] == TransactionOutcome::Committed {
            let first = self.journal.units.front();
            if first.is_some_and(|unit| unit.is_commit && !unit.is_partly_answered()) {
                self.journal.answer_commit();
                return Ok(());
            }
            match self.journal.answer_committed() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                // The client has got the beginning of another answer from an earlier session.
                Err(Mismatch) => return Err(Settle::Stop(Stop::End)),
            }
        }
        for index in 0..answered {
            // Later units may belong to the last transaction.
            let of = index.min(last.unwrap_or_default());
            let error = match outcomes[of] {
                TransactionOutcome::Committed => unknown_outcome(ids[of]),
                TransactionOutcome::Forgotten => unknown_outcome(0),
                TransactionOutcome::Aborted => lost_answer(),
            };
            self.answer_with(&error, TransactionStatus::Idle)?;
        }
        let is_repeated_again = self.journal.units.front_mut().is_some_and(|unit| {
            unit.repeats += 1;
            unit.repeats > MAX_REPEATS
        });
        if is_repeated_again {
            self.fail_transaction(&crashed_again())?;
        }
        Ok(())
    }

    /// Answers the units that cannot be repeated, because the journal is too long or their
    /// transaction contains the end of another one.
    fn give_up_lost(&mut self) -> Result<(), Stop> {
        let in_transaction = self.journal.status != TransactionStatus::Idle && !self.journal.has_failed;
        if self.journal.is_lost {
            self.fail_transaction(&not_repeated())?;
            while !self.journal.units.is_empty() && !self.journal.units.iter().all(|unit| unit.is_discarded) {
                let status = self.journal.status;
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
    fn fail_transaction(&mut self, error: &Error) -> Result<(), Stop> {
        let in_transaction = self.journal.status != TransactionStatus::Idle;
        if in_transaction {
            self.journal.transaction_failed();
            self.journal.answer_closes();
        }
        if self.journal.units.is_empty() {
            self.doomed = in_transaction.then(|| error.clone());
            return Ok(());
        }
        let status = if in_transaction { TransactionStatus::Failed } else { TransactionStatus::Idle };
        self.answer_with(error, status)
    }

    fn answer_with(&mut self, error: &Error, status: TransactionStatus) -> Result<(), Stop> {
        let mut message = Vec::new();
        backend::error(&mut message, error, Severity::Error);
        match self.journal.fail(&message, status) {
            true => Ok(()),
            // The client waits for the rest of a message that no session can send any more.
            false => Err(Stop::End),
        }
    }
}

enum Settle {
    /// The owner does not answer.
    Retry,
    Stop(Stop),
}

impl From<Stop> for Settle {
    fn from(stop: Stop) -> Settle {
        Settle::Stop(stop)
    }
}

fn not_repeated() -> Error {
    let message = "could not continue the transaction, because the database was moved to another node";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message).hint("Retry the transaction.")
}

fn changed() -> Error {
    let message = "could not repeat the transaction after the database was moved to another node";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message)
        .detail("A statement returned something else than before.")
        .hint("Retry the transaction.")
}

fn crashed_again() -> Error {
    const CRASH_SHUTDOWN: &str = "57P02";
    Error::new(CRASH_SHUTDOWN, "the database's node failed twice while it executed the statement")
        .detail("The statement had no effect.")
        .hint("Do not retry it before you know that it is not the cause.")
}

const OUTCOME_UNKNOWN: &str = "08007";

/// A transaction within the query was committed, then the database was moved.
fn executed_in_part() -> Error {
    let message = "the database was moved to another node after a part of the query was committed";
    Error::new(OUTCOME_UNKNOWN, message)
        .detail("The transactions that the query has committed are durable. The rest was not executed.")
        .hint("Query the data for the result.")
}

/// The session has executed a statement without effect before one that was committed.
fn lost_answer() -> Error {
    let message = "the connection to the database's node was lost before its answer arrived";
    Error::new(sqlstate::SERIALIZATION_FAILURE, message)
        .detail("The statement had no effect. A later statement was committed.")
        .hint("Retry the statement if its result is needed.")
}

fn unknown_outcome(id: u64) -> Error {
    let message = "the connection to the database's node was lost before its answer arrived";
    let error = Error::new(OUTCOME_UNKNOWN, message);
    match id {
        0 => error
            .detail("It is not known whether the statement was committed.")
            .hint("Check the data before you retry the statement."),
        id => error
            .detail(format!("Transaction {id} was committed. Its result is lost."))
            .hint("Do not retry the statement. Query the data for the result."),
    }
}

pub(super) fn no_owner(database: &str) -> Error {
    let message = format!("database \"{database}\" is not available");
    Error::new(sqlstate::CANNOT_CONNECT_NOW, message)
        .detail("No node of the cluster has taken it over within 30 s.")
        .hint("Check the nodes in the table fulmar.nodes, and connect again.")
}
