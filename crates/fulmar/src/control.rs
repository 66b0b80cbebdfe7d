//! `fulmar control` and `fulmar decisions`: the cluster's controller, by SQL statements.

use serde::Serialize;
use tokio_postgres::{Client, Row};

use crate::cli::{ControlAction, ControlArgs, DecisionsArgs};
use crate::client::{connect, from_row, server_error};
use crate::output;
use crate::tenant::{SYSTEM_DATABASE, literal, quoted};

/// A row of `fulmar.control`.
#[derive(Serialize)]
struct ControlRow {
    name: String,
    value: String,
    default: Option<String>,
    about: String,
}

/// Runs `fulmar control`.
pub async fn run(arguments: ControlArgs) -> anyhow::Result<()> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let (statement, done) = match &arguments.action {
        ControlAction::Show => return show(&client, arguments.json).await,
        ControlAction::Set { name, value } => (
            format!("ALTER SYSTEM SET {} = {}", setting(name), literal(value)),
            format!("set {name} to {value}"),
        ),
        ControlAction::Reset { name } => {
            (format!("ALTER SYSTEM RESET {}", setting(name)), format!("reset {name}"))
        }
        ControlAction::Pin { tenant } => {
            (format!("ALTER DATABASE {} PIN", quoted(tenant)), format!("pinned {tenant}"))
        }
        ControlAction::Unpin { tenant } => {
            (format!("ALTER DATABASE {} UNPIN", quoted(tenant)), format!("unpinned {tenant}"))
        }
        ControlAction::Forbid { node } => {
            (format!("ALTER NODE {} FORBID", literal(node)), format!("nothing is moved to {node}"))
        }
        ControlAction::Allow { node } => {
            (format!("ALTER NODE {} ALLOW", literal(node)), format!("tenants may be moved to {node}"))
        }
        ControlAction::Cancel => {
            ("ALTER SYSTEM CANCEL PLAN".to_owned(), "the plan in progress is given up".to_owned())
        }
    };
    client.batch_execute(&statement).await.map_err(|error| server_error(&error))?;
    match arguments.json {
        true => output::json(&serde_json::json!({ "done": done })),
        false => output::line(&done),
    }
}

fn setting(name: &str) -> String {
    format!("control.{}", quoted(name))
}

async fn show(client: &Client, json: bool) -> anyhow::Result<()> {
    let rows = client.query("SELECT * FROM fulmar.control", &[]).await;
    let rows = rows.map_err(|error| server_error(&error))?;
    let read = |row: &Row| Ok(from_row!(row => ControlRow { name, value, default, about }));
    let rows: Vec<ControlRow> = rows.iter().map(read).collect::<Result<_, tokio_postgres::Error>>()?;
    if json {
        return output::json(&rows);
    }
    let mut table = output::table(["name", "value", "default", "about"]);
    for row in &rows {
        table.add_row([&*row.name, &*row.value, row.default.as_deref().unwrap_or_default(), &*row.about]);
    }
    output::line(&table.to_string())
}

/// Runs `fulmar decisions`.
pub async fn decisions(arguments: DecisionsArgs) -> anyhow::Result<()> {
    let client = connect(&arguments.server, SYSTEM_DATABASE).await?;
    let sql = "SELECT number, strftime('%Y-%m-%d %H:%M:%S', time), mode, what, why, predicted, \
               coalesce(outcome, 'in progress'), report FROM fulmar.decisions ORDER BY number DESC LIMIT $1::bigint";
    let rows = client.query(sql, &[&i64::from(arguments.limit)]).await;
    let rows = rows.map_err(|error| server_error(&error))?;
    if arguments.json {
        let report = |row: &Row| Ok(serde_json::from_str(&row.try_get::<_, String>(7)?)?);
        let reports: Vec<serde_json::Value> = rows.iter().map(report).collect::<anyhow::Result<_>>()?;
        return output::json(&reports);
    }
    if arguments.why {
        return rows.iter().try_for_each(explain);
    }
    let mut table = output::table(["number", "time", "mode", "decision", "outcome"]);
    for row in &rows {
        let number: i64 = row.try_get(0)?;
        let text = |at: usize| row.try_get::<_, String>(at);
        table.add_row([number.to_string(), text(1)?, text(2)?, text(3)?, text(6)?]);
    }
    output::line(&table.to_string())
}

/// Prints a decision with its reasons.
fn explain(row: &Row) -> anyhow::Result<()> {
    let number: i64 = row.try_get(0)?;
    let text = |at: usize| row.try_get::<_, String>(at);
    output::line(&format!("{number}  {}  {}  {}", text(1)?, text(2)?, text(3)?))?;
    for (name, at) in [("why", 4), ("predicted", 5), ("outcome", 6)] {
        output::line(&format!("    {name:10} {}", text(at)?))?;
    }
    Ok(())
}
