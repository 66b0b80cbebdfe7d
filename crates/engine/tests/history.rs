//! What a partition was: restored, branched, thinned out, collected, with a crash in between.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{Client, start_when_free};
use fulmar_engine::{Config, Engine, Era, Error, SystemTime, TimeSource, Value, sqlstate};
use fulmar_pages::PartitionId;

const SHOP: PartitionId = PartitionId(7);
const MINUTE: u64 = 60_000;
const DAY: u64 = 24 * 60 * MINUTE;

/// A clock that the test moves on; what is measured goes on by itself.
#[derive(Default)]
struct Moved {
    system: SystemTime,
    by_ms: AtomicU64,
}

impl TimeSource for Moved {
    fn unix_ms(&self) -> u64 {
        self.system.unix_ms() + self.by_ms.load(Ordering::Relaxed)
    }

    fn monotonic_ms(&self) -> u64 {
        self.system.monotonic_ms()
    }
}

struct Node {
    engine: Arc<Engine>,
    directory: tempfile::TempDir,
    clock: Arc<Moved>,
    /// What a catalog knows of it.
    eras: HashMap<PartitionId, Era>,
    retention: Duration,
}

impl Node {
    async fn start(retention: Duration) -> Node {
        let (directory, clock) = (tempfile::tempdir().unwrap(), Arc::new(Moved::default()));
        let engine = Self::open(&directory, &clock, &HashMap::new(), retention).await;
        Node { engine, directory, clock, eras: HashMap::new(), retention }
    }

    async fn open(
        directory: &tempfile::TempDir,
        clock: &Arc<Moved>,
        eras: &HashMap<PartitionId, Era>,
        retention: Duration,
    ) -> Arc<Engine> {
        let config = || Config {
            time: clock.clone(),
            eras: eras.iter().map(|(id, era)| (*id, *era)).collect(),
            retention: Arc::new(move |_| retention),
            // Only the test flushes.
            manifest_interval: Duration::from_secs(3600),
            ..Config::new(directory.path(), 1 << 28)
        };
        start_when_free(config).await
    }

    /// As a kill does: nothing is closed or flushed.
    async fn crash(self) -> Node {
        let Node { engine, directory, clock, eras, retention } = self;
        drop(engine);
        let engine = Self::open(&directory, &clock, &eras, retention).await;
        Node { engine, directory, clock, eras, retention }
    }

    fn client(&self, id: PartitionId) -> Client {
        Client { session: self.engine.session(id) }
    }

    fn wait(&self, ms: u64) {
        self.clock.by_ms.fetch_add(ms, Ordering::Relaxed);
    }

    async fn run(&self, sql: &str) {
        let mut client = self.client(SHOP);
        client.run(sql).await.unwrap();
        client.close().await;
    }

    /// A row more, flushed, and a minute later. Answers when it was there and nothing else.
    async fn minute(&self) -> u64 {
        self.run("INSERT INTO t(v) VALUES (randomblob(3000))").await;
        self.engine.flush().await.unwrap();
        self.wait(MINUTE);
        self.clock.unix_ms() - MINUTE / 2
    }

    async fn rows(&self, id: PartitionId) -> i64 {
        let mut client = self.client(id);
        let rows = client.int("SELECT count(*) FROM t").await;
        assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        client.close().await;
        rows
    }

    async fn restore(&mut self, at: u64) -> Result<(), Error> {
        let eras = &mut self.eras;
        let decide = async |era| {
            eras.insert(SHOP, era);
            Ok(())
        };
        self.engine.restore_partition(SHOP, at, decide).await
    }

    fn objects(&self, of: &str) -> usize {
        fn count(directory: &std::path::Path) -> usize {
            let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
            let count = |entry: std::fs::DirEntry| match entry.path() {
                path if path.is_dir() => count(&path),
                _ => 1,
            };
            entries.map(|entry| count(entry.unwrap())).sum()
        }
        count(&self.directory.path().join("store").join(of))
    }
}

