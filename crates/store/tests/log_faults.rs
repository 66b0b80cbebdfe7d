//! The log on a slow, full or broken disk: the results that callers get, and when.

mod common;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::sync::{Arc, Barrier};

use common::*;
use fulmar_store::{CommitLog, Fault, FaultyFiles, FullCause, LogError, LogOptions, Lsn, Operation, Urgency};

/// Receives the reported discards.
fn discards(log: &CommitLog) -> mpsc::Receiver<(Lsn, Lsn)> {
    let (sender, receiver) = mpsc::channel();
    log.on_discard(Box::new(move |after, upto| {
        // The receiver is gone when the test has ended.
        let _ = sender.send((after, upto));
    }));
    receiver
}

#[test]
fn waiting_returns_immediately_only_for_durable_positions() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let first = append_durably(&log, 1, 10);
    assert!(log.is_durable(first));
    assert!(log.wait_durable(first).now_or_never().unwrap().is_ok());
    files.hold(Operation::Sync, true);
    let second = append(&log, 2, 10).unwrap();
    assert!(log.wait_durable(second).now_or_never().is_none());
    assert!(!log.is_durable(second) && log.durable() == first && log.appended() == second);
    files.hold(Operation::Sync, false);
    block_on(log.wait_durable(second)).unwrap();
}

#[test]
fn records_appended_during_a_sync_form_the_next_batch() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let syncs = files.count(Operation::Sync);
    files.hold(Operation::Sync, true);
    append(&log, 1, 10).unwrap();
    wait_until("the first batch is being synced", || files.count(Operation::Sync) == syncs + 1);
    for transaction in 2..=100 {
        append(&log, transaction, 10).unwrap();
    }
    files.hold(Operation::Sync, false);
    block_on(log.wait_durable(log.appended())).unwrap();
    assert_eq!(log.statistics().largest_batch_records.load(Relaxed), 99);
    assert_eq!(log.statistics().records.load(Relaxed), 100);
    assert_eq!(log.statistics().batches.load(Relaxed), 2);
}

#[test]
fn appends_are_rejected_while_too_much_is_pending() {
    let files = FaultyFiles::new();
    let options = LogOptions { pending_bytes: 2000, ..options() };
    let (log, _) = open_with(options, files.clone()).unwrap();
    let syncs = files.count(Operation::Sync);
    files.hold(Operation::Sync, true);
    append(&log, 1, 100).unwrap();
    wait_until("the first batch is being synced", || files.count(Operation::Sync) == syncs + 1);
    let refused = (2..)
        .find(|transaction| log.append(&commit(*transaction, 100), Urgency::Immediate).is_err())
        .unwrap();
    let error = log.append(&commit(refused, 100), Urgency::Immediate).unwrap_err();
    assert!(matches!(error, LogError::Busy), "{error}");
    let mut room = Box::pin(log.wait_for_space(commit(refused, 100).len(), Urgency::Immediate));
    assert!(room.as_mut().now_or_never().is_none());
    files.hold(Operation::Sync, false);
    block_on(room).unwrap();
    append_durably(&log, refused, 100);
    let (_, seen) = open(files.process_kill());
    assert_eq!(transactions(&seen), (1..=refused).collect::<Vec<_>>());
}

#[test]
fn full_disk_rejects_commits_and_loses_none() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    append_durably(&log, 1, 100);
    wait_until("a file is ready", || log.size_bytes() >= 2 * 4096);
    files.fail_while(Operation::Create, Some(Fault::NoSpace));
    let mut last = 1;
    let error = loop {
        match append(&log, last + 1, 100) {
            Ok(_) => last += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LogError::Full(FullCause::Disk { .. })), "{error}");
    assert!(matches!(log.full_cause(), Some(FullCause::Disk { .. })));
    assert_eq!(log.statistics().failures.load(Relaxed), 0);
    block_on(log.wait_durable(log.appended())).unwrap();
    // Space becomes available by truncation alone, because files are reused.
    log.truncate(log.durable());
    wait_until("a file is reused", || append(&log, last + 1, 100).is_ok());
    // Space also becomes available when the disk has some again.
    files.fail_while(Operation::Create, None);
    for transaction in last + 2..last + 200 {
        wait_until("there is space", || append(&log, transaction, 100).is_ok());
    }
    wait_until("the log is not full any more", || log.full_cause().is_none());
    log.close().unwrap();
    let (_, seen) = open(files.process_kill());
    assert_eq!(seen.last().unwrap().0, last + 199);
}

