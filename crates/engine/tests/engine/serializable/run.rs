//! Runs a schedule on an engine and records its history.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fulmar_engine::{Error, Scope, Value, sqlstate};

use super::schedule::{Form, KEYS, Kind, Plan, Step, sessions};
use crate::common::{Client, Node, Rows, WAIT_TIMEOUT};
use crate::seeds::Random;
use fulmar_workload::history::{Event, History, Transaction};

/// Longer than a client may be idle before its write turn is passed on.
const LONG_PAUSE: Duration = Duration::from_millis(12);

const SCHEMA: &str = "
    CREATE TABLE texts(k INTEGER PRIMARY KEY, v TEXT NOT NULL);
    CREATE TABLE indexed(k INTEGER PRIMARY KEY, v TEXT NOT NULL, size INTEGER NOT NULL);
    CREATE INDEX by_size ON indexed(size, k, v);
    CREATE TABLE places(id INTEGER PRIMARY KEY, k INTEGER, place INTEGER, value INTEGER, pad TEXT, UNIQUE(k, place))";

/// State shared by all sessions of a run.
struct Shared {
    clock: AtomicU64,
    values: AtomicU32,
    done: Mutex<Vec<Transaction>>,
}

impl Shared {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn value(&self) -> u32 {
        self.values.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Creates the tables, once per partition.
pub async fn make_tables(node: &Node, partition: u64) {
    let mut client = node.client(partition);
    client.run(&format!("BEGIN; {SCHEMA}; COMMIT")).await.unwrap();
    client.close().await;
}

/// Runs the schedule of a seed on a partition that no other task uses. The interleaving depends on
/// the runtime and the seed.
pub async fn run(node: &Node, partition: u64, seed: u64) -> History {
    let mut random = Random::new(seed);
    let plans = sessions(&mut random);
    let text: String = plans.iter().flatten().map(|plan| format!("{plan:?}\n")).collect();
    empty_lists(node, partition).await;
    let shared =
        Arc::new(Shared { clock: AtomicU64::new(0), values: AtomicU32::new(0), done: Mutex::default() });
    let mut tasks = tokio::task::JoinSet::new();
    for (session, plans) in plans.into_iter().enumerate() {
        let random = Random::new(seed.wrapping_mul(1000).wrapping_add(session as u64));
        let client = node.client(partition);
        tasks.spawn(Runner { client, random, shared: shared.clone(), session }.run(plans));
    }
    let all = async {
        while let Some(end) = tasks.join_next().await {
            end.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        }
    };
    if tokio::time::timeout(WAIT_TIMEOUT, all).await.is_err() {
        let done = std::mem::take(&mut *shared.done.lock().unwrap());
        let so_far = History { transactions: done, last: Vec::new() }.describe();
        panic!("seed {seed} hangs. Schedule:\n{text}\nCompleted transactions:\n{so_far}");
    }
    let transactions = std::mem::take(&mut *shared.done.lock().unwrap());
    History { transactions, last: lists(node, partition).await }
}

async fn empty_lists(node: &Node, partition: u64) {
    let mut sql = String::from("BEGIN; DELETE FROM texts; DELETE FROM indexed; DELETE FROM places;");
    for (key, form) in KEYS.iter().enumerate() {
        match form {
            Form::Text => sql += &format!("INSERT INTO texts VALUES ({key}, '');"),
            Form::Indexed => sql += &format!("INSERT INTO indexed VALUES ({key}, '', 0);"),
            Form::Rows => {}
        }
    }
    let mut client = node.client(partition);
    client.run(&(sql + "COMMIT")).await.unwrap();
    client.close().await;
}

async fn lists(node: &Node, partition: u64) -> Vec<Vec<u32>> {
    let mut client = node.client(partition);
    let mut lists = Vec::new();
    for (key, form) in KEYS.iter().enumerate() {
        let rows = client.with(read_text(*form), &[integer(key as u32)]).await.unwrap().0;
        lists.push(list_of(*form, &rows));
    }
    assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
    client.close().await;
    lists
}

fn integer(n: u32) -> Value {
    Value::Integer(i64::from(n))
}

fn read_text(form: Form) -> &'static str {
    match form {
        Form::Text => "SELECT v FROM texts WHERE k = $1",
        Form::Indexed => "SELECT v FROM indexed WHERE k = $1",
        Form::Rows => "SELECT value FROM places WHERE k = $1 ORDER BY place",
    }
}

fn read_all_text(form: Form) -> &'static str {
    match form {
        Form::Text => "SELECT k, v FROM texts",
        // Uses only the index.
        Form::Indexed => "SELECT k, v FROM indexed INDEXED BY by_size WHERE size >= 0",
        Form::Rows => "SELECT k, value FROM places ORDER BY k, place",
    }
}

