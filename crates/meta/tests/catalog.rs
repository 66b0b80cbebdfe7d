//! The catalog on the embedded store: tenants, users, privileges, ids, concurrency, restarts, and
//! unusual names.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use fulmar_meta::{
    Access, Catalog, Embedded, Limit, Limits, MetaError, MetadataStore, ObjectKind, SYSTEM_PARTITION,
    SYSTEM_TENANT, SYSTEM_USER, ScramVerifier, SecretHash, Tenant, TenantState, Transaction,
};
use fulmar_pages::{Durability, PartitionId};

async fn open(directory: &Path) -> Arc<Catalog> {
    Catalog::open_with_clock(Arc::new(store(directory)), || 1_790_000_000_000).await.unwrap()
}

fn store(directory: &Path) -> Embedded {
    Embedded::open(&directory.join("meta.db")).unwrap()
}

async fn create(catalog: &Catalog, name: &str) -> Arc<Tenant> {
    let tenant = catalog.create_tenant(name, SYSTEM_USER).await.unwrap();
    catalog.finish_create(&tenant).await.unwrap()
}

async fn drop_tenant(catalog: &Catalog, name: &str) {
    let tenant = catalog.begin_drop(name).await.unwrap();
    catalog.finish_drop(&tenant).await.unwrap();
}

fn names(catalog: &Arc<Catalog>) -> Vec<String> {
    catalog.tenants().iter().map(|tenant| tenant.name.clone()).collect()
}

fn verifier(salt: u8) -> ScramVerifier {
    ScramVerifier { salt: vec![salt; 16], iterations: 4096, stored_key: vec![1; 32], server_key: vec![2; 32] }
}

#[tokio::test]
async fn restored_partition_changes_its_lineage_once() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let shop = create(&catalog, "shop").await;
    catalog.begin_timeline(shop.partition, 77, 2).await.unwrap();
    let again = catalog.begin_timeline(shop.partition, 78, 2).await;
    assert!(matches!(again, Err(MetaError::InUse { .. })), "{again:?}");
    drop(catalog);
    let catalog = open(directory.path()).await;
    let record = catalog.partitions().into_iter().find(|record| record.id == shop.partition).unwrap();
    assert_eq!((record.lineage, record.epoch), (77, 2));
    drop_tenant(&catalog, "shop").await;
    let gone = catalog.begin_timeline(shop.partition, 79, 3).await;
    assert!(matches!(gone, Err(MetaError::Missing { .. })), "{gone:?}");
}

#[tokio::test]
async fn new_catalog_has_the_system_tenant_and_user() {
    let directory = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let catalog = open(directory.path()).await;
        let system = catalog.tenant(SYSTEM_TENANT).unwrap();
        assert_eq!((system.partition, system.owner.as_str()), (SYSTEM_PARTITION, SYSTEM_USER));
        assert_eq!(system.created_unix_ms, 1_790_000_000_000);
        let user = catalog.user(SYSTEM_USER).unwrap();
        assert!(user.superuser && user.verifier.is_none());
        let partitions = catalog.partitions();
        assert_eq!(partitions.len(), 1);
        assert_eq!((partitions[0].id, partitions[0].lineage, partitions[0].epoch), (SYSTEM_PARTITION, 1, 1));

        for refused in
            [catalog.begin_drop(SYSTEM_TENANT).await, catalog.rename_tenant(SYSTEM_TENANT, "x").await]
        {
            assert!(matches!(refused, Err(MetaError::InUse { what: ObjectKind::Tenant, .. })));
        }
        assert!(matches!(
            catalog.drop_user(SYSTEM_USER).await,
            Err(MetaError::InUse { what: ObjectKind::User, .. })
        ));
    }
}

