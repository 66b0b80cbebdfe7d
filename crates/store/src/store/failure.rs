//! Failures of store operations, classified by how to react to them.

use std::fmt;
use std::time::Duration;

/// Class of a failure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FailureKind {
    /// The object does not exist.
    Missing,
    /// An object with this name exists.
    Exists,
    /// The store rejects the operation permanently: wrong permissions, credentials, name or bucket.
    /// A retry would fail in the same way.
    Refused,
    /// The store could not perform the operation now; a retry may succeed. The outcome of a put is
    /// unknown.
    Unavailable,
    /// The operation exceeded its time limit. Otherwise as `Unavailable`.
    TimedOut,
    /// Any other failure, such as a full or broken disk. A retry would most likely fail in the same
    /// way.
    Other,
}

impl FailureKind {
    /// All kinds, in the order of [`FailureKind::index`].
    pub const ALL: [FailureKind; 6] = [
        FailureKind::Missing,
        FailureKind::Exists,
        FailureKind::Refused,
        FailureKind::Unavailable,
        FailureKind::TimedOut,
        FailureKind::Other,
    ];

    /// Label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            FailureKind::Missing => "missing",
            FailureKind::Exists => "exists",
            FailureKind::Refused => "refused",
            FailureKind::Unavailable => "unavailable",
            FailureKind::TimedOut => "timed_out",
            FailureKind::Other => "other",
        }
    }

    /// Returns true if a retry may succeed.
    pub fn is_transient(self) -> bool {
        matches!(self, FailureKind::Unavailable | FailureKind::TimedOut)
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// What an operator can do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            FailureKind::Missing | FailureKind::Exists => "check which other processes use the store",
            FailureKind::Refused => "check the store's URL, the credentials and their permissions",
            FailureKind::Unavailable | FailureKind::TimedOut => {
                "check that the store is running and can be reached from this machine"
            }
            FailureKind::Other => "check that the store is writable and has free space",
        }
    }
}

/// Failure of a store operation. It does not contain the object's name, which the caller knows.
#[derive(Debug, Clone)]
pub struct Failure {
    kind: FailureKind,
    cause: String,
}

impl Failure {
    /// Creates a failure with its cause.
    pub fn new(kind: FailureKind, cause: impl fmt::Display) -> Self {
        Failure { kind, cause: cause.to_string() }
    }

    /// Creates a failure with the messages of an error and its sources.
    pub(super) fn of(kind: FailureKind, error: &(dyn std::error::Error + 'static)) -> Self {
        let mut cause = error.to_string();
        let mut next = error.source();
        while let Some(error) = next {
            let text = error.to_string();
            // Many errors repeat the message of their source.
            if !cause.contains(&text) {
                cause = format!("{cause}: {text}");
            }
            next = error.source();
        }
        Failure { kind, cause }
    }

    pub(super) fn timed_out(limit: Duration) -> Self {
        Failure::new(FailureKind::TimedOut, format!("no response within {limit:?}"))
    }

    /// Class of the failure.
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// Appends a detail to the message.
    pub(super) fn with_detail(self, detail: impl fmt::Display) -> Self {
        Failure { cause: format!("{}; {detail}", self.cause), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)
    }
}

impl std::error::Error for Failure {}
