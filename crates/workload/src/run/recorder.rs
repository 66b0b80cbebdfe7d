//! Records the intervals of a run for benchmarks that act while it runs.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Report, RunEvent, RunOptions, RunTick, Watcher, run};
use crate::measure::{Latencies, Latency, Sample};
use crate::workload::Workload;

/// Records the intervals of one run.
pub(crate) struct Recorder {
    opened: watch::Sender<Option<Instant>>,
    ticks: Arc<Mutex<Vec<Moment>>>,
}

impl Recorder {
    pub(crate) fn new() -> Recorder {
        Recorder { opened: watch::Sender::new(None), ticks: Arc::default() }
    }

    /// What the run has to call.
    pub(crate) fn watcher(&self) -> Watcher {
        let (opened, ticks) = (self.opened.clone(), self.ticks.clone());
        Arc::new(move |event: &RunEvent| match event {
            RunEvent::Opens => {
                opened.send_replace(Some(Instant::now()));
            }
            // Answers that come after the end make an interval of their own.
            RunEvent::Tick(tick) if tick.elapsed <= tick.of => {
                let moment = Moment { at: Instant::now(), tick: tick.clone() };
                ticks.lock().unwrap_or_else(PoisonError::into_inner).push(moment);
            }
            _ => {}
        })
    }

    /// Waits until the measured window opens. Returns when that was.
    pub(crate) async fn opened(&self) -> anyhow::Result<Instant> {
        let mut opened = self.opened.subscribe();
        let opened = *opened.wait_for(Option::is_some).await.context("the run has ended")?;
        opened.context("the run has not begun")
    }

    /// The intervals so far.
    pub(crate) fn moments(&self) -> Moments {
        let ticks = self.ticks.lock().unwrap_or_else(PoisonError::into_inner);
        Moments(ticks.clone())
    }
}

/// An interval of a run.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    /// When it ended.
    pub(crate) at: Instant,
    pub(crate) tick: RunTick,
}

/// Intervals of a run, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moments(pub(crate) Vec<Moment>);

impl Moments {
    /// The intervals that ended after one time and not after another.
    pub(crate) fn between(&self, from: Instant, to: Instant) -> Moments {
        Moments(self.0.iter().filter(|moment| moment.at > from && moment.at <= to).cloned().collect())
    }

    /// The latency of all transactions.
    pub(crate) fn latency(&self) -> Latency {
        let mut all = Latencies::new();
        self.0.iter().for_each(|moment| all.add(&moment.tick.samples_us));
        all.summary()
    }

    /// All latencies, in ascending order.
    pub(crate) fn samples(&self) -> Vec<Sample> {
        let mut samples: Vec<Sample> =
            self.0.iter().flat_map(|moment| moment.tick.samples_us.iter().copied()).collect();
        samples.sort_unstable();
        samples
    }

    /// Transactions that failed.
    pub(crate) fn failed(&self) -> u64 {
        self.0.iter().map(|moment| moment.tick.failed).sum()
    }

    /// Attempts that the server rejected, most of which were repeated.
    pub(crate) fn rejected(&self) -> u64 {
        self.0.iter().map(|moment| moment.tick.rejected).sum()
    }

    /// Connections that were lost in the whole run.
    pub(crate) fn lost_connections(&self) -> u64 {
        self.0.last().map_or(0, |last| last.tick.lost_connections)
    }
}

/// Runs a load while `acts` acts, and ends it then. `acts` begins when the window opens, and gets
/// that time. Returns the intervals, and what `acts` returned.
pub(crate) async fn run_while<W: Workload, T>(
    workload: W,
    options: RunOptions,
    acts: impl AsyncFnOnce(Instant) -> anyhow::Result<T>,
) -> anyhow::Result<(Moments, T)> {
    let recorder = Recorder::new();
    let run = run(workload, RunOptions { watcher: Some(recorder.watcher()), ..options });
    let acting = async { acts(recorder.opened().await?).await };
    let acted = tokio::select! {
        ended = run => {
            let Report { transactions, .. } = ended?;
            bail!("the load ended too early, after {transactions} transactions")
        }
        acted = acting => acted?,
    };
    Ok((recorder.moments(), acted))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn intervals_are_recorded_from_the_opening_to_the_end() {
        let (recorder, second) = (Recorder::new(), Duration::from_secs(1));
        let watcher = recorder.watcher();
        let tick = |elapsed: u64, failed| RunTick {
            elapsed: Duration::from_secs(elapsed),
            of: Duration::from_secs(2),
            throughput_tps: 4.0,
            mean_ms: 2.0,
            p50_ms: 1.0,
            p99_ms: 5.0,
            samples_us: vec![(1_000, 3), (5_000, 1)],
            failed,
            rejected: 2,
            lost_connections: elapsed,
        };
        watcher(&RunEvent::Opens);
        let opened = recorder.opened().await.unwrap();
        for (elapsed, failed) in [(1, 0), (2, 5), (3, 9)] {
            watcher(&RunEvent::Tick(tick(elapsed, failed)));
        }
        let all = recorder.moments().between(opened - second, Instant::now());
        assert_eq!((all.0.len(), all.failed(), all.rejected()), (2, 5, 4));
        assert_eq!(all.lost_connections(), 2, "they are counted since the start");
        assert_eq!((all.latency().count, all.samples().len()), (8, 4));
        assert!((all.latency().mean_ms - 2.0).abs() < 0.01, "{:?}", all.latency());
        assert!(all.between(Instant::now(), Instant::now()).0.is_empty());
    }
}
