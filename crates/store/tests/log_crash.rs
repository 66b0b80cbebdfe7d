//! Model test of the local log with crashes and disk errors, for many seeds.
//!
//! The model records the appended records and their reported outcomes. After each crash, the
//! recovered records must be a prefix of the appended ones, excluding discarded records. They must
//! include every acknowledged record, and none that was reported as lost. Every later recovery must
//! find the records that an earlier one has found, whatever the crash left after them.

mod common;

use std::sync::mpsc;

use common::*;
use fulmar_store::{CommitLog, Fault, FaultyFiles, LogError, LogFiles, Lsn, Operation, failpoint};
use futures::channel::oneshot;
use futures::future::{Either, select};
use parking_lot::Mutex;

const SEEDS: u64 = 400;
const ROUNDS: u64 = 5;

/// The outcome of a record as reported to its client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Unknown,
    Acknowledged,
    Lost,
}

struct Entry {
    transaction: u64,
    lsn: Lsn,
    fate: Fate,
}

struct Model {
    seed: u64,
    random: Random,
    entries: Vec<Entry>,
    /// Position up to which the log was truncated.
    truncated: Lsn,
    next_transaction: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        Model { seed, random: Random::new(seed), entries: Vec::new(), truncated: Lsn(0), next_transaction: 1 }
    }

    /// Checks the records that a recovery found, and continues with them.
    fn check_recovered(&mut self, seen: &[(u64, Lsn)], round: u64) {
        let seed = self.seed;
        let kept: Vec<_> = self.entries.iter().filter(|entry| entry.fate != Fate::Lost).collect();
        let first = match seen.first() {
            Some(first) => kept.iter().position(|entry| entry.transaction == first.0),
            None => Some(kept.iter().filter(|entry| entry.lsn <= self.truncated).count()),
        };
        let first = first.unwrap_or_else(|| panic!("seed {seed} round {round}: {} is unknown", seen[0].0));
        for entry in &kept[..first] {
            assert!(
                entry.lsn <= self.truncated,
                "seed {seed} round {round}: {} is missing",
                entry.transaction
            );
        }
        let found: Vec<_> = kept[first..].iter().take(seen.len()).map(|e| (e.transaction, e.lsn)).collect();
        assert_eq!(seen, found, "seed {seed} round {round}: not a prefix");
        for entry in &kept[first + seen.len()..] {
            let fate = entry.fate;
            assert_eq!(fate, Fate::Unknown, "seed {seed} round {round}: {} is missing", entry.transaction);
        }
        // A recovered record is permanent: later recoveries must find it.
        self.entries = seen
            .iter()
            .map(|&(transaction, lsn)| Entry { transaction, lsn, fate: Fate::Acknowledged })
            .collect();
    }

    /// Works with a log for some steps, or until it fails. Returns true if it has failed.
    fn work(&mut self, log: &CommitLog) -> bool {
        let (failed, failure) = oneshot::channel();
        let failed = Mutex::new(Some(failed));
        log.on_discard(Box::new(move |after, upto| {
            assert!(after <= upto);
            if let Some(failed) = failed.lock().take() {
                // The receiver is gone when the round is over.
                let _ = failed.send(());
            }
        }));
        let mut failure = failure.fuse();
        for _ in 0..self.random.below(120) {
            let bytes = if self.random.below(20) == 0 {
                1 + self.random.below(6000)
            } else {
                1 + self.random.below(300)
            };
            match append(log, self.next_transaction, bytes as usize) {
                Ok(lsn) => {
                    self.entries.push(Entry { transaction: self.next_transaction, lsn, fate: Fate::Unknown });
                    self.next_transaction += 1;
                }
                Err(LogError::Failed { .. } | LogError::Full(_)) => return true,
                Err(error) => panic!("seed {}: {error}", self.seed),
            }
            match self.random.below(10) {
                0..3 => {
                    let at =
                        self.entries.len() - 1 - self.random.below(3.min(self.entries.len() as u64)) as usize;
                    let wait = log.wait_durable(self.entries[at].lsn);
                    // Checks the failure first: after one, records before a durable one may have
                    // been lost.
                    let waited = match block_on(select(&mut failure, wait)) {
                        Either::Left(_) => return true,
                        Either::Right((waited, _)) => waited,
                    };
                    match waited {
                        Ok(()) => self.acknowledge(at),
                        Err(LogError::Discarded { .. }) => {
                            // The log may have failed after the check.
                            if (&mut failure).now_or_never().is_some() {
                                return true;
                            }
                            assert_eq!(
                                self.entries[at].fate,
                                Fate::Lost,
                                "seed {}: a discard without a failure",
                                self.seed
                            );
                        }
                        Err(error) => panic!("seed {}: {error}", self.seed),
                    }
                }
                3 => {
                    let upto = Lsn(self.random.below(log.durable().0 + 1));
                    self.truncated = self.truncated.max(upto);
                    log.truncate(upto);
                }
                _ => {}
            }
        }
        failure.now_or_never().is_some()
    }

    /// A durable record implies that all records before it are durable.
    fn acknowledge(&mut self, at: usize) {
        for entry in self.entries[..=at].iter_mut().filter(|entry| entry.fate == Fate::Unknown) {
            entry.fate = Fate::Acknowledged;
        }
    }

    /// Queries the outcome of all undecided records. Only after a failure from which the log
    /// recovers.
    fn resolve_outcomes(&mut self, log: &CommitLog) {
        for entry in self.entries.iter_mut().filter(|entry| entry.fate == Fate::Unknown) {
            entry.fate = match block_on(log.wait_durable(entry.lsn)) {
                Ok(()) => Fate::Acknowledged,
                Err(LogError::Discarded { .. }) => Fate::Lost,
                Err(error) => panic!("seed {}: {error}", self.seed),
            };
        }
    }

    fn crash(&mut self, files: &FaultyFiles) -> FaultyFiles {
        let seed = self.random.below(u64::MAX);
        match self.random.below(3) {
            0 => files.process_kill(),
            1 => files.power_cut(seed),
            _ => files.process_kill().power_cut(seed),
        }
    }
}

