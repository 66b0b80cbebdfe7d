//! A term: the time in which one process writes to a store, from its start to its end, as the store has it.
//!
//! Terms are numbered; who begins the greatest one is the owner of the store's partitions and its collector. An object says that a
//! term has begun, another one that it has ended: that its process is gone with all that it has asked of the store, and
//! those of all terms before it.

use crate::FormatError;
use crate::codec::Envelope;

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "term",
    magic: b"FULMTERM",
    foreign: "this is not a term (wrong first bytes)",
    version: FORMAT_VERSION,
};

/// What the store knows of a term.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredTerm {
    /// Which one.
    pub number: u32,
    /// Whose: random.
    pub by: u128,
    /// Whether it has ended, or only begun.
    pub has_ended: bool,
}

impl StoredTerm {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ENVELOPE.begin(40);
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.by.to_le_bytes());
        out.push(u8::from(self.has_ended));
        ENVELOPE.end(out)
    }

    /// Decodes one.
    pub fn decode(bytes: &[u8]) -> Result<StoredTerm, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let (number, by) = (reader.u32()?, reader.u128()?);
        let has_ended = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return Err(reader.invalid("it has neither begun nor ended")),
        };
        reader.end()?;
        Ok(StoredTerm { number, by, has_ended })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::testing::nothing_else_is_read;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        for has_ended in [false, true] {
            let term = StoredTerm { number: 7, by: 5 << 90, has_ended };
            assert_eq!(StoredTerm::decode(&term.encode()), Ok(term));
            nothing_else_is_read(&term.encode(), StoredTerm::decode);
        }
    }
}
