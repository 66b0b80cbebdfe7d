//! Pieces of segments that the disk cache has, where there is one, and what it is given to keep.
//!
//! What it answers is whole, and the piece that was asked for; if a page cannot be made of it all the same the store is asked.

use bytes::Bytes;
use fulmar_pages::{FrameLocation, SegmentId, SegmentIndex};
use tokio::time::Instant;

use super::{PageStore, StoreError};
use crate::disk_cache::{Key, Reading, Wanted};

impl PageStore {
    /// The frames that the disk cache has, in the places of their locations.
    pub(super) async fn cached_frames(
        &self,
        id: SegmentId,
        locations: &[FrameLocation],
        reading: Reading,
    ) -> Vec<Option<Bytes>> {
        let Some(cache) = &self.disk_cache else { return vec![None; locations.len()] };
        let wanted = |location: &FrameLocation| Wanted {
            key: Key::frame(id, location.offset),
            bytes: Some(location.length as usize),
        };
        let wanted: Vec<Wanted> = locations.iter().map(wanted).collect();
        cache.get(&wanted, reading).await
    }

    /// A segment's index, if the disk cache has it.
    pub(super) async fn cached_index(&self, id: SegmentId) -> Option<SegmentIndex> {
        let wanted = Wanted { key: Key::end(id), bytes: None };
        let end = self.disk_cache.as_ref()?.get(&[wanted], Reading::Again).await.pop().flatten()?;
        SegmentIndex::decode(&end).ok()
    }

    /// Reads one page from the store, and tells the disk cache how long that took.
    pub(super) async fn timed<T>(
        &self,
        read: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let Some(cache) = &self.disk_cache else { return read.await };
        let began = Instant::now();
        let read = read.await?;
        cache.read_from_store(began.elapsed());
        Ok(read)
    }

    /// Gives a piece to the disk cache.
    pub(super) fn keep(&self, key: Key, piece: Bytes) {
        if let Some(cache) = &self.disk_cache {
            cache.put(key, piece);
        }
    }
}
