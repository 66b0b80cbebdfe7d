//! The load: clients that record their transactions and the responses.
//!
//! | weight | transaction of a worker |
//! | --- | --- |
//! | 8 | BEGIN, get its id, transfer between two accounts, insert a ledger entry, COMMIT |
//! | 1 | the same, rolled back |
//! | 2 | BEGIN, get its id, delete a note, insert two large ones and a ledger entry, COMMIT |
//! | 3 | insert a small note, autocommitted, over the extended protocol |
//! | 1 | insert a large note, likewise |
//! | 3 | delete a note, autocommitted |
//!
//! An outcome poller queries the outcomes of running transactions. Such a query decides the
//! outcome, so it aborts some of them. All clients continue until the node is gone.

use std::error::Error as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinHandle;
use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use crate::books::{
    ACCOUNTS, Attempt, Books, Change, ClientOutcome, Entry, RoundRecord, TOKEN_BYTES, WORKERS, body,
};
use crate::node::Node;
use crate::sql::{self, Client, QueriedOutcome};

/// Timeout for a client to end after the node was killed, which it should detect immediately.
const END_TIMEOUT: Duration = Duration::from_secs(120);
/// A worker with this many notes deletes one instead of inserting one.
const MAX_NOTES: usize = 24;
/// Length of a small note in tokens.
const SMALL_NOTE: std::ops::RangeInclusive<i64> = 1..=12;
/// Length of a large note in tokens: up to 16 pages.
const LARGE_NOTE: std::ops::RangeInclusive<i64> = 256..=4096;

/// State that the clients of one tenant share while they run.
#[derive(Default)]
pub struct Tenant {
    pub name: String,
    /// Ids of transactions that have begun, in order.
    begun: Mutex<Vec<i64>>,
    /// Ids of acknowledged transactions.
    acknowledged: Mutex<Vec<i64>>,
}

impl Tenant {
    fn note_begun(&self, xact: i64) {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).push(xact);
    }

    fn note_acknowledged(&self, xact: i64) {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).push(xact);
    }

    /// Returns the ids of the transactions acknowledged so far.
    pub fn acknowledged(&self) -> Vec<i64> {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the id of the transaction that has begun last.
    fn newest(&self) -> Option<i64> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).last().copied()
    }
}

/// All clients of a round.
pub struct Clients {
    pub tenants: Vec<Arc<Tenant>>,
    workers: Vec<Vec<JoinHandle<anyhow::Result<Vec<Attempt>>>>>,
    outcome_pollers: Vec<JoinHandle<anyhow::Result<Vec<QueriedOutcome>>>>,
}

/// Starts the load on all tenants.
pub fn start(node: &Node, round: u64, books: &[Books], random: &mut StdRng) -> Clients {
    let mut clients = Clients { tenants: Vec::new(), workers: Vec::new(), outcome_pollers: Vec::new() };
    for books in books {
        let tenant = Arc::new(Tenant { name: books.name.clone(), ..Tenant::default() });
        let workers = (0..WORKERS).map(|number| {
            let worker = Worker {
                tenant: tenant.clone(),
                random: StdRng::seed_from_u64(random.random()),
                notes: books.notes.keys().copied().skip(number).step_by(WORKERS).collect(),
                // Ids that no other worker uses in any round.
                next_note: (round as i64 * WORKERS as i64 + number as i64) * 1_000_000,
                attempts: Vec::new(),
            };
            tokio::spawn(worker.run(node.sql))
        });
        clients.workers.push(workers.collect());
        let pause = Duration::from_millis(random.random_range(1..=20));
        clients.outcome_pollers.push(tokio::spawn(poll_outcomes(tenant.clone(), node.sql, pause)));
        clients.tenants.push(tenant);
    }
    clients
}

impl Clients {
    /// Waits for all clients after the node is gone. Returns their records for each tenant.
    pub async fn join(self) -> anyhow::Result<Vec<RoundRecord>> {
        let mut all = Vec::new();
        for (workers, poller) in self.workers.into_iter().zip(self.outcome_pollers) {
            let mut heard = RoundRecord::default();
            for worker in workers {
                heard.attempts.extend(join(worker).await?);
            }
            heard.queried_outcomes = join(poller).await?;
            all.push(heard);
        }
        Ok(all)
    }
}

