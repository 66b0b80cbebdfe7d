//! Format of a catalog object: a full copy of the metadata store's keys and values.
//!
//! ```text
//!   number 12, of node 8c1f...
//!     counter/partition -> {"v":1,"next":66}     put by revision 3
//!     tenant/shop       -> {"v":1, ...}          put by revision 17
//! ```
//!
//! Keys are text and values are bytes here, in order of the keys. `crates/meta` defines their
//! meaning.

use crate::FormatError;
use crate::codec::{self, Envelope};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "catalog",
    magic: b"FULMCATA",
    foreign: "not a catalog (wrong magic bytes)",
    version: FORMAT_VERSION,
};

/// Minimum length of an entry, in bytes.
const MIN_ENTRY_BYTES: usize = 3;

/// A catalog.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredCatalog {
    /// Sequence number of the catalog in its store. The greatest is the newest.
    pub number: u64,
    /// Id of the node that wrote it. The node's log in the store has the same id.
    pub node: u128,
    /// Entries in ascending order of their keys, which are unique.
    pub entries: Vec<CatalogEntry>,
}

/// A key and its value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogEntry {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Vec<u8>,
    /// The metadata store's revision that wrote the value.
    pub modified: u64,
}

impl StoredCatalog {
    /// Encodes the catalog.
    pub fn encode(&self) -> Vec<u8> {
        let entry_bytes = |entry: &CatalogEntry| entry.key.len() + entry.value.len() + 3 * codec::VARINT_MAX;
        let mut out = ENVELOPE.begin(64 + self.entries.iter().map(entry_bytes).sum::<usize>());
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(&self.node.to_le_bytes());
        codec::put_varint(&mut out, self.entries.len() as u64);
        for CatalogEntry { key, value, modified } in &self.entries {
            for bytes in [key.as_bytes(), value] {
                codec::put_varint(&mut out, bytes.len() as u64);
                out.extend_from_slice(bytes);
            }
            codec::put_varint(&mut out, *modified);
        }
        ENVELOPE.end(out)
    }

    /// Decodes a catalog.
    pub fn decode(bytes: &[u8]) -> Result<StoredCatalog, FormatError> {
        let mut reader = ENVELOPE.open(bytes)?;
        let (number, node) = (reader.u64()?, reader.u128()?);
        // Not allocated from the stated count: an entry takes more memory than encoded bytes.
        let mut entries: Vec<CatalogEntry> = Vec::new();
        for _ in 0..reader.count(MIN_ENTRY_BYTES)? {
            let bytes = reader.count(1)?;
            let Ok(key) = std::str::from_utf8(reader.take(bytes)?) else {
                return Err(reader.invalid("key is not UTF-8"));
            };
            if entries.last().is_some_and(|before| before.key.as_str() >= key) {
                return Err(reader.invalid("keys are not in ascending order"));
            }
            let bytes = reader.count(1)?;
            let value = reader.take(bytes)?.to_vec();
            entries.push(CatalogEntry { key: key.to_owned(), value, modified: reader.varint()? });
        }
        reader.end()?;
        Ok(StoredCatalog { number, node, entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Problem;
    use crate::codec::CRC_BYTES;
    use crate::codec::testing::{assert_rejects_damage, with_valid_checksum};
    use proptest::prelude::*;

    fn entry(key: &str, value: &[u8], modified: u64) -> CatalogEntry {
        CatalogEntry { key: key.to_owned(), value: value.to_vec(), modified }
    }

    fn example() -> StoredCatalog {
        let entries = vec![entry("counter/partition", b"{}", 300), entry("tenant/h\u{e9}ron", b"", 1)];
        StoredCatalog { number: 12, node: 7 << 100, entries }
    }

    #[test]
    fn catalog_round_trips_and_damage_is_rejected() {
        let bytes = example().encode();
        assert_eq!(StoredCatalog::decode(&bytes), Ok(example()));
        assert_rejects_damage(&bytes, StoredCatalog::decode);
    }

    #[test]
    fn unsorted_or_duplicate_keys_are_rejected() {
        for keys in [["b", "a"], ["a", "a"]] {
            let entries = keys.map(|key| entry(key, b"x", 1)).to_vec();
            let error = StoredCatalog::decode(&StoredCatalog { entries, ..example() }.encode()).unwrap_err();
            assert_eq!(error.problem, Problem::Invalid("keys are not in ascending order"));
        }
    }

    proptest! {
        #[test]
        fn changed_byte_is_rejected_or_round_trips(at: prop::sample::Index, value: u8) {
            let mut bytes = example().encode();
            let at = at.index(bytes.len() - CRC_BYTES);
            bytes[at] = value;
            let bytes = with_valid_checksum(bytes);
            if let Ok(decoded) = StoredCatalog::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}
