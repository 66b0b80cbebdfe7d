//! The etcd store on a single member.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, CompactionOptions, ConnectOptions, Permission, PermissionType};
use fulmar_meta::{
    EtcdOptions, EtcdStore, EtcdTls, MetaError, MetadataStore, Outcome, Revision, Transaction,
};
use fulmar_workload::server::{Etcd, EtcdSetup, certificate};
use tokio::task::block_in_place;

use crate::proxy::{Fault, Proxy};
use crate::suite::{self, RecordingObserver};
use crate::{commit, eventually, impatient, open, options, put, start};

async fn client(etcd: &Etcd) -> Client {
    Client::connect(etcd.endpoints(), None).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_conforms() {
    let etcd = start(1);
    suite::conforms(&[open(etcd.endpoints()).await, open(etcd.endpoints()).await]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_conforms_through_a_slow_network() {
    let etcd = start(1);
    let proxy = Proxy::start(&etcd.endpoints()[0]).await;
    proxy.set(Fault::Delay(Duration::from_millis(4)));
    suite::conforms(&[open(vec![proxy.endpoint()]).await, open(etcd.endpoints()).await]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clusters_that_share_an_etcd_are_separate() {
    let etcd = start(1);
    let cluster = |name: &str| EtcdOptions { cluster: name.to_owned(), ..options(etcd.endpoints()) };
    let a = EtcdStore::open(cluster("a")).await.unwrap();
    let b = EtcdStore::open(cluster("a-b")).await.unwrap();
    assert_ne!(a.cluster_id(), b.cluster_id());
    let observer = Arc::new(RecordingObserver::default());
    a.follow(observer.clone()).await.unwrap();
    let revision = commit(&a, Transaction::new().put("k", "a")).await;
    commit(&b, Transaction::new().put("k", "b").put("only in b", "b")).await;
    // The changes of another cluster are no conflict, and not part of the revision.
    assert_eq!(commit(&a, Transaction::new().unchanged("k", revision)).await, revision);
    assert_eq!(a.scan("").await.unwrap().len(), 1);
    commit(&a, Transaction::new().put("end", "a")).await;
    let changes: Vec<String> =
        observer.changes.lock().unwrap().iter().map(|change| change.key.clone()).collect();
    assert_eq!(changes, ["k", "end"]);

    let again = EtcdStore::open(cluster("a")).await.unwrap();
    assert_eq!(again.cluster_id(), a.cluster_id(), "the id of a cluster is permanent");
    let invalid = EtcdStore::open(cluster("a/b")).await.unwrap_err();
    assert!(invalid.remedy().contains("hyphen"), "{invalid}");
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_creations_agree_on_the_cluster_id() {
    let etcd = start(1);
    let opens = (0..8).map(|_| EtcdStore::open(options(etcd.endpoints())));
    let stores = futures::future::try_join_all(opens).await.unwrap();
    assert!(stores.iter().all(|store| store.cluster_id() == stores[0].cluster_id()));
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_without_operations_is_not_proposed_to_raft() {
    let etcd = start(1);
    let store = open(etcd.endpoints()).await;
    let revision = commit(&*store, Transaction::new().put("node/1", "alive")).await;
    let mut client = client(&etcd).await;
    let before = client.status().await.unwrap();
    for _ in 0..100 {
        assert_eq!(commit(&*store, Transaction::new().unchanged("node/1", revision)).await, revision);
    }
    let after = client.status().await.unwrap();
    assert_eq!(after.header().unwrap().revision(), before.header().unwrap().revision());
    let proposals = after.raft_index() - before.raft_index();
    assert!(proposals < 100, "{proposals} proposals; etcd itself makes a few");
}

#[tokio::test(flavor = "multi_thread")]
async fn full_etcd_rejects_changes_but_not_leases() {
    let setup =
        EtcdSetup { arguments: vec!["--quota-backend-bytes=16777216".to_owned()], ..EtcdSetup::default() };
    let etcd = block_in_place(|| Etcd::start_with(1, setup)).unwrap();
    let store = open(etcd.endpoints()).await;
    let alive = commit(&*store, Transaction::new().put("node/1", "alive")).await;
    let full = loop {
        match store.transact(Transaction::new().put("large", vec![7; 1 << 20])).await {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(full, MetaError::OutOfSpace { .. }), "{full}");
    assert!(full.to_string().contains("made no change"), "{full}");
    assert!(full.remedy().contains("etcdctl alarm disarm"), "{}", full.remedy());
    // The lease, and reads.
    let renewed = store.transact(Transaction::new().unchanged("node/1", alive)).await.unwrap();
    assert!(matches!(renewed, Outcome::Committed(_)));
    assert_eq!(store.get("node/1").await.unwrap().unwrap().value, b"alive");

    // The documented remedy.
    let mut client = client(&etcd).await;
    let revision = client.status().await.unwrap().header().unwrap().revision();
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.unwrap();
    client.defragment().await.unwrap();
    block_in_place(|| etcd.etcdctl(&["alarm", "disarm"])).unwrap();
    put(&*store, "small", "1").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn authentication_with_simple_tokens() {
    authentication_is_enforced_and_renewed(&start(1)).await;
}

/// These tokens become invalid with every change of users and roles.
#[tokio::test(flavor = "multi_thread")]
async fn authentication_with_signed_tokens() {
    let directory = tempfile::tempdir().unwrap();
    let key = certificate(directory.path(), "token", &[]).unwrap().key;
    let argument = format!("--auth-token=jwt,sign-method=ES256,priv-key={}", key.display());
    let setup = EtcdSetup { arguments: vec![argument], ..EtcdSetup::default() };
    let etcd = block_in_place(|| Etcd::start_with(1, setup)).unwrap();
    authentication_is_enforced_and_renewed(&etcd).await;
}

async fn authentication_is_enforced_and_renewed(etcd: &Etcd) {
    let mut root = client(etcd).await;
    for role in ["fulmar", "unused"] {
        root.role_add(role).await.unwrap();
    }
    let prefix = || Permission::new(PermissionType::Readwrite, "/fulmar/test/").with_prefix();
    root.role_grant_permission("fulmar", prefix()).await.unwrap();
    for (user, role) in [("root", "root"), ("node", "fulmar"), ("guest", "none")] {
        root.user_add(user, "secret", None).await.unwrap();
        if role == "none" {
            root.role_add("none").await.unwrap();
        }
        root.user_grant_role(user, role).await.unwrap();
    }
    root.auth_enable().await.unwrap();
    let login = ConnectOptions::new().with_user("root", "secret");
    let mut root = Client::connect(etcd.endpoints(), Some(login)).await.unwrap();

    let with_user = |user: Option<(&str, &str)>| EtcdOptions {
        user: user.map(|(name, password)| (name.to_owned(), password.to_owned())),
        ..options(etcd.endpoints())
    };
    for (user, remedy) in [
        (None, "--meta-password-file"),
        (Some(("node", "wrong")), "--meta-password-file"),
        (Some(("guest", "secret")), "readwrite"),
    ] {
        let denied = EtcdStore::open(with_user(user)).await.unwrap_err();
        assert!(matches!(denied, MetaError::PermissionDenied { .. }), "{user:?}: {denied}");
        assert!(denied.remedy().contains(remedy), "{user:?}: {}", denied.remedy());
    }
    let node = || with_user(Some(("node", "secret")));
    let other = EtcdStore::open(node()).await.unwrap();
    let proxy = Proxy::start(&etcd.endpoints()[0]).await;
    let through_proxy = EtcdOptions { endpoints: vec![proxy.endpoint()], ..node() };
    let store = EtcdStore::open(through_proxy).await.unwrap();
    let observer = Arc::new(RecordingObserver::default());
    store.follow(observer.clone()).await.unwrap();
    put(&store, "k", "1").await.unwrap();
    root.role_grant_permission("none", prefix()).await.unwrap();
    put(&store, "k", "2").await.unwrap();
    assert_eq!(store.get("k").await.unwrap().unwrap().value, b"2");
    // The watch, which the store opens again without any other request.
    root.role_delete("unused").await.unwrap();
    proxy.cut_once();
    put(&other, "other", "1").await.unwrap();
    let seen = async || (observer.changes.lock().unwrap().len() == 3).then_some(());
    eventually("the watch continues with a new token", seen).await;
    root.user_change_password("node", "other").await.unwrap();
    let denied = eventually("the old password is rejected", async || put(&store, "k", "3").await.err()).await;
    assert!(matches!(denied, MetaError::PermissionDenied { .. }), "{denied}");
    assert_eq!(observer.changes.lock().unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn user_without_authentication_in_etcd_is_rejected() {
    let etcd = start(1);
    let user = Some(("node".to_owned(), "secret".to_owned()));
    let error = EtcdStore::open(EtcdOptions { user, ..options(etcd.endpoints()) }).await.unwrap_err();
    assert!(error.remedy().contains("auth enable"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_client_certificates() {
    let setup = EtcdSetup { tls: true, ..EtcdSetup::default() };
    let etcd = block_in_place(|| Etcd::start_with(1, setup)).unwrap();
    let certificates = etcd.certificates().unwrap();
    let read = |path| std::fs::read(path).unwrap();
    let authority = read(&certificates.authority.certificate);
    let identity = (read(&certificates.client.certificate), read(&certificates.client.key));
    let tls = EtcdTls { ca_pem: authority.clone(), identity_pem: Some(identity.clone()) };
    let store = EtcdStore::open(EtcdOptions { tls: Some(tls), ..options(etcd.endpoints()) }).await.unwrap();
    put(&store, "k", "1").await.unwrap();
    assert_eq!(store.get("k").await.unwrap().unwrap().value, b"1");

    let no_identity = EtcdTls { ca_pem: authority, identity_pem: None };
    let other_authority = EtcdTls { ca_pem: identity.0.clone(), identity_pem: Some(identity) };
    for tls in [None, Some(no_identity), Some(other_authority)] {
        let error = EtcdStore::open(EtcdOptions { tls, ..impatient(etcd.endpoints()) }).await.unwrap_err();
        assert!(matches!(error, MetaError::Unavailable { .. }), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_restored_from_an_old_backup_is_rejected() {
    let mut etcd = start(1);
    let running = open(etcd.endpoints()).await;
    put(&*running, "k", "old").await.unwrap();
    let backup = etcd.path("backup");
    block_in_place(|| etcd.etcdctl(&["snapshot", "save", backup.to_str().unwrap()])).unwrap();
    let in_backup = running.revision();
    put(&*running, "k", "new").await.unwrap();
    let floor = running.revision();
    block_in_place(|| etcd.restore(&backup)).unwrap();

    let with_floor = |floor: Revision| EtcdOptions { floor, ..options(etcd.endpoints()) };
    for damaged in [
        running.get("k").await.map(drop),
        put(&*running, "k", "newer").await.map(drop),
        EtcdStore::open(with_floor(floor)).await.map(drop),
    ] {
        let error = damaged.unwrap_err();
        assert!(matches!(error, MetaError::Damaged { .. }), "{error}");
        assert!(error.remedy().contains("old backup"), "{}", error.remedy());
    }
    // Nothing was changed, and a floor that the backup has reached is accepted.
    let store = EtcdStore::open(with_floor(in_backup)).await.unwrap();
    assert_eq!(store.get("k").await.unwrap().unwrap().value, b"old");
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_cluster_is_rejected() {
    let etcd = start(1);
    let running = open(etcd.endpoints()).await;
    put(&*running, "k", "1").await.unwrap();
    let all = etcd_client::DeleteOptions::new().with_prefix();
    client(&etcd).await.delete("/fulmar/test/", Some(all)).await.unwrap();
    let floor = running.revision();
    for damaged in [
        running.get("k").await.map(drop),
        put(&*running, "k", "2").await.map(drop),
        EtcdStore::open(EtcdOptions { floor, ..options(etcd.endpoints()) }).await.map(drop),
    ] {
        let error = damaged.unwrap_err();
        assert!(matches!(error, MetaError::Damaged { .. }), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_addresses_are_rejected() {
    let error = async |endpoints: &[&str]| {
        let endpoints = endpoints.iter().map(|endpoint| (*endpoint).to_owned()).collect();
        EtcdStore::open(impatient(endpoints)).await.unwrap_err()
    };
    for invalid in [&[][..], &["http://127.0.0.1:2379"], &["no spaces:1"]] {
        let error = error(invalid).await;
        assert!(error.remedy().contains("HOST:PORT"), "{error}");
    }
    // Nothing listens on port 1.
    let error = error(&["127.0.0.1:1"]).await;
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    assert!(error.remedy().contains("majority"), "{}", error.remedy());
}