fn parse(text: &Value) -> Vec<u32> {
    let Value::Text(text) = text else { panic!("expected a list, found {text:?}") };
    text.split_terminator(',').map(|value| value.parse().unwrap()).collect()
}

fn number(value: &Value) -> u32 {
    let Value::Integer(i) = value else { panic!("expected a number, found {value:?}") };
    *i as u32
}

fn list_of(form: Form, rows: &[Vec<Value>]) -> Vec<u32> {
    match form {
        Form::Rows => rows.iter().map(|row| number(&row[0])).collect(),
        _ => parse(&rows[0][0]),
    }
}

/// One session.
struct Runner {
    client: Client,
    random: Random,
    shared: Arc<Shared>,
    session: usize,
}

impl Runner {
    async fn run(mut self, plans: Vec<Plan>) {
        for plan in plans {
            let began = self.shared.tick();
            let mut events = Vec::new();
            let committed = match self.transaction(&plan, &mut events).await {
                Ok(committed) => committed,
                Err(error) => {
                    let expected = [sqlstate::SERIALIZATION_FAILURE, sqlstate::DEADLOCK_DETECTED];
                    assert!(expected.contains(&error.state()), "{plan:?}: {error}");
                    self.client.run("ROLLBACK").await.unwrap();
                    false
                }
            };
            let ended = self.shared.tick();
            let kind = format!("{:?}", plan.kind);
            let transaction = Transaction { session: self.session, kind, began, ended, committed, events };
            self.shared.done.lock().unwrap().push(transaction);
        }
        self.client.close().await;
    }

    /// Returns true if it committed.
    async fn transaction(&mut self, plan: &Plan, events: &mut Vec<Event>) -> Result<bool, Error> {
        match plan.kind {
            Kind::Auto | Kind::Implicit => {}
            Kind::Begin => drop(self.client.run("BEGIN").await?),
            Kind::BeginReadOnly => drop(self.client.run("BEGIN READ ONLY").await?),
            Kind::BeginImmediate => drop(self.client.run("BEGIN IMMEDIATE").await?),
        }
        let scope = if plan.kind == Kind::Implicit { Scope::Implicit } else { Scope::Auto };
        for step in &plan.steps {
            self.pause().await;
            self.step(*step, scope, events).await?;
        }
        self.pause().await;
        match plan.kind {
            Kind::Auto => {}
            Kind::Implicit => self.client.session.finish_implicit().await?,
            _ if plan.rolls_back => {
                self.client.run("ROLLBACK").await?;
                return Ok(false);
            }
            _ => drop(self.client.run("COMMIT").await?),
        }
        Ok(true)
    }

    /// Yields to other tasks up to three times.
    async fn pause(&mut self) {
        for _ in 0..self.random.below(4) {
            tokio::task::yield_now().await;
        }
    }

