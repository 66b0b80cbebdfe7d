//! A successor takes the log over from a process that is alive and commits as fast as it can.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::wild::Wild;
use super::{
    CommitLog, Limits, LogError, SharedLogOptions, Urgency, append_durably, commit, names, open, open_with,
    slot,
};

/// Interval of the old process's commits: 200 per second.
const COMMIT_INTERVAL: Duration = Duration::from_millis(5);
/// Delay before and after a put takes effect: 20 to 50 ms together.
const DELAY_MS: std::ops::Range<u32> = 10..25;
/// How long a takeover may take.
const MAX_TAKEOVER: Duration = Duration::from_secs(5);

/// Appends until the log is taken over. Returns the acknowledged transactions.
async fn commit_until_fenced(log: Arc<CommitLog>, interval: Duration) -> Vec<u64> {
    let mut waiting = Vec::new();
    for transaction in 1.. {
        match log.append(&commit(transaction, 10), Urgency::Immediate) {
            Ok(lsn) => waiting.push((transaction, lsn)),
            Err(LogError::Fenced { .. }) => break,
            Err(LogError::Busy) => {}
            Err(error) => panic!("{error}"),
        }
        sleep(interval).await;
    }
    let mut acknowledged = Vec::new();
    for (transaction, lsn) in waiting {
        if log.wait_durable(lsn).await.is_ok() {
            acknowledged.push(transaction);
        }
    }
    acknowledged
}

#[tokio::test(start_paused = true)]
async fn every_takeover_from_a_committing_process_succeeds_in_time() {
    for seed in 0..20 {
        let store = Wild::slow(seed, DELAY_MS);
        let open =
            async || open_with(SharedLogOptions::default(), Arc::new(store.clone()), Limits::default()).await;
        let (old, _) = open().await.unwrap();
        let committing = tokio::spawn(commit_until_fenced(old, COMMIT_INTERVAL));
        sleep(Duration::from_millis(500 + 37 * seed)).await;
        let began = Instant::now();
        let (new, seen) = open().await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(began.elapsed() < MAX_TAKEOVER, "seed {seed}: {:?}", began.elapsed());
        append_durably(&new, 1_000_000).await;
        let acknowledged = committing.await.unwrap();
        assert!(acknowledged.len() > 50, "seed {seed}: the old process must have committed");
        let seen: Vec<u64> = seen.into_iter().map(|(transaction, _)| transaction).collect();
        assert!(acknowledged.iter().all(|transaction| seen.contains(transaction)), "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn barrier_that_the_log_has_not_reached_is_deleted() {
    let mut barriers = 0;
    for seed in 0..100 {
        let store = Wild::slow(seed, DELAY_MS);
        let (old, _) = open(&store).await;
        // So seldom that the successor often wins the second slot that it tries.
        let committing = tokio::spawn(commit_until_fenced(old, 12 * COMMIT_INTERVAL));
        sleep(Duration::from_millis(500)).await;
        let (new, seen) = open(&store).await;
        let last_of_old = async || {
            let names = names(store.truth()).await;
            names.into_iter().rfind(|name| *name < slot(2, 0)).unwrap()
        };
        // A put in flight may land behind the seal at any time; the next start deletes its object.
        let in_flight = SharedLogOptions::default().in_flight as u64;
        let end = slot(1, seen.len() as u64 + 1 + in_flight);
        barriers += usize::from(last_of_old().await > end);
        committing.await.unwrap();
        // What does not count is deleted in the background.
        sleep(Duration::from_secs(10)).await;
        assert!(last_of_old().await <= end, "seed {seed}: the barrier is left");
        append_durably(&new, 1_000_000).await;
        let (_, seen_again) = open(&store).await;
        assert_eq!(seen_again[..seen.len()], seen, "seed {seed}");
    }
    assert!(barriers > 0, "no seed has left a barrier");
}

/// The barrier lands where a seal of another successor stands already, or a record.
#[tokio::test(start_paused = true)]
async fn concurrent_successors_agree_on_the_end() {
    for seed in 0..50 {
        let store = Wild::slow(seed, DELAY_MS);
        let (old, _) = open(&store).await;
        let committing = tokio::spawn(commit_until_fenced(old, COMMIT_INTERVAL));
        sleep(Duration::from_millis(300 + 11 * seed)).await;
        let open =
            async || open_with(SharedLogOptions::default(), Arc::new(store.clone()), Limits::default()).await;
        let (first, second) = tokio::join!(open(), open());
        let seen = |opened: Result<(Arc<CommitLog>, Vec<_>), LogError>| {
            let (log, seen) = opened.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            (log, seen.into_iter().map(|(transaction, _)| transaction).collect::<Vec<u64>>())
        };
        let ((_first, first), (_second, second)) = (seen(first), seen(second));
        assert_eq!(first, second, "seed {seed}");
        let acknowledged = committing.await.unwrap();
        assert!(acknowledged.iter().all(|transaction| first.contains(transaction)), "seed {seed}");
    }
}
