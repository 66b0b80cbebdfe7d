//! The event log: keeps the newest events in memory, and writes them to disk in a background
//! thread.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::aggregation::Aggregator;
use super::event::Event;
use super::files::Files;
use super::kinds::Kind;
use crate::activity::now_ms;

/// Maximum number of events in memory.
const MAX_EVENTS: usize = 10_000;
/// Maximum number of events per write.
const BATCH_SIZE: usize = 500;
/// The interval of retries after a failed write.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The event log of a node.
pub struct EventLog {
    core: Arc<Core>,
    /// How the previous run of the node ended.
    previous_run: PreviousRun,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// How the previous run of the node ended, according to the event log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreviousRun {
    /// There was no previous run.
    None,
    /// It stopped cleanly.
    Stop,
    /// It crashed or was killed.
    Crash,
}

#[derive(Default)]
struct Core {
    state: Mutex<State>,
    /// Notified when there are events to write, or when the log is closed.
    wake: Condvar,
}

#[derive(Default)]
struct State {
    events: VecDeque<Arc<Event>>,
    last_id: u64,
    /// The id of the last event on disk, if the log has files.
    written_id: u64,
    aggregator: Aggregator,
    closing: bool,
}

impl EventLog {
    /// Creates an event log that is kept in memory only.
    pub fn in_memory() -> EventLog {
        EventLog { core: Arc::default(), previous_run: PreviousRun::None, writer: Mutex::default() }
    }

    /// Opens the event log in a directory.
    pub fn open(directory: &Path) -> io::Result<EventLog> {
        let (files, mut read) = Files::open(directory)?;
        let previous_run = match read.last() {
            None => PreviousRun::None,
            Some(event) if event.kind == Kind::NodeStopped.name() => PreviousRun::Stop,
            Some(_) => PreviousRun::Crash,
        };
        let last_id = read.iter().map(|event| event.id).max().unwrap_or(0);
        let events = read.drain(read.len().saturating_sub(MAX_EVENTS)..).map(Arc::new).collect();
        let state = State { events, last_id, written_id: last_id, ..State::default() };
        let core = Arc::new(Core { state: Mutex::new(state), wake: Condvar::new() });
        let thread = std::thread::Builder::new().name("fulmar-events".to_owned()).spawn({
            let core = core.clone();
            move || write(&core, files)
        })?;
        Ok(EventLog { core, previous_run, writer: Mutex::new(Some(thread)) })
    }

    /// How the previous run of the node ended.
    pub fn previous_run(&self) -> PreviousRun {
        self.previous_run
    }

    /// Records an event.
    pub fn record(&self, event: Event) {
        self.core.state.lock().push(event);
        self.core.wake.notify_one();
    }

    /// Like [`EventLog::record`], for events that unprivileged clients can cause at any rate: they
    /// are aggregated.
    pub(crate) fn record_aggregated(&self, event: Event) {
        let mut state = self.core.state.lock();
        if let Some(first) = state.aggregator.add(event, Instant::now()) {
            state.push(first);
            self.core.wake.notify_one();
        }
    }

    /// Records the aggregated events whose interval has ended.
    pub(crate) fn flush_aggregated(&self, now: Instant) {
        let mut state = self.core.state.lock();
        for event in state.aggregator.due(Some(now)) {
            state.push(event);
            self.core.wake.notify_one();
        }
    }

    /// The events in memory, oldest first.
    pub(crate) fn events(&self) -> Vec<Arc<Event>> {
        self.core.state.lock().events.iter().cloned().collect()
    }

    /// Writes the remaining events and stops the writer. Later events are not written.
    pub fn close(&self) {
        let Some(writer) = self.writer.lock().take() else { return };
        {
            let mut state = self.core.state.lock();
            for event in state.aggregator.due(None) {
                state.push(event);
            }
            state.closing = true;
        }
        self.core.wake.notify_one();
        let _ = writer.join(); // the thread returns nothing
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        self.close();
    }
}

impl State {
    fn push(&mut self, event: Event) {
        self.last_id = self.last_id.saturating_add(1);
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(Arc::new(Event { id: self.last_id, time_unix_ms: now_ms(), ..event }));
    }

    /// The next events to write.
    fn unwritten(&self) -> Vec<Arc<Event>> {
        let first = self.events.partition_point(|event| event.id <= self.written_id);
        self.events.range(first..).take(BATCH_SIZE).cloned().collect()
    }
}

/// The writer thread: writes new events until the log is closed.
fn write(core: &Core, mut files: Files) {
    let mut failed = false;
    let mut state = core.state.lock();
    loop {
        let events = state.unwritten();
        let Some(last) = events.last() else {
            if state.closing {
                return;
            }
            core.wake.wait(&mut state);
            continue;
        };
        let last_id = last.id;
        drop(state);
        let outcome = files.append(&events);
        state = core.state.lock();
        match outcome {
            Ok(()) => {
                failed = false;
                state.written_id = last_id;
            }
            Err(_) if state.closing => return,
            Err(error) => {
                if !std::mem::replace(&mut failed, true) {
                    tracing::warn!(%error, "could not write the event log; retrying");
                }
                core.wake.wait_for(&mut state, RETRY_INTERVAL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(log: &EventLog) -> Vec<(u64, String)> {
        log.events().iter().map(|event| (event.id, event.kind.to_string())).collect()
    }

    #[test]
    fn event_log_continues_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let log = EventLog::open(directory.path()).unwrap();
        assert_eq!(log.previous_run(), PreviousRun::None);
        log.record(Event::new(Kind::NodeStarted));
        for _ in 0..3 {
            log.record_aggregated(Event::new(Kind::LoginFailed));
        }
        let last = log.events().last().unwrap().id;
        assert_eq!(last, 2, "repeated events must be aggregated");
        drop(log);
        let log = EventLog::open(directory.path()).unwrap();
        assert_eq!(log.previous_run(), PreviousRun::Crash);
        let named = |names: &[&str]| -> Vec<(u64, String)> {
            (1..).zip(names.iter().map(|name| (*name).to_owned())).collect()
        };
        assert_eq!(kinds(&log), named(&["node.started", "login.failed", "login.failed"]));
        assert_eq!(log.events()[2].details.to_map()["times"], 2);
        log.record(Event::new(Kind::NodeStopped));
        drop(log);
        let log = EventLog::open(directory.path()).unwrap();
        assert_eq!((log.previous_run(), log.events().len()), (PreviousRun::Stop, 4));
    }

    #[test]
    fn number_of_events_in_memory_is_bounded() {
        let log = EventLog::in_memory();
        (0..MAX_EVENTS + 5).for_each(|_| log.record(Event::new(Kind::UserCreated)));
        let events = log.events();
        assert_eq!((events.len(), events[0].id), (MAX_EVENTS, 6));
    }

    #[test]
    fn overwritten_events_leave_gaps_in_the_ids() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events");
        let log = EventLog::open(&path).unwrap();
        (0..MAX_EVENTS * 2)
            .for_each(|_| log.record(Event::new(Kind::UserCreated).detail("role", "x".repeat(60))));
        log.close();
        let log = EventLog::open(&path).unwrap();
        // Events that were evicted from memory before they were written are missing. The gaps in
        // the ids show how many.
        let events = log.events();
        assert_eq!(events.last().map(|event| event.id), Some(2 * MAX_EVENTS as u64));
        assert!(events.is_sorted_by_key(|event| event.id));
    }
}
