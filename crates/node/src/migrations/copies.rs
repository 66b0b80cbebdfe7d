//! Copies of partitions between nodes that have stores of their own, over a stream.
//!
//! ```text
//!   source                        destination
//!   opening                 ->    checks the journal
//!   frames, frames, ...     ->    segment
//!   end of round, manifest  ->    segment and manifest are durable
//!                           <-    done
//!   frames ...                    (further rounds; the last one during the handover)
//! ```
//!
//! # Late messages
//! A copy must not be stored after a newer one: the destination opens the newest manifest. Each stream
//! has an [`Attempt`], and the destination stores nothing of an attempt that is older than the newest
//! one that it has seen. If the destination restarts, its streams end, and no handover that a source
//! has begun can be applied: it compares the destination's incarnation.
//!
//! # Deleting copies
//! A node deletes what it has stored of a partition if another node owns it, and no handover to this
//! node can be applied any more: the journal, which the handover compares, is not that of a migration
//! to this node, or that is undone. The journal is read first, then the owner.

use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::migration::{Journal, Step};
use fulmar_cluster::{NodeId, metadata};
use fulmar_engine::{Error, OutgoingCopy, Result, Timeline, sqlstate};
use fulmar_migrate::PageSource;
use fulmar_migrate::report::Round;
use fulmar_pages::{Manifest, PAGE_SIZE, PartitionId};
use fulmar_transport::{Error as TransportError, Stream};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::Node;
use crate::assignments::{METADATA_TIMEOUT, metadata_unavailable, moved, protocol_error};
use crate::messages::{self, Answer, Opening, Request};

/// The first byte of a message with frames.
const FRAMES: u8 = 0;
/// The first byte of the message that ends a round. The manifest follows, if there is one.
const END_OF_ROUND: u8 = 1;
/// How long the destination may take to accept a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the destination may take to make a round durable.
const ROUND_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of pages in a request to read pages into memory.
const WARM_PAGES: usize = 1024;
/// How long the destination may take for such a request.
const WARM_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a node looks for copies that it does not need.
const DELETE_INTERVAL: Duration = Duration::from_secs(20);

/// Orders the streams that copy a partition to a node: the migration, the source's incarnation, and a
/// number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Attempt {
    migration: u64,
    incarnation: u64,
    number: u64,
}

/// The first message of a copy.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CopyOpening {
    partition: u64,
    attempt: Attempt,
    lineage: u64,
    /// The epoch of the timeline.
    timeline: u32,
    /// The size of the first round.
    bytes: u64,
}

/// A partition that is, or was, copied to this node.
#[derive(Default)]
pub(super) struct Arriving {
    newest: Mutex<Attempt>,
    /// Held while something is stored or deleted.
    storing: tokio::sync::Mutex<()>,
}

/// The source's side of a copy.
pub(crate) struct CopyStream {
    outgoing: OutgoingCopy,
    destination: NodeId,
    opening: CopyOpening,
    /// `None` before the first round.
    stream: Option<Stream>,
    message: Vec<u8>,
}

impl CopyStream {
    /// The migration that it belongs to.
    pub(super) fn migration(&self) -> u64 {
        self.opening.attempt.migration
    }

