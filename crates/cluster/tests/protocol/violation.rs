//! Violations of the protocol that a run can show.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An acknowledged commit is not in the final contents.
    Lost,
    /// A commit is in the contents twice.
    Duplicated,
    /// A commit precedes one that was known before it began.
    Reordered,
    /// A read returned contents that the partition never had.
    Forked,
    /// A read returned less than was known before it began.
    StaleRead,
    /// An object of a log that recovery needs is missing.
    MissingLog,
    /// A version does not follow the one before.
    VersionGap,
    /// An incarnation opened an epoch of a partition twice.
    OpenedTwice,
    /// A partition has no owner that answers, although all faults have ended.
    NoOwner,
    /// A segment that a needed manifest names is missing.
    MissingSegment,
    /// A manifest that recovery needs was deleted, or one within the retention.
    MissingManifest,
    /// An object that a living incarnation holds was deleted.
    MissingHeld,
    /// Pages of a private partition are missing at their owner.
    MissingPages,
    /// A transaction killed more than two nodes.
    KilledAgain,
    /// A quarantined partition killed a node.
    QuarantineIgnored,
    /// A partition is quarantined although it did not kill two nodes.
    WronglyQuarantined,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub kind: Kind,
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.text)
    }
}
