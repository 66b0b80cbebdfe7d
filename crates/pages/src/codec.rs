//! Reads and writes the fields of the formats: little-endian integers and varints (LEB128).
//!
//! A varint holds seven bits per byte, least significant group first. The top bit of a byte is set
//! if another byte follows. Each number has exactly one encoding (no padding with zero groups), so
//! equal contents are equal bytes.
//!
//! Formats that are read as a whole (manifests, holds, terms, lists of hot pages, catalogs) share
//! an [`Envelope`]: eight magic bytes, the format version, the fields, and a CRC-32 of everything
//! before it.

use crate::{FormatError, Problem};

/// Maximum length of a varint, in bytes.
pub(crate) const VARINT_MAX: usize = 10;

/// Appends a varint.
pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The encoded length of a varint, in bytes.
pub(crate) fn varint_len(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}

/// Maps small numbers of either sign to small numbers: 0, -1, 1, -2 become 0, 1, 2, 3.
pub(crate) fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// The inverse of [`zigzag`].
pub(crate) fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

/// The header and checksum around the fields of a format.
pub(crate) struct Envelope {
    /// Name of the format in error messages.
    pub(crate) format: &'static str,
    /// The first eight bytes.
    pub(crate) magic: &'static [u8; 8],
    /// The error message for other first bytes.
    pub(crate) foreign: &'static str,
    /// The format version that is written, and the only one that is read.
    pub(crate) version: u32,
}

/// Length of the trailing checksum, in bytes.
pub(crate) const CRC_BYTES: usize = 4;

impl Envelope {
    /// Writes the header. [`Envelope::end`] completes the result. `capacity` is the expected
    /// total length in bytes.
    pub(crate) fn begin(&self, capacity: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(capacity);
        out.extend_from_slice(self.magic);
        out.extend_from_slice(&self.version.to_le_bytes());
        out
    }

    /// Appends the checksum.
    pub(crate) fn end(&self, mut out: Vec<u8>) -> Vec<u8> {
        let crc = crc32fast::hash(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out
    }

    /// Checks header and checksum, and returns a reader of the fields.
    pub(crate) fn open<'a>(&self, bytes: &'a [u8]) -> Result<Reader<'a>, FormatError> {
        let end =
            bytes.len().checked_sub(CRC_BYTES).ok_or(error(self.format, bytes.len(), Problem::Truncated))?;
        let mut reader = Reader::new(self.format, &bytes[..end]);
        if reader.take(self.magic.len())? != self.magic {
            return Err(error(self.format, 0, Problem::Invalid(self.foreign)));
        }
        let stored = Reader::starting(self.format, bytes, end).u32()?;
        let computed = crc32fast::hash(&bytes[..end]);
        if stored != computed {
            return Err(error(self.format, end, Problem::Checksum { stored, computed }));
        }
        let found = reader.u32()?;
        if found != self.version {
            let problem = Problem::FormatVersion { found, newest: self.version };
            return Err(error(self.format, self.magic.len(), problem));
        }
        Ok(reader)
    }
}

