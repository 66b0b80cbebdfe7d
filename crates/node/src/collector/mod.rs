//! Deletes garbage from the common store: segments, manifests, and logs of ended incarnations.
//!
//! The collector is one elected node ([`fulmar_cluster::election`]). What it deletes is decided by
//! [`fulmar_cluster::collection`] and [`fulmar_cluster::truncation`], whose module heads argue every
//! crash point. If the collector dies, another node is elected within [`CAMPAIGN_INTERVAL`].
//!
//! # Cost
//! A pass lists the store and reads manifests that it has not read before, at a limited rate
//! ([`fulmar_engine::CommonStore`]). The pause between two passes is at least [`PASS_PAUSES`] times
//! as long as the last one took. It doubles from [`MIN_PAUSE`] to [`MAX_PAUSE`] while nothing is
//! found, so an idle cluster lists the store every ten minutes. A node that starts or ends resets
//! the pause: it leaves a log.

mod collected;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fulmar_cluster::collection::{Collector, Outcome};
use fulmar_cluster::election::{self, Term};
use fulmar_cluster::truncation;
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_gateway::events::{Event, Kind};
use fulmar_pages::SegmentId;
use tokio::time::{sleep, timeout};

use crate::messages::Answer;
use crate::objects::CollectorEnvironment;
use crate::{Node, Partitions};
pub(crate) use collected::Collected;

/// The name of the role.
const ROLE: &str = "collector";
/// How often a node checks whether there is a collector.
const CAMPAIGN_INTERVAL: Duration = Duration::from_secs(10);
/// Limits of the pause between two passes.
const MIN_PAUSE: Duration = Duration::from_secs(10);
const MAX_PAUSE: Duration = Duration::from_secs(600);
/// A pause is at least this number of times as long as the pass before it.
const PASS_PAUSES: u32 = 10;

impl Node {
    /// Campaigns, and collects while elected.
    pub(crate) async fn collect_garbage(self: Arc<Self>, partitions: Arc<dyn Partitions>) {
        let environment = CollectorEnvironment::new(self.clone(), partitions.common_store());
        loop {
            sleep(CAMPAIGN_INTERVAL).await;
            let node = (self.id(), &self.begun().read);
            match election::campaign(&environment, ROLE, node).await {
                Ok(Some(term)) => {
                    partitions.record(Event::new(Kind::CollectorElected));
                    self.collected.lock().is_elected = true;
                    self.collect_in(&environment, term, &*partitions).await;
                    self.collected.lock().is_elected = false;
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "could not elect a garbage collector; will retry");
                }
            }
        }
    }

    /// Collects until another node is the collector.
    async fn collect_in(&self, environment: &CollectorEnvironment, term: Term, partitions: &dyn Partitions) {
        tracing::info!(term = term.number(), "this node collects the cluster's garbage");
        let (mut collector, mut truncated) = (Collector::new(term), BTreeSet::new());
        let mut pause = MIN_PAUSE;
        let mut has_failed = false;
        loop {
            let changed = self.owners().nodes_changed();
            let begun = Instant::now();
            let truncation = truncation::truncate_ended(environment, &mut truncated).await;
            let outcome = match environment.objects.read_clocks().await {
                true => collector.collect(environment, &*environment.objects).await,
                false => Ok(Outcome::Skipped),
            };
            let failure = truncation.as_ref().err().or(outcome.as_ref().err()).map(ToString::to_string);
            if failure.is_some() != has_failed {
                has_failed = failure.is_some();
                partitions.record(match failure {
                    Some(error) => Event::new(Kind::CollectorFailed).detail("error", error),
                    None => Event::new(Kind::CollectorWorks),
                });
            }
            let found = match (truncation, outcome) {
                (Ok(_), Ok(Outcome::Deposed)) => return,
                (Ok(log_objects), Ok(outcome)) => {
                    let objects = if let Outcome::Collected(objects) = outcome { objects } else { 0 };
                    self.collected.lock().add(outcome != Outcome::Skipped, objects, log_objects);
                    if objects + log_objects > 0 {
                        let ms = begun.elapsed().as_millis() as u64;
                        tracing::info!(objects, log_objects, ms, "deleted garbage from the store");
                    }
                    objects + log_objects > 0 || outcome == Outcome::Skipped
                }
                (Err(error), _) | (_, Err(error)) => {
                    tracing::error!(%error, "garbage collection stopped; nothing is deleted");
                    false
                }
            };
            pause = if found { MIN_PAUSE } else { (pause * 2).min(MAX_PAUSE) };
            if timeout(pause.max(begun.elapsed() * PASS_PAUSES), changed).await.is_ok() {
                pause = MIN_PAUSE;
                sleep(MIN_PAUSE).await;
            }
        }
    }

    /// Answers the collector: which of these segments this incarnation does not need.
    pub(crate) async fn disown(&self, incarnation: u64, segments: &[String]) -> Result<Answer> {
        if incarnation != self.incarnation() {
            let text = format!("incarnation {incarnation} of node \"{}\" has ended", self.name());
            return Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, text));
        }
        let parse = |digits: &String| u128::from_str_radix(digits, 16).ok().map(SegmentId);
        let asked: Vec<SegmentId> = segments.iter().filter_map(parse).collect();
        let disowned = match asked.is_empty() {
            true => Vec::new(),
            false => self.partitions()?.disowned(asked).await,
        };
        let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        Ok(Answer::Disowned { segments: disowned.iter().map(ToString::to_string).collect(), unix_ms })
    }
}
