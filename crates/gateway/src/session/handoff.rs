//! The handoff of sessions between workers.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::outcome::End;
use super::state::Session;
use crate::connection_slots::ConnectionSlot;
use crate::registry::RegistryEntry;
use crate::worker_scaling::WorkerScaler;

/// An entry of a worker's queue.
pub(crate) enum QueueEntry {
    /// An accepted connection, and its connection slot.
    Client(std::net::TcpStream, ConnectionSlot),
    /// A session that migrates from another worker.
    Session(Box<MigratingSession>),
    /// A stream of another node, for a session of a client that is connected there.
    Relayed(fulmar_transport::Stream),
    /// A health check, to be answered.
    Ping(oneshot::Sender<()>),
}

/// A session that migrates between workers, with its socket.
pub(crate) struct MigratingSession {
    pub(crate) session: Box<Session>,
    pub(crate) stream: std::net::TcpStream,
    pub(crate) entry: RegistryEntry,
}

/// Why a session leaves its worker.
pub(crate) enum Departure {
    End(End),
    /// The session migrates to another worker, where a queue slot is reserved.
    Migrate(mpsc::OwnedPermit<QueueEntry>),
}

/// A worker's place among all workers, as its sessions see it.
pub(crate) struct WorkerContext {
    pub(crate) number: usize,
    pub(crate) scaler: Arc<WorkerScaler>,
    /// The queues of all workers.
    pub(crate) queues: Arc<[mpsc::Sender<QueueEntry>]>,
}

impl WorkerContext {
    /// Reserves a queue slot at the worker where the session should run. `None` if it already runs
    /// there, or if that worker's queue is full.
    pub(crate) fn reserve_home_slot(&self, session: i32) -> Option<mpsc::OwnedPermit<QueueEntry>> {
        let home = self.scaler.home(session);
        if home == self.number {
            return None;
        }
        self.queues.get(home)?.clone().try_reserve_owned().ok()
    }
}
