//! Sessions in a cluster: the client is connected to one node, its session runs at the node that owns
//! its partition.
//!
//! ```text
//!  client <--> front (journal) <--pipe--> pump <--stream--> pump <--pipe--> session --> engine
//!             any node                                                owner of the partition
//! ```
//!
//! After authentication a connection becomes a *front* ([`front`]): it passes the client's messages
//! to an ordinary session and the answers back, and keeps a *journal* ([`journal`]) of what is
//! needed to continue with another session: the parameters, the prepared statements, the messages of
//! the open transaction, and the messages that have no complete answer. If the owner is this node,
//! front and session are connected by a pipe; otherwise by a stream of the transport ([`pump`]).
//!
//! | module | contents |
//! | --- | --- |
//! | [`front`], [`connect`] | the client's side: messages, connecting |
//! | [`resume`], [`settle`] | continuing with another session; outcomes of transactions |
//! | [`journal`], [`unit`], [`statements`] | what is repeated, and the comparison of answers |
//! | [`charge`] | the memory of a front |
//! | [`control`] | transaction control in the text of statements |
//! | [`tables`] | temporary tables |
//! | [`owner`] | the session's side |
//! | [`message`], [`scanner`], [`pump`] | messages between the nodes, and within bytes; streams |
//!
//! # When the owner changes
//!
//! The front continues with a session at the new owner, which it waits for up to 30 s, or until the
//! client disconnects or cancels its statement, or the node stops:
//!
//! - The session reported that the partition has moved: its unfinished statements had no effect. The
//!   front repeats the open transaction and the unanswered messages.
//! - The connection broke: the front first asks for the outcome of the transaction of each
//!   unanswered unit. A commit is answered, and so is an autocommitted statement: its session has
//!   sent the answer before it waited until the transaction was durable. Others that were committed
//!   get 08007, because their answer is lost. The question decides transactions that were not
//!   committed: they can no longer be committed, and are repeated, with a new id.
//!
//! Answers to repeated messages are compared with what the client has received. If they differ, the
//! transaction fails with 40001, as it does if it is too long to be repeated. They do not differ
//! because of data: the session repeats the transaction at the snapshot that it had under its first
//! id ([`message::REPEATED`]), if the partition has that, until all answers have been compared
//! ([`message::REPETITION_ENDED`]). The client's session otherwise continues normally. Temporary
//! tables follow it ([`tables`]). Lost are advisory locks of the session, and portals of earlier
//! transactions.
//!
//! # Nothing is done twice
//!
//! A message is sent again in two cases only. (1) Its session reported that it had no effect. The
//! session does so for a statement that failed with PARTITION_MOVED, which the engine guarantees
//! to have had no durable effect, and at a shutdown between two messages. If a transaction has ended
//! earlier in the same unit, also by a COMMIT among its statements, the session reports that too, and
//! the client gets 08007. (2) The cluster has decided that the unit's transaction is aborted. A unit
//! has one transaction, whose id the front has chosen, unless its text may contain the end of one
//! before other statements, or the begin of one after them ([`control`]): such a unit is never
//! repeated after a broken connection (08007). A unit within a transaction is repeated together with
//! it, and never without it: the new session starts with the first message of the transaction, and
//! if the transaction is committed, all units up to its end were executed.
//!
//! One ReadyForQuery answers a unit, so the number of answers must not depend on errors: a Query
//! after extended messages without Sync is refused.

mod charge;
mod connect;
mod control;
mod front;
mod journal;
pub(crate) mod message;
mod owner;
mod pump;
mod resume;
mod scanner;
mod settle;
mod statements;
mod tables;
#[cfg(test)]
mod tests;
mod unit;
mod waits;

use std::sync::Arc;

use fulmar_transport::Stream;
use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

pub(crate) use connect::{Unavailable, open_front, send_cancel};
pub(crate) use front::Front;
pub(crate) use message::SessionHello;
pub(crate) use owner::start;
pub(crate) use waits::WaitRegistry;

use crate::startup;
use message::Hello;

/// Receives the first message of a stream from another node. Returns the session that it starts.
pub(crate) async fn accept(
    stream: Stream,
    context: &startup::Context,
) -> Option<(SessionHello, DuplexStream)> {
    let (mut near, far) = duplex(pump::PIPE_BYTES);
    tokio::task::spawn_local(pump::pump(stream, far));
    match owner::hello(&mut near).await? {
        Hello::Session(hello) => Some((*hello, near)),
        Hello::Cancel { pid, secret } => {
            context.registry.cancel(pid, secret);
            let _ = near.shutdown().await; // the other side may have stopped waiting
            None
        }
    }
}

/// Passes a cancel request of a client to the node that the client is connected to.
pub(crate) fn cancel(context: &Arc<startup::Context>, pid: i32, secret: i32) {
    match context.registry.other_node(pid) {
        Some(node) => send_cancel(context.clone(), node, pid, secret),
        None => context.registry.cancel(pid, secret),
    }
}
