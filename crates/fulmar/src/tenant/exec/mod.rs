//! `fulmar tenant exec`: a script in many tenants, some at a time, each in a transaction of its own.
//!
//! ```text
//! BEGIN; SELECT pg_current_xact_id(); the script         an error: it is rolled back, and listed
//! note: "begun in shop as transaction 17"                synced, before anything can be committed
//! COMMIT
//! note: "done in shop"
//! ```
//!
//! So whenever this process, its network or the server dies, the notes ([`state`]) tell in which tenants the script has
//! been run, or which transaction has to be asked for ([`attempt`]): a script is never run twice in a tenant.

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
use state::State;

/// Where it failed, and why.
#[derive(Debug, Serialize)]
struct Failure {
    tenant: String,
    /// As the server named it; nothing if it was no answer of the server's.
    sqlstate: Option<String>,
    message: String,
}

/// What came of it, for scripts.
#[derive(Serialize)]
struct Report {
    done: usize,
    /// Tenants in which an earlier run has done it.
    skipped: usize,
    failed: Vec<Failure>,
    seconds: f64,
}

/// Runs the script where it has not been run yet. That it failed somewhere is an error, after all has been tried.
pub async fn run(server: &ServerArgs, arguments: &ExecArgs, json: bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let script = script(arguments)?;
    let state = match state_file(arguments) {
        Some(file) => Some(State::open(&file, &state::key(server, &script)?)?),
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
    let runner = Runner { server, script: &script, state: state.as_ref(), whole: !arguments.no_transaction };
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
            bail!("the script failed; what it had done before the error is kept")
        }
        _ => {
            bail!("the script failed; where it did nothing of it is kept, and the same command goes on there")
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
        output::line(&format!("done in {done} tenants, {skipped} had it, {failed} failed: {seconds:.1} s"))
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
    let beside = |file: &PathBuf| {
        let mut name = file.clone().into_os_string();
        name.push(".state");
        PathBuf::from(name)
    };
    arguments.state.clone().or_else(|| arguments.file.as_ref().map(beside))
}

/// The tenants that are meant, each once.
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
    // SQLite says what LIKE is.
    let text = |text: &str| format!("'{}'", text.replace('\'', "''"));
    let all = text(&serde_json::to_string(&names)?);
    let sql = format!("SELECT value FROM json_each({all}) WHERE value LIKE {}", text(pattern));
    let names: Vec<String> = texts(&client, &sql).await?.into_iter().map(|[name]| name).collect();
    ensure!(!names.is_empty(), "no tenant's name is LIKE {pattern}; `fulmar tenant list` shows them");
    Ok(names)
}
