//! The series of a cluster: its total, its nodes, and its busiest tenants.
//!
//! series | step | kept
//! --- | --- | ---
//! cluster | one | four days of minutes
//! nodes, at most [`MAX_NODES`] | [`COARSE`] | the same days
//! the busiest [`MAX_TENANTS`] tenants | [`COARSE`] | the same days
//!
//! The steps of nodes and tenants are longer, so that a series needs 17 kB instead of 63 kB. When a
//! step of theirs ends, busy tenants that have no series get one; if all are taken, that of a tenant
//! with less than half of the load. A node or tenant that is gone for [`MAX_ABSENT`] steps loses its
//! series.
//!
//! The load of a node changes when tenants move. What its tenants will do is in their own series,
//! which the policy adds up.

use std::collections::HashMap;

use super::SelectorSettings;
use super::series::{Series, SeriesKind, SeriesReport};
use super::stored::StoredSeries;
use crate::picture::{NodeState, Partition, Picture};

/// Steps of the cluster's series in one of a node or tenant.
pub const COARSE: u64 = 5;
/// Maximum number of nodes with a series.
pub const MAX_NODES: usize = 1000;
/// Maximum number of tenants with a series.
pub const MAX_TENANTS: usize = 1000;
/// Steps without a node or tenant after which its series is dropped.
const MAX_ABSENT: u32 = 12;
/// A tenant with less load, in CPUs, gets no series.
const MIN_TENANT_LOAD: f64 = 1e-3;
/// Steps of a report: six hours of minutes.
const SHOWN: usize = 360;
const SHOWN_COARSE: usize = 72;
/// One season, and the maximum of its steps.
const SEASON_S: f64 = 86_400.0;
const MAX_PERIOD: f64 = 2880.0;
/// Steps of nodes and tenants between fits: an hour of five minutes.
const COARSE_REFIT: usize = 12;
/// Errors of nodes and tenants lose half of their weight in 140 steps.
const COARSE_MEMORY: f64 = 0.995;
/// A horizon that differs by less than this factor is the same.
const HORIZON_TOLERANCE: f64 = 1.25;

/// Steps of a stored value, and the maximum of values.
const STORED: (usize, usize) = (1, 6260);
const STORED_COARSE: (usize, usize) = (3, 320);

/// Which series have a new value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// That of the cluster.
    pub cluster: bool,
    /// Those of nodes and tenants.
    pub others: bool,
}

struct Member {
    series: Series,
    absent: u32,
}

/// The series of a cluster.
pub struct SeriesSet {
    step_s: f64,
    horizon: usize,
    cluster: Series,
    nodes: HashMap<String, Member>,
    tenants: HashMap<String, Member>,
    /// The current step, and that of nodes and tenants.
    step: Option<(u64, u64)>,
}

impl SeriesSet {
    /// Empty series with steps of this length, for a horizon in steps.
    pub fn new(step_s: f64, horizon: usize) -> SeriesSet {
        SeriesSet {
            step_s,
            horizon,
            cluster: Series::new(settings(step_s, horizon), SHOWN),
            nodes: HashMap::new(),
            tenants: HashMap::new(),
            step: None,
        }
    }

    /// The series that an earlier controller has stored, up to the time `now_s`. Those that are
    /// damaged begin empty.
    pub fn restored(
        step_s: f64,
        horizon: usize,
        stored: impl IntoIterator<Item = StoredSeries>,
        now_s: f64,
    ) -> SeriesSet {
        let mut set = SeriesSet::new(step_s, horizon);
        let now = step_at(now_s, step_s);
        for stored in stored {
            if stored.kind == SeriesKind::Cluster {
                let series = stored.restore(settings(step_s, horizon), SHOWN, STORED.0, now);
                set.cluster = series.unwrap_or(set.cluster);
                continue;
            }
            let coarse = coarse_settings(step_s, horizon);
            let series = stored.restore(coarse, SHOWN_COARSE, STORED_COARSE.0, now / COARSE);
            let (members, max) = match stored.kind {
                SeriesKind::Node => (&mut set.nodes, MAX_NODES),
                _ => (&mut set.tenants, MAX_TENANTS),
            };
            if let Some(series) = series.filter(|_| members.len() < max) {
                members.insert(stored.name, Member { series, absent: 0 });
            }
        }
        set
    }

    /// Adds the loads of a picture. Ends the steps before it.
    pub fn observe(&mut self, picture: &Picture) -> Ended {
        let step = step_at(picture.at_s, self.step_s);
        let coarse = step / COARSE;
        let mut ended = Ended::default();
        if let Some((current, _)) = self.step.filter(|(current, _)| *current != step) {
            ended.cluster = self.cluster.end_step(current);
        }
        match self.step {
            Some((_, current)) if current != coarse => {
                end_all(&mut self.nodes, current);
                end_all(&mut self.tenants, current);
                self.admit(picture);
                ended.others = true;
            }
            Some(_) => {}
            None => self.admit(picture),
        }
        self.step = Some((step, coarse));
        self.add(picture);
        ended
    }

