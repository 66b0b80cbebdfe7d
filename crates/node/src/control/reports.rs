//! The newest load reports of all nodes, smoothed.
//!
//! If a node that lives does not answer, its partitions keep the load of its last report: without it
//! the cluster would seem to have less load than it has.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_control::plan::CostModel;
use fulmar_control::report::{MoveReport, NodeReport, PartitionReport};
use fulmar_pages::PartitionId;
use hashbrown::{HashMap, HashSet};

/// Loads are smoothed exponentially with a time constant of this, or of five rounds if that is less.
/// A load that jumps shows half of it after 70 % of that time.
const MAX_SMOOTHING: Duration = Duration::from_secs(5);
const SMOOTHING_ROUNDS: u32 = 5;
/// A report that is older than this says nothing about the node now.
const MAX_AGE: Duration = Duration::from_secs(30);
/// For this long after its last report, a node that does not report is a hole.
pub(super) const MAX_HOLE: Duration = Duration::from_secs(15);
/// A round decides if at most one in this many nodes is a hole: their last reports say nearly what
/// the cluster's load is, and in a large cluster there may always be one.
const NODES_PER_HOLE: usize = 10;

/// Bounds of what a node reports of its moves: their fixed time, and their rate.
const FIXED_S: (f64, f64) = (0.0, 600.0);
const BYTES_PER_S: (f64, f64) = (1e4, 1e11);

/// What a node has reported.
#[derive(Clone, Debug)]
pub(super) struct Reported {
    pub report: NodeReport,
    at: Instant,
}

/// The load of a partition, smoothed over some reports.
#[derive(Clone, Debug, Default)]
pub(super) struct PartitionLoad {
    /// CPUs.
    pub load: f64,
    /// The newest report.
    pub report: PartitionReport,
    /// Whether it is one of the last round.
    pub is_fresh: bool,
    /// The node that has sent it.
    node: Option<Arc<str>>,
}

/// The reports of all nodes.
#[derive(Debug, Default)]
pub(super) struct Reports {
    nodes: BTreeMap<String, Reported>,
    partitions: HashMap<PartitionId, PartitionLoad>,
    updated_at: Option<Instant>,
}

impl Reports {
    /// Adds the reports of one round. `round` is the time from one to the next, and `silent` are the nodes
    /// that live and have not reported.
    pub fn update(&mut self, reports: Vec<NodeReport>, silent: &[String], round: Duration, now: Instant) {
        let weight = self.updated_at.replace(now).map_or(1.0, |last| weight(now.duration_since(last), round));
        let mut seen: HashMap<PartitionId, ()> = HashMap::new();
        for mut report in reports {
            let (factor, node) = (overhead(&report), Arc::<str>::from(report.node.as_str()));
            for partition in std::mem::take(&mut report.partitions) {
                let id = PartitionId(partition.partition);
                let cpu = finite(partition.cpu) * factor;
                let known = self.partitions.entry(id).or_default();
                known.load += (cpu - known.load) * weight;
                (known.report, known.node, known.is_fresh) = (partition, Some(node.clone()), true);
                seen.insert(id, ());
            }
            self.nodes.insert(report.node.clone(), Reported { report, at: now });
        }
        // A partition that no node has reported is idle, or its node has not answered.
        let silent: HashSet<&str> = silent.iter().map(String::as_str).collect();
        for (id, partition) in &mut self.partitions {
            partition.is_fresh &= seen.contains_key(id);
            let is_silent = partition.node.as_deref().is_some_and(|node| silent.contains(node));
            if !seen.contains_key(id) && !is_silent {
                partition.load *= 1.0 - weight;
                partition.report.requests_per_s = 0.0;
            }
        }
        self.partitions.retain(|id, partition| seen.contains_key(id) || partition.load > 1e-6);
        self.nodes.retain(|_, reported| now.duration_since(reported.at) < 10 * MAX_AGE);
    }

    /// Returns true if too many of the silent nodes have reported within [`MAX_HOLE`] to decide
    /// anything.
    pub fn has_holes(&self, silent: &[String], now: Instant) -> bool {
        let is_hole = |reported: &Reported| now.duration_since(reported.at) < MAX_HOLE;
        let holes = silent.iter().filter(|node| self.nodes.get(*node).is_some_and(is_hole)).count();
        holes * NODES_PER_HOLE > self.nodes.len()
    }

    /// The newest report of a node, and whether it is recent.
    pub fn node(&self, name: &str, now: Instant) -> Option<(&NodeReport, bool)> {
        let reported = self.nodes.get(name)?;
        Some((&reported.report, now.duration_since(reported.at) < MAX_AGE))
    }

