//! `fulmar events`: the journal of a node, as a client of `fulmar.events`.

use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use tokio_postgres::{Client, Row};

use crate::cli::EventsArgs;
use crate::client::{connect, from_row, server_error};
use crate::interrupt::{Interrupted, or_interrupted};
use crate::output;
use crate::tenant::SYSTEM_DATABASE;

/// How often a node is asked for more.
const PERIOD: Duration = Duration::from_secs(1);
/// As SQLite's LIMIT: all of them.
const ALL: i64 = -1;

/// A line.
#[derive(Serialize)]
struct Shown {
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
        // There is no other way out.
        Err(error) if arguments.follow && error.is::<Interrupted>() => Ok(()),
        ended => ended,
    }
}

async fn watch(arguments: &EventsArgs) -> anyhow::Result<()> {
    let database = arguments.server.database()?;
    let client = connect(&arguments.server, database.as_deref().unwrap_or(SYSTEM_DATABASE)).await?;
    let mut last_id = 0;
    let mut at_most = i64::from(arguments.last);
    let tenant = arguments.tenant.as_deref();
    loop {
        for event in newest(&client, last_id, tenant, at_most).await? {
            last_id = event.id;
            if arguments.json { output::json(&event) } else { output::line(&event.line()) }?;
        }
        if !arguments.follow {
            if let Some(tenant) = tenant.filter(|_| last_id == 0) {
                eprintln!("fulmar: no events of {tenant}");
            }
            return Ok(());
        }
        at_most = ALL;
        tokio::time::sleep(PERIOD).await;
    }
}

/// The newest events after one, the oldest first.
async fn newest(
    client: &Client,
    after: i64,
    tenant: Option<&str>,
    at_most: i64,
) -> anyhow::Result<Vec<Shown>> {
    // Times have three digits behind the point, always: what stands in a line below another begins where that does.
    let sql = format!(
        "SELECT * FROM (SELECT id, strftime('%Y-%m-%d %H:%M:%f', time) AS time, kind, severity, database AS tenant, \
         \"user\", address, text, CAST(details AS TEXT) AS details FROM fulmar.events \
         WHERE id > {after} AND database IS coalesce($1, database) ORDER BY id DESC LIMIT {at_most}) ORDER BY id"
    );
    let rows = client.query(&sql, &[&tenant]).await.map_err(|error| server_error(&error))?;
    rows.iter().map(Shown::read).collect()
}

impl Shown {
    fn read(row: &Row) -> anyhow::Result<Shown> {
        let details: Option<String> = row.try_get("details")?;
        let details = details.map(|text| serde_json::from_str(&text)).transpose();
        Ok(from_row!(row => Shown {
            id, time, kind, severity, tenant, user, address, text;
            details: details.context("the server answered with details that are no JSON")?
        }))
    }

    /// For people: the time, the kind, where, by whom, what, and what else there is to know.
    fn line(&self) -> String {
        let mut line = format!("{} {:7} {:22}", self.time, self.severity, self.kind);
        let named = [("tenant", &self.tenant), ("user", &self.user), ("address", &self.address)];
        for (name, value) in named {
            value.iter().for_each(|value| line.push_str(&format!(" {name}={value}")));
        }
        line.push_str(&format!(" {}", self.text));
        self.details.iter().for_each(|details| line.push_str(&format!(" {details}")));
        line
    }
}
