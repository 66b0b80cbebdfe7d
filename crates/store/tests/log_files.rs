//! The log on a real file system.

mod common;

use common::*;
use fulmar_store::{LogFiles, LogOptions, StdFiles};

#[test]
fn log_is_recovered_from_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let options = || LogOptions { file_bytes: 64 << 10, ..options() };
    let mut last = 0;
    for round in 0..3 {
        let (log, seen) = open_with(options(), StdFiles::open(&path).unwrap()).unwrap();
        assert_eq!(seen.last().map_or(0, |(transaction, _)| *transaction), last, "round {round}");
        for _ in 0..500 {
            last += 1;
            let lsn = append(&log, last, 500).unwrap();
            if last % 50 == 0 {
                block_on(log.wait_durable(lsn)).unwrap();
                log.truncate(lsn);
            }
        }
        log.close().unwrap();
    }
}

#[test]
fn directory_is_locked() {
    let directory = tempfile::tempdir().unwrap();
    let first = StdFiles::open(directory.path()).unwrap();
    let error = StdFiles::open(directory.path()).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    drop(first);
    StdFiles::open(directory.path()).unwrap();
}

#[test]
fn files_keep_their_length_and_can_be_renamed() {
    let directory = tempfile::tempdir().unwrap();
    let files = StdFiles::open(directory.path()).unwrap();
    let file = files.create("a", 3_000_000).unwrap();
    assert_eq!(file.length_bytes().unwrap(), 3_000_000);
    file.write_at(2_999_990, b"0123456789").unwrap();
    file.sync_data().unwrap();
    files.rename("a", "b").unwrap();
    files.sync_dir().unwrap();
    assert_eq!(files.list().unwrap(), ["b"]);
    let mut bytes = [1; 20];
    files.open("b").unwrap().read_at(2_999_980, &mut bytes).unwrap();
    assert_eq!(&bytes, b"\0\0\0\0\0\0\0\0\0\x000123456789");
    assert!(files.open("a").is_err());
    files.remove("b").unwrap();
    assert!(files.describe("b").starts_with(directory.path().to_str().unwrap()));
}

/// The next process takes over a file that an earlier one has preallocated and not used.
#[test]
fn preallocated_file_is_reused_after_a_restart() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let options = || LogOptions { file_bytes: 64 << 10, ..options() };
    let ready = |sequence: u64| directory.path().join(format!("{sequence:016x}.log"));
    let inode = |sequence| ready(sequence).metadata().map(|found| found.ino());
    let open = || open_with(options(), StdFiles::open(directory.path()).unwrap()).unwrap().0;
    let log = open();
    wait_until("a file is ready", || inode(2).is_ok() && log.size_bytes() == 2 * (64 << 10));
    let made = inode(2).unwrap();
    log.close().unwrap();
    drop(log);
    let log = open();
    wait_until("a file is ready", || inode(4).is_ok());
    assert_eq!(inode(4).unwrap(), made);
    log.close().unwrap();
}

/// Consecutive writes of various lengths, with reopening in between: the data is read back,
/// followed by zeros up to the end of the block.
#[test]
fn sequential_writes_are_read_back() {
    const BYTES: usize = 4 << 20;
    let directory = tempfile::tempdir().unwrap();
    let files = StdFiles::open(directory.path()).unwrap();
    let mut file = files.create("a", BYTES as u64).unwrap();
    file.write_at(0, &[0xee; BYTES]).unwrap();
    let (mut written, mut expected) = (0, vec![0xee; BYTES]);
    let lengths = [64, 150, 4096, 3786, 1, 8191, 700_000, 4096 * 64, 5, 300_000, 4095, 1, 123_456];
    for (round, length) in lengths.into_iter().cycle().take(30).enumerate() {
        let piece: Vec<u8> = (0..length).map(|at| (at * 7 + round) as u8).collect();
        if written + length > BYTES {
            break;
        }
        file.write_at(written as u64, &piece).unwrap();
        expected[written..written + length].copy_from_slice(&piece);
        written += length;
        let block = written.next_multiple_of(4096);
        expected[written..block].fill(0);
        if round % 3 == 0 {
            file.sync_data().unwrap();
            file = files.open("a").unwrap();
        }
        let mut seen = vec![0; BYTES];
        file.read_at(0, &mut seen).unwrap();
        let differs = seen.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(differs, None, "after {written} bytes");
    }
    assert!(written > 2 << 20);
}
