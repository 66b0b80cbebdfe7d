//! Fibers: stackful coroutines for SQLite, so that it can wait without blocking a thread.
//!
//! SQLite calls the VFS and expects the result on return. If the result is not available yet (a
//! page is still in the store), the callback suspends the whole C stack, and the thread serves
//! other sessions:
//!
//! ```text
//!  tokio task                      fiber (own stack)
//!  ----------                      --------------------------
//!  Fiber::poll(cx) -- resume(cx) -> closure -> sqlite3_step -> xFetch
//!                                                   page absent: Suspender::wait(load)
//!                                                     load.poll(cx): Pending (cx's waker is kept)
//!  Poll::Pending  <-- suspend ---------------------'
//!     ... the load is done, the waker wakes the task ...
//!  Fiber::poll(cx) -- resume(cx) --> load.poll(cx): Ready -> xFetch returns -> closure returns
//!  Poll::Ready(r) <-- return --------------------------------------------------'
//! ```
//!
//! A fiber that may compute for a long time without interruption moves to the offload pool and
//! stays there ([`offload`]). Its stack is described in [`stack`].
//!
//! Rules for soundness:
//!
//! - A suspended fiber is never freed: its C frames cannot be unwound. [`Fiber`]'s destructor
//!   resumes it as *abandoned*. Then every wait fails immediately, and SQLite unwinds through its
//!   error codes.
//! - No thread-local is read on a fiber across a suspension, since the fiber may continue on
//!   another thread. [`current`] is set by every `poll` and only read between two suspensions.
//! - No lock of the engine is held while a fiber waits.

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

use offload::{Job, Resumable, Resume, on_offload_thread};
use stack::FiberStack;

use crate::slice::SliceTimer;

/// Stacks that each thread caches for reuse. An idle one holds 8 KiB of memory, at most 64 KiB.
const POOLED_STACKS: usize = 64;

/// Why a fiber is suspended.
#[derive(Clone, Copy)]
enum Suspension {
    /// It waits for its waker.
    Wait,
    /// It asks to continue on the offload pool, as a statement of this partition.
    Offload(u64),
}

type FiberCoroutine<T> = Coroutine<Resume, Suspension, T, FiberStack>;

/// The interface by which callbacks on a fiber wait. Part of the connection that the fiber drives.
pub struct Suspender {
    yielder: Cell<*const Yielder<Resume, Suspension>>,
    context: Cell<Resume>,
    slice: SliceTimer,
    /// The soft limit of the stack in use; 0 outside a fiber.
    soft_limit: Cell<usize>,
    /// The guard page of the stack in use; empty outside a fiber.
    guard: Cell<(usize, usize)>,
    /// The lowest stack pointer seen on it.
    deepest: Cell<usize>,
    /// The fiber runs on the offload pool.
    offloaded: Cell<bool>,
}

/// The fiber was abandoned while it waited. The caller must return as soon as possible.
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

    /// Sets how long a fiber computes before it should yield.
    pub(crate) fn with_time_slice(self, length: Duration) -> Self {
        Suspender { slice: SliceTimer::new(length), ..self }
    }

    /// Wait for `future`; suspends the fiber while it is pending.
    pub(crate) fn wait<F: Future>(&self, future: F) -> Result<F::Output, Abandoned> {
        let mut future = pin!(future);
        loop {
            let context = self.context.get();
            if context.is_null() || self.yielder.get().is_null() {
                return Err(Abandoned);
            }
            // SAFETY: `poll` stored the context of the call that resumes this fiber; it outlives
            // this resumption.
            match poll_on_this_thread(future.as_mut(), unsafe { &mut *context }) {
                Poll::Ready(output) => return Ok(output),
                Poll::Pending => self.suspend(Suspension::Wait),
            }
        }
    }

    /// Returns true if the fiber should yield because its time slice is over. Always false outside
    /// a fiber.
    pub(crate) fn slice_is_over(&self) -> bool {
        self.slice.is_over() && !self.yielder.get().is_null()
    }

    /// Yields to other tasks on this thread. The thread polls its sockets before the fiber
    /// continues.
    pub(crate) fn yield_now(&self) -> Result<(), Abandoned> {
        self.wait(tokio::task::yield_now())
    }

    /// Returns true if the stack has room for the code that runs after an allocation. Always true
    /// outside a fiber.
    pub(crate) fn has_stack(&self) -> bool {
        let here = 0_u8;
        let pointer = (&raw const here).addr();
        if pointer < self.deepest.get() {
            self.deepest.set(pointer);
        }
        pointer >= self.soft_limit.get()
    }

    /// Returns true if the address is in the guard page of the stack in use. Async-signal-safe.
    pub(crate) fn is_in_guard(&self, address: usize) -> bool {
        let (start, end) = self.guard.get();
        (start..end).contains(&address)
    }

    /// Runs `body` on another stack. `body` may suspend the fiber.
    pub fn on_stack<T>(&self, stack: &mut FiberStack, body: impl FnOnce() -> T) -> T {
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

    /// Returns true if [`Suspender::offload`] would move the fiber: it runs on a worker, and was
    /// not abandoned.
    pub(crate) fn can_offload(&self) -> bool {
        !self.context.get().is_null() && !self.yielder.get().is_null() && !self.offloaded.get()
    }

    /// Returns true if the fiber runs on the offload pool.
    pub(crate) fn is_offloaded(&self) -> bool {
        self.offloaded.get()
    }

    /// Returns true if the fiber was dropped, and runs only to unwind.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.context.get().is_null() && !self.yielder.get().is_null()
    }

    /// Continues on the offload pool, as a statement of the partition `tenant`. Requires
    /// [`Suspender::can_offload`].
    pub(crate) fn offload(&self, tenant: u64) {
        self.suspend(Suspension::Offload(tenant));
        self.offloaded.set(on_offload_thread());
    }

    #[inline(never)]
    fn suspend(&self, why: Suspension) {
        // SAFETY: the yielder is on the fiber's stack, which is the current one; it was checked not
        // to be null.
        let context = unsafe { (*self.yielder.get()).suspend(why) };
        self.context.set(context);
        self.slice.reset();
    }
}

