//! Old copies of the catalog, and catalogs in the previous format version.

use super::*;

const FILES: [&str; 3] = ["meta.db", "meta.db-wal", "meta.head"];

/// Copies files of the catalog from one directory to another. Removes those that do not exist in
/// `from`.
fn copy_catalog(from: &Rig, to: &Rig, files: &[&str]) {
    for file in FILES {
        let (from, to) = (from.data().join(file), to.data().join(file));
        if files.contains(&file) {
            let _ = std::fs::remove_file(&to); // a file of a running store may be absent
            if from.exists() {
                std::fs::copy(from, to).unwrap();
            }
        }
    }
}

/// Returns the revision that an error message offers to accept.
fn offered_revision(error: &str) -> String {
    let (_, revision) = error.split_once("--accept-catalog ").unwrap_or_else(|| panic!("{error}"));
    revision.split_whitespace().next().unwrap_or_default().to_owned()
}

async fn run(rig: &Rig, sql: &str) {
    let node = rig.start(&[]).unwrap();
    let system = log_in(&node, "fulmar", &rig.password(), "fulmar").await.unwrap();
    system.batch_execute(sql).await.unwrap();
    drop(system);
    assert_eq!(node.stop_with(Signal::KILL), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn old_copies_of_the_catalog_are_refused() {
    let old = rig(Signal::TERM).await;
    let new = old.copy();
    run(&new, "DROP USER bob").await;
    run(&new, "CREATE DATABASE late").await;
    let password = new.password();
    let node = new.start(&[]).unwrap();
    let late = log_in(&node, "fulmar", &password, "late").await.unwrap();
    late.batch_execute("CREATE TABLE t(x); INSERT INTO t VALUES (1)").await.unwrap();
    let now = contents(&node, &password).await.unwrap();
    drop(late);
    assert_eq!(node.stop_with(Signal::KILL), None);
    let new = Rig { contents: now, ..new };

    // Replace SQLite's files, meta.head, and all files.
    for (files, reported) in [
        (&["meta.db", "meta.db-wal"][..], "meta.db is damaged or an old copy: expected revision "),
        (&["meta.head"][..], "meta.head is damaged or an old copy"),
        (&FILES[..], "data of partition "),
    ] {
        let trial = new.copy();
        copy_catalog(&old, &trial, files);
        let error = trial.read().await.unwrap_err();
        assert!(error.contains(reported), "{files:?}: {error}");
        let again = trial.read().await.unwrap_err();
        assert_eq!(again.lines().last(), error.lines().last(), "the next start must be refused as well");
        copy_catalog(&new, &trial, &FILES);
        assert_eq!(trial.read().await.as_ref(), Ok(&new.contents), "{files:?}");
    }

    // One start with the right revision accepts the loss.
    for files in [&["meta.db", "meta.db-wal"][..], &FILES] {
        let trial = new.copy();
        copy_catalog(&old, &trial, files);
        let revision = offered_revision(&trial.read().await.unwrap_err());
        let wrong = format!("{revision}0");
        assert!(trial.start(&["--accept-catalog", &wrong]).is_err(), "{files:?}");
        let node = trial.start(&["--accept-catalog", &revision]).unwrap();
        let system = log_in(&node, "fulmar", &password, "fulmar").await.unwrap();
        system.batch_execute("CREATE DATABASE fresh").await.unwrap();
        let fresh = log_in(&node, "fulmar", &password, "fresh").await.unwrap();
        assert!(fresh.query("SELECT * FROM t", &[]).await.is_err(), "partition ids must not be reused");
        drop((system, fresh));
        assert_eq!(node.stop_with(Signal::KILL), None);
        let accepted = trial.read().await.unwrap();
        assert!(!accepted.contains(&"database late".to_owned()), "{accepted:?}");
        assert!(accepted.contains(&"user bob".to_owned()) && accepted.contains(&"database fresh".to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn start_without_any_catalog_file_is_refused() {
    let good = rig(Signal::KILL).await;
    let trial = good.copy();
    for file in FILES {
        std::fs::remove_file(trial.data().join(file)).unwrap();
    }
    let error = trial.read().await.unwrap_err();
    assert!(
        error.contains("meta.db is damaged or an old copy") && error.contains("data of partition "),
        "{error}"
    );
    copy_catalog(&good, &trial, &FILES);
    assert_eq!(trial.read().await.as_ref(), Ok(&good.contents));
}

/// A data directory of the previous version has no digests, no `meta.head` and no dropped
/// partitions.
#[tokio::test(flavor = "multi_thread")]
async fn data_directory_of_the_previous_version_is_converted() {
    let good = rig(Signal::TERM).await;
    let before = good.copy();
    let file = before.data().join("meta.db");
    let connection = rusqlite::Connection::open(&file).unwrap();
    connection
        .execute_batch(
            "PRAGMA journal_mode = DELETE;
             CREATE TABLE store (one INTEGER PRIMARY KEY CHECK (one = 1), revision INTEGER NOT NULL);
             INSERT INTO store SELECT 1, revision FROM head;
             DROP TABLE head;
             DELETE FROM entry WHERE CAST(key AS TEXT) LIKE 'dropped/%' OR CAST(key AS TEXT) IN ('counter/dropped', 'secret/salt');
             PRAGMA user_version = 1;",
        )
        .unwrap();
    drop(connection);
    std::fs::remove_file(before.data().join("meta.head")).unwrap();
    let converted = before.copy();
    for _ in 0..2 {
        assert_eq!(converted.read().await.as_ref(), Ok(&good.contents));
    }
    // After the conversion, the previous file counts as an old copy.
    copy_catalog(&before, &converted, &["meta.db", "meta.db-wal"]);
    let error = converted.read().await.unwrap_err();
    assert!(error.contains("meta.db is a copy from before an upgrade"), "{error}");
}
