//! The offload pool: threads for fibers that may compute for a long time without interruption.
//!
//! A single call into SQLite can take minutes (`json_patch` of two large objects is quadratic), and
//! it cannot be preempted. On a worker it would block every session of that worker. Such calls are
//! slow because of large input. So a fiber leaves its worker as soon as it handles a text, a
//! parameter or an allocation of more than [`OFFLOAD_BYTES`], or needs more than 1 MiB to compile a
//! statement (`Link::offload`). It continues on a thread of this pool until it ends:
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
//! - A tenant occupies at most one thread. Its other jobs wait in the tenant's queue, and tenants
//!   take turns. So a tenant that runs an expensive call delays only its own large statements.
//! - Threads have a low scheduling priority ([`NICENESS`]): workers come first.
//! - A job yields after each time slice where it can be interrupted, as on a worker, and goes to
//!   the end of the queue.
//! - A job that has not yielded for [`STUCK_AFTER`] is stuck: it is in a call that may not return
//!   for a long time. Its thread does not count towards the [`MAX_PROGRESSING`] threads of the
//!   pool, so stuck calls do not delay other tenants' jobs. Its thread gets the lowest priority
//!   ([`STUCK_NICENESS`]) and ends with the job. Any number of stuck threads, up to
//!   [`MAX_THREADS`], leaves the workers their CPU time.
//!
//! A job is a small executor task: its waker queues it again, and only its end wakes the task that
//! awaits the fiber.

use std::any::Any;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;

/// The context of the poll that resumed the fiber; null when the fiber is abandoned.
pub(super) type Resume = *mut Context<'static>;

thread_local! {
    static OFFLOAD_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if this thread belongs to the offload pool.
#[inline(never)]
pub(super) fn on_offload_thread() -> bool {
    OFFLOAD_THREAD.get()
}

/// A statement that handles a larger text, parameter or allocation leaves its worker. Quadratic
/// functions take a few milliseconds on smaller input.
///
/// It is more than 64 KiB because SQLite keeps the statement journal of every multi-row INSERT in
/// chunks of 64 KiB and a header.
pub(crate) const OFFLOAD_BYTES: usize = 72 << 10;

/// Maximum of threads that are not stuck.
const MAX_PROGRESSING: usize = 8;
/// Maximum of threads in total. One tenant can occupy each of them for a long time.
const MAX_THREADS: usize = 256;
/// A job that has run for this time without yielding is stuck. A time slice is 1 ms of CPU time.
const STUCK_AFTER: Duration = Duration::from_millis(100);
/// An idle thread ends after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Added to the threads' nice value. A thread of the pool then gets about a tenth of the CPU time
/// of a busy worker.
const NICENESS: i32 = 10;
/// The nice value of stuck threads. To the system's scheduler 256 of them weigh as much as 4
/// workers; with [`NICENESS`], as much as 27.
const STUCK_NICENESS: i32 = 19;

/// A coroutine that can be resumed.
pub(super) trait Resumable {
    /// Runs until the next suspension. Returns true if the coroutine has ended.
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
    /// Waits for its waker.
    Waiting,
    /// In the pool's queue.
    Queued,
    Running {
        woken: bool,
    },
    /// It has ended, possibly with a panic, or its fiber was dropped. The pool does not touch
    /// `body` any more.
    Stopped(Option<Box<dyn Any + Send>>),
}

impl Job {
    /// Creates a job of a tenant, to be passed to [`submit`].
    ///
    /// # Safety
    /// `body` must stay valid until [`Job::stop`] has returned or [`Job::poll_end`] has returned
    /// true.
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

    /// Returns true if the job has ended. Otherwise the task is woken when it has. Resumes a panic
    /// of the fiber.
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

    /// Removes the job from the pool. Waits while it runs: the fiber's borrows end with this call.
    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        while matches!(*state, State::Running { .. }) {
            self.stopped.wait(&mut state);
        }
        if !matches!(*state, State::Stopped(_)) {
            *state = State::Stopped(None);
        }
    }

    /// Runs the job until its next suspension, on a thread of the pool. Returns true if it must be
    /// queued again.
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
            // SAFETY: the state is `Running`, so the body is valid and only this thread uses it.
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

/// Submits a job to the pool. Returns false if no thread could be started; the caller then keeps
/// the job.
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
    /// Signalled when it is a tenant's turn.
    queued: Condvar,
    /// Signalled when it is a tenant's turn and there is no thread for it.
    lacking: Condvar,
}

