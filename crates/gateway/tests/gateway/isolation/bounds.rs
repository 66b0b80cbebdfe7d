//! Limits on a tenant's use of a node: memory, CPU, names, message sizes.

use bytes::Bytes;
use futures::SinkExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{check_sqlstate, log_in, node_with_roles};
use crate::common::{Node, ends, state, wait_until};

/// Runs until it is cancelled.
const ENDLESS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";

#[tokio::test(flavor = "multi_thread")]
async fn excessive_statements_are_rejected() {
    let (node, admin) = node_with_roles().await;
    admin.batch_execute("ALTER DATABASE shop SET transaction_memory = '8MB'").await.unwrap();
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    let mut wrong = Vec::new();
    let deep = |open: &str, inner: &str, close: &str| {
        format!("{}{inner}{}", open.repeat(50_000), close.repeat(50_000))
    };
    for (statement, expected) in [
        // Memory.
        ("SELECT zeroblob(1000000000)".to_owned(), "54000"),
        ("SELECT randomblob(1000000000)".to_owned(), "54000"),
        ("SELECT printf('%.*c', 1000000000, 'x')".to_owned(), "54000"),
        ("SELECT replace(hex(zeroblob(1000000)), '0', hex(zeroblob(1000000)))".to_owned(), "54000"),
        ("CREATE TEMP TABLE big AS SELECT zeroblob(20000000)".to_owned(), "53400"),
        // Nesting depth and length.
        (format!("SELECT {}", deep("(", "1", ")")), "54001"),
        (format!("SELECT {}", deep("abs(", "1", ")")), "54001"),
        (format!("SELECT {}1", "- ".repeat(50_000)), "54001"),
        (format!("SELECT {}1", "1 + ".repeat(50_000)), "54001"),
        (format!("SELECT 1{}", " UNION ALL SELECT 1".repeat(50_000)), "54000"),
        (format!("SELECT {}1", "1, ".repeat(50_000)), "54000"),
        (format!("SELECT * FROM t{}", ", t".repeat(1000)), "54000"),
        (format!("SELECT * FROM {}", deep("(SELECT * FROM ", "t", ")")), "54001"),
        (format!("SELECT json('{}')", deep("[", "", "]")), "22P02"),
        // Patterns.
        (format!("SELECT 'x' LIKE '{}'", "%a".repeat(100_000)), "54000"),
        (format!("SELECT 'x' GLOB '{}'", "*a".repeat(100_000)), "54000"),
        ("SELECT 1 FROM pg_class WHERE relname ~ '(((a{100}){100}){100}){100}'".to_owned(), "2201B"),
        ("SELECT 1 FROM pg_class WHERE relname ~ '('".to_owned(), "2201B"),
        // Recursion, whose rows are in a temporary table. Views that refer to each other. Common
        // table expressions that double.
        (
            "WITH RECURSIVE n(i, x) AS (SELECT 1, '' UNION SELECT i + 1, hex(zeroblob(2000)) FROM n) \
             SELECT count(*) FROM n"
                .to_owned(),
            "53400",
        ),
        (
            "CREATE TEMP VIEW v AS SELECT * FROM w; CREATE TEMP VIEW w AS SELECT * FROM v; SELECT * FROM v"
                .to_owned(),
            "42601",
        ),
        (doubling_tables(30), "54001"),
    ] {
        check_sqlstate(&anna, &statement, expected, "anna", &mut wrong).await;
    }
    admin.batch_execute("ALTER DATABASE shop SET statement_timeout = '500ms'").await.unwrap();
    for (statement, expected) in [
        (ENDLESS.to_owned(), "57014"),
        (
            "SELECT count(*) FROM pg_type a, pg_type b, pg_type c, pg_type d, pg_type e, pg_type f"
                .to_owned(),
            "57014",
        ),
    ] {
        if expected == "57014" {
            admin.batch_execute("ALTER DATABASE shop SET statement_timeout = '500ms'").await.unwrap();
        }
        check_sqlstate(&anna, &statement, expected, "anna", &mut wrong).await;
    }
    // Memory that SQLite uses besides pages: twenty values of 100 MB.
    admin.batch_execute("ALTER DATABASE shop RESET statement_timeout").await.unwrap();
    let values: Vec<_> = (0..20).map(|more| format!("hex(zeroblob({}))", 50_000_000 + more)).collect();
    check_sqlstate(&anna, &format!("SELECT length(max({}))", values.join(", ")), "53200", "anna", &mut wrong)
        .await;
    // Recursive triggers are disabled, so triggers that fire each other terminate.
    anna.batch_execute(
        "CREATE TABLE u (a); CREATE TRIGGER r AFTER INSERT ON u BEGIN INSERT INTO w VALUES (new.a); END; \
         CREATE TABLE w (a); CREATE TRIGGER s AFTER INSERT ON w BEGIN INSERT INTO u VALUES (new.a); END; \
         INSERT INTO u VALUES (1)",
    )
    .await
    .unwrap();
    for (table, rows) in [("u", 2), ("w", 1)] {
        let row = anna.query_one(&format!("SELECT count(*) FROM {table}"), &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), rows, "{table}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // The database is unaffected.
    let row = anna.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1);
    drop((admin, anna));
    node.stop().await;
}

