//! The load monitor: reports of the node and its partitions, and accesses per key.

use std::time::Duration;

use fulmar_gateway::{KeyMode, KeyMonitoring};
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::common::{Node, connect, wait_until};

async fn node(mode: KeyMode) -> Node {
    let window = Duration::from_millis(100);
    Node::start(|config| {
        config.insecure = true;
        config.memory_bytes = 64 << 20;
        config.cpus = Some(1.5);
        config.key_monitoring = KeyMonitoring { mode, window, keys: 3, watermark: 0.0 };
    })
    .await
}

/// The rows of a query as text, columns separated by `|`.
async fn rows(client: &Client, sql: &str) -> Vec<String> {
    let messages = client.simple_query(sql).await.unwrap();
    let text = |message: SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|column| row.get(column).unwrap_or("-")).collect::<Vec<_>>().join("|"))
        }
        _ => None,
    };
    messages.into_iter().filter_map(text).collect()
}

async fn number(client: &Client, sql: &str) -> f64 {
    rows(client, sql).await.first().and_then(|value| value.parse().ok()).unwrap_or(0.0)
}

/// Half of the accesses are to key 7 of `items`, a quarter to other keys, and a quarter to no key.
async fn access(shop: &Client) {
    let by_key = shop.prepare("SELECT v FROM items WHERE id = $1").await.unwrap();
    for round in 0..50i64 {
        shop.query(&by_key, &[&7i64]).await.unwrap();
        shop.batch_execute("UPDATE items SET v = v + 1 WHERE id = 7").await.unwrap();
        shop.query(&by_key, &[&(round % 10 + 10)]).await.unwrap();
        shop.query("SELECT count(*) FROM items", &[]).await.unwrap();
    }
}

async fn shop(node: &Node) -> Client {
    let shop = node.database("shop").await;
    shop.batch_execute("CREATE TABLE items (id BIGINT PRIMARY KEY, v BIGINT)").await.unwrap();
    let numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100)";
    shop.batch_execute(&format!("INSERT INTO items {numbers} SELECT i, 0 FROM n")).await.unwrap();
    shop
}

