//! Access to the disk cache for parts of segments.
//!
//! Data from the disk cache is complete and belongs to the requested key. If a page still cannot be
//! decoded from it, the store is read instead.

use bytes::Bytes;
use fulmar_pages::{FrameLocation, SegmentId, SegmentIndex};
use tokio::time::Instant;

use super::{PageStore, StoreError};
use crate::disk_cache::{CacheRequest, Key, ReadHint};

impl PageStore {
    /// Returns the frames that are in the disk cache, in the order of their locations.
    pub(super) async fn cached_frames(
        &self,
        id: SegmentId,
        locations: &[FrameLocation],
        reading: ReadHint,
    ) -> Vec<Option<Bytes>> {
        let Some(cache) = &self.disk_cache else { return vec![None; locations.len()] };
        let wanted = |location: &FrameLocation| CacheRequest {
            key: Key::frame(id, location.offset),
            bytes: Some(location.length as usize),
        };
        let wanted: Vec<CacheRequest> = locations.iter().map(wanted).collect();
        cache.get(&wanted, reading).await
    }

    /// Returns a segment's index if it is in the disk cache.
    pub(super) async fn cached_index(&self, id: SegmentId) -> Option<SegmentIndex> {
        let wanted = CacheRequest { key: Key::end(id), bytes: None };
        let end = self.disk_cache.as_ref()?.get(&[wanted], ReadHint::WillReuse).await.pop().flatten()?;
        SegmentIndex::decode(&end).ok()
    }

    /// Reads one page from the store, and reports the latency to the disk cache.
    pub(super) async fn read_timed<T>(
        &self,
        read: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let Some(cache) = &self.disk_cache else { return read.await };
        let began = Instant::now();
        let read = read.await?;
        cache.read_from_store(began.elapsed());
        Ok(read)
    }

    /// Adds data to the disk cache.
    pub(super) fn cache_piece(&self, key: Key, piece: Bytes) {
        if let Some(cache) = &self.disk_cache {
            cache.put(key, piece);
        }
    }
}
