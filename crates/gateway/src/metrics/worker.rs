//! The counters of a worker.
//!
//! Only the worker's thread writes them. An increment is therefore a load and a store, without an
//! atomic read-modify-write instruction and without contention for the cache line. A scrape sums
//! the counters of all workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::text::{self, Metric, header, line};
use crate::histogram::{BUCKETS, bucket, bucket_bound_us};

/// A counter that a single thread writes.
#[derive(Default)]
struct Counter(AtomicU64);

impl Counter {
    fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Declares the counters: the field, the name of the metric, and its help text.
macro_rules! counters {
    ($($field:ident $name:literal $help:literal;)+) => {
        /// The counters of a worker.
        #[derive(Default)]
        pub(crate) struct WorkerMetrics {
            statements: Counter,
            statement_us: Counter,
            buckets: [Counter; BUCKETS + 1],
            $($field: Counter,)+
        }

        const COUNTERS: &[Metric<[Arc<WorkerMetrics>]>] = &[
            $(text::counter($name, $help, |workers| {
                workers.iter().map(|worker| worker.$field.get()).sum()
            }),)+
        ];
    };
}

counters! {
    sessions "fulmar_sessions_total" "Sessions opened since the start.";
    moved "fulmar_session_migrations_total" "Moves of a session to another worker thread.";
    rows "fulmar_rows_total" "Rows sent to clients.";
    errors "fulmar_errors_total" "Errors sent to clients.";
    received_bytes "fulmar_received_bytes_total" "Bytes received from clients.";
    sent_bytes "fulmar_sent_bytes_total" "Bytes sent to clients.";
}

impl WorkerMetrics {
    /// Records an executed statement.
    pub(crate) fn record_statement(&self, time: Duration, rows: u64) {
        let time_us = time.as_micros() as u64;
        self.statements.add(1);
        self.statement_us.add(time_us);
        self.buckets[bucket(time_us)].add(1);
        self.rows.add(rows);
    }

    /// Records an error sent to a client.
    pub(crate) fn record_error(&self) {
        self.errors.add(1);
    }

    /// Records bytes received from a client.
    pub(crate) fn received(&self, bytes: usize) {
        self.received_bytes.add(bytes as u64);
    }

    /// Records bytes sent to a client.
    pub(crate) fn sent(&self, bytes: usize) {
        self.sent_bytes.add(bytes as u64);
    }

    /// Records a session that was moved here from another worker.
    pub(crate) fn moved(&self) {
        self.moved.add(1);
    }

    /// Records a new session.
    pub(crate) fn connected(&self) {
        self.sessions.add(1);
    }
}

/// Writes the sums of all workers.
pub(super) fn write(out: &mut String, workers: &[Arc<WorkerMetrics>]) {
    text::write(out, COUNTERS, workers);
    statement_times(out, workers);
}

fn statement_times(out: &mut String, workers: &[Arc<WorkerMetrics>]) {
    const NAME: &str = "fulmar_statement_seconds";
    header(out, NAME, "Execution time of statements.", "histogram");
    let mut total = 0;
    for index in 0..=BUCKETS {
        total += workers.iter().map(|worker| worker.buckets[index].get()).sum::<u64>();
        let bound_us = bucket_bound_us(index);
        let bound = if index == BUCKETS { "+Inf".to_owned() } else { (bound_us as f64 / 1e6).to_string() };
        line(out, format_args!("{NAME}_bucket{{le=\"{bound}\"}} {total}"));
    }
    let time_us: u64 = workers.iter().map(|worker| worker.statement_us.get()).sum();
    let statements: u64 = workers.iter().map(|worker| worker.statements.get()).sum();
    line(out, format_args!("{NAME}_sum {}", time_us as f64 / 1e6));
    line(out, format_args!("{NAME}_count {statements}"));
}
