//! Fibers: SQLite on stackful coroutines, so that it can wait without holding a thread.
//!
//! SQLite calls down into our VFS and expects an answer on return. When the answer is not there yet (a page is still in the
//! store), the callback suspends the whole C stack, and the thread serves other sessions:
//!
//! ```text
//!  tokio task                      fiber (own stack)
//!  ----------                      --------------------------
//!  Fiber::poll(cx) -- resume(cx) -> closure -> sqlite3_step -> xFetch
//!                                                   page absent: Suspender::wait(load)
//!                                                     load.poll(cx): Pending (cx's waker is kept)
//!  Poll::Pending  <-- suspend ---------------------'
//!     ... the load is done, the waker wakes the task ...
//!  Fiber::poll(cx) -- resume(cx) --> load.poll(cx): Ready -> xFetch returns -> ... -> closure returns
//!  Poll::Ready(r) <-- return --------------------------------------------------'
//! ```
//!
//! A fiber that may compute for long without interruption leaves its thread for good and continues on the offload pool
//! ([`offload`]). Its stack is described in [`stack`].
//!
//! Rules that keep this sound, each for a reason:
//! - A suspended fiber is never dropped: its C frames cannot be unwound. [`Fiber`]'s destructor resumes it with
//!   the *abandoned* mark set, upon which every wait fails immediately and SQLite unwinds itself by error codes.
//! - No thread-local is read on a fiber across a suspension, since the fiber may continue on another thread.
//!   [`current`] is set again by every `poll` and only read between two suspensions.
//! - No lock of ours is held while a fiber waits.

pub(crate) mod offload;
pub(crate) mod overflow;
pub(crate) mod stack;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::ptr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use corosensei::{Coroutine, CoroutineResult, Yielder};

use offload::{Job, Resumable};
use stack::FiberStack;

use crate::slice::SliceTimer;

/// Stacks kept for reuse by each thread; an idle one holds 8 KiB, and 64 KiB at most.
const POOLED_STACKS: usize = 64;

/// The context of the poll that resumed the fiber; null when the fiber is abandoned.
type Resume = *mut Context<'static>;

/// Why a fiber is suspended.
#[derive(Clone, Copy)]
enum Suspended {
    /// Until its waker is called.
    Waits,
    /// It wants to continue on the offload pool, as a statement of this partition.
    WantsOffload(u64),
}

type FiberCoroutine<T> = Coroutine<Resume, Suspended, T, FiberStack>;

/// What a fiber's callbacks use to wait. Lives in the connection that the fiber drives.
pub(crate) struct Suspender {
    yielder: Cell<*const Yielder<Resume, Suspended>>,
    context: Cell<Resume>,
    slice: SliceTimer,
    /// Of the stack in use; 0 outside of a fiber.
    soft_limit: Cell<usize>,
    /// The guard page of the stack in use; empty outside of a fiber.
    guard: Cell<(usize, usize)>,
    /// The lowest stack pointer that was seen on it.
    deepest: Cell<usize>,
    /// The fiber runs on the offload pool.
    offloaded: Cell<bool>,
}

/// The fiber that waited was abandoned: end as soon as possible.
#[derive(Debug)]
pub(crate) struct Abandoned;

impl Suspender {
    pub(crate) fn new() -> Self {
        Suspender {
            yielder: Cell::new(ptr::null()),
            context: Cell::new(ptr::null_mut()),
            slice: SliceTimer::default(),
            soft_limit: Cell::new(0),
            guard: Cell::new((0, 0)),
            deepest: Cell::new(usize::MAX),
            offloaded: Cell::new(false),
        }
    }

    /// Sets how long a fiber computes before it yields.
    pub(crate) fn with_time_slice(self, length: Duration) -> Self {
        Suspender { slice: SliceTimer::new(length), ..self }
    }

