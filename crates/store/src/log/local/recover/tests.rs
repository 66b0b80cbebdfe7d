//! Recovery of the golden log: two files of one log and one of the next, as earlier versions wrote
//! them. Other recovery tests use the log's public interface (`tests/`).

use std::path::PathBuf;

use fulmar_pages::{PartitionId, RecordBuilder, RecordHeader, Version};

use super::*;
use crate::FaultyFiles;
use crate::{CommitLog, LogOptions};

const FIRST: LogId = LogId(0x0123_4567 << 96 | 1);
const SECOND: LogId = LogId(0x89ab_cdef << 96 | 2);

pub(super) fn body(kind: RecordKind, transaction: u64, cut: Option<CutPoint>) -> Vec<u8> {
    let mut builder = RecordBuilder::default();
    builder.begin(&RecordHeader {
        kind,
        partition: PartitionId(7),
        version: Version { lineage: 1, epoch: 1, number: transaction },
        transaction,
        timestamp: 1000 + transaction,
        page_count: 3,
        previous: None,
    });
    if let Some(cut) = cut {
        builder.push_cut(cut);
    }
    builder.finish().to_vec()
}

/// Encodes a file with these bodies, each synced before the next was written. Also returns the
/// position of its end.
fn file(header: Header, bodies: &[Vec<u8>]) -> (Vec<u8>, u64) {
    let mut bytes = header.encode().to_vec();
    let mut position = header.start;
    for body in bodies {
        let at = bytes.len();
        Frames::push(&mut bytes, body);
        Frames::of(header.log).fill(&mut bytes[at..], position, position);
        position += (bytes.len() - at) as u64;
    }
    bytes.resize(bytes.len() + 100, 0);
    (bytes, position)
}

pub(super) fn written() -> [Vec<u8>; 3] {
    let commit = |transaction| body(RecordKind::Commit, transaction, None);
    let header = |log, sequence, start| Header { log, sequence, start };
    let (one, end) =
        file(header(FIRST, 1, 0), &[body(RecordKind::Cut, 0, Some(NO_LOG)), commit(11), commit(12)]);
    let (two, end) = file(header(FIRST, 2, end), &[commit(13)]);
    let cut = body(RecordKind::Cut, 0, Some(CutPoint { log: FIRST, position: end }));
    let (three, _) = file(header(SECOND, 3, end), &[cut, commit(21), body(RecordKind::Seal, 0, None)]);
    [one, two, three]
}

/// Reads a golden file. It is written only if it is missing and the environment variable is set, as
/// in `fulmar-pages`.
fn golden(name: &str, written: &[u8]) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if !path.exists() && std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, written).unwrap();
    }
    std::fs::read(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; set UPDATE_GOLDEN=1 for a new one", path.display()))
}

/// The log format has only one version so far; the format of its records has had several.
#[test]
fn golden_log_is_written_and_read_unchanged() {
    for (sequence, bytes) in (1..).zip(written()) {
        let stored = golden(&format!("log-v1-records-v3-{sequence}.bin"), &bytes);
        assert_eq!(bytes, stored, "file {sequence}");
    }
    for records in ["", "-records-v2", "-records-v3"] {
        let files = FaultyFiles::new();
        for sequence in 1..=3 {
            let stored = golden(&format!("log-v1{records}-{sequence}.bin"), &[]);
            files.put(&super::super::preallocation::log_name(sequence), stored);
        }
        assert_golden_log(&files);
    }
}

fn assert_golden_log(files: &FaultyFiles) {
    let mut seen = Vec::new();
    let recovered = recover(files, &mut |lsn, record| {
        seen.push((lsn.0, record.header.transaction));
        Ok(())
    });
    let recovered = recovered.unwrap();
    assert_eq!(seen.iter().map(|(_, transaction)| *transaction).collect::<Vec<_>>(), [11, 12, 13, 21]);
    assert!(seen.is_sorted());
    assert_eq!((recovered.cut.log, recovered.next_sequence), (SECOND, 4));
    assert_eq!(recovered.live.iter().map(|file| file.start).collect::<Vec<_>>()[0], 0);
    assert_eq!((recovered.live.len(), recovered.useless_files.len()), (3, 0));
}

