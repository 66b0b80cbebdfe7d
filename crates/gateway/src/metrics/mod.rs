//! Metrics in the Prometheus text format.
//!
//! Each metric is declared once, with its name, its help text and its value: the counters of
//! workers in [`worker`], those of the engine and the store in [`engine`], those of tenants in
//! [`tenant`], and those of connections here. `docs/operations.md` explains them; a test compares
//! it with the output.

mod engine;
mod tenant;
mod text;
mod worker;

use std::sync::Arc;

use fulmar_engine::{EngineStatistics, ReplicaStatistics};
use fulmar_store::OperationStatistics;

pub(crate) use tenant::TenantMetrics;
pub(crate) use worker::WorkerMetrics;

use crate::cluster::{CollectorStatistics, ForecastError};
use crate::connection_slots::SlotCounts;
use crate::memory::Usage;
use text::{Metric, counter, gauge};

/// Maximum number of tenants with metrics of their own: the busiest ones. A node has thousands of
/// tenants, and each label value creates new time series.
pub(crate) const MAX_TENANTS: usize = 20;

/// The current connections.
pub(crate) struct Connections {
    pub(crate) sessions: u64,
    /// Connections that are not authenticated yet.
    pub(crate) logins: SlotCounts,
    /// Memory charged by the sessions.
    pub(crate) memory: Usage,
    /// Workers that serve the sessions.
    pub(crate) workers_active: u64,
    /// In a cluster, the work of this node as the garbage collector.
    pub(crate) collector: Option<CollectorStatistics>,
    /// If this node is the controller, the errors of the forecasting methods.
    pub(crate) forecasts: Vec<ForecastError>,
}

const COLLECTOR: &[Metric<CollectorStatistics>] = &[
    gauge("fulmar_collector_elected", "1 if this node collects the cluster's garbage.", |collector| {
        collector.is_elected.into()
    }),
    counter("fulmar_collector_passes_total", "Passes of garbage collection over the store.", |collector| {
        collector.passes
    }),
    counter(
        "fulmar_collector_deleted_objects_total",
        "Segments and manifests that garbage collection has deleted.",
        |collector| collector.objects,
    ),
    counter(
        "fulmar_collector_deleted_log_objects_total",
        "Log objects of ended incarnations that garbage collection has deleted.",
        |collector| collector.log_objects,
    ),
    gauge(
        "fulmar_collector_last_pass_age_seconds",
        "Time since the last complete pass of this node; 0 before the first.",
        |collector| collector.last_pass.unwrap_or_default().as_secs(),
    ),
];

const CONNECTIONS: &[Metric<Connections>] = &[
    gauge("fulmar_sessions", "Open sessions.", |now| now.sessions),
    gauge("fulmar_connections_pending", "Connections that are not authenticated yet.", |now| {
        now.logins.used as u64
    }),
    counter(
        "fulmar_connections_evicted_total",
        "Unauthenticated connections that were closed because of the connection limit.",
        |now| now.logins.evicted,
    ),
    gauge(
        "fulmar_session_memory_bytes",
        "Memory charged to sessions: messages, prepared statements, portals, unsent results.",
        |now| now.memory.used_bytes,
    ),
    gauge(
        "fulmar_session_memory_limit_bytes",
        "The limit of fulmar_session_memory_bytes; half of it per database.",
        |now| now.memory.limit_bytes,
    ),
    counter(
        "fulmar_session_memory_rejections_total",
        "Requests that failed for lack of session memory.",
        |now| now.memory.rejected,
    ),
    gauge(
        "fulmar_workers_active",
        "Worker threads that serve sessions; the number follows the load.",
        |now| now.workers_active,
    ),
];

/// Renders all metrics of a node in the Prometheus text format.
pub(crate) fn render(
    workers: &[Arc<WorkerMetrics>],
    connections: &Connections,
    engine: &EngineStatistics,
    replica: Option<&ReplicaStatistics>,
    store: &[OperationStatistics],
    tenants: &[TenantMetrics],
) -> String {
    let mut out = String::new();
    text::write(&mut out, CONNECTIONS, connections);
    if let Some(collector) = &connections.collector {
        text::write(&mut out, COLLECTOR, collector);
    }
    write_forecasts(&mut out, &connections.forecasts);
    worker::write(&mut out, workers);
    engine::write(&mut out, engine);
    if let Some(replica) = replica {
        engine::write_replica(&mut out, replica);
    }
    engine::write_store(&mut out, store);
    tenant::write(&mut out, tenants);
    out
}

fn write_forecasts(out: &mut String, errors: &[ForecastError]) {
    const NAME: &str = "fulmar_forecast_error_ratio";
    if errors.is_empty() {
        return;
    }
    let help = "Mean error of forecasts of the cluster's load at the horizon, as a share of the load.";
    text::header(out, NAME, help, "gauge");
    for ForecastError { method, ratio } in errors {
        text::line(out, format_args!("{NAME}{{method=\"{method}\"}} {ratio}"));
    }
}

