//! The backlog that a start reads is bounded, covered objects do not count, and a clean stop leaves
//! none.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};

use super::wild::Wild;
use super::*;

/// Opens the log. Also returns the number of objects that were read.
async fn open_and_count(
    options: SharedLogOptions,
    store: Arc<dyn Store>,
    limits: Limits,
) -> Result<(Arc<CommitLog>, Vec<(u64, Lsn)>, u64), LogError> {
    let options = SharedLogOptions { progress: Arc::default(), ..options };
    let progress = options.progress.clone();
    let (log, seen) = open_with(options, store, limits).await?;
    Ok((log, seen, progress.read()))
}

async fn read_by_start(store: &impl CloneStore) -> (Arc<CommitLog>, Vec<u64>, u64) {
    let opened = open_and_count(SharedLogOptions::default(), store.share(), Limits::default()).await;
    let (log, seen, read) = opened.unwrap();
    (log, seen.into_iter().map(|(transaction, _)| transaction).collect(), read)
}

/// No commit follows the flush, so no commit states which objects are covered.
#[tokio::test(start_paused = true)]
async fn covered_objects_are_deleted_without_further_commits() {
    let store = Backend::memory();
    let (log, _) = open(&store).await;
    for transaction in 1..=5 {
        append_durably(&log, transaction).await;
    }
    log.truncate(log.durable());
    assert_eq!(log.oldest(), log.durable());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(
        names(&store).await,
        [slot(1, 0), slot(1, 6)],
        "only the claim, which is not in the backlog, and the mark may remain"
    );
    // Covered objects are not stated twice.
    log.truncate(log.durable());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(log.oldest(), log.durable());
    let objects = names(&store).await.len();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(names(&store).await.len(), objects);
    drop(log);
    let (_, seen, read) = read_by_start(&store).await;
    assert!(seen.is_empty());
    assert_eq!(read, 2, "the start must read only the mark and its own seal");
}

/// The mark is put between the last flush and the end of the process.
#[tokio::test(start_paused = true)]
async fn clean_stop_deletes_the_mark() {
    let store = Backend::memory();
    let (log, _) = open(&store).await;
    append_durably(&log, 1).await;
    log.truncate(log.durable());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(names(&store).await, [slot(1, 0), slot(1, 2)], "the claim and the mark");
    close(&log).await.unwrap();
    drop(log);
    assert_eq!(names(&store).await, [slot(1, 3)], "the seal");
    let (log, seen, read) = read_by_start(&store).await;
    assert!(seen.is_empty());
    assert_eq!(read, 1, "the seal");
    append_durably(&log, 2).await;
    drop(log);
    let (_, seen, _) = read_by_start(&store).await;
    assert_eq!(seen, [2]);
}

