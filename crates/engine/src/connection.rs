//! Connections on partitions.

use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::{Partition, PartitionPages};
use fulmar_sqlite::{Fiber, Result, Settings};

use crate::procedure::Known;

/// What the node decides about its connections.
#[derive(Clone, Copy)]
pub(crate) struct ConnectionSettings {
    /// CPU time after which a statement yields its thread.
    pub(crate) time_slice: Duration,
    /// Maximum length of one statement's SQL text.
    pub(crate) max_statement_bytes: usize,
}

/// An open connection on a partition. All calls into SQLite go through [`Connection::run`], on a
/// fiber.
pub(crate) struct Connection {
    sqlite: fulmar_sqlite::Connection,
    /// The same pages that `sqlite` uses.
    pub(crate) pages: Rc<PartitionPages>,
    /// Definitions of procedures.
    pub(crate) procedures: Known,
}

// SAFETY: the pages are shared only with `sqlite`, and one session at a time uses both.
unsafe impl Send for Connection {}

impl Connection {
    /// Opens a connection on a partition.
    pub(crate) async fn open(
        partition: Arc<Partition>,
        settings: ConnectionSettings,
    ) -> Result<Box<Connection>> {
        let mut connection = Box::new(Connection::new(partition, settings));
        connection.sqlite.open().await?;
        Ok(connection)
    }

    fn new(partition: Arc<Partition>, settings: ConnectionSettings) -> Connection {
        let files = partition.temporary_files();
        let settings = Settings {
            database: partition.id.0,
            heap: partition.heap().clone(),
            files: files.clone(),
            time_slice: settings.time_slice,
            max_statement_bytes: settings.max_statement_bytes,
        };
        let pages = Rc::new(PartitionPages::new(partition, files));
        let sqlite = fulmar_sqlite::Connection::new(pages.clone(), settings);
        Connection { sqlite, pages, procedures: Known::default() }
    }

    /// Runs `body` on a fiber, where it may call SQLite.
    pub(crate) fn run<'a, T: 'a>(
        &'a mut self,
        body: impl FnOnce(&mut Connection) -> T + 'a,
    ) -> Result<Fiber<'a, T>> {
        fulmar_sqlite::Connection::run_with(self, |connection| &mut connection.sqlite, body)
    }

    /// The partition.
    pub(crate) fn partition(&self) -> &Arc<Partition> {
        self.pages.partition()
    }
}

impl Deref for Connection {
    type Target = fulmar_sqlite::Connection;

    fn deref(&self) -> &fulmar_sqlite::Connection {
        &self.sqlite
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut fulmar_sqlite::Connection {
        &mut self.sqlite
    }
}
