//! Model test: random SQL runs on the engine and on stock SQLite in memory, and all results are
//! compared: rows in order, counts of changed rows, errors, `last_insert_rowid()`, `changes()`,
//! `total_changes()`, and at the end the whole schema and every table.
//!
//! Events that exist only in the engine happen in between: flushes, restarts (clean and after
//! crashes), and changes of the session. A reader holds an old snapshot all the time, which must
//! not change.
//!
//! ANALYZE is tested separately: its results stay in the memory of a stock connection across schema
//! changes, so a later ANALYZE changes its plans and the order of its rows.
//!
//! One difference is by design: after an error inside a transaction, the engine accepts only the
//! end of the transaction or ROLLBACK TO, as PostgreSQL does. The test then does the same on both
//! sides.

mod generate;
mod stock;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use fulmar_engine::{CommandTag, Config, Engine, TransactionStatus, Value, sqlstate};
use fulmar_pages::PartitionId;
use generate::Generated;
use stock::Stock;

use crate::common::{Client, MEMORY, start_when_free};
use crate::seeds::{self, Random};

/// Number of statements per seed.
const STATEMENTS: u64 = 1500;
/// Number of statements in the report of a failure.
const HISTORY_LEN: usize = 40;
const SAVEPOINTS: [&str; 3] = ["a", "b", "c"];
const COUNTERS: &str = "SELECT last_insert_rowid(), changes(), total_changes()";
const SNAPSHOT: &str = "SELECT (SELECT group_concat(id || name || coalesce(age, '-')) FROM people), \
    (SELECT count(*) || '/' || coalesce(sum(length), 0) FROM notes), (SELECT group_concat(name) FROM sqlite_schema)";

/// The engine and stock SQLite, which run the same statements.
struct Pair {
    random: Random,
    directory: tempfile::TempDir,
    engine: Arc<Engine>,
    client: Client,
    /// A reader that holds an old snapshot, and the rows that it read.
    reader: Option<(Client, Vec<Vec<Value>>)>,
    stock: Stock,
    /// The total changes of stock SQLite when the session began.
    counted_before: i64,
    /// Savepoints of the open transaction, the newest last.
    savepoints: Vec<&'static str>,
    history: VecDeque<String>,
    seed: u64,
    errors: u64,
}

/// Asserts a condition. A failure reports the seed and the last statements.
macro_rules! must {
    ($pair:expr, $condition:expr, $($message:tt)+) => {
        if !$condition {
            let history: Vec<_> = $pair.history.iter().map(String::as_str).collect();
            panic!("{}\nFULMAR_TEST_SEED={}, after\n{}", format_args!($($message)+), $pair.seed, history.join("\n"));
        }
    };
}

async fn start(directory: &Path) -> (Arc<Engine>, Client) {
    let engine = start_when_free(|| Config::new(directory, MEMORY)).await;
    let client = Client { session: engine.session(PartitionId(1)) };
    (engine, client)
}

impl Pair {
    async fn new(seed: u64) -> Pair {
        let directory = tempfile::tempdir().unwrap();
        let (engine, client) = start(directory.path()).await;
        let mut pair = Pair {
            random: Random::new(seed),
            directory,
            engine,
            client,
            reader: None,
            stock: Stock::open(),
            counted_before: 0,
            savepoints: Vec::new(),
            history: VecDeque::new(),
            seed,
            errors: 0,
        };
        for sql in generate::SCHEMA {
            pair.run(Generated::plain(*sql)).await;
        }
        // From here on, both sides count from zero.
        pair.change_session().await;
        pair
    }

    fn remember(&mut self, text: String) {
        if self.history.len() == HISTORY_LEN {
            self.history.pop_front();
        }
        self.history.push_back(text);
    }

    fn in_transaction(&self) -> bool {
        self.client.session.status() != TransactionStatus::Idle
    }

