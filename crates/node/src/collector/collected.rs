//! Statistics of the garbage collector.

use std::time::Instant;

use fulmar_gateway::cluster::CollectorStatistics;

/// What this process has done as the collector.
#[derive(Default)]
pub(crate) struct Collected {
    pub(super) is_elected: bool,
    passes: u64,
    objects: u64,
    log_objects: u64,
    last_pass: Option<Instant>,
}

impl Collected {
    /// Counts a pass.
    pub(super) fn add(&mut self, is_complete: bool, objects: usize, log_objects: usize) {
        self.passes += 1;
        self.objects += objects as u64;
        self.log_objects += log_objects as u64;
        if is_complete {
            self.last_pass = Some(Instant::now());
        }
    }

    pub(crate) fn statistics(&self) -> CollectorStatistics {
        CollectorStatistics {
            is_elected: self.is_elected,
            passes: self.passes,
            objects: self.objects,
            log_objects: self.log_objects,
            last_pass: self.last_pass.map(|at| at.elapsed()),
        }
    }
}
