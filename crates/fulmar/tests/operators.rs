//! Tools for operators: `tenant exec`, restore, export and import, `verify`, and a full disk.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use common::{Node, client, fulmar, query_i64, run, stderr_of_failure, stdout, wait, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn exec_runs_a_script_once_in_each_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(&directory.path().join("data"), &["--insecure"]);
    let url = node.url();
    let file = directory.path().join("migrate.sql");
    let path = file.to_str().unwrap();
    let exec = |arguments: &[&str]| run(&[&["tenant", "--server", &url, "exec"], arguments].concat());
    stdout(&run(&["tenant", "--server", &url, "create", "a-1", "a-2", "b-1"]));
    stdout(&exec(&["--all", "-c", "CREATE TABLE log(n INTEGER)"]));
    std::fs::write(
        &file,
        "INSERT INTO log VALUES (1); CREATE TABLE t(x); INSERT INTO t SELECT sum(n) FROM log;",
    )
    .unwrap();

    // The script fails in one tenant, and is rolled back there.
    client(&node, "a-2").await.batch_execute("CREATE TABLE t(y)").await.unwrap();
    let output = exec(&["--like", "A-_", "-f", path, "--json"]);
    assert!(stderr_of_failure(&output, 1).contains("script failed"));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["done"], &report["skipped"]), (&1.into(), &0.into()));
    let failed = report["failed"].as_array().unwrap();
    assert_eq!(
        (failed.len(), &failed[0]["tenant"], &failed[0]["sqlstate"]),
        (1, &"a-2".into(), &"42P07".into())
    );
    assert!(failed[0]["message"].as_str().unwrap().contains("already exists"));
    assert_eq!(query_i64(&client(&node, "a-2").await, "SELECT count(*) FROM log").await, 0);
    let output = exec(&["--like", "a-_", "-f", path]);
    assert!(stderr_of_failure(&output, 1).contains("re-run the same command"));
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("42P07") && table.contains("done in 0 tenants, 1 skipped, 1 failed"), "{table}");

    // Without the cause of the failure, the next run completes the other tenants, and a further run
    // skips all of them.
    client(&node, "a-2").await.batch_execute("DROP TABLE t").await.unwrap();
    assert!(stdout(&exec(&["--all", "-f", path])).starts_with("done in 2 tenants, 1 skipped, 0 failed"));
    assert!(stdout(&exec(&["--all", "-f", path])).starts_with("done in 0 tenants, 3 skipped, 0 failed"));
    for name in ["a-1", "a-2", "b-1"] {
        assert_eq!(query_i64(&client(&node, name).await, "SELECT count(*) FROM log").await, 1);
    }

    // A changed text is a new script. A tenant that does not exist counts as failed.
    std::fs::write(&file, "INSERT INTO log VALUES (2)").unwrap();
    let output = exec(&["a-1", "nobody", "-f", path, "--json"]);
    assert!(stderr_of_failure(&output, 1).contains("script failed"));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["done"], &report["failed"][0]["sqlstate"]), (&1.into(), &"3D000".into()));

    let ends = exec(&["a-1", "-c", "INSERT INTO log VALUES (9); ROLLBACK; INSERT INTO log VALUES (9)"]);
    assert!(String::from_utf8_lossy(&ends.stdout).contains("the script ends its transaction"));
    assert_eq!(query_i64(&client(&node, "a-1").await, "SELECT count(*) FROM log WHERE n = 9").await, 1);
    stdout(&exec(&["a-1", "-c", "VACUUM", "--no-transaction"]));
    stderr_of_failure(&exec(&["--all", "a-1", "-c", "SELECT 1"]), 2);
    stderr_of_failure(&exec(&["--all"]), 2);
    assert!(stderr_of_failure(&exec(&["--like", "nobody", "-c", "SELECT 1"]), 1).contains("tenant list"));
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_checks_the_outcome_of_an_interrupted_commit() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(&directory.path().join("data"), &["--insecure"]);
    let url = node.url();
    let file = directory.path().join("migrate.sql");
    let path = file.to_str().unwrap();
    stdout(&run(&["tenant", "--server", &url, "create", "a", "b"]));
    let exec = ["tenant", "--server", &url, "exec", "--all", "-f", path];
    let table = "CREATE TABLE log(n INTEGER PRIMARY KEY); INSERT INTO log VALUES (1)";
    stdout(&run(&["tenant", "--server", &url, "exec", "--all", "-c", table]));
    std::fs::write(&file, "SELECT * FROM log WHERE n = 1 FOR UPDATE; INSERT INTO log VALUES (2)").unwrap();

    // In tenant b the script waits for a row lock. Interrupt it there.
    let holder = client(&node, "b").await;
    holder.batch_execute("BEGIN; SELECT * FROM log WHERE n = 1 FOR UPDATE").await.unwrap();
    let mut process = fulmar(&exec).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let observer = client(&node, "a").await;
    let is_done = async || query_i64(&observer, "SELECT count(*) FROM log WHERE n = 2").await > 0;
    wait_until("the script has committed in tenant a", is_done).await;
    rustix::process::kill_process(rustix::process::Pid::from_child(&process), rustix::process::Signal::INT)
        .unwrap();
    assert_eq!(wait(&mut process).code(), Some(130));
    holder.batch_execute("ROLLBACK").await.unwrap();

    // Simulate a crash between the COMMIT and the note of its success.
    let notes = std::fs::read_to_string(directory.path().join("migrate.sql.state")).unwrap();
    let begun: Vec<&str> = notes.lines().filter(|line| line.ends_with("\"done\":false}")).collect();
    assert!(!begun.is_empty() && begun.iter().all(|line| line.contains("\"tenant\":\"a\"")), "{notes}");
    std::fs::write(directory.path().join("migrate.sql.state"), begun.join("\n")).unwrap();
    let report: serde_json::Value =
        serde_json::from_str(&stdout(&run(&[&exec[..], &["--json"]].concat()))).unwrap();
    assert_eq!((&report["done"], &report["skipped"]), (&2.into(), &0.into()));
    for name in ["a", "b"] {
        let client = client(&node, name).await;
        assert_eq!(query_i64(&client, "SELECT count(*) FROM log WHERE n = 2").await, 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restore_and_branches_at_a_time_survive_a_crash() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let node = Node::start(&data, &["--insecure"]);
    let url = node.url();
    let tenant = |url: &str, arguments: &[&str]| run(&[&["tenant", "--server", url], arguments].concat());
    stdout(&tenant(&url, &["create", "shop"]));
    client(&node, "shop").await.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1)").await.unwrap();
    // Creating a branch flushes its template, which adds a restore point.
    stdout(&tenant(&url, &["create", "one", "--template", "shop"]));
    let points: serde_json::Value =
        serde_json::from_str(&stdout(&tenant(&url, &["history", "shop", "--json"]))).unwrap();
    let time = points[0]["time"].as_str().unwrap();
    assert!(stdout(&tenant(&url, &["history", "shop"])).contains(time));
    client(&node, "shop").await.batch_execute("INSERT INTO t VALUES (2), (3)").await.unwrap();
    stdout(&tenant(&url, &["create", "then", "--template", "shop", "--at", time]));
    stdout(&tenant(&url, &["restore", "shop", "--to", time]));
    assert!(
        stderr_of_failure(&tenant(&url, &["restore", "shop", "--to", "2001-01-01"]), 1).contains("22023")
    );
    client(&node, "shop").await.batch_execute("INSERT INTO t VALUES (4)").await.unwrap();
    assert_eq!(node.stop_with(rustix::process::Signal::KILL), None);

    let node = Node::start(&data, &["--insecure"]);
    for (name, rows) in [("shop", 2), ("one", 1), ("then", 1)] {
        assert_eq!(query_i64(&client(&node, name).await, "SELECT count(*) FROM t").await, rows, "{name}");
    }
    assert_eq!(node.stop_with(rustix::process::Signal::TERM), Some(0));
    assert!(stdout(&run(&["verify", "--data", data.to_str().unwrap()])).starts_with("sound"));
}

