//! Metrics of tenants.

use super::text::{escape_label, header, line};
use crate::tenant_stats::TenantCounts;

/// The metrics of a tenant.
pub(crate) struct TenantMetrics {
    pub(crate) name: String,
    pub(crate) counts: TenantCounts,
    pub(crate) commits: u64,
    pub(crate) sessions: u64,
    /// Memory charged by its sessions.
    pub(crate) session_memory_bytes: u64,
}

/// Writes the metrics of tenants.
pub(super) fn write(out: &mut String, tenants: &[TenantMetrics]) {
    type Value = fn(&TenantMetrics) -> f64;
    let metrics: [(&str, &str, &str, Value); 6] = [
        ("statements_total", "counter", "Statements executed for the tenant.", |tenant| {
            tenant.counts.statements as f64
        }),
        (
            "busy_seconds_total",
            "counter",
            "Time for which the tenant's sessions kept workers busy.",
            |tenant| tenant.counts.busy_us as f64 / 1e6,
        ),
        ("errors_total", "counter", "Errors sent to clients of the tenant.", |tenant| {
            tenant.counts.errors as f64
        }),
        ("commits_total", "counter", "Commits of the tenant.", |tenant| tenant.commits as f64),
        ("sessions", "gauge", "Open sessions of the tenant.", |tenant| tenant.sessions as f64),
        ("session_memory_bytes", "gauge", "Memory charged to sessions of the tenant.", |tenant| {
            tenant.session_memory_bytes as f64
        }),
    ];
    for (suffix, kind, help, value) in metrics {
        let name = format!("fulmar_tenant_{suffix}");
        header(out, &name, help, kind);
        for tenant in tenants {
            line(out, format_args!("{name}{{tenant=\"{}\"}} {}", escape_label(&tenant.name), value(tenant)));
        }
    }
}
