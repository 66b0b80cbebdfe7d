//! Runs the script in one tenant.
//!
//! With a state file, the script commits at most once: the id of the transaction is recorded before
//! COMMIT. If the response to COMMIT is lost, this run or the next one asks the server for the
//! outcome of that transaction before it runs the script again.

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error};

use super::Failure;
use super::state::StateFile;
use crate::cli::ServerArgs;
use crate::client::{ServerError, connect, server_error};
use crate::tenant::texts;

/// Maximum number of attempts for a transaction that fails with a serialization failure or a
/// deadlock. From the second attempt on it takes the partition's turn first, so more are rare.
const MAX_ATTEMPTS: usize = 5;

/// Runs the script in tenants.
pub(super) struct Runner<'a> {
    pub(super) server: &'a ServerArgs,
    pub(super) script: &'a str,
    pub(super) state: Option<&'a StateFile>,
    /// Whether to run the script in one transaction.
    pub(super) single_transaction: bool,
}

/// The error of an attempt.
enum AttemptError {
    Server(Error),
    /// The response to the COMMIT of this transaction was lost.
    UnknownOutcome(u64, Error),
    Other(anyhow::Error),
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> Self {
        AttemptError::Server(error)
    }
}

impl From<anyhow::Error> for AttemptError {
    fn from(error: anyhow::Error) -> Self {
        AttemptError::Other(error)
    }
}

impl Runner<'_> {
    /// Runs the script in a tenant, unless a transaction of an earlier run has committed.
    pub(super) async fn run(&self, tenant: &str) -> Result<(), Failure> {
        let outcome = match self.resume(tenant).await {
            Err(AttemptError::UnknownOutcome(transaction, error)) => {
                match self.has_committed(tenant, transaction).await {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(AttemptError::Server(error)),
                    Err(_) => Err(AttemptError::UnknownOutcome(transaction, error)),
                }
            }
            outcome => outcome,
        };
        let recorded = match outcome {
            Ok(()) => {
                self.state.map_or(Ok(()), |state| state.record_done(tenant)).map_err(AttemptError::Other)
            }
            Err(error) => Err(error),
        };
        recorded.map_err(|error| error.in_tenant(tenant))
    }

    /// Checks the outcome of an earlier run's transaction, and runs the script if it has not
    /// committed.
    async fn resume(&self, tenant: &str) -> Result<(), AttemptError> {
        if let Some(transaction) = self.state.and_then(|state| state.pending_transaction(tenant))
            && self.has_committed(tenant, transaction).await?
        {
            return Ok(());
        }
        let client = connect(self.server, tenant).await?;
        if !self.single_transaction {
            return Ok(client.batch_execute(self.script).await?);
        }
        for _ in 1..MAX_ATTEMPTS {
            match self.transaction(&client, tenant).await {
                Err(AttemptError::Server(error)) if is_retryable(&error) => {
                    client.batch_execute("ROLLBACK").await?;
                }
                outcome => return outcome,
            }
        }
        self.transaction(&client, tenant).await
    }

    async fn transaction(&self, client: &Client, tenant: &str) -> Result<(), AttemptError> {
        client.batch_execute("BEGIN").await?;
        let transaction = transaction_id(client).await?;
        client.batch_execute(self.script).await?;
        if transaction_id(client).await? != transaction {
            let message = "the script ends its transaction; remove COMMIT and ROLLBACK from it";
            return Err(anyhow::anyhow!(message).into());
        }
        if let Some(state) = self.state {
            state.record_begun(tenant, transaction)?;
        }
        match client.batch_execute("COMMIT").await {
            Err(error) if error.as_db_error().is_none() => {
                Err(AttemptError::UnknownOutcome(transaction, error))
            }
            outcome => Ok(outcome?),
        }
    }

    /// Returns true if a transaction has committed. The question decides an open transaction: it is
    /// aborted, and can no longer commit.
    async fn has_committed(&self, tenant: &str, transaction: u64) -> anyhow::Result<bool> {
        let client = connect(self.server, tenant).await?;
        let sql = format!("SELECT coalesce(pg_xact_status({transaction}), 'forgotten')");
        match texts(&client, &sql).await?.as_slice() {
            [[status]] if status == "committed" => Ok(true),
            [[status]] if status == "aborted" => Ok(false),
            _ => anyhow::bail!(
                "the server no longer knows whether transaction {transaction}, which ran the \
                 script, has committed; check the tenant, then edit its last line in the state \
                 file: set \"transaction\" to null to run the script, or \"done\" to true to skip \
                 it"
            ),
        }
    }
}

/// Returns the id of the current transaction. Outside a transaction block, that is the query's own
/// transaction, which has already ended.
async fn transaction_id(client: &Client) -> anyhow::Result<u64> {
    match texts(client, "SELECT pg_current_xact_id()").await?.as_slice() {
        [[id]] => Ok(id.parse()?),
        _ => anyhow::bail!("the server did not return the transaction id"),
    }
}

/// Returns true for errors caused by concurrent transactions, after which a retry can succeed.
fn is_retryable(error: &Error) -> bool {
    error.code().is_some_and(|code| {
        [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED].contains(code)
    })
}

impl AttemptError {
    fn in_tenant(self, tenant: &str) -> Failure {
        let error = match self {
            AttemptError::Server(error) => server_error(&error),
            AttemptError::UnknownOutcome(transaction, error) => server_error(&error).context(format!(
                "the connection was lost during COMMIT of transaction {transaction}; the next run \
                 checks whether it has committed"
            )),
            AttemptError::Other(error) => error,
        };
        let sqlstate = error.downcast_ref::<ServerError>().and_then(|error| error.state.clone());
        Failure { tenant: tenant.to_owned(), sqlstate, message: format!("{error:#}") }
    }
}
