//! What HTTP clients can query: the node's metrics and its health.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fulmar_engine::Engine;
use fulmar_meta::{Catalog, Tenant};
use fulmar_pages::PartitionId;

use crate::cluster::Cluster;
use crate::connection_slots::ConnectionSlots;
use crate::memory::SessionMemory;
use crate::metrics::{self, TenantMetrics};
use crate::registry::Registry;
use crate::tenant_stats::{TenantCounts, TenantStatsRegistry};
use crate::tokens::{AuthorizationError, Authorizer, Scope};
use crate::worker::Worker;
use crate::worker_scaling::WorkerScaler;

/// The source of the gateway's metrics.
pub(crate) struct MetricsSource {
    pub(crate) engine: Arc<Engine>,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) tenants: Arc<TenantStatsRegistry>,
    pub(crate) memory: Arc<SessionMemory>,
    pub(crate) logins: Arc<ConnectionSlots>,
    pub(crate) authorizer: Authorizer,
    pub(crate) scaler: Arc<WorkerScaler>,
    /// The cluster that the node belongs to.
    pub(crate) cluster: Option<Arc<dyn Cluster>>,
    pub(crate) workers: Arc<[Worker]>,
    /// The number of regular workers. The workers after them are spare.
    pub(crate) regular: usize,
}

/// A worker that does not respond to a ping within this time is considered stuck: sessions yield
/// every millisecond.
const WORKER_TIMEOUT: Duration = Duration::from_secs(2);

impl MetricsSource {
    /// Returns true if all regular workers respond to a ping.
    pub(crate) async fn workers_respond(&self) -> bool {
        let pings = self.workers[..self.regular].iter().map(|worker| worker.responds_within(WORKER_TIMEOUT));
        futures::future::join_all(pings).await.into_iter().all(|responded| responded)
    }

    /// Renders the metrics that the scope includes, in Prometheus's text format.
    pub(crate) fn render(&self, scope: Scope) -> String {
        let workers: Vec<_> = self.workers.iter().map(|worker| worker.metrics.clone()).collect();
        match scope {
            Scope::Node => metrics::render(
                &workers,
                &metrics::Connections {
                    sessions: self.registry.len() as u64,
                    logins: self.logins.count(),
                    memory: self.memory.usage(),
                    workers_active: self.scaler.active() as u64,
                    collector: self.cluster.as_ref().map(|cluster| cluster.collector()),
                    forecasts: self
                        .cluster
                        .as_ref()
                        .map_or_else(Vec::new, |cluster| cluster.forecast_errors()),
                },
                &self.engine.statistics(),
                self.engine.replica_statistics().as_ref(),
                &self.engine.store_statistics(),
                &self.busiest_tenants(),
            ),
            Scope::Tenant(partition) => metrics::render_tenant(self.tenant(partition)),
        }
    }

    /// The scope of metrics that a token grants.
    pub(crate) async fn authorize(
        &self,
        secret: Option<&str>,
        address: Option<IpAddr>,
    ) -> Result<Scope, AuthorizationError> {
        self.authorizer.authorize(secret, address).await
    }

    fn tenant(&self, partition: PartitionId) -> Option<TenantMetrics> {
        let tenant = self.catalog.tenant_of(partition)?;
        Some(self.figures(&tenant, self.tenants.counts(partition).unwrap_or_default()))
    }

    fn figures(&self, tenant: &Tenant, counts: TenantCounts) -> TenantMetrics {
        TenantMetrics {
            name: tenant.name.clone(),
            counts,
            commits: self.engine.partition_statistics(tenant.partition).unwrap_or_default().commits,
            sessions: self.registry.count(tenant.partition) as u64,
            session_memory_bytes: self.memory.used_bytes(tenant.partition),
        }
    }

    fn busiest_tenants(&self) -> Vec<TenantMetrics> {
        let mut busiest = self.tenants.busiest(metrics::MAX_TENANTS);
        let named = self
            .catalog
            .tenants()
            .into_iter()
            .filter_map(|tenant| Some(self.figures(&tenant, busiest.remove(&tenant.partition)?)));
        named.collect()
    }

    /// Returns true if commits are accepted.
    pub(crate) fn is_healthy(&self) -> bool {
        self.engine.accepts_commits()
    }

    /// Returns true if the node is a replica.
    pub(crate) fn is_replica(&self) -> bool {
        self.engine.is_replica()
    }

    /// Returns true if the shared log accepts commits.
    pub(crate) fn is_shared_log_healthy(&self) -> bool {
        self.engine.health().shared_log.accepts()
    }
}
