//! The engine of one node.

mod config;
mod health;
mod operations;
mod start;
mod statistics;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_maintenance::Maintenance;
use fulmar_mvcc::{Node, Partitions};
use fulmar_pages::PartitionId;
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::{DiskCache, PageStore};
use futures::FutureExt;
use futures::future::BoxFuture;

pub use config::{CatalogPartitions, Config, DEFAULT_STATEMENT_BYTES, MIN_STATEMENT_BYTES};
pub use statistics::{EngineStatistics, LogDurations, PartitionStatistics};

use crate::connection::ConnectionSettings;
use crate::health::Recovery;
use crate::log_routing::LogRouter;
use crate::membership::Member;
use crate::opener::NodeOpener;
use crate::procedure::LuaPool;
use crate::replica::Replica;

/// All partitions of a node, with their logs and memory.
pub struct Engine {
    maintenance: Arc<Maintenance>,
    partitions: Arc<Partitions>,
    opener: Arc<NodeOpener>,
    /// Lua machines for procedures.
    lua_pool: LuaPool,
    connections: ConnectionSettings,
    recovery: Recovery,
    tickets: AtomicU64,
    seeds: AtomicU64,
}

impl Engine {
    /// Flushes all changes, seals the logs and stops. All sessions must have been closed.
    pub fn shutdown(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            self.maintenance.stop().await;
            if self.is_replica() {
                return Ok(());
            }
            let flushed = self.maintenance.flush_all().await;
            let logs: Vec<_> = self.node().logs().cloned().collect();
            // Close every log, even if closing one fails.
            let close = move || {
                let closed: Vec<_> = logs.iter().map(|log| log.close()).collect();
                closed.into_iter().find(|closed| closed.is_err()).unwrap_or(Ok(()))
            };
            let closed = tokio::task::spawn_blocking(close).await;
            self.maintenance.store_hot_pages().await;
            let store = self.node().store.clone();
            // Unwritten contents of the disk cache are not needed after a restart.
            let _ = tokio::task::spawn_blocking(move || store.disk_cache().map(DiskCache::close)).await;
            match closed {
                Ok(closed) => flushed.and(closed.map_err(fulmar_mvcc::log_error))?,
                Err(e) => {
                    return Err(Error::new(sqlstate::INTERNAL, format!("panic while closing a log: {e}")));
                }
            }
            self.node().end_term().await
        }
        .boxed()
    }

    /// The store, for other data that is kept in it.
    pub fn store(&self) -> PageStore {
        PageStore::clone(&self.node().store)
    }

    /// Sets how much page memory a partition keeps under pressure. The floor is ignored if all
    /// floors together leave too little for the others.
    pub(crate) fn set_cache_floor(&self, id: PartitionId, bytes: u64) {
        self.partitions.counted(id).cache_floor_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Statistics of the recovery at the start.
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// Maximum length of one statement's SQL text in bytes.
    pub fn max_statement_bytes(&self) -> usize {
        self.connections.max_statement_bytes
    }

    pub(crate) fn connection_settings(&self) -> ConnectionSettings {
        self.connections
    }

    pub(crate) fn node(&self) -> &Arc<Node> {
        self.partitions.node()
    }

    pub(crate) fn partitions(&self) -> &Arc<Partitions> {
        &self.partitions
    }

    pub(crate) fn maintenance(&self) -> &Arc<Maintenance> {
        &self.maintenance
    }

    pub(crate) fn lua_pool(&self) -> &LuaPool {
        &self.lua_pool
    }

    pub(crate) fn log_router(&self) -> &LogRouter {
        &self.opener.log_router
    }

    /// Set on a member of a cluster.
    pub(crate) fn member(&self) -> Option<&Arc<Member>> {
        self.opener.member.as_ref()
    }

    /// Set on a replica: the state of following the primary.
    pub(crate) fn replica(&self) -> Option<&Arc<Replica>> {
        self.opener.replica.as_ref()
    }

    /// Returns a new unique number.
    pub(crate) fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a seed for a transaction's random functions.
    pub(crate) fn seed(&self) -> u64 {
        self.seeds.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Pooled connections and their partition reference each other.
        for partition in
            self.partitions.open_partitions().into_iter().chain(self.maintenance.historical_versions().open())
        {
            partition.close_idle();
        }
    }
}