#[test]
fn acknowledged_records_survive_and_lost_ones_are_not_resurrected() {
    for seed in 0..SEEDS {
        let mut model = Model::new(seed);
        let mut files = FaultyFiles::new();
        for round in 0..ROUNDS {
            let (log, seen) = open(files.clone());
            model.check_recovered(&seen, round);
            let passages = 1 + model.random.below(20);
            match model.random.below(4) {
                0 => files.stop_at(failpoint::LOG_MID_RECORD, passages),
                1 => files.stop_at(failpoint::LOG_AFTER_WRITE, passages),
                _ => {}
            }
            model.work(&log);
            if model.random.below(8) == 0 && log.close().is_ok() {
                model.entries.iter_mut().for_each(|entry| entry.fate = Fate::Acknowledged);
            }
            files = model.crash(&files);
        }
    }
}

#[test]
fn records_reported_as_lost_stay_lost() {
    let mut lost = 0;
    for seed in 0..SEEDS {
        let mut model = Model::new(seed);
        let mut files = FaultyFiles::new();
        for round in 0..ROUNDS {
            let (log, seen) = open(files.clone());
            model.check_recovered(&seen, round);
            for _ in 0..2 {
                let operation = if model.random.below(2) == 0 { Operation::Sync } else { Operation::Write };
                files.fail_nth(operation, 1 + model.random.below(8), Fault::Io);
                model.work(&log);
                model.resolve_outcomes(&log);
            }
            lost += model.entries.iter().filter(|entry| entry.fate == Fate::Lost).count();
            if model.work(&log) {
                model.resolve_outcomes(&log);
            }
            files = model.crash(&files);
        }
    }
    assert!(lost > 1000, "only {lost} records were lost: the test is vacuous");
}

#[test]
fn crash_while_a_log_is_started_loses_nothing() {
    for seed in 0..60 {
        for passages in 1..10 {
            let files = FaultyFiles::new();
            let (log, _) = open(files.clone());
            for transaction in 0..30 {
                append(&log, transaction, 100).unwrap();
            }
            block_on(log.wait_durable(log.appended())).unwrap();
            let files = files.power_cut(seed);
            // The opening fails at each kind of operation in turn.
            for operation in
                [Operation::Create, Operation::SyncDir, Operation::Write, Operation::Sync, Operation::Remove]
            {
                files.fail_nth(operation, passages, Fault::Io);
            }
            let (sender, receiver) = mpsc::channel();
            if let Ok((log, seen)) = open_with(options(), files.clone()) {
                sender.send(transactions(&seen)).unwrap();
                drop(log);
            }
            let (_, seen) = open(files.process_kill().power_cut(seed + 1));
            assert_eq!(transactions(&seen), (0..30).collect::<Vec<_>>());
            assert!(receiver.try_iter().all(|first| first == transactions(&seen)));
        }
    }
}

/// Each created file in turn has only its first bytes when the process is killed or the power is
/// cut.
#[test]
fn crash_while_a_file_is_created_loses_nothing() {
    let with_records = FaultyFiles::new();
    let (log, _) = open(with_records.clone());
    for transaction in 0..30 {
        append(&log, transaction, 100).unwrap();
    }
    block_on(log.wait_durable(log.appended())).unwrap();
    let with_records = with_records.process_kill();
    let without_newest = with_records.process_kill();
    without_newest.remove("newest").unwrap();
    for (before, expected) in [(FaultyFiles::new(), 0), (with_records, 30), (without_newest, 30)] {
        for (nth, left_bytes) in (1..=4).flat_map(|nth| [0, 1, 47, 48, 4095].map(|left| (nth, left))) {
            let files = before.copy();
            files.stop_in_create(nth, left_bytes);
            // The last files are created by a thread of the log, or not at all.
            drop(open_with(options(), files.clone()));
            for files in [files.process_kill(), files.power_cut(nth)] {
                for _ in 0..2 {
                    let opened = open_with(options(), files.clone());
                    let (log, seen) = opened.unwrap_or_else(|error| panic!("{nth}, {left_bytes}: {error}"));
                    assert_eq!(transactions(&seen), (0..expected).collect::<Vec<_>>());
                    log.close().unwrap();
                }
                assert!(!files.list().unwrap().contains(&"newest-new".to_owned()));
            }
        }
    }
}

#[test]
fn incomplete_file_of_an_earlier_start_is_removed() {
    let files = FaultyFiles::new();
    open(files.clone()).0.close().unwrap();
    files.put("newest-new", vec![0; 7]);
    open(files.clone()).0.close().unwrap();
    assert_eq!(files.contents("newest-new"), None);
}
