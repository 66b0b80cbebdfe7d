//! Damage to the files of the embedded store: every bit flip, truncation, deletion and old copy is
//! rejected or has no effect, and restoring the file recovers all contents.

use std::path::{Path, PathBuf};

use fulmar_meta::{Catalog, Embedded, Entry, MetaError, MetadataStore, Outcome, Revision, Transaction};

const FILES: [&str; 3] = ["meta.db", "meta.db-wal", "meta.head"];

fn open(directory: &Path) -> Result<Embedded, MetaError> {
    Embedded::open_accepting(&directory.join("meta.db"), None)
}

fn copy(from: &Path, to: &Path) {
    for file in FILES {
        if from.join(file).exists() {
            std::fs::copy(from.join(file), to.join(file)).unwrap();
        }
    }
}

/// A copy of a directory, in the state after a kill.
fn killed(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    copy(from, to.path());
    to
}

async fn commit(store: &Embedded, transaction: Transaction) -> Revision {
    match store.transact(transaction).await.unwrap() {
        Outcome::Committed(revision) => revision,
        Outcome::Conflict(revision) => panic!("conflict at {revision:?}"),
    }
}

async fn put(store: &Embedded, key: &str) -> Revision {
    commit(store, Transaction::new().put(key, key.repeat(9))).await
}

/// Puts, overwrites and deletes some keys.
async fn fill(store: &Embedded, prefix: &str) {
    for n in 0..12 {
        put(store, &format!("{prefix}{n:02}")).await;
    }
    put(store, &format!("{prefix}03")).await;
    commit(store, Transaction::new().delete(format!("{prefix}05"))).await;
}

/// Opens the store and returns all entries.
async fn contents(directory: &Path) -> Result<Vec<Entry>, MetaError> {
    open(directory)?.scan("").await
}

/// A store's files and its entries.
struct Rig {
    good: tempfile::TempDir,
    entries: Vec<Entry>,
}

/// The files of a store that was checkpointed, used again, and then killed or stopped. After a stop
/// there is no write-ahead log, and after a kill its pages override those of `meta.db`.
async fn rig(stop: bool) -> Rig {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    fill(&store, "checkpointed").await;
    drop(store);
    let store = open(directory.path()).unwrap();
    fill(&store, "logged").await;
    let entries = store.scan("").await.unwrap();
    if stop {
        drop(store);
    }
    let good = killed(directory.path());
    assert_eq!(good.path().join("meta.db-wal").exists(), !stop);
    Rig { good, entries }
}

/// Asserts that a rejection names one of the store's files and has a remedy. Returns its text.
fn assert_names_file(error: &MetaError) -> String {
    let text = error.to_string();
    assert!(text.contains("meta.db") || text.contains("meta.head"), "{text}");
    assert!(!error.remedy().is_empty());
    text
}

/// Opens a damaged store. If it is rejected, restoring the file must recover all contents.
/// Otherwise nothing may be missing. Returns true if it was rejected.
async fn is_rejected(rig: &Rig, file: &str, harm: &str, damage: impl FnOnce(PathBuf)) -> bool {
    let harmed = killed(rig.good.path());
    damage(harmed.path().join(file));
    match contents(harmed.path()).await {
        Ok(found) => {
            assert_eq!(found, rig.entries, "{file} {harm}: the opened store must have all contents");
            false
        }
        Err(error) => {
            assert_names_file(&error);
            std::fs::copy(rig.good.path().join(file), harmed.path().join(file)).unwrap();
            let restored = contents(harmed.path()).await.unwrap();
            assert_eq!(restored, rig.entries, "{file} {harm}: the restored store must have all contents");
            true
        }
    }
}

