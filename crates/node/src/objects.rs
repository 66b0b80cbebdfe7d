//! The segments and manifests of the common store, for the ownership protocol.
//!
//! The protocol's names are derived from those of the store:
//!
//! | protocol | store |
//! | --- | --- |
//! | a segment's maker | the segment's term. The record `term/TERM` names the incarnation ([`crate::registration`]) |
//! | a manifest's epoch | the upper bits of its version number |
//! | a manifest's position | its timeline's epoch, and the rest of the number |
//! | a manifest's node | the partition's owner, if the epoch is the current one |
//!
//! Only the owner of an epoch writes manifests of it. Manifests of earlier epochs have no node, so
//! recovery may use none of them as far as the collector knows, and nothing of a partition is
//! deleted before its owner has stored a manifest.
//!
//! The ages of manifests are measured by the clock of the living node that is furthest behind: a
//! clock that was set forwards must not end the retention (`store_clock`). Stores do not tell the
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::collection::Makers;
use fulmar_cluster::directory::DataDirectory;
use fulmar_cluster::environment::{
    Environment, LogObjects, ObjectEnvironment, PartitionObjects, StoredManifests, Uncertain,
};
use fulmar_cluster::{Incarnation, ManifestName, NodeId, Rules, SegmentName};
use fulmar_engine::CommonStore;
use fulmar_meta::MetadataStore;
use fulmar_pages::{PartitionId, SegmentId};
use fulmar_store::VERSION_BITS;
use parking_lot::RwLock;
use tokio::time::timeout;

use crate::Node;
use crate::environment::NodeEnvironment;
use crate::messages::{Answer, Request};
use crate::registration::{self, Terms};

/// How long a node may take to answer which segments it disowns.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failure of the store.
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Maximum number of segments in one question.
const MAX_ASKED: usize = 10_000;
const NUMBER_MASK: u64 = (1 << VERSION_BITS) - 1;

/// The objects of a cluster.
pub(crate) struct Objects {
    node: Arc<Node>,
    store: CommonStore,
    /// The incarnation of each term.
    terms: RwLock<Terms>,
    /// The time by which ages are measured, in milliseconds since 1970.
    now_ms: AtomicU64,
}

/// The environment of a node that can be the collector.
#[derive(Clone)]
pub(crate) struct CollectorEnvironment {
    environment: NodeEnvironment,
    pub(crate) objects: Arc<Objects>,
}

impl CollectorEnvironment {
    pub(crate) fn new(node: Arc<Node>, store: CommonStore) -> Self {
        let environment = node.environment().clone();
        let objects = Objects { node, store, terms: RwLock::default(), now_ms: AtomicU64::new(0) };
        CollectorEnvironment { environment, objects: Arc::new(objects) }
    }
}

impl Environment for CollectorEnvironment {
    fn now(&self) -> Duration {
        self.environment.now()
    }

    fn unix_time(&self) -> Duration {
        self.environment.unix_time()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send {
        self.environment.sleep(duration)
    }

    fn jitter(&self, max: Duration) -> Duration {
        self.environment.jitter(max)
    }

    fn metadata(&self) -> &dyn MetadataStore {
        self.environment.metadata()
    }

    fn logs(&self) -> &dyn LogObjects {
        self.environment.logs()
    }

    fn directory(&self) -> &dyn DataDirectory {
        self.environment.directory()
    }

    fn rules(&self) -> &Rules {
        self.environment.rules()
    }
}

impl ObjectEnvironment for CollectorEnvironment {
    fn objects(&self) -> &dyn PartitionObjects {
        &*self.objects
    }
}

fn segment_id(name: SegmentName) -> SegmentId {
    SegmentId(name.number)
}

/// `None` if the maker is not known.
fn segment_name(terms: &Terms, id: SegmentId) -> Option<SegmentName> {
    let (node, incarnation) = terms.get(id.term())?;
    Some(SegmentName { node, incarnation, number: id.0 })
}

fn stored_name(partition: PartitionId, name: ManifestName) -> fulmar_store::ManifestName {
    fulmar_store::ManifestName {
        partition,
        epoch: name.incarnation as u32,
        number: u64::from(name.epoch) << VERSION_BITS | name.covered,
    }
}

impl Objects {
    /// Asks all living nodes for their clocks, before a collection. Returns false if one does not
    /// answer.
    pub(crate) async fn read_clocks(&self) -> bool {
        let mut now_ms = u64::MAX;
        let alive = self.node.owners().nodes().into_iter();
        for (node, incarnation) in alive.filter_map(|known| Some((known.id, known.alive()?))) {
            match self.ask(node, incarnation, Vec::new()).await {
                Some((_, unix_ms)) => now_ms = now_ms.min(unix_ms),
                None => return false,
            }
        }
        self.now_ms.store(now_ms, Ordering::Relaxed);
        now_ms != u64::MAX
    }

