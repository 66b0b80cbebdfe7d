//! Moves, drops and outcomes: requests that the owner of a partition carries out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fulmar_cluster::handover::{self, Outcome, Release, Transfer};
use fulmar_cluster::migration::Command;
use fulmar_cluster::{LogKind, NodeId, PartitionRecord, Position, Read, metadata};
use fulmar_engine::{Closing, Error, Result, Timeline, sqlstate};
use fulmar_gateway::cluster::Cluster as _;
use fulmar_pages::PartitionId;
use futures::future::BoxFuture;
use futures::stream::{self, StreamExt};
use tokio::time::{Instant, timeout, timeout_at};

use crate::Node;
use crate::assignments::{METADATA_TIMEOUT, missing, moved, protocol_error};
use crate::detector::Placement;
use crate::load::Observation;
use crate::logs::position;
use crate::messages::{Answer, ROUTING_TIMEOUT, Request};
use crate::migrations::{Progress, local_stays};

/// Number of partitions that a drain moves concurrently.
const CONCURRENT_MOVES: usize = 16;
/// How often a drain reports its progress.
const PROGRESS_STEP: usize = 100;
/// How often a move checks whether its partition's record is being changed.
const RANGES_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How long a handover waits for another change of its partition.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between attempts to take a partition back.
const TAKE_BACK_DELAY: Duration = Duration::from_secs(1);
/// Pause before a request is sent again, if no change of the owner is noticed.
const ROUTING_RETRY_DELAY: Duration = Duration::from_millis(100);

/// A partition that is being moved or dropped.
pub(crate) struct Moving<'a> {
    node: &'a Node,
    partition: PartitionId,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.node.moving.lock().remove(&self.partition);
    }
}

impl Node {
    /// Carries out a request of another node, or of this one.
    pub(crate) async fn carry_out(&self, request: Request) -> Result<Answer> {
        match request {
            Request::Migrate { partition, to, mechanism, max_bytes_per_s, requester } => {
                let (partition, options) = (PartitionId(partition), (mechanism, max_bytes_per_s));
                let started =
                    self.start_migration(partition, NodeId(to), options, requester.as_ref()).await?;
                Ok(started.map_or(Answer::Done, |number| Answer::Started { number }))
            }
            Request::Command { partition, fence, epoch, action } => {
                let partition = PartitionId(partition);
                self.migration_command(Command { partition, fence, epoch, action }).await?;
                Ok(Answer::Done)
            }
            Request::Warm { partition, lineage, epoch, pages } => {
                let timeline = Timeline { lineage, epoch };
                let warm = self.partitions()?.warm(PartitionId(partition), timeline, pages);
                Ok(Answer::Warmed { pages: warm.await? })
            }
            Request::Archive { partition, lineage, epoch } => {
                let (partition, timeline) = (PartitionId(partition), Timeline { lineage, epoch });
                let archive = self.partitions()?.archive_size(partition, timeline).await?;
                Ok(Answer::Archive { bytes: archive.map_or(0, |archive| archive.bytes) })
            }
            Request::Pull { partition, pages } => {
                self.page_servers.request(PartitionId(partition), pages);
                Ok(Answer::Done)
            }
            Request::Tidy { partition } => {
                self.tidy_archive(PartitionId(partition), self.archive_bytes()).await?;
                Ok(Answer::Done)
            }
            Request::Open { partition } => {
                self.partitions()?.open_arrived(PartitionId(partition)).await?;
                Ok(Answer::Done)
            }
            Request::Waits { partition } => {
                Ok(Answer::Waits { waits: self.partitions()?.take_waits(PartitionId(partition)) })
            }
            Request::Latency { partition } => {
                Ok(Answer::Latency { us: self.partitions()?.smoothed_us(PartitionId(partition)) })
            }
            Request::Latencies { partition } => {
                let latencies = self.used_latencies(PartitionId(partition)).into_iter();
                Ok(Answer::Latencies { us: latencies.map(|(id, us)| (id.0, us)).collect() })
            }
            Request::Drop { partition } => {
                self.drop_own(PartitionId(partition)).await?;
                Ok(Answer::Done)
            }
            Request::Branch { source, branch, at_unix_ms } => {
                self.branch_own(PartitionId(source), PartitionId(branch), at_unix_ms).await?;
                Ok(Answer::Done)
            }
            Request::Restore { partition, at_unix_ms, from, lineage } => {
                self.restore_own(PartitionId(partition), at_unix_ms, from, lineage).await?;
                Ok(Answer::Done)
            }
            Request::SetDurability { partition, durability } => {
                self.set_own_durability(PartitionId(partition), durability).await?;
                Ok(Answer::Done)
            }
            Request::Sessions { partition } => {
                Ok(Answer::Sessions { count: self.partitions()?.sessions(PartitionId(partition)) })
            }
            Request::LoadReport { keys, count } => {
                Ok(Answer::LoadReport(self.own_report(Observation { keys, count })?))
            }
            Request::StatementReport { partitions } => {
                let report = self.partitions()?.statement_report(partitions.as_deref());
                Ok(Answer::StatementReport(report))
            }
            Request::Forecasts => Ok(Answer::Forecasts { series: self.own_forecasts() }),
            Request::Outcome { partition, transaction } => {
                let partition = PartitionId(partition);
                self.own_record(partition).await?;
                let outcome = self.partitions()?.outcome(partition, transaction).await?;
                self.wait_for_lease().await?;
                Ok(Answer::outcome(outcome))
            }
            Request::Disown { incarnation, segments } => self.disown(incarnation, &segments).await,
        }
    }