    /// Waits for `future`; suspends the fiber while it is pending.
    pub(crate) fn wait<F: Future>(&self, future: F) -> Result<F::Output, Abandoned> {
        let mut future = pin!(future);
        loop {
            let context = self.context.get();
            if context.is_null() || self.yielder.get().is_null() {
                return Err(Abandoned);
            }
            // SAFETY: `poll` stored the context of the call that is resuming us; it outlives this resumption.
            match poll_on_this_thread(future.as_mut(), unsafe { &mut *context }) {
                Poll::Ready(output) => return Ok(output),
                Poll::Pending => self.suspend(Suspended::Waits),
            }
        }
    }

    /// Returns true if the fiber should yield because its time slice is over. Always false outside a fiber.
    pub(crate) fn slice_is_over(&self) -> bool {
        self.slice.is_over() && !self.yielder.get().is_null()
    }

    /// Lets other work run on this thread, then goes on. The thread looks at its sockets before.
    pub(crate) fn yield_now(&self) -> Result<(), Abandoned> {
        self.wait(tokio::task::yield_now())
    }

    /// Whether the fiber's stack has room for what may follow an allocation. True outside of a fiber.
    pub(crate) fn has_stack(&self) -> bool {
        let here = 0_u8;
        let pointer = (&raw const here).addr();
        if pointer < self.deepest.get() {
            self.deepest.set(pointer);
        }
        pointer >= self.soft_limit.get()
    }

    /// Whether the address is in the guard page of the stack in use. Async-signal-safe.
    pub(crate) fn is_in_guard(&self, address: usize) -> bool {
        let (start, end) = self.guard.get();
        (start..end).contains(&address)
    }

    /// Runs `body` on another stack. It may suspend the fiber.
    pub(crate) fn on_stack<T>(&self, stack: &mut FiberStack, body: impl FnOnce() -> T) -> T {
        let entered = EnteredStack {
            suspender: self,
            soft_limit: self.soft_limit.replace(stack.soft_limit()),
            guard: self.guard.replace(stack.guard()),
            deepest: self.deepest.replace(usize::MAX),
        };
        let result = corosensei::on_stack(&mut *stack, body);
        let deepest = self.deepest.get();
        drop(entered);
        stack.trim_if_deep(deepest);
        result
    }

    /// Whether [`Suspender::offload`] would move the fiber: it runs on a worker, and was not abandoned.
    pub(crate) fn can_offload(&self) -> bool {
        !self.context.get().is_null() && !self.yielder.get().is_null() && !self.offloaded.get()
    }

    /// Whether the fiber runs on the offload pool.
    pub(crate) fn is_offloaded(&self) -> bool {
        self.offloaded.get()
    }

    /// Whether the fiber was dropped, and runs only to unwind.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.context.get().is_null() && !self.yielder.get().is_null()
    }

    /// Continues on the offload pool, as a statement of the partition `tenant`. Only if [`Suspender::can_offload`].
    pub(crate) fn offload(&self, tenant: u64) {
        self.suspend(Suspended::WantsOffload(tenant));
        self.offloaded.set(on_offload_thread());
    }

    #[inline(never)]
    fn suspend(&self, why: Suspended) {
        // SAFETY: the yielder lives on the fiber's own stack, on which we run; it was checked not to be null.
        let context = unsafe { (*self.yielder.get()).suspend(why) };
        self.context.set(context);
        self.slice.reset();
    }
}

/// Restores what a suspender knew of the stack in use, after a panic too.
struct EnteredStack<'a> {
    suspender: &'a Suspender,
    soft_limit: usize,
    guard: (usize, usize),
    deepest: usize,
}

impl Drop for EnteredStack<'_> {
    fn drop(&mut self) {
        self.suspender.soft_limit.set(self.soft_limit);
        self.suspender.guard.set(self.guard);
        self.suspender.deepest.set(self.deepest);
    }
}

