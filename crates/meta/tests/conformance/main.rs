//! Conformance tests of the `MetadataStore` trait, and tests of the etcd store under faults.
//!
//! - [`suite`]: the contract, run on the embedded store, on etcd, and on etcd through a slow
//!   network.
//! - [`etcd`]: one member: authentication, TLS, space quota, backups, several clusters.
//! - [`faults`]: one member behind a [`proxy`] that cuts connections and loses answers.
//! - [`members`]: three members: a killed leader, a lost majority, a hanging member.
//! - [`copy`]: copies between stores.
//!
//! The tests start etcd themselves. They need Debian's packages etcd-server and etcd-client.

mod copy;
mod embedded;
mod etcd;
mod faults;
mod members;
mod proxy;
mod suite;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_meta::{
    EtcdOptions, EtcdStore, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction,
};
use fulmar_workload::server::Etcd;
use tokio::task::block_in_place;

/// A deadline that only a fault exceeds.
const PATIENCE: Duration = Duration::from_secs(120);
/// The pause between polls of a condition.
const POLL: Duration = Duration::from_millis(10);

/// Options with a deadline that only a fault exceeds.
fn options(endpoints: Vec<String>) -> EtcdOptions {
    EtcdOptions { timeout: PATIENCE, ..EtcdOptions::new(endpoints, "test") }
}

/// Options for tests in which requests fail at their deadline.
fn impatient(endpoints: Vec<String>) -> EtcdOptions {
    EtcdOptions { timeout: Duration::from_secs(2), ..options(endpoints) }
}

/// Opens a store with [`impatient`] options. Repeats this if it exceeds the deadline.
async fn open_impatient(endpoints: Vec<String>) -> EtcdStore {
    eventually("a store is opened", async || EtcdStore::open(impatient(endpoints.clone())).await.ok()).await
}

/// The same, with an observer that has received its first snapshot.
async fn follow_impatient<O: Observer + Default + 'static>(endpoints: Vec<String>) -> (EtcdStore, Arc<O>) {
    eventually("a store is followed", async || {
        let store = open_impatient(endpoints.clone()).await;
        let observer = Arc::new(O::default());
        store.follow(observer.clone()).await.ok()?;
        Some((store, observer))
    })
    .await
}

async fn open(endpoints: Vec<String>) -> Arc<EtcdStore> {
    Arc::new(EtcdStore::open(options(endpoints)).await.unwrap())
}

fn start(members: usize) -> Etcd {
    block_in_place(|| Etcd::start(members).unwrap())
}

async fn commit(store: &dyn MetadataStore, transaction: Transaction) -> Revision {
    match store.transact(transaction).await.unwrap() {
        Outcome::Committed(revision) => revision,
        Outcome::Conflict(revision) => panic!("conflict at {revision:?}"),
    }
}

async fn put(store: &dyn MetadataStore, key: &str, value: &str) -> Result<Outcome, MetaError> {
    store.transact(Transaction::new().put(key, value)).await
}

/// Polls until `condition` returns a value.
async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, condition: impl Fn() -> F) -> T {
    let begin = Instant::now();
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(begin.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(POLL).await;
    }
}
