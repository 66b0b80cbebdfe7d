//! Reachability index of the garbage collector: which segments the manifests reference. A manifest
//! never changes, so each is read once. (Manifests above their partition's epoch are the exception:
//! they are left by failed restores, whose names later restores reuse. They are removed from the
//! index immediately.)
//!
//! ```text
//!   manifests of a partition    5    9    12    17    21
//!   segment a1                  |---------|            referenced by 5, 9, 12: written by a flush,
//!                                                      merged by a compaction
//!   segment b2                       |-----------|
//! ```
//!
//! For each segment the index stores the first and the last manifest of its partition that
//! reference it. The segment is needed while any remaining manifest lies between them, which
//! includes all that reference it. Manifests in between that do not reference it exist only if a
//! restore went back to a version before a merge; a segment held only by them is kept until they
//! are deleted.
//!
//! Size: 32 bytes per manifest and 48 bytes per segment. A partition that is written all day has
//! 1,440 manifests and somewhat more segments. Beyond [`MAX_BYTES`] in total, manifests are read
//! again in each collection.

use fulmar_mvcc::store_error;
use fulmar_pages::{Manifest, PartitionId, SegmentId};
use fulmar_store::{ManifestName, PageStore, StoreError};
use futures::stream::{self, StreamExt};
use hashbrown::HashMap;

use crate::restore_points::{ManifestTime, Point};
use fulmar_sqlite::Result;

/// Maximum number of concurrent manifest reads.
const MAX_CONCURRENT_READS: usize = 16;
/// Approximate number of manifests per chunk. A partition's manifests are not split.
const CHUNK_MANIFESTS: usize = 1000;
/// Approximate maximum size of the index.
const MAX_BYTES: usize = 64 << 20;

/// Sort key of a partition's manifests: epoch and number.
type Position = (u32, u64);

/// The index of all partitions.
pub(crate) struct ReachabilityIndex {
    partitions: HashMap<PartitionId, PartitionIndex>,
    max_bytes: usize,
}

/// The index of one partition.
#[derive(Default)]
struct PartitionIndex {
    /// The time of each manifest, sorted by position.
    manifests: Vec<(Position, ManifestTime)>,
    /// The first and the last manifest that reference each segment, sorted by segment.
    segments: Vec<(SegmentId, (Position, Position))>,
}

/// Manifests that could not be read.
#[derive(Default)]
pub(crate) struct UnreadManifests {
    /// A listed manifest does not exist any more.
    pub missing: bool,
    /// The error of the first damaged manifest.
    pub damaged: Option<StoreError>,
}

impl Default for ReachabilityIndex {
    fn default() -> Self {
        ReachabilityIndex { partitions: HashMap::new(), max_bytes: MAX_BYTES }
    }
}

fn position(name: ManifestName) -> Position {
    (name.epoch, name.number)
}

/// Splits sorted manifest names into chunks of about [`CHUNK_MANIFESTS`]; a partition's names stay
/// together.
pub(crate) fn chunks(names: &[ManifestName]) -> impl Iterator<Item = &[ManifestName]> {
    let mut left = names;
    std::iter::from_fn(move || {
        let last = left.get(left.len().min(CHUNK_MANIFESTS).checked_sub(1)?)?;
        let (piece, rest) = left.split_at(left.partition_point(|name| name.partition <= last.partition));
        left = rest;
        Some(piece)
    })
}

impl ReachabilityIndex {
    /// Removes partitions without any of these manifests, which are all that exist.
    pub(crate) fn keep_only(&mut self, names: &[ManifestName]) {
        let exists = |id: &PartitionId| names.binary_search_by_key(id, |name| name.partition).is_ok();
        self.partitions.retain(|id, _| exists(id));
    }

