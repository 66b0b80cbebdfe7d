//! `ALTER NODE ... MOVE TO`: moves all databases of a node to another one, which is ShuttleDB's
//! migration of a machine.
//!
//! It is a drain with one destination. Each database is moved by an ordinary migration, and nothing
//! else is recorded:
//!
//! - **Resumed**: if the statement's node dies, or one of the two, the migrations that have begun
//!   end by themselves. Repeating the statement, at any node, waits for those and moves what is
//!   left.
//! - **Cancelled**: no further migration begins, and those that still copy are cancelled. Databases
//!   that have moved stay there.
//!
//! The system database stays: it contains no tenant's data, and the session that runs the statement
//! is in it. A node that is stopped hands it over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_engine::{Error, sqlstate};
use fulmar_meta::SYSTEM_PARTITION;
use fulmar_migrate::report::{MachineReport, Report};
use fulmar_pages::{Durability, PartitionId};
use futures::stream::{self, StreamExt};

use super::cluster::{Running, check_node, move_partition, require_cluster};
use super::context::Context;
use crate::Result;
use crate::cluster::{Cluster, Move};

/// Number of databases that are moved concurrently, as in a drain.
const CONCURRENT_MOVES: usize = 16;
/// How long the report of a migration may take after its end.
const REPORT_TIMEOUT: Duration = Duration::from_secs(5);
const REPORT_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Number of databases that an error names.
const MAX_NAMED: usize = 5;

/// Moves all databases of a node. Fails if some could not be moved, after it has moved the others.
pub(super) async fn move_node(
    from: &str,
    to: &str,
    options: &Move,
    context: &Context,
    running: &Running,
) -> Result<MachineReport> {
    let cluster = require_cluster(context)?;
    check_node(from, &**cluster)?;
    check_node(to, &**cluster)?;
    if from == to {
        let message = format!("node \"{from}\" is both source and destination");
        return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, message).hint("Name another node."));
    }
    let began = Instant::now();
    let mut whole = MachineReport::new(from, to);
    // A database whose move has ended is not moved again: the owners in memory may be older.
    let mut ended: BTreeMap<PartitionId, Result<()>> = BTreeMap::new();
    loop {
        let mut left = movable(from, &**cluster);
        left.retain(|partition| !ended.contains_key(partition));
        if left.is_empty() {
            break;
        }
        let moves = left.into_iter().map(|partition| async move {
            let moved = move_partition(partition, to, options.clone(), cluster, running).await;
            let report = match moved {
                Ok(Some(number)) => report(partition, number, cluster).await,
                _ => None,
            };
            (partition, moved.map(|number| number.is_some()), report)
        });
        let mut moves = stream::iter(moves).buffer_unordered(CONCURRENT_MOVES);
        while let Some((partition, moved, report)) = moves.next().await {
            if let Ok(true) = moved {
                whole.add(report.as_ref());
            }
            ended.insert(partition, moved.map(drop));
        }
    }
    whole.total_ms = began.elapsed().as_millis() as u64;
    check_failures(&ended, from, context)?;
    Ok(whole)
}

/// The databases of a node that can be moved.
fn movable(node: &str, cluster: &dyn Cluster) -> Vec<PartitionId> {
    let is_private = cluster.has_private_stores();
    let partitions = cluster.partitions().into_iter().filter(|partition| {
        let can_move = is_private || partition.durability == Durability::Shared;
        partition.owner == node && partition.id != SYSTEM_PARTITION && can_move
    });
    partitions.map(|partition| partition.id).collect()
}

/// The report of a migration that has ended, with the waits of clients if they become known soon.
async fn report(partition: PartitionId, number: u64, cluster: &Arc<dyn Cluster>) -> Option<Report> {
    let deadline = Instant::now() + REPORT_TIMEOUT;
    loop {
        let reports = cluster.migrations().into_iter().map(|migration| migration.report);
        let found = reports.into_iter().find(|of| of.partition == partition.0 && of.number == number);
        if found.as_ref().is_some_and(|report| report.knows_waits) || Instant::now() >= deadline {
            return found;
        }
        tokio::time::sleep(REPORT_POLL_INTERVAL).await;
    }
}

/// The error for databases that were not moved.
fn check_failures(ended: &BTreeMap<PartitionId, Result<()>>, from: &str, context: &Context) -> Result<()> {
    let failed: Vec<(PartitionId, &Error)> =
        ended.iter().filter_map(|(partition, moved)| Some((*partition, moved.as_ref().err()?))).collect();
    let Some((_, first)) = failed.first() else { return Ok(()) };
    let name = |partition: PartitionId| {
        context.catalog.tenant_of(partition).map_or_else(|| partition.to_string(), |of| of.name.clone())
    };
    let named = failed.iter().take(MAX_NAMED);
    let named: Vec<String> =
        named.map(|(partition, error)| format!("{}: {}", name(*partition), error.message())).collect();
    let message = format!("{} of {} databases of node \"{from}\" were not moved", failed.len(), ended.len());
    Err(Error::new(first.state(), message)
        .detail(named.join("; "))
        .hint("Repeat the statement: it moves what is left."))
}
