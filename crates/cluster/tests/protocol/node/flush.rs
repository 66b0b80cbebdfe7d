//! Flushes: segments and manifests, and the truncation of the shared log.

use std::time::Duration;

use fulmar_cluster::environment::{Environment, LogObjects, Slot};
use fulmar_cluster::truncation::{self, Covered};
use fulmar_cluster::{LogId, LogKind, ManifestName, PartitionRecord, Position, Read, SegmentName, metadata};
use fulmar_pages::PartitionId;

use super::Node;
use crate::partition::Segment;
use crate::run::is_private;
use crate::world::{Manifest, segment_name};

/// One in this number of flushes also merges all segments.
const COMPACTION_INTERVAL: u64 = 4;

/// The longest time between the segments of a flush and its manifest.
const MAX_FLUSH_TIME: Duration = Duration::from_millis(200);

/// A flush in progress.
struct Flush {
    /// Its entry in the map of unsettled segments.
    number: u64,
    covered: Position,
    version: u64,
    /// The new segment, and whether it replaces all others.
    segment: Option<(SegmentName, Segment)>,
    is_compaction: bool,
    epoch: u32,
}

impl Node {
    /// Periodically writes manifests, drops closed ranges from records, and truncates the log.
    pub(super) async fn flush(self) {
        // Logs of earlier incarnations are truncated completely.
        let mut first = 1;
        loop {
            self.env.sleep(Duration::from_millis(200) + self.env.jitter(Duration::from_millis(600))).await;
            let partitions: Vec<_> = self.shared.lock().owned.keys().copied().collect();
            for partition in partitions {
                self.flush_one(partition).await;
                self.raise_kept_from();
            }
            first = self.truncate(first).await;
        }
    }

    async fn flush_one(&self, partition: PartitionId) {
        let read = {
            let mut shared = self.shared.lock();
            let shared = &mut *shared;
            let Some(owned) = shared.owned.get_mut(&partition) else { return };
            let kind = owned.log();
            let durable = match kind {
                LogKind::Shared => shared.shared_log.durable,
                LogKind::Local => shared.local_log.durable,
            };
            let covered = Position { incarnation: shared.begun.incarnation, slot: durable };
            if owned.is_busy || is_private(partition) || owned.attempted == Some(covered) {
                return;
            }
            owned.is_busy = true;
            owned.read.clone()
        };
        let stored = self.store_manifest(partition, None, false).await;
        let mut new_read = None;
        if let Some((name, covered)) = stored {
            let range = &read.record.ranges[0];
            if read.record.ranges.len() > 1 || range.from.incarnation < covered.incarnation {
                new_read = self.forget_ranges(partition, &read, name, covered).await;
            }
        }
        let mut shared = self.shared.lock();
        let Some(owned) = shared.owned.get_mut(&partition) else { return };
        owned.is_busy = false;
        if let Some(read) = new_read {
            owned.read = read;
        }
        if let Some((_, covered)) = stored
            && owned.log() == LogKind::Shared
        {
            owned.kept = owned.kept.max(covered);
        }
    }

    /// Stores a manifest of the durable contents of a partition whose `is_busy` the caller has set.
    /// `draft`: the epoch and position of a draft. `must`: repeats it until it is known to be
    /// stored. Returns its name and the position up to which it covers the log.
    pub(super) async fn store_manifest(
        &self,
        partition: PartitionId,
        draft: Option<(u32, Position)>,
        must: bool,
    ) -> Option<(ManifestName, Position)> {
        let flush = self.begin_flush(partition, draft)?;
        if let Some((name, segment)) = &flush.segment {
            while self.env.put_segment(*name, segment.clone()).await.is_err() {
                if !must {
                    // The segment may be stored. No manifest will name it.
                    self.shared.lock().unsettled.remove(&flush.number);
                    return None;
                }
            }
        }
        // A large flush stores many segments.
        self.env.sleep(self.env.jitter(MAX_FLUSH_TIME)).await;
        let Flush { number, covered, version, epoch, .. } = flush;
        let manifest = {
            let mut shared = self.shared.lock();
            let Some(owned) = shared.owned.get_mut(&partition) else {
                shared.unsettled.remove(&number);
                return None;
            };
            if let Some((name, _)) = flush.segment {
                if flush.is_compaction {
                    owned.segments.clear();
                }
                owned.segments.push(name);
                owned.flushed = version;
            }
            let (incarnation, is_draft) = (covered.incarnation, draft.is_some());
            let name = ManifestName { epoch, incarnation, covered: covered.slot, node: self.id, is_draft };
            let segments = owned.segments.clone();
            shared.unsettled.insert(number, segments.clone());
            Manifest { name, segments }
        };
        let name = manifest.name;
        loop {
            if self.env.put_manifest(partition, manifest.clone()).await.is_ok() {
                self.shared.lock().unsettled.remove(&number);
                return Some((name, covered));
            }
            if !must {
                break;
            }
        }
        if self.rules().settle_manifests {
            // It may still be stored, so its segments are not disowned until it is.
            self.spawn(self.clone().settle(number, partition, manifest));
        } else {
            self.shared.lock().unsettled.remove(&number);
        }
        None
    }

