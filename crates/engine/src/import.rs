//! A plain SQLite file as a new partition.
//!
//! ```text
//! bytes, as they come -> pages -> segment, in parts -> manifest: version 1 of the partition
//! ```
//!
//! The partition must be one that nobody knows of yet. Nothing of it is there until [`Import::finish`]; an import that is
//! dropped leaves nothing. What is in the pages is for SQLite to say: who imports runs `PRAGMA quick_check` before
//! anybody else sees the partition.
//!
//! Whether the partition's id is new, and the store still this process's, is checked when the import begins and again just before
//! its manifest is stored ([`Engine::put_first_manifest`]): the client may have taken hours in between.
//!
//! Page 1 is kept until the end and says then what is so: the number of pages, and that no write-ahead log is used.

use std::sync::Arc;

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{PAGE_SIZE, Page, PartitionId, Version};
use fulmar_store::SegmentWriter;

use crate::partition::{page_one, store_error};
use crate::{Engine, Error, Result, sqlstate};

/// Bytes of a segment that are collected before they are handed to the store.
const PIECE_BYTES: usize = 1 << 20;

/// What an SQLite file begins with.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";

/// How a file is made that can be imported.
const REMEDY: &str =
    "Make a copy that can be imported: sqlite3 OLD.db \"PRAGMA page_size = 4096; VACUUM INTO 'NEW.db'\"";

/// A file on its way in.
pub struct Import {
    engine: Arc<Engine>,
    id: PartitionId,
    writer: SegmentWriter,
    builder: SegmentBuilder,
    /// Bytes of the page that is not complete yet.
    partial: Vec<u8>,
    /// Page 1, once it has come.
    first: Option<Box<Page>>,
    /// Pages that have come.
    pages: u32,
}

impl Engine {
    /// Begins to fill a partition that is new. Refuses the id of one that has a manifest.
    pub async fn import(self: &Arc<Self>, id: PartitionId) -> Result<Import> {
        self.check_owner()?;
        self.node().disk.admit(true)?;
        self.check_new(id).await?;
        let mut writer = self.node().store.segment_writer().await.map_err(store_error)?;
        let builder = SegmentBuilder::new(writer.buffer());
        let partial = Vec::with_capacity(PAGE_SIZE);
        Ok(Import { engine: self.clone(), id, writer, builder, partial, first: None, pages: 0 })
    }
}

impl Import {
    /// Takes the next bytes of the file.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(bytes.len().min(PAGE_SIZE - self.partial.len()));
            self.partial.extend_from_slice(piece);
            bytes = rest;
            if let Ok(page) = <&Page>::try_from(self.partial.as_slice()) {
                let page = Box::new(*page);
                self.partial.clear();
                self.page(page).await?;
            }
        }
        Ok(())
    }

    async fn page(&mut self, page: Box<Page>) -> Result<()> {
        self.pages = self.pages.checked_add(1).ok_or_else(too_large)?;
        if self.pages == 1 {
            check_header(&page)?;
            self.first = Some(page);
            return Ok(());
        }
        self.builder.push(self.id, self.pages, &page, self.writer.buffer());
        if self.writer.buffer().len() > PIECE_BYTES {
            self.engine.node().disk.admit(true)?;
            self.writer.flush().await.map_err(store_error)?;
        }
        Ok(())
    }

    /// The file is complete: the partition is there, and durable. Answers its pages.
    pub async fn finish(mut self) -> Result<u32> {
        if !self.partial.is_empty() {
            // A first page of another size is told as what it is.
            if self.first.is_none() {
                check_header(&padded(&self.partial))?;
            }
            return Err(truncated());
        }
        let Some(mut first) = self.first.take() else { return Ok(0) };
        if page_one::page_count(&first) > self.pages && page_one::counter(&first) == valid_for(&first) {
            return Err(truncated());
        }
        first[page_one::ALLOCATION.start..page_one::ALLOCATION.start + 4]
            .copy_from_slice(&self.pages.to_be_bytes());
        first[18..20].fill(1);
        page_one::stamp(&mut first, 1);
        self.builder.push(self.id, 1, &first, self.writer.buffer());
        self.name_segment().await
    }

    async fn name_segment(mut self) -> Result<u32> {
        let node = self.engine.node();
        let bytes = self.builder.bytes();
        self.builder.finish(self.writer.buffer());
        let _unnamed = node.naming.enter();
        let segment = self.writer.finish().await.map_err(store_error)?;
        let manifest = Manifest {
            partition: self.id,
            version: Version { lineage: self.id.0, epoch: 1, number: 1 },
            page_count: self.pages,
            timestamp: node.clock.tick(),
            segments: vec![SegmentRef { id: segment, partition: self.id }],
            outcomes: Vec::new(),
            outcomes_horizon: node.clock.newest_id(),
        };
        self.engine.put_first_manifest(&manifest).await?;
        self.engine.maintenance.count_written(bytes);
        Ok(self.pages)
    }
}

/// Whether these are pages that can be ours.
fn check_header(page: &Page) -> Result<()> {
    if page[..16] != MAGIC[..] {
        return Err(Error::new(sqlstate::BAD_COPY_FILE, "this is no SQLite database")
            .hint("Rows are loaded with COPY or `fulmar tenant load`; SQL with psql -f."));
    }
    // 1 stands for 65536, which does not fit.
    let page_size = match u16::from_be_bytes([page[16], page[17]]) {
        1 => 65536,
        size => u32::from(size),
    };
    if page_size as usize != PAGE_SIZE {
        let message = format!("the database has pages of {page_size} bytes; they must have {PAGE_SIZE}");
        return Err(Error::new(sqlstate::BAD_COPY_FILE, message).hint(REMEDY));
    }
    if u32::from_be_bytes([page[56], page[57], page[58], page[59]]) > 1 {
        return Err(Error::new(
            sqlstate::BAD_COPY_FILE,
            "the database's texts are UTF-16; they must be UTF-8",
        )
        .hint("Make a copy that can be imported: sqlite3 OLD.db .dump | sqlite3 NEW.db"));
    }
    Ok(())
}

/// A page that begins with these bytes.
fn padded(bytes: &[u8]) -> Page {
    let mut page = [0; PAGE_SIZE];
    page[..bytes.len()].copy_from_slice(bytes);
    page
}

/// The change counter at which the header's number of pages was right.
fn valid_for(page: &Page) -> u32 {
    u32::from_be_bytes([page[92], page[93], page[94], page[95]])
}

fn truncated() -> Error {
    Error::new(sqlstate::BAD_COPY_FILE, "the database's end is missing")
        .hint(format!("Was it copied while it was in use? {REMEDY}"))
}

fn too_large() -> Error {
    Error::new(sqlstate::PROGRAM_LIMIT, "the database has more pages than there are numbers for")
        .hint("A database has at most 4,294,967,294 pages.")
}
