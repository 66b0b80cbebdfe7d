//! The keys of one cluster in etcd, and the conversion of transactions.
//!
//! ```text
//! /fulmar/NAME/cluster     {"v":1,"id":"..."}   the cluster id, 32 hexadecimal digits
//! /fulmar/NAME/head        {"v":1}              put by every transaction that has operations
//! /fulmar/NAME/data/KEY    the entries of the store
//! ```

use etcd_client::{
    Compare as EtcdCompare, CompareOp, GetOptions, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse,
};

use crate::{Compare, Entry, MetaError, Operation, Revision, Transaction};

const ROOT: &str = "/fulmar/";
const MAX_NAME_BYTES: usize = 63;
const HEAD_VALUE: &str = r#"{"v":1}"#;

/// The head of a cluster: its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// The revision of the last transaction that had operations.
    pub(super) revision: i64,
    /// The number of these transactions. It grows by one with each, so an observer that misses one
    /// detects the gap.
    pub(super) version: i64,
}

impl Head {
    pub(super) fn of(kv: &KeyValue) -> Self {
        Self { revision: kv.mod_revision(), version: kv.version() }
    }
}

/// The keys of a cluster.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    /// The prefix of all keys.
    pub(super) root: String,
    pub(super) cluster: String,
    pub(super) head: String,
    /// The prefix of the entries.
    data: String,
}

impl Keys {
    pub(super) fn new(cluster: &str) -> Result<Self, MetaError> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if cluster.is_empty() || cluster.len() > MAX_NAME_BYTES || !cluster.chars().all(allowed) {
            return Err(MetaError::Unavailable {
                cause: format!("does not accept the cluster name \"{}\"", cluster.escape_debug()),
                remedy: "Choose a name of 1 to 63 characters: a-z, 0-9, hyphen and underscore.",
            });
        }
        let root = format!("{ROOT}{cluster}/");
        let key = |name: &str| format!("{root}{name}");
        Ok(Self { cluster: key("cluster"), head: key("head"), data: key("data/"), root })
    }

    /// The etcd key of an entry, and the etcd prefix of a prefix.
    pub(super) fn of(&self, key: &str) -> String {
        format!("{}{key}", self.data)
    }

    /// The key of an entry, given its etcd key. `None` for keys outside of the data and for keys
    /// that are not text, which Fulmar does not write.
    pub(super) fn parse<'a>(&self, key: &'a [u8]) -> Option<&'a str> {
        std::str::from_utf8(key).ok()?.strip_prefix(&self.data)
    }

    pub(super) fn entry(&self, kv: KeyValue) -> Option<Entry> {
        let key = self.parse(kv.key())?.to_owned();
        let modified = revision(kv.mod_revision());
        Some(Entry { key, value: kv.into_key_value().1, modified })
    }

    /// The read of the head that is part of every request. It also makes a transaction without
    /// operations linearizable: etcd serves a transaction that has no linearizable operation from
    /// the state of the member that it reaches, without asking the others.
    pub(super) fn read_head(&self) -> TxnOp {
        TxnOp::get(self.head.as_str(), Some(GetOptions::new().with_keys_only()))
    }

    /// Converts a transaction. It fails if the head is older than `floor`.
    pub(super) fn transaction(&self, transaction: &Transaction, floor: i64) -> Txn {
        let mut compares: Vec<EtcdCompare> =
            transaction.compares.iter().map(|compare| self.compare(compare)).collect();
        compares.push(EtcdCompare::mod_revision(self.head.as_str(), CompareOp::Greater, floor - 1));
        let mut operations: Vec<TxnOp> =
            transaction.operations.iter().map(|operation| self.operation(operation)).collect();
        operations.push(if operations.is_empty() {
            self.read_head()
        } else {
            TxnOp::put(self.head.as_str(), HEAD_VALUE, None)
        });
        Txn::new().when(compares).and_then(operations).or_else([self.read_head()])
    }

    /// Creates the records of a new cluster.
    pub(super) fn creation(&self, cluster_value: String) -> Txn {
        Txn::new().when([EtcdCompare::version(self.cluster.as_str(), CompareOp::Equal, 0)]).and_then([
            TxnOp::put(self.cluster.as_str(), cluster_value, None),
            TxnOp::put(self.head.as_str(), HEAD_VALUE, None),
        ])
    }

    fn compare(&self, compare: &Compare) -> EtcdCompare {
        match compare {
            Compare::Absent(key) => EtcdCompare::version(self.of(key), CompareOp::Equal, 0),
            // An absent key has revision 0 in etcd. It must not equal revision 0 of the caller.
            Compare::Unchanged(key, Revision(0)) => EtcdCompare::version(self.of(key), CompareOp::Less, 0),
            Compare::Unchanged(key, Revision(revision)) => {
                let revision = i64::try_from(*revision).unwrap_or(i64::MAX);
                EtcdCompare::mod_revision(self.of(key), CompareOp::Equal, revision)
            }
        }
    }

    fn operation(&self, operation: &Operation) -> TxnOp {
        match operation {
            Operation::Put(key, value) => TxnOp::put(self.of(key), value.as_slice(), None),
            Operation::Delete(key) => TxnOp::delete(self.of(key), None),
        }
    }
}

/// etcd's revisions are positive.
pub(super) fn revision(revision: i64) -> Revision {
    Revision(revision.unsigned_abs())
}

/// The end of the range of all keys with a prefix. The last byte of a text is never 255.
pub(super) fn range_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// The results of the reads of a transaction, in order.
pub(super) fn reads(response: &TxnResponse) -> impl Iterator<Item = etcd_client::GetResponse> {
    response.op_responses().into_iter().filter_map(|response| match response {
        TxnOpResponse::Get(get) => Some(get),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cluster_name_cannot_reach_another_clusters_keys() {
        for valid in ["a", "shop-1", "under_score", &"x".repeat(MAX_NAME_BYTES)] {
            assert_eq!(Keys::new(valid).unwrap().of("k"), format!("/fulmar/{valid}/data/k"));
        }
        for invalid in ["", "a/b", "..", "A", "é", "a b", &"x".repeat(MAX_NAME_BYTES + 1)] {
            assert!(Keys::new(invalid).is_err(), "{invalid:?} must be rejected");
        }
    }

    #[test]
    fn only_text_below_the_data_prefix_is_an_entry() {
        let keys = Keys::new("c").unwrap();
        assert_eq!(keys.parse(b"/fulmar/c/data/tenant/ada"), Some("tenant/ada"));
        assert_eq!(keys.parse(b"/fulmar/c/head"), None);
        assert_eq!(keys.parse(b"/fulmar/cc/data/x"), None);
        assert_eq!(keys.parse(b"/fulmar/c/data/\xff"), None);
    }

    #[test]
    fn range_ends_after_all_keys_with_the_prefix() {
        let end = range_end("p/");
        assert!("p/\u{10ffff}\u{10ffff}".as_bytes() < end.as_slice());
        assert_eq!(end, b"p0");
    }
}
