//! The command line: flags, exit codes, output, signals, the data directory lock, the password
//! file.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::{Node, fulmar, run, stderr_of_failure, stdout};
use tokio_postgres::NoTls;

#[test]
fn invalid_flags_and_unreachable_nodes_are_reported_with_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let start = |flags: &[&str]| {
        let line = [&["start", "--data", data.to_str().unwrap(), "--http", "127.0.0.1:0"], flags].concat();
        run(&line)
    };
    let insecure = stderr_of_failure(&start(&["--sql", "0.0.0.0:0", "--insecure"]), 1);
    assert!(insecure.contains("remove --insecure"), "{insecure}");
    let memory = stderr_of_failure(&start(&["--sql", "127.0.0.1:0", "--memory", "12 parsecs"]), 2);
    assert!(memory.contains("256MB"), "{memory}");
    let memory = stderr_of_failure(&start(&["--sql", "127.0.0.1:0", "--memory", "1kB"]), 1);
    assert!(memory.contains("at least"), "{memory}");
    let tls = stderr_of_failure(
        &start(&["--sql", "127.0.0.1:0", "--tls-cert", "none.pem", "--tls-key", "none.pem"]),
        1,
    );
    assert!(tls.contains("none.pem"), "{tls}");
    assert!(!data.exists(), "a start with invalid flags must not create the data directory");
    let unreachable =
        stderr_of_failure(&run(&["tenant", "list", "--server", "postgres://fulmar@127.0.0.1:1"]), 1);
    assert!(
        unreachable.contains("cannot connect to 127.0.0.1:1; check that the node is running"),
        "{unreachable}"
    );
    stderr_of_failure(&run(&["status", "--http", "127.0.0.1:1"]), 1);
}

#[test]
fn tenants_are_created_renamed_listed_and_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &["--insecure"]);
    let url = node.url();
    let tenant = |arguments: &[&str]| run(&[&["tenant", "--server", &url], arguments].concat());
    assert_eq!(
        stdout(&tenant(&["create", "shop", "O'Hara \"1st\""])),
        "created shop\ncreated O'Hara \"1st\"\n"
    );
    assert!(stderr_of_failure(&tenant(&["create", "shop"]), 1).contains("already exists"));
    assert_eq!(
        stdout(&tenant(&["rename", "shop", "store", "--json"])),
        "[{\"tenant\":\"shop\",\"done\":\"renamed\"}]\n"
    );
    let listed: serde_json::Value = serde_json::from_str(&stdout(&tenant(&["list", "--json"]))).unwrap();
    let names: Vec<&str> =
        listed.as_array().unwrap().iter().map(|row| row["tenant"].as_str().unwrap()).collect();
    assert_eq!(names, ["O'Hara \"1st\"", "fulmar", "store"]);
    assert!(listed[0]["owner"].is_string());
    stdout(&tenant(&["drop", "store", "O'Hara \"1st\""]));
    assert!(stderr_of_failure(&tenant(&["drop", "store"]), 1).contains("does not exist"));
    assert!(stdout(&tenant(&["list"])).contains("fulmar"));

    let status: serde_json::Value =
        serde_json::from_str(&stdout(&common::status(&["--json", "--http", &node.http]))).unwrap();
    assert_eq!(status["healthy"], true);
    assert!(
        status["metrics"]
            .as_array()
            .unwrap()
            .iter()
            .any(|metric| metric["name"].as_str().unwrap().starts_with("fulmar_"))
    );
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn load_is_all_or_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(&directory.path().join("data"), &["--insecure"]);
    let url = node.url();
    let load =
        |arguments: &[&str]| run(&[&["tenant", "--server", &url, "load", "fulmar"], arguments].concat());
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("CREATE TABLE t(id INTEGER PRIMARY KEY, s TEXT)").await.unwrap();
    let file = directory.path().join("rows.csv");
    let path = file.to_str().unwrap();
    let rows: String = (1..=50_000).map(|id| format!("{id},\"row, {id}\"\n")).collect();
    std::fs::write(&file, format!("id,s\n{rows}")).unwrap();
    assert!(stdout(&load(&["t", path, "--header"])).starts_with("loaded 50000 rows into t of fulmar"));
    // A new row, then a duplicate key.
    std::fs::write(&file, "0,zero\n1,again\n").unwrap();
    let error = stderr_of_failure(&load(&["t", path]), 1);
    assert!(error.contains("no rows were loaded") && error.contains("23505"), "{error}");
    std::fs::write(&file, "only s\n").unwrap();
    let loaded = stdout(&load(&["t", path, "--columns", "s", "--json"]));
    let loaded: serde_json::Value = serde_json::from_str(&loaded).unwrap();
    assert_eq!((&loaded["rows"], &loaded["bytes"]), (&1.into(), &7.into()));
    let count: i64 = client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0);
    assert_eq!(count, 50_001);
    assert!(stderr_of_failure(&load(&["nowhere", path]), 1).contains("does not exist"));
    let other = run(&["tenant", "--server", &url, "load", "nobody", "t", path]);
    assert!(
        stderr_of_failure(&other, 1)
            .contains("rejected the connection: database \"nobody\" does not exist (3D000)")
    );
    assert!(stderr_of_failure(&load(&["t", "/nowhere"]), 1).contains("cannot open /nowhere"));
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));
}

