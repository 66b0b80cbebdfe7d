//! Tests specific to the embedded store: the file, its lock, rejected files, and observers that
//! fail or are dropped.

use std::path::Path;
use std::sync::Arc;

use fulmar_meta::{Change, Embedded, Entry, MetaError, MetadataStore, Observer, Outcome, Transaction};

fn open(directory: &Path) -> Result<Embedded, MetaError> {
    Embedded::open(&directory.join("meta.db"))
}

#[tokio::test]
async fn revisions_continue_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut last = None;
    for _ in 0..3 {
        let store = open(directory.path()).unwrap();
        let put = store.transact(Transaction::new().put("k", "v")).await.unwrap();
        let delete = store.transact(Transaction::new().delete("k")).await.unwrap();
        let (Outcome::Committed(put), Outcome::Committed(delete)) = (put, delete) else { panic!() };
        assert!(last < Some(put) && put < delete);
        last = Some(delete);
    }
}

#[tokio::test]
async fn file_is_locked_while_it_is_open() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    let second = open(directory.path()).unwrap_err();
    assert!(second.to_string().contains("open in another process"), "{second}");
    assert!(second.remedy().contains("Stop the other process"));
    drop(store);
    open(directory.path()).unwrap();
}

#[test]
fn foreign_and_newer_files_are_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("meta.db");
    let write = |sql: &str| rusqlite::Connection::open(&path).unwrap().execute_batch(sql).unwrap();

    std::fs::write(&path, "this is a text of more than a hundred bytes ".repeat(20)).unwrap();
    assert!(matches!(Embedded::open(&path), Err(MetaError::Damaged { .. })));

    std::fs::remove_file(&path).unwrap();
    write("CREATE TABLE theirs (x)");
    let foreign = Embedded::open(&path).unwrap_err();
    assert!(foreign.to_string().contains("not a Fulmar metadata file"), "{foreign}");

    std::fs::remove_file(&path).unwrap();
    drop(Embedded::open(&path).unwrap());
    write("PRAGMA user_version = 3");
    let newer = Embedded::open(&path).unwrap_err();
    assert!(newer.to_string().contains("format version 3"), "{newer}");
    assert!(newer.remedy().contains("start the version of Fulmar that wrote them"), "{}", newer.remedy());

    let nowhere = open(&directory.path().join("missing")).unwrap_err();
    assert!(matches!(nowhere, MetaError::Unavailable { .. }), "{nowhere}");
}

/// An observer that rejects the snapshot.
struct Rejecting;

impl Observer for Rejecting {
    fn snapshot(&self, _: Vec<Entry>) -> Result<(), MetaError> {
        Err(MetaError::Corrupt { place: "everything".to_owned(), cause: "test".to_owned() })
    }

    fn changed(&self, _: &[Change]) {
        panic!("notified after it rejected the snapshot");
    }
}

#[tokio::test]
async fn observer_that_rejects_the_snapshot_is_not_registered() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    let observer = Arc::new(Rejecting);
    assert!(matches!(store.follow(observer.clone()).await, Err(MetaError::Corrupt { .. })));
    store.transact(Transaction::new().put("k", "v")).await.unwrap();
    assert!(store.get("k").await.unwrap().is_some());
    assert_eq!(Arc::strong_count(&observer), 1);
}

/// Queued requests are not lost when the store is dropped.
#[tokio::test]
async fn drop_answers_all_queued_requests() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(open(directory.path()).unwrap());
    let writers: Vec<_> = (0..300)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { store.transact(Transaction::new().put(format!("k{n}"), "v")).await })
        })
        .collect();
    drop(store);
    for writer in writers {
        writer.await.unwrap().unwrap();
    }
    assert_eq!(open(directory.path()).unwrap().scan("k").await.unwrap().len(), 300);
}

#[tokio::test]
async fn files_are_readable_by_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    store.transact(Transaction::new().put("k", "v")).await.unwrap();
    let files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(Result::unwrap).collect();
    assert_eq!(files.len(), 3, "the file, its write-ahead log and its head file");
    for file in files {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", file.path());
    }
}
