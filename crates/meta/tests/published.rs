//! The catalog in the store: what its owner says, who reads beside it sees a moment later, whatever was there before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_meta::{
    Access, Catalog, Embedded, Entry, Followed, MetaError, MetadataStore, Publisher, ScramVerifier,
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

/// Waits until it is so: what is published comes a moment later.
async fn soon(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < Duration::from_secs(120), "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What a reader of the store shows.
async fn followed(store: &Backend) -> (Arc<Followed>, Arc<Catalog>) {
    soon("there is a catalog", async || !names(store).await.is_empty()).await;
    let followed = Followed::open(pages(store)).await.unwrap();
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
async fn who_follows_sees_what_changes() {
    let store = Backend::memory();
    let owner = owner(&store).await;
    let (followed, catalog) = followed(&store).await;
    assert_eq!(followed.node(), NODE);
    assert!(catalog.tenant("fulmar").is_some() && catalog.tenant("shop").is_none());
    tenant(&owner.catalog, "shop").await;
    owner.catalog.create_user("ada", false, Some(verifier(1))).await.unwrap();
    let rights = catalog.rights_generation();
    soon("the tenant is seen", async || {
        followed.look().await.unwrap();
        catalog.user("ada").is_some()
    })
    .await;
    assert_ne!(catalog.rights_generation(), rights, "sessions look at their rights anew");
    let shop = catalog.tenant("shop").unwrap();
    assert_eq!(catalog.tenant_of(shop.partition), Some(shop.clone()));
    assert_eq!(catalog.partition(shop.partition).unwrap().epoch, 1);

    let limits = catalog.live_limits(&shop);
    owner.catalog.rename_tenant("shop", "store").await.unwrap();
    owner.catalog.alter_user_password("ada", Some(verifier(2))).await.unwrap();
    owner.catalog.grant("store", "ada", Access::ReadOnly).await.unwrap();
    soon("all of it is seen", async || {
        followed.look().await.unwrap();
        let store = catalog.tenant("store");
        store.is_some_and(|store| {
            catalog.access(&catalog.user("ada").unwrap(), &store) == Some(Access::ReadOnly)
        })
    })
    .await;
    assert!(catalog.tenant("shop").is_none());
    assert_eq!(catalog.tenant_of(shop.partition).unwrap().name, "store");
    assert_eq!(catalog.user("ada").unwrap().verifier, Some(verifier(2)));
    assert!(Arc::ptr_eq(&limits, &catalog.live_limits(&shop)), "sessions hold them");
    owner
        .catalog
        .alter_limits("store", |limits| limits.set(fulmar_meta::Limit::MaxConnections, Some(3)))
        .await
        .unwrap();
    // Without waiting: the end of the node publishes what is not yet.
    owner.publisher.stop().await;
    followed.look().await.unwrap();
    assert_eq!(limits.get(fulmar_meta::Limit::MaxConnections), Some(3));
    soon("older ones are deleted", async || names(&store).await.len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_changed_by_who_follows() {
    let store = Backend::memory();
    let _owner = owner(&store).await;
    let (followed, catalog) = followed(&store).await;
    let refused = followed.transact(Transaction::new().put("x", "1")).await;
    assert_eq!(refused, Err(MetaError::ReadOnly));
    let refused = catalog.create_tenant("shop", "fulmar").await.unwrap_err();
    assert!(refused.remedy().contains("the node that owns the store"), "{refused}");
    // It answers as the owner's does.
    for prefix in ["", "tenant/", "user/f", "nothing"] {
        let here: Vec<Entry> = followed.scan(prefix).await.unwrap();
        assert_eq!(here, _owner.metadata.scan(prefix).await.unwrap(), "{prefix}");
    }
    assert_eq!(followed.get("tenant/fulmar").await, _owner.metadata.get("tenant/fulmar").await);
    assert_eq!(followed.get("tenant/none").await, Ok(None));
}

/// An owner whose data directory is of before, and one that finds garbage: what it says counts.
#[tokio::test(flavor = "multi_thread")]
async fn the_owner_has_the_last_word() {
    let store = Backend::memory();
    let entry = |key: &str| CatalogEntry { key: key.to_owned(), value: b"{}".to_vec(), modified: 1 << 40 };
    let before = StoredCatalog { number: 41, node: NODE, entries: vec![entry("zz/of later")] };
    pages(&store).put_catalog(&before).await.unwrap();
    store.put("catalog/000000000000002a", b"garbage".as_slice().into()).await.unwrap();
    let refused = Followed::open(pages(&store)).await.map(drop).unwrap_err();
    assert!(matches!(&refused, MetaError::Corrupt { .. }), "{refused}");
    assert!(refused.to_string().contains("catalog/000000000000002a"), "{refused}");
    let owner = owner(&store).await;
    soon("it is there", async || names(&store).await == ["catalog/000000000000002b"]).await;
    let (followed, catalog) = followed(&store).await;
    assert_eq!(followed.get("zz/of later").await, Ok(None));
    assert!(catalog.tenant("fulmar").is_some());
    // Garbage in the place of the next one: what was known goes on being shown, until the owner says something.
    store.put("catalog/000000000000002c", b"garbage".as_slice().into()).await.unwrap();
    assert!(matches!(followed.look().await, Err(MetaError::Corrupt { .. })));
    assert!(catalog.tenant("fulmar").is_some());
    tenant(&owner.catalog, "shop").await;
    soon("the number after the garbage is taken", async || {
        followed.look().await.is_ok() && catalog.tenant("shop").is_some()
    })
    .await;
    // Emptied by hand: it is put again with the next change.
    for name in names(&store).await {
        store.delete(&name).await.unwrap();
    }
    followed.look().await.unwrap();
    tenant(&owner.catalog, "another").await;
    soon("it is there again", async || followed.look().await.is_ok() && catalog.tenant("another").is_some())
        .await;
    // Somebody else's.
    let other = StoredCatalog { number: 1 << 40, node: NODE + 1, entries: Vec::new() };
    pages(&store).put_catalog(&other).await.unwrap();
    let refused = followed.look().await.unwrap_err();
    assert!(refused.to_string().contains("another node"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_not_changed_is_not_published_again() {
    let store = Backend::memory();
    let first = owner(&store).await;
    soon("it is there", async || !names(&store).await.is_empty()).await;
    first.publisher.stop().await;
    let published = names(&store).await;
    let again = Publisher::start(first.metadata.clone(), pages(&store), NODE);
    again.stop().await;
    assert_eq!(names(&store).await, published);
}

/// A process that does not know that the store has been taken over publishes, and deletes what it has found before that.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_owners_the_later_one_has_the_last_word() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    let of_zombie = PageStore::open(Arc::new(faulty.clone()));
    let first = of_zombie.begin_term().await.unwrap();
    let zombie = owner_over(of_zombie.in_term(&first)).await;
    soon("it is there", async || names(&store).await == ["catalog/0000010000000000"]).await;
    faulty.hold(StoreOperation::Delete, true);
    tenant(&zombie.catalog, "early").await;
    // What is before its newest is about to be deleted.
    faulty.is_holding().await;
    let second = pages(&store).begin_term().await.unwrap();
    let successor = owner_over(pages(&store).in_term(&second)).await;
    soon("it is the only one", async || names(&store).await == ["catalog/0000020000000000"]).await;
    faulty.hold(StoreOperation::Delete, false);
    tenant(&zombie.catalog, "late").await;
    zombie.publisher.stop().await;
    assert_eq!(names(&store).await, ["catalog/0000010000000002", "catalog/0000020000000000"]);
    let (followed, catalog) = followed(&store).await;
    assert!(catalog.tenant("fulmar").is_some() && catalog.tenant("late").is_none());
    tenant(&successor.catalog, "shop").await;
    soon("what the successor says is seen", async || {
        followed.look().await.is_ok() && catalog.tenant("shop").is_some()
    })
    .await;
    assert!(catalog.tenant("early").is_none());
    // One that has said nothing yet finds out before it does.
    successor.publisher.stop().await;
    let published = names(&store).await;
    assert!(published.len() == 1 && published[0].starts_with("catalog/000002"), "{published:?}");
    let late = Publisher::start(zombie.metadata.clone(), pages(&store).in_term(&first), NODE);
    late.stop().await;
    assert_eq!(names(&store).await, published);
}

/// The same catalog under an earlier term may be followed by what the process of that term goes on to say.
#[tokio::test(flavor = "multi_thread")]
async fn each_term_begins_with_a_catalog_of_its_own() {
    let store = Backend::memory();
    let first = owner_over(pages(&store)).await;
    soon("it is there", async || names(&store).await == ["catalog/0000000000000001"]).await;
    first.publisher.stop().await;
    for published in ["catalog/0000010000000000", "catalog/0000020000000000"] {
        let term = pages(&store).begin_term().await.unwrap();
        let of_term = pages(&store).in_term(&term);
        let again = Publisher::start(first.metadata.clone(), of_term, NODE);
        soon("it is of this term", async || names(&store).await == [published]).await;
        again.stop().await;
    }
}

/// Nobody waits for a store that does not answer, and what it did not take it gets later.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_fails_holds_nobody_up() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    faulty.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Refused)));
    let owner = owner_over(PageStore::open(Arc::new(faulty.clone()))).await;
    tenant(&owner.catalog, "shop").await;
    let missing = Followed::open(pages(&store)).await.map(drop).unwrap_err();
    assert!(missing.remedy().contains("start that node once"), "{missing}");
    faulty.always(StoreOperation::Put, None);
    let (_, catalog) = followed(&store).await;
    assert!(catalog.tenant("shop").is_some());
    owner.publisher.stop().await;
}