#[tokio::test]
async fn tenant_is_visible_only_while_ready() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let creating = catalog.create_tenant("ada", SYSTEM_USER).await.unwrap();
    assert_eq!(creating.state, TenantState::Creating);
    assert!(catalog.tenant("ada").is_none() && names(&catalog) == [SYSTEM_TENANT]);
    assert_eq!(catalog.unfinished(), std::slice::from_ref(&creating));
    assert!(matches!(catalog.create_tenant("ada", SYSTEM_USER).await, Err(MetaError::InUse { .. })));
    assert!(matches!(catalog.begin_drop("ada").await, Err(MetaError::Missing { .. })));
    assert!(matches!(
        catalog.grant("ada", SYSTEM_USER, Access::ReadWrite).await,
        Err(MetaError::Missing { .. })
    ));

    let ready = catalog.finish_create(&creating).await.unwrap();
    assert_eq!(catalog.tenant("ada"), Some(ready.clone()));
    assert_eq!((ready.partition, ready.state), (creating.partition, TenantState::Ready));
    assert_eq!(catalog.finish_create(&creating).await.unwrap(), ready, "finish must be idempotent");
    assert!(matches!(catalog.create_tenant("ada", SYSTEM_USER).await, Err(MetaError::Exists { .. })));
    assert!(matches!(catalog.finish_drop(&ready).await, Err(MetaError::InUse { .. })));

    let dropping = catalog.begin_drop("ada").await.unwrap();
    assert!(catalog.tenant("ada").is_none());
    assert_eq!(catalog.begin_drop("ada").await.unwrap(), dropping, "a drop must be repeatable");
    assert!(matches!(catalog.finish_create(&creating).await, Err(MetaError::InUse { .. })));
    catalog.finish_drop(&dropping).await.unwrap();
    assert!(matches!(catalog.finish_drop(&dropping).await, Err(MetaError::Missing { .. })));
    assert_eq!(catalog.partitions().len(), 1);
    assert!(catalog.unfinished().is_empty());
}

#[tokio::test]
async fn reused_name_belongs_to_a_new_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    create(&catalog, "ada").await;
    let first = catalog.begin_drop("ada").await.unwrap();
    catalog.finish_drop(&first).await.unwrap();
    let second = catalog.create_tenant("ada", SYSTEM_USER).await.unwrap();
    // A caller that still holds the first tenant can neither finish nor delete the second one.
    assert!(matches!(catalog.finish_create(&first).await, Err(MetaError::Missing { .. })));
    assert!(matches!(catalog.finish_drop(&first).await, Err(MetaError::Missing { .. })));
    assert_eq!(catalog.unfinished(), [second]);
}

/// A caller has found the tenant by a name that may belong to another tenant by now.
#[tokio::test]
async fn durability_change_follows_the_partition_not_the_name() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let found = create(&catalog, "ada").await;
    catalog.rename_tenant("ada", "eva").await.unwrap();
    let namesake = create(&catalog, "ada").await;
    let changed = catalog.set_durability(&found, Durability::Shared).await.unwrap();
    assert_eq!((changed.name.as_str(), changed.durability), ("eva", Durability::Shared));
    let catalog = open_after(directory.path(), catalog).await;
    let durability = |name| catalog.tenant(name).unwrap().durability;
    assert_eq!((durability("ada"), durability("eva")), (Durability::Local, Durability::Shared));

    let creating = catalog.create_tenant("new", SYSTEM_USER).await.unwrap();
    assert_eq!(
        catalog.set_durability(&creating, Durability::Shared).await.unwrap().state,
        TenantState::Creating
    );
    catalog.begin_drop("ada").await.unwrap();
    let dropping = catalog.set_durability(&namesake, Durability::Shared).await;
    assert!(matches!(dropping, Err(MetaError::Missing { .. })), "{dropping:?}");
}

#[tokio::test]
async fn partition_ids_are_never_reused() {
    let directory = tempfile::tempdir().unwrap();
    let mut seen = HashSet::from([SYSTEM_PARTITION]);
    for _ in 0..5 {
        let catalog = open(directory.path()).await;
        for _ in 0..30 {
            assert!(seen.insert(create(&catalog, "ada").await.partition));
            drop_tenant(&catalog, "ada").await;
        }
        let aborted = catalog.create_tenant("ada", SYSTEM_USER).await.unwrap();
        assert!(seen.insert(aborted.partition));
        catalog.finish_drop(&aborted).await.unwrap();
    }
}

