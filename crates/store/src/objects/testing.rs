//! Helpers for tests of this module.

use fulmar_pages::{Manifest, Version};

use super::ManifestName;

/// A manifest with this name, of an empty partition.
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
