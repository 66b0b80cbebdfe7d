//! Segments and manifests as objects of an object store.
//!
//! ```text
//!   segments/0123456789abcdef0123456789abcdef                    random id
//!   manifests/0000000000000007/00000002/000000000000005a         partition/epoch/number, so that names sort
//! ```
//!
//! Everything is created only if absent and never changed. A manifest that is there already with the same contents
//! counts as written (a put whose answer was lost); with other contents it means that somebody else writes for the
//! partition.
//!
//! Each call touches its objects once and caches nothing: caches and retries belong to the caller, who knows what is
//! worth keeping. Any [`ObjectStore`] will do; [`PageStore::open_directory`] makes one of a local directory, with every
//! write synced (file and directory) before the call returns.

mod adopt;
mod error;
mod segment_writer;
mod verify;

use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use fulmar_pages::{
    FormatError, FrameLocation, Manifest, Page, PartitionId, SegmentId, SegmentIndex, ZERO_PAGE, segment,
};
use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};

pub use error::StoreError;
pub use segment_writer::SegmentWriter;

const SEGMENTS: &str = "segments";
const MANIFESTS: &str = "manifests";

/// What is read at a segment's end at first: the index of up to some 10,000 pages and the footer.
const TAIL_BYTES: u64 = 64 << 10;

/// Names a manifest. In the order of a partition's manifests: a later one is greater.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ManifestName {
    /// Whose manifest it is.
    pub partition: PartitionId,
    /// Its version's epoch.
    pub epoch: u32,
    /// Its version's number.
    pub number: u64,
}

impl ManifestName {
    /// The name of this manifest.
    pub fn of(manifest: &Manifest) -> Self {
        let version = manifest.version;
        ManifestName { partition: manifest.partition, epoch: version.epoch, number: version.number }
    }

    fn path(&self) -> Path {
        epoch_path(self.partition, self.epoch).join(format!("{:016x}", self.number))
    }

    fn parse(path: &Path) -> Option<Self> {
        let mut parts = path.as_ref().split('/');
        let mut next = || parts.next();
        if next()? != MANIFESTS {
            return None;
        }
        let name = ManifestName {
            partition: PartitionId(u64::from_str_radix(next()?, 16).ok()?),
            epoch: u32::from_str_radix(next()?, 16).ok()?,
            number: u64::from_str_radix(next()?, 16).ok()?,
        };
        (name.path() == *path).then_some(name)
    }
}

fn partition_path(partition: PartitionId) -> Path {
    Path::from(MANIFESTS).join(partition.to_string())
}

fn epoch_path(partition: PartitionId, epoch: u32) -> Path {
    partition_path(partition).join(format!("{epoch:08x}"))
}

fn segment_path(id: SegmentId) -> Path {
    Path::from(SEGMENTS).join(id.to_string())
}

/// Segments and manifests in an object store. Clones share it.
#[derive(Clone, Debug)]
pub struct PageStore {
    objects: Arc<dyn ObjectStore>,
    /// Where they lie, if that is a local directory.
    directory: Option<PathBuf>,
}

impl PageStore {
    /// Keeps segments and manifests in this object store.
    pub fn open(objects: Arc<dyn ObjectStore>) -> Self {
        PageStore { objects, directory: None }
    }

    /// Keeps them in a local directory, which must exist. Every write is synced.
    pub fn open_directory(directory: &FilePath) -> Result<Self, StoreError> {
        let objects = LocalFileSystem::new_with_prefix(directory)
            .map_err(|cause| StoreError::failed("open the store in", directory.display(), cause))?;
        let objects = Arc::new(objects.with_fsync(true));
        Ok(PageStore { objects, directory: Some(directory.to_owned()) })
    }

    /// Stores the bytes of a segment under a new random name.
    pub async fn put_segment(&self, bytes: Bytes) -> Result<SegmentId, StoreError> {
        let id = SegmentId(rand::random());
        let path = segment_path(id);
        let outcome = self.objects.put_opts(&path, bytes.into(), create()).await;
        outcome.map_err(|cause| StoreError::failed("store", &path, cause))?;
        Ok(id)
    }

