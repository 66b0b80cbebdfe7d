//! The offload pool: threads for fibers that may compute for long without interruption.
//!
//! A single call into SQLite can take minutes (`json_patch` of two large objects is quadratic), and while it runs nothing can
//! be taken from its thread. On a worker it would freeze every session of that worker. What makes such calls slow is large
//! input, so a fiber leaves its worker as soon as it handles a text, a parameter or an allocation of more than
//! [`OFFLOAD_BYTES`] (`Link::offload`), and continues on a thread of this pool until it ends:
//!
//! ```text
//!  worker                                     pool thread
//!  ------                                     -----------
//!  Fiber::poll -- resume --> sqlite3_malloc(1 MiB)
//!  Poll::Pending <- suspend(Offload)
//!    submit ------------------------------->  resume --> json_patch ... 25 s ...
//!    (serves other sessions)                          suspend: waits for a page
//!                                             ... the page's waker queues the job again ...
//!                                             resume --> ends
//!  Fiber::poll <-------- wake ---------------- finished
//!  Poll::Ready
//! ```
//!
//! - A tenant occupies at most one thread; its other jobs wait in a queue of its own, and tenants take turns. So a tenant
//!   that runs an expensive call delays only its own large statements.
//! - Threads have a low scheduling priority ([`NICENESS`]): workers come first.
//! - A job yields after each time slice that it can be interrupted in, as on a worker, and goes to the end of the queue.
//!
//! A job is a small executor task: its waker queues it again, and only its end wakes the task that awaits the fiber.

use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures::task::AtomicWaker;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;

use super::Resume;

/// A statement that handles a larger text, parameter or allocation leaves its worker. Quadratic functions take some
/// milliseconds on smaller input.
pub(crate) const OFFLOAD_BYTES: usize = 64 << 10;

/// Threads of the pool. Each can be held for long by one tenant.
const MAX_THREADS: usize = 8;
/// An idle thread ends after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Added to the threads' nice value. A thread of the pool then gets about a tenth of the CPU time of a busy worker.
const NICENESS: i32 = 10;

/// A coroutine that can be continued.
pub(super) trait Resumable {
    /// Continues until the next suspension. Returns true if it has ended.
    fn resume(&mut self, context: Resume) -> bool;
}

/// A fiber on the pool.
pub(super) struct Job {
    /// The tenant's partition.
    tenant: u64,
    state: Mutex<State>,
    /// Signalled when the job is no longer running.
    stopped: Condvar,
    /// The task that awaits the fiber.
    task: AtomicWaker,
    runtime: Option<Handle>,
    body: *mut dyn Resumable,
}

// SAFETY: `body` is used only by the thread that has set the state to `Running` or `Stopped`.
unsafe impl Send for Job {}
// SAFETY: the same.
unsafe impl Sync for Job {}

enum State {
    /// For its waker.
    Waiting,
    /// In the pool's queue.
    Queued,
    Running {
        woken: bool,
    },
    /// It has ended, possibly with a panic, or its fiber was dropped. The pool does not touch `body` any more.
    Stopped(Option<Box<dyn Any + Send>>),
}

