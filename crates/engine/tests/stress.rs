//! Files that grow, shrink and spill while transactions roll back, conflict, are cancelled and are dropped midway.
//!
//! This is the test that a wrong commit point does not survive: a rollback that is taken for a commit installs stale
//! pages, and sooner or later the integrity check says so. Two more things are checked after each round:
//!
//! - `stock` holds what the ledgers say: each transaction notes in its ledger how many rows it adds to `stock` and what
//!   they sum up to, in the same transaction;
//! - the ledgers hold the transactions whose COMMIT was answered, not one that was refused or rolled back, and of those
//!   whose COMMIT was dropped midway all or nothing.
//!
//! Every row of `stock` says what its padding must look like, so that pages of two transactions mixed up are seen too.

mod common;
#[path = "common/seeds.rs"]
mod seeds;

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Client, MEMORY, Node, start_when_free};
use fulmar_engine::{CancelReason, Config, Engine, Error, Result, Value, sqlstate};
use fulmar_pages::PartitionId;
use seeds::Random;

const SESSIONS: u64 = 6;
const TRANSACTIONS: u64 = 12;
/// A round has some seventy transactions; one that takes this long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(60);

/// What the padding of a row must be.
const PAD: &str = "replace(hex(zeroblob(size / 2)), '00', printf('%02d', tag))";

async fn make_tables(client: &mut Client) {
    client
        .run("CREATE TABLE stock(id INTEGER PRIMARY KEY, owner INTEGER, n INTEGER, tag INTEGER, size INTEGER, pad TEXT)")
        .await
        .unwrap();
    client.run("CREATE INDEX by_owner ON stock(owner, n)").await.unwrap();
    for session in 0..SESSIONS {
        client.run(&format!("CREATE TABLE ledger{session}(id INTEGER PRIMARY KEY, n INTEGER, count INTEGER)")).await.unwrap();
    }
}

/// What a session knows of its transactions, by their numbers in its ledger.
#[derive(Default)]
struct Outcomes {
    committed: HashSet<i64>,
    unknown: HashSet<i64>,
}

/// How a call is disturbed.
#[derive(Clone, Copy, PartialEq)]
enum Disturbance {
    None,
    Cancel,
    Drop,
}

/// Why a transaction did not go on.
enum Stop {
    /// Refused or cancelled: it must leave nothing.
    Failed(Error),
    /// The future was dropped, and the session has rolled back, if it had not committed yet.
    Dropped,
}

struct Worker {
    client: Client,
    random: Random,
    session: u64,
    number: i64,
    /// Whether this session may cancel and drop what it runs.
    disturbs: bool,
    /// Its private table exists.
    has_table: bool,
    outcomes: Outcomes,
}

impl Worker {
    async fn run(mut self) -> (u64, i64, bool, Outcomes) {
        for _ in 0..TRANSACTIONS {
            if self.random.once_in(25) {
                self.vacuum().await;
                continue;
            }
            self.number += 1;
            let had_table = self.has_table;
            match self.transaction().await {
                Ok(true) => drop(self.outcomes.committed.insert(self.number)),
                Ok(false) => self.has_table = had_table,
                Err(Stop::Failed(error)) => {
                    self.has_table = had_table;
                    let expected = [sqlstate::SERIALIZATION_FAILURE, sqlstate::QUERY_CANCELED];
                    assert!(expected.contains(&error.state()), "session {}: {error}", self.session);
                    assert!(self.disturbs || error.state() != sqlstate::QUERY_CANCELED, "nobody cancelled: {error}");
                    self.client.run("ROLLBACK").await.unwrap();
                }
                Err(Stop::Dropped) => {
                    self.client.run("ROLLBACK").await.unwrap();
                    let sql = format!("SELECT count(*) FROM sqlite_schema WHERE name = 'own{}'", self.session);
                    self.has_table = self.client.int(&sql).await == 1;
                }
            }
        }
        self.client.close().await;
        (self.session, self.number, self.has_table, self.outcomes)
    }

    async fn vacuum(&mut self) {
        if let Err(error) = self.client.run("VACUUM").await {
            assert_eq!(error.state(), sqlstate::SERIALIZATION_FAILURE, "VACUUM: {error}");
        }
    }