/// Polls in a frame of its own. In one with the suspension the compiler would look up the thread-locals that a future uses (the
/// runtime's, when it wakes or defers) once for all polls, and go on with those of the thread that the fiber has left.
#[inline(never)]
fn poll_on_this_thread<F: Future>(future: Pin<&mut F>, context: &mut Context<'_>) -> Poll<F::Output> {
    future.poll(context)
}

thread_local! {
    static CURRENT: Cell<*const ()> = const { Cell::new(ptr::null()) };
    static STACKS: RefCell<Vec<FiberStack>> = const { RefCell::new(Vec::new()) };
    static OFFLOAD_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is one of the offload pool's.
#[inline(never)]
fn on_offload_thread() -> bool {
    OFFLOAD_THREAD.get()
}

fn set_offload_thread() {
    OFFLOAD_THREAD.set(true);
}

/// The environment pointer of the fiber that runs on this thread; null outside fibers.
#[inline(never)]
pub(crate) fn current() -> *const () {
    CURRENT.get()
}

/// Runs `body` here, without a fiber: it waits for nothing. While it runs, [`current`] answers `environment`.
///
/// # Safety
/// `environment` must be what a fiber's may be, and stay valid until `body` has ended.
pub(crate) unsafe fn within<T>(environment: *const (), body: impl FnOnce() -> T) -> T {
    let _environment = Environment::enter(environment);
    body()
}

/// While it lives, [`current`] answers the environment that it was made for. A panic on its way through the fiber ends it too.
struct Environment {
    outer: *const (),
}

impl Environment {
    fn enter(environment: *const ()) -> Environment {
        Environment { outer: CURRENT.replace(environment) }
    }
}

impl Drop for Environment {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
    }
}

/// A closure that runs on a stack of its own and can wait; a future of its result.
pub(crate) struct Fiber<'a, T> {
    place: Place<T>,
    suspender: *const Suspender,
    environment: *const (),
    borrows: PhantomData<&'a mut ()>,
}

/// Where a fiber continues.
enum Place<T> {
    /// On the thread that polls it.
    Here(FiberCoroutine<T>),
    /// On the offload pool. The body was made by `Box::into_raw`.
    Offloaded { job: Arc<Job>, body: *mut Body<T> },
    /// It has ended.
    Nowhere,
}

/// An offloaded fiber, as the pool sees it.
struct Body<T> {
    coroutine: FiberCoroutine<T>,
    environment: *const (),
    result: Option<T>,
}

impl<T> Resumable for Body<T> {
    fn resume(&mut self, context: Resume) -> bool {
        loop {
            match resume(&mut self.coroutine, self.environment, context) {
                CoroutineResult::Yield(Suspended::Waits) => return false,
                CoroutineResult::Yield(Suspended::WantsOffload(_)) => {}
                CoroutineResult::Return(value) => {
                    self.result = Some(value);
                    return true;
                }
            }
        }
    }
}

// SAFETY: what lies on the stack of a suspended fiber is SQLite's frames (connections are opened NOMUTEX and hold
// nothing of their thread) and our callbacks, which keep no thread-bound value across a wait (module rules).
unsafe impl<T: Send> Send for Fiber<'_, T> {}

/// Continues a coroutine on this thread.
fn resume<T>(
    coroutine: &mut FiberCoroutine<T>,
    environment: *const (),
    context: Resume,
) -> CoroutineResult<Suspended, T> {
    let _environment = Environment::enter(environment);
    coroutine.resume(context)
}