async fn five_minutes(retention: Duration) -> (Node, Vec<u64>) {
    let node = Node::start(retention).await;
    node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    let mut times = Vec::new();
    for _ in 0..5 {
        times.push(node.minute().await);
    }
    (node, times)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_goes_back_to_any_of_its_minutes_and_forth_again() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 5);
    for (minute, time) in times.iter().enumerate() {
        let id = PartitionId(100 + minute as u64);
        node.engine.create_partition(id, Some((SHOP, Some(*time)))).await.unwrap();
        assert_eq!(node.rows(id).await, minute as i64 + 1);
    }

    // Not flushed yet: a restore leaves it restorable.
    node.run("DELETE FROM t").await;
    node.restore(times[2]).await.unwrap();
    assert_eq!(node.rows(SHOP).await, 3);
    let history = node.engine.history(SHOP).await.unwrap();
    let deleted = history.iter().rfind(|point| point.lineage == SHOP.0).unwrap().time_unix_ms;
    node.run("INSERT INTO t(v) VALUES ('after')").await;
    node = node.crash().await;
    assert_eq!(node.rows(SHOP).await, 4);
    node.wait(MINUTE);
    // The last one is now: nothing changes.
    for (time, rows) in [(Some(deleted), 0), (Some(times[4]), 5), (Some(times[0]), 1), (None, 1)] {
        let time = time.unwrap_or_else(|| node.clock.unix_ms());
        node.restore(time).await.unwrap();
        assert_eq!(node.rows(SHOP).await, rows, "at {time}");
        node = node.crash().await;
        assert_eq!(node.rows(SHOP).await, rows, "at {time}, after a crash");
    }
    let history = node.engine.history(SHOP).await.unwrap();
    assert!(history.is_sorted_by(|a, b| a.time_unix_ms <= b.time_unix_ms), "{history:?}");
    let mut lineages: Vec<u64> = history.iter().map(|point| point.lineage).collect();
    lineages.dedup();
    assert_eq!(lineages.len(), 6, "that of the beginning, and one for each restore: {history:?}");
    assert_eq!(node.rows(PartitionId(103)).await, 4, "a branch goes its own way");
}

#[tokio::test(flavor = "multi_thread")]
async fn times_that_nobody_can_go_back_to_are_refused() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let error = node.restore(times[0] - DAY).await.unwrap_err();
    assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE);
    assert!(error.get_detail().unwrap().starts_with("It begins at 20"), "{error:?}");
    let error = node.restore(node.clock.unix_ms() + MINUTE).await.unwrap_err();
    assert!(error.message().contains("future"), "{error:?}");
    let error = node.engine.create_partition(PartitionId(8), Some((PartitionId(9), Some(times[0])))).await;
    assert!(error.unwrap_err().get_detail().unwrap().contains("none yet"));
    assert_eq!(node.rows(SHOP).await, 5);
}

