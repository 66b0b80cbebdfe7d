//! Clients that read and append to lists, and record what they saw.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fulmar_workload::Target;
use fulmar_workload::history::{Event, Transaction};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use super::{Connection, Load, connect, database};

/// A statement or login that takes longer is a defect: the cluster must answer or refuse.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(240);
/// Pause after a failure.
const PAUSE: Duration = Duration::from_millis(20);

/// What all clients share.
pub struct Shared {
    pub targets: Vec<Target>,
    pub load: Load,
    pub failed_logins: AtomicU32,
    /// Clients use their own lists only, and do not disconnect: no transaction has a reason to fail.
    pub gentle: AtomicBool,
    /// A logical clock.
    clock: AtomicU64,
    /// The next value to append.
    value: AtomicU32,
}

impl Shared {
    pub fn new(targets: Vec<Target>, load: Load) -> Shared {
        let (clock, value) = (AtomicU64::new(1), AtomicU32::new(1));
        Shared {
            targets,
            load,
            failed_logins: AtomicU32::new(0),
            gentle: AtomicBool::new(false),
            clock,
            value,
        }
    }

    pub fn is_gentle(&self) -> bool {
        self.gentle.load(Ordering::Relaxed)
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }
}

/// A transaction as its client saw it.
pub struct Record {
    pub tenant: usize,
    pub transaction: Transaction,
    /// The client does not know whether it has committed.
    pub is_unknown: bool,
    /// SQLSTATE of the failure, or what failed otherwise.
    pub failure: Option<String>,
}

/// A client with at most one connection.
pub struct Client {
    number: usize,
    /// The node that it is connected to.
    node: usize,
    shared: Arc<Shared>,
    random: StdRng,
}

/// How a transaction ended.
enum End {
    Committed,
    /// Not committed for certain.
    Refused(String),
    Unknown(String),
}

impl Client {
    pub fn new(number: usize, shared: Arc<Shared>, random: StdRng) -> Client {
        Client { number, node: 0, shared, random }
    }

