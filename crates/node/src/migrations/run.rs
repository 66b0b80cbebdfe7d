//! Runs one migration: the coordinator, the commands, and the report.

use std::time::Duration;

use fulmar_cluster::handover::Transfer;
use fulmar_cluster::migration::{self, Action, Command, Journal, Mechanism, Participants, Reply};
use fulmar_cluster::{NodeId, Read, Rules};
use fulmar_engine::{CachedPages, Closing, Error, HoldReason, PendingMove, Result, sqlstate};
use fulmar_gateway::cluster::Waits;
use fulmar_meta::Transaction;
use fulmar_migrate::Source;
use fulmar_migrate::copy::{self, Copied};
use fulmar_migrate::pace::{Throttle, Throttled};
use fulmar_migrate::prediction::{Costs, Predictor};
use fulmar_migrate::report::{Report, Round};
use fulmar_pages::{PageNo, PartitionId, Timeline};
use futures::FutureExt;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::copies::CopyRounds;
use super::observed::report_key;
use super::progress::Progress;
use super::{MAX_REPORTS, MOVED, UNDONE};
use crate::Node;
use crate::assignments::{METADATA_TIMEOUT, metadata_unavailable, missing, moved, protocol_error};
use crate::messages::{Answer, Request};

/// How long a command may take at another node.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the destination may take to read a batch of pages.
const WARM_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a handover waits for COPYs, for temporary tables that are too large to be carried over,
/// and, with some mechanisms, for transactions.
const HOLD_TIMEOUT: Duration = Duration::from_secs(10);
/// A wait after which another round is copied: the partition has changed since the last one.
const LONG_WAIT: Duration = Duration::from_millis(250);
/// How long the last round of a copy may take, while the partition is frozen.
const LAST_ROUND_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum number of pages that the destination of an on-demand migration reads first: as many as fit
/// into a message.
const MAX_HOTTEST_PAGES: usize = 90_000;
/// How long the destination may take to begin to copy pages after an on-demand migration.
const PULL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the destination may take to open a partition. It is opened later if that fails.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the nodes may take to report the waits of their clients.
const WAITS_TIMEOUT: Duration = Duration::from_secs(1);
/// When the waits of clients are read, after the handover.
const WAITS_DELAY: Duration = Duration::from_millis(500);
/// When the latency at the destination is read, after the handover.
const AFTER_DELAY: Duration = Duration::from_secs(30);

/// What the source has measured.
#[derive(Default)]
pub(super) struct Measured(Mutex<Measurements>);

#[derive(Clone, Default)]
struct Measurements {
    copied: Copied,
    copy: Duration,
    throttled: Throttled,
    freeze: Duration,
    total: Duration,
    latency_before_us: u64,
    latency_during_us: u64,
    cause: Option<String>,
}

/// The coordinator of one migration.
struct Coordinator<'a> {
    node: &'a Node,
    measured: Measured,
    begun: Instant,
}

impl Participants for Coordinator<'_> {
    async fn command(&self, node: NodeId, command: Command) -> Option<Reply> {
        let result = match node == self.node.id() {
            true => self.node.carry_out_command(command, &self.measured).await,
            false => {
                let called = self.node.call(node, Request::command(command));
                match timeout(COMMAND_TIMEOUT, called).await {
                    Ok(Ok(answer)) => answer.map(drop),
                    Ok(Err(_)) | Err(_) => return None,
                }
            }
        };
        match result {
            Ok(()) => Some(Reply::Done),
            Err(error) => {
                self.measured.0.lock().cause = Some(error.to_string());
                Some(Reply::Refused)
            }
        }
    }

    fn cause(&self) -> Option<String> {
        self.measured.0.lock().cause.clone()
    }

    fn report(&self, partition: PartitionId, ended: &Journal) -> Option<(String, Vec<u8>)> {
        self.measured.0.lock().total = self.begun.elapsed();
        let report = self.node.report(partition, ended, &self.measured);
        Some((report_key(&report), serde_json::to_vec(&report).unwrap_or_default()))
    }
}

/// The source of a copy.
struct CopySource<'a> {
    node: &'a Node,
    partition: PartitionId,
    destination: NodeId,
    timeline: Timeline,
    max_bytes_per_s: Option<u64>,
}

