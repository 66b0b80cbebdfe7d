//! Nodes with a store in S3: crashes between the steps of a flush, crashes under load, the disk
//! cache, `fulmar verify`, and starts with the wrong store.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{Node, client, fulmar, query_i64, run, stderr_of_failure, stdout, wait, wait_until};
use fulmar_workload::server::S3Server;
use rustix::process::{Pid, Signal};

const TENANTS: [&str; 3] = ["a", "b", "c"];

struct Rig {
    s3: S3Server,
    directory: tempfile::TempDir,
}

impl Rig {
    fn data(&self) -> &Path {
        self.directory.path()
    }

    fn command(&self) -> Command {
        let mut command = Node::command(self.data(), &[]);
        command.args(["--insecure", "--store", &self.s3.url("node")]).envs(self.s3.environment());
        command
    }

    fn start(&self) -> Node {
        Node::run(self.command())
    }

    /// Starts a node that kills itself at a failpoint, at the latest during the flush of its
    /// shutdown.
    fn start_and_die_at(&self, failpoint: &str) {
        let mut command = self.command();
        command.env("FULMAR_FAILPOINTS", format!("{failpoint}=exit:1")).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        // Wait until the node is ready or dead.
        common::first_line(&mut process);
        rustix::process::kill_process(Pid::from_child(&process), Signal::TERM).unwrap();
        assert_eq!(wait(&mut process).signal(), Some(Signal::KILL.as_raw()), "{failpoint}");
    }

    fn verify(&self) -> Output {
        let data = self.data().to_str().unwrap();
        fulmar(&["verify", "--json", "--data", data]).envs(self.s3.environment()).output().unwrap()
    }

    fn segments(&self) -> Vec<PathBuf> {
        let directory = std::fs::read_dir(self.s3.objects().join("node/segments")).unwrap();
        directory.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()).collect()
    }
}

async fn rig() -> Rig {
    let rig = Rig { s3: S3Server::start().unwrap(), directory: tempfile::tempdir().unwrap() };
    let node = rig.start();
    stdout(&run(&[&["tenant", "--server", &node.url(), "create"], &TENANTS[..]].concat()));
    for tenant in TENANTS {
        let sql = "CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)";
        client(&node, tenant).await.batch_execute(sql).await.unwrap();
    }
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    rig
}