    /// Runs one random step. Returns true if the next step must be a restart.
    async fn step(&mut self) -> bool {
        let open = self.in_transaction();
        match self.random.below(200) {
            0..16 if !open => self.run(Generated::plain("BEGIN")).await,
            0..8 => self.end("COMMIT").await,
            8..12 => self.end("ROLLBACK").await,
            12..30 if open => self.savepoint().await,
            30 if !open => return true,
            31 | 32 if !open => self.run(Generated::plain("VACUUM")).await,
            33 if !open => self.change_session().await,
            34 => self.flush().await,
            35..38 => self.check_reader().await,
            38..60 => self.run(Generated::plain(COUNTERS)).await,
            _ => {
                let generated = generate::statement(&mut self.random);
                self.run(generated).await;
            }
        }
        false
    }

    /// Runs a statement on both sides and compares the results.
    async fn run(&mut self, generated: Generated) {
        let Generated { sql, parameters } = generated;
        self.remember(format!("{sql}  {}", brief(&parameters)));
        let was_open = self.in_transaction();
        let expected = self.stock.run(&sql, &parameters);
        let found = self.client.with(&sql, &parameters).await;
        match (&expected, &found) {
            (Ok(expected), Ok((found, completion))) => {
                let expected = self.without_base(&sql, expected.clone());
                must!(
                    self,
                    expected == *found,
                    "{sql}\nstock  {}\nengine {}",
                    brief_rows(&expected),
                    brief_rows(found)
                );
                let counted = match completion.tag {
                    CommandTag::Insert(n) | CommandTag::Update(n) | CommandTag::Delete(n) => {
                        n == self.stock.changes()
                    }
                    CommandTag::Select(n) => n == expected.len() as u64,
                    _ => true,
                };
                must!(self, counted, "{sql}: engine {}, stock {}", completion.tag, self.stock.changes());
            }
            (Err(expected), Err(found)) => {
                self.errors += 1;
                must!(self, stock::same_error(expected, found), "{sql}\nstock  {expected:?}\nengine {found}");
            }
            (expected, found) => must!(self, false, "{sql}\nstock  {expected:?}\nengine {found:?}"),
        }
        if found.is_err() && was_open {
            self.recover().await;
        }
        must!(
            self,
            self.in_transaction() != self.stock.is_autocommit(),
            "{sql}: one side is in a transaction"
        );
    }

    /// Subtracts the changes that stock SQLite counted before the session began.
    fn without_base(&self, sql: &str, mut rows: Vec<Vec<Value>>) -> Vec<Vec<Value>> {
        if sql == COUNTERS
            && let Value::Integer(total) = &mut rows[0][2]
        {
            *total -= self.counted_before;
        }
        rows
    }

    /// After an error in a transaction: rolls back to a savepoint, or ends the transaction.
    async fn recover(&mut self) {
        must!(
            self,
            self.client.session.status() == TransactionStatus::Failed,
            "the transaction must have failed"
        );
        let state = self.client.state("SELECT 1").await;
        must!(self, state == sqlstate::IN_FAILED_TRANSACTION, "a failed transaction answers {state}");
        // OR ROLLBACK and RAISE(ROLLBACK) have ended the transaction on the stock side.
        let ended = self.stock.is_autocommit();
        match self.savepoints.last() {
            Some(name) if ended => {
                let result = self.client.run(&format!("ROLLBACK TO {name}")).await;
                must!(self, result.is_err(), "a savepoint must end with its transaction");
            }
            Some(name) if self.random.once_in(2) => {
                let sql = format!("ROLLBACK TO {name}");
                return Box::pin(self.run(Generated::plain(sql))).await;
            }
            _ => {}
        }
        self.savepoints.clear();
        if !ended {
            self.stock.run("ROLLBACK", &[]).unwrap();
        }
        let end = *self.random.pick(&["ROLLBACK", "COMMIT"]);
        self.remember(format!("{end} of the failed transaction"));
        let (_, completion) = self.client.with(end, &[]).await.unwrap();
        must!(self, completion.tag == CommandTag::Plain("ROLLBACK"), "{end} answers {}", completion.tag);
    }

