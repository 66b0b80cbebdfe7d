//! Attacks on disk space: the temporary files that sessions cause are bounded per tenant.

use futures::future::join_all;

use crate::client::{Response, query};
use crate::test_bench::{OWNER, READER, Target, TestBench};

/// Rejected, or executed within the limit.
const BOUNDED: &[&str] = &["00000", "53400", "53100", "53200", "54000", "57014"];

const ROWS: &str = "INSERT INTO t WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000) SELECT i FROM n";

const SCHEMA: &[&str] = &["CREATE TABLE t(a INTEGER PRIMARY KEY)", ROWS];

#[tokio::test(flavor = "multi_thread")]
async fn temporary_files_are_bounded() {
    let mut arena = TestBench::new("disk", SCHEMA).await;
    arena
        .attack("4 sessions that do not read 1.3 GB each", BOUNDED, async |target| {
            unread(target, 4, "SELECT hex(zeroblob(650000)) FROM t").await
        })
        .await;
    for (name, sql) in [
        (
            "a sort of 1.3 GB",
            "SELECT b FROM (SELECT hex(zeroblob(650000)) AS b, a FROM t) ORDER BY b, -a LIMIT 1 OFFSET 900",
        ),
        ("DISTINCT of 1.3 GB", "SELECT count(DISTINCT a || hex(zeroblob(650000))) FROM t"),
        (
            "a recursive query of 1.3 GB",
            "WITH RECURSIVE n(i, b) AS (SELECT 1, '' UNION SELECT i + 1, i || hex(zeroblob(650000)) FROM n WHERE i < 1000) SELECT count(*) FROM n",
        ),
        (
            "a materialized expression of 1.3 GB",
            "WITH m AS MATERIALIZED (SELECT a, a || hex(zeroblob(650000)) AS b FROM t) SELECT count(*) FROM m AS x JOIN m AS y USING (a) WHERE x.b = y.b",
        ),
        (
            "a window of 1.3 GB",
            "SELECT max(length(l)) FROM (SELECT last_value(b) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS l FROM (SELECT a || hex(zeroblob(650000)) AS b FROM t))",
        ),
        (
            "GROUP BY of 1.3 GB",
            "SELECT count(*) FROM (SELECT a || hex(zeroblob(650000)) AS b FROM t GROUP BY 1)",
        ),
    ] {
        arena.statement(name, BOUNDED, READER, sql).await;
    }
    for (name, sql) in [
        ("a temporary table of 1.3 GB", "CREATE TEMP TABLE x AS SELECT zeroblob(1300000) AS b FROM t"),
        ("a table of 1.3 GB", "CREATE TABLE x AS SELECT zeroblob(1300000) AS b FROM t"),
        ("an index of 1.3 GB", "CREATE INDEX x ON t(hex(zeroblob(650000)) || a)"),
        (
            "1.3 GB written and rolled back",
            "BEGIN; CREATE TABLE x(b); INSERT INTO x SELECT zeroblob(1300000) FROM t; ROLLBACK",
        ),
    ] {
        arena.statement(name, BOUNDED, OWNER, sql).await;
    }
    arena.assert_no_failures();
}

/// Sends a query in each session, reads no more than its first row, and disconnects when all
/// sessions have one. The node sends rows when the statement has ended, so by then its temporary
/// files are complete. Returns the first error, or success.
async fn unread(target: &Target, sessions: usize, sql: &str) -> Response {
    let answers = join_all((0..sessions).map(|_| async {
        let mut raw = target.log_in_raw(READER).await?;
        raw.send(&query(sql)).await?;
        let answer = raw.read_until(b'D', 1).await;
        std::io::Result::Ok((raw, answer))
    }));
    match answers.await.into_iter().collect::<Result<Vec<_>, _>>() {
        Ok(answers) => answers
            .into_iter()
            .map(|(_, answer)| answer)
            .find(|answer| *answer != Response::Success)
            .unwrap_or(Response::Success),
        Err(error) => Response::Closed(error.to_string()),
    }
}
