//! A terminal that runs TATP's transactions.

use rand::RngExt;

use super::Tatp;
use super::population::{Number, location, number};
use super::schema::Statements;
use crate::client::{Client, Error, Parameter};
use crate::keys::Keys;
use crate::workload::{AttemptError, Dialect, Kind, Random, Terminal, TerminalId, TransactionOutcome};

/// The transactions of the specification and their shares.
pub(super) const KINDS: [Kind; 7] = [
    Kind { name: "get-subscriber-data", weight: 35.0 },
    Kind { name: "get-new-destination", weight: 10.0 },
    Kind { name: "get-access-data", weight: 35.0 },
    Kind { name: "update-subscriber-data", weight: 2.0 },
    Kind { name: "update-location", weight: 14.0 },
    Kind { name: "insert-call-forwarding", weight: 2.0 },
    Kind { name: "delete-call-forwarding", weight: 2.0 },
];

/// Errors of an insert of a forwarding that the specification expects: the forwarding already
/// exists, or the facility does not exist.
const EXPECTED_ERRORS: [&str; 2] = ["23505", "23503"];

/// A transaction and its random inputs.
#[derive(Clone, Copy)]
enum Plan {
    GetSubscriberData,
    GetNewDestination { facility: i32, start: i32, end: i32 },
    GetAccessData { access: i32 },
    UpdateSubscriberData { bit: i32, facility: i32, data: i32 },
    UpdateLocation { location: i32 },
    InsertForwarding { facility: i32, start: i32, end: i32, target: Number },
    DeleteForwarding { facility: i32, start: i32 },
}

/// A terminal: the random generators of a connection and its current transaction.
pub struct TatpTerminal {
    keys: Keys,
    random: Random,
    subscriber: i32,
    number: Number,
    plan: Plan,
}

impl TatpTerminal {
    pub(super) fn new(workload: &Tatp, place: TerminalId) -> TatpTerminal {
        TatpTerminal {
            keys: Keys::new(workload.distribution, workload.subscribers),
            random: place.random(),
            subscriber: 1,
            number: number(1),
            plan: Plan::GetSubscriberData,
        }
    }

    /// Draws a type of facility or access.
    fn kind(&mut self) -> i32 {
        self.random.random_range(1..=4)
    }

    fn start(&mut self) -> i32 {
        self.random.random_range(0..3) * 8
    }

    async fn update_subscriber(
        &self,
        client: &mut Client,
        statements: &Statements,
        [bit, facility, data]: [i32; 3],
    ) -> Result<TransactionOutcome, AttemptError> {
        let subscriber = Parameter::Int4(self.subscriber);
        client.execute(&statements.begin, &[]).await?;
        let parameters = [Parameter::Int4(bit), subscriber];
        self.expect_one(client.execute(&statements.update_bit, &parameters).await?)?;
        let parameters = [Parameter::Int4(data), subscriber, Parameter::Int4(facility)];
        let changed = client.execute(&statements.update_facility, &parameters).await?;
        commit_or_roll_back(client, statements, changed > 0).await
    }

