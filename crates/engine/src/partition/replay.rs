//! What the log holds of a partition that has not been opened since the start: its records, in memory, to be applied when it is.
//!
//! The log may hold a record more than once: those of a partition that cannot be opened are carried to its end
//! ([`crate::flush`]), and whatever of the older copies has not been cut off yet is read with them.
//!
//! ```text
//!   log:      | 7  8  9 | 10 . . . | 7 . 8  9 |          (the file with 1 to 6 has been given back)
//!   replay:     7  8  9  10        each once, in the order of their numbers; 7, 8 and 9 stand at the later places
//! ```
//!
//! So records are told apart by epoch and number, which are given once (a commit that was lost may leave its number to
//! another one, but is not in the log that a start reads), and it is not the log's order that counts but theirs. Two that have
//! the same and are not the same are damage: the partition is not opened.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::Record;
use fulmar_store::Lsn;

/// The most that a log puts around a record's bytes.
const FRAME_BYTES: u64 = 32;

/// The log's records of one partition.
pub(crate) struct Replay {
    /// By epoch, number and kind.
    records: BTreeMap<(u32, u64, u8), Logged>,
    /// At or before the place of any.
    since: AtomicU64,
    /// Whether each says which one it goes on from, and no two have one number.
    may_move: bool,
}

/// A record that stands in the log.
pub(crate) struct Logged {
    /// At or before its beginning.
    place: AtomicU64,
    /// Where a copy ends that was appended, of which it is not known yet whether it is durable; 0 if there is none.
    copy: AtomicU64,
    pub body: Box<[u8]>,
    /// There is another one of its number.
    pub is_ambiguous: bool,
}

impl Default for Replay {
    fn default() -> Self {
        Replay { records: BTreeMap::new(), since: AtomicU64::new(u64::MAX), may_move: true }
    }
}

impl Logged {
    /// Where a record begins that ends there, or before that.
    fn place(end: Lsn, body: &[u8]) -> u64 {
        end.0.saturating_sub(body.len() as u64 + FRAME_BYTES)
    }

    /// Bytes that it takes in a log, about.
    pub(crate) fn bytes(&self) -> u64 {
        self.body.len() as u64 + FRAME_BYTES
    }

    /// Where the copy ends that was appended and has not been heard of.
    pub(crate) fn copy(&self) -> Option<Lsn> {
        Some(self.copy.load(Ordering::Acquire)).filter(|end| *end > 0).map(Lsn)
    }

    /// A copy was appended.
    pub(crate) fn copied(&self, end: Lsn) {
        self.copy.store(end.0, Ordering::Release);
    }

    /// The copy is lost.
    pub(crate) fn forget_copy(&self) {
        self.copy.store(0, Ordering::Release);
    }

    /// It stands at another place, where it is durable.
    pub(crate) fn move_to(&self, end: Lsn) {
        self.place.store(Logged::place(end, &self.body), Ordering::Release);
        self.forget_copy();
    }
}

impl Replay {
    /// Adds a record that ends there. They come in the log's order: of one that has come before this is the later copy.
    pub(crate) fn push(&mut self, end: Lsn, record: &Record<'_>) {
        let header = &record.header;
        let key = (header.version.epoch, header.version.number, header.kind as u8);
        let place = Logged::place(end, record.body());
        let since = self.since.get_mut();
        *since = place.min(*since);
        let new = || Logged {
            place: AtomicU64::new(0),
            copy: AtomicU64::new(0),
            body: record.body().into(),
            is_ambiguous: false,
        };
        let logged = self.records.entry(key).or_insert_with(new);
        *logged.place.get_mut() = place;
        logged.is_ambiguous |= *logged.body != *record.body();
        self.may_move &= header.previous.is_some() && !logged.is_ambiguous;
    }

    /// The records, each once, in the order of their numbers.
    pub(crate) fn records(&self) -> impl Iterator<Item = &Logged> {
        self.records.values()
    }

