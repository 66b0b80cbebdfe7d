//! Opening a partition: recovery from manifests and logs.

use std::collections::BTreeSet;
use std::time::Duration;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::incarnation::lease_wait;
use fulmar_cluster::{
    LogKind, ManifestName, PartitionRecord, Position, Read, SegmentName, metadata, migration, quarantine,
    recovery,
};
use fulmar_pages::PartitionId;
use futures::channel::oneshot;
use futures::future::join_all;

use super::{Answer, Node, Owned, Request};
use crate::partition::{Record, State};
use crate::violation::Kind;
use crate::world::{Env, Manifest};

/// A recovered partition.
pub struct Loaded {
    pub state: State,
    segments: Vec<SegmentName>,
    flushed: u64,
    from: Option<ManifestName>,
}

/// The contents of a partition with this record, as its owner recovers them. `end` is where the
/// open range ends.
pub async fn load(
    env: &Env,
    partition: PartitionId,
    record: &PartitionRecord,
    end: Position,
) -> Result<Loaded, (Kind, String)> {
    let copy = record.base.and_then(|base| env.directory.lock().copies.get(&(partition, base)).cloned());
    let mut loaded = match (copy, record.base) {
        (Some(state), from) => Loaded { state, segments: Vec::new(), flushed: 0, from },
        (None, Some(base)) if base.incarnation == 0 => {
            return Err((Kind::MissingPages, format!("partition {partition}: {base:?} is missing")));
        }
        (None, _) => load_manifest(env, partition, record).await?,
    };
    let objects = recovery::objects(env, record, loaded.from, end)
        .await
        .map_err(|missing| (Kind::MissingLog, format!("partition {partition}: {missing:?} is missing")))?;
    for object in &objects {
        let entry = Record::decode(&object.body);
        let version = loaded.state.version();
        if entry.is_commit_of(partition, object.range.epoch) && !loaded.state.replay(&entry) {
            let text = format!("partition {partition}: version {} follows {version}", entry.version);
            return Err((Kind::VersionGap, text));
        }
    }
    Ok(loaded)
}

/// The contents of the newest manifest.
async fn load_manifest(
    env: &Env,
    partition: PartitionId,
    record: &PartitionRecord,
) -> Result<Loaded, (Kind, String)> {
    let manifests = loop {
        if let Ok(manifests) = env.manifests(partition).await {
            break manifests;
        }
    };
    let may_use =
        |manifest: &&Manifest| !env.rules().named_manifests || recovery::is_named(record, manifest.name);
    let newest =
        manifests.into_iter().filter(|manifest| may_use(&manifest)).max_by_key(|manifest| manifest.name);
    let Some(newest) = newest else {
        return Ok(Loaded { state: State::default(), segments: Vec::new(), flushed: 0, from: None });
    };
    let mut state = State::default();
    let contents = join_all(newest.segments.iter().map(|name| read_segment(env, *name))).await;
    for (name, contents) in newest.segments.iter().zip(contents) {
        let Some(segment) = contents else {
            let text = format!("partition {partition}: {name:?} of {:?} is missing", newest.name);
            return Err((Kind::MissingSegment, text));
        };
        if !state.apply(&segment) {
            return Err((Kind::VersionGap, format!("partition {partition}: {name:?} does not follow")));
        }
    }
    let flushed = state.version();
    Ok(Loaded { state, segments: newest.segments, flushed, from: Some(newest.name) })
}

pub(super) async fn read_segment(
    env: &Env,
    name: SegmentName,
) -> Option<std::sync::Arc<crate::partition::Segment>> {
    loop {
        if let Ok(segment) = env.segment(name).await {
            return segment;
        }
        env.sleep(Duration::from_millis(5)).await;
    }
}

impl Node {
    /// Opens the partition if needed. Returns the answer to the request if it cannot be served
    /// here.
    pub(super) async fn open(&self, partition: PartitionId) -> Result<(), Answer> {
        loop {
            let opened = {
                let mut shared = self.shared.lock();
                if shared.is_fenced {
                    return Err(Answer::Elsewhere);
                }
                if shared.owned.contains_key(&partition) {
                    return Ok(());
                }
                match shared.opening.get_mut(&partition) {
                    None => {
                        shared.opening.insert(partition, Vec::new());
                        break;
                    }
                    Some(waiting) => {
                        let (sender, receiver) = oneshot::channel();
                        waiting.push(sender);
                        receiver
                    }
                }
            };
            let _opened_or_not = opened.await;
        }
        let opened = self.recover(partition).await;
        let mut shared = self.shared.lock();
        let waiting = shared.opening.remove(&partition);
        let owned = opened?;
        shared.unopened.remove(&partition);
        let is_first = shared.opened.insert((partition, owned.read.record.epoch));
        shared.owned.insert(partition, owned);
        drop(shared);
        drop(waiting);
        if !is_first {
            let text = format!("partition {partition} was opened twice in one epoch");
            self.env.world.violation(Kind::OpenedTwice, text);
        }
        Ok(())
    }

