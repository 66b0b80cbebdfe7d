//! Import of a plain SQLite file as a new partition.
//!
//! ```text
//! stream of bytes -> pages -> segment, in parts -> manifest: version 1 of the partition
//! ```
//!
//! The partition must be unknown to all others. It does not exist until [`Import::finish`]; a
//! dropped import leaves nothing. The contents of the pages are not checked: the importer runs
//! `PRAGMA quick_check` before the partition becomes visible.
//!
//! When the import begins, and again just before its manifest is stored, two conditions are checked
//! ([`Maintenance::put_first_manifest`]): the partition's id is new, and the store is still this
//! process's. The client may have taken hours in between.
//!
//! Page 1 is held back until the end. Its header is then corrected: the number of pages, and no
//! write-ahead log.

use std::sync::Arc;

use fulmar_pages::manifest::{Manifest, SegmentRef};
use fulmar_pages::segment::SegmentBuilder;
use fulmar_pages::{PAGE_SIZE, Page, PartitionId, Version};
use fulmar_sqlite::{Error, Result, sqlstate};
use fulmar_store::SegmentWriter;

use crate::maintenance::Maintenance;
use fulmar_mvcc::{page_one, store_error};

/// Size of the parts in which a segment is handed to the store.
const PART_BYTES: usize = 1 << 20;

/// The first bytes of an SQLite file.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";

/// Hint on how to make a file that can be imported.
const REMEDY: &str =
    "Make a copy that can be imported: sqlite3 OLD.db \"PRAGMA page_size = 4096; VACUUM INTO 'NEW.db'\"";

/// An import in progress.
pub struct Import {
    maintenance: Arc<Maintenance>,
    id: PartitionId,
    writer: SegmentWriter,
    builder: SegmentBuilder,
    /// Bytes of the current, incomplete page.
    partial: Vec<u8>,
    /// Page 1, once received.
    first: Option<Box<Page>>,
    /// Number of pages received.
    pages: u32,
}

impl Maintenance {
    /// Begins to fill a new partition. Fails if a partition with this id has a manifest.
    pub async fn import(self: &Arc<Self>, id: PartitionId) -> Result<Import> {
        self.node().check_owner()?;
        self.node().disk.admit(true)?;
        self.check_new(id).await?;
        let mut writer = self.node().store.segment_writer().await.map_err(store_error)?;
        let builder = SegmentBuilder::new(writer.buffer());
        let partial = Vec::with_capacity(PAGE_SIZE);
        Ok(Import { maintenance: self.clone(), id, writer, builder, partial, first: None, pages: 0 })
    }
}

impl Import {
    /// Appends the next bytes of the file.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(PAGE_SIZE - self.partial.len()));
            self.partial.extend_from_slice(part);
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
        if self.writer.buffer().len() > PART_BYTES {
            self.maintenance.node().disk.admit(true)?;
            self.writer.flush().await.map_err(store_error)?;
        }
        Ok(())
    }

    /// Completes the import: the partition exists and is durable. Returns its number of pages.
    pub async fn finish(mut self) -> Result<u32> {
        if !self.partial.is_empty() {
            // Report a wrong page size as such, not as a truncated file.
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
        let node = self.maintenance.node();
        let bytes = self.builder.bytes();
        self.builder.finish(self.writer.buffer());
        let _unnamed = node.publication.enter();
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
        self.maintenance.put_first_manifest(&manifest).await?;
        self.maintenance.scheduler.count_written(bytes);
        Ok(self.pages)
    }
}

/// Checks that a file with this first page can be imported.
fn check_header(page: &Page) -> Result<()> {
    if page[..16] != MAGIC[..] {
        return Err(Error::new(sqlstate::BAD_COPY_FILE, "file is not an SQLite database")
            .hint("Use COPY or \"fulmar tenant load\" to load rows, and psql -f to run SQL."));
    }
    // The value 1 stands for 65536, which does not fit into 16 bits.
    let page_size = match u16::from_be_bytes([page[16], page[17]]) {
        1 => 65536,
        size => u32::from(size),
    };
    if page_size as usize != PAGE_SIZE {
        let message = format!("unsupported page size of {page_size} bytes; must be {PAGE_SIZE}");
        return Err(Error::new(sqlstate::BAD_COPY_FILE, message).hint(REMEDY));
    }
    if u32::from_be_bytes([page[56], page[57], page[58], page[59]]) > 1 {
        return Err(Error::new(sqlstate::BAD_COPY_FILE, "unsupported text encoding UTF-16; must be UTF-8")
            .hint("Make a copy that can be imported: sqlite3 OLD.db .dump | sqlite3 NEW.db"));
    }
    Ok(())
}

/// A page that begins with these bytes, padded with zeros.
fn padded(bytes: &[u8]) -> Page {
    let mut page = [0; PAGE_SIZE];
    page[..bytes.len()].copy_from_slice(bytes);
    page
}

/// The change counter for which the page count in the header is valid.
fn valid_for(page: &Page) -> u32 {
    u32::from_be_bytes([page[92], page[93], page[94], page[95]])
}

fn truncated() -> Error {
    Error::new(sqlstate::BAD_COPY_FILE, "database file is truncated")
        .hint(format!("The file may have been copied while it was in use. {REMEDY}"))
}

fn too_large() -> Error {
    Error::new(sqlstate::PROGRAM_LIMIT, "database too large: page count exceeds 4,294,967,294")
        .hint("A database has at most 4,294,967,294 pages.")
}