#[tokio::test]
async fn every_damaged_byte_is_rejected_or_has_no_effect() {
    let (killed, stopped) = (rig(false).await, rig(true).await);
    // One slot of the head file may be damaged, as by a torn write.
    let cases = [
        (&killed, "meta.db", 397, 0),
        (&killed, "meta.db-wal", 499, 50),
        (&killed, "meta.head", 59, 0),
        (&stopped, "meta.db", 97, 15),
        (&stopped, "meta.head", 59, 0),
    ];
    for (rig, file, step, min_rejected) in cases {
        let bytes = std::fs::read(rig.good.path().join(file)).unwrap();
        let mut refused = 0;
        for at in (0..bytes.len()).step_by(step) {
            let mut harmed = bytes.clone();
            harmed[at] ^= 1 << (at % 8);
            let damage = |path: PathBuf| std::fs::write(path, harmed).unwrap();
            refused += usize::from(is_rejected(rig, file, &format!("byte {at}"), damage).await);
        }
        assert!(refused >= min_rejected, "{file}: too few damaged bytes were rejected: {refused}");
    }
}

#[tokio::test]
async fn truncated_zeroed_and_deleted_files_are_rejected() {
    let (killed, stopped) = (rig(false).await, rig(true).await);
    for (rig, file) in
        [(&killed, "meta.db-wal"), (&killed, "meta.head"), (&stopped, "meta.db"), (&stopped, "meta.head")]
    {
        let bytes = std::fs::read(rig.good.path().join(file)).unwrap();
        let cuts = [("empty", 0), ("first bytes", 100), ("half", bytes.len() / 2)];
        for (harm, left) in cuts {
            let damage = |path: PathBuf| std::fs::write(path, &bytes[..left]).unwrap();
            assert!(is_rejected(rig, file, harm, damage).await, "{file} {harm}");
        }
        let damage = |path: PathBuf| std::fs::write(path, vec![0; bytes.len()]).unwrap();
        assert!(is_rejected(rig, file, "zeros", damage).await, "{file} zeros");
        let damage = |path: PathBuf| std::fs::remove_file(path).unwrap();
        assert!(is_rejected(rig, file, "deleted", damage).await, "{file} deleted");
    }
    for harm in ["empty", "deleted"] {
        let damage = |path: PathBuf| match harm {
            "empty" => std::fs::write(path, "").unwrap(),
            _ => std::fs::remove_file(path).unwrap(),
        };
        assert!(is_rejected(&killed, "meta.db", harm, damage).await, "meta.db {harm}, with a log");
    }
    let damage = |path: PathBuf| {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[600] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    assert!(is_rejected(&killed, "meta.db-wal", "byte 600", damage).await);
}

#[tokio::test]
async fn old_copies_are_rejected_with_the_expected_revision() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    put(&store, "a").await;
    drop(store);
    let old = killed(directory.path());
    let store = open(directory.path()).unwrap();
    put(&store, "b").await;
    put(&store, "c").await;
    let entries = store.scan("").await.unwrap();
    drop(store);
    for (file, text) in [
        ("meta.db", "is damaged or an old copy: expected revision 3, found revision 1"),
        ("meta.head", "is damaged or an old copy: it is at revision 1, and"),
    ] {
        let harmed = killed(directory.path());
        std::fs::copy(old.path().join(file), harmed.path().join(file)).unwrap();
        let error = contents(harmed.path()).await.unwrap_err();
        assert!(assert_names_file(&error).contains(text), "{error}");
        assert!(error.remedy().contains("--accept-catalog "), "{}", error.remedy());
        // In a cluster the flag is not available.
        let error = Embedded::open(&harmed.path().join("meta.db")).unwrap_err();
        assert!(assert_names_file(&error).contains(text), "{error}");
        let remedy = error.remedy();
        assert!(
            remedy.contains("meta.db, ") && remedy.contains("all three from the same moment"),
            "{remedy}"
        );
        assert!(!remedy.contains("--accept-catalog"), "{remedy}");
        std::fs::copy(directory.path().join(file), harmed.path().join(file)).unwrap();
        assert_eq!(contents(harmed.path()).await.unwrap(), entries);
    }
    // Two stores at the same revision are distinguished by their digests.
    let other = tempfile::tempdir().unwrap();
    let store = open(other.path()).unwrap();
    for key in ["x", "y", "z"] {
        put(&store, key).await;
    }
    drop(store);
    std::fs::copy(directory.path().join("meta.db"), other.path().join("meta.db")).unwrap();
    assert_names_file(&contents(other.path()).await.unwrap_err());
}

