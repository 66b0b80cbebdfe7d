//! What is made of a store when its answers are lost, or say what is not so: the same for every store, since what decides then is what
//! the store says of what is there.
//!
//! ```text
//!   Reliable --- FaultyStore --- any store
//! ```
//!
//! The waits are short, and no time is measured: these run on real servers. What takes a minute of patience, or comes late, is
//! in [`super::faults`], where time stands still.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fulmar_store::{FailureKind, FaultyStore, Limits, Reliable, Span, Store, StoreFault, StoreOperation};

const UNAVAILABLE: StoreFault = StoreFault::Fail(FailureKind::Unavailable);
const EXISTS: StoreFault = StoreFault::Fail(FailureKind::Exists);
const TRIES: u32 = 3;
/// The least that stores take as a part that is not the last.
const PART_BYTES: usize = 5 << 20;

/// A store, and what can be relied on above it, with faults in between.
struct Doubts<'a> {
    truth: &'a dyn Store,
    faulty: FaultyStore,
    store: Reliable,
}

/// Runs all of them.
pub async fn are_settled(store: &Arc<dyn Store>) {
    let faulty = FaultyStore::new(store.clone());
    let brief = Duration::from_millis(1);
    let limits = Limits { tries: TRIES, first_delay: brief, longest_delay: brief, ..Limits::default() };
    let reliable = Reliable::new(Arc::new(faulty.clone()), limits);
    let doubts = Doubts { truth: &**store, faulty, store: reliable };
    doubts.of_a_lost_answer().await;
    doubts.of_all_answers_lost().await;
    doubts.of_a_conflict_for_nothing().await;
    doubts.of_another_ones_object().await;
    doubts.of_a_put_that_comes_late().await;
    doubts.of_an_upload().await;
    doubts.of_a_listing().await;
}

impl Doubts<'_> {
    async fn put(&self, name: &str, bytes: &'static str) -> Result<(), FailureKind> {
        let put = self.store.put(name, Bytes::from_static(bytes.as_bytes())).await;
        put.map_err(|failure| failure.kind())
    }

    async fn holds(&self, name: &str) -> Option<Bytes> {
        self.truth.get(name, Span::Whole).await.ok().map(|found| found.bytes)
    }

    /// The second put meets the first one, and is the same.
    async fn of_a_lost_answer(&self) {
        self.faulty.next(StoreOperation::Put, StoreFault::LoseAnswer);
        self.put("doubts/lost", "mine").await.unwrap();
        assert_eq!(self.holds("doubts/lost").await.unwrap(), "mine");
        self.faulty.next(StoreOperation::Delete, StoreFault::LoseAnswer);
        self.store.delete("doubts/lost").await.unwrap();
        assert_eq!(self.holds("doubts/lost").await, None);
    }

    /// What is there decides.
    async fn of_all_answers_lost(&self) {
        self.faulty.next(StoreOperation::Put, StoreFault::LoseAnswer);
        self.faulty.always(StoreOperation::Put, Some(UNAVAILABLE));
        self.put("doubts/all", "mine").await.unwrap();
        assert_eq!(self.put("doubts/all", "other").await, Err(FailureKind::Exists));
        self.faulty.always(StoreOperation::Put, None);
        assert_eq!(self.holds("doubts/all").await.unwrap(), "mine");
    }

    /// S3 answers 409 to one of two puts that meet, though the other one then fails.
    async fn of_a_conflict_for_nothing(&self) {
        self.faulty.next(StoreOperation::Put, EXISTS);
        self.put("doubts/conflict", "mine").await.unwrap();
        assert_eq!(self.holds("doubts/conflict").await.unwrap(), "mine");
        self.faulty.always(StoreOperation::Put, Some(EXISTS));
        let nothing = self.put("doubts/nothing", "mine").await;
        assert_eq!(nothing, Err(FailureKind::Unavailable), "there is nothing of that name");
        self.faulty.always(StoreOperation::Put, None);
        assert_eq!(self.holds("doubts/nothing").await, None);
    }

    async fn of_another_ones_object(&self) {
        self.truth.put("doubts/theirs", Bytes::from_static(b"theirs")).await.unwrap();
        for fault in [UNAVAILABLE, StoreFault::LoseAnswer, EXISTS] {
            self.faulty.next(StoreOperation::Put, fault);
            assert_eq!(self.put("doubts/theirs", "mine").await, Err(FailureKind::Exists), "{fault:?}");
            self.faulty.forget(StoreOperation::Put);
        }
        assert_eq!(self.holds("doubts/theirs").await.unwrap(), "theirs");
    }

    /// It was told to be in doubt; then it is there, or meets what was made since.
    async fn of_a_put_that_comes_late(&self) {
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
            assert_eq!(self.holds(&name).await.unwrap(), since.unwrap_or("mine"));
            // And again, by who had been in doubt.
            let again = if since.is_some() { Err(FailureKind::Exists) } else { Ok(()) };
            assert_eq!(self.put(&name, "mine").await, again);
        }
    }

    /// A part that is sent again takes its own place, and a completion that was not answered is one.
    async fn of_an_upload(&self) {
        let mut upload = self.store.upload("doubts/upload").await.unwrap();
        for (part, fault) in [(1, UNAVAILABLE), (2, StoreFault::LoseAnswer)] {
            self.faulty.next(StoreOperation::Upload, fault);
            upload.part(vec![part; PART_BYTES].into()).await.unwrap();
        }
        self.faulty.next(StoreOperation::Upload, StoreFault::LoseAnswer);
        upload.complete().await.unwrap();
        let found = self.holds("doubts/upload").await.unwrap();
        let starts: Vec<u8> = found.chunks(PART_BYTES).map(|part| part[0]).collect();
        assert_eq!((found.len(), starts), (2 * PART_BYTES, vec![1, 2]));
    }

    async fn of_a_listing(&self) {
        for name in ["doubts/list/a", "doubts/list/b"] {
            self.put(name, "x").await.unwrap();
        }
        for fault in [UNAVAILABLE, StoreFault::LoseAnswer] {
            self.faulty.next(StoreOperation::List, fault);
            let names = self.store.list_all("doubts/list").await.unwrap();
            assert_eq!(names, ["doubts/list/a", "doubts/list/b"]);
        }
        self.faulty.next(StoreOperation::List, StoreFault::EmptyPage);
        self.store.list_all("doubts/list").await.unwrap_err();
    }
}