#[test]
fn log_stays_within_its_capacity() {
    let files = FaultyFiles::new();
    let options = LogOptions { capacity_bytes: 5 * 4096, ..options() };
    let (log, _) = open_with(options, files.clone()).unwrap();
    let mut last = 0;
    let error = loop {
        match append(&log, last + 1, 100) {
            Ok(_) => last += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LogError::Full(FullCause::Capacity { .. })), "{error}");
    assert!(matches!(log.full_cause(), Some(FullCause::Capacity { .. })));
    assert!(log.size_bytes() <= 5 * 4096);
    block_on(log.wait_durable(log.appended())).unwrap();
    log.truncate(log.durable());
    wait_until("there is space again", || append(&log, last + 1, 100).is_ok());
    assert_eq!(log.full_cause(), None);
    block_on(log.wait_durable(log.appended())).unwrap();
    assert_eq!(open(files.process_kill()).1.last().unwrap().0, last + 1);
}

/// Records that make room may exceed the capacity. After a restart the rest of the reserve is still
/// available, and still not for commits.
#[test]
fn reserve_is_available_after_a_kill() {
    let files = FaultyFiles::new();
    let options = || LogOptions { capacity_bytes: 5 * 4096, ..options() };
    let (log, _) = open_with(options(), files.clone()).unwrap();
    let mut last = 0;
    while append(&log, last + 1, 100).is_ok() {
        last += 1;
    }
    let makes_room = |log: &CommitLog, transaction| loop {
        match log.append(&commit(transaction, 100), Urgency::FreesSpace) {
            Err(LogError::Busy) => {
                block_on(log.wait_for_space(commit(transaction, 100).len(), Urgency::FreesSpace))?;
            }
            appended => return appended,
        }
    };
    last += 1;
    let end = makes_room(&log, last).unwrap();
    block_on(log.wait_durable(end)).unwrap();
    let (log, seen) = open_with(options(), files.process_kill()).unwrap();
    assert_eq!(seen.last().unwrap().0, last);
    let refused = append(&log, last + 1, 100).unwrap_err();
    assert!(matches!(refused, LogError::Full(FullCause::Capacity { .. })), "{refused}");
    let end = makes_room(&log, last + 1).unwrap();
    block_on(log.wait_durable(end)).unwrap();
    log.truncate(log.durable());
    wait_until("there is space again", || append(&log, last + 2, 100).is_ok());
    wait_until("the log is not full any more", || log.full_cause().is_none());
}

/// A new log needs a file, although the capacity is used up.
#[test]
fn full_log_restarts_after_a_failure() {
    let files = FaultyFiles::new();
    let options = LogOptions { capacity_bytes: 5 * 4096, ..options() };
    let (log, _) = open_with(options, files.clone()).unwrap();
    append_durably(&log, 1, 100);
    files.hold(Operation::Sync, true);
    let mut last = 1;
    while append(&log, last + 1, 100).is_ok() {
        last += 1;
    }
    files.fail_while(Operation::Sync, Some(Fault::Io));
    files.hold(Operation::Sync, false);
    wait_until("the log has failed", || log.check_available().is_err());
    files.fail_while(Operation::Sync, None);
    wait_until("the log works again", || log.check_available().is_ok());
    let end = block_on(async {
        loop {
            match log.append(&commit(last + 1, 100), Urgency::FreesSpace) {
                Ok(end) => break end,
                Err(_) => drop(log.wait_for_space(commit(1, 100).len(), Urgency::FreesSpace).await),
            }
        }
    });
    block_on(log.wait_durable(end)).unwrap();
    assert_eq!(transactions(&open(files.process_kill()).1), [1, last + 1]);
}

