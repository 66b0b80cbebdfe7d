//! Segments, manifests, holds on manifests, lists of hot pages, catalogs and terms as objects of a
//! store.
//!
//! ```text
//!   segments/0000000789abcdef0123456789abcdef            term and random bits
//!   manifests/PARTITION/00000002/000000000000005a        epoch/number, in sort order
//!   manifests/PARTITION/hot-00000002-000000000000006b    epoch and time ([`hot`])
//!   manifests/PARTITION/fate-00000002-000000000000005a-00000000
//!                                                        pin or deletion ([`manifest_holds`])
//!   manifests/PARTITION/anchor-00000002-000000000000005a
//!                                                        the newest manifest ([`anchors`])
//!   terms/00000007                                       ownership of the store ([`terms`])
//!   catalog/000000000000000c                             the list of partitions ([`catalog`])
//! ```
//!
//! PARTITION is the partition's id in 16 hexadecimal digits.
//!
//! All objects are created with create-if-absent and are immutable. If a manifest already exists
//! with the same contents, it counts as written (the response to an earlier put was lost). If it
//! exists with other contents, another process writes for the partition.
//!
//! The indexes of segments are read once and cached, and so are manifests for time-travel reads,
//! each within a fixed number of bytes. Callers decide what else to cache. If there is a disk
//! cache, it is checked before the store ([`disk_cache_access`]). Any [`Store`] can be used;
//! [`Reliable`] adds retries and time-outs.

mod adopt;
mod anchors;
mod catalog;
mod disk_cache_access;
mod error;
mod frames;
mod hot;
mod manifest_holds;
mod partitions;
mod segment_writer;
mod terms;
#[cfg(test)]
mod testing;
mod verify;

use std::path::Path as FilePath;
use std::sync::Arc;

use bytes::Bytes;
use fulmar_pages::{
    FormatError, FrameLocation, Manifest, Page, PartitionId, SegmentId, SegmentIndex, ZERO_PAGE, segment,
};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::disk_cache::{DiskCache, Key, ReadHint};
use crate::single_flight::SingleFlight;
use crate::store::{Backend, FailureKind, Limits, OperationStatistics, Piece, Reliable, Span, Store};
pub use error::StoreError;
pub use frames::RawFrame;
pub use hot::HotPagesName;
pub use manifest_holds::{HoldName, PIN_RENEWAL_INTERVAL, PinOutcome};
pub use segment_writer::SegmentWriter;
pub use terms::{MAX_TERM, Term, VERSION_BITS};

const SEGMENTS: &str = "segments";
const MANIFESTS: &str = "manifests";

/// Maximum number of cached indexes, and their maximum total size.
const CACHED_INDEXES: usize = 1000;
const INDEX_CACHE_BYTES: u64 = 32 << 20;

/// Maximum number of cached manifests, and their maximum total size.
const CACHED_MANIFESTS: usize = 10_000;
const MANIFEST_CACHE_BYTES: u64 = 16 << 20;

/// Length of the first read at a segment's end: enough for the footer and the index of about 10,000
/// pages.
const TAIL_BYTES: u64 = 64 << 10;

/// Name of a manifest. Names of one partition sort in the order of its manifests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ManifestName {
    /// The manifest's partition.
    pub partition: PartitionId,
    /// Epoch of its version.
    pub epoch: u32,
    /// Number of its version.
    pub number: u64,
}

impl ManifestName {
    /// Returns the name of a manifest.
    pub fn of(manifest: &Manifest) -> Self {
        let version = manifest.version;
        ManifestName { partition: manifest.partition, epoch: version.epoch, number: version.number }
    }

    fn object(&self) -> String {
        format!("{}/{:08x}/{:016x}", directory(self.partition), self.epoch, self.number)
    }

