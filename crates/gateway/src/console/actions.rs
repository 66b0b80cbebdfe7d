//! The actions of the page: administrative statements, as JSON.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fulmar_meta::{SYSTEM_TENANT, SYSTEM_USER};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::timeout;

use super::Console;
use super::answer::Failure;
use super::sections::{APPLICATION, check_text};
use super::sql::{SqlError, identifier, string};
use crate::events::{Actor, Event, Kind};
use crate::tokens::AdminToken;

/// How long a request waits for the end of its statement.
const WAIT: Duration = Duration::from_secs(5);
/// Maximum duration of a statement. It is then cancelled.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// A request.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "action", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Action {
    /// Moves a database to a node.
    Move { database: String, node: String, mechanism: Option<String> },
    /// Cancels the move of a database.
    CancelMove { database: String },
    /// The controller does not move the database.
    Pin { database: String },
    /// The controller may move the database again.
    Unpin { database: String },
    /// Restores a database to a time.
    Restore { database: String, timestamp: String },
    /// Nothing is moved to the node.
    Forbid { node: String },
    /// Databases may be moved to the node again.
    Allow { node: String },
    /// Gives up the controller's plan.
    CancelPlan {},
    /// Sets the controller's mode.
    Mode { mode: String },
}

impl Action {
    /// The statement.
    fn sql(&self) -> Result<String, Failure> {
        let name = |what: &str, name: &str| check_text(what, name).map(|()| identifier(name));
        let of =
            |database: &str, rest: &str| Ok(format!("ALTER DATABASE {} {rest}", name("database", database)?));
        match self {
            Action::Move { database, node, mechanism } => {
                let mut rest = format!("MOVE TO {}", name("node", node)?);
                if let Some(mechanism) = mechanism {
                    rest.push_str(&format!(" USING {}", name("mechanism", mechanism)?));
                }
                of(database, &rest)
            }
            Action::CancelMove { database } => of(database, "CANCEL MOVE"),
            Action::Pin { database } => of(database, "PIN"),
            Action::Unpin { database } => of(database, "UNPIN"),
            Action::Restore { database, timestamp } => {
                check_text("timestamp", timestamp)?;
                of(database, &format!("RESTORE TO TIMESTAMP {}", string(timestamp)))
            }
            Action::Forbid { node } => Ok(format!("ALTER NODE {} FORBID", name("node", node)?)),
            Action::Allow { node } => Ok(format!("ALTER NODE {} ALLOW", name("node", node)?)),
            Action::CancelPlan {} => Ok("ALTER SYSTEM CANCEL PLAN".to_owned()),
            Action::Mode { mode } => {
                check_text("mode", mode)?;
                Ok(format!("ALTER SYSTEM SET control.mode = {}", string(mode)))
            }
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// The statement continues. Its effect is seen in the sections.
    Running,
}

/// Runs the statement of an action. It continues if the request is dropped.
pub(super) async fn run(
    console: &Arc<Console>,
    action: &Action,
    token: &AdminToken,
    address: IpAddr,
    permit: OwnedSemaphorePermit,
) -> Result<Outcome, Failure> {
    let sql = action.sql()?;
    let actor = Actor { user: Some(SYSTEM_USER), address: Some(address) };
    let event = Event::new(Kind::ConsoleStatement).by(actor);
    let event = event.detail("token", token.name.as_str()).detail("statement", sql.as_str());
    console.source.authorizer.event_log.record(event);
    let (ended, end) = oneshot::channel::<Result<(), SqlError>>();
    let (sessions, closing) = (console.sessions.clone(), console.closing.clone());
    let application = format!("{APPLICATION} ({})", token.name);
    tokio::spawn(async move {
        let run = async {
            let mut session =
                sessions.open(SYSTEM_TENANT, Some(address), &application, STATEMENT_TIMEOUT).await?;
            session.query(&sql).await.map(drop)
        };
        if let Some(outcome) = closing.run_until_cancelled(run).await {
            // The request may have been answered.
            let _ = ended.send(outcome);
        }
        drop(permit);
    });
    match timeout(WAIT, end).await {
        Ok(Ok(outcome)) => Ok(outcome.map(|()| Outcome::Done)?),
        Ok(Err(_)) => Err(Failure::closing()),
        Err(_) => Ok(Outcome::Running),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> serde_json::Result<Action> {
        serde_json::from_str(json)
    }

    #[test]
    fn actions_are_administrative_statements() {
        for (json, sql) in [
            (r#"{"action":"move","database":"a\"b","node":"n2"}"#, r#"ALTER DATABASE "a""b" MOVE TO "n2""#),
            (
                r#"{"action":"move","database":"a","node":"n2","mechanism":"live"}"#,
                r#"ALTER DATABASE "a" MOVE TO "n2" USING "live""#,
            ),
            (r#"{"action":"cancel_move","database":"a"}"#, r#"ALTER DATABASE "a" CANCEL MOVE"#),
            (r#"{"action":"pin","database":"a"}"#, r#"ALTER DATABASE "a" PIN"#),
            (r#"{"action":"unpin","database":"a"}"#, r#"ALTER DATABASE "a" UNPIN"#),
            (
                r#"{"action":"restore","database":"a","timestamp":"2026-11-27' X"}"#,
                r#"ALTER DATABASE "a" RESTORE TO TIMESTAMP '2026-11-27'' X'"#,
            ),
            (r#"{"action":"forbid","node":"n"}"#, r#"ALTER NODE "n" FORBID"#),
            (r#"{"action":"allow","node":"n"}"#, r#"ALTER NODE "n" ALLOW"#),
            (r#"{"action":"cancel_plan"}"#, "ALTER SYSTEM CANCEL PLAN"),
            (r#"{"action":"mode","mode":"on"}"#, "ALTER SYSTEM SET control.mode = 'on'"),
        ] {
            assert_eq!(parse(json).unwrap().sql().unwrap(), sql, "{json}");
        }
    }

    #[test]
    fn other_requests_are_refused() {
        for json in [
            "{}",
            r#"{"action":"drop","database":"a"}"#,
            r#"{"action":"pin"}"#,
            r#"{"action":"pin","database":"a","sql":"b"}"#,
            r#"{"action":"pin","database":7}"#,
            "[]",
        ] {
            assert!(parse(json).is_err(), "{json}");
        }
        let long = "a".repeat(300);
        for database in ["a\0b", "a\nb", long.as_str()] {
            assert!(Action::Pin { database: database.to_owned() }.sql().is_err(), "{database:?}");
        }
    }
}
