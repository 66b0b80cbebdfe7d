//! What sessions keep for an open partition: idle connections, descriptions of statements, and the
//! primary keys of tables.
//!
//! Sessions hold no connection between transactions: they take one from the partition's pool and
//! return it. So thousands of idle sessions use no SQLite memory, and a few connections stay warm.

use std::sync::Arc;

use fulmar_mvcc::Attachment;
use fulmar_sqlite::StatementCache;
use parking_lot::Mutex;

use crate::connection::Connection;
use crate::table_keys::TableKeys;

/// The idle connections of a partition, and the descriptions of its statements.
#[derive(Default)]
pub(crate) struct Idle {
    #[expect(
        clippy::vec_box,
        reason = "a connection changes hands for every statement: its pointer does, not its bytes"
    )]
    connections: Mutex<Vec<Box<Connection>>>,
    pub(crate) statements: StatementCache,
    pub(crate) keys: TableKeys,
    /// Held while a copy of a session's temporary tables is in memory.
    pub(crate) copying: Arc<tokio::sync::Mutex<()>>,
}

/// Maximum of idle connections of a partition (about 50 KiB each, as long as the partition is
/// open). More may be in use, one per open transaction. Opening a connection costs as much as a
/// dozen statements.
const MAX_POOLED_CONNECTIONS: usize = 64;

impl Idle {
    /// Takes the connection that was used last, so that few connections stay warm.
    pub(crate) fn take(&self) -> Option<Box<Connection>> {
        self.connections.lock().pop()
    }

    pub(crate) fn give(&self, connection: Box<Connection>) {
        let keeps = !connection.tainted
            && !connection.link.heap_account.exceeds_idle_limit()
            && !connection.partition().heap().is_crowded();
        let mut kept = self.connections.lock();
        if keeps && kept.len() < MAX_POOLED_CONNECTIONS {
            kept.push(connection);
        } else {
            drop(kept);
            drop(connection);
        }
    }
}

impl Attachment for Idle {
    /// Each connection holds one reference.
    fn references(&self) -> usize {
        self.connections.lock().len()
    }

    fn close_idle(&self) {
        let connections = std::mem::take(&mut *self.connections.lock());
        drop(connections);
    }
}
