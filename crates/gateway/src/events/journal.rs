//! The newest events in memory, and the thread that writes them to the disk.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::files::Files;
use super::gathered::Gathered;
use super::{Event, Kind};
use crate::activity::now_ms;

/// Events in memory.
const KEPT: usize = 10_000;
/// Events that are written at once.
const BATCH: usize = 500;
/// When writing is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// The journal of a node.
pub struct Journal {
    core: Arc<Core>,
    /// How the node ended that wrote it before.
    before: Before,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// What a journal says of the node before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// There was none.
    Nothing,
    /// It stopped.
    Stop,
    /// It was killed, or crashed.
    Crash,
}

#[derive(Default)]
struct Core {
    state: Mutex<State>,
    /// There is something to write, or the end has come.
    wake: Condvar,
}

#[derive(Default)]
struct State {
    events: VecDeque<Arc<Event>>,
    last_id: u64,
    /// The last one that is on the disk, if there are files.
    written_id: u64,
    gathered: Gathered,
    closing: bool,
}

impl Journal {
    /// One that lasts as long as the process.
    pub fn in_memory() -> Journal {
        Journal { core: Arc::default(), before: Before::Nothing, writer: Mutex::default() }
    }

    /// One that is kept in a directory.
    pub fn open(directory: &Path) -> io::Result<Journal> {
        let (files, mut read) = Files::open(directory)?;
        let before = match read.last() {
            None => Before::Nothing,
            Some(event) if event.kind == Kind::NodeStopped.name() => Before::Stop,
            Some(_) => Before::Crash,
        };
        let last_id = read.iter().map(|event| event.id).max().unwrap_or(0);
        let events = read.drain(read.len().saturating_sub(KEPT)..).map(Arc::new).collect();
        let state = State { events, last_id, written_id: last_id, ..State::default() };
        let core = Arc::new(Core { state: Mutex::new(state), wake: Condvar::new() });
        let thread = std::thread::Builder::new().name("fulmar-events".to_owned()).spawn({
            let core = core.clone();
            move || write(&core, files)
        })?;
        Ok(Journal { core, before, writer: Mutex::new(Some(thread)) })
    }

    /// What it says of the node that wrote it before.
    pub fn before(&self) -> Before {
        self.before
    }

    /// Something has happened.
    pub fn record(&self, event: Event) {
        self.core.state.lock().push(event);
        self.core.wake.notify_one();
    }

    /// The same, of what anybody can cause as often as he likes.
    pub(crate) fn gather(&self, event: Event) {
        let mut state = self.core.state.lock();
        if let Some(first) = state.gathered.add(event, Instant::now()) {
            state.push(first);
            self.core.wake.notify_one();
        }
    }

    /// Records what was gathered for long enough.
    pub(crate) fn settle(&self, now: Instant) {
        let mut state = self.core.state.lock();
        for event in state.gathered.due(Some(now)) {
            state.push(event);
            self.core.wake.notify_one();
        }
    }

    /// What is remembered, the oldest first.
    pub(crate) fn events(&self) -> Vec<Arc<Event>> {
        self.core.state.lock().events.iter().cloned().collect()
    }

    /// Writes what has not been written. What happens later is not written any more.
    pub fn close(&self) {
        let Some(writer) = self.writer.lock().take() else { return };
        {
            let mut state = self.core.state.lock();
            for event in state.gathered.due(None) {
                state.push(event);
            }
            state.closing = true;
        }
        self.core.wake.notify_one();
        let _ = writer.join(); // it has nothing to tell
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.close();
    }
}

impl State {
    fn push(&mut self, event: Event) {
        self.last_id = self.last_id.saturating_add(1);
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back(Arc::new(Event { id: self.last_id, time_unix_ms: now_ms(), ..event }));
    }

    /// What is to be written next.
    fn unwritten(&self) -> Vec<Arc<Event>> {
        let first = self.events.partition_point(|event| event.id <= self.written_id);
        self.events.range(first..).take(BATCH).cloned().collect()
    }
}

/// The thread: writes what there is, until the end.
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
                    tracing::warn!(%error, "the journal of events cannot be written; it is tried again");
                }
                core.wake.wait_for(&mut state, RETRY);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(journal: &Journal) -> Vec<(u64, String)> {
        journal.events().iter().map(|event| (event.id, event.kind.to_string())).collect()
    }

    #[test]
    fn it_goes_on_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(directory.path()).unwrap();
        assert_eq!(journal.before(), Before::Nothing);
        journal.record(Event::new(Kind::NodeStarted));
        for _ in 0..3 {
            journal.gather(Event::new(Kind::LoginFailed));
        }
        let last = journal.events().last().unwrap().id;
        assert_eq!(last, 2, "the other two are gathered");
        drop(journal);
        let journal = Journal::open(directory.path()).unwrap();
        assert_eq!(journal.before(), Before::Crash);
        let named = |names: &[&str]| -> Vec<(u64, String)> {
            (1..).zip(names.iter().map(|name| (*name).to_owned())).collect()
        };
        assert_eq!(kinds(&journal), named(&["node.started", "login.failed", "login.failed"]));
        assert_eq!(journal.events()[2].details.to_map()["times"], 2);
        journal.record(Event::new(Kind::NodeStopped));
        drop(journal);
        let journal = Journal::open(directory.path()).unwrap();
        assert_eq!((journal.before(), journal.events().len()), (Before::Stop, 4));
    }

    #[test]
    fn memory_is_bounded() {
        let journal = Journal::in_memory();
        (0..KEPT + 5).for_each(|_| journal.record(Event::new(Kind::UserCreated)));
        let events = journal.events();
        assert_eq!((events.len(), events[0].id), (KEPT, 6));
    }

    #[test]
    fn what_is_overtaken_before_it_is_written_is_missing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events");
        let journal = Journal::open(&path).unwrap();
        (0..KEPT * 2)
            .for_each(|_| journal.record(Event::new(Kind::UserCreated).detail("role", "x".repeat(60))));
        journal.close();
        let journal = Journal::open(&path).unwrap();
        // What was overtaken before it was written is missing, and the numbers say so.
        let events = journal.events();
        assert_eq!(events.last().map(|event| event.id), Some(2 * KEPT as u64));
        assert!(events.is_sorted_by_key(|event| event.id));
    }
}
