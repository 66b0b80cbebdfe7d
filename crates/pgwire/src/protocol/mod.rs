//! The PostgreSQL wire protocol 3.0: the messages of an established session.
//!
//! A message consists of a kind byte, a length in bytes (which includes itself but not the kind),
//! and a body:
//!
//! ```text
//! 'E' 00 00 00 09  00  00 00 00 00        Execute: the unnamed portal, no row limit
//!  |   `- 9 bytes   |   `- maximum number of rows
//!  kind             `- name, terminated by a zero byte
//! ```
//!
//! [`frontend`] parses client messages in place in the receive buffer, without copying names or
//! parameters. [`backend`] writes responses directly to the send buffer. Messages that occur once
//! per connection (startup packet, authentication, cancel keys) use the types of the crate `pgwire`
//! instead.

pub mod backend;
pub mod frontend;

use smallvec::SmallVec;

/// Maximum size of a message. A message must fit in memory; a client that sends a larger one is
/// disconnected.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;

/// The encoding of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// PostgreSQL's text format.
    Text,
    /// PostgreSQL's binary format.
    Binary,
}

/// The formats of a statement's parameters or columns: one for all, or one for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Formats {
    /// One format for all.
    All(Format),
    /// A format for each, in order.
    Each(SmallVec<[Format; 16]>),
}

impl Formats {
    /// The format of the item at `index`. `None` if the client sent too few.
    pub fn get(&self, index: usize) -> Option<Format> {
        match self {
            Formats::All(format) => Some(*format),
            Formats::Each(formats) => formats.get(index).copied(),
        }
    }

    /// Heap memory of the list, in bytes.
    pub fn heap_bytes(&self) -> usize {
        match self {
            Formats::Each(formats) if formats.spilled() => formats.capacity() * size_of::<Format>(),
            _ => 0,
        }
    }

    /// Returns true if the client's list matches `count` items.
    pub fn fits(&self, count: usize) -> bool {
        match self {
            Formats::All(_) => true,
            Formats::Each(formats) => formats.len() == count,
        }
    }
}
