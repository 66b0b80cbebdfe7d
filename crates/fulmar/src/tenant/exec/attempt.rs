//! The script in one tenant.

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error};

use super::Failure;
use super::state::State;
use crate::cli::ServerArgs;
use crate::client::{ServerError, connect, server_error};
use crate::tenant::texts;

/// How often a transaction is run that fails for others' sake. The second time it takes its turn first, so more is rare.
const TRIES: usize = 5;

/// Runs the script.
pub(super) struct Runner<'a> {
    pub(super) server: &'a ServerArgs,
    pub(super) script: &'a str,
    pub(super) state: Option<&'a State>,
    /// All of it in one transaction.
    pub(super) whole: bool,
}

/// Why it was not done.
enum Stop {
    Server(Error),
    /// No answer to the COMMIT of this transaction has come.
    Unknown(u64, Error),
    Other(anyhow::Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Server(error)
    }
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Self {
        Stop::Other(error)
    }
}

impl Runner<'_> {
    /// Runs it in a tenant, unless it turns out to have been done.
    pub(super) async fn run(&self, tenant: &str) -> Result<(), Failure> {
        let outcome = match self.settle(tenant).await {
            Err(Stop::Unknown(transaction, error)) => match self.asked(tenant, transaction).await {
                Ok(true) => Ok(()),
                Ok(false) => Err(Stop::Server(error)),
                Err(_) => Err(Stop::Unknown(transaction, error)),
            },
            outcome => outcome,
        };
        let noted = match outcome {
            Ok(()) => self.state.map_or(Ok(()), |state| state.done(tenant)).map_err(Stop::Other),
            Err(stop) => Err(stop),
        };
        noted.map_err(|stop| stop.in_tenant(tenant))
    }

    /// Does what an earlier run has left open.
    async fn settle(&self, tenant: &str) -> Result<(), Stop> {
        if let Some(transaction) = self.state.and_then(|state| state.begun(tenant))
            && self.asked(tenant, transaction).await?
        {
            return Ok(());
        }
        let client = connect(self.server, tenant).await?;
        if !self.whole {
            return Ok(client.batch_execute(self.script).await?);
        }
        for _ in 1..TRIES {
            match self.transaction(&client, tenant).await {
                Err(Stop::Server(error)) if for_others_sake(&error) => {
                    client.batch_execute("ROLLBACK").await?;
                }
                outcome => return outcome,
            }
        }
        self.transaction(&client, tenant).await
    }

    async fn transaction(&self, client: &Client, tenant: &str) -> Result<(), Stop> {
        client.batch_execute("BEGIN").await?;
        let transaction = transaction_id(client).await?;
        client.batch_execute(self.script).await?;
        if transaction_id(client).await? != transaction {
            let advice = "the script ends its transaction itself; take its COMMIT or ROLLBACK out";
            return Err(anyhow::anyhow!(advice).into());
        }
        if let Some(state) = self.state {
            state.begin(tenant, transaction)?;
        }
        match client.batch_execute("COMMIT").await {
            Err(error) if error.as_db_error().is_none() => Err(Stop::Unknown(transaction, error)),
            outcome => Ok(outcome?),
        }
    }

    /// Whether a transaction has committed. Asking decides: from now on it cannot, if it has not.
    async fn asked(&self, tenant: &str, transaction: u64) -> anyhow::Result<bool> {
        let client = connect(self.server, tenant).await?;
        let sql = format!("SELECT coalesce(pg_xact_status({transaction}), 'forgotten')");
        match texts(&client, &sql).await?.as_slice() {
            [[status]] if status == "committed" => Ok(true),
            [[status]] if status == "aborted" => Ok(false),
            _ => anyhow::bail!(
                "the server does not remember whether transaction {transaction}, which ran the script, has \
                 committed; look at the tenant, then change the transaction of its last line in the state file to \
                 null if the script has to be run, or its \"done\" to true if not"
            ),
        }
    }
}

/// The transaction's id; outside of one, that of a transaction that has already ended.
async fn transaction_id(client: &Client) -> anyhow::Result<u64> {
    match texts(client, "SELECT pg_current_xact_id()").await?.as_slice() {
        [[id]] => Ok(id.parse()?),
        _ => anyhow::bail!("the server did not tell the transaction's id"),
    }
}

/// Whether running it again may help.
fn for_others_sake(error: &Error) -> bool {
    error.code().is_some_and(|code| {
        [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].contains(code)
    })
}

impl Stop {
    fn in_tenant(self, tenant: &str) -> Failure {
        let error = match self {
            Stop::Server(error) => server_error(&error),
            Stop::Unknown(transaction, error) => server_error(&error).context(format!(
                "the connection was lost at the COMMIT of transaction {transaction}; whether it has committed the \
                 next run will ask"
            )),
            Stop::Other(error) => error,
        };
        let sqlstate = error.downcast_ref::<ServerError>().and_then(|said| said.state.clone());
        Failure { tenant: tenant.to_owned(), sqlstate, message: format!("{error:#}") }
    }
}
