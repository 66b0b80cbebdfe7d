//! The handoff of sessions between workers.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::outcome::End;
use super::state::Session;
use crate::crew::Crew;
use crate::crowd::Place;
use crate::registry::Entry;

/// An entry of a worker's queue.
pub(crate) enum Arrival {
    /// An accepted connection, and its connection slot.
    Client(std::net::TcpStream, Place),
    /// A session that migrates from another worker.
    Session(Box<Traveller>),
    /// A health check, to be answered.
    Ping(oneshot::Sender<()>),
}

/// A session that migrates between workers, with its socket.
pub(crate) struct Traveller {
    pub(crate) session: Session,
    pub(crate) stream: std::net::TcpStream,
    pub(crate) entry: Entry,
}

/// Why a session leaves its worker.
pub(crate) enum Leave {
    Ends(End),
    /// The session migrates to another worker, where a queue slot is reserved.
    Moves(mpsc::OwnedPermit<Arrival>),
}

/// A worker's place among all workers, as its sessions see it.
pub(crate) struct Post {
    pub(crate) number: usize,
    pub(crate) crew: Arc<Crew>,
    /// The queues of all workers.
    pub(crate) queues: Arc<[mpsc::Sender<Arrival>]>,
}

impl Post {
    /// Reserves a queue slot at the worker where the session should run. `None` if it already runs
    /// there, or if that worker's queue is full.
    pub(crate) fn elsewhere(&self, session: i32) -> Option<mpsc::OwnedPermit<Arrival>> {
        let home = self.crew.home(session);
        if home == self.number {
            return None;
        }
        self.queues.get(home)?.clone().try_reserve_owned().ok()
    }
}