/// Checks that all tenants have this number of rows and are intact.
async fn check_tenants(node: &Node, rows: i64) {
    for tenant in TENANTS {
        let client = client(node, tenant).await;
        assert_eq!(query_i64(&client, "SELECT count(*) FROM t").await, rows, "tenant {tenant}");
        let integrity: String = client.query_one("PRAGMA integrity_check", &[]).await.unwrap().get(0);
        assert_eq!(integrity, "ok", "tenant {tenant}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_survive_crashes_during_a_flush() {
    let rig = rig().await;
    let mut rows = 0;
    for failpoint in ["flush-after-segment", "flush-after-manifest", "flush-before-truncate"] {
        let node = rig.start();
        check_tenants(&node, rows).await;
        for tenant in TENANTS {
            let client = client(&node, tenant).await;
            client.batch_execute("INSERT INTO t(v) VALUES (randomblob(9000)), ('small')").await.unwrap();
        }
        rows += 2;
        assert_eq!(node.stop_with(Signal::KILL), None);
        rig.start_and_die_at(failpoint);
    }
    let node = rig.start();
    check_tenants(&node, rows).await;
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    let node = rig.start();
    check_tenants(&node, rows).await;
    let metrics = stdout(&common::status(&["--json", "--http", &node.http]));
    assert!(metrics.contains("fulmar_store_seconds_count"), "{metrics}");
    assert_eq!(node.stop_with(Signal::KILL), None);
    let found: serde_json::Value = serde_json::from_str(&stdout(&rig.verify())).unwrap();
    let manifests = found["checked"]["manifests"].as_u64().unwrap();
    assert!(manifests >= TENANTS.len() as u64, "each tenant must have a manifest: {found}");
}

/// The node is killed under load on tenants with local and with shared durability.
#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_commits_of_local_and_shared_tenants_survive_crashes_under_load() {
    const CLIENTS: i64 = 6;
    let rig = rig().await;
    let node = rig.start();
    let system = client(&node, "fulmar").await;
    system.batch_execute("CREATE DATABASE shared DURABILITY shared").await.unwrap();
    let create = "CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)";
    client(&node, "shared").await.batch_execute(create).await.unwrap();
    assert_eq!(node.stop_with(Signal::KILL), None);
    let tenant_of = |number: i64| if number % 3 == 0 { TENANTS[0] } else { "shared" };
    let mut acknowledged = [0; CLIENTS as usize];
    for round in 0..3 {
        let node = rig.start();
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let mut writers = Vec::new();
        for (number, before) in (0..CLIENTS).zip(acknowledged) {
            let (client, sender) = (client(&node, tenant_of(number)).await, sender.clone());
            writers.push(tokio::spawn(async move {
                let insert =
                    client.prepare("INSERT INTO t(id, v) VALUES ($1, randomblob(300))").await.unwrap();
                let mut last = before;
                // Insert rows until the node is killed.
                while client.execute(&insert, &[&((last + 1) * CLIENTS + number)]).await.is_ok() {
                    last += 1;
                    sender.send(()).unwrap();
                }
                last
            }));
        }
        for _ in 0..1000 {
            receiver.recv().await.unwrap();
        }
        assert_eq!(node.stop_with(Signal::KILL), None);
        let node = rig.start();
        for (number, writer) in (0..CLIENTS).zip(writers) {
            let last = writer.await.unwrap();
            let tenant = tenant_of(number);
            let count = format!("SELECT count(*) FROM t WHERE id % {CLIENTS} = {number}");
            let rows = number_of(&node, tenant, &count).await;
            // The insert in flight at the crash may have committed as well.
            assert!((last..=last + 1).contains(&rows), "round {round}: {rows} rows of {last} in {tenant}");
            acknowledged[number as usize] = rows;
        }
        assert_eq!(node.stop_with(Signal::KILL), None);
    }
    let node = rig.start();
    let integrity: String =
        client(&node, "shared").await.query_one("PRAGMA integrity_check", &[]).await.unwrap().get(0);
    assert_eq!(integrity, "ok");
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
}

/// Each commit is one log object or part of one. A killed node leaves only the objects that it
/// added. A stopped node leaves only seals.
#[tokio::test(flavor = "multi_thread")]
async fn shared_log_does_not_grow_across_crashes() {
    const COMMITS: i64 = 300;
    let rig = rig().await;
    let objects = || {
        let incarnations = std::fs::read_dir(rig.s3.objects().join("node/logs")).into_iter().flatten();
        let incarnations = incarnations.flat_map(|node| std::fs::read_dir(node.unwrap().path()).unwrap());
        let objects = incarnations.flat_map(|one| std::fs::read_dir(one.unwrap().path()).unwrap());
        objects.count() as i64
    };
    let node = rig.start();
    let create = "CREATE DATABASE shared DURABILITY shared";
    client(&node, "fulmar").await.batch_execute(create).await.unwrap();
    let create = "CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)";
    client(&node, "shared").await.batch_execute(create).await.unwrap();
    assert_eq!(node.stop_with(Signal::KILL), None);
    for life in 1..=4 {
        let node = rig.start();
        // Recovered records are flushed without any client activity. The remaining objects are the
        // seals of all earlier starts, a claim and a mark.
        wait_until("the log is short", async || objects() <= life + 2).await;
        let shared = client(&node, "shared").await;
        for _ in 0..COMMITS {
            shared.execute("INSERT INTO t(v) VALUES (randomblob(300))", &[]).await.unwrap();
        }
        assert_eq!(query_i64(&shared, "SELECT count(*) FROM t").await, life * COMMITS);
        assert_eq!(node.stop_with(Signal::KILL), None);
        assert!(objects() <= COMMITS + life + 10, "life {life}: {} objects", objects());
    }
    let node = rig.start();
    // A stop gives up deleting objects after some seconds, which is too short for all of them on a busy
    // machine.
    wait_until("the log is short", async || objects() <= 5 + 2).await;
    assert_eq!(number_of(&node, "shared", "SELECT count(*) FROM t").await, 4 * COMMITS);
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    assert_eq!(objects(), 6, "one seal for each of the six starts with a shared tenant");
    let node = rig.start();
    assert_eq!(metric(&node, "fulmar_shared_log_backlog_objects"), 0.0);
    assert_eq!(number_of(&node, "shared", "SELECT count(*) FROM t").await, 4 * COMMITS);
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
}

async fn number_of(node: &Node, tenant: &str, sql: &str) -> i64 {
    query_i64(&client(node, tenant).await, sql).await
}

/// Returns the value of a node's metric.
fn metric(node: &Node, name: &str) -> f64 {
    let status = stdout(&common::status(&["--json", "--http", &node.http]));
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    let found = status["metrics"].as_array().unwrap().iter().find(|metric| metric["name"] == name);
    found.and_then(|metric| metric["value"].as_f64()).unwrap_or_else(|| panic!("{name} in {status}"))
}

/// The node is killed several times while it writes its disk cache, and restarted with the
/// remaining cache, with corrupted cache files, and without a cache.
#[tokio::test(flavor = "multi_thread")]
async fn disk_cache_tolerates_crashes_corruption_and_removal() {
    const DIGEST: &str = "SELECT CAST(sum(length(v)) + sum(unicode(hex(v)) * id) AS BIGINT) FROM t";
    let rig = rig().await;
    let start_with_cache = || {
        let mut command = rig.command();
        command.args(["--disk-cache", "64MB"]);
        Node::run(command)
    };
    let files = || {
        let files = std::fs::read_dir(rig.data().join("cache")).unwrap();
        files.map(|file| file.unwrap().path()).collect::<Vec<_>>()
    };
    // Load the data without a cache, so that the later scans have to fill it.
    let node = rig.start();
    let a = client(&node, "a").await;
    // More data than fits in the node's memory.
    let fill = "INSERT INTO t(v) WITH RECURSIVE i(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM i WHERE k < 15000) \
                SELECT randomblob(3500) FROM i";
    a.batch_execute(fill).await.unwrap();
    let expected = query_i64(&a, DIGEST).await;
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    for round in 0..4 {
        let node = start_with_cache();
        let a = client(&node, "a").await;
        assert_eq!(query_i64(&a, DIGEST).await, expected, "round {round}");
        // The cache is written, and opened, in the background.
        if round == 0 {
            wait_until("pages are written", async || {
                assert_eq!(query_i64(&a, DIGEST).await, expected);
                metric(&node, "fulmar_disk_cache_written_bytes_total") > 1e6
            })
            .await;
        }
        if round == 3 {
            wait_until("corrupted pages are read and rejected", async || {
                assert_eq!(query_i64(&a, DIGEST).await, expected);
                metric(&node, "fulmar_disk_cache_failures_total") > 0.0
            })
            .await;
        }
        // Kill the node during another scan.
        let scan = tokio::spawn(async move { a.query_one(DIGEST, &[]).await.map(drop) });
        assert_eq!(node.stop_with(Signal::KILL), None);
        // The scan may have completed before the kill.
        let _ = scan.await.unwrap();
        let bytes: u64 = files().iter().map(|file| file.metadata().unwrap().len()).sum();
        assert!(bytes <= 64 << 20, "{bytes}");
        for file in files().iter().filter(|_| round == 2) {
            let mut bytes = std::fs::read(file).unwrap();
            bytes.iter_mut().skip(100).step_by(50_000).for_each(|byte| *byte ^= 1);
            std::fs::write(file, bytes).unwrap();
        }
    }
    let node = start_with_cache();
    wait_until("pages are read from the cache", async || {
        assert_eq!(number_of(&node, "a", DIGEST).await, expected);
        metric(&node, "fulmar_disk_cache_hits_total") > 0.0
    })
    .await;
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    assert!(!files().is_empty());
    let node = rig.start();
    assert!(!rig.data().join("cache").exists(), "a start without --disk-cache must delete the cache");
    assert_eq!(number_of(&node, "a", DIGEST).await, expected);
    assert_eq!(node.stop_with(Signal::TERM), Some(0));
    stdout(&rig.verify());
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_reports_a_corrupted_segment_in_s3() {
    let rig = rig().await;
    stdout(&rig.verify());
    let segment = rig.segments().pop().unwrap();
    let mut bytes = std::fs::read(&segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&segment, bytes).unwrap();
    let output = rig.verify();
    stderr_of_failure(&output, 1);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let name = segment.file_name().unwrap().to_str().unwrap();
    assert_eq!(found["damage"][0]["place"], format!("{}/segments/{name}", rig.s3.url("node")), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn start_with_another_store_is_refused() {
    let rig = rig().await;
    let start = |data: &Path, flags: &[&str]| {
        Node::command(data, &[]).args(["--insecure"]).args(flags).envs(rig.s3.environment()).output().unwrap()
    };
    let error = stderr_of_failure(&start(rig.data(), &[]), 1);
    assert!(error.contains(&format!("start with --store {}", rig.s3.url("node"))), "{error}");
    let error = stderr_of_failure(&start(rig.data(), &["--store", &rig.s3.url("other")]), 1);
    assert!(error.contains("is not the store of this data directory"), "{error}");
    let other = tempfile::tempdir().unwrap();
    let error = stderr_of_failure(&start(other.path(), &["--store", &rig.s3.url("node")]), 1);
    assert!(error.contains("belongs to another data directory"), "{error}");
    let error = stderr_of_failure(&start(other.path(), &["--store", "s3://nowhere/x"]), 1);
    assert!(error.contains("s3://nowhere/x") && error.contains("check the store's URL"), "{error}");
    let error = stderr_of_failure(&start(other.path(), &["--disk-cache", "1GiB"]), 1);
    assert!(error.contains("--disk-cache requires an S3 store"), "{error}");
    let error = stderr_of_failure(&start(other.path(), &["--store", "http://x"]), 2);
    assert!(error.contains("expected file:///directory, s3://bucket/prefix or memory:"), "{error}");
}
