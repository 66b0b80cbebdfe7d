//! Catalog replication through the object store: replicas see the changes of the primary.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_meta::{
    Access, Catalog, CatalogReplica, Embedded, Entry, MetaError, MetadataStore, Publisher, ScramVerifier,
    Transaction,
};
use fulmar_pages::{CatalogEntry, StoredCatalog};
use fulmar_store::{Backend, FailureKind, FaultyStore, PageStore, Store, StoreFault, StoreOperation};

const NODE: u128 = 7;

struct Owner {
    metadata: Arc<dyn MetadataStore>,
    catalog: Arc<Catalog>,
    publisher: Publisher,
    _directory: tempfile::TempDir,
}

async fn owner(store: &Backend) -> Owner {
    owner_over(PageStore::open(Arc::new(store.clone()))).await
}

async fn owner_over(store: PageStore) -> Owner {
    let directory = tempfile::tempdir().unwrap();
    let metadata: Arc<dyn MetadataStore> =
        Arc::new(Embedded::open(&directory.path().join("meta.db")).unwrap());
    let catalog = Catalog::open(metadata.clone()).await.unwrap();
    let publisher = Publisher::start(metadata.clone(), store, NODE);
    Owner { metadata, catalog, publisher, _directory: directory }
}

fn pages(store: &Backend) -> PageStore {
    PageStore::open(Arc::new(store.clone()))
}

async fn names(store: &Backend) -> Vec<String> {
    store.list("catalog", None).await.unwrap().names
}

