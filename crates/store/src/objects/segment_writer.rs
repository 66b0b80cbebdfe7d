//! Stores a segment piece by piece.

use fulmar_pages::SegmentId;

use super::{PageStore, StoreError, segment_object};
use crate::store::{Store, Upload};

/// Object stores want parts of at least 5 MiB.
const PART_BYTES: usize = 8 << 20;

/// Stores a segment while it is being made. It exists when [`SegmentWriter::finish`] has returned, not before. Holds
/// one part of 8 MiB in memory; what is not larger than that is stored in one piece.
pub struct SegmentWriter {
    id: SegmentId,
    object: String,
    store: PageStore,
    upload: Option<Box<dyn Upload>>,
    part: Vec<u8>,
}

impl SegmentWriter {
    pub(super) fn new(id: SegmentId, store: PageStore) -> Self {
        SegmentWriter { id, object: segment_object(id), store, upload: None, part: Vec::new() }
    }

    /// Where the segment's next bytes go: for [`fulmar_pages::SegmentBuilder`], followed by [`SegmentWriter::flush`].
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.part
    }

    /// Sends what is in the buffer on its way, if it is enough for a part.
    pub async fn flush(&mut self) -> Result<(), StoreError> {
        if self.part.len() < PART_BYTES {
            return Ok(());
        }
        let bytes = std::mem::take(&mut self.part).into();
        let failed =
            |failure| StoreError::failed("store a part of", &self.object, &self.store.store, failure);
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => none.insert(self.store.store.upload(&self.object).await.map_err(failed)?),
        };
        upload.part(bytes).await.map_err(failed)
    }

    /// Sends the rest; the segment is stored.
    pub async fn finish(mut self) -> Result<SegmentId, StoreError> {
        let rest = std::mem::take(&mut self.part).into();
        let Some(mut upload) = self.upload else {
            self.store.put(&self.object, rest).await?;
            return Ok(self.id);
        };
        let stored = match upload.part(rest).await {
            Ok(()) => upload.complete().await,
            Err(failure) => Err(failure),
        };
        stored.map_err(|failure| StoreError::failed("store", &self.object, &self.store.store, failure))?;
        Ok(self.id)
    }

    /// Gives up: what was sent is removed.
    pub async fn abort(self) -> Result<(), StoreError> {
        let Some(mut upload) = self.upload else { return Ok(()) };
        let aborted = upload.abort().await;
        aborted.map_err(|failure| StoreError::failed("give up", &self.object, &self.store.store, failure))
    }
}
