//! Copies of partitions between nodes that have stores of their own, over a stream.
//!
//! ```text
//!   source                        destination
//!   opening                 ->    checks the journal
//!                           <-    hashes of its archive (`delta`)
//!   frames, frames, ...     ->    segment
//!   end of round, manifest  ->    segment and manifest are durable
//!                           <-    done
//!   frames ...                    (further rounds; the last one during the handover)
//! ```
//!
//! A copy as rows (`sql`) has one round, whose messages contain rows.
//!
//! # Late messages
//! A copy must not be stored after a newer one: the destination opens the newest manifest. Each stream
//! has an [`Attempt`], and the destination stores nothing of an attempt that is older than the newest
//! one that it has seen. If the destination restarts, its streams end, and no handover that a source
//! has begun can be applied: it compares the destination's incarnation.
//!
//! # Archives
//! What a node has stored of a partition that another node owns is its archive, which makes a move
//! back cheaper (`delta`). A node keeps the newest ones up to its budget (`--archives`), and deletes
//! the others, if no handover to this node can be applied any more: the journal, which the handover
//! compares, is not that of a migration to this node, or that is undone. The journal is read first,
//! then the owner.

use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::migration::{Journal, Mechanism, Step};
use fulmar_cluster::{NodeId, PartitionRecord, metadata};
use fulmar_engine::{Archive, ArchiveSize, Error, OutgoingCopy, Result, Timeline, sqlstate};
use fulmar_migrate::PageSource;
use fulmar_migrate::report::Round;
use fulmar_pages::{Manifest, PAGE_SIZE, PartitionId};
use fulmar_transport::{Error as TransportError, Stream};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::running::CopyStream;
use crate::Node;
use crate::assignments::{METADATA_TIMEOUT, metadata_unavailable, moved, protocol_error};
use crate::messages::{self, Answer, Attempt, CopyMode, CopyOpening, Opening, Request};

/// The first byte of a message with frames.
const FRAMES: u8 = 0;
/// The first byte of the message that ends a round. The manifest follows, if there is one.
const END_OF_ROUND: u8 = 1;
/// The first byte of a message with hashes of the destination's archive.
const ARCHIVED: u8 = 2;
/// The only byte of the message that follows them.
const END_OF_ARCHIVE: u8 = 3;
/// The first byte of a message with rows.
const ROWS: u8 = 4;
/// How long the destination may take to accept a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the destination may take to make a round durable.
const ROUND_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of pages in a request to read pages into memory.
const WARM_PAGES: usize = 1024;
/// How long the destination may take for such a request.
const WARM_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a node looks for archives that exceed the budget.
const TIDY_INTERVAL: Duration = Duration::from_secs(20);
/// How long the creation of a partition may take after its first manifest.
const CREATION_TIMEOUT: Duration = Duration::from_secs(3600);
/// The bits of a hybrid timestamp below its milliseconds.
const CLOCK_BITS: u32 = 16;

impl CopyStream {
    async fn stream(&mut self, node: &Node) -> Result<&mut Stream> {
        if self.stream.is_none() {
            let opening = Opening::Copy { copy: self.opening };
            let opened = timeout(SEND_TIMEOUT, node.open_stream(self.destination, &opening)).await;
            let opened = opened.map_err(|_| no_answer())?.map_err(|error| lost(&error))?;
            let stream = self.stream.insert(opened);
            if self.opening.mode == CopyMode::Patch {
                stream.widen();
                self.received_bytes += receive_archive(stream, &mut self.outgoing).await?;
            }
        }
        self.stream.as_mut().ok_or_else(no_answer)
    }

    async fn send(&mut self, node: &Node) -> Result<()> {
        let message = std::mem::take(&mut self.message);
        let stream = self.stream(node).await?;
        let sent = timeout(SEND_TIMEOUT, stream.send(&message)).await.map_err(|_| no_answer())?;
        if let Err(error) = sent {
            // The destination says why it has ended the stream.
            return Err(answer(stream).await.err().unwrap_or_else(|| lost(&error)));
        }
        self.message = message;
        Ok(())
    }