    async fn insert_forwarding(
        &self,
        client: &mut Client,
        statements: &Statements,
        [facility, start, end_time]: [i32; 3],
        target: &Number,
    ) -> Result<TransactionOutcome, AttemptError> {
        client.execute(&statements.begin, &[]).await?;
        self.by_number(client, statements).await?;
        client.execute(&statements.facilities, &[Parameter::Int4(self.subscriber)]).await?;
        let [facility, start, end_time] = [facility, start, end_time].map(Parameter::Int4);
        let row = [Parameter::Int4(self.subscriber), facility, start, end_time, Parameter::Text(target)];
        match client.execute(&statements.insert_forwarding, &row).await {
            Ok(_) => commit_or_roll_back(client, statements, true).await,
            Err(error) if error.sqlstate().is_some_and(|code| EXPECTED_ERRORS.contains(&code)) => {
                commit_or_roll_back(client, statements, false).await
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn delete_forwarding(
        &self,
        client: &mut Client,
        statements: &Statements,
        [facility, start]: [i32; 2],
    ) -> Result<TransactionOutcome, AttemptError> {
        client.execute(&statements.begin, &[]).await?;
        self.by_number(client, statements).await?;
        let key = [self.subscriber, facility, start].map(Parameter::Int4);
        let deleted = client.execute(&statements.delete_forwarding, &key).await?;
        commit_or_roll_back(client, statements, deleted > 0).await
    }

    async fn by_number(&self, client: &mut Client, statements: &Statements) -> Result<(), AttemptError> {
        let rows = client.execute(&statements.by_number, &[Parameter::Text(&self.number)]).await?;
        self.expect_one(rows)
    }

    fn expect_one(&self, rows: u64) -> Result<(), AttemptError> {
        match rows {
            1 => Ok(()),
            _ => Err(AttemptError::Data(format!(
                "{rows} subscribers have the number {}, expected one; \
                 drop the four TATP tables and load them again",
                self.subscriber
            ))),
        }
    }
}

/// Commits a transaction that had an effect, and rolls back one that had none.
async fn commit_or_roll_back(
    client: &mut Client,
    statements: &Statements,
    effect: bool,
) -> Result<TransactionOutcome, AttemptError> {
    let (statement, done) = match effect {
        true => (&statements.commit, TransactionOutcome::Committed),
        false => (&statements.rollback, TransactionOutcome::RolledBack),
    };
    client.execute(statement, &[]).await?;
    Ok(done)
}

/// The outcome of a read: one that found no rows counts as rolled back.
fn read_outcome(rows: u64) -> TransactionOutcome {
    if rows > 0 { TransactionOutcome::Committed } else { TransactionOutcome::RolledBack }
}

impl Terminal for TatpTerminal {
    type Statements = Statements;

    async fn prepare(&self, client: &mut Client, _dialect: Dialect) -> Result<Statements, Error> {
        Statements::prepare(client).await
    }

    fn draw(&mut self, kind: usize) {
        self.subscriber = i32::try_from(self.keys.draw(&mut self.random)).map_or(i32::MAX, |key| key + 1);
        self.number = number(self.subscriber);
        self.plan = match kind {
            0 => Plan::GetSubscriberData,
            1 => Plan::GetNewDestination {
                facility: self.kind(),
                start: self.start(),
                end: self.random.random_range(1..=24),
            },
            2 => Plan::GetAccessData { access: self.kind() },
            3 => Plan::UpdateSubscriberData {
                bit: self.random.random_range(0..=1),
                facility: self.kind(),
                data: self.random.random_range(0..=255),
            },
            4 => Plan::UpdateLocation { location: location(&mut self.random) },
            5 => Plan::InsertForwarding {
                facility: self.kind(),
                start: self.start(),
                end: self.random.random_range(1..=24),
                target: number(self.random.random_range(1..=i32::MAX)),
            },
            _ => Plan::DeleteForwarding { facility: self.kind(), start: self.start() },
        };
    }

    async fn attempt(
        &mut self,
        client: &mut Client,
        statements: &Statements,
    ) -> Result<TransactionOutcome, AttemptError> {
        let subscriber = Parameter::Int4(self.subscriber);
        match self.plan {
            Plan::GetSubscriberData => {
                let rows = client.execute(&statements.subscriber_data, &[subscriber]).await?;
                self.expect_one(rows)?;
                Ok(TransactionOutcome::Committed)
            }
            Plan::GetNewDestination { facility, start, end } => {
                let [facility, start, end] = [facility, start, end].map(Parameter::Int4);
                let parameters = [subscriber, facility, start, end];
                Ok(read_outcome(client.execute(&statements.new_destination, &parameters).await?))
            }
            Plan::GetAccessData { access } => {
                let parameters = [subscriber, Parameter::Int4(access)];
                Ok(read_outcome(client.execute(&statements.access_data, &parameters).await?))
            }
            Plan::UpdateSubscriberData { bit, facility, data } => {
                self.update_subscriber(client, statements, [bit, facility, data]).await
            }
            Plan::UpdateLocation { location } => {
                let parameters = [Parameter::Int4(location), Parameter::Text(&self.number)];
                let rows = client.execute(&statements.update_location, &parameters).await?;
                self.expect_one(rows)?;
                Ok(TransactionOutcome::Committed)
            }
            Plan::InsertForwarding { facility, start, end, target } => {
                self.insert_forwarding(client, statements, [facility, start, end], &target).await
            }
            Plan::DeleteForwarding { facility, start } => {
                self.delete_forwarding(client, statements, [facility, start]).await
            }
        }
    }
}
