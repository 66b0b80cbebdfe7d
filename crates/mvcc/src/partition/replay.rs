//! The log records of a partition that has not been opened since the start. They are in memory, and
//! are applied when the partition is opened.
//!
//! The log may contain a record more than once. Records of a partition that cannot be opened are
//! copied to the end of the log (`flush` in `fulmar_maintenance`); older copies that have not been
//! truncated are read as well.
//!
//! ```text
//!  log:      | 7  8  9 | 10 . . . | 7 . 8  9 |      (the file with 1 to 6 has been truncated)
//!  replay:     7  8  9  10        each once, ordered by number; 7, 8 and 9 at the later positions
//! ```
//!
//! Records are therefore identified by epoch and number, which are unique (a lost commit may leave
//! its number to another one, but is not in the log that a start reads). They are applied in the
//! order of these, not of the log. Two different records with the same epoch and number are
//! corruption: the partition is not opened.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::Record;
use fulmar_store::Lsn;

/// The maximum overhead of a log per record.
const FRAME_BYTES: u64 = 32;

/// The log records of one partition.
pub struct Replay {
    /// By epoch, number and kind.
    records: BTreeMap<(u32, u64, u8), Logged>,
    /// At or before the position of all records.
    since: AtomicU64,
    /// True if each record names its predecessor, and no two records have the same number.
    may_move: bool,
}

/// A record in the log.
pub struct Logged {
    /// At or before its beginning.
    position: AtomicU64,
    /// The end of a copy that was appended and is not known to be durable; 0 if there is none.
    copy: AtomicU64,
    /// The record.
    pub body: Box<[u8]>,
    /// There is a different record with the same number.
    pub is_ambiguous: bool,
}

impl Default for Replay {
    fn default() -> Self {
        Replay { records: BTreeMap::new(), since: AtomicU64::new(u64::MAX), may_move: true }
    }
}

impl Logged {
    /// A position at or before the beginning of a record that ends at `end`.
    fn start_position(end: Lsn, body: &[u8]) -> u64 {
        end.0.saturating_sub(body.len() as u64 + FRAME_BYTES)
    }

    /// Its approximate size in the log.
    pub fn bytes(&self) -> u64 {
        self.body.len() as u64 + FRAME_BYTES
    }

    /// The end of the copy that was appended and is not known to be durable.
    pub fn copy(&self) -> Option<Lsn> {
        Some(self.copy.load(Ordering::Acquire)).filter(|end| *end > 0).map(Lsn)
    }

    /// Records that a copy was appended.
    pub fn copied(&self, end: Lsn) {
        self.copy.store(end.0, Ordering::Release);
    }

    /// Records that the copy was lost.
    pub fn forget_copy(&self) {
        self.copy.store(0, Ordering::Release);
    }

    /// Moves the record to the position of its copy, which is durable.
    pub fn move_to(&self, end: Lsn) {
        self.position.store(Logged::start_position(end, &self.body), Ordering::Release);
        self.forget_copy();
    }
}

impl Replay {
    /// Adds a record that ends at `end`. Records come in the log's order: if a record is known,
    /// this is its later copy.
    pub fn push(&mut self, end: Lsn, record: &Record<'_>) {
        self.push_at(Logged::start_position(end, record.body()), record);
    }

    /// Adds a record of another log. The partition's own log is kept from `position` on.
    pub fn push_at(&mut self, position: u64, record: &Record<'_>) {
        let header = &record.header;
        let key = (header.version.epoch, header.version.number, header.kind as u8);
        let since = self.since.get_mut();
        *since = position.min(*since);
        let new = || Logged {
            position: AtomicU64::new(0),
            copy: AtomicU64::new(0),
            body: record.body().into(),
            is_ambiguous: false,
        };
        let logged = self.records.entry(key).or_insert_with(new);
        *logged.position.get_mut() = position;
        logged.is_ambiguous |= *logged.body != *record.body();
        self.may_move &= header.previous.is_some() && !logged.is_ambiguous;
    }

    /// The records, each once, in the order of their numbers.
    pub fn records(&self) -> impl Iterator<Item = &Logged> {
        self.records.values()
    }

    /// The position from which the log must be kept for them, or one before it.
    pub fn since(&self) -> Lsn {
        Lsn(self.since.load(Ordering::Acquire))
    }

    /// Returns true if the records may be copied to another position. Each must name its
    /// predecessor (the first version of the format does not). No two may have the same number and
    /// differ: truncation would leave one of them, and recovery would trust it.
    pub fn may_move(&self) -> bool {
        self.may_move
    }

    /// The records at positions before `upto`.
    pub fn placed_before(&self, upto: Lsn) -> impl Iterator<Item = &Logged> {
        self.records().filter(move |record| record.position.load(Ordering::Acquire) < upto.0)
    }

