//! `Reliable` with faults: responses that are lost, late or misleading.
//!
//! Uses tokio's paused clock, so that long time-outs take no time.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fulmar_store::{
    Backend, Failure, FailureKind, FaultyStore, Limits, OperationStatistics, Reliable, Span, Store,
    StoreFault, StoreOperation,
};
use tokio::time::Instant;

const UNAVAILABLE: StoreFault = StoreFault::Fail(FailureKind::Unavailable);

struct Rig {
    /// The store without faults.
    truth: Backend,
    faulty: FaultyStore,
    store: Reliable,
}

fn rig() -> Rig {
    let truth = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(truth.clone()));
    let store = Reliable::new(Arc::new(faulty.clone()), Limits::default());
    Rig { truth, faulty, store }
}

impl Rig {
    async fn put(&self, bytes: &'static str) -> Result<(), FailureKind> {
        let put = self.store.put("a", Bytes::from_static(bytes.as_bytes())).await;
        put.map_err(|failure| failure.kind())
    }

    async fn contents(&self) -> Option<Bytes> {
        self.truth.get("a", Span::Whole).await.ok().map(|found| found.bytes)
    }

    fn statistics(&self, operation: StoreOperation) -> OperationStatistics {
        self.store.statistics().into_iter().find(|one| one.operation == operation).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn put_with_a_lost_response_succeeds() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::LoseResponse);
    rig.put("mine").await.unwrap();
    assert_eq!(rig.contents().await.unwrap(), "mine");
    let puts = rig.statistics(StoreOperation::Put);
    assert_eq!((puts.attempts, puts.retries, puts.bytes), (2, 1, 4));
}

/// An object that was found is not necessarily durable: in a directory the put may have failed
/// after creating it.
#[tokio::test(start_paused = true)]
async fn existing_object_is_synced_before_a_put_succeeds() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::LoseResponse);
    // The read that finds the object, then its sync.
    rig.faulty.next(StoreOperation::Get, StoreFault::Delay(Duration::ZERO));
    rig.faulty.next(StoreOperation::Get, UNAVAILABLE);
    rig.put("mine").await.unwrap();
    assert_eq!(rig.statistics(StoreOperation::Put).attempts, 3);
    rig.faulty.next(StoreOperation::Get, StoreFault::Delay(Duration::ZERO));
    rig.faulty.next(StoreOperation::Get, StoreFault::Fail(FailureKind::Other));
    assert_eq!(rig.put("mine").await, Err(FailureKind::Other));
}

/// The put was performed and later ones get no response: the existing object decides the outcome.
#[tokio::test(start_paused = true)]
async fn existing_object_decides_if_no_response_arrives() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::LoseResponse);
    rig.faulty.always(StoreOperation::Put, Some(UNAVAILABLE));
    rig.put("mine").await.unwrap();
    assert_eq!(rig.put("other").await, Err(FailureKind::Exists));
    assert_eq!(rig.contents().await.unwrap(), "mine");
}

#[tokio::test(start_paused = true)]
async fn spurious_conflict_is_retried() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::Fail(FailureKind::Exists));
    rig.put("mine").await.unwrap();
    assert_eq!(rig.contents().await.unwrap(), "mine");
    rig.truth.delete("a").await.unwrap();
    rig.faulty.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Exists)));
    assert_eq!(rig.put("mine").await, Err(FailureKind::Unavailable), "the object does not exist");
}

#[tokio::test(start_paused = true)]
async fn object_of_another_writer_is_reported_as_existing() {
    let rig = rig();
    rig.truth.put("a", Bytes::from_static(b"theirs")).await.unwrap();
    assert_eq!(rig.put("mine").await, Err(FailureKind::Exists));
    rig.faulty.next(StoreOperation::Put, UNAVAILABLE);
    assert_eq!(rig.put("mine").await, Err(FailureKind::Exists));
    rig.put("theirs").await.unwrap();
}

