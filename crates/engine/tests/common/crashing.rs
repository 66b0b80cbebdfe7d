//! A node on a store with injected faults, which a test can crash and restart.

use std::sync::Arc;

use fulmar_engine::{Config, Engine};
use fulmar_pages::PartitionId;
use fulmar_store::{Backend, FaultyStore};

use super::{Client, start_when_free};

pub struct CrashingNode {
    pub engine: Arc<Engine>,
    pub store: FaultyStore,
    pub directory: tempfile::TempDir,
    memory_bytes: u64,
    adjust: fn(&mut Config),
}

impl CrashingNode {
    pub async fn start(memory_bytes: u64, adjust: fn(&mut Config)) -> CrashingNode {
        let directory = tempfile::tempdir().unwrap();
        let store = FaultyStore::new(Arc::new(Backend::memory()));
        let engine = start(&directory, &store, memory_bytes, adjust).await;
        CrashingNode { engine, store, directory, memory_bytes, adjust }
    }

    /// Simulates a kill: nothing is closed or flushed.
    pub async fn crash(self) -> CrashingNode {
        let CrashingNode { engine, store, directory, memory_bytes, adjust } = self;
        drop(engine);
        let engine = start(&directory, &store, memory_bytes, adjust).await;
        CrashingNode { engine, store, directory, memory_bytes, adjust }
    }

    /// Stops cleanly and starts again.
    pub async fn restart(self) -> CrashingNode {
        self.engine.shutdown().await.unwrap();
        self.crash().await
    }

    pub fn client(&self, partition: u64) -> Client {
        Client { session: self.engine.session(PartitionId(partition)) }
    }
}

async fn start(
    directory: &tempfile::TempDir,
    store: &FaultyStore,
    memory_bytes: u64,
    adjust: fn(&mut Config),
) -> Arc<Engine> {
    let config = || {
        let mut config = Config::new(directory.path(), memory_bytes);
        config.store = Some(Arc::new(store.clone()));
        // No other process uses the store.
        config.is_exclusive = true;
        adjust(&mut config);
        config
    };
    start_when_free(config).await
}
