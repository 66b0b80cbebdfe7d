//! `fulmar events`: shows the event log of a node, read from the table `fulmar.events`.

use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use tokio_postgres::{Client, Row};

use crate::cli::EventsArgs;
use crate::client::{connect, from_row, server_error};
use crate::interrupt::{Interrupted, or_interrupted};
use crate::output;
use crate::tenant::SYSTEM_DATABASE;

/// Interval between polls with `--follow`.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// A LIMIT without effect, in SQLite.
const NO_LIMIT: i64 = -1;

/// One event, as printed with `--json`.
#[derive(Serialize)]
struct EventRow {
    id: i64,
    time: String,
    kind: String,
    severity: String,
    tenant: Option<String>,
    user: Option<String>,
    address: Option<String>,
    text: String,
    details: Option<serde_json::Value>,
}

/// Runs `fulmar events`.
pub async fn run(arguments: EventsArgs) -> anyhow::Result<()> {
    match or_interrupted(watch(&arguments)).await {
        // An interruption is the only way to end `--follow`.
        Err(error) if arguments.follow && error.is::<Interrupted>() => Ok(()),
        result => result,
    }
}

async fn watch(arguments: &EventsArgs) -> anyhow::Result<()> {
    let database = arguments.server.database()?;
    let client = connect(&arguments.server, database.as_deref().unwrap_or(SYSTEM_DATABASE)).await?;
    let mut last_id = 0;
    let mut limit = i64::from(arguments.last);
    let tenant = arguments.tenant.as_deref();
    loop {
        for event in newest(&client, last_id, tenant, limit).await? {
            last_id = event.id;
            if arguments.json { output::json(&event) } else { output::line(&event.line()) }?;
        }
        if !arguments.follow {
            if let Some(tenant) = tenant.filter(|_| last_id == 0) {
                eprintln!("fulmar: no events for tenant \"{tenant}\"");
            }
            return Ok(());
        }
        limit = NO_LIMIT;
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Reads the newest events with an id above `after`, at most `limit`, in ascending order.
async fn newest(
    client: &Client,
    after: i64,
    tenant: Option<&str>,
    limit: i64,
) -> anyhow::Result<Vec<EventRow>> {
    // Times always have three decimal places, so that the columns of the output align.
    let sql = format!(
        "SELECT * FROM (SELECT id, strftime('%Y-%m-%d %H:%M:%f', time) AS time, kind, severity, \
         database AS tenant, \"user\", address, text, CAST(details AS TEXT) AS details FROM \
         fulmar.events WHERE id > {after} AND database IS coalesce($1, database) ORDER BY id DESC \
         LIMIT {limit}) ORDER BY id"
    );
    let rows = client.query(&sql, &[&tenant]).await.map_err(|error| server_error(&error))?;
    rows.iter().map(EventRow::read).collect()
}

impl EventRow {
    fn read(row: &Row) -> anyhow::Result<EventRow> {
        let details: Option<String> = row.try_get("details")?;
        let details = details.map(|text| serde_json::from_str(&text)).transpose();
        Ok(from_row!(row => EventRow {
            id, time, kind, severity, tenant, user, address, text;
            details: details.context("the server returned event details that are not JSON")?
        }))
    }

    /// Formats the event as text: time, severity, kind, origin, message and details.
    fn line(&self) -> String {
        let mut line = format!("{} {:7} {:22}", self.time, self.severity, self.kind);
        let origin = [("tenant", &self.tenant), ("user", &self.user), ("address", &self.address)];
        for (name, value) in origin {
            value.iter().for_each(|value| line.push_str(&format!(" {name}={value}")));
        }
        line.push_str(&format!(" {}", self.text));
        self.details.iter().for_each(|details| line.push_str(&format!(" {details}")));
        line
    }
}
