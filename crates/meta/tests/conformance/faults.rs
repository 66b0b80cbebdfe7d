//! One member behind a proxy that cuts connections, hangs and loses answers.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use etcd_client::Client;
use fulmar_meta::{Change, Entry, EtcdStore, MetaError, MetadataStore, Observer, Outcome, Transaction};
use fulmar_workload::server::Etcd;
use rand::RngExt;

use crate::proxy::{Fault, Proxy};
use crate::suite::{RecordingObserver, Replica};
use crate::{commit, eventually, follow_impatient, open, open_impatient, put, start};

/// An etcd, a client through a proxy, and one without.
struct Faulty {
    etcd: Etcd,
    proxy: Proxy,
    store: Arc<EtcdStore>,
    direct: Arc<EtcdStore>,
}

impl Faulty {
    async fn start() -> Faulty {
        let etcd = start(1);
        let proxy = Proxy::start(&etcd.endpoints()[0]).await;
        let store = open(vec![proxy.endpoint()]).await;
        let direct = open(etcd.endpoints()).await;
        Faulty { etcd, proxy, store, direct }
    }

    /// Compacts everything before the current revision.
    async fn compact(&self) {
        let mut client = Client::connect(self.etcd.endpoints(), None).await.unwrap();
        let revision = client.status().await.unwrap().header().unwrap().revision();
        client.compact(revision, None).await.unwrap();
    }

