//! Format of a manifest hold: a pin or a tombstone of a manifest that is not its partition's
//! newest.
//!
//! - A process that reads or branches a manifest *pins* it until a given time.
//! - The garbage collector *condemns* a manifest before it deletes it. A condemned manifest can no
//!   longer be pinned.
//!
//! The holds of a manifest are numbered, and the one with the greatest number is in force. Each is
//! an object that is created only if absent, so of two processes that try to decide the next number
//! exactly one succeeds (compare-and-set).

use crate::codec::{self, Envelope};
use crate::{FormatError, PartitionId};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "fate of a manifest",
    magic: b"FULMFATE",
    foreign: "not a fate of a manifest (wrong magic bytes)",
    version: FORMAT_VERSION,
};

const CONDEMNED: u8 = 1;
const PINNED: u8 = 2;

/// A decision about a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HoldState {
    /// The manifest is being deleted.
    Condemned,
    /// The manifest and the segments that it names are kept.
    Pinned {
        /// Until this time, in milliseconds since 1970.
        until_unix_ms: u64,
    },
}

/// A hold as stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredHold {
    /// The manifest's partition.
    pub partition: PartitionId,
    /// Epoch of the manifest's version.
    pub epoch: u32,
    /// Number of the manifest's version.
    pub number: u64,
    /// Sequence number of the decision, from 0.
    pub sequence: u32,
    /// Random id of the deciding process: distinguishes two that decide the same.
    pub by: u128,
    /// The decision.
    pub state: HoldState,
}

impl StoredHold {
    /// Encodes the hold.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ENVELOPE.begin(72);
        out.extend_from_slice(&self.partition.0.to_le_bytes());
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&self.by.to_le_bytes());
        match self.state {
            HoldState::Condemned => out.push(CONDEMNED),
            HoldState::Pinned { until_unix_ms } => {
                out.push(PINNED);
                codec::put_varint(&mut out, until_unix_ms);
            }
        }
        ENVELOPE.end(out)
    }

    /// Decodes a hold.
    pub fn decode(bytes: &[u8]) -> Result<StoredHold, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let (partition, epoch, number) = (PartitionId(reader.u64()?), reader.u32()?, reader.u64()?);
        let (sequence, by) = (reader.u32()?, reader.u128()?);
        let state = match reader.u8()? {
            CONDEMNED => HoldState::Condemned,
            PINNED => HoldState::Pinned { until_unix_ms: reader.varint()? },
            _ => return Err(reader.invalid("unknown fate")),
        };
        reader.end()?;
        Ok(StoredHold { partition, epoch, number, sequence, by, state })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::testing::{assert_rejects_damage, with_valid_checksum};
    use proptest::prelude::*;

    fn example(state: HoldState) -> StoredHold {
        StoredHold { partition: PartitionId(7), epoch: 2, number: 90, sequence: 1, by: 5 << 90, state }
    }

    #[test]
    fn fate_round_trips_and_damage_is_rejected() {
        for state in [HoldState::Condemned, HoldState::Pinned { until_unix_ms: 1 << 40 }] {
            let bytes = example(state).encode();
            assert_eq!(StoredHold::decode(&bytes), Ok(example(state)));
            assert_rejects_damage(&bytes, StoredHold::decode);
        }
    }

    proptest! {
        #[test]
        fn changed_byte_is_rejected_or_round_trips(
            at: prop::sample::Index,
            value: u8,
            until_unix_ms: u64,
        ) {
            let mut bytes = example(HoldState::Pinned { until_unix_ms }).encode();
            let at = at.index(bytes.len() - crate::codec::CRC_BYTES);
            bytes[at] = value;
            let bytes = with_valid_checksum(bytes);
            if let Ok(decoded) = StoredHold::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}