/// Restores a suspender's state of the stack in use, also after a panic.
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

/// Polls in a separate stack frame. In the frame of the suspension the compiler could look up the
/// thread-locals that a future uses (the runtime's, when it wakes or defers) once for all polls,
/// and would then use those of the thread that the fiber has left.
#[inline(never)]
fn poll_on_this_thread<F: Future>(future: Pin<&mut F>, context: &mut Context<'_>) -> Poll<F::Output> {
    future.poll(context)
}

thread_local! {
    static CURRENT: Cell<*const ()> = const { Cell::new(ptr::null()) };
    static STACKS: RefCell<Vec<FiberStack>> = const { RefCell::new(Vec::new()) };
}

/// The environment pointer of the fiber that runs on this thread; null outside fibers.
#[inline(never)]
pub(crate) fn current() -> *const () {
    CURRENT.get()
}

/// Runs `body` on this thread without a fiber; `body` must not wait. While it runs, [`current`]
/// returns `environment`.
///
/// # Safety
/// `environment` must be valid as the environment of a fiber, until `body` has ended.
pub(crate) unsafe fn within<T>(environment: *const (), body: impl FnOnce() -> T) -> T {
    let _environment = Environment::enter(environment);
    body()
}

/// While this exists, [`current`] returns the given environment. A panic in the fiber drops it as
/// well.
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

/// A closure that runs on a separate stack and can wait; a future of its result.
pub struct Fiber<'a, T> {
    location: Location<T>,
    suspender: *const Suspender,
    environment: *const (),
    borrows: PhantomData<&'a mut ()>,
}

/// Where a fiber continues.
enum Location<T> {
    /// On the polling thread.
    Here(FiberCoroutine<T>),
    /// On the offload pool. The body came from `Box::into_raw`.
    Offloaded { job: Arc<Job>, body: *mut Body<T> },
    /// Ended: it has ended.
    Ended,
}

/// An offloaded fiber from the pool's point of view.
struct Body<T> {
    coroutine: FiberCoroutine<T>,
    environment: *const (),
    result: Option<T>,
}

impl<T> Resumable for Body<T> {
    fn resume(&mut self, context: Resume) -> bool {
        loop {
            match resume(&mut self.coroutine, self.environment, context) {
                CoroutineResult::Yield(Suspension::Wait) => return false,
                CoroutineResult::Yield(Suspension::Offload(_)) => {}
                CoroutineResult::Return(value) => {
                    self.result = Some(value);
                    return true;
                }
            }
        }
    }
}

// SAFETY: the stack of a suspended fiber contains frames of SQLite (connections are opened NOMUTEX
// and keep no state of their thread) and of the engine's callbacks, which keep no thread-bound
// value across a wait (see the rules above).
unsafe impl<T: Send> Send for Fiber<'_, T> {}

/// Resumes a coroutine on this thread.
fn resume<T>(
    coroutine: &mut FiberCoroutine<T>,
    environment: *const (),
    context: Resume,
) -> CoroutineResult<Suspension, T> {
    let _environment = Environment::enter(environment);
    coroutine.resume(context)
}

