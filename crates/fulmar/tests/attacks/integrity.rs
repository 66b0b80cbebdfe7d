//! An interrupted integrity check fails with SQLSTATE 57014, and does not report damage.

use crate::client::Response;
use crate::test_bench::{OWNER, TestBench};

/// About 40 MB in a table and an index. A check takes many times the shortest timeout.
const SCHEMA: &[&str] = &[
    "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT)",
    "INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 200000)
        SELECT i, hex(zeroblob(20)) || i FROM n",
    "CREATE INDEX i ON t(b)",
];

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_integrity_check_reports_no_damage() {
    let mut arena = TestBench::new("integrity", SCHEMA).await;
    for check in ["PRAGMA integrity_check", "PRAGMA quick_check", "PRAGMA integrity_check(t)"] {
        for timeout_ms in [1, 3, 10, 30] {
            let name = format!("{check} within {timeout_ms} ms");
            let expected: &[&str] = if timeout_ms == 1 { &["57014"] } else { &["57014", "00000"] };
            arena
                .attack(&name, expected, async |target| {
                    let session = target.log_in(OWNER).await.unwrap();
                    session.batch_execute(&format!("SET statement_timeout = {timeout_ms}")).await.unwrap();
                    match session.query_one(check, &[]).await {
                        Ok(row) if row.get::<_, &str>(0) != "ok" => Response::Wrong(row.get(0)),
                        result => Response::of(result),
                    }
                })
                .await;
        }
    }
    arena.assert_no_failures();
}
