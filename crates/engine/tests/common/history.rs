//! A partition that is written once a minute, on a wall clock that the test advances.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::{Config, Engine, Error, Space, SpaceSource, SystemTime, TimeSource, Timeline, Value};
use fulmar_pages::PartitionId;

use super::{Client, start_when_free};

pub const SHOP: PartitionId = PartitionId(7);
pub const MINUTE: u64 = 60_000;
pub const HOUR: u64 = 60 * MINUTE;
pub const DAY: u64 = 24 * HOUR;

/// A wall clock that the test advances. The monotonic clock is the system's.
#[derive(Default)]
pub struct TestClock {
    system: SystemTime,
    offset_ms: AtomicU64,
}

impl TimeSource for TestClock {
    fn unix_ms(&self) -> u64 {
        self.system.unix_ms() + self.offset_ms.load(Ordering::Relaxed)
    }

    fn monotonic_ms(&self) -> u64 {
        self.system.monotonic_ms()
    }
}

pub struct Node {
    pub engine: Arc<Engine>,
    pub directory: tempfile::TempDir,
    pub clock: Arc<TestClock>,
    /// Lineages and epochs, as in the catalog.
    pub eras: HashMap<PartitionId, Timeline>,
    pub retention: Duration,
    /// Free space on its disk.
    pub available_bytes: Arc<AtomicU64>,
}

impl Node {
    pub async fn start(retention: Duration) -> Node {
        let (directory, clock) = (tempfile::tempdir().unwrap(), Arc::new(TestClock::default()));
        let available_bytes = Arc::new(AtomicU64::new(u64::MAX));
        let engine = Self::open(&directory, &clock, &HashMap::new(), retention, &available_bytes).await;
        Node { engine, directory, clock, eras: HashMap::new(), retention, available_bytes }
    }

    async fn open(
        directory: &tempfile::TempDir,
        clock: &Arc<TestClock>,
        eras: &HashMap<PartitionId, Timeline>,
        retention: Duration,
        available_bytes: &Arc<AtomicU64>,
    ) -> Arc<Engine> {
        let space = |available: Arc<AtomicU64>| -> SpaceSource {
            Arc::new(move || {
                Ok(Space { available_bytes: available.load(Ordering::Relaxed), total_bytes: u64::MAX })
            })
        };
        let config = || Config {
            space: Some(space(available_bytes.clone())),
            time: clock.clone(),
            timelines: eras.iter().map(|(id, era)| (*id, *era)).collect(),
            retention: Arc::new(move |_| retention),
            // Only the test flushes.
            manifest_interval: Duration::from_secs(3600),
            ..Config::new(directory.path(), 1 << 28)
        };
        start_when_free(config).await
    }

    /// Simulates a kill: nothing is closed or flushed.
    pub async fn crash(self) -> Node {
        let Node { engine, directory, clock, eras, retention, available_bytes } = self;
        drop(engine);
        let engine = Self::open(&directory, &clock, &eras, retention, &available_bytes).await;
        Node { engine, directory, clock, eras, retention, available_bytes }
    }

    pub fn client(&self, id: PartitionId) -> Client {
        Client { session: self.engine.session(id) }
    }

    pub fn advance(&self, ms: u64) {
        self.clock.offset_ms.fetch_add(ms, Ordering::Relaxed);
    }

    pub async fn run(&self, sql: &str) {
        let mut client = self.client(SHOP);
        client.run(sql).await.unwrap();
        client.close().await;
    }

    /// Inserts and flushes a row, and advances the clock by one minute. Returns a time at which
    /// this row was the newest.
    pub async fn minute(&self) -> u64 {
        self.run("INSERT INTO t(v) VALUES (randomblob(3000))").await;
        self.engine.flush().await.unwrap();
        self.advance(MINUTE);
        self.clock.unix_ms() - MINUTE / 2
    }

    pub async fn rows(&self, id: PartitionId) -> i64 {
        let mut client = self.client(id);
        let rows = client.int("SELECT count(*) FROM t").await;
        assert_eq!(client.value("PRAGMA integrity_check").await, Value::Text("ok".into()));
        client.close().await;
        rows
    }

    pub async fn restore(&mut self, at: u64) -> Result<(), Error> {
        let eras = &mut self.eras;
        let decide = async |era| {
            eras.insert(SHOP, era);
            Ok(())
        };
        self.engine.restore_partition(SHOP, at, decide).await
    }

    pub fn objects(&self, directory: &str) -> usize {
        fn count(directory: &std::path::Path) -> usize {
            let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
            let count = |entry: std::fs::DirEntry| match entry.path() {
                path if path.is_dir() => count(&path),
                // Holds of manifests are not counted.
                path if path.to_string_lossy().contains("/fate-") => 0,
                _ => 1,
            };
            entries.map(|entry| count(entry.unwrap())).sum()
        }
        count(&self.directory.path().join("store").join(directory))
    }
}

pub async fn five_minutes(retention: Duration) -> (Node, Vec<u64>) {
    let node = Node::start(retention).await;
    node.run("CREATE TABLE t(id INTEGER PRIMARY KEY, v BLOB)").await;
    let mut times = Vec::new();
    for _ in 0..5 {
        times.push(node.minute().await);
    }
    (node, times)
}
