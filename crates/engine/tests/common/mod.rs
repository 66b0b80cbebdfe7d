//! An engine in a temporary directory, and SQL clients for it.
#![allow(dead_code)]

pub mod crashing;
pub mod history;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::*;
use fulmar_pages::PartitionId;

pub const MEMORY: u64 = 1 << 30;

/// Time limit of every wait in a test. A wait that takes longer is a hang, not a slow machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// Polls until `holds` returns true. Panics after [`WAIT_TIMEOUT`].
pub async fn wait_until(description: &str, mut holds: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    with_timeout(description, poll).await;
}

/// Returns the result of `future`. Panics after [`WAIT_TIMEOUT`].
pub async fn with_timeout<T>(description: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(WAIT_TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("timed out: {description}"),
    }
}

/// A clock that only the test advances.
#[derive(Default)]
pub struct ManualClock {
    ms: AtomicU64,
}

impl ManualClock {
    pub fn advance(&self, by: Duration) {
        self.ms.fetch_add(by.as_millis() as u64, Ordering::Relaxed);
    }
}

impl TimeSource for ManualClock {
    fn unix_ms(&self) -> u64 {
        // 2026-01-01, 00:00 UTC.
        1_767_225_600_000 + self.monotonic_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.ms.load(Ordering::Relaxed)
    }
}

pub struct Node {
    pub engine: Arc<Engine>,
    pub directory: tempfile::TempDir,
}

impl Node {
    pub async fn start() -> Node {
        Node::with(|_| ()).await
    }

    /// Starts a node with a modified configuration.
    pub async fn with(adjust: impl FnOnce(&mut Config)) -> Node {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config::new(directory.path(), MEMORY);
        adjust(&mut config);
        Node { engine: Engine::start(config).await.unwrap(), directory }
    }

    pub fn client(&self, partition: u64) -> Client {
        Client { session: self.engine.session(PartitionId(partition)) }
    }

    /// Stops cleanly and starts again.
    pub async fn restart(self) -> Node {
        let Node { engine, directory } = self;
        engine.shutdown().await.unwrap();
        drop(engine);
        let engine = Engine::start(Config::new(directory.path(), MEMORY)).await.unwrap();
        Node { engine, directory }
    }
}

/// Starts an engine on the directory of an engine that was just dropped, as in a crash. The old
/// engine releases the directory asynchronously, so the start is retried.
pub async fn start_when_free(config: impl Fn() -> Config) -> Arc<Engine> {
    let start = async {
        loop {
            match Engine::start(config()).await {
                Err(error) if error.message().contains("in use") => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                result => return result.unwrap(),
            }
        }
    };
    with_timeout("the directory is released", start).await
}

pub struct Client {
    pub session: Session,
}

#[derive(Default)]
pub struct Rows(pub Vec<Vec<Value>>);

impl RowSink for Rows {
    fn row(&mut self, row: &dyn Row) -> Result<()> {
        self.0.push((0..row.len()).map(|i| row.get(i).to_owned()).collect());
        Ok(())
    }
    fn reset(&mut self) {
        self.0.clear();
    }
}

impl Client {
    /// Runs all statements of a text. Returns the rows of the last one.
    pub async fn run(&mut self, sql: &str) -> Result<Vec<Vec<Value>>> {
        self.with(sql, &[]).await.map(|(rows, _)| rows)
    }

    pub async fn with(&mut self, sql: &str, parameters: &[Value]) -> Result<(Vec<Vec<Value>>, Completion)> {
        let mut rest = sql;
        loop {
            let (statement, after) = self.session.prepare(rest).await?;
            let mut rows = Rows::default();
            let completion = self.session.execute(&statement, parameters, Scope::Auto, &mut rows).await?;
            rest = after;
            if rest.is_empty() {
                return Ok((rows.0, completion));
            }
        }
    }

    /// The first value of a query's result.
    pub async fn value(&mut self, sql: &str) -> Value {
        let rows = self.run(sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
        rows.into_iter()
            .next()
            .and_then(|row| row.into_iter().next())
            .unwrap_or_else(|| panic!("{sql}: no rows"))
    }

    pub async fn int(&mut self, sql: &str) -> i64 {
        match self.value(sql).await {
            Value::Integer(i) => i,
            other => panic!("{sql}: {other:?}"),
        }
    }

    /// The SQLSTATE of the error of a text, or "00000".
    pub async fn state(&mut self, sql: &str) -> &'static str {
        match self.run(sql).await {
            Ok(_) => "00000",
            Err(error) => error.state(),
        }
    }

    pub async fn close(mut self) {
        self.session.close().await;
    }
}
