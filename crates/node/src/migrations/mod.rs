//! Runs the migrations of partitions ([`fulmar_cluster::migration`]) between the nodes.
//!
//! ```text
//!   any node            source                                  destination
//!   Request::Migrate -> journal: copying
//!                       flush, list, Request::Warm ...        -> reads the pages
//!                       journal: handing over
//!                       release, open snapshots      -> keeps them until it opens the partition
//!                       change of owner
//!                       Request::Open                         -> opens the partition
//!                       journal: finished, report
//!   <- journal in memory
//! ```
//!
//! The source coordinates. If it has died, the partition's next owner does, and finishes or undoes the
//! migration. A node finds the journals that it has to run in its copy of the metadata, so a request
//! only writes the journal, and waits until that is finished.
//!
//! # Crash points
//! | killed | what happens |
//! | --- | --- |
//! | the node that a client asked | the migration continues; the client reconnects and sees it in `fulmar.migrations` |
//! | the source while copying | a failover gives the partition to another node, which undoes the migration. If the source is back before, or the partition is in its own store, it copies again |
//! | the source after the change of owner | the destination finishes the journal. Its report lacks what the source has measured |
//! | the destination while copying | the source's request fails, and the migration is undone |
//! | the destination during the handover | the change of owner compares its record and fails, so the source keeps the partition; or it was applied, and the destination is failed over |
//! | either end during the last round of a copy (with `bulk` and `sql` that is all of it) | the owner changes only after the round, so the source keeps the partition: it takes it back, or opens it when it is back. What the destination has stored is deleted, and a database that it builds from rows exists only in memory and unnamed files until the round ends |
//! | the destination after it has stored that round | the change of owner compares its incarnation and fails |
//! | either end after the snapshots of open transactions were sent ([`snapshots`]) | transactions are repeated at the newest version |
//! | the metadata store | the handover waits for it; statements wait meanwhile |
//!
//! # Limits
//! A node copies [`running::CONCURRENT`] partitions at a time; further ones wait. Of all reports the
//! newest [`MAX_REPORTS`] are kept.

mod copies;
mod neighbours;
mod observed;
mod progress;
mod run;
mod running;
mod snapshots;

use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::election::RoleFence;
use fulmar_cluster::migration::{self, Command, Mechanism, Outcome, Step};
use fulmar_cluster::{LogKind, NodeId, PartitionRecord};
use fulmar_engine::{Error, Result, Timeline, sqlstate};
use fulmar_gateway::cluster::{MigrationInfo, Move};
use fulmar_migrate::report::Report;
use fulmar_pages::PartitionId;
use tokio::time::{Instant, timeout, timeout_at};

use crate::Node;
use crate::assignments::{missing, protocol_error};
use crate::messages::{Answer, ROUTING_TIMEOUT, Request};
pub(crate) use observed::Migrations;
pub(crate) use progress::Progress;
pub(crate) use running::Running;

/// Number of reports that are kept.
const MAX_REPORTS: usize = 1000;
/// The outcomes in reports.
const MOVED: &str = "moved";
const UNDONE: &str = "undone";
/// How long a client waits for its migration.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// How long the destination may take to say whether it has an archive.
const CHOICE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a node looks for journals whose coordinator has died.
const RESUME_INTERVAL: Duration = Duration::from_secs(1);

impl Node {
    /// Starts the migration of a partition of this node. Returns its number; `None` if the partition
    /// is at the destination.
    pub(crate) async fn start_migration(
        &self,
        partition: PartitionId,
        to: NodeId,
        options: (Option<Mechanism>, Option<u64>),
        requester: Option<&RoleFence>,
    ) -> Result<Option<u64>> {
        let (mechanism, max_bytes_per_s) = options;
        let read = self.own_record(partition).await?;
        if to == self.id() {
            // A failover may have given it to the destination of a migration that is still open.
            return self.running_to(partition, to).await;
        }
        check_pulled(&read.record)?;
        let is_local = read.record.log() == LogKind::Local;
        if is_local && !self.is_private() {
            return Err(local_stays(partition));
        }
        let is_draining = self.heard.lock().get(&to).is_some_and(|heard| heard.is_draining);
        let is_leaving = is_draining || self.control().is_removing(&self.name_of(to));
        if is_leaving || self.owners().node(to).and_then(|known| known.alive()).is_none() {
            return Err(self.not_alive(to));
        }
        let (mechanism, reason) = match mechanism {
            Some(mechanism) => (mechanism, None),
            None => self.choose_mechanism(partition, to, is_local).await?,
        };
        check_mechanism(mechanism, is_local)?;
        let options = migration::Options { mechanism, reason, max_bytes_per_s };
        let environment = self.environment();
        let started = migration::start(environment, partition, &read.record, to, options, requester).await;
        if let Some(number) = started.map_err(|error| protocol_error(&error))? {
            return Ok(Some(number));
        }
        // The same request may have been sent twice.
        let running = self.running_to(partition, to).await?;
        running.map(Some).ok_or_else(|| {
            Error::new(sqlstate::OBJECT_IN_USE, format!("partition {partition} is already being moved"))
                .hint("The table fulmar.migrations shows its progress.")
        })
    }

