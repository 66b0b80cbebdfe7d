//! What is relied on stands up to faults: answers that are lost, come late, or say what is not so.
//!
//! Time stands still but for the waits (tokio's paused clock), so a minute of patience takes no time.

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
    /// Without faults: what is really there.
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

    async fn holds(&self) -> Option<Bytes> {
        self.truth.get("a", Span::Whole).await.ok().map(|found| found.bytes)
    }

    fn counted(&self, operation: StoreOperation) -> OperationStatistics {
        self.store.statistics().into_iter().find(|one| one.operation == operation).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn a_put_whose_answer_was_lost_has_succeeded() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::LoseAnswer);
    rig.put("mine").await.unwrap();
    assert_eq!(rig.holds().await.unwrap(), "mine");
    let puts = rig.counted(StoreOperation::Put);
    assert_eq!((puts.tries, puts.retries, puts.bytes), (2, 1, 4));
}

/// What is found is not durable for being found: in a directory the put may have failed behind that.
#[tokio::test(start_paused = true)]
async fn what_is_found_is_made_durable_before_it_counts() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::LoseAnswer);
    // The read that finds it, and then its sync.
    rig.faulty.next(StoreOperation::Get, StoreFault::Delay(Duration::ZERO));
    rig.faulty.next(StoreOperation::Get, UNAVAILABLE);
    rig.put("mine").await.unwrap();
    assert_eq!(rig.counted(StoreOperation::Put).tries, 3);
    rig.faulty.next(StoreOperation::Get, StoreFault::Delay(Duration::ZERO));
    rig.faulty.next(StoreOperation::Get, StoreFault::Fail(FailureKind::Other));
    assert_eq!(rig.put("mine").await, Err(FailureKind::Other));
}

/// The put was done, and no later one gets an answer: what is there decides.
#[tokio::test(start_paused = true)]
async fn what_is_there_decides_when_no_answer_comes() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::LoseAnswer);
    rig.faulty.always(StoreOperation::Put, Some(UNAVAILABLE));
    rig.put("mine").await.unwrap();
    assert_eq!(rig.put("other").await, Err(FailureKind::Exists));
    assert_eq!(rig.holds().await.unwrap(), "mine");
}

#[tokio::test(start_paused = true)]
async fn a_conflict_for_nothing_is_tried_again() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::Fail(FailureKind::Exists));
    rig.put("mine").await.unwrap();
    assert_eq!(rig.holds().await.unwrap(), "mine");
    rig.truth.delete("a").await.unwrap();
    rig.faulty.always(StoreOperation::Put, Some(StoreFault::Fail(FailureKind::Exists)));
    assert_eq!(rig.put("mine").await, Err(FailureKind::Unavailable), "there is nothing of that name");
}

#[tokio::test(start_paused = true)]
async fn another_ones_object_is_not_taken_for_ours() {
    let rig = rig();
    rig.truth.put("a", Bytes::from_static(b"theirs")).await.unwrap();
    assert_eq!(rig.put("mine").await, Err(FailureKind::Exists));
    rig.faulty.next(StoreOperation::Put, UNAVAILABLE);
    assert_eq!(rig.put("mine").await, Err(FailureKind::Exists));
    rig.put("theirs").await.unwrap();
}

/// A put that arrives after its time-out meets the one that was made since.
#[tokio::test(start_paused = true)]
async fn a_put_that_lingers_does_no_harm() {
    let rig = rig();
    rig.faulty.next(StoreOperation::Put, StoreFault::Linger(Duration::from_secs(30)));
    rig.put("mine").await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(rig.holds().await.unwrap(), "mine");
    assert_eq!(rig.counted(StoreOperation::Put).failures[4], 1, "one has timed out");
}

#[tokio::test(start_paused = true)]
async fn an_operation_ends_within_its_bounds() {
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
        assert!(put.kind().is_transient() && put.to_string().contains("may yet appear"), "{put}");
        assert!(rig.store.list_all("").await.unwrap_err().kind().is_transient());
        assert!(rig.store.delete("a").await.unwrap_err().kind().is_transient());
        let longest = Limits::default().patience + Limits::default().answer;
        assert!(began.elapsed() < 5 * longest, "{:?}", began.elapsed());
    }
    let gets = rig.counted(StoreOperation::Get);
    assert_eq!(gets.tries - gets.retries, 2);
    assert!(gets.failures[3] >= 6 && gets.failures[4] >= 2, "{gets:?}");
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_would_come_again_is_not_tried_again() {
    let rig = rig();
    for kind in [FailureKind::Refused, FailureKind::Other] {
        rig.faulty.next(StoreOperation::Put, StoreFault::Fail(kind));
        assert_eq!(rig.put("mine").await, Err(kind));
    }
    assert_eq!(rig.counted(StoreOperation::Put).retries, 0);
    assert_eq!(rig.store.get("none", Span::Whole).await.unwrap_err().kind(), FailureKind::Missing);
    assert_eq!(rig.counted(StoreOperation::Get).retries, 0);
}

