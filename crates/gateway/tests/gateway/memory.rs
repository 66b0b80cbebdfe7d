//! Memory of sessions at the gateway: charged before it is allocated, limited, and released.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::SinkExt;
use futures::future::select_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::common::{Node, WAIT_TIMEOUT, state, with_timeout};

const MIB: usize = 1 << 20;
/// How long a message waits for memory.
const MAX_WAIT: Duration = Duration::from_secs(5);

/// A node whose sessions may use 64 MiB, and 32 MiB per database.
async fn small_node() -> Node {
    Node::start(|config| {
        config.insecure = true;
        config.public_metrics = true;
        config.session_memory_bytes = 64 << 20;
    })
    .await
}

/// The value of a metric.
async fn metric(node: &Node, name: &str) -> u64 {
    let text = node.get("/metrics", "").await;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Waits until a metric has the expected value.
async fn wait_until_metric(node: &Node, name: &str, condition: impl Fn(u64) -> bool) {
    let reached = async {
        while !condition(metric(node, name).await) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let reached = tokio::time::timeout(WAIT_TIMEOUT, reached).await;
    assert!(reached.is_ok(), "{name} stays at {}", metric(node, name).await);
}

const USED: &str = "fulmar_session_memory_bytes";

/// A connection whose session has received only the header of a query message of this size.
async fn incomplete_message(node: &Node, database: &str, bytes: usize) -> TcpStream {
    let mut stream = TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    let version = 196_608_u32.to_be_bytes();
    let body = [&version[..], b"user\0anna\0database\0", database.as_bytes(), b"\0\0"].concat();
    stream.write_all(&(body.len() as u32 + 4).to_be_bytes()).await.unwrap();
    stream.write_all(&body).await.unwrap();
    stream.write_all(&[&b"Q"[..], &(bytes as u32).to_be_bytes()].concat()).await.unwrap();
    stream
}

async fn works(client: &Client) {
    assert_eq!(client.query_one("SELECT 1", &[]).await.unwrap().get::<_, i64>(0), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn oversized_messages_fail_without_ending_the_session() {
    let node = small_node().await;
    let client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a TEXT)").await.unwrap();
    let long = "x".repeat(40 * MIB);
    // A Query, a Bind, a CopyData.
    assert_eq!(state(client.batch_execute(&format!("SELECT '{long}'")).await), "54000");
    works(&client).await;
    assert_eq!(state(client.query("SELECT length($1)", &[&long]).await), "54000");
    works(&client).await;
    let sink = client.copy_in("COPY t FROM STDIN").await.unwrap();
    let mut sink = Box::pin(sink);
    let sent = sink.send(Bytes::from(format!("{long}\n"))).await;
    let finished = match sent {
        Ok(()) => sink.as_mut().finish().await.map(drop),
        Err(error) => Err(error),
    };
    assert_eq!(state(finished), "54000");
    works(&client).await;
    assert_eq!(client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get::<_, i64>(0), 0);
    // In a transaction it is an error like any other.
    client.batch_execute("BEGIN").await.unwrap();
    assert_eq!(state(client.query("SELECT length($1)", &[&long]).await), "54000");
    assert_eq!(state(client.batch_execute("SELECT 1").await), "25P02");
    client.batch_execute("ROLLBACK").await.unwrap();
    assert!(metric(&node, "fulmar_session_memory_rejections_total").await >= 4);
    wait_until_metric(&node, USED, |used| used == 0).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn incomplete_messages_are_charged_and_small_messages_succeed() {
    let node = small_node().await;
    let other = node.database("t2").await;
    let small = node.database("t1").await;
    let incomplete_message =
        [incomplete_message(&node, "t1", 15 * MIB).await, incomplete_message(&node, "t1", 15 * MIB).await];
    wait_until_metric(&node, USED, |used| used >= 30 << 20).await;
    // Another 4 MiB exceed the database's 32 MiB.
    let refused = small.query("SELECT length($1)", &[&"x".repeat(4 * MIB)]).await;
    assert_eq!(state(refused), "53200");
    for client in [&small, &other] {
        works(client).await;
        let length = client.query_one("SELECT length($1)", &[&"x".repeat(50_000)]).await.unwrap();
        assert_eq!(length.get::<_, i64>(0), 50_000);
    }
    let large = other.query_one("SELECT length($1)", &[&"x".repeat(10 * MIB)]).await.unwrap();
    assert_eq!(large.get::<_, i64>(0), 10 * MIB as i64);
    drop(incomplete_message);
    wait_until_metric(&node, USED, |used| used == 0).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_wait_for_memory() {
    let node = small_node().await;
    let client = node.database("t1").await;
    let stream = incomplete_message(&node, "t1", 30 * MIB).await;
    wait_until_metric(&node, USED, |used| used >= 30 << 20).await;
    let value = "x".repeat(4 * MIB);
    let answer = async {
        loop {
            let begin = Instant::now();
            match client.query_one("SELECT length($1)", &[&value]).await {
                Ok(row) => return row.get::<_, i64>(0),
                // On a slow machine, the wait may end before the other session has been closed.
                Err(error) => {
                    assert_eq!(error.code().map(|code| code.code()), Some("53200"));
                    assert!(begin.elapsed() >= MAX_WAIT, "the message did not wait for memory");
                }
            }
        }
    };
    // The session of the incomplete message ends and releases its charge.
    let answers = async { tokio::join!(answer, async { drop(stream) }).0 };
    assert_eq!(with_timeout("the message gets memory", answers).await, 4 * MIB as i64);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_messages_are_ended_when_the_node_is_short_of_memory() {
    let node = small_node().await;
    let client = node.database("t3").await;
    let mut stalled = Vec::new();
    for database in ["t1", "t2"] {
        drop(node.database(database).await);
        stalled.push(incomplete_message(&node, database, 32 * MIB - 100_000).await);
    }
    wait_until_metric(&node, USED, |used| used >= 63 << 20).await;
    let value = "x".repeat(4 * MIB);
    let served = async {
        // On a slow machine, the wait of 5 s may end before both sessions have been closed.
        while let Err(error) = client.query_one("SELECT length($1)", &[&value]).await {
            assert_eq!(error.code().map(|code| code.code()), Some("53200"));
        }
    };
    with_timeout("memory of the node for a third database", served).await;
    // The memory of one of them is sufficient.
    let ends = stalled.into_iter().map(|mut stream| {
        Box::pin(async move {
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.map(|_| answer)
        })
    });
    let (ended, _, other) = with_timeout("a stalled session ends", select_all(ends)).await;
    let (answer, state) = (ended.unwrap(), b"C08006\0");
    assert!(
        answer.windows(state.len()).any(|bytes| bytes == state),
        "the session ended without an error message"
    );
    drop(other);
    wait_until_metric(&node, USED, |used| used == 0).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bound_values_are_charged_until_execution() {
    let node = small_node().await;
    let other = node.database("t2").await;
    let mut client = node.database("t1").await;
    let statement = client.prepare("SELECT length($1)").await.unwrap();
    let value = "x".repeat(8 * MIB);
    let transaction = client.transaction().await.unwrap();
    let mut portals = Vec::new();
    let refused = loop {
        match transaction.bind(&statement, &[&value]).await {
            Ok(portal) => portals.push(portal),
            Err(error) => break error,
        }
        assert!(portals.len() < 4, "four values of 8 MiB and one more message exceed 32 MiB");
    };
    assert_eq!(refused.code().unwrap().code(), "54000");
    assert!(!portals.is_empty());
    works(&other).await;
    drop(portals);
    transaction.rollback().await.unwrap();
    wait_until_metric(&node, USED, |used| used == 0).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_settings_are_limited_and_charged() {
    let node = small_node().await;
    let client = node.database("t1").await;
    for sql in [
        "SELECT set_config('app.' || hex(zeroblob(1000)), 'x', false)".to_owned(),
        format!("SET app.{} = 'x'", "n".repeat(2000)),
    ] {
        assert_eq!(state(client.batch_execute(&sql).await), "54000", "{sql}");
    }
    for number in 0..50 {
        let value = "x".repeat(4000);
        client.batch_execute(&format!("SET app.s{number} = '{value}'")).await.unwrap();
    }
    assert!(metric(&node, USED).await > 200_000);
    client.batch_execute("RESET ALL").await.unwrap();
    wait_until_metric(&node, USED, |used| used == 0).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_results_are_spilled_to_files() {
    let node = small_node().await;
    let writer = node.database("t1").await;
    writer.batch_execute("CREATE TABLE t (a TEXT)").await.unwrap();
    let rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20) \
                INSERT INTO t SELECT hex(zeroblob(500000)) FROM n";
    writer.batch_execute(rows).await.unwrap();
    let mut clients = Vec::new();
    for _ in 0..12 {
        let mut stream = TcpStream::connect(node.gateway.local_addr()).await.unwrap();
        let body = [&196_608_u32.to_be_bytes()[..], b"user\0anna\0database\0t1\0\0"].concat();
        let sql = b"SELECT a FROM t\0";
        let query = [&b"Q"[..], &(sql.len() as u32 + 4).to_be_bytes(), sql].concat();
        let all = [&(body.len() as u32 + 4).to_be_bytes()[..], &body, &query].concat();
        stream.write_all(&all).await.unwrap();
        clients.push(stream);
    }
    // Several sessions have rows in memory, and together they stay below the limit of the database.
    wait_until_metric(&node, USED, |used| used > 8 << 20).await;
    for mut stream in clients {
        assert!(metric(&node, USED).await <= 37 << 20);
        let mut received = 0;
        let mut buffer = vec![0; 1 << 20];
        while received < 20_000_000 {
            let count = stream.read(&mut buffer).await.unwrap();
            assert!(count > 0, "the answer ends after {received} bytes");
            received += count;
        }
    }
    wait_until_metric(&node, USED, |used| used == 0).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn statement_length_is_limited_but_script_length_is_not() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    client.batch_execute("CREATE TABLE t (a)").await.unwrap();
    for list in
        [format!("a IN ({}1)", "1,".repeat(600_000)), format!("a = ANY (ARRAY[{}1])", "1,".repeat(600_000))]
    {
        let sql = format!("SELECT a FROM t WHERE {list}");
        assert_eq!(state(client.batch_execute(&sql).await), "54000");
        assert_eq!(state(client.query(&sql, &[]).await), "54000");
    }
    let rows = |messages: Vec<SimpleQueryMessage>| {
        messages.iter().filter(|message| matches!(message, SimpleQueryMessage::Row(_))).count()
    };
    let statement = format!("SELECT '{}';\n", "x".repeat(100_000));
    assert_eq!(rows(client.simple_query(&statement.repeat(30)).await.unwrap()), 30);
    // A statement that is too long fails the script, and the other statements of the script are
    // rolled back.
    let script =
        format!("INSERT INTO t VALUES (1); SELECT '{}'; INSERT INTO t VALUES (2)", "x".repeat(2 * MIB));
    assert_eq!(state(client.batch_execute(&script).await), "54000");
    let trigger = "CREATE TRIGGER r AFTER INSERT ON t BEGIN UPDATE t SET a = 7; SELECT 1; END;";
    let script = format!("{trigger} {} INSERT INTO t VALUES (3)", statement.repeat(15));
    assert_eq!(rows(client.simple_query(&script).await.unwrap()), 15);
    let values = client.query_one("SELECT group_concat(a) FROM t", &[]).await.unwrap();
    assert_eq!(values.get::<_, &str>(0), "7");
    // A statement within the limit is translated.
    let list = format!("{}7", "1, ".repeat(50_000));
    let count = client.query_one(&format!("SELECT count(*) FROM t WHERE a = ANY (ARRAY[{list}])"), &[]).await;
    assert_eq!(count.unwrap().get::<_, i64>(0), 1);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_names_are_not_stored_per_parameter() {
    let node = Node::insecure().await;
    let client = node.database("t1").await;
    let name = "n".repeat(300_000);
    client.batch_execute(&format!("CREATE TABLE t ({name} INTEGER)")).await.unwrap();
    let parameters: Vec<String> = (1..=20_000).map(|number| format!("${number}")).collect();
    let sql = format!("SELECT 1 FROM t WHERE {name} IN ({})", parameters.join(","));
    let statement = client.prepare(&sql).await.unwrap();
    assert_eq!(statement.params().len(), 20_000);
    // The total length of a result's column names is limited too.
    let twice = format!("SELECT {} FROM t", ["*"; 10].join(","));
    assert_eq!(state(client.prepare(&twice).await), "54000");
    node.stop().await;
}

/// A schema that is large enough to be read in several parts.
async fn with_wide_tables(node: &Node) -> Client {
    let client = node.database("t1").await;
    let columns: Vec<String> = (0..600).map(|number| format!("column_number_{number} TEXT")).collect();
    for table in 0..30 {
        let refers = if table == 0 { String::new() } else { format!(" REFERENCES t{}(id)", table - 1) };
        let sql = format!(
            "CREATE TABLE t{table} (id INTEGER PRIMARY KEY, up INTEGER{refers} CHECK (up <> {table}), {}); \
             CREATE UNIQUE INDEX i{table} ON t{table}(column_number_7)",
            columns.join(", ")
        );
        client.batch_execute(&sql).await.unwrap();
    }
    client.batch_execute("CREATE VIEW v AS SELECT id, up FROM t3; CREATE TABLE small (a, b)").await.unwrap();
    client
}

#[tokio::test(flavor = "multi_thread")]
async fn catalog_is_complete_when_read_in_parts() {
    let node = Node::insecure().await;
    let client = with_wide_tables(&node).await;
    for (sql, expected) in [
        ("SELECT count(*) FROM information_schema.columns", "18064"),
        ("SELECT count(*) FROM information_schema.columns WHERE table_name = 't7'", "602"),
        ("SELECT count(*) FROM information_schema.columns WHERE column_name = 'up'", "31"),
        ("SELECT count(*) FROM information_schema.columns WHERE table_name = 'nothing'", "0"),
        ("SELECT count(*) FROM information_schema.tables", "32"),
        (
            "SELECT count(*) FROM pg_attribute a JOIN pg_class c ON a.attrelid = c.oid WHERE c.relkind IN ('r', 'v')",
            "18064",
        ),
        ("SELECT count(*) FROM pg_attribute WHERE attrelid = 't7'::regclass", "602"),
        (
            "SELECT count(*) FROM pg_attribute WHERE attrelid = (SELECT oid::text FROM pg_class WHERE relname = 't7')",
            "602",
        ),
        ("SELECT count(*) FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid", "60"),
        ("SELECT count(DISTINCT oid) FROM pg_constraint", "89"),
        (
            "SELECT confrelid::regclass::text FROM pg_constraint WHERE contype = 'f' AND conrelid = 't7'::regclass",
            "t6",
        ),
        (
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'f' AND conrelid = 't7'::regclass",
            "FOREIGN KEY (up) REFERENCES t6(id)",
        ),
        (
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' AND conrelid = 't7'::regclass",
            "CHECK (up <> 7)",
        ),
        (
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p' AND conrelid = 't7'::regclass",
            "PRIMARY KEY (id)",
        ),
        (
            "SELECT unique_constraint_name FROM information_schema.referential_constraints WHERE constraint_name = 't7_up_fkey'",
            "t6_pkey",
        ),
        ("SELECT 't7_pkey'::regclass::oid::regclass::text", "t7_pkey"),
        (
            "SELECT pg_get_indexdef('i7'::regclass)",
            "CREATE UNIQUE INDEX i7 ON t7 USING btree (column_number_7)",
        ),
        ("SELECT pg_get_viewdef('v'::regclass)", "CREATE VIEW v AS SELECT id, up FROM t3"),
    ] {
        let messages = client.simple_query(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        let value = messages.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        });
        assert_eq!(value.as_deref(), Some(expected), "{sql}");
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn catalog_queries_can_be_cancelled() {
    let node = Node::insecure().await;
    let client = with_wide_tables(&node).await;
    let watcher = node.client("t1").await;
    let cancel = client.cancel_token();
    let running = client.simple_query(
        "SELECT count(*) FROM information_schema.columns a, information_schema.columns b WHERE a.table_name > b.udt_name",
    );
    let cancelled = async {
        let active = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%udt_name%' \
                      AND pid <> pg_backend_pid()";
        while watcher.query_one(active, &[]).await.unwrap().get::<_, i64>(0) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        cancel.cancel_query(NoTls).await.unwrap();
    };
    let both = async { tokio::join!(running, cancelled).0 };
    let outcome =
        tokio::time::timeout(Duration::from_secs(120), both).await.expect("the query was not cancelled");
    assert_eq!(state(outcome), "57014");
    works(&client).await;
    node.stop().await;
}