    fn parse(object: &str) -> Option<Self> {
        let mut parts = object.split('/');
        let mut next = || parts.next();
        if next()? != MANIFESTS {
            return None;
        }
        let name = ManifestName {
            partition: PartitionId(u64::from_str_radix(next()?, 16).ok()?),
            epoch: u32::from_str_radix(next()?, 16).ok()?,
            number: u64::from_str_radix(next()?, 16).ok()?,
        };
        (name.object() == object).then_some(name)
    }
}

/// Names of the objects of partitions, except segments. Each list is sorted.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PartitionObjects {
    /// Manifests.
    pub manifests: Vec<ManifestName>,
    /// Lists of hot pages.
    pub hot_pages: Vec<HotPagesName>,
    /// Holds of manifests.
    pub holds: Vec<HoldName>,
    /// Anchors: manifests that were the newest of their partitions ([`PageStore::put_anchor`]).
    pub anchors: Vec<ManifestName>,
}

impl PartitionObjects {
    /// The greatest partition that has any of these objects.
    pub fn last_partition(&self) -> Option<PartitionId> {
        let lasts = [
            self.manifests.last().map(|name| name.partition),
            self.hot_pages.last().map(|name| name.partition),
            self.holds.last().map(|name| name.manifest.partition),
            self.anchors.last().map(|name| name.partition),
        ];
        lasts.into_iter().flatten().max()
    }

    /// Removes the objects of the partitions up to `last`, and returns them.
    pub fn take_up_to(&mut self, last: PartitionId) -> PartitionObjects {
        fn take<T>(from: &mut Vec<T>, last: PartitionId, of: impl Fn(&T) -> PartitionId) -> Vec<T> {
            let rest = from.split_off(from.partition_point(|name| of(name) <= last));
            std::mem::replace(from, rest)
        }
        PartitionObjects {
            manifests: take(&mut self.manifests, last, |name| name.partition),
            hot_pages: take(&mut self.hot_pages, last, |name| name.partition),
            holds: take(&mut self.holds, last, |name| name.manifest.partition),
            anchors: take(&mut self.anchors, last, |name| name.partition),
        }
    }

    fn sort(&mut self) {
        self.manifests.sort_unstable();
        self.hot_pages.sort_unstable();
        self.holds.sort_unstable();
        self.anchors.sort_unstable();
    }

    fn add(&mut self, objects: &[String]) {
        for object in objects {
            self.manifests.extend(ManifestName::parse(object));
            self.hot_pages.extend(HotPagesName::parse(object));
            self.holds.extend(HoldName::parse(object));
            self.anchors.extend(anchors::parse(object));
        }
    }
}

/// The directory of a partition's manifests.
fn directory(partition: PartitionId) -> String {
    format!("{MANIFESTS}/{partition}")
}

fn segment_object(id: SegmentId) -> String {
    format!("{SEGMENTS}/{id}")
}

/// Returns a frame's bytes out of `read`, which starts at offset `begin` of the segment. The result
/// is shorter if `read` does not contain all of the frame.
fn frame_within(read: &Bytes, begin: u64, location: FrameLocation) -> Bytes {
    let start = location.offset.saturating_sub(begin) as usize;
    let end = start.saturating_add(location.length as usize);
    read.slice(start.min(read.len())..end.min(read.len()))
}

/// Segments and manifests in a store. Clones share the store and the caches.
#[derive(Clone, Debug)]
pub struct PageStore {
    store: Arc<Reliable>,
    indexes: Arc<Cache<SegmentId, Arc<SegmentIndex>, IndexWeight>>,
    /// Reads of indexes in progress.
    reading: Arc<SingleFlight<SegmentId, Result<Arc<SegmentIndex>, StoreError>>>,
    manifests: Arc<Cache<ManifestName, Arc<Manifest>, ManifestWeight>>,
    disk_cache: Option<Arc<DiskCache>>,
    /// Term for new segments and catalogs; 0 without a term.
    term: u32,
}

#[derive(Clone)]
struct IndexWeight;

