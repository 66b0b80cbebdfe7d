//! Recovery of the local log: torn tails, damage, missing files and reused files.

mod common;

use common::*;
use fulmar_store::{CommitLog, FaultyFiles, LogError, LogFiles, Lsn, Operation, Urgency};

const HEADER_BYTES: u64 = 48;

fn log_names(files: &FaultyFiles) -> Vec<String> {
    let mut names = files.list().unwrap();
    names.retain(|name| name.ends_with(".log"));
    names.sort();
    names
}

/// Commits transactions 1 to `last`, each durable before the next. Returns their positions.
fn committed(log: &CommitLog, last: u64) -> Vec<Lsn> {
    (1..=last).map(|transaction| append_durably(log, transaction, 100)).collect()
}

/// Returns the file, and the offset in it, at which the record with position `lsn` ends. For logs
/// that started at 0 and have files of 4096 bytes.
fn place(files: &FaultyFiles, lsn: Lsn) -> (String, u64) {
    let mut place = None;
    for name in log_names(files) {
        let bytes = files.contents(&name).unwrap();
        let start = u64::from_le_bytes(bytes[36..44].try_into().unwrap());
        if &bytes[..8] == b"FULMCLOG" && start < lsn.0 {
            place = Some((name, HEADER_BYTES + lsn.0 - start));
        }
    }
    place.unwrap()
}

fn corrupt_at(outcome: Opened) -> (String, u64) {
    match outcome {
        Err(LogError::Corrupt { file, offset, .. }) => (file, offset),
        Err(error) => panic!("{error}"),
        Ok((_, seen)) => panic!("the log was opened with {} records", seen.len()),
    }
}

#[test]
fn empty_directory_is_an_empty_log() {
    let files = FaultyFiles::new();
    let (log, seen) = open(files.clone());
    assert!(seen.is_empty());
    log.close().unwrap();
    log.close().unwrap();
    assert!(matches!(log.append(&commit(1, 1), Urgency::Immediate), Err(LogError::Closed)));
    assert!(open(files).1.is_empty());
}

#[test]
fn records_keep_their_positions_across_files_and_logs() {
    let mut files = FaultyFiles::new();
    let mut all = Vec::new();
    for round in 0..4 {
        let (log, seen) = open(files.clone());
        assert_eq!(seen, all, "round {round}");
        for _ in 0..100 {
            let transaction = all.len() as u64;
            let lsn = append_durably(&log, transaction, 100 + transaction as usize);
            assert!(all.last().is_none_or(|(_, last)| *last < lsn), "positions must grow");
            all.push((transaction, lsn));
        }
        if round % 2 == 0 {
            log.close().unwrap();
        }
        files = files.process_kill();
    }
    assert!(log_names(&files).len() > 8, "the log must use many files");
}

#[test]
fn torn_tail_is_cut_off_at_any_byte() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let lsns = committed(&log, 3);
    let files = files.process_kill();
    let (name, start) = place(&files, lsns[1]);
    let (_, end) = place(&files, lsns[2]);
    for at in start..end {
        let torn = files.process_kill();
        torn.damage(&name, at, 0xff);
        let (log, seen) = open(torn.clone());
        assert_eq!(transactions(&seen), [1, 2], "byte {at}");
        append_durably(&log, 9, 10);
        // The tail becomes whole again, as sectors from a disk cache might. It must remain cut off.
        let whole = torn.process_kill();
        whole.damage(&name, at, 0xff);
        assert_eq!(transactions(&open(whole).1), [1, 2, 9], "byte {at}");
    }
}

#[test]
fn damage_in_durable_data_is_refused_with_its_offset() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let lsns = committed(&log, 60);
    let mut files = files.process_kill();
    for damaged in [0, 1, 20, 40, 57] {
        let (name, end) = place(&files, lsns[damaged]);
        files.damage(&name, end - 3, 0x01);
        let (file, offset) = corrupt_at(open_with(options(), files.clone()));
        assert_eq!(file, name);
        let frame = lsns[1].0 - lsns[0].0;
        assert_eq!(offset, end - frame, "the offset must be that of the record's start");
        files.damage(&name, end - 3, 0x01);
        files = files.process_kill();
    }
    assert_eq!(open(files).1.len(), 60);
}