    /// Runs transactions until `stop` is set. Returns their records.
    pub async fn run(mut self, stop: Arc<AtomicBool>) -> Vec<Record> {
        let mut records = Vec::new();
        let mut connection: Option<(usize, Connection)> = None;
        while !stop.load(Ordering::Relaxed) {
            // A connection is used for some transactions, then another tenant and node are chosen.
            if connection.is_none() || self.random.random_bool(0.1) {
                let tenant = self.random.random_range(0..self.shared.load.tenants);
                self.node = self.random.random_range(0..self.shared.targets.len());
                let target = &self.shared.targets[self.node];
                let name = database(tenant);
                let connected = tokio::time::timeout(ANSWER_TIMEOUT, connect(target, &name));
                match connected.await.expect("a login was neither answered nor refused") {
                    Ok(client) => connection = Some((tenant, client)),
                    Err(_) => {
                        self.shared.failed_logins.fetch_add(1, Ordering::Relaxed);
                        connection = None;
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                }
            }
            let Some((tenant, client)) = &connection else { continue };
            let tenant = *tenant;
            let record = tokio::time::timeout(ANSWER_TIMEOUT, self.transaction(tenant, client));
            let record = record.await.expect("a transaction was neither answered nor refused");
            let failed = record.failure.is_some();
            records.push(record);
            if client.is_closed() || (failed && client.batch_execute("ROLLBACK").await.is_err()) {
                connection = None;
            }
            if failed {
                tokio::time::sleep(PAUSE).await;
            }
        }
        records
    }

    /// The list of the next operation.
    fn key(&mut self) -> usize {
        match self.shared.is_gentle() {
            true => self.number % self.shared.load.keys,
            false => self.random.random_range(0..self.shared.load.keys),
        }
    }

    async fn transaction(&mut self, tenant: usize, client: &Connection) -> Record {
        let is_auto = self.random.random_bool(0.4);
        let (began, begun) = (self.shared.tick(), SystemTime::now());
        let mut events = Vec::new();
        let end = match is_auto {
            true => self.append_auto(client, &mut events).await,
            false => self.explicit(client, &mut events).await,
        };
        let (committed, is_unknown, failure) = match end {
            End::Committed => (true, false, None),
            End::Refused(failure) => (false, false, Some(failure)),
            End::Unknown(failure) => (false, true, Some(failure)),
        };
        let kind = if is_auto { "autocommit" } else { "transaction" };
        let (node, failure_text) = (self.node, failure.as_deref().unwrap_or_default());
        let kind = format!("{} {kind} through n{} {failure_text}", time_of_day(begun), node + 1);
        let ended = self.shared.tick();
        let transaction = Transaction { session: self.number, kind, began, ended, committed, events };
        Record { tenant, transaction, is_unknown, failure }
    }

    /// One autocommitted statement that appends and returns the list.
    async fn append_auto(&mut self, client: &Connection, events: &mut Vec<Event>) -> End {
        let key = self.key();
        let value = self.shared.value.fetch_add(1, Ordering::Relaxed);
        events.push(Event::Append { key, value });
        let sql = "UPDATE lists SET v = v || ' ' || $1 WHERE k = $2 RETURNING v";
        let (value, key_value) = (value.to_string(), key as i64);
        let parameters: [&(dyn ToSql + Sync); 2] = [&value, &key_value];
        match self.or_disconnect(client, client.query_one(sql, &parameters)).await {
            Some(Ok(row)) => {
                events.push(Event::Read { key, list: parse(row.get(0)) });
                End::Committed
            }
            Some(Err(error)) => at_commit(&error),
            None => End::Unknown("disconnected".to_owned()),
        }
    }

    async fn explicit(&mut self, client: &Connection, events: &mut Vec<Event>) -> End {
        if let Err(error) = self.statements(client, events).await {
            // COMMIT was not sent.
            return End::Refused(describe(&error));
        }
        if self.random.random_bool(0.01) && !self.shared.is_gentle() {
            client.disconnect();
            return End::Refused("disconnected before COMMIT".to_owned());
        }
        match self.or_disconnect(client, client.batch_execute("COMMIT")).await {
            Some(Ok(())) => End::Committed,
            Some(Err(error)) => at_commit(&error),
            None => End::Unknown("disconnected".to_owned()),
        }
    }

    /// The answer to a statement. Sometimes the client does not wait for long, and disconnects: None.
    async fn or_disconnect<T>(&mut self, client: &Connection, answer: impl Future<Output = T>) -> Option<T> {
        let patience = match self.random.random_range(0..100) {
            _ if self.shared.is_gentle() => return Some(answer.await),
            // The time of a commit.
            0..2 => self.random.random_range(0..30),
            // The time of a failover.
            2..10 => self.random.random_range(500..4000),
            _ => return Some(answer.await),
        };
        let answered = tokio::time::timeout(Duration::from_millis(patience), answer).await.ok();
        if answered.is_none() {
            client.disconnect();
        }
        answered
    }

    async fn statements(
        &mut self,
        client: &Connection,
        events: &mut Vec<Event>,
    ) -> Result<(), tokio_postgres::Error> {
        client.batch_execute("BEGIN").await?;
        for _ in 0..self.random.random_range(1..4) {
            let key = self.key();
            if self.random.random_bool(0.5) {
                let row = client.query_one("SELECT v FROM lists WHERE k = $1", &[&(key as i64)]).await?;
                events.push(Event::Read { key, list: parse(row.get(0)) });
            } else {
                let value = self.shared.value.fetch_add(1, Ordering::Relaxed);
                let sql = "UPDATE lists SET v = v || ' ' || $1 WHERE k = $2";
                events.push(Event::Append { key, value });
                client.execute(sql, &[&value.to_string(), &(key as i64)]).await?;
            }
            if self.random.random_bool(0.2) {
                tokio::time::sleep(Duration::from_millis(self.random.random_range(0..50))).await;
            }
        }
        Ok(())
    }
}

/// The outcome that an error of a COMMIT, or of an autocommitted statement, implies.
fn at_commit(error: &tokio_postgres::Error) -> End {
    let failure = describe(error);
    match error.code() {
        None => End::Unknown(failure),
        // 08007 says that the outcome is unknown, and a FATAL error may replace the answer.
        Some(code) if *code == SqlState::TRANSACTION_RESOLUTION_UNKNOWN => End::Unknown(failure),
        Some(code) if code.code().starts_with("57P01") || code.code().starts_with("58") => {
            End::Unknown(failure)
        }
        Some(_) => End::Refused(failure),
    }
}

/// The time of day (UTC), to find it in the nodes' logs.
fn time_of_day(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs() % 86_400;
    format!("{:02}:{:02}:{:02}.{:03}", seconds / 3600, seconds / 60 % 60, seconds % 60, since.subsec_millis())
}

pub fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(error) => format!("{} {}", error.code().code(), error.message()),
        None => error.to_string(),
    }
}

/// The values of a list.
pub fn parse(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|value| value.parse().expect("a list of numbers")).collect()
}

/// Counts of transactions.
#[derive(Default)]
pub struct Summary {
    pub committed: usize,
    unknown: usize,
    unknown_committed: usize,
    failures: std::collections::BTreeMap<String, usize>,
}

impl Summary {
    pub fn add<'a>(&mut self, records: impl Iterator<Item = (&'a Record, &'a Transaction)>) {
        for (record, transaction) in records {
            self.committed += usize::from(transaction.committed && !record.is_unknown);
            self.unknown += usize::from(record.is_unknown);
            self.unknown_committed += usize::from(record.is_unknown && transaction.committed);
            if let Some(failure) = &record.failure {
                *self.failures.entry(failure.clone()).or_default() += 1;
            }
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { committed, unknown, unknown_committed, failures } = self;
        write!(f, "{committed} committed, {unknown} unknown of which {unknown_committed} committed")?;
        for (failure, count) in failures {
            write!(f, "\n{count:8} {failure}")?;
        }
        Ok(())
    }
}
