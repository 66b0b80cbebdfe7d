//! Pages of partitions that were moved to this node before they were copied (on demand).
//!
//! The record of such a partition names the node that still has its segments, the page server. This
//! node reads a part of a segment from there when it needs it ([`PulledSegments`]), and copies all of
//! them in the background. Then the record changes, and the page server deletes them or keeps them as
//! an archive ([`crate::migrations`]).
//!
//! | killed | what happens |
//! | --- | --- |
//! | the page server | pages that were not copied cannot be read until it is back: statements that need them fail with 58030 |
//! | the owner | its next incarnation finds the page server in the record, and continues |
//! | the owner after the last segment, before the record has changed | the same; it finds nothing to copy |

mod servers;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::{ManifestName, NodeId, migration};
use fulmar_engine::{Error, Result, sqlstate};
use fulmar_pages::{PageNo, PartitionId, SegmentId};
use fulmar_store::{Failure, FailureKind, Fallback, Piece, Span};
use fulmar_transport::{Stream, WINDOW_BYTES};
use tokio::time::timeout;

use crate::Node;
use crate::assignments::protocol_error;
use crate::messages::{self, Answer, Opening, Request, SegmentOpening, SegmentPart};
pub(crate) use servers::PageServers;

/// Maximum length of a part that is requested.
const MAX_PART_BYTES: u64 = 64 << 20;
/// Length of the messages that contain it.
const CHUNK_BYTES: usize = 512 << 10;
/// How long a page server may take for a message.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a node continues to copy the pages of its partitions.
const PULL_INTERVAL: Duration = Duration::from_secs(5);

/// Reads segments that this node does not have from page servers.
pub struct PulledSegments(Weak<Node>);

impl PulledSegments {
    /// The segments of the page servers of a node.
    pub fn of(node: &Arc<Node>) -> Self {
        PulledSegments(Arc::downgrade(node))
    }
}

impl fmt::Debug for PulledSegments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PulledSegments")
    }
}

#[async_trait]
impl Fallback for PulledSegments {
    async fn get(&self, name: &str, span: Span) -> Option<std::result::Result<Piece, Failure>> {
        let segment = name.strip_prefix("segments/")?;
        let node = self.0.upgrade()?;
        let mut last = None;
        for server in node.page_servers.distinct() {
            match node.read_remote_segment(server, segment, span).await {
                Ok(Some(piece)) => return Some(Ok(piece)),
                Ok(None) => {}
                Err(error) => {
                    let name = node.owners().node(server).map_or_else(|| server.to_string(), |it| it.name);
                    let text = format!("it is still at node \"{name}\": {error}");
                    last = Some(Err(Failure::new(FailureKind::Unavailable, text)));
                }
            }
        }
        last
    }
}

fn no_answer() -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, "the node does not answer")
}

async fn receive(stream: &mut Stream) -> Result<bytes::Bytes> {
    match timeout(CHUNK_TIMEOUT, stream.receive()).await {
        Ok(Ok(Some(message))) => Ok(message),
        Ok(Err(error)) => Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, error.to_string())),
        Ok(Ok(None)) | Err(_) => Err(no_answer()),
    }
}

impl Node {
    /// Reads a part of a segment from a node. `None` if it is not there.
    async fn read_remote_segment(&self, server: NodeId, segment: &str, span: Span) -> Result<Option<Piece>> {
        let segment = SegmentOpening { segment: segment.to_owned(), part: span.into() };
        let opened = timeout(CHUNK_TIMEOUT, self.open_stream(server, &Opening::Segment { segment })).await;
        let opened = opened.map_err(|_| no_answer())?;
        let mut stream =
            opened.map_err(|error| Error::new(sqlstate::CANNOT_CONNECT_NOW, error.to_string()))?;
        let answer = messages::decode::<Answer>(&receive(&mut stream).await?);
        let answer = answer.map_err(|cause| Error::new(sqlstate::INTERNAL, cause))?.into_result()?;
        let (offset, bytes) = match answer {
            Answer::Segment { offset, bytes } => (offset, bytes),
            Answer::Missing => return Ok(None),
            _ => return Err(no_answer()),
        };
        if bytes > u64::from(WINDOW_BYTES) {
            stream.widen();
        }
        let mut part = Vec::new();
        while (part.len() as u64) < bytes {
            part.extend_from_slice(&receive(&mut stream).await?);
        }
        stream.finish();
        Ok(Some(Piece { offset, bytes: part.into() }))
    }

