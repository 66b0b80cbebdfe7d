//! Branches, restores and compactions: a node that is killed on the way has all of one or nothing of it.
//!
//! ```text
//! killed   with the manifest stored, before the catalog | with the catalog told, before the answer
//! restore  it is as it was                              | it is as it was then
//! branch   there is none; its name is free              |
//! ```

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::node::Node;
use crate::sql::Client;

/// When nothing happens after so long nothing will.
const KILLED_WITHIN: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_has_happened_or_not() {
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let run = async {
        let node = start(directory.path(), None).await?;
        let system = Client::connect(&node, "fulmar").await?;
        system.query("CREATE DATABASE past").await?;
        let client = Client::connect(&node, "past").await?;
        client.query("CREATE TABLE t (x); INSERT INTO t VALUES (1)").await?;
        // Flushes it.
        system.query("CREATE DATABASE branch BRANCH OF past").await?;
        let first = client.query("SELECT time FROM fulmar.history").await?;
        let first = first.first().and_then(|row| row.get(0)).context("no restore point")?.to_owned();
        client.query("INSERT INTO t VALUES (2)").await?;
        node.kill().await?;
        let restore = format!("ALTER DATABASE past RESTORE TO TIMESTAMP '{first}'");
        let branch = format!("CREATE DATABASE other BRANCH OF past AT TIMESTAMP '{first}'");

        for (place, statement, rows) in [
            ("branch-after-manifest", &branch, 2),
            ("restore-after-manifest", &restore, 2),
            ("branch-after-manifest", &branch, 2),
            ("restore-after-catalog", &restore, 1),
        ] {
            let armed = format!("{place}=exit:1");
            let mut node = start(directory.path(), Some(&armed)).await?;
            let answer = Client::connect(&node, "fulmar").await?.query(statement).await;
            ensure!(answer.is_err(), "{statement} was answered though the node was to be killed at {place}");
            node.end_by_kill().await?;
            let node = start(directory.path(), None).await?;
            check(&node, "past", rows).await.context(place)?;
            node.kill().await?;
        }
        // What is stored now is of one history.
        let node = start(directory.path(), None).await?;
        Client::connect(&node, "past").await?.query("INSERT INTO t VALUES (3)").await?;
        Client::connect(&node, "fulmar").await?.query(&branch).await.context("the name is free")?;
        node.stop().await?;
        let node = start(directory.path(), None).await?;
        check(&node, "past", 2).await?;
        check(&node, "other", 1).await?;
        node.kill().await?;
        anyhow::Ok(())
    };
    run.await.unwrap();
}

/// A node that is killed with the merged segment stored, before or after the manifest that names it, has what it had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compaction_that_is_killed_loses_nothing() {
    let directory = tempfile::Builder::new().prefix("fulmar-crash-").tempdir().unwrap();
    let run = async {
        let node = start(directory.path(), None).await?;
        Client::connect(&node, "fulmar").await?.query("CREATE DATABASE many").await?;
        Client::connect(&node, "many").await?.query("CREATE TABLE t (x)").await?;
        node.kill().await?;
        let mut rows = 0;
        for place in ["compact-after-segment", "compact-after-manifest", "compact-after-manifest"] {
            let armed = format!("{place}=exit:1");
            let mut node = start(directory.path(), Some(&armed)).await?;
            let (system, client) =
                (Client::connect(&node, "fulmar").await?, Client::connect(&node, "many").await?);
            // A branch flushes what it is made of: soon there are segments to merge.
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
            ensure!(node.is_killed_within(KILLED_WITHIN).await?, "no node was killed at {place}");
            let node = start(directory.path(), None).await?;
            let client = Client::connect(&node, "many").await?;
            let found = client.query("SELECT count(*) FROM t").await?;
            let found: i64 = found.first().and_then(|row| row.get(0)).context("no count")?.parse()?;
            // One that was not answered may be there.
            ensure!((rows..=rows + 1).contains(&found), "{found} rows instead of {rows} after {place}");
            rows = found;
            check(&node, "many", rows).await?;
            node.stop().await?;
        }
        anyhow::Ok(())
    };
    run.await.unwrap();
}

/// A node that is armed with places at which it is to be killed, but not while it starts.
async fn start(directory: &Path, failpoints: Option<&str>) -> anyhow::Result<Node> {
    Node::start(directory, failpoints).await?.context("the node was killed while it started")
}

async fn check(node: &Node, database: &str, rows: i64) -> anyhow::Result<()> {
    let client = Client::connect(node, database).await?;
    let found = client.query("SELECT count(*) FROM t").await?;
    let found = found.first().and_then(|row| row.get(0)).map(str::to_owned);
    ensure!(found == Some(rows.to_string()), "{database} has {found:?} rows instead of {rows}");
    let sound = client.query("PRAGMA integrity_check").await?;
    ensure!(sound.first().and_then(|row| row.get(0)) == Some("ok"), "{sound:?}");
    Ok(())
}
