//! `space`: the size of an overwritten tenant in the store.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::rounds::Progress;
use super::store::{self, ROWS_PER_STATEMENT, StoreArgs};
use crate::client::Client;
use crate::server::{Fulmar, Server};

const TENANT: &str = "rewritten";
/// How often every row is overwritten.
const OVERWRITES: u32 = 10;
/// Wait after the restart. A node starts its first garbage collection 60 s after its start, and the
/// data must not change until then.
const FIRST_COLLECTION: Duration = Duration::from_secs(75);
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Bytes in the store over bytes of the database, after every row has been overwritten and the
/// garbage has been collected.
pub(super) async fn measure(arguments: &StoreArgs, binary: PathBuf, rows: u32) -> anyhow::Result<Vec<f64>> {
    let progress = Progress::new();
    progress.step("space: loading");
    let directory = tempfile::Builder::new().prefix("fulmar-bench-store-").tempdir()?;
    let url = format!("file://{}", directory.path().display());
    let fulmar = Fulmar::at(binary).with_store(url, Vec::new());
    let mut server = Server::start(Box::new(fulmar), arguments.memory_mib << 20, 4).await?;
    store::load(&server, TENANT, rows).await?;
    let mut system = Client::connect(&server.target()).await?;
    system.query(&format!("ALTER DATABASE {TENANT} SET retention = 0")).await?;
    system.close().await?;
    let mut client = Client::connect(&server.target().with_database(TENANT)).await?;
    for pass in 1..=OVERWRITES {
        progress.step(&format!("space: overwriting, {pass} of {OVERWRITES}"));
        for first in (1..=rows).step_by(ROWS_PER_STATEMENT as usize) {
            let last = rows.min(first + ROWS_PER_STATEMENT - 1);
            client
                .query(&format!("UPDATE t SET v = randomblob(1000) WHERE id BETWEEN {first} AND {last}"))
                .await?;
        }
    }
    let sql = format!("SELECT size_bytes FROM fulmar.tenant_stats WHERE tenant = '{TENANT}'");
    let size = client.query(&sql).await?;
    let live_bytes = size.into_iter().flatten().flatten().next().and_then(|bytes| bytes.parse::<f64>().ok());
    let live_bytes =
        live_bytes.ok_or_else(|| anyhow::anyhow!("node did not report the size of the database"))?;
    client.close().await?;
    server.stop().await?;
    server.restart().await?;
    // Opens the database: the node may have stopped before it had merged the last overwrites.
    let mut client = Client::connect(&server.target().with_database(TENANT)).await?;
    client.query("SELECT length(v) FROM t WHERE id = 1").await?;
    client.close().await?;
    progress.step("space: waiting for garbage collection");
    let began = Instant::now();
    while began.elapsed() < FIRST_COLLECTION {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let stored = bytes_below(directory.path())?;
    server.stop().await?;
    Ok(vec![stored as f64 / live_bytes])
}

fn bytes_below(directory: &Path) -> std::io::Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { bytes_below(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}
