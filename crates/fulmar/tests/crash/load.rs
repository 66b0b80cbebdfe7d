//! The load: clients that write down what they try and what they are told.
//!
//! | weight | a worker's transaction |
//! | --- | --- |
//! | 8 | BEGIN, its id, a transfer between two accounts, its entry, COMMIT |
//! | 1 | the same, rolled back |
//! | 2 | BEGIN, its id, a note removed, two large ones inserted, an entry, COMMIT |
//! | 3 | a small note, autocommitted, by the extended protocol |
//! | 1 | a large one |
//! | 3 | a note removed, autocommitted |
//!
//! An asker asks for outcomes of transactions while they run: asking decides, so some of them are refused then.
//! All go on until the node is gone.

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

use crate::books::{ACCOUNTS, Attempt, Books, Change, Entry, Heard, TOKEN_BYTES, Told, WORKERS, body};
use crate::node::Node;
use crate::sql::{self, Answer, Client};

/// Clients notice at once that a killed node is gone.
const END_TIMEOUT: Duration = Duration::from_secs(120);
/// With more notes than this a worker removes one instead of inserting one.
const MOST_NOTES: usize = 24;
/// What a small note may be long, in tokens; and a large one: up to 16 pages.
const SMALL: std::ops::RangeInclusive<i64> = 1..=12;
const LARGE: std::ops::RangeInclusive<i64> = 256..=4096;

/// What the clients of one tenant tell each other while they run.
#[derive(Default)]
pub struct Tenant {
    pub name: String,
    /// Ids of transactions that have begun, in order.
    begun: Mutex<Vec<i64>>,
    /// Ids of transactions that were acknowledged.
    acknowledged: Mutex<Vec<i64>>,
}

impl Tenant {
    fn note_begun(&self, xact: i64) {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).push(xact);
    }

    fn note_acknowledged(&self, xact: i64) {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).push(xact);
    }

    /// What is acknowledged by now.
    pub fn acknowledged(&self) -> Vec<i64> {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The newest id that has begun.
    fn newest(&self) -> Option<i64> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).last().copied()
    }
}

/// All clients of a round.
pub struct Clients {
    pub tenants: Vec<Arc<Tenant>>,
    workers: Vec<Vec<JoinHandle<anyhow::Result<Vec<Attempt>>>>>,
    askers: Vec<JoinHandle<anyhow::Result<Vec<Answer>>>>,
}

/// Starts the load on all tenants.
pub fn start(node: &Node, round: u64, books: &[Books], random: &mut StdRng) -> Clients {
    let mut clients = Clients { tenants: Vec::new(), workers: Vec::new(), askers: Vec::new() };
    for books in books {
        let tenant = Arc::new(Tenant { name: books.name.clone(), ..Tenant::default() });
        let workers = (0..WORKERS).map(|number| {
            let worker = Worker {
                tenant: tenant.clone(),
                random: StdRng::seed_from_u64(random.random()),
                notes: books.notes.keys().copied().skip(number).step_by(WORKERS).collect(),
                // Numbers that nobody else gives, in any round.
                next_note: (round as i64 * WORKERS as i64 + number as i64) * 1_000_000,
                attempts: Vec::new(),
            };
            tokio::spawn(worker.run(node.sql))
        });
        clients.workers.push(workers.collect());
        let pause = Duration::from_millis(random.random_range(1..=20));
        clients.askers.push(tokio::spawn(ask(tenant.clone(), node.sql, pause)));
        clients.tenants.push(tenant);
    }
    clients
}

impl Clients {
    /// Waits for all of them, when the node is gone. Answers what was heard, tenant by tenant.
    pub async fn join(self) -> anyhow::Result<Vec<Heard>> {
        let mut all = Vec::new();
        for (workers, asker) in self.workers.into_iter().zip(self.askers) {
            let mut heard = Heard::default();
            for worker in workers {
                heard.attempts.extend(join(worker).await?);
            }
            heard.answers = join(asker).await?;
            all.push(heard);
        }
        Ok(all)
    }
}

/// Waits for a client, when the node is gone.
pub async fn join<T>(client: JoinHandle<anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::time::timeout(END_TIMEOUT, client).await.context("a client hangs though the node is gone")??
}

/// What an error tells of the statement that it answers.
///
/// Only the errors that this load can cause are expected; any other is a defect.
pub fn told_by(error: &Error) -> anyhow::Result<Told> {
    match error.code() {
        None if is_lost(error) => Ok(Told::Nothing),
        Some(&SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED) => Ok(Told::No),
        // The node ends; whether what was sent has been run, this does not tell.
        Some(&SqlState::ADMIN_SHUTDOWN) => Ok(Told::Nothing),
        _ => bail!("a client got an error that it should not get: {error:?}"),
    }
}

/// Whether the error is that the connection is gone.
fn is_lost(error: &Error) -> bool {
    error.is_closed() || error.source().is_some_and(|source| source.is::<std::io::Error>())
}