    /// Reads those of these manifests that are not in the index, and removes the others of their
    /// partitions.
    pub(crate) async fn refresh(
        &mut self,
        store: &PageStore,
        names: &[ManifestName],
    ) -> Result<UnreadManifests> {
        let mut unknown = Vec::new();
        for names in names.chunk_by(|a, b| a.partition == b.partition) {
            let index = self.partitions.entry(names[0].partition).or_default();
            index.keep_only(names);
            unknown.extend(names.iter().copied().filter(|name| index.when(*name).is_none()));
        }
        let read = |name| async move { (name, store.read_manifest(name).await) };
        let mut reads = stream::iter(unknown.into_iter().map(read)).buffer_unordered(MAX_CONCURRENT_READS);
        let mut unlearned = UnreadManifests::default();
        while let Some((name, read)) = reads.next().await {
            match read {
                Ok(manifest) => self.partitions.entry(name.partition).or_default().add(name, &manifest),
                Err(StoreError::Missing { .. }) => unlearned.missing = true,
                Err(error @ (StoreError::Damaged { .. } | StoreError::WrongIdentity { .. })) => {
                    unlearned.damaged.get_or_insert(error);
                }
                Err(error) => return Err(store_error(error)),
            }
        }
        // Most partitions have one manifest and one segment, so excess capacity would dominate the
        // index's size.
        for names in names.chunk_by(|a, b| a.partition == b.partition) {
            self.partitions.entry(names[0].partition).or_default().shrink();
        }
        Ok(unlearned)
    }

    /// The number of these manifests that are in the index.
    pub(crate) fn count(&self, names: &[ManifestName]) -> usize {
        let is_known = |name: &&ManifestName| {
            self.partitions.get(&name.partition).is_some_and(|index| index.when(**name).is_some())
        };
        names.iter().filter(is_known).count()
    }

    /// Removes the partitions of these manifests if the index is too large.
    pub(crate) fn evict_if_full(&mut self, names: &[ManifestName]) {
        if self.partitions.values().map(PartitionIndex::bytes).sum::<usize>() > self.max_bytes {
            for names in names.chunk_by(|a, b| a.partition == b.partition) {
                self.partitions.remove(&names[0].partition);
            }
        }
    }

    /// Returns a partition's manifests with their times, which are None for manifests that could
    /// not be read.
    pub(crate) fn points(&self, names: &[ManifestName]) -> Vec<Point> {
        let index = names.first().and_then(|name| self.partitions.get(&name.partition));
        let point = |name: &ManifestName| Point { name: *name, when: index.and_then(|m| m.when(*name)) };
        names.iter().map(point).collect()
    }

    /// The segments that a partition's manifests reference.
    pub(crate) fn segments(&self, id: PartitionId) -> impl Iterator<Item = SegmentId> {
        self.partitions
            .get(&id)
            .into_iter()
            .flat_map(|index| index.segments.iter().map(|(segment, _)| *segment))
    }

    /// Removes manifests of one partition, sorted: they are deleted, or their names may be reused.
    pub(crate) fn forget(&mut self, names: &[ManifestName]) {
        let Some(index) = names.first().and_then(|name| self.partitions.get_mut(&name.partition)) else {
            return;
        };
        let is_removed = |other: &Position| names.binary_search_by_key(other, |name| position(*name)).is_ok();
        index.manifests.retain(|(position, _)| !is_removed(position));
    }
}

impl PartitionIndex {
    fn when(&self, name: ManifestName) -> Option<ManifestTime> {
        let at = self.manifests.binary_search_by_key(&position(name), |(position, _)| *position).ok()?;
        Some(self.manifests[at].1)
    }

    fn add(&mut self, name: ManifestName, manifest: &Manifest) {
        let position = position(name);
        let at = self.manifests.partition_point(|(other, _)| *other < position);
        self.manifests.insert(at, (position, ManifestTime::of(manifest)));
        for segment in &manifest.segments {
            match self.segments.binary_search_by_key(&segment.id, |(id, _)| *id) {
                Ok(at) => {
                    let (first, last) = &mut self.segments[at].1;
                    (*first, *last) = ((*first).min(position), (*last).max(position));
                }
                Err(at) => self.segments.insert(at, (segment.id, (position, position))),
            }
        }
    }

