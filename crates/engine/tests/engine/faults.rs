//! Disk faults: power cuts, failing disks and full disks. Acknowledged changes survive, rejected
//! ones do not appear, and no change is applied partially.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Client, start_when_free, wait_until, with_timeout};
use fulmar_engine::{Config, Engine, Value, sqlstate};
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, Fault, FaultyFiles, LogOptions, Operation};

const TENANTS: u64 = 3;
const WRITERS: usize = 6;

struct Disk {
    directory: tempfile::TempDir,
    store: Backend,
}

impl Disk {
    fn new() -> Self {
        Disk { directory: tempfile::tempdir().unwrap(), store: Backend::memory() }
    }

    async fn start(&self, files: &FaultyFiles) -> Arc<Engine> {
        start_when_free(|| Config {
            files: Some(Arc::new(files.clone())),
            store: Some(Arc::new(self.store.clone())),
            log: LogOptions {
                file_bytes: 1 << 20,
                retry_delay: Duration::from_millis(1),
                ..LogOptions::default()
            },
            manifest_interval: Duration::from_millis(40),
            idle_after: Duration::from_millis(5),
            ..Config::new(self.directory.path(), 1 << 30)
        })
        .await
    }
}

fn client(engine: &Arc<Engine>, partition: u64) -> Client {
    Client { session: engine.session(PartitionId(partition)) }
}

/// The answers that a writer has received: ids of acknowledged rows, and of rows that were rejected
/// by an error.
#[derive(Default)]
struct Answers {
    acknowledged: Vec<i64>,
    rejected: Vec<i64>,
}

