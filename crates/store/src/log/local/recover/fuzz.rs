//! Fuzz target: arbitrary bytes as log files. The log opens or reports the damage. A log that
//! opened despite damage keeps its records.
//!
//! An input is a concatenation of files, each starting with its magic bytes. Headers and frame
//! heads have checksums, which mutations do not survive. The first byte therefore selects which of
//! them are recomputed, and whether files are named according to their headers.

use fulmar_fuzz::Target;
use futures::executor::block_on;

use super::super::preallocation::log_name;
use super::tests::{body, written};
use super::*;
use crate::FaultyFiles;
use crate::{CommitLog, LogOptions, Urgency};

const MAGIC: &[u8; 8] = b"FULMCLOG";
const SIGN_HEADERS: u8 = 1;
const SIGN_FRAMES: u8 = 2;
const NAME_BY_HEADER: u8 = 4;
const OPEN: u8 = 8;

fn seeds() -> Vec<Vec<u8>> {
    let [one, two, three] = written();
    let files = [vec![&one], vec![&one, &two], vec![&one, &two, &three], vec![&three], vec![&two, &three]];
    let input = |flags: u8, files: &[&Vec<u8>]| {
        let bytes = files.iter().flat_map(|file| file.iter().copied());
        std::iter::once(flags).chain(bytes).collect()
    };
    files.iter().flat_map(|files| [0, 3, 7, 8, 12, 15].map(|flags| input(flags, files))).collect()
}

/// Splits the input into files.
fn cut(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut starts: Vec<usize> =
        bytes.windows(8).enumerate().filter(|(_, w)| *w == MAGIC).map(|(at, _)| at).collect();
    starts.push(bytes.len());
    starts.windows(2).map(|pair| bytes[pair[0]..pair[1]].to_vec()).collect()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |chunk| u64::from_le_bytes(*chunk))
}

fn sign_header(file: &mut [u8]) {
    if file.len() >= HEADER_BYTES {
        let crc = crc32fast::hash(&file[..44]);
        file[44..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Recomputes the heads of frames, for as long as they are consecutive.
fn sign_frames(file: &mut [u8]) {
    let id = LogId(u128::from(u64_at(file, 12)) | u128::from(u64_at(file, 20)) << 64);
    let (mut at, mut position) = (HEADER_BYTES, u64_at(file, 36));
    while at + FRAME_HEAD_BYTES <= file.len() {
        let word =
            |from: usize| u32::from_le_bytes([file[from], file[from + 1], file[from + 2], file[from + 3]]);
        let (bytes, back) = (FRAME_HEAD_BYTES + word(at) as usize, u64::from(word(at + 4)));
        let Some(next) = position.checked_add(bytes as u64) else { return };
        if bytes == FRAME_HEAD_BYTES || at + bytes > file.len() {
            return;
        }
        Frames::of(id).fill(&mut file[at..at + bytes], position, position.saturating_sub(back));
        (at, position) = (at + bytes, next);
    }
}

fn disk(flags: u8, bytes: &[u8]) -> FaultyFiles {
    let disk = FaultyFiles::new();
    for (sequence, mut file) in (1..).zip(cut(bytes)) {
        if flags & SIGN_HEADERS != 0 {
            sign_header(&mut file);
        }
        if flags & SIGN_FRAMES != 0 {
            sign_frames(&mut file);
        }
        let sequence = if flags & NAME_BY_HEADER != 0 { u64_at(&file, 28) } else { sequence };
        disk.put(&log_name(sequence), file);
    }
    disk
}

/// Opens the log, appends a record with this transaction id and closes it. Returns the ids of the
/// records that were in it.
fn open_and_append(disk: &FaultyFiles, transaction: u64) -> Result<Vec<u64>, LogError> {
    let mut seen = Vec::new();
    let log = CommitLog::open(
        LogOptions { file_bytes: 4096, ..LogOptions::default() },
        Arc::new(disk.clone()),
        &mut |_, record| {
            seen.push(record.header.transaction);
            Ok(())
        },
    )?;
    let end = log.append(&body(RecordKind::Commit, transaction, None), Urgency::Immediate)?;
    block_on(log.wait_durable(end))?;
    log.close()?;
    Ok(seen)
}

#[test]
fn fuzz_log() {
    let target = Target::new("log", env!("CARGO_MANIFEST_DIR")).seeds(seeds()).words(&["FULMCLOG"]);
    target.max_allocation(1 << 20, 64).run(|input| {
        let Some((flags, bytes)) = input.split_first() else { return };
        let files = disk(*flags, bytes);
        let mut records = 0;
        let recovered = recover(&files, &mut |_, record| {
            records += record.pages().count().min(1);
            Ok(())
        });
        if recovered.is_err() || flags & OPEN == 0 {
            return;
        }
        let files = disk(*flags, bytes);
        let forged = flags & (SIGN_HEADERS | SIGN_FRAMES) != 0;
        if let Ok(mut held) = open_and_append(&files, 4711)
            && !forged
        {
            held.push(4711);
            assert_eq!(
                open_and_append(&files, 4712).unwrap(),
                held,
                "the log must contain its old records and the new one"
            );
        }
    });
}