impl<'a, T: 'a> Fiber<'a, T> {
    /// Creates a fiber that will run `body`. While it runs, [`current`] returns `environment`.
    ///
    /// # Safety
    /// `suspender` and `environment` must stay valid until the fiber is dropped, and no other fiber
    /// may use `suspender` meanwhile. Everything that `body` uses must be usable from another
    /// thread while the caller waits.
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
        // SAFETY: everything that `body` borrows outlives 'a, and the fiber runs to its end before
        // it is dropped.
        let coroutine = unsafe {
            Coroutine::with_stack_unchecked(stack, move |yielder: &Yielder<Resume, Suspension>, context| {
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
        Ok(Fiber { location: Location::Here(coroutine), suspender, environment, borrows: PhantomData })
    }

    /// Resumes on this thread. Returns `None` if the fiber has moved to the offload pool.
    fn resume_here(&mut self, context: Resume) -> Option<Poll<T>> {
        loop {
            let Location::Here(coroutine) = &mut self.location else { return None };
            match resume(coroutine, self.environment, context) {
                CoroutineResult::Yield(Suspension::Wait) => return Some(Poll::Pending),
                // If the pool has no thread, the fiber continues here.
                CoroutineResult::Yield(Suspension::Offload(tenant)) => {
                    if self.offload(tenant) {
                        return None;
                    }
                }
                CoroutineResult::Return(value) => {
                    if let Location::Here(ended) = std::mem::replace(&mut self.location, Location::Ended) {
                        self.recycle(ended.into_stack());
                    }
                    return Some(Poll::Ready(value));
                }
            }
        }
    }

    /// Moves the fiber to the pool. Returns false if the pool has no thread.
    fn offload(&mut self, tenant: u64) -> bool {
        let Location::Here(coroutine) = std::mem::replace(&mut self.location, Location::Ended) else {
            return false;
        };
        let body = Box::new(Body { coroutine, environment: self.environment, result: None });
        let body = Box::into_raw(body);
        // SAFETY: the body is freed when the job has stopped.
        let job = unsafe { Job::new(tenant, body) };
        if offload::submit(&job) {
            self.location = Location::Offloaded { job, body };
            return true;
        }
        // SAFETY: the job was not started.
        let body = unsafe { Box::from_raw(body) };
        self.location = Location::Here(body.coroutine);
        false
    }

    fn recycle(&self, stack: FiberStack) {
        // SAFETY: the caller of `new` keeps the suspender valid until this fiber is dropped.
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

/// Caches a stack for the next fiber of this thread.
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
        if let Location::Here(_) = self.location {
            let context = (&raw mut *cx).cast();
            if let Some(polled) = self.resume_here(context) {
                return polled;
            }
        }
        let Location::Offloaded { job, body } = &self.location else {
            unreachable!("a fiber must not be polled after its end")
        };
        if !job.poll_end(cx.waker()) {
            return Poll::Pending;
        }
        // SAFETY: the job has ended, so this fiber owns the body again.
        let body = unsafe { Box::from_raw(*body) };
        self.location = Location::Ended;
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
        let mut coroutine = match std::mem::replace(&mut self.location, Location::Ended) {
            Location::Ended => return,
            Location::Here(coroutine) => coroutine,
            Location::Offloaded { job, body } => {
                // Wait while the job runs: the fiber's borrows must stay valid until then.
                job.stop();
                // SAFETY: the job is stopped, so this fiber owns the body again.
                let body = unsafe { Box::from_raw(body) };
                body.coroutine
            }
        };
        if !coroutine.started() {
            return;
        }
        // Every wait of an abandoned fiber fails immediately. It needs a loop, since SQLite may
        // retry.
        let _environment = Environment::enter(self.environment);
        while !coroutine.done() {
            // SAFETY: the caller of `new` keeps the suspender valid until this fiber is dropped.
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
    fn fiber_that_never_waits_completes_on_the_first_poll() {
        let suspender = Suspender::new();
        // SAFETY: the suspender outlives the fiber.
        let fiber = unsafe { Fiber::new(&suspender, ptr::null(), || 7) }.unwrap();
        assert_eq!(poll_once(fiber), Poll::Ready(7));
    }

    #[test]
    fn fiber_can_be_resumed_on_another_thread() {
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
    fn panic_resets_the_environment() {
        let (suspender, environment) = (Suspender::new(), 7);
        let panicking = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: both outlive the fiber, and the environment is not dereferenced.
            let fiber = unsafe {
                Fiber::<()>::new(&raw const suspender, (&raw const environment).cast(), || {
                    panic!("expected, in {:?}", current())
                })
            };
            poll_once(fiber.unwrap())
        }));
        assert!(panicking.is_err() && current().is_null());
    }

    #[test]
    fn abandoned_fiber_runs_to_its_end() {
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
            // Blocks its thread until the polling thread has sent its id.
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
    fn stack_beyond_the_soft_limit_is_detected() {
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
        let Poll::Ready(depth) = poll_once(fiber.unwrap()) else { panic!("the fiber must not wait") };
        assert!((100..2000).contains(&depth), "{depth}");
        assert!(suspender.has_stack(), "there must be no limit outside a fiber");
    }
}