#[tokio::test(flavor = "multi_thread")]
async fn export_and_import_preserve_all_data() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let node = Node::start(&data, &["--insecure"]);
    let url = node.url();
    let tenant = |arguments: &[&str]| run(&[&["tenant", "--server", &url], arguments].concat());
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    stdout(&tenant(&["create", "shop"]));
    let rows = "CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT UNIQUE);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
        INSERT INTO item SELECT i, 'item ' || i FROM n";
    client(&node, "shop").await.batch_execute(rows).await.unwrap();

    let file = path("shop.db");
    assert!(stdout(&tenant(&["export", "shop", &file])).starts_with("exported shop to "));
    let stock = |file: &str, sql: &str| -> String {
        rusqlite::Connection::open(file).unwrap().query_row(sql, [], |row| row.get(0)).unwrap()
    };
    assert_eq!(stock(&file, "PRAGMA integrity_check"), "ok");
    assert_eq!(stock(&file, "SELECT name FROM item WHERE id = 20000"), "item 20000");
    assert!(stderr_of_failure(&tenant(&["export", "shop", &file]), 1).contains("--force"));
    let again = stdout(&tenant(&["export", "shop", &file, "--force", "--json"]));
    let again: serde_json::Value = serde_json::from_str(&again).unwrap();
    assert_eq!(again["bytes"], std::fs::metadata(&file).unwrap().len());
    assert!(
        stderr_of_failure(&tenant(&["export", "nobody", &path("nobody.db")]), 1).contains("does not exist")
    );
    assert_eq!(tenant(&["export", "shop", "-"]).stdout, std::fs::read(&file).unwrap());

    // Export at a restore point.
    let history: serde_json::Value =
        serde_json::from_str(&stdout(&tenant(&["history", "shop", "--json"]))).unwrap();
    let time = history.as_array().unwrap().last().unwrap()["time"].as_str().unwrap();
    client(&node, "shop").await.batch_execute("DELETE FROM item").await.unwrap();
    let early = path("early.db");
    stdout(&tenant(&["export", "shop", &early, "--at", time]));
    assert_eq!(std::fs::read(&early).unwrap(), std::fs::read(&file).unwrap());
    let error = stderr_of_failure(&tenant(&["export", "shop", &path("none.db"), "--at", "2020-01-01"]), 1);
    assert!(
        error.contains("no restore point at or before") && !Path::new(&path("none.db")).exists(),
        "{error}"
    );

    // A file with a write-ahead log is rejected.
    let user = rusqlite::Connection::open(&file).unwrap();
    user.execute_batch("PRAGMA journal_mode = WAL; UPDATE item SET name = 'changed' WHERE id = 1").unwrap();
    let error = stderr_of_failure(&tenant(&["import", "store", &file]), 1);
    assert!(error.contains("write-ahead log") && error.contains("VACUUM INTO"), "{error}");
    drop(user);
    assert!(stdout(&tenant(&["import", "store", &file])).contains(" as store: "));
    assert!(stderr_of_failure(&tenant(&["import", "store", &file]), 1).contains("already exists"));
    std::fs::write(path("text"), "no database").unwrap();
    assert!(
        stderr_of_failure(&tenant(&["import", "other", &path("text")]), 1)
            .contains("cannot import tenant \"other\"")
    );
    assert!(!stdout(&tenant(&["list"])).contains("other"));
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().contains("partial")), "{names:?}");

    // The imported tenant survives a crash.
    client(&node, "store").await.batch_execute("INSERT INTO item VALUES (0, 'zero')").await.unwrap();
    assert_eq!(node.stop_with(rustix::process::Signal::KILL), None);
    let node = Node::start(&data, &["--insecure"]);
    let store = client(&node, "store").await;
    assert_eq!(query_i64(&store, "SELECT count(*) FROM item WHERE name IN ('zero', 'changed')").await, 2);
    assert_eq!(query_i64(&store, "SELECT count(*) FROM item").await, 20_001);
    let integrity: String = store.query_one("PRAGMA integrity_check", &[]).await.unwrap().get(0);
    assert_eq!(integrity, "ok");
}