    /// Updates [`Replay::since`] after records were moved.
    pub fn update_since(&self) {
        let positions = self.records().map(|record| record.position.load(Ordering::Acquire));
        self.since.store(positions.min().unwrap_or(u64::MAX), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use fulmar_pages::record::{self, RecordBuilder, RecordHeader, RecordKind};
    use fulmar_pages::{PartitionId, Version, ZERO_PAGE};

    use super::*;

    /// The body of a commit record.
    fn body(epoch: u32, number: u64) -> Vec<u8> {
        body_of(epoch, number, number)
    }

    fn body_of(epoch: u32, number: u64, timestamp: u64) -> Vec<u8> {
        let mut builder = RecordBuilder::default();
        builder.begin(&RecordHeader {
            kind: RecordKind::Commit,
            partition: PartitionId(1),
            version: Version { lineage: 1, epoch, number },
            transaction: 0,
            timestamp,
            page_count: 1,
            previous: Some(number.saturating_sub(1)),
        });
        builder.push_page(1, None, &ZERO_PAGE);
        builder.finish().to_vec()
    }

    /// The replay of a log with commits that end at these positions.
    fn read(log: &[(u64, u32, u64)]) -> Replay {
        let mut replay = Replay::default();
        for (end, epoch, number) in log {
            let body = body(*epoch, *number);
            replay.push(Lsn(*end), &record::decode(&body).unwrap());
        }
        replay
    }

    fn numbers<'r>(records: impl Iterator<Item = &'r Logged>) -> Vec<(u32, u64)> {
        records
            .map(|logged| record::decode(&logged.body).unwrap().header.version)
            .map(|version| (version.epoch, version.number))
            .collect()
    }

    #[test]
    fn duplicate_records_are_applied_once_in_order() {
        // The older copies of 1 and 2 are truncated; 5 was written after the copies of 1 to 3.
        let replay =
            read(&[(3000, 1, 3), (4000, 1, 4), (5000, 1, 1), (6000, 1, 2), (7000, 1, 3), (8000, 1, 5)]);
        assert_eq!(numbers(replay.records()), [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]);
        // A crash during copying leaves both copies.
        let replay = read(&[(1000, 1, 1), (2000, 1, 2), (3000, 1, 3), (4000, 1, 1), (5000, 1, 2)]);
        assert_eq!(numbers(replay.records()), [(1, 1), (1, 2), (1, 3)]);
        assert!(replay.records().all(|record| !record.is_ambiguous));
        // The same number in another epoch is another record.
        let replay = read(&[(1000, 1, 2), (2000, 2, 1), (3000, 2, 2), (4000, 1, 2)]);
        assert_eq!(numbers(replay.records()), [(1, 2), (2, 1), (2, 2)]);
    }

    #[test]
    fn records_with_the_same_number_that_differ_are_ambiguous() {
        let mut replay = read(&[(1000, 1, 1), (2000, 1, 2)]);
        let other = body_of(1, 2, 3);
        replay.push(Lsn(3000), &record::decode(&other).unwrap());
        let ambiguous: Vec<_> = replay.records().map(|record| record.is_ambiguous).collect();
        assert_eq!(ambiguous, [false, true]);
        assert!(!replay.may_move(), "truncation would leave one of two conflicting records");
    }

    #[test]
    fn log_is_kept_for_the_later_copy() {
        let replay = read(&[(1000, 1, 1), (2000, 1, 2), (3000, 1, 3), (4000, 1, 1)]);
        assert!(replay.since() < Lsn(1000), "the log must be kept until the positions are updated");
        replay.update_since();
        assert!((1000..2000).contains(&replay.since().0), "{}", replay.since());
        assert_eq!(numbers(replay.placed_before(Lsn(3000))), [(1, 2), (1, 3)]);
        for (record, end) in replay.records().skip(1).zip([5000, 6000]) {
            record.move_to(Lsn(end));
        }
        assert_eq!(numbers(replay.placed_before(Lsn(3000))), []);
        replay.update_since();
        assert!((3000..4000).contains(&replay.since().0), "{}", replay.since());
    }

    #[test]
    fn empty_replay_keeps_no_log() {
        let replay = Replay::default();
        replay.update_since();
        assert_eq!(replay.since(), Lsn(u64::MAX));
    }

    #[test]
    fn records_of_the_first_format_are_not_moved() {
        assert!(read(&[(1000, 1, 1)]).may_move());
        // Its numbers are at fixed positions, and it has no predecessor.
        let newest = body(1, 2);
        let mut first = vec![1, newest[1]];
        first.extend(2_u64.to_le_bytes());
        first.extend(2_u64.to_le_bytes());
        first.extend(1_u32.to_le_bytes());
        first.extend(&newest[2 + 3 + 8..]);
        let mut replay = read(&[(1000, 1, 1)]);
        replay.push(Lsn(2000), &record::decode(&first).unwrap());
        assert!(!replay.may_move());
    }
}
