//! Sends the snapshots of open transactions to the destination of a handover, over a stream.
//!
//! ```text
//!   source                                     destination
//!   opening (epoch, incarnation, size)     ->
//!   pieces of the encoded snapshots        ->  keeps them for the opening of the partition
//!                                          <-  done
//! ```
//!
//! They are sent between the release and the change of owner, while the last round of a copy is
//! sent. The destination refuses those for another incarnation, and uses them only when it first
//! opens the partition in the epoch that begins with the handover. So a late message has no effect.
//! If they are not sent in time, or either end dies, transactions are repeated at the newest
//! version.

use std::time::Duration;

use fulmar_cluster::NodeId;
use fulmar_engine::{CarriedSnapshots, Error, Result, sqlstate};
use fulmar_pages::PartitionId;
use fulmar_transport::{Error as TransportError, Stream};
use tokio::time::timeout;

use crate::Node;
use crate::messages::{self, Answer, Opening, SnapshotsOpening};

/// Maximum size of a message.
const PIECE_BYTES: usize = 256 << 10;
/// Maximum size of the snapshots of a partition.
const MAX_BYTES: usize = 16 << 20;
/// How long a handover waits for the destination.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the destination waits for the source.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);

impl Node {
    /// Sends the snapshots of a released partition's transactions to the next owner.
    pub(crate) async fn send_snapshots(
        &self,
        partition: PartitionId,
        (to, epoch): (NodeId, u32),
        snapshots: &CarriedSnapshots,
    ) {
        if snapshots.is_empty() {
            return;
        }
        let Some(incarnation) = self.owners().node(to).and_then(|known| known.alive()) else { return };
        let encoded = snapshots.encode();
        let opening =
            SnapshotsOpening { partition: partition.0, epoch, incarnation, bytes: encoded.len() as u64 };
        let send = async {
            let mut stream = self.open_stream(to, &Opening::Snapshots { snapshots: opening }).await?;
            for piece in encoded.chunks(PIECE_BYTES) {
                stream.send(piece).await?;
            }
            let answer = stream.receive().await?.ok_or(TransportError::Closed)?;
            messages::decode::<Answer>(&answer).map_err(TransportError::Refused)
        };
        let cause = match timeout(SEND_TIMEOUT, send).await {
            Ok(Ok(answer)) => answer.into_result().err().map(|error| error.to_string()),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("timed out".to_owned()),
        };
        let (partition, bytes, transactions) = (partition.0, encoded.len(), snapshots.len());
        tracing::info!(partition, transactions, bytes, cause, "sent the snapshots of open transactions");
    }

    /// Receives the snapshots of a partition that is being handed over to this node.
    pub(crate) async fn receive_snapshots(&self, opening: SnapshotsOpening, mut stream: Stream) {
        let received = timeout(RECEIVE_TIMEOUT, self.receive_pieces(&opening, &mut stream)).await;
        let result = received.unwrap_or_else(|_| Err(lost("timed out")));
        let answer = Answer::of(result.map(|()| Answer::Done));
        // The source may have stopped waiting.
        if stream.send(&messages::encode(&answer)).await.is_ok() {
            stream.finish();
            // Dropping the stream before the source has finished would reset it.
            let _ = timeout(SEND_TIMEOUT, stream.receive()).await;
        }
    }

    async fn receive_pieces(&self, opening: &SnapshotsOpening, stream: &mut Stream) -> Result<()> {
        let bytes = usize::try_from(opening.bytes).unwrap_or(usize::MAX);
        if opening.incarnation != self.incarnation() || bytes > MAX_BYTES {
            return Err(Error::new(
                sqlstate::NOT_IN_PREREQUISITE_STATE,
                "snapshots are not for this process",
            ));
        }
        let mut encoded = Vec::with_capacity(bytes);
        while encoded.len() < bytes {
            let received = stream.receive().await.map_err(|error| lost(&error.to_string()))?;
            let piece = received.ok_or_else(|| lost("the stream has ended"))?;
            encoded.extend_from_slice(&piece);
        }
        let snapshots = CarriedSnapshots::decode(&encoded)?;
        match self.partitions()?.expect_snapshots(PartitionId(opening.partition), opening.epoch, snapshots)? {
            true => Ok(()),
            false => Err(Error::new(
                sqlstate::CONFIGURATION_LIMIT,
                "no memory for snapshots, or the partition is open",
            )),
        }
    }
}

fn lost(cause: &str) -> Error {
    Error::new(sqlstate::CANNOT_CONNECT_NOW, format!("lost the connection to the source: {cause}"))
}