    /// Whether the newest report of a node is recent and shows a utilisation above a threshold.
    pub fn is_above(&self, name: &str, threshold: f64, now: Instant) -> bool {
        let report = self.node(name, now).filter(|(_, is_recent)| *is_recent);
        report.is_some_and(|(report, _)| finite(report.cpu) / capacity(report) > threshold)
    }

    /// The load of a partition.
    pub fn partition(&self, id: PartitionId) -> Option<&PartitionLoad> {
        self.partitions.get(&id)
    }

    /// The mean capacity of the nodes that have reported.
    pub fn mean_capacity(&self) -> Option<f64> {
        let capacities = self.nodes.values().map(|reported| capacity(&reported.report));
        let sum: f64 = capacities.sum();
        (!self.nodes.is_empty()).then(|| sum / self.nodes.len() as f64)
    }

    /// What moves take: the means of what the nodes have measured, and otherwise the defaults.
    pub fn move_cost(&self) -> CostModel {
        let mean = |value: fn(&MoveReport) -> Option<f64>, (low, high): (f64, f64)| {
            let measured = self.nodes.values().filter_map(|reported| value(&reported.report.moves));
            let measured: Vec<f64> = measured.filter(|value| value.is_finite()).collect();
            let sum: f64 = measured.iter().map(|value| value.clamp(low, high)).sum();
            (!measured.is_empty()).then(|| sum / measured.len() as f64)
        };
        let default = CostModel::default();
        let rate = |value, default| mean(value, BYTES_PER_S).unwrap_or(default);
        CostModel {
            fixed_s: mean(|moves| moves.fixed_s, FIXED_S).unwrap_or(default.fixed_s),
            site_bytes_per_s: rate(|moves| moves.site_bytes_per_s, default.site_bytes_per_s),
            wan_bytes_per_s: rate(|moves| moves.wan_bytes_per_s, default.wan_bytes_per_s),
        }
    }
}

/// The CPUs of a node, at least a thousandth of one.
pub(super) fn capacity(report: &NodeReport) -> f64 {
    finite(report.capacity).max(1e-3)
}

/// What the process uses over the time that its partitions' statements take on the workers. Flushes,
/// the log and the network are charged to the partitions, at most twice what they use themselves. It
/// is less than 1 if the workers wait for a CPU: other processes use it, or the node has only a share.
fn overhead(report: &NodeReport) -> f64 {
    const MAX_OVERHEAD: f64 = 3.0;
    let sum: f64 = report.partitions.iter().map(|partition| finite(partition.cpu)).sum();
    if sum > 0.0 { (finite(report.cpu) / sum).min(MAX_OVERHEAD) } else { 1.0 }
}

/// The time constant of loads that are reported in each round.
pub(super) fn smoothing(round: Duration) -> Duration {
    MAX_SMOOTHING.min(round * SMOOTHING_ROUNDS)
}

/// The weight of the newest report, this time after the one before it.
fn weight(interval: Duration, round: Duration) -> f64 {
    let constant_s = smoothing(round).as_secs_f64().max(f64::MIN_POSITIVE);
    1.0 - (-interval.as_secs_f64() / constant_s).exp()
}

