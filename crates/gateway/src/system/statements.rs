//! `fulmar.statements` and `fulmar.slow_statements`: the statistics of statements of all nodes. A
//! tenant is shown to its owner and to superusers.

use std::sync::Arc;

use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::Database;
use fulmar_meta::Tenant;
use fulmar_pages::PartitionId;
use fulmar_pgwire::types::datetime::timestamp_text;
use hashbrown::HashMap;

use super::stats::milliseconds;
use super::viewer::{Table, Viewer};
use crate::Result;

const STATEMENTS: &str = "fulmar.statements";
const SLOW_STATEMENTS: &str = "fulmar.slow_statements";

pub(super) const TABLES: &[Table] = &[
    (
        table(
            STATEMENTS,
            &[
                ("node", "TEXT"),
                ("tenant", "NAME"),
                ("fingerprint", "TEXT"),
                ("statement", "TEXT"),
                ("calls", "INT8"),
                ("total_ms", "FLOAT8"),
                ("mean_ms", "FLOAT8"),
                ("max_ms", "FLOAT8"),
                ("rows", "INT8"),
                ("errors", "INT8"),
            ],
        ),
        statements,
    ),
    (
        table(
            SLOW_STATEMENTS,
            &[
                ("node", "TEXT"),
                ("time", "TIMESTAMPTZ"),
                ("tenant", "NAME"),
                ("user", "NAME"),
                ("ms", "FLOAT8"),
                ("rows", "INT8"),
                ("sqlstate", "TEXT"),
                ("fingerprint", "TEXT"),
                ("statement", "TEXT"),
            ],
        ),
        slow_statements,
    ),
];

/// Whether a statement reads the statistics of statements.
pub(crate) fn statements_needed(sql: &str) -> bool {
    sql.contains(STATEMENTS) || sql.contains(SLOW_STATEMENTS)
}

fn owned(viewer: &Viewer) -> HashMap<PartitionId, Arc<Tenant>> {
    viewer.owned_tenants().into_iter().map(|tenant| (tenant.partition, tenant)).collect()
}

fn statements(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let tenants = owned(viewer);
    let mut rows = Rows::new();
    for (node, report) in &viewer.remote.statements {
        rows.extend(report.statements.iter().filter_map(|of| {
            let tenant = tenants.get(&PartitionId(of.partition))?;
            Some(row![
                node.as_str(),
                tenant.name.as_str(),
                fingerprint(of.fingerprint),
                of.text.as_str(),
                of.calls as i64,
                milliseconds(of.time_us),
                milliseconds(of.time_us / of.calls.max(1)),
                milliseconds(of.max_us),
                of.rows as i64,
                of.errors as i64
            ])
        }));
    }
    Ok(rows)
}

fn slow_statements(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let tenants = owned(viewer);
    let mut rows = Rows::new();
    for (node, report) in &viewer.remote.statements {
        rows.extend(report.slow.iter().filter_map(|of| {
            let tenant = tenants.get(&PartitionId(of.partition))?;
            Some(row![
                node.as_str(),
                timestamp_text(of.at_unix_ms),
                tenant.name.as_str(),
                of.user.as_str(),
                milliseconds(of.time_us),
                of.rows as i64,
                of.sqlstate.as_deref(),
                fingerprint(of.fingerprint),
                of.text.as_str()
            ])
        }));
    }
    Ok(rows)
}

/// A hash as text: numbers of 64 bits are not exact in JSON.
fn fingerprint(hash: u64) -> String {
    format!("{hash:016x}")
}
