//! Stress test: the database file grows, shrinks and spills while transactions roll back, conflict,
//! are cancelled and are dropped halfway.
//!
//! It detects wrong commit points: if a rollback is mistaken for a commit, stale pages are
//! installed, and sooner or later the integrity check fails. Two more invariants are checked after
//! each round:
//!
//! - `stock` matches the ledgers: each transaction records in its ledger, in the same transaction,
//!   how many rows it adds to `stock` and their sum;
//! - the ledgers contain all transactions whose COMMIT was acknowledged, none that was rejected or
//!   rolled back, and of those whose COMMIT was dropped halfway all changes or none.
//!
//! Every row of `stock` determines its padding, so mixed pages of two transactions are also
//! detected.

mod page_one;
mod worker;

use std::collections::HashSet;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fulmar_engine::{CancelReason, Config, Engine, Result, Value, sqlstate};
use fulmar_pages::PartitionId;
use worker::{Account, PAD, Worker, make_tables};

use crate::common::{Client, MEMORY, Node, start_when_free, with_timeout};
use crate::seeds::{self, Random};

const SESSIONS: u64 = 6;
const TRANSACTIONS: u64 = 12;

/// Checks the invariants while no transaction runs.
async fn check(engine: &Arc<Engine>, accounts: &[Account], when: &str) {
    let mut client = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()), "{when}");
    assert_eq!(
        client.int(&format!("SELECT count(*) FROM stock WHERE pad <> {PAD}")).await,
        0,
        "{when}: wrong padding"
    );
    let union: Vec<String> = (0..SESSIONS).map(|s| format!("SELECT n, count FROM ledger{s}")).collect();
    let noted =
        client.run(&format!("SELECT sum(n), sum(count) FROM ({})", union.join(" UNION ALL "))).await.unwrap();
    let found = client.run("SELECT sum(n), count(*) FROM stock").await.unwrap();
    let or_zero = |rows: &[Vec<Value>]| {
        rows[0]
            .iter()
            .map(|v| if *v == Value::Null { Value::Integer(0) } else { v.clone() })
            .collect::<Vec<_>>()
    };
    assert_eq!(or_zero(&found), or_zero(&noted), "{when}: stock and ledgers differ");
    for account in accounts {
        let session = account.session;
        let rows = client.run(&format!("SELECT id FROM ledger{session}")).await.unwrap();
        let present: HashSet<i64> = rows
            .iter()
            .map(|row| if let Value::Integer(id) = row[0] { id } else { panic!("{row:?}") })
            .collect();
        let lost: Vec<_> = account.committed.difference(&present).collect();
        assert!(lost.is_empty(), "{when}: committed transactions {lost:?} of session {session} are lost");
        let revived: Vec<_> = present
            .iter()
            .filter(|id| !account.committed.contains(id) && !account.unknown.contains(id))
            .collect();
        assert!(
            revived.is_empty(),
            "{when}: uncommitted transactions {revived:?} of session {session} are visible"
        );
    }
    client
        .run("INSERT INTO words(words) VALUES ('integrity-check')")
        .await
        .unwrap_or_else(|e| panic!("{when}: {e}"));
    client.close().await;
}