#[derive(Default)]
struct Queues {
    jobs: HashMap<u64, VecDeque<Arc<Job>>>,
    /// Tenants that have queued jobs and none running, in the order of their turns.
    turns: VecDeque<u64>,
    /// Tenants that have a running job.
    running: HashMap<u64, Run>,
    threads: usize,
    watch: Watch,
}

/// The state of the thread that detects stuck jobs ([`watch`]).
#[derive(Default, PartialEq, Eq)]
enum Watch {
    #[default]
    Absent,
    /// It waits until there is no thread for a tenant's turn.
    Idle,
    /// It checks every [`STUCK_AFTER`].
    Polls,
}

/// One run of a job on a thread, from one suspension to the next.
struct Run {
    since: Instant,
    /// The thread's id in the system.
    thread: libc::pid_t,
    /// The thread has the priority of a stuck one. It ends after the run.
    demoted: bool,
}

impl Run {
    fn is_stuck(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= STUCK_AFTER
    }
}

impl Queues {
    fn push(&mut self, job: Arc<Job>) {
        let tenant = job.tenant;
        let jobs = self.jobs.entry(tenant).or_default();
        jobs.push_back(job);
        if jobs.len() == 1 && !self.running.contains_key(&tenant) {
            self.turns.push_back(tenant);
        }
    }

    /// Returns the next job, to be run on `thread`. Its tenant gets no other one until
    /// [`Queues::finish`].
    fn next(&mut self, now: Instant, thread: libc::pid_t) -> Option<Arc<Job>> {
        let tenant = self.turns.pop_front()?;
        let jobs = self.jobs.get_mut(&tenant)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.jobs.remove(&tenant);
        }
        self.running.insert(tenant, Run { since: now, thread, demoted: false });
        job
    }

    /// Records that a tenant's job is no longer running. Returns true if its thread was demoted.
    fn finish(&mut self, tenant: u64) -> bool {
        let run = self.running.remove(&tenant);
        if self.jobs.contains_key(&tenant) {
            self.turns.push_back(tenant);
        }
        run.is_some_and(|run| run.demoted)
    }

    /// Returns true if more tenants are due than threads are about to take a job.
    fn lacks_threads(&self) -> bool {
        self.turns.len() > self.threads.saturating_sub(self.running.len())
    }

    /// Returns true if another thread should be started.
    fn wants_thread(&self, now: Instant) -> bool {
        let stuck = self.running.values().filter(|run| run.is_stuck(now)).count();
        self.lacks_threads() && self.threads < MAX_THREADS && self.threads < MAX_PROGRESSING + stuck
    }

    /// Lowers the priority of the threads whose jobs are stuck.
    fn demote_stuck(&mut self, now: Instant) {
        for run in self.running.values_mut().filter(|run| !run.demoted && run.is_stuck(now)) {
            lower_priority(run.thread, STUCK_NICENESS);
            run.demoted = true;
        }
    }
}

impl Pool {
    fn push(&self, job: Arc<Job>) {
        let mut queues = self.queues.lock();
        queues.push(job);
        self.add_threads(&mut queues);
        drop(queues);
        self.queued.notify_one();
    }

    /// Returns true if there is a thread. Starts the first one if necessary.
    fn has_thread(&self) -> bool {
        let mut queues = self.queues.lock();
        queues.threads > 0 || self.start_thread(&mut queues)
    }

    /// Starts threads for the tenants that are due, within the bounds. If jobs turn out to be
    /// stuck, [`watch`] starts more later.
    fn add_threads(&self, queues: &mut Queues) {
        let now = Instant::now();
        while queues.wants_thread(now) {
            if queues.threads >= MAX_PROGRESSING {
                queues.demote_stuck(now);
            }
            if !self.start_thread(queues) {
                break;
            }
        }
        if !queues.lacks_threads() {
            return;
        }
        match queues.watch {
            Watch::Absent if spawn("fulmar-offload-watch", watch) => queues.watch = Watch::Polls,
            Watch::Idle => {
                self.lacking.notify_one();
            }
            Watch::Absent | Watch::Polls => {}
        }
    }

    /// Starts a thread. Returns false if the system refuses.
    fn start_thread(&self, queues: &mut Queues) -> bool {
        let started = spawn("fulmar-offload", serve);
        queues.threads += usize::from(started);
        started
    }
}

fn spawn(name: &str, body: fn()) -> bool {
    let started = std::thread::Builder::new().name(name.into()).spawn(body);
    if let Err(error) = &started {
        tracing::warn!(%error, "could not start a thread of the offload pool");
    }
    started.is_ok()
}

