//! Fair scheduling of each worker's time between tenants: start-time fair queueing (Goyal, Vin,
//! Cheng 1996), so that a tenant at full load does not slow down the others.
//!
//! A runtime polls sessions in the order in which they become ready. This is cheap but unfair: a
//! tenant with 60 busy connections is polled 60 times per round. Therefore each tenant has an
//! account at each worker. Its *virtual time* is the time that its sessions have kept the worker
//! busy, divided by its weight (`cpu_share`). Before each slice of work a session passes its
//! [`Gate`]:
//!
//! ```text
//!  ready --> gate -- low usage --------------------------> one slice; the tenant is charged
//!             |                                              ^
//!             `-- high usage, other tenants busy --> queue --'
//!                        (lowest virtual time first)    one session at a time; between two
//!                                                       sessions the worker polls its sockets
//! ```
//!
//! - *Low usage* is at most [`QUANTUM_NS`] since the worker was last idle. As long as the worker
//!   has enough time for all tenants, no session is queued.
//! - A session of a tenant with low usage waits for a few slices at most, independent of how many
//!   sessions of other tenants are ready.
//! - A tenant with high usage gets all the time that the other tenants do not use.
//!
//! A slice is one poll of a session: about 10 us for ordinary statements, and up to about 1 ms for
//! long statements, in which the engine's fibers yield, and for many statements that arrived
//! together ([`slice_is_over`]). A slice starts at its tenant's virtual time, or at the worker's
//! virtual time (the start of the previous slice) if that is later. A tenant therefore does not
//! accumulate credit while it is idle. Tenants are distributed over the workers, and each worker is
//! fair by itself.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use fulmar_meta::{Limit, LiveLimits};
use fulmar_pages::PartitionId;

use crate::idle_time;

/// The virtual time that a tenant can use before its sessions are queued, in nanoseconds.
const QUANTUM_NS: u64 = 200_000;
/// A tenant that has worked in such a period counts as busy in this period and the next.
const ACTIVITY_PERIOD: Duration = Duration::from_millis(500);
/// The default weight, with which virtual time equals real time.
const DEFAULT_WEIGHT: u64 = 100;

/// How long a session works before it yields to other sessions of its worker.
const SLICE: Duration = Duration::from_millis(1);
/// The clock is read before one of this many messages of the extended protocol that execute nothing:
/// most slices have fewer.
const MESSAGES_PER_CHECK: u32 = 4;

thread_local! {
    static QUEUE: Queue = Queue::default();
    static SLICE_BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
    static UNTIL_CHECK: Cell<u32> = const { Cell::new(MESSAGES_PER_CHECK) };
}

/// Called when the poll of a session begins.
pub(crate) fn slice_begins() {
    SLICE_BEGAN.set(Some(Instant::now()));
    UNTIL_CHECK.set(MESSAGES_PER_CHECK);
}

/// Counts a message of the extended protocol, which may execute something or not. Returns true if
/// [`slice_is_over`] is to be checked before it: after a message that executes something, and before
/// one of [`MESSAGES_PER_CHECK`].
pub(crate) fn count_message(executes: bool) -> bool {
    let left = UNTIL_CHECK.get() - 1;
    UNTIL_CHECK.set(match (executes, left) {
        (true, _) => 1,
        (false, 0) => MESSAGES_PER_CHECK,
        (false, left) => left,
    });
    left == 0
}

/// Returns true if the session that is being polled should yield before it continues.
pub(crate) fn slice_is_over() -> bool {
    SLICE_BEGAN.get().is_some_and(|began| began.elapsed() >= SLICE)
}

/// A worker's queue and clocks.
#[derive(Default)]
struct Queue {
    accounts: RefCell<HashMap<PartitionId, Weak<Account>>>,
    /// Tenants with queued sessions, by the virtual time at which their next slice starts, and a
    /// sequence number.
    waiting: RefCell<BTreeMap<(u64, u64), Rc<Account>>>,
    next_sequence: Cell<u64>,
    dispatcher: Cell<Option<Waker>>,
    /// The worker's virtual time: the start of the last slice.
    virtual_ns: Cell<u64>,
    period: Cell<Period>,
}

