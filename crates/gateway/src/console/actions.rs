//! The actions of the page: administrative statements, as JSON.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fulmar_meta::{SYSTEM_TENANT, SYSTEM_USER};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::timeout;

use super::Console;
use super::answer::Failure;
use super::sections::check_text;
use super::sql::{Sessions, SqlError, identifier, string};
use crate::events::{Actor, Event, Kind};
use crate::identity::CONSOLE_APPLICATION;
use crate::tokens::AdminToken;

/// How long a request waits for the end of its statement.
const WAIT: Duration = Duration::from_secs(5);
/// Maximum time until the catalog of this node is current.
const CATALOG_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum duration of a statement. It is then cancelled.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// A request. `partition` is that of the database whose data the operator sees: the name may have
/// been given to another database since. The page always sends it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "action", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Action {
    /// Moves a database to a node.
    Move { database: String, partition: Option<u64>, node: String, mechanism: Option<String> },
    /// Cancels the move of a database.
    CancelMove { database: String, partition: Option<u64> },
    /// The controller does not move the database.
    Pin { database: String, partition: Option<u64> },
    /// The controller may move the database again.
    Unpin { database: String, partition: Option<u64> },
    /// Restores a database to a time.
    Restore { database: String, partition: Option<u64>, timestamp: String },
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
            Action::Move { database, node, mechanism, .. } => {
                let mut rest = format!("MOVE TO {}", name("node", node)?);
                if let Some(mechanism) = mechanism {
                    rest.push_str(&format!(" USING {}", name("mechanism", mechanism)?));
                }
                of(database, &rest)
            }
            Action::CancelMove { database, .. } => of(database, "CANCEL MOVE"),
            Action::Pin { database, .. } => of(database, "PIN"),
            Action::Unpin { database, .. } => of(database, "UNPIN"),
            Action::Restore { database, timestamp, .. } => {
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

/// Refuses an action if the database with its name has another partition than the operator sees.
async fn check_partition(console: &Console, action: &Action) -> Result<(), Failure> {
    let (Action::Move { database, partition: Some(shown), .. }
    | Action::CancelMove { database, partition: Some(shown) }
    | Action::Pin { database, partition: Some(shown) }
    | Action::Unpin { database, partition: Some(shown) }
    | Action::Restore { database, partition: Some(shown), .. }) = action
    else {
        return Ok(());
    };
    let catalog = &console.source.catalog;
    if !matches!(timeout(CATALOG_TIMEOUT, catalog.catch_up()).await, Ok(Ok(()))) {
        return Err(Failure::timed_out());
    }
    match catalog.tenant(database) {
        Some(tenant) if tenant.partition.0 != *shown => Err(Failure::replaced(database)),
        // The statement reports a database that does not exist.
        _ => Ok(()),
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// The statement continues. Its end is an event, and is sent to the open pages.
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
    check_partition(console, action).await?;
    let statement = Statement { sql, token: token.name.clone(), address };
    console.source.authorizer.event_log.record(statement.event(Kind::ConsoleStatement));
    let (ended, mut end) = oneshot::channel::<Result<(), SqlError>>();
    let console = console.clone();
    tokio::spawn(async move {
        let run = statement.run(&console.sessions);
        if let Some(outcome) = console.closing.run_until_cancelled(run).await
            && let Err(outcome) = ended.send(outcome)
        {
            statement.report(&console, outcome);
        }
        drop(permit);
    });
    let outcome = match timeout(WAIT, &mut end).await {
        Ok(outcome) => outcome.map_err(|_| Failure::closing())?,
        Err(_) => {
            // An outcome that is sent after this is reported as an event.
            end.close();
            let Ok(outcome) = end.try_recv() else { return Ok(Outcome::Running) };
            outcome
        }
    };
    Ok(outcome.map(|()| Outcome::Done)?)
}

/// A statement that runs in the background.
struct Statement {
    sql: String,
    /// The name of the token that authorized it.
    token: String,
    address: IpAddr,
}

impl Statement {
    async fn run(&self, sessions: &Sessions) -> Result<(), SqlError> {
        let (address, application) = (Some(self.address), format!("{CONSOLE_APPLICATION} ({})", self.token));
        let mut session = sessions.open(SYSTEM_TENANT, address, &application, STATEMENT_TIMEOUT).await?;
        session.query(&self.sql).await.map(drop)
    }

    fn event(&self, kind: Kind) -> Event {
        let actor = Actor { user: Some(SYSTEM_USER), address: Some(self.address) };
        let event = Event::new(kind).by(actor);
        event.detail("token", self.token.as_str()).detail("statement", self.sql.as_str())
    }

    /// Reports the outcome if the request was answered before: as an event, and to the open pages.
    fn report(&self, console: &Console, outcome: Result<(), SqlError>) {
        let result = json!({ "token": self.token, "statement": self.sql, "error": outcome.as_ref().err() });
        let event = match outcome {
            Ok(()) => self.event(Kind::ConsoleCompleted),
            Err(error) => {
                let event = self.event(Kind::ConsoleFailed);
                event.detail("sqlstate", error.state).detail("problem", error.message)
            }
        };
        console.source.authorizer.event_log.record(event);
        // Fails if no page is open.
        let _ = console.results.send(result.to_string().into());
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
            (r#"{"action":"pin","database":"a","partition":7}"#, r#"ALTER DATABASE "a" PIN"#),
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
            r#"{"action":"pin","database":"a","partition":-1}"#,
            "[]",
        ] {
            assert!(parse(json).is_err(), "{json}");
        }
        let long = "a".repeat(300);
        for database in ["a\0b", "a\nb", long.as_str()] {
            let pin = Action::Pin { database: database.to_owned(), partition: None };
            assert!(pin.sql().is_err(), "{database:?}");
        }
    }
}