/// A put that arrives after its time-out finds the object of its retry.
#[tokio::test(start_paused = true)]
async fn put_that_arrives_after_its_timeout_is_harmless() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::Linger(Duration::from_secs(30)));
    rig.put("mine").await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(rig.contents().await.unwrap(), "mine");
    assert_eq!(rig.statistics(StoreOperation::Put).failures[4], 1, "one attempt must have timed out");
}

#[tokio::test(start_paused = true)]
async fn operations_end_within_their_limits() {
    let rig = rig();
    rig.truth.put("a", Bytes::from_static(b"x")).await.unwrap();
    for fault in [UNAVAILABLE, StoreFault::Delay(Duration::from_secs(3600))] {
        rig.faulty.always(StoreOperation::Get, Some(fault));
        rig.faulty.always(StoreOperation::Put, Some(fault));
        rig.faulty.always(StoreOperation::List, Some(fault));
        rig.faulty.always(StoreOperation::Delete, Some(fault));
        let began = Instant::now();
        let get = rig.store.get("a", Span::Whole).await.unwrap_err();
        assert!(get.kind().is_transient() && get.to_string().contains("given up after"), "{get}");
        let put = rig.store.put("b", Bytes::from_static(b"x")).await.unwrap_err();
        assert!(put.kind().is_transient() && put.to_string().contains("may still appear"), "{put}");
        assert!(rig.store.list_all("").await.unwrap_err().kind().is_transient());
        assert!(rig.store.delete("a").await.unwrap_err().kind().is_transient());
        let longest = Limits::default().retry_timeout + Limits::default().attempt_timeout;
        assert!(began.elapsed() < 5 * longest, "{:?}", began.elapsed());
    }
    let gets = rig.statistics(StoreOperation::Get);
    assert_eq!(gets.attempts - gets.retries, 2);
    assert!(gets.failures[3] >= 6 && gets.failures[4] >= 2, "{gets:?}");
}

#[tokio::test(start_paused = true)]
async fn permanent_failures_are_not_retried() {
    let rig = rig();
    for kind in [FailureKind::Refused, FailureKind::Other] {
        rig.faulty.next(StoreOperation::Put, StoreFault::Fail(kind));
        assert_eq!(rig.put("mine").await, Err(kind));
    }
    assert_eq!(rig.statistics(StoreOperation::Put).retries, 0);
    assert_eq!(rig.store.get("none", Span::Whole).await.unwrap_err().kind(), FailureKind::Missing);
    assert_eq!(rig.statistics(StoreOperation::Get).retries, 0);
}

/// A listing fails after an empty page that is not the last one, instead of omitting names.
#[tokio::test(start_paused = true)]
async fn incomplete_listing_is_an_error() {
    let rig = rig();
    for name in ["d/a", "d/b"] {
        rig.truth.put(name, Bytes::from_static(b"x")).await.unwrap();
    }
    rig.faulty.next(StoreOperation::List, StoreFault::EmptyPage);
    let failure = rig.store.list_all("d").await.unwrap_err();
    assert!(failure.to_string().contains("does not advance"), "{failure}");
    assert_eq!(rig.store.list_all("d").await.unwrap(), ["d/a", "d/b"]);
    rig.faulty.next(StoreOperation::List, StoreFault::EmptyPage);
    rig.store.list_all_after("d", Some("d/a".to_owned())).await.unwrap_err();
    assert_eq!(rig.store.list_all_after("d", Some("d/a".to_owned())).await.unwrap(), ["d/b"]);
}

/// `Linger` also works as a fault of all puts.
#[tokio::test(start_paused = true)]
async fn linger_applies_to_all_puts() {
    let rig = rig();
    let late = Duration::from_secs(30);
    rig.faulty.always(StoreOperation::Put, Some(StoreFault::Linger(late)));
    let put = rig.faulty.put("a", Bytes::from_static(b"mine"));
    assert!(tokio::time::timeout(Duration::from_secs(1), put).await.is_err());
    assert_eq!(rig.contents().await, None);
    tokio::time::sleep(late).await;
    assert_eq!(
        rig.contents().await.unwrap(),
        "mine",
        "a lingering put must be performed although its caller is gone"
    );
}

