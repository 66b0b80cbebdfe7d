//! Uncertain outcomes: responses that are lost or misleading. The same for every store, because the
//! outcome is decided by reading the store.
//!
//! ```text
//!   Reliable --- FaultyStore --- any store
//! ```
//!
//! Delays are short and no durations are measured, because these checks also run on real servers.
//! Cases that take a minute or arrive late are in [`super::faults`], which uses a paused clock.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fulmar_store::{FailureKind, FaultyStore, Limits, Reliable, Span, Store, StoreFault, StoreOperation};

const UNAVAILABLE: StoreFault = StoreFault::Fail(FailureKind::Unavailable);
const EXISTS: StoreFault = StoreFault::Fail(FailureKind::Exists);
const TRIES: u32 = 3;
/// Minimum size of a part that is not the last one.
const PART_BYTES: usize = 5 << 20;

/// A store, and a reliable store above it with faults in between.
struct UncertainOutcomes<'a> {
    truth: &'a dyn Store,
    faulty: FaultyStore,
    store: Reliable,
}

/// Runs all checks.
pub async fn are_resolved(store: &Arc<dyn Store>) {
    let faulty = FaultyStore::new(store.clone());
    let brief = Duration::from_millis(1);
    let limits = Limits { max_attempts: TRIES, first_delay: brief, max_delay: brief, ..Limits::default() };
    let reliable = Reliable::new(Arc::new(faulty.clone()), limits);
    let doubts = UncertainOutcomes { truth: &**store, faulty, store: reliable };
    doubts.put_with_a_lost_response().await;
    doubts.put_with_all_responses_lost().await;
    doubts.put_with_a_spurious_conflict().await;
    doubts.put_of_an_existing_object().await;
    doubts.put_that_arrives_late().await;
    doubts.upload_with_lost_responses().await;
    doubts.listing_with_faults().await;
}

impl UncertainOutcomes<'_> {
    async fn put(&self, name: &str, bytes: &'static str) -> Result<(), FailureKind> {
        let put = self.store.put(name, Bytes::from_static(bytes.as_bytes())).await;
        put.map_err(|failure| failure.kind())
    }

    async fn contents(&self, name: &str) -> Option<Bytes> {
        self.truth.get(name, Span::Whole).await.ok().map(|found| found.bytes)
    }

    /// The second put finds the object of the first one, which is the same.
    async fn put_with_a_lost_response(&self) {
        self.faulty.next(StoreOperation::Put, StoreFault::LoseResponse);
        self.put("doubts/lost", "mine").await.unwrap();
        assert_eq!(self.contents("doubts/lost").await.unwrap(), "mine");
        self.faulty.next(StoreOperation::Delete, StoreFault::LoseResponse);
        self.store.delete("doubts/lost").await.unwrap();
        assert_eq!(self.contents("doubts/lost").await, None);
    }

    /// The existing object decides the outcome.
    async fn put_with_all_responses_lost(&self) {
        self.faulty.next(StoreOperation::Put, StoreFault::LoseResponse);
        self.faulty.always(StoreOperation::Put, Some(UNAVAILABLE));
        self.put("doubts/all", "mine").await.unwrap();
        assert_eq!(self.put("doubts/all", "other").await, Err(FailureKind::Exists));
        self.faulty.always(StoreOperation::Put, None);
        assert_eq!(self.contents("doubts/all").await.unwrap(), "mine");
    }

    /// S3 may answer 409 to one of two concurrent puts although the other one then fails.
    async fn put_with_a_spurious_conflict(&self) {
        self.faulty.next(StoreOperation::Put, EXISTS);
        self.put("doubts/conflict", "mine").await.unwrap();
        assert_eq!(self.contents("doubts/conflict").await.unwrap(), "mine");
        self.faulty.always(StoreOperation::Put, Some(EXISTS));
        let nothing = self.put("doubts/nothing", "mine").await;
        assert_eq!(nothing, Err(FailureKind::Unavailable), "the object does not exist");
        self.faulty.always(StoreOperation::Put, None);
        assert_eq!(self.contents("doubts/nothing").await, None);
    }

    async fn put_of_an_existing_object(&self) {
        self.truth.put("doubts/theirs", Bytes::from_static(b"theirs")).await.unwrap();
        for fault in [UNAVAILABLE, StoreFault::LoseResponse, EXISTS] {
            self.faulty.next(StoreOperation::Put, fault);
            assert_eq!(self.put("doubts/theirs", "mine").await, Err(FailureKind::Exists), "{fault:?}");
            self.faulty.forget(StoreOperation::Put);
        }
        assert_eq!(self.contents("doubts/theirs").await.unwrap(), "theirs");
    }

    /// The outcome of the put was reported as uncertain. Then it arrives late, or finds an object
    /// that was created since.
    async fn put_that_arrives_late(&self) {
        for since in [None, Some("other")] {
            let name = format!("doubts/late-{}", since.unwrap_or("none"));
            self.faulty.always(StoreOperation::Put, Some(UNAVAILABLE));
            assert_eq!(self.put(&name, "mine").await, Err(FailureKind::Unavailable));
            self.faulty.always(StoreOperation::Put, None);
            if let Some(other) = since {
                self.put(&name, other).await.unwrap();
            }
            let late = self.truth.put(&name, Bytes::from_static(b"mine")).await;
            assert_eq!(late.map_err(|failure| failure.kind()).err(), since.map(|_| FailureKind::Exists));
            assert_eq!(self.contents(&name).await.unwrap(), since.unwrap_or("mine"));
            // The caller of the uncertain put retries it.
            let again = if since.is_some() { Err(FailureKind::Exists) } else { Ok(()) };
            assert_eq!(self.put(&name, "mine").await, again);
        }
    }

    /// A part that is sent again replaces itself. A completion whose response was lost counts.
    async fn upload_with_lost_responses(&self) {
        let mut upload = self.store.upload("doubts/upload").await.unwrap();
        for (part, fault) in [(1, UNAVAILABLE), (2, StoreFault::LoseResponse)] {
            self.faulty.next(StoreOperation::Upload, fault);
            upload.part(vec![part; PART_BYTES].into()).await.unwrap();
        }
        self.faulty.next(StoreOperation::Upload, StoreFault::LoseResponse);
        upload.complete().await.unwrap();
        let found = self.contents("doubts/upload").await.unwrap();
        let starts: Vec<u8> = found.chunks(PART_BYTES).map(|part| part[0]).collect();
        assert_eq!((found.len(), starts), (2 * PART_BYTES, vec![1, 2]));
    }

    async fn listing_with_faults(&self) {
        for name in ["doubts/list/a", "doubts/list/b"] {
            self.put(name, "x").await.unwrap();
        }
        for fault in [UNAVAILABLE, StoreFault::LoseResponse] {
            self.faulty.next(StoreOperation::List, fault);
            let names = self.store.list_all("doubts/list").await.unwrap();
            assert_eq!(names, ["doubts/list/a", "doubts/list/b"]);
        }
        self.faulty.next(StoreOperation::List, StoreFault::EmptyPage);
        self.store.list_all("doubts/list").await.unwrap_err();
    }
}
