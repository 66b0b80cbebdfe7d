//! PostgreSQL's wire protocol 3.0, as a server speaks it: messages, types, COPY formats,
//! authentication and the connection. Nothing here knows a session, a tenant or a statement's
//! execution.
//!
//! ```text
//!              bytes                    messages                  values
//! client <---> wire (TCP or TLS) <---> protocol::frontend <---> types::decode <---> the caller
//!              buffers, polling        protocol::backend        types::encode
//!                                      auth (SCRAM)             copy::read, copy::write
//! ```
//!
//! | module | contents |
//! | --- | --- |
//! | [`wire`] | a connection with or without TLS; pooled buffers; adaptive busy-polling |
//! | [`protocol`] | framing; parsing of client messages in place; writing of responses |
//! | [`types`] | types of columns and parameters; text and binary formats of their values |
//! | [`copy`] | the text and CSV formats of COPY, as readers and writers of lines |
//! | [`auth`] | SCRAM-SHA-256, the server's side |
//!
//! # Values
//!
//! The protocol has typed columns, SQLite has typed values. [`types`] decides how a column is
//! described and how each value of it is sent, from the declared type that SQLite stores as text.
//! A value is encoded from a borrowed [`fulmar_sqlite::ValueRef`] directly into the send buffer,
//! and a parameter is decoded from the receive buffer. For example, a point read that returns one
//! 4-byte integer in binary format writes 15 bytes of DataRow and allocates nothing.
//!
//! # Memory and time
//!
//! Clients are not trusted. Every decoder is bounded by the length of its input, which is at most
//! [`protocol::MAX_MESSAGE_BYTES`], and reports malformed input as an error: nothing panics. Memory
//! that depends on the input (names, parameters, rows) is counted by the caller. The decoders are
//! fuzzed: the targets are the tests named `fuzz_...`.
//!
//! Buffers belong to a thread and not to a connection ([`wire`]), so an idle connection holds none.
//! [`wire::Wire`] waits for a client and for requests to end the connection at the same time. The
//! owner of the connection makes those requests through [`wire::Interrupts`].
//!
//! # Why not the crate `pgwire`
//!
//! Messages that occur once per connection (startup, authentication, cancel keys) use the types of
//! the crate `pgwire`. The messages of each statement are parsed in place and written directly,
//! because that crate copies the names, parameters and rows of each message.

pub mod auth;
mod busy_poll;
pub mod copy;
pub mod protocol;
pub mod types;
pub mod wire;

/// The result of most functions. Unless stated otherwise, the error is reported to the client.
pub type Result<T, E = fulmar_sqlite::Error> = std::result::Result<T, E>;

/// The emulated PostgreSQL version, followed by the Fulmar version. Drivers parse the leading
/// number.
pub const SERVER_VERSION: &str = concat!("15.0 (Fulmar ", env!("CARGO_PKG_VERSION"), ")");
/// The emulated PostgreSQL version, in the format of `server_version_num`.
pub const SERVER_VERSION_NUMBER: &str = "150000";

/// The result of `version()`.
pub fn version_text() -> String {
    format!("PostgreSQL {SERVER_VERSION}, SQLite SQL dialect")
}
