//! Migrations of partitions: a journalled state machine.
//!
//! The journal of a partition's newest migration is a record in the metadata store. A coordinator
//! (any node; usually the source) sends commands to the source and the destination, and moves the
//! journal from step to step by compare-and-set. If it dies, another one continues from the
//! journal. Several coordinators may run concurrently.
//!
//! ```text
//!   copying ------ handing over ------ finished
//!      |                |                 |
//!      +----------- undoing --------------+
//! ```
//!
//! While `copying`, the source copies its pages to the destination, or waits until open transactions
//! have ended, and serves. When `handing over`, it stops serving and hands the partition over. When
//! `undoing`, the destination deletes the copy. A migration is cancelled by changing `copying` to
//! `undoing`.
//!
//! What a copy is depends on where the pages are. Pages in the common store are not copied: the
//! destination reads those that the source has cached, so that its cache is warm. Its copy is a
//! hint; losing it loses no data. Pages of a private partition exist only at their owner, and the
//! rules below protect their copy.
//!
//! - **The handover compares the journal** ([`crate::handover::Transfer`]). It is applied only
//!   while the journal stands at `handing over`. When a coordinator has changed it to `undoing`,
//!   and the partition has not moved by then, it never will, so the copy can be deleted.
//! - **Commands carry a [`Fence`] and the epoch.** The destination remembers the newest [`Fence`] of the
//!   copy, and refuses older commands: a copy of an earlier round that arrives late would replace
//!   the last round. If it restarts, no handover to its earlier incarnation can be applied.
//! - **Before the owner changes, every page is durable** at the destination, or pinned at the
//!   source. In the second case (on demand) the record names the source as the page server, until
//!   the new owner has stored all pages ([`pulled`]). The source keeps them as long as
//!   [`is_pinned`].

use fulmar_meta::{MetaError, Transaction};
use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

use crate::election::RoleFence;
use crate::environment::Environment;
use crate::metadata;
use crate::records::{VERSION, records};
use crate::{Error, ManifestName, NodeId, NodeRecord, PartitionRecord, Read, Rules, retry};

/// Attempts of a command before the migration is undone.
const MAX_ATTEMPTS: u32 = 3;

/// A step of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The source copies its pages to the destination, or waits for transactions, and serves meanwhile.
    Copying,
    /// The source may hand the partition over.
    HandingOver,
    /// The migration has failed: the destination deletes the copy.
    Undoing,
    /// Nothing is left to do.
    Finished,
}

/// How a partition is migrated: what is copied before the handover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mechanism {
    /// Nothing: the source stops serving, flushes, and hands over. The destination's cache is empty
    /// (a baseline of ElasTraS 7.7).
    Stop,
    /// Nothing: the source flushes while it serves, and again when it has stopped (a baseline of
    /// ElasTraS 7.7).
    Flush,
    /// The pages that the source has cached, in rounds (Albatross, ElasTraS 6).
    Albatross,
    /// All pages of a private partition, in rounds (ShuttleDB 3).
    Live,
    /// Nothing. The destination pulls the pages of a private partition from the source.
    OnDemand,
    /// The pages of a private partition that differ from what the destination has kept of it (ShuttleDB
    /// 3.2), and then rounds.
    Delta,
    /// Nothing. All pages of a private partition are copied while it is frozen (thesis 3.2.3).
    Bulk,
    /// Nothing. All rows of a private partition are read and inserted with SQL while it is frozen
    /// (the application-level mechanism of the thesis, 2.3).
    Sql,
}

impl Mechanism {
    /// All mechanisms.
    pub const ALL: [Mechanism; 8] = [
        Mechanism::Stop,
        Mechanism::Flush,
        Mechanism::Albatross,
        Mechanism::Live,
        Mechanism::OnDemand,
        Mechanism::Delta,
        Mechanism::Bulk,
        Mechanism::Sql,
    ];

    /// Its name in SQL and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Mechanism::Stop => "stop",
            Mechanism::Flush => "flush",
            Mechanism::Albatross => "albatross",
            Mechanism::Live => "live",
            Mechanism::OnDemand => "on-demand",
            Mechanism::Delta => "delta",
            Mechanism::Bulk => "bulk",
            Mechanism::Sql => "sql",
        }
    }

    /// The mechanism with this name.
    pub fn from_name(name: &str) -> Option<Mechanism> {
        Mechanism::ALL.into_iter().find(|mechanism| mechanism.name() == name)
    }

    /// Whether something is copied before the handover, or open transactions are waited for.
    fn copies_first(self) -> bool {
        matches!(self, Mechanism::Albatross | Mechanism::Live | Mechanism::Delta)
            || self.waits_for_transactions()
    }

    /// Whether it moves partitions whose pages are in the common store; otherwise private ones.
    pub fn needs_common_store(self) -> bool {
        matches!(self, Mechanism::Stop | Mechanism::Flush | Mechanism::Albatross)
    }

    /// Whether open transactions are aborted, as in the paper.
    pub fn aborts_transactions(self) -> bool {
        matches!(self, Mechanism::Stop | Mechanism::Flush)
    }

    /// Whether it takes the partition lock (thesis, 3.1.4): it waits until open transactions have ended,
    /// and is undone if that takes too long. With all others that do not abort them, they continue at
    /// the destination.
    pub fn waits_for_transactions(self) -> bool {
        matches!(self, Mechanism::Bulk | Mechanism::Sql)
    }
}

