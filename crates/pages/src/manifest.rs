//! Format of a manifest: the list of segments that make up a partition at a version.
//!
//! ```text
//!   manifest of partition 7 at version 90       lookup of page 5 of partition 7:
//!     segments   c3 as 7   <- newest              c3, then b2, then a1 (as page 5 of partition 4:
//!                b2 as 7                          partition 7 is a branch of 4, by reference)
//!                a1 as 4   <- oldest
//! ```
//!
//! - A page is read from the newest segment that contains it.
//! - Pages beyond `page_count` are not part of the partition, even if a segment contains them.
//! - `outcomes` lists the transaction outcomes that clients can still ask for. A transaction below
//!   `outcomes_horizon` that is not in the list is reported as too old.

use crate::codec::{self, Envelope, Reader};
use crate::{FormatError, Outcome, PartitionId, SegmentId, Version};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "manifest",
    magic: b"FULMMANI",
    foreign: "not a manifest (wrong magic bytes)",
    version: FORMAT_VERSION,
};

const SEGMENT_BYTES: usize = 24;

/// One segment of a partition.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SegmentRef {
    /// The segment.
    pub id: SegmentId,
    /// The partition under which the segment stores the pages. After a branch it differs from the
    /// manifest's partition.
    pub partition: PartitionId,
}

/// The contents of a partition at a version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// The partition.
    pub partition: PartitionId,
    /// The version.
    pub version: Version,
    /// Number of pages in the partition.
    pub page_count: u32,
    /// The hybrid timestamp of the version.
    pub timestamp: u64,
    /// Segments, oldest first. Later segments override earlier ones.
    pub segments: Vec<SegmentRef>,
    /// Outcomes of transactions that clients can still ask for.
    pub outcomes: Vec<Outcome>,
    /// Transactions with a smaller id that are not in `outcomes` are too old to report.
    pub outcomes_horizon: u64,
}

impl Manifest {
    /// Encodes the manifest.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = ENVELOPE.begin(80 + SEGMENT_BYTES * self.segments.len() + 10 * self.outcomes.len());
        out.extend_from_slice(&self.partition.0.to_le_bytes());
        out.extend_from_slice(&self.version.lineage.to_le_bytes());
        out.extend_from_slice(&self.version.epoch.to_le_bytes());
        out.extend_from_slice(&self.version.number.to_le_bytes());
        out.extend_from_slice(&self.page_count.to_le_bytes());
        out.extend_from_slice(&self.timestamp.to_le_bytes());
        out.extend_from_slice(&self.outcomes_horizon.to_le_bytes());
        codec::put_varint(&mut out, self.segments.len() as u64);
        for segment in &self.segments {
            out.extend_from_slice(&segment.id.0.to_le_bytes());
            out.extend_from_slice(&segment.partition.0.to_le_bytes());
        }
        codec::put_varint(&mut out, self.outcomes.len() as u64);
        for outcome in &self.outcomes {
            codec::put_varint(&mut out, outcome.transaction);
            out.push(u8::from(outcome.committed));
        }
        ENVELOPE.end(out)
    }

    /// Memory use, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.segments.capacity() * size_of::<SegmentRef>()
            + self.outcomes.capacity() * size_of::<Outcome>()
    }

    /// Decodes a manifest.
    pub fn decode(bytes: &[u8]) -> Result<Manifest, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let partition = PartitionId(reader.u64()?);
        let version = Version { lineage: reader.u64()?, epoch: reader.u32()?, number: reader.u64()? };
        let page_count = reader.u32()?;
        let timestamp = reader.u64()?;
        let outcomes_horizon = reader.u64()?;
        let segments = decode_segments(&mut reader)?;
        let outcomes = decode_outcomes(&mut reader)?;
        reader.end()?;
        Ok(Manifest { partition, version, page_count, timestamp, segments, outcomes, outcomes_horizon })
    }
}

fn decode_segments(reader: &mut Reader<'_>) -> Result<Vec<SegmentRef>, FormatError> {
    let count = reader.count(SEGMENT_BYTES)?;
    let mut segments = Vec::with_capacity(count);
    for _ in 0..count {
        segments.push(SegmentRef { id: SegmentId(reader.u128()?), partition: PartitionId(reader.u64()?) });
    }
    Ok(segments)
}

fn decode_outcomes(reader: &mut Reader<'_>) -> Result<Vec<Outcome>, FormatError> {
    let count = reader.count(2)?;
    let mut outcomes = Vec::with_capacity(count);
    for _ in 0..count {
        let transaction = reader.varint()?;
        let committed = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return Err(reader.invalid("unknown transaction outcome")),
        };
        outcomes.push(Outcome { transaction, committed });
    }
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::CRC_BYTES;
    use crate::codec::testing::{assert_rejects_damage, with_valid_checksum};
    use proptest::prelude::*;

    fn any_manifest() -> impl Strategy<Value = Manifest> {
        let segment = any::<(u128, u64)>()
            .prop_map(|(id, p)| SegmentRef { id: SegmentId(id), partition: PartitionId(p) });
        let outcome =
            any::<(u64, bool)>().prop_map(|(transaction, committed)| Outcome { transaction, committed });
        let version =
            any::<(u64, u32, u64)>().prop_map(|(lineage, epoch, number)| Version { lineage, epoch, number });
        (
            (any::<u64>(), version, any::<u32>(), any::<u64>(), any::<u64>()),
            prop::collection::vec(segment, 0..20),
            prop::collection::vec(outcome, 0..20),
        )
            .prop_map(
                |((partition, version, page_count, timestamp, horizon), segments, outcomes)| Manifest {
                    partition: PartitionId(partition),
                    version,
                    page_count,
                    timestamp,
                    segments,
                    outcomes,
                    outcomes_horizon: horizon,
                },
            )
    }

    #[test]
    fn damaged_manifest_is_rejected() {
        assert_rejects_damage(&example().encode(), Manifest::decode);
    }

    fn example() -> Manifest {
        Manifest {
            partition: PartitionId(7),
            version: Version { lineage: 1, epoch: 2, number: 3 },
            page_count: 4,
            timestamp: 5,
            segments: vec![SegmentRef { id: SegmentId(6), partition: PartitionId(4) }; 3],
            outcomes: vec![Outcome { transaction: 300, committed: true }],
            outcomes_horizon: 200,
        }
    }

    proptest! {
        #[test]
        fn manifest_round_trips(manifest in any_manifest()) {
            prop_assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
        }

        #[test]
        fn changed_byte_is_rejected_or_round_trips(
            manifest in any_manifest(),
            at: prop::sample::Index,
            value: u8,
        ) {
            let mut bytes = manifest.encode();
            let at = at.index(bytes.len() - CRC_BYTES);
            bytes[at] = value;
            let bytes = with_valid_checksum(bytes);
            if let Ok(decoded) = Manifest::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}
