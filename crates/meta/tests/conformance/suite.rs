//! The contract of `MetadataStore`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use fulmar_meta::{
    Change, Entry, MAX_KEY_BYTES, MAX_TRANSACTION_BYTES, MAX_TRANSACTION_STEPS, MAX_VALUE_BYTES, MetaError,
    MetadataStore, Observer, Outcome, Revision, Transaction,
};

use crate::commit;

/// Runs all conformance tests on an empty store. `stores` are one or more clients of it.
pub async fn conforms(stores: &[Arc<dyn MetadataStore>]) {
    let store = &*stores[0];
    values_and_revisions(store).await;
    transactions_are_all_or_nothing(store).await;
    transactions_without_operations_only_compare(store).await;
    scans_by_prefix(store).await;
    scans_many_entries(store).await;
    rejects_oversized_transactions(store).await;
    racing_compares_have_one_winner(stores).await;
    counts_exactly_under_contention(stores).await;
    observers_see_all_changes_in_order(&stores[0]).await;
    observers_see_conflicting_changes(stores).await;
    copies_are_exact_while_observers_join(stores).await;
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

/// Such transactions renew leases.
async fn transactions_without_operations_only_compare(store: &dyn MetadataStore) {
    let revision = commit(store, Transaction::new().put("lease/1", "alive")).await;
    let alive = || Transaction::new().unchanged("lease/1", revision).absent("lease/2");
    for _ in 0..10 {
        assert_eq!(commit(store, alive()).await, revision, "a compare must not create a revision");
    }
    for dead in [alive().absent("lease/1"), alive().unchanged("lease/2", revision)] {
        assert_eq!(store.transact(dead).await.unwrap(), Outcome::Conflict(revision));
    }
    // No value was ever put by revision 0, not even that of an absent key.
    for zero in ["lease/1", "lease/2"] {
        let compared = Transaction::new().unchanged(zero, Revision(0));
        assert_eq!(store.transact(compared).await.unwrap(), Outcome::Conflict(revision));
    }
    let ended = commit(store, Transaction::new().put("lease/1", "ended")).await;
    assert_eq!(store.transact(alive()).await.unwrap(), Outcome::Conflict(ended));
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

/// More entries than a page of any implementation.
async fn scans_many_entries(store: &dyn MetadataStore) {
    const BATCHES: usize = 50;
    let key = |n: usize| format!("many/{n:05}");
    for batch in 0..BATCHES {
        let numbers = batch * 100..(batch + 1) * 100;
        let puts = numbers.fold(Transaction::new(), |transaction, n| transaction.put(key(n), n.to_string()));
        commit(store, puts).await;
    }
    let scanned = store.scan("many/").await.unwrap();
    assert_eq!(scanned.len(), BATCHES * 100);
    for (n, entry) in scanned.iter().enumerate() {
        assert_eq!((&entry.key, entry.value.as_slice()), (&key(n), n.to_string().as_bytes()));
    }
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
    let full = (0..MAX_TRANSACTION_STEPS).fold(Transaction::new(), |transaction, n| {
        let key = format!("{n:04}{}", "k".repeat(MAX_KEY_BYTES - 4));
        let value = vec![7; if n == 0 { MAX_VALUE_BYTES } else { 0 }];
        transaction.absent(key.as_str()).put(key.as_str(), value)
    });
    commit(store, full.clone()).await;
    let delete = |transaction: Transaction, n: usize| {
        transaction.delete(format!("{n:04}{}", "k".repeat(MAX_KEY_BYTES - 4)))
    };
    commit(store, (0..MAX_TRANSACTION_STEPS).fold(Transaction::new(), delete)).await;
    let too_many_bytes = Transaction::new().put("x", vec![7; MAX_VALUE_BYTES]);
    let too_many_bytes = too_many_bytes.put("y", vec![7; MAX_TRANSACTION_BYTES - MAX_VALUE_BYTES]);
    for refused in [
        too_many_bytes,
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

async fn racing_compares_have_one_winner(stores: &[Arc<dyn MetadataStore>]) {
    let racers: Vec<_> = (0..50)
        .map(|racer| {
            let store = stores[racer % stores.len()].clone();
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
    assert_eq!(winners, [stores[0].get("prize").await.unwrap().unwrap().value]);
}

async fn counts_exactly_under_contention(stores: &[Arc<dyn MetadataStore>]) {
    const TASKS: usize = 8;
    const INCREMENTS: usize = 25;
    let store = &*stores[0];
    commit(store, Transaction::new().put("count", "0")).await;
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let store = stores[task % stores.len()].clone();
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
pub struct RecordingObserver {
    pub snapshots: Mutex<Vec<Vec<Entry>>>,
    pub changes: Mutex<Vec<Change>>,
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

async fn observers_see_all_changes_in_order(store: &Arc<dyn MetadataStore>) {
    commit(&**store, Transaction::new().put("seen/before", "1")).await;
    let observer = Arc::new(RecordingObserver::default());
    store.follow(observer.clone()).await.unwrap();
    let entries = store.scan("").await.unwrap();
    assert_eq!(*observer.snapshots.lock().unwrap(), [entries]);

    // Immediately after `transact` returns, committed changes are notified, conflicting ones are
    // not.
    let revision = commit(&**store, Transaction::new().put("seen/a", "1").delete("seen/before")).await;
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

/// A caller that conflicts with another client's change finds the change in its own cache.
async fn observers_see_conflicting_changes(stores: &[Arc<dyn MetadataStore>]) {
    let (reader, writer) = (&*stores[0], &*stores[stores.len() - 1]);
    let observer = Arc::new(RecordingObserver::default());
    reader.follow(observer.clone()).await.unwrap();
    for n in 0..20 {
        let key = format!("conflict/{n}");
        let revision = commit(writer, Transaction::new().put(key.as_str(), "theirs")).await;
        let ours = Transaction::new().absent(key.as_str()).put(key.as_str(), "ours");
        let Outcome::Conflict(at) = reader.transact(ours).await.unwrap() else {
            panic!("the other client's put was acknowledged");
        };
        assert!(at >= revision);
        let seen = observer.changes.lock().unwrap();
        assert!(seen.iter().any(|change| change.key == key && change.revision == revision));
    }
}

/// A copy of the store in memory.
#[derive(Default)]
pub struct Replica {
    contents: Mutex<(BTreeMap<String, Entry>, Revision)>,
}

impl Replica {
    pub fn entries(&self) -> Vec<Entry> {
        self.contents.lock().unwrap().0.values().cloned().collect()
    }
}

impl Observer for Replica {
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError> {
        let newest = entries.iter().map(|entry| entry.modified).max().unwrap_or_default();
        let by_key = entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
        let mut contents = self.contents.lock().unwrap();
        assert!(
            newest >= contents.1 || contents.1 == Revision(0),
            "a snapshot must not be older than a change"
        );
        *contents = (by_key, newest);
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        let mut contents = self.contents.lock().unwrap();
        let revision = changes[0].revision;
        assert!(revision > contents.1, "{revision:?} after {:?}", contents.1);
        contents.1 = revision;
        for Change { key, value, revision: modified } in changes.iter().cloned() {
            assert_eq!(modified, revision, "all changes of a call have one revision");
            match value {
                Some(value) => contents.0.insert(key.clone(), Entry { key, value, modified }),
                None => contents.0.remove(&key),
            };
        }
    }
}

/// Observers that register while others write have exact copies at the end.
async fn copies_are_exact_while_observers_join(stores: &[Arc<dyn MetadataStore>]) {
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let store = stores[writer % stores.len()].clone();
            tokio::spawn(async move {
                for n in 0..50 {
                    let (key, other) = (format!("join/{}", n % 7), format!("join/{writer}/{n}"));
                    commit(&*store, Transaction::new().put(key, n.to_string()).put(other.as_str(), "1"))
                        .await;
                    commit(&*store, Transaction::new().delete(other)).await;
                }
            })
        })
        .collect();
    let mut replicas = Vec::new();
    for n in 0..10 {
        let replica = Arc::new(Replica::default());
        stores[n % stores.len()].follow(replica.clone()).await.unwrap();
        replicas.push(replica);
    }
    for writer in writers {
        writer.await.unwrap();
    }
    for store in stores {
        // The last change of each client passes through its observers.
        commit(&**store, Transaction::new().put("join/last", "1")).await;
    }
    let expected = stores[0].scan("").await.unwrap();
    for (n, replica) in replicas.iter().enumerate() {
        // A client may not have seen the last change of the other yet: it is forced to.
        let key = format!("join/end/{n}");
        commit(&*stores[n % stores.len()], Transaction::new().put(key.as_str(), "1")).await;
        commit(&*stores[n % stores.len()], Transaction::new().delete(key)).await;
        assert!(replica.entries() == expected, "replica {n} differs");
    }
}