impl Job {
    /// A job of a tenant, to be given to [`submit`].
    ///
    /// # Safety
    /// `body` must stay valid until [`Job::stop`] has returned or [`Job::poll_end`] has returned true.
    pub(super) unsafe fn new<'a>(tenant: u64, body: *mut (dyn Resumable + 'a)) -> Arc<Job> {
        // SAFETY: only the lifetime changes; the caller keeps the body valid.
        let body: *mut dyn Resumable = unsafe { std::mem::transmute(body) };
        Arc::new(Job {
            tenant,
            state: Mutex::new(State::Waiting),
            stopped: Condvar::new(),
            task: AtomicWaker::new(),
            runtime: Handle::try_current().ok(),
            body,
        })
    }

    /// Whether the job has ended; if not, the task is woken when it has. Continues a panic of the fiber.
    pub(super) fn poll_end(&self, task: &Waker) -> bool {
        self.task.register(task);
        let panic = match &mut *self.state.lock() {
            State::Stopped(panic) => panic.take(),
            _ => return false,
        };
        if let Some(panic) = panic {
            std::panic::resume_unwind(panic);
        }
        true
    }

    /// Takes the job from the pool. Waits while it runs: the fiber's borrows end with this call.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        while matches!(*state, State::Running { .. }) {
            self.stopped.wait(&mut state);
        }
        if !matches!(*state, State::Stopped(_)) {
            *state = State::Stopped(None);
        }
    }

    /// Runs the job until its next suspension, on a thread of the pool. Returns true if it is to be queued again.
    fn run(self: &Arc<Job>) -> bool {
        {
            let mut state = self.state.lock();
            if !matches!(*state, State::Queued) {
                return false;
            }
            *state = State::Running { woken: false };
        }
        let waker = Waker::from(self.clone());
        let mut context = Context::from_waker(&waker);
        let runtime = self.runtime.as_ref().map(Handle::enter);
        let resumed = catch_unwind(AssertUnwindSafe(|| {
            let context: *mut Context<'_> = &raw mut context;
            // SAFETY: the state is `Running`, so the body is valid and used by this thread alone.
            unsafe { (*self.body).resume(context.cast()) }
        }));
        drop(runtime);
        let mut state = self.state.lock();
        let woken = matches!(*state, State::Running { woken: true });
        *state = match resumed {
            Ok(true) => State::Stopped(None),
            Err(panic) => State::Stopped(Some(panic)),
            Ok(false) if woken => State::Queued,
            Ok(false) => State::Waiting,
        };
        let (again, ended) = (matches!(*state, State::Queued), matches!(*state, State::Stopped(_)));
        drop(state);
        self.stopped.notify_all();
        if ended {
            self.task.wake();
        }
        again
    }
}

impl Wake for Job {
    fn wake(self: Arc<Job>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Job>) {
        let mut state = self.state.lock();
        match &mut *state {
            State::Running { woken } => *woken = true,
            State::Waiting => {
                *state = State::Queued;
                drop(state);
                POOL.push(self.clone());
            }
            State::Queued | State::Stopped(_) => {}
        }
    }
}

/// Gives a job to the pool. Returns false if no thread could be started; then the job is still the caller's.
pub(super) fn submit(job: &Arc<Job>) -> bool {
    if !POOL.has_thread() {
        return false;
    }
    job.wake_by_ref();
    true
}

static POOL: LazyLock<Pool> = LazyLock::new(Pool::default);

#[derive(Default)]
struct Pool {
    queues: Mutex<Queues>,
    /// Signalled when a tenant has its turn.
    queued: Condvar,
}

#[derive(Default)]
struct Queues {
    jobs: HashMap<u64, VecDeque<Arc<Job>>>,
    /// Tenants that have jobs queued and none running, in the order of their turns.
    turns: VecDeque<u64>,
    running: HashSet<u64>,
    threads: usize,
    idle: usize,
}

impl Queues {
    fn push(&mut self, job: Arc<Job>) {
        let tenant = job.tenant;
        let jobs = self.jobs.entry(tenant).or_default();
        jobs.push_back(job);
        if jobs.len() == 1 && !self.running.contains(&tenant) {
            self.turns.push_back(tenant);
        }
    }

    /// The next job; its tenant has no other one until [`Queues::finish`].
    fn next(&mut self) -> Option<Arc<Job>> {
        let tenant = self.turns.pop_front()?;
        let jobs = self.jobs.get_mut(&tenant)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.jobs.remove(&tenant);
        }
        self.running.insert(tenant);
        job
    }

    /// A tenant's job is no longer running.
    fn finish(&mut self, tenant: u64) {
        self.running.remove(&tenant);
        if self.jobs.contains_key(&tenant) {
            self.turns.push_back(tenant);
        }
    }
}

