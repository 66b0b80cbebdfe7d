//! Fibers: SQLite on stackful coroutines, so that it can wait without holding a thread.
//!
//! SQLite calls down into our VFS and expects an answer on return. When the answer is not there yet (a page still
//! lies in the store), the callback suspends the whole C stack and the thread goes on with other work:
//!
//! ```text
//!  tokio task                      fiber (own stack, 256 KiB)
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
//! Rules that keep this sound, each for a reason:
//! - A suspended fiber is never dropped: its C frames cannot be unwound. [`Fiber`]'s destructor resumes it with
//!   the *abandoned* mark set, upon which every wait fails at once and SQLite unwinds itself by error codes.
//! - No thread-local is read on a fiber across a suspension, since it may go on on another thread.
//!   [`current`] is set anew by every `poll` and only read between two suspensions.
//! - No lock of ours is held while a fiber waits.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::ptr;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};

/// Ordinary statements need 6-11 KiB; the limits set on every connection keep the worst below half of this.
const STACK_BYTES: usize = 256 << 10;

/// How long a fiber computes before others on its thread get their turn.
const SLICE: Duration = Duration::from_millis(1);

/// Stacks kept for reuse by each thread; an idle one holds 8 KiB.
const POOLED_STACKS: usize = 64;

/// The context of the poll that resumed the fiber; null when the fiber is abandoned.
type Resume = *mut Context<'static>;

/// What a fiber's callbacks use to wait. Lives in the connection that the fiber drives.
pub(crate) struct Suspender {
    yielder: Cell<*const Yielder<Resume, ()>>,
    context: Cell<Resume>,
    /// Of the slice in which it was first asked since the fiber was resumed ([`Suspender::slice_is_over`]).
    slice_ends: Cell<Option<Instant>>,
}

/// The fiber that waited was abandoned: end as soon as possible.
#[derive(Debug)]
pub(crate) struct Abandoned;

impl Suspender {
    pub(crate) fn new() -> Self {
        Suspender {
            yielder: Cell::new(ptr::null()),
            context: Cell::new(ptr::null_mut()),
            slice_ends: Cell::new(None),
        }
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
                Poll::Pending => self.suspend(),
            }
        }
    }

    /// Whether the fiber has computed for so long that it should let others on this thread work. What it waited for without being
    /// suspended counts. Outside of a fiber nobody gives way.
    pub(crate) fn slice_is_over(&self) -> bool {
        let now = Instant::now();
        match self.slice_ends.get() {
            None => self.slice_ends.set(Some(now + SLICE)),
            Some(ends) => return now >= ends && !self.yielder.get().is_null(),
        }
        false
    }

    /// Lets other work run on this thread, then goes on. The thread looks at its sockets before.
    pub(crate) fn yield_now(&self) -> Result<(), Abandoned> {
        self.wait(tokio::task::yield_now())
    }

    fn suspend(&self) {
        // SAFETY: the yielder lives on the fiber's own stack, on which we run; it was checked not to be null.
        let context = unsafe { (*self.yielder.get()).suspend(()) };
        self.context.set(context);
        self.slice_ends.set(None);
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
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
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
    coroutine: Option<Coroutine<Resume, (), T, DefaultStack>>,
    suspender: *const Suspender,
    environment: *const (),
    borrows: PhantomData<&'a mut ()>,
}

// SAFETY: what lies on the stack of a suspended fiber is SQLite's frames (connections are opened NOMUTEX and hold
// nothing of their thread) and our callbacks, which keep no thread-bound value across a wait (module rules).
unsafe impl<T: Send> Send for Fiber<'_, T> {}

impl<'a, T: 'a> Fiber<'a, T> {
    /// A fiber that will run `body`. While it runs, [`current`] answers `environment`.
    ///
    /// # Safety
    /// `suspender` and `environment` must stay valid until the fiber is dropped, and no other fiber may use
    /// `suspender` meanwhile.
    pub(crate) unsafe fn new(
        suspender: *const Suspender,
        environment: *const (),
        body: impl FnOnce() -> T + 'a,
    ) -> std::io::Result<Self> {
        let pooled = STACKS.with_borrow_mut(|stacks| stacks.pop());
        let stack = match pooled {
            Some(stack) => stack,
            None => DefaultStack::new(STACK_BYTES)?,
        };
        // SAFETY: what `body` borrows outlives 'a, and the fiber is driven to its end before it is dropped.
        let coroutine = unsafe {
            Coroutine::with_stack_unchecked(stack, move |yielder: &Yielder<Resume, ()>, context| {
                let suspender = &*suspender;
                suspender.context.set(context);
                suspender.yielder.set(yielder);
                suspender.slice_ends.set(None);
                // Cleared by a guard, so that a panic in `body` clears it too.
                let _clear = ClearYielder(suspender);
                body()
            })
        };
        Ok(Fiber { coroutine: Some(coroutine), suspender, environment, borrows: PhantomData })
    }

    fn resume(&mut self, context: Resume) -> Poll<T> {
        let Some(coroutine) = self.coroutine.as_mut() else { unreachable!("a fiber polled after its end") };
        let environment = Environment::enter(self.environment);
        let result = coroutine.resume(context);
        drop(environment);
        match result {
            CoroutineResult::Yield(()) => Poll::Pending,
            CoroutineResult::Return(value) => {
                if let Some(done) = self.coroutine.take() {
                    recycle(done.into_stack());
                }
                Poll::Ready(value)
            }
        }
    }
}

struct ClearYielder<'a>(&'a Suspender);

impl Drop for ClearYielder<'_> {
    fn drop(&mut self) {
        self.0.yielder.set(ptr::null());
        self.0.context.set(ptr::null_mut());
    }
}

fn recycle(stack: DefaultStack) {
    // `try_with`: a fiber may end while its thread is being torn down.
    let _ = STACKS.try_with(|stacks| {
        let mut stacks = stacks.borrow_mut();
        if stacks.len() < POOLED_STACKS {
            stacks.push(stack);
        }
    });
}

impl<'a, T: 'a> Future for Fiber<'a, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let context = (cx as *mut Context<'_>).cast();
        self.resume(context)
    }
}

impl<T> Unpin for Fiber<'_, T> {}

impl<T> Drop for Fiber<'_, T> {
    fn drop(&mut self) {
        let Some(coroutine) = self.coroutine.as_mut() else { return };
        if !coroutine.started() {
            return;
        }
        // Every wait of an abandoned fiber fails at once; a loop all the same, since SQLite may retry.
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
}