/// The nodes of a cluster share the store, and each has a catalog.
#[tokio::test]
async fn catalogs_of_two_nodes_assign_different_ids() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(&directory.path().join("meta.db")).unwrap());
    let first = Catalog::open(store.clone()).await.unwrap();
    let second = Catalog::open(store).await.unwrap();
    let mut seen = HashSet::from([SYSTEM_PARTITION]);
    // More than the ids that a catalog reserves.
    for number in 0..100 {
        let [one, other] = ["one", "other"].map(|name| format!("{name}{number}"));
        let created = futures::future::join(create(&first, &one), create(&second, &other)).await;
        assert!(seen.insert(created.0.partition), "{number}");
        assert!(seen.insert(created.1.partition), "{number}");
    }
}

/// An old copy of a catalog must be detectable: it does not know the partitions created since.
#[tokio::test]
async fn catalog_knows_existing_and_dropped_partitions_but_no_later_ones() {
    let directory = tempfile::tempdir().unwrap();
    let knows = |catalog: &Catalog, id: u64| catalog.knows_partition(PartitionId(id));
    let catalog = open(directory.path()).await;
    assert!(knows(&catalog, SYSTEM_PARTITION.0));
    let kept = create(&catalog, "kept").await.partition.0;
    let dropped = create(&catalog, "dropped").await.partition.0;
    drop_tenant(&catalog, "dropped").await;
    let aborted = catalog.create_tenant("aborted", SYSTEM_USER).await.unwrap();
    catalog.finish_drop(&aborted).await.unwrap();
    for known in [kept, dropped, aborted.partition.0] {
        assert!(knows(&catalog, known), "{known}");
    }
    let later = aborted.partition.0 + 1;
    assert!(!knows(&catalog, later), "a reserved but unassigned id must be unknown");
    let catalog = open_after(directory.path(), catalog).await;
    assert!(knows(&catalog, dropped) && !knows(&catalog, later));

    // All ids assigned so far are accounted for; ids assigned from now on are not.
    catalog.settle_dropped(None).await.unwrap();
    let settled = catalog.first_unsettled_partition();
    assert!(knows(&catalog, later) && knows(&catalog, settled.0 - 1) && !knows(&catalog, settled.0));
    let catalog = open_after(directory.path(), catalog).await;
    assert_eq!(catalog.first_unsettled_partition(), settled);
    let next = create(&catalog, "next").await.partition;
    assert!(next >= settled && knows(&catalog, next.0) && !knows(&catalog, next.0 + 1));
    drop_tenant(&catalog, "next").await;
    let catalog = open_after(directory.path(), catalog).await;

    // Abandoned ids found in the log are not assigned again.
    let found = PartitionId(10_000);
    catalog.settle_dropped(Some(found)).await.unwrap();
    assert!(knows(&catalog, found.0) && create(&catalog, "last").await.partition > found);
    drop(catalog);
    let tombstones = store(directory.path()).scan("dropped/").await.unwrap();
    assert_eq!(tombstones, [], "tombstones must not accumulate");
}

#[tokio::test]
async fn settling_deletes_many_tombstones() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    for n in 0..300 {
        let tenant = catalog.create_tenant(&format!("t{n}"), SYSTEM_USER).await.unwrap();
        catalog.finish_drop(&tenant).await.unwrap();
    }
    catalog.settle_dropped(None).await.unwrap();
    drop(catalog);
    assert_eq!(store(directory.path()).scan("dropped/").await.unwrap(), []);
}

