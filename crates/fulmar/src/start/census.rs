//! Compares the log and the store with the catalog at the start.
//!
//! A catalog that lacks a partition whose data are in the log or in the store, and has not dropped it either, is older than the data.
//! Such a start is refused before anything is deleted or recycled. `meta.head` finds an old copy of `meta.db` already
//! ([`fulmar_meta::Embedded`]); this check also finds old copies of both files.
//!
//! With `--accept-catalog REVISION` the start continues: the unknown partitions count as dropped from then on, and later partitions get
//! greater ids.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use anyhow::anyhow;
use fulmar_engine::CatalogPartitions;
use fulmar_meta::{Catalog, MetaError, Revision};
use fulmar_pages::PartitionId;
use parking_lot::Mutex;

/// The partitions of a catalog, and those that it lacks.
pub(super) struct Census {
    catalog: Arc<Catalog>,
    /// Unknown partitions are given up instead of refused.
    accepts_unknown: bool,
    unknown: Mutex<BTreeSet<PartitionId>>,
}

impl Census {
    pub(super) fn new(catalog: Arc<Catalog>, accepts_unknown: bool) -> Arc<Self> {
        Arc::new(Census { catalog, accepts_unknown, unknown: Mutex::default() })
    }

    /// What the engine asks.
    pub(super) fn known(self: &Arc<Self>) -> CatalogPartitions {
        let census = self.clone();
        CatalogPartitions {
            from: self.catalog.first_unsettled_partition(),
            knows: Arc::new(move |id| {
                census.catalog.knows_partition(id) || {
                    census.unknown.lock().insert(id);
                    census.accepts_unknown
                }
            }),
        }
    }

    /// The reason why the engine has refused to start, if it is an unknown partition.
    pub(super) fn refusal(&self, metadata: &Path, revision: Revision) -> Option<anyhow::Error> {
        let id = self.unknown.lock().first().copied()?;
        let (path, head) = (metadata.display(), metadata.with_extension("head"));
        Some(anyhow!(
            "{path} is damaged or an old copy: the log or the store holds data of partition {id}, which the catalog neither has \
             nor has dropped; restore {path}, {path}-wal and {} as the node left them; to lose all later changes of tenants, users \
             and privileges, start once with --accept-catalog {}",
            head.display(),
            revision.0
        ))
    }

    /// The engine has found nothing to refuse: all partition ids up to now are accounted for.
    pub(super) async fn settle(&self) -> Result<(), MetaError> {
        let unknown: Vec<u64> = self.unknown.lock().iter().map(|id| id.0).collect();
        if !unknown.is_empty() {
            tracing::warn!(
                partitions = ?unknown,
                "partitions that the accepted catalog does not have are lost; their objects stay in the store"
            );
        }
        self.catalog.settle_dropped(unknown.last().copied().map(PartitionId)).await
    }
}

/// An error with its remedy, for people.
pub(super) fn with_remedy(error: MetaError) -> anyhow::Error {
    anyhow!("{error}; {}", error.remedy())
}