/// The complete sequence of a failure, for a write and for a sync.
#[test]
fn failure_discards_records_and_notifies_waiters_once_that_is_durable() {
    for operation in [Operation::Write, Operation::Sync] {
        let files = FaultyFiles::new();
        let (log, _) = open(files.clone());
        let discards = discards(&log);
        let kept = append_durably(&log, 1, 100);
        files.fail_while(operation, Some(Fault::Io));
        let lost = append(&log, 2, 100).unwrap();
        assert_eq!(discards.recv().unwrap(), (kept, lost));
        // The new log cannot start yet, so waiters are not notified, and appends are rejected.
        assert!(log.wait_durable(lost).now_or_never().is_none());
        let error = log.append(&commit(3, 100), Urgency::Immediate).unwrap_err();
        assert!(matches!(error, LogError::Failed { .. }), "{error}");
        assert!(log.wait_durable(kept).now_or_never().unwrap().is_ok());
        files.fail_while(operation, None);
        let error = block_on(log.wait_durable(lost)).unwrap_err();
        assert!(matches!(error, LogError::Discarded { after } if after == kept), "{error}");
        let next = append_durably(&log, 4, 100);
        assert!(next > lost, "positions must not be reused");
        assert!(!log.is_durable(lost) && log.is_durable(kept) && log.is_durable(next));
        assert!(
            log.wait_durable(lost).now_or_never().unwrap().is_err(),
            "a later wait must report the loss, too"
        );
        assert!(discards.try_recv().is_err(), "the callback must be called only once");
        assert_eq!(log.statistics().failures.load(Relaxed), 1);
        for files in [files.process_kill(), files.power_cut(1)] {
            assert_eq!(transactions(&open(files).1), [1, 4]);
        }
    }
}

#[test]
fn file_whose_sync_failed_is_not_reused() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    append_durably(&log, 1, 100);
    files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
    let lost = append(&log, 2, 100).unwrap();
    assert!(block_on(log.wait_durable(lost)).is_err());
    let after = append_durably(&log, 3, 100);
    // If the failed file were reused, its next sync would succeed for data that is not on the disk.
    let (log, seen) = open(files.power_cut(3));
    assert_eq!(transactions(&seen), [1, 3]);
    assert_eq!(seen[1].1, after);
    drop(log);
}

#[test]
fn recovery_rewrites_data_that_may_be_only_in_the_page_cache() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let discards = discards(&log);
    append_durably(&log, 1, 100);
    files.fail_while(Operation::Sync, Some(Fault::Io));
    append(&log, 2, 100).unwrap();
    discards.recv().unwrap();
    // The process dies before any waiter is notified. The next one reads the record, whose pages
    // the kernel considers clean.
    let files = files.process_kill();
    let (log, seen) = open(files.clone());
    assert_eq!(transactions(&seen), [1, 2]);
    append_durably(&log, 3, 100);
    assert_eq!(transactions(&open(files.power_cut(1)).1), [1, 2, 3]);
}

#[test]
fn failed_files_are_removed_after_truncation() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    for round in 0..20 {
        for i in 0..40 {
            append_durably(&log, round * 100 + i, 100);
        }
        files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
        let lost = append(&log, 99, 100).unwrap();
        assert!(block_on(log.wait_durable(lost)).is_err());
        log.truncate(log.durable());
    }
    append_durably(&log, 5000, 100);
    log.truncate(log.durable());
    wait_until("the old files are gone", || log.size_bytes() <= 6 * 4096);
    wait_until("the failed files are removed instead of reused", || files.count(Operation::Remove) >= 20);
    let (_, seen) = open(files.process_kill());
    assert_eq!(transactions(&seen), [5000]);
}

