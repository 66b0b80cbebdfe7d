//! Copies between stores, and the catalog on a copied store.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use fulmar_meta::{
    Catalog, Copied, CopyProgress, Embedded, Entry, MAX_VALUE_BYTES, MetaError, MetadataStore, Observer,
    Outcome, SYSTEM_USER, Transaction, copy,
};

use crate::{commit, eventually, open, put, start};

fn embedded(directory: &Path, name: &str) -> Embedded {
    Embedded::open(&directory.join(name)).unwrap()
}

/// Keys and values.
async fn contents(store: &dyn MetadataStore) -> Vec<(String, Vec<u8>)> {
    store.scan("").await.unwrap().into_iter().map(|entry| (entry.key, entry.value)).collect()
}

/// 300 small entries, and 3 of maximum size.
async fn fill(store: &dyn MetadataStore) {
    for batch in 0..3 {
        let numbers = batch * 100..(batch + 1) * 100;
        let puts = numbers
            .fold(Transaction::new(), |transaction, n| transaction.put(format!("k/{n}"), n.to_string()));
        commit(store, puts).await;
        commit(store, Transaction::new().put(format!("large/{batch}"), vec![batch as u8; MAX_VALUE_BYTES]))
            .await;
    }
}

/// A store that loses the answers to all changes after a number of them.
struct Interrupted<'a> {
    store: &'a dyn MetadataStore,
    remaining: AtomicUsize,
}

#[async_trait]
impl MetadataStore for Interrupted<'_> {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        self.store.get(key).await
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        self.store.scan(prefix).await
    }

    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        let remaining = self.remaining.load(Ordering::Acquire);
        if remaining > 0 {
            self.remaining.store(remaining - 1, Ordering::Release);
            return self.store.transact(transaction).await;
        }
        self.store.transact(transaction).await?;
        Err(MetaError::OutcomeUnknown { cause: "was interrupted".to_owned(), remedy: "Repeat the change." })
    }

    async fn follow(&self, observer: Arc<dyn Observer>) -> Result<(), MetaError> {
        self.store.follow(observer).await
    }
}

#[tokio::test]
async fn interrupted_copy_continues_and_ends_exact() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (embedded(directory.path(), "from"), embedded(directory.path(), "to"));
    fill(&from).await;
    for after in 0.. {
        let interrupted = Interrupted { store: &to, remaining: AtomicUsize::new(after % 3) };
        match copy(&from, &interrupted, |_| {}).await {
            Ok(_) => break,
            Err(error) => assert!(matches!(error, MetaError::OutcomeUnknown { .. }), "{error}"),
        }
        assert!(after < 100, "each run makes progress");
    }
    assert!(contents(&from).await == contents(&to).await);
    let again = copy(&from, &to, |_| panic!("nothing to copy")).await.unwrap();
    assert_eq!(again, Copied { entries: 303, changed: 0 });
}

#[tokio::test]
async fn unfinished_copy_is_not_opened_as_a_catalog() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (embedded(directory.path(), "from"), Arc::new(embedded(directory.path(), "to")));
    fill(&from).await;
    let interrupted = Interrupted { store: &*to, remaining: AtomicUsize::new(1) };
    copy(&from, &interrupted, |_| {}).await.unwrap_err();
    let error = Catalog::open(to.clone()).await.unwrap_err();
    assert!(error.to_string().contains("unfinished copy"), "{error}");
    let error = copy(&*to, &from, |_| {}).await.unwrap_err();
    assert!(error.to_string().contains("unfinished copy"), "an unfinished copy is no source: {error}");
    copy(&from, &*to, |_| {}).await.unwrap();
}

#[tokio::test]
async fn progress_counts_all_entries() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (embedded(directory.path(), "from"), embedded(directory.path(), "to"));
    fill(&from).await;
    let mut all = Vec::new();
    let copied = copy(&from, &to, |progress| all.push(progress)).await.unwrap();
    assert_eq!(copied, Copied { entries: 303, changed: 303 });
    assert!(all.is_sorted_by_key(|progress| progress.changed));
    assert_eq!(all.last(), Some(&CopyProgress { changed: 303, to_change: 303 }));
}

#[tokio::test]
async fn destination_with_other_entries_is_not_changed() {
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (embedded(directory.path(), "from"), embedded(directory.path(), "to"));
    fill(&from).await;
    put(&to, "theirs", "1").await.unwrap();
    let error = copy(&from, &to, |_| {}).await.unwrap_err();
    assert!(error.to_string().contains("not empty"), "{error}");
    assert_eq!(contents(&to).await, [("theirs".to_owned(), b"1".to_vec())]);
}

#[tokio::test]
async fn changes_during_the_copy_are_detected() {
    let directory = tempfile::tempdir().unwrap();
    for changes_source in [true, false] {
        let (from, to) = if changes_source { ("a", "b") } else { ("c", "d") };
        let (from, to) = (embedded(directory.path(), from), embedded(directory.path(), to));
        fill(&from).await;
        let mut is_changed = false;
        let change_once = |_| {
            if !std::mem::replace(&mut is_changed, true) {
                let changed = if changes_source { &from } else { &to };
                futures::executor::block_on(put(changed, "k/7", "changed")).unwrap();
            }
        };
        let error = copy(&from, &to, change_once).await.unwrap_err();
        assert!(error.remedy().contains("Stop all nodes"), "{error}");
        // The next run corrects the destination.
        copy(&from, &to, |_| {}).await.unwrap();
        assert!(contents(&from).await == contents(&to).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn catalog_moves_from_a_file_to_etcd() {
    let directory = tempfile::tempdir().unwrap();
    let file = Arc::new(embedded(directory.path(), "meta.db"));
    let catalog = Catalog::open(file.clone()).await.unwrap();
    for n in 0..20 {
        let tenant = catalog.create_tenant(&format!("tenant-{n}"), SYSTEM_USER).await.unwrap();
        catalog.finish_create(&tenant).await.unwrap();
    }
    drop(catalog);
    let etcd = start(1);
    let store = open(etcd.endpoints()).await;
    copy(&*file, &*store, |_| {}).await.unwrap();
    assert!(contents(&*file).await == contents(&*store).await);

    // Two nodes, each with its own client.
    let first = Catalog::open(store).await.unwrap();
    let second = Catalog::open(open(etcd.endpoints()).await).await.unwrap();
    assert_eq!(first.tenants().len(), 21);
    let tenant = first.create_tenant("later", SYSTEM_USER).await.unwrap();
    first.finish_create(&tenant).await.unwrap();
    second.catch_up().await.unwrap();
    assert!(second.tenant("later").is_some(), "lookups include what the other node has committed");
    let error = second.create_tenant("later", SYSTEM_USER).await.unwrap_err();
    assert!(matches!(error, MetaError::Exists { .. }), "{error}");
    let dropped = second.begin_drop("later").await.unwrap();
    second.finish_drop(&dropped).await.unwrap();
    eventually("the other node sees the drop", async || first.tenant("later").is_none().then_some(())).await;
}