    fn add(&mut self, picture: &Picture) {
        self.cluster.add(picture.load());
        let mut by_node: HashMap<&str, f64> = HashMap::new();
        for partition in &picture.partitions {
            *by_node.entry(partition.owner.as_str()).or_default() += partition.load;
            if let Some(member) = self.tenants.get_mut(&partition.name) {
                member.series.add(partition.load);
            }
        }
        for node in picture.nodes.iter().filter(|node| serves(node.state)) {
            if let Some(member) = self.nodes.get_mut(&node.name) {
                member.series.add(by_node.get(node.name.as_str()).copied().unwrap_or(0.0));
            }
        }
    }

    /// Gives series to nodes, and to the busiest tenants.
    fn admit(&mut self, picture: &Picture) {
        let settings = coarse_settings(self.step_s, self.horizon);
        let member = || Member { series: Series::new(settings, SHOWN_COARSE), absent: 0 };
        for node in picture.nodes.iter().filter(|node| serves(node.state)) {
            if self.nodes.len() < MAX_NODES && !self.nodes.contains_key(&node.name) {
                self.nodes.insert(node.name.clone(), member());
            }
        }
        let is_new = |partition: &&Partition| {
            // A partition without a tenant has a name that no tenant can have.
            partition.load >= MIN_TENANT_LOAD
                && !partition.name.starts_with('\0')
                && !self.tenants.contains_key(&partition.name)
        };
        let mut new: Vec<&Partition> = picture.partitions.iter().filter(is_new).collect();
        let busiest_first = |left: &&Partition, right: &&Partition| right.load.total_cmp(&left.load);
        if new.len() > MAX_TENANTS {
            new.select_nth_unstable_by(MAX_TENANTS, busiest_first);
            new.truncate(MAX_TENANTS);
        }
        new.sort_unstable_by(busiest_first);
        let mut means: Vec<(f64, String)> = Vec::new();
        if self.tenants.len() + new.len() > MAX_TENANTS {
            means = self.tenants.iter().map(|(name, of)| (of.series.mean(), name.clone())).collect();
            means.sort_unstable_by(|left, right| right.0.total_cmp(&left.0));
        }
        for partition in new {
            if self.tenants.len() >= MAX_TENANTS {
                let Some((mean, name)) = means.pop() else { return };
                if partition.load < 2.0 * mean {
                    return;
                }
                self.tenants.remove(&name);
            }
            self.tenants.insert(partition.name.clone(), member());
        }
    }

    /// Forecasts for another horizon, if it differs by a quarter.
    pub fn set_horizon(&mut self, horizon: usize) {
        let (old, new) = (self.horizon as f64, horizon as f64);
        if (old / HORIZON_TOLERANCE..=old * HORIZON_TOLERANCE).contains(&new) {
            return;
        }
        self.horizon = horizon;
        self.cluster.set_horizon(horizon);
        let coarse = coarse_settings(self.step_s, horizon).horizon;
        for member in self.nodes.values_mut().chain(self.tenants.values_mut()) {
            member.series.set_horizon(coarse);
        }
    }

    /// Fits series that are due, one at least, while `continues` returns true.
    pub fn fit_due(&mut self, mut continues: impl FnMut() -> bool) {
        let members = self.nodes.values_mut().chain(self.tenants.values_mut());
        let all = std::iter::once(&mut self.cluster).chain(members.map(|member| &mut member.series));
        for series in all.filter(|series| series.is_fit_due()) {
            series.fit();
            if !continues() {
                return;
            }
        }
    }

    /// Length of a step of the cluster's series, in seconds.
    pub fn step_s(&self) -> f64 {
        self.step_s
    }

    /// The cluster's series.
    pub fn cluster(&self) -> &Series {
        &self.cluster
    }

    /// How the load of each tenant with a series will differ from that of its newest step, in the
    /// steps of the cluster's series up to the horizon.
    pub fn changes(&self) -> HashMap<String, Vec<f64>> {
        let change = |(name, member): (&String, &Member)| {
            let newest = member.series.newest()?;
            let (_, path) = member.series.forecast().filter(|(_, path)| !path.is_empty())?;
            let at = |step: usize| {
                let position = step as f64 / COARSE as f64;
                let (before, share) = (position.floor() as usize, position.fract());
                let value = |index: usize| match index.checked_sub(1) {
                    None => newest,
                    Some(index) => path[index.min(path.len() - 1)],
                };
                value(before) + (value(before + 1) - value(before)) * share - newest
            };
            Some((name.clone(), (1..=self.horizon).map(at).collect()))
        };
        self.tenants.iter().filter_map(change).collect()
    }

