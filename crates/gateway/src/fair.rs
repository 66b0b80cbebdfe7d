//! A fair queue for each worker's time, so that a tenant at full load does not slow down the others.
//!
//! A worker runs sessions as they become ready, first come first served. That is cheap, and unfair: a tenant with sixty
//! busy connections stands sixty times in that line. So each tenant has an account at each worker, of the time that its
//! sessions have kept the worker busy, over its weight (`cpu_share`): its *virtual time*. Before each slice of work a
//! session passes its [`Gate`]:
//!
//! ```text
//!  ready --> gate --- its tenant has used little --------------------> works for a slice; its tenant is charged
//!             |                                                          ^
//!             `-- it has used much, and others are busy too --> queue ---' called one by one; between two calls the
//!                                   (the least virtual time first)         worker looks at its sockets
//! ```
//! *Little* is less than [`QUANTUM_NS`] since the worker last had nothing to do: nobody waits while there is time enough for
//! all. So a tenant that uses little finds at most a few slices before it, however many sessions of another one are ready;
//! and one that uses much gets all the time that nobody else wants.
//!
//! A slice is one poll of a session: some ten microseconds for ordinary statements, about a millisecond at most for long ones
//! (the engine's fibers yield) and for many that came together ([`slice_is_over`]). The order is that of start-time fair queueing (Goyal, Vin, Cheng 1996): a slice
//! starts at its tenant's virtual time, or at the worker's (that of the slice before) if the tenant has rested: what was not
//! used is not saved up. Tenants are spread over the workers, and each worker is fair by itself.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use fulmar_meta::{Limit, LiveLimits};
use fulmar_pages::PartitionId;

use crate::rest;

/// What a tenant may use, in virtual nanoseconds, before it has to queue.
const QUANTUM_NS: u64 = 200_000;
/// Who has worked within such a period is busy in the next.
const PERIOD: Duration = Duration::from_millis(500);
/// The weight whose virtual time is real time, and that a tenant has unless it was given another.
const USUAL_WEIGHT: u64 = 100;

/// How long a session works before it lets others on its worker work.
const SLICE: Duration = Duration::from_millis(1);