    /// Asks an incarnation which segments it disowns, and for its time.
    async fn ask(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        segments: Vec<SegmentId>,
    ) -> Option<(Vec<SegmentId>, u64)> {
        let segments = segments.iter().map(ToString::to_string).collect();
        let request = Request::Disown { incarnation, segments };
        let answer = match node == self.node.id() {
            true => Ok(Ok(self.node.carry_out(request).await.ok()?)),
            false => timeout(ANSWER_TIMEOUT, self.node.call(node, request)).await.ok()?,
        };
        let Ok(Ok(Answer::Disowned { segments, unix_ms })) = answer else { return None };
        let parse = |digits: &String| u128::from_str_radix(digits, 16).ok().map(SegmentId);
        Some((segments.iter().filter_map(parse).collect(), unix_ms))
    }
}

/// Logs a failure of the store, and waits: the protocol retries immediately.
async fn answer<T>(result: fulmar_engine::Result<T>) -> Result<T, Uncertain> {
    match result {
        Ok(answer) => Ok(answer),
        Err(error) => {
            tracing::warn!(%error, detail = error.get_detail(), "garbage collection failed; will retry");
            tokio::time::sleep(RETRY_DELAY).await;
            Err(Uncertain)
        }
    }
}

#[async_trait]
impl PartitionObjects for Objects {
    async fn segments(&self) -> Result<Vec<SegmentName>, Uncertain> {
        let segments = answer(self.store.segments().await).await?;
        // After the segments: the maker of each has recorded its term before.
        let terms = registration::terms(self.node.environment().metadata()).await.map_err(|_| Uncertain)?;
        let names = segments.into_iter().filter_map(|id| segment_name(&terms, id)).collect();
        *self.terms.write() = terms;
        Ok(names)
    }

    async fn contents(&self, segment: SegmentName) -> Result<Vec<PartitionId>, Uncertain> {
        answer(self.store.contents(segment_id(segment)).await).await
    }

    async fn manifests_after(
        &self,
        after: Option<PartitionId>,
    ) -> Result<Vec<(PartitionId, StoredManifests)>, Uncertain> {
        let catalog = self.node.catalog();
        // Manifests of later timelines are of restores that are in progress, or have failed.
        let timeline = |id| catalog.partition(id).map_or(1, |record| record.epoch);
        let now_ms = self.now_ms.load(Ordering::Relaxed);
        let listed = answer(self.store.manifests_after(after, now_ms, &timeline).await).await?;
        let terms = self.terms.read();
        let partitions = listed.into_iter().map(|listed| {
            let owner = self.node.owners().owner(listed.partition);
            let name = |name: fulmar_store::ManifestName| {
                let epoch = (name.number >> VERSION_BITS) as u32;
                let node = owner.filter(|owner| owner.epoch == epoch).map_or(NodeId(0), |owner| owner.node);
                let (incarnation, covered) = (u64::from(name.epoch), name.number & NUMBER_MASK);
                ManifestName { epoch, incarnation, covered, node, is_draft: false }
            };
            let manifests = listed.manifests.into_iter().map(|(of, has_expired)| (name(of), has_expired));
            let segments = listed.segments.into_iter().filter_map(|id| segment_name(&terms, id));
            let stored = StoredManifests {
                manifests: manifests.collect(),
                segments: segments.collect(),
                is_incomplete: listed.is_incomplete,
            };
            (listed.partition, stored)
        });
        Ok(partitions.collect())
    }

    async fn has_segment(&self, segment: SegmentName) -> Result<bool, Uncertain> {
        answer(self.store.has_segment(segment_id(segment)).await).await
    }

    async fn has_manifest(&self, partition: PartitionId, manifest: ManifestName) -> Result<bool, Uncertain> {
        answer(self.store.has_manifest(stored_name(partition, manifest)).await).await
    }

    async fn delete_segment(&self, segment: SegmentName) -> Result<(), Uncertain> {
        answer(self.store.delete_segment(segment_id(segment)).await).await
    }

    async fn delete_manifest(&self, partition: PartitionId, manifest: ManifestName) -> Result<(), Uncertain> {
        answer(self.store.delete_manifest(stored_name(partition, manifest)).await).await
    }
}

impl Makers for Objects {
    async fn disowned(
        &self,
        node: NodeId,
        incarnation: Incarnation,
        segments: Vec<SegmentName>,
    ) -> Option<Vec<SegmentName>> {
        let terms = self.terms.read().clone();
        let ids: Vec<SegmentId> = segments.iter().map(|name| segment_id(*name)).collect();
        let mut disowned = Vec::new();
        for asked in ids.chunks(MAX_ASKED) {
            let (segments, _) = self.ask(node, incarnation, asked.to_vec()).await?;
            disowned.extend(segments.into_iter().filter_map(|id| segment_name(&terms, id)));
        }
        Some(disowned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn names_of_the_protocol_are_those_of_the_store() {
        let directory = tempfile::tempdir().unwrap();
        let metadata = fulmar_meta::Embedded::open(&directory.path().join("meta.db")).unwrap();
        let (key, converted) = registration::converted_terms(NodeId(2), 1, 4);
        metadata.transact(fulmar_meta::Transaction::new().put(key, converted)).await.unwrap();
        registration::record_term(&metadata, 7, NodeId(2), 3).await.unwrap();
        let terms = registration::terms(&metadata).await.unwrap();
        let id = SegmentId::with_term(7, u128::MAX);
        let name = segment_name(&terms, id).unwrap();
        assert_eq!((name.node, name.incarnation), (NodeId(2), 3));
        assert_eq!(segment_id(name), id);
        let maker = |term| segment_name(&terms, SegmentId::with_term(term, 1)).map(|name| name.incarnation);
        assert_eq!((maker(1), maker(4)), (Some(1), Some(1)), "terms of the single node");
        assert_eq!((maker(6), maker(8)), (None, None), "their makers are not known");
        let manifest =
            ManifestName { epoch: 5, incarnation: 2, covered: 77, node: NodeId(1), is_draft: false };
        let stored = stored_name(PartitionId(4), manifest);
        assert_eq!((stored.epoch, stored.number), (2, 5 << VERSION_BITS | 77));
    }
}