    async fn stream(&mut self, node: &Node) -> Result<&mut Stream> {
        if self.stream.is_none() {
            let opening = Opening::Copy { copy: self.opening };
            let opened = timeout(SEND_TIMEOUT, node.open_stream(self.destination, &opening)).await;
            let opened = opened.map_err(|_| no_answer())?.map_err(|error| lost(&error))?;
            self.stream = Some(opened);
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
            // The destination has segments of its own.
            let manifest = Manifest { segments: Vec::new(), ..manifest.clone() };
            self.message.extend_from_slice(&manifest.encode());
        }
        self.send(node).await?;
        answer(self.stream(node).await?).await
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

fn lost(error: &TransportError) -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, format!("lost the connection to the destination: {error}"))
        .hint("Check the nodes with \"fulmar node list\".")
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
        self.copy.opening.bytes = size.bytes;
        self.copy.stream(self.node).await?;
        Ok(size.pages)
    }

    async fn send(&mut self) -> Result<Option<u64>> {
        self.copy.message.clear();
        self.copy.message.push(FRAMES);
        if !self.copy.outgoing.next(&mut self.copy.message).await? {
            return Ok(None);
        }
        let bytes = self.copy.message.len() as u64;
        self.copy.send(self.node).await?;
        Ok(Some(bytes))
    }

    async fn end_round(&mut self, rounds: &[Round]) -> Result<()> {
        self.copy.end_round(self.node).await?;
        if self.is_last {
            return Ok(());
        }
        let pages = rounds.first().map_or(0, |round| round.pages);
        self.node.show_rounds(self.partition(), rounds, pages * PAGE_SIZE as u64, self.max_bytes_per_s).await;
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
        };
        let outgoing = self.partitions()?.copy_out(partition);
        Ok(CopyStream {
            outgoing,
            destination: journal.destination,
            opening,
            stream: None,
            message: Vec::new(),
        })
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
        drop(begun);
        while let Ok(Some(message)) = stream.receive().await {
            match message.split_first() {
                Some((&FRAMES, batch)) => incoming.frames(batch).await?,
                Some((&END_OF_ROUND, manifest)) => {
                    let manifest = (!manifest.is_empty()).then(|| Manifest::decode(manifest)).transpose();
                    let manifest = manifest.map_err(|cause| {
                        Error::new(sqlstate::DATA_CORRUPTED, format!("received a damaged manifest: {cause}"))
                    })?;
                    let _storing = arriving.storing.lock().await;
                    check()?;
                    incoming.end_round(manifest).await?;
                    let done = stream.send(&messages::encode(&Answer::Done)).await;
                    done.map_err(|error| lost(&error))?;
                }
                _ => return Err(Error::new(sqlstate::INTERNAL, "received an unknown message of a copy")),
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

    async fn read_record(&self, partition: PartitionId) -> Result<Option<fulmar_cluster::PartitionRecord>> {
        let read = timeout(METADATA_TIMEOUT, metadata::partition(self.environment(), partition)).await;
        let read = read.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))?;
        Ok(read.map(|read| read.record))
    }

    /// Deletes what this node has stored of a partition, unless it owns it or may still get it.
    pub(super) async fn delete_unneeded_copy(&self, partition: PartitionId) -> Result<()> {
        let arriving = self.running.arriving(partition);
        let _storing = arriving.storing.lock().await;
        let journal = self.read_journal(partition).await?;
        let may_arrive = |journal: &Journal| {
            journal.destination == self.id() && matches!(journal.step, Step::Copying | Step::HandingOver)
        };
        if journal.as_ref().is_some_and(may_arrive) {
            return Ok(());
        }
        // A partition without a record may be being created.
        let Some(record) = self.read_record(partition).await? else { return Ok(()) };
        if record.owner == self.id() || record.page_server == Some(self.id()) {
            return Ok(());
        }
        self.partitions()?.delete_copy(partition).await
    }

    /// Deletes copies that this node does not need, until the process ends.
    pub(crate) async fn delete_unneeded_copies(self: Arc<Self>) {
        loop {
            tokio::time::sleep(DELETE_INTERVAL).await;
            let Ok(partitions) = self.partitions() else { continue };
            let stored = match partitions.stored_partitions().await {
                Ok(stored) => stored,
                Err(error) => {
                    tracing::warn!(%error, "cannot list the databases in this node's store; will retry");
                    continue;
                }
            };
            let is_own = |id: &PartitionId| self.owners().owner(*id).is_some_and(|own| own.node == self.id());
            for partition in stored.into_iter().filter(|id| !is_own(id)) {
                if let Err(error) = self.delete_unneeded_copy(partition).await {
                    let partition = partition.0;
                    tracing::warn!(partition, %error, "cannot delete the copy of a moved database; will retry");
                }
            }
        }
    }
}
