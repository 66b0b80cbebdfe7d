//! What manifests name, as the collector remembers it: a manifest never changes, so each is read once. (But for those of an epoch that
//! its partition has not come to: a restore that fails leaves one, and the next one may give its name to another. They are
//! forgotten at once.)
//!
//! ```text
//!   manifests of a partition    5    9    12    17    21
//!   segment a1                  |---------|                    named by 5, 9 and 12: a flush has made it, a compaction merged it
//!   segment b2                       |-----------|
//! ```
//!
//! Of a segment the first and the last of its partition's manifests that name it are kept. It is needed as long as one of those that are
//! left lies between them: every one that names it does. Others lie between only where a restore has gone back to what was
//! merged since; what only they would free stays until they go.
//!
//! Thirty-two bytes for each manifest and forty-eight for each segment: a partition that is written all day has 1,440 of the one, and some more
//! of the other. Beyond [`MOST_BYTES`] for all, manifests are read again with each collection.

use fulmar_pages::{Manifest, PartitionId, SegmentId};
use fulmar_store::{ManifestName, PageStore, StoreError};
use futures::stream::{self, StreamExt};
use hashbrown::HashMap;

use crate::Result;
use crate::history::{Point, When};
use crate::partition::store_error;

/// Manifests that are read at the same time.
const AT_ONCE: usize = 16;
/// Manifests that are looked at together, about: no partition's are looked at in parts.
const TOGETHER: usize = 1000;
/// Bytes of memory for what is remembered, about.
const MOST_BYTES: usize = 64 << 20;

/// Where a manifest stands among its partition's: epoch and number.
type Place = (u32, u64);

/// What is remembered of all partitions.
pub(crate) struct Marks {
    partitions: HashMap<PartitionId, Marked>,
    most_bytes: usize,
}

/// What is remembered of a partition's manifests.
#[derive(Default)]
struct Marked {
    /// When each was the current version, sorted.
    manifests: Vec<(Place, When)>,
    /// The first and the last of them that name a segment, sorted by segments.
    segments: Vec<(SegmentId, (Place, Place))>,
}

/// What could not be learned.
#[derive(Default)]
pub(crate) struct Unlearned {
    /// A manifest that was listed is not there any more.
    pub missing: bool,
    /// The first one that is damaged.
    pub damaged: Option<StoreError>,
}

impl Default for Marks {
    fn default() -> Self {
        Marks { partitions: HashMap::new(), most_bytes: MOST_BYTES }
    }
}

fn place(name: ManifestName) -> Place {
    (name.epoch, name.number)
}

/// Sorted names of manifests in pieces of some size, each with all of its partitions'.
pub(crate) fn together(names: &[ManifestName]) -> impl Iterator<Item = &[ManifestName]> {
    let mut left = names;
    std::iter::from_fn(move || {
        let last = left.get(left.len().min(TOGETHER).checked_sub(1)?)?;
        let (piece, rest) = left.split_at(left.partition_point(|name| name.partition <= last.partition));
        left = rest;
        Some(piece)
    })
}

impl Marks {
    /// Forgets partitions that have none of these manifests, which are all that there are.
    pub(crate) fn keep_only(&mut self, names: &[ManifestName]) {
        let is_there = |id: &PartitionId| names.binary_search_by_key(id, |name| name.partition).is_ok();
        self.partitions.retain(|id, _| is_there(id));
    }

