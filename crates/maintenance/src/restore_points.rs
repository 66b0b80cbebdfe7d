//! Restore points: a partition's past manifests. Each is a version that the partition can be
//! restored to or branched from.
//!
//! ```text
//!   now - retention                                                       now
//!   ... |     .     .     .     .     .     .     .     .     .     .     .*   <- always kept
//!       ^                              one per minute
//!       `- the last one before: the version current when the retention period begins
//! ```
//!
//! A changed partition gets a manifest at least every minute, and many more under load. The last
//! manifest of each minute is kept for the retention period, so the version that was current at a
//! whole minute is the same as if all had been kept. A manifest costs a small object, plus the
//! segments that only past manifests reference: that is the cost of retention for a database that
//! is rewritten all the time.
//!
//! If the disk that holds the store is nearly full, older history is thinned: to one manifest per
//! 10 minutes beyond an age of one hour, and one per hour beyond a day. Commits are rejected at
//! that point, so a coarser history is the lesser evil.
//!
//! Time means the hybrid timestamp at which the manifest's version was current: the version
//! includes all commits before it and none after. Restoring to a time takes the last manifest at or
//! before it.
//!
//! # If the system clock was set back
//! Hybrid timestamps never go back. If the system clock was wrong for a moment, say two hours
//! ahead, all versions of the next two hours have future timestamps within about the same
//! millisecond. Which of them was current at a time in between is unknown, so two rules hold:
//! - Versions with a future timestamp are never thinned: by their timestamps all of them belong to
//!   one minute.
//! - A time is rejected if the next later version is more than a minute in the future: the version
//!   before it may be far older than the requested one. The error names both. (Hybrid time may be
//!   up to a minute ahead without any fault.)
//!
//! # Damaged manifests
//! The time of an unreadable manifest is only known to lie between those of its neighbours, since
//! names sort by time. The list of restore points omits it and logs a warning. A request for a time
//! at which it may have been the newest fails: the error names the damaged manifest and the
//! neighbouring times, because an older version than the requested one is never chosen silently.
//! Every restore point in the list can be used: at exactly its own time it is the newest.
//!
//! While a manifest is damaged no segment is collected ([`crate::collect`]). It is deleted once its
//! successor is older than the retention period.

use std::sync::Arc;
use std::time::Duration;

use fulmar_pages::{Manifest, PAGE_SIZE, PartitionId};
use fulmar_store::{ManifestName, PageStore, StoreError};
use futures::stream::{self, StreamExt};

use fulmar_mvcc::{MAX_CLOCK_LEAD_MS, store_error, store_error_of};
use fulmar_sqlite::calendar::{DAY_MS, HOUR_MS, MINUTE_MS, timestamp};
use fulmar_sqlite::{Error, Result, sqlstate};

/// The default retention period.
const DEFAULT_RETENTION: Duration = Duration::from_secs(86_400);
/// Maximum number of concurrent manifest reads.
const MAX_CONCURRENT_READS: usize = 16;
/// Thinning while disk space is low: (minimum age, one manifest per this interval).
const THINNING: [(u64, u64); 2] = [(HOUR_MS, 10 * MINUTE_MS), (DAY_MS, HOUR_MS)];

/// Returns a partition's retention period. A change takes effect at the next collection.
pub type RetentionSource = Arc<dyn Fn(PartitionId) -> Duration + Send + Sync>;

/// A retention period of one day for all partitions.
pub fn default_retention() -> RetentionSource {
    Arc::new(|_| DEFAULT_RETENTION)
}

/// A version that a partition can be restored to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestorePoint {
    /// When the version was current, in milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Size of the database in bytes.
    pub size_bytes: u64,
    /// Version number.
    pub version: u64,
    /// Changes with every restore.
    pub lineage: u64,
}

/// Converts a hybrid timestamp to milliseconds since 1970.
fn milliseconds(timestamp: u64) -> u64 {
    timestamp >> 16
}

impl RestorePoint {
    /// The restore point of a manifest.
    pub fn of(manifest: &Manifest) -> Self {
        RestorePoint {
            time_unix_ms: milliseconds(manifest.timestamp),
            size_bytes: u64::from(manifest.page_count) * PAGE_SIZE as u64,
            version: manifest.version.number,
            lineage: manifest.version.lineage,
        }
    }
}

/// A manifest, or the error that it is damaged.
pub(crate) type Readable = std::result::Result<Arc<Manifest>, StoreError>;

fn time_ms(manifest: &Manifest) -> u64 {
    milliseconds(manifest.timestamp)
}

