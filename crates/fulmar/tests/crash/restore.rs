//! Atomicity of branches, restores and compactions across crashes.
//!
//! | crash | restore | branch |
//! | --- | --- | --- |
//! | after the manifest, before the catalog | not restored | does not exist, and its name is free |
//! | after the catalog, before the response | restored | |

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::node::Node;
use crate::sql::Client;

/// Timeout for the node to reach its failpoint.
const FAILPOINT_TIMEOUT: Duration = Duration::from_secs(120);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restores_and_branches_are_atomic_across_crashes() {
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let run = async {
        let node = start(directory.path(), None).await?;
        let system = Client::connect(&node, "fulmar").await?;
        system.query("CREATE DATABASE past").await?;
        let client = Client::connect(&node, "past").await?;
        client.query("CREATE TABLE t (x); INSERT INTO t VALUES (1)").await?;
        // A branch flushes its source, which adds a restore point.
        system.query("CREATE DATABASE branch BRANCH OF past").await?;
        let first = client.query("SELECT time FROM fulmar.history").await?;
        let first = first.first().and_then(|row| row.get(0)).context("no restore point")?.to_owned();
        client.query("INSERT INTO t VALUES (2)").await?;
        node.kill().await?;
        let restore = format!("ALTER DATABASE past RESTORE TO TIMESTAMP '{first}'");
        let branch = format!("CREATE DATABASE other BRANCH OF past AT TIMESTAMP '{first}'");

        for (failpoint, statement, rows) in [
            ("branch-after-manifest", &branch, 2),
            ("restore-after-manifest", &restore, 2),
            ("branch-after-manifest", &branch, 2),
            ("restore-after-catalog", &restore, 1),
        ] {
            let failpoints = format!("{failpoint}=exit:1");
            let mut node = start(directory.path(), Some(&failpoints)).await?;
            let response = Client::connect(&node, "fulmar").await?.query(statement).await;
            ensure!(
                response.is_err(),
                "{statement} succeeded, but the node should have killed itself at {failpoint}"
            );
            ensure!(
                node.is_killed_within(FAILPOINT_TIMEOUT).await?,
                "the node did not reach {failpoint}: {response:?}"
            );
            let node = start(directory.path(), None).await?;
            check(&node, "past", rows).await.context(failpoint)?;
            node.kill().await?;
        }
        // Further commits and branches belong to the restored history.
        let node = start(directory.path(), None).await?;
        Client::connect(&node, "past").await?.query("INSERT INTO t VALUES (3)").await?;
        Client::connect(&node, "fulmar")
            .await?
            .query(&branch)
            .await
            .context("the branch's name must be free")?;
        node.stop().await?;
        let node = start(directory.path(), None).await?;
        check(&node, "past", 2).await?;
        check(&node, "other", 1).await?;
        node.kill().await?;
        anyhow::Ok(())
    };
    run.await.unwrap();
}

/// The node is killed after the merged segment was stored, before or after the manifest that
/// references it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_during_a_compaction_loses_nothing() {
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let run = async {
        let node = start(directory.path(), None).await?;
        Client::connect(&node, "fulmar").await?.query("CREATE DATABASE many").await?;
        Client::connect(&node, "many").await?.query("CREATE TABLE t (x)").await?;
        node.kill().await?;
        let mut rows = 0;
        for failpoint in ["compact-after-segment", "compact-after-manifest", "compact-after-manifest"] {
            let failpoints = format!("{failpoint}=exit:1");
            let mut node = start(directory.path(), Some(&failpoints)).await?;
            let (system, client) =
                (Client::connect(&node, "fulmar").await?, Client::connect(&node, "many").await?);
            // Each branch flushes its source, until there are enough segments to compact.
            for number in 0..50 {
                let branch = format!("CREATE DATABASE b{rows}_{number} BRANCH OF many");
                if client.query("INSERT INTO t VALUES (randomblob(9000))").await.is_err() {
                    break;
                }
                rows += 1;
                if system.query(&branch).await.is_err() {
                    break;
                }
            }
            let was_killed = node.is_killed_within(FAILPOINT_TIMEOUT).await?;
            ensure!(was_killed, "the node did not reach {failpoint}");
            let node = start(directory.path(), None).await?;
            let client = Client::connect(&node, "many").await?;
            let found = client.query("SELECT count(*) FROM t").await?;
            let found: i64 = found.first().and_then(|row| row.get(0)).context("no count")?.parse()?;
            // The insert without a response may have committed.
            ensure!((rows..=rows + 1).contains(&found), "{found} rows instead of {rows} after {failpoint}");
            rows = found;
            check(&node, "many", rows).await?;
            node.stop().await?;
        }
        anyhow::Ok(())
    };
    run.await.unwrap();
}

/// Starts a node with failpoints that it must not reach during startup.
async fn start(directory: &Path, failpoints: Option<&str>) -> anyhow::Result<Node> {
    Node::start(directory, failpoints).await?.context("the node was killed during startup")
}

async fn check(node: &Node, database: &str, rows: i64) -> anyhow::Result<()> {
    let client = Client::connect(node, database).await?;
    let found = client.query("SELECT count(*) FROM t").await?;
    let found = found.first().and_then(|row| row.get(0)).map(str::to_owned);
    ensure!(found == Some(rows.to_string()), "{database} has {found:?} rows instead of {rows}");
    let integrity = client.query("PRAGMA integrity_check").await?;
    ensure!(integrity.first().and_then(|row| row.get(0)) == Some("ok"), "{integrity:?}");
    Ok(())
}