/// How a migration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The destination became the owner.
    Moved,
    /// The source kept the partition, or its failover gave the partition to another node.
    Undone,
}

/// How a migration is carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// How the partition is migrated.
    pub mechanism: Mechanism,
    /// Why that mechanism was chosen, if the request did not name one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Limit of the bytes copied per second.
    #[serde(default)]
    pub max_bytes_per_s: Option<u64>,
}

impl From<Mechanism> for Options {
    fn from(mechanism: Mechanism) -> Self {
        Options { mechanism, reason: None, max_bytes_per_s: None }
    }
}

/// The metadata store's record of a partition's newest migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    v: u32,
    /// Incremented at each migration of the partition.
    pub number: u64,
    /// The current step.
    pub step: Step,
    /// Why it is undone.
    #[serde(default)]
    pub cause: Option<String>,
    /// How it is carried out.
    #[serde(flatten)]
    pub options: Options,
    /// How it ended, if it is finished.
    #[serde(default)]
    pub outcome: Option<Outcome>,
    /// When it started, in milliseconds since 1970.
    #[serde(default)]
    pub started_unix_ms: u64,
    /// The owner.
    pub source: NodeId,
    /// The next owner.
    pub destination: NodeId,
    /// The partition's epoch. The migration fails if it has changed.
    pub epoch: u32,
}

records!(Journal);

impl Journal {
    /// Returns true if both are journals of the same migration.
    fn is_same(&self, other: &Journal) -> bool {
        let of = |journal: &Journal| (journal.number, journal.started_unix_ms, journal.destination);
        of(self) == of(other)
    }

    /// The fence of a command of the current step.
    fn fence(&self, sequence: u64) -> Fence {
        Fence { number: self.number, step: self.step, sequence }
    }

    /// The name of the copy at the destination.
    pub fn copy(&self) -> ManifestName {
        ManifestName {
            epoch: self.epoch + 1,
            // Before any position of the new epoch.
            incarnation: 0,
            covered: self.number,
            node: self.destination,
            is_draft: true,
        }
    }

    /// The transaction, which is applied only if the journal is still the one that was read.
    pub(crate) fn compare(
        read: &Read<Journal>,
        partition: PartitionId,
        transaction: Transaction,
    ) -> Transaction {
        transaction.unchanged(key(partition), read.revision)
    }
}

/// Orders the commands of a partition's migrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fence {
    /// The migration.
    pub number: u64,
    /// Its step.
    pub step: Step,
    /// The position among the commands of the step.
    pub sequence: u64,
}

/// Returns true if a command must be refused, because a newer one has been carried out.
pub fn is_stale(rules: &Rules, newest: Option<Fence>, command: Fence) -> bool {
    rules.refuse_stale_commands && newest.is_some_and(|newest| command < newest)
}

/// An action of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// The source stores a copy at the destination.
    Copy,
    /// The source hands the partition over.
    HandOver,
    /// The destination deletes the copy.
    Drop,
}

/// A command of the coordinator. Each may arrive late, and more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The partition.
    pub partition: PartitionId,
    /// Its place among the commands.
    pub fence: Fence,
    /// The epoch that the partition must have.
    pub epoch: u32,
    /// What to do.
    pub action: Action,
}

/// The answer to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It was carried out.
    Done,
    /// It was not: it is stale, or the node cannot.
    Refused,
}

/// The nodes of a migration.
pub trait Participants: Send + Sync {
    /// Sends a command. `None`: no answer; it may still be carried out.
    fn command(&self, node: NodeId, command: Command) -> impl Future<Output = Option<Reply>> + Send;

    /// Why the last command was refused.
    fn cause(&self) -> Option<String> {
        None
    }

    /// The key and value of a report, which is stored in the transaction that ends the migration.
    fn report(&self, _partition: PartitionId, _ended: &Journal) -> Option<(String, Vec<u8>)> {
        None
    }
}

