//! Format of a log object: a head followed by records.
//!
//! ```text
//!   object  = head (80 bytes), record*
//!   head    = "FULMLOGO", format version u32, crc u32, writer u128, incarnation u64, sequence u64,
//!             start u64, needed incarnation u64, needed sequence u64, durable u64
//!   record  = length u32, body (`length` bytes)
//! ```
//!
//! The checksum covers everything after it. `start` is the position of the first record. Positions
//! count the records with their lengths, but not the heads. `needed` and `durable` are explained in
//! the parent module.

use bytes::Bytes;
use fulmar_pages::{FormatError, LogId, Record, RecordKind, record};

use super::slot::Slot;

/// Length of an object's head.
pub(super) const HEAD_BYTES: usize = 80;
/// Length of a record's length field.
pub(super) const LENGTH_BYTES: usize = 4;

const MAGIC: &[u8; 8] = b"FULMLOGO";
const FORMAT_VERSION: u32 = 1;
/// Offset from which on the checksum covers an object.
const CHECKED: usize = 16;

/// The fields of an object's head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    /// Random id of the writer.
    pub(super) writer: LogId,
    /// The object's slot. Equals the slot in its name.
    pub(super) slot: Slot,
    /// Position of the first record.
    pub(super) start: u64,
    /// Everything before this slot is covered. Never later than the object's own slot, except in an
    /// end mark: there it is the first slot of the next incarnation.
    pub(super) needed: Slot,
    /// All smaller sequence numbers of its incarnation were durable when the object was created.
    pub(super) durable: u64,
}

/// Damage of an object: the problem and its offset.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Damage {
    pub(super) offset: u64,
    pub(super) problem: String,
}

/// A decoded object.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) head: Head,
    /// The object is a seal.
    pub(super) is_seal: bool,
    bytes: Bytes,
}

/// Starts an object, with space for its head.
pub(super) fn begin() -> Vec<u8> {
    vec![0; HEAD_BYTES]
}

/// Adds a record.
pub(super) fn push(object: &mut Vec<u8>, body: &[u8]) {
    object.extend_from_slice(&(body.len() as u32).to_le_bytes());
    object.extend_from_slice(body);
}

/// Fills in the head once all records have been added.
pub(super) fn finish(mut object: Vec<u8>, head: &Head) -> Bytes {
    let mut fields = Vec::with_capacity(HEAD_BYTES);
    fields.extend_from_slice(&head.writer.0.to_le_bytes());
    let numbers = [
        head.slot.incarnation,
        head.slot.sequence,
        head.start,
        head.needed.incarnation,
        head.needed.sequence,
        head.durable,
    ];
    fields.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    object[CHECKED..HEAD_BYTES].copy_from_slice(&fields);
    let crc = crc32fast::hash(&object[CHECKED..]);
    object[..8].copy_from_slice(MAGIC);
    object[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
    object[12..CHECKED].copy_from_slice(&crc.to_le_bytes());
    object.into()
}

impl Object {
    /// Decodes the object of `slot`.
    pub(super) fn decode(slot: Slot, bytes: Bytes) -> Result<Object, Damage> {
        let damage =
            |offset: usize, problem: &str| Damage { offset: offset as u64, problem: problem.to_owned() };
        if bytes.len() < HEAD_BYTES {
            return Err(damage(bytes.len(), "the object ends within its head"));
        }
        if bytes[..8] != MAGIC[..] {
            return Err(damage(0, "not a log object"));
        }
        let version = u32_at(&bytes, 8);
        if version != FORMAT_VERSION {
            let problem =
                format!("format version {version} is not supported; this build reads {FORMAT_VERSION}");
            return Err(damage(8, &problem));
        }
        if u32_at(&bytes, 12) != crc32fast::hash(&bytes[CHECKED..]) {
            return Err(damage(12, "checksum mismatch"));
        }
        let number = |at: usize| u64_at(&bytes, at);
        let at = |at: usize| Slot { incarnation: number(at), sequence: number(at + 8) };
        let head = Head {
            writer: LogId(u128::from(number(16)) | u128::from(number(24)) << 64),
            slot: at(32),
            start: number(48),
            needed: at(56),
            durable: number(72),
        };
        if head.slot != slot {
            return Err(damage(32, &format!("the object belongs to slot {}", head.slot)));
        }
        let mut object = Object { head, is_seal: false, bytes };
        object.check()?;
        // A start relies on this rule when it skips objects below the needed slot.
        if head.needed > slot && !object.is_end_mark() {
            let problem = format!("the needed slot {} is later than the object's own", head.needed);
            return Err(damage(56, &problem));
        }
        Ok(object)
    }

    /// Validates all records.
    fn check(&mut self) -> Result<(), Damage> {
        let mut at = HEAD_BYTES;
        while at < self.bytes.len() {
            let offset = at as u64;
            let damage = |problem: String| Damage { offset, problem };
            let Some(body) = body_at(&self.bytes, at) else {
                return Err(damage("the object ends within a record".to_owned()));
            };
            let record = record::decode(body).map_err(|error: FormatError| damage(error.to_string()))?;
            self.is_seal |= record.header.kind == RecordKind::Seal;
            at += LENGTH_BYTES + body.len();
        }
        match self.head.start.checked_add(self.bytes.len() as u64) {
            Some(_) => Ok(()),
            None => Err(Damage { offset: 48, problem: "the start position is out of range".to_owned() }),
        }
    }

    /// The records, each with the position of its end.
    pub(super) fn records(&self) -> impl Iterator<Item = (u64, Record<'_>)> {
        self.offsets().filter_map(|(at, length)| {
            let end = at + LENGTH_BYTES + length - HEAD_BYTES;
            Some((self.head.start + end as u64, self.record_at(at)?))
        })
    }

    /// Offsets of the records, and the lengths of their bodies.
    pub(super) fn offsets(&self) -> impl Iterator<Item = (usize, usize)> + use<'_> {
        let mut next = HEAD_BYTES;
        std::iter::from_fn(move || {
            let (at, length) = (next, body_at(&self.bytes, next)?.len());
            next += LENGTH_BYTES + length;
            Some((at, length))
        })
    }

    /// Decodes the record at an offset.
    pub(super) fn record_at(&self, at: usize) -> Option<Record<'_>> {
        // `decode` has validated all records.
        record::decode(body_at(&self.bytes, at)?).ok()
    }

    /// Returns true for the mark of a log that is being deleted ([`super::LogSlots::create_end_mark`]).
    fn is_end_mark(&self) -> bool {
        let next = self.head.slot.incarnation.checked_add(1);
        let next = next.map(|incarnation| Slot { incarnation, sequence: 0 });
        self.is_seal && Some(self.head.needed) == next
    }

    /// Position of the object's end.
    pub(super) fn end(&self) -> u64 {
        self.head.start + (self.bytes.len() - HEAD_BYTES) as u64
    }

    /// Length of the object.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }
}

fn body_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    let (length, rest) = rest.split_first_chunk::<LENGTH_BYTES>()?;
    rest.get(..u32::from_le_bytes(*length) as usize)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |chunk| u32::from_le_bytes(*chunk))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |chunk| u64::from_le_bytes(*chunk))
}
