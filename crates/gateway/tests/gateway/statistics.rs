//! Statistics in SQL: sessions and their activity, counters of tenants, limits.

use crate::common::{Node, connect, state, wait_until, with_timeout};
use tokio_postgres::Client;

/// A statement that runs until it is cancelled.
const ENDLESS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";

async fn pid(client: &Client) -> i32 {
    let row = client.query_one("SELECT pg_backend_pid() AS pid", &[]).await.unwrap();
    row.get::<_, i64>(0) as i32
}

/// Waits until a session is in this state.
async fn wait_for(admin: &Client, pid: i32, state: &str) -> tokio_postgres::Row {
    let sql = "SELECT state, query, xact_start IS NOT NULL AS begun FROM pg_stat_activity WHERE pid = $1";
    let reached = async {
        loop {
            let row = admin.query_one(sql, &[&pid]).await.unwrap();
            if row.get::<_, String>(0) == state {
                return row;
            }
        }
    };
    with_timeout(&format!("the session is {state}"), reached).await
}

#[tokio::test(flavor = "multi_thread")]
async fn running_statements_are_shown_and_can_be_cancelled() {
    let node = Node::insecure().await;
    let (shop, admin) = (node.database("shop").await, node.client("fulmar").await);
    let shop_pid = pid(&shop).await;
    let running = tokio::spawn(async move {
        let outcome = shop.batch_execute(ENDLESS).await;
        (shop, outcome)
    });
    let row = wait_for(&admin, shop_pid, "active").await;
    assert_eq!((row.get::<_, String>(1).as_str(), row.get::<_, bool>(2)), (ENDLESS, true));
    let cancelled = admin.query_one("SELECT pg_cancel_backend($1)", &[&shop_pid]).await;
    cancelled.unwrap();
    let (shop, outcome) = running.await.unwrap();
    assert_eq!(state(outcome), "57014");
    wait_for(&admin, shop_pid, "idle").await;

    shop.batch_execute("CREATE TABLE t (a); BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    wait_for(&admin, shop_pid, "idle in transaction").await;
    assert!(shop.batch_execute("SELECT * FROM nothing").await.is_err());
    wait_for(&admin, shop_pid, "idle in transaction (aborted)").await;
    admin.batch_execute(&format!("SELECT pg_terminate_backend({shop_pid})")).await.unwrap();
    assert!(shop.batch_execute("SELECT 1").await.is_err());
    // The client gets the error before the session has released all its resources.
    let sessions = "SELECT 1 FROM pg_stat_activity WHERE datname = 'shop'";
    wait_until("the session is gone", async || admin.query(sessions, &[]).await.unwrap().is_empty()).await;
    let none = admin.simple_query("SELECT pg_cancel_backend(0)").await.unwrap();
    let tokio_postgres::SimpleQueryMessage::Row(row) = &none[1] else { panic!("{none:?}") };
    assert_eq!(row.get(0), Some("f"));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_statistics_count_statements() {
    let node = Node::insecure().await;
    let (shop, admin) = (node.database("shop").await, node.client("fulmar").await);
    shop.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY)").await.unwrap();
    for id in 0..9_i64 {
        shop.execute("INSERT INTO t VALUES ($1)", &[&id]).await.unwrap();
    }
    shop.query("SELECT * FROM t", &[]).await.unwrap();
    assert!(shop.execute("INSERT INTO t VALUES (1)", &[]).await.is_err());
    let sql = "SELECT sessions, statements, rows, errors, commits, log_bytes, pages_written, size_bytes, \
               busy_ms > 0 AND time_ms > 0 AND p99_ms >= p50_ms AND page_hits > 9 AND page_misses + pages_evicted = 0 FROM fulmar.tenant_stats WHERE tenant = 'shop'";
    let row = admin.query_one(sql, &[]).await.unwrap();
    let number = |column: usize| row.get::<_, i64>(column);
    assert_eq!((number(0), number(2), number(3), number(4)), (1, 9, 1, 10));
    assert!(number(1) >= 12 && number(5) > 100 && number(6) >= 10 && number(7) >= 8192, "{row:?}");
    assert!(row.get::<_, bool>(8));
    // BEGIN is neither a read nor a write. A failed statement counts by its kind.
    shop.batch_execute("BEGIN; COMMIT").await.unwrap();
    let sql = "SELECT reads, writes, statements FROM fulmar.tenant_stats WHERE tenant = 'shop'";
    let row = admin.query_one(sql, &[]).await.unwrap();
    assert_eq!([0, 1, 2].map(|column| row.get::<_, i64>(column)), [1, 11, 14]);
    let sql = "SELECT numbackends, xact_commit, xact_rollback, temp_files, temp_bytes, deadlocks \
               FROM pg_stat_database WHERE datname = 'shop'";
    let row = admin.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, i64>(1)), (1, 10));
    assert_eq!(
        [2, 3, 4, 5].map(|column| row.get::<_, Option<i64>>(column)),
        [None; 4],
        "columns without a counter must be NULL"
    );
    node.stop().await;
}