/// Returns the files below a directory with a path that matches `filter`.
fn files(directory: &Path, filter: &dyn Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files(&path, filter)),
            false if filter(path.to_str().unwrap()) => found.push(path),
            false => {}
        }
    }
    found.sort();
    found
}

fn flip(file: &Path, byte: usize) {
    let mut bytes = std::fs::read(file).unwrap();
    bytes[byte] ^= 0x10;
    std::fs::write(file, bytes).unwrap();
}

/// Returns the damaged places in the report of `fulmar verify`, each with its byte offset.
fn damage(output: &Output) -> Vec<(String, Option<u64>)> {
    assert!(matches!(output.status.code(), Some(0 | 1)), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let place = |damage: &serde_json::Value| {
        assert!(!damage["problem"].as_str().unwrap().is_empty());
        (damage["place"].as_str().unwrap().to_owned(), damage["byte"].as_u64())
    };
    let places: Vec<_> = report["damage"].as_array().unwrap().iter().map(place).collect();
    assert_eq!(output.status.success(), places.is_empty());
    places
}

#[tokio::test(flavor = "multi_thread")]
async fn verify_reports_every_damaged_file() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().canonicalize().unwrap().join("data");
    let verify = || run(&["verify", "--data", data.to_str().unwrap(), "--json"]);
    assert!(stderr_of_failure(&verify(), 1).contains("is not a data directory"));
    let node = Node::start(&data, &["--insecure"]);
    stdout(&run(&["tenant", "--server", &node.url(), "create", "shop", "big"]));
    let shop = client(&node, "shop").await;
    shop.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1), (2)").await.unwrap();
    // A commit so large that it is written as a segment, which the log only references.
    let large =
        "CREATE TABLE t(x); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
        INSERT INTO t SELECT randomblob(4000) FROM n";
    client(&node, "big").await.batch_execute(large).await.unwrap();
    assert!(stderr_of_failure(&verify(), 1).contains("in use by process"));
    // The data of a killed node is not damaged.
    assert_eq!(node.stop_with(rustix::process::Signal::KILL), None);
    assert_eq!(damage(&verify()), []);
    let referenced_by_log = files(&data.join("store"), &|name| name.contains("/segments/"));
    assert_eq!(referenced_by_log.len(), 1);
    let moved = directory.path().join("moved");
    std::fs::rename(&referenced_by_log[0], &moved).unwrap();
    assert_eq!(damage(&verify()), [(referenced_by_log[0].to_str().unwrap().to_owned(), None)]);
    std::fs::rename(&moved, &referenced_by_log[0]).unwrap();

    let node = Node::start(&data, &["--insecure"]);
    client(&node, "shop").await.batch_execute("INSERT INTO t VALUES (3)").await.unwrap();
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));
    assert_eq!(damage(&verify()), []);
    let read = stdout(&run(&["verify", "--data", data.to_str().unwrap()]));
    assert!(read.starts_with("sound: read 1 catalog, "), "{read}");

    let mut places = vec![(data.join("meta.db"), 100, None)];
    let mut kinds = 1;
    let mut add = |found: Vec<PathBuf>, bytes: &dyn Fn(usize) -> Vec<(usize, Option<u64>)>| {
        assert!(!found.is_empty());
        kinds += 1;
        for file in found {
            let length = std::fs::metadata(&file).unwrap().len() as usize;
            places.extend(bytes(length).into_iter().map(|(byte, reported)| (file.clone(), byte, reported)));
        }
    };
    // In segments: header, first frame, index, footer, magic.
    add(files(&data.join("store"), &|name| name.contains("/segments/")), &|length| {
        vec![(0, Some(0)), (40, Some(17)), (length - 46, None), (length - 30, None), (length - 1, None)]
    });
    // The directory also contains lists of hot pages, which are hints and not verified, and
    // anchors, which have no contents.
    let other_objects = ["/hot-", "/anchor-"];
    let is_manifest =
        |name: &str| name.contains("/manifests/") && !other_objects.iter().any(|other| name.contains(other));
    add(files(&data.join("store"), &is_manifest), &|length| {
        vec![(0, Some(0)), (30, None), (length - 1, None)]
    });
    // In log files that are not preallocated only: the header, the header of the first frame, its
    // body.
    let is_used = |file: &PathBuf| std::fs::read(file).unwrap().starts_with(b"FULMCLOG");
    let logs = files(&data.join("log"), &|name| name.ends_with(".log"));
    add(logs.into_iter().filter(is_used).collect(), &|_| vec![(0, Some(0)), (50, Some(48)), (70, Some(48))]);
    for (file, byte, reported) in &places {
        flip(file, *byte);
        let found = damage(&verify());
        assert_eq!(found.len(), 1, "byte {byte} of {}: {found:?}", file.display());
        assert_eq!(Path::new(&found[0].0), file, "byte {byte}");
        if reported.is_some() {
            assert_eq!(found[0].1, *reported, "byte {byte} of {}", file.display());
        }
        flip(file, *byte);
    }
    assert_eq!((kinds, damage(&verify())), (4, vec![]));

    // A running node reports the same damage in its store.
    let node = Node::start(&data, &["--insecure"]);
    let verify_node = |flags: &[&str]| run(&[&["verify", "--server", &node.url(), "--json"], flags].concat());
    assert_eq!(damage(&verify_node(&["--deep"])), []);
    let segments = files(&data.join("store"), &|name| name.contains("/segments/"));
    let big = segments.iter().max_by_key(|file| std::fs::metadata(file).unwrap().len()).unwrap();
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));
    flip(big, 5_000_000);
    let node = Node::start(&data, &["--insecure"]);
    let verify_node = |flags: &[&str]| run(&[&["verify", "--server", &node.url(), "--json"], flags].concat());
    let found = damage(&verify_node(&[]));
    let place = format!("store/{}", big.strip_prefix(data.join("store")).unwrap().display());
    assert_eq!(found.iter().map(|(place, _)| place).collect::<Vec<_>>(), [&place]);
    let found = damage(&verify_node(&["--deep"]));
    assert_eq!(
        found.iter().map(|(place, _)| place.as_str()).collect::<Vec<_>>(),
        [place.as_str(), "tenant big"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_rejects_writes_but_allows_reads_and_drops() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &["--insecure", "--disk-reserve", "0"]);
    stdout(&run(&["tenant", "--server", &node.url(), "create", "shop", "old"]));
    client(&node, "shop").await.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1)").await.unwrap();
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));

    // No disk has this much free space.
    let node = Node::start(directory.path(), &["--insecure", "--disk-reserve", "4000000TB"]);
    let shop = client(&node, "shop").await;
    assert_eq!(query_i64(&shop, "SELECT count(*) FROM t").await, 1);
    let error = shop.batch_execute("INSERT INTO t VALUES (2)").await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!(error.code().code(), "53100");
    assert!(error.hint().unwrap().contains("resume automatically"), "{error:?}");
    let created = run(&["tenant", "--server", &node.url(), "create", "new"]);
    assert!(stderr_of_failure(&created, 1).contains("53100"));
    stdout(&run(&["tenant", "--server", &node.url(), "drop", "old"]));
    let status = common::status(&["--json", "--http", &node.http]);
    assert!(stderr_of_failure(&status, 1).contains("the disk is full"));
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let level = |metric: &&serde_json::Value| metric["name"] == "fulmar_disk_pressure";
    assert_eq!(status["metrics"].as_array().unwrap().iter().find(level).unwrap()["value"], 2.0);
    drop(shop);
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));
}
