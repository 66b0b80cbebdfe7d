//! The history of a partition: its manifests of the past, each a version that it can be restored to or branched from.
//!
//! ```text
//!   now - retention                                    an hour ago            now
//!   ... |     .     .     .     .     .     .     .     .............|.........*   <- the newest always stays
//!       ^                one in ten minutes              one a minute
//!       `- the last one before: what was true when the retention begins
//! ```
//!
//! A changed partition gets a manifest at least every minute, and under load many more. What is kept of them is thinned
//! with their age: the first one of every minute for an hour, of every ten minutes for a day, of every hour beyond. So a
//! partition has some two hundred manifests for a day, and twenty-four more for every further one. A manifest costs a
//! small object, and the segments that only the past still names: with a database that is rewritten all the time
//! that is what retention costs.
//!
//! Time is the hybrid timestamp at which the manifest's version was the current one: all that was committed before is in
//! it, and nothing that came after. To restore to a moment is to take the last manifest at or before it.
//!
//! # Manifests that are damaged
//! One that cannot be read tells nothing of its time but that it lies between those of its neighbours: names sort as times do. History is
//! shown without it, with a warning in the log; whoever asks for a time at which it may have been the newest is refused, and told which it is
//! and which times beside it there are, for an older version than the one that was asked for is never taken silently. What stands in a list of
//! history can be gone back to: at exactly its own time a version is the newest. Nothing is collected meanwhile ([`crate::collect`]).

use std::sync::Arc;
use std::time::Duration;

use fulmar_pages::{Manifest, PAGE_SIZE, PartitionId};
use fulmar_store::{ManifestName, PageStore, StoreError};
use futures::stream::{self, StreamExt};

use crate::calendar::{DAY_MS, HOUR_MS, MINUTE_MS, timestamp};
use crate::partition::{store_error, store_error_of};
use crate::{Engine, Error, Result, sqlstate};

/// How long history is kept if nobody says another time.
const DAY: Duration = Duration::from_secs(86_400);
/// Manifests that are read at the same time.
const READS_AT_ONCE: usize = 16;

/// Says how long the history of a partition is kept. What a partition had before a change counts until the next
/// collection.
pub type RetentionSource = Arc<dyn Fn(PartitionId) -> Duration + Send + Sync>;

/// A day for all.
pub(crate) fn a_day() -> RetentionSource {
    Arc::new(|_| DAY)
}

/// A version of a partition that can be gone back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestorePoint {
    /// When it was the current version, in milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Bytes of the database.
    pub size_bytes: u64,
    /// Its number.
    pub version: u64,
    /// Another one after each restore.
    pub lineage: u64,
}

/// Milliseconds since 1970 of a hybrid timestamp.
fn milliseconds(timestamp: u64) -> u64 {
    timestamp >> 16
}

impl RestorePoint {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        RestorePoint {
            time_unix_ms: milliseconds(manifest.timestamp),
            size_bytes: u64::from(manifest.page_count) * PAGE_SIZE as u64,
            version: manifest.version.number,
            lineage: manifest.version.lineage,
        }
    }
}

impl Engine {
    /// The versions that a partition can be restored to, the oldest first.
    pub async fn history(&self, id: PartitionId) -> Result<Vec<RestorePoint>> {
        let mut points = Vec::new();
        for manifest in self.manifests(id).await? {
            match manifest {
                Ok(manifest) => points.push(RestorePoint::of(&manifest)),
                Err(error) => {
                    tracing::warn!(%error, partition = %id, "a restore point is not listed: its manifest is damaged");
                }
            }
        }
        Ok(points)
    }

    /// The manifest of a partition that was the newest one at a time. Callers keep it from being deleted.
    pub(crate) async fn manifest_at(&self, id: PartitionId, at_unix_ms: u64) -> Result<Arc<Manifest>> {
        let now_ms = self.node().clock.unix_ms();
        if at_unix_ms > now_ms {
            return Err(Error::new(sqlstate::INVALID_PARAMETER_VALUE, "the time is in the future")
                .detail(format!("It is {} now.", timestamp(now_ms))));
        }
        at(id, &self.manifests(id).await?, at_unix_ms)
    }
}

impl Engine {
    /// A partition's manifests up to its epoch (what is above is of a restore that did not come to its end), the oldest first.
    async fn manifests(&self, id: PartitionId) -> Result<Vec<Readable>> {
        let store = &self.node().store;
        let mut names = store.list_manifests(Some(id)).await.map_err(store_error)?;
        let epoch = self.era(id).epoch;
        names.retain(|name| name.epoch <= epoch);
        read(store, &names).await
    }
}

/// A manifest, or that it is damaged.
type Readable = std::result::Result<Arc<Manifest>, StoreError>;

fn time_ms(manifest: &Manifest) -> u64 {
    milliseconds(manifest.timestamp)
}

