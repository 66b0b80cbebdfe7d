//! The executor: tasks, processes and virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{self, AtomicBool};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// A simulated process. Machine 0 is the environment of all others; its process is never killed or
/// paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Process {
    /// The machine that runs it.
    pub machine: u32,
    /// Distinguishes the processes of a machine.
    pub run: u32,
}

/// The future did not complete in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout;

/// Names an entry of a slab. Entries are reused; the generation distinguishes their uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    place: u32,
    generation: u32,
}

struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

/// A map with keys of its own that allocates nothing in steady state.
struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    fn new() -> Self {
        Slab { entries: Vec::new(), free: Vec::new() }
    }

    fn insert(&mut self, value: impl FnOnce(Key) -> T) -> Key {
        let place = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry { generation: 0, value: None });
            self.entries.len() as u32 - 1
        });
        let entry = &mut self.entries[place as usize];
        let key = Key { place, generation: entry.generation };
        entry.value = Some(value(key));
        key
    }

    fn get(&mut self, key: Key) -> Option<&mut T> {
        let entry = &mut self.entries[key.place as usize];
        entry.value.as_mut().filter(|_| entry.generation == key.generation)
    }

    fn remove(&mut self, key: Key) -> Option<T> {
        let entry = &mut self.entries[key.place as usize];
        if entry.generation != key.generation {
            return None;
        }
        let value = entry.value.take()?;
        entry.generation += 1;
        self.free.push(key.place);
        Some(value)
    }

    fn drain(&mut self) -> Vec<T> {
        let keys = self.keys(|_| true);
        keys.into_iter().filter_map(|key| self.remove(key)).collect()
    }

    fn keys(&self, mut is_wanted: impl FnMut(&T) -> bool) -> Vec<Key> {
        let entries = self.entries.iter().enumerate();
        let wanted = entries.filter(|(_, entry)| entry.value.as_ref().is_some_and(&mut is_wanted));
        wanted.map(|(place, entry)| Key { place: place as u32, generation: entry.generation }).collect()
    }
}

struct Task {
    process: Process,
    /// `None` while it is being polled.
    future: Option<BoxFuture<'static, ()>>,
    waker: Arc<TaskWaker>,
}

struct TaskWaker {
    task: Key,
    is_queued: AtomicBool,
    ready: Arc<Mutex<Vec<Key>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_queued.swap(true, atomic::Ordering::Relaxed) {
            self.ready.lock().push(self.task);
        }
    }
}

enum Action {
    /// Wakes a sleeping task.
    Wake(Waker),
    Run(Box<dyn FnOnce() + Send>),
}

/// An action and its time. Small, because the heap moves it often.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at_us: u64,
    /// Orders the events of a time.
    number: u64,
    action: Key,
}

struct State {
    now_us: u64,
    random: SmallRng,
    tasks: Slab<Task>,
    actions: Slab<Action>,
    events: BinaryHeap<Reverse<Event>>,
    next_event: u64,
    paused: Vec<Process>,
    /// Ready tasks of paused processes.
    parked: Vec<Key>,
    polls: u64,
    trace: Vec<String>,
}

impl State {
    fn push(&mut self, at_us: u64, action: Action) -> Key {
        let number = self.next_event;
        self.next_event += 1;
        let action = self.actions.insert(|_| action);
        self.events.push(Reverse(Event { at_us, number, action }));
        action
    }
}

/// A handle to a simulation. Clones share it.
#[derive(Clone)]
pub struct Simulation {
    state: Arc<Mutex<State>>,
    ready: Arc<Mutex<Vec<Key>>>,
    is_traced: bool,
}

impl Simulation {
    /// The process that represents the environment of all processes.
    pub const WORLD: Process = Process { machine: 0, run: 0 };

    /// A simulation determined by `seed`. With `trace`, lines passed to [`Simulation::note`] are
    /// kept.
    pub fn new(seed: u64, trace: bool) -> Simulation {
        let state = State {
            now_us: 0,
            random: SmallRng::seed_from_u64(seed),
            tasks: Slab::new(),
            actions: Slab::new(),
            events: BinaryHeap::new(),
            next_event: 0,
            paused: Vec::new(),
            parked: Vec::new(),
            polls: 0,
            trace: Vec::new(),
        };
        Simulation { state: Arc::new(Mutex::new(state)), ready: Arc::default(), is_traced: trace }
    }

    /// Starts a task of a process.
    pub fn spawn(&self, process: Process, future: impl Future<Output = ()> + Send + 'static) {
        let future: BoxFuture<'static, ()> = Box::pin(future);
        let key = self.state.lock().tasks.insert(|task| Task {
            process,
            future: Some(future),
            waker: Arc::new(TaskWaker { task, is_queued: AtomicBool::new(true), ready: self.ready.clone() }),
        });
        self.ready.lock().push(key);
    }

