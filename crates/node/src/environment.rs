//! The environment of the ownership protocols in a server: the machine's clocks, the metadata
//! store, the logs in the store, and the data directory.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fulmar_cluster::Rules;
use fulmar_cluster::directory::DataDirectory;
use fulmar_cluster::environment::{Environment, LogObjects};
use fulmar_meta::MetadataStore;
use rand::RngExt;
use rustix::time::{ClockId, clock_gettime};

/// The environment of a node.
#[derive(Clone)]
pub struct NodeEnvironment(Arc<Parts>);

struct Parts {
    metadata: Arc<dyn MetadataStore>,
    logs: Arc<dyn LogObjects>,
    directory: Arc<dyn DataDirectory>,
}

impl NodeEnvironment {
    /// The environment with these parts.
    pub fn new(
        metadata: Arc<dyn MetadataStore>,
        logs: Arc<dyn LogObjects>,
        directory: Arc<dyn DataDirectory>,
    ) -> Self {
        NodeEnvironment(Arc::new(Parts { metadata, logs, directory }))
    }
}

/// CLOCK_BOOTTIME.
pub fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

impl Environment for NodeEnvironment {
    fn now(&self) -> Duration {
        boot_time()
    }

    fn unix_time(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(duration)
    }

    fn jitter(&self, max: Duration) -> Duration {
        rand::rng().random_range(Duration::ZERO..=max)
    }

    fn metadata(&self) -> &dyn MetadataStore {
        &*self.0.metadata
    }

    fn logs(&self) -> &dyn LogObjects {
        &*self.0.logs
    }

    fn directory(&self) -> &dyn DataDirectory {
        &*self.0.directory
    }

    fn rules(&self) -> &Rules {
        &Rules::ALL
    }
}