#[tokio::test]
async fn only_the_specified_revision_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let accept =
        |revision| Embedded::open_accepting(&directory.path().join("meta.db"), Some(Revision(revision)));
    let store = open(directory.path()).unwrap();
    put(&store, "a").await;
    drop(store);
    let old = killed(directory.path());
    let store = open(directory.path()).unwrap();
    put(&store, "b").await;
    drop(store);
    copy(old.path(), directory.path());
    std::fs::remove_file(directory.path().join("meta.head")).unwrap();
    for wrong in [0, 2] {
        assert!(matches!(accept(wrong), Err(MetaError::Damaged { .. })), "{wrong}");
    }
    let store = accept(1).unwrap();
    assert_eq!(put(&store, "c").await, Revision(2));
    drop(store);
    let entries = contents(directory.path()).await.unwrap();
    assert_eq!(entries.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>(), ["a", "c"]);
    // The acceptance applied to one start only.
    copy(old.path(), directory.path());
    std::fs::remove_file(directory.path().join("meta.head")).unwrap();
    assert!(accept(2).is_err());
    std::fs::remove_file(directory.path().join("meta.db")).unwrap();
    std::fs::write(directory.path().join("meta.head"), "x").unwrap();
    assert!(matches!(open(directory.path()), Err(MetaError::Damaged { .. })));
    assert_eq!(accept(0).unwrap().scan("").await.unwrap(), []);
}

/// The crash points of the table in the head of `embedded`.
#[tokio::test]
async fn start_after_a_crash_between_the_two_files_has_the_last_batch() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path()).unwrap();
    // Nothing was written yet: the head file may not exist.
    let created = killed(directory.path());
    std::fs::remove_file(created.path().join("meta.head")).unwrap();
    assert_eq!(contents(created.path()).await.unwrap(), []);
    let head = directory.path().join("meta.head");
    for n in 0..5 {
        let before = std::fs::read(&head).unwrap();
        put(&store, &format!("k{n}")).await;
        let entries = store.scan("").await.unwrap();
        let crashed = killed(directory.path());
        std::fs::write(crashed.path().join("meta.head"), &before).unwrap();
        assert_eq!(contents(crashed.path()).await.unwrap(), entries, "head file not written");
        // Another crash without a change in between.
        assert_eq!(contents(crashed.path()).await.unwrap(), entries);
        // A torn write of the slot.
        let after = std::fs::read(&head).unwrap();
        let torn: Vec<u8> = after
            .iter()
            .enumerate()
            .map(|(at, byte)| if at % 4096 < 24 { *byte } else { before[at] })
            .collect();
        let crashed = killed(directory.path());
        std::fs::write(crashed.path().join("meta.head"), torn).unwrap();
        assert_eq!(contents(crashed.path()).await.unwrap(), entries, "head file torn");
    }
}

#[tokio::test]
async fn format_version_1_is_converted_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("meta.db");
    let golden = include_bytes!("golden/meta-v1.db");
    std::fs::write(&path, golden).unwrap();
    let store = open(directory.path()).unwrap();
    let revision = store.get("user/ada").await.unwrap().unwrap().modified;
    let catalog = Catalog::open(std::sync::Arc::new(store)).await.unwrap();
    assert!(catalog.tenant("shop").is_some_and(|tenant| tenant.owner == "ada"));
    assert!(catalog.tenant("gone").is_none() && catalog.user("ada").unwrap().verifier.is_some());
    drop(catalog);
    // The store continues from that revision, and the file before the conversion is now an old
    // copy.
    let store = open(directory.path()).unwrap();
    assert!(put(&store, "k").await > revision);
    drop(store);
    std::fs::write(&path, golden).unwrap();
    let error = open(directory.path()).unwrap_err();
    assert!(assert_names_file(&error).contains("copy from before an upgrade"), "{error}");
}