    /// Sends a request to the owner of its partition, and repeats it while the owner changes. Fails
    /// after `patience`.
    pub(crate) async fn ask_owner(
        &self,
        partition: PartitionId,
        patience: Duration,
        request: impl Fn() -> Request,
    ) -> Result<Answer> {
        let deadline = Instant::now() + patience;
        let mut last = None;
        while Instant::now() < deadline {
            let changed = self.owners().partition_changed(partition);
            let read = timeout_at(deadline, metadata::partition(self.environment(), partition)).await;
            let Ok(read) = read else { break };
            let Some(read) = read.map_err(|error| protocol_error(&error))? else {
                return Err(missing(partition));
            };
            if let Some(error) = self.unavailable_owner(&read.record) {
                return Err(error);
            }
            let owner = read.record.owner;
            let answer = match owner == self.id() {
                true => Ok(self.carry_out(request()).await),
                false => tokio::select! {
                    answer = timeout_at(deadline, self.call(owner, request())) => match answer {
                        Ok(answer) => answer,
                        Err(_) => break,
                    },
                    // A node that was cut off does not answer.
                    () = self.owner_changed(partition, read.record.epoch) => continue,
                },
            };
            match answer {
                Ok(Err(error)) => {
                    // An owner that was replaced fails in any way. Requests may be repeated.
                    if error.state() != sqlstate::PARTITION_MOVED && self.is_owned(partition, &read).await {
                        return Err(error);
                    }
                    last = Some(error.to_string());
                }
                Ok(answer) => return answer,
                Err(error) => last = Some(error.to_string()),
            }
            let _ = timeout_at(Instant::now() + ROUTING_RETRY_DELAY, changed).await;
        }
        let text = format!("the owner of partition {partition} did not answer within {patience:?}");
        let error =
            Error::new(sqlstate::CANNOT_CONNECT_NOW, text).hint("Check the nodes with \"fulmar node list\".");
        Err(match last {
            Some(last) => error.detail(format!("The last attempt failed: {last}.")),
            None => error,
        })
    }

    /// Returns true if the owner of a partition is the same as in a record.
    async fn is_owned(&self, partition: PartitionId, before: &Read<PartitionRecord>) -> bool {
        match timeout(METADATA_TIMEOUT, metadata::partition(self.environment(), partition)).await {
            Ok(Ok(Some(now))) => now.record.owner == before.record.owner,
            _ => false,
        }
    }

