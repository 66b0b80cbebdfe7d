//! The Postgres wire protocol 3.0, as far as a session needs it at speed.
//!
//! A message is a byte that says its kind, a length in bytes that counts itself but not the kind, and a body:
//!
//! ```text
//! 'E' 00 00 00 09  00  00 00 00 00        Execute: the unnamed portal, no row limit
//!  |   `- 9 bytes   |   `- rows at most
//!  kind             `- name, ended by a zero byte
//! ```
//!
//! [`frontend`] reads what clients send, straight from the receive buffer and without copying a name or a
//! parameter; [`backend`] writes answers straight into the send buffer. What happens once per connection
//! (start-up packet, authentication, cancel keys) uses the types of the crate `pgwire` instead.

pub(crate) mod backend;
pub(crate) mod frontend;

use smallvec::SmallVec;

/// How a value travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    Binary,
}

/// The formats of a statement's parameters or columns: one for all, or one each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Formats {
    All(Format),
    Each(SmallVec<[Format; 16]>),
}

impl Formats {
    /// The format of the item at `index`; `None` if the client gave too few.
    pub(crate) fn get(&self, index: usize) -> Option<Format> {
        match self {
            Formats::All(format) => Some(*format),
            Formats::Each(formats) => formats.get(index).copied(),
        }
    }

    /// Memory of the list outside of this value.
    pub(crate) fn heap_bytes(&self) -> usize {
        match self {
            Formats::Each(formats) if formats.spilled() => formats.capacity() * size_of::<Format>(),
            _ => 0,
        }
    }

    /// Whether the client's list fits `count` items.
    pub(crate) fn fits(&self, count: usize) -> bool {
        match self {
            Formats::All(_) => true,
            Formats::Each(formats) => formats.len() == count,
        }
    }
}
