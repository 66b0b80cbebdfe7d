//! A session that runs random transactions on shared tables, and records their outcomes.

use std::collections::HashSet;
use std::time::Duration;

use fulmar_engine::{CancelReason, Error, Value, sqlstate};

use super::SESSIONS;
use crate::common::Client;
use crate::seeds::Random;

/// The required padding of a row.
pub const PAD: &str = "replace(hex(zeroblob(size / 2)), '00', printf('%02d', tag))";

pub async fn make_tables(client: &mut Client) {
    client
        .run("CREATE TABLE stock(id INTEGER PRIMARY KEY, owner INTEGER, n INTEGER, tag INTEGER, size INTEGER, pad TEXT)")
        .await
        .unwrap();
    client.run("CREATE VIRTUAL TABLE words USING fts5(body)").await.unwrap();
    client.run("CREATE INDEX by_owner ON stock(owner, n)").await.unwrap();
    for session in 0..SESSIONS {
        client
            .run(&format!("CREATE TABLE ledger{session}(id INTEGER PRIMARY KEY, n INTEGER, count INTEGER)"))
            .await
            .unwrap();
    }
}

/// A session's record of its transactions, by their numbers in its ledger, and of its tables.
pub struct Account {
    pub session: u64,
    /// Number of its last transaction.
    number: i64,
    /// Its private table exists.
    has_table: bool,
    pub committed: HashSet<i64>,
    /// Transactions whose COMMIT was dropped halfway.
    pub unknown: HashSet<i64>,
}

impl Account {
    pub fn new(session: u64) -> Account {
        Account { session, number: 0, has_table: false, committed: HashSet::new(), unknown: HashSet::new() }
    }

    /// Returns true if the session may cancel and drop its statements.
    fn disturbs(&self) -> bool {
        self.session % 2 == 1
    }
}

/// How a call is disturbed.
#[derive(Clone, Copy, PartialEq)]
enum Disturbance {
    None,
    Cancel,
    Drop,
}

/// Why a transaction ended early.
enum Stop {
    /// Rejected or cancelled: it must leave no changes.
    Failed(Error),
    /// The future was dropped. The session has rolled back, unless it had already committed.
    Dropped,
}

pub struct Worker {
    pub client: Client,
    pub random: Random,
    pub account: Account,
}

impl Worker {
    /// Runs `transactions` transactions, and closes the client.
    pub async fn run(mut self, transactions: u64) -> Account {
        for _ in 0..transactions {
            if self.random.once_in(25) {
                self.vacuum().await;
                continue;
            }
            self.account.number += 1;
            let had_table = self.account.has_table;
            match self.transaction().await {
                Ok(true) => drop(self.account.committed.insert(self.account.number)),
                Ok(false) => self.account.has_table = had_table,
                Err(Stop::Failed(error)) => {
                    self.account.has_table = had_table;
                    let expected = [sqlstate::SERIALIZATION_FAILURE, sqlstate::QUERY_CANCELED];
                    assert!(expected.contains(&error.state()), "session {}: {error}", self.account.session);
                    assert!(
                        self.account.disturbs() || error.state() != sqlstate::QUERY_CANCELED,
                        "a statement was cancelled without a request: {error}"
                    );
                    self.client.run("ROLLBACK").await.unwrap();
                }
                Err(Stop::Dropped) => {
                    self.client.run("ROLLBACK").await.unwrap();
                    let sql = format!(
                        "SELECT count(*) FROM sqlite_schema WHERE name = 'own{}'",
                        self.account.session
                    );
                    self.account.has_table = self.client.int(&sql).await == 1;
                }
            }
        }
        self.client.close().await;
        self.account
    }