/// Waits for a client after the node is gone.
pub async fn join<T>(client: JoinHandle<anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::time::timeout(END_TIMEOUT, client).await.context("a client hangs after the node is gone")??
}

/// Returns the outcome of a statement that failed with `error`.
///
/// Fails on errors that this load must not cause.
pub fn outcome_of_error(error: &Error) -> anyhow::Result<ClientOutcome> {
    match error.code() {
        None if is_lost(error) => Ok(ClientOutcome::Unknown),
        Some(&SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED) => {
            Ok(ClientOutcome::NotCommitted)
        }
        // A shutdown error does not say whether the statement has been executed.
        Some(&SqlState::ADMIN_SHUTDOWN) => Ok(ClientOutcome::Unknown),
        _ => bail!("a client received an unexpected error: {error:?}"),
    }
}

/// Returns true if the connection is lost.
fn is_lost(error: &Error) -> bool {
    error.is_closed() || error.source().is_some_and(|source| source.is::<std::io::Error>())
}

struct Worker {
    tenant: Arc<Tenant>,
    random: StdRng,
    /// Existing notes that only this worker deletes.
    notes: Vec<i64>,
    next_note: i64,
    attempts: Vec<Attempt>,
}

/// How a transaction ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    Rollback,
}

impl Worker {
    async fn run(mut self, sql: SocketAddr) -> anyhow::Result<Vec<Attempt>> {
        // The node may be gone before it has accepted the connection.
        let Ok(client) = Client::connect_to(sql, &self.tenant.name).await else { return Ok(self.attempts) };
        while self.run_transaction(&client).await? {}
        Ok(self.attempts)
    }

    /// Runs one transaction. Returns false if the connection is lost.
    async fn run_transaction(&mut self, client: &Client) -> anyhow::Result<bool> {
        let is_full = self.notes.len() >= MAX_NOTES;
        match self.random.random_range(0..18) {
            0..8 => self.transfer(client, End::Commit).await,
            8 => self.transfer(client, End::Rollback).await,
            9..11 => self.exchange(client).await,
            11..14 if !is_full => self.insert(client, SMALL_NOTE).await,
            14 if !is_full => self.insert(client, LARGE_NOTE).await,
            _ => self.remove(client).await,
        }
    }

    async fn transfer(&mut self, client: &Client, end: End) -> anyhow::Result<bool> {
        let payer = self.random.random_range(1..=ACCOUNTS);
        let payee = (payer + self.random.random_range(0..ACCOUNTS - 1)) % ACCOUNTS + 1;
        let amount = self.random.random_range(1..=9);
        let statements = vec![
            format!("UPDATE account SET balance = balance - {amount} WHERE id = {payer}"),
            format!("UPDATE account SET balance = balance + {amount} WHERE id = {payee}"),
        ];
        self.transaction(client, Entry { payer, payee, amount }, statements, Vec::new(), end).await
    }

    /// Deletes a note and inserts two.
    async fn exchange(&mut self, client: &Client) -> anyhow::Result<bool> {
        let Some(old) = self.notes.pop() else { return self.insert(client, LARGE_NOTE).await };
        let mut statements = vec![format!("DELETE FROM note WHERE id = {old}")];
        let mut changes = vec![Change::Remove { note: old }];
        for _ in 0..2 {
            let (note, bytes) = self.new_note(LARGE_NOTE);
            statements.push(format!("INSERT INTO note (id, body) VALUES ({note}, '{}')", body(note, bytes)));
            changes.push(Change::Add { note, bytes });
        }
        let no_transfer = Entry { payer: 1, payee: 1, amount: 0 };
        self.transaction(client, no_transfer, statements, changes, End::Commit).await
    }