impl Weighter<SegmentId, Arc<SegmentIndex>> for IndexWeight {
    fn weight(&self, _: &SegmentId, index: &Arc<SegmentIndex>) -> u64 {
        index.memory_bytes() as u64
    }
}

#[derive(Clone)]
struct ManifestWeight;

impl Weighter<ManifestName, Arc<Manifest>> for ManifestWeight {
    fn weight(&self, _: &ManifestName, manifest: &Arc<Manifest>) -> u64 {
        manifest.memory_bytes() as u64
    }
}

impl PageStore {
    /// Opens a page store on a store, with the default limits.
    pub fn open(store: Arc<dyn Store>) -> Self {
        PageStore {
            store: Arc::new(Reliable::new(store, Limits::default())),
            indexes: Arc::new(Cache::with_weighter(CACHED_INDEXES, INDEX_CACHE_BYTES, IndexWeight)),
            reading: Arc::default(),
            manifests: Arc::new(Cache::with_weighter(CACHED_MANIFESTS, MANIFEST_CACHE_BYTES, ManifestWeight)),
            disk_cache: None,
            term: 0,
        }
    }

    /// Adds a cache on the local disk, for a store that is slower than that.
    pub fn with_disk_cache(self, disk_cache: DiskCache) -> Self {
        PageStore { disk_cache: Some(Arc::new(disk_cache)), ..self }
    }

    /// Uses a term that this process has started.
    pub fn in_term(self, term: &Term) -> Self {
        PageStore { term: term.number, ..self }
    }

    /// Uses a term that a cluster has assigned to this process.
    pub fn in_assigned_term(self, term: u32) -> Self {
        PageStore { term, ..self }
    }

    /// Returns the cache on the local disk, if there is one.
    pub fn disk_cache(&self) -> Option<&DiskCache> {
        self.disk_cache.as_deref()
    }

    /// Returns the store, for other objects in it. Shares the counters.
    pub fn store(&self) -> &Reliable {
        &self.store
    }

    /// Opens a page store in a local directory, which must exist. Every write is synced.
    pub fn open_directory(directory: &FilePath) -> Result<Self, StoreError> {
        let opened = Backend::directory(directory);
        let store = opened.map_err(|failure| {
            StoreError::failed("open", "the store", format_args!("file://{}", directory.display()), failure)
        })?;
        Ok(Self::open(Arc::new(store)))
    }

    /// Number of reads that are useful to run concurrently. In a remote store, concurrent reads
    /// take as long as one. In a directory each read needs a thread, and starting a thread costs
    /// more than a read.
    pub fn read_concurrency(&self) -> usize {
        if self.store.directory().is_some() { 2 } else { 64 }
    }

    /// Returns the counters of the store's operations.
    pub fn statistics(&self) -> Vec<OperationStatistics> {
        self.store.statistics()
    }

    /// Stores a segment under a new name.
    pub async fn put_segment(&self, bytes: Bytes) -> Result<SegmentId, StoreError> {
        let id = self.new_segment();
        self.put(&segment_object(id), bytes).await?;
        Ok(id)
    }

    /// Starts a segment that is too large for memory. Its bytes are written incrementally.
    pub async fn segment_writer(&self) -> Result<SegmentWriter, StoreError> {
        Ok(SegmentWriter::new(self.new_segment(), self.clone()))
    }

    fn new_segment(&self) -> SegmentId {
        SegmentId::with_term(self.term, rand::random())
    }

    /// Returns a segment's index. The first call uses one ranged read, or two if the index is
    /// large. Concurrent calls share the reads.
    pub async fn segment_index(&self, id: SegmentId) -> Result<Arc<SegmentIndex>, StoreError> {
        if let Some(index) = self.indexes.get(&id) {
            return Ok(index);
        }
        let read = async {
            // Another caller may have read it in the meantime.
            if let Some(index) = self.indexes.get(&id) {
                return Ok(index);
            }
            let index = match self.cached_index(id).await {
                Some(index) => index,
                None => {
                    let (index, end) = self.read_index(id).await?;
                    self.cache_piece(Key::end(id), end);
                    index
                }
            };
            let index = Arc::new(index);
            self.indexes.insert(id, index.clone());
            Ok(index)
        };
        self.reading.run(id, read).await
    }

