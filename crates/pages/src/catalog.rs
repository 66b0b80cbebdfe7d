//! The catalog as it stands in the store: all keys of the metadata store with their values, whole.
//!
//! ```text
//!   number 12, of node 8c1f...
//!     counter/partition -> {"v":1,"next":66}     put by revision 3
//!     tenant/shop       -> {"v":1, ...}          put by revision 17
//! ```
//!
//! What keys and values mean is the metadata store's own matter; here they are text and bytes, in order of their keys.

use crate::FormatError;
use crate::codec::{self, Envelope};

/// The format version that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;

const ENVELOPE: Envelope = Envelope {
    format: "catalog",
    magic: b"FULMCATA",
    foreign: "this is not a catalog (wrong first bytes)",
    version: FORMAT_VERSION,
};

/// Bytes that an entry takes at least.
const LEAST_ENTRY_BYTES: usize = 3;

/// A catalog.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredCatalog {
    /// Counts the catalogs of a store: the greatest is the newest.
    pub number: u64,
    /// Whose it is; names the node's log in the store, too.
    pub node: u128,
    /// In order of their keys, none of which comes twice.
    pub entries: Vec<CatalogEntry>,
}

/// A key with its value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CatalogEntry {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Vec<u8>,
    /// The revision of the metadata store that has put it.
    pub modified: u64,
}

impl StoredCatalog {
    /// The catalog's bytes.
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
        // Not as many as it says at once: an entry takes more here than there.
        let mut entries: Vec<CatalogEntry> = Vec::new();
        for _ in 0..reader.count(LEAST_ENTRY_BYTES)? {
            let bytes = reader.count(1)?;
            let Ok(key) = std::str::from_utf8(reader.take(bytes)?) else {
                return Err(reader.invalid("a key is not UTF-8"));
            };
            if entries.last().is_some_and(|before| before.key.as_str() >= key) {
                return Err(reader.invalid("keys are not in order"));
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
    use crate::codec::testing::{nothing_else_is_read, resigned};
    use proptest::prelude::*;

    fn entry(key: &str, value: &[u8], modified: u64) -> CatalogEntry {
        CatalogEntry { key: key.to_owned(), value: value.to_vec(), modified }
    }

    fn example() -> StoredCatalog {
        let entries = vec![entry("counter/partition", b"{}", 300), entry("tenant/h\u{e9}ron", b"", 1)];
        StoredCatalog { number: 12, node: 7 << 100, entries }
    }

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let bytes = example().encode();
        assert_eq!(StoredCatalog::decode(&bytes), Ok(example()));
        nothing_else_is_read(&bytes, StoredCatalog::decode);
    }

    #[test]
    fn keys_are_in_order_and_come_once() {
        for keys in [["b", "a"], ["a", "a"]] {
            let entries = keys.map(|key| entry(key, b"x", 1)).to_vec();
            let error = StoredCatalog::decode(&StoredCatalog { entries, ..example() }.encode()).unwrap_err();
            assert_eq!(error.problem, Problem::Invalid("keys are not in order"));
        }
    }

    proptest! {
        #[test]
        fn changed_bytes_are_rejected_or_decode_to_what_they_encode(at: prop::sample::Index, value: u8) {
            let mut bytes = example().encode();
            let at = at.index(bytes.len() - CRC_BYTES);
            bytes[at] = value;
            let bytes = resigned(bytes);
            if let Ok(decoded) = StoredCatalog::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}