thread_local! {
    static QUEUE: Queue = Queue::default();
    static SLICE_BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// A session is polled.
pub(crate) fn slice_begins() {
    SLICE_BEGAN.set(Some(Instant::now()));
}

/// Whether the session that is being polled has worked for so long that it should give way before it goes on.
pub(crate) fn slice_is_over() -> bool {
    SLICE_BEGAN.get().is_some_and(|began| began.elapsed() >= SLICE)
}

/// A worker's queue and clocks.
#[derive(Default)]
struct Queue {
    accounts: RefCell<HashMap<PartitionId, Weak<Account>>>,
    /// Tenants with sessions that wait, by the virtual time at which their next slice starts (and a number).
    waiting: RefCell<BTreeMap<(u64, u64), Rc<Account>>>,
    places: Cell<u64>,
    dispatcher: Cell<Option<Waker>>,
    /// The worker's virtual time: the start of the last slice.
    virtual_ns: Cell<u64>,
    period: Cell<Period>,
}

/// Whether several tenants are busy.
#[derive(Clone, Copy, Default)]
struct Period {
    number: u64,
    ends: Option<Instant>,
    /// Tenants that have worked in this period so far, and in the one before.
    tenants: u32,
    tenants_before: u32,
}

/// A tenant's account at this worker.
struct Account {
    limits: Arc<LiveLimits>,
    virtual_ns: Cell<u64>,
    /// Virtual time used since the worker rested, the last time that it worked; and how often it had rested then.
    used_ns: Cell<u64>,
    era: Cell<u64>,
    /// The period in which it last worked.
    period: Cell<u64>,
    places: RefCell<VecDeque<Rc<Place>>>,
    /// It is in the queue, or the dispatcher will put it back.
    queued: Cell<bool>,
}

/// A session's place in the queue.
#[derive(Default)]
struct Place {
    state: Cell<State>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
enum State {
    #[default]
    Outside,
    Waiting,
    /// It may pass.
    Called,
}

/// Where a session asks before it works.
pub(crate) struct Gate {
    account: Rc<Account>,
    /// Made when it has to wait for the first time.
    place: Option<Rc<Place>>,
}

impl Gate {
    /// For a session of a tenant, on this worker.
    pub(crate) fn new(partition: PartitionId, limits: &Arc<LiveLimits>) -> Gate {
        Gate { account: QUEUE.with(|queue| queue.account(partition, limits)), place: None }
    }

    /// Ready when the session may work; it does so at once, and says with [`Gate::worked`] how long.
    pub(crate) fn poll_pass(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<()> {
        let state = self.place.as_ref().map_or(State::Outside, |place| place.state.get());
        QUEUE.with(|queue| {
            let passes = match state {
                State::Called => true,
                State::Waiting => false,
                State::Outside => !queue.has_used_much(&self.account, now),
            };
            if passes {
                if let Some(place) = &self.place {
                    place.state.set(State::Outside);
                }
                queue.start(&self.account);
                return Poll::Ready(());
            }
            let place = self.place.get_or_insert_default();
            place.wait(cx);
            if state == State::Outside {
                queue.enter(&self.account, place.clone());
            }
            Poll::Pending
        })
    }

    /// The session has kept the worker busy.
    pub(crate) fn worked(&self, time: Duration) {
        self.account.charge(time);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // Its place is passed over when its turn comes.
        if let Some(place) = &self.place {
            place.waker.take();
        }
    }
}

impl Place {
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
        let weight = self.limits.get(Limit::CpuShare).unwrap_or(USUAL_WEIGHT).max(1);
        let cost_ns = time.as_nanos() as u64 * USUAL_WEIGHT / weight;
        self.virtual_ns.set(self.virtual_ns.get() + cost_ns);
        self.used_ns.set(self.used_ns.get() + cost_ns);
    }

    /// Calls the first session that still waits. Whether there was one.
    fn call(&self) -> bool {
        while let Some(place) = self.places.borrow_mut().pop_front() {
            place.state.set(State::Called);
            if let Some(waker) = place.waker.take() {
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
            era: Cell::new(0),
            period: Cell::new(0),
            places: RefCell::default(),
            queued: Cell::new(false),
        });
        accounts.insert(partition, Rc::downgrade(&account));
        account
    }

    /// Whether a session of the tenant has to queue.
    fn has_used_much(&self, account: &Account, now: Instant) -> bool {
        let mut period = self.period.get();
        if period.ends.is_none_or(|ends| now >= ends) {
            let (number, ends) = (period.number + 1, Some(now + PERIOD));
            period = Period { number, ends, tenants: 0, tenants_before: period.tenants };
        }
        if account.period.replace(period.number) != period.number {
            period.tenants += 1;
        }
        self.period.set(period);
        let era = rest::rested().times;
        if account.era.replace(era) != era {
            account.used_ns.set(0);
        }
        account.used_ns.get() > QUANTUM_NS && period.tenants.max(period.tenants_before) > 1
    }

    /// A slice of the tenant's starts.
    fn start(&self, account: &Account) {
        let start_ns = account.virtual_ns.get().max(self.virtual_ns.get());
        account.virtual_ns.set(start_ns);
        self.virtual_ns.set(start_ns);
    }

    fn enter(&self, account: &Rc<Account>, place: Rc<Place>) {
        account.places.borrow_mut().push_back(place);
        if !account.queued.replace(true) {
            self.put(account.clone());
        }
        if let Some(dispatcher) = self.dispatcher.take() {
            dispatcher.wake();
        }
    }

    fn put(&self, account: Rc<Account>) {
        let number = self.places.replace(self.places.get() + 1);
        let start_ns = account.virtual_ns.get().max(self.virtual_ns.get());
        self.waiting.borrow_mut().insert((start_ns, number), account);
    }

    /// Calls the next session; answers its tenant.
    fn call(&self) -> Option<Rc<Account>> {
        let (_, account) = self.waiting.borrow_mut().pop_first()?;
        account.call();
        Some(account)
    }

    /// The tenant whose session was called has been charged: its next one takes its place.
    fn called(&self, account: Rc<Account>) {
        match account.places.borrow().is_empty() {
            true => account.queued.set(false),
            false => self.put(account.clone()),
        }
    }
}

/// Calls those who wait, for as long as the worker lives.
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
        // The worker's line is run to its end, in which the one stands who was called; then its sockets are looked at.
        // Who has become ready stands before those who are called next.
        tokio::task::yield_now().await;
        QUEUE.with(|queue| queue.called(account));
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use fulmar_meta::Limits;

    use super::*;

    /// A worker's line: each session works for so long, again and again; those that wait are called between.
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
    fn tenants_get_their_shares_however_many_sessions_they_have() {
        let worked = run(&[(100, 30, 20), (100, 2, 30), (200, 5, 25)], 20_000);
        let of = |tenant: usize| worked[tenant] as f64 / worked.iter().sum::<u64>() as f64;
        assert!((of(0) - 0.25).abs() < 0.02 && (of(1) - 0.25).abs() < 0.02, "{worked:?}");
        assert!((of(2) - 0.5).abs() < 0.02, "{worked:?}");
    }

    #[test]
    fn who_is_alone_never_waits() {
        let worked = run(&[(100, 30, 20)], 1000);
        assert_eq!(worked, [30 * 20 * 1000]);
    }

    #[test]
    fn nobody_saves_up_time() {
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
        assert!(busy.poll_pass(&mut cx, now).is_pending(), "now there are two");
        rest::falls_asleep();
        std::thread::sleep(Duration::from_millis(1));
        rest::wakes_up();
        let mut other = Gate::new(PartitionId(1), &limits);
        assert!(other.poll_pass(&mut cx, now).is_ready(), "there was time for all");
    }

    #[test]
    fn who_has_gone_is_passed_over() {
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
