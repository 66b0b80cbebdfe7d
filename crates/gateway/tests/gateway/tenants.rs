//! Tenants, users, privileges, passwords.

use std::time::Instant;

use futures::StreamExt;
use futures::future::try_join_all;
use futures::stream::FuturesUnordered;

use crate::common::{Node, connect, ends, state};

#[tokio::test(flavor = "multi_thread")]
async fn databases_can_be_created_copied_renamed_and_dropped() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    admin.batch_execute("CREATE DATABASE base").await.unwrap();
    let base = node.client("base").await;
    base.batch_execute("CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (7)").await.unwrap();
    admin.batch_execute("CREATE DATABASE copy TEMPLATE base").await.unwrap();
    let copy = node.client("copy").await;
    copy.batch_execute("INSERT INTO t VALUES (8)").await.unwrap();
    let sum = async |client: &tokio_postgres::Client| {
        client.query_one("SELECT count(*) FROM t", &[]).await.unwrap().get::<_, i64>(0)
    };
    assert_eq!((sum(&base).await, sum(&copy).await), (1, 2));

    assert_eq!(state(admin.batch_execute("CREATE DATABASE base").await), "42P04");
    assert_eq!(state(admin.batch_execute("CREATE DATABASE x TEMPLATE missing").await), "3D000");
    assert_eq!(state(admin.batch_execute("CREATE DATABASE x OWNER missing").await), "42704");
    assert_eq!(state(admin.batch_execute("DROP DATABASE fulmar").await), "55006");
    assert_eq!(state(admin.batch_execute("DROP DATABASE missing").await), "3D000");
    admin.batch_execute("DROP DATABASE IF EXISTS missing").await.unwrap();
    assert_eq!(state(admin.batch_execute("BEGIN; CREATE DATABASE x").await), "25001");
    admin.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(state(base.batch_execute("CREATE DATABASE x").await), "0A000");

    admin.batch_execute("ALTER DATABASE copy RENAME TO \"The Copy\"").await.unwrap();
    assert_eq!(sum(&node.client("The Copy").await).await, 2);
    assert_eq!(state(admin.batch_execute("DROP DATABASE base").await), "55006");
    admin.batch_execute("DROP DATABASE base WITH (FORCE)").await.unwrap();
    assert!(base.query("SELECT 1 FROM t", &[]).await.is_err() && ends(&base).await);
    assert_eq!(state(connect(&node.config("base", "anna")).await.map(|_| ())), "3D000");
    node.stop().await;
}