    /// COMMIT or ROLLBACK.
    async fn end(&mut self, sql: &str) {
        self.remember(sql.to_owned());
        self.savepoints.clear();
        let expected = self.stock.run(sql, &[]);
        let found = self.client.run(sql).await;
        match (expected, found) {
            (Ok(_), Ok(_)) => {}
            // Deferred foreign keys. Stock SQLite would keep the transaction open; the engine rolls
            // it back, as PostgreSQL does.
            (Err(expected), Err(found)) => {
                must!(self, stock::same_error(&expected, &found), "{sql}: {expected:?}, {found}");
                self.stock.run("ROLLBACK", &[]).unwrap();
            }
            (expected, found) => must!(self, false, "{sql}\nstock  {expected:?}\nengine {found:?}"),
        }
        must!(self, !self.in_transaction(), "{sql} leaves a transaction open");
    }

    async fn savepoint(&mut self) {
        let name = *self.random.pick(&SAVEPOINTS);
        let known = self.savepoints.iter().rposition(|other| *other == name);
        match self.random.below(3) {
            0 => {
                self.run(Generated::plain(format!("SAVEPOINT {name}"))).await;
                self.savepoints.push(name);
            }
            1 => {
                if let Some(at) = known {
                    self.savepoints.truncate(at);
                }
                self.run(Generated::plain(format!("RELEASE {name}"))).await;
            }
            _ => {
                if let Some(at) = known {
                    self.savepoints.truncate(at + 1);
                }
                self.run(Generated::plain(format!("ROLLBACK TO {name}"))).await;
            }
        }
        if !self.in_transaction() {
            self.savepoints.clear();
        }
    }

    async fn flush(&mut self) {
        self.remember("flush".to_owned());
        self.engine.flush().await.unwrap();
    }

    /// Stops the engine, cleanly or by a simulated crash, and starts it again. Temporary tables end
    /// with their session.
    async fn restart(mut self) -> Pair {
        if let Some((reader, _)) = self.reader.take() {
            reader.close().await;
        }
        self.client.session.close().await;
        let clean = self.random.once_in(2);
        self.remember(if clean { "restart" } else { "crash" }.to_owned());
        if clean {
            self.engine.shutdown().await.unwrap();
        }
        let Pair { random, directory, engine, client, stock, history, seed, errors, .. } = self;
        drop((client, engine));
        let (engine, client) = start(directory.path()).await;
        let (reader, savepoints) = (None, Vec::new());
        let counted_before = 0;
        let mut pair = Pair {
            random,
            directory,
            engine,
            client,
            reader,
            stock,
            counted_before,
            savepoints,
            history,
            seed,
            errors,
        };
        pair.begin_session().await;
        pair.run(Generated::plain("PRAGMA integrity_check")).await;
        pair
    }

    async fn change_session(&mut self) {
        self.remember("another session".to_owned());
        let mut old =
            std::mem::replace(&mut self.client, Client { session: self.engine.session(PartitionId(1)) });
        old.session.close().await;
        self.begin_session().await;
    }

    /// A new session has no counts and no temporary tables. Makes the stock connection agree.
    async fn begin_session(&mut self) {
        self.stock.run("DROP TABLE IF EXISTS temp.passing", &[]).unwrap();
        self.counted_before = self.stock_counters().2;
        self.run(Generated::plain("INSERT INTO audit(what) VALUES ('another session')")).await;
        self.run(Generated::plain(COUNTERS)).await;
    }

    fn stock_counters(&self) -> (i64, i64, i64) {
        match self.stock.run(COUNTERS, &[]).unwrap()[0][..] {
            [Value::Integer(rowid), Value::Integer(changes), Value::Integer(total)] => {
                (rowid, changes, total)
            }
            ref other => panic!("{other:?}"),
        }
    }