    /// As [`Node::begin_move`], but waits while the partition's record is being shortened, which
    /// takes one transaction, and for a while for a branch or another change.
    async fn begin_handover(&self, partition: PartitionId) -> Result<Moving<'_>> {
        let deadline = Instant::now() + CHANGE_TIMEOUT;
        loop {
            match self.begin_move(partition) {
                Err(_) if Instant::now() < deadline || self.dropping_ranges.lock().contains(&partition) => {
                    tokio::time::sleep(RANGES_POLL_INTERVAL).await;
                }
                begun => return begun,
            }
        }
    }

    pub(crate) fn begin_move(&self, partition: PartitionId) -> Result<Moving<'_>> {
        let dropping = self.dropping_ranges.lock();
        match !dropping.contains(&partition) && self.moving.lock().insert(partition) {
            true => Ok(Moving { node: self, partition }),
            false => Err(Error::new(
                sqlstate::OBJECT_IN_USE,
                format!("partition {partition} is already being moved or dropped"),
            )
            .hint("Retry when that has completed.")),
        }
    }

    /// Hands a partition of this node over to another one. `last_round` completes a copy of it after its
    /// release. Returns when it stopped accepting statements; `None` if this is the other one.
    pub(crate) async fn hand_over(
        &self,
        partition: PartitionId,
        to: NodeId,
        (transfer, closing): (Transfer, Closing),
        last_round: Option<BoxFuture<'_, Result<()>>>,
    ) -> Result<Option<Instant>> {
        let _moving = self.begin_handover(partition).await?;
        let mut read = self.own_record(partition).await?;
        if to == self.id() {
            return Ok(None);
        }
        // A restore since the command was checked has begun a new epoch, and another timeline.
        if transfer.epoch().is_some_and(|epoch| epoch != read.record.epoch) {
            return Err(moved(partition));
        }
        let is_local = read.record.log() == LogKind::Local;
        if is_local && last_round.is_none() {
            return Err(local_stays(partition));
        }
        if self.owners().node(to).and_then(|known| known.alive()).is_none() {
            return Err(self.not_alive(to));
        }
        let partitions = self.partitions()?.clone();
        if !read.record.is_covered(self.incarnation()) {
            partitions.cover(partition).await?;
        }
        let start = Position { incarnation: self.incarnation(), slot: 0 };
        let (end, closed) = match partitions.release(partition, closing).await {
            // Nothing reads positions of local logs.
            Ok(released) if is_local => (start, released.closed),
            Ok(released) => (position(released.end), released.closed),
            Err(error) => {
                // Accepts statements again, if some step before the release record failed.
                self.take_back(partition).await?;
                return Err(error);
            }
        };
        // Everything up to the release is in a manifest: earlier ranges are not needed any more.
        read.record = read.record.covered(read.record.base, start);
        let slot = Position { slot: end.slot.saturating_sub(1), ..end };
        let release = Release { partition, read, slot, kept_from: end, transfer };
        let (environment, own) = (self.environment(), &self.begun().read);
        let snapshots = partitions.take_snapshots(partition);
        let epoch = release.read.record.epoch + 1;
        let last_round = async {
            match last_round {
                Some(last_round) => last_round.await,
                None => Ok(()),
            }
        };
        let (copied, ()) = tokio::join!(last_round, self.send_snapshots(partition, (to, epoch), &snapshots));
        let ended = match &copied {
            Ok(()) => handover::hand_over(environment, self.id(), own, to, &release).await,
            Err(_) => handover::take_back(environment, self.id(), own, &release).await,
        };
        match ended {
            Ok(Outcome::HandedOver) => {
                partitions.give_up(partition);
                Ok(Some(closed))
            }
            Ok(Outcome::Kept(kept)) => {
                // If this fails, transactions continue at the newest version.
                let _ = partitions.expect_snapshots(partition, kept.record.epoch, snapshots);
                self.take_back(partition).await?;
                Err(copied.err().unwrap_or_else(|| self.not_alive(to)))
            }
            Err(error) => {
                self.fence(&error.to_string());
                Err(moved(partition))
            }
        }
    }

    /// Lets a partition accept statements again. The store may be away: repeats it until it succeeds,
    /// unless this node stops or was fenced.
    pub(crate) async fn take_back(&self, partition: PartitionId) -> Result<()> {
        let partitions = self.partitions()?.clone();
        while let Err(error) = partitions.take_back(partition).await {
            if self.is_draining.load(Ordering::Relaxed) {
                return Err(error);
            }
            tokio::select! {
                () = partitions.fenced() => return Err(error),
                () = tokio::time::sleep(TAKE_BACK_DELAY) => {}
            }
        }
        Ok(())
    }

    /// Drops a partition of this node and deletes its record.
    async fn drop_own(&self, partition: PartitionId) -> Result<()> {
        let _moving = self.begin_change(partition).await?;
        self.own_record(partition).await?;
        self.partitions()?.drop_partition(partition).await?;
        self.page_servers.forget(partition);
        let deadline = Instant::now() + ROUTING_TIMEOUT;
        while Instant::now() < deadline {
            // Another owner drops it again, which does nothing.
            let read = match self.own_record(partition).await {
                Ok(read) => read,
                Err(error) if error.state() == sqlstate::INVALID_CATALOG_NAME => return Ok(()),
                Err(error) => return Err(error),
            };
            let key = fulmar_cluster::records::owner_key(partition);
            let node = fulmar_cluster::records::node_key(self.id());
            let delete = fulmar_meta::Transaction::new()
                .unchanged(key.as_str(), read.revision)
                .unchanged(node, self.begun().read.revision)
                .delete(fulmar_cluster::quarantine::key(partition))
                .delete(fulmar_cluster::migration::key(partition))
                .delete(Progress::key(partition))
                .delete(crate::control::pin_key(partition))
                .delete(key);
            if metadata::transact(self.environment(), delete).await == metadata::Change::Applied {
                return Ok(());
            }
            tokio::time::sleep(ROUTING_RETRY_DELAY).await;
        }
        Err(crate::assignments::metadata_unavailable())
    }

    /// Hands all partitions in the shared log over to the other nodes that live. Returns how many
    /// this node still owns.
    pub async fn drain(self: &Arc<Self>) -> u64 {
        let owned = self.owners().owned_by(self.id());
        let shared: Vec<PartitionId> =
            owned.into_iter().filter(|(_, owner)| owner.log == LogKind::Shared).map(|(id, _)| id).collect();
        self.is_draining.store(true, Ordering::Relaxed);
        let mut others = self.serving();
        others.retain(|id| *id != self.id());
        if shared.is_empty() || others.is_empty() {
            return shared.len() as u64;
        }
        tracing::info!(databases = shared.len(), "handing databases over to the other nodes");
        let mut placement = Placement::new(self, others);
        let placed: Vec<(PartitionId, NodeId)> =
            shared.iter().filter_map(|id| Some((*id, placement.next()?))).collect();
        let (total, moved) = (placed.len(), AtomicUsize::new(0));
        let moves = placed.into_iter().map(|(partition, to)| {
            let moved = &moved;
            async move {
                match self.hand_over(partition, to, (Transfer::Store, Closing::Prepared), None).await {
                    Ok(_) => {
                        let moved = moved.fetch_add(1, Ordering::Relaxed) + 1;
                        if moved.is_multiple_of(PROGRESS_STEP) || moved == total {
                            tracing::info!(moved, of = total, "handed databases over");
                        }
                    }
                    Err(error) => {
                        tracing::warn!(partition = partition.0, %error, "cannot hand a database over");
                    }
                }
            }
        });
        stream::iter(moves).buffer_unordered(CONCURRENT_MOVES).collect::<()>().await;
        self.owners().count(self.id()).shared
    }

    /// The error of a move to a node that is not alive.
    pub(crate) fn not_alive(&self, node: NodeId) -> Error {
        let text = format!("node \"{}\" is not alive", self.name_of(node));
        Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, text)
            .hint("Choose another node: \"fulmar node list\" lists them.")
    }
}
