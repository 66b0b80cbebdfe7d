//! `fulmar verify`: everything that is kept, compared with its checksums.
//!
//! With `--data` it reads the directory of a node that does not run: catalog, log, manifests, segments; with `--store` a store
//! alone. Else it asks a node
//! that runs (`VERIFY` in the database `fulmar`), and with `--deep` lets SQLite look at every tenant, some at a time.
//! Neither changes anything. Damage is an error, after all of it has been listed.

mod offline;
mod online;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::bail;
use serde::Serialize;

use crate::cli::VerifyArgs;
use crate::output;

/// A place that is not as it was written.
#[derive(Debug, Serialize)]
struct Damage {
    /// A file, or `tenant NAME`.
    place: String,
    byte: Option<u64>,
    problem: String,
    /// Whose data it has, if it is not everybody's or nobody's.
    tenants: String,
}

/// What was looked at, and what was found.
#[derive(Default, Serialize)]
struct Report {
    /// Of each kind how many.
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
        _ => bail!("there is damage; docs/operations.md tells what to do with each file"),
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
            self.checked.iter().map(|(what, count)| format!("{count} {what}")).collect();
        let verdict = if self.damage.is_empty() { "sound" } else { "DAMAGED" };
        output::line(&format!("{verdict}: read {} in {:.1} s", checked.join(", "), self.seconds))
    }
}
