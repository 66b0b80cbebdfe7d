//! What decides: the policy and the forecasts. Deciding may take seconds, so it runs on a thread of
//! its own.
//!
//! **A time about which nothing is known** is no evidence. If rounds are further apart than
//! [`max_gap_s`], because the machine was suspended or a clock has jumped, the policy forgets for how
//! long its conditions have held. An outlook that is too old is not used.

use std::sync::Arc;

use fulmar_control::picture::Picture;
use fulmar_control::plan::CostModel;
use fulmar_control::policy::which::Mechanism;
use fulmar_control::policy::{Controller, Decision, horizon_s};
use fulmar_elastic::settings::ControlSettings;

use super::forecast::Forecaster;

/// Rounds may be this far apart.
const MAX_GAP_ROUNDS: f64 = 10.0;
const MIN_GAP_S: f64 = 60.0;

pub(super) struct Brain {
    settings: ControlSettings,
    controller: Controller,
    pub forecaster: Forecaster,
    last_s: Option<f64>,
}

impl Brain {
    /// `None` if the settings name a rule or a planner that does not exist, which [`ControlSettings`]
    /// excludes.
    pub fn new(settings: &ControlSettings, forecaster: Forecaster) -> Option<Brain> {
        let mut policy = settings.policy.clone();
        policy.planning.whole_partitions = !Mechanism::MoveRows.exists();
        let controller = Controller::new(settings.rule, policy)?;
        Some(Brain { settings: settings.clone(), controller, forecaster, last_s: None })
    }

    /// Continues the drains of an earlier policy.
    pub fn adopt(&mut self, drained: Vec<String>) {
        self.controller.adopt(drained);
    }

    /// Forgets what was decided and is not carried out.
    pub fn forget_decisions(&mut self, drained: Vec<String>) {
        self.controller.forget_decisions(drained);
    }

    /// Sets the cost model of moves, which the nodes have measured.
    pub fn set_move_cost(&mut self, cost: CostModel) {
        self.controller.set_move_cost(cost);
    }

    /// Decides for one round, at this time of the machine's clock. While it is paused, it only observes.
    pub fn decide(&mut self, picture: &Arc<Picture>, unix_s: f64, is_paused: bool) -> Vec<Decision> {
        let at_s = picture.at_s;
        let is_known = |last: f64| (0.0..=max_gap_s(&self.settings)).contains(&(at_s - last));
        if !self.last_s.is_none_or(is_known) {
            tracing::info!(seconds = at_s - self.last_s.unwrap_or(at_s), "no load was observed for a while");
            self.controller.forget_times();
        }
        self.last_s = Some(at_s);
        self.forecaster.observe(picture.clone(), horizon_s(picture, self.controller.settings()));
        if is_paused {
            return Vec::new();
        }
        self.controller.set_utc_offset(unix_s - at_s);
        self.controller.decide(picture, &self.forecaster.outlook(at_s))
    }

    /// Ends a round, at this time of the pictures' clock: what it took to decide is no gap.
    pub fn decided(&mut self, at_s: f64) {
        self.last_s = Some(at_s);
    }
}

