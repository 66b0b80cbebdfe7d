//! Startup check that the catalog is not older than the log and the store.
//!
//! If the log or the store has data of a partition that the catalog neither contains nor has
//! dropped, the catalog is older than the data. The start is then refused, before anything is
//! deleted or recycled. `meta.head` already detects an old copy of `meta.db`
//! ([`fulmar_meta::Embedded`]); this check also detects old copies of both files.
//!
//! With `--accept-catalog REVISION` the start continues. The unknown partitions count as dropped
//! from then on, and new partitions get greater ids.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::anyhow;
use fulmar_engine::CatalogPartitions;
use fulmar_meta::{Catalog, MetaError, Revision};
use fulmar_pages::PartitionId;
use parking_lot::Mutex;

/// The check, and the unknown partitions that the engine has found.
pub(super) struct CatalogCheck {
    catalog: Arc<Catalog>,
    /// Whether unknown partitions are given up, instead of refusing the start.
    accepts_unknown: bool,
    unknown: Mutex<BTreeSet<PartitionId>>,
}

impl CatalogCheck {
    pub(super) fn new(catalog: Arc<Catalog>, accepts_unknown: bool) -> Arc<Self> {
        Arc::new(CatalogCheck { catalog, accepts_unknown, unknown: Mutex::default() })
    }

    /// Returns the callbacks with which the engine looks up partitions.
    pub(super) fn partition_callbacks(self: &Arc<Self>) -> CatalogPartitions {
        let (catalog, census) = (self.catalog.clone(), self.clone());
        CatalogPartitions {
            from: self.catalog.first_unsettled_partition(),
            knows: Arc::new(move |id| catalog.knows_partition(id)),
            accepts: Arc::new(move |id| {
                census.unknown.lock().insert(id);
                census.accepts_unknown
            }),
        }
    }

    /// Returns the message to report instead of the engine's `error`, if an unknown partition is
    /// the cause.
    pub(super) fn refusal(
        &self,
        error: &fulmar_engine::Error,
        metadata: &Path,
        revision: Revision,
    ) -> Option<anyhow::Error> {
        if self.accepts_unknown || !error.is_of_unknown_partition() {
            return None;
        }
        let id = self.unknown.lock().first().copied()?;
        let (path, head) = (metadata.display(), metadata.with_extension("head"));
        Some(anyhow!(
            "{path} is damaged or an old copy: the log or the store contains data of partition \
             {id}, which the catalog neither contains nor has dropped; restore {path}, {path}-wal \
             and {} as the node left them; to lose all later changes to tenants, users and \
             privileges, start once with --accept-catalog {}",
            head.display(),
            revision.0
        ))
    }

    /// Records in the catalog that all partition ids so far are accounted for, the accepted unknown
    /// ones as dropped. Called after the engine has started.
    pub(super) async fn settle(&self) -> Result<(), MetaError> {
        let unknown: Vec<u64> = self.unknown.lock().iter().map(|id| id.0).collect();
        if !unknown.is_empty() {
            tracing::warn!(
                partitions = ?unknown,
                "partitions missing from the accepted catalog are lost; their objects remain in the store"
            );
        }
        self.catalog.settle_dropped(unknown.last().copied().map(PartitionId)).await
    }
}

/// Formats an error with its remedy.
pub(super) fn with_remedy(error: MetaError) -> anyhow::Error {
    anyhow!("{error}. {}", error.remedy())
}

#[cfg(test)]
mod tests {
    use fulmar_engine::{Config, Engine};
    use fulmar_meta::{Embedded, MetadataStore};

    use super::*;

    /// Starts an engine on `data` with an empty catalog. Returns the engine's error and the message
    /// that replaces it.
    async fn start(data: &Path, accepts_unknown: bool) -> (Option<fulmar_engine::Error>, Option<String>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("meta.db");
        let metadata: Arc<dyn MetadataStore> = Arc::new(Embedded::open(&path).unwrap());
        let census = CatalogCheck::new(Catalog::open(metadata).await.unwrap(), accepts_unknown);
        let started = async {
            loop {
                let mut config = Config::new(data, 64 << 20);
                config.known = Some(census.partition_callbacks());
                match Engine::start(config).await {
                    // The previous engine's log is closed on another thread.
                    Err(error) if error.message().contains("in use") => tokio::task::yield_now().await,
                    started => return started,
                }
            }
        };
        let deadline = std::time::Duration::from_secs(120);
        match tokio::time::timeout(deadline, started).await.expect("data directory still in use") {
            Ok(engine) => {
                engine.shutdown().await.unwrap();
                (None, None)
            }
            Err(error) => {
                let refusal = census.refusal(&error, &path, Revision(7));
                (Some(error), refusal.map(|refusal| refusal.to_string()))
            }
        }
    }

    #[tokio::test]
    async fn only_unknown_partitions_are_reported_as_a_damaged_catalog() {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path();
        // An empty directory, as garbage collection leaves it, is not data of the partition.
        let partition = data.join("store/manifests").join(PartitionId(900).to_string());
        std::fs::create_dir_all(&partition).unwrap();
        assert_eq!(start(data, false).await, (None, None));
        // Make the log fail to open: put a directory in the place of its file.
        let blocked = data.join("log/newest");
        std::fs::remove_file(&blocked).unwrap();
        std::fs::create_dir(&blocked).unwrap();
        for accepts_unknown in [false, true] {
            let (error, refusal) = start(data, accepts_unknown).await;
            assert!(error.is_some() && refusal.is_none(), "{error:?} {refusal:?}");
        }
        std::fs::write(partition.join("anchor-x"), "x").unwrap();
        let (error, refusal) = start(data, true).await;
        assert!(error.is_some() && refusal.is_none(), "{error:?} {refusal:?}");
        std::fs::remove_dir(&blocked).unwrap();
        let (error, refusal) = start(data, false).await;
        assert!(error.unwrap().is_of_unknown_partition());
        assert!(refusal.unwrap().contains("start once with --accept-catalog 7"));
        assert_eq!(start(data, true).await, (None, None));
    }
}
