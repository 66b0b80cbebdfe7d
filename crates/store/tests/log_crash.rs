//! The log through crashes and disk errors, over many seeds.
//!
//! A model keeps what was appended and what became of it. After each crash the recovered records must be a prefix of
//! what was appended (discarded records left out), hold everything that was acknowledged and nothing that was answered
//! as lost; and what one recovery has found every later one finds again, whatever the crash left behind it.

mod common;

use std::sync::mpsc;

use common::*;
use fulmar_store::{CommitLog, Fault, FaultyFiles, LogError, LogFiles, Lsn, Operation, failpoint};
use futures::channel::oneshot;
use futures::future::{Either, select};
use parking_lot::Mutex;

const SEEDS: u64 = 400;
const ROUNDS: u64 = 5;

/// What became of a record, as far as its client was told.
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
    /// Up to where the log was told to truncate.
    truncated: Lsn,
    next_transaction: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        Model { seed, random: Random::new(seed), entries: Vec::new(), truncated: Lsn(0), next_transaction: 1 }
    }

    /// Compares what a recovery found, and goes on from there.
    fn check_recovered(&mut self, seen: &[(u64, Lsn)], round: u64) {
        let seed = self.seed;
        let kept: Vec<_> = self.entries.iter().filter(|entry| entry.fate != Fate::Lost).collect();
        let first = match seen.first() {
            Some(first) => kept.iter().position(|entry| entry.transaction == first.0),
            None => Some(kept.iter().filter(|entry| entry.lsn <= self.truncated).count()),
        };
        let first = first.unwrap_or_else(|| panic!("seed {seed} round {round}: {} is not known", seen[0].0));
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
        // A record that was found is there for good: the next recoveries must find it.
        self.entries = seen
            .iter()
            .map(|&(transaction, lsn)| Entry { transaction, lsn, fate: Fate::Acknowledged })
            .collect();
    }

    /// Works with a log until it is enough, or the log has failed. Answers whether it has.
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
                    // The failure first: after one, what stands before a durable record may be lost all the same.
                    match block_on(select(&mut failure, wait)) {
                        Either::Left(_) => return true,
                        Either::Right((Ok(()), _)) => self.acknowledge(at),
                        Either::Right((Err(LogError::Discarded { .. }), _)) => {
                            assert_eq!(self.entries[at].fate, Fate::Lost, "seed {}: not of late", self.seed);
                        }
                        Either::Right((Err(error), _)) => panic!("seed {}: {error}", self.seed),
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

    /// What is durable is durable with all that stands before it.
    fn acknowledge(&mut self, at: usize) {
        for entry in self.entries[..=at].iter_mut().filter(|entry| entry.fate == Fate::Unknown) {
            entry.fate = Fate::Acknowledged;
        }
    }

    /// Asks what became of everything that is open. Only after a failure that the log can get over.
    fn settle(&mut self, log: &CommitLog) {
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
fn what_was_acknowledged_survives_and_nothing_else_revives() {
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
fn what_was_answered_as_lost_stays_lost() {
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
                model.settle(&log);
            }
            lost += model.entries.iter().filter(|entry| entry.fate == Fate::Lost).count();
            if model.work(&log) {
                model.settle(&log);
            }
            files = model.crash(&files);
        }
    }
    assert!(lost > 1000, "only {lost} records were lost: the test has tested nothing");
}

#[test]
fn a_crash_while_a_log_is_begun_changes_nothing() {
    for seed in 0..60 {
        for passages in 1..10 {
            let files = FaultyFiles::new();
            let (log, _) = open(files.clone());
            for transaction in 0..30 {
                append(&log, transaction, 100).unwrap();
            }
            block_on(log.wait_durable(log.appended())).unwrap();
            let files = files.power_cut(seed);
            // Each operation in turn is the one at which opening fails.
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

/// Each file in turn is the one that has only its first bytes when the process ends, or the power.
#[test]
fn a_crash_while_a_file_is_made_changes_nothing() {
    let with_records = FaultyFiles::new();
    let (log, _) = open(with_records.clone());
    for transaction in 0..30 {
        append(&log, transaction, 100).unwrap();
    }
    block_on(log.wait_durable(log.appended())).unwrap();
    let with_records = with_records.process_kill();
    let without_witness = with_records.process_kill();
    without_witness.remove("newest").unwrap();
    for (before, expected) in [(FaultyFiles::new(), 0), (with_records, 30), (without_witness, 30)] {
        for (nth, left_bytes) in (1..=4).flat_map(|nth| [0, 1, 47, 48, 4095].map(|left| (nth, left))) {
            let files = before.copy();
            files.stop_in_create(nth, left_bytes);
            // The last ones are made by a thread of the log, or not at all.
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
fn what_an_earlier_start_left_of_a_file_is_removed() {
    let files = FaultyFiles::new();
    open(files.clone()).0.close().unwrap();
    files.put("newest-new", vec![0; 7]);
    open(files.clone()).0.close().unwrap();
    assert_eq!(files.contents("newest-new"), None);
}
