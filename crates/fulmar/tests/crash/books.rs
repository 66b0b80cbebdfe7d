//! The model of a tenant: the contents that follow from the responses that clients received.
//!
//! A tenant has three tables:
//!
//! | table | contents |
//! | --- | --- |
//! | `account` | a few hot balances |
//! | `ledger` | an entry for each transaction that has requested its id, which is the key |
//! | `note` | texts, some of them large: files grow, pages are split and freed |
//!
//! The balances follow from the ledger, and the text of a note follows from its id and length.

use std::collections::BTreeMap;

use anyhow::Context;

use crate::node::Node;
use crate::sql::{Client, QueriedOutcome};

/// Number of accounts of a tenant. Their ids start at 1.
pub const ACCOUNTS: i64 = 4;
/// Initial balance of each account.
pub const FIRST_BALANCE: i64 = 1_000_000;
/// Number of workers of a tenant. Each one deletes only its own notes.
pub const WORKERS: usize = 3;
/// The text of a note repeats its id, formatted with this width.
pub const TOKEN_BYTES: i64 = 16;

/// An entry of the ledger: a transfer, with amount 0 for a transaction that changes only notes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub payer: i64,
    pub payee: i64,
    pub amount: i64,
}

/// A change by a transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    Enter(Entry),
    Add { note: i64, bytes: i64 },
    Remove { note: i64 },
}

/// The outcome of a transaction as its client knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientOutcome {
    /// Acknowledged: the node has confirmed the commit.
    Acknowledged,
    /// Not committed: the node has rejected it, or the client has rolled it back or has lost the
    /// connection before it sent COMMIT.
    NotCommitted,
    /// Unknown: the connection was lost before the response.
    Unknown,
}

/// A transaction attempted by a client.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its id, if the client has requested it. Then one of the changes is a ledger entry with this
    /// key.
    pub xact: Option<i64>,
    pub changes: Vec<Change>,
    pub outcome: ClientOutcome,
}

/// The transactions of a tenant's clients in a round, in the order of each client.
#[derive(Default, Debug)]
pub struct RoundRecord {
    pub attempts: Vec<Attempt>,
    /// Outcomes queried under load.
    pub queried_outcomes: Vec<QueriedOutcome>,
}

/// The expected contents of one tenant.
pub struct Books {
    pub name: String,
    pub ledger: BTreeMap<i64, Entry>,
    /// Notes with the lengths of their texts in bytes.
    pub notes: BTreeMap<i64, i64>,
    /// Transactions of the last round with an unknown outcome.
    pub unknown: Vec<Attempt>,
    /// Outcomes queried under load in the last round.
    pub queried_outcomes: Vec<QueriedOutcome>,
    /// Ids of transactions that did not commit, of all rounds.
    pub aborted: Vec<i64>,
    /// Number of ids in `aborted` that were checked in earlier rounds.
    pub checked_aborted: usize,
    /// Ids of committed read-only transactions.
    pub read_only: Vec<i64>,
}

impl Books {
    pub fn new(tenant: usize) -> Books {
        Books {
            name: format!("tenant-{tenant}"),
            ledger: BTreeMap::new(),
            notes: BTreeMap::new(),
            unknown: Vec::new(),
            queried_outcomes: Vec::new(),
            aborted: Vec::new(),
            checked_aborted: 0,
            read_only: Vec::new(),
        }
    }

    /// Creates the tenant and its tables.
    pub async fn create(&self, node: &Node) -> anyhow::Result<()> {
        let system = Client::connect(node, "fulmar").await?;
        system
            .query(&format!("CREATE DATABASE \"{}\"", self.name))
            .await
            .context("cannot create a tenant")?;
        let accounts: Vec<String> = (1..=ACCOUNTS).map(|id| format!("({id}, {FIRST_BALANCE})")).collect();
        let tables = format!(
            "CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL);
             CREATE TABLE ledger (xact INTEGER PRIMARY KEY, payer INTEGER NOT NULL REFERENCES account (id),
                                  payee INTEGER NOT NULL REFERENCES account (id), amount INTEGER NOT NULL);
             CREATE INDEX ledger_payer ON ledger (payer, amount);
             CREATE TABLE note (id INTEGER PRIMARY KEY, body TEXT NOT NULL);
             INSERT INTO account (id, balance) VALUES {}",
            accounts.join(", ")
        );
        let tenant = Client::connect(node, &self.name).await?;
        tenant.query(&tables).await.context("cannot create the tables")?;
        Ok(())
    }

    pub fn entries(&self) -> usize {
        self.ledger.len()
    }

    /// Applies the transactions of a round.
    pub fn apply_round(&mut self, record: RoundRecord) {
        self.queried_outcomes = record.queried_outcomes;
        for attempt in record.attempts {
            match (attempt.outcome, attempt.xact) {
                (ClientOutcome::Acknowledged, _) => self.apply(&attempt),
                (ClientOutcome::NotCommitted, xact) => self.aborted.extend(xact),
                (ClientOutcome::Unknown, _) => self.unknown.push(attempt),
            }
        }
    }

    /// Applies a committed transaction.
    pub fn apply(&mut self, attempt: &Attempt) {
        for change in &attempt.changes {
            match change {
                Change::Enter(entry) => drop(self.ledger.insert(attempt.xact.unwrap_or_default(), *entry)),
                Change::Add { note, bytes } => drop(self.notes.insert(*note, *bytes)),
                Change::Remove { note } => drop(self.notes.remove(note)),
            }
        }
    }
}

/// Computes the balances from a ledger.
pub fn balances(ledger: &BTreeMap<i64, Entry>) -> BTreeMap<i64, i64> {
    let mut balances: BTreeMap<i64, i64> = (1..=ACCOUNTS).map(|id| (id, FIRST_BALANCE)).collect();
    for entry in ledger.values() {
        *balances.entry(entry.payer).or_default() -= entry.amount;
        *balances.entry(entry.payee).or_default() += entry.amount;
    }
    balances
}

/// Returns the text of a note.
pub fn body(note: i64, bytes: i64) -> String {
    format!("{note:016}").repeat((bytes / TOKEN_BYTES) as usize)
}
