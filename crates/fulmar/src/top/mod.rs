//! `fulmar top`: shows the busiest tenants and the longest-running statements.
//!
//! A node counts the activity of its tenants since its start (`fulmar.tenant_stats`). The command
//! samples these counters once per interval, computes rates from two samples ([`stats`]), and
//! displays them ([`screen`]).

mod screen;
mod stats;

use std::io::IsTerminal;
use std::time::Instant;

use anyhow::Context;
use tokio::time::MissedTickBehavior;
use tokio_postgres::{Client, Statement};

use crate::cli::TopArgs;
use crate::client::{connect, server_error};
use crate::interrupt::{Interrupted, or_interrupted};
use crate::output;
use crate::tenant::SYSTEM_DATABASE;
use screen::Screen;
use stats::{COUNTERS, CounterSample, Counters, Interval, RUNNING, Running};

/// Number of tenants shown if stdout is not a terminal.
const DEFAULT_ROWS: usize = 20;

/// Runs `fulmar top`.
pub async fn run(arguments: TopArgs) -> anyhow::Result<()> {
    match or_interrupted(watch(&arguments)).await {
        // Without `--once`, an interruption is the only way to end the command.
        Err(error) if !arguments.once && error.is::<Interrupted>() => Ok(()),
        result => result,
    }
}

async fn watch(arguments: &TopArgs) -> anyhow::Result<()> {
    let node = Node::connect(arguments).await?;
    let mut before = node.sample().await?;
    let mut ticks = tokio::time::interval(arguments.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await; // the first tick completes immediately
    let is_live = !arguments.once && !arguments.json && std::io::stdout().is_terminal();
    let screen = is_live.then(Screen::enter).transpose()?;
    loop {
        ticks.tick().await;
        let now = node.sample().await?;
        let mut interval = Interval::between(&before, &now, node.running().await?);
        before = now;
        interval.sort(arguments.sort);
        let rows = arguments.rows.map(usize::from);
        match &screen {
            Some(screen) => screen.show(&interval, rows)?,
            None => {
                interval.tenants.truncate(rows.unwrap_or(DEFAULT_ROWS));
                if arguments.json { output::json(&interval) } else { output::line(&interval.text()) }?;
            }
        }
        if arguments.once {
            return Ok(());
        }
    }
}

/// A connection to the node, with the prepared queries.
struct Node {
    client: Client,
    counters: Statement,
    running: Statement,
}

impl Node {
    async fn connect(arguments: &TopArgs) -> anyhow::Result<Self> {
        // The statistics are the same in every database. A user without access to the system
        // database must name another one.
        let database = arguments.server.database()?;
        let client = connect(&arguments.server, database.as_deref().unwrap_or(SYSTEM_DATABASE)).await?;
        let prepare = async |sql| client.prepare(sql).await.map_err(|error| server_error(&error));
        let (counters, running) = (prepare(COUNTERS).await?, prepare(RUNNING).await?);
        Ok(Self { client, counters, running })
    }

    /// Samples the counters.
    async fn sample(&self) -> anyhow::Result<CounterSample> {
        let rows = self.client.query(&self.counters, &[]).await.map_err(|error| server_error(&error))?;
        let tenants = rows.iter().map(Counters::read).collect::<Result<_, _>>();
        Ok(CounterSample { at: Instant::now(), tenants: tenants.context(VERSION_MISMATCH)? })
    }

    /// Returns the longest-running statements and transactions.
    async fn running(&self) -> anyhow::Result<Vec<Running>> {
        let rows = self.client.query(&self.running, &[]).await.map_err(|error| server_error(&error))?;
        rows.iter().map(Running::read).collect::<Result<_, _>>().context(VERSION_MISMATCH)
    }
}

/// The error for rows that cannot be decoded.
const VERSION_MISMATCH: &str =
    "the node's statistics have unexpected columns; use the fulmar command of the node's version";