/// The longest time between two rounds in which conditions count as having held.
fn max_gap_s(settings: &ControlSettings) -> f64 {
    (MAX_GAP_ROUNDS * settings.round.as_secs_f64()).max(MIN_GAP_S)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use fulmar_control::picture::{Node, Partition};
    use fulmar_control::policy::Action;
    use fulmar_control::report::{NodeReport, PartitionReport};
    use fulmar_pages::PartitionId;
    use parking_lot::Mutex;

    use super::super::clock::{Clock, TimeSource};
    use super::super::reports::Reports;
    use super::*;

    /// Clocks that a test sets.
    #[derive(Clone, Default)]
    struct Times(Arc<Mutex<(Duration, Duration)>>);

    impl TimeSource for Times {
        fn boot_time(&self) -> Duration {
            self.0.lock().0
        }

        fn unix_time(&self) -> Duration {
            self.0.lock().1
        }
    }

    /// The rounds of a controller of two nodes with one CPU each, as in `Run::round`.
    struct Rounds {
        times: Times,
        clock: Clock,
        reports: Reports,
        brain: Brain,
        begun: Instant,
    }

    const ROUND: Duration = Duration::from_secs(5);

    impl Rounds {
        fn new() -> Rounds {
            let times = Times::default();
            times.0.lock().1 = Duration::from_secs(1_800_000_000);
            let settings = ControlSettings { rule: "thresholds", ..ControlSettings::default() };
            Rounds {
                clock: Clock::with(Box::new(times.clone())),
                times,
                reports: Reports::default(),
                brain: Brain::new(&settings, Forecaster::idle()).unwrap(),
                begun: Instant::now(),
            }
        }

        /// One round, with the load of each node or no report of it. Returns the decisions.
        fn round(&mut self, loads: [Option<f64>; 2]) -> Vec<Decision> {
            let passed = {
                let mut times = self.times.0.lock();
                (times.0, times.1) = (times.0 + ROUND, times.1 + ROUND);
                times.0
            };
            let (mut reports, mut silent) = (Vec::new(), Vec::new());
            for (number, load) in (1_u64..).zip(loads) {
                let node = format!("n{number}");
                let Some(cpu) = load else {
                    silent.push(node);
                    continue;
                };
                let report = PartitionReport {
                    partition: number,
                    tenant: format!("t{number}"),
                    cpu,
                    requests_per_s: 1.0,
                    ..PartitionReport::default()
                };
                let partitions = vec![report];
                reports.push(NodeReport { node, cpu, capacity: 1.0, partitions, ..NodeReport::default() });
            }
            let now = self.begun + passed;
            self.reports.update(reports, &silent, ROUND, now);
            if self.reports.has_holes(&silent, now) {
                return Vec::new();
            }
            let load = |number| self.reports.partition(PartitionId(number)).map_or(0.0, |of| of.load);
            let partitions = (1..=2)
                .map(|number| Partition::new(format!("t{number}"), format!("n{number}"), load(number)));
            let picture = Picture {
                at_s: self.clock.at_s(),
                nodes: vec![Node::new("n1", 1.0), Node::new("n2", 1.0)],
                partitions: partitions.collect(),
            };
            self.brain.decide(&Arc::new(picture), self.clock.at_s(), false)
        }

        fn rounds(&mut self, rounds: usize, loads: [Option<f64>; 2]) -> Vec<Decision> {
            (0..rounds).flat_map(|_| self.round(loads)).collect()
        }
    }

    fn resizes(decisions: &[Decision]) -> usize {
        let is_resize =
            |one: &&Decision| matches!(one.action, Action::AddNodes { .. } | Action::Drain { .. });
        decisions.iter().filter(is_resize).count()
    }

    #[test]
    fn clock_that_is_set_changes_nothing() {
        let mut rounds = Rounds::new();
        assert!(rounds.rounds(60, [Some(0.6), Some(0.6)]).is_empty());
        // 77 % for 30 s, which is too short.
        for jump in [3600_i64, -7200] {
            let before = rounds.clock.at_s();
            assert_eq!(rounds.clock.jumped(), None);
            assert_eq!(resizes(&rounds.rounds(6, [Some(0.9), Some(0.9)])), 0);
            {
                let mut times = rounds.times.0.lock();
                times.1 = Duration::from_secs(times.1.as_secs().checked_add_signed(jump).unwrap());
            }
            assert_eq!(resizes(&rounds.rounds(1, [Some(0.9), Some(0.9)])), 0, "a jump by {jump} s");
            assert_eq!(rounds.clock.jumped().map(f64::round), Some(jump as f64));
            assert!((rounds.clock.at_s() - before - 35.0).abs() < 1e-6, "the clock of a term is not set");
            assert_eq!(resizes(&rounds.rounds(60, [Some(0.6), Some(0.6)])), 0);
        }
        assert!(resizes(&rounds.rounds(20, [Some(0.9), Some(0.9)])) > 0, "a minute is long enough");
    }

    #[test]
    fn time_without_rounds_is_no_evidence() {
        let mut rounds = Rounds::new();
        rounds.rounds(60, [Some(0.6), Some(0.6)]);
        rounds.rounds(8, [Some(0.9), Some(0.9)]);
        // The machine is suspended for an hour.
        rounds.times.0.lock().0 += Duration::from_secs(3600);
        assert_eq!(resizes(&rounds.rounds(10, [Some(0.9), Some(0.9)])), 0, "50 s since then");
        assert!(resizes(&rounds.rounds(5, [Some(0.9), Some(0.9)])) > 0);

        let mut rounds = Rounds::new();
        rounds.rounds(60, [Some(0.6), Some(0.6)]);
        rounds.rounds(100, [Some(0.3), Some(0.3)]);
        rounds.times.0.lock().0 += Duration::from_secs(3600);
        assert_eq!(resizes(&rounds.rounds(100, [Some(0.3), Some(0.3)])), 0, "low for 500 s, not 600 s");
        assert!(resizes(&rounds.rounds(30, [Some(0.3), Some(0.3)])) > 0);
    }

    #[test]
    fn rounds_without_reports_of_a_node_decide_nothing() {
        let mut rounds = Rounds::new();
        assert!(rounds.rounds(60, [Some(0.6), Some(0.6)]).is_empty());
        // Without its last report, the node would seem to be idle: one of two would be removed.
        assert!(rounds.rounds(200, [Some(0.6), None]).is_empty());
        assert!(rounds.rounds(60, [Some(0.6), Some(0.6)]).is_empty(), "nothing has changed");
        // A short hole decides nothing even if the others have a reason.
        rounds.rounds(11, [Some(0.9), Some(0.9)]);
        assert!(rounds.rounds(2, [Some(0.9), None]).is_empty());
        assert!(resizes(&rounds.rounds(4, [Some(0.9), Some(0.9)])) > 0, "the reports are back");
        assert!(
            rounds.rounds(1000, [None, None]).iter().all(|one| !matches!(one.action, Action::Drain { .. }))
        );
    }
}