    /// The mechanism for a partition, and why.
    async fn choose_mechanism(
        &self,
        partition: PartitionId,
        to: NodeId,
        is_private: bool,
    ) -> Result<(Mechanism, Option<String>)> {
        if !is_private {
            let reason = match self.is_private() {
                true => "the system database contains no data",
                false => "the nodes share a store, so only cached pages are copied",
            };
            return Ok((Mechanism::Albatross, Some(reason.to_owned())));
        }
        let Timeline { lineage, epoch } = self.timeline(partition).await?;
        let request = Request::Archive { partition: partition.0, lineage, epoch };
        let (mechanism, reason) = match timeout(CHOICE_TIMEOUT, self.call(to, request)).await {
            Ok(Ok(Ok(Answer::Archive { bytes }))) if bytes > 0 => {
                (Mechanism::Delta, format!("the destination has kept {} MiB of the database", bytes >> 20))
            }
            _ => (Mechanism::Live, "the nodes have stores of their own".to_owned()),
        };
        Ok((mechanism, Some(reason)))
    }

    /// The number of the partition's migration that has not ended, if it has this destination.
    async fn running_to(&self, partition: PartitionId, to: NodeId) -> Result<Option<u64>> {
        let journal = self.read_journal(partition).await?;
        let running = journal.filter(|it| it.step != Step::Finished && it.destination == to);
        Ok(running.map(|journal| journal.number))
    }

    /// Starts the migration of a partition, from whichever node owns it. Returns its number; `None` if
    /// the partition is at the destination. Fails if the term of the `requester` has ended.
    pub(crate) async fn request_migration(
        &self,
        partition: PartitionId,
        node: &str,
        options: Move,
        requester: Option<&RoleFence>,
    ) -> Result<Option<u64>> {
        let Some(to) = self.owners().find_node(node) else {
            let text = format!("node \"{node}\" does not exist");
            return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, text)
                .hint("\"fulmar node list\" lists the nodes."));
        };
        let Move { mechanism, max_bytes_per_s } = options;
        let mechanism = mechanism.map(|name| mechanism_named(&name)).transpose()?;
        let request = || Request::Migrate {
            partition: partition.0,
            to: to.id.0,
            mechanism,
            max_bytes_per_s,
            requester: requester.cloned(),
        };
        match self.ask_owner(partition, ROUTING_TIMEOUT, request).await? {
            Answer::Started { number } => Ok(Some(number)),
            _ => Ok(None),
        }
    }

    /// Waits until a migration has ended. Fails if it was undone.
    pub(crate) async fn migration_ended(&self, partition: PartitionId, number: u64) -> Result<()> {
        let deadline = Instant::now() + MIGRATION_TIMEOUT;
        loop {
            let changed = self.migrations().changed();
            match self.migrations().journal(partition) {
                Some(journal) if journal.number == number && journal.step == Step::Finished => {
                    return match journal.outcome {
                        Some(Outcome::Undone) => Err(undone(partition, journal.cause.as_deref())),
                        _ => Ok(()),
                    };
                }
                // Another migration was started since.
                Some(journal) if journal.number > number => {
                    return match self.migrations().report(partition, number) {
                        Some(report) if report.outcome != MOVED => {
                            Err(undone(partition, report.error.as_deref()))
                        }
                        _ => Ok(()),
                    };
                }
                // It is not observed yet, or was deleted together with the database.
                None if matches!(self.read_journal(partition).await, Ok(None)) => {
                    return Err(missing(partition));
                }
                _ => {}
            }
            if timeout_at(deadline, changed).await.is_err() {
                let text = format!("partition {partition} was not moved within a day");
                return Err(Error::new(sqlstate::QUERY_CANCELED, text)
                    .hint("The table fulmar.migrations shows its progress."));
            }
        }
    }

    /// Cancels the migration of a partition: the one with this number, if one is given.
    pub(crate) async fn cancel_migration(&self, partition: PartitionId, number: Option<u64>) -> Result<()> {
        match migration::cancel(self.environment(), partition, number).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                let text = format!("partition {partition} has no migration that can be cancelled");
                Err(Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, text)
                    .hint("A migration can be cancelled until its handover."))
            }
            Err(error) => Err(protocol_error(&error)),
        }
    }

    /// Runs the migrations whose coordinator this node is, until the process ends.
    pub(crate) async fn run_migrations(self: Arc<Self>) {
        loop {
            let changed = self.migrations().changed();
            for (partition, journal, _) in self.migrations().running() {
                if self.coordinates(partition, journal.source)
                    && self.running.partitions.lock().insert(partition)
                {
                    let node = self.clone();
                    tokio::spawn(async move {
                        let ended = node.run_migration(partition).await;
                        node.running.partitions.lock().remove(&partition);
                        // An idle database has no latency.
                        if let Some((report, destination)) =
                            ended.filter(|(report, _)| report.latency_before_us > 0)
                        {
                            node.complete_report(report, destination).await;
                        }
                    });
                }
            }
            // The owner may change without a change of a journal.
            let _ = tokio::time::timeout(RESUME_INTERVAL, changed).await;
        }
    }

    /// Whether this node runs a migration: the source does, or the owner if the source is dead.
    fn coordinates(&self, partition: PartitionId, source: NodeId) -> bool {
        if source == self.id() {
            return true;
        }
        let owns = self.owners().owner(partition).is_some_and(|owner| owner.node == self.id());
        owns && self.owners().node(source).and_then(|known| known.alive()).is_none()
    }

    /// Carries out a command of another coordinator, or of this node's.
    pub(crate) async fn migration_command(&self, command: Command) -> Result<()> {
        self.carry_out_command(command, &run::Measured::default()).await
    }

    /// The name of a node; its id if it was forgotten.
    pub(crate) fn name_of(&self, id: NodeId) -> String {
        self.owners().node(id).map_or_else(|| id.to_string(), |known| known.name)
    }

    /// All migrations, newest first.
    pub(crate) fn migration_infos(&self) -> Vec<MigrationInfo> {
        let running = self.migrations().running().into_iter().map(|(partition, journal, progress)| {
            let progress = progress.unwrap_or_default();
            let report = Report {
                partition: partition.0,
                number: journal.number,
                mechanism: journal.options.mechanism.name().to_owned(),
                reason: journal.options.reason,
                source: self.name_of(journal.source),
                destination: self.name_of(journal.destination),
                started_unix_ms: journal.started_unix_ms,
                bytes: progress.bytes(),
                rounds: progress.rounds,
                prediction: progress.prediction,
                error: journal.cause,
                ..Report::default()
            };
            let step = match journal.step {
                Step::Copying => "copying",
                Step::HandingOver => "handing over",
                Step::Undoing | Step::Finished => "undoing",
            };
            MigrationInfo { partition, step: step.to_owned(), report }
        });
        let mut all: Vec<MigrationInfo> = running.collect();
        all.extend(self.migrations().reports().into_iter().rev().map(|report| MigrationInfo {
            partition: PartitionId(report.partition),
            step: report.outcome.clone(),
            report,
        }));
        all
    }
}

