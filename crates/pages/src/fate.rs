//! What is to become of a manifest that is not its partition's newest: somebody needs it for a while, or it goes.
//!
//! A manifest's fates are numbered, and the last one counts. It is decided by who makes the next number first: whoever wants to use
//! a manifest *pins* it, whoever wants to delete it *condemns* it, and what is condemned is pinned by nobody any more.

use crate::codec::{self, Envelope};
use crate::{FormatError, PartitionId};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "fate of a manifest",
    magic: b"FULMFATE",
    foreign: "this is not the fate of a manifest (wrong first bytes)",
    version: FORMAT_VERSION,
};

const CONDEMNED: u8 = 1;
const PINNED: u8 = 2;

/// What has been decided of a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It is deleted now.
    Condemned,
    /// It stays until then (milliseconds since 1970), and what it names too.
    Pinned {
        /// Until when.
        until_unix_ms: u64,
    },
}

/// A decision on a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredFate {
    /// Whose manifest it is.
    pub partition: PartitionId,
    /// Its version's epoch.
    pub epoch: u32,
    /// Its version's number.
    pub number: u64,
    /// Which decision it is.
    pub turn: u32,
    /// Random: tells two apart who decide the same.
    pub by: u128,
    /// What was decided.
    pub fate: Fate,
}

impl StoredFate {
    /// The decision's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ENVELOPE.begin(72);
        out.extend_from_slice(&self.partition.0.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.turn.to_le_bytes());
        out.extend_from_slice(&self.by.to_le_bytes());
        match self.fate {
            Fate::Condemned => out.push(CONDEMNED),
            Fate::Pinned { until_unix_ms } => {
                out.push(PINNED);
                codec::put_varint(&mut out, until_unix_ms);
            }
        }
        ENVELOPE.end(out)
    }

    /// Decodes a decision.
    pub fn decode(bytes: &[u8]) -> Result<StoredFate, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let (partition, epoch, number) = (PartitionId(reader.u64()?), reader.u32()?, reader.u64()?);
        let (turn, by) = (reader.u32()?, reader.u128()?);
        let fate = match reader.u8()? {
            CONDEMNED => Fate::Condemned,
            PINNED => Fate::Pinned { until_unix_ms: reader.varint()? },
            _ => return Err(reader.invalid("it is neither pinned nor condemned")),
        };
        reader.end()?;
        Ok(StoredFate { partition, epoch, number, turn, by, fate })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::testing::{nothing_else_is_read, resigned};
    use proptest::prelude::*;

    fn example(fate: Fate) -> StoredFate {
        StoredFate { partition: PartitionId(7), epoch: 2, number: 90, turn: 1, by: 5 << 90, fate }
    }

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        for fate in [Fate::Condemned, Fate::Pinned { until_unix_ms: 1 << 40 }] {
            let bytes = example(fate).encode();
            assert_eq!(StoredFate::decode(&bytes), Ok(example(fate)));
            nothing_else_is_read(&bytes, StoredFate::decode);
        }
    }

    proptest! {
        #[test]
        fn changed_bytes_are_rejected_or_decode_to_what_they_encode(at: prop::sample::Index, value: u8, until_unix_ms: u64) {
            let mut bytes = example(Fate::Pinned { until_unix_ms }).encode();
            let at = at.index(bytes.len() - crate::codec::CRC_BYTES);
            bytes[at] = value;
            let bytes = resigned(bytes);
            if let Ok(decoded) = StoredFate::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}