/// The prefix of all journals' keys.
pub const PREFIX: &str = "migration/";

/// The key of a partition's journal.
pub fn key(partition: PartitionId) -> String {
    format!("{PREFIX}{:016x}", partition.0)
}

/// The partition of a key made by [`key`].
pub fn partition_of_key(of: &str) -> Option<PartitionId> {
    let partition = PartitionId(u64::from_str_radix(of.strip_prefix(PREFIX)?, 16).ok()?);
    (key(partition) == of).then_some(partition)
}

/// The journal of the partition's newest migration.
pub async fn journal<E: Environment>(
    env: &E,
    partition: PartitionId,
) -> Result<Option<Read<Journal>>, Error> {
    metadata::read(env, &key(partition)).await
}

/// Starts a migration, and returns its number. `None` if another one is running, or was started
/// concurrently, or if the requester's term in its role has ended. Fails if the metadata store has no
/// space.
pub async fn start<E: Environment>(
    env: &E,
    partition: PartitionId,
    record: &PartitionRecord,
    destination: NodeId,
    options: Options,
    requester: Option<&RoleFence>,
) -> Result<Option<u64>, Error> {
    let newest = journal(env, partition).await?;
    if newest.as_ref().is_some_and(|newest| newest.record.step != Step::Finished) {
        return Ok(None);
    }
    let number = newest.as_ref().map_or(1, |newest| newest.record.number + 1);
    let step = if options.mechanism.copies_first() { Step::Copying } else { Step::HandingOver };
    let PartitionRecord { owner: source, epoch, .. } = *record;
    let started_unix_ms = env.unix_time().as_millis() as u64;
    let journal = Journal {
        v: VERSION,
        number,
        step,
        cause: None,
        options,
        outcome: None,
        started_unix_ms,
        source,
        destination,
        epoch,
    };
    let start = metadata::replace(&key(partition), newest.as_ref(), &journal)?;
    let start = match requester {
        Some(fence) => fence.compare(start),
        None => start,
    };
    let started = env.metadata().transact(start).await;
    // The outcome of the transaction may be unknown.
    let now = self::journal(env, partition).await?;
    let is_started = now.is_some_and(|now| now.record.number == number && now.record.is_same(&journal));
    match started {
        _ if is_started => Ok(Some(number)),
        Err(error @ MetaError::OutOfSpace { remedy, .. }) => {
            Err(Error::OutOfSpace { cause: error.to_string(), remedy })
        }
        _ => Ok(None),
    }
}

/// Why a migration was cancelled.
pub const CANCELLED: &str = "cancelled by an administrator";

/// Cancels a migration that is copying: the one with this number, if one is given. Returns false if
/// there is none: the handover has begun, or the migration has ended.
pub async fn cancel<E: Environment>(
    env: &E,
    partition: PartitionId,
    number: Option<u64>,
) -> Result<bool, Error> {
    let mut tried = None;
    loop {
        let Some(read) = journal(env, partition).await? else { return Ok(false) };
        if number.is_some_and(|number| number != read.record.number) {
            return Ok(false);
        }
        match read.record.step {
            Step::Undoing => return Ok(true),
            Step::HandingOver | Step::Finished => {
                // It may have ended since it was cancelled.
                let is_cancelled = read.record.cause.as_deref() == Some(CANCELLED);
                return Ok(is_cancelled && tried == Some(read.record.number));
            }
            Step::Copying => tried = Some(read.record.number),
        }
        let cause = Some(CANCELLED.to_owned());
        let next = Journal { step: Step::Undoing, cause, ..read.record.clone() };
        // Whatever the outcome is, the journal is read again.
        metadata::transact(env, metadata::replace(&key(partition), Some(&read), &next)?).await;
        retry::pause(env).await;
    }
}