    /// Ends the round. The destination has made it durable on return.
    async fn end_round(&mut self, node: &Node) -> Result<()> {
        self.message.clear();
        self.message.push(END_OF_ROUND);
        if let Some(manifest) = self.outgoing.manifest() {
            let mut manifest = manifest.clone();
            if self.opening.mode != CopyMode::Segments {
                // The destination has segments of its own.
                manifest.segments.clear();
            }
            self.message.extend_from_slice(&manifest.encode());
        }
        self.send(node).await?;
        answer(self.stream(node).await?).await
    }
}

/// Receives the hashes of the destination's archive. Returns their size.
async fn receive_archive(stream: &mut Stream, outgoing: &mut OutgoingCopy) -> Result<u64> {
    let mut bytes = 0;
    loop {
        let received = timeout(ROUND_TIMEOUT, stream.receive()).await.map_err(|_| no_answer())?;
        let Some(message) = received.map_err(|error| lost(&error))? else { return Err(no_answer()) };
        bytes += message.len() as u64;
        match message.split_first() {
            Some((&ARCHIVED, list)) => outgoing.add_archived(list)?,
            Some((&END_OF_ARCHIVE, _)) => return Ok(bytes),
            _ => {
                let answer = messages::decode::<Answer>(&message);
                answer.map_err(|cause| Error::new(sqlstate::INTERNAL, cause))?.into_result()?;
                return Err(no_answer());
            }
        }
    }
}

/// The destination's answer.
async fn answer(stream: &mut Stream) -> Result<()> {
    let received = timeout(ROUND_TIMEOUT, stream.receive()).await.map_err(|_| no_answer())?;
    let Some(received) = received.map_err(|error| lost(&error))? else { return Err(no_answer()) };
    let answer = messages::decode::<Answer>(&received);
    answer.map_err(|cause| Error::new(sqlstate::INTERNAL, cause))?.into_result().map(drop)
}

fn no_answer() -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, "the destination does not answer")
        .hint("Check the nodes with \"fulmar node list\".")
}

fn unexpected() -> Error {
    Error::new(sqlstate::INTERNAL, "received an unexpected message of a copy")
}

fn lost(error: &TransportError) -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, format!("lost the connection to the destination: {error}"))
        .hint("Check the nodes with \"fulmar node list\".")
}

/// Sends the hashes of an archive to the source.
async fn send_archive(stream: &mut Stream, archive: &mut Archive) -> Result<()> {
    let mut message = vec![ARCHIVED];
    while archive.next(&mut message).await? {
        let sent = timeout(SEND_TIMEOUT, stream.send(&message)).await;
        sent.map_err(|_| no_answer())?.map_err(|error| lost(&error))?;
        message.truncate(1);
    }
    stream.send(&[END_OF_ARCHIVE]).await.map_err(|error| lost(&error))
}

/// The rounds of a copy.
pub(super) struct CopyRounds<'a> {
    pub node: &'a Node,
    pub copy: &'a mut CopyStream,
    pub timeline: Timeline,
    /// The partition was released: this is the last round.
    pub is_last: bool,
    pub max_bytes_per_s: Option<u64>,
}

impl CopyRounds<'_> {
    fn partition(&self) -> PartitionId {
        PartitionId(self.copy.opening.partition)
    }

    /// The destination, and the limit of the copy.
    fn link(&self) -> (NodeId, Option<u64>) {
        (self.copy.destination, self.max_bytes_per_s)
    }

    /// Sends the next rows. Returns the bytes sent; `None` at the end.
    async fn send_rows(&mut self) -> Result<Option<u64>> {
        let Some(rows) = &mut self.copy.rows else { return Ok(None) };
        self.copy.message.clear();
        self.copy.message.push(ROWS);
        if !rows.get_mut().next(&mut self.copy.message).await? {
            self.copy.rows = None;
            return Ok(None);
        }
        let bytes = self.copy.message.len() as u64;
        self.copy.send(self.node).await?;
        Ok(Some(bytes))
    }

    /// Lets the destination read the pages that this node has in memory.
    async fn warm(&self) -> Result<()> {
        let pages = self.node.partitions()?.pages_in_memory(self.partition());
        for pages in pages.chunks(WARM_PAGES) {
            let Timeline { lineage, epoch } = self.timeline;
            let (partition, pages) = (self.copy.opening.partition, pages.to_vec());
            let warm = Request::Warm { partition, lineage, epoch, pages };
            let warmed = timeout(WARM_TIMEOUT, self.node.call(self.copy.destination, warm)).await;
            warmed.map_err(|_| no_answer())?.map_err(|error| lost(&error))??;
        }
        Ok(())
    }
}