impl Pool {
    fn push(&self, job: Arc<Job>) {
        let mut queues = self.queues.lock();
        queues.push(job);
        let wanted = queues.turns.len();
        if queues.idle < wanted {
            self.start_thread(&mut queues);
        }
        drop(queues);
        self.queued.notify_one();
    }

    /// Whether there is a thread, starting the first one if need be.
    fn has_thread(&self) -> bool {
        let mut queues = self.queues.lock();
        queues.threads > 0 || self.start_thread(&mut queues)
    }

    /// Starts a thread, unless there are enough. Returns false if the system refuses.
    fn start_thread(&self, queues: &mut Queues) -> bool {
        if queues.threads == MAX_THREADS {
            return true;
        }
        let started = std::thread::Builder::new().name("fulmar-offload".into()).spawn(serve);
        if let Err(error) = &started {
            tracing::warn!(%error, "could not start a thread of the offload pool");
            return false;
        }
        queues.threads += 1;
        true
    }
}

/// What a thread of the pool does until it has been idle for [`IDLE_TIMEOUT`].
fn serve() {
    super::set_offload_thread();
    // SAFETY: a plain call. On Linux the value is that of the calling thread.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) } != 0 {
        tracing::warn!(error = %std::io::Error::last_os_error(), "could not lower the priority of a thread");
    }
    let pool = &*POOL;
    let mut queues = pool.queues.lock();
    loop {
        if let Some(job) = queues.next() {
            drop(queues);
            let again = job.run();
            queues = pool.queues.lock();
            let tenant = job.tenant;
            if again {
                queues.push(job);
            }
            queues.finish(tenant);
            continue;
        }
        queues.idle += 1;
        let timed_out = pool.queued.wait_for(&mut queues, IDLE_TIMEOUT).timed_out();
        queues.idle -= 1;
        // The last thread stays: a job may have been promised one.
        if timed_out && queues.turns.is_empty() && queues.threads > 1 {
            queues.threads -= 1;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Reports each run, then waits to be told to end it.
    struct Reporting {
        name: &'static str,
        started: mpsc::Sender<&'static str>,
        proceed: mpsc::Receiver<bool>,
    }

    impl Resumable for Reporting {
        fn resume(&mut self, _context: Resume) -> bool {
            self.started.send(self.name).unwrap();
            self.proceed.recv().unwrap()
        }
    }

    struct Started {
        job: Arc<Job>,
        proceed: mpsc::Sender<bool>,
        body: *mut Reporting,
    }

    impl Started {
        fn new(tenant: u64, name: &'static str, started: &mpsc::Sender<&'static str>) -> Started {
            let (proceed, receiver) = mpsc::channel();
            let body =
                Box::into_raw(Box::new(Reporting { name, started: started.clone(), proceed: receiver }));
            // SAFETY: `finish` waits for the job's end before it frees the body.
            let job = unsafe { Job::new(tenant, body) };
            assert!(submit(&job));
            Started { job, proceed, body }
        }

        fn finish(self) {
            self.proceed.send(true).unwrap();
            self.job.stop();
            // SAFETY: the job does not use it any more.
            drop(unsafe { Box::from_raw(self.body) });
        }
    }

    #[test]
    fn tenant_occupies_one_thread_and_does_not_delay_others() {
        let (started, runs) = mpsc::channel();
        let first = Started::new(1, "first of one", &started);
        assert_eq!(runs.recv().unwrap(), "first of one");
        let second = Started::new(1, "second of one", &started);
        let other = Started::new(2, "other tenant", &started);
        assert_eq!(runs.recv().unwrap(), "other tenant", "a tenant's second job must wait for its first one");
        other.finish();
        first.finish();
        assert_eq!(runs.recv().unwrap(), "second of one");
        second.finish();
    }

    #[test]
    fn wake_while_running_queues_the_job_again() {
        let (started, runs) = mpsc::channel();
        let job = Started::new(3, "woken", &started);
        runs.recv().unwrap();
        job.job.wake_by_ref();
        job.proceed.send(false).unwrap();
        runs.recv().expect("the wake must not be lost");
        job.finish();
    }
}
