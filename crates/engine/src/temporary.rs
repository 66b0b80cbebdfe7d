//! Temporary files of the layers above.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_pages::PartitionId;
use fulmar_sqlite::{Quota, TemporaryCharge};

use crate::engine::Engine;

/// Charges temporary files outside of the engine, such as results, to the tenant of a session.
pub struct TemporarySpace {
    engine: Arc<Engine>,
    id: PartitionId,
    limit_bytes: AtomicU64,
}

impl TemporarySpace {
    pub(crate) fn new(engine: Arc<Engine>, id: PartitionId) -> TemporarySpace {
        TemporarySpace { engine, id, limit_bytes: AtomicU64::new(u64::MAX) }
    }

    /// Sets the tenant's `temp_file_limit`, for files that are charged from now on.
    pub fn set_limit(&self, bytes: u64) {
        self.limit_bytes.store(bytes, Ordering::Relaxed);
    }

    /// The charge of a new file.
    pub fn charge(&self) -> TemporaryCharge {
        let space = self.engine.partitions().counted(self.id).temporary_space(&self.engine.node().temporary);
        TemporaryCharge::new(&Quota::new(space, self.limit_bytes.load(Ordering::Relaxed)))
    }
}
