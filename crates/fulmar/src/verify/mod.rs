//! `fulmar verify`: verifies the checksums of all stored data.
//!
//! - With `--data`: reads the data directory of a stopped node: catalog, log, manifests and
//!   segments.
//! - With `--store`: reads a store without its data directory.
//! - Otherwise: runs `VERIFY` in the database `fulmar` of a running node. With `--deep` also runs
//!   `PRAGMA quick_check` in every tenant.
//!
//! Stored data is not modified. All damage is listed; if there is any, the command returns an
//! error.

mod offline;
mod online;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::bail;
use serde::Serialize;

use crate::cli::VerifyArgs;
use crate::output;

/// A damaged place.
#[derive(Debug, Serialize)]
struct Damage {
    /// A file, or `tenant NAME`.
    place: String,
    byte: Option<u64>,
    problem: String,
    /// The affected tenants. Empty if it affects all tenants or none.
    tenants: String,
}

/// The result.
#[derive(Default, Serialize)]
struct Report {
    /// Number of checked objects of each kind.
    checked: BTreeMap<&'static str, u64>,
    damage: Vec<Damage>,
    seconds: f64,
}

/// Runs `fulmar verify`.
pub async fn run(arguments: VerifyArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut report = match (&arguments.data, &arguments.store) {
        (Some(data), _) => offline::verify(data).await?,
        (None, Some(store)) => offline::verify_store(store).await?,
        (None, None) => online::verify(&arguments).await?,
    };
    report.seconds = began.elapsed().as_secs_f64();
    report.print(arguments.json)?;
    match report.damage.len() {
        0 => Ok(()),
        _ => bail!("stored data is damaged; docs/operations.md describes the repair of each file"),
    }
}

impl Report {
    fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            return output::json(self);
        }
        if !self.damage.is_empty() {
            let mut table = output::table(["place", "byte", "tenants", "problem"]);
            table.add_rows(self.damage.iter().map(|damage| {
                let byte = damage.byte.map_or_else(|| "-".to_owned(), |byte| byte.to_string());
                [damage.place.clone(), byte, damage.tenants.clone(), damage.problem.clone()]
            }));
            output::line(&table.to_string())?;
        }
        let checked: Vec<String> =
            self.checked.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let verdict = if self.damage.is_empty() { "sound" } else { "DAMAGED" };
        output::line(&format!("{verdict}: read {} in {:.1} s", checked.join(", "), self.seconds))
    }
}
