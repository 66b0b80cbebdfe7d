//! The executor: tasks, processes and virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// A simulated process. Process 0 is the environment of all others; it is never killed or paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Process(pub u32);

/// The future did not complete in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeout;

type TaskId = u64;

struct Task {
    process: Process,
    /// `None` while it is being polled.
    future: Option<BoxFuture<'static, ()>>,
}

struct State {
    now_us: u64,
    random: StdRng,
    tasks: BTreeMap<TaskId, Task>,
    next_task: TaskId,
    timers: BinaryHeap<Reverse<(u64, u64)>>,
    wakers: BTreeMap<u64, Waker>,
    next_timer: u64,
    paused: Vec<Process>,
    trace: Option<Vec<String>>,
}

/// A handle to a simulation. Clones share it.
#[derive(Clone)]
pub struct Simulation {
    state: Arc<Mutex<State>>,
    ready: Arc<Mutex<Vec<TaskId>>>,
}

struct TaskWaker {
    task: TaskId,
    ready: Arc<Mutex<Vec<TaskId>>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let mut ready = self.ready.lock();
        if !ready.contains(&self.task) {
            ready.push(self.task);
        }
    }
}

impl Simulation {
    /// The process that represents the environment of all processes.
    pub const WORLD: Process = Process(0);

    /// A simulation determined by `seed`. With `trace`, lines passed to [`Simulation::note`] are
    /// kept.
    pub fn new(seed: u64, trace: bool) -> Simulation {
        let state = State {
            now_us: 0,
            random: StdRng::seed_from_u64(seed),
            tasks: BTreeMap::new(),
            next_task: 0,
            timers: BinaryHeap::new(),
            wakers: BTreeMap::new(),
            next_timer: 0,
            paused: Vec::new(),
            trace: trace.then(Vec::new),
        };
        Simulation { state: Arc::new(Mutex::new(state)), ready: Arc::default() }
    }

    /// Starts a task of a process.
    pub fn spawn(&self, process: Process, future: impl Future<Output = ()> + Send + 'static) {
        let mut state = self.state.lock();
        let id = state.next_task;
        state.next_task += 1;
        state.tasks.insert(id, Task { process, future: Some(Box::pin(future)) });
        drop(state);
        self.ready.lock().push(id);
    }

    /// Drops all tasks of a process. Must not be called by a task of that process.
    pub fn kill(&self, process: Process) {
        let mut state = self.state.lock();
        let ids: Vec<_> =
            state.tasks.iter().filter(|(_, task)| task.process == process).map(|(id, _)| *id).collect();
        let dropped: Vec<_> = ids.iter().filter_map(|id| state.tasks.remove(id)).collect();
        state.paused.retain(|paused| *paused != process);
        drop(state);
        // Outside of the lock, because dropping a future may wake other tasks.
        drop(dropped);
    }

    /// Stops the tasks of a process until [`Simulation::resume`].
    pub fn pause(&self, process: Process) {
        self.state.lock().paused.push(process);
    }

    /// Lets the tasks of a paused process run again.
    pub fn resume(&self, process: Process) {
        self.state.lock().paused.retain(|paused| *paused != process);
    }

    /// Virtual time since the start.
    pub fn now(&self) -> Duration {
        Duration::from_micros(self.state.lock().now_us)
    }

    /// Completes after `duration`.
    pub async fn sleep(&self, duration: Duration) {
        let at = self.state.lock().now_us + duration.as_micros() as u64;
        Sleep { simulation: self.clone(), at, timer: None }.await;
    }