/// Flushes repeatedly until stopped.
fn flush_until_stopped(engine: &Arc<Engine>) -> (Arc<AtomicBool>, tokio::task::JoinHandle<Result<()>>) {
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

/// Runs all sessions concurrently, each with its own part of the seed, while the engine flushes.
async fn run_round(engine: &Arc<Engine>, accounts: Vec<Account>, seed: u64, when: &str) -> Vec<Account> {
    let (stop, flushing) = flush_until_stopped(engine);
    let mut tasks = Vec::new();
    for account in accounts {
        let client = Client { session: engine.session(PartitionId(1)) };
        let random = Random::new(seed.wrapping_mul(100).wrapping_add(account.session));
        tasks.push(tokio::spawn(Worker { client, random, account }.run(TRANSACTIONS)));
    }
    let mut accounts = Vec::new();
    for task in tasks {
        accounts.push(task.await.unwrap_or_else(|e| panic!("{when}: {e}")));
    }
    stop.store(true, Ordering::Relaxed);
    flushing.await.unwrap().unwrap();
    accounts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn file_stays_intact_under_growth_shrinking_spills_and_rollbacks() {
    let directory = tempfile::tempdir().unwrap();
    let start = || start_when_free(|| Config::new(directory.path(), MEMORY));
    let mut engine = start().await;
    let mut client = Client { session: engine.session(PartitionId(1)) };
    make_tables(&mut client).await;
    client.close().await;
    let mut accounts: Vec<Account> = (0..SESSIONS).map(Account::new).collect();
    for round in 0..seeds::rounds(6) {
        let seed = seeds::first() + round;
        let when = format!("FULMAR_TEST_SEED={seed}");
        accounts = with_timeout(&when, run_round(&engine, accounts, seed, &when)).await;
        check(&engine, &accounts, &when).await;
        let statistics = engine.statistics();
        println!(
            "{when}: {} committed so far, {} conflicts, {} replays, {} temporary files",
            accounts.iter().map(|account| account.committed.len()).sum::<usize>(),
            statistics.conflicts,
            statistics.replays,
            statistics.temporary_files
        );
        // Every second round ends like a crash: changes that are only in the log are recovered from
        // it.
        if round % 2 == 0 {
            with_timeout(&when, engine.shutdown()).await.unwrap();
        }
        drop(engine);
        engine = with_timeout(&when, start()).await;
        check(&engine, &accounts, &format!("{when}, after the restart")).await;
    }
}

/// Counts to three million, which takes some 100 ms if it is not stopped.
const SLOW: &str = "WITH RECURSIVE i(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM i WHERE x < 3000000) \
    INSERT INTO stock(owner, n) SELECT 0, count(*) FROM i";

/// A node whose statements yield at every second check, so that a test can stop them at a specific
/// point.
async fn node_that_yields() -> Node {
    let directory = tempfile::tempdir().unwrap();
    let config = Config { time_slice: Duration::ZERO, ..Config::new(directory.path(), MEMORY) };
    Node { engine: Engine::start(config).await.unwrap(), directory }
}

/// Polls a future `times` times. It must be pending each time.
async fn poll_pending<T>(times: u64, mut future: Pin<&mut impl Future<Output = T>>) {
    for _ in 0..times {
        assert!(futures::poll!(future.as_mut()).is_pending(), "the statement needs more polls");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statement_dropped_midway_leaves_the_partition_usable() {
    let node = node_that_yields().await;
    let (mut a, mut b) = (node.client(1), node.client(1));
    make_tables(&mut a).await;
    for round in 0..60u64 {
        let begin = ["SELECT 1", "BEGIN", "BEGIN IMMEDIATE"][round as usize % 3];
        a.run(begin).await.unwrap();
        a.run("INSERT INTO stock(owner, n) SELECT 1, 1 WHERE changes() < 0").await.unwrap();
        if round % 3 == 1 {
            a.run("SELECT n FROM stock WHERE id = 1 FOR UPDATE").await.unwrap();
        }
        poll_pending(1 + 8 * (round % 13), pin!(a.run(SLOW))).await;
        // The write turn, the row lock and the connection are released, for this session and for
        // others.
        let others =
            b.run("UPDATE stock SET n = n WHERE id = 1; INSERT INTO ledger0(n, count) VALUES (1, 1)");
        with_timeout("another session writes", others).await.unwrap();
        let own = a.run("ROLLBACK; INSERT INTO ledger0(n, count) VALUES (1, 1)");
        with_timeout("the session itself writes", own).await.unwrap();
        assert_eq!(b.int("SELECT count(*) FROM stock").await, 0);
    }
    assert_eq!(b.int("SELECT sum(count) FROM ledger0").await, 120);
    assert_eq!(b.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_statement_keeps_changes_before_the_savepoint() {
    let node = node_that_yields().await;
    let mut a = node.client(1);
    make_tables(&mut a).await;
    for round in 0..10 {
        a.run("BEGIN; INSERT INTO ledger0(n, count) VALUES (1, 1); SAVEPOINT s").await.unwrap();
        let canceller = a.session.canceller();
        {
            let mut slow = pin!(a.run(SLOW));
            poll_pending(10 + 10 * round, slow.as_mut()).await;
            canceller.cancel(CancelReason::User);
            let error = with_timeout("the statement is cancelled", slow).await.unwrap_err();
            assert_eq!(error.state(), sqlstate::QUERY_CANCELED);
        }
        assert_eq!(a.state("SELECT 1").await, sqlstate::IN_FAILED_TRANSACTION);
        a.run("ROLLBACK TO s; INSERT INTO ledger1(n, count) VALUES (1, 1); COMMIT").await.unwrap();
        let sql = "SELECT (SELECT count(*) FROM ledger0) + (SELECT count(*) FROM ledger1)";
        assert_eq!(a.int(sql).await, 2 * (round as i64 + 1));
    }
    assert_eq!(a.int("SELECT count(*) FROM stock").await, 0);
}