impl Source for CopySource<'_> {
    async fn flush_and_list(&self) -> Result<CachedPages> {
        self.node.partitions()?.flush_and_list(self.partition).await
    }

    async fn warm(&self, pages: &[PageNo]) -> Result<u64> {
        let request = Request::Warm {
            partition: self.partition.0,
            lineage: self.timeline.lineage,
            epoch: self.timeline.epoch,
            pages: pages.to_vec(),
        };
        match timeout(WARM_TIMEOUT, self.node.call(self.destination, request)).await {
            Ok(Ok(Ok(Answer::Warmed { pages }))) => Ok(pages),
            Ok(Ok(Ok(_))) => Err(Error::new(sqlstate::INTERNAL, "unexpected answer of the destination")),
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(_)) | Err(_) => {
                Err(Error::new(sqlstate::CANNOT_CONNECT_NOW, "the destination does not answer")
                    .hint("Check the nodes with \"fulmar node list\"."))
            }
        }
    }

    async fn round_ended(&self, rounds: &[Round]) {
        let pages = rounds.first().map_or(0, |round| round.pages);
        let bytes = pages * fulmar_pages::PAGE_SIZE as u64;
        self.node.show_rounds(self.partition, rounds, bytes, (self.destination, self.max_bytes_per_s)).await;
    }
}

/// How a mechanism closes the partition.
fn closing(mechanism: Mechanism) -> Closing {
    match mechanism {
        Mechanism::Stop => Closing::Immediate,
        mechanism if mechanism.waits_for_transactions() => Closing::Exclusive,
        _ => Closing::Prepared,
    }
}

impl Node {
    pub(super) async fn read_journal(&self, partition: PartitionId) -> Result<Option<Journal>> {
        let read = timeout(METADATA_TIMEOUT, migration::journal(self.environment(), partition)).await;
        let read = read.map_err(|_| metadata_unavailable())?.map_err(|error| protocol_error(&error))?;
        Ok(read.map(|read| read.record))
    }

    /// Stores the progress of a migration. Nothing depends on it.
    async fn show_progress(&self, partition: PartitionId, progress: &Progress) {
        let value = serde_json::to_vec(progress).unwrap_or_default();
        let put = Transaction::new().put(Progress::key(partition), value);
        let _ = timeout(METADATA_TIMEOUT, self.metadata().transact(put)).await;
    }

    /// Carries out a command. An error means that it is refused.
    pub(super) async fn carry_out_command(&self, command: Command, measured: &Measured) -> Result<()> {
        let partition = command.partition;
        if command.action == Action::Drop {
            self.partitions()?.forget_arrival(partition);
            return match self.is_private() {
                true => self.tidy_archive(partition, self.archive_bytes()).await.map(drop),
                false => Ok(()),
            };
        }
        let read = migration::journal(self.environment(), partition).await;
        let read = read.map_err(|error| protocol_error(&error))?;
        let read = read.filter(|read| migration::is_current(&Rules::ALL, &read.record, &command));
        let read = read.ok_or_else(|| Error::new(sqlstate::QUERY_CANCELED, "the command is outdated"))?;
        if self.own_record(partition).await?.record.epoch != command.epoch {
            return Err(moved(partition));
        }
        match command.action {
            Action::Copy => self.copy(partition, &read.record, measured).await,
            _ => {
                let destination = read.record.destination;
                let begun = Instant::now();
                let mechanism = read.record.options.mechanism;
                let _pending = match mechanism.aborts_transactions() {
                    true => None,
                    false => {
                        let locked = self.running.take_lock(partition, read.record.number);
                        Some(self.wait_for_holds(partition, mechanism, locked).await?)
                    }
                };
                let has_waited = begun.elapsed() >= LONG_WAIT;
                let closed = match mechanism.needs_common_store() {
                    false => self.hand_copy_over(partition, read, measured, has_waited).await?,
                    true => {
                        let transfer = (Transfer::Migrated(read), closing(mechanism));
                        self.hand_over(partition, destination, transfer, None).await?
                    }
                };
                let open = self.call(destination, Request::Open { partition: partition.0 });
                // The next statement opens it anyway.
                let _ = timeout(OPEN_TIMEOUT, open).await;
                if let Some(closed) = closed {
                    measured.0.lock().freeze = closed.elapsed();
                }
                Ok(())
            }
        }
    }