/// Counts the busy tenants of the current period.
#[derive(Clone, Copy, Default)]
struct Period {
    number: u64,
    ends: Option<Instant>,
    /// Tenants that have worked in this period so far.
    tenants: u32,
    /// Tenants that worked in the previous period.
    tenants_before: u32,
}

/// A tenant's account at this worker.
struct Account {
    limits: Arc<LiveLimits>,
    virtual_ns: Cell<u64>,
    /// Virtual time used since the worker was idle.
    used_ns: Cell<u64>,
    /// The number of idle periods of the worker when `used_ns` was last updated.
    idle_count: Cell<u64>,
    /// The period in which the tenant last worked.
    period: Cell<u64>,
    waiters: RefCell<VecDeque<Rc<Waiter>>>,
    /// The account is in the queue, or the dispatcher will put it back.
    queued: Cell<bool>,
}

/// A session in the queue.
#[derive(Default)]
struct Waiter {
    state: Cell<State>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
enum State {
    /// Not queued.
    #[default]
    Outside,
    /// Queued.
    Waiting,
    /// Dequeued: the session can pass the gate.
    Called,
}

/// The gate that a session passes before each slice.
pub(crate) struct Gate {
    account: Rc<Account>,
    /// Created when the session is queued for the first time.
    waiter: Option<Rc<Waiter>>,
}

impl Gate {
    /// Creates the gate of a session of the tenant on this worker.
    pub(crate) fn new(partition: PartitionId, limits: &Arc<LiveLimits>) -> Gate {
        Gate { account: QUEUE.with(|queue| queue.account(partition, limits)), waiter: None }
    }

    /// Ready when the session can work. It must do so immediately, and then report the time with
    /// [`Gate::worked`].
    pub(crate) fn poll_pass(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<()> {
        let state = self.waiter.as_ref().map_or(State::Outside, |waiter| waiter.state.get());
        QUEUE.with(|queue| {
            let passes = match state {
                State::Called => true,
                State::Waiting => false,
                State::Outside => !queue.must_wait(&self.account, now),
            };
            if passes {
                if let Some(waiter) = &self.waiter {
                    waiter.state.set(State::Outside);
                }
                queue.start(&self.account);
                return Poll::Ready(());
            }
            let waiter = self.waiter.get_or_insert_default();
            waiter.wait(cx);
            if state == State::Outside {
                queue.enter(&self.account, waiter.clone());
            }
            Poll::Pending
        })
    }

    /// Charges the tenant for the time that the session has worked.
    pub(crate) fn worked(&self, time: Duration) {
        self.account.charge(time);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A waiter without a waker is skipped when it is dequeued.
        if let Some(waiter) = &self.waiter {
            waiter.waker.take();
        }
    }
}

impl Waiter {
    fn wait(&self, cx: &Context<'_>) {
        self.state.set(State::Waiting);
        match &mut *self.waker.borrow_mut() {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
    }
}

impl Account {
    fn charge(&self, time: Duration) {
        let weight = self.limits.get(Limit::CpuShare).unwrap_or(DEFAULT_WEIGHT).max(1);
        let cost_ns = time.as_nanos() as u64 * DEFAULT_WEIGHT / weight;
        self.virtual_ns.set(self.virtual_ns.get() + cost_ns);
        self.used_ns.set(self.used_ns.get() + cost_ns);
    }