/// Processes that are killed before their first commit leave a claim and a seal each.
#[tokio::test(start_paused = true)]
async fn starts_without_commits_do_not_grow_the_backlog() {
    let store = Backend::memory();
    let (log, _) = open(&store).await;
    append_durably(&log, 1).await;
    drop(log);
    for _ in 0..20 {
        // Killed immediately after the start.
        drop(open(&store).await);
    }
    let (log, seen, read) = read_by_start(&store).await;
    assert_eq!(seen, [1]);
    assert!(read > 40, "{read}");
    log.truncate(log.durable());
    sleep(Duration::from_secs(1)).await;
    drop(log);
    for _ in 0..3 {
        let (log, seen, read) = read_by_start(&store).await;
        assert!(seen.is_empty() && read <= 3, "{read} objects");
        log.truncate(log.durable());
        sleep(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn clean_stop_leaves_only_seals_and_a_start_reads_one() {
    let store = Backend::memory();
    for start in 1..=3 {
        let (log, seen, read) = read_by_start(&store).await;
        assert!(seen.is_empty());
        assert_eq!(read, u64::from(start > 1), "a start must read only the seal of the last stop");
        for transaction in 1..=20 {
            append_durably(&log, 100 * start + transaction).await;
        }
        log.truncate(log.durable());
        close(&log).await.unwrap();
        assert_eq!(log.backlog_objects(), 0);
        let seals = (1..=start).map(|incarnation| slot(incarnation, 21));
        assert_eq!(names(&store).await, seals.collect::<Vec<_>>());
    }
}

/// The processes were killed before they deleted the objects that they had flushed.
#[tokio::test(start_paused = true)]
async fn start_deletes_covered_objects_without_replaying_them() {
    let store = Backend::memory();
    let faulty = FaultyStore::new(Arc::new(store.clone()));
    faulty.always(StoreOperation::Delete, Some(StoreFault::Fail(FailureKind::Refused)));
    for start in 1..=2 {
        let (log, _, _) = read_by_start(&faulty).await;
        for transaction in 1..=200 {
            append_durably(&log, 1000 * start + transaction).await;
        }
        log.truncate(log.durable());
        append_durably(&log, 1000 * start + 999).await;
    }
    assert!(names(&store).await.len() > 400);
    faulty.always(StoreOperation::Delete, None);
    let (log, seen, read) = read_by_start(&faulty).await;
    assert_eq!(seen, [2999]);
    assert_eq!(read, 2, "the start must read only the last record and the seal");
    sleep(Duration::from_secs(10)).await;
    // A seal per earlier start, the record, and the new claim, which its own log does not need.
    assert_eq!(names(&store).await, [slot(1, 202), slot(2, 201), slot(2, 202), slot(3, 0)]);
    assert_eq!(log.backlog_objects(), 1);
}

/// An object whose statement a start could not rely on is damaged, whatever its checksum.
#[tokio::test(start_paused = true)]
async fn object_that_states_a_later_slot_is_refused() {
    let (at, later) = (Slot { incarnation: 1, sequence: 4 }, Slot { incarnation: 1, sequence: 5 });
    let head = |needed| object_format::Head {
        writer: fulmar_pages::LogId(1),
        slot: at,
        start: 0,
        needed,
        durable: 0,
    };
    let decode = |needed| Object::decode(at, object_format::finish(object_format::begin(), &head(needed)));
    decode(at).unwrap();
    let damage = decode(later).unwrap_err();
    assert_eq!(damage.offset, 56, "{damage:?}");
}

#[tokio::test(start_paused = true)]
async fn flush_is_due_from_half_of_the_limit_and_leaves_a_quarter() {
    let store = Backend::memory();
    let options = SharedLogOptions { backlog_objects: 40, ..SharedLogOptions::default() };
    let (log, _) = open_with(options, store.share(), Limits::default()).await.unwrap();
    let (notify, due) = std::sync::mpsc::channel();
    log.on_flush_due(Box::new(move || notify.send(()).unwrap()));
    let mut ends = Vec::new();
    for transaction in 1..=20 {
        assert_eq!(log.flush_before(), None);
        ends.push(append_durably(&log, transaction).await);
    }
    for transaction in 21..=30 {
        ends.push(append_durably(&log, transaction).await);
        // Ten objects remain after that position.
        assert_eq!(log.flush_before(), Some(ends[ends.len() - 11]));
    }
    assert_eq!(
        due.try_iter().count(),
        1,
        "the callback must be called once when the backlog exceeds half of its limit"
    );
    log.truncate(log.flush_before().unwrap());
    assert_eq!((log.backlog_objects(), log.flush_before()), (10, None));

    let bytes = 40 * (HEAD_BYTES + LENGTH_BYTES + commit(1, 10).len()) as u64;
    let options = SharedLogOptions { backlog_bytes: bytes, ..SharedLogOptions::default() };
    let (log, _) = open_with(options, Backend::memory().share(), Limits::default()).await.unwrap();
    while log.flush_before().is_none() {
        append_durably(&log, 1).await;
    }
    assert!((19..=21).contains(&log.backlog_objects()), "{}", log.backlog_objects());
    log.truncate(log.flush_before().unwrap());
    assert!(log.size_bytes() <= bytes / 2 && log.flush_before().is_none());
}

/// Nothing is flushed. Commits are still accepted, and share objects.
#[tokio::test(start_paused = true)]
async fn puts_are_throttled_beyond_the_backlog_limit() {
    let store = Backend::memory();
    let options = SharedLogOptions { backlog_objects: 40, ..SharedLogOptions::default() };
    let in_flight = options.in_flight as u64;
    let (log, _) = open_with(options, store.share(), Limits::default()).await.unwrap();
    let mut last = Lsn(0);
    while log.backlog_objects() < 40 {
        last = append_durably(&log, 1).await;
    }
    let (began, mut transactions) = (Instant::now(), 1);
    while began.elapsed() < Duration::from_secs(30) {
        last = append(&log, transactions);
        transactions += 1;
        sleep(Duration::from_millis(2)).await;
    }
    log.wait_durable(last).await.unwrap();
    let most = 40 + in_flight + began.elapsed().as_millis() as u64 / 100;
    assert!(log.backlog_objects() <= most, "{} objects, {transactions} commits", log.backlog_objects());
    // Once there is space again, commits do not wait for others.
    log.truncate(last);
    let begun = Instant::now();
    for transaction in 1..=10 {
        append_durably(&log, transaction).await;
    }
    assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
}

// The model test.

const SEEDS: u64 = 300;
/// Environment variable with a single seed to run.
const SEED: &str = "SHARED_LOG_BACKLOG_SEED";
const LIVES: u64 = 12;
const BACKLOG_LIMIT: usize = 16;
/// Maximum number of objects that a start may read: the limit, the objects that were put beyond it
/// while a slow flush runs, and the claim, mark and seal of each of a few lives that were too short
/// to flush. Without a limit a start would read hundreds.
const MAX_READ: u64 = 3 * BACKLOG_LIMIT as u64;

/// Transactions that were acknowledged, and those that manifests cover.
#[derive(Default)]
struct Model {
    acknowledged: BTreeSet<u64>,
    covered: BTreeSet<u64>,
    appended: u64,
    commits: u64,
    flushes: u64,
    most_read: u64,
}

/// A life: commits at random intervals, and a flusher that the log wakes or that finds records of
/// an earlier life. Ends at a random point.
async fn live(store: &Wild, model: &Arc<Mutex<Model>>, random: &mut StdRng) -> Result<(), LogError> {
    let options = SharedLogOptions {
        // A full object is put regardless of the limit.
        object_bytes: 2000,
        in_flight: 3,
        backlog_objects: BACKLOG_LIMIT,
        ..SharedLogOptions::default()
    };
    let limits = Limits {
        max_attempts: 5,
        first_delay: Duration::ZERO,
        max_delay: Duration::ZERO,
        ..Limits::default()
    };
    let (log, seen, read) = open_and_count(options, store.share(), limits).await?;
    let ids: BTreeSet<u64> = seen.iter().map(|(transaction, _)| *transaction).collect();
    {
        let mut model = model.lock();
        let lost: Vec<_> =
            model.acknowledged.difference(&ids).filter(|id| !model.covered.contains(id)).collect();
        assert!(
            lost.is_empty(),
            "{lost:?} were acknowledged, but are neither read nor covered by a manifest"
        );
        model.most_read = model.most_read.max(read);
        // Records in flight at the end of the last life may or may not count; now that is decided.
        model.acknowledged.extend(&ids);
    }
    let places = Arc::new(Mutex::new(seen.iter().map(|(id, lsn)| (*lsn, *id)).collect::<BTreeMap<_, _>>()));
    let wake = Arc::new(tokio::sync::Notify::new());
    let woken = wake.clone();
    log.on_flush_due(Box::new(move || woken.notify_one()));
    let flusher = tokio::spawn(flush(log.clone(), model.clone(), places.clone(), wake, random.random()));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..random.random_range(0..150) {
        let transaction = {
            let mut model = model.lock();
            model.appended += 1;
            model.appended
        };
        let appended = log.append(&commit(transaction, random.random_range(1..120)), Urgency::Immediate);
        // Appends are rejected while the store is unavailable.
        if let Ok(lsn) = appended {
            places.lock().insert(lsn, transaction);
            let (log, model) = (log.clone(), model.clone());
            clients.spawn(async move {
                if log.wait_durable(lsn).await.is_ok() {
                    let mut model = model.lock();
                    model.acknowledged.insert(transaction);
                    model.commits += 1;
                }
            });
        }
        sleep(Duration::from_millis(random.random_range(0..40))).await;
    }
    flusher.abort();
    let _ = flusher.await;
    if random.random_bool(0.2) {
        let _ = close(&log).await;
    }
    // No client gets an answer after a kill.
    clients.abort_all();
    while clients.join_next().await.is_some() {}
    drop(log);
    Ok(())
}

/// Flushes when that is due, as the engine does: manifests first, then the truncation. It is
/// aborted at an arbitrary point.
async fn flush(
    log: Arc<CommitLog>,
    model: Arc<Mutex<Model>>,
    places: Arc<Mutex<BTreeMap<Lsn, u64>>>,
    wake: Arc<tokio::sync::Notify>,
    seed: u64,
) {
    let mut random = StdRng::seed_from_u64(seed);
    loop {
        let earlier_records = (log.oldest() < log.start_position()).then(|| log.start_position());
        let Some(before) = log.flush_before().max(earlier_records) else {
            let _ = tokio::time::timeout(Duration::from_millis(500), wake.notified()).await;
            continue;
        };
        // Only durable records are flushed.
        let upto = log.durable();
        assert!(before <= upto, "{before} {upto}");
        sleep(Duration::from_millis(random.random_range(0..300))).await;
        {
            let mut model = model.lock();
            model.covered.extend(places.lock().range(..=upto).map(|(_, transaction)| *transaction));
            model.flushes += 1;
        }
        // The life may end between the two steps.
        tokio::task::yield_now().await;
        log.truncate(upto);
    }
}

async fn run(seed: u64) -> (u64, u64, u64) {
    let (store, model) = (Wild::new(seed), Arc::new(Mutex::new(Model::default())));
    let mut random = StdRng::seed_from_u64(seed ^ 0xbac);
    for _ in 0..LIVES {
        match live(&store, &model, &mut random).await {
            Ok(()) | Err(LogError::Store { .. } | LogError::Contended { .. }) => {}
            Err(error) => panic!("{SEED}={seed}: {error}"),
        }
        // Late puts arrive before or after the start of the next life.
        sleep(Duration::from_millis(random.random_range(0..4000))).await;
    }
    let model = model.lock();
    assert!(model.most_read <= MAX_READ, "{SEED}={seed}: a start read {} objects", model.most_read);
    (model.commits, model.flushes, model.most_read)
}

#[test]
fn starts_read_a_bounded_number_of_objects_and_every_acknowledged_commit() {
    let seeds = match std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..SEEDS,
    };
    let all = seeds.end - seeds.start == SEEDS;
    let (mut commits, mut flushes, mut most_read) = (0, 0, 0);
    for seed in seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let outcome = runtime.unwrap().block_on(run(seed));
        commits += outcome.0;
        flushes += outcome.1;
        most_read = most_read.max(outcome.2);
    }
    // The seeds must actually reach the limit.
    let reached = commits > 30_000 && flushes > 3000 && most_read > BACKLOG_LIMIT as u64;
    assert!(!all || reached, "{commits} commits, {flushes} flushes, at most {most_read} objects read");
}