/// Each of these changes a different set of counters, so exchanged columns would be detected.
#[tokio::test(flavor = "multi_thread")]
async fn conflicts_replays_and_turns_have_separate_counters() {
    let node = Node::insecure().await;
    let (shop, admin) = (node.database("shop").await, node.client("fulmar").await);
    let other = node.client("shop").await;
    shop.batch_execute(
        "CREATE TABLE t (a INTEGER PRIMARY KEY, n INTEGER, b TEXT); INSERT INTO t VALUES (1, 0, ''), (2, 0, ''), (3, 0, '')",
    )
    .await
    .unwrap();
    let counts = async || {
        let sql = "SELECT conflicts, replays, turns FROM fulmar.tenant_stats WHERE tenant = 'shop'";
        let row = admin.query_one(sql, &[]).await.unwrap();
        [0, 1, 2].map(|column| row.get::<_, i64>(column))
    };
    let start = counts().await;
    shop.batch_execute("BEGIN IMMEDIATE; UPDATE t SET n = 1 WHERE a = 1; COMMIT").await.unwrap();
    let turn = counts().await;
    assert_eq!([turn[0], turn[1]], [start[0], start[1]], "taking a turn must not count as a conflict");
    assert!(turn[2] > start[2], "{turn:?}");

    // The page that the transaction read is changed before its COMMIT.
    shop.batch_execute("BEGIN; SELECT n FROM t WHERE a = 1; UPDATE t SET n = 2 WHERE a = 2").await.unwrap();
    other.batch_execute("UPDATE t SET n = 1 WHERE a = 3").await.unwrap();
    shop.batch_execute("COMMIT").await.unwrap();
    let conflict = counts().await;
    assert!(conflict.iter().zip(turn).all(|(now, before)| *now > before), "{turn:?} {conflict:?}");

    // A transaction that is too large for a replay at its COMMIT is replayed earlier, and then has
    // no conflict.
    shop.batch_execute("BEGIN; SELECT n FROM t WHERE a = 1").await.unwrap();
    other.batch_execute("UPDATE t SET n = 2 WHERE a = 3").await.unwrap();
    shop.execute("UPDATE t SET b = $1 WHERE a = 2", &[&"x".repeat(5 << 20)]).await.unwrap();
    shop.batch_execute("COMMIT").await.unwrap();
    let large = counts().await;
    assert_eq!(large[0], conflict[0], "{conflict:?} {large:?}");
    assert!(large[1] > conflict[1] && large[2] > conflict[2], "{conflict:?} {large:?}");
    drop((shop, other, admin));
    node.stop().await;
}