/// Returns the manifests that decide which one was the newest at a time: from the last readable one
/// at or before it to the first readable one after it. `names` is sorted, oldest first. Binary
/// search, since a history of days has thousands of manifests.
pub(crate) async fn around(
    store: &PageStore,
    names: &[ManifestName],
    at_unix_ms: u64,
) -> Result<Vec<Readable>> {
    // Invariants: every readable manifest before `low` is at or before the time. `later`, if in
    // range, is readable and after it. Nothing between `high` and `later` is readable.
    let (mut low, mut high, mut later) = (0, names.len(), names.len());
    while low < high {
        let middle = low + (high - low) / 2;
        match readable(store, names, middle..high).await? {
            Some((at, manifest)) if time_ms(&manifest) <= at_unix_ms => low = at + 1,
            Some((at, _)) => (high, later) = (middle, at),
            None => high = middle,
        }
    }
    let before = readable(store, names, (0..low).rev()).await?;
    read(store, &names[before.map_or(0, |(at, _)| at)..names.len().min(later + 1)], |manifest| manifest).await
}

/// Returns the first readable manifest of `indexes`, and its index.
async fn readable(
    store: &PageStore,
    names: &[ManifestName],
    indexes: impl Iterator<Item = usize>,
) -> Result<Option<(usize, Arc<Manifest>)>> {
    for at in indexes {
        if let Some(Ok(manifest)) = read(store, &names[at..=at], |manifest| manifest).await?.pop() {
            return Ok(Some((at, manifest)));
        }
    }
    Ok(None)
}

/// Chooses the manifest that was the newest at a time from `manifests`, oldest first.
pub(crate) fn at(
    id: PartitionId,
    manifests: &[Readable],
    at_unix_ms: u64,
    now_ms: u64,
) -> Result<Arc<Manifest>> {
    let is_later =
        |manifest: &Readable| manifest.as_ref().is_ok_and(|manifest| time_ms(manifest) > at_unix_ms);
    let begun = manifests.iter().position(is_later).unwrap_or(manifests.len());
    let readable = |manifest: &Readable| manifest.as_ref().ok().cloned();
    let (before, after) = manifests.split_at(begun);
    let newest = before.iter().rev().find_map(readable);
    if let Some(newest) = newest.as_ref().filter(|newest| time_ms(newest) == at_unix_ms) {
        return Ok(newest.clone());
    }
    let next = after.first().and_then(readable);
    if let Some(next) = next.filter(|next| time_ms(next) > now_ms.saturating_add(MAX_CLOCK_LEAD_MS)) {
        return Err(clock_was_set_back(at_unix_ms, newest.as_deref(), &next));
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

/// The error for a time at which the newest manifest is damaged. `before` and `after` are its
/// readable neighbours.
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
        false => format!(", or choose another time: there are restore points at {}", times.join(" and ")),
    };
    store_error_of(id, damaged).hint(format!(
        "The damaged manifest may be the restore point for that time. Restore it from a copy of \
         the store{others}."
    ))
}

/// The error for a time whose version is unknown because later versions have future timestamps.
fn clock_was_set_back(at_unix_ms: u64, before: Option<&Manifest>, next: &Manifest) -> Error {
    let message = format!(
        "cannot determine the version of the database at {}: the system clock was set back",
        timestamp(at_unix_ms)
    );
    let next_ms = timestamp(time_ms(next));
    let error = Error::new(sqlstate::INVALID_PARAMETER_VALUE, message);
    match before.map(|before| timestamp(time_ms(before))) {
        Some(before_ms) => error
            .detail(format!("The restore point after {before_ms} is at {next_ms}, which is in the future."))
            .hint(format!("Choose exactly {before_ms}, or wait until {next_ms}.")),
        None => error
            .detail(format!("The first restore point is at {next_ms}, which is in the future."))
            .hint(format!("Wait until {next_ms}.")),
    }
}

fn no_such_point(at_unix_ms: u64, first_ms: Option<u64>) -> Error {
    let message = format!("no restore point at or before {}", timestamp(at_unix_ms));
    let error = Error::new(sqlstate::INVALID_PARAMETER_VALUE, message);
    match first_ms {
        Some(first_ms) => {
            error.detail(format!("The oldest restore point is at {}.", timestamp(first_ms))).hint(
                "SELECT * FROM fulmar.history in the database, or \"fulmar tenant history\", \
                 lists the restore points.",
            )
        }
        None => error
            .detail("The database has no restore points: it has not been flushed yet.")
            .hint("A changed database gets a restore point at least every minute."),
    }
}

