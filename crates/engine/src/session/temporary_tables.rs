//! Temporary tables of a session whose partition moves.
//!
//! They are in the connection that the session keeps. A partition that moves is closed for good,
//! and its connections with it, so the tables are copied to a connection of the next partition
//! object:
//!
//! - At another node: the session at the source rolls its transaction back and copies the tables
//!   ([`Session::save_temporary_tables`]); the session at the destination loads the copy before its
//!   first statement, and the transaction is repeated.
//! - At the same node, if the move was undone or changed something else: the session's next
//!   transaction copies them.
//!
//! The copy has the state before the open transaction. A statement that was reported as moved had
//! no effect on the tables: it was rolled back, together with its transaction.
//!
//! # Bounds
//! Tables of at most [`MAX_BYTES`] are copied; the source charges the copy to the tenant, and the
//! sessions of a database are copied one after the other. A session with larger ones holds the
//! partition ([`HoldReason::TemporaryTables`]), so that a move waits for it, and is rolled back at a
//! bound. If there is no memory for a copy, the tables are lost, and their session ends.

use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::{HoldReason, MoveHold, Partition};
use fulmar_sqlite::Result;
use tokio::sync::OwnedMutexGuard;
use tokio::time::timeout;

use super::Session;
use crate::connection::Connection;
use crate::idle::Idle;

/// Size of temporary tables above which a session holds its partition.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum size of a copy. SQLite's cache may contain pages that the size of the file does not
/// show.
const MAX_COPY_BYTES: usize = 68 << 20;

/// How long a copy waits for those of other sessions, which are sent one after the other.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// A copy of a session's temporary tables.
pub struct TemporaryTables {
    bytes: Vec<u8>,
    /// The connection that the bytes are charged to.
    _connection: Box<Connection>,
    _turn: Option<OwnedMutexGuard<()>>,
}

impl TemporaryTables {
    /// The copy.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

async fn save(connection: &mut Connection) -> Result<Vec<u8>> {
    connection.run(|connection| connection.save_temporary_here(MAX_COPY_BYTES))?.await
}

impl Session {
    fn connection_with_tables(&self) -> Option<&Connection> {
        let open = self.open.as_ref().and_then(|open| open.connection.as_ref());
        self.own.as_ref().or(open.filter(|connection| connection.tainted)).map(|connection| &**connection)
    }

    /// Whether the session has, or had, temporary tables.
    pub fn has_temporary_tables(&self) -> bool {
        self.connection_with_tables().is_some()
    }

    /// Whether the partition that the temporary tables belong to has moved.
    pub fn have_temporary_tables_moved(&self) -> bool {
        self.connection_with_tables().is_some_and(|connection| connection.partition().has_moved())
    }

    /// Rolls the open transaction back, and copies the temporary tables. The session has none
    /// afterwards. Returns `None` if it had none.
    pub async fn save_temporary_tables(&mut self) -> Result<Option<TemporaryTables>> {
        if let Some(open) = self.open.take() {
            // The transaction has ended also if this fails.
            let _ = self.roll_back(open).await;
        }
        let Some(mut connection) = self.own.take() else { return Ok(None) };
        self.large_tables = None;
        let copying = connection.partition().attachment::<Idle>().copying.clone();
        let turn = timeout(TURN_TIMEOUT, copying.lock_owned()).await.ok();
        let bytes = save(&mut connection).await?;
        Ok((!bytes.is_empty()).then_some(TemporaryTables { bytes, _connection: connection, _turn: turn }))
    }

    /// Drops all temporary tables. No transaction is open.
    pub fn drop_temporary_tables(&mut self) {
        (self.own, self.large_tables) = (None, None);
    }

    /// Replaces the session's temporary tables by a copy. No transaction is open.
    pub async fn load_temporary_tables(&mut self, copy: &[u8]) -> Result<()> {
        let (engine, id) = (self.engine.clone(), self.id);
        let partition = self.cancellable(async move { engine.partitions().partition(id).await }).await??;
        let connection = self.open_with_tables(partition, copy).await?;
        self.hold_large_tables(&connection);
        self.own = Some(connection);
        Ok(())
    }

    async fn open_with_tables(&mut self, partition: Arc<Partition>, copy: &[u8]) -> Result<Box<Connection>> {
        let mut connection = Connection::open(partition, self.engine.connection_settings()).await?;
        connection.set_limits(self.limits);
        connection.run(|connection| connection.load_temporary_here(copy))?.await?;
        Ok(connection)
    }

    /// Takes the session's own connection out, for a transaction on `partition`. If it belongs to
    /// an earlier object of the partition, which has moved, the tables are copied to a new
    /// connection.
    pub(super) async fn take_own(&mut self, partition: &Arc<Partition>) -> Result<Option<Box<Connection>>> {
        let Some(mut own) = self.own.take() else { return Ok(None) };
        if own.partition().has_moved() {
            let reopened = self.reopen(&mut own, partition.clone()).await;
            if reopened.is_err() {
                self.own = Some(own);
            }
            return reopened.map(Some);
        }
        // Not a connection from before a restore.
        let own = Some(own).filter(|own| !own.partition().is_closed());
        if own.is_none() {
            self.large_tables = None;
        }
        Ok(own)
    }

    async fn reopen(&mut self, own: &mut Connection, partition: Arc<Partition>) -> Result<Box<Connection>> {
        let copy = save(own).await?;
        let next = self.open_with_tables(partition, &copy).await;
        own.link.release(copy.len() as u64);
        next
    }

    /// Holds the partition if its temporary tables are too large to be copied. Called after each
    /// transaction that may have changed them.
    pub(super) fn hold_large_tables(&mut self, connection: &Connection) {
        let is_large = connection.link.buffered_bytes() > MAX_BYTES;
        if is_large != self.large_tables.is_some() {
            let hold =
                || MoveHold::new(self.engine.partitions().counted(self.id), HoldReason::TemporaryTables);
            self.large_tables = is_large.then(hold);
        }
    }
}