/// Inserts rows, each in a transaction that also moves money between two accounts, until stopped or
/// the disk fails.
async fn write(
    mut client: Client,
    writer: usize,
    stop: Arc<AtomicBool>,
    next: Arc<AtomicI64>,
    answers: Arc<Mutex<Answers>>,
) {
    while !stop.load(Ordering::Acquire) {
        let id = next.fetch_add(1, Ordering::Relaxed);
        let (from, to) = (id % 7 + 1, (id * 3 + writer as i64) % 7 + 1);
        let sql = format!(
            "BEGIN; UPDATE account SET balance = balance - 5 WHERE id = {from}; \
             UPDATE account SET balance = balance + 5 WHERE id = {to}; INSERT INTO ledger VALUES ({id}, {writer}); COMMIT"
        );
        match client.run(&sql).await {
            Ok(_) => answers.lock().unwrap().acknowledged.push(id),
            // The log was closed during the commit: its outcome is unknown.
            Err(error) if error.message().contains("could not confirm") => break,
            Err(_) => {
                answers.lock().unwrap().rejected.push(id);
                let _ = client.run("ROLLBACK").await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

async fn set_up(engine: &Arc<Engine>) {
    for tenant in 1..=TENANTS {
        let mut client = client(engine, tenant);
        client.run("CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER); CREATE TABLE ledger(id INTEGER PRIMARY KEY, writer INTEGER)").await.unwrap();
        client.run("INSERT INTO account SELECT value, 100 FROM json_each('[1,2,3,4,5,6,7]')").await.unwrap();
        client.close().await;
    }
}

/// A writer: its tenant, its task, and the answers that it has received.
type Writer = (u64, tokio::task::JoinHandle<()>, Arc<Mutex<Answers>>);

/// Waits for `commits` further acknowledged commits.
async fn progress(writers: &[Writer], commits: usize) {
    let count = |answers: &Arc<Mutex<Answers>>| answers.lock().unwrap().acknowledged.len();
    let acknowledged = || writers.iter().map(|(_, _, answers)| count(answers)).sum::<usize>();
    let before = acknowledged();
    wait_until("the writers commit", async || acknowledged() >= before + commits).await;
}

fn spawn_writers(engine: &Arc<Engine>, stop: &Arc<AtomicBool>, next: &Arc<AtomicI64>) -> Vec<Writer> {
    (0..WRITERS)
        .map(|writer| {
            let tenant = writer as u64 % TENANTS + 1;
            let answers = Arc::<Mutex<Answers>>::default();
            let task = write(client(engine, tenant), writer, stop.clone(), next.clone(), answers.clone());
            (tenant, tokio::spawn(task), answers)
        })
        .collect()
}

/// Checks a tenant: sums, integrity, all acknowledged rows, and no rejected ones.
async fn check(engine: &Arc<Engine>, tenant: u64, answers: &[Answers], context: &str) {
    let mut client = client(engine, tenant);
    assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()), "{context}");
    assert_eq!(client.int("SELECT sum(balance) FROM account").await, 700, "{context}");
    let rows = client.run("SELECT id FROM ledger").await.unwrap();
    let there: std::collections::HashSet<i64> = rows
        .iter()
        .map(|row| match row[0] {
            Value::Integer(i) => i,
            _ => -1,
        })
        .collect();
    for answers in answers {
        for id in &answers.acknowledged {
            assert!(there.contains(id), "{context}: tenant {tenant}: acknowledged row {id} is lost");
        }
        for id in &answers.rejected {
            assert!(!there.contains(id), "{context}: tenant {tenant}: rejected row {id} is visible");
        }
    }
    client.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_changes_survive_power_cuts() {
    let rounds = std::env::var("FULMAR_ROUNDS").ok().and_then(|r| r.parse().ok()).unwrap_or(25);
    let disk = Disk::new();
    let mut files = FaultyFiles::new();
    let mut all: Vec<(u64, Answers)> = Vec::new();
    let next = Arc::new(AtomicI64::new(1));
    for round in 0..rounds {
        let engine = disk.start(&files).await;
        if round == 0 {
            set_up(&engine).await;
        }
        for tenant in 1..=TENANTS {
            let answers: Vec<Answers> =
                std::mem::take(&mut all).into_iter().fold(Vec::new(), |mut mine, (t, answers)| {
                    if t == tenant {
                        mine.push(answers)
                    } else {
                        all.push((t, answers))
                    }
                    mine
                });
            check(&engine, tenant, &answers, &format!("round {round}")).await;
            all.extend(answers.into_iter().map(|answers| (tenant, answers)));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let writers = spawn_writers(&engine, &stop, &next);
        progress(&writers, 20 + round as usize * 7 % 60).await;
        // Power may be cut during writes, syncs and changes of the directory.
        let after = files.power_cut(round);
        stop.store(true, Ordering::Release);
        drop(engine);
        for (tenant, writer, answers) in writers {
            // The process ends with its machine, so no further answer arrives.
            writer.abort();
            let _ = writer.await;
            let answers = std::mem::take(&mut *answers.lock().unwrap());
            all.push((tenant, answers));
        }
        files = after;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_log_write_rejects_its_commits() {
    let disk = Disk::new();
    let files = FaultyFiles::new();
    let engine = disk.start(&files).await;
    set_up(&engine).await;
    let mut all: Vec<(u64, Answers)> = Vec::new();
    let next = Arc::new(AtomicI64::new(1));
    for (round, operation) in
        [Operation::Write, Operation::Sync, Operation::Sync, Operation::Write].into_iter().enumerate()
    {
        let stop = Arc::new(AtomicBool::new(false));
        let writers = spawn_writers(&engine, &stop, &next);
        for nth in 0..8 {
            progress(&writers, 5).await;
            let failures = || engine.statistics().log_failures;
            let before = failures();
            files.fail_nth(operation, nth % 3 + 1, Fault::Io);
            wait_until("the log fails", async || failures() > before).await;
        }
        progress(&writers, 5).await;
        stop.store(true, Ordering::Release);
        for (tenant, writer, answers) in writers {
            with_timeout("every client gets an answer", writer).await.unwrap();
            let answers = std::mem::take(&mut *answers.lock().unwrap());
            all.push((tenant, answers));
        }
        for tenant in 1..=TENANTS {
            let (mine, others) = all.into_iter().partition::<Vec<_>, _>(|(t, _)| *t == tenant);
            let answers: Vec<Answers> = mine.into_iter().map(|(_, answers)| answers).collect();
            check(&engine, tenant, &answers, &format!("round {round}")).await;
            all = others.into_iter().chain(answers.into_iter().map(|answers| (tenant, answers))).collect();
        }
    }
    let refused: usize = all.iter().map(|(_, answers)| answers.rejected.len()).sum();
    assert!(refused > 0, "a failed log write must refuse a commit");
    // The next process finds the same contents.
    let after = files.process_kill();
    drop(engine);
    let engine = disk.start(&after).await;
    for tenant in 1..=TENANTS {
        let (mine, others) = all.into_iter().partition::<Vec<_>, _>(|(t, _)| *t == tenant);
        let answers: Vec<Answers> = mine.into_iter().map(|(_, answers)| answers).collect();
        check(&engine, tenant, &answers, "after the restart").await;
        all = others;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_rejects_commits_and_serves_reads() {
    let disk = Disk::new();
    let files = FaultyFiles::new();
    let engine = disk.start(&files).await;
    set_up(&engine).await;
    files.fail_while(Operation::Create, Some(Fault::NoSpace));
    let mut a = client(&engine, 1);
    let mut refused = None;
    let mut inserted = 0;
    for id in 0..2000 {
        match a
            .run(&format!("INSERT INTO ledger VALUES ({id}, 0), ({id} + 100000, length(randomblob(9)))"))
            .await
        {
            Ok(_) => inserted += 2,
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
        a.run(
            "CREATE TABLE IF NOT EXISTS big(v); INSERT INTO big VALUES (randomblob(20000)); DELETE FROM big",
        )
        .await
        .ok();
    }
    let refused = refused.expect("a log without space for new files must reject commits");
    assert_eq!(refused.state(), sqlstate::DISK_FULL, "{refused}");
    assert_eq!(a.int("SELECT count(*) FROM ledger").await, inserted);
    files.fail_while(Operation::Create, None);
    let commits = async || a.run("INSERT INTO ledger VALUES (-1, 0)").await.is_ok();
    wait_until("commits are accepted after space was freed", commits).await;
    assert_eq!(a.int("SELECT count(*) FROM ledger").await, inserted + 1);
}

/// Changes committed before a failed large commit, and not yet in the store, are still flushed.
#[tokio::test]
async fn failed_large_commit_does_not_affect_earlier_commits() {
    let rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) SELECT i, randomblob(3500) FROM n";
    let directory = tempfile::tempdir().unwrap();
    let files = FaultyFiles::new();
    let config = |files: &FaultyFiles| Config {
        files: Some(Arc::new(files.clone())),
        // Only the test starts flushes.
        manifest_interval: Duration::from_secs(3600),
        ..Config::new(directory.path(), crate::common::MEMORY)
    };
    let engine = start_when_free(|| config(&files)).await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    a.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB, n INTEGER DEFAULT 0)").await.unwrap();
    a.run(&format!("INSERT INTO t(id, v) {rows}")).await.unwrap();
    engine.flush().await.unwrap();
    a.run("UPDATE t SET n = 1 WHERE id % 100 = 0").await.unwrap();
    files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
    a.run("UPDATE t SET n = 2, v = randomblob(3500)").await.unwrap_err();
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 50);
    engine.flush().await.unwrap();
    a.close().await;
    // Uses a copy of the files, as after a kill, because threads of the old log may still be
    // running.
    let files = files.process_kill();
    drop(engine);
    let engine = start_when_free(|| config(&files)).await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 50);
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}
