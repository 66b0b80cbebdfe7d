//! The contract on the embedded store.

use std::sync::Arc;

use fulmar_meta::{Embedded, Transaction};

use crate::{commit, suite};

#[tokio::test(flavor = "multi_thread")]
async fn embedded_conforms() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("meta.db")).unwrap();
    suite::conforms(&[Arc::new(store)]).await;
}

#[tokio::test]
async fn transaction_without_operations_does_not_write_to_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("meta.db")).unwrap();
    let revision = commit(&store, Transaction::new().put("node/1", "alive")).await;
    let files = || {
        ["meta.db", "meta.db-wal", "meta.head"]
            .map(|name| std::fs::read(directory.path().join(name)).unwrap())
    };
    let before = files();
    for _ in 0..10 {
        let compared = Transaction::new().unchanged("node/1", revision).absent("node/2");
        assert_eq!(commit(&store, compared).await, revision);
    }
    assert!(before == files(), "a renewal of a lease must not write");
    assert_eq!(store.revision(), revision);
}