/// Common table expressions that each join the previous one with itself: 2^30 rows for a depth of
/// 30.
fn doubling_tables(depth: u32) -> String {
    let tables: Vec<_> =
        (1..=depth).map(|n| format!("a{n} AS (SELECT p.x FROM a{0} p, a{0} q)", n - 1)).collect();
    format!("WITH a0 AS (SELECT 1 AS x), {} SELECT count(*) FROM a{depth}", tables.join(", "))
}

/// The content of one message can keep its session busy for seconds, with statements that are each
/// short. All sessions are on one worker. Other sessions are served and the session can be
/// cancelled only if it yields.
#[tokio::test(flavor = "multi_thread")]
async fn many_short_statements_do_not_block_other_sessions() {
    let node = Node::start(|config| (config.insecure, config.workers) = (true, 1)).await;
    let (shop, other) = (node.database("shop").await, node.database("other").await);
    shop.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)").await.unwrap();
    for is_copy in [false, true] {
        let shop = node.client("shop").await;
        let token = shop.cancel_token();
        let busy = tokio::spawn(async move {
            if !is_copy {
                return shop.batch_execute(&"INSERT INTO t (b) VALUES ('x');".repeat(1_000_000)).await;
            }
            let mut rows = std::pin::pin!(shop.copy_in::<_, Bytes>("COPY t (b) FROM STDIN").await?);
            rows.send(Bytes::from("x\n".repeat(20_000_000))).await?;
            rows.finish().await.map(drop)
        });
        let (mut seen_at_work, mut busy_ms) = (0, 0.0);
        while seen_at_work < 50 && !busy.is_finished() {
            let row = other.query_one("SELECT busy_ms FROM fulmar.tenant_stats WHERE tenant = 'shop'", &[]);
            let now_ms: f64 = row.await.unwrap().get(0);
            seen_at_work += i32::from(now_ms > std::mem::replace(&mut busy_ms, now_ms));
        }
        assert_eq!(seen_at_work, 50, "other sessions waited until the busy one was finished");
        token.cancel_query(tokio_postgres::NoTls).await.unwrap();
        assert_eq!(state(busy.await.unwrap()), "57014");
    }
    drop((shop, other));
    node.stop().await;
}

/// On one worker, one tenant runs eight endless statements and another tenant runs one. Each tenant
/// gets half of the CPU time, whatever its number of statements, and a tenant with few requests is
/// served. With three times the weight, a tenant gets three times as much. A change of the weight
/// takes effect immediately.
#[tokio::test(flavor = "multi_thread")]
async fn cpu_time_is_shared_fairly_between_tenants() {
    let node = Node::start(|config| (config.insecure, config.workers) = (true, 1)).await;
    let admin = node.client("fulmar").await;
    let mut busy = Vec::new();
    for (database, sessions) in [("shop", 8), ("other", 1)] {
        drop(node.database(database).await);
        for _ in 0..sessions {
            let client = node.client(database).await;
            let token = client.cancel_token();
            busy.push((tokio::spawn(async move { client.batch_execute(ENDLESS).await }), token));
        }
    }
    let active = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'WITH%' AND state = 'active'";
    let are_active = async || admin.query_one(active, &[]).await.unwrap().get::<_, i64>(0) == 9;
    wait_until("every statement runs", are_active).await;
    let busy_ms = async || {
        let stats =
            "SELECT busy_ms FROM fulmar.tenant_stats WHERE tenant IN ('shop', 'other') ORDER BY tenant";
        let rows = admin.query(stats, &[]).await.unwrap();
        [0, 1].map(|tenant| rows[tenant].get::<_, f64>(0))
    };
    for (cpu_share, times) in [(100, 1.0), (300, 3.0)] {
        admin.batch_execute(&format!("ALTER DATABASE other SET cpu_share = {cpu_share}")).await.unwrap();
        let before = busy_ms().await;
        // Other programs on the machine disturb short measurements: the shares count since the
        // change, and must become right within the deadline.
        let are_fair = async || {
            let now = busy_ms().await;
            let (other, shop) = (now[0] - before[0], times * (now[1] - before[1]));
            other + shop > 1000.0 && other > 0.7 * shop && shop > 0.7 * other
        };
        wait_until("the tenants get their shares", are_fair).await;
    }
    for (statement, token) in busy {
        assert!(!statement.is_finished());
        token.cancel_query(tokio_postgres::NoTls).await.unwrap();
        assert_eq!(state(statement.await.unwrap()), "57014");
    }
    drop(admin);
    node.stop().await;
}

