//! `scale-out-in`: the load of all tenants doubles, then halves. The controller adds a node and
//! removes it again.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::elastic::{CPUS, Elastic, Placement, Second, Watched};
use super::{Bench, SCALE, case};
use crate::arrival::Arrival;
use crate::compare::result::CaseResult;
use crate::server::{AddedNodes, ControlGroup};

const OWNERS: usize = 2;
const TENANTS: u32 = 20;
/// The share of the first nodes' capacity that all tenants together need at first.
const BASE_LOAD: f64 = 0.35;
const QUIET: Duration = Duration::from_secs(15);
const BUSY: Duration = Duration::from_secs(60);
/// The load has halved again.
const AFTER: Duration = Duration::from_secs(60);
const MAX_ROUNDS: u32 = 3;
/// How often new nodes are looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(super) async fn measure(bench: &Bench<'_>) -> anyhow::Result<Vec<CaseResult>> {
    let rounds = bench.arguments.rounds.min(MAX_ROUNDS);
    let (mut shares, mut notes) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        let nodes = AddedNodes::new()?;
        let elastic = Elastic::start(
            bench.binary,
            &|text| bench.progress.step(text),
            (OWNERS, Placement::Spread),
            TENANTS,
            Some(&nodes),
        )
        .await?;
        bench.progress.step(&format!("{SCALE}: round {round} of {rounds}"));
        let least = OWNERS.to_string();
        let most = (OWNERS + 1).to_string();
        let settings = [
            ("mode", "on"),
            ("policy", "thresholds"),
            ("min_nodes", &*least),
            ("max_nodes", &*most),
            ("round", "1 s"),
            ("node_start", "3 s"),
            ("hold_up", "2 s"),
            ("hold_down", "15 s"),
            ("cool_down", "30 s"),
        ];
        elastic.configure(&settings).await?;
        let (base, more) = (Watched::default(), Watched::default());
        let rate = elastic.capacity_tps * BASE_LOAD;
        let doubled = async {
            sleep(QUIET).await;
            let begun = Instant::now();
            let report = elastic.load(&elastic.databases, Arrival::poisson(rate), BUSY, &more).await?;
            anyhow::Ok((begun, report))
        };
        let (time, started) = (QUIET + BUSY + AFTER, Instant::now());
        let loads = async {
            tokio::try_join!(elastic.load(&elastic.databases, Arrival::poisson(rate), time, &base), doubled,)
        };
        let mut counts = Counts::new(&nodes);
        let (first, (begun, second)) = tokio::select! {
            ended = loads => ended?,
            failed = counts.follow(&elastic) => return Err(failed),
        };
        let mut seconds = base.since(begun);
        seconds.extend(more.since(begun));
        let late = seconds.iter().copied().filter(Second::is_late).count();
        let late_percent = late as f64 / seconds.len().max(1) as f64 * 100.0;
        // A round in which no node was added and removed again is no success.
        shares.push(if counts.has_returned() { late_percent } else { 100.0 });
        let failed = first.failed + first.lost_connections + second.failed + second.lost_connections;
        notes.push(format!(
            "round {round}: capacity of {OWNERS} nodes {:.0} tx/s; nodes: {}; {late} of {} seconds late; \
             {failed} failed",
            elastic.capacity_tps,
            counts.described(begun),
            seconds.len(),
        ));
        notes.push(format!("p99 in ms, each 5 s: {}", base.timeline(started)));
        notes.extend(elastic.decisions().await?);
    }
    let result = CaseResult::value(case(SCALE)?, shares);
    Ok(vec![notes.into_iter().fold(result, CaseResult::with_note)])
}

/// The nodes that the provisioner has started.
pub(crate) struct Counts<'a> {
    nodes: &'a AddedNodes,
    /// The control group of each, by process id.
    groups: HashMap<i32, ControlGroup>,
    /// How many there are, and since when.
    changes: Vec<(Instant, usize)>,
}

impl<'a> Counts<'a> {
    pub(crate) fn new(nodes: &'a AddedNodes) -> Counts<'a> {
        Counts { nodes, groups: HashMap::new(), changes: Vec::new() }
    }

    /// Gives each new node its share of a core, and counts the nodes that own tenants. Returns only if
    /// that fails.
    async fn follow(&mut self, elastic: &Elastic) -> anyhow::Error {
        loop {
            if let Err(error) = self.poll(elastic).await {
                return error;
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Looks for new nodes once, and counts.
    pub(crate) async fn poll(&mut self, elastic: &Elastic) -> anyhow::Result<()> {
        for pid in self.nodes.pids()? {
            if let std::collections::hash_map::Entry::Vacant(new) = self.groups.entry(pid) {
                let group = ControlGroup::with_cpus("added", CPUS)?;
                group.add_process(pid)?;
                new.insert(group);
            }
        }
        let sql = "SELECT DISTINCT node FROM fulmar.partitions WHERE tenant <> 'fulmar'";
        let count = elastic.column(sql).await?.len();
        if self.changes.last().is_none_or(|(_, last)| *last != count) {
            self.changes.push((Instant::now(), count));
        }
        Ok(())
    }

    /// How many nodes owned tenants when they were counted last.
    pub(crate) fn nodes(&self) -> usize {
        self.changes.last().map_or(0, |(_, count)| *count)
    }

    /// Returns true if a node was added that owned tenants, and does so no more.
    fn has_returned(&self) -> bool {
        self.changes.iter().any(|(_, count)| *count > OWNERS) && self.nodes() == OWNERS
    }

    fn described(&self, begun: Instant) -> String {
        let text = |(at, count): &(Instant, usize)| match at.checked_duration_since(begun) {
            Some(after) => format!("{count} after {:.0} s", after.as_secs_f64()),
            None => count.to_string(),
        };
        self.changes.iter().map(text).collect::<Vec<_>>().join(", ")
    }
}