#[test]
fn close_fails_while_the_disk_is_broken() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let discards = discards(&log);
    append_durably(&log, 1, 100);
    files.fail_while(Operation::Sync, Some(Fault::Io));
    let undecided = append(&log, 2, 100).unwrap();
    discards.recv().unwrap();
    assert!(log.close().is_err());
    let error = block_on(log.wait_durable(undecided)).unwrap_err();
    assert!(matches!(error, LogError::Closed), "the outcome must be unknown: {error}");
}

#[test]
fn dropping_a_log_does_not_wait_for_the_disk() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    files.hold(Operation::Sync, true);
    append(&log, 1, 100).unwrap();
    drop(log);
    files.hold(Operation::Sync, false);
    let (_, seen) = open(files.process_kill());
    assert!(seen.len() <= 1);
}

#[test]
fn dropped_waiter_does_not_affect_others() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    files.hold(Operation::Sync, true);
    let lsn = append(&log, 1, 100).unwrap();
    let mut dropped = Box::pin(log.wait_durable(lsn));
    let mut kept = Box::pin(log.wait_durable(lsn));
    assert!(dropped.as_mut().now_or_never().is_none());
    assert!(kept.as_mut().now_or_never().is_none());
    drop(dropped);
    files.hold(Operation::Sync, false);
    block_on(kept).unwrap();
}

#[test]
fn concurrent_appends_keep_their_positions() {
    const THREADS: u64 = 8;
    const EACH: u64 = 300;
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let barrier = Arc::new(Barrier::new(THREADS as usize));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (log, barrier) = (log.clone(), barrier.clone());
            std::thread::spawn(move || {
                barrier.wait();
                (0..EACH)
                    .map(|i| {
                        let transaction = thread * EACH + i;
                        let lsn = append(&log, transaction, 1 + (transaction % 500) as usize).unwrap();
                        if i % 10 == 0 {
                            block_on(log.wait_durable(lsn)).unwrap();
                        }
                        (transaction, lsn)
                    })
                    .collect::<Vec<_>>()
            })
        })
        .collect();
    let mut expected: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    expected.sort_by_key(|(_, lsn)| *lsn);
    log.close().unwrap();
    let (_, seen) = open(files.power_cut(0));
    assert_eq!(seen, expected);
}

#[test]
fn panicking_callback_releases_waiters() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    log.on_discard(Box::new(|_, _| panic!("intentional panic")));
    files.fail_next_of("fulmar-log", Operation::Sync, Fault::Io);
    let lsn = append(&log, 1, 100).unwrap();
    let error = block_on(log.wait_durable(lsn)).unwrap_err();
    assert!(matches!(error, LogError::Closed), "{error}");
    assert!(matches!(log.append(&commit(2, 10), Urgency::Immediate), Err(LogError::Closed)));
    assert!(log.close().is_err());
}

/// If an operation fails while the log switches to further files, the log continues, and the next
/// start finds all records.
#[test]
fn failed_preparation_of_a_file_is_retried() {
    for operation in
        [Operation::Create, Operation::Open, Operation::Rename, Operation::SyncDir, Operation::Remove]
    {
        for nth in 1..=4 {
            let files = FaultyFiles::new();
            let (log, _) = open(files.clone());
            let mut last = 0;
            for round in 0..3 {
                for _ in 0..20 {
                    last += 1;
                    // The preparation is retried after a short delay.
                    wait_until("a file is ready", || match append(&log, last, 500) {
                        Ok(lsn) => block_on(log.wait_durable(lsn)).is_ok(),
                        Err(LogError::Full(_)) => false,
                        Err(other) => panic!("{operation:?} {nth}: {other}"),
                    });
                }
                if round == 1 {
                    files.fail_nth(operation, nth, Fault::Io);
                    log.truncate(Lsn(log.durable().0 / 2));
                }
            }
            drop(log);
            let (_, seen) = open(files.process_kill());
            let seen: Vec<_> = seen.into_iter().map(|(transaction, _)| transaction).collect();
            assert_eq!(seen.last(), Some(&last), "{operation:?} {nth}");
            assert!(seen.is_sorted_by(|a, b| a + 1 == *b), "{operation:?} {nth}: {seen:?}");
        }
    }
}