/// Runs the partition's migration to its end. Several coordinators may do so concurrently.
pub async fn coordinate<E: Environment>(
    env: &E,
    partition: PartitionId,
    nodes: &impl Participants,
) -> Result<(), Error> {
    loop {
        let Some(read) = journal(env, partition).await? else { return Ok(()) };
        let (step, outcome) = match read.record.step {
            Step::Copying => match send(env, nodes, partition, &read.record, Action::Copy).await {
                Some(Reply::Done) => (Step::HandingOver, None),
                Some(Reply::Refused) | None => (Step::Undoing, None),
            },
            Step::HandingOver => {
                let reply = send(env, nodes, partition, &read.record, Action::HandOver).await;
                match reply == Some(Reply::Done) || has_moved(env, partition, &read.record).await? {
                    true => (Step::Finished, Some(Outcome::Moved)),
                    false => (Step::Undoing, None),
                }
            }
            // The handover can no longer be applied, but may have been applied before.
            Step::Undoing if has_moved(env, partition, &read.record).await? => {
                (Step::Finished, Some(Outcome::Moved))
            }
            Step::Undoing => {
                send(env, nodes, partition, &read.record, Action::Drop).await;
                (Step::Finished, Some(Outcome::Undone))
            }
            Step::Finished => return Ok(()),
        };
        let cause = match step {
            Step::Undoing => nodes.cause().or_else(|| Some("a node did not answer".to_owned())),
            _ => read.record.cause.clone(),
        };
        let next = Journal { step, outcome, cause, ..read.record.clone() };
        let mut transaction = metadata::replace(&key(partition), Some(&read), &next)?;
        if step == Step::Finished
            && let Some((key, report)) = nodes.report(partition, &next)
        {
            transaction = transaction.put(key, report);
        }
        // Whatever the outcome is, the journal is read again.
        metadata::transact(env, transaction).await;
    }
}

/// Sends a command until it is answered, a few times.
async fn send<E: Environment>(
    env: &E,
    nodes: &impl Participants,
    partition: PartitionId,
    journal: &Journal,
    action: Action,
) -> Option<Reply> {
    let to = if action == Action::Drop { journal.destination } else { journal.source };
    let command = Command { partition, fence: journal.fence(0), epoch: journal.epoch, action };
    for _ in 0..MAX_ATTEMPTS {
        if let Some(reply) = nodes.command(to, command).await {
            return Some(reply);
        }
        retry::pause(env).await;
    }
    None
}

/// Returns true if the migration's handover was applied. Of a partition in the common store that has
/// changed its owner again since, it is not known, and false: nothing but the outcome in the journal
/// depends on it.
async fn has_moved<E: Environment>(
    env: &E,
    partition: PartitionId,
    journal: &Journal,
) -> Result<bool, Error> {
    let Some(read) = metadata::partition(env, partition).await? else { return Ok(false) };
    let first = read.record.epoch == journal.epoch + 1 && read.record.owner == journal.destination;
    // Later epochs may belong to any node. Only the copy of this migration can be their base.
    Ok(first || read.record.base == Some(journal.copy()))
}

/// Returns true if a command of this migration is to be carried out by the source: the journal
/// still stands at its step.
pub fn is_current(rules: &Rules, journal: &Journal, command: &Command) -> bool {
    !rules.refuse_stale_commands
        || (journal.number == command.fence.number
            && journal.step == command.fence.step
            && journal.epoch == command.epoch)
}

/// Returns true if `node` must keep the pages that it pinned for the epoch `epoch` of a partition,
/// the first one of the destination. As long as the partition has not reached that epoch, the
/// handover may still be applied, or be tried again. Once this has returned false, the pages are
/// no longer needed.
pub fn is_pinned(record: &PartitionRecord, node: NodeId, epoch: u32) -> bool {
    record.epoch < epoch || record.page_server == Some(node)
}

/// Records that this node, the owner, has stored all pages as the manifest `base`, and does not
/// need the page server any more.
pub async fn pulled<E: Environment>(
    env: &E,
    partition: PartitionId,
    read: &Read<PartitionRecord>,
    node: (NodeId, &Read<NodeRecord>),
    base: ManifestName,
) -> Result<Read<PartitionRecord>, Error> {
    metadata::change_own(env, partition, read, node, |record| record.pulled(base)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_mechanisms_and_keys_are_read_back() {
        for mechanism in Mechanism::ALL {
            assert_eq!(Mechanism::from_name(mechanism.name()), Some(mechanism));
            assert_eq!(serde_json::to_value(mechanism).unwrap(), mechanism.name());
        }
        assert_eq!(partition_of_key(&key(PartitionId(258))), Some(PartitionId(258)));
        assert_eq!(partition_of_key("migration/102"), None);
    }

    #[test]
    fn commands_of_earlier_migrations_and_steps_are_stale() {
        let fence = |number, step, sequence| Fence { number, step, sequence };
        let newest = Some(fence(2, Step::HandingOver, 1));
        let is_stale = |command| is_stale(&Rules::ALL, newest, command);
        assert!(is_stale(fence(1, Step::Undoing, 9)), "an earlier migration");
        assert!(is_stale(fence(2, Step::Copying, 9)), "an earlier step");
        assert!(is_stale(fence(2, Step::HandingOver, 0)), "an earlier command");
        assert!(!is_stale(fence(2, Step::HandingOver, 1)), "the same command again");
        assert!(!is_stale(fence(2, Step::Undoing, 0)));
        assert!(!super::is_stale(&Rules::ALL, None, fence(1, Step::Copying, 0)));
    }
}