    async fn step(&mut self, step: Step, scope: Scope, events: &mut Vec<Event>) -> Result<(), Error> {
        match step {
            Step::Read(key) => drop(self.read(key, "", scope, events).await?),
            Step::ReadForUpdate(key) => drop(self.read(key, " FOR UPDATE", scope, events).await?),
            Step::ReadAll(form) => self.read_all(form, scope, events).await?,
            Step::AppendBlindly(key) => {
                let value = self.append_blindly(key, scope).await?;
                events.push(Event::Append { key, value });
            }
            Step::AppendToRead(key) => {
                let list = self.read(key, "", scope, events).await?;
                self.pause().await;
                let value = self.append_to(key, list, scope).await?;
                events.push(Event::Append { key, value });
            }
            Step::AppendAndUndo(key) => {
                self.execute("SAVEPOINT before", &[], scope).await?;
                let value = self.append_blindly(key, scope).await?;
                events.push(Event::Undone { key, value });
                self.pause().await;
                self.execute("ROLLBACK TO before", &[], scope).await?;
            }
            Step::Pause => tokio::time::sleep(LONG_PAUSE).await,
        }
        Ok(())
    }

    async fn read(
        &mut self,
        key: usize,
        suffix: &str,
        scope: Scope,
        events: &mut Vec<Event>,
    ) -> Result<Vec<u32>, Error> {
        let sql = format!("{}{suffix}", read_text(KEYS[key]));
        let rows = self.execute(&sql, &[integer(key as u32)], scope).await?;
        let list = list_of(KEYS[key], &rows);
        events.push(Event::Read { key, list: list.clone() });
        Ok(list)
    }

    async fn read_all(&mut self, form: Form, scope: Scope, events: &mut Vec<Event>) -> Result<(), Error> {
        let rows = self.execute(read_all_text(form), &[], scope).await?;
        for (key, _) in KEYS.iter().enumerate().filter(|(_, other)| **other == form) {
            let own = rows.iter().filter(|row| number(&row[0]) as usize == key);
            let list = match form {
                Form::Rows => own.map(|row| number(&row[1])).collect(),
                _ => own.flat_map(|row| parse(&row[1])).collect(),
            };
            events.push(Event::Read { key, list });
        }
        Ok(())
    }

    async fn append_blindly(&mut self, key: usize, scope: Scope) -> Result<u32, Error> {
        let value = self.shared.value();
        let sql = match KEYS[key] {
            Form::Text => "UPDATE texts SET v = v || $2 || ',' WHERE k = $1",
            Form::Indexed => "UPDATE indexed SET v = v || $2 || ',', size = size + 1 WHERE k = $1",
            Form::Rows => {
                "INSERT INTO places(k, place, value, pad) \
                 SELECT $1, coalesce(max(place), 0) + 1, $2, hex(zeroblob(400)) FROM places WHERE k = $1"
            }
        };
        self.execute(sql, &[integer(key as u32), integer(value)], scope).await?;
        Ok(value)
    }

    async fn append_to(&mut self, key: usize, mut list: Vec<u32>, scope: Scope) -> Result<u32, Error> {
        let value = self.shared.value();
        list.push(value);
        let size = integer(list.len() as u32);
        let text = Value::Text(list.iter().map(|value| format!("{value},")).collect());
        let key_value = integer(key as u32);
        let (sql, parameters) = match KEYS[key] {
            Form::Text => ("UPDATE texts SET v = $2 WHERE k = $1", vec![key_value, text]),
            Form::Indexed => {
                ("UPDATE indexed SET v = $2, size = $3 WHERE k = $1", vec![key_value, text, size])
            }
            Form::Rows => (
                "INSERT INTO places(k, place, value, pad) VALUES ($1, $3, $2, hex(zeroblob(400)))",
                vec![key_value, integer(value), size],
            ),
        };
        self.execute(sql, &parameters, scope).await?;
        Ok(value)
    }

    async fn execute(
        &mut self,
        sql: &str,
        parameters: &[Value],
        scope: Scope,
    ) -> Result<Vec<Vec<Value>>, Error> {
        let (statement, _) = self.client.session.prepare(sql).await?;
        let mut rows = Rows::default();
        self.client.session.execute(&statement, parameters, scope, &mut rows).await?;
        Ok(rows.0)
    }
}
