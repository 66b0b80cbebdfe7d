//! Three members: a killed leader, a lost majority, hanging members.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use etcd_client::Client;
use fulmar_meta::{EtcdStore, MetaError, MetadataStore, Outcome, Transaction};
use fulmar_workload::server::Etcd;
use tokio::task::block_in_place;

use crate::suite::Replica;
use crate::{commit, eventually, follow_impatient, impatient, open, options, put, start};

/// The index of the leader.
async fn leader(etcd: &Etcd) -> usize {
    let endpoints = etcd.endpoints();
    // An election may end between the answers of two members.
    eventually("a member is the leader", async || {
        for (index, endpoint) in endpoints.iter().enumerate() {
            let mut client = Client::connect([endpoint], None).await.unwrap();
            let status = client.status().await.unwrap();
            if status.leader() == status.header().unwrap().member_id() {
                return Some(index);
            }
        }
        None
    })
    .await
}

async fn replica_is_exact(store: &EtcdStore, replica: &Replica) {
    eventually("a change succeeds", async || put(store, "end", "1").await.ok()).await;
    let entries = eventually("a scan succeeds", async || store.scan("").await.ok()).await;
    assert!(replica.entries() == entries);
}

/// A lease renewal, and reads: they fail only if there is no majority.
async fn reads(store: &EtcdStore) -> Result<(), MetaError> {
    let Some(entry) = store.get("k").await? else { return Ok(()) };
    let renewed = store.transact(Transaction::new().unchanged("k", entry.modified)).await?;
    assert!(matches!(renewed, Outcome::Committed(_)));
    store.scan("").await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_leader_loses_and_repeats_nothing() {
    let mut etcd = start(3);
    let store = open(etcd.endpoints()).await;
    let replica = Arc::new(Replica::default());
    store.follow(replica.clone()).await.unwrap();
    commit(&*store, Transaction::new().put("count", "0")).await;
    let (is_stopping, acknowledged, unknown) =
        (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counter = tokio::spawn({
        let (store, is_stopping) = (store.clone(), is_stopping.clone());
        let (acknowledged, unknown) = (acknowledged.clone(), unknown.clone());
        async move {
            while !is_stopping.load(Ordering::Acquire) {
                let entry = store.get("count").await.unwrap().unwrap();
                let count: usize = std::str::from_utf8(&entry.value).unwrap().parse().unwrap();
                let next = Transaction::new().unchanged("count", entry.modified);
                match store.transact(next.put("count", (count + 1).to_string())).await {
                    Ok(Outcome::Committed(_)) => acknowledged.fetch_add(1, Ordering::AcqRel),
                    // The earlier attempt with an unknown outcome was applied after the read.
                    Ok(Outcome::Conflict(_)) | Err(MetaError::Unavailable { .. }) => 0,
                    Err(MetaError::OutcomeUnknown { .. }) => unknown.fetch_add(1, Ordering::AcqRel),
                    Err(error) => panic!("{error}"),
                };
            }
        }
    });
    let progressed = async |more: usize| {
        let target = acknowledged.load(Ordering::Acquire) + more;
        eventually("changes succeed", async || {
            (acknowledged.load(Ordering::Acquire) >= target).then_some(())
        })
        .await;
    };
    for _ in 0..2 {
        progressed(20).await;
        let killed = leader(&etcd).await;
        block_in_place(|| etcd.kill(killed)).unwrap();
        progressed(20).await;
        block_in_place(|| etcd.start_again(killed).and_then(|()| etcd.wait_until_healthy(killed))).unwrap();
    }
    is_stopping.store(true, Ordering::Release);
    counter.await.unwrap();
    let count = store.get("count").await.unwrap().unwrap().value;
    let count: usize = String::from_utf8(count).unwrap().parse().unwrap();
    let (acknowledged, unknown) = (acknowledged.load(Ordering::Acquire), unknown.load(Ordering::Acquire));
    assert!(
        (acknowledged..=acknowledged + unknown).contains(&count),
        "{count} increments of {acknowledged} acknowledged and {unknown} unknown ones"
    );
    replica_is_exact(&store, &replica).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn minority_rejects_all_requests() {
    let mut etcd = start(3);
    let (store, replica): (_, Arc<Replica>) = follow_impatient(etcd.endpoints()).await;
    eventually("a change succeeds", async || put(&store, "k", "1").await.ok()).await;
    let read = eventually("a read succeeds", async || store.get("k").await.ok()).await;
    let revision = read.unwrap().modified;
    for member in [0, 2] {
        block_in_place(|| etcd.kill(member)).unwrap();
    }
    // The remaining member must not confirm a lease: the others may have been cut off instead, and
    // may have ended the node's incarnation.
    let renewal = store.transact(Transaction::new().unchanged("k", revision)).await;
    for rejected in [renewal.map(drop), store.get("k").await.map(drop), store.scan("").await.map(drop)] {
        let error = rejected.unwrap_err();
        assert!(matches!(error, MetaError::Unavailable { .. }), "{error}");
        assert!(error.to_string().contains("no majority"), "{error}");
        assert!(error.remedy().contains("endpoint health"), "{}", error.remedy());
    }
    let error = put(&store, "k", "2").await.unwrap_err();
    assert!(matches!(error, MetaError::Unavailable { .. } | MetaError::OutcomeUnknown { .. }), "{error}");
    let error = EtcdStore::open(impatient(etcd.endpoints())).await.unwrap_err();
    assert!(error.to_string().contains("no majority"), "{error}");

    block_in_place(|| etcd.start_again(2)).unwrap();
    eventually("reads succeed with two of three members", async || reads(&store).await.ok()).await;
    replica_is_exact(&store, &replica).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_member_delays_no_read_until_the_deadline() {
    let etcd = start(3);
    let store = open(etcd.endpoints()).await;
    let replica = Arc::new(Replica::default());
    store.follow(replica.clone()).await.unwrap();
    commit(&*store, Transaction::new().put("k", "1")).await;
    for frozen in 0..3 {
        etcd.freeze(frozen).unwrap();
        // Finds a member that answers. The frozen one may have been the leader.
        reads(&store).await.unwrap();
        commit(&*store, Transaction::new().put("k", frozen.to_string())).await;
        assert!(replica.entries() == store.scan("").await.unwrap());
        etcd.thaw(frozen).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_different_etcd_clusters_are_rejected() {
    let (one, mut other) = (start(1), start(1));
    // Another token gives the second cluster another id, as any real one has.
    let backup = other.path("backup");
    block_in_place(|| other.etcdctl(&["snapshot", "save", backup.to_str().unwrap()])).unwrap();
    block_in_place(|| other.restore(&backup)).unwrap();
    let both = [one.endpoints(), other.endpoints()].concat();
    let mut one = one;
    let store = EtcdStore::open(options(both)).await.unwrap();
    put(&store, "k", "1").await.unwrap();
    block_in_place(|| one.kill(0)).unwrap();
    let error = store.get("k").await.unwrap_err();
    assert!(matches!(error, MetaError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("has the id"), "{error}");
}