    /// Runs `action` after `delay`, at a moment at which no task runs.
    pub fn after(&self, delay: Duration, action: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        let at_us = state.now_us + delay.as_micros() as u64;
        state.push(at_us, Action::Run(Box::new(action)));
    }

    /// Drops all tasks of a process. Must not be called by a task of that process.
    pub fn kill(&self, process: Process) {
        let mut state = self.state.lock();
        let keys = state.tasks.keys(|task| task.process == process);
        let dropped: Vec<_> = keys.iter().filter_map(|key| state.tasks.remove(*key)).collect();
        state.paused.retain(|paused| *paused != process);
        drop(state);
        // Outside of the lock, because dropping a future may wake other tasks.
        drop(dropped);
    }

    /// Drops all tasks and events. They may hold handles to the simulation, which would otherwise
    /// keep it in memory.
    pub fn clear(&self) {
        let mut state = self.state.lock();
        let tasks = state.tasks.drain();
        let actions = state.actions.drain();
        state.events.clear();
        drop(state);
        drop((tasks, actions));
    }

    /// Stops the tasks of a process until [`Simulation::resume`].
    pub fn pause(&self, process: Process) {
        self.state.lock().paused.push(process);
    }

    /// Lets the tasks of a paused process run again.
    pub fn resume(&self, process: Process) {
        let mut state = self.state.lock();
        state.paused.retain(|paused| *paused != process);
        let parked = std::mem::take(&mut state.parked);
        self.ready.lock().extend(parked);
    }

    /// Virtual time since the start.
    pub fn now(&self) -> Duration {
        Duration::from_micros(self.state.lock().now_us)
    }

    /// Number of times that a task was polled: the amount of work.
    pub fn polls(&self) -> u64 {
        self.state.lock().polls
    }

    /// Completes after `duration`.
    pub fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send + use<> {
        let at_us = self.state.lock().now_us + duration.as_micros() as u64;
        Sleep { simulation: self.clone(), at_us, action: None }
    }

    /// The future's result, unless it takes longer than `duration`; then it is dropped.
    pub async fn within<F: Future>(&self, duration: Duration, future: F) -> Result<F::Output, Timeout> {
        let future = std::pin::pin!(future);
        match futures::future::select(future, self.sleep(duration)).await {
            futures::future::Either::Left((output, _)) => Ok(output),
            futures::future::Either::Right(_) => Err(Timeout),
        }
    }

    /// A random number below `bound`.
    pub fn below(&self, bound: u64) -> u64 {
        self.state.lock().random.random_range(0..bound)
    }

    /// True with probability `numerator` / `denominator`.
    pub fn chance(&self, numerator: u64, denominator: u64) -> bool {
        numerator > 0 && self.below(denominator) < numerator
    }

    /// A random duration, most often near `from`, sometimes up to `to`.
    pub fn delay(&self, from: Duration, to: Duration) -> Duration {
        let span = (to.saturating_sub(from)).as_micros() as u64 + 1;
        let mut state = self.state.lock();
        let (a, b) = (state.random.random_range(0..span), state.random.random_range(0..span));
        from + Duration::from_micros(a * b / span)
    }

    /// Adds a line to the trace of this run.
    pub fn note(&self, line: impl FnOnce() -> String) {
        if self.is_traced {
            let line = line();
            let mut state = self.state.lock();
            let now_ms = state.now_us as f64 / 1000.0;
            state.trace.push(format!("{now_ms:>10.3} {line}"));
        }
    }

    /// The lines noted so far.
    pub fn trace(&self) -> Vec<String> {
        self.state.lock().trace.clone()
    }

    /// Runs until virtual time reaches `until`, or nothing is left to do, or `done` returns true.
    /// `done` is called whenever virtual time is about to advance.
    pub fn run(&self, until: Duration, done: impl Fn() -> bool) {
        loop {
            while self.poll_one() {}
            if done() || !self.advance(until) {
                return;
            }
        }
    }

    /// Polls a random task that is ready and whose process runs. Returns false if there is none.
    fn poll_one(&self) -> bool {
        let (key, mut future, waker) = {
            let mut state = self.state.lock();
            let state = &mut *state;
            let mut ready = self.ready.lock();
            loop {
                if ready.is_empty() {
                    return false;
                }
                let place = if ready.len() == 1 { 0 } else { state.random.random_range(0..ready.len()) };
                let key = ready.swap_remove(place);
                let Some(task) = state.tasks.get(key) else { continue };
                if state.paused.contains(&task.process) {
                    state.parked.push(key);
                    continue;
                }
                task.waker.is_queued.store(false, atomic::Ordering::Relaxed);
                if let Some(future) = task.future.take() {
                    state.polls += 1;
                    break (key, future, Waker::from(task.waker.clone()));
                }
            }
        };
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        let mut state = self.state.lock();
        if polled.is_ready() {
            let _finished = state.tasks.remove(key);
            return true;
        }
        match state.tasks.get(key) {
            Some(task) => task.future = Some(future),
            None => {
                // Killed meanwhile.
                drop(state);
                drop(future);
            }
        }
        true
    }

