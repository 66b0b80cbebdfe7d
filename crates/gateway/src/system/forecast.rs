//! `fulmar.forecast` and `fulmar.forecast_errors`: the series of loads that the controller keeps, and
//! what it forecasts. They are empty without a controller.

use fulmar_control::forecast::series::{SeriesKind, SeriesReport};
use fulmar_dialect::row;
use fulmar_dialect::system::{Rows, table};
use fulmar_engine::Database;
use fulmar_pgwire::types::datetime::timestamp_text;
use hashbrown::HashSet;

use super::viewer::{Table, Viewer};
use crate::Result;

/// Both tables' names begin with it.
const FORECAST: &str = "fulmar.forecast";

pub(super) const TABLES: &[Table] = &[
    (
        table(
            FORECAST,
            &[
                ("series", "TEXT"),
                ("name", "TEXT"),
                ("method", "TEXT"),
                ("at", "TIMESTAMPTZ"),
                ("load", "FLOAT8"),
                ("forecast", "FLOAT8"),
                ("error", "FLOAT8"),
            ],
        ),
        forecast,
    ),
    (
        table(
            "fulmar.forecast_errors",
            &[
                ("series", "TEXT"),
                ("name", "TEXT"),
                ("method", "TEXT"),
                ("step_s", "FLOAT8"),
                ("horizon", "INT8"),
                ("error", "FLOAT8"),
                ("ratio", "FLOAT8"),
                ("judged", "INT8"),
                ("is_used", "BOOL"),
            ],
        ),
        errors,
    ),
];

/// Whether a statement reads the forecasts.
pub(crate) fn forecasts_needed(sql: &str) -> bool {
    sql.contains(FORECAST)
}

/// The series of the cluster and its nodes, for superusers, and those of the tenants that the viewer
/// may connect to.
fn visible(viewer: &Viewer) -> Result<Vec<&SeriesReport>> {
    let reports = viewer.remote.forecasts.as_ref().map_err(Clone::clone)?;
    let tenants: HashSet<String> = viewer.tenants().iter().map(|tenant| tenant.name.clone()).collect();
    let is_visible = |report: &&SeriesReport| match report.kind {
        SeriesKind::Cluster | SeriesKind::Node => viewer.identity.superuser,
        SeriesKind::Tenant => tenants.contains(&report.name),
    };
    Ok(reports.iter().filter(is_visible).collect())
}

/// A row per step: those of the past with the load, and what was forecast for it at the horizon;
/// those ahead with the forecast.
fn forecast(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let mut rows = Rows::new();
    for report in visible(viewer)? {
        let (kind, name, method) = (report.kind.name(), report.name.as_str(), report.method.as_str());
        let error = report.error();
        let at = |steps: f64| timestamp_text(((report.at_s + steps * report.step_s) * 1000.0) as u64);
        let first = 1.0 - report.loads.len() as f64;
        let past = report.loads.iter().zip(&report.forecasts).enumerate();
        rows.extend(past.map(|(index, (load, forecast))| {
            let load = f64::from(*load);
            row![kind, name, method, at(first + index as f64), load, forecast.map(f64::from), error]
        }));
        let ahead = report.ahead.iter().enumerate();
        rows.extend(ahead.map(|(index, forecast)| {
            row![kind, name, method, at(1.0 + index as f64), (), f64::from(*forecast), error]
        }));
    }
    Ok(rows)
}

/// The error of each method for each series, in CPUs and as a share of the mean load.
fn errors(viewer: &Viewer, _: &Database<'_>) -> Result<Rows> {
    let mut rows = Rows::new();
    for report in visible(viewer)? {
        rows.extend(report.methods.iter().map(|of| {
            row![
                report.kind.name(),
                report.name.as_str(),
                of.method.as_str(),
                report.step_s,
                report.horizon as i64,
                of.error,
                report.ratio(of.error),
                of.judged as i64,
                i64::from(of.method == report.method)
            ]
        }));
    }
    Ok(rows)
}
