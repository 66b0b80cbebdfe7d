//! Slows a copy down while the latency of a database at its nodes exceeds its bound ([`Throttle`]).
//!
//! Observed are the database that moves and the [`MAX_NEIGHBOURS`] most used ones of either node, as far
//! as they executed statements in the last second. The bound of a database is:
//!
//! - its `latency_objective`. If its latency exceeded that before the copy, the copy is not the
//!   cause, and may even be the remedy: then the bound is that latency and a quarter;
//! - without an objective, [`FACTOR`] times its latency before the copy, and at least
//!   [`MIN_EXCESS_US`] more.

use std::convert::Infallible;
use std::time::Duration;

use fulmar_cluster::NodeId;
use fulmar_meta::Limit;
use fulmar_migrate::pace::Throttle;
use fulmar_pages::PartitionId;
use hashbrown::HashMap;
use tokio::time::{sleep, timeout};

use crate::Node;
use crate::messages::{Answer, Request};

/// How often latencies are read.
const INTERVAL: Duration = Duration::from_millis(250);
/// How long the destination may take to report. Without an answer, only the source's count.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of databases of a node that are observed.
const MAX_NEIGHBOURS: usize = 8;
/// The bound without an objective, as a multiple of the latency before the copy.
const FACTOR: u64 = 3;
/// Smaller increases of the latency are not noticed.
const MIN_EXCESS_US: u64 = 5_000;

/// The bounds of the databases that were observed, in microseconds.
#[derive(Default)]
pub(super) struct Bounds {
    known: HashMap<(NodeId, PartitionId), u64>,
    /// The copy has begun.
    is_copying: bool,
}

impl Bounds {
    /// The bound of a database whose latency is `us` now.
    fn of(&mut self, key: (NodeId, PartitionId), us: u64, objective_us: Option<u64>) -> u64 {
        *self.known.entry(key).or_insert_with(|| match (objective_us, self.is_copying) {
            (Some(objective_us), true) => objective_us.max(1),
            (Some(objective_us), false) if us <= objective_us => objective_us.max(1),
            (Some(_), false) => us + us / 4,
            (None, _) => (us * FACTOR).max(us + MIN_EXCESS_US),
        })
    }
}

impl Node {
    /// The most used partitions of this node with the smoothed execution times of their statements in
    /// microseconds. Contains `moving` if it is used.
    pub(crate) fn used_latencies(&self, moving: PartitionId) -> Vec<(PartitionId, u64)> {
        let Ok(partitions) = self.partitions() else { return Vec::new() };
        let used = partitions.latencies().into_iter().enumerate();
        used.filter(|(rank, (id, _))| *rank < MAX_NEIGHBOURS || *id == moving).map(|(_, of)| of).collect()
    }

    /// The bounds for a copy that has not begun yet.
    pub(super) async fn latency_bounds(&self, partition: PartitionId, destination: NodeId) -> Bounds {
        let mut bounds = Bounds::default();
        self.worst_ratio(partition, destination, &mut bounds).await;
        bounds.is_copying = true;
        bounds
    }

    /// Slows a copy down, until this is dropped.
    pub(super) async fn throttle_copy(
        &self,
        partition: PartitionId,
        destination: NodeId,
        (throttle, mut bounds): (&Throttle, Bounds),
    ) -> Infallible {
        loop {
            sleep(INTERVAL).await;
            throttle.report(self.worst_ratio(partition, destination, &mut bounds).await);
        }
    }

    /// The highest ratio of a latency to its bound; 0 if no database is used.
    async fn worst_ratio(&self, partition: PartitionId, destination: NodeId, bounds: &mut Bounds) -> f64 {
        let request = self.call(destination, Request::Latencies { partition: partition.0 });
        let theirs = match timeout(REPORT_TIMEOUT, request).await {
            Ok(Ok(Ok(Answer::Latencies { us }))) => us,
            _ => Vec::new(),
        };
        let own = self.used_latencies(partition).into_iter().map(|(id, us)| (self.id(), id, us));
        let theirs = theirs.into_iter().map(|(id, us)| (destination, PartitionId(id), us));
        let ratios = own.chain(theirs).map(|(node, id, us)| {
            let objective_ms = self.catalog().limit_of(id, Limit::LatencyObjective);
            let objective_us = objective_ms.map(|ms| ms.saturating_mul(1000));
            us as f64 / bounds.of((node, id), us, objective_us) as f64
        });
        ratios.fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_objectives_or_follow_the_latency_before_the_copy() {
        let mut bounds = Bounds::default();
        let of = |id| (NodeId(1), PartitionId(id));
        assert_eq!(bounds.of(of(1), 5_000, Some(20_000)), 20_000);
        assert_eq!(bounds.of(of(2), 40_000, Some(20_000)), 50_000, "exceeded before the copy");
        assert_eq!(bounds.of(of(3), 40_000, None), 120_000);
        assert_eq!(bounds.of(of(4), 100, None), 5_100);
        bounds.is_copying = true;
        assert_eq!(bounds.of(of(5), 40_000, Some(20_000)), 20_000, "used since the copy has begun");
        assert_eq!(bounds.of(of(3), 500_000, None), 120_000, "a bound does not follow the copy");
        assert_eq!(bounds.of((NodeId(2), PartitionId(3)), 1_000, None), 6_000);
    }
}