    /// Advances to the next event and runs all events of that time. Returns false if there is none
    /// before `until`.
    fn advance(&self, until: Duration) -> bool {
        let Some(first) = self.next_action(until, true) else { return false };
        let mut next = Some(first);
        while let Some(action) = next {
            match action {
                Action::Wake(waker) => waker.wake(),
                Action::Run(action) => action(),
            }
            next = self.next_action(until, false);
        }
        true
    }

    /// The next action until `until`; unless `advance`, only if it is due now.
    fn next_action(&self, until: Duration, advance: bool) -> Option<Action> {
        let until_us = until.as_micros() as u64;
        let mut state = self.state.lock();
        loop {
            let Reverse(event) = state.events.peek().copied()?;
            let exists = state.actions.get(event.action).is_some();
            if exists && advance && event.at_us > until_us {
                state.now_us = until_us;
                return None;
            }
            if exists && !advance && event.at_us > state.now_us {
                return None;
            }
            state.events.pop();
            // A sleep that was dropped has no action, and does not advance time.
            if let Some(action) = state.actions.remove(event.action) {
                state.now_us = event.at_us;
                return Some(action);
            }
        }
    }
}

struct Sleep {
    simulation: Simulation,
    at_us: u64,
    action: Option<Key>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let simulation = self.simulation.clone();
        let mut state = simulation.state.lock();
        if state.now_us >= self.at_us {
            return Poll::Ready(());
        }
        let waker = context.waker().clone();
        match self.action.and_then(|action| state.actions.get(action)) {
            Some(action) => *action = Action::Wake(waker),
            None => self.action = Some(state.push(self.at_us, Action::Wake(waker))),
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(action) = self.action {
            let removed = self.simulation.state.lock().actions.remove(action);
            drop(removed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn process(machine: u32) -> Process {
        Process { machine, run: 1 }
    }

    fn run(seed: u64) -> Vec<String> {
        let simulation = Simulation::new(seed, true);
        for number in 0..5 {
            let handle = simulation.clone();
            simulation.spawn(process(1 + number % 2), async move {
                for step in 0..3 {
                    handle.sleep(handle.delay(Duration::ZERO, SECOND)).await;
                    handle.note(|| format!("task {number}, step {step}"));
                }
            });
        }
        simulation.run(SECOND * 10, || false);
        simulation.trace()
    }

    #[test]
    fn same_seed_gives_same_run() {
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        assert_eq!(run(1).len(), 15);
    }

    #[test]
    fn killed_process_does_not_run_and_paused_process_continues_later() {
        let simulation = Simulation::new(3, true);
        for machine in [1, 2] {
            let handle = simulation.clone();
            simulation.spawn(process(machine), async move {
                handle.sleep(SECOND).await;
                handle.note(|| format!("machine {machine}"));
            });
        }
        simulation.pause(process(2));
        simulation.kill(process(1));
        simulation.run(SECOND * 2, || false);
        assert!(simulation.trace().is_empty());
        simulation.resume(process(2));
        simulation.run(SECOND * 3, || false);
        assert_eq!(simulation.trace().len(), 1);
        assert_eq!(simulation.now(), SECOND, "time must not advance without an event");
    }

    #[test]
    fn future_that_exceeds_its_time_is_dropped() {
        let simulation = Simulation::new(4, true);
        let handle = simulation.clone();
        simulation.spawn(process(1), async move {
            let late = handle.within(SECOND, handle.sleep(SECOND * 2)).await;
            let early = handle.within(SECOND, handle.sleep(SECOND / 2)).await;
            handle.note(|| format!("{late:?} {early:?}"));
        });
        simulation.run(SECOND * 10, || false);
        assert!(simulation.trace()[0].ends_with("Err(Timeout) Ok(())"));
    }

    #[test]
    fn time_stops_at_the_last_event_and_cleared_tasks_are_dropped() {
        let simulation = Simulation::new(5, false);
        let (handle, dropped) = (simulation.clone(), Arc::new(()));
        let held = dropped.clone();
        simulation.after(SECOND, || {});
        simulation.spawn(process(1), async move {
            let _early = handle.within(SECOND, handle.sleep(SECOND * 3)).await;
            std::future::pending::<()>().await;
            drop(held);
        });
        simulation.run(SECOND * 10, || false);
        assert_eq!(simulation.now(), SECOND, "a dropped sleep must not advance time");
        assert_eq!(Arc::strong_count(&dropped), 2, "the task must still exist");
        simulation.clear();
        assert_eq!(Arc::strong_count(&dropped), 1, "the task must be dropped");
    }
}
