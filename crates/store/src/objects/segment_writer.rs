//! Stores a segment piece by piece.
//!
//! # What is given up
//! Parts that were sent cost space until their upload is completed or aborted. So a writer that goes before its segment is stored,
//! for whatever reason (the store fails, its maker does, whoever waits is cancelled), aborts its upload, in a task of its own: nobody waits
//! for a store that has just failed, and nobody can forget it. The task ends within the bounds of an operation
//! ([`crate::Limits`]). It makes no object, so it does no harm behind the end of a term; and where a completion is still under way, the
//! one or the other comes first, and nobody names that segment. What even so is left (the process dies, the store does not
//! answer) the bucket's own rule removes, and in a directory the next start ([`crate::Backend::sweep`]).

use std::sync::Arc;

use bytes::Bytes;
use fulmar_pages::SegmentId;
use fulmar_pages::segment::{self, FrameLocation, SegmentIndex};
use tokio::runtime::Handle;

use super::{PageStore, StoreError, segment_object};
use crate::disk_cache::Key;
use crate::store::{Store, Upload};

/// Object stores want parts of at least 5 MiB; some want all but the last to be of one size.
const PART_BYTES: usize = 8 << 20;
/// A segment that has become so long gets room for a part, and for what comes with its last bytes. Growing as vectors do
/// would copy all of it, and take fresh memory from the system, once more.
const LONG_BYTES: usize = 1 << 20;
const ROOM_BYTES: usize = PART_BYTES + 2 * LONG_BYTES;

/// Stores a segment while it is being made. It exists when [`SegmentWriter::finish`] has returned, not before; one that is
/// dropped never will. Holds one part of 8 MiB in memory, in the same place for all; what is smaller than that is stored in one piece.
pub struct SegmentWriter {
    id: SegmentId,
    object: String,
    store: PageStore,
    /// From the first part on, until it is completed.
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

    /// The frame that was appended to the buffer last is likely to be read again: the disk cache keeps it, if there is one. (It may
    /// have it before the store has the segment, and whether or not there will be one: nobody asks for it before.)
    pub fn keep(&mut self, frame: FrameLocation) {
        if self.store.disk_cache.is_some() {
            let begin = self.part.len().saturating_sub(frame.length as usize);
            self.store.keep(Key::frame(self.id, frame.offset), Bytes::copy_from_slice(&self.part[begin..]));
        }
    }

    /// Sends what is in the buffer on its way, as far as it is enough for parts.
    pub async fn flush(&mut self) -> Result<(), StoreError> {
        if self.part.len() < PART_BYTES {
            if self.part.len() >= LONG_BYTES {
                self.part.reserve_exact(ROOM_BYTES.saturating_sub(self.part.len()));
            }
            return Ok(());
        }
        let mut bytes = Bytes::from(std::mem::take(&mut self.part));
        while bytes.len() >= PART_BYTES {
            self.send(bytes.split_to(PART_BYTES)).await?;
        }
        // The same memory, since the store has let go of the parts.
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

    /// Sends the rest; the segment is stored. The index is at the end of that: who has written a segment wants it next, and
    /// need not read it. (If a part ended in the midst of it, it is read.)
    pub async fn finish(mut self) -> Result<SegmentId, StoreError> {
        self.flush().await?;
        let rest = Bytes::from(std::mem::take(&mut self.part));
        let index = SegmentIndex::decode(&rest).ok();
        let end = segment::tail_bytes(&rest).ok().filter(|_| index.is_some());
        if let Some(bytes) = end {
            let begin = rest.len().saturating_sub(bytes as usize);
            // Its own bytes: the rest is not to wait with it.
            self.store.keep(Key::end(self.id), Bytes::copy_from_slice(&rest[begin..]));
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
        // Without a runtime the process ends.
        let Ok(runtime) = Handle::try_current() else { return };
        let object = std::mem::take(&mut self.object);
        runtime.spawn(async move {
            if let Err(failure) = upload.abort().await {
                tracing::debug!(object, %failure, "an upload could not be aborted");
            }
        });
    }
}