    /// Waits until no session holds the partition ([`PendingMove`]). Until the result is dropped,
    /// no COPY begins, and no transaction if the mechanism waits for them. `locked` is the result of an
    /// earlier call.
    async fn wait_for_holds(
        &self,
        partition: PartitionId,
        mechanism: Mechanism,
        locked: Option<PendingMove>,
    ) -> Result<PendingMove> {
        let announce = || Ok(self.partitions()?.announce_move(partition, mechanism.waits_for_transactions()));
        let pending = locked.map_or_else(announce, Ok)?;
        if timeout(HOLD_TIMEOUT, pending.released()).await.is_ok() {
            return Ok(pending);
        }
        let what = match pending.held() {
            None => return Ok(pending),
            Some(HoldReason::Copy) => "a COPY in the database did not end",
            Some(HoldReason::TemporaryTables) => "a session kept temporary tables of more than 64 MiB",
            Some(HoldReason::Transaction) => "a transaction in the database did not end",
        };
        let text = format!("{what} for {} s", HOLD_TIMEOUT.as_secs());
        Err(Error::new(sqlstate::OBJECT_IN_USE, text).hint("Retry when it has ended."))
    }

    async fn copy(&self, partition: PartitionId, journal: &Journal, measured: &Measured) -> Result<()> {
        let predictor = self.predictor(journal.destination);
        let throttle = Throttle::new(journal.options.max_bytes_per_s);
        let bounds = self.latency_bounds(partition, journal.destination).await;
        let source = CopySource {
            node: self,
            partition,
            destination: journal.destination,
            timeline: self.timeline(partition).await?,
            max_bytes_per_s: journal.options.max_bytes_per_s,
        };
        let copying = async {
            // A migration that waits for its turn can be cancelled.
            let _slot = self.running.slots.acquire().await;
            let begun = Instant::now();
            let copied = match journal.options.mechanism {
                Mechanism::Albatross => copy::albatross(&source, &throttle, predictor).await,
                Mechanism::Live | Mechanism::Delta => {
                    self.copy_live(partition, journal, &throttle, predictor).await
                }
                mechanism @ (Mechanism::Bulk | Mechanism::Sql) => {
                    let pending = self.wait_for_holds(partition, mechanism, None).await?;
                    self.running.locked.lock().insert(partition, (journal.number, pending));
                    return Ok((Copied::default(), Duration::ZERO));
                }
                // These do nothing before the handover.
                Mechanism::Stop | Mechanism::Flush | Mechanism::OnDemand => Ok(Copied::default()),
            };
            copied.map(|copied| (copied, begun.elapsed()))
        };
        let copied = tokio::select! {
            copied = copying => copied,
            error = self.copy_interrupted(partition, journal) => Err(error),
            never = self.throttle_copy(partition, journal.destination, (&throttle, bounds)) => match never {},
        };
        measured.0.lock().throttled = throttle.throttled();
        let (copied, copy) = copied?;
        let latency_us = self.partitions()?.smoothed_us(partition);
        let mut measured = measured.0.lock();
        (measured.copied, measured.copy, measured.latency_during_us) = (copied, copy, latency_us);
        Ok(())
    }

    /// Copies a partition of this node's store, and keeps the copy for the handover.
    async fn copy_live(
        &self,
        partition: PartitionId,
        journal: &Journal,
        throttle: &Throttle,
        predictor: Predictor,
    ) -> Result<Copied> {
        let mut copy = self.begin_copy(partition, journal).await?;
        let mut rounds = CopyRounds {
            node: self,
            copy: &mut copy,
            timeline: self.timeline(partition).await?,
            is_last: false,
            max_bytes_per_s: journal.options.max_bytes_per_s,
        };
        let copied = copy::live(&mut rounds, throttle, predictor).await?;
        self.running.copies.lock().insert(partition, copy);
        Ok(copied)
    }

