//! Conformance tests of the `MetadataStore` trait, run against each implementation.

use std::sync::{Arc, Mutex};

use fulmar_meta::{
    Change, Embedded, Entry, MAX_KEY_BYTES, MAX_TRANSACTION_STEPS, MAX_VALUE_BYTES, MetaError, MetadataStore,
    Observer, Outcome, Revision, Transaction,
};

/// Runs all conformance tests on an empty store.
async fn conforms(store: Arc<dyn MetadataStore>) {
    values_and_revisions(&*store).await;
    transactions_are_all_or_nothing(&*store).await;
    scans_by_prefix(&*store).await;
    rejects_oversized_transactions(&*store).await;
    racing_compares_have_one_winner(store.clone()).await;
    counts_exactly_under_contention(store.clone()).await;
    observers_see_all_changes_in_order(store.clone()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn embedded_conforms() {
    let directory = tempfile::tempdir().unwrap();
    conforms(Arc::new(Embedded::open(&directory.path().join("meta.db")).unwrap())).await;
}

async fn commit(store: &dyn MetadataStore, transaction: Transaction) -> Revision {
    match store.transact(transaction).await.unwrap() {
        Outcome::Committed(revision) => revision,
        Outcome::Conflict(revision) => panic!("conflict at {revision:?}"),
    }
}

async fn values_and_revisions(store: &dyn MetadataStore) {
    assert_eq!(store.get("a").await.unwrap(), None);
    let first = commit(store, Transaction::new().put("a", "1")).await;
    let expected = Entry { key: "a".to_owned(), value: b"1".to_vec(), modified: first };
    assert_eq!(store.get("a").await.unwrap(), Some(expected));

    let second = commit(store, Transaction::new().put("a", "").put("b", [0, 255])).await;
    assert!(second > first);
    let a = store.get("a").await.unwrap().unwrap();
    let b = store.get("b").await.unwrap().unwrap();
    assert_eq!((a.value, a.modified, b.value, b.modified), (vec![], second, vec![0, 255], second));

    // Neither a compare without operations nor a conflicting transaction creates a revision.
    assert_eq!(commit(store, Transaction::new().unchanged("a", second)).await, second);
    let refused = store.transact(Transaction::new().unchanged("a", first).put("a", "x")).await.unwrap();
    assert_eq!(refused, Outcome::Conflict(second));

    // Deleting an absent key is not an error. A deleted key does not reuse its old revision.
    let third = commit(store, Transaction::new().delete("b").delete("never there")).await;
    assert_eq!(store.get("b").await.unwrap(), None);
    let fourth = commit(store, Transaction::new().absent("b").put("b", "again")).await;
    assert!(fourth > third && third > second);
}

async fn transactions_are_all_or_nothing(store: &dyn MetadataStore) {
    let revision = commit(store, Transaction::new().put("x", "1")).await;
    for refused in [
        Transaction::new().unchanged("x", revision).absent("x"),
        Transaction::new().unchanged("x", Revision(revision.0 + 1)),
        Transaction::new().unchanged("x", revision).unchanged("not there", revision),
        Transaction::new().absent("x"),
    ] {
        let refused = refused.put("x", "2").put("y", "2").delete("a");
        assert_eq!(store.transact(refused).await.unwrap(), Outcome::Conflict(revision));
    }
    assert_eq!(store.get("x").await.unwrap().unwrap().value, b"1");
    assert_eq!(store.get("y").await.unwrap(), None);
    assert!(store.get("a").await.unwrap().is_some());
}

async fn scans_by_prefix(store: &dyn MetadataStore) {
    let keys = ["p/", "p/a", "p/a'b", "p/é", "p/\u{10ffff}x", "p0", "P/a", "p"];
    let filled = keys.iter().fold(Transaction::new(), |transaction, key| transaction.put(*key, *key));
    commit(store, filled).await;
    let scanned = store.scan("p/").await.unwrap();
    let found: Vec<&str> = scanned.iter().map(|entry| entry.key.as_str()).collect();
    assert_eq!(found, ["p/", "p/a", "p/a'b", "p/é", "p/\u{10ffff}x"]);
    assert!(scanned.iter().all(|entry| entry.value == entry.key.as_bytes()));
    assert_eq!(store.scan("p/zz").await.unwrap(), []);
    assert!(store.scan("").await.unwrap().len() >= keys.len());
}

async fn rejects_oversized_transactions(store: &dyn MetadataStore) {
    let steps = |count: usize| {
        (0..count).fold(Transaction::new(), |transaction, n| transaction.put(format!("step/{n}"), "x"))
    };
    let key = "k".repeat(MAX_KEY_BYTES);
    let fits = [steps(MAX_TRANSACTION_STEPS), Transaction::new().put(key.as_str(), vec![7; MAX_VALUE_BYTES])];
    for fitting in fits {
        commit(store, fitting).await;
    }
    for refused in [
        steps(MAX_TRANSACTION_STEPS + 1),
        Transaction::new().put(format!("{key}k"), "x"),
        Transaction::new().absent(format!("{key}k")),
        Transaction::new().put("big", vec![7; MAX_VALUE_BYTES + 1]),
        Transaction::new().put("twice", "x").delete("twice"),
    ] {
        assert!(matches!(store.transact(refused).await, Err(MetaError::Unavailable { .. })));
    }
    assert_eq!(store.get("twice").await.unwrap(), None);
}

async fn racing_compares_have_one_winner(store: Arc<dyn MetadataStore>) {
    let racers: Vec<_> = (0..50)
        .map(|racer| {
            let store = store.clone();
            let transaction = Transaction::new().absent("prize").put("prize", racer.to_string());
            tokio::spawn(async move { (racer, store.transact(transaction).await.unwrap()) })
        })
        .collect();
    let mut winners = Vec::new();
    for racer in racers {
        if let (racer, Outcome::Committed(_)) = racer.await.unwrap() {
            winners.push(racer.to_string().into_bytes());
        }
    }
    assert_eq!(winners, [store.get("prize").await.unwrap().unwrap().value]);
}

async fn counts_exactly_under_contention(store: Arc<dyn MetadataStore>) {
    const TASKS: usize = 8;
    const INCREMENTS: usize = 25;
    commit(&*store, Transaction::new().put("count", "0")).await;
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                for _ in 0..INCREMENTS {
                    increment(&*store).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let count = store.get("count").await.unwrap().unwrap().value;
    assert_eq!(String::from_utf8(count).unwrap(), (TASKS * INCREMENTS).to_string());
}

async fn increment(store: &dyn MetadataStore) {
    loop {
        let entry = store.get("count").await.unwrap().unwrap();
        let count: u64 = std::str::from_utf8(&entry.value).unwrap().parse().unwrap();
        let next =
            Transaction::new().unchanged("count", entry.modified).put("count", (count + 1).to_string());
        if let Outcome::Committed(_) = store.transact(next).await.unwrap() {
            return;
        }
    }
}

/// Records all notifications.
#[derive(Default)]
struct RecordingObserver {
    snapshots: Mutex<Vec<Vec<Entry>>>,
    changes: Mutex<Vec<Change>>,
}

impl Observer for RecordingObserver {
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError> {
        self.snapshots.lock().unwrap().push(entries);
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        self.changes.lock().unwrap().extend_from_slice(changes);
    }
}

async fn observers_see_all_changes_in_order(store: Arc<dyn MetadataStore>) {
    commit(&*store, Transaction::new().put("seen/before", "1")).await;
    let observer = Arc::new(RecordingObserver::default());
    store.follow(observer.clone()).await.unwrap();
    let entries = store.scan("").await.unwrap();
    assert_eq!(*observer.snapshots.lock().unwrap(), [entries]);

    // Immediately after `transact` returns, committed changes are notified, conflicting ones are
    // not.
    let revision = commit(&*store, Transaction::new().put("seen/a", "1").delete("seen/before")).await;
    store.transact(Transaction::new().absent("seen/a").put("seen/b", "1")).await.unwrap();
    assert_eq!(
        *observer.changes.lock().unwrap(),
        [
            Change { key: "seen/a".to_owned(), value: Some(b"1".to_vec()), revision },
            Change { key: "seen/before".to_owned(), value: None, revision },
        ]
    );

    // Many writers: each sees its own change notified, and all are notified in order of revision.
    let writers: Vec<_> = (0..100)
        .map(|n| {
            let (store, observer) = (store.clone(), observer.clone());
            tokio::spawn(async move {
                let key = format!("seen/{n}");
                let revision = commit(&*store, Transaction::new().put(key.as_str(), "1")).await;
                let notified = observer.changes.lock().unwrap();
                assert!(notified.iter().any(|change| change.key == key && change.revision == revision));
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    let revisions: Vec<Revision> =
        observer.changes.lock().unwrap().iter().map(|change| change.revision).collect();
    assert!(revisions.is_sorted());
    assert_eq!(revisions.len(), 102);
}