/// A restore ends between its manifest and the catalog's word, or behind that; nobody has got to know.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_has_happened_when_the_catalog_says_so() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    node.run("INSERT INTO t(v) VALUES ('in the log')").await;
    let manifests = node.objects("manifests");
    let fails = async |_| Err(Error::new(sqlstate::IO_ERROR, "the catalog has failed"));
    node.engine.restore_partition(SHOP, times[1], fails).await.unwrap_err();
    let mut client = node.client(SHOP);
    assert_eq!(client.state("INSERT INTO t(v) VALUES (1)").await, "57P01", "it may have been restored");
    client.close().await;
    // The catalog does not know of it.
    node = node.crash().await;
    assert_eq!(node.objects("manifests"), manifests + 2, "of its flush, and of its next epoch");
    assert_eq!(node.rows(SHOP).await, 6);
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), manifests + 1);
    node.engine.collect().await.unwrap();
    assert_eq!(node.objects("manifests"), manifests + 1);

    // It does, and that is all that is left of it.
    let eras = &mut node.eras;
    let knows = async |era| {
        eras.insert(SHOP, era);
        Err(Error::new(sqlstate::IO_ERROR, "its answer was lost"))
    };
    node.engine.restore_partition(SHOP, times[1], knows).await.unwrap_err();
    node = node.crash().await;
    assert_eq!(node.rows(SHOP).await, 2);
    node.engine.collect().await.unwrap();
    assert_eq!(node.rows(SHOP).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_in_a_transaction_cannot_commit_into_what_was_restored() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let mut client = node.client(SHOP);
    client.run("CREATE TEMP TABLE mine(x); BEGIN; INSERT INTO t(v) VALUES ('before')").await.unwrap();
    node.restore(times[0]).await.unwrap();
    assert_eq!(client.state("COMMIT").await, "57P01");
    let _ = client.run("ROLLBACK").await;
    assert_eq!(client.int("SELECT count(*) FROM t").await, 1);
    client.run("INSERT INTO t(v) VALUES ('after')").await.unwrap();
    client.close().await;
    assert_eq!(node.rows(SHOP).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_older_than_the_retention_goes_and_what_others_name_stays() {
    let (node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let branch = PartitionId(8);
    node.engine.create_partition(branch, Some((SHOP, Some(times[1])))).await.unwrap();
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 5);
    node.wait(DAY + MINUTE);
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 1, "the newest stays");
    assert_eq!((node.rows(SHOP).await, node.rows(branch).await), (5, 2));
    node.engine.drop_partition(SHOP).await.unwrap();
    node.engine.collect().await.unwrap();
    let node = node.crash().await;
    assert_eq!(node.rows(branch).await, 2);
    node.engine.drop_partition(branch).await.unwrap();
    node.engine.collect().await.unwrap();
    assert_eq!((node.objects("manifests"), node.objects("segments")), (0, 0));
}

/// Branches, flushes, drops and collections at once: no branch ever misses a page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_collected_that_a_branch_needs() {
    let (node, _) = five_minutes(Duration::ZERO).await;
    let collecting = tokio::spawn({
        let engine = node.engine.clone();
        async move {
            loop {
                engine.collect().await.unwrap();
            }
        }
    });
    let mut previous = SHOP;
    for number in 100..140 {
        node.run("UPDATE t SET v = randomblob(3000)").await;
        let id = PartitionId(number);
        // Of the newest, or a branch of a branch whose source goes at once.
        let source = if number % 2 == 0 { SHOP } else { previous };
        node.engine.create_partition(id, Some((source, None))).await.unwrap();
        if previous != SHOP {
            node.engine.drop_partition(previous).await.unwrap();
        }
        assert_eq!(node.rows(id).await, 5);
        previous = id;
    }
    collecting.abort();
    let _ = collecting.await;
    assert_eq!(node.rows(SHOP).await, 5);
}

/// Sessions look at the past while others go on writing; nothing of it is written, not even an outcome.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_see_the_partition_as_it_was() {
    let (mut node, times) = five_minutes(Duration::from_millis(DAY)).await;
    const COUNT: &str = "SELECT count(*) FROM t";
    let mut client = node.client(SHOP);
    client.run("CREATE TEMP TABLE mine(x); INSERT INTO mine VALUES (7)").await.unwrap();
    for (minute, time) in times.iter().enumerate() {
        client.session.set_as_of(Some(*time));
        assert_eq!(client.int(COUNT).await, minute as i64 + 1);
        let shown = client.session.snapshot_time().unwrap();
        assert!(shown <= *time && shown + MINUTE > *time, "{shown} for {time}");
        assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
    }
    client.session.set_as_of(Some(times[1]));
    client.run("BEGIN READ ONLY").await.unwrap();
    assert_eq!(client.int(COUNT).await, 2);
    // What is open stays with what it sees.
    client.session.set_as_of(None);
    node.run("DELETE FROM t; DROP TABLE t; CREATE TABLE other(x)").await;
    assert_eq!((client.int(COUNT).await, client.int("SELECT max(id) FROM t").await), (2, 2));
    client.run("COMMIT").await.unwrap();
    assert_eq!((client.state(COUNT).await, client.int("SELECT x FROM mine").await), ("42P01", 7));

    client.session.set_as_of(Some(times[1]));
    for sql in [
        "INSERT INTO t(v) VALUES (1)",
        "BEGIN; INSERT INTO t(v) VALUES (1)",
        "BEGIN READ WRITE; DELETE FROM t",
        "CREATE TEMP TABLE another(x)",
        "SELECT * FROM t WHERE id = 1 FOR UPDATE",
        "SELECT pg_current_xact_id()",
        "SELECT pg_xact_status(1 << 40)",
        "PRAGMA user_version = 3",
        "VACUUM",
    ] {
        assert_eq!(client.state(sql).await, "25006", "{sql}");
        let _ = client.run("ROLLBACK").await;
    }
    client.close().await;
    node.run("INSERT INTO other VALUES (1)").await;
    node = node.crash().await;
    let mut client = node.client(SHOP);
    assert_eq!(client.int("SELECT count(*) FROM other").await, 1);
    client.session.set_as_of(Some(times[4]));
    assert_eq!(client.int(COUNT).await, 5);
    // From before a restore to after it.
    node.restore(times[0]).await.unwrap();
    assert_eq!(client.int(COUNT).await, 5);
    client.session.set_as_of(None);
    assert_eq!(client.int(COUNT).await, 1);
    for (at, said) in [(times[0] - DAY, "does not reach back"), (node.clock.unix_ms() + MINUTE, "future")] {
        client.session.set_as_of(Some(at));
        let error = client.run(COUNT).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE);
        assert!(error.message().contains(said), "{error:?}");
    }
    client.close().await;
}