    /// What is shown of the cluster's series. `None` before its first value.
    pub fn report(&self) -> Option<SeriesReport> {
        self.cluster.report(SeriesKind::Cluster, "", self.step_s)
    }

    /// What is shown of the nodes, and then of the tenants, by name.
    pub fn reports(&self) -> Vec<SeriesReport> {
        let step_s = self.step_s * COARSE as f64;
        let of = |kind| {
            let report = move |(name, member): (&String, &Member)| member.series.report(kind, name, step_s);
            self.members(kind).iter().filter_map(report)
        };
        let mut reports: Vec<SeriesReport> = of(SeriesKind::Node).chain(of(SeriesKind::Tenant)).collect();
        reports.sort_by(|left, right| (left.kind, &left.name).cmp(&(right.kind, &right.name)));
        reports
    }

    /// The series of a kind, for the next controller, by name.
    pub fn stored(&self, kind: SeriesKind) -> Vec<StoredSeries> {
        if kind == SeriesKind::Cluster {
            return StoredSeries::of(&self.cluster, kind, "", STORED).into_iter().collect();
        }
        let store =
            |(name, member): (&String, &Member)| StoredSeries::of(&member.series, kind, name, STORED_COARSE);
        let mut stored: Vec<StoredSeries> = self.members(kind).iter().filter_map(store).collect();
        stored.sort_by(|left, right| left.name.cmp(&right.name));
        stored
    }

    fn members(&self, kind: SeriesKind) -> &HashMap<String, Member> {
        if kind == SeriesKind::Node { &self.nodes } else { &self.tenants }
    }
}

fn end_all(members: &mut HashMap<String, Member>, step: u64) {
    members.retain(|_, member| {
        member.absent = if member.series.end_step(step) { 0 } else { member.absent + 1 };
        member.absent <= MAX_ABSENT
    });
}

fn serves(state: NodeState) -> bool {
    matches!(state, NodeState::Active | NodeState::Draining)
}

fn step_at(at_s: f64, step_s: f64) -> u64 {
    (at_s / step_s).max(0.0) as u64
}

fn settings(step_s: f64, horizon: usize) -> SelectorSettings {
    SelectorSettings::new(horizon, (SEASON_S / step_s).clamp(1.0, MAX_PERIOD) as usize)
}