    /// Dequeues and wakes the first session that still exists. Returns false if there is none.
    fn call(&self) -> bool {
        while let Some(waiter) = self.waiters.borrow_mut().pop_front() {
            waiter.state.set(State::Called);
            if let Some(waker) = waiter.waker.take() {
                waker.wake();
                return true;
            }
        }
        false
    }
}

impl Queue {
    fn account(&self, partition: PartitionId, limits: &Arc<LiveLimits>) -> Rc<Account> {
        let mut accounts = self.accounts.borrow_mut();
        if let Some(account) = accounts.get(&partition).and_then(Weak::upgrade) {
            return account;
        }
        if accounts.len() == accounts.capacity() {
            accounts.retain(|_, account| account.strong_count() > 0);
        }
        let account = Rc::new(Account {
            limits: limits.clone(),
            virtual_ns: Cell::new(0),
            used_ns: Cell::new(0),
            idle_count: Cell::new(0),
            period: Cell::new(0),
            waiters: RefCell::default(),
            queued: Cell::new(false),
        });
        accounts.insert(partition, Rc::downgrade(&account));
        account
    }

    /// Returns true if a session of the tenant must be queued.
    fn must_wait(&self, account: &Account, now: Instant) -> bool {
        let mut period = self.period.get();
        if period.ends.is_none_or(|ends| now >= ends) {
            let (number, ends) = (period.number + 1, Some(now + ACTIVITY_PERIOD));
            period = Period { number, ends, tenants: 0, tenants_before: period.tenants };
        }
        if account.period.replace(period.number) != period.number {
            period.tenants += 1;
        }
        self.period.set(period);
        let idle_count = idle_time::read().periods;
        if account.idle_count.replace(idle_count) != idle_count {
            account.used_ns.set(0);
        }
        account.used_ns.get() > QUANTUM_NS && period.tenants.max(period.tenants_before) > 1
    }

    /// Starts a slice of the tenant.
    fn start(&self, account: &Account) {
        let start_ns = account.virtual_ns.get().max(self.virtual_ns.get());
        account.virtual_ns.set(start_ns);
        self.virtual_ns.set(start_ns);
    }

    /// Queues a session.
    fn enter(&self, account: &Rc<Account>, waiter: Rc<Waiter>) {
        account.waiters.borrow_mut().push_back(waiter);
        if !account.queued.replace(true) {
            self.put(account.clone());
        }
        if let Some(dispatcher) = self.dispatcher.take() {
            dispatcher.wake();
        }
    }

    /// Queues an account by the start of its next slice.
    fn put(&self, account: Rc<Account>) {
        let sequence = self.next_sequence.replace(self.next_sequence.get() + 1);
        let start_ns = account.virtual_ns.get().max(self.virtual_ns.get());
        self.waiting.borrow_mut().insert((start_ns, sequence), account);
    }

    /// Wakes the next session. Returns its tenant's account.
    fn call(&self) -> Option<Rc<Account>> {
        let (_, account) = self.waiting.borrow_mut().pop_first()?;
        account.call();
        Some(account)
    }

