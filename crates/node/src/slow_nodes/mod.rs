//! Finds nodes that are many times slower than the others, such as one whose disk fails.
//!
//! Each node measures four latencies, and sends them with its heartbeats:
//!
//! - `log puts`, `disk syncs`: how long its logs take to make commits durable. Only under load.
//! - `store reads`: a read of the object `owner` every 2 s. Also without load.
//! - `CPU`: how late a timer of 100 ms fires.
//!
//! [`latencies`] says when a node is slow. All nodes compare, so the event log of each names the slow
//! one. New databases, and those of a dead or draining node, are placed on others while there are
//! any. The controller replaces a node that stays slow, if it can.

mod latencies;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_store::{DurationCounts, Span, Store};
use tokio::time::{sleep, timeout};

use crate::{Node, Partitions};
use latencies::Change;
pub(crate) use latencies::{Latencies, Measurements, SlowNodes};

/// How often latencies are sampled and compared.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between two reads of the store.
const READ_INTERVAL: Duration = Duration::from_secs(2);
/// The object that is read: every store of a cluster has it.
const READ_OBJECT: &str = "owner";
/// The timer whose delay measures the CPU.
const TIMER: Duration = Duration::from_millis(100);

impl Node {
    /// Measures this node's latencies, and compares them with those of the others.
    pub(crate) async fn watch_latencies(self: Arc<Self>, partitions: Arc<dyn Partitions>) {
        tokio::spawn(self.clone().measure_store_reads());
        tokio::spawn(self.clone().measure_cpu());
        let mut before = partitions.log_durations();
        loop {
            sleep(SAMPLE_INTERVAL).await;
            let durations = partitions.log_durations();
            let now = Instant::now();
            {
                let mut measured = self.measurements.lock();
                if let Some(mean) = mean_between(&before.shared, &durations.shared) {
                    measured.log_puts.push(now, mean);
                }
                if let Some(mean) = mean_between(&before.local, &durations.local) {
                    measured.disk_syncs.push(now, mean);
                }
            }
            before = durations;
            self.compare_latencies(now);
        }
    }

    fn compare_latencies(&self, now: Instant) {
        let heard = self.heard.lock().clone();
        let living = self.living().into_iter();
        let measured = living.filter_map(|id| match id == self.id() {
            true => Some((id, self.measurements.lock().latencies(now))),
            false => Some((id, heard.get(&id)?.latencies)),
        });
        let changes = self.slow_nodes.lock().compare(now, &measured.collect());
        for Change { node, resource, slow } in changes {
            let name = self.owners().node(node).map(|known| known.name).unwrap_or_default();
            match slow {
                Some((latency, others)) => tracing::warn!(
                    node = name,
                    resource,
                    latency_ms = latency.as_millis() as u64,
                    others_ms = others.as_millis() as u64,
                    "node is much slower than the others"
                ),
                None => tracing::info!(node = name, resource, "node is not slower than the others any more"),
            }
        }
    }

    async fn measure_store_reads(self: Arc<Self>) {
        loop {
            let begun = Instant::now();
            let mut read = self.store.get(READ_OBJECT, Span::Whole);
            // A read that is retried is slow as well.
            while timeout(SAMPLE_INTERVAL, &mut read).await.is_err() {
                self.measurements.lock().store_reads.push(Instant::now(), begun.elapsed());
            }
            self.measurements.lock().store_reads.push(Instant::now(), begun.elapsed());
            sleep(READ_INTERVAL).await;
        }
    }

    async fn measure_cpu(self: Arc<Self>) {
        const TIMERS: u32 = (SAMPLE_INTERVAL.as_millis() / TIMER.as_millis()) as u32;
        loop {
            let mut late = Duration::ZERO;
            for _ in 0..TIMERS {
                let begun = Instant::now();
                sleep(TIMER).await;
                late += begun.elapsed().saturating_sub(TIMER);
            }
            self.measurements.lock().cpu.push(Instant::now(), late / TIMERS);
        }
    }
}

/// The mean of the durations that were counted between two times.
fn mean_between(before: &DurationCounts, now: &DurationCounts) -> Option<Duration> {
    let count = |counts: &DurationCounts| counts.buckets.iter().sum::<u64>();
    let total_us = now.total_us.saturating_sub(before.total_us);
    total_us.checked_div(count(now).saturating_sub(count(before))).map(Duration::from_micros)
}
