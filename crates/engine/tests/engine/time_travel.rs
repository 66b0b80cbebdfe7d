//! Time travel: historical sessions (`fulmar.as_of`), concurrent with writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::Client;
use crate::common::history::{DAY, MINUTE, Node, SHOP, five_minutes};
use fulmar_engine::{TimeSource, Value, sqlstate};
use parking_lot::Mutex;

/// Historical sessions run while other sessions write. They write nothing, not even a transaction
/// outcome.
#[tokio::test(flavor = "multi_thread")]
async fn historical_sessions_see_the_partition_at_their_time() {
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
    // An open transaction keeps its version.
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
    // A version from before the restore can be read after it.
    node.restore(times[0]).await.unwrap();
    assert_eq!(client.int(COUNT).await, 5);
    client.session.set_as_of(None);
    assert_eq!(client.int(COUNT).await, 1);
    for (at, expected) in
        [(times[0] - DAY, "no restore point at or before"), (node.clock.unix_ms() + MINUTE, "future")]
    {
        client.session.set_as_of(Some(at));
        let error = client.run(COUNT).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE);
        assert!(error.message().contains(expected), "{error:?}");
    }
    client.close().await;
}

/// A version that is being read is kept beyond the retention. It is collected afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn version_being_read_is_not_collected() {
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
    node.advance(DAY + MINUTE);
    node.engine.collect().await.unwrap();
    assert_eq!(node.engine.history(SHOP).await.unwrap().len(), 1);
    // These pages have not been read before.
    assert_eq!(client.int("SELECT sum(length(v)) FROM t").await, 5 * 3000);
    client.session.set_as_of(None);
    assert_eq!(client.int("SELECT count(*) FROM t").await, 0);
    client.session.set_as_of(Some(times[0]));
    assert_eq!(client.state("SELECT count(*) FROM t").await, "22023", "the version is beyond the retention");

    client.session.set_as_of(Some(node.clock.unix_ms()));
    assert_eq!(client.int("SELECT count(*) FROM t").await, 0);
    node.engine.drop_partition(SHOP).await.unwrap();
    assert_eq!(client.state("SELECT count(*) FROM t").await, "57P04");
    client.close().await;
}

/// Sessions of the same version share it. The number of open versions per partition is limited.
#[tokio::test(flavor = "multi_thread")]
async fn number_of_open_versions_is_limited() {
    let node = Node::start(Duration::from_millis(DAY)).await;
    node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    let mut readers = Vec::new();
    for rows in 1..=9 {
        let mut client = node.client(SHOP);
        client.session.set_as_of(Some(node.minute().await));
        match client.run("SELECT count(*) FROM t").await {
            Ok(answer) => assert_eq!(answer, [[Value::Integer(rows)]]),
            Err(error) => assert_eq!((error.state(), rows), (sqlstate::CONFIGURATION_LIMIT, 9)),
        }
        readers.push(client);
    }
    let mut ninth = readers.pop().unwrap();
    assert_eq!(ninth.state("SELECT count(*) FROM t").await, "53400");
    let first = readers.remove(0);
    let shared = first.session.snapshot_time().unwrap() + 1;
    let mut sharing = node.client(SHOP);
    sharing.session.set_as_of(Some(shared));
    assert_eq!(sharing.int("SELECT count(*) FROM t").await, 1);
    first.close().await;
    assert_eq!(
        ninth.state("SELECT count(*) FROM t").await,
        "53400",
        "another session still reads the version"
    );
    sharing.close().await;
    assert_eq!(ninth.int("SELECT count(*) FROM t").await, 9);
    ninth.close().await;
}

/// Concurrent writers, flushes, compactions and collections, with a retention of ten minutes. A
/// reader of a minute consistently sees the version of that minute or of the one before, or gets an
/// error that it has expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_sees_one_consistent_minute_under_load() {
    const RETENTION_MINUTES: usize = 10;
    let node = Node::start(Duration::from_millis(RETENTION_MINUTES as u64 * MINUTE)).await;
    node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, minute INTEGER, v BLOB)").await;
    node.run(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20) \
         INSERT INTO t SELECT i, 0, '' FROM n",
    )
    .await;
    let times = Arc::new(Mutex::new(Vec::new()));
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..3)
        .map(|reader| {
            let (times, stop, engine) = (times.clone(), stop.clone(), node.engine.clone());
            tokio::spawn(async move {
                let mut client = Client { session: engine.session(SHOP) };
                let (mut reads, mut round) = (0, reader);
                while !stop.load(Ordering::Relaxed) {
                    tokio::task::yield_now().await;
                    round += 1;
                    let (minute, time) = {
                        let times = times.lock();
                        let Some(oldest) = times.len().checked_sub(1) else { continue };
                        let minute = oldest - (round * 7) % times.len().min(RETENTION_MINUTES + 3);
                        (minute as i64, times[minute])
                    };
                    client.session.set_as_of(Some(time));
                    let mut first = None;
                    for _ in 0..3 {
                        match client.run("SELECT min(minute), max(minute), sum(length(v)) FROM t").await {
                            Ok(rows) => {
                                let [Value::Integer(shown), newest, bytes] = &rows[0][..] else {
                                    panic!("{rows:?}")
                                };
                                // History has one version per minute.
                                assert!((minute - 1..=minute).contains(shown), "{shown} at {minute}");
                                assert_eq!(
                                    (newest, bytes),
                                    (&Value::Integer(*shown), &Value::Integer(60_000))
                                );
                                assert_eq!(*shown, *first.get_or_insert(*shown));
                                reads += 1;
                            }
                            Err(error) => {
                                assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE, "{error:?}");
                                let newest = times.lock().len() as i64 - 1;
                                assert!(
                                    newest - minute >= RETENTION_MINUTES as i64 - 1,
                                    "minute {minute} of {newest}: {error:?}"
                                );
                            }
                        }
                    }
                }
                client.close().await;
                reads
            })
        })
        .collect();
    for minute in 0..60 {
        node.run(&format!("UPDATE t SET minute = {minute}, v = randomblob(3000)")).await;
        node.engine.flush().await.unwrap();
        node.advance(MINUTE / 2);
        times.lock().push(node.clock.unix_ms());
        node.advance(MINUTE / 2);
        node.engine.compact_all().await.unwrap();
        node.engine.collect().await.unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.await.unwrap() > 0, "every reader must have read a version");
    }
    assert!(node.engine.history(SHOP).await.unwrap().len() <= RETENTION_MINUTES + 2);
}
