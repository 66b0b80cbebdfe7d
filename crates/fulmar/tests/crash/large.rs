//! Large commits, whose pages stand in a segment that the log's record names: a node that is killed anywhere on the way has
//! all of one or nothing of it.
//!
//! ```text
//! killed   with pages spilled, before COMMIT | with the segment stored, before the record | after the answer
//! there is nothing of it                     | nothing of it, a segment that nobody names  | all of it
//! ```

use anyhow::{Context, ensure};

use crate::node::Node;
use crate::sql::Client;

/// Rows of 2 KB: 20 MB of pages, five times what a transaction keeps in memory.
const ROWS: i64 = 10_000;

fn insert(load: i64) -> String {
    format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS}) \
         INSERT INTO loaded SELECT {load}, i, hex(randomblob(1000)) FROM n"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_commit_is_there_as_a_whole_or_not_at_all() {
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let run = async {
        let start = async |failpoints| {
            let node = Node::start(directory.path(), failpoints).await?;
            node.context("the node was killed while it started")
        };
        let mut node = start(None).await?;
        let client = Client::connect(&node, "fulmar").await?;
        client.query("CREATE DATABASE large").await?;
        let client = Client::connect(&node, "large").await?;
        client.query("CREATE TABLE loaded (load, i, body, PRIMARY KEY (load, i)) WITHOUT ROWID").await?;
        client.query(&insert(1)).await?;
        node.end_by_kill().await?;

        let mut node = start(None).await?;
        let client = check(&node, &[1]).await.context("killed after the answer")?;
        client.query(&format!("BEGIN; {}", insert(2))).await?;
        node.end_by_kill().await?;

        let node = start(Some("commit-after-segment=exit:1")).await?;
        let client = check(&node, &[1]).await.context("killed before the commit")?;
        let stored = segments(directory.path())?;
        let answer = client.query(&insert(3)).await;
        ensure!(answer.is_err(), "a commit was answered though the node was to be killed before");
        ensure!(
            segments(directory.path())? == stored + 1,
            "the segment was not stored when the node was killed"
        );

        let node = start(None).await?;
        let client = check(&node, &[1]).await.context("killed with the segment stored")?;
        client.query(&insert(3)).await?;
        node.stop().await?;
        let node = start(None).await?;
        check(&node, &[1, 3]).await.context("after a clean end")?;
        node.kill().await?;
        let left = std::fs::read_dir(directory.path().join("data/tmp"))?.count();
        ensure!(left == 0, "{left} temporary files are left");
        anyhow::Ok(())
    };
    run.await.unwrap();
}

/// Checks that exactly these loads are there.
async fn check(node: &Node, loads: &[i64]) -> anyhow::Result<Client> {
    let client = Client::connect(node, "large").await?;
    let found = client.query("SELECT load, count(*), sum(length(body)) FROM loaded GROUP BY load").await?;
    let found: Vec<_> =
        found.iter().map(|row| [0, 1, 2].map(|column| row.get(column).map(String::from))).collect();
    let expected: Vec<_> =
        loads.iter().map(|load| [*load, ROWS, ROWS * 2000].map(|number| Some(number.to_string()))).collect();
    ensure!(found == expected, "there is {found:?} instead of {expected:?}");
    let sound = client.query("PRAGMA integrity_check").await?;
    ensure!(sound.first().and_then(|row| row.get(0)) == Some("ok"), "{sound:?}");
    Ok(client)
}

fn segments(directory: &std::path::Path) -> anyhow::Result<usize> {
    Ok(std::fs::read_dir(directory.join("data/store/segments"))?.count())
}