#[tokio::test]
async fn salt_key_is_created_once() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let key = catalog.salt_key().unwrap();
    assert_eq!(key.0.len(), 32);
    assert_eq!(open_after(directory.path(), catalog).await.salt_key().unwrap(), key);
    let other = tempfile::tempdir().unwrap();
    assert_ne!(open(other.path()).await.salt_key().unwrap(), key);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_concurrent_creations_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    for round in 0..20 {
        let name = format!("round {round}");
        let creators: Vec<_> = (0..16)
            .map(|_| {
                let (catalog, name) = (catalog.clone(), name.clone());
                tokio::spawn(async move { catalog.create_tenant(&name, SYSTEM_USER).await })
            })
            .collect();
        let mut winners = Vec::new();
        for creator in creators {
            match creator.await.unwrap() {
                Ok(tenant) => winners.push(tenant),
                Err(error) => assert!(matches!(error, MetaError::InUse { .. }), "{error}"),
            }
        }
        assert_eq!(winners.len(), 1);
        assert_eq!(catalog.unfinished(), winners);
        catalog.finish_create(&winners[0]).await.unwrap();
    }
    assert_eq!(names(&open_after(directory.path(), catalog).await).len(), 21);
}

/// Reopens the catalog, as after a restart.
async fn open_after(directory: &Path, catalog: Arc<Catalog>) -> Arc<Catalog> {
    drop(catalog);
    open(directory).await
}

/// Two catalogs on one store represent two nodes: each observes the other's changes.
#[tokio::test(flavor = "multi_thread")]
async fn two_catalogs_on_one_store_agree() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(store(directory.path()));
    let one = Catalog::open(store.clone()).await.unwrap();
    let two = Catalog::open(store).await.unwrap();
    let tasks: Vec<_> = (0..200)
        .map(|n| {
            let catalog = if n % 2 == 0 { one.clone() } else { two.clone() };
            tokio::spawn(async move {
                match catalog.create_tenant(&format!("t{}", n / 2), SYSTEM_USER).await {
                    Ok(tenant) => Some(catalog.finish_create(&tenant).await.unwrap().partition),
                    Err(MetaError::InUse { .. } | MetaError::Exists { .. }) => None,
                    Err(error) => panic!("{error}"),
                }
            })
        })
        .collect();
    let mut partitions = HashSet::new();
    for task in tasks {
        if let Some(partition) = task.await.unwrap() {
            assert!(partitions.insert(partition));
        }
    }
    assert_eq!(partitions.len(), 100);
    assert_eq!(one.tenants(), two.tenants());
    assert_eq!(one.partitions(), two.partitions());
}

#[tokio::test]
async fn names_may_contain_quotes_slashes_and_any_letters() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let hard =
        ["O'Hara \"the\" 1st", "a/b", "a", "héron/鳥", "tenant/x", "%_\\", " ", "'; DROP TABLE entry; --"];
    for name in hard {
        create(&catalog, name).await;
        catalog.create_user(name, false, None).await.unwrap();
        catalog.grant(name, name, Access::ReadWrite).await.unwrap();
    }
    let catalog = open_after(directory.path(), catalog).await;
    for name in hard {
        let (tenant, user) = (catalog.tenant(name).unwrap(), catalog.user(name).unwrap());
        assert!(catalog.may_connect(&user, &tenant));
        assert_eq!(
            hard.iter().filter(|user| catalog.may_connect(&catalog.user(user).unwrap(), &tenant)).count(),
            1
        );
    }
    let mut sorted = hard.to_vec();
    sorted.push(SYSTEM_TENANT);
    sorted.sort_unstable();
    assert_eq!(names(&catalog), sorted);
    for name in ["", "a\0b", "line\nbreak", &"x".repeat(64)] {
        assert!(matches!(catalog.create_tenant(name, SYSTEM_USER).await, Err(MetaError::InvalidName { .. })));
        assert!(matches!(catalog.rename_tenant("a", name).await, Err(MetaError::InvalidName { .. })));
        assert!(matches!(catalog.create_user(name, false, None).await, Err(MetaError::InvalidName { .. })));
    }
}