/// What lies behind an empty page is neither garbage nor of no account: the listing fails.
#[tokio::test(start_paused = true)]
async fn a_listing_that_is_cut_short_is_an_error() {
    let rig = rig();
    for name in ["d/a", "d/b"] {
        rig.truth.put(name, Bytes::from_static(b"x")).await.unwrap();
    }
    rig.faulty.next(StoreOperation::List, StoreFault::EmptyPage);
    let failure = rig.store.list_all("d").await.unwrap_err();
    assert!(failure.to_string().contains("leads no further"), "{failure}");
    assert_eq!(rig.store.list_all("d").await.unwrap(), ["d/a", "d/b"]);
    rig.faulty.next(StoreOperation::List, StoreFault::EmptyPage);
    rig.store.list_all_after("d", Some("d/a".to_owned())).await.unwrap_err();
    assert_eq!(rig.store.list_all_after("d", Some("d/a".to_owned())).await.unwrap(), ["d/b"]);
}

/// All puts of a store that lingers, not only the next one.
#[tokio::test(start_paused = true)]
async fn a_fault_of_all_puts_lingers_too() {
    let rig = rig();
    let late = Duration::from_secs(30);
    rig.faulty.always(StoreOperation::Put, Some(StoreFault::Linger(late)));
    let put = rig.faulty.put("a", Bytes::from_static(b"mine"));
    assert!(tokio::time::timeout(Duration::from_secs(1), put).await.is_err());
    assert_eq!(rig.holds().await, None);
    tokio::time::sleep(late).await;
    assert_eq!(rig.holds().await.unwrap(), "mine", "nobody has waited for it");
}

#[tokio::test(start_paused = true)]
async fn a_slow_read_is_waited_for() {
    let rig = rig();
    rig.truth.put("a", vec![7; 1 << 20].into()).await.unwrap();
    rig.faulty.next(StoreOperation::Get, StoreFault::Delay(Duration::from_secs(9)));
    let span = Span::Range { offset: 10, bytes: 20 };
    assert_eq!(rig.store.get("a", span).await.unwrap().bytes, vec![7; 20]);
    assert_eq!(rig.counted(StoreOperation::Get).retries, 0);
}

/// A disk that stalls: a part, and then the completion, are still being done when they are tried again. Each is done once.
#[test]
fn an_upload_to_a_directory_survives_a_stall() {
    // One thread for all that blocks, so that nothing is done while the test holds it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build();
    let directory = tempfile::tempdir().unwrap();
    runtime.unwrap().block_on(async {
        let ms = Duration::from_millis;
        let limits =
            Limits { answer: ms(100), first_delay: ms(1), bytes_per_second: u64::MAX, ..Limits::default() };
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
                futures::future::Either::Left((result, _)) => panic!("it was not tried again: {result:?}"),
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

/// A part whose answer was lost is sent again and takes its own place; so does a completion.
#[tokio::test]
async fn an_upload_survives_lost_answers() {
    let server = fulmar_workload::server::S3Server::start().unwrap();
    let s3 = Backend::s3(server.bucket(), "", server.environment()).unwrap();
    let faulty = FaultyStore::new(Arc::new(s3));
    let store = Reliable::new(Arc::new(faulty.clone()), Limits::default());
    let mut upload = store.upload("a").await.unwrap();
    for part in 1..=3u8 {
        faulty.next(StoreOperation::Upload, UNAVAILABLE);
        upload.part(vec![part; 5 << 20].into()).await.unwrap();
    }
    faulty.next(StoreOperation::Upload, StoreFault::LoseAnswer);
    upload.complete().await.unwrap();
    let found = store.get("a", Span::Whole).await.unwrap().bytes;
    let starts: Vec<u8> = found.chunks(5 << 20).map(|part| part[0]).collect();
    assert_eq!((found.len(), starts), (15 << 20, vec![1, 2, 3]));
}
