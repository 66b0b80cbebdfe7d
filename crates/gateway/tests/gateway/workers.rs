//! Sessions that move between workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Node, with_timeout};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::{Client, Statement};

const SESSIONS: i64 = 12;
/// The number of moves to wait for. With three active workers, eight of the sessions belong to
/// another worker than the first; this is half of them.
const MOVES: i64 = 4;
/// Takes several hundred microseconds.
const WORK: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) \
                    SELECT CAST(count(*) + $1::int8 AS BIGINT) FROM n";

/// Prepared statements, settings and temporary tables move with a session, and the client does not
/// notice. The test sets the number of active workers. The tests of `worker_scaling` cover how that
/// number is chosen.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_move_to_the_active_workers() {
    let active = Arc::new(AtomicUsize::new(1));
    let node = Node::start(|config| {
        config.insecure = true;
        config.workers = 3;
        config.active_workers = Some(active.clone());
    })
    .await;
    let owner = node.database("t1").await;
    owner.batch_execute("CREATE TABLE t(k INTEGER PRIMARY KEY, n INTEGER)").await.unwrap();
    let mut sessions = Vec::new();
    for number in 0..SESSIONS {
        let client = node.client("t1").await;
        client.batch_execute(&format!("SET application_name = 'a{number}'")).await.unwrap();
        client
            .batch_execute(&format!("CREATE TEMP TABLE own(n INTEGER); INSERT INTO own VALUES ({number})"))
            .await
            .unwrap();
        client.execute("INSERT INTO t VALUES ($1, 0)", &[&number]).await.unwrap();
        let statement = client.prepare(WORK).await.unwrap();
        sessions.push((number, client, statement));
    }

    let mut rounds = 0;
    for workers in [3, 1] {
        // Read before the change, since a session may move while the metric is read.
        let before = metric(&node, "fulmar_session_migrations_total").await;
        active.store(workers, Ordering::Relaxed);
        assert_eq!(metric(&node, "fulmar_workers_active").await, workers as i64);
        let work = async {
            while metric(&node, "fulmar_session_migrations_total").await < before + MOVES {
                futures::future::join_all(sessions.iter().map(|session| busy(session, 5))).await;
                rounds += 5;
            }
        };
        with_timeout("the sessions move", work).await;
    }
    for (number, client, _) in &sessions {
        let row = client.query_one("SELECT n FROM t WHERE k = $1", &[number]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), rounds);
        let name = client.query_one("SHOW application_name", &[]).await.unwrap();
        assert_eq!(name.get::<_, String>(0), format!("a{number}"));
    }
    drop((owner, sessions));
    node.stop().await;
}

/// Runs transactions whose results only this session can return.
async fn busy((number, client, statement): &(i64, Client, Statement), rounds: usize) {
    for _ in 0..rounds {
        let row = client.query_one(statement, &[number]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), 2000 + number);
        client.batch_execute("BEGIN").await.unwrap();
        client.execute("UPDATE t SET n = n + 1 WHERE k = $1", &[number]).await.unwrap();
        let row = client.query_one("SELECT n FROM own", &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), *number);
        client.batch_execute("COMMIT").await.unwrap();
    }
}

/// The value of a metric.
async fn metric(node: &Node, name: &str) -> i64 {
    let mut http = TcpStream::connect(node.http.local_addr()).await.unwrap();
    http.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    http.read_to_string(&mut answer).await.unwrap();
    let line = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {answer}")).parse().unwrap()
}
