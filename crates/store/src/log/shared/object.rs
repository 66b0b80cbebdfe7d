//! The bytes of a log object: a head and records.
//!
//! ```text
//!   object  = head (80 bytes), record*
//!   head    = "FULMLOGO", format version u32, crc u32, writer u128, incarnation u64, sequence u64, start u64,
//!             needed incarnation u64, needed sequence u64, durable u64
//!   record  = length u32, body (`length` bytes)
//! ```
//!
//! The checksum covers all that follows it. `start` is the position of the first record; positions count the records
//! with their lengths, not the heads. What `needed` and `durable` say the module's head explains.

use bytes::Bytes;
use fulmar_pages::{FormatError, LogId, Record, RecordKind, record};

use super::Slot;

/// Bytes of an object before its records.
pub(super) const HEAD_BYTES: usize = 80;
/// Bytes of a record before its body.
pub(super) const LENGTH_BYTES: usize = 4;

const MAGIC: &[u8; 8] = b"FULMLOGO";
const FORMAT_VERSION: u32 = 1;
/// Where the bytes begin that the checksum covers.
const CHECKED: usize = 16;

/// What an object says besides its records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    /// Random: who wrote it.
    pub(super) writer: LogId,
    /// Where it stands; its name says the same.
    pub(super) slot: Slot,
    /// The position of its first record.
    pub(super) start: u64,
    /// Manifests cover everything before this slot, which is never later than the object's own.
    pub(super) needed: Slot,
    /// All smaller sequences of its incarnation were durable when it was made.
    pub(super) durable: u64,
}

/// What is wrong with an object's bytes, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Damage {
    pub(super) offset: u64,
    pub(super) problem: String,
}

/// An object that was read.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub(super) head: Head,
    /// It ends its log.
    pub(super) is_seal: bool,
    bytes: Bytes,
}

/// Begins an object: room for its head.
pub(super) fn begin() -> Vec<u8> {
    vec![0; HEAD_BYTES]
}

/// Adds a record.
pub(super) fn push(object: &mut Vec<u8>, body: &[u8]) {
    object.extend_from_slice(&(body.len() as u32).to_le_bytes());
    object.extend_from_slice(body);
}

/// Fills in the head, when all records are there.
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
    /// Reads the object that stands at `slot`.
    pub(super) fn decode(slot: Slot, bytes: Bytes) -> Result<Object, Damage> {
        let damage =
            |offset: usize, problem: &str| Damage { offset: offset as u64, problem: problem.to_owned() };
        if bytes.len() < HEAD_BYTES {
            return Err(damage(bytes.len(), "it ends within its head"));
        }
        if bytes[..8] != MAGIC[..] {
            return Err(damage(0, "it is no log object"));
        }
        let version = u32_at(&bytes, 8);
        if version != FORMAT_VERSION {
            let problem = format!("its format version is {version}; this build reads {FORMAT_VERSION}");
            return Err(damage(8, &problem));
        }
        if u32_at(&bytes, 12) != crc32fast::hash(&bytes[CHECKED..]) {
            return Err(damage(12, "its checksum is wrong"));
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
            return Err(damage(32, &format!("it is the object of {}", head.slot)));
        }
        // A start relies on this rule when it skips objects below the needed slot.
        if head.needed > slot {
            let problem = format!("it states that the log is needed from {} on, a later slot", head.needed);
            return Err(damage(56, &problem));
        }
        let mut object = Object { head, is_seal: false, bytes };
        object.check()?;
        Ok(object)
    }

    /// Looks at all records once.
    fn check(&mut self) -> Result<(), Damage> {
        let mut at = HEAD_BYTES;
        while at < self.bytes.len() {
            let offset = at as u64;
            let damage = |problem: String| Damage { offset, problem };
            let Some(body) = body_at(&self.bytes, at) else {
                return Err(damage("it ends within a record".to_owned()));
            };
            let record = record::decode(body).map_err(|error: FormatError| damage(error.to_string()))?;
            self.is_seal |= record.header.kind == RecordKind::Seal;
            at += LENGTH_BYTES + body.len();
        }
        match self.head.start.checked_add(self.bytes.len() as u64) {
            Some(_) => Ok(()),
            None => Err(Damage { offset: 48, problem: "it begins beyond any position".to_owned() }),
        }
    }

    /// Its records, each with the position of its end.
    pub(super) fn records(&self) -> impl Iterator<Item = (u64, Record<'_>)> {
        self.places().filter_map(|(at, length)| {
            let end = at + LENGTH_BYTES + length - HEAD_BYTES;
            Some((self.head.start + end as u64, self.record_at(at)?))
        })
    }

    /// Where its records stand, and how long their bodies are.
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, usize)> + use<'_> {
        let mut next = HEAD_BYTES;
        std::iter::from_fn(move || {
            let (at, length) = (next, body_at(&self.bytes, next)?.len());
            next += LENGTH_BYTES + length;
            Some((at, length))
        })
    }

    /// The record that stands at a place.
    pub(super) fn record_at(&self, at: usize) -> Option<Record<'_>> {
        // All of them could be read before.
        record::decode(body_at(&self.bytes, at)?).ok()
    }

    /// The position of its end.
    pub(super) fn end(&self) -> u64 {
        self.head.start + (self.bytes.len() - HEAD_BYTES) as u64
    }

    /// All its bytes.
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