/// Renders the metrics of one tenant, for clients with that tenant's token.
pub(crate) fn render_tenant(tenant: Option<TenantMetrics>) -> String {
    let mut out = String::new();
    tenant::write(&mut out, tenant.as_slice());
    out
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fulmar_store::DiskCacheStatistics;

    use super::*;
    use crate::tenant_stats::TenantCounts;

    fn connected(sessions: u64) -> Connections {
        let memory = Usage { used_bytes: 11, limit_bytes: 12, rejected: 13 };
        let collector = Some(CollectorStatistics { objects: 14, ..CollectorStatistics::default() });
        let logins = SlotCounts { used: 3, evicted: 0 };
        let forecasts = vec![ForecastError { method: "arima".to_owned(), ratio: 0.25 }];
        Connections { sessions, logins, memory, workers_active: 2, collector, forecasts }
    }

    #[test]
    fn render_sums_all_workers() {
        let workers: Vec<Arc<WorkerMetrics>> = (0..2).map(|_| Arc::default()).collect();
        workers[0].record_statement(Duration::from_micros(20), 3);
        workers[1].record_statement(Duration::from_secs(60), 4);
        let disk_cache = Some(DiskCacheStatistics { hits: 8, bytes: 9, ..DiskCacheStatistics::default() });
        let engine = EngineStatistics { log_bytes: 7, disk_cache, ..EngineStatistics::default() };
        let text = render(&workers, &connected(5), &engine, None, &[], &[]);
        for expected in [
            "fulmar_sessions 5\n",
            "fulmar_connections_pending 3\n",
            "fulmar_session_memory_bytes 11\n",
            "fulmar_session_memory_limit_bytes 12\n",
            "fulmar_session_memory_rejections_total 13\n",
            "fulmar_collector_deleted_objects_total 14\n",
            "fulmar_forecast_error_ratio{method=\"arima\"} 0.25\n",
            "fulmar_rows_total 7\n",
            "fulmar_statement_seconds_bucket{le=\"0.000016\"} 0\n",
            "fulmar_statement_seconds_bucket{le=\"0.000032\"} 1\n",
            "fulmar_statement_seconds_bucket{le=\"+Inf\"} 2\n",
            "fulmar_statement_seconds_count 2\n",
            "fulmar_log_bytes_total 7\n",
            "# TYPE fulmar_disk_cache_hits_total counter\nfulmar_disk_cache_hits_total 8\n",
            "fulmar_disk_cache_bytes 9\n",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn manual_lists_exactly_the_existing_metrics() {
        let engine =
            EngineStatistics { disk_cache: Some(DiskCacheStatistics::default()), ..Default::default() };
        let replica = ReplicaStatistics { age_ms: Some(1), ..ReplicaStatistics::default() };
        let text = render(&[], &connected(0), &engine, Some(&replica), &[], &[]);
        let manual = include_str!("../../../../docs/operations.md");
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        let missing: Vec<&str> =
            types.clone().filter(|name| !manual.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(types.count() > 60);
        // The manual must not list metrics that do not exist.
        let is_rendered = |name: &&str| text.contains(&format!("# TYPE {name} "));
        let documented = manual.split('`').filter(|word| word.starts_with("fulmar_") && !word.ends_with('_'));
        let names = documented.map(|word| word.split('{').next().unwrap_or_default());
        let unknown: Vec<&str> = names.filter(|name| !is_rendered(name)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn tenant_metrics_have_escaped_name_labels() {
        let counts = TenantCounts { statements: 3, busy_us: 2_500_000, errors: 1, ..TenantCounts::default() };
        let name = "a \"b\\\n".into();
        let shop = TenantMetrics { name, counts, commits: 1 << 50, sessions: 4, session_memory_bytes: 5 };
        let text = render(&[], &connected(0), &EngineStatistics::default(), None, &[], &[shop]);
        for expected in [
            "# TYPE fulmar_tenant_statements_total counter\nfulmar_tenant_statements_total{tenant=\"a \\\"b\\\\\\n\"} 3\n",
            "fulmar_tenant_busy_seconds_total{tenant=\"a \\\"b\\\\\\n\"} 2.5\n",
            "fulmar_tenant_errors_total{tenant=\"a \\\"b\\\\\\n\"} 1\n",
            "fulmar_tenant_commits_total{tenant=\"a \\\"b\\\\\\n\"} 1125899906842624\n",
            "fulmar_tenant_sessions{tenant=\"a \\\"b\\\\\\n\"} 4\n",
            "fulmar_tenant_session_memory_bytes{tenant=\"a \\\"b\\\\\\n\"} 5\n",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }
}
