//! What is the embedded store's own: the file, its lock, its refusals, and observers that refuse or go away.

use std::path::Path;
use std::sync::Arc;

use fulmar_meta::{Change, Embedded, Entry, MetaError, MetadataStore, Observer, Outcome, Transaction};

fn open(directory: &Path) -> Result<Embedded, MetaError> {
    Embedded::open(&directory.join("meta.db"))
}

#[tokio::test]
async fn revisions_go_on_after_a_restart() {
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
async fn one_process_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    let second = open(directory.path()).unwrap_err();
    assert!(second.to_string().contains("open in another process"), "{second}");
    assert!(second.remedy().contains("stop the other process"));
    drop(store);
    open(directory.path()).unwrap();
}

#[test]
fn foreign_and_newer_files_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("meta.db");
    let write = |sql: &str| rusqlite::Connection::open(&path).unwrap().execute_batch(sql).unwrap();

    std::fs::write(&path, "this is a text of more than a hundred bytes ".repeat(20)).unwrap();
    assert!(matches!(Embedded::open(&path), Err(MetaError::Corrupt { .. })));

    std::fs::remove_file(&path).unwrap();
    write("CREATE TABLE theirs (x)");
    let foreign = Embedded::open(&path).unwrap_err();
    assert!(foreign.to_string().contains("not one of Fulmar's"), "{foreign}");

    std::fs::remove_file(&path).unwrap();
    drop(Embedded::open(&path).unwrap());
    write("PRAGMA user_version = 3");
    let newer = Embedded::open(&path).unwrap_err();
    assert!(newer.to_string().contains("format version 3"), "{newer}");

    let nowhere = open(&directory.path().join("missing")).unwrap_err();
    assert!(matches!(nowhere, MetaError::Unavailable { .. }), "{nowhere}");
}

/// An observer that cannot read what there is.
struct Blind;

impl Observer for Blind {
    fn snapshot(&self, _: Vec<Entry>) -> Result<(), MetaError> {
        Err(MetaError::Corrupt { place: "everything".to_owned(), cause: "it is dark".to_owned() })
    }

    fn changed(&self, _: &[Change]) {
        panic!("told of a change after it refused the snapshot");
    }
}

#[tokio::test]
async fn an_observer_that_refuses_is_told_nothing_more() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    let blind = Arc::new(Blind);
    assert!(matches!(store.follow(blind.clone()).await, Err(MetaError::Corrupt { .. })));
    store.transact(Transaction::new().put("k", "v")).await.unwrap();
    assert!(store.get("k").await.unwrap().is_some());
    assert_eq!(Arc::strong_count(&blind), 1);
}

/// Everything that was answered is in the file: queued requests are not lost when the store is dropped.
#[tokio::test]
async fn a_drop_answers_what_is_queued() {
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
async fn nobody_else_can_read_the_files() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    store.transact(Transaction::new().put("k", "v")).await.unwrap();
    let files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(Result::unwrap).collect();
    assert_eq!(files.len(), 3, "the file, its write-ahead log and its head");
    for file in files {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", file.path());
    }
}
