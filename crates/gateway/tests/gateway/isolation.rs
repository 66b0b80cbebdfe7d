//! Each way out of a tenant, and what each role may do: tried over the wire, as a hostile tenant would.
//!
//! | way | what is tried here | and elsewhere |
//! | --- | --- | --- |
//! | files, modules, extensions, PRAGMAs, SQLite's own tables | [`no_statement_reaches_out`] | `engine/tests/sql` |
//! | procedures | the same from Lua, [`procedures_reach_no_further`] | `procedures` |
//! | other tenants | [`other_tenants_are_out_of_reach`] | `statistics` |
//! | administration, by role | [`what_each_role_may_do`] | `roles`, `limits`, `tokens` |
//! | memory, deep, long and recursive statements, patterns | [`what_is_too_much_is_refused`] | `limits`, `engine/tests/limits`, `fuzz` |
//! | processors | [`a_busy_tenant_leaves_time_for_others`] (`cpu_share`), [`many_short_statements_leave_time_for_others`] | `limits` (`statement_timeout`) |
//! | connections | | `limits` (`max_connections`, and those of the node), `tenants` (guessing passwords) |
//! | huge messages and names, many parameters, prepared statements and portals | [`messages_and_names_have_bounds`], [`what_a_session_names_has_bounds`] | `wire`, `fuzz` |

use crate::common::{Node, connect, ends, state};
use bytes::Bytes;
use futures::SinkExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_postgres::{Client, Error};

/// It runs until it is cancelled.
const ENDLESS: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n";

async fn log_in(node: &Node, database: &str, user: &str) -> Result<Client, Error> {
    let mut config = node.config(database, user);
    config.password(user);
    connect(&config).await
}

/// A node with users of each role, each with its name as password: `fulmar` is superuser; `anna` owns `shop`, `bert` may
/// do everything in it, `carl` may read it, `dora` may nothing. `other` belongs to `dora`.
async fn node_with_roles() -> (Node, Client) {
    let node = Node::start(|_| {}).await;
    node.catalog.alter_user_password("fulmar", Some(fulmar_gateway::scram_verifier("fulmar"))).await.unwrap();
    let admin = log_in(&node, "fulmar", "fulmar").await.unwrap();
    for user in ["anna", "bert", "carl", "dora"] {
        admin.batch_execute(&format!("CREATE USER {user} PASSWORD '{user}'")).await.unwrap();
    }
    for statement in [
        "CREATE DATABASE shop OWNER anna",
        "CREATE DATABASE other OWNER dora",
        "GRANT CONNECT ON DATABASE shop TO bert",
        "GRANT SELECT ON DATABASE shop TO carl",
        // So that the right to administer is what they are refused for, and not the place.
        "GRANT CONNECT ON DATABASE fulmar TO anna, bert, carl",
    ] {
        admin.batch_execute(statement).await.unwrap();
    }
    let dora = log_in(&node, "other", "dora").await.unwrap();
    dora.batch_execute("CREATE TABLE secret (a); INSERT INTO secret VALUES ('of dora')").await.unwrap();
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    anna.batch_execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT); INSERT INTO t VALUES (1, 'x')")
        .await
        .unwrap();
    (node, admin)
}

/// Notes what gets another SQLSTATE than it should.
async fn gets(client: &Client, statement: &str, expected: &str, who: &str, wrong: &mut Vec<String>) {
    let seen = match client.batch_execute(statement).await {
        Ok(()) => "no error".to_owned(),
        Err(error) => error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned()),
    };
    if seen != expected {
        let shown: String = statement.chars().take(60).collect();
        wrong.push(format!("{who}: {shown}: {seen} instead of {expected}"));
    }
}

