//! Preparing the partitions of a single node for a cluster.

use fulmar_sqlite::{Error, Result, sqlstate};

use crate::engine::Engine;

impl Engine {
    /// Makes a manifest of every commit of this single node, so that no log is needed any more.
    /// Returns the greatest term that names an object of the store or a version.
    ///
    /// Fails if that is not possible for some partition: it may be damaged, or the shared log, which
    /// may have lost commits of any partition. Nothing may use the engine at the same time.
    pub async fn settle_for_cluster(&self) -> Result<u32> {
        self.check_primary()?;
        self.log_router().check()?;
        let Some(ownership) = &self.node().ownership else {
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, "store is inside the data directory")
                .hint("Move the store to a place that all nodes reach."));
        };
        self.maintenance().flush_all().await?;
        let unsettled = self.partitions().open_partitions().into_iter().find(|open| !open.is_settled());
        let unsettled = unsettled.map(|open| open.id).or_else(|| {
            let unopened = self.partitions().unopened();
            unopened.first().map(|unopened| unopened.id)
        });
        if let Some(id) = unsettled {
            let text = format!("could not flush all commits of partition {id}");
            return Err(Error::new(sqlstate::IO_ERROR, text).hint("Retry. The reason is in the log."));
        }
        ownership.check(&self.node().store, &self.node().clock).await?;
        Ok(ownership.term().number)
    }
}
