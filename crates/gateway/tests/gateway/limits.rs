//! Limits of tenants: set by superusers, stored, applied to running sessions, and enforced.

use crate::common::{Node, connect, state, with_timeout};
use futures::{SinkExt, StreamExt};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_postgres::{Client, Error, NoTls};

/// The SQLSTATE, message and hint of an error.
fn error_fields<T>(outcome: Result<T, Error>) -> (String, String, String) {
    let Err(error) = outcome else { panic!("the statement must fail") };
    let Some(error) = error.as_db_error() else { panic!("no error message of the server: {error}") };
    (error.code().code().to_owned(), error.message().to_owned(), error.hint().unwrap_or_default().to_owned())
}

/// A node with password authentication, a session of its superuser, and a database `shop` owned by
/// `anna`, who is not a superuser.
async fn node_with_a_shop() -> (Node, Client) {
    let node = Node::start(|_| {}).await;
    let verifier = fulmar_gateway::scram_verifier("top secret");
    node.catalog.alter_user_password("fulmar", Some(verifier)).await.unwrap();
    let admin = log_in(&node, "fulmar", "fulmar", "top secret").await.unwrap();
    admin.batch_execute("CREATE USER anna PASSWORD 'a'").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop OWNER anna").await.unwrap();
    (node, admin)
}

async fn log_in(node: &Node, database: &str, user: &str, password: &str) -> Result<Client, Error> {
    let mut config = node.config(database, user);
    config.password(password);
    connect(&config).await
}

async fn limit(admin: &Client, change: &str) {
    admin.batch_execute(&format!("ALTER DATABASE shop {change}")).await.unwrap();
}

async fn shown(client: &Client, parameter: &str) -> String {
    client.query_one(&format!("SHOW {parameter}"), &[]).await.unwrap().get(0)
}

