//! The names of a node's log objects.

use std::fmt;

/// The name of an object in a node's logs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub(super) struct Slot {
    /// Which of the node's logs.
    pub(super) incarnation: u64,
    /// Which object of the log.
    pub(super) sequence: u64,
}

impl Slot {
    pub(super) fn next(self) -> Slot {
        Slot { sequence: self.sequence + 1, ..self }
    }

    /// The slot before this one, whether or not it can have an object.
    pub(super) fn before(self) -> Option<Slot> {
        match (self.incarnation.checked_sub(1), self.sequence.checked_sub(1)) {
            (_, Some(sequence)) => Some(Slot { sequence, ..self }),
            (Some(incarnation), None) => Some(Slot { incarnation, sequence: u64::MAX }),
            (None, None) => None,
        }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}/{:016x}", self.incarnation, self.sequence)
    }
}