impl<'a, T: 'a> Fiber<'a, T> {
    /// A fiber that will run `body`. While it runs, [`current`] answers `environment`.
    ///
    /// # Safety
    /// `suspender` and `environment` must stay valid until the fiber is dropped, and no other fiber may use
    /// `suspender` meanwhile. What `body` uses must be usable from another thread while the caller waits.
    pub(crate) unsafe fn new(
        suspender: *const Suspender,
        environment: *const (),
        body: impl FnOnce() -> T + 'a,
    ) -> std::io::Result<Self> {
        let pooled = STACKS.with_borrow_mut(|stacks| stacks.pop());
        let stack = match pooled {
            Some(stack) => stack,
            None => FiberStack::new()?,
        };
        let (soft_limit, guard) = (stack.soft_limit(), stack.guard());
        // SAFETY: what `body` borrows outlives 'a, and the fiber is driven to its end before it is dropped.
        let coroutine = unsafe {
            Coroutine::with_stack_unchecked(stack, move |yielder: &Yielder<Resume, Suspended>, context| {
                let suspender = &*suspender;
                suspender.context.set(context);
                suspender.yielder.set(yielder);
                suspender.slice.reset();
                suspender.soft_limit.set(soft_limit);
                suspender.guard.set(guard);
                suspender.deepest.set(usize::MAX);
                suspender.offloaded.set(false);
                // Cleared by a guard, so that a panic in `body` clears it too.
                let _clear = ClearYielder(suspender);
                body()
            })
        };
        Ok(Fiber { place: Place::Here(coroutine), suspender, environment, borrows: PhantomData })
    }

    /// Continues on this thread. `None` if the fiber moved to the offload pool.
    fn resume_here(&mut self, context: Resume) -> Option<Poll<T>> {
        loop {
            let Place::Here(coroutine) = &mut self.place else { return None };
            match resume(coroutine, self.environment, context) {
                CoroutineResult::Yield(Suspended::Waits) => return Some(Poll::Pending),
                // If there is no thread for it, it continues here.
                CoroutineResult::Yield(Suspended::WantsOffload(tenant)) => {
                    if self.offload(tenant) {
                        return None;
                    }
                }
                CoroutineResult::Return(value) => {
                    if let Place::Here(ended) = std::mem::replace(&mut self.place, Place::Nowhere) {
                        self.recycle(ended.into_stack());
                    }
                    return Some(Poll::Ready(value));
                }
            }
        }
    }

    /// Gives the fiber to the pool. Returns false if the pool has no thread.
    fn offload(&mut self, tenant: u64) -> bool {
        let Place::Here(coroutine) = std::mem::replace(&mut self.place, Place::Nowhere) else {
            return false;
        };
        let body = Box::new(Body { coroutine, environment: self.environment, result: None });
        let body = Box::into_raw(body);
        // SAFETY: the body is freed when the job has stopped.
        let job = unsafe { Job::new(tenant, body) };
        if offload::submit(&job) {
            self.place = Place::Offloaded { job, body };
            return true;
        }
        // SAFETY: the job was not started.
        let body = unsafe { Box::from_raw(body) };
        self.place = Place::Here(body.coroutine);
        false
    }

    fn recycle(&self, stack: FiberStack) {
        // SAFETY: the caller of `new` keeps the suspender valid until we are dropped.
        let deepest = unsafe { (*self.suspender).deepest.get() };
        recycle(stack, deepest);
    }
}

struct ClearYielder<'a>(&'a Suspender);

impl Drop for ClearYielder<'_> {
    fn drop(&mut self) {
        self.0.yielder.set(ptr::null());
        self.0.context.set(ptr::null_mut());
        self.0.soft_limit.set(0);
        self.0.guard.set((0, 0));
    }
}

/// Keeps a stack for the next fiber of this thread.
fn recycle(stack: FiberStack, deepest: usize) {
    // `try_with`: a fiber may end while its thread is being torn down.
    let _ = STACKS.try_with(|stacks| {
        let mut stacks = stacks.borrow_mut();
        if stacks.len() < POOLED_STACKS {
            stack.trim_if_deep(deepest);
            stacks.push(stack);
        }
    });
}

