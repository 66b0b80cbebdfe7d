//! The common store does not grow for ever: superseded manifests, their segments and the logs of
//! ended incarnations are deleted, and nothing that was committed is lost.

use std::path::Path;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{create, execute, move_to, start, state, values, wait_until, wait_until_alive};

/// Longer than the collector takes, whose pauses between passes are 10 s and more.
const DEADLINE: Duration = Duration::from_secs(400);
/// Manifests, anchors and lists of hot pages of two databases, of which one retains nothing.
const MANIFESTS: usize = 12;
/// Segments of both: their newest manifests, and those of a flush in progress.
const SEGMENTS: usize = 12;
/// Seals of an ended log.
const SEALS: usize = 4;

/// The number of files below a directory.
fn files(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    let count = |entry: std::io::Result<std::fs::DirEntry>| match entry {
        Ok(entry) if entry.path().is_dir() => files(&entry.path()),
        Ok(_) => 1,
        // It was deleted meanwhile.
        Err(_) => 0,
    };
    entries.map(count).sum()
}

/// The numbers of manifests and of segments, and of objects in the log of the first incarnation of
/// each node that has a second one.
fn objects(store: &Path) -> (usize, usize, Vec<usize>) {
    let nodes = std::fs::read_dir(store.join("logs")).unwrap().map(|node| node.unwrap().path());
    let restarted = nodes.filter(|node| node.join(format!("{:016x}", 2)).exists());
    let ended = restarted.map(|node| files(&node.join(format!("{:016x}", 1))));
    (files(&store.join("manifests")), files(&store.join("segments")), ended.collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_deleted_and_no_commit_is_lost() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop SET retention = 0").await;
    let store = cluster.path("store");
    let (mut next, mut round) = (0, 0);
    // Collections pass meanwhile.
    wait_until("there is garbage", async || {
        // Each move stores a manifest.
        move_to(&cluster, 0, "shop", round % 3).await;
        round += 1;
        for _ in 0..10 {
            execute(&cluster, next % 3, "shop", &format!("INSERT INTO t VALUES ({next})")).await;
            next += 1;
        }
        let (manifests, _, _) = objects(&store);
        round >= 10 && manifests > MANIFESTS
    })
    .await;
    move_to(&cluster, 0, "shop", 2).await;
    execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({next})")).await;
    let expected: Vec<i64> = (0..=next as i64).collect();
    let (_, before) = state(&cluster, 0, 2).await;
    cluster.kill(2).unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, expected);
    cluster.start_node(2).await.unwrap();
    wait_until_alive(&cluster, 0, 2, before + 1).await;
    let collected = async {
        loop {
            let (manifests, segments, ended) = objects(&store);
            let is_truncated = !ended.is_empty() && ended.iter().all(|objects| *objects <= SEALS);
            if manifests <= MANIFESTS && segments <= SEGMENTS && is_truncated {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    let collected = timeout(DEADLINE, collected).await;
    assert!(collected.is_ok(), "{:?} objects remain:\n{}", objects(&store), cluster.log_tail(0));
    assert_eq!(values(&cluster, 1, "shop").await, expected);
    for node in 0..3 {
        cluster.kill(node).unwrap();
    }
    for node in 0..3 {
        cluster.start_node(node).await.unwrap();
    }
    assert_eq!(values(&cluster, 2, "shop").await, expected);
}