    /// Answers whether it committed.
    async fn transaction(&mut self) -> std::result::Result<bool, Stop> {
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
                self.outcomes.unknown.insert(self.number);
                Err(Stop::Dropped)
            }
            Err(failed) => Err(failed),
        }
    }

    async fn step(&mut self) -> std::result::Result<(), Stop> {
        match self.random.below(12) {
            0..4 => self.grow().await,
            4..6 => self.free().await,
            6..8 => self.rewrite().await,
            8 => self.change_schema().await,
            9..11 => self.undo().await,
            _ => self.fail_and_undo().await,
        }
    }

    /// Adds to this transaction's entry in the ledger: a list of two values, the change of the sum and of the count.
    async fn note(&mut self, values: &str) -> std::result::Result<(), Stop> {
        let (session, number) = (self.session, self.number);
        self.disturbed(&format!(
            "INSERT INTO ledger{session} SELECT {number}, {values} WHERE true \
             ON CONFLICT DO UPDATE SET n = n + excluded.n, count = count + excluded.count"
        ))
        .await
    }

    /// More rows: small ones, some with overflow pages, or so many that SQLite's cache spills.
    async fn grow(&mut self) -> std::result::Result<(), Stop> {
        let (rows, size) = self.random.weighted(&[(5, (20, 300)), (3, (3, 30_000)), (1, (700, 4000))]);
        let (n, tag) = (self.random.between(1, 100), self.random.between(10, 99));
        self.note(&format!("{}, {rows}", n * rows)).await?;
        let session = self.session;
        self.disturbed(&format!(
            "WITH RECURSIVE i(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM i WHERE x < {rows}), \
             r(owner, n, tag, size) AS (SELECT {session}, {n}, {tag}, {size}) \
             INSERT INTO stock(owner, n, tag, size, pad) SELECT owner, n, tag, size, {PAD} FROM i, r"
        ))
        .await
    }

    /// Fewer rows: a part of the session's own, or all of them.
    async fn free(&mut self) -> std::result::Result<(), Stop> {
        let which = match self.random.below(3) {
            0 => format!("owner = {}", self.session),
            part => format!("owner = {} AND id % 3 = {part}", self.session),
        };
        let (session, number) = (self.session, self.number);
        self.disturbed(&format!(
            "INSERT INTO ledger{session} SELECT {number}, -coalesce(sum(n), 0), -count(*) FROM stock WHERE {which} \
             ON CONFLICT DO UPDATE SET n = n + excluded.n, count = count + excluded.count"
        ))
        .await?;
        self.disturbed(&format!("DELETE FROM stock WHERE {which}")).await
    }

    /// Other sizes for rows of anybody: pages are freed and taken anew, and sessions conflict on rows.
    async fn rewrite(&mut self) -> std::result::Result<(), Stop> {
        let size = *self.random.pick(&[100, 2000, 9000]);
        let (tag, part) = (self.random.between(10, 99), self.random.below(20));
        let owner = self.random.below(SESSIONS);
        let pad = PAD.replace("size", "$1").replace("tag", "$2");
        let sql = format!(
            "UPDATE stock SET size = $1, tag = $2, pad = {pad} WHERE owner = {owner} AND id % 20 = {part}"
        );
        self.disturbed_with(&sql, &[Value::Integer(size), Value::Integer(tag)]).await
    }

    async fn change_schema(&mut self) -> std::result::Result<(), Stop> {
        let session = self.session;
        if self.has_table {
            self.disturbed(&format!("DROP TABLE own{session}")).await?;
        } else {
            self.disturbed(&format!("CREATE TABLE own{session} AS SELECT * FROM stock WHERE owner = {session}")).await?;
            self.disturbed(&format!("CREATE INDEX own_index{session} ON own{session}(pad, n)")).await?;
        }
        self.has_table = !self.has_table;
        Ok(())
    }

    /// Everything that the steps do, behind a savepoint that is rolled back to.
    async fn undo(&mut self) -> std::result::Result<(), Stop> {
        self.client.run("SAVEPOINT undone").await.map_err(Stop::Failed)?;
        for _ in 0..1 + self.random.below(2) {
            match self.random.below(3) {
                0 => self.grow().await?,
                1 => self.free().await?,
                _ => self.rewrite().await?,
            }
        }
        self.client.run("ROLLBACK TO undone").await.map_err(Stop::Failed)?;
        if self.random.once_in(2) {
            self.client.run("RELEASE undone").await.map_err(Stop::Failed)?;
        }
        Ok(())
    }

    /// A statement that fails when it has done half of its work.
    async fn fail_and_undo(&mut self) -> std::result::Result<(), Stop> {
        self.client.run("SAVEPOINT undone").await.map_err(Stop::Failed)?;
        self.grow().await?;
        let sql = format!("INSERT INTO stock SELECT id + (id % 2) * 1000000, owner, n, tag, size, pad FROM stock WHERE owner = {}", self.session);
        match self.client.run(&sql).await {
            Err(error) if error.state() == sqlstate::UNIQUE_VIOLATION => {}
            Err(error) => return Err(Stop::Failed(error)),
            Ok(_) => panic!("a row was inserted twice"),
        }
        self.client.run("ROLLBACK TO undone; RELEASE undone").await.map_err(Stop::Failed)?;
        Ok(())
    }

    async fn disturbed(&mut self, sql: &str) -> std::result::Result<(), Stop> {
        self.disturbed_with(sql, &[]).await
    }

    /// Runs a statement that now and then is cancelled, or dropped, at some moment of its run.
    async fn disturbed_with(&mut self, sql: &str, parameters: &[Value]) -> std::result::Result<(), Stop> {
        let disturbance = match self.random.below(25) {
            0 if self.disturbs => Disturbance::Cancel,
            1 if self.disturbs => Disturbance::Drop,
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
                // Else it could meet the next statement, which does not expect it.
                cancels.abort();
                let _ = cancels.await;
                result.map(drop).map_err(Stop::Failed)
            }
        }
    }
}