    /// At or before the first place where the log must be kept for them.
    pub(crate) fn since(&self) -> Lsn {
        Lsn(self.since.load(Ordering::Acquire))
    }

    /// Whether the records may be carried to another place: each says which version it goes on from (the first version of their format
    /// does not), and of no two that have one number, and are not the same, would one be left to be taken for the truth.
    pub(crate) fn may_move(&self) -> bool {
        self.may_move
    }

    /// The records that stand before a position.
    pub(crate) fn placed_before(&self, upto: Lsn) -> impl Iterator<Item = &Logged> {
        self.records().filter(move |record| record.place.load(Ordering::Acquire) < upto.0)
    }

    /// Looks where the first of them stands by now.
    pub(crate) fn look_for_first(&self) {
        let places = self.records().map(|record| record.place.load(Ordering::Acquire));
        self.since.store(places.min().unwrap_or(u64::MAX), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use fulmar_pages::record::{self, RecordBuilder, RecordHeader, RecordKind};
    use fulmar_pages::{PartitionId, Version, ZERO_PAGE};

    use super::*;

    /// The body of a commit.
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

    /// What a log holds of commits that end there.
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
    fn a_record_that_stands_twice_is_one_in_its_place() {
        // The older copies of 1 and 2 are cut off; 5 has been written behind the copies of 1 to 3.
        let replay =
            read(&[(3000, 1, 3), (4000, 1, 4), (5000, 1, 1), (6000, 1, 2), (7000, 1, 3), (8000, 1, 5)]);
        assert_eq!(numbers(replay.records()), [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]);
        // A crash in the midst of carrying leaves both.
        let replay = read(&[(1000, 1, 1), (2000, 1, 2), (3000, 1, 3), (4000, 1, 1), (5000, 1, 2)]);
        assert_eq!(numbers(replay.records()), [(1, 1), (1, 2), (1, 3)]);
        assert!(replay.records().all(|record| !record.is_ambiguous));
        // A number of another epoch is another record.
        let replay = read(&[(1000, 1, 2), (2000, 2, 1), (3000, 2, 2), (4000, 1, 2)]);
        assert_eq!(numbers(replay.records()), [(1, 2), (2, 1), (2, 2)]);
    }

    #[test]
    fn two_that_differ_are_no_copies() {
        let mut replay = read(&[(1000, 1, 1), (2000, 1, 2)]);
        let other = body_of(1, 2, 3);
        replay.push(Lsn(3000), &record::decode(&other).unwrap());
        let ambiguous: Vec<_> = replay.records().map(|record| record.is_ambiguous).collect();
        assert_eq!(ambiguous, [false, true]);
        assert!(!replay.may_move(), "one of them would be left, and taken for the truth");
    }

    #[test]
    fn the_later_copy_is_the_one_that_the_log_is_kept_for() {
        let replay = read(&[(1000, 1, 1), (2000, 1, 2), (3000, 1, 3), (4000, 1, 1)]);
        assert!(replay.since() < Lsn(1000), "until somebody looks nothing is given away");
        replay.look_for_first();
        assert!((1000..2000).contains(&replay.since().0), "{}", replay.since());
        assert_eq!(numbers(replay.placed_before(Lsn(3000))), [(1, 2), (1, 3)]);
        for (record, end) in replay.records().skip(1).zip([5000, 6000]) {
            record.move_to(Lsn(end));
        }
        assert_eq!(numbers(replay.placed_before(Lsn(3000))), []);
        replay.look_for_first();
        assert!((3000..4000).contains(&replay.since().0), "{}", replay.since());
    }

    #[test]
    fn nothing_keeps_no_log() {
        let replay = Replay::default();
        replay.look_for_first();
        assert_eq!(replay.since(), Lsn(u64::MAX));
    }

    #[test]
    fn records_of_the_first_format_are_told() {
        assert!(read(&[(1000, 1, 1)]).may_move());
        // Its numbers stand at fixed places, and there is no previous one.
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