#[tokio::test(start_paused = true)]
async fn slow_read_within_the_limit_succeeds() {
    let rig = rig();
    rig.truth.put("a", vec![7; 1 << 20].into()).await.unwrap();
    rig.faulty.next(StoreOperation::Get, StoreFault::Delay(Duration::from_secs(9)));
    let span = Span::Range { offset: 10, bytes: 20 };
    assert_eq!(rig.store.get("a", span).await.unwrap().bytes, vec![7; 20]);
    assert_eq!(rig.statistics(StoreOperation::Get).retries, 0);
}

/// The disk stalls: a part, and then the completion, are still running when they are retried. Each
/// is performed once.
#[test]
fn upload_to_a_directory_survives_a_stall() {
    // One blocking thread, which the test occupies to stall the store.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
    let directory = tempfile::tempdir().unwrap();
    runtime.unwrap().block_on(async {
        let ms = Duration::from_millis;
        let limits = Limits {
            attempt_timeout: ms(100),
            first_delay: ms(1),
            bytes_per_second: u64::MAX,
            ..Limits::default()
        };
        let store = Reliable::new(Arc::new(Backend::directory(directory.path()).unwrap()), limits);
        let retries = || store.statistics().iter().map(|of| of.retries).sum::<u64>();
        let stall = async |done: &mut (dyn Future<Output = Result<(), Failure>> + Unpin)| {
            let (release, held) = std::sync::mpsc::channel::<()>();
            let blocked = tokio::task::spawn_blocking(move || held.recv());
            let before = retries();
            let retried = async {
                while retries() < before + 3 {
                    tokio::task::yield_now().await;
                }
            };
            match futures::future::select(&mut *done, Box::pin(retried)).await {
                futures::future::Either::Left((result, _)) => {
                    panic!("the operation was not retried: {result:?}")
                }
                futures::future::Either::Right(_) => drop(release),
            }
            done.await.unwrap();
            assert!(blocked.await.unwrap().is_err());
        };
        let mut upload = store.upload("a").await.unwrap();
        upload.part(vec![1; 5 << 20].into()).await.unwrap();
        stall(&mut upload.part(vec![2; 5 << 20].into())).await;
        upload.part(vec![3; 1 << 20].into()).await.unwrap();
        stall(&mut upload.complete()).await;
        let found = store.get("a", Span::Whole).await.unwrap().bytes;
        let starts: Vec<u8> = found.chunks(5 << 20).map(|part| part[0]).collect();
        assert_eq!((found.len(), starts), (11 << 20, vec![1, 2, 3]));
    });
}

/// A part whose response was lost is sent again and replaces itself, as does a completion.
#[tokio::test]
async fn upload_survives_lost_responses() {
    let server = fulmar_workload::server::S3Server::start().unwrap();
    let s3 = Backend::s3(server.bucket(), "", server.environment()).unwrap();
    let faulty = FaultyStore::new(Arc::new(s3));
    let store = Reliable::new(Arc::new(faulty.clone()), Limits::default());
    let mut upload = store.upload("a").await.unwrap();
    for part in 1..=3u8 {
        faulty.next(StoreOperation::Upload, UNAVAILABLE);
        upload.part(vec![part; 5 << 20].into()).await.unwrap();
    }
    faulty.next(StoreOperation::Upload, StoreFault::LoseResponse);
    upload.complete().await.unwrap();
    let found = store.get("a", Span::Whole).await.unwrap().bytes;
    let starts: Vec<u8> = found.chunks(5 << 20).map(|part| part[0]).collect();
    assert_eq!((found.len(), starts), (15 << 20, vec![1, 2, 3]));
}
