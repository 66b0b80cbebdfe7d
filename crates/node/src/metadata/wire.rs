//! The messages of a remote metadata store: JSON. Values are text with the prefix `=`, or hexadecimal
//! digits with the prefix `#` if they are not UTF-8.

use fulmar_meta::{Change, Compare, Entry, MetaError, Operation, Outcome, Revision, Transaction};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum length of a message. The largest transaction, of up to 1.3 MiB, can become six times
/// longer in JSON.
pub(super) const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// The remedy of errors that the serving node has reported.
const REMEDY: &str = "Check the node that runs with --meta embedded. The reason is in its log.";

/// A request. Follows the opening of its stream.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum Request {
    Get {
        key: String,
    },
    Scan {
        prefix: String,
    },
    Transact {
        compares: Vec<WireCompare>,
        operations: Vec<WireOperation>,
    },
    /// Answered by a snapshot and then by changes, until the stream ends.
    Follow,
}

/// An answer, or a part of it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// A part of a scan or of a snapshot.
    Entries(Vec<WireEntry>),
    /// The end of it. The revision is that of a snapshot.
    End {
        revision: u64,
    },
    Committed {
        revision: u64,
    },
    Conflict {
        revision: u64,
    },
    Changes {
        revision: u64,
        changes: Vec<WireOperation>,
    },
    Error {
        kind: ErrorKind,
        cause: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ErrorKind {
    Unavailable,
    OutcomeUnknown,
    OutOfSpace,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireEntry {
    key: String,
    value: Value,
    modified: u64,
}

/// A compare: with the revision that put the value, or without one if the key must be absent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireCompare {
    key: String,
    revision: Option<u64>,
}

/// A put, or a deletion without a value.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WireOperation {
    key: String,
    value: Option<Value>,
}

#[derive(Debug)]
struct Value(Vec<u8>);

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = match std::str::from_utf8(&self.0) {
            Ok(text) => format!("={text}"),
            Err(_) => self.0.iter().fold("#".to_owned(), |text, byte| text + &format!("{byte:02x}")),
        };
        serializer.serialize_str(&text)
    }
}

impl<'a> Deserialize<'a> for Value {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let invalid = || serde::de::Error::custom("invalid value");
        if let Some(text) = text.strip_prefix('=') {
            return Ok(Value(text.as_bytes().to_vec()));
        }
        let digits = text.strip_prefix('#').filter(|digits| digits.len().is_multiple_of(2));
        let bytes = digits.ok_or_else(invalid)?.as_bytes().chunks(2).map(|pair| {
            let pair = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(pair, 16).ok()
        });
        bytes.collect::<Option<_>>().map(Value).ok_or_else(invalid)
    }
}

impl From<Entry> for WireEntry {
    fn from(entry: Entry) -> Self {
        WireEntry { key: entry.key, value: Value(entry.value), modified: entry.modified.0 }
    }
}

impl From<WireEntry> for Entry {
    fn from(entry: WireEntry) -> Self {
        Entry { key: entry.key, value: entry.value.0, modified: Revision(entry.modified) }
    }
}

impl WireEntry {
    /// The approximate length of the entry in a message.
    pub(super) fn bytes(&self) -> usize {
        self.key.len() + self.value.0.len()
    }
}

impl From<Change> for WireOperation {
    fn from(change: Change) -> Self {
        WireOperation { key: change.key, value: change.value.map(Value) }
    }
}

/// The changes of one revision.
pub(super) fn changes(changes: Vec<WireOperation>, revision: u64) -> Vec<Change> {
    let changes = changes.into_iter();
    changes
        .map(|change| Change {
            key: change.key,
            value: change.value.map(|value| value.0),
            revision: Revision(revision),
        })
        .collect()
}

/// The request for a transaction.
pub(super) fn request(transaction: Transaction) -> Request {
    let compares = transaction.compares.into_iter().map(|compare| match compare {
        Compare::Absent(key) => WireCompare { key, revision: None },
        Compare::Unchanged(key, revision) => WireCompare { key, revision: Some(revision.0) },
    });
    let operations = transaction.operations.into_iter().map(|operation| match operation {
        Operation::Put(key, value) => WireOperation { key, value: Some(Value(value)) },
        Operation::Delete(key) => WireOperation { key, value: None },
    });
    Request::Transact { compares: compares.collect(), operations: operations.collect() }
}

/// The transaction of a request.
pub(super) fn transaction(compares: Vec<WireCompare>, operations: Vec<WireOperation>) -> Transaction {
    let compares = compares.into_iter().map(|compare| match compare.revision {
        None => Compare::Absent(compare.key),
        Some(revision) => Compare::Unchanged(compare.key, Revision(revision)),
    });
    let operations = operations.into_iter().map(|operation| match operation.value {
        Some(value) => Operation::Put(operation.key, value.0),
        None => Operation::Delete(operation.key),
    });
    Transaction { compares: compares.collect(), operations: operations.collect() }
}

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Committed(Revision(revision)) => Answer::Committed { revision },
            Outcome::Conflict(Revision(revision)) => Answer::Conflict { revision },
        }
    }
}

impl From<MetaError> for Answer {
    fn from(error: MetaError) -> Self {
        let (kind, cause) = match error {
            MetaError::Unavailable { cause, .. } => (ErrorKind::Unavailable, cause),
            MetaError::OutcomeUnknown { cause, .. } => (ErrorKind::OutcomeUnknown, cause),
            MetaError::OutOfSpace { cause, .. } => (ErrorKind::OutOfSpace, cause),
            // The embedded store has no others that are not reported at its start.
            error => (ErrorKind::Unavailable, format!("has failed: {error}")),
        };
        Answer::Error { kind, cause }
    }
}

/// The error that the serving node has reported.
pub(super) fn error(kind: ErrorKind, cause: String) -> MetaError {
    let remedy = REMEDY;
    match kind {
        ErrorKind::Unavailable => MetaError::Unavailable { cause, remedy },
        ErrorKind::OutcomeUnknown => MetaError::OutcomeUnknown { cause, remedy },
        ErrorKind::OutOfSpace => MetaError::OutOfSpace { cause, remedy },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::{decode, encode};

    #[test]
    fn all_values_are_received_as_sent() {
        for value in [&b""[..], b"=", b"#", b"{\"v\":1}", &[0, 255, 128], "\u{1f600}".as_bytes()] {
            let entry = Entry { key: "k".into(), value: value.to_vec(), modified: Revision(7) };
            let sent = encode(&Answer::Entries(vec![entry.clone().into()]));
            let Ok(Answer::Entries(mut received)) = decode::<Answer>(&sent) else { panic!("{sent:?}") };
            assert_eq!(Entry::from(received.remove(0)), entry);
        }
        for invalid in ["", "x", "#1", "#zz"] {
            let text = format!(r#"{{"entries":[{{"key":"k","value":"{invalid}","modified":1}}]}}"#);
            assert!(decode::<Answer>(text.as_bytes()).is_err(), "{invalid}");
        }
    }

    #[test]
    fn transactions_are_received_as_sent() {
        let sent = Transaction::new().absent("a").unchanged("b", Revision(3)).put("c", "1").delete("d");
        let Request::Transact { compares, operations } = request(sent.clone()) else {
            panic!("no transaction")
        };
        assert_eq!(transaction(compares, operations), sent);
    }
}
