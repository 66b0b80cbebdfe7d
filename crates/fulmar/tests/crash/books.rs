//! The books: what must be in a tenant, by what clients were told.
//!
//! A tenant has three tables:
//!
//! | table | holds |
//! | --- | --- |
//! | `account` | a few hot balances |
//! | `ledger` | an entry for each transaction that asked for its id, which is the key |
//! | `note` | texts, some of them large: files grow, pages split and come free |
//!
//! The balances follow from the ledger, a note's text from its number and length.

use std::collections::BTreeMap;

use anyhow::Context;

use crate::node::Node;
use crate::sql::{Answer, Client};

/// Accounts of a tenant, numbered from 1.
pub const ACCOUNTS: i64 = 4;
/// What each has at first.
pub const FIRST_BALANCE: i64 = 1_000_000;
/// Workers of a tenant; each removes only notes that no other worker does.
pub const WORKERS: usize = 3;
/// A note's text is its number, so many bytes wide, again and again.
pub const TOKEN_BYTES: i64 = 16;

/// An entry of the ledger: a transfer (of nothing, where a transaction only changed notes).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub payer: i64,
    pub payee: i64,
    pub amount: i64,
}

/// What a transaction would change, all or nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    Enter(Entry),
    Add { note: i64, bytes: i64 },
    Remove { note: i64 },
}

/// What a client was told of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Told {
    /// It was committed.
    Yes,
    /// It was refused; or the client rolled it back, or lost the node before it said COMMIT.
    No,
    /// The connection was lost first.
    Nothing,
}

/// A transaction that a client tried.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its id, if the client asked for it; then one of the changes is an entry under it.
    pub xact: Option<i64>,
    pub changes: Vec<Change>,
    pub told: Told,
}

/// What the clients of a tenant heard in a round, in the order of each client.
#[derive(Default, Debug)]
pub struct Heard {
    pub attempts: Vec<Attempt>,
    /// Outcomes that were asked for under load.
    pub answers: Vec<Answer>,
}

/// What must be in one tenant.
pub struct Books {
    pub name: String,
    pub ledger: BTreeMap<i64, Entry>,
    /// Notes and the lengths of their texts, bytes.
    pub notes: BTreeMap<i64, i64>,
    /// Transactions of the last round that nobody was told of.
    pub unanswered: Vec<Attempt>,
    /// What was asked and answered in the last round, under load.
    pub answers: Vec<Answer>,
    /// Ids of transactions that did not happen, of all rounds.
    pub aborted: Vec<i64>,
    /// Those before this index were looked at in earlier rounds.
    pub aborted_before: usize,
    /// Ids of transactions that committed without changing anything.
    pub unchanging: Vec<i64>,
}

impl Books {
    pub fn new(tenant: usize) -> Books {
        Books {
            name: format!("tenant-{tenant}"),
            ledger: BTreeMap::new(),
            notes: BTreeMap::new(),
            unanswered: Vec::new(),
            answers: Vec::new(),
            aborted: Vec::new(),
            aborted_before: 0,
            unchanging: Vec::new(),
        }
    }

    /// Makes the tenant.
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
        tenant.query(&tables).await.context("cannot make the tables")?;
        Ok(())
    }

    pub fn entries(&self) -> usize {
        self.ledger.len()
    }

    /// Enters what clients heard in a round.
    pub fn enter(&mut self, heard: Heard) {
        self.answers = heard.answers;
        for attempt in heard.attempts {
            match (attempt.told, attempt.xact) {
                (Told::Yes, _) => self.apply(&attempt),
                (Told::No, xact) => self.aborted.extend(xact),
                (Told::Nothing, _) => self.unanswered.push(attempt),
            }
        }
    }

    /// A transaction has happened.
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

/// The balances that a ledger adds up to.
pub fn balances(ledger: &BTreeMap<i64, Entry>) -> BTreeMap<i64, i64> {
    let mut balances: BTreeMap<i64, i64> = (1..=ACCOUNTS).map(|id| (id, FIRST_BALANCE)).collect();
    for entry in ledger.values() {
        *balances.entry(entry.payer).or_default() -= entry.amount;
        *balances.entry(entry.payee).or_default() += entry.amount;
    }
    balances
}

/// The text of a note.
pub fn body(note: i64, bytes: i64) -> String {
    format!("{note:016}").repeat((bytes / TOKEN_BYTES) as usize)
}
