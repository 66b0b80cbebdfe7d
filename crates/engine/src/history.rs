//! The history of a partition: its manifests of the past, each a version that it can be restored to or branched from.
//!
//! ```text
//!   now - retention                                                             now
//!   ... |     .     .     .     .     .     .     .     .     .     .     .     .*   <- the newest always stays
//!       ^                              one a minute
//!       `- the last one before: what was true when the retention begins
//! ```
//!
//! A changed partition gets a manifest at least every minute, and under load many more. Of each minute the last one is kept, for as long
//! as the retention says: so what was current at a whole minute is what it would be if all were. A manifest costs a small object, and
//! the segments that only the past still names: with a database that is rewritten all the time that is what retention costs.
//!
//! Where the disk that all of it lies on is nearly full, what is older is thinned: one in ten minutes beyond an hour, one an hour beyond a day.
//! Commits are refused then; that a version of last night is ten minutes older than it might be is the lesser evil.
//!
//! Time is the hybrid timestamp at which the manifest's version was the current one: all that was committed before is in
//! it, and nothing that came after. To restore to a moment is to take the last manifest at or before it.
//!
//! # A system clock that was set back
//! Hybrid timestamps never go back. If the system clock was wrong for a moment, say two hours ahead, all versions of the next two
//! hours have times within the same millisecond or little more, in the future. Which of them was current at a time in between is
//! unknown, so two rules hold:
//! - A version whose time is in the future is never thinned: by their times all of them would be of one minute.
//! - A time is refused if the next later version's time is more than a minute in the future: the version before it may be far
//!   older than the one that is asked for. Both are named. (Up to a minute hybrid time may be ahead by itself.)
//!
//! # Manifests that are damaged
//! One that cannot be read tells nothing of its time but that it lies between those of its neighbours: names sort as times do. History is
//! shown without it, with a warning in the log; whoever asks for a time at which it may have been the newest is refused, and told which it is
//! and which times beside it there are, for an older version than the one that was asked for is never taken silently. What stands in a list of
//! history can be gone back to: at exactly its own time a version is the newest. No segment is collected meanwhile ([`crate::collect`]); when what came after
//! it is older than the retention, it goes too.

use std::sync::Arc;
use std::time::Duration;

use fulmar_pages::{Manifest, PAGE_SIZE, PartitionId};
use fulmar_store::{ManifestName, PageStore, StoreError};
use futures::stream::{self, StreamExt};

use crate::calendar::{DAY_MS, HOUR_MS, MINUTE_MS, timestamp};
use crate::clock::MOST_LEAD_MS;
use crate::partition::{store_error, store_error_of};
use crate::{Engine, Error, Result, sqlstate};

/// How long history is kept if nobody says another time.
const DAY: Duration = Duration::from_secs(86_400);
/// Manifests that are read at the same time.
const READS_AT_ONCE: usize = 16;
/// What is kept of older manifests where space is short: their age, and in how much time one.
const SPARSE: [(u64, u64); 2] = [(HOUR_MS, 10 * MINUTE_MS), (DAY_MS, HOUR_MS)];

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
        let names = self.manifests(id).await?;
        for point in read(&self.node().store, &names, |manifest| RestorePoint::of(&manifest)).await? {
            match point {
                Ok(point) => points.push(point),
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
        let names = self.manifests(id).await?;
        at(id, &around(&self.node().store, &names, at_unix_ms).await?, at_unix_ms, now_ms)
    }
}

impl Engine {
    /// A partition's manifests up to its epoch (what is above is of a restore that did not come to its end), the oldest first.
    async fn manifests(&self, id: PartitionId) -> Result<Vec<ManifestName>> {
        let mut names = self.node().store.list_manifests(Some(id)).await.map_err(store_error)?;
        let epoch = self.era(id).epoch;
        names.retain(|name| name.epoch <= epoch);
        Ok(names)
    }
}

/// A manifest, or that it is damaged.
type Readable = std::result::Result<Arc<Manifest>, StoreError>;

fn time_ms(manifest: &Manifest) -> u64 {
    milliseconds(manifest.timestamp)
}