    async fn settle(self, number: u64, partition: PartitionId, manifest: Manifest) {
        while self.env.put_manifest(partition, manifest.clone()).await.is_err() {
            self.env.sleep(Duration::from_millis(100)).await;
        }
        self.shared.lock().unsettled.remove(&number);
    }

    /// Chooses what a manifest covers, and names its new segment.
    fn begin_flush(&self, partition: PartitionId, draft: Option<(u32, Position)>) -> Option<Flush> {
        let is_compaction = self.simulation().chance(1, COMPACTION_INTERVAL);
        let mut shared = self.shared.lock();
        let shared = &mut *shared;
        let (number, incarnation) = (shared.number(), shared.begun.incarnation);
        let owned = shared.owned.get_mut(&partition)?;
        let log = match owned.log() {
            LogKind::Shared => &shared.shared_log,
            LogKind::Local => &shared.local_log,
        };
        let (version, slot) = match self.rules().durable_manifests {
            true => (owned.durable_version(log.durable), log.durable),
            false => (owned.state.version(), log.next),
        };
        let position = Position { incarnation, slot };
        let (epoch, covered) = draft.unwrap_or((owned.read.record.epoch, position));
        if draft.is_none() {
            owned.attempted = Some(covered);
        }
        let is_compaction = is_compaction && !owned.segments.is_empty();
        let from = if is_compaction { 0 } else { owned.flushed };
        let segment = (version > from).then(|| {
            let name = segment_name(partition, self.id, incarnation, number);
            (name, owned.state.segment(from, version))
        });
        shared.unsettled.insert(number, segment.iter().map(|(name, _)| *name).collect());
        Some(Flush { number, covered, version, segment, is_compaction, epoch })
    }

    /// Raises `kept_from` of the shared log to the oldest record that is in no manifest.
    fn raise_kept_from(&self) {
        let mut shared = self.shared.lock();
        let shared = &mut *shared;
        let nothing = Position { incarnation: shared.begun.incarnation, slot: shared.shared_log.durable };
        let opened = shared.owned.values().filter(|owned| owned.log() == LogKind::Shared);
        let unopened =
            shared.unopened.iter().filter(|(id, _)| !shared.owned.contains_key(id)).map(|(_, kept)| *kept);
        let kept_from = opened.map(|owned| owned.kept).chain(unopened).min().unwrap_or(nothing);
        shared.shared_log.kept_from = shared.shared_log.kept_from.max(kept_from);
    }

    /// Drops the ranges that this manifest covers from the partition's record.
    async fn forget_ranges(
        &self,
        partition: PartitionId,
        read: &Read<PartitionRecord>,
        name: ManifestName,
        covered: Position,
    ) -> Option<Read<PartitionRecord>> {
        let epoch = read.record.epoch;
        let covered = [Covered { partition, epoch, base: Some(name), from: covered }];
        let begun = self.begun();
        truncation::drop_ranges(&self.env, (self.id, &begun.read), &covered).await.unwrap();
        let now = metadata::partition(&self.env, partition).await.unwrap()?;
        (now.record.epoch == epoch && now.record.owner == self.id).then_some(now)
    }

    /// Truncates the logs of the incarnations from `first` on. Returns the first one in which
    /// records remain, apart from the last one.
    async fn truncate(&self, first: u64) -> u64 {
        let (kept_from, incarnation) = {
            let shared = self.shared.lock();
            (shared.shared_log.durable_kept_from, shared.begun.incarnation)
        };
        let mut below = kept_from;
        if self.rules().keep_closed_ranges {
            for (_, read) in metadata::partitions(&self.env).await.unwrap() {
                let is_closed = |range: &&fulmar_cluster::Range| range.node == self.id && range.to.is_some();
                let needed = read.record.ranges.iter().filter(is_closed);
                let needed = needed.filter(|range| range.log == LogKind::Shared);
                below = needed.map(|range| range.from).fold(below, Position::min);
            }
        }
        for incarnation in first..=incarnation.min(below.incarnation) {
            if !self.truncate_log(LogId::shared(self.id, incarnation), below).await {
                return incarnation;
            }
        }
        first.max(incarnation.min(below.incarnation))
    }

    /// Truncates a log. Returns true if nothing more can be truncated of it.
    ///
    /// Never deletes the last record: its `kept_from` shows what was truncated. Deletes in order,
    /// one at a time, because a sealer takes the first gap for the end.
    async fn truncate_log(&self, log: LogId, below: Position) -> bool {
        let Ok(slots) = self.env.list(log).await else { return false };
        for slot in &slots {
            if (Position { incarnation: log.incarnation, slot: *slot }) >= below {
                return false;
            }
            match LogObjects::read(&self.env, log, slot + 1).await {
                Ok(Some(Slot::Records { .. })) => {}
                Ok(Some(Slot::Seal)) => return true,
                Ok(None) | Err(_) => return false,
            }
            if self.env.delete(log, *slot).await.is_err() {
                return false;
            }
        }
        true
    }
}
