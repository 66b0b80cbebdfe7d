//! Sealing the log of an incarnation that has ended.
//!
//! A slot holds the object that was created first: records, or a seal. The log of an ended
//! incarnation ends at its lowest seal. Its writer may still be alive and put objects as fast as it
//! can, up to 16 concurrently. A sealer that only tried the next free slot could lose that race
//! indefinitely. It therefore first puts a barrier 64 slots ahead (further ahead if that slot is
//! taken), which the writer cannot pass, and then seals upwards from the first gap. Every slot
//! below the barrier is tried once, so the number of puts is bounded.
//!
//! A slot may be free because its object was truncated while the sealer was running. An object is
//! written when everything below its `kept_from` is durable, and only that part is truncated. A
//! seal is therefore the end only if no later object has a `kept_from` beyond it.
//!
//! Two sealers may run concurrently. Both find the same end: a sealer returns slot `e` only if it
//! is a seal and it has found records in every slot below, and slots never change.

use futures::future::join_all;

use crate::environment::{Environment, LogObjects, Slot, Uncertain};
use crate::{LogId, Position, retry};

/// How far ahead of the last slot the barrier is put.
const BARRIER_DISTANCE: u64 = 64;
/// Maximum number of concurrent reads of log objects.
const CONCURRENT_READS: usize = 128;

/// Where a sealed log ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// The first slot that holds no record.
    pub end: u64,
    /// `kept_from` of the last object: records before it are in manifests. The default position if
    /// the log is empty.
    pub kept_from: Position,
}

/// Seals a log. Repeats failed requests until the store answers.
pub async fn seal<E: Environment>(env: &E, log: LogId) -> Sealed {
    loop {
        match try_seal(env, log).await {
            Ok(sealed) => return sealed,
            Err(Uncertain) => retry::pause(env).await,
        }
    }
}

async fn try_seal<E: Environment>(env: &E, log: LogId) -> Result<Sealed, Uncertain> {
    let logs = env.logs();
    let mut slots = logs.list(log).await?;
    if env.rules().barrier {
        put_barrier(logs, log, slots.last().copied()).await?;
    }
    let mut end = durable_before(logs, log, &slots).await?;
    loop {
        end = first_without_records(logs, log, &slots, end).await?;
        let is_created = slots.binary_search(&end).is_err() && logs.create(log, end, Slot::Seal).await?;
        if !is_created {
            match logs.read(log, end).await? {
                Some(Slot::Seal) => {}
                Some(Slot::Records { .. }) => {
                    end += 1;
                    continue;
                }
                None => return Err(Uncertain),
            }
        }
        // If the slot was free because its object was truncated, a later object's `kept_from` is
        // beyond it.
        slots = logs.list(log).await?;
        let durable = durable_before(logs, log, &slots).await?;
        if durable <= end {
            break;
        }
        end = durable;
    }
    let last = match end.checked_sub(1) {
        Some(last) => logs.read(log, last).await?,
        None => None,
    };
    match last {
        Some(Slot::Records { kept_from, .. }) => Ok(Sealed { end, kept_from }),
        _ => Ok(Sealed { end, kept_from: Position::default() }),
    }
}

/// The first slot, from `from` on, that is not listed or holds a seal.
async fn first_without_records(
    logs: &dyn LogObjects,
    log: LogId,
    slots: &[u64],
    from: u64,
) -> Result<u64, Uncertain> {
    let listed = &slots[slots.partition_point(|slot| *slot < from)..];
    let is_next = |(expected, slot): &(u64, &u64)| expected == *slot;
    let run: Vec<u64> = (from..).zip(listed).take_while(is_next).map(|(slot, _)| slot).collect();
    for slots in run.chunks(CONCURRENT_READS) {
        let reads = slots.iter().map(|slot| logs.read(log, *slot));
        for (slot, contents) in slots.iter().zip(join_all(reads).await) {
            match contents? {
                Some(Slot::Records { .. }) => {}
                Some(Slot::Seal) => return Ok(*slot),
                // Truncated since it was listed.
                None => return Err(Uncertain),
            }
        }
    }
    Ok(from + run.len() as u64)
}

/// A slot below which all objects were durable: they exist, or were truncated. It is `kept_from` of
/// the last object.
async fn durable_before(logs: &dyn LogObjects, log: LogId, slots: &[u64]) -> Result<u64, Uncertain> {
    for slot in slots.iter().rev() {
        match logs.read(log, *slot).await? {
            Some(Slot::Seal) => {}
            Some(Slot::Records { kept_from, .. }) if kept_from.incarnation == log.incarnation => {
                return Ok(kept_from.slot);
            }
            Some(Slot::Records { .. }) => return Ok(0),
            None => return Err(Uncertain),
        }
    }
    Ok(0)
}

/// Puts a seal that the writer cannot pass, unless the log already has one. If the slot is taken,
/// the seal is put further ahead.
async fn put_barrier(logs: &dyn LogObjects, log: LogId, last: Option<u64>) -> Result<(), Uncertain> {
    if let Some(last) = last
        && logs.read(log, last).await? == Some(Slot::Seal)
    {
        return Ok(());
    }
    let mut distance = BARRIER_DISTANCE;
    loop {
        let slot = last.map_or(distance, |last| last + distance);
        if logs.create(log, slot, Slot::Seal).await? || logs.read(log, slot).await? == Some(Slot::Seal) {
            return Ok(());
        }
        distance *= 2;
    }
}
