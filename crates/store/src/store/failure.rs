//! Why an operation of a store failed, as far as that matters for what to do next.

use std::fmt;
use std::time::Duration;

/// What to make of a failure.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FailureKind {
    /// There is no such object.
    Missing,
    /// There is one of that name.
    Exists,
    /// The store knows the operation and will not do it: rights, credentials, a name or a bucket that is wrong. The same
    /// again would end the same.
    Refused,
    /// The store could not do it now: it is worth trying again. Of a put nobody knows whether it was done.
    Unavailable,
    /// It took longer than it may: as `Unavailable`.
    TimedOut,
    /// Anything else; the same again would most likely end the same. A disk that is full or broken.
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

    /// As metrics call it.
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

    /// Whether trying again may help.
    pub fn is_transient(self) -> bool {
        matches!(self, FailureKind::Unavailable | FailureKind::TimedOut)
    }

    pub(super) fn index(self) -> usize {
        self as usize
    }

    /// What whoever runs the node can do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            FailureKind::Missing | FailureKind::Exists => "look up who else uses the store",
            FailureKind::Refused => "check the store's URL, the credentials and their rights",
            FailureKind::Unavailable | FailureKind::TimedOut => {
                "check that the store runs and can be reached from this machine"
            }
            FailureKind::Other => "check that the store may be written and has space",
        }
    }
}

/// A failure of a store's operation. It does not name the object: whoever asked for the operation knows that.
#[derive(Debug, Clone)]
pub struct Failure {
    kind: FailureKind,
    cause: String,
}

impl Failure {
    /// A failure with its cause.
    pub fn new(kind: FailureKind, cause: impl fmt::Display) -> Self {
        Failure { kind, cause: cause.to_string() }
    }

    /// A failure with what an error and those behind it say.
    pub(super) fn of(kind: FailureKind, error: &(dyn std::error::Error + 'static)) -> Self {
        let mut cause = error.to_string();
        let mut next = error.source();
        while let Some(error) = next {
            let text = error.to_string();
            // Many errors repeat what is behind them.
            if !cause.contains(&text) {
                cause = format!("{cause}: {text}");
            }
            next = error.source();
        }
        Failure { kind, cause }
    }

    pub(super) fn timed_out(limit: Duration) -> Self {
        Failure::new(FailureKind::TimedOut, format!("no answer within {limit:?}"))
    }

    /// What to make of it.
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// The same, with more said.
    pub(super) fn but(self, more: impl fmt::Display) -> Self {
        Failure { cause: format!("{}; {more}", self.cause), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)
    }
}

impl std::error::Error for Failure {}
