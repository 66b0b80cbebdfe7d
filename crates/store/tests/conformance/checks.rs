//! The contract of the trait `Store`, check by check, and the outcome of operations whose responses
//! are lost ([`uncertain_outcomes`]).

use std::sync::Arc;

use bytes::Bytes;
use fulmar_store::{Failure, FailureKind, Span, Store};
use futures::future::join_all;

use crate::uncertain_outcomes;

/// Number of writers that race for a name.
const WRITERS: usize = 16;
const RACES: usize = 20;
/// More than the 1,000 names that S3 returns per page.
const NAMES: usize = 1100;
/// Size of the large object, and of its parts.
const LARGE_BYTES: usize = (100 << 20) + 12_345;
const PART_BYTES: usize = 8 << 20;

/// Runs all checks on an empty store.
pub async fn conforms(store: Arc<dyn Store>) {
    reads_objects_that_were_put(&*store).await;
    is_never_overwritten(&*store).await;
    reads_ranges(&*store).await;
    has_one_winner_of_a_race(&store).await;
    lists_in_order(&*store).await;
    lists_in_pages(&store).await;
    deletes_existing_and_missing_objects(&*store).await;
    for bypasses_page_cache in [false, true] {
        accepts_large_objects_in_parts(&*store, bypasses_page_cache).await;
    }
    discards_aborted_uploads(&*store).await;
    uncertain_outcomes::are_resolved(&store).await;
}

fn kind<T: std::fmt::Debug>(outcome: Result<T, Failure>) -> FailureKind {
    outcome.unwrap_err().kind()
}

async fn whole(store: &dyn Store, name: &str) -> Bytes {
    store.get(name, Span::Whole).await.unwrap().bytes
}

/// Lists all names below a directory, page by page.
pub async fn list_all(store: &dyn Store, directory: &str) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    loop {
        let page = store.list(directory, names.last().map(String::as_str)).await.unwrap();
        assert!(!page.more || !page.names.is_empty(), "a page that is not the last one must not be empty");
        names.extend(page.names);
        if !page.more {
            return names;
        }
    }
}

async fn reads_objects_that_were_put(store: &dyn Store) {
    assert_eq!(kind(store.get("read/a", Span::Whole).await), FailureKind::Missing);
    store.put("read/a", Bytes::from_static(b"abc")).await.unwrap();
    let found = store.get("read/a", Span::Whole).await.unwrap();
    assert_eq!((found.offset, &found.bytes[..]), (0, &b"abc"[..]));
    assert_eq!(
        kind(store.get("read", Span::Whole).await),
        FailureKind::Missing,
        "a directory must not be an object"
    );
}

async fn is_never_overwritten(store: &dyn Store) {
    store.put("once/a", Bytes::from_static(b"first")).await.unwrap();
    assert_eq!(kind(store.put("once/a", Bytes::from_static(b"other")).await), FailureKind::Exists);
    assert_eq!(whole(store, "once/a").await, "first");
    // A deleted name can be used again: a store does not remember it.
    store.delete("once/a").await.unwrap();
    store.put("once/a", Bytes::from_static(b"again")).await.unwrap();
    assert_eq!(whole(store, "once/a").await, "again");
}

async fn reads_ranges(store: &dyn Store) {
    let bytes: Bytes = (0..=255).collect::<Vec<u8>>().into();
    store.put("ranges/a", bytes.clone()).await.unwrap();
    let range = |offset, bytes| Span::Range { offset, bytes };
    for (span, expected) in [
        (range(0, 1), 0..1),
        (range(10, 20), 10..30),
        (range(255, 1), 255..256),
        (range(250, 100), 250..256),
        (range(256, 1), 256..256),
        (range(10_000, 10), 10_000..10_000),
        (Span::Last(1), 255..256),
        (Span::Last(100), 156..256),
        (Span::Last(256), 0..256),
        (Span::Last(1000), 0..256),
    ] {
        let found = store.get("ranges/a", span).await.unwrap();
        assert_eq!(found.offset, expected.start as u64, "{span:?}");
        assert_eq!(found.bytes, bytes.get(expected).unwrap_or_default(), "{span:?}");
    }
    for span in [range(0, 1), Span::Last(1)] {
        assert_eq!(kind(store.get("ranges/none", span).await), FailureKind::Missing);
    }
}