/// Wrong passwords delay the next responses for that user, including those to the correct password,
/// and no other user's. It makes no difference whether the user exists.
#[tokio::test(flavor = "multi_thread")]
async fn guessing_passwords_is_slow() {
    let node = Node::start(|_| {}).await;
    for user in ["anna", "bert"] {
        let verifier = fulmar_gateway::scram_verifier("right");
        node.catalog.create_user(user, true, Some(verifier)).await.unwrap();
    }
    let log_in = |user: &str, password: &str| {
        let mut config = node.config("fulmar", user);
        config.password(password);
        async move {
            let start = Instant::now();
            let outcome = connect(&config).await;
            (outcome, start.elapsed().as_millis())
        }
    };
    for min_ms in [0, 100, 200, 400, 800] {
        let ((anna, anna_ms), (unknown, unknown_ms)) =
            tokio::join!(log_in("anna", "wrong"), log_in("unknown", "wrong"));
        assert_eq!((state(anna), state(unknown)), ("28P01".to_owned(), "28P01".to_owned()));
        assert!(anna_ms >= min_ms && unknown_ms >= min_ms, "{min_ms}: {anna_ms}, {unknown_ms}");
    }
    // The unit tests check without a clock that other users are not delayed.
    let slow = tokio::spawn(log_in("anna", "right"));
    let bert_logins = try_join_all((0..20).map(|_| async { log_in("bert", "right").await.0 })).await;
    let (anna, elapsed_ms) = slow.await.unwrap();
    assert!(anna.is_ok() && elapsed_ms >= 1600, "{elapsed_ms}");
    drop((anna, bert_logins.unwrap()));

    // Concurrent guesses are not answered sooner than sequential ones.
    let start = Instant::now();
    let mut guesses: FuturesUnordered<_> = (0..50).map(|_| log_in("carl", "wrong")).collect();
    for min_ms in [0, 100, 300, 700, 1500] {
        let (carl, _) = guesses.next().await.unwrap();
        assert_eq!(state(carl), "28P01");
        let elapsed_ms = start.elapsed().as_millis();
        assert!(elapsed_ms >= min_ms, "{elapsed_ms} instead of {min_ms}");
    }
    drop(guesses);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn passwords_and_privileges_are_checked() {
    let node = Node::start(|_| {}).await;
    let verifier = fulmar_gateway::scram_verifier("top secret");
    node.catalog.alter_user_password("fulmar", Some(verifier)).await.unwrap();
    let log_in = async |database: &str, user: &str, password: &str| {
        let mut config = node.config(database, user);
        config.password(password);
        connect(&config).await
    };
    let login_error = async |database: &str, user: &str, password: &str| {
        state(log_in(database, user, password).await.map(|_| ()))
    };
    let admin = log_in("fulmar", "fulmar", "top secret").await.unwrap();
    assert_eq!(login_error("fulmar", "fulmar", "wrong").await, "28P01");
    assert_eq!(login_error("fulmar", "unknown", "top secret").await, "28P01");

    admin.batch_execute("CREATE USER anna PASSWORD 'a'; ").await.unwrap();
    admin.batch_execute("CREATE ROLE bert WITH LOGIN PASSWORD 'b'").await.unwrap();
    admin.batch_execute("CREATE DATABASE shop OWNER anna").await.unwrap();
    let anna = log_in("shop", "anna", "a").await.unwrap();
    assert_eq!(login_error("fulmar", "anna", "a").await, "42501");
    assert_eq!(login_error("shop", "bert", "b").await, "42501");
    // Only authenticated users learn whether a database exists.
    assert_eq!(login_error("missing", "bert", "wrong").await, "28P01");
    assert_eq!(login_error("missing", "bert", "b").await, "3D000");

    admin.batch_execute("GRANT CONNECT ON DATABASE shop, fulmar TO bert").await.unwrap();
    log_in("shop", "bert", "b").await.unwrap();
    let bert = log_in("fulmar", "bert", "b").await.unwrap();
    assert_eq!(state(bert.batch_execute("CREATE DATABASE x").await), "42501");
    assert_eq!(state(bert.batch_execute("ALTER USER fulmar PASSWORD 'mine'").await), "42501");
    assert_eq!(state(admin.batch_execute("DROP USER anna").await), "55006");
    admin.batch_execute("REVOKE CONNECT ON DATABASE shop FROM bert").await.unwrap();
    assert_eq!(login_error("shop", "bert", "b").await, "42501");

    // Databases without the CONNECT privilege are not listed.
    let names = async |client: &tokio_postgres::Client| {
        let rows = client.query("SELECT datname FROM pg_database", &[]).await.unwrap();
        rows.iter().map(|row| row.get::<_, String>(0)).collect::<Vec<_>>()
    };
    assert_eq!(names(&admin).await, ["fulmar", "shop"]);
    assert_eq!(names(&anna).await, ["shop"]);
    assert_eq!(names(&bert).await, ["fulmar"]);

    admin.batch_execute("ALTER USER bert PASSWORD 'c'").await.unwrap();
    assert_eq!(login_error("fulmar", "bert", "b").await, "28P01");
    log_in("fulmar", "bert", "c").await.unwrap();
    admin.batch_execute("DROP USER bert").await.unwrap();
    assert_eq!(login_error("fulmar", "bert", "c").await, "28P01");
    node.stop().await;
}