#[test]
fn only_a_seal_proves_the_durability_of_the_last_record() {
    for sealed in [true, false] {
        let files = FaultyFiles::new();
        let (log, _) = open(files.clone());
        let lsns = committed(&log, 5);
        if sealed {
            log.close().unwrap();
        }
        let files = files.process_kill();
        let (name, end) = place(&files, lsns[4]);
        files.damage(&name, end - 1, 0x80);
        match sealed {
            true => assert_eq!(corrupt_at(open_with(options(), files)).0, name),
            false => assert_eq!(transactions(&open(files).1), [1, 2, 3, 4]),
        }
    }
}

#[test]
fn missing_file_is_refused() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    committed(&log, 100);
    let files = files.process_kill();
    let names = log_names(&files);
    for missing in &names[1..names.len() - 2] {
        let kept = files.contents(missing).unwrap();
        files.remove(missing).unwrap();
        corrupt_at(open_with(options(), files.clone()));
        files.put(missing, kept);
    }
    assert_eq!(open(files).1.len(), 100);
}

#[test]
fn log_without_its_newest_file_is_refused() {
    for last in [1, 100] {
        let files = FaultyFiles::new();
        let (log, _) = open(files.clone());
        committed(&log, last);
        let files = files.process_kill();
        let begun = |name: &&String| files.contents(name).is_some_and(|bytes| bytes.starts_with(b"FULMCLOG"));
        let newest = log_names(&files).iter().rfind(begun).unwrap().clone();
        let whole = files.contents(&newest).unwrap();
        for left in [None, Some(0), Some(47), Some(100), Some(whole.len() - 1)] {
            match left {
                None => files.remove(&newest).unwrap(),
                Some(left) => files.put(&newest, whole[..left].to_vec()),
            }
            assert_eq!(corrupt_at(open_with(options(), files.clone())).0, newest, "{left:?}");
            files.put(&newest, whole.clone());
        }
        files.damage("newest", 30, 1);
        assert_eq!(corrupt_at(open_with(options(), files.clone())).0, "newest");
        // The loss of the file `newest` itself is tolerated.
        files.remove("newest").unwrap();
        assert_eq!(open(files.clone()).1.len() as u64, last);
        assert!(files.contents("newest").is_some());
    }
}

#[test]
fn log_whose_end_is_missing_is_refused_if_a_later_log_records_it() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    committed(&log, 100);
    let files = files.process_kill();
    let names = log_names(&files);
    let (log, _) = open(files.clone());
    append_durably(&log, 101, 100);
    let files = files.process_kill();
    let last_with_records =
        names.iter().rev().find(|name| files.contents(name).is_some_and(|b| b[0] != 0)).unwrap();
    files.remove(last_with_records).unwrap();
    corrupt_at(open_with(options(), files));
}

#[test]
fn file_of_an_unknown_format_version_is_refused() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    committed(&log, 1);
    let files = files.process_kill();
    let name = &log_names(&files)[0];
    let mut bytes = files.contents(name).unwrap();
    bytes[8] = 2;
    let crc = crc32fast::hash(&bytes[..44]);
    bytes[44..48].copy_from_slice(&crc.to_le_bytes());
    files.put(name, bytes);
    let error = open_with(options(), files).err().unwrap();
    assert!(error.to_string().contains("version 2"), "{error}");
}

#[test]
fn replay_error_aborts_the_opening() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    committed(&log, 3);
    let files = std::sync::Arc::new(files.process_kill());
    let outcome = CommitLog::open(options(), files, &mut |position, _| {
        Err(LogError::Replay { position, cause: "no such partition".into() })
    });
    assert!(matches!(outcome.err(), Some(LogError::Replay { .. })));
}

#[test]
fn truncated_files_are_reused_and_their_old_records_ignored() {
    let mut files = FaultyFiles::new();
    let mut last = 0;
    for round in 0..5 {
        let (log, seen) = open(files.clone());
        assert_eq!(seen.last().map_or(0, |(transaction, _)| *transaction), last, "round {round}");
        assert!(
            seen.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1),
            "no transaction may be missing in between"
        );
        for _ in 0..200 {
            last += 1;
            let lsn = append_durably(&log, last, 100);
            log.truncate(lsn);
        }
        // Each start creates a first file, which is kept here because it is as long as the others.
        wait_until("the old files are released", || log.size_bytes() <= (5 + round) * 4096);
        assert!(log.oldest() <= log.durable());
        assert!(log.durable().0 - log.oldest().0 <= 2 * 4096);
        files = files.power_cut(round);
    }
    assert!(files.count(Operation::Create) < 30);
}