/// Reads manifests in order and returns `wanted` of each, since all manifests of a long history may
/// not fit in memory. Manifests deleted meanwhile are left out.
pub(crate) async fn read<T>(
    store: &PageStore,
    names: &[ManifestName],
    wanted: impl Fn(Arc<Manifest>) -> T,
) -> Result<Vec<std::result::Result<T, StoreError>>> {
    let reads: Vec<_> = names.iter().map(|name| store.manifest(*name)).collect();
    let mut found = Vec::new();
    let mut reads = stream::iter(reads).buffered(MAX_CONCURRENT_READS);
    while let Some(read) = reads.next().await {
        match read {
            Ok(manifest) => found.push(Ok(wanted(manifest))),
            Err(StoreError::Missing { .. }) => {}
            Err(error @ (StoreError::Damaged { .. } | StoreError::WrongIdentity { .. })) => {
                found.push(Err(error))
            }
            Err(error) => return Err(store_error(error)),
        }
    }
    Ok(found)
}

/// The time and lineage of a manifest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ManifestTime {
    time_ms: u64,
    lineage: u64,
}

impl ManifestTime {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        ManifestTime { time_ms: time_ms(manifest), lineage: manifest.version.lineage }
    }
}

/// A past manifest. `when` is None if the manifest cannot be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub name: ManifestName,
    pub when: Option<ManifestTime>,
}

/// Returns the manifests that have expired. `points` is sorted, oldest first; the newest never
/// expires. `sparsely` selects the thinning for low disk space.
pub(crate) fn expired(
    points: &[Point],
    now_ms: u64,
    retention: Duration,
    sparsely: bool,
) -> Vec<ManifestName> {
    let begun_ms = now_ms.saturating_sub(retention.as_millis() as u64);
    let (mut next, mut kept): (Option<ManifestTime>, Option<ManifestTime>) = (None, None);
    let mut over = Vec::new();
    for point in points.iter().rev() {
        // Exempt: the version current at the start of the retention period, and future timestamps,
        // which are all wrong.
        let is_redundant = |when: ManifestTime| {
            when.time_ms > begun_ms
                && when.time_ms <= now_ms
                && kept.is_some_and(|kept| is_near(when, kept, now_ms, sparsely))
        };
        // Even if the direct successor is unreadable, this manifest was superseded no later than
        // the next readable one.
        let has_expired = next.is_some_and(|next| next.time_ms <= begun_ms);
        if has_expired || point.when.is_some_and(is_redundant) {
            over.push(point.name);
        } else {
            kept = point.when.or(kept);
        }
        next = point.when.or(next);
    }
    over.reverse();
    over
}