    async fn recover(&self, partition: PartitionId) -> Result<Owned, Answer> {
        let is_quarantined = self.env.world.is_quarantined(partition);
        let read = metadata::partition(&self.env, partition).await.unwrap();
        let Some(mut read) = read.filter(|read| read.record.owner == self.id) else {
            return Err(Answer::Elsewhere);
        };
        if self.features.poison && quarantine::is_quarantined(&self.env, partition).await.unwrap() {
            return Err(Answer::Quarantined);
        }
        let serve_from = self.serve_from(&read.record);
        if read.record.page_server.is_some() {
            read = self.pull(partition, read).await.ok_or(Answer::Elsewhere)?;
        }
        let loaded = load(&self.env, partition, &read.record, self.start()).await;
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err((kind, text)) => {
                // It may have become true because another node owns the partition now.
                let now = metadata::partition(&self.env, partition).await.unwrap();
                if now.is_some_and(|now| now.revision == read.revision) && self.is_current().await {
                    self.env.world.violation(kind, text);
                }
                return Err(Answer::Elsewhere);
            }
        };
        let mut shared = self.shared.lock();
        let next = Position { incarnation: shared.begun.incarnation, slot: shared.shared_log.next };
        let (id, epoch) = (self.id, read.record.epoch);
        self.simulation().note(|| {
            let (version, from) = (loaded.state.version(), loaded.from);
            format!("node {id}: opens {partition}, epoch {epoch}, version {version}, from {from:?}")
        });
        let kept = shared.unopened.get(&partition).copied().unwrap_or(next);
        if read.record.log() == LogKind::Shared {
            // Its records keep the log until it is in the map of owned partitions.
            shared.unopened.insert(partition, kept);
        }
        Ok(Owned {
            read,
            state: loaded.state,
            pending: Vec::new(),
            serve_from,
            accepts: true,
            is_busy: false,
            refused: BTreeSet::new(),
            kept,
            segments: loaded.segments,
            flushed: loaded.flushed,
            attempted: None,
            is_quarantined: is_quarantined && self.env.world.is_quarantined(partition),
        })
    }

    /// When the leases of earlier owners have run out.
    fn serve_from(&self, record: &PartitionRecord) -> Duration {
        let now = self.env.now();
        let shared = self.shared.lock();
        let serve_from = shared.begun.serve_from;
        if !record.by_failover || !self.rules().wait_out_lease {
            return serve_from;
        }
        let previous = &record.ranges[record.ranges.len().saturating_sub(2)];
        let incarnation = previous.to.map_or(0, |to| to.incarnation);
        let observed = shared.observed_ended.get(&(previous.node, incarnation)).copied();
        serve_from.max(observed.unwrap_or(now) + lease_wait(self.rules()))
    }

    /// Pulls the pages of a partition from its page server.
    async fn pull(
        &self,
        partition: PartitionId,
        read: Read<PartitionRecord>,
    ) -> Option<Read<PartitionRecord>> {
        let (server, epoch) = (read.record.page_server?, read.record.epoch);
        let Some(Answer::Pages(pages)) = self.call(server, Request::Pull { partition, epoch }).await else {
            return None;
        };
        let Some(state) = pages else {
            let now = metadata::partition(&self.env, partition).await.unwrap()?;
            if now.revision == read.revision && self.is_current().await {
                let text = format!("partition {partition}: node {server} has not kept its pages");
                self.env.world.violation(Kind::MissingPages, text);
            }
            return None;
        };
        let base = ManifestName { epoch, incarnation: 0, covered: 0, node: self.id, is_draft: true };
        self.env.write(|directory| directory.copies.insert((partition, base), state)).await;
        let begun = self.begun();
        match migration::pulled(&self.env, partition, &read, (self.id, &begun.read), base).await {
            Ok(read) => Some(read),
            Err(error) => {
                self.fenced(&error.to_string());
                None
            }
        }
    }

    /// Waits until the partition may be served. Returns the answer to the request if it is not
    /// served here.
    pub(super) async fn ready(&self, partition: PartitionId) -> Result<(), Answer> {
        loop {
            self.open(partition).await?;
            let serve_from = self.shared.lock().owned.get(&partition).map(|owned| owned.serve_from);
            let Some(serve_from) = serve_from else { continue };
            let now = self.env.now();
            if now >= serve_from {
                return Ok(());
            }
            self.env.sleep(serve_from - now).await;
        }
    }
}
