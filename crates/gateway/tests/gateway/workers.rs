//! Sessions that move between workers.

use std::time::{Duration, Instant};

use crate::common::Node;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::{Client, Statement};

const SESSIONS: i64 = 12;
/// Some hundred microseconds.
const WORK: &str = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) \
                    SELECT CAST(count(*) + $1::int8 AS BIGINT) FROM n";
/// Longer than any machine takes to see that it is busy, or that it is not.
const LONGEST: Duration = Duration::from_secs(60);

/// Under load they spread, afterwards they come together; what they have (names, prepared statements, settings, locks)
/// goes with them, and nobody is told.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_follow_the_load() {
    let node = Node::start(|config| {
        config.insecure = true;
        config.workers = 3;
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
    assert_eq!(figure(&node, "fulmar_workers_active").await, 1, "that was no load");

    let (began, mut rounds) = (Instant::now(), 0);
    while figure(&node, "fulmar_workers_active").await < 2
        || figure(&node, "fulmar_sessions_moved_total").await == 0
    {
        assert!(began.elapsed() < LONGEST, "nobody comes to help");
        futures::future::join_all(sessions.iter().map(|session| busy(session, 20))).await;
        rounds += 20;
    }
    let spread = figure(&node, "fulmar_sessions_moved_total").await;
    let began = Instant::now();
    while figure(&node, "fulmar_workers_active").await > 1 {
        assert!(began.elapsed() < LONGEST, "they do not come together");
        for session in &sessions {
            busy(session, 1).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        rounds += 1;
    }
    for session in &sessions {
        busy(session, 1).await;
    }
    rounds += 1;
    assert!(figure(&node, "fulmar_sessions_moved_total").await > spread);
    for (number, client, _) in &sessions {
        let row = client.query_one("SELECT n FROM t WHERE k = $1", &[number]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), rounds);
        let name = client.query_one("SHOW application_name", &[]).await.unwrap();
        assert_eq!(name.get::<_, String>(0), format!("a{number}"));
    }
    drop((owner, sessions));
    node.stop().await;
}

/// So many rounds of what only this session can answer, with a transaction in each.
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

/// A figure of the node.
async fn figure(node: &Node, name: &str) -> i64 {
    let mut http = TcpStream::connect(node.http.local_addr()).await.unwrap();
    http.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    http.read_to_string(&mut answer).await.unwrap();
    let line = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {answer}")).parse().unwrap()
}
