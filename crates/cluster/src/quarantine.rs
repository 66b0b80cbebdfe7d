//! Statements that kill: a bad statement must not kill one node after the other.
//!
//! Two limits, because no single one is enough:
//! - **A transaction** that was executing when its owner died is replayed once. If the next owner
//!   dies too, it fails with 57P02 and is not replayed ([`may_replay`]).
//! - **A partition** whose statements killed two nodes within ten minutes is quarantined, because
//!   its clients repeat what fails. No node opens it until an operator resumes it.
//!
//! Only deaths with a witness count towards a quarantine: the handler of a fatal signal writes the
//! partition of the dying thread to the data directory, and the node's next incarnation reports it.
//! `kill -9` and power failures leave no report, so partitions that were merely open are not
//! quarantined. A death is identified by the incarnation, so a report that is repeated counts once.

use std::time::Duration;

use fulmar_pages::PartitionId;
use serde::{Deserialize, Serialize};

use crate::directory::CrashReport;
use crate::environment::Environment;
use crate::metadata::{self, Change};
use crate::records::{VERSION, records};
use crate::{Error, Incarnation, NodeId, Read, Rules, retry};

/// Number of reported deaths after which a partition is quarantined.
const MAX_DEATHS: usize = 2;
/// Deaths that are further apart do not add up.
const WINDOW: Duration = Duration::from_secs(600);

/// A node that died while it executed a statement of the partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Death {
    /// The node.
    pub node: NodeId,
    /// The incarnation that died.
    pub incarnation: Incarnation,
    /// When it was reported, by the clock of the node that reported it.
    pub reported_unix_ms: u64,
    /// False after the partition was resumed.
    pub counts: bool,
}

/// The metadata store's record of the deaths in a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineRecord {
    v: u32,
    /// Deaths of the last ten minutes.
    pub deaths: Vec<Death>,
    /// No node opens the partition.
    pub is_quarantined: bool,
}

records!(QuarantineRecord);

impl QuarantineRecord {
    fn new() -> QuarantineRecord {
        QuarantineRecord { v: VERSION, deaths: Vec::new(), is_quarantined: false }
    }

    /// The record with one more death. A death that it contains already is not added again.
    fn with(&self, death: Death, rules: &Rules) -> QuarantineRecord {
        let mut next = self.clone();
        // A clock that was set may show an earlier time than another node's. Such deaths count.
        let oldest = death.reported_unix_ms.saturating_sub(WINDOW.as_millis() as u64);
        next.deaths.retain(|death| death.reported_unix_ms >= oldest);
        let is_same = |other: &Death| (other.node, other.incarnation) == (death.node, death.incarnation);
        if !rules.count_deaths_once || !next.deaths.iter().any(is_same) {
            next.deaths.push(death);
        }
        next.is_quarantined |= next.deaths.iter().filter(|death| death.counts).count() >= MAX_DEATHS;
        next
    }
}

const PREFIX: &str = "quarantine/";

/// The key of a partition's record.
pub fn key(partition: PartitionId) -> String {
    format!("{PREFIX}{:016x}", partition.0)
}

/// The partition of a key made by [`key`].
pub fn partition_of_key(key: &str) -> Option<PartitionId> {
    u64::from_str_radix(key.strip_prefix(PREFIX)?, 16).ok().map(PartitionId)
}

/// The partition's record.
async fn read<E: Environment>(
    env: &E,
    partition: PartitionId,
) -> Result<Option<Read<QuarantineRecord>>, Error> {
    metadata::read(env, &key(partition)).await
}

/// Returns true if no node may open the partition.
pub async fn is_quarantined<E: Environment>(env: &E, partition: PartitionId) -> Result<bool, Error> {
    Ok(env.rules().quarantine && read(env, partition).await?.is_some_and(|read| read.record.is_quarantined))
}

/// Reports what the node's previous incarnation recorded when it died. Called before the new
/// incarnation serves. A crash in between repeats the report.
pub async fn report_crash<E: Environment>(env: &E, node: NodeId) -> Result<(), Error> {
    if let Some(CrashReport { partition, incarnation }) = env.directory().crash_report().await? {
        report(env, partition, node, incarnation).await?;
        env.directory().clear_crash_report().await?;
    }
    Ok(())
}

/// Reports that a statement of the partition killed an incarnation. Repeats it until it is known to
/// be recorded.
pub async fn report<E: Environment>(
    env: &E,
    partition: PartitionId,
    node: NodeId,
    incarnation: Incarnation,
) -> Result<(), Error> {
    let key = key(partition);
    let reported_unix_ms = env.unix_time().as_millis() as u64;
    let death = Death { node, incarnation, reported_unix_ms, counts: true };
    loop {
        let read = read(env, partition).await?;
        let next = read.as_ref().map_or_else(QuarantineRecord::new, |read| read.record.clone());
        let next = next.with(death, env.rules());
        if read.as_ref().is_some_and(|read| read.record == next) {
            return Ok(());
        }
        let transaction = metadata::replace(&key, read.as_ref(), &next)?;
        if metadata::transact(env, transaction).await == Change::Applied {
            return Ok(());
        }
        retry::pause(env).await;
    }
}

/// Resumes a partition: its earlier deaths no longer count. Returns false if it was not quarantined.
pub async fn resume<E: Environment>(env: &E, partition: PartitionId) -> Result<bool, Error> {
    let mut was_quarantined = false;
    loop {
        let Some(read) = read(env, partition).await? else { return Ok(was_quarantined) };
        was_quarantined |= read.record.is_quarantined;
        let mut next = QuarantineRecord { is_quarantined: false, ..read.record.clone() };
        next.deaths.iter_mut().for_each(|death| death.counts = false);
        if next == read.record {
            return Ok(was_quarantined);
        }
        metadata::transact(env, metadata::replace(&key(partition), Some(&read), &next)?).await;
    }
}

/// Returns true if a gateway may replay a transaction that was executing when this number of owners
/// died.
pub fn may_replay(rules: &Rules, owner_deaths: u32) -> bool {
    owner_deaths < 2 || !rules.replay_once
}

#[cfg(test)]
mod tests {
    use super::*;

    fn death(node: u32, minutes: u64) -> Death {
        let reported_unix_ms = minutes * 60_000;
        Death { node: NodeId(node), incarnation: 1, reported_unix_ms, counts: true }
    }

    fn is_quarantined(deaths: &[Death]) -> bool {
        let add = |record: QuarantineRecord, death: &Death| record.with(*death, &Rules::ALL);
        deaths.iter().fold(QuarantineRecord::new(), add).is_quarantined
    }

    #[test]
    fn two_deaths_within_ten_minutes_quarantine() {
        assert!(!is_quarantined(&[death(1, 60)]));
        assert!(is_quarantined(&[death(1, 60), death(2, 70)]));
        assert!(!is_quarantined(&[death(1, 60), death(2, 71)]), "too far apart");
        assert!(!is_quarantined(&[death(1, 60), death(1, 61)]), "the same death");
        assert!(is_quarantined(&[death(1, 60), death(2, 50)]), "the second node's clock is behind");
    }

    #[test]
    fn deaths_before_a_resume_do_not_count() {
        let resumed = Death { counts: false, ..death(1, 60) };
        assert!(!is_quarantined(&[resumed, death(2, 61)]));
        assert!(!is_quarantined(&[resumed, death(1, 61)]), "a repeated report of a death that was resumed");
        assert!(is_quarantined(&[resumed, death(2, 61), death(3, 62)]));
    }
}