    async fn replica_is_exact(&self, replica: &Replica) {
        let expected = self.direct.scan("").await.unwrap();
        eventually("the replica is exact", async || (replica.entries() == expected).then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answer_of_a_change_is_an_unknown_outcome() {
    let Faulty { proxy, store, direct, .. } = &Faulty::start().await;
    let replica = Arc::new(Replica::default());
    store.follow(replica.clone()).await.unwrap();
    proxy.set(Fault::LoseAnswers);
    let changed = tokio::spawn({
        let store = store.clone();
        async move { put(&*store, "k", "applied").await }
    });
    let is_applied = async || direct.get("k").await.unwrap();
    let applied = eventually("the change is applied", is_applied).await;
    assert!(!changed.is_finished(), "its answer is lost");
    proxy.set(Fault::None);
    let error = changed.await.unwrap().unwrap_err();
    assert!(matches!(error, MetaError::OutcomeUnknown { .. }), "{error}");
    assert!(error.to_string().contains("outcome of this change is not known"), "{error}");
    // Another compare-and-set settles it, and shows it to the observers.
    let settled = store.transact(Transaction::new().absent("k").put("k", "again")).await.unwrap();
    assert!(matches!(settled, Outcome::Conflict(_)));
    assert_eq!(replica.entries(), [applied]);
}

/// Lost answers of reads and of lease renewals are retried, because these change nothing.
#[tokio::test(flavor = "multi_thread")]
async fn reads_survive_cut_connections() {
    let Faulty { proxy, store, .. } = &Faulty::start().await;
    let revision = commit(&**store, Transaction::new().put("k", "1")).await;
    for _ in 0..20 {
        proxy.cut_once();
        assert_eq!(store.get("k").await.unwrap().unwrap().modified, revision);
        proxy.cut_once();
        assert_eq!(store.scan("").await.unwrap().len(), 1);
        proxy.cut_once();
        let renewed = store.transact(Transaction::new().unchanged("k", revision)).await.unwrap();
        assert_eq!(renewed, Outcome::Committed(revision));
    }
}

/// What became of the attempts of all tasks.
#[derive(Default)]
struct Attempts {
    committed: BTreeSet<String>,
    unknown: BTreeSet<String>,
}

/// After a network was cut, its connections are silent for longer than the cut has lasted.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connection_is_replaced() {
    let Faulty { proxy, store, direct, .. } = &Faulty::start().await;
    let replica = Arc::new(Replica::default());
    store.follow(replica.clone()).await.unwrap();
    for round in 0..3 {
        proxy.silence_once();
        let revision = commit(&**direct, Transaction::new().put("k", format!("{round}"))).await;
        assert_eq!(store.get("k").await.unwrap().unwrap().modified, revision);
        // The watch was on the same connection.
        eventually("the replica is exact", async || {
            (replica.entries() == direct.scan("").await.unwrap()).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn outcomes_and_observers_are_exact_while_connections_are_cut() {
    const TASKS: usize = 4;
    const CHANGES: usize = 25;
    let faulty = Arc::new(Faulty::start().await);
    let replica = Arc::new(Replica::default());
    faulty.store.follow(replica.clone()).await.unwrap();
    let attempts = Arc::new(Mutex::new(Attempts::default()));
    let is_done = Arc::new(AtomicBool::new(false));
    let cutter = tokio::spawn({
        let (faulty, is_done) = (faulty.clone(), is_done.clone());
        async move {
            while !is_done.load(Ordering::Acquire) {
                let pause = Duration::from_millis(rand::rng().random_range(20..200));
                tokio::time::sleep(pause).await;
                faulty.proxy.cut_once();
            }
        }
    });
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (faulty, replica, attempts) = (faulty.clone(), replica.clone(), attempts.clone());
            tokio::spawn(async move {
                let mut committed = 0;
                for attempt in 0.. {
                    let key = format!("attempt/{task}/{attempt}");
                    // A change that was sent twice would conflict with itself.
                    let change = Transaction::new().absent(key.as_str()).put(key.as_str(), "1");
                    match faulty.store.transact(change).await {
                        Ok(Outcome::Conflict(_)) => panic!("{key} was put by an earlier attempt"),
                        Ok(Outcome::Committed(_)) => {
                            let seen = replica.entries();
                            assert!(seen.iter().any(|entry| entry.key == key), "{key} was not notified");
                            attempts.lock().unwrap().committed.insert(key);
                            committed += 1;
                        }
                        Err(MetaError::OutcomeUnknown { .. }) => {
                            attempts.lock().unwrap().unknown.insert(key);
                        }
                        // Nothing was changed.
                        Err(MetaError::Unavailable { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                    if committed == CHANGES {
                        return;
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    is_done.store(true, Ordering::Release);
    cutter.await.unwrap();

    let entries = faulty.direct.scan("attempt/").await.unwrap();
    let found: BTreeSet<String> = entries.into_iter().map(|entry| entry.key).collect();
    let Attempts { committed, unknown } = std::mem::take(&mut *attempts.lock().unwrap());
    assert_eq!(committed.len(), TASKS * CHANGES);
    let lost: Vec<_> = committed.difference(&found).collect();
    assert!(lost.is_empty(), "acknowledged changes are lost: {lost:?}");
    let possible = committed.union(&unknown).cloned().collect();
    let denied: Vec<_> = found.difference(&possible).collect();
    assert!(denied.is_empty(), "changes that were reported as not made exist: {denied:?}");
    commit(&*faulty.store, Transaction::new().put("end", "1")).await;
    assert!(replica.entries() == faulty.direct.scan("").await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_watch_continues_without_a_snapshot() {
    let faulty = Faulty::start().await;
    let (replica, recorder) = (Arc::new(Replica::default()), Arc::new(RecordingObserver::default()));
    faulty.store.follow(replica.clone()).await.unwrap();
    faulty.store.follow(recorder.clone()).await.unwrap();
    for n in 0..5 {
        faulty.proxy.set(Fault::Cut);
        for key in ["a", "b", "c"] {
            commit(
                &*faulty.direct,
                Transaction::new().put(format!("{key}/{n}"), "1").delete(format!("{key}/{}", n - 1)),
            )
            .await;
        }
        faulty.proxy.set(Fault::None);
        faulty.replica_is_exact(&replica).await;
    }
    assert_eq!(recorder.snapshots.lock().unwrap().len(), 1, "nothing was compacted");
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_during_a_lost_watch_renews_the_snapshot() {
    let faulty = Faulty::start().await;
    let (replica, recorder) = (Arc::new(Replica::default()), Arc::new(RecordingObserver::default()));
    faulty.store.follow(replica.clone()).await.unwrap();
    faulty.store.follow(recorder.clone()).await.unwrap();
    commit(&*faulty.store, Transaction::new().put("kept", "1").put("deleted", "1")).await;

    faulty.proxy.set(Fault::Cut);
    commit(&*faulty.direct, Transaction::new().delete("deleted")).await;
    commit(&*faulty.direct, Transaction::new().put("new", "1")).await;
    faulty.compact().await;
    faulty.proxy.set(Fault::None);
    faulty.replica_is_exact(&replica).await;
    // The observers are called one after the other.
    let renewed = async || (recorder.snapshots.lock().unwrap().len() == 2).then_some(());
    eventually("the snapshot is renewed", renewed).await;
    // The watch continues after the snapshot.
    let revision = commit(&*faulty.store, Transaction::new().put("later", "1")).await;
    let last = recorder.changes.lock().unwrap().last().cloned();
    assert_eq!(last, Some(Change { key: "later".to_owned(), value: Some(b"1".to_vec()), revision }));
    faulty.replica_is_exact(&replica).await;
}

/// The head counts the transactions. If its count does not continue, events were lost.
#[tokio::test(flavor = "multi_thread")]
async fn gap_in_the_count_of_transactions_renews_the_snapshot() {
    let faulty = Faulty::start().await;
    let recorder = Arc::new(RecordingObserver::default());
    faulty.store.follow(recorder.clone()).await.unwrap();
    let mut client = Client::connect(faulty.etcd.endpoints(), None).await.unwrap();
    client.delete("/fulmar/test/head", None).await.unwrap();
    client.put("/fulmar/test/head", "{}", None).await.unwrap();
    let renewed = async || (recorder.snapshots.lock().unwrap().len() == 2).then_some(());
    eventually("the snapshot is renewed", renewed).await;
    commit(&*faulty.store, Transaction::new().put("k", "1")).await;
    assert_eq!(recorder.changes.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_watch_moves_to_another_address() {
    let etcd = start(1);
    let endpoint = &etcd.endpoints()[0];
    let proxies = [Proxy::start(endpoint).await, Proxy::start(endpoint).await];
    let store = open(proxies.iter().map(Proxy::endpoint).collect()).await;
    let replica = Arc::new(Replica::default());
    store.follow(replica.clone()).await.unwrap();
    let faults = [(0, Fault::LoseData), (1, Fault::Hang), (0, Fault::Hang), (1, Fault::LoseData)];
    for (n, fault) in faults {
        proxies[n].set(fault);
        // The read finds the address that answers, the transaction uses it, and then waits for the
        // watch.
        store.get("k").await.unwrap();
        commit(&*store, Transaction::new().put("k", format!("{fault:?}"))).await;
        assert_eq!(replica.entries(), store.scan("").await.unwrap());
        proxies[n].set(Fault::None);
    }
}

/// An observer that accepts only its first snapshot, until it is repaired.
#[derive(Default)]
struct Unwilling {
    snapshots: Mutex<usize>,
    is_repaired: AtomicBool,
}

impl Observer for Unwilling {
    fn snapshot(&self, _: Vec<Entry>) -> Result<(), MetaError> {
        let mut snapshots = self.snapshots.lock().unwrap();
        *snapshots += 1;
        if *snapshots == 1 || self.is_repaired.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(MetaError::Corrupt { place: "everything".to_owned(), cause: "test".to_owned() })
    }

    fn changed(&self, _: &[Change]) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn outcome_is_reported_with_a_stale_cache() {
    let faulty = Faulty::start().await;
    let (store, observer): (_, Arc<Unwilling>) = follow_impatient(vec![faulty.proxy.endpoint()]).await;
    faulty.proxy.set(Fault::Cut);
    commit(&*faulty.direct, Transaction::new().put("k", "1")).await;
    commit(&*faulty.direct, Transaction::new().put("k", "2")).await;
    faulty.compact().await;
    faulty.proxy.set(Fault::None);
    let is_stale = async || match put(&store, "k", "3").await {
        Err(error @ MetaError::CacheStale { .. }) => Some(error),
        _ => None,
    };
    let error = eventually("the cache is stale", is_stale).await;
    let Some(Outcome::Committed(revision)) = error.outcome() else { panic!("{error}") };
    assert_eq!(faulty.direct.get("k").await.unwrap().unwrap().modified, revision);
    assert!(error.to_string().contains("committed the change"), "{error}");
    // A lease does not depend on the cache.
    let renew = async || store.transact(Transaction::new().unchanged("k", revision)).await.ok();
    assert_eq!(eventually("the lease is renewed", renew).await, Outcome::Committed(revision));

    observer.is_repaired.store(true, Ordering::Release);
    eventually("the cache is current", async || put(&store, "k", "4").await.ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_follow_does_not_register_the_observer() {
    let faulty = Faulty::start().await;
    let store = open_impatient(vec![faulty.proxy.endpoint()]).await;
    faulty.proxy.set(Fault::Cut);
    let recorder = Arc::new(RecordingObserver::default());
    let error = store.follow(recorder.clone()).await.unwrap_err();
    assert!(matches!(error, MetaError::Unavailable { .. }), "{error}");
    faulty.proxy.set(Fault::None);
    // Without observers a transaction does not wait for the watch.
    eventually("a change succeeds", async || put(&store, "k", "1").await.ok()).await;
    assert!(recorder.changes.lock().unwrap().is_empty());
    eventually("the observer follows", async || store.follow(recorder.clone()).await.ok()).await;
    commit(&*faulty.direct, Transaction::new().put("k", "2")).await;
    let notified = async || (!recorder.changes.lock().unwrap().is_empty()).then_some(());
    eventually("the observer is notified", notified).await;
    assert_eq!(recorder.changes.lock().unwrap().len(), 1);
}
