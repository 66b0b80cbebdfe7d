//! `fulmar tenant exec`: runs a script in many tenants concurrently, in one transaction per tenant.
//!
//! ```text
//! BEGIN; SELECT pg_current_xact_id(); the script         an error: rolled back and reported
//! state file: "begun in shop as transaction 17"          synced before COMMIT
//! COMMIT
//! state file: "done in shop"
//! ```
//!
//! With a state file, the script commits at most once per tenant, even if this process, the network
//! or the server fails at any point. The state file ([`state`]) says in which tenants it has
//! committed, and for which transactions the server must be asked for the outcome ([`attempt`]).

mod attempt;
mod state;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use futures::{StreamExt, stream};
use serde::Serialize;

use super::{SYSTEM_DATABASE, connect, texts};
use crate::cli::{ExecArgs, ServerArgs};
use crate::output;
use attempt::Runner;
use state::StateFile;

/// A tenant in which the script failed.
#[derive(Debug, Serialize)]
struct Failure {
    tenant: String,
    /// `None` if the error did not come from the server.
    sqlstate: Option<String>,
    message: String,
}

/// The result, for `--json`.
#[derive(Serialize)]
struct Report {
    done: usize,
    /// Tenants in which an earlier run has committed the script.
    skipped: usize,
    failed: Vec<Failure>,
    seconds: f64,
}

/// Runs the script in the tenants in which it has not committed yet. Tries all of them, then
/// returns an error if any has failed.
pub async fn run(server: &ServerArgs, arguments: &ExecArgs, json: bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let script = script(arguments)?;
    let state = match state_file(arguments) {
        Some(file) => Some(StateFile::open(&file, &state::key(server, &script)?)?),
        None => None,
    };
    let tenants = tenants(server, arguments).await?;
    let all = tenants.len();
    let due: Vec<String> = match &state {
        Some(state) => tenants.into_iter().filter(|tenant| !state.is_done(tenant)).collect(),
        None => tenants,
    };
    let skipped = all - due.len();
    let bar = output::progress("running", due.len() as u64);
    let runner = Runner {
        server,
        script: &script,
        state: state.as_ref(),
        single_transaction: !arguments.no_transaction,
    };
    let outcomes = stream::iter(due).map(|tenant| {
        let (runner, bar) = (&runner, &bar);
        async move {
            let outcome = runner.run(&tenant).await;
            bar.inc(1);
            outcome
        }
    });
    let outcomes: Vec<Result<(), Failure>> = outcomes.buffer_unordered(arguments.jobs.into()).collect().await;
    bar.finish_and_clear();
    let done = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    let mut failed: Vec<Failure> = outcomes.into_iter().filter_map(Result::err).collect();
    failed.sort_by(|a, b| a.tenant.cmp(&b.tenant));
    let report = Report { done, skipped, failed, seconds: began.elapsed().as_secs_f64() };
    report.print(json)?;
    match report.failed.len() {
        0 => Ok(()),
        _ if arguments.no_transaction => {
            bail!("script failed; statements before the error stay committed")
        }
        _ => {
            bail!(
                "script failed; failed tenants were rolled back; re-run the same command to retry \
                 only those"
            )
        }
    }
}

impl Report {
    fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            return output::json(self);
        }
        if !self.failed.is_empty() {
            let mut table = output::table(["tenant", "SQLSTATE", "message"]);
            table.add_rows(self.failed.iter().map(|failure| {
                [&failure.tenant, failure.sqlstate.as_deref().unwrap_or("-"), failure.message.as_str()]
            }));
            output::line(&table.to_string())?;
        }
        let Report { done, skipped, seconds, .. } = self;
        let failed = self.failed.len();
        output::line(&format!("done in {done} tenants, {skipped} skipped, {failed} failed: {seconds:.1} s"))
    }
}

fn script(arguments: &ExecArgs) -> anyhow::Result<String> {
    match (&arguments.file, &arguments.command) {
        (Some(file), _) => {
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
        }
        (None, text) => Ok(text.clone().unwrap_or_default()),
    }
}

fn state_file(arguments: &ExecArgs) -> Option<PathBuf> {
    let default = |file: &PathBuf| {
        let mut name = file.clone().into_os_string();
        name.push(".state");
        PathBuf::from(name)
    };
    arguments.state.clone().or_else(|| arguments.file.as_ref().map(default))
}

/// Returns the selected tenants without duplicates.
async fn tenants(server: &ServerArgs, arguments: &ExecArgs) -> anyhow::Result<Vec<String>> {
    let mut names = match arguments.names.is_empty() {
        true => listed(server, arguments.like.as_deref()).await?,
        false => arguments.names.clone(),
    };
    names.sort();
    names.dedup();
    Ok(names)
}

async fn listed(server: &ServerArgs, like: Option<&str>) -> anyhow::Result<Vec<String>> {
    let client = connect(server, SYSTEM_DATABASE).await?;
    let all = texts(&client, "SELECT datname FROM pg_catalog.pg_database ORDER BY 1").await?;
    let names: Vec<String> =
        all.into_iter().map(|[name]| name).filter(|name| name != SYSTEM_DATABASE).collect();
    let Some(pattern) = like else { return Ok(names) };
    // Let the server evaluate LIKE.
    let text = |text: &str| format!("'{}'", text.replace('\'', "''"));
    let all = text(&serde_json::to_string(&names)?);
    let sql = format!("SELECT value FROM json_each({all}) WHERE value LIKE {}", text(pattern));
    let names: Vec<String> = texts(&client, &sql).await?.into_iter().map(|[name]| name).collect();
    ensure!(
        !names.is_empty(),
        "no tenant name matches {pattern}; list the tenants with `fulmar tenant list`"
    );
    Ok(names)
}