/// Sets the nice value of a thread of this process.
fn lower_priority(thread: libc::pid_t, niceness: i32) {
    // SAFETY: a plain call. On Linux the value applies to the thread only.
    if unsafe { libc::setpriority(libc::PRIO_PROCESS, thread as libc::id_t, niceness) } != 0 {
        tracing::warn!(error = %std::io::Error::last_os_error(), "could not lower the priority of a thread");
    }
}

/// The main loop of a pool thread. It ends after it has been idle for [`IDLE_TIMEOUT`], or after
/// its job was stuck.
fn serve() {
    OFFLOAD_THREAD.set(true);
    // SAFETY: a plain call.
    let thread = unsafe { libc::gettid() };
    lower_priority(thread, NICENESS);
    let pool = &*POOL;
    let mut queues = pool.queues.lock();
    loop {
        if let Some(job) = queues.next(Instant::now(), thread) {
            drop(queues);
            let again = job.run();
            queues = pool.queues.lock();
            let tenant = job.tenant;
            if again {
                queues.push(job);
            }
            let demoted = queues.finish(tenant);
            // A thread cannot raise its priority again, so another one replaces it.
            if demoted && (queues.threads > 1 || pool.start_thread(&mut queues)) {
                queues.threads -= 1;
                pool.add_threads(&mut queues);
                pool.queued.notify_one();
                return;
            }
            continue;
        }
        let timed_out = pool.queued.wait_for(&mut queues, IDLE_TIMEOUT).timed_out();
        // The last thread stays: `submit` may have relied on it.
        if timed_out && queues.turns.is_empty() && queues.threads > 1 {
            queues.threads -= 1;
            return;
        }
    }
}

/// Starts threads when jobs turn out to be stuck while tenants wait for their turn. Ends after no
/// tenant has waited for [`IDLE_TIMEOUT`].
fn watch() {
    let pool = &*POOL;
    let mut queues = pool.queues.lock();
    loop {
        queues.watch = Watch::Polls;
        pool.add_threads(&mut queues);
        if queues.lacks_threads() {
            pool.lacking.wait_for(&mut queues, STUCK_AFTER);
            continue;
        }
        queues.watch = Watch::Idle;
        if pool.lacking.wait_for(&mut queues, IDLE_TIMEOUT).timed_out() && !queues.lacks_threads() {
            queues.watch = Watch::Absent;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Reports each run, then waits for the signal to end it.
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

    /// The timeout of the tests' waits: far longer than any of them takes.
    const DEADLINE: Duration = Duration::from_secs(120);

    #[test]
    fn stuck_jobs_of_any_number_of_tenants_do_not_delay_others() {
        const FIRST: u64 = 100;
        let (started, runs) = mpsc::channel();
        let tenants = FIRST..FIRST + 3 * MAX_PROGRESSING as u64 + 1;
        let stuck: Vec<Started> = tenants.map(|tenant| Started::new(tenant, "stuck", &started)).collect();
        for _ in &stuck {
            runs.recv_timeout(DEADLINE).expect("each must get a thread while all before it are stuck");
        }
        let niceness = {
            let queues = POOL.queues.lock();
            // SAFETY: a plain call.
            unsafe { libc::getpriority(libc::PRIO_PROCESS, queues.running[&FIRST].thread as libc::id_t) }
        };
        assert_eq!(niceness, STUCK_NICENESS, "a stuck thread has the lowest priority");
        stuck.into_iter().for_each(Started::finish);
        let next = Started::new(FIRST, "next", &started);
        assert_eq!(runs.recv_timeout(DEADLINE), Ok("next"), "a thread must be left");
        next.finish();
    }

    #[test]
    fn threads_are_added_only_if_others_are_stuck() {
        let began = Instant::now();
        let queues = |threads: usize| Queues {
            turns: VecDeque::from([7]),
            running: (100..100 + threads as u64)
                .map(|tenant| (tenant, Run { since: began, thread: 0, demoted: false }))
                .collect(),
            threads,
            ..Queues::default()
        };
        let later = began + STUCK_AFTER;
        assert!(queues(MAX_PROGRESSING - 1).wants_thread(began));
        assert!(
            !queues(MAX_PROGRESSING).wants_thread(began),
            "no thread is added while all threads make progress"
        );
        assert!(queues(MAX_PROGRESSING).wants_thread(later), "a thread is added if all threads are stuck");
        assert!(!queues(MAX_THREADS).wants_thread(later), "the pool must not exceed MAX_THREADS");
        let idle = Queues { threads: 2 * MAX_PROGRESSING + 1, ..queues(2 * MAX_PROGRESSING) };
        assert!(!idle.wants_thread(later), "no thread is added if an idle one can take the job");
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