    /// The future's result, unless it takes longer than `duration`; then it is dropped.
    pub async fn within<F: Future>(&self, duration: Duration, future: F) -> Result<F::Output, Timeout> {
        let future = std::pin::pin!(future);
        let sleep = std::pin::pin!(self.sleep(duration));
        match futures::future::select(future, sleep).await {
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
        self.below(denominator) < numerator
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
        let mut state = self.state.lock();
        let now_ms = state.now_us as f64 / 1000.0;
        if let Some(trace) = &mut state.trace {
            trace.push(format!("{now_ms:>10.3} {}", line()));
        }
    }

    /// The lines noted so far.
    pub fn trace(&self) -> Vec<String> {
        self.state.lock().trace.clone().unwrap_or_default()
    }

    /// Runs until `done` returns true or virtual time reaches `until`.
    pub fn run(&self, until: Duration, done: impl Fn() -> bool) {
        while !done() {
            match self.next_ready() {
                Some(id) => self.poll(id),
                None if self.advance(until) => {}
                None => return,
            }
        }
    }

    /// A random task that is ready and whose process runs.
    fn next_ready(&self) -> Option<TaskId> {
        let mut ready = self.ready.lock();
        let mut state = self.state.lock();
        ready.retain(|id| state.tasks.contains_key(id));
        if state.paused.is_empty() {
            if ready.is_empty() {
                return None;
            }
            let place = state.random.random_range(0..ready.len());
            return Some(ready.swap_remove(place));
        }
        let runs = |id: &TaskId| !state.paused.contains(&state.tasks[id].process);
        let places: Vec<usize> = (0..ready.len()).filter(|place| runs(&ready[*place])).collect();
        if places.is_empty() {
            return None;
        }
        let place = places[state.random.random_range(0..places.len())];
        Some(ready.swap_remove(place))
    }

    fn poll(&self, id: TaskId) {
        let Some(mut future) = self.state.lock().tasks.get_mut(&id).and_then(|task| task.future.take())
        else {
            return;
        };
        let waker = Waker::from(Arc::new(TaskWaker { task: id, ready: self.ready.clone() }));
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        let mut state = self.state.lock();
        match polled {
            Poll::Ready(()) => {
                state.tasks.remove(&id);
            }
            Poll::Pending => {
                if let Some(task) = state.tasks.get_mut(&id) {
                    task.future = Some(future);
                    return;
                }
            }
        }
        drop(state);
    }

    /// Advances to the next timer. Returns false if there is none before `until`.
    fn advance(&self, until: Duration) -> bool {
        let mut state = self.state.lock();
        let until_us = until.as_micros() as u64;
        let Some(Reverse((at, _))) = state.timers.peek().copied() else { return false };
        if at > until_us {
            state.now_us = until_us;
            return false;
        }
        state.now_us = state.now_us.max(at);
        let now_us = state.now_us;
        let mut due = Vec::new();
        while let Some(Reverse((at, timer))) = state.timers.peek().copied() {
            if at > now_us {
                break;
            }
            state.timers.pop();
            due.extend(state.wakers.remove(&timer));
        }
        drop(state);
        for waker in due {
            waker.wake();
        }
        true
    }
}

struct Sleep {
    simulation: Simulation,
    at: u64,
    timer: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let simulation = self.simulation.clone();
        let mut state = simulation.state.lock();
        if state.now_us >= self.at {
            return Poll::Ready(());
        }
        match self.timer {
            Some(timer) => {
                state.wakers.insert(timer, context.waker().clone());
            }
            None => {
                let timer = state.next_timer;
                state.next_timer += 1;
                state.timers.push(Reverse((self.at, timer)));
                state.wakers.insert(timer, context.waker().clone());
                self.timer = Some(timer);
            }
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer {
            self.simulation.state.lock().wakers.remove(&timer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn run(seed: u64) -> Vec<String> {
        let simulation = Simulation::new(seed, true);
        for number in 0..5 {
            let handle = simulation.clone();
            simulation.spawn(Process(1 + number % 2), async move {
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
        for process in [1, 2] {
            let handle = simulation.clone();
            simulation.spawn(Process(process), async move {
                handle.sleep(SECOND).await;
                handle.note(|| format!("process {process}"));
            });
        }
        simulation.pause(Process(2));
        simulation.kill(Process(1));
        simulation.run(SECOND * 2, || false);
        assert!(simulation.trace().is_empty());
        simulation.resume(Process(2));
        simulation.run(SECOND * 3, || false);
        assert_eq!(simulation.trace().len(), 1);
        assert_eq!(simulation.now(), SECOND, "time must not advance without a timer");
    }

    #[test]
    fn future_that_exceeds_its_time_is_dropped() {
        let simulation = Simulation::new(4, true);
        let handle = simulation.clone();
        simulation.spawn(Process(1), async move {
            let late = handle.within(SECOND, handle.sleep(SECOND * 2)).await;
            let early = handle.within(SECOND, handle.sleep(SECOND / 2)).await;
            handle.note(|| format!("{late:?} {early:?}"));
        });
        simulation.run(SECOND * 10, || false);
        assert!(simulation.trace()[0].ends_with("Err(Timeout) Ok(())"));
    }
}
