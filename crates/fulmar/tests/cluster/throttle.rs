//! Copies that are slowed down because latencies exceed their bounds.

use super::migrations::{ROWS, fill, final_report, newest_report, rows};
use super::private_stores::start_private;
use super::*;

/// Takes much longer than a millisecond.
const SLOW: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) \
                    SELECT count(*) FROM n";
const MAX_BYTES_PER_S: u64 = 200 << 10;

/// Moves `shop`. When its copy has begun, `busy` runs slow statements.
async fn move_beside(cluster: &Cluster, to: usize, busy: Option<&str>) -> serde_json::Value {
    let number = newest_report(cluster, 0, "shop").map_or(0, |report| report["number"].as_u64().unwrap());
    let (url, sql) = (
        cluster.url(0, "fulmar"),
        format!("ALTER DATABASE shop MOVE TO '{}' USING live LIMIT '200kB'", cluster.name(to)),
    );
    let observer = connect(cluster, 0, "fulmar").await;
    // The statements begin while the copy runs, which takes 10 s: the session is open before.
    let busy = match busy {
        Some(database) => Some(connect(cluster, 0, database).await),
        None => None,
    };
    // What was slow before the copy does not count.
    let used = "SELECT tenant FROM fulmar.load WHERE requests_per_s > 0 AND tenant <> 'fulmar'";
    wait_until("no load", async || observer.query(used, &[]).await.unwrap().is_empty()).await;
    let moving = tokio::spawn(async move { try_connect(&url).await?.batch_execute(&sql).await });
    // The latencies before the copy have been read by then.
    let begun = "SELECT number FROM fulmar.migrations WHERE tenant = 'shop' AND step = 'copying' \
                 AND expected_bytes > 0";
    wait_until("the copy", async || !observer.query(begun, &[]).await.unwrap().is_empty()).await;
    if let Some(client) = busy {
        for _ in 0..60 {
            with_timeout(SLOW, client.batch_execute(SLOW)).await.unwrap();
        }
    }
    with_timeout("the move", moving).await.unwrap().unwrap();
    assert_eq!((owner(cluster, 0, "shop").await, rows(cluster, 0, "shop").await), (to, ROWS));
    final_report(cluster, 0, "shop", number + 1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_is_slowed_down_while_a_latency_exceeds_its_bound() {
    let cluster = start_private().await;
    fill(&cluster, "shop").await;
    let source = owner(&cluster, 0, "shop").await;
    let to = (source + 1) % 3;
    create(&cluster, "neighbour").await;
    if owner(&cluster, 0, "neighbour").await != to {
        move_to(&cluster, 0, "neighbour", to).await;
    }
    for database in ["shop", "neighbour"] {
        let sql = format!("ALTER DATABASE {database} SET latency_objective = '1ms'");
        execute(&cluster, 0, "fulmar", &sql).await;
    }
    // At the destination, at the source, and the database itself.
    for (to, busy) in [(to, "neighbour"), (source, "neighbour"), (to, "shop")] {
        let report = move_beside(&cluster, to, Some(busy)).await;
        assert!(report["throttled_ms"].as_u64().unwrap() > 0, "{busy}: {report}");
        assert!(report["lowest_bytes_per_s"].as_u64().unwrap() < MAX_BYTES_PER_S, "{busy}: {report}");
    }
    // The statements of this test are within this bound on any machine.
    for database in ["shop", "neighbour", "fulmar"] {
        let sql = format!("ALTER DATABASE {database} SET latency_objective = '1h'");
        execute(&cluster, 0, "fulmar", &sql).await;
    }
    let report = move_beside(&cluster, source, None).await;
    assert_eq!(report["throttled_ms"], 0, "{report}");
    assert!(report.get("lowest_bytes_per_s").is_none(), "{report}");
}
