//! What a front and the node that runs its session exchange.
//!
//! Both directions carry the client protocol's messages. Messages of the kinds below are between
//! the nodes, have the same format (kind, length, body), and never reach the client or come from
//! it. They are in the stream at the place where they apply.

use std::net::IpAddr;

use fulmar_meta::{ScramVerifier, User};
use serde::{Deserialize, Serialize};

/// The first message to a node: [`Hello`].
pub(crate) const HELLO: u8 = 0x10;
/// To the session: the id of its next transaction (8 bytes), if none is open.
pub(crate) const TRANSACTION: u8 = 0x11;
/// To the session: it is in a failed transaction, because the client's transaction could not be
/// repeated.
pub(crate) const FAILED: u8 = 0x12;
/// To the session: the transaction of [`FAILED`] has ended. The front has answered its COMMIT.
pub(crate) const FAILED_ENDED: u8 = 0x16;
/// To the session, after [`TRANSACTION`]: that transaction repeats one that has begun under this id
/// (8 bytes), and whose answers the client has got.
pub(crate) const REPEATED: u8 = 0x13;
/// To the session, after [`TRANSACTION`]: that transaction was sent before under this id (8 bytes),
/// and the client has no answer.
pub(crate) const ABANDONED: u8 = 0x15;
/// To the session: the answers that the client has got are the same again.
pub(crate) const REPETITION_ENDED: u8 = 0x14;
/// To the session, before all others: a piece of a copy of the temporary tables of the session
/// before.
pub(crate) const TABLES: u8 = 0x17;
/// To the session: the copy of the temporary tables is complete. It answers with [`TABLES_DONE`].
pub(crate) const TABLES_END: u8 = 0x18;
/// From the session: it serves the front.
pub(crate) const ACCEPTED: u8 = 0x01;
/// From the session: another node owns the partition now. The statements since the last
/// ReadyForQuery have had no effect (body 0), or some of them were committed (body 1).
pub(crate) const MOVED: u8 = 0x02;
/// From the session: the parameters have changed. The body is a list of names and values in JSON.
pub(crate) const SETTINGS: u8 = 0x03;
/// From the session: the statement with this name was closed by DEALLOCATE; all of them if the name
/// is empty.
pub(crate) const DEALLOCATED: u8 = 0x04;
/// From the session: it has ended, and its last message was for the client.
pub(crate) const END: u8 = 0x05;

/// From the session: an autocommitted statement is committed, but not durable yet. The body is the
/// rest of the answer to its unit, without ReadyForQuery. The front uses it if the session is lost
/// and the transaction turns out to be durable.
pub(crate) const COMMITTED: u8 = 0x06;

/// From the session: the parameters after a COMMIT of the open transaction, which has changed them.
/// The body is as in [`SETTINGS`]. The front uses them if the COMMIT's answer is lost.
pub(crate) const PENDING_SETTINGS: u8 = 0x07;

/// From the session: it has temporary tables (body 1), or none any more (body 0).
pub(crate) const HAS_TABLES: u8 = 0x08;
/// From the session, when it has ended and the front sends nothing more: a piece of a copy of its
/// temporary tables.
pub(crate) const TABLES_COPY: u8 = 0x09;
/// From the session: the copy of its temporary tables, or the loading of a copy, is complete (body
/// 1) or has failed (body 0).
pub(crate) const TABLES_DONE: u8 = 0x0a;

/// Maximum size of a piece of a copy of temporary tables. Small enough to be received without a
/// charge.
pub(crate) const TABLES_PIECE_BYTES: usize = 8 << 10;
/// Maximum size of an answer in [`COMMITTED`].
pub(crate) const MAX_COMMITTED_BYTES: usize = 64 << 10;
/// Maximum size of a [`Hello`].
pub(crate) const MAX_HELLO_BYTES: usize = 2 << 20;

/// The greatest kind of messages between nodes. The kinds of the client protocol are letters and
/// digits.
const LAST_KIND: u8 = 0x1f;

/// Returns true if messages of this kind are between nodes.
pub(crate) fn is_internal(kind: u8) -> bool {
    kind <= LAST_KIND
}

/// Writes a message.
pub(crate) fn put(out: &mut Vec<u8>, kind: u8, body: &[u8]) {
    out.push(kind);
    out.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
    out.extend_from_slice(body);
}

/// The first message of a stream.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Hello {
    /// Cancels the statement of the session with this key.
    Cancel {
        /// The process id.
        pid: i32,
        /// The secret.
        secret: i32,
    },
    /// Starts a session.
    Session(Box<SessionHello>),
}

/// Names and values of parameters.
pub(crate) type Values = Vec<(String, String)>;

/// Identifies the password of an account. A changed password has another one.
pub(crate) fn fingerprint(account: &User) -> Option<u64> {
    account.verifier.as_ref().map(ScramVerifier::fingerprint)
}

/// Describes a session, for the node that runs it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SessionHello {
    /// The partition.
    pub(crate) partition: u64,
    /// The user.
    pub(crate) user: String,
    /// False if the node of the front has no authentication: the user may have no account.
    pub(crate) authenticated: bool,
    /// The password that the client authenticated with ([`fingerprint`]).
    pub(crate) password: Option<u64>,
    /// The client's address.
    pub(crate) address: Option<IpAddr>,
    /// The front's process id, which is the session's.
    pub(crate) pid: i32,
    /// The secret for cancel requests.
    pub(crate) secret: i32,
    /// The parameters that the client set when it connected.
    pub(crate) defaults: Values,
    /// The parameters now.
    pub(crate) values: Values,
    /// The address of the owner, unless the client is connected to it.
    pub(crate) owner: String,
}
