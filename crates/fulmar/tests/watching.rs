//! Monitoring of a node: `fulmar top`, tenant metrics, the slow statement log.

mod common;

use common::{Node, client, run, stderr_of_failure, stdout, with_timeout};
use tokio_postgres::NoTls;

/// A statement that runs until it is cancelled or times out.
const ENDLESS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";

#[tokio::test(flavor = "multi_thread")]
async fn top_shows_tenant_statistics_and_running_statements() {
    let directory = tempfile::tempdir().unwrap();
    let node = Node::start(directory.path(), &["--insecure"]);
    let url = node.url();
    let top = |arguments: &[&str]| {
        stdout(&run(&[&["top", "--server", &url, "--once", "--interval", "0.5"], arguments].concat()))
    };
    stdout(&run(&["tenant", "--server", &url, "create", "shop", "busy", "idle"]));
    let busy = client(&node, "busy").await;
    let token = busy.cancel_token();
    let endless = tokio::spawn(async move { busy.batch_execute(ENDLESS).await });
    let shop = client(&node, "shop").await;
    shop.batch_execute("CREATE TABLE t(id INTEGER PRIMARY KEY)").await.unwrap();
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let load = tokio::spawn(async move {
        while stopped.try_recv().is_err() {
            shop.batch_execute("INSERT INTO t DEFAULT VALUES").await.unwrap();
            assert!(shop.batch_execute("SELECT * FROM nothing").await.is_err());
        }
    });

    const STATISTICS: [&str; 5] =
        ["statements_per_second", "commits_per_second", "errors_per_second", "busy_percent", "p99_ms"];
    let tenant = |seen: &serde_json::Value, name: &str| {
        let tenants = seen["tenants"].as_array().unwrap();
        tenants.iter().find(|tenant| tenant["tenant"] == name).unwrap().clone()
    };
    // On a busy machine, an interval of 0.5 s may have no completed statement.
    let all_positive = async {
        loop {
            let seen: serde_json::Value = serde_json::from_str(&top(&["--json"])).unwrap();
            let positive = |tenant: &serde_json::Value, name: &str| tenant[name].as_f64().unwrap() > 0.0;
            let shop = tenant(&seen, "shop");
            if STATISTICS.iter().all(|name| positive(&shop, name))
                && positive(&tenant(&seen, "busy"), "busy_percent")
            {
                break seen;
            }
            tokio::task::yield_now().await;
        }
    };
    let seen = with_timeout("all statistics of the tenants are positive", all_positive).await;
    let tenant = |name: &str| tenant(&seen, name);
    assert!(seen["seconds"].as_f64().unwrap() >= 0.5);
    for name in STATISTICS {
        assert!(seen["total"][name].as_f64().is_none_or(|total| total > 0.0), "{name}: {seen}");
    }
    assert_eq!((&tenant("shop")["sessions"], &tenant("idle")["sessions"]), (&1.into(), &0.into()));
    assert!(tenant("shop")["size_bytes"].as_i64() >= Some(8192), "{seen}");
    let is_endless = |running: &serde_json::Value| running["tenant"] == "busy" && running["query"] == ENDLESS;
    assert!(seen["running"].as_array().unwrap().iter().any(is_endless), "{seen}");

    let table = top(&["--sort", "sessions", "-n", "1"]);
    assert_eq!(table.lines().filter(|line| line.starts_with('│')).count(), 2, "{table}");
    assert!(
        table.starts_with("in ") && table.contains("longest running:") && !table.contains('\x1b'),
        "{table}"
    );
    stop.send(()).unwrap();
    load.await.unwrap();
    token.cancel_query(NoTls).await.unwrap();
    assert!(endless.await.unwrap().is_err());

    let status: serde_json::Value =
        serde_json::from_str(&stdout(&common::status(&["--json", "--http", &node.http]))).unwrap();
    let statements = status["metrics"].as_array().unwrap().iter().find(|metric| {
        metric["name"] == "fulmar_tenant_statements_total" && metric["labels"] == "tenant=\"shop\""
    });
    assert!(statements.unwrap()["value"].as_f64().unwrap() >= 3.0, "{status}");
    let shop = format!("{url}/shop");
    assert!(stdout(&run(&["top", "--server", &shop, "--once", "--interval", "0.1"])).contains("│ idle "));
    let nowhere = stderr_of_failure(&run(&["top", "--server", &format!("{url}/nowhere")]), 1);
    assert!(nowhere.contains("does not exist"), "{nowhere}");
    assert!(stderr_of_failure(&run(&["top", "--interval", "0"]), 2).contains("between 0.1 and 3600"));
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_statements_are_logged_without_their_literals() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let node = Node::start_with(
        &directory.path().join("data"),
        &["--insecure", "--slow-statement", "1", "--log-format", "json"],
        std::fs::File::create(&log).unwrap().into(),
    );
    let shop = client(&node, "fulmar").await;
    let count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300000)\n\
                 SELECT count(*), 'secret', $1 FROM n -- secret";
    shop.query_one(count, &[&"secret"]).await.unwrap();
    shop.batch_execute("CREATE USER anna PASSWORD 'secret'").await.unwrap();
    shop.batch_execute("SET statement_timeout = 50").await.unwrap();
    assert!(shop.batch_execute(&ENDLESS.replace("1 UNION", "1 + length('secret') UNION")).await.is_err());
    assert_eq!(node.stop_with(rustix::process::Signal::INT), Some(0));

    let log = std::fs::read_to_string(log).unwrap();
    assert!(!log.contains("secret"), "{log}");
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let slow = |statement: &str| {
        let matches =
            |line: &&serde_json::Value| line["statement"].as_str().is_some_and(|s| s.contains(statement));
        let line = lines.iter().find(matches).unwrap_or_else(|| panic!("no {statement} in {log}"));
        assert_eq!((&line["message"], &line["level"]), (&"slow statement".into(), &"WARN".into()));
        assert_eq!((&line["tenant"], &line["user"]), (&"fulmar".into(), &"fulmar".into()));
        line
    };
    let counted = slow("LIMIT 300000) SELECT count(*), '...', $1 FROM n");
    assert!(counted["rows"] == 1 && counted["milliseconds"].as_u64() > Some(0), "{counted}");
    assert!(counted.get("sqlstate").is_none(), "{counted}");
    let cancelled = slow("1 + length('...')");
    assert!(
        cancelled["sqlstate"] == "57014" && cancelled["milliseconds"].as_u64() >= Some(50),
        "{cancelled}"
    );
}