/// Reads fields in sequence and tracks its position for error reports.
#[derive(Clone)]
pub(crate) struct Reader<'a> {
    format: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Reads `bytes` from the start.
    pub(crate) fn new(format: &'static str, bytes: &'a [u8]) -> Self {
        Reader { format, bytes, at: 0 }
    }

    /// Reads `bytes` from position `at`.
    pub(crate) fn starting(format: &'static str, bytes: &'a [u8], at: usize) -> Self {
        Reader { format, bytes, at: at.min(bytes.len()) }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn error(&self, problem: Problem) -> FormatError {
        error(self.format, self.at, problem)
    }

    pub(crate) fn invalid(&self, what: &'static str) -> FormatError {
        self.error(Problem::Invalid(what))
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], FormatError> {
        if len > self.remaining() {
            return Err(self.error(Problem::Truncated));
        }
        let taken = &self.bytes[self.at..self.at + len];
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, FormatError> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn u128(&mut self) -> Result<u128, FormatError> {
        Ok(u128::from_le_bytes(self.array()?))
    }

    pub(crate) fn varint(&mut self) -> Result<u64, FormatError> {
        let mut value = 0u64;
        for i in 0..VARINT_MAX {
            let byte = *self.bytes.get(self.at + i).ok_or_else(|| self.error(Problem::Truncated))?;
            let group = u64::from(byte & 0x7f);
            if i == VARINT_MAX - 1 && group > 1 {
                return Err(self.invalid("varint exceeds 64 bits"));
            }
            value |= group << (7 * i);
            if byte & 0x80 == 0 {
                if byte == 0 && i > 0 {
                    return Err(self.invalid("varint is not in its shortest form"));
                }
                self.at += i + 1;
                return Ok(value);
            }
        }
        Err(self.invalid("varint exceeds 64 bits"))
    }

    /// A varint that must fit into 32 bits.
    pub(crate) fn varint_u32(&mut self) -> Result<u32, FormatError> {
        let at = self.at;
        let value = self.varint()?;
        u32::try_from(value).map_err(|_| error(self.format, at, Problem::Invalid("number exceeds 32 bits")))
    }

    /// A varint that counts the following items, each of at least `min_item_bytes` bytes.
    pub(crate) fn count(&mut self, min_item_bytes: usize) -> Result<usize, FormatError> {
        let at = self.at;
        let value = self.varint()?;
        match usize::try_from(value) {
            Ok(count) if count <= self.remaining() / min_item_bytes => Ok(count),
            _ => Err(error(self.format, at, Problem::Invalid("count exceeds the remaining data"))),
        }
    }

    /// Fails if bytes are left.
    pub(crate) fn end(&self) -> Result<(), FormatError> {
        match self.remaining() {
            0 => Ok(()),
            _ => Err(self.error(Problem::Trailing)),
        }
    }
}

/// An error in `format` at byte `at`.
pub(crate) fn error(format: &'static str, at: usize, problem: Problem) -> FormatError {
    FormatError { format, at, problem }
}

/// Helpers for tests of formats with an [`Envelope`].
#[cfg(test)]
pub(crate) mod testing {
    use std::fmt::Debug;

    use super::CRC_BYTES;
    use crate::{FormatError, Problem};

    /// Recomputes the checksum of changed bytes, so that the decoder's other checks are tested.
    pub(crate) fn with_valid_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
        let end = bytes.len() - CRC_BYTES;
        let crc = crc32fast::hash(&bytes[..end]);
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Asserts that `decode` accepts `bytes`, and rejects every copy with a flipped bit, every
    /// truncated copy, and the next format version.
    pub(crate) fn assert_rejects_damage<T: Debug>(bytes: &[u8], decode: fn(&[u8]) -> Result<T, FormatError>) {
        assert!(decode(bytes).is_ok());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.to_vec();
                damaged[at] ^= 1 << bit;
                assert!(decode(&damaged).is_err(), "bit {bit} of byte {at}");
            }
            assert!(decode(&bytes[..at]).is_err(), "truncated to {at} bytes");
        }
        let mut newer = bytes.to_vec();
        newer[8] = 2;
        let error = decode(&with_valid_checksum(newer)).unwrap_err();
        assert_eq!(error.problem, Problem::FormatVersion { found: 2, newest: 1 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varint_round_trips_and_has_one_encoding() {
        for value in [0, 1, 0x7f, 0x80, 0x3fff, 0x4000, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            assert_eq!(out.len(), varint_len(value), "{value}");
            let mut reader = Reader::new("test", &out);
            assert_eq!(reader.varint(), Ok(value));
            assert_eq!(reader.end(), Ok(()));
            assert!(Reader::new("test", &out[..out.len() - 1]).varint().is_err());
        }
        assert!(Reader::new("test", &[0x80, 0]).varint().is_err(), "padding");
        assert!(Reader::new("test", &[0xff; 10]).varint().is_err(), "more than 64 bits");
        assert!(Reader::new("test", &[0xff; 11]).varint().is_err(), "more than ten bytes");
    }

    #[test]
    fn zigzag_is_reversible() {
        for value in [0, 1, -1, 63, -64, i64::MAX, i64::MIN] {
            assert_eq!(unzigzag(zigzag(value)), value);
        }
        assert_eq!(zigzag(-1), 1);
    }

    #[test]
    fn count_is_bounded_by_the_remaining_data() {
        assert_eq!(Reader::new("test", &[2, 0, 0, 0, 0]).count(2), Ok(2));
        assert!(Reader::new("test", &[3, 0, 0, 0, 0]).count(2).is_err());
    }
}
