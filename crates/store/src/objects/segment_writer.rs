//! Stores a segment incrementally, as a multipart upload if it is large.
//!
//! # Aborted uploads
//!
//! Uploaded parts use space until their upload is completed or aborted. A writer that is dropped
//! before its segment is stored (because the store fails, the caller fails, or the task is
//! cancelled) therefore aborts its upload in a background task. Callers do not wait for a store
//! that has just failed, and cannot forget to abort. The task ends within the limits of an
//! operation ([`crate::Limits`]). It creates no object, so it is harmless after the end of a term.
//! If a completion is still in progress, one of the two takes effect first; no manifest references
//! that segment.
//!
//! If the abort does not happen, because the process dies or the store does not respond, the
//! bucket's lifecycle rule removes the parts, or in a directory the next start
//! ([`crate::Backend::sweep`]).

use std::sync::Arc;

use bytes::Bytes;
use fulmar_pages::SegmentId;
use fulmar_pages::segment::{self, FrameLocation, SegmentIndex};
use tokio::runtime::Handle;

use super::{PageStore, StoreError, segment_object};
use crate::disk_cache::Key;
use crate::store::{Store, Upload};

/// Object stores require parts of at least 5 MiB; some require all parts except the last to have
/// the same size.
const PART_BYTES: usize = 8 << 20;
/// Once the buffer has this length, it reserves space for a whole part and for the bytes that are
/// appended with its end. Growing step by step would copy all of it and allocate fresh memory once
/// more.
const RESERVE_THRESHOLD_BYTES: usize = 1 << 20;
const BUFFER_CAPACITY_BYTES: usize = PART_BYTES + 2 * RESERVE_THRESHOLD_BYTES;

/// Stores a segment while it is being built. The segment exists once [`SegmentWriter::finish`] has
/// returned; if the writer is dropped before, it never will. Uses one part of 8 MiB of memory,
/// which is reused for all parts. A smaller segment is stored with a single put.
pub struct SegmentWriter {
    id: SegmentId,
    object: String,
    store: PageStore,
    /// The upload, from the first part until its completion.
    upload: Option<Box<dyn Upload>>,
    part: Vec<u8>,
}

impl SegmentWriter {
    pub(super) fn new(id: SegmentId, store: PageStore) -> Self {
        SegmentWriter { id, object: segment_object(id), store, upload: None, part: Vec::new() }
    }

    /// Buffer for the segment's next bytes. Used by [`fulmar_pages::SegmentBuilder`], followed by
    /// [`SegmentWriter::flush`].
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.part
    }

    /// Stores the frame that was appended last in the disk cache, if there is one, because it is
    /// likely to be read again. The disk cache may contain it before the segment is stored, or even
    /// if it never is; nothing requests it before.
    pub fn cache_last_frame(&mut self, frame: FrameLocation) {
        if self.store.disk_cache.is_some() {
            let begin = self.part.len().saturating_sub(frame.length as usize);
            self.store
                .cache_piece(Key::frame(self.id, frame.offset), Bytes::copy_from_slice(&self.part[begin..]));
        }
    }

    /// Uploads the buffer, as far as it contains complete parts.
    pub async fn flush(&mut self) -> Result<(), StoreError> {
        if self.part.len() < PART_BYTES {
            if self.part.len() >= RESERVE_THRESHOLD_BYTES {
                self.part.reserve_exact(BUFFER_CAPACITY_BYTES.saturating_sub(self.part.len()));
            }
            return Ok(());
        }
        let mut bytes = Bytes::from(std::mem::take(&mut self.part));
        while bytes.len() >= PART_BYTES {
            self.send(bytes.split_to(PART_BYTES)).await?;
        }
        // Reuses the same memory, because the store has released the parts.
        self.part = Vec::from(bytes);
        Ok(())
    }

    async fn send(&mut self, part: Bytes) -> Result<(), StoreError> {
        let failed =
            |failure| StoreError::failed("store a part of", &self.object, &self.store.store, failure);
        let upload = match &mut self.upload {
            Some(upload) => upload,
            none => none.insert(self.store.store.upload(&self.object).await.map_err(failed)?),
        };
        upload.part(part).await.map_err(failed)
    }

    /// Uploads the rest and completes the segment. Adds its index to the caches, because the caller
    /// will need it next. (If a part boundary lies within the index, it is read later.)
    pub async fn finish(mut self) -> Result<SegmentId, StoreError> {
        self.flush().await?;
        let rest = Bytes::from(std::mem::take(&mut self.part));
        let index = SegmentIndex::decode(&rest).ok();
        let end = segment::tail_bytes(&rest).ok().filter(|_| index.is_some());
        if let Some(bytes) = end {
            let begin = rest.len().saturating_sub(bytes as usize);
            // A copy, so that the cache does not keep the whole rest in memory.
            self.store.cache_piece(Key::end(self.id), Bytes::copy_from_slice(&rest[begin..]));
        }
        match self.upload.is_none() {
            true => self.store.put(&self.object, rest).await?,
            false => self.complete(rest).await?,
        }
        if let Some(index) = index {
            self.store.indexes.insert(self.id, Arc::new(index));
        }
        Ok(self.id)
    }

    async fn complete(&mut self, rest: Bytes) -> Result<(), StoreError> {
        if !rest.is_empty() {
            self.send(rest).await?;
        }
        let Some(upload) = &mut self.upload else { return Ok(()) };
        let completed = upload.complete().await;
        completed.map_err(|failure| StoreError::failed("store", &self.object, &self.store.store, failure))?;
        self.upload = None;
        Ok(())
    }
}

impl Drop for SegmentWriter {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        // Without a runtime, the process is ending.
        let Ok(runtime) = Handle::try_current() else { return };
        let object = std::mem::take(&mut self.object);
        runtime.spawn(async move {
            if let Err(failure) = upload.abort().await {
                tracing::debug!(object, %failure, "could not abort an upload");
            }
        });
    }
}
