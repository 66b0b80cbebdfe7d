//! Stores a segment piece by piece.

use fulmar_pages::SegmentId;
use object_store::path::Path;
use object_store::{MultipartUpload, PutPayload};

use super::StoreError;

/// Object stores want parts of at least 5 MiB.
const PART_BYTES: usize = 8 << 20;

/// Stores a segment while it is being made. It exists when [`SegmentWriter::finish`] has returned, not before. Holds
/// one part of 8 MiB in memory.
pub struct SegmentWriter {
    id: SegmentId,
    path: Path,
    upload: Box<dyn MultipartUpload>,
    part: Vec<u8>,
}

impl SegmentWriter {
    pub(super) fn new(id: SegmentId, path: Path, upload: Box<dyn MultipartUpload>) -> Self {
        SegmentWriter { id, path, upload, part: Vec::new() }
    }

    /// Where the segment's next bytes go: for [`fulmar_pages::SegmentBuilder`], followed by [`SegmentWriter::flush`].
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.part
    }

    /// Sends what is in the buffer on its way, if it is enough for a part.
    pub async fn flush(&mut self) -> Result<(), StoreError> {
        match self.part.len() >= PART_BYTES {
            true => self.send().await,
            false => Ok(()),
        }
    }

    /// Sends the rest; the segment is stored.
    pub async fn finish(mut self) -> Result<SegmentId, StoreError> {
        self.send().await?;
        self.upload.complete().await.map_err(|cause| StoreError::failed("store", &self.path, cause))?;
        Ok(self.id)
    }

    /// Gives up: what was sent is removed.
    pub async fn abort(mut self) -> Result<(), StoreError> {
        self.upload.abort().await.map_err(|cause| StoreError::failed("give up", &self.path, cause))
    }

    async fn send(&mut self) -> Result<(), StoreError> {
        let payload = PutPayload::from(std::mem::take(&mut self.part));
        self.upload
            .put_part(payload)
            .await
            .map_err(|cause| StoreError::failed("store a part of", &self.path, cause))
    }
}