    /// Reads a segment's index. Also returns its encoded bytes.
    async fn read_index(&self, id: SegmentId) -> Result<(SegmentIndex, Bytes), StoreError> {
        let object = segment_object(id);
        let mut tail = self.get(&object, Span::Last(TAIL_BYTES)).await?;
        let damage = |at, cause| self.damaged_at(&object, at, cause);
        let needed = segment::tail_bytes(&tail.bytes).map_err(|cause| damage(tail.offset, cause))?;
        if needed > tail.bytes.len() as u64 {
            tail = self.get(&object, Span::Last(needed)).await?;
        }
        let index = SegmentIndex::decode(&tail.bytes).map_err(|cause| damage(tail.offset, cause))?;
        let begin = tail.bytes.len().saturating_sub(needed as usize);
        Ok((index, tail.bytes.slice(begin..)))
    }

    /// Reads one page into `page` with one ranged read. The location comes from the segment's
    /// index.
    pub async fn read_page(
        &self,
        id: SegmentId,
        location: FrameLocation,
        page: &mut Page,
    ) -> Result<(), StoreError> {
        if let Some(frame) = self.cached_frames(id, &[location], ReadHint::WillReuse).await.pop().flatten()
            && segment::decode_frame(&frame, page).is_ok()
        {
            return Ok(());
        }
        let object = segment_object(id);
        let span = Span::Range { offset: location.offset, bytes: location.length.into() };
        let frame = self.read_timed(self.get(&object, span)).await?.bytes;
        self.decode_frame(&object, location, &frame, page)?;
        self.cache_piece(Key::frame(id, location.offset), frame);
        Ok(())
    }

    /// Reads pages whose frames are consecutive, and appends them to `out`, with one ranged read.
    pub async fn read_pages(
        &self,
        id: SegmentId,
        locations: &[FrameLocation],
        reading: ReadHint,
        out: &mut Vec<u8>,
    ) -> Result<(), StoreError> {
        let cached = self.cached_frames(id, locations, reading).await;
        self.read_remaining(id, locations, cached, reading, out).await
    }

    /// As [`PageStore::read_pages`], if some frames are already available. Reads the range from the
    /// first to the last of the others.
    async fn read_remaining(
        &self,
        id: SegmentId,
        locations: &[FrameLocation],
        frames: Vec<Option<Bytes>>,
        reading: ReadHint,
        out: &mut Vec<u8>,
    ) -> Result<(), StoreError> {
        let object = segment_object(id);
        let others = || locations.iter().zip(&frames).filter(|(_, frame)| frame.is_none());
        let (mut read, mut begin) = (Bytes::new(), 0);
        if let (Some((first, _)), Some((last, _))) = (others().next(), others().next_back()) {
            begin = first.offset;
            let end = last.offset.saturating_add(last.length.into());
            let span = Span::Range { offset: begin, bytes: end.saturating_sub(begin) };
            read = self.get(&object, span).await?.bytes;
        }
        let mut page = ZERO_PAGE;
        for (location, cached) in locations.iter().zip(&frames) {
            let frame = cached.clone().unwrap_or_else(|| frame_within(&read, begin, *location));
            self.decode_frame(&object, *location, &frame, &mut page)?;
            out.extend_from_slice(&page);
            if cached.is_none() && reading == ReadHint::WillReuse {
                self.cache_piece(Key::frame(id, location.offset), frame);
            }
        }
        Ok(())
    }