    async fn vacuum(&mut self) {
        if let Err(error) = self.client.run("VACUUM").await {
            assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE, "VACUUM: {error}");
        }
    }

    /// Returns true if it committed.
    async fn transaction(&mut self) -> Result<bool, Stop> {
        let begin = if self.random.once_in(8) { "BEGIN IMMEDIATE" } else { "BEGIN" };
        self.client.run(begin).await.map_err(Stop::Failed)?;
        for _ in 0..1 + self.random.below(4) {
            self.step().await?;
            tokio::task::yield_now().await;
        }
        self.note("0, 0").await?;
        if self.random.once_in(4) {
            self.client.run("ROLLBACK").await.map_err(Stop::Failed)?;
            return Ok(false);
        }
        match self.disturbed("COMMIT").await {
            Ok(()) => Ok(true),
            Err(Stop::Dropped) => {
                self.account.unknown.insert(self.account.number);
                Err(Stop::Dropped)
            }
            Err(failed) => Err(failed),
        }
    }

    async fn step(&mut self) -> Result<(), Stop> {
        match self.random.below(15) {
            0..4 => self.grow().await,
            4..6 => self.free().await,
            6..8 => self.rewrite().await,
            8 => self.change_schema().await,
            9..11 => self.undo().await,
            11 => self.fail_and_undo().await,
            12 => self.index_words().await,
            _ => self.check_own_rows().await,
        }
    }

    /// Adds to this transaction's entry in the ledger. `values` is a list of two values: the change
    /// of the sum and of the count.
    async fn note(&mut self, values: &str) -> Result<(), Stop> {
        let (session, number) = (self.account.session, self.account.number);
        self.disturbed(&format!(
            "INSERT INTO ledger{session} SELECT {number}, {values} WHERE true \
             ON CONFLICT DO UPDATE SET n = n + excluded.n, count = count + excluded.count"
        ))
        .await
    }

    /// Inserts rows: small ones, some with overflow pages, or enough to spill SQLite's cache.
    async fn grow(&mut self) -> Result<(), Stop> {
        let (rows, size) = self.random.weighted(&[(5, (20, 300)), (3, (3, 30_000)), (1, (700, 4000))]);
        let (n, tag) = (self.random.between(1, 100), self.random.between(10, 99));
        self.note(&format!("{}, {rows}", n * rows)).await?;
        let session = self.account.session;
        self.disturbed(&format!(
            "WITH RECURSIVE i(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM i WHERE x < {rows}), \
             r(owner, n, tag, size) AS (SELECT {session}, {n}, {tag}, {size}) \
             INSERT INTO stock(owner, n, tag, size, pad) SELECT owner, n, tag, size, {PAD} FROM i, r"
        ))
        .await
    }

    /// Deletes a part of the session's own rows, or all of them.
    async fn free(&mut self) -> Result<(), Stop> {
        let which = match self.random.below(3) {
            0 => format!("owner = {}", self.account.session),
            part => format!("owner = {} AND id % 3 = {part}", self.account.session),
        };
        let (session, number) = (self.account.session, self.account.number);
        self.disturbed(&format!(
            "INSERT INTO ledger{session} SELECT {number}, -coalesce(sum(n), 0), -count(*) FROM stock WHERE {which} \
             ON CONFLICT DO UPDATE SET n = n + excluded.n, count = count + excluded.count"
        ))
        .await?;
        self.disturbed(&format!("DELETE FROM stock WHERE {which}")).await
    }

    /// Changes the size of rows of any session: pages are freed and reallocated, and sessions
    /// conflict on rows.
    async fn rewrite(&mut self) -> Result<(), Stop> {
        let size = *self.random.pick(&[100, 2000, 9000]);
        let (tag, part) = (self.random.between(10, 99), self.random.below(20));
        let owner = self.random.below(SESSIONS);
        let pad = PAD.replace("size", "$1").replace("tag", "$2");
        let sql = format!(
            "UPDATE stock SET size = $1, tag = $2, pad = {pad} WHERE owner = {owner} AND id % 20 = {part}"
        );
        self.disturbed_with(&sql, &[Value::Integer(size), Value::Integer(tag)]).await
    }

    async fn change_schema(&mut self) -> Result<(), Stop> {
        let session = self.account.session;
        if self.account.has_table {
            self.disturbed(&format!("DROP TABLE own{session}")).await?;
        } else {
            self.disturbed(&format!(
                "CREATE TABLE own{session} AS SELECT * FROM stock WHERE owner = {session}"
            ))
            .await?;
            self.disturbed(&format!("CREATE INDEX own_index{session} ON own{session}(pad, n)")).await?;
        }
        self.account.has_table = !self.account.has_table;
        Ok(())
    }

    /// Runs steps after a savepoint, and rolls back to it.
    async fn undo(&mut self) -> Result<(), Stop> {
        self.client.run("SAVEPOINT undone").await.map_err(Stop::Failed)?;
        match self.work_to_be_undone().await {
            // The transaction can continue from the savepoint, whatever SQLite has rolled back.
            Err(Stop::Failed(error)) if error.state() == sqlstate::QUERY_CANCELED => {}
            other => other?,
        }
        self.client.run("ROLLBACK TO undone").await.map_err(Stop::Failed)?;
        if self.random.once_in(2) {
            self.client.run("RELEASE undone").await.map_err(Stop::Failed)?;
        }
        Ok(())
    }

    async fn work_to_be_undone(&mut self) -> Result<(), Stop> {
        for _ in 0..1 + self.random.below(2) {
            match self.random.below(3) {
                0 => self.grow().await?,
                1 => self.free().await?,
                _ => self.rewrite().await?,
            }
        }
        Ok(())
    }

    /// Checks that the session's own rows match its ledger, also within a transaction.
    async fn check_own_rows(&mut self) -> Result<(), Stop> {
        let session = self.account.session;
        let sql = format!(
            "SELECT (SELECT coalesce(sum(n), 0) FROM stock WHERE owner = {session}) \
             - (SELECT coalesce(sum(n), 0) FROM ledger{session}), \
             (SELECT count(*) FROM stock WHERE owner = {session}) \
             - (SELECT coalesce(sum(count), 0) FROM ledger{session})"
        );
        let rows = self.client.run(&sql).await.map_err(Stop::Failed)?;
        assert_eq!(
            rows,
            [[Value::Integer(0), Value::Integer(0)]],
            "the rows of session {session} do not match its ledger"
        );
        Ok(())
    }

    /// Full-text search has separate caches and tables.
    async fn index_words(&mut self) -> Result<(), Stop> {
        let number = self.account.number;
        self.disturbed(&format!(
            "INSERT INTO words(body) VALUES ('some words of {number} and {}')",
            self.account.session
        ))
        .await?;
        self.disturbed(&format!("DELETE FROM words WHERE words MATCH '{}' AND rowid % 3 = 0", number / 2))
            .await
    }

    /// A statement that fails halfway.
    async fn fail_and_undo(&mut self) -> Result<(), Stop> {
        self.client.run("SAVEPOINT undone").await.map_err(Stop::Failed)?;
        self.grow().await?;
        let sql = format!(
            "INSERT INTO stock SELECT id + (id % 2) * 1000000, owner, n, tag, size, pad FROM stock WHERE owner = {}",
            self.account.session
        );
        match self.client.run(&sql).await {
            Err(error) if error.state() == sqlstate::UNIQUE_VIOLATION => {}
            Err(error) => return Err(Stop::Failed(error)),
            Ok(_) => panic!("a duplicate id was accepted"),
        }
        self.client.run("ROLLBACK TO undone; RELEASE undone").await.map_err(Stop::Failed)?;
        Ok(())
    }

    async fn disturbed(&mut self, sql: &str) -> Result<(), Stop> {
        self.disturbed_with(sql, &[]).await
    }

    /// Runs a statement. Sometimes it is cancelled or dropped while it runs.
    async fn disturbed_with(&mut self, sql: &str, parameters: &[Value]) -> Result<(), Stop> {
        let disturbance = match self.random.below(25) {
            0 if self.account.disturbs() => Disturbance::Cancel,
            1 if self.account.disturbs() => Disturbance::Drop,
            _ => Disturbance::None,
        };
        let after = Duration::from_micros(self.random.below(4000));
        let canceller = self.client.session.canceller();
        let run = self.client.with(sql, parameters);
        match disturbance {
            Disturbance::None => run.await.map(drop).map_err(Stop::Failed),
            Disturbance::Drop => match tokio::time::timeout(after, run).await {
                Ok(result) => result.map(drop).map_err(Stop::Failed),
                Err(_) => Err(Stop::Dropped),
            },
            Disturbance::Cancel => {
                let cancels = tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    canceller.cancel(CancelReason::User);
                });
                let result = run.await;
                // Otherwise it could cancel the next statement, which does not expect it.
                cancels.abort();
                let _ = cancels.await;
                result.map(drop).map_err(Stop::Failed)
            }
        }
    }
}
