//! Attempts to escape from a tenant, and the privileges of each role, tested over the wire as a
//! hostile tenant would.
//!
//! - Files, modules, extensions, PRAGMAs, SQLite's own tables:
//!   [`statements_cannot_escape_the_tenant`]; see also `engine/tests/sql`.
//! - Procedures: [`procedures_cannot_escape_the_tenant`]; see also `procedures`.
//! - Other tenants: [`other_tenants_are_inaccessible`]; see also `statistics`.
//! - Administration, by role: [`privileges_of_each_role`]; see also `roles`, `limits`, `tokens`.
//! - Memory, deep, long and recursive statements, patterns:
//!   [`bounds::excessive_statements_are_rejected`]; see also `limits`, `engine/tests/limits`,
//!   `fuzz`.
//! - CPU: [`bounds::cpu_time_is_shared_fairly_between_tenants`] (`cpu_share`),
//!   [`bounds::many_short_statements_do_not_block_other_sessions`]; see also `limits`
//!   (`statement_timeout`).
//! - Connections: see `limits` (`max_connections`, and the limit of the node) and `tenants`
//!   (guessing passwords).
//! - Huge messages and names, many parameters, prepared statements and portals:
//!   [`bounds::messages_and_names_are_limited`],
//!   [`bounds::parameters_statements_and_portals_are_limited`]; see also `wire`, `fuzz`.

mod bounds;

use crate::common::{Node, connect, state};
use tokio_postgres::{Client, Error};

async fn log_in(node: &Node, database: &str, user: &str) -> Result<Client, Error> {
    let mut config = node.config(database, user);
    config.password(user);
    connect(&config).await
}

/// A node with users of each role. Each password is the user's name. `fulmar` is a superuser;
/// `anna` owns `shop`, `bert` may read and write it, `carl` may read it, and `dora` has no
/// privilege on it. `dora` owns `other`.
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
        // So that statements fail for lack of privileges, and not because of the database.
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

/// Records an error if the statement does not fail with the expected SQLSTATE.
async fn check_sqlstate(
    client: &Client,
    statement: &str,
    expected: &str,
    role: &str,
    wrong: &mut Vec<String>,
) {
    let seen = match client.batch_execute(statement).await {
        Ok(()) => "no error".to_owned(),
        Err(error) => error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned()),
    };
    if seen != expected {
        let shown: String = statement.chars().take(60).collect();
        wrong.push(format!("{role}: {shown}: {seen} instead of {expected}"));
    }
}

/// Statements that are forbidden for every tenant, with the expected SQLSTATEs.
fn forbidden_statements() -> Vec<(String, &'static str)> {
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
        ("CREATE TABLE \"sqlite_system_fulmar.history\" (a)", "42601"),
        ("CREATE VIEW \"sqlite_system_fulmar.history\" AS SELECT 1", "42601"),
        ("ALTER TABLE t RENAME TO \"sqlite_system_fulmar.history\"", "42601"),
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
async fn statements_cannot_escape_the_tenant() {
    let (node, admin) = node_with_roles().await;
    // A superuser has no more access to the machine than other users.
    let root = log_in(&node, "shop", "fulmar").await.unwrap();
    let mut wrong = Vec::new();
    for (client, role) in [(&root, "superuser"), (&log_in(&node, "shop", "anna").await.unwrap(), "owner")] {
        for (statement, expected) in forbidden_statements() {
            check_sqlstate(client, &statement, expected, role, &mut wrong).await;
        }
        let sound =
            client.query_one("SELECT integrity_check FROM pragma_integrity_check", &[]).await.unwrap();
        assert_eq!(sound.get::<_, &str>(0), "ok");
    }
    // Read-only users get an error for all of them, whatever its SQLSTATE.
    let carl = log_in(&node, "shop", "carl").await.unwrap();
    for (statement, _) in forbidden_statements() {
        assert!(carl.batch_execute(&statement).await.is_err(), "{statement}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(!std::path::Path::new("/tmp/stolen").exists());
    drop((admin, root, carl));
    node.stop().await;
}

/// The same from views and triggers, which run in the session of another user.
#[tokio::test(flavor = "multi_thread")]
async fn views_and_triggers_cannot_escape_the_tenant() {
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
    // The superuser's session was not terminated.
    admin.batch_execute("SELECT 1").await.unwrap();
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn system_tables_cannot_be_replaced_by_a_tenant() {
    let (node, _admin) = node_with_roles().await;
    let anna = log_in(&node, "shop", "anna").await.unwrap();
    let superuser = log_in(&node, "shop", "fulmar").await.unwrap();
    anna.batch_execute(
        "CREATE TABLE \"fulmar.limits\" AS SELECT 'of anna' AS name;
         CREATE TABLE l (table_name);
         ALTER TABLE l RENAME TO \"information_schema.tables\"",
    )
    .await
    .unwrap();
    for client in [&anna, &superuser] {
        let limits = client.query("SELECT name FROM fulmar.limits", &[]).await.unwrap();
        assert!(limits.iter().any(|row| row.get::<_, &str>(0) == "statement_timeout"));
        let tables = "SELECT count(*) FROM information_schema.tables WHERE table_name = 't'";
        assert_eq!(client.query_one(tables, &[]).await.unwrap().get::<_, i64>(0), 1);
    }
    let error = anna.batch_execute("SELECT * FROM fulmar.unknown").await.unwrap_err();
    assert_eq!(error.as_db_error().unwrap().message(), "no such table: fulmar.unknown");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn procedures_cannot_escape_the_tenant() {
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
        check_sqlstate(&anna, "CALL p()", expected, body, &mut wrong).await;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    drop((admin, anna));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_tenants_are_inaccessible() {
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
        // No virtual table contains a trace of the other tenant.
        let sql = "SELECT DISTINCT replace(m.name, 'sqlite_system_', '') FROM pragma_module_list AS m, pg_am \
                   WHERE m.name LIKE 'pg~_%' ESCAPE '~' OR m.name LIKE 'sqlite~_system~_%' ESCAPE '~' ORDER BY 1";
        let tables = client.query(sql, &[]).await.unwrap();
        assert!(tables.len() > 60, "{}", tables.len());
        for table in tables {
            let table = table.get::<_, &str>(0);
            for message in client.simple_query(&format!("SELECT * FROM {table}")).await.unwrap() {
                let tokio_postgres::SimpleQueryMessage::Row(row) = message else { continue };
                let names = ["other", "dora", "secret", "of dora"];
                let leaked = (0..row.len()).filter_map(|n| row.get(n)).find(|value| names.contains(value));
                assert_eq!(leaked, None, "{user} sees {table}");
            }
        }
        assert_eq!(client.query("SELECT 1 FROM fulmar.tokens", &[]).await.unwrap().len(), 0);
    }
    // The sessions of another tenant cannot be terminated, cancelled or blocked, even if the
    // process id is known.
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
async fn privileges_of_each_role() {
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
        // A privilege on one database is not valid for another.
        let elsewhere = log_in(&node, "other", user).await;
        assert_eq!(elsewhere.is_ok(), user == "fulmar", "{user}");
    }
    drop(admin);
    node.stop().await;
}