    /// Reads those of these manifests that are not remembered, and forgets others of their partitions.
    pub(crate) async fn learn(&mut self, store: &PageStore, names: &[ManifestName]) -> Result<Unlearned> {
        let mut unknown = Vec::new();
        for names in names.chunk_by(|a, b| a.partition == b.partition) {
            let marked = self.partitions.entry(names[0].partition).or_default();
            marked.keep_only(names);
            unknown.extend(names.iter().copied().filter(|name| marked.when(*name).is_none()));
        }
        let read = |name| async move { (name, store.read_manifest(name).await) };
        let mut reads = stream::iter(unknown.into_iter().map(read)).buffer_unordered(AT_ONCE);
        let mut unlearned = Unlearned::default();
        while let Some((name, read)) = reads.next().await {
            match read {
                Ok(manifest) => self.partitions.entry(name.partition).or_default().add(name, &manifest),
                Err(StoreError::Missing { .. }) => unlearned.missing = true,
                Err(error @ (StoreError::Damaged { .. } | StoreError::Misnamed { .. })) => {
                    unlearned.damaged.get_or_insert(error);
                }
                Err(error) => return Err(store_error(error)),
            }
        }
        // Most partitions have one manifest and a segment: what is kept for more is more than those.
        for names in names.chunk_by(|a, b| a.partition == b.partition) {
            self.partitions.entry(names[0].partition).or_default().shrink();
        }
        Ok(unlearned)
    }

    /// Forgets what was learned of these, if all of it together is too much.
    pub(crate) fn make_room(&mut self, names: &[ManifestName]) {
        if self.partitions.values().map(Marked::bytes).sum::<usize>() > self.most_bytes {
            for names in names.chunk_by(|a, b| a.partition == b.partition) {
                self.partitions.remove(&names[0].partition);
            }
        }
    }

    /// A partition's manifests as its history sees them. Of one that could not be read nothing is known.
    pub(crate) fn points(&self, names: &[ManifestName]) -> Vec<Point> {
        let marked = names.first().and_then(|name| self.partitions.get(&name.partition));
        let point = |name: &ManifestName| Point { name: *name, when: marked.and_then(|m| m.when(*name)) };
        names.iter().map(point).collect()
    }

    /// Segments that a partition's manifests name.
    pub(crate) fn segments(&self, id: PartitionId) -> impl Iterator<Item = SegmentId> {
        self.partitions
            .get(&id)
            .into_iter()
            .flat_map(|marked| marked.segments.iter().map(|(segment, _)| *segment))
    }

    /// Manifests of one partition, sorted, are deleted, or may become others of the same names.
    pub(crate) fn forget(&mut self, names: &[ManifestName]) {
        let Some(marked) = names.first().and_then(|name| self.partitions.get_mut(&name.partition)) else {
            return;
        };
        let is_one = |other: &Place| names.binary_search_by_key(other, |name| place(*name)).is_ok();
        marked.manifests.retain(|(place, _)| !is_one(place));
    }
}

impl Marked {
    fn when(&self, name: ManifestName) -> Option<When> {
        let at = self.manifests.binary_search_by_key(&place(name), |(place, _)| *place).ok()?;
        Some(self.manifests[at].1)
    }

    fn add(&mut self, name: ManifestName, manifest: &Manifest) {
        let place = place(name);
        let at = self.manifests.partition_point(|(other, _)| *other < place);
        self.manifests.insert(at, (place, When::of(manifest)));
        for segment in &manifest.segments {
            match self.segments.binary_search_by_key(&segment.id, |(id, _)| *id) {
                Ok(at) => {
                    let (first, last) = &mut self.segments[at].1;
                    (*first, *last) = ((*first).min(place), (*last).max(place));
                }
                Err(at) => self.segments.insert(at, (segment.id, (place, place))),
            }
        }
    }