async fn count(client: &Client) -> i64 {
    client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_superusers_can_set_limits() {
    let (node, admin) = node_with_a_shop().await;
    let anna = log_in(&node, "shop", "anna", "a").await.unwrap();
    admin.batch_execute("GRANT CONNECT ON DATABASE fulmar TO anna").await.unwrap();
    let elsewhere = log_in(&node, "fulmar", "anna", "a").await.unwrap();
    for statement in ["ALTER DATABASE shop SET max_size = '1TB'", "ALTER DATABASE shop RESET ALL"] {
        for client in [&anna, &elsewhere] {
            let (state, message, _) = error_fields(client.batch_execute(statement).await);
            assert_eq!(state, "42501");
            assert!(message.contains("permission denied to run"), "{message}");
        }
    }
    for (statement, refused, hint_part) in [
        ("ALTER DATABASE shop SET work_mem = '1MB'", "42704", "transaction_memory"),
        ("ALTER DATABASE shop RESET work_mem", "42704", "transaction_memory"),
        ("ALTER DATABASE shop SET cpu_share = 0", "22023", "from 1 to 10000"),
        ("ALTER DATABASE shop SET max_size = '64 potatoes'", "22023", "MB"),
        ("ALTER DATABASE nothing SET max_size = '64MB'", "3D000", "tenant list"),
        ("BEGIN; ALTER DATABASE shop SET cpu_share = 5", "25001", ""),
    ] {
        let (state, _, hint) = error_fields(admin.batch_execute(statement).await);
        assert_eq!(state, refused, "{statement}");
        assert!(hint.contains(hint_part), "{statement}: {hint}");
    }
    admin.batch_execute("ROLLBACK").await.unwrap();

    // Limits are kept when a database is renamed, and are not copied with it.
    limit(&admin, "SET cpu_share = 250").await;
    limit(&admin, "SET max_size TO '64MB'").await;
    admin.batch_execute("CREATE DATABASE copy TEMPLATE shop").await.unwrap();
    admin.batch_execute("ALTER DATABASE shop RENAME TO store").await.unwrap();
    let values = |name: &str| {
        let shown = node.catalog.tenant(name).unwrap().limits;
        let values = shown.shown().filter(|limit| limit.value != limit.default);
        values.map(|limit| (limit.name, limit.value.unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(values("store"), [("max_size", "64MB".to_owned()), ("cpu_share", "250".to_owned())]);
    assert_eq!(values("copy"), []);
    admin.batch_execute("ALTER DATABASE store RESET max_size").await.unwrap();
    assert_eq!(values("store"), [("cpu_share", "250".to_owned())]);
    admin.batch_execute("ALTER DATABASE store SET cpu_share = DEFAULT").await.unwrap();
    assert_eq!(values("store"), []);
    drop((admin, anna, elsewhere));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_of_a_database_are_limited() {
    let (node, admin) = node_with_a_shop().await;
    limit(&admin, "SET max_connections = 2").await;
    let first = log_in(&node, "shop", "anna", "a").await.unwrap();
    let second = log_in(&node, "shop", "anna", "a").await.unwrap();
    let (state, message, hint) = error_fields(log_in(&node, "shop", "anna", "a").await);
    assert_eq!(state, "53300");
    assert!(message.contains("\"shop\"") && hint.contains("max_connections"), "{message} {hint}");
    // A superuser is admitted beyond the limit, and counts.
    let superuser = log_in(&node, "shop", "fulmar", "top secret").await.unwrap();

    // Lowering the limit does not close sessions.
    limit(&admin, "SET max_connections = 1").await;
    for client in [&first, &second, &superuser] {
        client.batch_execute("SELECT 1").await.unwrap();
    }
    assert_eq!(error_fields(log_in(&node, "shop", "anna", "a").await).0, "53300");
    limit(&admin, "SET max_connections = 4").await;
    let fourth = log_in(&node, "shop", "anna", "a").await.unwrap();
    assert_eq!(error_fields(log_in(&node, "shop", "anna", "a").await).0, "53300");

    // A session that ends frees a slot. The server notices that with a delay, so the login is
    // repeated.
    drop(first);
    let again = async {
        loop {
            match log_in(&node, "shop", "anna", "a").await {
                Ok(client) => break client,
                refused => assert_eq!(error_fields(refused).0, "53300"),
            }
        }
    };
    let again = with_timeout("a connection slot is free", again).await;
    limit(&admin, "SET max_connections = 0").await;
    assert_eq!(error_fields(log_in(&node, "shop", "anna", "a").await).0, "53300");
    limit(&admin, "RESET max_connections").await;
    let last = log_in(&node, "shop", "anna", "a").await.unwrap();
    drop((admin, second, superuser, fourth, again, last));
    node.stop().await;
}

/// Superusers can connect even if a tenant opens as many sessions as it can.
#[tokio::test(flavor = "multi_thread")]
async fn connection_slots_are_reserved_for_superusers() {
    let node = Node::start(|config| config.max_sessions = 13).await;
    let verifier = || Some(fulmar_gateway::scram_verifier("a"));
    node.catalog.alter_user_password("fulmar", verifier()).await.unwrap();
    node.catalog.create_user("anna", false, verifier()).await.unwrap();
    let admin = log_in(&node, "fulmar", "fulmar", "a").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop OWNER anna").await.unwrap();
    let mut sessions = Vec::new();
    for _ in 0..2 {
        sessions.push(log_in(&node, "shop", "anna", "a").await.unwrap());
    }
    let (state, message, hint) = error_fields(log_in(&node, "shop", "anna", "a").await);
    assert_eq!(state, "53300");
    assert!(message.contains("too many clients") && hint.contains("pool"), "{message} {hint}");
    for _ in 0..10 {
        sessions.push(log_in(&node, "shop", "fulmar", "a").await.unwrap());
    }
    assert_eq!(error_fields(log_in(&node, "shop", "fulmar", "a").await).0, "53300");
    for client in &sessions {
        client.batch_execute("SELECT 1").await.unwrap();
    }
    drop((admin, sessions));
    node.stop().await;
}

/// Connections that send nothing block neither logins nor health checks.
#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_connections_are_evicted() {
    let node = Node::start(|config| (config.max_logins, config.insecure) = (3, true)).await;
    let mut idle = Vec::new();
    for _ in 0..3 {
        idle.push(TcpStream::connect(node.gateway.local_addr()).await.unwrap());
    }
    // Sessions do not count against the limit.
    let mut sessions = Vec::new();
    for _ in 0..5 {
        sessions.push(node.client("fulmar").await);
    }
    assert!(is_closed(&mut idle[0]).await);
    let metrics = node.get("/metrics", "").await;
    let evicted = metrics.lines().find_map(|line| line.strip_prefix("fulmar_connections_evicted_total "));
    assert!(evicted.unwrap().parse::<u64>().unwrap() > 0, "{metrics}");
    for client in &sessions {
        client.batch_execute("SELECT 1").await.unwrap();
    }

    let mut idle_http = Vec::new();
    for _ in 0..100 {
        idle_http.push(TcpStream::connect(node.http.local_addr()).await.unwrap());
    }
    assert!(node.health().await.starts_with("HTTP/1.1 200"));
    assert!(is_closed(&mut idle_http[0]).await);
    drop((idle, idle_http, sessions));
    node.stop().await;
}

/// Waits until the server closes the connection. Returns false if the server sends data.
async fn is_closed(stream: &mut TcpStream) -> bool {
    !matches!(stream.read(&mut [0]).await, Ok(1..))
}

const ENDLESS: &str =
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n";

#[tokio::test(flavor = "multi_thread")]
async fn statement_timeout_is_enforced() {
    let (node, admin) = node_with_a_shop().await;
    let anna = log_in(&node, "shop", "anna", "a").await.unwrap();
    assert_eq!(shown(&anna, "statement_timeout").await, "0");
    anna.batch_execute("SET statement_timeout = '1min'").await.unwrap();

    // Long enough for all other statements. Applies to a session that has set a longer timeout
    // before.
    limit(&admin, "SET statement_timeout = '1s'").await;
    assert_eq!(state(anna.batch_execute(ENDLESS).await), "57014");
    assert_eq!(shown(&anna, "statement_timeout").await, "1s");
    for value in ["0", "'1001ms'"] {
        let (state, message, hint) =
            error_fields(anna.batch_execute(&format!("SET statement_timeout = {value}")).await);
        assert_eq!(state, "22023");
        assert!(message.contains("limit is 1s") && hint.contains("ALTER DATABASE"), "{message} {hint}");
    }
    let mut config = node.config("shop", "anna");
    config.password("a").options("-c statement_timeout=0");
    assert_eq!(error_fields(connect(&config).await).0, "22023");

    // A shorter timeout is allowed. The limit is also the default.
    anna.batch_execute("SET statement_timeout = 900").await.unwrap();
    assert_eq!(shown(&anna, "statement_timeout").await, "900");
    anna.batch_execute("RESET statement_timeout").await.unwrap();
    assert_eq!(shown(&anna, "statement_timeout").await, "1s");
    assert_eq!(state(anna.batch_execute(ENDLESS).await), "57014");

    // The same in the middle of a transaction.
    limit(&admin, "SET statement_timeout = 0").await;
    anna.batch_execute("BEGIN; SELECT 1").await.unwrap();
    limit(&admin, "SET statement_timeout = '60ms'").await;
    assert_eq!(state(anna.batch_execute(ENDLESS).await), "57014");
    anna.batch_execute("ROLLBACK").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}

/// A client, and the error that ends its connection.
async fn client_and_end(node: &Node) -> (Client, tokio::task::JoinHandle<Option<Error>>) {
    let mut config = node.config("shop", "anna");
    config.password("a");
    let (client, mut connection) = config.connect(NoTls).await.unwrap();
    let end = tokio::spawn(async move {
        let mut messages = futures::stream::poll_fn(move |cx| connection.poll_message(cx));
        while let Some(message) = messages.next().await {
            if let Err(error) = message {
                return Some(error);
            }
        }
        None
    });
    (client, end)
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_in_transaction_timeout_is_enforced() {
    let (node, admin) = node_with_a_shop().await;
    let anna = log_in(&node, "shop", "anna", "a").await.unwrap();
    anna.batch_execute("CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1)").await.unwrap();

    // The session's own setting, as in PostgreSQL.
    let (idle, end) = client_and_end(&node).await;
    idle.batch_execute("SET idle_in_transaction_session_timeout = '30ms'").await.unwrap();
    idle.batch_execute("BEGIN; INSERT INTO t VALUES (2)").await.unwrap();
    let error = end.await.unwrap().expect("the server must send an error");
    assert_eq!(error.code().map(|code| code.code()), Some("25P03"), "{error}");
    assert_eq!(count(&anna).await, 1, "the transaction must be rolled back");

    // The limit is both the default and the maximum. It applies in a failed transaction, and not
    // outside of a transaction.
    limit(&admin, "SET idle_in_transaction_timeout = '30ms'").await;
    assert_eq!(shown(&anna, "idle_in_transaction_session_timeout").await, "30ms");
    for value in ["0", "'1min'"] {
        let set = anna.batch_execute(&format!("SET idle_in_transaction_session_timeout = {value}")).await;
        assert_eq!(state(set), "22023");
    }
    let (idle, end) = client_and_end(&node).await;
    assert_eq!(state(idle.batch_execute("BEGIN; SELECT missing").await), "42703");
    let error = end.await.unwrap().expect("the server must send an error");
    assert_eq!(error.code().map(|code| code.code()), Some("25P03"), "{error}");
    // The idle sessions that were terminated have taken longer than the timeout, and this session
    // was idle outside of a transaction meanwhile.
    assert_eq!(count(&anna).await, 1);

    // It also applies to a COPY whose client stops sending rows.
    let (idle, end) = client_and_end(&node).await;
    let rows = idle.copy_in("COPY t FROM STDIN").await.unwrap();
    futures::pin_mut!(rows);
    // The session may have been terminated before this row.
    drop(rows.send(&b"2\n"[..]).await);
    with_timeout("an idle COPY is terminated", end).await.unwrap();
    assert_eq!(count(&anna).await, 1);

    // A session that holds a row lock is terminated after the timeout, which releases its lock.
    limit(&admin, "SET idle_in_transaction_timeout = '200ms'").await;
    let (holder, end) = client_and_end(&node).await;
    holder.batch_execute("BEGIN; SELECT a FROM t WHERE a = 1 FOR UPDATE").await.unwrap();
    let update = anna.batch_execute("UPDATE t SET a = 5 WHERE a = 1");
    with_timeout("the row is released", update).await.unwrap();
    assert!(end.await.unwrap().is_some());
    drop((admin, anna));
    node.stop().await;
}

const ROWS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)
    INSERT INTO t SELECT randomblob(3000) FROM n";

#[tokio::test(flavor = "multi_thread")]
async fn transaction_memory_is_limited() {
    let (node, admin) = node_with_a_shop().await;
    let anna = log_in(&node, "shop", "anna", "a").await.unwrap();
    anna.batch_execute("CREATE TABLE t (a BLOB)").await.unwrap();
    anna.batch_execute(ROWS).await.unwrap();
    anna.batch_execute("BEGIN; INSERT INTO t VALUES ('before')").await.unwrap();
    limit(&admin, "SET transaction_memory = '1MB'").await;
    let (refused, message, hint) =
        error_fields(anna.batch_execute("UPDATE t SET a = randomblob(3000)").await);
    assert_eq!(refused, "53400");
    assert!(message.contains("transaction_memory of 1024kB") && hint.contains("ALTER DATABASE"), "{message}");
    assert_eq!(state(anna.batch_execute("SELECT 1").await), "25P02");
    anna.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(count(&anna).await, 1000);
    assert_eq!(state(anna.batch_execute("SELECT a FROM t ORDER BY hex(a)").await), "53400");
    // The session remains usable, also after the limit is raised.
    anna.batch_execute("INSERT INTO t VALUES ('after')").await.unwrap();
    limit(&admin, "RESET transaction_memory").await;
    anna.batch_execute("UPDATE t SET a = randomblob(3000)").await.unwrap();
    assert_eq!(count(&anna).await, 1001);
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn database_size_is_limited() {
    let (node, admin) = node_with_a_shop().await;
    let anna = log_in(&node, "shop", "anna", "a").await.unwrap();
    anna.batch_execute("CREATE TABLE t (a BLOB)").await.unwrap();
    anna.batch_execute(ROWS).await.unwrap();
    // The limit is lowered below the current size of 4 MB.
    limit(&admin, "SET max_size = '2MB'").await;
    let (refused, message, hint) = error_fields(anna.batch_execute(ROWS).await);
    assert_eq!(refused, "53100");
    assert!(message.contains("max_size of 2048kB") && hint.contains("Delete"), "{message} {hint}");
    assert_eq!(count(&anna).await, 1000);
    anna.batch_execute("DELETE FROM t WHERE rowid > 100").await.unwrap();
    anna.batch_execute("INSERT INTO t VALUES ('in the space that is free')").await.unwrap();
    anna.batch_execute("VACUUM").await.unwrap();
    assert_eq!(state(anna.batch_execute(ROWS).await), "53100");
    limit(&admin, "SET max_size = '8MB'").await;
    anna.batch_execute(ROWS).await.unwrap();
    assert_eq!(count(&anna).await, 1101);
    drop((admin, anna));
    node.stop().await;
}

/// Rows whose result does not fit in memory.
const LARGE_RESULT: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40)
    SELECT hex(zeroblob(500000)) FROM n";

#[tokio::test(flavor = "multi_thread")]
async fn temporary_files_are_limited_for_all_sessions_together() {
    let (node, admin) = node_with_a_shop().await;
    let (mut anna, other) = (
        log_in(&node, "shop", "anna", "a").await.unwrap(),
        log_in(&node, "shop", "anna", "a").await.unwrap(),
    );
    other.batch_execute("CREATE TABLE t (a BLOB)").await.unwrap();
    other.batch_execute(ROWS).await.unwrap();
    limit(&admin, "SET temp_file_limit = '60MB'").await;
    // The portal's unfetched rows keep its result of 40 MB.
    let transaction = anna.transaction().await.unwrap();
    let portal = transaction.bind(LARGE_RESULT, &[]).await.unwrap();
    assert_eq!(transaction.query_portal(&portal, 1).await.unwrap().len(), 1);
    let (refused, message, hint) = error_fields(other.query(LARGE_RESULT, &[]).await);
    assert_eq!(
        (refused.as_str(), message.as_str()),
        ("53400", "temporary file size exceeds temp_file_limit (61440kB)")
    );
    assert!(hint.contains("temp_file_limit"), "{hint}");
    // Results that fit in memory, and other databases, are not affected.
    assert_eq!(count(&other).await, 1000);
    other.batch_execute("INSERT INTO t VALUES ('after')").await.unwrap();
    assert_eq!(admin.query(LARGE_RESULT, &[]).await.unwrap().len(), 40);
    transaction.rollback().await.unwrap();
    assert_eq!(other.query(LARGE_RESULT, &[]).await.unwrap().len(), 40);
    drop((admin, anna, other));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn values_patterns_and_parameters_are_limited() {
    let (node, admin) = node_with_a_shop().await;
    let anna = log_in(&node, "shop", "anna", "a").await.unwrap();
    limit(&admin, "SET max_value_size = '1MB'").await;
    limit(&admin, "SET max_pattern_length = 10").await;
    limit(&admin, "SET max_parameters = 2").await;
    anna.batch_execute("SELECT zeroblob(1000000), 'a' LIKE '%aaaaaaaa'").await.unwrap();
    let (refused, _, hint) = error_fields(anna.batch_execute("SELECT hex(zeroblob(600000))").await);
    assert!(refused == "54000" && hint.contains("up to 1024 kB"), "{refused} {hint}");
    assert_eq!(state(anna.batch_execute("SELECT 'a' LIKE '%aaaaaaaaaa'").await), "54000");
    assert_eq!(state(anna.prepare("SELECT $1, $2, $3").await), "54000");
    anna.prepare("SELECT $1, $2").await.unwrap();
    for name in ["max_value_size", "max_pattern_length", "max_parameters"] {
        limit(&admin, &format!("RESET {name}")).await;
    }
    anna.batch_execute("SELECT hex(zeroblob(600000)), 'a' LIKE '%aaaaaaaaaa'").await.unwrap();
    anna.prepare("SELECT $1, $2, $3").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}