/// What no tenant's statement does, with the SQLSTATE that it gets.
fn ways_out() -> Vec<(String, &'static str)> {
    let fixed = [
        ("ATTACH '/etc/passwd' AS x", "42501"),
        ("ATTACH '' AS x", "42501"),
        ("ATTACH ':memory:' AS x", "42501"),
        ("ATTACH DATABASE 'file:other?mode=memory&cache=shared' AS x", "42501"),
        ("DETACH main", "42501"),
        ("VACUUM INTO '/tmp/stolen'", "42501"),
        ("VACUUM main INTO '/tmp/stolen'", "42501"),
        ("SELECT load_extension('/tmp/x.so')", "42501"),
        ("SELECT readfile('/etc/passwd')", "42883"),
        ("SELECT writefile('/tmp/x', 'y')", "42883"),
        ("SELECT edit('x', 'sh')", "42883"),
        ("SELECT fts3_tokenizer('simple')", "42501"),
        ("SELECT fts3_tokenizer('simple', x'0000000000000000')", "42501"),
        ("SELECT * FROM sqlite_dbpage", "42P01"),
        ("UPDATE sqlite_dbpage SET data = zeroblob(4096)", "42P01"),
        ("SELECT * FROM sqlite_stmt", "42P01"),
        ("SELECT * FROM fsdir('/')", "42P01"),
        ("SELECT * FROM completion('a')", "42P01"),
        ("CREATE VIRTUAL TABLE x USING csv(filename='/etc/passwd')", "42601"),
        ("CREATE VIRTUAL TABLE x USING zipfile('/tmp/x.zip')", "42601"),
        ("CREATE VIRTUAL TABLE x USING vfsstat", "42601"),
        ("UPDATE sqlite_schema SET sql = ''", "42501"),
        ("DELETE FROM sqlite_master", "42501"),
        ("INSERT INTO sqlite_schema VALUES ('table', 'x', 'x', 3, 'CREATE TABLE x (a)')", "42501"),
        ("DROP TABLE sqlite_schema", "42601"),
        ("COPY t FROM '/etc/passwd'", "0A000"),
        ("COPY t TO '/tmp/x'", "0A000"),
        ("COPY t FROM PROGRAM 'id'", "0A000"),
        ("COPY t TO PROGRAM 'cat > /tmp/x'", "0A000"),
        ("COPY (SELECT 1) TO '/tmp/x'", "0A000"),
        ("COPY DATABASE other TO STDOUT (FORMAT sqlite)", "42601"),
        ("CREATE EXTENSION dblink", "42601"),
        ("CREATE FUNCTION f() RETURNS int LANGUAGE c AS 'x'", "42601"),
        ("LOAD '/tmp/x.so'", "42601"),
        ("SELECT pg_read_file('/etc/passwd')", "42883"),
        ("SELECT pg_ls_dir('/')", "42883"),
        ("SELECT lo_import('/etc/passwd')", "42883"),
        ("SET SESSION AUTHORIZATION fulmar", "0A000"),
        ("SET ROLE fulmar", "0A000"),
    ];
    let pragmas = [
        "writable_schema = 1",
        "trusted_schema = 1",
        "foreign_keys = OFF",
        "journal_mode = OFF",
        "journal_mode",
        "synchronous = OFF",
        "locking_mode = EXCLUSIVE",
        "temp_store = 2",
        "temp_store_directory = '/tmp'",
        "data_store_directory = '/tmp'",
        "mmap_size = 1000000000",
        "cache_size = 1000000000",
        "cache_spill = 0",
        "hard_heap_limit = 1",
        "soft_heap_limit = 1",
        "threads = 64",
        "wal_checkpoint",
        "query_only = 0",
        "page_size = 512",
        "max_page_count = 1",
        "auto_vacuum = 1",
        "incremental_vacuum",
        "encoding = 'UTF-16'",
        "schema_version = 7",
        "busy_timeout = 1000000",
        "read_uncommitted = 1",
        "recursive_triggers = 1",
        "case_sensitive_like = 1",
        "ignore_check_constraints = 1",
        "legacy_alter_table = 1",
        "shrink_memory",
        "lock_proxy_file = '/tmp/x'",
        "key = 'x'",
    ];
    let fixed = fixed.into_iter().map(|(sql, state)| (sql.to_owned(), state));
    fixed.chain(pragmas.iter().map(|pragma| (format!("PRAGMA {pragma}"), "42501"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_reaches_out() {
    let (node, admin) = node_with_roles().await;
    // A superuser has no more of a machine than others.
    let root = log_in(&node, "shop", "fulmar").await.unwrap();
    let mut wrong = Vec::new();
    for (client, role) in [(&root, "superuser"), (&log_in(&node, "shop", "anna").await.unwrap(), "owner")] {
        for (statement, expected) in ways_out() {
            gets(client, &statement, expected, role, &mut wrong).await;
        }
        let sound =
            client.query_one("SELECT integrity_check FROM pragma_integrity_check", &[]).await.unwrap();
        assert_eq!(sound.get::<_, &str>(0), "ok");
    }
    // Who may only read gets no further, whatever is said first.
    let carl = log_in(&node, "shop", "carl").await.unwrap();
    for (statement, _) in ways_out() {
        assert!(carl.batch_execute(&statement).await.is_err(), "{statement}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(!std::path::Path::new("/tmp/stolen").exists());
    drop((admin, root, carl));
    node.stop().await;
}

/// The same from views and triggers, which run when somebody else looks.
#[tokio::test(flavor = "multi_thread")]
async fn views_and_triggers_reach_no_further() {
    let (node, admin) = node_with_roles().await;
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    for (attempt, used) in [
        ("CREATE VIEW v AS SELECT * FROM fulmar.tokens", "SELECT * FROM v"),
        ("CREATE VIEW v AS SELECT pg_terminate_backend(1)", "SELECT * FROM v"),
        ("CREATE VIEW v AS SELECT load_extension('x')", "SELECT * FROM v"),
        (
            "CREATE TRIGGER r AFTER INSERT ON t BEGIN SELECT pg_terminate_backend(1); END",
            "INSERT INTO t VALUES (7, 7)",
        ),
    ] {
        if anna.batch_execute(attempt).await.is_ok() {
            let root = log_in(&node, "shop", "fulmar").await.unwrap();
            assert!(root.batch_execute(used).await.is_err(), "{attempt}");
        }
        anna.batch_execute("DROP VIEW IF EXISTS v; DROP TRIGGER IF EXISTS r").await.unwrap();
    }
    // Neither made the superuser's session end.
    admin.batch_execute("SELECT 1").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn procedures_reach_no_further() {
    let (node, admin) = node_with_roles().await;
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    let mut wrong = Vec::new();
    for (body, expected) in [
        ("io.open('/etc/passwd')", "38000"),
        ("os.execute('id')", "38000"),
        ("require('os')", "38000"),
        ("loadstring('return 1')", "38000"),
        ("db.exec([[ATTACH '/etc/passwd' AS x]])", "0A000"),
        ("db.exec([[VACUUM INTO '/tmp/stolen']])", "0A000"),
        ("db.exec([[PRAGMA writable_schema = 1]])", "0A000"),
        ("db.query([[SELECT readfile('/etc/passwd')]])", "42883"),
        ("db.query('SELECT * FROM other.secret')", "42P01"),
        ("db.exec('CREATE USER x SUPERUSER')", "0A000"),
        ("db.exec([[COPY t TO PROGRAM 'id']])", "0A000"),
    ] {
        anna.batch_execute(&format!("CREATE OR REPLACE PROCEDURE p() LANGUAGE lua AS $p$ {body} $p$"))
            .await
            .unwrap();
        gets(&anna, "CALL p()", expected, body, &mut wrong).await;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_tenants_are_out_of_reach() {
    let (node, admin) = node_with_roles().await;
    for user in ["anna", "bert", "carl"] {
        assert_eq!(state(log_in(&node, "other", user).await), "42501");
        let client = log_in(&node, "shop", user).await.unwrap();
        for statement in [
            "SELECT * FROM secret",
            "SELECT * FROM other.secret",
            "SELECT * FROM other.main.secret",
            "SELECT * FROM \"other\".\"secret\"",
        ] {
            assert!(
                ["42P01", "42601", "0A000"].contains(&state(client.batch_execute(statement).await).as_str()),
                "{statement}"
            );
        }
        // Nor is there a trace of it in any table that is computed.
        let sql = "SELECT DISTINCT m.name FROM pragma_module_list AS m, pg_am WHERE m.name LIKE 'pg~_%' ESCAPE '~' \
                   OR m.name LIKE 'information~_schema.%' ESCAPE '~' OR m.name LIKE 'fulmar.%' ORDER BY 1";
        let tables = client.query(sql, &[]).await.unwrap();
        assert!(tables.len() > 60, "{}", tables.len());
        for table in tables {
            let table = table.get::<_, &str>(0);
            for message in client.simple_query(&format!("SELECT * FROM {table}")).await.unwrap() {
                let tokio_postgres::SimpleQueryMessage::Row(row) = message else { continue };
                let names = ["other", "dora", "secret", "of dora"];
                let told = (0..row.len()).filter_map(|n| row.get(n)).find(|value| names.contains(value));
                assert_eq!(told, None, "{user} sees {table}");
            }
        }
        assert_eq!(client.query("SELECT 1 FROM fulmar.tokens", &[]).await.unwrap().len(), 0);
    }
    // A session of another is not ended, cancelled or locked out by who knows its number.
    let dora = log_in(&node, "other", "dora").await.unwrap();
    let pid: i64 = dora.query_one("SELECT pg_backend_pid() AS pid", &[]).await.unwrap().get(0);
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    for function in ["pg_cancel_backend", "pg_terminate_backend"] {
        assert_eq!(state(anna.batch_execute(&format!("SELECT {function}({pid})")).await), "42501");
    }
    anna.batch_execute("SELECT pg_advisory_lock(7)").await.unwrap();
    dora.batch_execute("SELECT pg_advisory_lock(7)").await.unwrap();
    drop((admin, anna, dora));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_each_role_may_do() {
    let (node, admin) = node_with_roles().await;
    let administration = [
        "CREATE DATABASE mine",
        "DROP DATABASE shop WITH (FORCE)",
        "ALTER DATABASE shop RENAME TO mine",
        "ALTER DATABASE shop SET max_size = '1TB'",
        "ALTER DATABASE shop RESET ALL",
        "CREATE USER mine SUPERUSER",
        "ALTER USER fulmar PASSWORD 'mine'",
        "ALTER USER anna PASSWORD 'mine'",
        "DROP USER bert",
        "GRANT CONNECT ON DATABASE other TO anna, bert, carl",
        "REVOKE CONNECT ON DATABASE shop FROM bert",
        "CREATE TOKEN mine",
        "CREATE TOKEN mine FOR DATABASE shop",
        "DROP TOKEN IF EXISTS mine",
        "VERIFY",
        "COPY DATABASE mine FROM STDIN (FORMAT sqlite)",
    ];
    for user in ["anna", "bert", "carl"] {
        for database in ["fulmar", "shop"] {
            let client = log_in(&node, database, user).await.unwrap();
            for statement in administration {
                assert_eq!(
                    state(client.batch_execute(statement).await),
                    "42501",
                    "{user} in {database}: {statement}"
                );
            }
        }
    }
    for (user, may_read, may_write) in [
        ("fulmar", true, true),
        ("anna", true, true),
        ("bert", true, true),
        ("carl", true, false),
        ("dora", false, false),
    ] {
        let client = match log_in(&node, "shop", user).await {
            Ok(client) => client,
            Err(error) => {
                assert!(!may_read, "{user}");
                assert_eq!(state(Err::<(), _>(error)), "42501", "{user}");
                continue;
            }
        };
        assert!(may_read, "{user}");
        client.query_one("SELECT b FROM t WHERE a = 1", &[]).await.unwrap();
        let writes = ["UPDATE t SET b = 'y'", "CREATE TABLE u (a)", "DROP TABLE u", "ANALYZE"];
        for statement in writes.into_iter().filter(|statement| may_write || !statement.starts_with("DROP")) {
            match client.batch_execute(statement).await {
                Ok(()) => assert!(may_write, "{user}: {statement}"),
                Err(error) => {
                    assert!(!may_write, "{user}: {statement}: {error}");
                    assert_eq!(state(Err::<(), _>(error)), "25006", "{user}: {statement}");
                }
            }
        }
        // What the role may do in one database it may not do in another.
        let elsewhere = log_in(&node, "other", user).await;
        assert_eq!(elsewhere.is_ok(), user == "fulmar", "{user}");
    }
    drop(admin);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_much_is_refused() {
    let (node, admin) = node_with_roles().await;
    admin.batch_execute("ALTER DATABASE shop SET transaction_memory = '8MB'").await.unwrap();
    admin.batch_execute("ALTER DATABASE shop SET statement_timeout = '500ms'").await.unwrap();
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
        // Depth and length.
        (format!("SELECT {}", deep("(", "1", ")")), "54000"),
        (format!("SELECT {}", deep("abs(", "1", ")")), "54000"),
        (format!("SELECT {}1", "- ".repeat(50_000)), "54000"),
        (format!("SELECT {}1", "1 + ".repeat(50_000)), "54000"),
        (format!("SELECT 1{}", " UNION ALL SELECT 1".repeat(50_000)), "54000"),
        (format!("SELECT {}1", "1, ".repeat(50_000)), "54000"),
        (format!("SELECT * FROM t{}", ", t".repeat(1000)), "54000"),
        (format!("SELECT * FROM {}", deep("(SELECT * FROM ", "t", ")")), "54000"),
        (format!("SELECT json('{}')", deep("[", "", "]")), "22P02"),
        // Patterns.
        (format!("SELECT 'x' LIKE '{}'", "%a".repeat(100_000)), "54000"),
        (format!("SELECT 'x' GLOB '{}'", "*a".repeat(100_000)), "54000"),
        ("SELECT 1 FROM pg_class WHERE relname ~ '(((a{100}){100}){100}){100}'".to_owned(), "2201B"),
        ("SELECT 1 FROM pg_class WHERE relname ~ '('".to_owned(), "2201B"),
        // Recursion: what it keeps of its rows is a temporary table. A view of itself, and common tables that double.
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
        (doubling(30), "54000"),
        // Time.
        (ENDLESS.to_owned(), "57014"),
        (
            "SELECT count(*) FROM pg_type a, pg_type b, pg_type c, pg_type d, pg_type e, pg_type f"
                .to_owned(),
            "57014",
        ),
    ] {
        gets(&anna, &statement, expected, "anna", &mut wrong).await;
    }
    // What SQLite holds beside pages: twenty values of a hundred megabytes, which take longer than others may.
    admin.batch_execute("ALTER DATABASE shop RESET statement_timeout").await.unwrap();
    let values: Vec<_> = (0..20).map(|more| format!("hex(zeroblob({}))", 50_000_000 + more)).collect();
    gets(&anna, &format!("SELECT length(max({}))", values.join(", ")), "53200", "anna", &mut wrong).await;
    // Triggers that call each other do not go round.
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
    // It is as well as before.
    let row = anna.query_one("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1);
    drop((admin, anna));
    node.stop().await;
}

/// Common tables of which each has the one before twice: a thousand million copies of the first, if they were all made.
fn doubling(depth: u32) -> String {
    let tables: Vec<_> =
        (1..=depth).map(|n| format!("a{n} AS (SELECT p.x FROM a{0} p, a{0} q)", n - 1)).collect();
    format!("WITH a0 AS (SELECT 1 AS x), {} SELECT count(*) FROM a{depth}", tables.join(", "))
}

/// What one message can hold keeps its session at work for seconds, in statements that are each over in no time. All
/// sessions are on one worker: others are answered meanwhile, and what runs can be cancelled, only if it gives way.
#[tokio::test(flavor = "multi_thread")]
async fn many_short_statements_leave_time_for_others() {
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
        assert_eq!(seen_at_work, 50, "the others have waited until it was over");
        token.cancel_query(tokio_postgres::NoTls).await.unwrap();
        assert_eq!(state(busy.await.unwrap()), "57014");
    }
    drop((shop, other));
    node.stop().await;
}

/// On one worker, a tenant with eight endless statements and one with a single one: each gets half of the time, not a share
/// for each statement, and who asks for little is answered. With three times the weight of the other it gets three times as much,
/// from the moment on when that is said.
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_tenant_leaves_time_for_others() {
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
    while admin.query_one(active, &[]).await.unwrap().get::<_, i64>(0) < 9 {}
    let busy_ms = async || {
        let stats =
            "SELECT busy_ms FROM fulmar.tenant_stats WHERE tenant IN ('shop', 'other') ORDER BY tenant";
        let rows = admin.query(stats, &[]).await.unwrap();
        [0, 1].map(|tenant| rows[tenant].get::<_, f64>(0))
    };
    for (cpu_share, times) in [(100, 1.0), (300, 3.0)] {
        admin.batch_execute(&format!("ALTER DATABASE other SET cpu_share = {cpu_share}")).await.unwrap();
        let before = busy_ms().await;
        let (other, shop) = loop {
            let now = busy_ms().await;
            let (other, shop) = (now[0] - before[0], now[1] - before[1]);
            if other + shop > 1000.0 {
                break (other, shop);
            }
        };
        let shop = times * shop;
        assert!(other > 0.7 * shop && shop > 0.7 * other, "{cpu_share}: {other} ms and {shop} ms");
    }
    for (statement, token) in busy {
        assert!(!statement.is_finished());
        token.cancel_query(tokio_postgres::NoTls).await.unwrap();
        assert_eq!(state(statement.await.unwrap()), "57014");
    }
    drop(admin);
    node.stop().await;
}

/// Nothing looks at the clock while SQLite compares two texts: that must not take their lengths' product.
#[tokio::test(flavor = "multi_thread")]
async fn texts_are_compared_in_the_time_of_their_lengths() {
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

    // They answer as SQLite's own do, and indexes may have them.
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
async fn what_a_session_names_has_bounds() {
    let (node, admin) = node_with_roles().await;
    let mut anna = log_in(&node, "shop", "anna").await.unwrap();
    // Parameters: as many as SQLite knows.
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
    const MOST: usize = 10_000;
    let prepared = futures::future::try_join_all((0..MOST).map(|_| anna.prepare("SELECT 1"))).await.unwrap();
    assert_eq!(state(anna.prepare("SELECT 1").await), "54000");
    let transaction = anna.transaction().await.unwrap();
    let bound = (0..MOST).map(|_| transaction.bind(&prepared[0], &[]));
    let portals = futures::future::try_join_all(bound).await.unwrap();
    assert_eq!(state(transaction.bind(&prepared[0], &[]).await.map(|_| ())), "54000");
    drop((portals, transaction));
    drop(prepared);
    anna.batch_execute("SELECT 1").await.unwrap();

    // What portals hold together, 256 MiB: their values ...
    let length = anna.prepare("SELECT length($1)").await.unwrap();
    let large = "x".repeat(50_000_000);
    for _ in 0..2 {
        let transaction = anna.transaction().await.unwrap();
        let mut portals = Vec::new();
        for _ in 0..5 {
            portals.push(transaction.bind(&length, &[&large]).await.unwrap());
        }
        assert_eq!(state(transaction.bind(&length, &[&large]).await.map(|_| ())), "54000");
        drop((portals, transaction)); // and nothing of it is held any more
    }
    // ... or, when they have been run, what is left of their answers.
    let rows = anna
        .prepare(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 7) \
             SELECT length($1), hex(zeroblob(500000)) FROM n",
        )
        .await
        .unwrap();
    let less = "x".repeat(20_000_000);
    let transaction = anna.transaction().await.unwrap();
    let mut portals = Vec::new();
    let refused = loop {
        let portal = match transaction.bind(&rows, &[&less]).await {
            Ok(portal) => portal,
            Err(refused) => break refused,
        };
        match transaction.query_portal(&portal, 1).await {
            Ok(rows) => assert_eq!(rows.len(), 1),
            Err(refused) => break refused,
        }
        portals.push(portal);
        assert!(portals.len() < 50, "nothing is refused");
    };
    assert_eq!(state(Err::<(), _>(refused)), "54000");
    assert!(portals.len() > 12, "{} answers of 7 MB each, the values of which are gone", portals.len());
    drop((portals, transaction));
    anna.batch_execute("SELECT 1").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_and_names_have_bounds() {
    let (node, admin) = node_with_roles().await;
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    let long = "x".repeat(1_000_000);
    // Names that others see keep the rule of names; names inside of a database are the database's own.
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

    // A message that is longer than 64 MiB ends the connection when its head has come.
    let mut stream = tokio::net::TcpStream::connect(node.gateway.local_addr()).await.unwrap();
    let length = 10_001_u32;
    stream.write_all(&[&length.to_be_bytes()[..], &196_608_u32.to_be_bytes()].concat()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await; // the end is what counts, not how it comes
    assert!(answer.is_empty(), "a start-up packet of {length} bytes");
    let too_long = anna.query_one("SELECT length($1)", &[&"x".repeat(70_000_000)]).await;
    assert!(too_long.is_err() && ends(&anna).await);
    log_in(&node, "shop", "anna").await.unwrap().batch_execute("SELECT 1").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}
