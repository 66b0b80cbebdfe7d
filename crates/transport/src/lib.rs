//! Connections between the nodes of a cluster: streams of messages, multiplexed over one byte
//! stream.
//!
//! ```text
//!   caller          Stream: send, receive, finish     one per session or request
//!     |
//!   Connection      streams by number, one output buffer, flow control
//!     |
//!   frames          14-byte header and up to 64 KiB                        [`frame`]
//!     |
//!   byte stream     TCP, TLS ([`tls`]), or a pipe in a test
//! ```
//!
//! A node dials every node that it sends requests to ([`Peers`]), and only the dialing side opens
//! streams. There are therefore at most two connections between two nodes, one for each direction.
//!
//! # Guarantees
//! - **Order.** The messages of a stream arrive in order, each at most once. Streams are
//!   independent of each other.
//! - **Flow control.** A sender has at most [`WINDOW_BYTES`] per stream in flight, or
//!   [`MAX_WINDOW_BYTES`] if the receiver has widened its window ([`Stream::widen`]). A receiver that
//!   does not read stops the sender of its stream, and no other one. A receiver therefore buffers
//!   at most its window per stream, and at most [`MAX_STREAMS`] streams. A connection buffers
//!   about [`MAX_OUTPUT_BYTES`] that the peer has not taken yet; then its senders wait. Senders of
//!   bulk data wait from [`MAX_BULK_OUTPUT_BYTES`] on, so that heartbeats and statements are not
//!   queued behind megabytes of it when the network is slow.
//! - **Failure.** When a connection ends, all its streams end with an error. An error never states
//!   whether the peer has processed a message: the cluster's protocols settle that
//!   (`ask_outcome` in `docs/architecture/ownership.md`).
//! - **Identity.** Both sides state their cluster, node, incarnation and protocol versions before
//!   anything else ([`hello`]). A node of another cluster, another node than the expected one, or
//!   one without a common protocol version is refused.
//!
//! # Why not gRPC
//! A forwarded statement is one small message in each direction. HTTP/2 with protobuf costs several
//! times the CPU of the statement itself, and would be a second connection between the nodes, next to
//! the one for data. One transport carries both.
//!
//! The crate starts no task and reads no clock: the caller polls [`Driver::run`] and applies its
//! own timeouts. It therefore runs unchanged in a simulator.

mod connection;
mod error;
pub mod frame;
pub mod hello;
mod peers;
mod stream;
pub mod tls;

pub use connection::{Connection, Driver, Incoming, accept, connect};
pub use error::Error;
pub use hello::Identity;
pub use peers::{Dial, Peers};
pub use stream::{Receiver, Sender, Stream};

/// Bytes, including frame headers, that the sender of a stream may have in flight.
pub const WINDOW_BYTES: u32 = 64 << 10;

/// The same, for a stream whose receiver has widened its window.
pub const MAX_WINDOW_BYTES: u32 = 4 << 20;

/// Maximum number of concurrent streams per connection.
pub const MAX_STREAMS: usize = 65_536;

/// Bytes of a connection's output buffer from which on its senders wait.
pub const MAX_OUTPUT_BYTES: usize = 4 << 20;

/// The same for streams whose receiver has widened its window.
pub const MAX_BULK_OUTPUT_BYTES: usize = 256 << 10;

/// Maximum number of streams that the peer has opened and that were not accepted yet. Further ones
/// are reset.
pub const MAX_UNACCEPTED_STREAMS: usize = 1024;