/// What must hold whenever nothing runs.
async fn check(engine: &Arc<Engine>, outcomes: &[Outcomes], when: &str) {
    let mut client = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()), "{when}");
    assert_eq!(client.int(&format!("SELECT count(*) FROM stock WHERE pad <> {PAD}")).await, 0, "{when}: padding");
    let union: Vec<String> = (0..SESSIONS).map(|s| format!("SELECT n, count FROM ledger{s}")).collect();
    let noted = client.run(&format!("SELECT sum(n), sum(count) FROM ({})", union.join(" UNION ALL "))).await.unwrap();
    let there = client.run("SELECT sum(n), count(*) FROM stock").await.unwrap();
    let or_zero = |rows: &[Vec<Value>]| rows[0].iter().map(|v| if *v == Value::Null { Value::Integer(0) } else { v.clone() }).collect::<Vec<_>>();
    assert_eq!(or_zero(&there), or_zero(&noted), "{when}: stock and ledgers differ");
    for (session, outcomes) in outcomes.iter().enumerate() {
        let rows = client.run(&format!("SELECT id FROM ledger{session}")).await.unwrap();
        let present: HashSet<i64> = rows.iter().map(|row| if let Value::Integer(id) = row[0] { id } else { panic!("{row:?}") }).collect();
        let lost: Vec<_> = outcomes.committed.difference(&present).collect();
        assert!(lost.is_empty(), "{when}: {lost:?} of session {session} committed and are lost");
        let revived: Vec<_> =
            present.iter().filter(|id| !outcomes.committed.contains(id) && !outcomes.unknown.contains(id)).collect();
        assert!(revived.is_empty(), "{when}: {revived:?} of session {session} did not commit and are there");
    }
    client.close().await;
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(HANGS_AFTER, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} hangs"),
    }
}