    /// Begins a segment that is too large for memory: its bytes are handed over as they come.
    pub async fn segment_writer(&self) -> Result<SegmentWriter, StoreError> {
        let id = SegmentId(rand::random());
        let path = segment_path(id);
        let upload = self.objects.put_multipart(&path).await;
        Ok(SegmentWriter::new(
            id,
            path.clone(),
            upload.map_err(|cause| StoreError::failed("begin to store", &path, cause))?,
        ))
    }

    /// Reads a segment's index: one ranged read, or two if it is large.
    pub async fn segment_index(&self, id: SegmentId) -> Result<Arc<SegmentIndex>, StoreError> {
        let path = segment_path(id);
        let (mut start, mut tail) = self.read_tail(&path, TAIL_BYTES).await?;
        let needed = segment::tail_bytes(&tail).map_err(|cause| damaged_at(&path, start, cause))?;
        if needed > tail.len() as u64 {
            (start, tail) = self.read_tail(&path, needed).await?;
        }
        SegmentIndex::decode(&tail).map(Arc::new).map_err(|cause| damaged_at(&path, start, cause))
    }

    /// Reads one page: one ranged read. The location comes from the segment's index.
    pub async fn read_page(&self, id: SegmentId, location: FrameLocation) -> Result<Box<Page>, StoreError> {
        let path = segment_path(id);
        let end = location.offset.saturating_add(location.length.into());
        let frame = self.read(&path, GetRange::Bounded(location.offset..end)).await?;
        let mut page = Box::new(ZERO_PAGE);
        decode_frame_at(&path, location, &frame, &mut page)?;
        Ok(page)
    }

    /// Reads pages that lie one behind the other, and appends them to `out`: one ranged read.
    pub async fn read_pages(
        &self,
        id: SegmentId,
        locations: &[FrameLocation],
        out: &mut Vec<u8>,
    ) -> Result<(), StoreError> {
        let (Some(first), Some(last)) = (locations.first(), locations.last()) else { return Ok(()) };
        let path = segment_path(id);
        let end = last.offset.saturating_add(last.length.into());
        let frames = self.read(&path, GetRange::Bounded(first.offset..end)).await?;
        let mut page = ZERO_PAGE;
        for location in locations {
            let start = location.offset.saturating_sub(first.offset) as usize;
            let frame = frames.get(start..start.saturating_add(location.length as usize));
            decode_frame_at(&path, *location, frame.unwrap_or_default(), &mut page)?;
            out.extend_from_slice(&page);
        }
        Ok(())
    }

    /// The segments that there are, in no particular order.
    pub async fn list_segments(&self) -> Result<Vec<SegmentId>, StoreError> {
        let paths = self.list(&Path::from(SEGMENTS)).await?;
        let parse = |path: &Path| {
            let id = SegmentId(u128::from_str_radix(path.filename()?, 16).ok()?);
            (segment_path(id) == *path).then_some(id)
        };
        Ok(paths.iter().filter_map(parse).collect())
    }

    /// Deletes a segment; no error if there is none.
    pub async fn delete_segment(&self, id: SegmentId) -> Result<(), StoreError> {
        self.delete(&segment_path(id)).await
    }