impl<'a, T: 'a> Future for Fiber<'a, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        if let Place::Here(_) = self.place {
            let context = (&raw mut *cx).cast();
            if let Some(polled) = self.resume_here(context) {
                return polled;
            }
        }
        let Place::Offloaded { job, body } = &self.place else {
            unreachable!("a fiber polled after its end")
        };
        if !job.poll_end(cx.waker()) {
            return Poll::Pending;
        }
        // SAFETY: the job has ended, so the body is this fiber's alone again.
        let body = unsafe { Box::from_raw(*body) };
        self.place = Place::Nowhere;
        let Body { coroutine, result, .. } = *body;
        self.recycle(coroutine.into_stack());
        match result {
            Some(value) => Poll::Ready(value),
            None => unreachable!("an offloaded fiber that ended without a panic has a result"),
        }
    }
}

impl<T> Unpin for Fiber<'_, T> {}

impl<T> Drop for Fiber<'_, T> {
    fn drop(&mut self) {
        let mut coroutine = match std::mem::replace(&mut self.place, Place::Nowhere) {
            Place::Nowhere => return,
            Place::Here(coroutine) => coroutine,
            Place::Offloaded { job, body } => {
                // Waits if the job runs: what the fiber borrows must not go before.
                job.stop();
                // SAFETY: the job is stopped, so the body is this fiber's alone again.
                let body = unsafe { Box::from_raw(body) };
                body.coroutine
            }
        };
        if !coroutine.started() {
            return;
        }
        // Every wait of an abandoned fiber fails immediately; a loop all the same, since SQLite may retry.
        let _environment = Environment::enter(self.environment);
        while !coroutine.done() {
            // SAFETY: the caller of `new` keeps the suspender valid until we are dropped.
            unsafe { (*self.suspender).context.set(ptr::null_mut()) };
            let _ = coroutine.resume(ptr::null_mut());
        }
    }
}