    /// Puts an account back into the queue if it has further waiting sessions. Called after the
    /// woken session's work has been charged.
    fn called(&self, account: Rc<Account>) {
        match account.waiters.borrow().is_empty() {
            true => account.queued.set(false),
            false => self.put(account.clone()),
        }
    }
}

/// The dispatcher task of a worker: wakes queued sessions one at a time. Never ends.
pub(crate) async fn dispatch() {
    loop {
        let account = poll_fn(|cx| {
            QUEUE.with(|queue| match queue.call() {
                Some(account) => Poll::Ready(account),
                None => {
                    queue.dispatcher.set(Some(cx.waker().clone()));
                    Poll::Pending
                }
            })
        })
        .await;
        // Lets the runtime run all ready tasks, including the woken session, and then poll its
        // sockets. Sessions that become ready by this run before the next queued session.
        tokio::task::yield_now().await;
        QUEUE.with(|queue| queue.called(account));
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use fulmar_meta::Limits;

    use super::*;

    /// Simulates a worker. `shares` has the weight, the number of sessions and the cost of a slice
    /// of each tenant. In each round all ready sessions work for a slice, and one queued session is
    /// dequeued. Returns the time that each tenant has worked, in microseconds.
    fn run(shares: &[(u64, usize, u64)], rounds: usize) -> Vec<u64> {
        let now = Instant::now();
        let mut sessions = Vec::new();
        for (tenant, (weight, count, cost_us)) in shares.iter().enumerate() {
            let mut limits = Limits::default();
            limits.set(Limit::CpuShare, Some(*weight));
            let limits = Arc::new(LiveLimits::new(&limits));
            for _ in 0..*count {
                sessions.push((tenant, *cost_us, Gate::new(PartitionId(tenant as u64 + 1), &limits)));
            }
        }
        let mut cx = Context::from_waker(Waker::noop());
        let mut worked = vec![0; shares.len()];
        for _ in 0..rounds {
            let called = QUEUE.with(Queue::call);
            for (tenant, cost_us, gate) in &mut sessions {
                if gate.poll_pass(&mut cx, now).is_ready() {
                    gate.worked(Duration::from_micros(*cost_us));
                    worked[*tenant] += *cost_us;
                }
            }
            if let Some(account) = called {
                QUEUE.with(|queue| queue.called(account));
            }
        }
        worked
    }

    #[test]
    fn tenants_get_their_shares_independent_of_session_count() {
        let worked = run(&[(100, 30, 20), (100, 2, 30), (200, 5, 25)], 20_000);
        let of = |tenant: usize| worked[tenant] as f64 / worked.iter().sum::<u64>() as f64;
        assert!((of(0) - 0.25).abs() < 0.02 && (of(1) - 0.25).abs() < 0.02, "{worked:?}");
        assert!((of(2) - 0.5).abs() < 0.02, "{worked:?}");
    }

    #[test]
    fn single_busy_tenant_is_never_queued() {
        let worked = run(&[(100, 30, 20)], 1000);
        assert_eq!(worked, [30 * 20 * 1000]);
    }

    #[test]
    fn idle_tenant_does_not_accumulate_credit() {
        let now = Instant::now();
        let mut cx = Context::from_waker(Waker::noop());
        let limits = Arc::new(LiveLimits::new(&Limits::default()));
        let (mut busy, mut rested) = (Gate::new(PartitionId(1), &limits), Gate::new(PartitionId(2), &limits));
        for _ in 0..1000 {
            assert!(busy.poll_pass(&mut cx, now).is_ready());
            busy.worked(Duration::from_millis(1));
        }
        assert!(rested.poll_pass(&mut cx, now).is_ready());
        rested.worked(Duration::ZERO);
        assert!(rested.account.virtual_ns.get() >= 999_000_000);
        assert!(
            busy.poll_pass(&mut cx, now).is_pending(),
            "a tenant with high usage must be queued while another is busy"
        );
        idle_time::on_park();
        std::thread::sleep(Duration::from_millis(1));
        idle_time::on_unpark();
        let mut other = Gate::new(PartitionId(1), &limits);
        assert!(other.poll_pass(&mut cx, now).is_ready(), "usage must be reset after the worker was idle");
    }

    #[test]
    fn dropped_session_is_skipped_in_the_queue() {
        let now = Instant::now();
        let mut cx = Context::from_waker(Waker::noop());
        let limits = Arc::new(LiveLimits::new(&Limits::default()));
        let mut gates: Vec<Gate> = (0..3).map(|_| Gate::new(PartitionId(1), &limits)).collect();
        let mut other = Gate::new(PartitionId(2), &limits);
        assert!(other.poll_pass(&mut cx, now).is_ready());
        assert!(gates[0].poll_pass(&mut cx, now).is_ready());
        gates[0].worked(Duration::from_millis(1));
        assert!(gates.iter_mut().all(|gate| gate.poll_pass(&mut cx, now).is_pending()));
        drop(gates.remove(0));
        QUEUE.with(|queue| {
            let account = queue.call().unwrap();
            queue.called(account);
        });
        assert!(gates[0].poll_pass(&mut cx, now).is_ready());
        assert!(gates[1].poll_pass(&mut cx, now).is_pending());
    }
}