struct Worker {
    tenant: Arc<Tenant>,
    random: StdRng,
    /// Notes that this worker knows to be there, and alone removes.
    notes: Vec<i64>,
    next_note: i64,
    attempts: Vec<Attempt>,
}

/// How a transaction is to end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    Rollback,
}

impl Worker {
    async fn run(mut self, sql: SocketAddr) -> anyhow::Result<Vec<Attempt>> {
        // The node may be gone before it has taken the connection.
        let Ok(client) = Client::connect_to(sql, &self.tenant.name).await else { return Ok(self.attempts) };
        while self.one(&client).await? {}
        Ok(self.attempts)
    }

    /// One transaction. Answers whether there may be another.
    async fn one(&mut self, client: &Client) -> anyhow::Result<bool> {
        let crowded = self.notes.len() >= MOST_NOTES;
        match self.random.random_range(0..18) {
            0..8 => self.transfer(client, End::Commit).await,
            8 => self.transfer(client, End::Rollback).await,
            9..11 => self.exchange(client).await,
            11..14 if !crowded => self.insert(client, SMALL).await,
            14 if !crowded => self.insert(client, LARGE).await,
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

    /// A note goes, two come.
    async fn exchange(&mut self, client: &Client) -> anyhow::Result<bool> {
        let Some(old) = self.notes.pop() else { return self.insert(client, LARGE).await };
        let mut statements = vec![format!("DELETE FROM note WHERE id = {old}")];
        let mut changes = vec![Change::Remove { note: old }];
        for _ in 0..2 {
            let (note, bytes) = self.new_note(LARGE);
            statements.push(format!("INSERT INTO note (id, body) VALUES ({note}, '{}')", body(note, bytes)));
            changes.push(Change::Add { note, bytes });
        }
        let nothing = Entry { payer: 1, payee: 1, amount: 0 };
        self.transaction(client, nothing, statements, changes, End::Commit).await
    }

    /// A transaction with an id, an entry of the ledger, and what else it does.
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
            Err(error) => return self.go_on(client, told_by(&error)?).await,
        };
        self.tenant.note_begun(xact);
        let Entry { payer, payee, amount } = entry;
        statements.push(format!("INSERT INTO ledger VALUES ({xact}, {payer}, {payee}, {amount})"));
        changes.push(Change::Enter(entry));
        for statement in &statements {
            if let Err(error) = client.query(statement).await {
                // COMMIT was never said.
                self.attempts.push(Attempt { xact: Some(xact), changes, told: Told::No });
                return self.go_on(client, told_by(&error)?).await;
            }
        }
        if end == End::Rollback {
            self.attempts.push(Attempt { xact: Some(xact), changes, told: Told::No });
            return self.go_on(client, Told::No).await;
        }
        let told = match client.query("COMMIT").await {
            Ok(_) => Told::Yes,
            Err(error) => told_by(&error)?,
        };
        if told == Told::Yes {
            self.tenant.note_acknowledged(xact);
        }
        self.done(Attempt { xact: Some(xact), changes, told });
        Ok(told != Told::Nothing)
    }

    /// Ends what is open after an error, or because the client wants it. Answers whether the connection lives.
    async fn go_on(&mut self, client: &Client, told: Told) -> anyhow::Result<bool> {
        match (told, client.query("ROLLBACK").await) {
            (Told::Nothing, _) => Ok(false),
            (_, Ok(_)) => Ok(true),
            (_, Err(error)) => told_by(&error).map(|told| told != Told::Nothing),
        }
    }

    async fn insert(
        &mut self,
        client: &Client,
        tokens: std::ops::RangeInclusive<i64>,
    ) -> anyhow::Result<bool> {
        let (note, bytes) = self.new_note(tokens);
        let result = client.insert_note(note, &body(note, bytes)).await;
        self.autocommitted(result.map(|_| ()), Change::Add { note, bytes })
    }

    async fn remove(&mut self, client: &Client) -> anyhow::Result<bool> {
        if self.notes.is_empty() {
            return self.insert(client, SMALL).await;
        }
        let at = self.random.random_range(0..self.notes.len());
        let note = self.notes.swap_remove(at);
        let result = client.query(&format!("DELETE FROM note WHERE id = {note}")).await;
        self.autocommitted(result.map(|_| ()), Change::Remove { note })
    }

    fn autocommitted(&mut self, result: Result<(), Error>, change: Change) -> anyhow::Result<bool> {
        let told = match result {
            Ok(()) => Told::Yes,
            Err(error) => told_by(&error)?,
        };
        self.done(Attempt { xact: None, changes: vec![change], told });
        Ok(told != Told::Nothing)
    }

    fn done(&mut self, attempt: Attempt) {
        if attempt.told == Told::Yes {
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

/// Asks for the newest transaction's outcome, again and again.
async fn ask(tenant: Arc<Tenant>, sql: SocketAddr, pause: Duration) -> anyhow::Result<Vec<Answer>> {
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
            Err(error) => match error.downcast_ref().map(told_by) {
                Some(Ok(Told::Nothing)) => return Ok(answers),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(error),
            },
        }
    }
}
