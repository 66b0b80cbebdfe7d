//! `fulmar top`: which tenants are busy now, and which statements have been running longest.
//!
//! A node counts what its tenants do from its start on (`fulmar.tenant_stats`). Two looks at these counters, an interval
//! apart, tell what was done in it: [`figures`]. [`screen`] shows that.

mod figures;
mod screen;

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
use figures::{COUNTERS, Counters, Interval, Look, RUNNING, Running};
use screen::Screen;

/// Tenants of a table that has no screen to fit.
const ROWS: usize = 20;

/// Runs `fulmar top`.
pub async fn run(arguments: TopArgs) -> anyhow::Result<()> {
    match or_interrupted(watch(&arguments)).await {
        // There is no other way out.
        Err(error) if !arguments.once && error.is::<Interrupted>() => Ok(()),
        ended => ended,
    }
}

async fn watch(arguments: &TopArgs) -> anyhow::Result<()> {
    let node = Node::connect(arguments).await?;
    let mut before = node.look().await?;
    let mut ticks = tokio::time::interval(arguments.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await; // the first is now
    let is_live = !arguments.once && !arguments.json && std::io::stdout().is_terminal();
    let screen = is_live.then(Screen::begin).transpose()?;
    loop {
        ticks.tick().await;
        let now = node.look().await?;
        let mut interval = Interval::between(&before, &now, node.running().await?);
        before = now;
        interval.sort(arguments.sort);
        let rows = arguments.rows.map(usize::from);
        match &screen {
            Some(screen) => screen.show(&interval, rows)?,
            None => {
                interval.tenants.truncate(rows.unwrap_or(ROWS));
                if arguments.json { output::json(&interval) } else { output::line(&interval.text()) }?;
            }
        }
        if arguments.once {
            return Ok(());
        }
    }
}

/// The node that is looked at.
struct Node {
    client: Client,
    counters: Statement,
    running: Statement,
}

impl Node {
    async fn connect(arguments: &TopArgs) -> anyhow::Result<Self> {
        // The statistics stand in every database; who is no superuser may have to name another one.
        let database = arguments.server.database()?;
        let client = connect(&arguments.server, database.as_deref().unwrap_or(SYSTEM_DATABASE)).await?;
        let prepare = async |sql| client.prepare(sql).await.map_err(|error| server_error(&error));
        let (counters, running) = (prepare(COUNTERS).await?, prepare(RUNNING).await?);
        Ok(Self { client, counters, running })
    }

    /// What the counters stand at.
    async fn look(&self) -> anyhow::Result<Look> {
        let rows = self.client.query(&self.counters, &[]).await.map_err(|error| server_error(&error))?;
        let tenants = rows.iter().map(Counters::read).collect::<Result<_, _>>();
        Ok(Look { at: Instant::now(), tenants: tenants.context(UNEXPECTED)? })
    }

    /// What runs longest.
    async fn running(&self) -> anyhow::Result<Vec<Running>> {
        let rows = self.client.query(&self.running, &[]).await.map_err(|error| server_error(&error))?;
        rows.iter().map(Running::read).collect::<Result<_, _>>().context(UNEXPECTED)
    }
}

/// Another version's, most likely.
const UNEXPECTED: &str = "the node's statistics are not those that this fulmar knows";
