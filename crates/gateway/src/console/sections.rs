//! The statements of the page. Each states a LIMIT.

use std::net::IpAddr;
use std::time::Duration;

use fulmar_meta::SYSTEM_TENANT;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::answer::Failure;
use super::sql::{Sessions, SqlError, SqlSession, Table, string};
use crate::identity::CONSOLE_APPLICATION;

/// `statement_timeout` of queries.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of one part of a tenant: a node that does not answer delays some by 2 s.
const PART_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum time of all parts of a tenant.
const PARTS_TIMEOUT: Duration = Duration::from_secs(12);
/// The error for a table that does not exist.
const UNDEFINED_TABLE: &str = "42P01";

/// A part of the page, with the statement that reads it.
pub(super) struct Section {
    pub(super) name: &'static str,
    pub(super) sql: &'static str,
    /// It is read at every n-th poll.
    pub(super) every: u64,
}

/// All sections.
pub(super) const SECTIONS: [Section; 11] = [
    Section {
        name: "nodes",
        sql: "SELECT id, name, state, sql, partitions, heard_ms, is_this, slow, site, rack \
              FROM fulmar.nodes ORDER BY id LIMIT 1000",
        every: 1,
    },
    Section {
        name: "node_load",
        sql: "SELECT node, at, capacity, cpu, memory_bytes, used_memory_bytes, written_bytes_per_s, \
              requests_per_s, error FROM fulmar.node_load ORDER BY node LIMIT 1000",
        every: 1,
    },
    Section {
        name: "tenants",
        sql: "SELECT node, tenant, cpu, requests_per_s, errors_per_s, size_bytes, memory_bytes, latency_ms, \
              p50_ms, p95_ms, p99_ms FROM fulmar.load ORDER BY cpu DESC, size_bytes DESC, tenant LIMIT 500",
        every: 1,
    },
    Section {
        name: "moves",
        sql: "SELECT partition, tenant, number, mechanism, source, destination, step, started, rounds, bytes, \
              expected_bytes, total_ms, pause_ms, expected_pause_ms, failed, error \
              FROM fulmar.migrations ORDER BY started DESC LIMIT 30",
        every: 1,
    },
    Section {
        name: "decisions",
        sql: "SELECT number, time, controller, mode, action, what, why, predicted, outcome, ended \
              FROM fulmar.decisions ORDER BY number DESC LIMIT 50",
        every: 1,
    },
    Section {
        name: "events",
        sql: "SELECT id, time, kind, severity, database, \"user\", text, details \
              FROM fulmar.events ORDER BY id DESC LIMIT 100",
        every: 1,
    },
    Section {
        name: "statements",
        sql: "SELECT pid, datname, usename, application_name, client_addr, query_start, query \
              FROM pg_stat_activity WHERE state = 'active' AND query <> '' \
              AND application_name NOT LIKE 'fulmar console%' ORDER BY query_start, pid LIMIT 20",
        every: 1,
    },
    Section {
        name: "slow_statements",
        sql: "SELECT node, time, tenant, \"user\", ms, rows, sqlstate, fingerprint, statement \
              FROM fulmar.slow_statements ORDER BY time DESC, tenant LIMIT 20",
        every: 2,
    },
    Section { name: "control", sql: "SELECT name, value FROM fulmar.control LIMIT 100", every: 2 },
    Section {
        name: "placements",
        sql: "SELECT l.tenant, p.node, l.value AS objective FROM fulmar.limits l \
              LEFT JOIN fulmar.partitions p ON p.tenant = l.tenant \
              WHERE l.name = 'latency_objective' AND l.tenant <> 'fulmar' \
              ORDER BY l.value IS NULL, l.tenant LIMIT 1000",
        every: 2,
    },
    Section {
        name: "forecast",
        sql: "SELECT series, name, method, at, load, forecast FROM fulmar.forecast \
              WHERE series IN ('cluster', 'node') ORDER BY series, name, at LIMIT 4000",
        every: 5,
    },
];

/// Runs a statement. `None` if it reads a table that this version does not have.
pub(super) async fn read(session: &mut SqlSession, sql: &str) -> Result<Option<Table>, SqlError> {
    match session.query(sql).await {
        Ok(table) => Ok(Some(table)),
        Err(error) if error.state == UNDEFINED_TABLE => Ok(None),
        Err(error) => Err(error),
    }
}

/// The first tenants whose names begin with `prefix`, with their nodes.
pub(super) async fn search(sessions: &Sessions, prefix: &str) -> Result<Table, Failure> {
    check_text("prefix", prefix)?;
    let mut session = sessions.open(SYSTEM_TENANT, None, CONSOLE_APPLICATION, STATEMENT_TIMEOUT).await?;
    let prefix = string(prefix);
    let sql = format!(
        "SELECT d.datname AS tenant, p.node FROM pg_database d \
         LEFT JOIN fulmar.partitions p ON p.tenant = d.datname \
         WHERE substr(d.datname, 1, length({prefix})) = {prefix} AND d.datname <> '{SYSTEM_TENANT}' \
         AND NOT d.datistemplate ORDER BY d.datname LIMIT 50"
    );
    Ok(session.query(&sql).await?)
}