#[tokio::test]
async fn renamed_tenant_keeps_its_partition_and_privileges() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let before = create(&catalog, "old").await;
    create(&catalog, "other").await;
    let user = catalog.create_user("ada", false, None).await.unwrap();
    catalog.grant("old", "ada", Access::ReadWrite).await.unwrap();
    let after = catalog.rename_tenant("old", "new").await.unwrap();
    assert_eq!((after.partition, after.name.as_str()), (before.partition, "new"));
    assert!(catalog.may_connect(&user, &after));
    assert!(catalog.tenant("old").is_none());
    assert_eq!(catalog.tenant("new"), Some(after));
    assert!(matches!(catalog.rename_tenant("old", "x").await, Err(MetaError::Missing { .. })));
    assert!(matches!(catalog.rename_tenant("new", "other").await, Err(MetaError::Exists { .. })));
    assert!(matches!(catalog.rename_tenant("new", "new").await, Err(MetaError::Exists { .. })));
    assert_eq!(names(&open_after(directory.path(), catalog).await), [SYSTEM_TENANT, "new", "other"]);
}

#[tokio::test]
async fn users_passwords_and_privileges_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let tenant = create(&catalog, "shop").await;
    let ada = catalog.create_user("ada", false, Some(verifier(1))).await.unwrap();
    let bob = catalog.create_user("bob", false, None).await.unwrap();
    let root = catalog.create_user("root", true, None).await.unwrap();
    assert!(matches!(catalog.create_user("ada", true, None).await, Err(MetaError::Exists { .. })));
    assert!(catalog.may_connect(&root, &tenant) && !catalog.may_connect(&ada, &tenant));

    catalog.grant("shop", "ada", Access::ReadWrite).await.unwrap();
    catalog.grant("shop", "ada", Access::ReadWrite).await.unwrap();
    assert!(catalog.may_connect(&ada, &tenant) && !catalog.may_connect(&bob, &tenant));
    catalog.alter_user_password("ada", Some(verifier(2))).await.unwrap();
    assert_eq!(catalog.user("ada").unwrap().verifier, Some(verifier(2)));

    let catalog = open_after(directory.path(), catalog).await;
    assert_eq!(catalog.user("ada").unwrap().verifier, Some(verifier(2)));
    assert!(catalog.may_connect(&ada, &tenant));
    catalog.revoke("shop", "ada", Access::ReadWrite).await.unwrap();
    catalog.revoke("shop", "ada", Access::ReadWrite).await.unwrap();
    assert!(!catalog.may_connect(&ada, &tenant));
    for missing in [
        catalog.grant("shop", "eve", Access::ReadWrite).await,
        catalog.grant("nowhere", "ada", Access::ReadWrite).await,
    ] {
        assert!(matches!(missing, Err(MetaError::Missing { .. })));
    }
    assert!(matches!(
        catalog.create_tenant("x", "eve").await,
        Err(MetaError::Missing { what: ObjectKind::User, .. })
    ));
    assert!(!format!("{:?}", catalog.user("ada")).contains("stored_key"), "secrets must not be printed");
}

#[tokio::test]
async fn dropped_user_leaves_no_privileges() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    catalog.create_user("ada", false, None).await.unwrap();
    // More grants than one transaction can delete.
    for n in 0..200 {
        create(&catalog, &format!("t{n}")).await;
        catalog.grant(&format!("t{n}"), "ada", Access::ReadWrite).await.unwrap();
    }
    let owned = catalog.create_tenant("hers", "ada").await.unwrap();
    let refused = catalog.drop_user("ada").await.unwrap_err();
    assert!(refused.to_string().contains("owns tenant \"hers\""), "{refused}");
    assert!(catalog.user("ada").is_some());
    catalog.finish_drop(&owned).await.unwrap();
    catalog.drop_user("ada").await.unwrap();
    assert!(matches!(catalog.drop_user("ada").await, Err(MetaError::Missing { .. })));

    let again = catalog.create_user("ada", false, None).await.unwrap();
    let catalog = open_after(directory.path(), catalog).await;
    assert!(catalog.tenants().iter().all(|tenant| !catalog.may_connect(&again, tenant)));
}