/// Of a partition's manifests, the oldest first, the one that was the newest at a time.
fn at(id: PartitionId, manifests: &[Readable], at_unix_ms: u64) -> Result<Arc<Manifest>> {
    let is_later =
        |manifest: &Readable| manifest.as_ref().is_ok_and(|manifest| time_ms(manifest) > at_unix_ms);
    let begun = manifests.iter().position(is_later).unwrap_or(manifests.len());
    let readable = |manifest: &Readable| manifest.as_ref().ok().cloned();
    let (before, after) = manifests.split_at(begun);
    let newest = before.iter().rev().find_map(readable);
    if let Some(newest) = newest.as_ref().filter(|newest| time_ms(newest) == at_unix_ms) {
        return Ok(newest.clone());
    }
    match (before.last(), newest) {
        (Some(Err(damaged)), newest) => {
            let next = after.first().and_then(readable);
            Err(damaged_point(id, damaged.clone(), newest.as_deref(), next.as_deref()))
        }
        (_, Some(newest)) => Ok(newest),
        (_, None) => Err(no_such_point(at_unix_ms, after.first().and_then(readable).as_deref().map(time_ms))),
    }
}

/// What was the newest version then cannot be read: it lies between these.
fn damaged_point(
    id: PartitionId,
    damaged: StoreError,
    before: Option<&Manifest>,
    after: Option<&Manifest>,
) -> Error {
    let times: Vec<String> =
        before.into_iter().chain(after).map(|manifest| timestamp(time_ms(manifest))).collect();
    let others = match times.is_empty() {
        true => String::new(),
        false => format!(", or choose another time: there are versions of {}", times.join(" and ")),
    };
    store_error_of(id, damaged).hint(format!(
        "It is the restore point for that time, as far as one can know. Restore it from a copy of the store{others}."
    ))
}

fn no_such_point(at_unix_ms: u64, first_ms: Option<u64>) -> Error {
    let message = format!("the database's history does not reach back to {}", timestamp(at_unix_ms));
    let error = Error::new(sqlstate::INVALID_PARAMETER_VALUE, message);
    match first_ms {
        Some(first_ms) => error
            .detail(format!("It begins at {}.", timestamp(first_ms)))
            .hint("`SELECT * FROM fulmar.history` in the database, or `fulmar tenant history`, lists what there is."),
        None => error.detail("It has none yet: nothing of it has been flushed.").hint(
            "A changed database gets a restore point at least every minute.",
        ),
    }
}

/// Manifests, in their order. One that is deleted meanwhile is left out.
async fn read(store: &PageStore, names: &[ManifestName]) -> Result<Vec<Readable>> {
    let reads: Vec<_> = names.iter().map(|name| store.manifest(*name)).collect();
    let mut found = Vec::new();
    let mut reads = stream::iter(reads).buffered(READS_AT_ONCE);
    while let Some(read) = reads.next().await {
        match read {
            Err(StoreError::Missing { .. }) => {}
            Ok(_) | Err(StoreError::Damaged { .. } | StoreError::Misnamed { .. }) => found.push(read),
            Err(error) => return Err(store_error(error)),
        }
    }
    Ok(found)
}

/// Which of a partition's manifests, all of them, in their order, have had their time.
pub(crate) async fn expired(
    store: &PageStore,
    names: &[ManifestName],
    now_ms: u64,
    retention: Duration,
) -> Result<Vec<ManifestName>> {
    let readable: std::result::Result<Vec<_>, _> = read(store, names).await?.into_iter().collect();
    let manifests = readable.map_err(store_error)?;
    let over = over(&manifests, now_ms, retention.as_millis() as u64);
    Ok(over.into_iter().map(ManifestName::of).collect())
}

/// Those of a partition's manifests, the oldest first, that have had their time. The newest never has.
fn over(manifests: &[Arc<Manifest>], now_ms: u64, retention_ms: u64) -> Vec<&Manifest> {
    let mut over = Vec::new();
    let mut kept: Option<&Manifest> = None;
    for pair in manifests.windows(2) {
        let (manifest, next) = (&*pair[0], &*pair[1]);
        let ended_ms = milliseconds(next.timestamp);
        let expired = ended_ms <= now_ms.saturating_sub(retention_ms);
        // What was there before a restore is what the restore can be undone with.
        let last_of_lineage = manifest.version.lineage != next.version.lineage;
        if expired || (!last_of_lineage && kept.is_some_and(|kept| is_near(kept, manifest, now_ms))) {
            over.push(manifest);
        } else {
            kept = Some(manifest);
        }
    }
    over
}

