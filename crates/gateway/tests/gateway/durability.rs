//! Durability of a tenant's commits: choosing, changing and showing it through SQL.

use std::sync::Arc;

use crate::common::{Node, state, wait_until, with_timeout};
use fulmar_store::{Backend, FailureKind, FaultyStore, Store, StoreFault, StoreOperation};
use tokio_postgres::Client;

async fn shown(client: &Client, database: &str) -> String {
    let sql = "SELECT value FROM fulmar.limits WHERE tenant = $1 AND name = 'durability'";
    client.query_one(sql, &[&database]).await.unwrap().get(0)
}

async fn log_objects(store: &Backend) -> usize {
    store.list("logs", None).await.unwrap().names.len()
}

/// Retries while the session that was just closed is still registered.
async fn alter(admin: &Client, sql: &str) {
    let altered = async {
        while let Err(error) = admin.batch_execute(sql).await {
            assert_eq!(error.code().unwrap().code(), "55006", "{error}");
        }
    };
    with_timeout(sql, altered).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn durability_can_be_set_and_changed() {
    let store = Backend::memory();
    let objects = store.clone();
    let node =
        Node::on_engine(|config| config.insecure = true, |engine| engine.store = Some(Arc::new(store))).await;
    let admin = node.client("fulmar").await;
    admin.batch_execute("CREATE DATABASE plain").await.unwrap();
    assert_eq!(log_objects(&objects).await, 0, "the shared log must not be opened before it is needed");
    admin.batch_execute("CREATE DATABASE safe WITH DURABILITY = shared").await.unwrap();
    assert_eq!(
        (shown(&admin, "plain").await, shown(&admin, "safe").await),
        ("local".into(), "shared".into())
    );
    let plain = node.client("plain").await;
    let before = log_objects(&objects).await;
    plain.batch_execute("CREATE TABLE t(v); INSERT INTO t VALUES (1)").await.unwrap();
    assert_eq!(log_objects(&objects).await, before);
    let safe = node.client("safe").await;
    safe.batch_execute("CREATE TABLE t(v)").await.unwrap();
    safe.batch_execute("INSERT INTO t VALUES (1)").await.unwrap();
    assert_eq!(log_objects(&objects).await, before + 2);

    let change = "ALTER DATABASE plain SET durability = 'shared'";
    assert_eq!(state(admin.batch_execute(change).await), "55006", "a session is connected");
    drop(plain);
    alter(&admin, change).await;
    assert_eq!(shown(&admin, "plain").await, "shared");
    let plain = node.client("plain").await;
    plain.batch_execute("INSERT INTO t VALUES (2)").await.unwrap();
    assert_eq!(plain.query("SELECT v FROM t", &[]).await.unwrap().len(), 2);
    assert_eq!(log_objects(&objects).await, before + 3);

    drop(safe);
    alter(&admin, "ALTER DATABASE safe RESET durability").await;
    assert_eq!(shown(&admin, "safe").await, "local");
    let safe = node.client("safe").await;
    safe.batch_execute("INSERT INTO t VALUES (2)").await.unwrap();
    assert_eq!(safe.query("SELECT v FROM t", &[]).await.unwrap().len(), 2);
    assert_eq!(log_objects(&objects).await, before + 3);

    let sql = "SELECT details FROM fulmar.events WHERE kind = 'durability.changed' AND database = 'plain'";
    assert_eq!(admin.query(sql, &[]).await.unwrap().len(), 1);
    // The shutdown must not wait for users of the shared log.
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_durability_is_rejected() {
    let node = Node::insecure().await;
    let admin = node.client("fulmar").await;
    admin.batch_execute("CREATE DATABASE shop").await.unwrap();
    for (sql, expected) in [
        ("ALTER DATABASE shop SET durability = 'replicated'", "22023"),
        ("CREATE DATABASE other DURABILITY 'no''ne'", "22023"),
        ("CREATE DATABASE other DURABILITY", "42601"),
        ("ALTER DATABASE missing SET durability = 'shared'", "3D000"),
    ] {
        assert_eq!(state(admin.batch_execute(sql).await), expected, "{sql}");
    }
    // No detail suggests terminating sessions, which would not help.
    let error = admin.batch_execute("ALTER DATABASE fulmar SET durability = 'shared'").await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!((error.code().code(), error.detail()), ("55006", None));
    assert_eq!(error.message(), "system database \"fulmar\" always has local durability");
    // The failed statements created nothing.
    admin.batch_execute("CREATE DATABASE other DURABILITY 'shared'").await.unwrap();
    admin.batch_execute("DROP DATABASE other").await.unwrap();
    admin.batch_execute("CREATE DATABASE other").await.unwrap();
    assert_eq!(shown(&admin, "other").await, "local");
}

/// If the shared log fails, local databases continue to work, and the node remains healthy for load
/// balancers. The health text reports the failure.
#[tokio::test(flavor = "multi_thread")]
async fn shared_log_failure_is_reported_and_local_databases_continue() {
    let store = FaultyStore::new(Arc::new(Backend::memory()));
    let faulty = store.clone();
    let node =
        Node::on_engine(|config| config.insecure = true, |engine| engine.store = Some(Arc::new(store))).await;
    let admin = node.client("fulmar").await;
    admin.batch_execute("CREATE DATABASE plain").await.unwrap();
    admin.batch_execute("CREATE DATABASE safe DURABILITY shared").await.unwrap();
    let (plain, safe) = (node.client("plain").await, node.client("safe").await);
    for client in [&plain, &safe] {
        client.batch_execute("CREATE TABLE t(v)").await.unwrap();
    }
    assert!(node.health().await.ends_with("\r\n\r\nok\n"));
    faulty.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
    let waiting = tokio::spawn(async move { safe.batch_execute("INSERT INTO t VALUES (1)").await });
    event(&admin, "shared_log.failed").await;
    let health = node.health().await;
    assert!(
        health.starts_with("HTTP/1.1 200") && health.contains("shared databases are not accepted"),
        "{health}"
    );
    assert!(node.get("/metrics", "").await.contains("\nfulmar_shared_log_available 0\n"));
    plain.batch_execute("INSERT INTO t VALUES (1)").await.unwrap();
    assert!(!waiting.is_finished(), "the outcome of the commit must not be reported before it is known");
    faulty.always(StoreOperation::Put, None);
    waiting.await.unwrap().unwrap();
    event(&admin, "shared_log.works").await;
    assert!(node.health().await.ends_with("\r\n\r\nok\n"));
    let local = "SELECT 1 FROM fulmar.events WHERE kind LIKE 'log.%'";
    assert!(admin.query(local, &[]).await.unwrap().is_empty(), "the local log must not report a failure");
    drop((plain, admin));
    node.stop().await;
}

/// Waits for an event of this kind.
async fn event(admin: &Client, kind: &str) {
    let sql = "SELECT 1 FROM fulmar.events WHERE kind = $1";
    wait_until(kind, async || !admin.query(sql, &[&kind]).await.unwrap().is_empty()).await;
}