    /// Stores a manifest under its name. [`StoreError::Exists`] if another one has that name.
    pub async fn put_manifest(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let path = ManifestName::of(manifest).path();
        let bytes = Bytes::from(manifest.encode());
        match self.objects.put_opts(&path, PutPayload::from(bytes.clone()), create()).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::AlreadyExists { .. }) => match self.read_all(&path).await? == bytes {
                true => Ok(()),
                false => Err(StoreError::Exists { object: path.to_string() }),
            },
            Err(cause) => Err(StoreError::failed("store", &path, cause)),
        }
    }

    /// Reads a manifest.
    pub async fn read_manifest(&self, name: ManifestName) -> Result<Manifest, StoreError> {
        let path = name.path();
        let manifest =
            Manifest::decode(&self.read_all(&path).await?).map_err(|cause| damaged(&path, cause))?;
        match ManifestName::of(&manifest) == name {
            true => Ok(manifest),
            false => Err(StoreError::Misnamed { object: path.to_string() }),
        }
    }

    /// The partition's newest manifest: the last of its newest epoch.
    pub async fn latest_manifest(&self, partition: PartitionId) -> Result<Option<Manifest>, StoreError> {
        let prefix = partition_path(partition);
        let epochs = self.objects.list_with_delimiter(Some(&prefix)).await;
        let mut epochs = match epochs {
            Ok(listing) => listing.common_prefixes,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(cause) => return Err(StoreError::failed("list", &prefix, cause)),
        };
        epochs.sort_unstable();
        // An epoch may have lost all its manifests.
        for epoch in epochs.iter().rev() {
            let names = self.list(epoch).await?;
            if let Some(name) = names.iter().filter_map(ManifestName::parse).max() {
                return self.read_manifest(name).await.map(Some);
            }
        }
        Ok(None)
    }

    /// The names of a partition's manifests (without one: of all partitions'), sorted.
    pub async fn list_manifests(
        &self,
        partition: Option<PartitionId>,
    ) -> Result<Vec<ManifestName>, StoreError> {
        let prefix = partition.map_or_else(|| Path::from(MANIFESTS), partition_path);
        let mut names: Vec<_> = self.list(&prefix).await?.iter().filter_map(ManifestName::parse).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Deletes a manifest; no error if there is none.
    pub async fn delete_manifest(&self, name: ManifestName) -> Result<(), StoreError> {
        self.delete(&name.path()).await
    }

    async fn read(&self, path: &Path, range: GetRange) -> Result<Bytes, StoreError> {
        self.get(path, GetOptions { range: Some(range), ..GetOptions::default() }).await
    }

    /// The last bytes of an object, and where in it they begin.
    async fn read_tail(&self, path: &Path, bytes: u64) -> Result<(u64, Bytes), StoreError> {
        let options = GetOptions { range: Some(GetRange::Suffix(bytes)), ..GetOptions::default() };
        let failed = |cause| StoreError::failed("read", path, cause);
        let result = self.objects.get_opts(path, options).await.map_err(failed)?;
        let start = result.range.start;
        Ok((start, result.bytes().await.map_err(failed)?))
    }

    async fn read_all(&self, path: &Path) -> Result<Bytes, StoreError> {
        self.get(path, GetOptions::default()).await
    }

    async fn get(&self, path: &Path, options: GetOptions) -> Result<Bytes, StoreError> {
        let bytes = match self.objects.get_opts(path, options).await {
            Ok(result) => result.bytes().await,
            Err(cause) => Err(cause),
        };
        bytes.map_err(|cause| StoreError::failed("read", path, cause))
    }

    async fn list(&self, prefix: &Path) -> Result<Vec<Path>, StoreError> {
        let paths = self.objects.list(Some(prefix)).map_ok(|object| object.location).try_collect().await;
        match paths {
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            other => other.map_err(|cause| StoreError::failed("list", prefix, cause)),
        }
    }

    async fn delete(&self, path: &Path) -> Result<(), StoreError> {
        match self.objects.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(cause) => Err(StoreError::failed("delete", path, cause)),
        }
    }
}

/// Decodes a frame of a segment. An error tells the place in the segment.
fn decode_frame_at(
    path: &Path,
    location: FrameLocation,
    frame: &[u8],
    page: &mut Page,
) -> Result<(), StoreError> {
    segment::decode_frame(frame, page).map_err(|cause| damaged_at(path, location.offset, cause))
}

fn create() -> PutOptions {
    PutOptions { mode: PutMode::Create, ..PutOptions::default() }
}

/// The same, of what was read from the place `start` on.
fn damaged_at(path: &Path, start: u64, cause: FormatError) -> StoreError {
    damaged(path, FormatError { at: cause.at.saturating_add(start as usize), ..cause })
}

fn damaged(path: &Path, cause: FormatError) -> StoreError {
    StoreError::Damaged { object: path.to_string(), cause }
}
