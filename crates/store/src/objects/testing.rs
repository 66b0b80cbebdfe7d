//! What tests of objects need more than once.

use fulmar_pages::{Manifest, Version};

use super::ManifestName;

/// A manifest of this name, of a partition that has nothing.
pub(super) fn empty_manifest(name: ManifestName) -> Manifest {
    Manifest {
        partition: name.partition,
        version: Version { lineage: 1, epoch: name.epoch, number: name.number },
        page_count: 0,
        timestamp: 0,
        segments: Vec::new(),
        outcomes: Vec::new(),
        outcomes_horizon: 0,
    }
}