impl PageSource for CopyRounds<'_> {
    async fn begin_round(&mut self) -> Result<u64> {
        let outgoing = &mut self.copy.outgoing;
        let size = match self.is_last {
            true => outgoing.begin_last_round(self.timeline.epoch).await?,
            false => outgoing.begin_round().await?,
        };
        if let (CopyMode::Rows, Some(manifest)) = (self.copy.opening.mode, outgoing.manifest()) {
            self.copy.rows = Some(Mutex::new(self.node.partitions()?.read_rows(manifest).await?));
        }
        self.copy.opening.bytes = size.bytes;
        let is_first = self.copy.stream.is_none();
        self.copy.stream(self.node).await?;
        if is_first && !self.is_last {
            let bytes = size.pages * PAGE_SIZE as u64;
            self.node.show_rounds(self.partition(), &[], bytes, self.link()).await;
        }
        Ok(if self.copy.opening.mode == CopyMode::Segments { 0 } else { size.pages })
    }

    async fn send(&mut self) -> Result<Option<u64>> {
        if self.copy.opening.mode == CopyMode::Segments {
            return Ok(None);
        }
        if self.copy.opening.mode == CopyMode::Rows {
            return self.send_rows().await;
        }
        self.copy.message.clear();
        self.copy.message.push(FRAMES);
        if !self.copy.outgoing.next(&mut self.copy.message).await? {
            return Ok(None);
        }
        let received = std::mem::take(&mut self.copy.received_bytes);
        // The destination may have all of the pages.
        if self.copy.message.len() == 1 {
            return Ok(Some(received));
        }
        let bytes = self.copy.message.len() as u64;
        self.copy.send(self.node).await?;
        Ok(Some(bytes + received))
    }

    async fn end_round(&mut self, rounds: &[Round]) -> Result<()> {
        self.copy.end_round(self.node).await?;
        if self.is_last {
            return Ok(());
        }
        let pages = rounds.first().map_or(0, |round| round.pages);
        self.node.show_rounds(self.partition(), rounds, pages * PAGE_SIZE as u64, self.link()).await;
        self.warm().await
    }
}

impl Node {
    /// Begins a copy for a migration of a partition of this node.
    pub(super) async fn begin_copy(&self, partition: PartitionId, journal: &Journal) -> Result<CopyStream> {
        let timeline = self.timeline(partition).await?;
        let attempt = Attempt {
            migration: journal.number,
            incarnation: self.incarnation(),
            number: self.running.next_attempt(),
        };
        let opening = CopyOpening {
            partition: partition.0,
            attempt,
            lineage: timeline.lineage,
            timeline: timeline.epoch,
            bytes: 0,
            mode: match journal.options.mechanism {
                Mechanism::Delta => CopyMode::Patch,
                Mechanism::OnDemand => CopyMode::Segments,
                Mechanism::Sql => CopyMode::Rows,
                _ => CopyMode::Pages,
            },
        };
        let outgoing = self.partitions()?.copy_out(partition);
        let destination = journal.destination;
        let (stream, message) = (None, Vec::new());
        Ok(CopyStream { outgoing, rows: None, destination, opening, stream, message, received_bytes: 0 })
    }