/// What is looked at stays, though its manifest has had its time; then it goes.
#[tokio::test(flavor = "multi_thread")]
async fn the_past_that_is_looked_at_is_not_collected() {
    let (node, times) = five_minutes(Duration::from_millis(DAY)).await;
    let mut client = node.client(SHOP);
    client.session.set_as_of(Some(times[4]));
    assert_eq!(client.int("SELECT count(*) FROM sqlite_schema").await, 1);
    for _ in 0..8 {
        node.run("UPDATE t SET v = randomblob(3000)").await;
        node.engine.flush().await.unwrap();
        node.engine.compact_all().await.unwrap();
    }
    node.run("DELETE FROM t").await;
    node.engine.flush().await.unwrap();
    node.wait(DAY + MINUTE);
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 1);
    // Nobody has read these pages yet.
    assert_eq!(client.int("SELECT sum(length(v)) FROM t").await, 5 * 3000);
    client.session.set_as_of(None);
    assert_eq!(client.int("SELECT count(*) FROM t").await, 0);
    client.session.set_as_of(Some(times[0]));
    assert_eq!(client.state("SELECT count(*) FROM t").await, "22023", "it is beyond the retention now");

    client.session.set_as_of(Some(node.clock.unix_ms()));
    assert_eq!(client.int("SELECT count(*) FROM t").await, 0);
    node.engine.drop_partition(SHOP).await.unwrap();
    assert_eq!(client.state("SELECT count(*) FROM t").await, "57P04");
    client.close().await;
}

/// A version is open once for all who look at it; of one partition only so many are.
#[tokio::test(flavor = "multi_thread")]
async fn only_so_many_versions_are_looked_at_at_once() {
    let node = Node::start(Duration::from_millis(DAY)).await;
    node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    let mut looking = Vec::new();
    for rows in 1..=9 {
        let mut client = node.client(SHOP);
        client.session.set_as_of(Some(node.minute().await));
        match client.run("SELECT count(*) FROM t").await {
            Ok(answer) => assert_eq!(answer, [[Value::Integer(rows)]]),
            Err(error) => assert_eq!((error.state(), rows), (sqlstate::CONFIGURATION_LIMIT, 9)),
        }
        looking.push(client);
    }
    let mut ninth = looking.pop().unwrap();
    assert_eq!(ninth.state("SELECT count(*) FROM t").await, "53400");
    let first = looking.remove(0);
    let shared = first.session.snapshot_time().unwrap() + 1;
    let mut beside = node.client(SHOP);
    beside.session.set_as_of(Some(shared));
    assert_eq!(beside.int("SELECT count(*) FROM t").await, 1);
    first.close().await;
    assert_eq!(ninth.state("SELECT count(*) FROM t").await, "53400", "another still looks at it");
    beside.close().await;
    assert_eq!(ninth.int("SELECT count(*) FROM t").await, 9);
    ninth.close().await;
}