/// Flushes while the sessions work, again and again until told to stop.
fn flush_meanwhile(engine: &Arc<Engine>) -> (Arc<AtomicBool>, tokio::task::JoinHandle<Result<()>>) {
    let stop = Arc::new(AtomicBool::new(false));
    let (engine, stopped) = (engine.clone(), stop.clone());
    let task = tokio::spawn(async move {
        while !stopped.load(Ordering::Relaxed) {
            engine.flush().await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    });
    (stop, task)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn growing_freeing_spilling_and_rolling_back_keeps_the_file_whole() {
    let directory = tempfile::tempdir().unwrap();
    let start = || start_when_free(|| Config::new(directory.path(), MEMORY));
    let mut engine = start().await;
    let mut client = Client { session: engine.session(PartitionId(1)) };
    make_tables(&mut client).await;
    client.close().await;
    let mut numbers = vec![0; SESSIONS as usize];
    let mut tables = vec![false; SESSIONS as usize];
    let mut outcomes: Vec<Outcomes> = (0..SESSIONS).map(|_| Outcomes::default()).collect();
    for round in 0..seeds::rounds(6) {
        let seed = seeds::first() + round;
        let when = format!("FULMAR_TEST_SEED={seed}");
        let flushing = flush_meanwhile(&engine);
        let mut tasks = tokio::task::JoinSet::new();
        for session in 0..SESSIONS {
            let at = session as usize;
            let worker = Worker {
                client: Client { session: engine.session(PartitionId(1)) },
                random: Random::new(seed.wrapping_mul(100).wrapping_add(session)),
                session,
                number: numbers[at],
                disturbs: session % 2 == 1,
                has_table: tables[at],
                outcomes: std::mem::take(&mut outcomes[at]),
            };
            tasks.spawn(worker.run());
        }
        within(&when, async {
            while let Some(end) = tasks.join_next().await {
                let (session, number, has_table, outcome) = end.unwrap_or_else(|e| panic!("{when}: {e}"));
                numbers[session as usize] = number;
                tables[session as usize] = has_table;
                outcomes[session as usize] = outcome;
            }
        })
        .await;
        flushing.0.store(true, Ordering::Relaxed);
        within(&when, flushing.1).await.unwrap().unwrap();
        check(&engine, &outcomes, &when).await;
        let statistics = engine.statistics();
        let committed: usize = outcomes.iter().map(|o| o.committed.len()).sum();
        println!(
            "{when}: {committed} committed so far, {} conflicts, {} replays, {} temporary files",
            statistics.conflicts, statistics.replays, statistics.temporary_files
        );
        // Every other time as after a crash: what is in the log and not in a segment is read from the log.
        if round % 2 == 0 {
            within(&when, engine.shutdown()).await.unwrap();
        }
        drop(engine);
        engine = within(&when, start()).await;
        check(&engine, &outcomes, &format!("{when}, after the restart")).await;
    }
}

/// Counts to three million: some hundred milliseconds, if nobody stops it.
const SLOW: &str = "WITH RECURSIVE i(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM i WHERE x < 3000000) \
    INSERT INTO stock(owner, n) SELECT 0, count(*) FROM i";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_is_dropped_midway_leaves_the_partition_usable() {
    let node = Node::start().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    make_tables(&mut a).await;
    for round in 0..60u64 {
        let begin = ["SELECT 1", "BEGIN", "BEGIN IMMEDIATE"][round as usize % 3];
        a.run(begin).await.unwrap();
        a.run("INSERT INTO stock(owner, n) SELECT 1, 1 WHERE changes() < 0").await.unwrap();
        if round % 3 == 1 {
            a.run("SELECT n FROM stock WHERE id = 1 FOR UPDATE").await.unwrap();
        }
        let dropped = tokio::time::timeout(Duration::from_micros(1 << (round % 13)), a.run(SLOW)).await;
        assert!(dropped.is_err(), "the statement was meant to be slower");
        // Turn, row lock and connection are free again, for this session and for others.
        let others = b.run("UPDATE stock SET n = n WHERE id = 1; INSERT INTO ledger0(n, count) VALUES (1, 1)");
        within("a writer", others).await.unwrap();
        let own = a.run("ROLLBACK; INSERT INTO ledger0(n, count) VALUES (1, 1)");
        within("the session itself", own).await.unwrap();
        assert_eq!(b.int("SELECT count(*) FROM stock").await, 0);
    }
    assert_eq!(b.int("SELECT sum(count) FROM ledger0").await, 120);
    assert_eq!(b.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_statement_costs_its_transaction_nothing_before_the_savepoint() {
    let node = Node::start().await;
    let mut a = node.client(1);
    make_tables(&mut a).await;
    for round in 0..10 {
        a.run("BEGIN; INSERT INTO ledger0(n, count) VALUES (1, 1); SAVEPOINT s").await.unwrap();
        let canceller = a.session.canceller();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let cancels = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(3)).await;
                canceller.cancel(CancelReason::User);
            }
        });
        let error = a.run(SLOW).await.expect_err("the statement was meant to be cancelled");
        assert_eq!(error.state(), sqlstate::QUERY_CANCELED);
        stop.store(true, Ordering::Relaxed);
        cancels.await.unwrap();
        assert_eq!(a.state("SELECT 1").await, sqlstate::IN_FAILED_TRANSACTION);
        a.run("ROLLBACK TO s; INSERT INTO ledger1(n, count) VALUES (1, 1); COMMIT").await.unwrap();
        let sql = "SELECT (SELECT count(*) FROM ledger0) + (SELECT count(*) FROM ledger1)";
        assert_eq!(a.int(sql).await, 2 * (round + 1));
    }
    assert_eq!(a.int("SELECT count(*) FROM stock").await, 0);
}