#[tokio::test]
async fn dropped_tenant_leaves_no_privileges() {
    let directory = tempfile::tempdir().unwrap();
    let metadata = Arc::new(store(directory.path()));
    let catalog = Catalog::open(metadata.clone()).await.unwrap();
    create(&catalog, "shop").await;
    for n in 0..200 {
        catalog.create_user(&format!("u{n}"), false, None).await.unwrap();
        catalog.grant("shop", &format!("u{n}"), Access::ReadWrite).await.unwrap();
    }
    assert_eq!(metadata.scan("grant/").await.unwrap().len(), 200);
    drop_tenant(&catalog, "shop").await;
    assert_eq!(metadata.scan("grant/").await.unwrap(), []);
}

/// Owners are dropped while tenants are created for them: no tenant may lose its owner.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_drop_of_an_owner_never_orphans_a_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(store(directory.path()));
    let one = Catalog::open(store.clone()).await.unwrap();
    let two = Catalog::open(store).await.unwrap();
    for n in 0..100 {
        let (user, tenant) = (format!("u{n}"), format!("t{n}"));
        one.create_user(&user, false, None).await.unwrap();
        let (created, dropped) = tokio::join!(one.create_tenant(&tenant, &user), two.drop_user(&user));
        let (has_tenant, has_user) = (!one.unfinished().is_empty(), one.user(&user).is_some());
        assert_eq!((created.is_ok(), dropped.is_ok()), (has_tenant, !has_user));
        assert!(!has_tenant || has_user, "tenant {tenant} lost its owner");
        if let Ok(tenant) = created {
            one.finish_drop(&tenant).await.unwrap();
        }
    }
}

#[tokio::test]
async fn interrupted_drop_of_a_user_is_undone_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    catalog.create_user("ada", false, Some(verifier(1))).await.unwrap();
    drop(catalog);
    let record = {
        let store = store(directory.path());
        let record = String::from_utf8(store.get("user/ada").await.unwrap().unwrap().value).unwrap();
        let leaving = record.replace(r#""leaving":false"#, r#""leaving":true"#);
        assert_ne!(record, leaving);
        store.transact(Transaction::new().put("user/ada", leaving)).await.unwrap();
        record
    };
    let catalog = open(directory.path()).await;
    assert_eq!(catalog.user("ada").unwrap().verifier, Some(verifier(1)));
    drop(catalog);
    assert_eq!(store(directory.path()).get("user/ada").await.unwrap().unwrap().value, record.as_bytes());
}