fn finite(value: f64) -> f64 {
    if value.is_finite() { value.clamp(0.0, 1e6) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(cpu: f64, partitions: &[(u64, f64)]) -> NodeReport {
        let partition = |(partition, cpu): &(u64, f64)| PartitionReport {
            partition: *partition,
            cpu: *cpu,
            requests_per_s: 1.0,
            ..PartitionReport::default()
        };
        let partitions = partitions.iter().map(partition).collect();
        NodeReport { node: "n1".to_owned(), cpu, capacity: 2.0, partitions, ..NodeReport::default() }
    }

    #[test]
    fn loads_include_overhead_and_are_smoothed() {
        const ROUND: Duration = Duration::from_millis(500);
        let (mut reports, mut now) = (Reports::default(), Instant::now());
        let load = |reports: &Reports, id| reports.partition(PartitionId(id)).map_or(0.0, |load| load.load);
        let mut update = |reports: &mut Reports, report| {
            now += ROUND;
            reports.update(vec![report], &[], ROUND, now);
        };
        update(&mut reports, report(1.0, &[(1, 0.6), (2, 0.2)]));
        assert!((load(&reports, 1) - 0.75).abs() < 1e-6 && (load(&reports, 2) - 0.25).abs() < 1e-6);
        for _ in 0..5 {
            update(&mut reports, report(1.8, &[(1, 1.6), (2, 0.2)]));
        }
        let share = (load(&reports, 1) - 0.75) / (1.6 - 0.75);
        assert!((share - 0.632).abs() < 1e-3, "63 % of the change after five rounds: {share}");
        for _ in 0..100 {
            update(&mut reports, report(0.9, &[(1, 0.1)]));
        }
        assert!((load(&reports, 1) - 0.3).abs() < 1e-6, "at most three times what the sessions use");
        for _ in 0..100 {
            update(&mut reports, report(0.3, &[(1, 1.0), (2, 0.5)]));
        }
        let loads = (load(&reports, 1), load(&reports, 2));
        assert!((loads.0 - 0.2).abs() < 1e-6 && (loads.1 - 0.1).abs() < 1e-6, "workers waited: {loads:?}");
        update(&mut reports, report(f64::NAN, &[(1, f64::NAN)]));
        assert!(load(&reports, 1).is_finite());
        let kept = load(&reports, 1);
        reports.update(Vec::new(), &["n1".to_owned()], ROUND, Instant::now());
        assert_eq!(load(&reports, 1), kept, "a node that does not answer is not idle");
        let is_fresh =
            |reports: &Reports| reports.partition(PartitionId(1)).is_some_and(|load| load.is_fresh);
        assert!(!is_fresh(&reports), "its latencies are old");
        for _ in 0..100 {
            update(&mut reports, report(0.0, &[]));
        }
        assert_eq!(load(&reports, 1), 0.0);
        assert_eq!(smoothing(Duration::from_secs(60)), Duration::from_secs(5));
    }

    #[test]
    fn old_reports_are_not_recent() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        reports.update(vec![report(0.0, &[])], &[], MAX_AGE, now);
        assert!(reports.node("n1", now).is_some_and(|(_, is_recent)| is_recent));
        assert!(reports.node("n1", now + MAX_AGE).is_some_and(|(_, is_recent)| !is_recent));
        assert!(reports.node("n2", now).is_none());
        let silent = ["n1".to_owned(), "n2".to_owned()];
        assert!(reports.has_holes(&silent, now) && !reports.has_holes(&silent[1..], now));
        assert!(!reports.has_holes(&silent, now + MAX_HOLE), "its last report stands in");
        assert_eq!(reports.mean_capacity(), Some(2.0));
        reports.update(vec![report(1.6, &[])], &[], MAX_AGE, now);
        assert!(reports.is_above("n1", 0.77, now) && !reports.is_above("n1", 0.8, now));
        assert!(!reports.is_above("n1", 0.77, now + MAX_AGE) && !reports.is_above("n2", 0.0, now));
    }

    #[test]
    fn moves_cost_what_nodes_have_measured() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        let with = |node: &str, fixed_s, site_bytes_per_s| {
            let moves = MoveReport { fixed_s, site_bytes_per_s, wan_bytes_per_s: None };
            NodeReport { node: node.to_owned(), moves, ..NodeReport::default() }
        };
        reports.update(vec![with("n1", None, None)], &[], MAX_AGE, now);
        assert_eq!(reports.move_cost(), CostModel::default(), "nothing was measured");
        let measured = vec![
            with("n1", Some(0.1), Some(10e6)),
            with("n2", Some(0.3), Some(30e6)),
            with("n3", Some(0.2), None),
        ];
        reports.update(measured, &[], MAX_AGE, now);
        let cost = reports.move_cost();
        assert!((cost.seconds(20_000_000, false) - 1.2).abs() < 1e-9, "{cost:?}");
        assert_eq!(cost.wan_bytes_per_s, CostModel::default().wan_bytes_per_s, "no node has measured it");
        reports.update(vec![with("n1", Some(f64::NAN), Some(-1.0))], &[], MAX_AGE, now);
        let cost = reports.move_cost();
        assert!((cost.fixed_s - 0.25).abs() < 1e-9 && cost.site_bytes_per_s < 30e6, "{cost:?}");
    }

    #[test]
    fn few_holes_in_a_large_cluster_do_not_stop_it() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        let named = |number| NodeReport { node: format!("n{number}"), ..report(0.5, &[]) };
        let silent: Vec<String> = (1..=3).map(|number| format!("n{number}")).collect();
        reports.update((1..=9).map(named).collect(), &[], MAX_AGE, now);
        assert!(reports.has_holes(&silent[..1], now), "one of nine");
        reports.update((1..=29).map(named).collect(), &[], MAX_AGE, now);
        assert!(!reports.has_holes(&silent[..2], now) && reports.has_holes(&silent, now), "of 29");
    }
}