/// Of a partition's manifests, the oldest first, those by which one knows what was the newest at a time: from the last one before that is
/// readable to the first one later that is. Found by halves: days of minutes are more than anybody wants to read.
async fn around(store: &PageStore, names: &[ManifestName], at_unix_ms: u64) -> Result<Vec<Readable>> {
    // What is readable before `low` is not later; `later` is, if it is one of them, and between `high` and that nothing is readable.
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

/// The first of some manifests that can be read, and which it is.
async fn readable(
    store: &PageStore,
    names: &[ManifestName],
    which: impl Iterator<Item = usize>,
) -> Result<Option<(usize, Arc<Manifest>)>> {
    for at in which {
        if let Some(Ok(manifest)) = read(store, &names[at..=at], |manifest| manifest).await?.pop() {
            return Ok(Some((at, manifest)));
        }
    }
    Ok(None)
}

/// Of a partition's manifests, the oldest first, the one that was the newest at a time.
fn at(id: PartitionId, manifests: &[Readable], at_unix_ms: u64, now_ms: u64) -> Result<Arc<Manifest>> {
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
    if let Some(next) = next.filter(|next| time_ms(next) > now_ms.saturating_add(MOST_LEAD_MS)) {
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

/// The version of that time is unknown: the times of later ones are in the future.
fn clock_was_set_back(at_unix_ms: u64, before: Option<&Manifest>, next: &Manifest) -> Error {
    let message = format!(
        "cannot determine what the database was at {}: the system clock was set back",
        timestamp(at_unix_ms)
    );
    let next_ms = timestamp(time_ms(next));
    let error = Error::new(sqlstate::INVALID_PARAMETER_VALUE, message);
    match before.map(|before| timestamp(time_ms(before))) {
        Some(before_ms) => error
            .detail(format!(
                "The restore point after that of {before_ms} has the time {next_ms}, which is in the future."
            ))
            .hint(format!("Choose exactly {before_ms}, or wait until {next_ms}.")),
        None => error
            .detail(format!("The first restore point has the time {next_ms}, which is in the future."))
            .hint(format!("Wait until {next_ms}.")),
    }
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

/// What is wanted of manifests, in their order: all of a long history are too much to be held at once. One that is deleted meanwhile is
/// left out.
async fn read<T>(
    store: &PageStore,
    names: &[ManifestName],
    wanted: impl Fn(Arc<Manifest>) -> T,
) -> Result<Vec<std::result::Result<T, StoreError>>> {
    let reads: Vec<_> = names.iter().map(|name| store.manifest(*name)).collect();
    let mut found = Vec::new();
    let mut reads = stream::iter(reads).buffered(READS_AT_ONCE);
    while let Some(read) = reads.next().await {
        match read {
            Ok(manifest) => found.push(Ok(wanted(manifest))),
            Err(StoreError::Missing { .. }) => {}
            Err(error @ (StoreError::Damaged { .. } | StoreError::Misnamed { .. })) => found.push(Err(error)),
            Err(error) => return Err(store_error(error)),
        }
    }
    Ok(found)
}

/// When a manifest was the current version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct When {
    time_ms: u64,
    lineage: u64,
}

impl When {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        When { time_ms: time_ms(manifest), lineage: manifest.version.lineage }
    }
}

/// A manifest of the past, and when it was the current version; `None` if it cannot be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub name: ManifestName,
    pub when: Option<When>,
}

/// Which of a partition's manifests, the oldest first, have had their time. The newest never has. `sparsely` is for
/// want of space.
pub(crate) fn over(points: &[Point], now_ms: u64, retention: Duration, sparsely: bool) -> Vec<ManifestName> {
    let begun_ms = now_ms.saturating_sub(retention.as_millis() as u64);
    let (mut next, mut kept): (Option<When>, Option<When>) = (None, None);
    let mut over = Vec::new();
    for point in points.iter().rev() {
        // Not for what was true when the retention begins, nor for times in the future, which are all wrong.
        let will_another_do = |when: When| {
            when.time_ms > begun_ms
                && when.time_ms <= now_ms
                && kept.is_some_and(|kept| is_near(when, kept, now_ms, sparsely))
        };
        // Whatever came directly behind it, it had come to its end when the next one that is readable began.
        let has_expired = next.is_some_and(|next| next.time_ms <= begun_ms);
        if has_expired || point.when.is_some_and(will_another_do) {
            over.push(point.name);
        } else {
            kept = point.when.or(kept);
        }
        next = point.when.or(next);
    }
    over.reverse();
    over
}

/// Whether a later manifest will do for this one. (One of another lineage will not: what was there before a restore is what the
/// restore can be undone with.)
fn is_near(when: When, later: When, now_ms: u64, sparsely: bool) -> bool {
    let age_ms = now_ms.saturating_sub(when.time_ms);
    let width_ms = SPARSE.iter().rfind(|(least_ms, _)| sparsely && age_ms > *least_ms);
    let width_ms = width_ms.map_or(MINUTE_MS, |(_, width_ms)| *width_ms);
    // One that began with a minute is that minute's, and ends the one before.
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

    /// Whatever time is asked for: what cannot be read is never passed over, and what can be is found at its own time.
    #[test]
    fn a_damaged_manifest_is_no_older_one() {
        let damaged = || {
            let object = "manifests/0000000000000007/00000001/00000000000000aa".to_owned();
            Err(StoreError::Misnamed { object, store: "memory:".to_owned() })
        };
        let history =
            [Ok(manifest(100, 7)), damaged(), Ok(manifest(300, 7)), Ok(manifest(400, 7)), damaged()];
        let found = |at_ms| at(PartitionId(7), &history, at_ms, NOW_MS).map(|manifest| time_ms(&manifest));
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
        let error = at(PartitionId(7), &[damaged()], 5, NOW_MS).unwrap_err();
        assert!(error.get_hint().unwrap().ends_with("from a copy of the store."), "{error:?}");
    }

    fn point(time_ms: u64, lineage: u64) -> Point {
        let manifest = manifest(time_ms, lineage);
        Point { name: ManifestName::of(&manifest), when: Some(When::of(&manifest)) }
    }

    fn points(times: &[u64]) -> Vec<Point> {
        times.iter().map(|time_ms| point(*time_ms, 7)).collect()
    }

    /// The times that are kept, of manifests at these times.
    fn kept(times: &[u64], now_ms: u64, retention_ms: u64, sparsely: bool) -> Vec<u64> {
        let over = over(&points(times), now_ms, Duration::from_millis(retention_ms), sparsely);
        let is_over = |time_ms: u64| over.iter().any(|name| name.number == time_ms);
        times.iter().copied().filter(|time_ms| !is_over(*time_ms)).collect()
    }

    #[test]
    fn each_minute_stays_and_where_space_is_short_fewer() {
        let times: Vec<u64> = (0..30 * 24 * 60).rev().map(|age| NOW_MS - age * MINUTE_MS).collect();
        assert_eq!(kept(&times, NOW_MS, 0, false), [NOW_MS]);
        for (days, sparse) in [(1, 195..205), (30, 890..905)] {
            let all = kept(&times, NOW_MS, days * DAY_MS, false);
            let minutes = (days * DAY_MS / MINUTE_MS) as usize;
            assert!((minutes..minutes + 2).contains(&all.len()), "{}", all.len());
            let some = kept(&times, NOW_MS, days * DAY_MS, true);
            assert!(sparse.contains(&some.len()), "{}", some.len());
            let begun_ms = all[0].max(some[0]);
            assert!(days > 1 || begun_ms <= NOW_MS - DAY_MS, "what was true when the retention begins");
        }
        let seconds: Vec<u64> = (0..600).rev().map(|age| NOW_MS - age * 1000).collect();
        assert_eq!(kept(&seconds, NOW_MS, DAY_MS, false).len(), 11, "the last of each minute");
    }

    #[test]
    fn what_was_before_a_restore_stays() {
        let history =
            [(100, 7), (10, 7), (9, 70), (0, 70)].map(|(ago, lineage)| point(NOW_MS - ago, lineage));
        let over = |now_ms| {
            let over = over(&history, now_ms, Duration::from_millis(DAY_MS), true);
            over.iter().map(|name| NOW_MS - name.number).collect::<Vec<_>>()
        };
        assert_eq!(over(NOW_MS), [100, 9], "others of the same minute");
        assert_eq!(over(NOW_MS + DAY_MS), [100, 10, 9]);
    }

    /// The clock was two hours ahead for one commit, and was set back then.
    #[test]
    fn a_clock_that_was_set_back_makes_no_silent_choice_and_loses_no_version() {
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
            "exactly that of a version"
        );
        assert_eq!(
            found(jump_ms - 1, jump_ms - MOST_LEAD_MS),
            Ok(NOW_MS - MINUTE_MS),
            "as far ahead as may be"
        );

        let times: Vec<u64> = history.iter().map(|manifest| time_ms(manifest.as_ref().unwrap())).collect();
        assert_eq!(kept(&times, NOW_MS + HOUR_MS, DAY_MS, true), times, "none is thinned before its time");
        assert_eq!(kept(&times, jump_ms + HOUR_MS, DAY_MS, false), [times[0], times[3]]);
    }

    /// Nobody knows when it began; but it has ended when the next one has begun, or before.
    #[test]
    fn what_cannot_be_read_goes_with_what_came_before_its_successor() {
        let mut history = points(&[3, 2, 1, 0].map(|ago| NOW_MS - ago * MINUTE_MS));
        history[1].when = None;
        let check = |history: &[Point], retention_ms, expected: &[u64]| {
            let over = over(history, NOW_MS, Duration::from_millis(retention_ms), false);
            let ago: Vec<u64> = over.iter().map(|name| (NOW_MS - name.number) / MINUTE_MS).collect();
            assert_eq!(ago, expected, "{history:?} for {retention_ms} ms");
        };
        check(&history, 9 * MINUTE_MS, &[]);
        check(&history, MINUTE_MS + 1, &[]);
        check(&history, MINUTE_MS, &[3, 2]);
        // When the third ended nobody knows.
        history[3].when = None;
        check(&history, 0, &[3, 2]);
        history[2].when = None;
        check(&history, 0, &[]);
    }

    /// Whatever was deleted, and whenever: to a whole minute within the retention the version is what it would be if nothing had been;
    /// where space is short, to every tenth of those of the last day, and to every hour before.
    #[test]
    fn every_minute_within_the_retention_has_its_version() {
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

    /// Whatever of it is damaged, and whichever time is asked for: the answer is the one that reading all of it would give.
    #[tokio::test]
    async fn what_was_the_newest_at_a_time_is_found_by_halves() {
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