    /// Receives a copy of another node's partition.
    pub(crate) async fn receive_copy(&self, opening: CopyOpening, mut stream: Stream) {
        if let Err(error) = self.receive(&opening, &mut stream).await {
            let partition = opening.partition;
            tracing::info!(partition, %error, "stopped receiving a copy of a database");
            // The source reads the answer when its next message is refused.
            let _ = stream.send(&messages::encode(&Answer::of(Err(error)))).await;
        }
    }

    async fn receive(&self, opening: &CopyOpening, stream: &mut Stream) -> Result<()> {
        let partition = PartitionId(opening.partition);
        let arriving = self.running.arriving(partition);
        let journal = self.check_copy(partition, opening.attempt.migration).await?;
        {
            let mut newest = arriving.newest.lock();
            *newest = (*newest).max(opening.attempt);
        }
        let check = || match *arriving.newest.lock() == opening.attempt {
            true => Ok(()),
            false => Err(Error::new(sqlstate::QUERY_CANCELED, "a newer copy of the partition was begun")),
        };
        let partitions = self.partitions()?;
        let timeline = Timeline { lineage: opening.lineage, epoch: opening.timeline };
        let begun = arriving.storing.lock().await;
        check()?;
        partitions.check_room(opening.bytes)?;
        let mut incoming = partitions.copy_in(partition, timeline, journal.epoch + 1).await?;
        if opening.mode == CopyMode::Patch {
            let Some(mut archive) = partitions.archive(partition, timeline).await? else {
                let text = format!("node \"{}\" has no archive of the database", self.name());
                return Err(Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, text).hint("Use \"live\"."));
            };
            send_archive(stream, &mut archive).await?;
            incoming.use_archive(&archive);
        }
        drop(begun);
        stream.widen();
        let mut rows = match opening.mode {
            CopyMode::Rows => Some(partitions.load_rows(partition, timeline).await?),
            _ => None,
        };
        while let Ok(Some(message)) = stream.receive().await {
            match message.split_first() {
                Some((&FRAMES, batch)) => incoming.frames(batch).await?,
                Some((&ROWS, part)) => match &mut rows {
                    Some(rows) => rows.push(part).await?,
                    None => return Err(unexpected()),
                },
                Some((&END_OF_ROUND, manifest)) => {
                    let manifest = (!manifest.is_empty()).then(|| Manifest::decode(manifest)).transpose();
                    let manifest = manifest.map_err(|cause| {
                        Error::new(sqlstate::DATA_CORRUPTED, format!("received a damaged manifest: {cause}"))
                    })?;
                    let loaded = match (opening.mode, &manifest, rows.take()) {
                        (CopyMode::Rows, Some(_), Some(rows)) => Some(rows.finish().await?),
                        (CopyMode::Rows, Some(_), None) => return Err(unexpected()),
                        _ => None,
                    };
                    let _storing = arriving.storing.lock().await;
                    check()?;
                    if let Some(loaded) = loaded {
                        loaded.store(&mut incoming).await?;
                    }
                    if let (CopyMode::Segments, Some(manifest)) = (opening.mode, &manifest) {
                        incoming.use_segments(manifest);
                    }
                    incoming.end_round(manifest).await?;
                    let done = stream.send(&messages::encode(&Answer::Done)).await;
                    done.map_err(|error| lost(&error))?;
                }
                _ => return Err(unexpected()),
            }
        }
        Ok(())
    }

    /// The journal of a copy to this node that may begin.
    async fn check_copy(&self, partition: PartitionId, migration: u64) -> Result<Journal> {
        if !self.is_private() {
            return Err(Error::new(
                sqlstate::FEATURE_NOT_SUPPORTED,
                "the nodes of this cluster share a store",
            ));
        }
        let journal = self.read_journal(partition).await?;
        let is_current = |journal: &Journal| {
            journal.number == migration
                && journal.destination == self.id()
                && matches!(journal.step, Step::Copying | Step::HandingOver)
        };
        let journal = journal.filter(is_current).ok_or_else(|| moved(partition))?;
        let record = self.read_record(partition).await?.ok_or_else(|| moved(partition))?;
        match record.epoch == journal.epoch && record.owner != self.id() {
            true => Ok(journal),
            false => Err(moved(partition)),
        }
    }

    async fn read_record(&self, partition: PartitionId) -> Result<Option<PartitionRecord>> {
        let read = timeout(METADATA_TIMEOUT, metadata::partition(self.environment(), partition)).await;
        let read = read.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))?;
        Ok(read.map(|read| read.record))
    }

    /// Returns true if this node owns a partition, serves pages of it, or may still get it. `record` was
    /// read after the journal.
    async fn may_own(&self, partition: PartitionId) -> Result<(bool, Option<PartitionRecord>)> {
        let journal = self.read_journal(partition).await?;
        let may_arrive = journal.is_some_and(|journal| {
            journal.destination == self.id() && matches!(journal.step, Step::Copying | Step::HandingOver)
        });
        let record = self.read_record(partition).await?;
        let is_needed = record
            .as_ref()
            .is_some_and(|record| record.owner == self.id() || record.page_server == Some(self.id()));
        Ok((may_arrive || is_needed, record))
    }

    /// Deletes the archive of a partition if it does not fit into the budget. Returns its size if it is
    /// kept.
    pub(crate) async fn tidy_archive(
        &self,
        partition: PartitionId,
        budget_bytes: u64,
    ) -> Result<Option<ArchiveSize>> {
        let arriving = self.running.arriving(partition);
        let _storing = arriving.storing.lock().await;
        let (false, record) = self.may_own(partition).await? else { return Ok(None) };
        let known = self.catalog().partition(partition);
        let (lineage, epoch) = known.as_ref().map_or((0, u32::MAX), |known| (known.lineage, known.epoch));
        let size = match self.partitions()?.archive_size(partition, Timeline { lineage, epoch }).await {
            Ok(size) => size,
            Err(error) if record.is_none() => return Err(error),
            // It is incomplete: its manifest is damaged, or was deleted.
            Err(_) => None,
        };
        let now_ms = self.environment().unix_time().as_millis() as u64;
        let may_be_creation = |size: &ArchiveSize| {
            let stored_ms = size.timestamp >> CLOCK_BITS;
            record.is_none() && now_ms < stored_ms + CREATION_TIMEOUT.as_millis() as u64
        };
        match size {
            // The contents of a partition without a record may be those of one that is being created.
            Some(size) if may_be_creation(&size) => Ok(None),
            // The archive of a dropped database is of no use.
            Some(size) if size.bytes <= budget_bytes && known.is_some() => Ok(Some(size)),
            _ => self.partitions()?.delete_copy(partition).await.map(|()| None),
        }
    }

    /// Deletes the archives that do not fit into the budget, oldest first.
    async fn tidy_archives(&self) -> Result<()> {
        let warn = |error: &Error| {
            tracing::warn!(%error, "cannot delete the pages of databases that were moved away; will retry");
        };
        let stored = self.partitions()?.stored_partitions().await?;
        let is_own = |id: &PartitionId| self.owners().owner(*id).is_some_and(|own| own.node == self.id());
        let mut kept = Vec::new();
        for partition in stored.into_iter().filter(|id| !is_own(id)) {
            match self.tidy_archive(partition, self.archive_bytes()).await {
                Ok(archive) => kept.extend(archive),
                Err(error) => warn(&error),
            }
        }
        kept.sort_unstable_by_key(|archive| std::cmp::Reverse(archive.timestamp));
        let mut left = self.archive_bytes();
        for archive in kept {
            left = match self.tidy_archive(archive.partition, left).await? {
                Some(size) => left.saturating_sub(size.bytes),
                None => left,
            };
        }
        Ok(())
    }

    /// Keeps the archives of this node within their budget, until the process ends.
    pub(crate) async fn keep_archives(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TIDY_INTERVAL).await;
            if let Err(error) = self.tidy_archives().await {
                tracing::warn!(%error, "cannot list the databases in this node's store; will retry");
            }
        }
    }
}
