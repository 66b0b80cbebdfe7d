//! A session: a terminal and its connection, with retries, reconnects and their counts.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::Target;
use crate::client::{Client, Error, Statement};
use crate::measure::{Event, Meter};
use crate::workload::{AttemptError, Dialect, Terminal, TerminalId, TransactionOutcome};

/// The maximum number of attempts of a transaction that the server rejects with a retryable error.
const MAX_ATTEMPTS: u32 = 100;

/// Delay between two connection attempts to a server that does not respond.
const RECONNECT_DELAY: Duration = Duration::from_millis(20);

/// The state that all sessions of a driver thread share.
pub(super) struct Shared {
    pub(super) meter: RefCell<Meter>,
    pub(super) dialect: Dialect,
    /// How long a session tries to reconnect. With zero, a lost connection ends the run.
    pub(super) reconnect_timeout: Duration,
}

/// A terminal and its connection.
pub(super) struct Session<T: Terminal> {
    pub(super) terminal: T,
    pub(super) place: TerminalId,
    target: Target,
    shared: Rc<Shared>,
    connection: Option<Connection<T::Statements>>,
}

struct Connection<S> {
    client: Client,
    statements: S,
    rollback: Statement,
}

impl<T: Terminal> Session<T> {
    pub(super) fn new(terminal: T, place: TerminalId, target: Target, shared: Rc<Shared>) -> Session<T> {
        Session { terminal, place, target, shared, connection: None }
    }

    /// Connects unless the session is connected. Retries for as long as `reconnect_timeout` allows.
    pub(super) async fn connect(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.shared.reconnect_timeout;
        while self.connection.is_none() {
            match self.try_connect().await {
                Ok(connection) => self.connection = Some(connection),
                Err(error) if error.ends_session() && Instant::now() < deadline => {
                    tokio::time::sleep(RECONNECT_DELAY).await;
                }
                Err(error) => {
                    let context = format!("could not connect to {}", self.target);
                    return Err(anyhow::Error::new(error).context(context));
                }
            }
        }
        Ok(())
    }

    async fn try_connect(&self) -> Result<Connection<T::Statements>, Error> {
        let mut client = Client::connect(&self.target).await?;
        let rollback = client.prepare("ROLLBACK", &[]).await?;
        let statements = self.terminal.prepare(&mut client, self.shared.dialect).await?;
        Ok(Connection { client, statements, rollback })
    }

    /// Runs the drawn transaction, which was due at `due`, until it ends or fails. An error ends
    /// the run.
    pub(super) async fn transaction(&mut self, kind: usize, due: Instant) -> anyhow::Result<()> {
        let event = self.event(kind, due);
        for attempt in 0..MAX_ATTEMPTS {
            self.connect().await?;
            let error = match self.attempt().await {
                Ok((done, statements)) => {
                    self.shared.meter.borrow_mut().done(event, done, Instant::now(), statements);
                    return Ok(());
                }
                Err(AttemptError::Client(error)) => error,
                Err(AttemptError::Data(what)) => anyhow::bail!("{what}"),
            };
            if attempt == 1 {
                self.shared.meter.borrow_mut().retried_again += 1;
            }
            if !self.handle_error(&error).await? {
                self.shared.meter.borrow_mut().record_failure(event, Instant::now(), &error);
                return Ok(());
            }
        }
        let error = Error::Protocol("the transaction was rejected in each of 100 attempts");
        self.shared.meter.borrow_mut().record_failure(event, Instant::now(), &error);
        Ok(())
    }

    fn event(&self, kind: usize, due: Instant) -> Event {
        Event { tenant: self.place.tenant, kind, due }
    }

    /// Counts a transaction that was cancelled because it was too late.
    pub(super) fn cancelled(&self, kind: usize, due: Instant, now: Instant) {
        self.shared.meter.borrow_mut().cancelled(self.event(kind, due), now);
    }

    /// Counts a transaction that was due but is not sent because the run ends.
    pub(super) fn unsent(&self, kind: usize, due: Instant) {
        self.shared.meter.borrow_mut().unsent(self.event(kind, due));
    }

    /// Runs one attempt. Returns its outcome and the number of statements.
    async fn attempt(&mut self) -> Result<(TransactionOutcome, u64), AttemptError> {
        let Connection { client, statements, .. } = self.connection.as_mut().ok_or(Error::Closed)?;
        let before = client.executed();
        let done = self.terminal.attempt(client, statements).await?;
        Ok((done, client.executed() - before))
    }

    /// Counts an error and rolls back. Returns true if a retry makes sense.
    async fn handle_error(&mut self, error: &Error) -> anyhow::Result<bool> {
        if let Some(sqlstate) = error.sqlstate() {
            self.shared.meter.borrow_mut().refused(sqlstate);
        }
        if error.ends_session() {
            return self.connection_lost(error);
        }
        match self.roll_back().await {
            Ok(()) => Ok(error.is_retryable()),
            Err(error) => self.connection_lost(&error),
        }
    }

    /// Counts a lost connection. It is unknown whether the transaction committed, so the
    /// transaction is not retried.
    fn connection_lost(&mut self, error: &Error) -> anyhow::Result<bool> {
        self.connection = None;
        self.shared.meter.borrow_mut().lost();
        anyhow::ensure!(
            !self.shared.reconnect_timeout.is_zero(),
            "lost connection to {}: {error}",
            self.target
        );
        Ok(false)
    }

    async fn roll_back(&mut self) -> Result<(), Error> {
        match &mut self.connection {
            Some(Connection { client, rollback, .. }) if client.in_transaction() => {
                client.execute(rollback, &[]).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Closes the connection.
    pub(super) async fn close(mut self) {
        if let Some(connection) = self.connection.take() {
            // The run has ended, so a failure to close does not matter.
            drop(connection.client.close().await);
        }
    }
}