fn coarse_settings(step_s: f64, horizon: usize) -> SelectorSettings {
    let fine = settings(step_s, horizon);
    let (horizon, period) = (horizon.div_ceil(COARSE as usize), fine.period / COARSE as usize);
    SelectorSettings {
        refit_every: COARSE_REFIT,
        memory: COARSE_MEMORY,
        ..SelectorSettings::new(horizon, period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::Node;

    fn picture(at_s: f64, partitions: &[(&str, &str, f64)]) -> Picture {
        let nodes = ["n1", "n2"].map(|name| Node::new(name, 1.0)).to_vec();
        let partitions = partitions.iter().map(|(name, owner, load)| Partition::new(*name, *owner, *load));
        Picture { at_s, nodes, partitions: partitions.collect() }
    }

    #[test]
    fn step_is_the_mean_of_its_rounds() {
        let mut set = SeriesSet::new(60.0, 15);
        for round in 0..12 {
            let load = if round % 2 == 0 { 1.0 } else { 3.0 };
            let ended = set.observe(&picture(600.0 + f64::from(round) * 5.0, &[("a", "n1", load)]));
            assert_eq!(ended, Ended::default(), "the first step has not ended");
        }
        assert!(set.report().is_none());
        let ended = set.observe(&picture(660.0, &[("a", "n1", 2.0)]));
        assert_eq!(ended, Ended { cluster: true, others: false });
        let report = set.report().expect("a step has ended");
        assert_eq!((report.loads, report.at_s, report.horizon), (vec![2.0], 660.0, 15));
        assert!(set.reports().is_empty(), "steps of nodes and tenants are longer");
        let ended = set.observe(&picture(900.0, &[("a", "n1", 2.0), ("\0p", "n2", 1.0)]));
        assert_eq!(ended, Ended { cluster: true, others: true });
        let named: Vec<(SeriesKind, String)> =
            set.reports().into_iter().map(|report| (report.kind, report.name)).collect();
        let node = |name: &str| (SeriesKind::Node, name.to_owned());
        assert_eq!(named, [node("n1"), node("n2"), (SeriesKind::Tenant, "a".to_owned())]);
    }

    #[test]
    fn busiest_tenants_have_series() {
        let mut set = SeriesSet::new(60.0, 15);
        let names: Vec<String> = (0..1100).map(|number| format!("t{number:04}")).collect();
        let at = |at_s: f64, load: fn(usize) -> f64| {
            let partitions: Vec<(&str, &str, f64)> =
                names.iter().enumerate().map(|(index, name)| (name.as_str(), "n1", load(index))).collect();
            picture(at_s, &partitions)
        };
        set.observe(&at(0.0, |index| if index < 50 { 0.0 } else { 0.01 + index as f64 / 1e3 }));
        assert!(set.tenants.len() == MAX_TENANTS && !set.tenants.contains_key("t0099"));
        assert!(set.tenants.contains_key("t0100") && set.tenants.contains_key("t1099"));
        // The least busy one has a mean of 0.11, which is more than half of 0.2.
        set.observe(&at(300.0, |index| if index < 50 { 0.2 } else { 0.01 + index as f64 / 1e3 }));
        assert!(!set.tenants.contains_key("t0000"), "series are not exchanged for a small difference");
        set.observe(&at(600.0, |index| if index < 2 { 1.0 } else { 0.01 + index as f64 / 1e3 }));
        assert!(set.tenants.len() == MAX_TENANTS && set.tenants.contains_key("t0001"));
        assert!(!set.tenants.contains_key("t0100") && set.tenants.contains_key("t0102"));
    }

    #[test]
    fn series_of_what_is_gone_are_dropped() {
        let mut set = SeriesSet::new(60.0, 15);
        set.observe(&picture(0.0, &[("a", "n1", 0.5), ("b", "n2", 0.5)]));
        for step in 1..=13 {
            set.observe(&picture(f64::from(step) * 300.0, &[("b", "n2", 0.5)]));
        }
        assert!(set.tenants.contains_key("a"), "it may come back");
        set.observe(&picture(14.0 * 300.0, &[("b", "n2", 0.5)]));
        assert!(!set.tenants.contains_key("a") && set.tenants.contains_key("b"));
    }

    #[test]
    fn next_controller_begins_with_the_series() {
        let mut set = SeriesSet::new(60.0, 15);
        for minute in 0..200 {
            set.observe(&picture(f64::from(minute) * 60.0, &[("a", "n1", 0.3), ("b", "n2", 0.2)]));
        }
        let kinds = [SeriesKind::Cluster, SeriesKind::Node, SeriesKind::Tenant];
        let stored: Vec<StoredSeries> = kinds.into_iter().flat_map(|kind| set.stored(kind)).collect();
        assert_eq!(stored.len(), 5);
        let mut next = SeriesSet::restored(60.0, 15, stored, 210.0 * 60.0);
        let report = next.report().expect("it has a history");
        assert_eq!((report.loads.len(), report.ahead.len()), (199, 15));
        assert!((report.loads[0] - 0.5).abs() < 1e-3);
        assert_eq!(next.reports().len(), 4);
        // Ten minutes without a controller are a hole.
        next.observe(&picture(210.0 * 60.0, &[("a", "n1", 0.3), ("b", "n2", 0.2)]));
        next.observe(&picture(211.0 * 60.0, &[("a", "n1", 0.3), ("b", "n2", 0.2)]));
        assert_eq!(next.cluster().selector().history().len(), 211);
    }

    #[test]
    fn changes_of_tenants_are_on_the_steps_of_the_cluster() {
        let mut set = SeriesSet::new(60.0, 10);
        let daily = |minute: u32| 1.0 + (f64::from(minute) * std::f64::consts::TAU / 1440.0).sin();
        let minutes = 4 * 1440 + 60;
        for minute in 0..=minutes {
            set.observe(&picture(f64::from(minute) * 60.0, &[("a", "n1", daily(minute))]));
            if minute % 1440 == 0 {
                set.fit_due(|| true);
            }
        }
        let changes = &set.changes()["a"];
        assert_eq!(changes.len(), 10);
        let true_change = daily(minutes + 7) - daily(minutes - 3);
        assert!((changes[9] - true_change).abs() < 0.02, "{changes:?}, not {true_change}");
        assert!(changes.windows(2).all(|pair| pair[0] <= pair[1]), "it rises: {changes:?}");
    }

    #[test]
    fn fits_are_bounded() {
        let mut set = SeriesSet::new(60.0, 15);
        for minute in 0..=250 {
            set.observe(&picture(f64::from(minute) * 60.0, &[("a", "n1", 0.3)]));
        }
        let due = |set: &SeriesSet| {
            let members = set.nodes.values().chain(set.tenants.values()).map(|member| &member.series);
            std::iter::once(&set.cluster).chain(members).filter(|series| series.is_fit_due()).count()
        };
        let before = due(&set);
        assert_eq!(before, 4, "the cluster, two nodes and a tenant");
        set.fit_due(|| false);
        assert_eq!(due(&set), 3, "at least one series is fitted");
        set.fit_due(|| true);
        assert_eq!(due(&set), 0);
    }
}
