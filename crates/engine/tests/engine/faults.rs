//! Power cuts, failing disks, full disks: what was acknowledged is there, what was refused is not, nothing is half there.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Client, start_when_free, until, within};
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

/// What one writer has been told: ids of acknowledged rows, and of rows whose answer was an error that says "no".
#[derive(Default)]
struct Told {
    yes: Vec<i64>,
    no: Vec<i64>,
}

/// Inserts rows, each in a transaction that also moves money between two accounts, until told to stop or the disk dies.
async fn write(
    mut client: Client,
    writer: usize,
    stop: Arc<AtomicBool>,
    next: Arc<AtomicI64>,
    told: Arc<Mutex<Told>>,
) {
    while !stop.load(Ordering::Acquire) {
        let id = next.fetch_add(1, Ordering::Relaxed);
        let (from, to) = (id % 7 + 1, (id * 3 + writer as i64) % 7 + 1);
        let sql = format!(
            "BEGIN; UPDATE account SET balance = balance - 5 WHERE id = {from}; \
             UPDATE account SET balance = balance + 5 WHERE id = {to}; INSERT INTO ledger VALUES ({id}, {writer}); COMMIT"
        );
        match client.run(&sql).await {
            Ok(_) => told.lock().unwrap().yes.push(id),
            // The log was closed under it: nobody knows.
            Err(error) if error.message().contains("not known") => break,
            Err(_) => {
                told.lock().unwrap().no.push(id);
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

/// A writer: its tenant, its task, what it has been told so far.
type Writer = (u64, tokio::task::JoinHandle<()>, Arc<Mutex<Told>>);

/// Waits for `commits` further acknowledgements of the writers.
async fn progress(writers: &[Writer], commits: usize) {
    let acknowledged = || writers.iter().map(|(_, _, told)| told.lock().unwrap().yes.len()).sum::<usize>();
    let before = acknowledged();
    until("the writers commit", async || acknowledged() >= before + commits).await;
}

fn spawn_writers(engine: &Arc<Engine>, stop: &Arc<AtomicBool>, next: &Arc<AtomicI64>) -> Vec<Writer> {
    (0..WRITERS)
        .map(|writer| {
            let tenant = writer as u64 % TENANTS + 1;
            let told = Arc::<Mutex<Told>>::default();
            let task = write(client(engine, tenant), writer, stop.clone(), next.clone(), told.clone());
            (tenant, tokio::spawn(task), told)
        })
        .collect()
}

/// Checks one tenant: sums, integrity, every "yes" there, every "no" not.
async fn check(engine: &Arc<Engine>, tenant: u64, told: &[Told], what: &str) {
    let mut client = client(engine, tenant);
    assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()), "{what}");
    assert_eq!(client.int("SELECT sum(balance) FROM account").await, 700, "{what}");
    let rows = client.run("SELECT id FROM ledger").await.unwrap();
    let there: std::collections::HashSet<i64> = rows
        .iter()
        .map(|row| match row[0] {
            Value::Integer(i) => i,
            _ => -1,
        })
        .collect();
    for told in told {
        for id in &told.yes {
            assert!(there.contains(id), "{what}: tenant {tenant}: acknowledged row {id} is lost");
        }
        for id in &told.no {
            assert!(!there.contains(id), "{what}: tenant {tenant}: refused row {id} is there");
        }
    }
    client.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_cut_keeps_what_was_acknowledged() {
    let rounds = std::env::var("FULMAR_ROUNDS").ok().and_then(|r| r.parse().ok()).unwrap_or(25);
    let disk = Disk::new();
    let mut files = FaultyFiles::new();
    let mut all: Vec<(u64, Told)> = Vec::new();
    let next = Arc::new(AtomicI64::new(1));
    for round in 0..rounds {
        let engine = disk.start(&files).await;
        if round == 0 {
            set_up(&engine).await;
        }
        for tenant in 1..=TENANTS {
            let told: Vec<Told> =
                std::mem::take(&mut all).into_iter().fold(Vec::new(), |mut mine, (t, told)| {
                    if t == tenant {
                        mine.push(told)
                    } else {
                        all.push((t, told))
                    }
                    mine
                });
            check(&engine, tenant, &told, &format!("round {round}")).await;
            all.extend(told.into_iter().map(|told| (tenant, told)));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let writers = spawn_writers(&engine, &stop, &next);
        progress(&writers, 20 + round as usize * 7 % 60).await;
        // Also in the middle of writes, of syncs and of the directory's changes.
        let after = files.power_cut(round);
        stop.store(true, Ordering::Release);
        drop(engine);
        for (tenant, writer, told) in writers {
            // The process is gone with its machine, in the middle of whatever it does: no answer comes any more.
            writer.abort();
            let _ = writer.await;
            let told = std::mem::take(&mut *told.lock().unwrap());
            all.push((tenant, told));
        }
        files = after;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_log_write_is_answered_truthfully() {
    let disk = Disk::new();
    let files = FaultyFiles::new();
    let engine = disk.start(&files).await;
    set_up(&engine).await;
    let mut all: Vec<(u64, Told)> = Vec::new();
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
            until("the log fails", async || failures() > before).await;
        }
        progress(&writers, 5).await;
        stop.store(true, Ordering::Release);
        for (tenant, writer, told) in writers {
            within("every client gets an answer", writer).await.unwrap();
            let told = std::mem::take(&mut *told.lock().unwrap());
            all.push((tenant, told));
        }
        for tenant in 1..=TENANTS {
            let (mine, others) = all.into_iter().partition::<Vec<_>, _>(|(t, _)| *t == tenant);
            let told: Vec<Told> = mine.into_iter().map(|(_, told)| told).collect();
            check(&engine, tenant, &told, &format!("round {round}")).await;
            all = others.into_iter().chain(told.into_iter().map(|told| (tenant, told))).collect();
        }
    }
    let refused: usize = all.iter().map(|(_, told)| told.no.len()).sum();
    assert!(refused > 0, "a failed log write must refuse a commit");
    // And the next process finds the same.
    let after = files.process_kill();
    drop(engine);
    let engine = disk.start(&after).await;
    for tenant in 1..=TENANTS {
        let (mine, others) = all.into_iter().partition::<Vec<_>, _>(|(t, _)| *t == tenant);
        let told: Vec<Told> = mine.into_iter().map(|(_, told)| told).collect();
        check(&engine, tenant, &told, "after the restart").await;
        all = others;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_refuses_commits_and_keeps_answering() {
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
    let refused = refused.expect("a log without new files takes commits for ever");
    assert_eq!(refused.state(), sqlstate::DISK_FULL, "{refused}");
    assert_eq!(a.int("SELECT count(*) FROM ledger").await, inserted);
    files.fail_while(Operation::Create, None);
    let commits = async || a.run("INSERT INTO ledger VALUES (-1, 0)").await.is_ok();
    until("commits are accepted, now that the disk has room", commits).await;
    assert_eq!(a.int("SELECT count(*) FROM ledger").await, inserted + 1);
}

/// What was committed before a large commit, and is not in the store yet, is flushed all the same.
#[tokio::test]
async fn a_large_commit_that_the_log_loses_takes_nothing_with_it() {
    let rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) SELECT i, randomblob(3500) FROM n";
    let directory = tempfile::tempdir().unwrap();
    let files = FaultyFiles::new();
    let config = |files: &FaultyFiles| Config {
        files: Some(Arc::new(files.clone())),
        // Only the test flushes.
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
    // The files of a killed process: the threads of its log may still be running.
    let files = files.process_kill();
    drop(engine);
    let engine = start_when_free(|| config(&files)).await;
    let mut a = Client { session: engine.session(PartitionId(1)) };
    assert_eq!(a.int("SELECT sum(n) FROM t").await, 50);
    assert_eq!(a.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
}