    /// Runs a transaction that gets its id, executes the statements and inserts a ledger entry.
    async fn transaction(
        &mut self,
        client: &Client,
        entry: Entry,
        mut statements: Vec<String>,
        mut changes: Vec<Change>,
        end: End,
    ) -> anyhow::Result<bool> {
        let begun = client.query("BEGIN; SELECT pg_current_xact_id()").await;
        let xact: i64 = match begun {
            Ok(rows) => sql::number(rows.first().context("no transaction id")?, 0)?,
            Err(error) => return self.roll_back(client, outcome_of_error(&error)?).await,
        };
        self.tenant.note_begun(xact);
        let Entry { payer, payee, amount } = entry;
        statements.push(format!("INSERT INTO ledger VALUES ({xact}, {payer}, {payee}, {amount})"));
        changes.push(Change::Enter(entry));
        for statement in &statements {
            if let Err(error) = client.query(statement).await {
                // COMMIT was not sent.
                self.attempts.push(Attempt {
                    xact: Some(xact),
                    changes,
                    outcome: ClientOutcome::NotCommitted,
                });
                return self.roll_back(client, outcome_of_error(&error)?).await;
            }
        }
        if end == End::Rollback {
            self.attempts.push(Attempt { xact: Some(xact), changes, outcome: ClientOutcome::NotCommitted });
            return self.roll_back(client, ClientOutcome::NotCommitted).await;
        }
        let outcome = match client.query("COMMIT").await {
            Ok(_) => ClientOutcome::Acknowledged,
            Err(error) => outcome_of_error(&error)?,
        };
        if outcome == ClientOutcome::Acknowledged {
            self.tenant.note_acknowledged(xact);
        }
        self.record(Attempt { xact: Some(xact), changes, outcome });
        Ok(outcome != ClientOutcome::Unknown)
    }

    /// Rolls back after an error, or as planned. Returns false if the connection is lost.
    async fn roll_back(&mut self, client: &Client, outcome: ClientOutcome) -> anyhow::Result<bool> {
        match (outcome, client.query("ROLLBACK").await) {
            (ClientOutcome::Unknown, _) => Ok(false),
            (_, Ok(_)) => Ok(true),
            (_, Err(error)) => outcome_of_error(&error).map(|outcome| outcome != ClientOutcome::Unknown),
        }
    }

    async fn insert(
        &mut self,
        client: &Client,
        tokens: std::ops::RangeInclusive<i64>,
    ) -> anyhow::Result<bool> {
        let (note, bytes) = self.new_note(tokens);
        let result = client.insert_note(note, &body(note, bytes)).await;
        self.record_autocommit(result.map(|_| ()), Change::Add { note, bytes })
    }

    async fn remove(&mut self, client: &Client) -> anyhow::Result<bool> {
        if self.notes.is_empty() {
            return self.insert(client, SMALL_NOTE).await;
        }
        let index = self.random.random_range(0..self.notes.len());
        let note = self.notes.swap_remove(index);
        let result = client.query(&format!("DELETE FROM note WHERE id = {note}")).await;
        self.record_autocommit(result.map(|_| ()), Change::Remove { note })
    }

    fn record_autocommit(&mut self, result: Result<(), Error>, change: Change) -> anyhow::Result<bool> {
        let outcome = match result {
            Ok(()) => ClientOutcome::Acknowledged,
            Err(error) => outcome_of_error(&error)?,
        };
        self.record(Attempt { xact: None, changes: vec![change], outcome });
        Ok(outcome != ClientOutcome::Unknown)
    }

    fn record(&mut self, attempt: Attempt) {
        if attempt.outcome == ClientOutcome::Acknowledged {
            self.notes.extend(attempt.changes.iter().filter_map(|change| match change {
                Change::Add { note, .. } => Some(*note),
                _ => None,
            }));
        }
        self.attempts.push(attempt);
    }

    fn new_note(&mut self, tokens: std::ops::RangeInclusive<i64>) -> (i64, i64) {
        self.next_note += 1;
        (self.next_note, TOKEN_BYTES * self.random.random_range(tokens))
    }
}

/// Queries the outcome of the newest transaction periodically.
async fn poll_outcomes(
    tenant: Arc<Tenant>,
    sql: SocketAddr,
    pause: Duration,
) -> anyhow::Result<Vec<QueriedOutcome>> {
    let mut answers = Vec::new();
    let Ok(client) = Client::connect_to(sql, &tenant.name).await else { return Ok(answers) };
    loop {
        tokio::time::sleep(pause).await;
        let Some(xact) = tenant.newest() else {
            match client.is_closed() {
                true => return Ok(answers),
                false => continue,
            }
        };
        match client.outcome(xact).await {
            Ok(outcome) => answers.push((xact, outcome)),
            Err(error) => match error.downcast_ref().map(outcome_of_error) {
                Some(Ok(ClientOutcome::Unknown)) => return Ok(answers),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(error),
            },
        }
    }
}