/// Whether an earlier manifest will do for this one, as old as it is.
fn is_near(earlier: &Manifest, manifest: &Manifest, now_ms: u64) -> bool {
    let time_ms = milliseconds(manifest.timestamp);
    let width_ms = match now_ms.saturating_sub(time_ms) {
        age_ms if age_ms <= HOUR_MS => MINUTE_MS,
        age_ms if age_ms <= DAY_MS => 10 * MINUTE_MS,
        _ => HOUR_MS,
    };
    earlier.version.lineage == manifest.version.lineage
        && milliseconds(earlier.timestamp) / width_ms == time_ms / width_ms
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fulmar_pages::Version;

    use super::*;

    const NOW_MS: u64 = 1_790_000_000_000;

    fn manifest(time_ms: u64, lineage: u64) -> Arc<Manifest> {
        Arc::new(Manifest {
            partition: PartitionId(7),
            version: Version { lineage, epoch: 1, number: time_ms },
            page_count: 1,
            timestamp: time_ms << 16,
            segments: Vec::new(),
            outcomes: Vec::new(),
            outcomes_horizon: 0,
        })
    }

    /// Whatever time is asked for: what cannot be read is never passed over, and what can be is found at its own time.
    #[test]
    fn a_damaged_manifest_is_no_older_one() {
        let damaged = || {
            let object = "manifests/0000000000000007/00000001/00000000000000aa".to_owned();
            Err(StoreError::Misnamed { object, store: "memory:".to_owned() })
        };
        let history =
            [Ok(manifest(100, 7)), damaged(), Ok(manifest(300, 7)), Ok(manifest(400, 7)), damaged()];
        let found = |at_ms| at(PartitionId(7), &history, at_ms).map(|manifest| time_ms(&manifest));
        for (at_ms, expected) in [(100, 100), (300, 300), (399, 300), (400, 400)] {
            assert_eq!(found(at_ms), Ok(expected), "{at_ms}");
        }
        for (at_ms, beside) in [(101, 2), (299, 2), (401, 1)] {
            let error = found(at_ms).unwrap_err();
            assert!(error.message().contains("00000000000000aa"), "{error:?}");
            assert_eq!(error.get_hint().unwrap().matches("1970-01-01").count(), beside, "{error:?}");
        }
        assert_eq!(found(99).unwrap_err().state(), sqlstate::INVALID_PARAMETER_VALUE);
        // There is nothing else.
        let error = at(PartitionId(7), &[damaged()], 5).unwrap_err();
        assert!(error.get_hint().unwrap().ends_with("from a copy of the store."), "{error:?}");
    }

    /// The times that are kept, of manifests at these times.
    fn kept(times: &[u64], now_ms: u64, retention_ms: u64) -> Vec<u64> {
        let manifests: Vec<_> = times.iter().map(|time_ms| manifest(*time_ms, 7)).collect();
        let over = over(&manifests, now_ms, retention_ms);
        let is_over = |time_ms: u64| over.iter().any(|manifest| manifest.version.number == time_ms);
        times.iter().copied().filter(|time_ms| !is_over(*time_ms)).collect()
    }

    #[test]
    fn a_month_of_minutes_is_thinned() {
        let times: Vec<u64> = (0..30 * 24 * 60).rev().map(|age| NOW_MS - age * MINUTE_MS).collect();
        assert_eq!(kept(&times, NOW_MS, 0), [NOW_MS]);
        let day = kept(&times, NOW_MS, DAY_MS);
        assert!((195..205).contains(&day.len()), "{}", day.len());
        assert!(day[0] <= NOW_MS - DAY_MS, "what was true a day ago");
        let month = kept(&times, NOW_MS, 30 * DAY_MS);
        assert!((890..905).contains(&month.len()), "{}", month.len());
    }

    #[test]
    fn what_was_before_a_restore_stays() {
        let first = manifest(NOW_MS - 100, 7);
        let (before, restored) = (manifest(NOW_MS - 10, 7), manifest(NOW_MS - 9, 70));
        let history = [first.clone(), before.clone(), restored, manifest(NOW_MS, 70)];
        assert_eq!(over(&history, NOW_MS, DAY_MS), Vec::<&Manifest>::new());
        assert_eq!(over(&history, NOW_MS + DAY_MS, DAY_MS), [&*first, &*before, &*history[2]]);
    }

    /// Whatever was thinned, and whenever: a moment within the retention is answered with a version that is older than
    /// the one of that moment by no more than the width for its age.
    #[test]
    fn every_moment_within_the_retention_has_its_version() {
        let mut seed = 7u64;
        let mut below = |most: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % most
        };
        for case in 0..2000 {
            let most_age_ms = [HOUR_MS, DAY_MS, 3 * DAY_MS][case % 3];
            let ages: BTreeSet<u64> = (0..1 + below(200)).map(|_| below(most_age_ms)).collect();
            let times: Vec<u64> = ages.iter().rev().map(|age| NOW_MS - age).collect();
            let (mut left, mut now_ms) = (times.clone(), NOW_MS);
            for _ in 0..1 + below(4) {
                now_ms += below(DAY_MS / 10);
                left = kept(&left, now_ms, DAY_MS);
            }
            assert_eq!(left.last(), times.last());
            let moment_ms = now_ms - below(DAY_MS);
            let last_of = |times: &[u64]| times.iter().copied().rfind(|time_ms| *time_ms <= moment_ms);
            let Some(current_then) = last_of(&times) else { continue };
            let found = last_of(&left).unwrap_or(0);
            let width_ms = match now_ms - current_then {
                age_ms if age_ms <= HOUR_MS => MINUTE_MS,
                age_ms if age_ms <= DAY_MS => 10 * MINUTE_MS,
                _ => HOUR_MS,
            };
            assert!(found + width_ms >= current_then, "case {case}: {found} instead of {current_then}");
        }
    }
}