#[test]
fn truncation_keeps_uncovered_and_non_durable_records() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    let lsns = committed(&log, 200);
    log.truncate(lsns[99]);
    wait_until("some files are released", || log.oldest() > Lsn(0));
    log.truncate(Lsn(u64::MAX));
    let durable = log.durable();
    assert!(log.oldest() < durable);
    let files = files.process_kill();
    let (_, seen) = open(files);
    assert_eq!(seen.last().unwrap().0, 200, "the active file must be kept");
}

#[test]
fn truncation_keeps_a_file_until_the_next_one_has_started() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    wait_until("a file is ready", || log.size_bytes() >= 2 * 4096);
    committed(&log, 10);
    files.hold(Operation::Write, true);
    let mut last = 10;
    while log.appended() < Lsn(5000) {
        last += 1;
        append(&log, last, 100).unwrap();
    }
    log.truncate(Lsn(u64::MAX));
    assert_eq!(log.oldest(), Lsn(0));
    let (_, seen) = open(files.process_kill());
    assert_eq!(transactions(&seen), (1..=10).collect::<Vec<_>>());
}

#[test]
fn record_longer_than_a_file_gets_a_longer_file() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    append_durably(&log, 1, 100);
    append_durably(&log, 2, 50_000);
    append_durably(&log, 3, 100);
    let error = log.append(&commit(4, 600_000), Urgency::Immediate).unwrap_err();
    assert!(matches!(error, LogError::TooLong { .. }), "{error}");
    append_durably(&log, 5, 4096);
    let (_, seen) = open(files.process_kill());
    assert_eq!(transactions(&seen), [1, 2, 3, 5]);
}

#[test]
fn invalid_spare_files_are_removed() {
    let files = FaultyFiles::new();
    files.put("0000000000000001.spare", vec![7; 4096]);
    files.put("0000000000000002.log", vec![0; 4095]);
    files.put("0000000000000003.log", Vec::new());
    files.put("foreign.spare", vec![0; 4096]);
    let (log, seen) = open(files.clone());
    assert!(seen.is_empty());
    for name in ["0000000000000001.spare", "0000000000000002.log", "0000000000000003.log", "foreign.spare"] {
        assert!(files.contents(name).is_none(), "{name}");
    }
    append_durably(&log, 1, 10);
    assert!(files.contents("0000000000000004.log").is_some(), "numbers must not be reused");
}

/// Files that were preallocated and never started, or that are no longer needed, are reused: a
/// start creates only its first file.
#[test]
fn spare_files_of_an_earlier_process_are_reused() {
    let files = FaultyFiles::new();
    files.put("0000000000000003.log", vec![0; 4096]);
    let (log, _) = open(files.clone());
    wait_until("the next file is ready", || files.contents("0000000000000005.log").is_some());
    assert!(files.contents("0000000000000003.log").is_none());
    assert_eq!(files.count(Operation::Create), 2, "only a log file and `newest` may be created");
    for transaction in 1..=100 {
        append_durably(&log, transaction, 500);
    }
    log.truncate(log.durable());
    let spares =
        |files: &FaultyFiles| files.list().unwrap().iter().filter(|name| name.ends_with(".spare")).count();
    wait_until("files are spare", || spares(&files) > 10);
    drop(log);

    let files = files.process_kill();
    let kept = spares(&files);
    let (log, _) = open(files.clone());
    for transaction in 101..=130 {
        append_durably(&log, transaction, 500);
    }
    assert!(spares(&files) < kept);
    assert_eq!(files.count(Operation::Create), 1);
    drop(log);
    let (_, seen) = open(files.process_kill());
    assert!(transactions(&seen).ends_with(&(101..=130).collect::<Vec<_>>()));
}

#[test]
fn file_with_the_header_of_a_later_file_is_refused() {
    let files = FaultyFiles::new();
    let (log, _) = open(files.clone());
    append_durably(&log, 1, 10);
    drop(log);
    let files = files.process_kill();
    files.put("0000000000000000.log", files.contents("0000000000000001.log").unwrap());
    let error = open_with(options(), files).err().expect("two files with the same header must be refused");
    assert!(error.to_string().contains("0000000000000001.log"), "{error}");
}
