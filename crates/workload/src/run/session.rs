//! One connection and the terminal that runs on it: retries, reconnects, and what is counted of both.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::Target;
use crate::client::{Client, Error, Statement};
use crate::measure::{Event, Meter};
use crate::workload::{Dialect, Done, Failure, Place, Terminal};

/// A transaction that the server keeps refusing is given up after this many tries.
const MAX_TRIES: u32 = 100;

/// Between two attempts to reach a server that is away.
const RECONNECT_PAUSE: Duration = Duration::from_millis(20);

/// What all sessions of a driver thread share.
pub(super) struct Shared {
    pub(super) meter: RefCell<Meter>,
    pub(super) dialect: Dialect,
    /// How long a session tries to reach a server that is away; zero: losing the server ends the run.
    pub(super) patience: Duration,
}

/// A terminal and its connection.
pub(super) struct Session<T: Terminal> {
    pub(super) terminal: T,
    pub(super) place: Place,
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
    pub(super) fn new(terminal: T, place: Place, target: Target, shared: Rc<Shared>) -> Session<T> {
        Session { terminal, place, target, shared, connection: None }
    }

    /// Connects, unless it is connected; waits within the run's patience for a server that is away.
    pub(super) async fn connect(&mut self) -> anyhow::Result<()> {
        let give_up = Instant::now() + self.shared.patience;
        while self.connection.is_none() {
            match self.try_connect().await {
                Ok(connection) => self.connection = Some(connection),
                Err(error) if error.ends_session() && Instant::now() < give_up => {
                    tokio::time::sleep(RECONNECT_PAUSE).await;
                }
                Err(error) => {
                    return Err(anyhow::Error::new(error).context(format!("cannot use {}", self.target)));
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

    /// Runs the transaction that was drawn and was due at `due`, until it ends or is given up. An error ends the run.
    pub(super) async fn transaction(&mut self, kind: usize, due: Instant) -> anyhow::Result<()> {
        let event = self.event(kind, due);
        for tried in 0..MAX_TRIES {
            self.connect().await?;
            let error = match self.attempt().await {
                Ok((done, statements)) => {
                    self.shared.meter.borrow_mut().done(event, done, Instant::now(), statements);
                    return Ok(());
                }
                Err(Failure::Client(error)) => error,
                Err(Failure::Data(what)) => anyhow::bail!("{what}"),
            };
            if tried == 1 {
                self.shared.meter.borrow_mut().retried_again += 1;
            }
            if !self.after(&error).await? {
                self.shared.meter.borrow_mut().gave_up(event, Instant::now(), &error);
                return Ok(());
            }
        }
        let error = Error::Protocol("a transaction was refused a hundred times in a row");
        self.shared.meter.borrow_mut().gave_up(event, Instant::now(), &error);
        Ok(())
    }

    fn event(&self, kind: usize, due: Instant) -> Event {
        Event { tenant: self.place.tenant, kind, due }
    }

    /// A transaction is too late to be started.
    pub(super) fn cancelled(&self, kind: usize, due: Instant, now: Instant) {
        self.shared.meter.borrow_mut().cancelled(self.event(kind, due), now);
    }

    /// The run ends before a transaction that was due.
    pub(super) fn unsent(&self, kind: usize, due: Instant) {
        self.shared.meter.borrow_mut().unsent(self.event(kind, due));
    }

    /// One try; answers how many statements it took.
    async fn attempt(&mut self) -> Result<(Done, u64), Failure> {
        let Connection { client, statements, .. } = self.connection.as_mut().ok_or(Error::Closed)?;
        let before = client.executed();
        let done = self.terminal.attempt(client, statements).await?;
        Ok((done, client.executed() - before))
    }

    /// Counts an error and clears up behind it; answers whether another try makes sense.
    async fn after(&mut self, error: &Error) -> anyhow::Result<bool> {
        if let Some(sqlstate) = error.sqlstate() {
            self.shared.meter.borrow_mut().refused(sqlstate);
        }
        if error.ends_session() {
            return self.lost(error);
        }
        match self.roll_back().await {
            Ok(()) => Ok(error.is_retryable()),
            Err(error) => self.lost(&error),
        }
    }

    /// The connection is gone. Whether its transaction committed is not known: it is neither counted nor run again.
    fn lost(&mut self, error: &Error) -> anyhow::Result<bool> {
        self.connection = None;
        self.shared.meter.borrow_mut().lost();
        anyhow::ensure!(!self.shared.patience.is_zero(), "lost {}: {error}", self.target);
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

    /// Ends the connection politely.
    pub(super) async fn close(mut self) {
        if let Some(connection) = self.connection.take() {
            // The run is over; a server that is gone needs no good-bye.
            drop(connection.client.close().await);
        }
    }
}