    /// Forgets all manifests but these, and the segments that only those others name.
    fn keep_only(&mut self, names: &[ManifestName]) {
        let count = self.manifests.len();
        let is_there = |other: &Place| names.binary_search_by_key(other, |name| place(*name)).is_ok();
        self.manifests.retain(|(place, _)| is_there(place));
        let manifests = &self.manifests;
        let is_between = |first: Place, last: Place| {
            let next = manifests.partition_point(|(place, _)| *place < first);
            manifests.get(next).is_some_and(|(place, _)| *place <= last)
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
            + self.manifests.capacity() * size_of::<(Place, When)>()
            + self.segments.capacity() * size_of::<(SegmentId, (Place, Place))>()
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

    const MOST_PARTITIONS: u64 = 3;

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

    /// Partitions as they are, beside what is remembered of them.
    struct Pair {
        store: PageStore,
        marks: Marks,
        manifests: BTreeMap<ManifestName, Vec<u128>>,
        next: u128,
        restored: bool,
    }

    impl Pair {
        fn new(most_bytes: usize) -> Pair {
            let store = PageStore::open(Arc::new(Backend::memory()));
            let marks = Marks { most_bytes, ..Marks::default() };
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

        /// A flush, a compaction, a restore, the end of a manifest or of a partition.
        async fn step(&mut self, random: &mut StdRng, restores: bool) {
            let partition = PartitionId(random.random_range(0..MOST_PARTITIONS));
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
                    // Any but the newest: history is thinned.
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

        async fn look(&mut self) {
            let names: Vec<_> = self.manifests.keys().copied().collect();
            self.marks.keep_only(&names);
            for several in together(&names) {
                let unlearned = self.marks.learn(&self.store, several).await.unwrap();
                assert!(!unlearned.missing && unlearned.damaged.is_none());
                for of in several.chunk_by(|a, b| a.partition == b.partition) {
                    let points = self.marks.points(of);
                    assert!(points.iter().all(|point| point.when.is_some()));
                    let found: HashSet<_> = self.marks.segments(of[0].partition).collect();
                    let manifests = self.of(of[0].partition).into_iter();
                    let named: HashSet<_> = manifests.flat_map(|(_, named)| named).map(SegmentId).collect();
                    assert!(found.is_superset(&named), "{named:?} are named, {found:?} are known");
                    assert!(self.restored || found == named, "{named:?} are named, {found:?} are known");
                }
                self.marks.make_room(several);
            }
        }

        fn reads(&self) -> u64 {
            let of = self.store.statistics().into_iter();
            of.filter(|of| of.operation == StoreOperation::Get).map(|of| of.tries).sum()
        }
    }

    /// Whatever came and went since it was looked last: all that is named is known, and without restores nothing else.
    #[tokio::test]
    async fn what_is_named_is_known() {
        for seed in 0..40 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut pair = Pair::new(if seed % 4 == 0 { 0 } else { MOST_BYTES });
            for _ in 0..60 {
                for _ in 0..random.random_range(0..8) {
                    pair.step(&mut random, seed % 2 == 0).await;
                }
                pair.look().await;
            }
        }
    }

    /// A restore that has failed leaves a manifest of which the next one gives the name to another.
    #[tokio::test]
    async fn a_name_that_is_forgotten_is_read_again() {
        let mut pair = Pair::new(MOST_BYTES);
        let name = ManifestName { partition: PartitionId(1), epoch: 2, number: 5 };
        for segment in [1, 2] {
            pair.put(name, vec![segment]).await;
            pair.look().await;
            pair.marks.forget(&[name]);
            pair.store.delete_manifest(name).await.unwrap();
        }
    }

    #[tokio::test]
    async fn each_manifest_is_read_once_where_there_is_room() {
        let mut random = StdRng::seed_from_u64(1);
        for (most_bytes, reads) in [(MOST_BYTES, 1), (0, 5)] {
            let mut pair = Pair::new(most_bytes);
            for _ in 0..100 {
                pair.step(&mut random, true).await;
            }
            for _ in 0..5 {
                pair.look().await;
            }
            assert_eq!(pair.reads(), reads * pair.manifests.len() as u64);
        }
    }

    #[test]
    fn no_partition_is_looked_at_in_parts() {
        let name = |partition, number| ManifestName { partition: PartitionId(partition), epoch: 1, number };
        let mut names: Vec<_> = (0..TOGETHER as u64 - 1).map(|partition| name(partition, 1)).collect();
        names.extend((0..5).map(|number| name(5000, number)));
        names.push(name(6000, 1));
        let lengths: Vec<_> = together(&names).map(<[_]>::len).collect();
        assert_eq!(lengths, [TOGETHER + 4, 1]);
        assert_eq!(together(&[]).count(), 0);
    }
}