/// Statistics belong to partition ids. A new database with the same name has new ones.
#[tokio::test(flavor = "multi_thread")]
async fn statistics_belong_to_partitions() {
    let node = Node::insecure().await;
    let (shop, admin) = (node.database("shop").await, node.client("fulmar").await);
    drop(node.database("other").await);
    shop.batch_execute("CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1); SELECT * FROM t")
        .await
        .unwrap();
    let numbers = "SELECT count(*), count(DISTINCT partition) FROM fulmar.partition_stats";
    let row = admin.query_one(numbers, &[]).await.unwrap();
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, i64>(1)),
        (3, 3),
        "the database fulmar has a partition too"
    );

    // The statistics of a tenant are the sums over its partitions. The same applies to its
    // histogram.
    let same = "SELECT count(*) FROM fulmar.partition_stats JOIN fulmar.tenant_stats \
                USING (tenant, statements, reads, writes, rows, commits, log_bytes, pages_written, page_hits) WHERE tenant = 'shop'";
    assert_eq!(admin.query_one(same, &[]).await.unwrap().get::<_, i64>(0), 1);
    let histogram = "SELECT sum(h.statements) = s.statements, max(h.up_to_ms) >= s.p99_ms, min(h.up_to_ms) <= s.p50_ms, count(*) \
                     FROM fulmar.latency_histogram AS h JOIN fulmar.partition_stats AS s USING (partition) WHERE s.tenant = 'shop'";
    let row = admin.query_one(histogram, &[]).await.unwrap();
    assert_eq!([0, 1, 2].map(|column| row.get::<_, bool>(column)), [true; 3]);
    assert!(row.get::<_, i64>(3) > 0);

    let shops = async || {
        let sql = "SELECT partition, statements, commits FROM fulmar.partition_stats WHERE tenant = 'shop'";
        let row = admin.query_one(sql, &[]).await.unwrap();
        [0, 1, 2].map(|column| row.get::<_, i64>(column))
    };
    let [before, statements, commits] = shops().await;
    assert!(statements >= 3 && commits >= 1, "{statements} {commits}");
    admin.batch_execute("DROP DATABASE shop WITH (FORCE)").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop").await.unwrap();
    let [after, statements, _] = shops().await;
    assert!(after != before && statements == 0, "{after} {before} {statements}");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_and_settings_can_be_queried() {
    let node = Node::insecure().await;
    let (shop, admin) = (node.database("shop").await, node.client("fulmar").await);
    admin.batch_execute("ALTER DATABASE shop SET max_connections = 7").await.unwrap();
    let sql = "SELECT value FROM fulmar.limits WHERE tenant = current_database() AND name = $1";
    assert_eq!(shop.query_one(sql, &[&"max_connections"]).await.unwrap().get::<_, &str>(0), "7");
    assert_eq!(shop.query_one(sql, &[&"max_size"]).await.unwrap().get::<_, Option<&str>>(0), None);

    let row = shop.query_one("SELECT set_config('app.tenant', $1, false)", &[&"7"]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "7");
    let row = shop.query_one("SELECT current_setting('app.tenant') || 'x'", &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "7x");
    let refused = shop.query_one("SELECT set_config('statement_timeout', 'soon', false)", &[]).await;
    assert_eq!(state(refused), "22023");
    shop.batch_execute("BEGIN; SELECT set_config('app.tenant', '8', true); COMMIT").await.unwrap();
    let row = shop.query_one("SELECT current_setting('app.tenant')", &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "7");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_see_only_their_own_databases() {
    let node = Node::start(|_| {}).await;
    node.catalog.alter_user_password("fulmar", Some(fulmar_gateway::scram_verifier("x"))).await.unwrap();
    let log_in = async |database: &str, user: &str, password: &str| {
        let mut config = node.config(database, user);
        config.password(password);
        connect(&config).await.unwrap()
    };
    let admin = log_in("fulmar", "fulmar", "x").await;
    for statement in
        ["CREATE USER anna PASSWORD 'a'", "CREATE DATABASE shop OWNER anna", "CREATE DATABASE other"]
    {
        admin.batch_execute(statement).await.unwrap();
    }
    let anna = log_in("shop", "anna", "a").await;
    for table in ["pg_stat_activity", "pg_database", "pg_stat_database"] {
        let names = anna.query(&format!("SELECT DISTINCT datname FROM {table}"), &[]).await.unwrap();
        let names: Vec<&str> = names.iter().map(|row| row.get(0)).collect();
        assert_eq!(names, ["shop"], "{table}");
    }
    for table in
        ["fulmar.tenant_stats", "fulmar.partition_stats", "fulmar.latency_histogram", "fulmar.limits"]
    {
        let names = anna.query(&format!("SELECT DISTINCT tenant FROM {table}"), &[]).await.unwrap();
        assert_eq!(names.iter().map(|row| row.get::<_, &str>(0)).collect::<Vec<_>>(), ["shop"], "{table}");
    }
    let roles = anna.query("SELECT rolname FROM pg_roles", &[]).await.unwrap();
    assert_eq!(roles.iter().map(|row| row.get::<_, &str>(0)).collect::<Vec<_>>(), ["anna"]);
    let other = pid(&admin).await;
    assert_eq!(state(anna.query_one("SELECT pg_terminate_backend($1)", &[&other]).await), "42501");
    // Views cannot expose other users' statements either: a view would outlive the privilege.
    anna.batch_execute("CREATE VIEW v AS SELECT * FROM pg_stat_activity").await.unwrap();
    assert!(anna.query("SELECT * FROM v", &[]).await.is_err());
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn advisory_locks_exclude_other_sessions() {
    let node = Node::insecure().await;
    let (one, other) = (node.database("shop").await, node.client("shop").await);
    let call = async |client: &Client, function: &str| {
        let sql = format!("SELECT {function}($1)");
        client.query_one(&sql, &[&7_i64]).await.map(|row| row.get::<_, bool>(0))
    };
    assert!(call(&one, "pg_try_advisory_lock").await.unwrap());
    assert!(!call(&other, "pg_try_advisory_lock").await.unwrap());
    assert_eq!(state(other.query_one("SELECT pg_advisory_lock(7)", &[]).await), "55P03");
    assert!(call(&one, "pg_advisory_unlock").await.unwrap());
    other.query_one("SELECT pg_advisory_lock(7)", &[]).await.unwrap();
    assert!(!call(&one, "pg_try_advisory_lock").await.unwrap());
    let pid = pid(&other).await;
    one.query_one("SELECT pg_terminate_backend($1)", &[&pid]).await.unwrap();
    wait_until("the lock is released", async || call(&one, "pg_try_advisory_lock").await.unwrap()).await;
    node.stop().await;
}

/// The catalog queries of a transaction are part of its reads: a replay repeats them.
#[tokio::test(flavor = "multi_thread")]
async fn replay_detects_schema_changes() {
    let node = Node::insecure().await;
    let (one, other) = (node.database("shop").await, node.client("shop").await);
    one.batch_execute("CREATE TABLE t (a INTEGER)").await.unwrap();
    for (concurrent, sqlstate) in
        [("INSERT INTO t VALUES (2)", None), ("CREATE TABLE late (a)", Some("40001"))]
    {
        one.batch_execute("BEGIN").await.unwrap();
        let sql = "SELECT count(*) FROM pg_class WHERE relname = 'late'";
        assert_eq!(one.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 0);
        one.batch_execute("INSERT INTO t VALUES (1)").await.unwrap();
        other.batch_execute(concurrent).await.unwrap();
        let committed = one.batch_execute("COMMIT").await;
        assert_eq!(committed.err().map(|error| error.code().unwrap().code().to_owned()).as_deref(), sqlstate);
    }
    node.stop().await;
}

/// Every system table can be read, and has a value for each of its columns.
#[tokio::test(flavor = "multi_thread")]
async fn all_system_tables_can_be_read() {
    let node = Node::insecure().await;
    let client = node.database("shop").await;
    client
        .batch_execute(
            "CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT UNIQUE DEFAULT 'x' CHECK (b <> '')); \
             CREATE TABLE u (a INT REFERENCES t, PRIMARY KEY (a)) WITHOUT ROWID; \
             CREATE VIEW v AS SELECT * FROM t; CREATE INDEX i ON u (a DESC) WHERE a > 1; \
             CREATE TRIGGER r AFTER INSERT ON t BEGIN SELECT 1; END",
        )
        .await
        .unwrap();
    let sql = "SELECT DISTINCT replace(m.name, 'sqlite_system_', '') FROM pragma_module_list AS m, pg_am \
               WHERE m.name LIKE 'pg~_%' ESCAPE '~' OR m.name LIKE '%.%' ORDER BY 1";
    let names = client.query(sql, &[]).await.unwrap();
    assert!(names.len() > 60, "{}", names.len());
    let mut filled = 0;
    for name in &names {
        let (name, from) = (name.get::<_, &str>(0), "SELECT * FROM");
        filled += usize::from(!client.query(&format!("{from} {name}"), &[]).await.unwrap().is_empty());
    }
    assert!(filled >= 30, "{filled}");
    let keys = "SELECT count(DISTINCT indexrelid), count(*) FROM pg_index";
    let row = client.query_one(keys, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), row.get::<_, i64>(1));
    node.stop().await;
}