/// Waits until `holds` returns true. Publication is asynchronous.
async fn wait_until(description: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < Duration::from_secs(120), "timed out: {description}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Opens a replica of the catalog.
async fn open_replica(store: &Backend) -> (Arc<CatalogReplica>, Arc<Catalog>) {
    wait_until("a catalog is published", async || !names(store).await.is_empty()).await;
    let followed = CatalogReplica::open(pages(store)).await.unwrap();
    let catalog = Catalog::read_only(followed.clone()).await.unwrap();
    (followed, catalog)
}

async fn tenant(catalog: &Catalog, name: &str) {
    let tenant = catalog.create_tenant(name, "fulmar").await.unwrap();
    catalog.finish_create(&tenant).await.unwrap();
}

fn verifier(byte: u8) -> ScramVerifier {
    ScramVerifier {
        salt: vec![byte; 16],
        iterations: 4096,
        stored_key: vec![byte; 32],
        server_key: vec![byte; 32],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_sees_changes() {
    let store = Backend::memory();
    let owner = owner(&store).await;
    let (followed, catalog) = open_replica(&store).await;
    assert_eq!(followed.node(), NODE);
    assert!(catalog.tenant("fulmar").is_some() && catalog.tenant("shop").is_none());
    tenant(&owner.catalog, "shop").await;
    owner.catalog.create_user("ada", false, Some(verifier(1))).await.unwrap();
    let rights = catalog.privileges_generation();
    wait_until("the user is visible", async || {
        followed.poll().await.unwrap();
        catalog.user("ada").is_some()
    })
    .await;
    assert_ne!(catalog.privileges_generation(), rights, "privileges have changed");
    let shop = catalog.tenant("shop").unwrap();
    assert_eq!(catalog.tenant_of(shop.partition), Some(shop.clone()));
    assert_eq!(catalog.partition(shop.partition).unwrap().epoch, 1);

    let limits = catalog.live_limits(&shop);
    owner.catalog.rename_tenant("shop", "store").await.unwrap();
    owner.catalog.alter_user_password("ada", Some(verifier(2))).await.unwrap();
    owner.catalog.grant("store", "ada", Access::ReadOnly).await.unwrap();
    wait_until("all changes are visible", async || {
        followed.poll().await.unwrap();
        let store = catalog.tenant("store");
        store.is_some_and(|store| {
            catalog.access(&catalog.user("ada").unwrap(), &store) == Some(Access::ReadOnly)
        })
    })
    .await;
    assert!(catalog.tenant("shop").is_none());
    assert_eq!(catalog.tenant_of(shop.partition).unwrap().name, "store");
    assert_eq!(catalog.user("ada").unwrap().verifier, Some(verifier(2)));
    assert!(Arc::ptr_eq(&limits, &catalog.live_limits(&shop)), "live limits must be kept");
    owner
        .catalog
        .alter_limits("store", |limits| limits.set(fulmar_meta::Limit::MaxConnections, Some(3)))
        .await
        .unwrap();
    // The shutdown publishes pending changes.
    owner.publisher.stop().await;
    followed.poll().await.unwrap();
    assert_eq!(limits.get(fulmar_meta::Limit::MaxConnections), Some(3));
    wait_until("older catalogs are deleted", async || names(&store).await.len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replica_rejects_changes() {
    let store = Backend::memory();
    let _owner = owner(&store).await;
    let (followed, catalog) = open_replica(&store).await;
    let refused = followed.transact(Transaction::new().put("x", "1")).await;
    assert_eq!(refused, Err(MetaError::ReadOnly));
    let refused = catalog.create_tenant("shop", "fulmar").await.unwrap_err();
    assert!(refused.remedy().contains("the primary node"), "{refused}");
    // It has the same contents as the primary's metadata store.
    for prefix in ["", "tenant/", "user/f", "nothing"] {
        let here: Vec<Entry> = followed.scan(prefix).await.unwrap();
        assert_eq!(here, _owner.metadata.scan(prefix).await.unwrap(), "{prefix}");
    }
    assert_eq!(followed.get("tenant/fulmar").await, _owner.metadata.get("tenant/fulmar").await);
    assert_eq!(followed.get("tenant/none").await, Ok(None));
}

/// The primary's data directory was restored from a backup, or the store contains garbage: the
/// primary publishes under a new number.
#[tokio::test(flavor = "multi_thread")]
async fn primary_replaces_newer_and_damaged_catalogs() {
    let store = Backend::memory();
    let entry = |key: &str| CatalogEntry { key: key.to_owned(), value: b"{}".to_vec(), modified: 1 << 40 };
    let before = StoredCatalog { number: 41, node: NODE, entries: vec![entry("zz/of later")] };
    pages(&store).put_catalog(&before).await.unwrap();
    store.put("catalog/000000000000002a", b"garbage".as_slice().into()).await.unwrap();
    let refused = CatalogReplica::open(pages(&store)).await.map(drop).unwrap_err();
    assert!(matches!(&refused, MetaError::Corrupt { .. }), "{refused}");
    assert!(refused.to_string().contains("catalog/000000000000002a"), "{refused}");
    let owner = owner(&store).await;
    wait_until("publication", async || names(&store).await == ["catalog/000000000000002b"]).await;
    let (followed, catalog) = open_replica(&store).await;
    assert_eq!(followed.get("zz/of later").await, Ok(None));
    assert!(catalog.tenant("fulmar").is_some());
    // Garbage under the next number: the replica keeps the last known catalog until the primary
    // publishes again.
    store.put("catalog/000000000000002c", b"garbage".as_slice().into()).await.unwrap();
    assert!(matches!(followed.poll().await, Err(MetaError::Corrupt { .. })));
    assert!(catalog.tenant("fulmar").is_some());
    tenant(&owner.catalog, "shop").await;
    wait_until("the number after the garbage is used", async || {
        followed.poll().await.is_ok() && catalog.tenant("shop").is_some()
    })
    .await;
    // All catalogs are deleted manually: the next change publishes again.
    for name in names(&store).await {
        store.delete(&name).await.unwrap();
    }
    followed.poll().await.unwrap();
    tenant(&owner.catalog, "another").await;
    wait_until("the catalog is published again", async || {
        followed.poll().await.is_ok() && catalog.tenant("another").is_some()
    })
    .await;
    // The catalog of another node.
    let other = StoredCatalog { number: 1 << 40, node: NODE + 1, entries: Vec::new() };
    pages(&store).put_catalog(&other).await.unwrap();
    let refused = followed.poll().await.unwrap_err();
    assert!(refused.to_string().contains("another node"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unchanged_catalog_is_not_published_again() {
    let store = Backend::memory();
    let first = owner(&store).await;
    wait_until("the catalog is published", async || !names(&store).await.is_empty()).await;
    first.publisher.stop().await;
    let published = names(&store).await;
    let again = Publisher::start(first.metadata.clone(), pages(&store), NODE);
    again.stop().await;
    assert_eq!(names(&store).await, published);
}

/// The earlier process publishes, and deletes catalogs that it listed before the takeover.
#[tokio::test(flavor = "multi_thread")]
async fn catalog_of_the_later_term_wins() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    let zombie_store = PageStore::open(Arc::new(faulty.clone()));
    let first = zombie_store.start_term().await.unwrap();
    let zombie = owner_over(zombie_store.in_term(&first)).await;
    wait_until("publication", async || names(&store).await == ["catalog/0000010000000000"]).await;
    faulty.hold(StoreOperation::Delete, true);
    tenant(&zombie.catalog, "early").await;
    // It is about to delete the catalogs before its newest one.
    faulty.is_holding().await;
    let second = pages(&store).start_term().await.unwrap();
    let successor = owner_over(pages(&store).in_term(&second)).await;
    wait_until("deletion of older ones", async || names(&store).await == ["catalog/0000020000000000"]).await;
    faulty.hold(StoreOperation::Delete, false);
    tenant(&zombie.catalog, "late").await;
    zombie.publisher.stop().await;
    assert_eq!(names(&store).await, ["catalog/0000010000000002", "catalog/0000020000000000"]);
    let (followed, catalog) = open_replica(&store).await;
    assert!(catalog.tenant("fulmar").is_some() && catalog.tenant("late").is_none());
    tenant(&successor.catalog, "shop").await;
    wait_until("the successor's change is visible", async || {
        followed.poll().await.is_ok() && catalog.tenant("shop").is_some()
    })
    .await;
    assert!(catalog.tenant("early").is_none());
    // A zombie that has not published yet detects the takeover before it publishes.
    successor.publisher.stop().await;
    let published = names(&store).await;
    assert!(published.len() == 1 && published[0].starts_with("catalog/000002"), "{published:?}");
    let late = Publisher::start(zombie.metadata.clone(), pages(&store).in_term(&first), NODE);
    late.stop().await;
    assert_eq!(names(&store).await, published);
}

/// The process of an earlier term could still publish another catalog, so equal contents do not
/// suffice.
#[tokio::test(flavor = "multi_thread")]
async fn each_term_publishes_its_own_catalog() {
    let store = Backend::memory();
    let first = owner_over(pages(&store)).await;
    wait_until("publication", async || names(&store).await == ["catalog/0000000000000001"]).await;
    first.publisher.stop().await;
    for published in ["catalog/0000010000000000", "catalog/0000020000000000"] {
        let term = pages(&store).start_term().await.unwrap();
        let of_term = pages(&store).in_term(&term);
        let again = Publisher::start(first.metadata.clone(), of_term, NODE);
        wait_until("this term has published", async || names(&store).await == [published]).await;
        again.stop().await;
    }
}

/// A failing store does not delay changes. They are published when it works again.
#[tokio::test(flavor = "multi_thread")]
async fn failing_store_delays_publication_only() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    faulty.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
    let owner = owner_over(PageStore::open(Arc::new(faulty.clone()))).await;
    tenant(&owner.catalog, "shop").await;
    let missing = CatalogReplica::open(pages(&store)).await.map(drop).unwrap_err();
    assert!(missing.remedy().contains("start that node once"), "{missing}");
    faulty.always(StoreOperation::Put, None);
    let (replica, catalog) = open_replica(&store).await;
    wait_until("the change is published", async || {
        replica.poll().await.is_ok() && catalog.tenant("shop").is_some()
    })
    .await;
    owner.publisher.stop().await;
}
