//! A partition as a plain SQLite file.
//!
//! What a partition holds are the pages of an SQLite database, so an export is the pages of one version, in order. It
//! reads them where they are for good: it flushes the partition, as a copy by reference does, and then reads the
//! segments that the newest manifest names.
//!
//! ```text
//! flush -> manifest -> segments, kept from the collector -> page 1, page 2, ... to whoever reads, however slowly
//! ```
//!
//! So an export pins no snapshot. It takes as long as its reader wants, holds back nothing in memory but the index
//! (32 bytes a page, which count as the node's memory), brings no page into the cache, and nobody waits for it.

use std::sync::Arc;

use fulmar_pages::{PAGE_SIZE, PageNo, PartitionId, SegmentId};
use fulmar_store::Reading;

use crate::memory::Hold;
use crate::node::Node;
use crate::partition::{read_frames, store_error};
use crate::store::{Frame, Segments};
use crate::{Engine, Error, Result, sqlstate};

/// Memory for each page of the index.
const INDEX_ENTRY_BYTES: u64 = size_of::<(PageNo, Frame)>() as u64;
/// Pages that are read at once.
const RUN_PAGES: usize = 64;

/// The pages of a version, to be read in order.
pub struct Export {
    node: Arc<Node>,
    segments: Segments,
    /// Where the pages lie, in their order. One that was never written has none.
    frames: Vec<(PageNo, Frame)>,
    page_count: u32,
    /// The page that comes next, and its frame's place if it has one.
    next: PageNo,
    at: usize,
    /// Memory for the frames.
    _memory: Hold,
    /// Tells the collector what is being read.
    _held: Arc<Vec<SegmentId>>,
}

impl Engine {
    /// Begins to read all of a partition, as it is now (everything that was committed before is in it, and nothing later is)
    /// or was at a time (milliseconds since 1970).
    pub async fn export(&self, id: PartitionId, at_unix_ms: Option<u64>) -> Result<Export> {
        if at_unix_ms.is_none() && self.reads_beside() {
            // Its newest manifest may be a minute old, whatever the session has seen.
            let message =
                "this node reads the databases of another one, and cannot export them as they are now";
            return Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, message)
                .hint("Export it at the node that owns the store, or as it was (fulmar.as_of)."));
        }
        let (past, manifest) = self.manifest_of(id, at_unix_ms).await?;
        let page_count = manifest.as_ref().map_or(0, |manifest| manifest.page_count);
        // Before the index is read. A client that reads slowly holds it for as long as it likes.
        let memory = self.node().room(u64::from(page_count) * INDEX_ENTRY_BYTES).await?.hold();
        let segments = Segments::default();
        let mut frames = Vec::new();
        if let Some(manifest) = &manifest {
            let (found, _) = read_frames(self.node(), &segments, manifest).await?;
            frames = found.into_iter().collect();
            frames.sort_unstable_by_key(|(no, _)| *no);
        }
        let held = Arc::new(segments.all());
        self.node().exported.lock().push(Arc::downgrade(&held));
        drop(past);
        let node = self.node().clone();
        Ok(Export { node, segments, frames, page_count, next: 1, at: 0, _memory: memory, _held: held })
    }
}

impl Export {
    /// Bytes of the whole file.
    pub fn bytes(&self) -> u64 {
        u64::from(self.page_count) * PAGE_SIZE as u64
    }

    /// Appends the next pages to `out`, some 256 KiB at most. Answers whether there were any.
    pub async fn next(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        if self.next > self.page_count {
            return Ok(false);
        }
        let run = self.run();
        match run.first() {
            None => {
                out.resize(out.len() + PAGE_SIZE, 0);
                self.next += 1;
            }
            Some(first) => {
                let locations: Vec<_> = run.iter().map(|frame| frame.location).collect();
                let segment = self.segments.known(first.segment)?;
                self.node
                    .store
                    .read_pages(segment, &locations, Reading::Once, out)
                    .await
                    .map_err(store_error)?;
                self.next += locations.len() as PageNo;
                self.at += locations.len();
            }
        }
        Ok(true)
    }

    /// The frames from the next page on that lie one behind the other.
    fn run(&self) -> Vec<Frame> {
        let mut run: Vec<Frame> = Vec::new();
        for (no, frame) in self.frames.iter().skip(self.at).take(RUN_PAGES) {
            let follows = run.last().is_none_or(|last| {
                last.segment == frame.segment
                    && last.location.offset + u64::from(last.location.length) == frame.location.offset
            });
            if *no != self.next + run.len() as PageNo || !follows {
                break;
            }
            run.push(*frame);
        }
        run
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;
    use crate::memory::Reservation;

    async fn run(engine: &Arc<Engine>, id: PartitionId, sql: &str) {
        let mut session = engine.session(id);
        session.run(sql).await;
        session.close().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_export_that_does_not_fit_into_memory_is_refused() {
        const ID: PartitionId = PartitionId(7);
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
        run(&engine, ID, "CREATE TABLE t(x); INSERT INTO t VALUES (zeroblob(100000))").await;
        engine.flush().await.unwrap();
        // Nothing is left to be freed meanwhile.
        engine.partition(ID).await.unwrap().sweep();
        let memory = &engine.node().memory;
        let used_bytes = memory.used_bytes();
        let export = engine.export(ID, None).await.unwrap();
        let index_bytes = export.bytes() / PAGE_SIZE as u64 * INDEX_ENTRY_BYTES;
        assert!(index_bytes > 0);
        assert_eq!(memory.used_bytes(), used_bytes + index_bytes, "the index counts");
        drop(export);
        assert_eq!(memory.used_bytes(), used_bytes);

        let all = Reservation::unasked(memory.clone(), memory.limit_bytes()).hold();
        let refused = engine.export(ID, None).await.map(drop).unwrap_err();
        assert_eq!(refused.state(), sqlstate::OUT_OF_MEMORY);
        drop(all);
        assert!(engine.export(ID, None).await.is_ok());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_being_exported_is_not_collected() {
        const ID: PartitionId = PartitionId(7);
        let directory = tempfile::tempdir().unwrap();
        let engine = Engine::start(Config::new(directory.path(), 64 << 20)).await.unwrap();
        run(
            &engine,
            ID,
            "CREATE TABLE t(x); WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000) \
             INSERT INTO t SELECT hex(randomblob(300)) FROM n",
        )
        .await;
        let mut export = engine.export(ID, None).await.unwrap();
        let mut file = Vec::new();
        assert!(export.next(&mut file).await.unwrap());
        engine.drop_partition(ID).await.unwrap();
        engine.collect().await.unwrap();
        while export.next(&mut file).await.unwrap() {}
        assert_eq!(file.len() as u64, export.bytes());
        assert!(file.starts_with(b"SQLite format 3\0"));

        // When nobody reads it any more it is garbage.
        drop(export);
        engine.collect().await.unwrap();
        assert_eq!(engine.node().store.list_segments().await.unwrap(), []);
    }
}