async fn has_one_winner_of_a_race(store: &Arc<dyn Store>) {
    for race in 0..RACES {
        let name = format!("race/{race}");
        let put = |writer: usize| {
            let (store, name) = (store.clone(), name.clone());
            // Tasks run on several threads. The objects are larger than a page or a packet, so that
            // partial writes would be detected.
            tokio::spawn(async move { store.put(&name, vec![writer as u8; 20_000].into()).await })
        };
        let outcomes = join_all((0..WRITERS).map(put)).await;
        let mut winners = Vec::new();
        for (writer, outcome) in outcomes.into_iter().enumerate() {
            match outcome.unwrap() {
                Ok(()) => winners.push(writer),
                Err(failure) => assert_eq!(failure.kind(), FailureKind::Exists, "{failure}"),
            }
        }
        assert_eq!(winners.len(), 1, "race {race}");
        assert_eq!(whole(&**store, &name).await, vec![winners[0] as u8; 20_000]);
    }
}

async fn lists_in_order(store: &dyn Store) {
    assert!(list_all(store, "order").await.is_empty());
    let names = ["order/b/1", "order/a", "order/b/0", "order/b-c", "order/0f", "orders", "order/b/00/z"];
    for name in names {
        store.put(name, Bytes::from_static(b"x")).await.unwrap();
    }
    let mut below: Vec<_> = names.into_iter().filter(|name| name.starts_with("order/")).collect();
    below.sort_unstable();
    assert_eq!(list_all(store, "order").await, below);
    assert_eq!(list_all(store, "order/b").await, ["order/b/0", "order/b/00/z", "order/b/1"]);
    assert_eq!(store.list("order/b", Some("order/b/0")).await.unwrap().names, ["order/b/00/z", "order/b/1"]);
    assert!(store.list("order/b", Some("order/b/1")).await.unwrap().names.is_empty());
    assert!(list_all(store, "order/b/1").await.is_empty(), "an object must not be listed below itself");
}

async fn lists_in_pages(store: &Arc<dyn Store>) {
    let names: Vec<String> = (0..NAMES).map(|number| format!("pages/{number:04x}")).collect();
    for some in names.chunks(32) {
        join_all(some.iter().map(|name| store.put(name, Bytes::from_static(b"x")))).await;
    }
    assert_eq!(list_all(&**store, "pages").await, names);
}

async fn deletes_existing_and_missing_objects(store: &dyn Store) {
    store.put("delete/a", Bytes::from_static(b"x")).await.unwrap();
    for _ in 0..2 {
        store.delete("delete/a").await.unwrap();
        assert_eq!(kind(store.get("delete/a", Span::Whole).await), FailureKind::Missing);
    }
    assert!(list_all(store, "delete").await.is_empty());
}

async fn accepts_large_objects_in_parts(store: &dyn Store, bypasses_page_cache: bool) {
    let byte = |at: usize| (at / 4099 % 251) as u8;
    let mut upload = store.upload("large/a").await.unwrap();
    if bypasses_page_cache {
        upload.bypass_page_cache();
    }
    for start in (0..LARGE_BYTES).step_by(PART_BYTES) {
        assert!(list_all(store, "large").await.is_empty(), "an upload must not exist before its completion");
        let part: Vec<u8> = (start..LARGE_BYTES.min(start + PART_BYTES)).map(byte).collect();
        upload.part(part.into()).await.unwrap();
    }
    upload.complete().await.unwrap();
    assert_eq!(list_all(store, "large").await, ["large/a"]);
    for offset in [0, PART_BYTES - 7, LARGE_BYTES / 2, LARGE_BYTES - 100] {
        let span = Span::Range { offset: offset as u64, bytes: 1000 };
        let found = store.get("large/a", span).await.unwrap().bytes;
        let expected: Vec<u8> = (offset..LARGE_BYTES.min(offset + 1000)).map(byte).collect();
        assert_eq!(found, expected, "at {offset}");
    }
    let last = store.get("large/a", Span::Last(1)).await.unwrap();
    assert_eq!(last.offset, LARGE_BYTES as u64 - 1);
    store.delete("large/a").await.unwrap();
}

async fn discards_aborted_uploads(store: &dyn Store) {
    let mut upload = store.upload("given-up/a").await.unwrap();
    upload.part(vec![1; PART_BYTES].into()).await.unwrap();
    upload.abort().await.unwrap();
    assert_eq!(kind(store.get("given-up/a", Span::Whole).await), FailureKind::Missing);
    assert!(list_all(store, "given-up").await.is_empty());
}