    /// Sends a part of a segment of this node's store.
    pub(crate) async fn send_segment(&self, opening: SegmentOpening, mut stream: Stream) {
        let piece = match self.read_own_segment(&opening).await {
            Ok(Some(piece)) => piece,
            refused => {
                let answer = Answer::of(refused.map(|_| Answer::Missing));
                let _ = stream.send(&messages::encode(&answer)).await;
                return;
            }
        };
        let head = Answer::Segment { offset: piece.offset, bytes: piece.bytes.len() as u64 };
        let sending = async {
            stream.send(&messages::encode(&head)).await?;
            for chunk in piece.bytes.chunks(CHUNK_BYTES) {
                stream.send(chunk).await?;
            }
            stream.finish();
            // Dropping the stream before the caller has finished would reset it.
            stream.receive().await.map(drop)
        };
        let _ = timeout(CHUNK_TIMEOUT * 6, sending).await;
    }

    async fn read_own_segment(&self, opening: &SegmentOpening) -> Result<Option<Piece>> {
        let Ok(id) = u128::from_str_radix(&opening.segment, 16) else { return Ok(None) };
        let span = match opening.part {
            SegmentPart::Range { offset, bytes } if bytes <= MAX_PART_BYTES => Span::Range { offset, bytes },
            SegmentPart::Last { bytes } if bytes <= MAX_PART_BYTES => Span::Last(bytes),
            _ => return Err(Error::new(sqlstate::PROGRAM_LIMIT, "the part of a segment is too long")),
        };
        self.partitions()?.read_segment(SegmentId(id), span).await
    }

    /// Copies the pages of a partition of this node from its page server, those of `hottest` first.
    async fn pull_partition(&self, partition: PartitionId, hottest: &[PageNo]) -> Result<()> {
        let partitions = self.partitions()?;
        let Some(server) = self.own_record(partition).await?.record.page_server else { return Ok(()) };
        if !partitions.pull(partition, hottest).await? {
            // Tried again when those snapshots have ended.
            return Ok(());
        }
        let read = self.own_record(partition).await?;
        let base = ManifestName {
            epoch: read.record.epoch,
            incarnation: self.incarnation(),
            covered: 0,
            node: self.id(),
            is_draft: false,
        };
        let node = (self.id(), &self.begun().read);
        let pulled = migration::pulled(self.environment(), partition, &read, node, base).await;
        let pulled = pulled.map_err(|error| protocol_error(&error))?;
        self.page_servers.set(partition, &pulled.record);
        tracing::info!(partition = partition.0, "copied all pages of a moved database");
        // If the request is lost, the other node finds out by itself.
        let tidy = Request::Tidy { partition: partition.0 };
        let _ = timeout(CHUNK_TIMEOUT, self.call(server, tidy)).await;
        Ok(())
    }

    /// Copies the pages of this node's partitions that other nodes still have, until the process ends.
    pub(crate) async fn pull_partitions(self: Arc<Self>) {
        loop {
            let _ = timeout(PULL_INTERVAL, self.page_servers.wake.notified()).await;
            let mut waiting = std::mem::take(&mut *self.page_servers.requested.lock());
            // The others were requested from an earlier incarnation, or have failed.
            for partition in self.owners().pulling(self.id()) {
                waiting.entry(partition).or_default();
            }
            for (partition, hottest) in waiting {
                if let Err(error) = self.pull_partition(partition, &hottest).await {
                    let partition = partition.0;
                    tracing::warn!(partition, %error, "cannot copy the pages of a moved database; will retry");
                }
            }
        }
    }
}
