//! Atomicity of large commits across crashes. The pages of a large commit are in a segment, which
//! the log record references.
//!
//! | crash | after the restart |
//! | --- | --- |
//! | pages spilled, before COMMIT | no change |
//! | segment stored, before the log record | no change, and an unreferenced segment |
//! | after the response | all changes |

use anyhow::{Context, ensure};

use crate::node::Node;
use crate::sql::Client;

/// Rows of 2 KB: 20 MB of pages, five times the limit of a transaction's memory.
const ROWS: i64 = 10_000;

fn insert(load: i64) -> String {
    format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS}) \
         INSERT INTO loaded SELECT {load}, i, hex(randomblob(1000)) FROM n"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_commits_are_atomic_across_crashes() {
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let run = async {
        let start = async |failpoints| {
            let node = Node::start(directory.path(), failpoints).await?;
            node.context("the node was killed during startup")
        };
        let mut node = start(None).await?;
        let client = Client::connect(&node, "fulmar").await?;
        client.query("CREATE DATABASE large").await?;
        let client = Client::connect(&node, "large").await?;
        client.query("CREATE TABLE loaded (load, i, body, PRIMARY KEY (load, i)) WITHOUT ROWID").await?;
        client.query(&insert(1)).await?;
        node.end_by_kill().await?;

        let mut node = start(None).await?;
        let client = check(&node, &[1]).await.context("killed after the response")?;
        client.query(&format!("BEGIN; {}", insert(2))).await?;
        node.end_by_kill().await?;

        let node = start(Some("commit-after-segment=exit:1")).await?;
        let client = check(&node, &[1]).await.context("killed before the commit")?;
        let stored = segments(directory.path())?;
        let response = client.query(&insert(3)).await;
        ensure!(response.is_err(), "the commit was acknowledged, but the node should have killed itself");
        ensure!(segments(directory.path())? == stored + 1, "the segment was not stored before the kill");

        let node = start(None).await?;
        let client = check(&node, &[1]).await.context("killed with the segment stored")?;
        client.query(&insert(3)).await?;
        node.stop().await?;
        let node = start(None).await?;
        check(&node, &[1, 3]).await.context("after a clean shutdown")?;
        node.kill().await?;
        let remaining = std::fs::read_dir(directory.path().join("data/tmp"))?.count();
        ensure!(remaining == 0, "{remaining} temporary files remain");
        anyhow::Ok(())
    };
    run.await.unwrap();
}

/// Checks that the table contains exactly these loads.
async fn check(node: &Node, loads: &[i64]) -> anyhow::Result<Client> {
    let client = Client::connect(node, "large").await?;
    let found = client.query("SELECT load, count(*), sum(length(body)) FROM loaded GROUP BY load").await?;
    let found: Vec<_> =
        found.iter().map(|row| [0, 1, 2].map(|column| row.get(column).map(String::from))).collect();
    let expected: Vec<_> =
        loads.iter().map(|load| [*load, ROWS, ROWS * 2000].map(|number| Some(number.to_string()))).collect();
    ensure!(found == expected, "found {found:?}, expected {expected:?}");
    let integrity = client.query("PRAGMA integrity_check").await?;
    ensure!(integrity.first().and_then(|row| row.get(0)) == Some("ok"), "{integrity:?}");
    Ok(client)
}

fn segments(directory: &std::path::Path) -> anyhow::Result<usize> {
    Ok(std::fs::read_dir(directory.join("data/store/segments"))?.count())
}