/// Runs a future that never waits, such as a fiber whose waits are all abandoned.
#[cfg(test)]
pub(crate) fn poll_once<F: Future + Unpin>(mut future: F) -> Poll<F::Output> {
    Pin::new(&mut future).poll(&mut Context::from_waker(std::task::Waker::noop()))
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn runs_to_its_end_without_waiting() {
        let suspender = Suspender::new();
        // SAFETY: the suspender outlives the fiber.
        let fiber = unsafe { Fiber::new(&suspender, ptr::null(), || 7) }.unwrap();
        assert_eq!(poll_once(fiber), Poll::Ready(7));
    }

    #[test]
    fn waits_and_is_resumed_on_another_thread() {
        let suspender = Box::new(Suspender::new());
        let address = &*suspender as *const Suspender as usize;
        let (send, receive) = tokio::sync::oneshot::channel::<u32>();
        // SAFETY: the suspender outlives the fiber.
        let mut fiber = unsafe {
            Fiber::new(address as *const Suspender, ptr::null(), move || {
                let suspender = &*(address as *const Suspender);
                suspender.wait(receive).map(|r| r.unwrap_or(0)).unwrap_or(1)
            })
        }
        .unwrap();
        assert!(Pin::new(&mut fiber).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        send.send(9).unwrap();
        let answer = std::thread::scope(|s| s.spawn(move || poll_once(fiber)).join().unwrap());
        assert_eq!(answer, Poll::Ready(9));
    }

    #[test]
    fn a_panic_leaves_no_environment_behind() {
        let (suspender, environment) = (Suspender::new(), 7);
        let panicking = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: both outlive the fiber, and nobody looks at the environment.
            let fiber = unsafe {
                Fiber::<()>::new(&raw const suspender, (&raw const environment).cast(), || {
                    panic!("as asked, in {:?}", current())
                })
            };
            poll_once(fiber.unwrap())
        }));
        assert!(panicking.is_err() && current().is_null());
    }

    #[test]
    fn an_abandoned_fiber_runs_to_its_end() {
        let suspender = Suspender::new();
        let ended = Cell::new(false);
        // SAFETY: the suspender outlives the fiber.
        let mut fiber = unsafe {
            Fiber::new(&suspender, ptr::null(), || {
                let failed = suspender.wait(std::future::pending::<()>()).is_err();
                ended.set(failed);
            })
        }
        .unwrap();
        assert!(Pin::new(&mut fiber).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(fiber);
        assert!(ended.get());
    }

    /// Polls a fiber until it ends, parking the thread in between.
    fn drive<'a, T: 'a>(fiber: &mut Fiber<'a, T>) -> T {
        futures::executor::block_on(fiber)
    }

    #[test]
    fn offloaded_fiber_does_not_occupy_its_thread() {
        let suspender = Suspender::new();
        let (send, receive) = std::sync::mpsc::channel::<std::thread::ThreadId>();
        let body = || {
            suspender.offload(1);
            assert!(suspender.is_offloaded() && !suspender.can_offload());
            // Blocks its thread until the polling thread has seen that it is free.
            receive.recv().unwrap() != std::thread::current().id()
        };
        // SAFETY: the suspender outlives the fiber.
        let mut fiber = unsafe { Fiber::new(&raw const suspender, ptr::null(), body) }.unwrap();
        assert!(Pin::new(&mut fiber).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        send.send(std::thread::current().id()).unwrap();
        assert!(drive(&mut fiber), "it must run on another thread");
    }

    #[test]
    fn offloaded_fiber_waits_for_futures() {
        let suspender = Suspender::new();
        let (send, receive) = tokio::sync::oneshot::channel::<u32>();
        let (started, has_started) = std::sync::mpsc::channel();
        let body = || {
            suspender.offload(2);
            started.send(()).unwrap();
            suspender.wait(receive).map(|received| received.unwrap_or(0)).unwrap_or(1)
        };
        // SAFETY: the suspender outlives the fiber.
        let mut fiber = unsafe { Fiber::new(&raw const suspender, ptr::null(), body) }.unwrap();
        assert!(Pin::new(&mut fiber).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        has_started.recv().unwrap();
        send.send(9).unwrap();
        assert_eq!(drive(&mut fiber), 9);
    }

    #[test]
    fn panic_on_the_pool_reaches_the_poller() {
        let suspender = Suspender::new();
        let panicking = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let body = || {
                suspender.offload(3);
                panic!("expected")
            };
            // SAFETY: the suspender outlives the fiber.
            let mut fiber = unsafe { Fiber::<()>::new(&raw const suspender, ptr::null(), body) }.unwrap();
            drive(&mut fiber)
        }));
        assert!(panicking.is_err());
        assert!(!suspender.can_offload(), "nothing of the fiber may remain");
    }

    #[test]
    fn dropped_fiber_ends_on_the_pool_first() {
        let suspender = Suspender::new();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let body = || {
            suspender.offload(4);
            let abandoned = suspender.wait(std::future::pending::<()>()).is_err();
            ended.store(abandoned, std::sync::atomic::Ordering::Release);
        };
        // SAFETY: the suspender outlives the fiber.
        let mut fiber = unsafe { Fiber::new(&raw const suspender, ptr::null(), body) }.unwrap();
        assert!(Pin::new(&mut fiber).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(fiber);
        assert!(ended.load(std::sync::atomic::Ordering::Acquire));
    }

    #[test]
    fn too_deep_a_stack_is_noticed() {
        fn recurse(suspender: &Suspender, depth: usize) -> usize {
            let frame = std::hint::black_box([0_u8; 1024]);
            if !suspender.has_stack() || depth == 100_000 {
                return depth;
            }
            recurse(suspender, depth + 1) + usize::from(frame[0])
        }
        let suspender = Suspender::new();
        // SAFETY: the suspender outlives the fiber.
        let fiber = unsafe { Fiber::new(&raw const suspender, ptr::null(), || recurse(&suspender, 0)) };
        let Poll::Ready(depth) = poll_once(fiber.unwrap()) else { panic!("it waits for nothing") };
        assert!((100..2000).contains(&depth), "{depth}");
        assert!(suspender.has_stack(), "there is no limit outside of a fiber");
    }
}
