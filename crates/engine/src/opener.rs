//! Opens the partitions of a node.

use std::sync::Arc;

use fulmar_maintenance::Parts;
use fulmar_mvcc::{Contents, Node, Opener, Partition, Partitions, store_error, with_partition_context};
use fulmar_pages::PartitionId;
use fulmar_sqlite::Result;
use fulmar_store::CommitLog;
use futures::FutureExt;
use futures::future::BoxFuture;

use crate::log_routing::LogRouter;
use crate::membership::{Member, shared_log};
use crate::replica::Replica;

/// Opens partitions from their newest manifests: those of an owner with the records of their log,
/// those of a replica as of the primary's log.
pub(crate) struct NodeOpener {
    pub(crate) log_router: LogRouter,
    /// Set on a member of a cluster.
    pub(crate) member: Option<Arc<Member>>,
    /// Set on a replica.
    pub(crate) replica: Option<Arc<Replica>>,
    pub(crate) parts: Parts,
}

impl NodeOpener {
    /// Opens a partition that the cluster has assigned to this node.
    async fn open_assigned(
        &self,
        member: &Member,
        partitions: &Partitions,
        id: PartitionId,
    ) -> Result<Arc<Partition>> {
        let (opened, hot_pages) = member.open(partitions, id).await?;
        if let Some(list) = hot_pages {
            self.parts.hot.prewarm(&opened, list);
        }
        Ok(opened)
    }

    async fn open_owned(&self, partitions: &Partitions, id: PartitionId) -> Result<Arc<Partition>> {
        self.log_router.wait_for_change(id).await;
        let replay = partitions.replay(id);
        let stats = partitions.counted(id);
        let (node, era) = (partitions.node().clone(), partitions.timeline(id));
        let log = self.log_of(&node, id)?;
        let (manifest, hot_pages) = node.store.latest(id, era.epoch, None).await.map_err(store_error)?;
        if let (Some(tenure), Some(manifest)) = (&node.ownership, &manifest) {
            tenure.check_number(manifest.version.number)?;
        }
        let contents = Contents { manifest: manifest.as_ref(), replay: replay.as_deref(), snapshots: None };
        let open = Partition::open(node, log, stats, id, era, contents);
        let opened = with_partition_context(id, open).await?;
        if let Some(list) = hot_pages {
            self.parts.hot.prewarm(&opened, list);
        }
        Ok(opened)
    }
}

impl Opener for NodeOpener {
    fn open<'a>(
        &'a self,
        partitions: &'a Partitions,
        id: PartitionId,
    ) -> BoxFuture<'a, Result<Arc<Partition>>> {
        async move {
            match (&self.replica, &self.member) {
                (Some(replica), _) => replica.open(partitions, &self.parts.hot, id).await,
                (None, Some(member)) => self.open_assigned(member, partitions, id).await,
                (None, None) => self.open_owned(partitions, id).await,
            }
        }
        .boxed()
    }

    fn opened(&self, partition: &Arc<Partition>) {
        // A replica does not compact.
        if self.replica.is_none() {
            self.parts.scheduler.opened(partition);
        }
    }

    fn log_of(&self, node: &Node, id: PartitionId) -> Result<Arc<CommitLog>> {
        match &self.member {
            Some(member) if member.has_copied(id) => shared_log(node),
            _ => self.log_router.log_of(node, id),
        }
    }

    fn log_settled(&self, id: PartitionId) -> BoxFuture<'_, ()> {
        self.log_router.wait_for_change(id).boxed()
    }

    fn learn_timeline<'a>(
        &'a self,
        partitions: &'a Partitions,
        id: PartitionId,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            // Others have all timelines in memory.
            let Some(member) = &self.member else { return Ok(()) };
            partitions.learn_timeline(id, member.timeline(id).await?);
            Ok(())
        }
        .boxed()
    }

    fn check_shared_log(&self) -> Result<()> {
        self.log_router.check()
    }

    fn forget(&self, id: PartitionId) {
        self.log_router.forget(id);
    }
}
