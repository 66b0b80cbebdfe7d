//! Corruption of the data directory of a cluster's node, whose metadata store is embedded. The
//! store is outside of the directory.

use super::files::{CORRUPTIONS, count_of, damage_all};
use super::*;

/// Files of the metadata store, without its head file.
const METADATA: [&str; 2] = ["cluster.db", "cluster.db-wal"];

/// Creates a cluster of one node, with a crash report that the next start processes. After a
/// shutdown, the write-ahead log of the metadata store is moved to its file.
async fn cluster(end: Signal) -> Rig {
    let port = Arc::new(ReservedPort::reserve_free().unwrap());
    let rig = fill(Rig::new(Some(port)), end).await;
    if end == Signal::TERM {
        let metadata = rusqlite::Connection::open(rig.data().join("cluster.db")).unwrap();
        metadata.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    }
    std::fs::write(rig.data().join("crash.json"), r#"{"partition":2,"incarnation":1}"#).unwrap();
    rig
}

/// Asserts that damage to the files that identify the node is reported. Without `cluster.json` the
/// node starts, because its stamp matches its record.
fn assert_identity_is_checked(counts: &[(String, usize)]) {
    assert_eq!(count_of(counts, "cluster.json"), CORRUPTIONS.len() - 1, "{counts:?}");
    assert_eq!(count_of(counts, "stamp.json"), CORRUPTIONS.len(), "{counts:?}");
    assert_eq!(count_of(counts, "crash.json"), 0, "an unreadable crash report must not prevent the start");
}

#[tokio::test(flavor = "multi_thread")]
async fn corruption_of_a_cluster_node_after_a_crash_is_reported_or_harmless() {
    let good = cluster(Signal::KILL).await;
    let counts = damage_all(&good).await;
    assert_identity_is_checked(&counts);
    // The zeroed range may have been zeros.
    assert!(count_of(&counts, "cluster.db-wal") >= CORRUPTIONS.len() - 1, "{counts:?}");
    assert!(count_of(&counts, "cluster.head") >= 3, "{counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn corruption_of_a_cluster_node_after_a_shutdown_is_reported_or_harmless() {
    let good = cluster(Signal::TERM).await;
    let counts = damage_all(&good).await;
    assert_identity_is_checked(&counts);
    assert!(!counts.iter().any(|(name, _)| name == "cluster.db-wal"), "{counts:?}");
    assert!(count_of(&counts, "cluster.db") >= 4, "{counts:?}");
    assert!(count_of(&counts, "cluster.head") >= 3, "{counts:?}");
}

/// `--accept-catalog` accepts a generation in a cluster, not a revision of the metadata store.
#[tokio::test(flavor = "multi_thread")]
async fn old_copy_of_the_embedded_metadata_store_is_refused_and_cannot_be_accepted() {
    let old = cluster(Signal::TERM).await;
    let new = old.copy();
    let node = new.start(&[]).unwrap();
    let system = log_in(&node, "fulmar", &new.password(), "fulmar").await.unwrap();
    system.batch_execute("CREATE DATABASE late").await.unwrap();
    drop(system);
    assert_eq!(node.stop_with(Signal::KILL), None);
    let trial = new.copy();
    std::fs::remove_file(trial.data().join("cluster.db-wal")).unwrap();
    trial.restore(&old, Path::new("cluster.db"));
    let error = trial.start(&[]).err().unwrap();
    assert!(error.contains("cluster.db is damaged or an old copy: expected revision "), "{error}");
    assert!(error.contains("cluster.head from a backup, all three from the same moment"), "{error}");
    assert!(!error.contains("--accept-catalog"), "{error}");
    let (_, found) = error.split_once("found revision ").unwrap();
    let revision = found.split('.').next().unwrap();
    let error = trial.start(&["--accept-catalog", revision]).err().unwrap();
    assert!(error.contains("is damaged or an old copy"), "{error}");
    for file in METADATA {
        trial.restore(&new, Path::new(file));
    }
    let node = trial.start(&[]).unwrap();
    log_in(&node, "fulmar", &trial.password(), "late").await.unwrap();
}