/// Which parts of a tenant are read.
pub(super) struct TenantParts {
    /// The partition of the tenant, which the page sends with its actions.
    pub(super) partition: Option<u64>,
    pub(super) has_forecast: bool,
    pub(super) has_history: bool,
}

/// The partition, limits, statistics, latencies, statements and restore points of a tenant, and its
/// forecast. Statistics are those of its owner. A part that cannot be read in time is an error.
pub(super) async fn tenant(
    sessions: &Sessions,
    name: &str,
    address: IpAddr,
    parts: TenantParts,
) -> Result<Value, Failure> {
    check_text("tenant", name)?;
    let open = async || sessions.open(name, Some(address), CONSOLE_APPLICATION, STATEMENT_TIMEOUT).await;
    let mut session = Some(open().await?);
    let end = Instant::now() + PARTS_TIMEOUT;
    let mut shown = serde_json::Map::from_iter([("partition".to_owned(), json!(parts.partition))]);
    for (part, sql) in tenant_statements(&string(name)) {
        if part == "forecast" && !parts.has_forecast || part == "history" && !parts.has_history {
            continue;
        }
        let read_part = async {
            // Taken, so that a session whose answer was not read completely is not used again.
            let mut of = match session.take() {
                Some(of) => of,
                None => match open().await {
                    Ok(of) => of,
                    Err(error) => return Err(error),
                },
            };
            let table = read(&mut of, &sql).await;
            if table.as_ref().err().is_none_or(|error| !error.state.is_empty()) {
                session = Some(of);
            }
            table
        };
        let value = match timeout_at(end.min(Instant::now() + PART_TIMEOUT), read_part).await {
            Ok(Ok(table)) => json!(table),
            // The other parts are shown, for example while the store cannot list restore points.
            Ok(Err(error)) => json!({ "error": error }),
            Err(_) => json!({ "error": { "message": "The node did not answer in time." } }),
        };
        shown.insert(part.to_owned(), value);
    }
    Ok(Value::Object(shown))
}

/// The statements of the parts. `tenant` is a string constant.
fn tenant_statements(tenant: &str) -> [(&'static str, String); 8] {
    let limits =
        format!("SELECT name, value, \"default\", about FROM fulmar.limits WHERE tenant = {tenant} LIMIT 50");
    let stats = format!("SELECT * FROM fulmar.tenant_stats WHERE tenant = {tenant}");
    let latencies = format!(
        "SELECT up_to_ms, statements FROM fulmar.latency_histogram WHERE tenant = {tenant} LIMIT 100"
    );
    let statements = format!(
        "SELECT pid, usename, application_name, client_addr, query_start, query FROM pg_stat_activity \
         WHERE datname = {tenant} AND state = 'active' AND query <> '' \
         AND application_name NOT LIKE '{CONSOLE_APPLICATION}%' ORDER BY query_start, pid LIMIT 20"
    );
    let top_statements = format!(
        "SELECT node, fingerprint, statement, calls, total_ms, mean_ms, max_ms, rows, errors \
         FROM fulmar.statements WHERE tenant = {tenant} ORDER BY total_ms DESC, statement LIMIT 20"
    );
    let hot_keys = format!(
        "SELECT table_name, key, share, error, sampled FROM fulmar.hot_keys \
         WHERE tenant = {tenant} AND key IS NOT NULL ORDER BY share DESC, table_name, key LIMIT 20"
    );
    // The page states how many there are, and the oldest one: it lets the operator enter any time.
    let history = "SELECT time, size_bytes, count(*) OVER () AS total, min(time) OVER () AS oldest \
                   FROM fulmar.history ORDER BY time DESC LIMIT 60";
    let forecast = format!(
        "SELECT method, at, load, forecast FROM fulmar.forecast \
         WHERE series = 'tenant' AND name = {tenant} ORDER BY at LIMIT 2000"
    );
    [
        ("limits", limits),
        ("stats", stats),
        ("latencies", latencies),
        ("statements", statements),
        ("top_statements", top_statements),
        ("hot_keys", hot_keys),
        ("history", history.to_owned()),
        ("forecast", forecast),
    ]
}

/// Refuses texts that no name contains.
pub(super) fn check_text(what: &str, text: &str) -> Result<(), Failure> {
    const MAX_BYTES: usize = 256;
    if text.len() > MAX_BYTES || text.chars().any(char::is_control) {
        return Err(Failure::invalid(format!("{what} is too long or contains control characters")));
    }
    Ok(())
}
