//! Combines the pieces of each interval: the counts of all driver threads and the resource usage of
//! the server.
//!
//! The thread that adds the last piece of an interval calls the watcher and writes the JSON line.
//! Each thread takes the lock once per interval and holds it meanwhile.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;

use super::message::{Message, Parent};
use super::record::{IntervalRecord, Record, UsageRecord};
use super::{RunEvent, RunOptions, RunTick, Watcher};
use crate::measure::{Counts, Interval, Latencies};
use crate::workload::Kind;

pub(super) struct Collector {
    kinds: Vec<Kind>,
    tick: Duration,
    warm_up: Duration,
    measure: Duration,
    /// Pieces per interval: one per driver thread, and one of the sampler if there is one.
    pieces: usize,
    watcher: Option<Watcher>,
    /// In a part, the parent process that combines the pieces.
    parent: Option<Arc<Parent>>,
    state: Mutex<State>,
}

struct State {
    pending: BTreeMap<i64, Pending>,
    /// A histogram of all kinds for the watcher, reused because it is large.
    latencies: Latencies,
    lost_connections: u64,
    lines: Option<Lines>,
}

#[derive(Default)]
struct Pending {
    pieces: usize,
    interval: Option<Interval>,
    /// CPU time by thread.
    driver_cpu: BTreeMap<usize, Duration>,
    usage: Option<UsageRecord>,
}

/// The writer of JSON lines. It keeps its first error until [`Collector::finish`].
struct Lines {
    file: BufWriter<File>,
    error: Option<std::io::Error>,
}

impl Lines {
    fn create(path: &Path) -> anyhow::Result<Lines> {
        let file = File::create(path).with_context(|| format!("could not create {}", path.display()))?;
        Ok(Lines { file: BufWriter::new(file), error: None })
    }

    fn write(&mut self, record: &Record) {
        if self.error.is_none() {
            let written = serde_json::to_writer(&mut self.file, record).map_err(std::io::Error::from);
            self.error = written.and_then(|()| self.file.write_all(b"\n")).err();
        }
    }
}

impl Collector {
    pub(super) fn new(options: &RunOptions, kinds: Vec<Kind>, pieces: usize) -> anyhow::Result<Collector> {
        let lines = options.output.as_deref().map(Lines::create).transpose()?;
        Ok(Collector {
            kinds,
            tick: options.tick,
            warm_up: options.warm_up,
            measure: options.measure,
            pieces,
            watcher: options.watcher.clone(),
            parent: None,
            state: Mutex::new(State {
                pending: BTreeMap::new(),
                latencies: Latencies::new(),
                lost_connections: 0,
                lines,
            }),
        })
    }

    /// Makes this the collector of a part, which sends all pieces to its parent.
    pub(super) fn for_parent(self, parent: Arc<Parent>) -> Collector {
        Collector { parent: Some(parent), ..self }
    }

    /// Adds the counts of a driver thread for an interval, and the CPU time that it used in it.
    pub(super) fn add_counts(&self, thread: usize, interval: Interval, cpu: Duration) {
        if let Some(parent) = &self.parent {
            // If the parent is gone, the end of stdin stops this process.
            let _ = parent.send(&Message::Interval { thread, interval, cpu });
            return;
        }
        self.add_piece(interval.number, |pending| {
            pending.driver_cpu.insert(thread, cpu);
            match &mut pending.interval {
                Some(before) => before.merge(interval),
                none => *none = Some(interval),
            }
        });
    }

    /// Adds the server's resource usage in an interval.
    pub(super) fn add_usage(&self, number: i64, usage: Option<UsageRecord>) {
        self.add_piece(number, |pending| pending.usage = usage);
    }

    fn add_piece(&self, number: i64, put: impl FnOnce(&mut Pending)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let pending = state.pending.entry(number).or_default();
        put(pending);
        pending.pieces += 1;
        if pending.pieces == self.pieces
            && let Some(Pending { interval: Some(interval), driver_cpu, usage, .. }) =
                state.pending.remove(&number)
        {
            let driver_cpu: Vec<_> = driver_cpu.into_values().collect();
            self.complete(&mut state, interval, &driver_cpu, usage);
        }
    }

    fn complete(
        &self,
        state: &mut State,
        interval: Interval,
        driver_cpu: &[Duration],
        usage: Option<UsageRecord>,
    ) {
        // The first interval may be shorter, because the run starts within it.
        let after = i32::try_from(interval.number + 1).unwrap_or(i32::MAX);
        let ends_s = f64::from(after) * self.tick.as_secs_f64();
        let seconds = self.tick.as_secs_f64().min(ends_s + self.warm_up.as_secs_f64());
        state.lost_connections += interval.lost_connections;
        if let Some(watcher) = &self.watcher {
            watcher(&RunEvent::Tick(self.tick(state, &interval, ends_s, seconds)));
        }
        if let Some(lines) = &mut state.lines {
            let record = IntervalRecord::new(interval, &self.kinds, ends_s, seconds, driver_cpu, usage);
            lines.write(&Record::Interval(record));
        }
    }

    fn tick(&self, state: &mut State, interval: &Interval, ends_s: f64, seconds: f64) -> RunTick {
        interval.kinds.iter().for_each(|(_, samples)| state.latencies.add(samples));
        let latency = state.latencies.summary();
        let samples_us = state.latencies.take();
        let sum = |of: fn(&Counts) -> u64| interval.kinds.iter().map(|(counts, _)| of(counts)).sum::<u64>();
        RunTick {
            elapsed: Duration::from_secs_f64((self.warm_up.as_secs_f64() + ends_s).max(0.0)),
            of: self.warm_up + self.measure,
            throughput_tps: sum(|counts| counts.succeeded()) as f64 / seconds,
            mean_ms: latency.mean_ms,
            p50_ms: latency.p50_ms,
            p99_ms: latency.p99_ms,
            samples_us,
            failed: sum(|counts| counts.failed),
            rejected: interval.refused,
            lost_connections: state.lost_connections,
        }
    }

    /// Writes a record that is not an interval.
    pub(super) fn write(&self, record: &Record) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lines) = &mut state.lines {
            lines.write(record);
        }
    }

    /// Flushes the file and returns the first error of all writes.
    pub(super) fn finish(&self) -> anyhow::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Lines { mut file, error }) = state.lines.take() else { return Ok(()) };
        error.map_or_else(|| file.flush(), Err).context("could not write the JSON lines")
    }
}
