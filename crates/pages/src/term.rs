//! Format of a term: the fencing record of a store's owner.
//!
//! A term covers the time during which one process owns a store. Terms are numbered. The process
//! with the greatest term owns the store's partitions and is its garbage collector. Two objects
//! describe a term:
//!
//! - *begun*: a process has claimed the term;
//! - *ended*: that process and all its requests to the store are gone. The object states how long
//!   requests of earlier terms may still arrive.

use crate::FormatError;
use crate::codec::{self, Envelope};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "term",
    magic: b"FULMTERM",
    foreign: "not a term (wrong magic bytes)",
    version: FORMAT_VERSION,
};

const BEGUN: u8 = 1;
const ENDED: u8 = 2;

/// The state of a term.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TermState {
    /// A process has claimed the term.
    Begun,
    /// The process is gone.
    Ended {
        /// How long requests of earlier terms may still arrive, in milliseconds. 0: none can.
        wait_ms: u64,
    },
}

/// A term object as stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredTerm {
    /// The term's number.
    pub number: u32,
    /// Random id of the process.
    pub by: u128,
    /// Whether the term has begun or ended.
    pub state: TermState,
}

impl StoredTerm {
    /// Encodes the term.
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

    /// Decodes a term.
    pub fn decode(bytes: &[u8]) -> Result<StoredTerm, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let (number, by) = (reader.u32()?, reader.u128()?);
        let state = match reader.u8()? {
            BEGUN => TermState::Begun,
            ENDED => TermState::Ended { wait_ms: reader.varint()? },
            _ => return Err(reader.invalid("unknown term state")),
        };
        reader.end()?;
        Ok(StoredTerm { number, by, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::testing::assert_rejects_damage;

    #[test]
    fn term_round_trips_and_damage_is_rejected() {
        for state in [TermState::Begun, TermState::Ended { wait_ms: 70_000 }] {
            let term = StoredTerm { number: 7, by: 5 << 90, state };
            assert_eq!(StoredTerm::decode(&term.encode()), Ok(term));
            assert_rejects_damage(&term.encode(), StoredTerm::decode);
        }
    }
}