fn mechanism_named(name: &str) -> Result<Mechanism> {
    Mechanism::from_name(name).ok_or_else(|| {
        let names = Mechanism::ALL.map(Mechanism::name).join(", ");
        let text = format!("migration mechanism \"{name}\" does not exist");
        Error::new(sqlstate::INVALID_PARAMETER_VALUE, text).hint(format!("Available values: {names}."))
    })
}

/// Fails if a mechanism does not move partitions of private stores, or only these.
fn check_mechanism(mechanism: Mechanism, is_private: bool) -> Result<()> {
    let refused = |detail: &str, hint: &str| {
        let text = format!("mechanism \"{}\" cannot move this database", mechanism.name());
        Err(Error::new(sqlstate::FEATURE_NOT_SUPPORTED, text).detail(detail).hint(hint))
    };
    match (mechanism.needs_common_store(), is_private) {
        (true, true) => {
            let hint = "Use \"live\", \"delta\", \"on-demand\", \"bulk\" or \"sql\".";
            refused("It is in the store of its node.", hint)
        }
        (false, false) => {
            refused("It is in the store that all nodes share.", "Use \"albatross\", \"flush\" or \"stop\".")
        }
        _ => Ok(()),
    }
}

/// Fails if another node still has pages of a partition.
pub(crate) fn check_pulled(record: &PartitionRecord) -> Result<()> {
    match record.page_server {
        None => Ok(()),
        Some(server) => {
            let text = format!("the pages of the database are still being copied from node {server}");
            Err(Error::new(sqlstate::OBJECT_IN_USE, text).hint("Retry when that has completed."))
        }
    }
}

pub(crate) fn local_stays(partition: PartitionId) -> Error {
    let text = format!("partition {partition} has local durability and cannot leave its node");
    Error::new(sqlstate::FEATURE_NOT_SUPPORTED, text)
        .hint("Change it first: ALTER DATABASE ... SET durability = shared.")
}

fn undone(partition: PartitionId, cause: Option<&str>) -> Error {
    let text = format!("partition {partition} was not moved: {}", cause.unwrap_or("unknown cause"));
    Error::new(sqlstate::NOT_IN_PREREQUISITE_STATE, text).hint("The database stays where it was. Retry.")
}
