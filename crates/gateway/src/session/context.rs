//! The components of the node that a session uses.

use std::path::PathBuf;
use std::sync::Arc;

use fulmar_engine::Engine;
use fulmar_meta::Catalog;

use super::slow::SlowLog;
use crate::admin;
use crate::advisory::AdvisoryLocks;
use crate::events::EventLog;
use crate::load::KeyMonitor;
use crate::memory::SessionMemory;
use crate::system::Sources;
use crate::tenant_stats::TenantStatsRegistry;

/// The components of the node that a session uses. Sessions share one instance, and have no other
/// state in common.
pub(crate) struct Context {
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) tenants: Arc<TenantStatsRegistry>,
    pub(crate) memory: Arc<SessionMemory>,
    pub(crate) advisory: Arc<AdvisoryLocks>,
    pub(crate) event_log: Arc<EventLog>,
    /// Counts accesses per key.
    pub(crate) keys: Arc<KeyMonitor>,
    pub(crate) slow: SlowLog,
    /// The directory of temporary files for large results.
    pub(crate) temporary_directory: PathBuf,
    /// What administrative statements change.
    pub(crate) administration: admin::Context,
    /// What system tables show.
    pub(crate) sources: Arc<Sources>,
}
