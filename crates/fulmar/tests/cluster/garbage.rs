//! The common store does not grow for ever: superseded manifests, their segments and the logs of
//! ended incarnations are deleted, and nothing that was committed is lost.

use std::path::Path;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::{create, execute, move_to, start, values, wait_until_alive};

/// Longer than the collector takes, whose pauses between passes are 10 s and more.
const DEADLINE: Duration = Duration::from_secs(400);
/// The store then contains at most these files: two databases with their newest manifests and
/// segments, three living logs after a flush, and the seals of one ended log.
const BOUND: usize = 60;

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

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_deleted_and_no_commit_is_lost() {
    let mut cluster = start().await;
    create(&cluster, "shop").await;
    execute(&cluster, 0, "fulmar", "ALTER DATABASE shop SET retention = 0").await;
    let mut next = 0;
    for round in 0..10 {
        // Each move stores a manifest.
        move_to(&cluster, 0, "shop", round % 3).await;
        for _ in 0..10 {
            execute(&cluster, next % 3, "shop", &format!("INSERT INTO t VALUES ({next})")).await;
            next += 1;
        }
    }
    move_to(&cluster, 0, "shop", 2).await;
    execute(&cluster, 0, "shop", &format!("INSERT INTO t VALUES ({next})")).await;
    let expected: Vec<i64> = (0..=next as i64).collect();
    let store = cluster.path("store");
    let before = files(&store);
    assert!(before > BOUND, "{before} files are too few for this test");
    cluster.kill(2).unwrap();
    assert_eq!(values(&cluster, 0, "shop").await, expected);
    cluster.start_node(2).await.unwrap();
    wait_until_alive(&cluster, 0, 2, 2).await;
    let collected = async {
        while files(&store) > BOUND {
            sleep(Duration::from_millis(100)).await;
        }
    };
    let collected = timeout(DEADLINE, collected).await;
    assert!(collected.is_ok(), "{} of {before} files remain:\n{}", files(&store), cluster.log_tail(0));
    assert_eq!(values(&cluster, 1, "shop").await, expected);
    for node in 0..3 {
        cluster.kill(node).unwrap();
    }
    for node in 0..3 {
        cluster.start_node(node).await.unwrap();
    }
    assert_eq!(values(&cluster, 2, "shop").await, expected);
}