/// A file whose creation failed, and which could not be removed, precedes the next one.
#[test]
fn file_that_was_never_started_is_skipped() {
    let commit = |transaction| body(RecordKind::Commit, transaction, None);
    let header = |sequence, start| Header { log: FIRST, sequence, start };
    let (one, end) = file(header(1, 0), &[body(RecordKind::Cut, 0, Some(NO_LOG)), commit(11)]);
    let (four, end) = file(header(4, end), &[commit(12)]);
    let (five, _) = file(header(5, end), &[commit(13)]);
    let files = FaultyFiles::new();
    for (sequence, bytes) in [(1, one), (2, vec![0; 100]), (3, Vec::new()), (4, four), (5, five)] {
        files.put(&super::super::preallocation::log_name(sequence), bytes);
    }
    let mut seen = Vec::new();
    let recovered = recover(&files, &mut |_, record| {
        seen.push(record.header.transaction);
        Ok(())
    });
    let recovered = recovered.unwrap();
    assert_eq!(seen, [11, 12, 13]);
    assert_eq!((recovered.live.len(), recovered.spares.len(), recovered.next_sequence), (3, 2, 6));
    // A missing file that was started is not skipped.
    files.remove(&super::super::preallocation::log_name(4)).unwrap();
    assert!(matches!(recover(&files, &mut |_, _| Ok(())).err(), Some(LogError::Corrupt { .. })));
}

#[test]
fn every_flipped_bit_in_the_golden_log_is_detected() {
    let whole = written();
    for (damaged, bytes) in whole.iter().enumerate() {
        // The last file is proved by its seal. The seal itself may be missing, as after a crash.
        let seal_bytes = FRAME_HEAD_BYTES + body(RecordKind::Seal, 0, None).len();
        let checked = bytes.len() - 100 - if damaged == 2 { seal_bytes } else { 0 };
        for at in 0..checked {
            let files = FaultyFiles::new();
            for (i, bytes) in whole.iter().enumerate() {
                files.put(&super::super::preallocation::log_name(i as u64 + 1), bytes.clone());
            }
            files.damage(&super::super::preallocation::log_name(damaged as u64 + 1), at as u64, 1);
            let error = recover(&files, &mut |_, _| Ok(())).err();
            assert!(
                matches!(error, Some(LogError::Corrupt { .. })),
                "byte {at} of file {}: {error:?}",
                damaged + 1
            );
        }
    }
}

/// A started log whose cut is damaged contains nothing. The log before it, which itself contains
/// only a cut, is then the only one that records the end of the oldest log.
#[test]
fn log_with_only_a_cut_is_kept_while_it_records_the_end_of_an_older_log() {
    let header = |log, sequence, start| Header { log, sequence, start };
    let cut = |log, position| body(RecordKind::Cut, 0, Some(CutPoint { log, position }));
    let (one, end) = file(header(FIRST, 1, 0), &[cut(LogId(0), 0), body(RecordKind::Commit, 11, None)]);
    let (two, _) = file(header(SECOND, 2, end), &[cut(FIRST, end)]);
    let (mut three, _) = file(header(LogId(3), 3, end), &[cut(SECOND, end)]);
    three[HEADER_BYTES] ^= 1;
    let files = FaultyFiles::new();
    for (sequence, bytes) in (1..).zip([one, two, three]) {
        files.put(&super::super::preallocation::log_name(sequence), bytes);
    }
    for _ in 0..3 {
        let mut seen = Vec::new();
        let log = CommitLog::open(LogOptions::default(), Arc::new(files.clone()), &mut |_, record| {
            seen.push(record.header.transaction);
            Ok(())
        });
        log.unwrap().close().unwrap();
        assert_eq!(seen, [11]);
    }
}
