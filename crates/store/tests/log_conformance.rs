//! Conformance tests for both implementations of the commit log.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use common::{commit, options, transactions};
use fulmar_store::{
    Backend, CommitLog, FaultyFiles, Limits, LogError, LogOptions, Lsn, Reliable, SharedLogOptions, Urgency,
};
use futures::FutureExt;
use parking_lot::Mutex;

/// Storage of a log that can be reopened repeatedly.
enum Place {
    /// Each opening finds the files as a killed process leaves them: the threads of a dropped log
    /// may still run for some time, which a lock on a real directory would prevent.
    Files(Mutex<FaultyFiles>),
    Store(Backend),
}

impl Place {
    /// Opens the log. Also returns the replayed transaction ids and positions.
    async fn open(&self) -> (Arc<CommitLog>, Vec<(u64, Lsn)>) {
        let mut seen = Vec::new();
        let mut replay = |lsn, record: &fulmar_pages::Record<'_>| {
            seen.push((record.header.transaction, lsn));
            Ok(())
        };
        let log = match self {
            Place::Files(files) => {
                let options = LogOptions { capacity_bytes: 64 << 10, pending_bytes: 4 << 10, ..options() };
                let mut files = files.lock();
                *files = files.process_kill();
                CommitLog::open(options, Arc::new(files.clone()), &mut replay)
            }
            Place::Store(store) => {
                let options = SharedLogOptions {
                    object_bytes: 512,
                    capacity_bytes: 64 << 10,
                    pending_bytes: 4 << 10,
                    ..SharedLogOptions::default()
                };
                let store = Reliable::new(Arc::new(store.clone()), Limits::default());
                CommitLog::open_shared(options, store, 7, &mut replay).await
            }
        };
        (log.unwrap(), seen)
    }
}

async fn append(log: &CommitLog, transaction: u64, bytes: usize) -> Lsn {
    let body = commit(transaction, bytes);
    loop {
        match log.append(&body, Urgency::Immediate) {
            Err(LogError::Busy) => log.wait_for_space(body.len(), Urgency::Immediate).await.unwrap(),
            other => return other.unwrap(),
        }
    }
}

async fn close(log: Arc<CommitLog>) -> Result<(), LogError> {
    tokio::task::spawn_blocking(move || log.close()).await.unwrap()
}

async fn conforms(place: Place) {
    keeps_durable_records_in_order(&place).await;
    accepts_concurrent_appends(&place).await;
    releases_space(&place).await;
    keeps_a_reserve_for_records_that_make_room(&place).await;
    rejects_records_that_are_too_long(&place).await;
}

async fn keeps_durable_records_in_order(place: &Place) {
    let (log, seen) = place.open().await;
    assert!(seen.is_empty());
    let mut appended = Vec::new();
    for transaction in 1..=50 {
        let before = log.appended();
        let lsn = append(&log, transaction, 40).await;
        assert!(lsn > before && log.appended() == lsn);
        appended.push((transaction, lsn));
    }
    log.wait_durable(appended[20].1).await.unwrap();
    assert!(
        appended[..=20].iter().all(|(_, lsn)| log.is_durable(*lsn)),
        "all records before a durable one must be durable"
    );
    log.wait_durable(appended[49].1).await.unwrap();
    assert_eq!(log.durable(), appended[49].1);
    assert_eq!(log.statistics().records.load(Relaxed), 50);
    // Dropped, as in a crash, and reopened.
    drop(log);
    let (log, seen) = place.open().await;
    assert_eq!(seen, appended);
    assert!(log.appended() >= appended[49].1 && log.is_durable(appended[49].1));
    let last = append(&log, 51, 40).await;
    assert!(log.wait_durable(Lsn(last.0 + 1)).now_or_never().is_none());
    close(log.clone()).await.unwrap();
    close(log.clone()).await.unwrap();
    assert!(log.is_durable(last), "a close must make appended records durable");
    assert!(matches!(log.append(&commit(52, 1), Urgency::Immediate), Err(LogError::Closed)));
    assert!(matches!(log.wait_for_space(1, Urgency::Immediate).await, Err(LogError::Closed)));
    // The seal takes a few bytes.
    assert!(matches!(log.wait_durable(Lsn(last.0 + 1000)).await, Err(LogError::Closed)));
    let (log, seen) = place.open().await;
    assert_eq!(transactions(&seen), (1..=51).collect::<Vec<_>>());
    log.truncate(log.appended());
    close(log).await.unwrap();
}