    /// Hands a partition of this node's store over, after the last round of its copy.
    async fn hand_copy_over(
        &self,
        partition: PartitionId,
        read: Read<Journal>,
        measured: &Measured,
        copies_again: bool,
    ) -> Result<Option<Instant>> {
        let (journal, timeline) = (read.record.clone(), self.timeline(partition).await?);
        let mut copy = match (journal.options.mechanism, self.running.take_copy(partition, journal.number)) {
            (_, Some(copy)) => copy,
            (Mechanism::Bulk | Mechanism::Sql | Mechanism::OnDemand, None) => {
                self.begin_copy(partition, &journal).await?
            }
            // This node has restarted since.
            (_, None) => return Err(Error::new(sqlstate::QUERY_CANCELED, "the copy was lost")),
        };
        let predictor = self.predictor(journal.destination);
        let max_bytes_per_s = journal.options.max_bytes_per_s;
        // Latencies do not limit it: clients wait for its end.
        let throttle = Throttle::new(max_bytes_per_s);
        let mut copied = measured.0.lock().copied.clone();
        if copies_again && matches!(journal.options.mechanism, Mechanism::Live | Mechanism::Delta) {
            let copy = &mut copy;
            let mut rounds = CopyRounds { node: self, copy, timeline, is_last: false, max_bytes_per_s };
            copy::copy_round(&mut rounds, &mut copied, &throttle, predictor).await?;
        }
        let last_round = async {
            let (node, copy) = (self, &mut copy);
            let mut rounds = CopyRounds { node, copy, timeline, is_last: true, max_bytes_per_s };
            let copying = copy::copy_round(&mut rounds, &mut copied, &throttle, predictor);
            timeout(LAST_ROUND_TIMEOUT, copying).await.map_err(|_| {
                let text = format!("the last round of the copy took more than {LAST_ROUND_TIMEOUT:?}");
                Error::new(sqlstate::QUERY_CANCELED, text)
            })??;
            measured.0.lock().copied = copied;
            Ok(())
        };
        let is_on_demand = journal.options.mechanism == Mechanism::OnDemand;
        let mut hottest = self.partitions()?.pages_in_memory(partition);
        hottest.truncate(MAX_HOTTEST_PAGES);
        let transfer = if is_on_demand { Transfer::Pinned(read) } else { Transfer::Copied(read) };
        let last_round = Some(last_round.boxed());
        let transfer = (transfer, closing(journal.options.mechanism));
        let closed = self.hand_over(partition, journal.destination, transfer, last_round).await?;
        if is_on_demand {
            // If the request is lost, the destination begins a little later.
            let pull = Request::Pull { partition: partition.0, pages: hottest };
            let _ = timeout(PULL_TIMEOUT, self.call(journal.destination, pull)).await;
        }
        Ok(closed)
    }

    /// Predicts migrations from this node to another one.
    fn predictor(&self, destination: NodeId) -> Predictor {
        self.running.predictors.lock().link(self.is_at_another_site(destination))
    }

    /// Whether another node is known to be at another site than this one.
    fn is_at_another_site(&self, other: NodeId) -> bool {
        let nodes = self.owners().nodes();
        let site = |id| nodes.iter().find(|known| known.id == id).map(|known| &known.place.site);
        matches!((site(self.id()), site(other)), (Some(own), Some(other)) if own != other)
    }

    /// What migrations from this node take.
    pub(crate) fn move_costs(&self) -> Costs {
        self.running.predictors.lock().costs()
    }

    /// Shows the rounds of a copy, of which `bytes` were expected.
    pub(super) async fn show_rounds(
        &self,
        partition: PartitionId,
        rounds: &[Round],
        bytes: u64,
        (destination, max_bytes_per_s): (NodeId, Option<u64>),
    ) {
        let prediction = self.predictor(destination).predict(bytes, max_bytes_per_s);
        self.show_progress(partition, &Progress { rounds: rounds.to_vec(), prediction }).await;
    }

    /// Runs a migration to its end, and reports it. Returns the report, if there is one.
    pub(super) async fn run_migration(&self, partition: PartitionId) -> Option<(Report, NodeId)> {
        let coordinator = Coordinator { node: self, measured: Measured::default(), begun: Instant::now() };
        let latency_us = self.partitions().ok()?.smoothed_us(partition);
        coordinator.measured.0.lock().latency_before_us = latency_us;
        self.waits(partition).await;
        if let Err(error) = migration::coordinate(self.environment(), partition, &coordinator).await {
            tracing::warn!(%error, partition = partition.0, "a migration was interrupted; it will be resumed");
            drop(self.running.locked.lock().remove(&partition));
            return None;
        }
        // It may have been cancelled when its copy was complete.
        self.running.forget(partition);
        let journal = self.read_journal(partition).await.ok().flatten()?;
        let mut report = self.report(partition, &journal, &coordinator.measured);
        sleep(WAITS_DELAY).await;
        self.add_waits(partition, &mut report).await;
        self.store_report(&report).await;
        if journal.outcome == Some(migration::Outcome::Moved) {
            if self.is_private()
                && let Err(error) = self.tidy_archive(partition, self.archive_bytes()).await
            {
                tracing::warn!(%error, "cannot delete the pages of databases that were moved away; will retry");
            }
            let crosses_sites = self.is_at_another_site(journal.destination);
            let is_limited = journal.options.max_bytes_per_s.is_some();
            self.running.predictors.lock().learn(&report, is_limited, crosses_sites);
        }
        tracing::info!(
            partition = partition.0,
            mechanism = report.mechanism,
            destination = report.destination,
            outcome = report.outcome,
            bytes = report.bytes,
            freeze_ms = report.freeze_ms,
            pause_ms = report.pause_ms,
            "migration ended"
        );
        Some((report, journal.destination))
    }

