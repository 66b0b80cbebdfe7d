//! The data directory of a node. It outlives the node's processes. Only one process uses it at a
//! time.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::directory::{CrashReport, DataDirectory, Stamp};
use fulmar_cluster::environment::Slot;
use fulmar_cluster::migration::Fence;
use fulmar_cluster::{Error, LogId, ManifestName};
use fulmar_pages::PartitionId;

use super::Env;
use crate::partition::State;

#[derive(Clone, Debug, Default)]
pub struct Directory {
    pub stamp: Option<Stamp>,
    pub crash_report: Option<CrashReport>,
    /// The local logs.
    pub logs: BTreeMap<(LogId, u64), Slot>,
    /// Private partitions that were copied to this node.
    pub copies: BTreeMap<(PartitionId, ManifestName), State>,
    /// The newest command for the copy of a partition.
    pub fences: BTreeMap<PartitionId, Fence>,
    /// Pages for the destination of an on-demand migration, by its first epoch.
    pub pinned: BTreeMap<(PartitionId, u32), State>,
}

impl Env {
    /// Changes the data directory. It is durable when this returns. If the process dies meanwhile,
    /// the change may or may not have happened.
    pub async fn write<T>(&self, change: impl FnOnce(&mut Directory) -> T) -> T {
        let simulation = &self.world.simulation;
        let delay = || simulation.delay(Duration::from_micros(50), Duration::from_millis(3));
        simulation.sleep(delay()).await;
        let result = change(&mut self.directory.lock());
        simulation.sleep(delay()).await;
        result
    }
}

#[async_trait]
impl DataDirectory for Env {
    async fn stamp(&self) -> Result<Option<Stamp>, Error> {
        Ok(self.directory.lock().stamp.clone())
    }

    async fn set_stamp(&self, stamp: Stamp) -> Result<(), Error> {
        self.write(|directory| directory.stamp = Some(stamp)).await;
        Ok(())
    }

    async fn crash_report(&self) -> Result<Option<CrashReport>, Error> {
        Ok(self.directory.lock().crash_report)
    }

    async fn clear_crash_report(&self) -> Result<(), Error> {
        self.write(|directory| directory.crash_report = None).await;
        Ok(())
    }
}