async fn accepts_concurrent_appends(place: &Place) {
    let (log, before) = place.open().await;
    let clients = (0..8).map(|client| {
        let log = log.clone();
        tokio::spawn(async move {
            for number in 0..20 {
                let lsn = append(&log, 1000 + 100 * client + number, 60).await;
                log.wait_durable(lsn).await.unwrap();
            }
        })
    });
    for ended in futures::future::join_all(clients).await {
        ended.unwrap();
    }
    drop(log);
    let (log, seen) = place.open().await;
    let mut seen = transactions(&seen[before.len()..]);
    for client in 0..8 {
        let own: Vec<_> = seen.iter().filter(|id| (**id - 1000) / 100 == client).copied().collect();
        assert!(own.is_sorted() && own.len() == 20, "{own:?}");
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 160);
    log.truncate(log.appended());
    close(log).await.unwrap();
}

async fn releases_space(place: &Place) {
    let (log, _) = place.open().await;
    // Several times the capacity.
    for transaction in 0..300 {
        let lsn = append(&log, transaction, 1000).await;
        log.wait_durable(lsn).await.unwrap();
        assert!(log.oldest() <= lsn);
        log.truncate(lsn);
    }
    assert!(log.size_bytes() <= 64 << 10);
    close(log).await.unwrap();
    let (_, seen) = place.open().await;
    assert!(seen.len() < 50, "{}", seen.len());
}

async fn keeps_a_reserve_for_records_that_make_room(place: &Place) {
    let (log, seen) = place.open().await;
    let mut transaction = seen.last().map_or(0, |(last, _)| *last);
    let refused = async |transaction: u64, urgency| {
        let body = commit(transaction, 500);
        loop {
            match log.append(&body, urgency) {
                Ok(_) => return None,
                Err(LogError::Busy) => match log.wait_for_space(body.len(), urgency).await {
                    Ok(()) => {}
                    Err(error) => return Some(error),
                },
                Err(error) => return Some(error),
            }
        }
    };
    for urgency in [Urgency::Immediate, Urgency::FreesSpace] {
        let mut taken = 0;
        let error = loop {
            match refused(transaction + 1, urgency).await {
                None => (transaction, taken) = (transaction + 1, taken + 1),
                Some(error) => break error,
            }
        };
        assert!(matches!(error, LogError::Full(_)), "{error}");
        assert!(taken >= 6, "{taken} {urgency:?}");
        let commits = refused(transaction + 1, Urgency::Immediate).await;
        assert!(matches!(commits, Some(LogError::Full(_))) && log.full_cause().is_some(), "{commits:?}");
        // The heads of objects in flight are not included in the limit.
        assert!(log.size_bytes() <= (64 + 8 + 1) << 10, "{}", log.size_bytes());
    }
    let end = log.appended();
    log.wait_durable(end).await.unwrap();
    log.truncate(end);
    let has_space = async {
        while refused(transaction + 1, Urgency::Immediate).await.is_some() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), has_space).await.expect("timed out: the log has space");
    assert_eq!(log.full_cause(), None);
    close(log).await.unwrap();
    let (log, seen) = place.open().await;
    assert_eq!(seen.last().unwrap().0, transaction + 1);
    log.truncate(log.appended());
    close(log).await.unwrap();
}

async fn rejects_records_that_are_too_long(place: &Place) {
    let (log, _) = place.open().await;
    let refused = log.append(&commit(1, 60 << 10), Urgency::Immediate);
    assert!(matches!(refused, Err(LogError::TooLong { .. })), "{refused:?}");
    let refused = log.wait_for_space(60 << 10, Urgency::Immediate).await;
    assert!(matches!(refused, Err(LogError::TooLong { .. })), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_conform() {
    conforms(Place::Files(Mutex::new(FaultyFiles::new()))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_conform() {
    conforms(Place::Store(Backend::memory())).await;
}

#[tokio::test]
async fn read_only_log_rejects_appends_and_never_waits() {
    let log = CommitLog::read_only();
    assert!(log.is_read_only() && log.is_durable(Lsn(0)));
    assert!(matches!(log.append(&commit(1, 1), Urgency::Immediate), Err(LogError::ReadOnly)));
    assert!(matches!(log.wait_for_space(1, Urgency::Immediate).await, Err(LogError::ReadOnly)));
    log.wait_durable(log.appended()).await.unwrap();
    log.truncate(Lsn(100));
    assert_eq!((log.appended(), log.oldest(), log.size_bytes()), (Lsn(0), Lsn(0), 0));
    close(log).await.unwrap();
}