    /// Completes a report when the destination's latency is known.
    pub(super) async fn complete_report(&self, mut report: Report, destination: NodeId) {
        let partition = PartitionId(report.partition);
        sleep(AFTER_DELAY).await;
        let latency = Request::Latency { partition: partition.0 };
        if let Ok(Ok(Ok(Answer::Latency { us }))) =
            timeout(WAITS_TIMEOUT, self.call(destination, latency)).await
        {
            report.latency_after_us = Some(us);
        }
        self.store_report(&report).await;
    }

    /// Completes when a copy must end: the migration was cancelled, its destination has died, or the
    /// partition was dropped.
    async fn copy_interrupted(&self, partition: PartitionId, journal: &Journal) -> Error {
        let incarnation = || self.owners().node(journal.destination).and_then(|known| known.alive());
        let destination = incarnation();
        let mut is_known = false;
        loop {
            let (changed, nodes) = (self.migrations().changed(), self.owners().nodes_changed());
            // What this node knows may be older than the journal.
            let is_later =
                |now: &Journal| (now.number, now.step) > (journal.number, migration::Step::Copying);
            match self.migrations().journal(partition) {
                Some(now) if is_later(&now) => {
                    return Error::new(sqlstate::QUERY_CANCELED, migration::CANCELLED);
                }
                Some(_) => is_known = true,
                None if is_known => return missing(partition),
                None => {}
            }
            if incarnation() != destination {
                return self.not_alive(journal.destination);
            }
            tokio::select! {
                () = changed => {}
                () = nodes => {}
            }
        }
    }

    fn report(&self, partition: PartitionId, journal: &Journal, measured: &Measured) -> Report {
        let measured = measured.0.lock().clone();
        let outcome = match journal.outcome {
            Some(migration::Outcome::Moved) => MOVED,
            _ => UNDONE,
        };
        Report {
            partition: partition.0,
            number: journal.number,
            mechanism: journal.options.mechanism.name().to_owned(),
            reason: journal.options.reason.clone(),
            source: self.name_of(journal.source),
            destination: self.name_of(journal.destination),
            started_unix_ms: journal.started_unix_ms,
            outcome: outcome.to_owned(),
            error: journal.cause.clone(),
            total_ms: measured.total.as_millis() as u64,
            copy_ms: measured.copy.as_millis() as u64,
            freeze_ms: measured.freeze.as_millis() as u64,
            bytes: measured.copied.bytes(),
            prediction: measured.copied.prediction,
            rounds: measured.copied.rounds,
            throttled_ms: measured.throttled.ms,
            lowest_bytes_per_s: measured.throttled.lowest_bytes_per_s,
            latency_before_us: measured.latency_before_us,
            latency_during_us: measured.latency_during_us,
            ..Report::default()
        }
    }

    /// The waits of the partition's clients at all nodes since the last call.
    async fn waits(&self, partition: PartitionId) -> Waits {
        let living = self.owners().nodes().into_iter().filter(|known| known.alive().is_some());
        let asked = living.map(|known| {
            let request = Request::Waits { partition: partition.0 };
            timeout(WAITS_TIMEOUT, self.call(known.id, request))
        });
        let mut total = Waits::default();
        for answer in futures::future::join_all(asked).await {
            if let Ok(Ok(Ok(Answer::Waits { waits }))) = answer {
                total.add(waits);
            }
        }
        total
    }

    async fn add_waits(&self, partition: PartitionId, report: &mut Report) {
        let waits = self.waits(partition).await;
        report.pause_ms = report.pause_ms.max(waits.longest_ms);
        report.waited += waits.count;
        report.failed += waits.failed;
        report.knows_waits = true;
    }

    /// Stores a report, removes the oldest ones, and the partition's progress.
    async fn store_report(&self, report: &Report) {
        let value = serde_json::to_vec(report).unwrap_or_default();
        let mut transaction = Transaction::new()
            .put(report_key(report), value)
            .delete(Progress::key(PartitionId(report.partition)));
        let keys = self.migrations().report_keys();
        for old in keys.iter().take(keys.len().saturating_sub(MAX_REPORTS - 1).min(16)) {
            transaction = transaction.delete(old.clone());
        }
        if let Ok(Err(error)) = timeout(METADATA_TIMEOUT, self.metadata().transact(transaction)).await {
            tracing::warn!(%error, "cannot store the report of a migration");
        }
    }
}
