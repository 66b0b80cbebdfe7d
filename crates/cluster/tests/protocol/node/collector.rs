//! The elected collector, and the makers that it asks.

use std::collections::BTreeSet;
use std::time::Duration;

use fulmar_cluster::collection::{Collector, Makers, Outcome};
use fulmar_cluster::{Error, NodeId, SegmentName, election, truncation};

use super::{Answer, Node, Report, Request};

impl Makers for Node {
    async fn disowned(
        &self,
        node: NodeId,
        incarnation: u64,
        segments: Vec<SegmentName>,
    ) -> Option<Vec<SegmentName>> {
        match self.call(node, Request::Disown { incarnation, segments }).await? {
            Answer::Disowned(segments) => Some(segments),
            _ => None,
        }
    }
}

impl Node {
    /// Campaigns, and collects while elected.
    pub(super) async fn collect(self) {
        loop {
            self.pause(Duration::from_millis(500), Duration::from_millis(2500)).await;
            let begun = self.begun();
            let term = election::campaign(&self.env, "collector", (self.id, &begun.read)).await.unwrap();
            let Some(term) = term else { continue };
            let id = self.id;
            self.simulation().note(|| format!("node {id}: is the collector of term {}", term.number()));
            let (mut collector, mut truncated) = (Collector::new(term), BTreeSet::new());
            loop {
                let outcome = collector.collect(&self.env, &self).await;
                self.simulation().note(|| format!("node {id}: collection: {outcome:?}"));
                match outcome {
                    Ok(Outcome::Collected(deleted)) => {
                        (self.report)(self.env.process, Report::Collected(deleted));
                    }
                    Ok(Outcome::Skipped) => {}
                    Ok(Outcome::Deposed) => break,
                    Err(error) => self.report_error(&error),
                }
                let deleted = truncation::truncate_ended(&self.env, &mut truncated).await.unwrap();
                self.simulation().note(|| format!("node {id}: deleted {deleted} objects of ended logs"));
                (self.report)(self.env.process, Report::Truncated(deleted));
                self.pause(Duration::from_millis(100), Duration::from_millis(1000)).await;
            }
        }
    }

    fn report_error(&self, error: &Error) {
        self.simulation().note(|| format!("node {}: the collector reports: {error}", self.id));
    }

    /// Which of these segments of this incarnation no manifest of it will name.
    pub(super) fn disown(&self, incarnation: u64, segments: Vec<SegmentName>) -> Answer {
        let shared = self.shared.lock();
        if shared.begun.incarnation != incarnation {
            return Answer::Elsewhere;
        }
        let may_be_named = |segment: &SegmentName| {
            let mut lists =
                shared.owned.values().map(|owned| &owned.segments).chain(shared.unsettled.values());
            lists.any(|list| list.contains(segment))
        };
        Answer::Disowned(segments.into_iter().filter(|segment| !may_be_named(segment)).collect())
    }
}