#[test]
fn first_start_creates_the_superuser_and_later_starts_keep_it() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &[]);
    let file = directory.path().join("superuser-password");
    let password = std::fs::read_to_string(&file).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let (url, file) = (node.url(), file.to_str().unwrap());
    let list = ["tenant", "list", "--server", &url];
    let missing = stderr_of_failure(&run(&list), 1);
    assert!(missing.contains("the node requires a password; set --password-file"), "{missing}");
    let wrong = stderr_of_failure(&fulmar(&list).env("PGPASSWORD", "guess").output().unwrap(), 1);
    assert!(wrong.contains("the node rejected the connection: ") && wrong.contains("(28P01)"), "{wrong}");
    stdout(&run(&[&list[..], &["--password-file", file]].concat()));
    stdout(&fulmar(&list).env("PGPASSWORD", password.trim()).output().unwrap());
    assert_eq!(node.stop_with(rustix::process::Signal::TERM), Some(0));

    std::fs::remove_file(file).unwrap();
    let node = Node::start(directory.path(), &[]);
    assert!(!Path::new(file).exists(), "an existing password must not be replaced");
    let url = node.url();
    let list = ["tenant", "list", "--server", &url];
    stdout(&fulmar(&list).env("PGPASSWORD", password.trim()).output().unwrap());
}

#[test]
fn command_in_the_ready_line_works() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("it's data");
    for flags in [&[][..], &["--insecure"]] {
        let node = Node::start(&data, flags);
        let arguments = node.command.strip_prefix("fulmar ").unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("\"$0\" {arguments} --json"), env!("CARGO_BIN_EXE_fulmar")]);
        let listed = shell.env_remove("FULMAR_SERVER").env_remove("PGPASSWORD").output().unwrap();
        stdout(&listed);
        assert_eq!(node.stop_with(rustix::process::Signal::TERM), Some(0));
    }
}

#[test]
fn data_directory_is_locked_until_its_process_exits() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().to_str().unwrap();
    let node = Node::start(directory.path(), &["--insecure"]);
    let id = node.process.id();
    let second =
        run(&["start", "--data", data, "--sql", "127.0.0.1:0", "--http", "127.0.0.1:0", "--insecure"]);
    assert!(stderr_of_failure(&second, 1).contains(&format!("process {id}")));
    // The lock is released even if the process is killed.
    assert_eq!(node.stop_with(rustix::process::Signal::KILL), None);
    drop(Node::start(directory.path(), &["--insecure"]));
}

#[tokio::test]
async fn tenant_limits_survive_a_crash() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &["--insecure"]);
    stdout(&run(&["tenant", "create", "shop", "--server", &node.url()]));
    let (client, connection) =
        tokio_postgres::connect(&format!("{}/fulmar", node.url()), NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("ALTER DATABASE shop SET statement_timeout = '90s'").await.unwrap();
    client.batch_execute("ALTER DATABASE shop SET max_size = '1MB'").await.unwrap();
    assert_eq!(node.stop_with(rustix::process::Signal::KILL), None);

    let node = Node::start(directory.path(), &["--insecure"]);
    let (client, connection) = tokio_postgres::connect(&format!("{}/shop", node.url()), NoTls).await.unwrap();
    tokio::spawn(connection);
    let shown = client.query_one("SHOW statement_timeout", &[]).await.unwrap();
    assert_eq!(shown.get::<_, &str>(0), "90s");
    let error = client.batch_execute("CREATE TABLE t AS SELECT randomblob(2000000)").await.unwrap_err();
    assert_eq!(error.code().map(|code| code.code()), Some("53100"), "max_size must be enforced");
}

#[tokio::test]
async fn commits_survive_repeated_kills() {
    let directory = tempfile::tempdir().unwrap();
    let mut node = Node::start(directory.path(), &["--insecure"]);
    for round in 0..3 {
        stdout(&run(&["tenant", "create", &format!("t{round}"), "--server", &node.url()]));
        for tenant in 0..=round {
            let config = format!("{}/t{tenant}", node.url());
            let (client, connection) = tokio_postgres::connect(&config, NoTls).await.unwrap();
            let connection = tokio::spawn(connection);
            client
                .batch_execute("CREATE TABLE IF NOT EXISTS seen (round INTEGER PRIMARY KEY)")
                .await
                .unwrap();
            client.batch_execute(&format!("INSERT INTO seen VALUES ({round})")).await.unwrap();
            let rows = client.query("SELECT round FROM seen ORDER BY round", &[]).await.unwrap();
            let seen: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
            assert_eq!(seen, (tenant..=round).collect::<Vec<_>>());
            drop(client);
            connection.await.unwrap().unwrap();
        }
        assert_eq!(node.stop_with(rustix::process::Signal::KILL), None);
        node = Node::start(directory.path(), &["--insecure"]);
    }
}