    /// The reader must see the same rows as before. It then ends, keeps its snapshot, or takes a
    /// new one.
    async fn check_reader(&mut self) {
        self.remember("check of the reader".to_owned());
        if let Some((mut reader, saw)) = self.reader.take() {
            let sees = reader.run(SNAPSHOT).await.unwrap();
            must!(self, sees == saw, "the reader's snapshot changed from\n{saw:?}\nto\n{sees:?}");
            if self.random.once_in(2) {
                self.reader = Some((reader, saw));
                return;
            }
            reader.run("COMMIT").await.unwrap();
            reader.close().await;
        }
        let mut reader = Client { session: self.engine.session(PartitionId(1)) };
        reader.run("BEGIN READ ONLY").await.unwrap();
        let saw = reader.run(SNAPSHOT).await.unwrap();
        self.reader = Some((reader, saw));
    }

    /// Compares all tables and the schema.
    async fn compare_all(&mut self) {
        if self.in_transaction() {
            self.end("COMMIT").await;
        }
        let tables =
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%' ORDER BY name";
        for row in self.stock.run(tables, &[]).unwrap() {
            let Value::Text(name) = &row[0] else { panic!("{row:?}") };
            self.run(Generated::plain(format!("SELECT * FROM \"{name}\""))).await;
        }
        for sql in ["SELECT * FROM sqlite_schema", "PRAGMA integrity_check", "PRAGMA foreign_key_check"] {
            self.run(Generated::plain(sql)).await;
        }
    }
}

fn brief(parameters: &[Value]) -> String {
    let mut text = format!("{parameters:?}");
    if let Some((end, _)) = text.char_indices().nth(200) {
        text.truncate(end);
    }
    text
}

fn brief_rows(rows: &[Vec<Value>]) -> String {
    rows.iter().map(|row| brief(row) + "\n       ").collect()
}

#[tokio::test]
async fn engine_matches_stock_sqlite() {
    for seed in seeds::first()..seeds::first() + seeds::rounds(4) {
        let mut pair = Pair::new(seed).await;
        for _ in 0..STATEMENTS {
            if pair.step().await {
                pair = pair.restart().await;
            }
        }
        pair.compare_all().await;
        let mut pair = pair.restart().await;
        pair.compare_all().await;
        println!("seed {seed}: {} of {STATEMENTS} statements failed on both sides", pair.errors);
        assert!(pair.errors < STATEMENTS / 2, "most statements must succeed");
    }
}

/// ANALYZE changes plans. Connections that were open before must use the same plans. Otherwise a
/// transaction replayed on another connection could return other rows, or another order.
#[tokio::test]
async fn all_sessions_use_the_last_analyze() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, mut a) = start(directory.path()).await;
    let mut b = Client { session: engine.session(PartitionId(1)) };
    let few = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < 500)";
    a.run("CREATE TABLE t(x, y); CREATE INDEX by_x ON t(x); CREATE INDEX by_y ON t(y)").await.unwrap();
    a.run(&format!("INSERT INTO t {few} SELECT n, n % 2 FROM i")).await.unwrap();
    let plan = "EXPLAIN QUERY PLAN SELECT * FROM t WHERE x = 1 AND y = 1";
    for (selective, other) in [("y", "x"), ("x", "y"), ("y", "x")] {
        // Both sessions hold separate connections at this point.
        for client in [&mut a, &mut b] {
            client.run(&format!("BEGIN; {plan}")).await.unwrap();
        }
        b.run("COMMIT").await.unwrap();
        b.run(&format!("UPDATE t SET {other} = 1, {selective} = rowid; ANALYZE")).await.unwrap();
        a.run("COMMIT").await.unwrap();
        for client in [&mut a, &mut b] {
            // EXPLAIN alone does not detect a changed schema; executing a statement does.
            client.run("BEGIN; SELECT count(*) FROM t").await.unwrap();
        }
        for client in [&mut a, &mut b] {
            let plan = format!("{:?}", client.run(plan).await.unwrap());
            assert!(plan.contains(&format!("by_{selective}")), "{plan}");
            client.run("COMMIT").await.unwrap();
        }
    }
}