/// Whether a later manifest makes this one redundant. A manifest of another lineage does not: the
/// versions before a restore are needed to undo it.
fn is_near(when: ManifestTime, later: ManifestTime, now_ms: u64, sparsely: bool) -> bool {
    let age_ms = now_ms.saturating_sub(when.time_ms);
    let width_ms = THINNING.iter().rfind(|(least_ms, _)| sparsely && age_ms > *least_ms);
    let width_ms = width_ms.map_or(MINUTE_MS, |(_, width_ms)| *width_ms);
    // A manifest exactly at a full minute belongs to the minute that ends there.
    let part = |time_ms: u64| time_ms.saturating_sub(1) / width_ms;
    when.lineage == later.lineage && part(when.time_ms) == part(later.time_ms)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fulmar_pages::Version;
    use fulmar_store::{Backend, Store};

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

    /// A damaged manifest is never skipped, and a readable one is found at its own time.
    #[test]
    fn damaged_manifest_is_never_replaced_by_an_older_one() {
        let damaged = || {
            let object = "manifests/0000000000000007/00000001/00000000000000aa".to_owned();
            Err(StoreError::WrongIdentity { object, store: "memory:".to_owned() })
        };
        let history =
            [Ok(manifest(100, 7)), damaged(), Ok(manifest(300, 7)), Ok(manifest(400, 7)), damaged()];
        let found = |at_ms| at(PartitionId(7), &history, at_ms, NOW_MS).map(|manifest| time_ms(&manifest));
        for (at_ms, expected) in [(100, 100), (300, 300), (399, 300), (400, 400)] {
            assert_eq!(found(at_ms), Ok(expected), "{at_ms}");
        }
        for (at_ms, neighbours) in [(101, 2), (299, 2), (401, 1)] {
            let error = found(at_ms).unwrap_err();
            assert!(error.message().contains("00000000000000aa"), "{error:?}");
            assert_eq!(error.get_hint().unwrap().matches("1970-01-01").count(), neighbours, "{error:?}");
        }
        assert_eq!(found(99).unwrap_err().state(), sqlstate::INVALID_PARAMETER_VALUE);
        // No other manifest exists.
        let error = at(PartitionId(7), &[damaged()], 5, NOW_MS).unwrap_err();
        assert!(error.get_hint().unwrap().ends_with("from a copy of the store."), "{error:?}");
    }

    fn point(time_ms: u64, lineage: u64) -> Point {
        let manifest = manifest(time_ms, lineage);
        Point { name: ManifestName::of(&manifest), when: Some(ManifestTime::of(&manifest)) }
    }

    fn points(times: &[u64]) -> Vec<Point> {
        times.iter().map(|time_ms| point(*time_ms, 7)).collect()
    }

    /// The times of the manifests that are kept.
    fn kept(times: &[u64], now_ms: u64, retention_ms: u64, sparsely: bool) -> Vec<u64> {
        let over = expired(&points(times), now_ms, Duration::from_millis(retention_ms), sparsely);
        let is_over = |time_ms: u64| over.iter().any(|name| name.number == time_ms);
        times.iter().copied().filter(|time_ms| !is_over(*time_ms)).collect()
    }

    #[test]
    fn one_manifest_per_minute_is_kept_and_fewer_when_space_is_low() {
        let times: Vec<u64> = (0..30 * 24 * 60).rev().map(|age| NOW_MS - age * MINUTE_MS).collect();
        assert_eq!(kept(&times, NOW_MS, 0, false), [NOW_MS]);
        for (days, sparse) in [(1, 195..205), (30, 890..905)] {
            let all = kept(&times, NOW_MS, days * DAY_MS, false);
            let minutes = (days * DAY_MS / MINUTE_MS) as usize;
            assert!((minutes..minutes + 2).contains(&all.len()), "{}", all.len());
            let some = kept(&times, NOW_MS, days * DAY_MS, true);
            assert!(sparse.contains(&some.len()), "{}", some.len());
            let begun_ms = all[0].max(some[0]);
            assert!(
                days > 1 || begun_ms <= NOW_MS - DAY_MS,
                "the version current at the start of the retention period is kept"
            );
        }
        let seconds: Vec<u64> = (0..600).rev().map(|age| NOW_MS - age * 1000).collect();
        assert_eq!(
            kept(&seconds, NOW_MS, DAY_MS, false).len(),
            11,
            "the last manifest of each minute is kept"
        );
    }

    #[test]
    fn last_version_before_a_restore_is_kept() {
        let history =
            [(100, 7), (10, 7), (9, 70), (0, 70)].map(|(ago, lineage)| point(NOW_MS - ago, lineage));
        let over = |now_ms| {
            let over = expired(&history, now_ms, Duration::from_millis(DAY_MS), true);
            over.iter().map(|name| NOW_MS - name.number).collect::<Vec<_>>()
        };
        assert_eq!(over(NOW_MS), [100, 9], "versions of the same minute are redundant");
        assert_eq!(over(NOW_MS + DAY_MS), [100, 10, 9]);
    }

    /// The clock was two hours ahead for one commit, and was then set back.
    #[test]
    fn clock_set_back_rejects_ambiguous_times_and_keeps_all_versions() {
        let jump_ms = NOW_MS + 2 * HOUR_MS;
        let history: Vec<Readable> = [NOW_MS - MINUTE_MS, jump_ms, jump_ms + 1, jump_ms + 2]
            .map(|time_ms| Ok(manifest(time_ms, 7)))
            .into();
        let found =
            |at_ms, now_ms| at(PartitionId(7), &history, at_ms, now_ms).map(|manifest| time_ms(&manifest));
        let error = found(NOW_MS, NOW_MS + HOUR_MS).unwrap_err();
        assert_eq!(error.state(), sqlstate::INVALID_PARAMETER_VALUE);
        for neighbour in [NOW_MS - MINUTE_MS, jump_ms] {
            assert!(error.get_detail().unwrap().contains(&timestamp(neighbour)), "{error:?}");
        }
        assert_eq!(
            found(NOW_MS - MINUTE_MS, NOW_MS + HOUR_MS),
            Ok(NOW_MS - MINUTE_MS),
            "the exact time of a version is accepted"
        );
        assert_eq!(
            found(jump_ms - 1, jump_ms - MAX_CLOCK_LEAD_MS),
            Ok(NOW_MS - MINUTE_MS),
            "a lead of MOST_LEAD_MS is accepted"
        );

        let times: Vec<u64> = history.iter().map(|manifest| time_ms(manifest.as_ref().unwrap())).collect();
        assert_eq!(
            kept(&times, NOW_MS + HOUR_MS, DAY_MS, true),
            times,
            "versions with a future timestamp are not thinned"
        );
        assert_eq!(kept(&times, jump_ms + HOUR_MS, DAY_MS, false), [times[0], times[3]]);
    }

    /// The time of an unreadable manifest is unknown, but it was superseded no later than its next
    /// readable neighbour.
    #[test]
    fn unreadable_manifest_expires_once_its_successor_covers_the_retention() {
        let mut history = points(&[3, 2, 1, 0].map(|ago| NOW_MS - ago * MINUTE_MS));
        history[1].when = None;
        let check = |history: &[Point], retention_ms, expected: &[u64]| {
            let over = expired(history, NOW_MS, Duration::from_millis(retention_ms), false);
            let ago: Vec<u64> = over.iter().map(|name| (NOW_MS - name.number) / MINUTE_MS).collect();
            assert_eq!(ago, expected, "{history:?} for {retention_ms} ms");
        };
        check(&history, 9 * MINUTE_MS, &[]);
        check(&history, MINUTE_MS + 1, &[]);
        check(&history, MINUTE_MS, &[3, 2]);
        // It is unknown when the third version was superseded.
        history[3].when = None;
        check(&history, 0, &[3, 2]);
        history[2].when = None;
        check(&history, 0, &[]);
    }

    /// After any sequence of collections, the version current at a whole minute within the
    /// retention period is the same as if nothing had been deleted. While space is low this holds
    /// for every tenth minute of the last day, and for every hour before that.
    #[test]
    fn version_of_every_retained_minute_survives_collection() {
        let mut seed = 7u64;
        let mut below = |most: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % most
        };
        for case in 0..2000 {
            let (most_age_ms, sparsely) = ([HOUR_MS, DAY_MS, 3 * DAY_MS][case % 3], case % 2 == 0);
            let ages: BTreeSet<u64> = (0..1 + below(200)).map(|_| below(most_age_ms)).collect();
            let times: Vec<u64> = ages.iter().rev().map(|age| NOW_MS - age).collect();
            let (mut left, mut now_ms) = (times.clone(), NOW_MS);
            for _ in 0..1 + below(4) {
                now_ms += below(DAY_MS / 10);
                left = kept(&left, now_ms, 2 * DAY_MS, sparsely);
            }
            assert_eq!(left.last(), times.last());
            let age_ms = below(2 * DAY_MS);
            let width_ms = match age_ms {
                _ if !sparsely => MINUTE_MS,
                0..HOUR_MS => MINUTE_MS,
                HOUR_MS..DAY_MS => 10 * MINUTE_MS,
                _ => HOUR_MS,
            };
            let moment_ms = (now_ms - age_ms).next_multiple_of(width_ms);
            let last_of = |times: &[u64]| times.iter().copied().rfind(|time_ms| *time_ms <= moment_ms);
            assert_eq!(last_of(&left), last_of(&times), "case {case}, at {moment_ms}");
        }
    }

    /// For any damage and any time, the binary search gives the same answer as reading all
    /// manifests.
    #[tokio::test]
    async fn binary_search_finds_the_newest_manifest_at_a_time() {
        let store = Arc::new(Backend::memory());
        let pages = PageStore::open(store.clone());
        for (round, damaged) in
            [&[][..], &[0], &[8], &[3, 4, 5], &[0, 1, 2, 6, 8], &[1, 3, 5, 7]].iter().enumerate()
        {
            let partition = PartitionId(round as u64 + 1);
            let mut names = Vec::new();
            for number in 0..9 {
                let manifest = Manifest { partition, ..Manifest::clone(&manifest(100 + 10 * number, 7)) };
                let name = ManifestName::of(&manifest);
                names.push(name);
                match damaged.contains(&number) {
                    false => pages.put_manifest(&manifest).await.unwrap(),
                    true => {
                        let object = format!("manifests/{partition}/{:08x}/{:016x}", name.epoch, name.number);
                        store.put(&object, vec![7; 20].into()).await.unwrap();
                    }
                }
            }
            let all = read(&pages, &names, |manifest| manifest).await.unwrap();
            for at_ms in 95..190 {
                let some = around(&pages, &names, at_ms).await.unwrap();
                let [some, all] = [&some, &all].map(|manifests| at(partition, manifests, at_ms, NOW_MS));
                assert_eq!(some, all, "{damaged:?} damaged, at {at_ms}");
            }
        }
    }
}