#[tokio::test]
async fn damaged_record_is_reported_by_key() {
    let damages = [
        ("tenant/ada", Some(r#"{"v":9}"#), "format version 9"),
        ("tenant/ada", Some("{"), "tenant/ada"),
        ("counter/partition", Some(r#"{"v":1,"next":2}"#), "again"),
        ("counter/partition", None, "missing"),
        ("partition/0000000000000002", None, "its partition"),
        ("grant/2/ada", Some(r#"{"v":1}"#), "grant/2/ada"),
    ];
    for (key, value, expected) in damages {
        let directory = tempfile::tempdir().unwrap();
        let catalog = open(directory.path()).await;
        assert_eq!(create(&catalog, "ada").await.partition.0, 2);
        drop(catalog);
        let store = Arc::new(store(directory.path()));
        let damage = match value {
            Some(value) => Transaction::new().put(key, value),
            None => Transaction::new().delete(key),
        };
        store.transact(damage).await.unwrap();
        let error = Catalog::open(store).await.unwrap_err();
        assert!(
            matches!(error, MetaError::Corrupt { .. }) && error.to_string().contains(expected),
            "{key}: {error}"
        );
    }
}

/// Prints the cost of a restart with many tenants. The times are not asserted.
#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_tenants_survive_a_restart() {
    const TENANTS: usize = 10_000;
    const CREATORS: usize = 100;
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let creating = std::time::Instant::now();
    let creators: Vec<_> = (0..CREATORS)
        .map(|creator| {
            let catalog = catalog.clone();
            tokio::spawn(async move {
                for n in (creator..TENANTS).step_by(CREATORS) {
                    create(&catalog, &format!("tenant-{n:05}")).await;
                }
            })
        })
        .collect();
    for creator in creators {
        creator.await.unwrap();
    }
    println!("{TENANTS} tenants created by {CREATORS} tasks in {} ms", creating.elapsed().as_millis());
    drop(catalog);
    let loading = std::time::Instant::now();
    let catalog = open(directory.path()).await;
    println!("{TENANTS} tenants loaded in {} ms", loading.elapsed().as_millis());
    assert_eq!(catalog.tenants().len(), TENANTS + 1);
    assert_eq!(catalog.partitions().len(), TENANTS + 1);
    let partitions: HashSet<_> = catalog.tenants().iter().map(|tenant| tenant.partition).collect();
    assert_eq!(partitions.len(), TENANTS + 1);
}

#[tokio::test]
async fn limit_changes_are_durable_and_visible_in_live_limits() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let tenant = create(&catalog, "ada").await;
    let live = catalog.live_limits(&tenant);
    assert_eq!((live.get(Limit::MaxSize), live.get(Limit::CpuShare)), (None, Some(100)));
    let before = live.generation();
    catalog
        .alter_limits("ada", |limits| {
            limits.set(Limit::MaxSize, Some(4096));
            limits.set(Limit::CpuShare, Some(300));
        })
        .await
        .unwrap();
    assert_ne!(live.generation(), before);
    assert_eq!((live.get(Limit::MaxSize), live.get(Limit::CpuShare)), (Some(4096), Some(300)));

    // A renamed tenant keeps its limits; another tenant has its own.
    catalog.rename_tenant("ada", "bea").await.unwrap();
    create(&catalog, "ada").await;
    catalog.alter_limits("bea", |limits| limits.set(Limit::CpuShare, None)).await.unwrap();
    assert_eq!((live.get(Limit::MaxSize), live.get(Limit::CpuShare)), (Some(4096), Some(100)));
    assert_eq!(catalog.tenant("ada").unwrap().limits, Limits::default());
    assert!(matches!(catalog.alter_limits("eve", |_| ()).await, Err(MetaError::Missing { .. })));

    drop(catalog);
    let catalog = open(directory.path()).await;
    assert_eq!(catalog.tenant("bea").unwrap().limits.get(Limit::MaxSize), Some(4096));
    drop_tenant(&catalog, "bea").await;
    let next = create(&catalog, "bea").await;
    assert_eq!(catalog.live_limits(&next).get(Limit::MaxSize), None);
}

#[tokio::test]
async fn user_has_one_grant_per_tenant() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    let tenant = create(&catalog, "shop").await;
    let ada = catalog.create_user("ada", false, None).await.unwrap();
    let owner = catalog.user(SYSTEM_USER).unwrap();
    let access = |catalog: &Catalog| catalog.access(&ada, &tenant);
    catalog.grant("shop", "ada", Access::ReadOnly).await.unwrap();
    catalog.grant("shop", SYSTEM_USER, Access::ReadOnly).await.unwrap();
    assert_eq!(access(&catalog), Some(Access::ReadOnly));
    assert_eq!(catalog.access(&owner, &tenant), Some(Access::ReadWrite), "the owner keeps its privileges");

    // The last grant replaces earlier ones.
    catalog.grant("shop", "ada", Access::ReadWrite).await.unwrap();
    assert_eq!(access(&catalog), Some(Access::ReadWrite));
    catalog.revoke("shop", "ada", Access::ReadOnly).await.unwrap();
    assert_eq!(access(&catalog), Some(Access::ReadWrite), "a ReadWrite grant is not ReadOnly");
    catalog.grant("shop", "ada", Access::ReadOnly).await.unwrap();
    let catalog = open_after(directory.path(), catalog).await;
    assert_eq!(access(&catalog), Some(Access::ReadOnly));
    catalog.revoke("shop", "ada", Access::ReadOnly).await.unwrap();
    assert_eq!(access(&catalog), None);
    catalog.grant("shop", "ada", Access::ReadOnly).await.unwrap();
    catalog.revoke("shop", "ada", Access::ReadWrite).await.unwrap();
    assert_eq!(access(&catalog), None);
}

#[tokio::test]
async fn token_is_found_by_its_secret_until_it_expires() {
    let directory = tempfile::tempdir().unwrap();
    let hash = |byte: u8| SecretHash(vec![byte; 32]);
    let catalog = open(directory.path()).await;
    let shop = create(&catalog, "shop").await;
    let all = catalog.create_token("all", hash(1), None, None).await.unwrap();
    let of_shop = catalog.create_token("one", hash(2), Some("shop"), Some(1)).await.unwrap();
    assert_eq!((all.partition, of_shop.partition), (None, Some(shop.partition)));
    let admin = catalog.create_admin_token("admin", hash(5), None).await.unwrap();
    assert_eq!((all.is_admin, of_shop.is_admin, admin.is_admin), (false, false, true));
    catalog.create_token("over", hash(3), None, Some(0)).await.unwrap();
    let taken = catalog.create_token("all", hash(4), None, None).await;
    assert!(matches!(taken, Err(MetaError::Exists { what: ObjectKind::Token, .. })));
    let nowhere = catalog.create_token("new", hash(4), Some("nowhere"), None).await;
    assert!(matches!(nowhere, Err(MetaError::Missing { what: ObjectKind::Tenant, .. })));

    let catalog = open_after(directory.path(), catalog).await;
    assert_eq!(catalog.find_token(&hash(1)), Some(all));
    assert_eq!(catalog.find_token(&hash(2)), Some(of_shop));
    assert_eq!(catalog.find_token(&hash(5)), Some(admin));
    assert_eq!(catalog.find_token(&hash(3)), None, "an expired token must not be found");
    assert_eq!(catalog.find_token(&hash(4)), None, "an unknown token must not be found");
    assert_eq!(catalog.find_token(&SecretHash(vec![1; 31])), None);
    drop_tenant(&catalog, "shop").await;
    let left = || catalog.tokens().iter().map(|token| token.name.clone()).collect::<Vec<_>>();
    assert_eq!(left(), ["admin", "all", "over"], "the tokens of a dropped tenant must be deleted");
    catalog.drop_token("all").await.unwrap();
    assert!(catalog.find_token(&hash(1)).is_none());
    assert!(matches!(
        catalog.drop_token("all").await,
        Err(MetaError::Missing { what: ObjectKind::Token, .. })
    ));
}

#[tokio::test]
async fn rights_generation_changes_with_privileges_only() {
    let directory = tempfile::tempdir().unwrap();
    let catalog = open(directory.path()).await;
    create(&catalog, "shop").await;
    let mut seen = catalog.privileges_generation();
    let mut changed = || {
        let before = std::mem::replace(&mut seen, catalog.privileges_generation());
        before != catalog.privileges_generation()
    };
    assert!(!changed());
    catalog.create_user("ada", false, None).await.unwrap();
    assert!(changed());
    catalog.grant("shop", "ada", Access::ReadOnly).await.unwrap();
    assert!(changed());
    catalog.alter_user_password("ada", Some(verifier(1))).await.unwrap();
    assert!(changed());
    catalog.revoke("shop", "ada", Access::ReadWrite).await.unwrap();
    assert!(changed());
    catalog.revoke("shop", "ada", Access::ReadWrite).await.unwrap();
    create(&catalog, "other").await;
    catalog.alter_limits("shop", |limits| limits.set(Limit::CpuShare, Some(7))).await.unwrap();
    assert!(!changed(), "other changes must not change the generation");
    catalog.drop_user("ada").await.unwrap();
    assert!(changed());
}