/// The timeout is not checked while SQLite compares two texts, so that must not take time
/// proportional to the product of their lengths.
#[tokio::test(flavor = "multi_thread")]
async fn text_functions_take_linear_time() {
    let (node, admin) = node_with_roles().await;
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    let (long, shorter) = ("hex(zeroblob(6000000))", "hex(zeroblob(3000000))");
    for (expression, expected) in [
        (format!("instr({long}, {shorter} || '1')"), 0),
        (format!("instr(CAST({long} AS BLOB), CAST({shorter} || '1' AS BLOB))"), 0),
        (format!("length(replace({long}, {shorter} || '1', ''))"), 12_000_000),
        (format!("length(unhex(replace({long}, '0', 'z'), {shorter} || 'z'))"), 0),
        (format!("length(trim({long}, {shorter} || '1'))"), 0),
    ] {
        let found = anna.query_one(&format!("SELECT {expression}"), &[]).await.unwrap();
        assert_eq!(found.get::<_, i64>(0), expected, "{expression}");
    }
    let many = "WITH RECURSIVE n(i) AS (SELECT 20000 UNION ALL SELECT i + 1 FROM n WHERE i < 40000) \
                SELECT trim(hex(zeroblob(1000000)), group_concat(char(i), '') || '0') FROM n";
    assert_eq!(state(anna.batch_execute(many).await), "54000");

    // The results are the same as those of SQLite's functions, and indexes can use them.
    for (expression, expected) in [
        (
            "instr(x'616263', 'c') || instr('abc', x'63') || instr(1234, '3') || instr('\u{e9}\u{20ac}x', 'x')",
            "3333",
        ),
        ("instr(x'c3a978', x'78') || instr('', '') || instr('a', '') || instr('a', 'b')", "3110"),
        (
            "typeof(instr(NULL, 'a')) || typeof(replace('a', NULL, '')) || typeof(trim('a', NULL))",
            "nullnullnull",
        ),
        (
            "typeof(replace(12, '', NULL)) || replace(1212, 2, 'x') || quote(unhex('4z1', 'z'))",
            "text1x1xNULL",
        ),
        (
            "quote(unhex('41 42', ' ')) || trim('xyaxy', 'xy') || ltrim('xax', 'x') || rtrim('xax', 'x')",
            "X'4142'aaxxa",
        ),
    ] {
        let found = anna.query_one(&format!("SELECT {expression}"), &[]).await.unwrap();
        assert_eq!(found.get::<_, String>(0), expected, "{expression}");
    }
    anna.batch_execute(
        "CREATE TABLE names (name TEXT, short TEXT AS (replace(name, 'x', '')) STORED);
         CREATE INDEX of_names ON names (trim(name, 'x'), instr(name, 'y'))",
    )
    .await
    .unwrap();
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parameters_statements_and_portals_are_limited() {
    let (node, admin) = node_with_roles().await;
    let mut anna = log_in(&node, "shop", "anna").await.unwrap();
    // The number of parameters is SQLite's maximum.
    let list = |count: usize| {
        let names: Vec<_> = (1..=count).map(|number| format!("${number}")).collect();
        format!("SELECT 7 IN ({})", names.join(", "))
    };
    let values: Vec<String> = (0..32_766).map(|number| number.to_string()).collect();
    let values: Vec<&(dyn tokio_postgres::types::ToSql + Sync)> =
        values.iter().map(|value| value as _).collect();
    anna.query_one(&list(values.len()), &values).await.unwrap();
    assert_eq!(state(anna.prepare(&list(values.len() + 1)).await), "54000");

    // Prepared statements and portals.
    const MAX_STATEMENTS: usize = 10_000;
    let prepared =
        futures::future::try_join_all((0..MAX_STATEMENTS).map(|_| anna.prepare("SELECT 1"))).await.unwrap();
    assert_eq!(state(anna.prepare("SELECT 1").await), "54000");
    let transaction = anna.transaction().await.unwrap();
    let bound = (0..MAX_STATEMENTS).map(|_| transaction.bind(&prepared[0], &[]));
    let portals = futures::future::try_join_all(bound).await.unwrap();
    assert_eq!(state(transaction.bind(&prepared[0], &[]).await.map(|_| ())), "54000");
    drop((portals, transaction));
    drop(prepared);
    anna.batch_execute("SELECT 1").await.unwrap();

    // Memory of portals: 128 MiB for all sessions of a database on this node. Their parameter
    // values are in memory.
    let length = anna.prepare("SELECT length($1)").await.unwrap();
    let large = "x".repeat(20_000_000);
    for _ in 0..2 {
        let transaction = anna.transaction().await.unwrap();
        let mut portals = Vec::new();
        for _ in 0..5 {
            portals.push(transaction.bind(&length, &[&large]).await.unwrap());
        }
        assert_eq!(state(transaction.bind(&length, &[&large]).await.map(|_| ())), "54000");
        drop((portals, transaction)); // releases the memory
    }
    // Unread results of executed portals are moved to files when memory is short.
    let rows = anna
        .prepare(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 7) \
             SELECT length($1), hex(zeroblob(500000)) FROM n",
        )
        .await
        .unwrap();
    let less = "x".repeat(10_000_000);
    let transaction = anna.transaction().await.unwrap();
    let mut portals = Vec::new();
    for _ in 0..20 {
        let portal = transaction.bind(&rows, &[&less]).await.unwrap();
        assert_eq!(transaction.query_portal(&portal, 1).await.unwrap().len(), 1);
        portals.push(portal);
    }
    for portal in &portals {
        assert_eq!(transaction.query_portal(portal, 0).await.unwrap().len(), 6);
    }
    drop((portals, transaction));
    anna.batch_execute("SELECT 1").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_and_names_are_limited() {
    let (node, admin) = node_with_roles().await;
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    let long = "x".repeat(400_000);
    // Names of global objects are limited. Names inside a database are not.
    for statement in
        [format!("CREATE DATABASE {long}"), format!("CREATE USER {long}"), format!("CREATE TOKEN {long}")]
    {
        assert_eq!(state(admin.batch_execute(&statement).await), "42602");
    }
    assert_eq!(
        state(admin.batch_execute(&format!("GRANT CONNECT ON DATABASE {long} TO anna")).await),
        "3D000"
    );
    anna.batch_execute(&format!("CREATE TABLE \"{long}\" (\"{long}\" TEXT); DROP TABLE \"{long}\""))
        .await
        .unwrap();
    anna.batch_execute(&format!("SET application_name = '{long}'")).await.unwrap_or_default();
    assert!(state(anna.batch_execute(&format!("SELECT {long}")).await).starts_with("42"));
    let value = anna.query_one("SELECT length($1)", &[&"x".repeat(50_000_000)]).await.unwrap();
    assert_eq!(value.get::<_, i64>(0), 50_000_000);

    // A message longer than 64 MiB closes the connection as soon as its header has been received.
    let mut stream = tokio::net::TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    let length = 10_001_u32;
    stream.write_all(&[&length.to_be_bytes()[..], &196_608_u32.to_be_bytes()].concat()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await; // a reset closes the connection too
    assert!(answer.is_empty(), "the server responded to a startup packet of {length} bytes");
    let too_long = anna.query_one("SELECT length($1)", &[&"x".repeat(70_000_000)]).await;
    assert!(too_long.is_err() && ends(&anna).await);
    log_in(&node, "shop", "anna").await.unwrap().batch_execute("SELECT 1").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}
