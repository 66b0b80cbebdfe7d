//! Nodes that have been slow for long: they are emptied, and others take their place (ElasTraS 7.9).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// For how long nodes have been slow or normal.
#[derive(Default)]
pub(super) struct SlowTimes {
    /// Whether a node is slow, and since when. Nodes that have never been slow are not in it.
    nodes: BTreeMap<String, (bool, Instant)>,
    unfit: BTreeSet<String>,
}

impl SlowTimes {
    /// Records which nodes are slow now. A node becomes unfit once it has been slow for `delay`, and fit
    /// again once it has been normal for as long: without load, a slow node may seem normal.
    pub fn update(&mut self, slow: &BTreeSet<String>, now: Instant, delay: Duration) {
        for name in slow {
            self.nodes.entry(name.clone()).or_insert((true, now));
        }
        self.nodes.retain(|name, (was_slow, since)| {
            let is_slow = slow.contains(name);
            if is_slow != *was_slow {
                (*was_slow, *since) = (is_slow, now);
            }
            if now.saturating_duration_since(*since) < delay {
                return true;
            }
            match is_slow {
                true => self.unfit.insert(name.clone()),
                false => self.unfit.remove(name),
            };
            is_slow
        });
    }

    /// The nodes that have to be emptied.
    pub fn unfit(&self) -> &BTreeSet<String> {
        &self.unfit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_is_unfit_after_it_was_slow_for_long() {
        let start = Instant::now();
        let mut times = SlowTimes::default();
        let mut unfit = |second: u64, slow: &[&str]| -> Vec<String> {
            let slow = slow.iter().map(|name| (*name).to_owned()).collect();
            times.update(&slow, start + Duration::from_secs(second), Duration::from_secs(10));
            times.unfit().iter().cloned().collect()
        };
        assert_eq!(unfit(0, &["n1"]), [""; 0]);
        assert_eq!(unfit(8, &[]), [""; 0]);
        assert_eq!(unfit(9, &["n1"]), [""; 0]);
        assert_eq!(unfit(18, &["n1"]), [""; 0], "slow for 9 s");
        assert_eq!(unfit(19, &["n1", "n2"]), ["n1"]);
        assert_eq!(unfit(20, &["n2"]), ["n1"]);
        assert_eq!(unfit(29, &["n2"]), ["n1", "n2"], "normal for 9 s");
        assert_eq!(unfit(30, &["n2"]), ["n2"]);
        assert_eq!(times.nodes.len(), 1);
    }
}
