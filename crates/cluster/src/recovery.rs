//! Recovery: reads the commits of all owners of a partition.
//!
//! The partition's record names a base manifest and, for each epoch since, a range of the owner's
//! logs. Records outside of the ranges are not applied: a fenced owner may have stored them.

use std::collections::BTreeMap;

use futures::future::join_all;

use crate::environment::{Environment, Slot};
use crate::{LogId, ManifestName, NodeId, PartitionRecord, Position, Range, retry};

/// Maximum number of concurrent reads of log objects.
const CONCURRENT_READS: usize = 128;

/// A log object within a range.
#[derive(Clone, Debug)]
pub struct Object {
    /// The range.
    pub range: Range,
    /// Its position in the log.
    pub position: Position,
    /// Its records.
    pub body: Vec<u8>,
}

/// An object of a range is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The node that wrote the log.
    pub node: NodeId,
    /// Its expected position.
    pub position: Position,
}

/// Returns true if a manifest of the partition may be used: it is the base, or it is not a draft
/// and a range names its epoch and node (`named_manifests`).
pub fn is_named(record: &PartitionRecord, manifest: ManifestName) -> bool {
    let is_of_range = |range: &Range| range.epoch == manifest.epoch && range.node == manifest.node;
    record.base == Some(manifest) || (!manifest.is_draft && record.ranges.iter().any(is_of_range))
}

/// Where to begin reading a range, given the manifest that recovery starts from.
fn start_of_read(range: &Range, manifest: Option<ManifestName>) -> Option<Position> {
    let Some(manifest) = manifest else { return Some(range.from) };
    match range.epoch.cmp(&manifest.epoch) {
        std::cmp::Ordering::Less => None,
        std::cmp::Ordering::Equal => {
            let covered = Position { incarnation: manifest.incarnation, slot: manifest.covered };
            Some(range.from.max(covered))
        }
        std::cmp::Ordering::Greater => Some(range.from),
    }
}

/// The objects of all ranges of a partition that the manifest does not cover, in order. `end` is
/// where this node's own open range ends: the start of its current incarnation's log.
pub async fn objects<E: Environment>(
    env: &E,
    record: &PartitionRecord,
    manifest: Option<ManifestName>,
    end: Position,
) -> Result<Vec<Object>, Missing> {
    let mut objects = Vec::new();
    for range in &record.ranges {
        if let Some(from) = start_of_read(range, manifest) {
            read_range(env, *range, from, range.to.unwrap_or(end), &mut objects).await?;
        }
    }
    Ok(objects)
}

async fn read_range<E: Environment>(
    env: &E,
    range: Range,
    from: Position,
    to: Position,
    objects: &mut Vec<Object>,
) -> Result<(), Missing> {
    let mut found = Vec::new();
    let mut missing = Vec::new();
    let mut kept_from = Position::default();
    for incarnation in from.incarnation..=to.incarnation {
        let log = LogId { node: range.node, incarnation, kind: range.log };
        let first = if incarnation == from.incarnation { from.slot } else { 0 };
        let until = (incarnation == to.incarnation).then_some(to.slot);
        let read = read_log(env, log, first, until).await;
        kept_from = kept_from.max(read.kept_from);
        missing.extend(read.missing.into_iter().map(|slot| Position { incarnation, slot }));
        let objects = read.objects.into_iter();
        found.extend(objects.map(|(slot, body)| Object {
            range,
            position: Position { incarnation, slot },
            body,
        }));
    }
    // A missing object must have been truncated. Otherwise it is an error (`no_gaps`).
    let is_lost = |position: &&Position| **position >= kept_from;
    if let Some(position) = missing.iter().find(is_lost).filter(|_| env.rules().no_gaps) {
        return Err(Missing { node: range.node, position: *position });
    }
    objects.extend(found);
    Ok(())
}

/// The contents of a part of one log.
#[derive(Default)]
struct LogRead {
    objects: Vec<(u64, Vec<u8>)>,
    missing: Vec<u64>,
    kept_from: Position,
}

/// Reads a log from `first` up to `until`, or to its end, which a seal marks.
async fn read_log<E: Environment>(env: &E, log: LogId, first: u64, until: Option<u64>) -> LogRead {
    let listed = list(env, log).await;
    let end = until.unwrap_or_else(|| listed.last().map_or(first, |last| last + 1));
    let present: Vec<u64> = listed.into_iter().filter(|slot| (first..end).contains(slot)).collect();
    let mut slots: BTreeMap<u64, Option<Slot>> = (first..end).map(|slot| (slot, None)).collect();
    for present in present.chunks(CONCURRENT_READS) {
        let reads = present.iter().map(|slot| self::read(env, log, *slot));
        slots.extend(present.iter().copied().zip(join_all(reads).await));
    }
    let mut read = LogRead::default();
    for contents in slots.values() {
        if let Some(Slot::Records { kept_from, .. }) = contents {
            read.kept_from = read.kept_from.max(*kept_from);
        }
    }
    for (slot, contents) in slots {
        match contents {
            Some(Slot::Records { body, .. }) => read.objects.push((slot, body)),
            None => read.missing.push(slot),
            // A seal in a slot that was truncated is not the end of the log: see `seal`.
            Some(Slot::Seal) if (Position { incarnation: log.incarnation, slot }) < read.kept_from => {}
            Some(Slot::Seal) => break,
        }
    }
    read
}

async fn list<E: Environment>(env: &E, log: LogId) -> Vec<u64> {
    loop {
        match env.logs().list(log).await {
            Ok(slots) => return slots,
            Err(_) => retry::pause(env).await,
        }
    }
}

async fn read<E: Environment>(env: &E, log: LogId, slot: u64) -> Option<Slot> {
    loop {
        match env.logs().read(log, slot).await {
            Ok(found) => return found,
            Err(_) => retry::pause(env).await,
        }
    }
}