    /// Lists all segments, in no particular order.
    pub async fn list_segments(&self) -> Result<Vec<SegmentId>, StoreError> {
        let parse = |object: &String| {
            let id = SegmentId(u128::from_str_radix(object.rsplit('/').next()?, 16).ok()?);
            (segment_object(id) == *object).then_some(id)
        };
        let mut segments = Vec::new();
        self.list_each(SEGMENTS, None, |objects| segments.extend(objects.iter().filter_map(parse))).await?;
        Ok(segments)
    }

    /// Returns true if a segment is in this store itself, and not only in a fallback of it.
    pub fn has_own_segment(&self, id: SegmentId) -> bool {
        self.store.directory().is_none_or(|directory| directory.join(segment_object(id)).exists())
    }

    /// Reads a part of a segment, for another node.
    pub async fn read_segment(&self, id: SegmentId, span: Span) -> Result<Piece, StoreError> {
        self.get(&segment_object(id), span).await
    }

    /// Deletes a segment. Succeeds if it does not exist.
    pub async fn delete_segment(&self, id: SegmentId) -> Result<(), StoreError> {
        self.indexes.remove(&id);
        self.delete(&segment_object(id)).await
    }

    /// Stores a manifest. [`StoreError::Exists`] if another one has the same name.
    pub async fn put_manifest(&self, manifest: &Manifest) -> Result<(), StoreError> {
        self.put(&ManifestName::of(manifest).object(), manifest.encode().into()).await
    }

    /// Returns a manifest for time-travel reads. It is read once and cached.
    pub async fn manifest(&self, name: ManifestName) -> Result<Arc<Manifest>, StoreError> {
        let read = async { self.read_manifest(name).await.map(Arc::new) };
        self.manifests.get_or_insert_async(&name, read).await
    }

    /// Reads a manifest from the store.
    pub async fn read_manifest(&self, name: ManifestName) -> Result<Manifest, StoreError> {
        let object = name.object();
        let bytes = self.get(&object, Span::Whole).await?.bytes;
        let manifest = Manifest::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        match ManifestName::of(&manifest) == name {
            true => Ok(manifest),
            false => Err(StoreError::WrongIdentity { object, store: self.store.to_string() }),
        }
    }

    /// Reads the partition's newest manifest up to an epoch: the last one of its newest epoch.
    /// Costs one listing, starting at the existing manifest `since` if given, and one read.
    /// [`StoreError::Missing`] if an anchor names a newer one.
    pub async fn latest_manifest(
        &self,
        partition: PartitionId,
        epoch: u32,
        since: Option<ManifestName>,
    ) -> Result<Option<Manifest>, StoreError> {
        self.latest(partition, epoch, since).await.map(|(manifest, _)| manifest)
    }

    /// As [`PageStore::latest_manifest`], and also returns the newest list of hot pages of exactly
    /// this epoch, which costs no further request.
    pub async fn latest(
        &self,
        partition: PartitionId,
        epoch: u32,
        since: Option<ManifestName>,
    ) -> Result<(Option<Manifest>, Option<HotPagesName>), StoreError> {
        let listed = self.list_since(partition, since).await?;
        self.check_anchors(&listed, partition, epoch)?;
        let hot_pages = listed.hot_pages.into_iter().rfind(|name| name.epoch == epoch);
        match listed.manifests.iter().rfind(|name| name.epoch <= epoch) {
            Some(name) => Ok((Some(self.read_manifest(*name).await?), hot_pages)),
            None => Ok((None, None)),
        }
    }

    /// Returns the name of the newest manifest up to an epoch, without reading it.
    pub async fn latest_name(
        &self,
        partition: PartitionId,
        epoch: u32,
        since: Option<ManifestName>,
    ) -> Result<Option<ManifestName>, StoreError> {
        let listed = self.list_since(partition, since).await?;
        Ok(listed.manifests.into_iter().rfind(|name| name.epoch <= epoch))
    }