#[tokio::test(flavor = "multi_thread")]
async fn hot_keys_are_shown_with_their_share() {
    // A watermark of 0 is always reached, so `auto` samples like `on`.
    for mode in [KeyMode::Auto, KeyMode::On, KeyMode::Full] {
        let node = node(mode).await;
        let (shop, admin) = (shop(&node).await, node.client("fulmar").await);
        let listing = "SELECT key, sampled, share, error, node || ' ' || table_name FROM fulmar.hot_keys \
                       WHERE tenant = 'shop'";
        // Checked in one answer, because another window may have another result.
        let mut listed = Vec::new();
        // Of 30 sampled accesses, one with a share of one half is less than a fifth in 1 of 3,000
        // cases; a window with that is not the last one.
        wait_until("the hot key", async || {
            access(&shop).await;
            listed = admin.query(listing, &[]).await.unwrap();
            let has = |key: Option<&str>, sampled: i64, share: f64| {
                listed.iter().any(|row| {
                    row.get::<_, Option<&str>>(0) == key
                        && row.get::<_, i64>(1) >= sampled
                        && row.get::<_, f64>(2) > share
                })
            };
            has(Some("7"), 30, 0.2) && has(None, 0, 0.05)
        })
        .await;
        let is_key = |row: &&tokio_postgres::Row| row.get::<_, Option<&str>>(0).is_some();
        let hottest: Vec<_> =
            listed.iter().filter(|row| row.get::<_, Option<&str>>(0) == Some("7")).collect();
        assert_eq!(hottest.len(), 1, "{mode:?}: {listed:?}");
        assert_eq!((hottest[0].get::<_, f64>(3), hottest[0].get::<_, &str>(4)), (0.0, "local items"));
        assert!(listed.iter().filter(is_key).count() <= 3, "3 is the maximum: {listed:?}");
        for row in &listed {
            let (share, error): (f64, f64) = (row.get(2), row.get(3));
            assert!((0.0..=1.0).contains(&share) && (0.0..=share).contains(&error), "{row:?}");
        }
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn composite_keys_lists_and_changes_are_counted() {
    let node = node(KeyMode::Full).await;
    let (shop, admin) = (shop(&node).await, node.client("fulmar").await);
    shop.batch_execute("CREATE TABLE lines (shop TEXT, n BIGINT, v BIGINT, PRIMARY KEY (shop, n))")
        .await
        .unwrap();
    // A window in which only this statement is run has only its keys. `-` is no key.
    let waits_for = async |sql: &str, expected: &[&str]| {
        let listing = "SELECT table_name, key FROM fulmar.hot_keys \
                       WHERE tenant = 'shop' AND share > 0 ORDER BY key";
        wait_until(sql, async || {
            for _ in 0..10 {
                shop.batch_execute(sql).await.unwrap();
            }
            rows(&admin, listing).await == expected
        })
        .await;
    };
    waits_for("SELECT v FROM lines WHERE n = 2 AND shop = 'a' AND v > 0", &["lines|'a', 2"]).await;
    waits_for("SELECT v FROM items WHERE id IN (4, 5)", &["items|4", "items|5"]).await;
    waits_for("DELETE FROM lines WHERE (n = 3) AND (lines.shop = 'b')", &["lines|'b', 3"]).await;
    waits_for("INSERT OR REPLACE INTO lines VALUES ('c', 4, 0)", &["lines|'c', 4"]).await;
    waits_for("BEGIN; UPDATE items SET v = 0 WHERE id = 6; COMMIT", &["items|6"]).await;
    waits_for("SELECT v FROM lines WHERE n = 2", &["-|-"]).await;
    shop.batch_execute("CREATE TABLE named (a TEXT, b TEXT)").await.unwrap();
    shop.batch_execute("INSERT INTO named VALUES ('x', 'y')").await.unwrap();
    shop.batch_execute("ALTER TABLE ONLY named ADD CONSTRAINT named_pkey PRIMARY KEY (b)").await.unwrap();
    waits_for("SELECT a FROM named WHERE b = 'y'", &["named|'y'"]).await;
    // The primary key is that of the new table.
    shop.batch_execute("DROP TABLE lines; CREATE TABLE lines (shop TEXT, n BIGINT PRIMARY KEY)")
        .await
        .unwrap();
    waits_for("SELECT shop FROM lines WHERE n = 2", &["lines|2"]).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn report_of_a_node_under_load_has_its_tenant() {
    let node = node(KeyMode::Off).await;
    let (shop, admin) = (shop(&node).await, node.client("fulmar").await);
    let sessions = node.gateway.partition_sessions();
    let mut report = sessions.load_report(true);
    wait_until("the load", async || {
        access(&shop).await;
        report = sessions.load_report(true);
        report.partitions.iter().any(|of| of.tenant == "shop" && of.cpu > 0.0 && of.writes_per_s > 0.0)
    })
    .await;
    assert_eq!((report.node.as_str(), report.capacity, report.memory), ("local", 1.5, 64 << 20));
    assert!(report.cpu > 0.0 && report.window_s > 0.0 && report.memory_used > 0, "{report:?}");
    let of = report.partitions.iter().find(|of| of.tenant == "shop").unwrap();
    assert!(
        of.requests_per_s > 0.9 * (of.reads_per_s + of.writes_per_s) && of.log_bytes_per_s > 0.0,
        "{of:?}"
    );
    assert!(of.latency_ms > 0.0 && of.p50_ms > 0.0 && of.p50_ms <= of.p95_ms && of.p95_ms <= of.p99_ms);
    assert!(of.size > 0 && of.memory > 0 && of.keys.is_none(), "{of:?}");

    let load =
        "SELECT count(*) FROM fulmar.load WHERE tenant = 'shop' AND memory_bytes > 0 AND node = 'local'";
    assert_eq!(number(&admin, load).await, 1.0);
    let node_load = "SELECT capacity, memory_bytes, error FROM fulmar.node_load WHERE cpu > 0";
    wait_until("the node's load", async || {
        access(&shop).await;
        rows(&admin, node_load).await == ["1.5|67108864|-"]
    })
    .await;
    assert_eq!(rows(&admin, "SELECT key FROM fulmar.hot_keys").await, [""; 0], "keys are not monitored");
    // An idle partition keeps its memory, and has no load.
    wait_until("the end of the load", async || {
        number(&admin, "SELECT requests_per_s + cpu FROM fulmar.load WHERE tenant = 'shop'").await == 0.0
    })
    .await;
    assert_eq!(number(&admin, load).await, 1.0);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_see_only_tenants_that_they_can_connect_to() {
    let node = Node::start(|config| {
        let window = Duration::from_millis(100);
        config.key_monitoring = KeyMonitoring { mode: KeyMode::Full, window, ..KeyMonitoring::default() };
    })
    .await;
    node.catalog.alter_user_password("fulmar", Some(fulmar_gateway::scram_verifier("x"))).await.unwrap();
    let log_in = async |database: &str, user: &str| {
        let mut config = node.config(database, user);
        config.password("x");
        connect(&config).await.unwrap()
    };
    let admin = log_in("fulmar", "fulmar").await;
    for user in ["anna", "bert"] {
        admin.batch_execute(&format!("CREATE USER {user} PASSWORD 'x'")).await.unwrap();
        admin.batch_execute(&format!("CREATE DATABASE of_{user} OWNER {user}")).await.unwrap();
    }
    let (anna, bert) = (log_in("of_anna", "anna").await, log_in("of_bert", "bert").await);
    for client in [&anna, &bert] {
        client
            .batch_execute("CREATE TABLE t (a BIGINT PRIMARY KEY); INSERT INTO t VALUES (1)")
            .await
            .unwrap();
    }
    let tenants = "SELECT DISTINCT tenant FROM fulmar.hot_keys WHERE key = '1' ORDER BY 1";
    wait_until("both tenants are monitored", async || {
        for client in [&anna, &bert] {
            client.batch_execute("SELECT * FROM t WHERE a = 1").await.unwrap();
        }
        rows(&admin, tenants).await == ["of_anna", "of_bert"]
    })
    .await;
    for (table, own) in [("load", 1.0), ("node_load", 0.0)] {
        let sql = format!("SELECT count(*) FROM fulmar.{table}");
        assert_eq!(number(&anna, &sql).await, own, "{table}");
    }
    let foreign = "SELECT count(*) FROM fulmar.hot_keys WHERE tenant <> 'of_anna'";
    assert_eq!(number(&anna, foreign).await, 0.0);
    node.stop().await;
}
