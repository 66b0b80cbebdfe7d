//! Stores a segment incrementally, as a multipart upload if it is large.
//!
//! # Aborted uploads
//!
//! Uploaded parts use space until their upload is completed or aborted. A writer that is dropped
//! before its segment is stored (because the store fails, the caller fails, or the task is
//! cancelled) therefore aborts its upload in a background task. Callers do not wait for a store
//! that has just failed, and cannot forget to abort. The task first waits for the part that is
//! being sent, and ends within the limits of two operations ([`crate::Limits`]). It creates no
//! object, so it is harmless after the end of a term. If a completion is still in progress, one of
//! the two takes effect first; no manifest references that segment.
//!
//! If the abort does not happen, because the process dies or the store does not respond, the
//! bucket's lifecycle rule removes the parts, or in a directory the next start
//! ([`crate::Backend::sweep`]).

use std::sync::Arc;

use bytes::Bytes;
use fulmar_pages::SegmentId;
use fulmar_pages::segment::{self, FrameLocation, SegmentIndex};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::{PageStore, StoreError, segment_object};
use crate::disk_cache::Key;
use crate::store::{Failure, FailureKind, Store, Upload};

/// Object stores require parts of at least 5 MiB; some require all parts except the last to have
/// the same size.
const PART_BYTES: usize = 8 << 20;
/// Once the buffer has this length, it reserves space for a whole part and for the bytes that are
/// appended with its end. Growing step by step would copy all of it and allocate fresh memory once
/// more.
const RESERVE_THRESHOLD_BYTES: usize = 1 << 20;
const BUFFER_CAPACITY_BYTES: usize = PART_BYTES + 2 * RESERVE_THRESHOLD_BYTES;

/// Stores a segment while it is being built. The segment exists once [`SegmentWriter::finish`] has
/// returned; if the writer is dropped before, it never will. A segment of up to 8 MiB is stored with a
/// single put. A larger one uses two parts of 8 MiB of memory, which are reused: one is sent while
/// the other one is filled.
pub struct SegmentWriter {
    id: SegmentId,
    object: String,
    store: PageStore,
    /// The upload, from the first part until its completion, unless a part is being sent.
    upload: Option<Box<dyn Upload>>,
    sending: Option<Sending>,
    part: Vec<u8>,
    bypasses_page_cache: bool,
}

/// A part that is being sent.
struct Sending {
    /// Returns the upload.
    task: JoinHandle<(Box<dyn Upload>, Result<(), Failure>)>,
    /// The part's memory.
    memory: Bytes,
}

impl SegmentWriter {
    pub(super) fn new(id: SegmentId, store: PageStore) -> Self {
        SegmentWriter {
            id,
            object: segment_object(id),
            store,
            upload: None,
            sending: None,
            part: Vec::new(),
            bypasses_page_cache: false,
        }
    }

    /// Writes a segment of more than 8 MiB past the operating system's page cache, if the store is a
    /// directory. For segments most of whose pages are not read soon: filling the page cache would
    /// take longer than everything else. To be called before the first [`SegmentWriter::flush`].
    pub fn bypass_page_cache(&mut self) {
        self.bypasses_page_cache = true;
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

    /// Uploads the buffer, as far as it contains complete parts. The last one may still be in progress
    /// on return: an error is then returned by the next call, or by [`SegmentWriter::finish`].
    pub async fn flush(&mut self) -> Result<(), StoreError> {
        if self.part.len() < PART_BYTES {
            if self.part.len() >= RESERVE_THRESHOLD_BYTES {
                self.part.reserve_exact(BUFFER_CAPACITY_BYTES.saturating_sub(self.part.len()));
            }
            return Ok(());
        }
        let memory = Bytes::from(std::mem::take(&mut self.part));
        let mut rest = memory.clone();
        while rest.len() >= PART_BYTES {
            let part = rest.split_to(PART_BYTES);
            let mut free = self.wait_until_sent().await?;
            free.clear();
            self.part = free;
            let mut upload = self.take_upload().await?;
            let task = tokio::spawn(async move {
                let sent = upload.part(part).await;
                (upload, sent)
            });
            self.sending = Some(Sending { task, memory: memory.clone() });
        }
        self.part.extend_from_slice(&rest);
        Ok(())
    }

    /// Waits for the part that is being sent. Returns its memory.
    async fn wait_until_sent(&mut self) -> Result<Vec<u8>, StoreError> {
        let Some(sending) = &mut self.sending else { return Ok(Vec::new()) };
        // If this future is dropped, the part remains in `sending`.
        let ended = (&mut sending.task).await;
        let memory = self.sending.take().map_or_else(Bytes::new, |sending| sending.memory);
        let (upload, sent) = ended.map_err(|panic| self.failed(Failure::new(FailureKind::Other, panic)))?;
        self.upload = Some(upload);
        sent.map_err(|failure| self.failed(failure))?;
        Ok(Vec::from(memory))
    }

    async fn take_upload(&mut self) -> Result<Box<dyn Upload>, StoreError> {
        match self.upload.take() {
            Some(upload) => Ok(upload),
            None => {
                let upload = self.store.store.upload(&self.object).await;
                let mut upload = upload.map_err(|failure| self.failed(failure))?;
                if self.bypasses_page_cache {
                    upload.bypass_page_cache();
                }
                Ok(upload)
            }
        }
    }

    fn failed(&self, failure: Failure) -> StoreError {
        StoreError::failed("store a part of", &self.object, &self.store.store, failure)
    }

    /// Uploads the rest and completes the segment. Adds its index to the caches, because the caller
    /// will need it next. (If a part boundary lies within the index, it is read later.)
    pub async fn finish(mut self) -> Result<SegmentId, StoreError> {
        self.flush().await?;
        self.wait_until_sent().await?;
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
        let Some(upload) = &mut self.upload else { return Ok(()) };
        if !rest.is_empty() {
            let sent = upload.part(rest).await;
            sent.map_err(|failure| self.failed(failure))?;
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
        let (idle, sending) = (self.upload.take(), self.sending.take());
        if idle.is_none() && sending.is_none() {
            return;
        }
        // Without a runtime, the process is ending.
        let Ok(runtime) = Handle::try_current() else { return };
        let object = std::mem::take(&mut self.object);
        runtime.spawn(async move {
            let upload = match sending {
                Some(sending) => sending.task.await.ok().map(|(upload, _)| upload),
                None => idle,
            };
            let Some(mut upload) = upload else { return };
            if let Err(failure) = upload.abort().await {
                tracing::debug!(object, %failure, "could not abort an upload");
            }
        });
    }
}