    /// Lists the manifests of a partition, or of all partitions, sorted.
    pub async fn list_manifests(
        &self,
        partition: Option<PartitionId>,
    ) -> Result<Vec<ManifestName>, StoreError> {
        self.list_partitions(partition).await.map(|listed| listed.manifests)
    }

    /// Lists all objects except segments of a partition, or of all partitions.
    pub async fn list_partitions(
        &self,
        partition: Option<PartitionId>,
    ) -> Result<PartitionObjects, StoreError> {
        self.list_after(partition, None).await
    }

    /// Lists a partition's objects starting at a manifest, which is included if it exists.
    async fn list_since(
        &self,
        partition: PartitionId,
        since: Option<ManifestName>,
    ) -> Result<PartitionObjects, StoreError> {
        let before =
            since.and_then(|name| Some(ManifestName { number: name.number.checked_sub(1)?, ..name }));
        self.list_after(Some(partition), before.map(|name| name.object())).await
    }

    async fn list_after(
        &self,
        partition: Option<PartitionId>,
        after: Option<String>,
    ) -> Result<PartitionObjects, StoreError> {
        let below = partition.map_or_else(|| MANIFESTS.to_owned(), directory);
        let mut listed = PartitionObjects::default();
        self.list_each(&below, after, |objects| listed.add(&objects)).await?;
        listed.sort();
        Ok(listed)
    }

    /// Deletes a manifest. Succeeds if it does not exist.
    pub async fn delete_manifest(&self, name: ManifestName) -> Result<(), StoreError> {
        self.manifests.remove(&name);
        self.delete(&name.object()).await
    }

    async fn put(&self, object: &str, bytes: Bytes) -> Result<(), StoreError> {
        self.store.put(object, bytes).await.map_err(|failure| match failure.kind() {
            FailureKind::Exists => {
                StoreError::Exists { object: object.to_owned(), store: self.store.to_string() }
            }
            _ => StoreError::failed("store", object, &self.store, failure),
        })
    }

    async fn get(&self, object: &str, span: Span) -> Result<Piece, StoreError> {
        self.store.get(object, span).await.map_err(|failure| match failure.kind() {
            FailureKind::Missing => {
                StoreError::Missing { object: object.to_owned(), store: self.store.to_string() }
            }
            _ => StoreError::failed("read", object, &self.store, failure),
        })
    }

    async fn list(&self, below: &str) -> Result<Vec<String>, StoreError> {
        let mut names = Vec::new();
        self.list_each(below, None, |page| names.extend(page)).await?;
        Ok(names)
    }

    /// Passes the names below a directory that come after `after` to `visit`, page by page, because
    /// there may be many.
    async fn list_each(
        &self,
        below: &str,
        after: Option<String>,
        visit: impl FnMut(Vec<String>),
    ) -> Result<(), StoreError> {
        let listed = self.store.list_each(below, after, visit).await;
        listed.map_err(|failure| StoreError::failed("list", below, &self.store, failure))
    }

    async fn delete(&self, object: &str) -> Result<(), StoreError> {
        let deleted = self.store.delete(object).await;
        deleted.map_err(|failure| StoreError::failed("delete", object, &self.store, failure))
    }

    /// Decodes a frame of a segment. An error contains the offset in the segment.
    fn decode_frame(
        &self,
        object: &str,
        location: FrameLocation,
        frame: &[u8],
        page: &mut Page,
    ) -> Result<(), StoreError> {
        segment::decode_frame(frame, page).map_err(|cause| self.damaged_at(object, location.offset, cause))
    }

    /// Returns an error about damage in bytes that start at offset `start` of an object.
    fn damaged_at(&self, object: &str, start: u64, cause: FormatError) -> StoreError {
        let cause = FormatError { at: cause.at.saturating_add(start as usize), ..cause };
        StoreError::Damaged { object: object.to_owned(), store: self.store.to_string(), cause }
    }
}
