//! A node on a store, for tests of this crate.

use std::sync::Arc;
use std::time::Duration;

use fulmar_mvcc::{
    Buffers, Cache, Clock, Contents, Disk, Found, MemoryBudget, Node, Opener, Partition, Partitions,
    SnapshotBounds, StoreOwnership, TimeSource, space_of, store_error,
};
use fulmar_pages::PartitionId;
use fulmar_sqlite::{Heap, NodeSpace, Result, SpillArea};
use fulmar_store::{CommitLog, LogOptions, PageStore, StdFiles, Store};
use futures::FutureExt;
use futures::future::BoxFuture;

use crate::{HotLists, Maintenance, Parts, Settings};

/// Opens partitions that commit to the local log.
struct LocalOpener;

impl Opener for LocalOpener {
    fn open<'a>(
        &'a self,
        partitions: &'a Partitions,
        id: PartitionId,
    ) -> BoxFuture<'a, Result<Arc<Partition>>> {
        async move {
            let (node, era) = (partitions.node().clone(), partitions.timeline(id));
            let manifest = node.store.latest_manifest(id, era.epoch, None).await.map_err(store_error)?;
            let (log, stats) = (node.log.clone(), partitions.counted(id));
            Partition::open(node, log, stats, id, era, Contents::of(manifest.as_ref())).await
        }
        .boxed()
    }

    fn opened(&self, _partition: &Arc<Partition>) {}

    fn log_of(&self, node: &Node, _id: PartitionId) -> Result<Arc<CommitLog>> {
        Ok(node.log.clone())
    }

    fn log_settled(&self, _id: PartitionId) -> BoxFuture<'_, ()> {
        async {}.boxed()
    }

    fn learn_timeline<'a>(&'a self, _: &'a Partitions, _: PartitionId) -> BoxFuture<'a, Result<()>> {
        async { Ok(()) }.boxed()
    }

    fn check_shared_log(&self) -> Result<()> {
        Ok(())
    }

    fn forget(&self, _id: PartitionId) {}
}

/// Starts a node that takes over a store. No background task runs.
pub(crate) async fn start(
    store: Arc<dyn Store>,
    time: Arc<dyn TimeSource>,
) -> (tempfile::TempDir, Arc<Maintenance>) {
    let directory = tempfile::tempdir().unwrap();
    let files = Arc::new(StdFiles::open(directory.path().join("log")).unwrap());
    let log = CommitLog::open(LogOptions::default(), files, &mut |_, _| Ok(())).unwrap();
    let clock = Clock::new(time);
    let store = PageStore::open(store);
    let tenure = StoreOwnership::begin(&store, &clock).await.unwrap();
    let store = Arc::new(store.in_term(tenure.term()));
    let node = Arc::new(Node {
        log,
        shared_log: Default::default(),
        store: store.clone(),
        spill: SpillArea::new(directory.path(), 4 << 20),
        temporary: NodeSpace::new(),
        memory: MemoryBudget::new(64 << 20),
        whole_process: false,
        heap: Heap::of_node(64 << 20),
        cache: Cache::new(false),
        disk: Disk::new(space_of(directory.path().to_owned()), None),
        clock,
        buffers: Buffers::default(),
        stats: Default::default(),
        publication: Default::default(),
        old_manifests: Default::default(),
        ownership: Some(tenure),
        is_member: false,
        has_common_store: false,
        is_replica: false,
        exported: Default::default(),
    });
    let partitions = Arc::new(Partitions::new(node, Arc::new(LocalOpener), Found::default()));
    let parts = Parts { scheduler: Arc::default(), hot: Arc::new(HotLists::new(store)), pins: None };
    let settings = Settings {
        manifest_interval: Duration::from_secs(60),
        idle_after: Duration::from_secs(20),
        snapshots: SnapshotBounds::default(),
        retention: crate::default_retention(),
    };
    (directory, Arc::new(Maintenance::new(partitions, parts, settings)))
}
