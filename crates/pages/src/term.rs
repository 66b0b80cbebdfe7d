//! A term: the time in which one process writes to a store, from its start to its end, as the store has it.
//!
//! Terms are numbered; who begins the greatest one is the owner of the store's partitions and its collector. An object says that a
//! term has begun, another one that it has ended: that its process is gone with all that it has asked of the store, and how
//! long something of terms before it may still arrive.

use crate::FormatError;
use crate::codec::{self, Envelope};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "term",
    magic: b"FULMTERM",
    foreign: "this is not a term (wrong first bytes)",
    version: FORMAT_VERSION,
};

const BEGUN: u8 = 1;
const ENDED: u8 = 2;

/// What became of a term.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TermState {
    /// It has begun.
    Begun,
    /// Its process is gone; for so many milliseconds from then on something of an earlier one may still arrive.
    Ended {
        /// 0: nothing does.
        wait_ms: u64,
    },
}

/// What the store knows of a term.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredTerm {
    /// Which one.
    pub number: u32,
    /// Whose: random.
    pub by: u128,
    /// What this says of it.
    pub state: TermState,
}

impl StoredTerm {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ENVELOPE.begin(40);
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.by.to_le_bytes());
        match self.state {
            TermState::Begun => out.push(BEGUN),
            TermState::Ended { wait_ms } => {
                out.push(ENDED);
                codec::put_varint(&mut out, wait_ms);
            }
        }
        ENVELOPE.end(out)
    }

    /// Decodes one.
    pub fn decode(bytes: &[u8]) -> Result<StoredTerm, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let (number, by) = (reader.u32()?, reader.u128()?);
        let state = match reader.u8()? {
            BEGUN => TermState::Begun,
            ENDED => TermState::Ended { wait_ms: reader.varint()? },
            _ => return Err(reader.invalid("it has neither begun nor ended")),
        };
        reader.end()?;
        Ok(StoredTerm { number, by, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::testing::nothing_else_is_read;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        for state in [TermState::Begun, TermState::Ended { wait_ms: 70_000 }] {
            let term = StoredTerm { number: 7, by: 5 << 90, state };
            assert_eq!(StoredTerm::decode(&term.encode()), Ok(term));
            nothing_else_is_read(&term.encode(), StoredTerm::decode);
        }
    }
}