    /// Keeps only these manifests, and the segments that one of them may reference.
    fn keep_only(&mut self, names: &[ManifestName]) {
        let count = self.manifests.len();
        let exists = |other: &Position| names.binary_search_by_key(other, |name| position(*name)).is_ok();
        self.manifests.retain(|(position, _)| exists(position));
        let manifests = &self.manifests;
        let is_between = |first: Position, last: Position| {
            let next = manifests.partition_point(|(position, _)| *position < first);
            manifests.get(next).is_some_and(|(position, _)| *position <= last)
        };
        self.segments.retain(|(_, (first, last))| is_between(*first, *last));
        if self.manifests.len() < count {
            self.shrink();
        }
    }

    fn shrink(&mut self) {
        self.manifests.shrink_to_fit();
        self.segments.shrink_to_fit();
    }

    fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.manifests.capacity() * size_of::<(Position, ManifestTime)>()
            + self.segments.capacity() * size_of::<(SegmentId, (Position, Position))>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};
    use std::sync::Arc;

    use fulmar_pages::{SegmentRef, Version};
    use fulmar_store::{Backend, StoreOperation};
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const PARTITIONS: u64 = 3;

    fn manifest(name: ManifestName, segments: &[u128]) -> Manifest {
        let ManifestName { partition, epoch, number } = name;
        let segment = |id: &u128| SegmentRef { id: SegmentId(*id), partition };
        Manifest {
            partition,
            version: Version { lineage: epoch.into(), epoch, number },
            page_count: 1,
            timestamp: number << 16,
            segments: segments.iter().map(segment).collect(),
            outcomes: Vec::new(),
            outcomes_horizon: 0,
        }
    }

    /// The state of some partitions, and the index under test.
    struct Pair {
        store: PageStore,
        marks: ReachabilityIndex,
        manifests: BTreeMap<ManifestName, Vec<u128>>,
        next: u128,
        restored: bool,
    }

    impl Pair {
        fn new(max_bytes: usize) -> Pair {
            let store = PageStore::open(Arc::new(Backend::memory()));
            let marks = ReachabilityIndex { max_bytes, ..ReachabilityIndex::default() };
            Pair { store, marks, manifests: BTreeMap::new(), next: 1, restored: false }
        }

        fn of(&self, partition: PartitionId) -> Vec<(ManifestName, Vec<u128>)> {
            let of = self.manifests.iter().filter(|(name, _)| name.partition == partition);
            of.map(|(name, segments)| (*name, segments.clone())).collect()
        }

        async fn put(&mut self, name: ManifestName, segments: Vec<u128>) {
            self.store.put_manifest(&manifest(name, &segments)).await.unwrap();
            self.manifests.insert(name, segments);
        }

        /// A random step: a flush, a compaction, a restore, or the deletion of a manifest or a
        /// partition.
        async fn step(&mut self, random: &mut StdRng, restores: bool) {
            let partition = PartitionId(random.random_range(0..PARTITIONS));
            let of = self.of(partition);
            self.next += 1;
            let Some((newest, segments)) = of.last().cloned() else {
                let name = ManifestName { partition, epoch: 1, number: self.next as u64 };
                return self.put(name, vec![self.next]).await;
            };
            let later = ManifestName { number: self.next as u64, ..newest };
            match random.random_range(0..20) {
                0 if restores => {
                    self.restored = true;
                    let to = of[random.random_range(0..of.len())].1.clone();
                    self.put(ManifestName { epoch: newest.epoch + 1, ..later }, to).await;
                }
                1 => {
                    for (name, _) in of {
                        self.delete(name).await;
                    }
                }
                2..=4 if segments.len() > 2 => {
                    let begin = random.random_range(0..segments.len() - 1);
                    let mut merged = segments;
                    merged.splice(begin..begin + 2, [self.next]);
                    self.put(later, merged).await;
                }
                5..=9 => {
                    // Any manifest except the newest: history is thinned.
                    if of.len() > 1 {
                        self.delete(of[random.random_range(0..of.len() - 1)].0).await;
                    }
                }
                _ => self.put(later, segments.into_iter().chain([self.next]).collect()).await,
            }
        }

        async fn delete(&mut self, name: ManifestName) {
            self.store.delete_manifest(name).await.unwrap();
            self.manifests.remove(&name);
        }

        async fn refresh(&mut self) {
            let names: Vec<_> = self.manifests.keys().copied().collect();
            self.marks.keep_only(&names);
            for chunk in chunks(&names) {
                let unlearned = self.marks.refresh(&self.store, chunk).await.unwrap();
                assert!(!unlearned.missing && unlearned.damaged.is_none());
                for of in chunk.chunk_by(|a, b| a.partition == b.partition) {
                    let points = self.marks.points(of);
                    assert!(points.iter().all(|point| point.when.is_some()));
                    let found: HashSet<_> = self.marks.segments(of[0].partition).collect();
                    let manifests = self.of(of[0].partition).into_iter();
                    let named: HashSet<_> = manifests.flat_map(|(_, named)| named).map(SegmentId).collect();
                    assert!(found.is_superset(&named), "{named:?} are named, {found:?} are known");
                    assert!(self.restored || found == named, "{named:?} are named, {found:?} are known");
                }
                self.marks.evict_if_full(chunk);
            }
        }

        fn reads(&self) -> u64 {
            let of = self.store.statistics().into_iter();
            of.filter(|of| of.operation == StoreOperation::Get).map(|of| of.attempts).sum()
        }
    }

    /// After any sequence of steps the index contains all referenced segments, and without restores
    /// no others.
    #[tokio::test]
    async fn index_contains_all_referenced_segments() {
        for seed in 0..40 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut pair = Pair::new(if seed % 4 == 0 { 0 } else { MAX_BYTES });
            for _ in 0..60 {
                for _ in 0..random.random_range(0..8) {
                    pair.step(&mut random, seed % 2 == 0).await;
                }
                pair.refresh().await;
            }
        }
    }

    /// A failed restore leaves a manifest whose name the next restore reuses.
    #[tokio::test]
    async fn removed_manifest_is_read_again() {
        let mut pair = Pair::new(MAX_BYTES);
        let name = ManifestName { partition: PartitionId(1), epoch: 2, number: 5 };
        for segment in [1, 2] {
            pair.put(name, vec![segment]).await;
            pair.refresh().await;
            pair.marks.forget(&[name]);
            pair.store.delete_manifest(name).await.unwrap();
        }
    }

    #[tokio::test]
    async fn each_manifest_is_read_once_while_the_index_has_room() {
        let mut random = StdRng::seed_from_u64(1);
        for (max_bytes, reads) in [(MAX_BYTES, 1), (0, 5)] {
            let mut pair = Pair::new(max_bytes);
            for _ in 0..100 {
                pair.step(&mut random, true).await;
            }
            for _ in 0..5 {
                pair.refresh().await;
            }
            assert_eq!(pair.reads(), reads * pair.manifests.len() as u64);
        }
    }

    #[test]
    fn chunks_do_not_split_partitions() {
        let name = |partition, number| ManifestName { partition: PartitionId(partition), epoch: 1, number };
        let mut names: Vec<_> = (0..CHUNK_MANIFESTS as u64 - 1).map(|partition| name(partition, 1)).collect();
        names.extend((0..5).map(|number| name(5000, number)));
        names.push(name(6000, 1));
        let lengths: Vec<_> = chunks(&names).map(<[_]>::len).collect();
        assert_eq!(lengths, [CHUNK_MANIFESTS + 4, 1]);
        assert_eq!(chunks(&[]).count(), 0);
    }
}
