//! A driver thread: connects its terminals, runs their transactions, and reports the counts of each
//! interval.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};
use rand::RngExt;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::collector::Collector;
use super::session::{Session, Shared};
use super::{RunEvent, RunOptions};
use crate::arrival::{Arrival, OpenLoop, Schedule};
use crate::cpu_affinity::{CpuHalf, restrict_to};
use crate::driver::{thread_cpu, use_idle_priority};
use crate::measure::{Availability, Meter, Window};
use crate::workload::{Dialect, Kind, Random, Terminal, TerminalId, Workload, generator};

/// Number of connections that a thread opens concurrently.
const CONCURRENT_CONNECTS: usize = 32;

/// How long a run waits for outstanding answers after its end.
const ANSWER_GRACE: Duration = Duration::from_secs(60);

/// Distinguishes the random generators of arrivals from those of terminals.
const ARRIVALS: u64 = 1;

/// The state that all threads of a run share.
pub(super) struct Plan<W> {
    pub(super) options: RunOptions,
    /// Workloads by tenant.
    pub(super) workloads: Vec<W>,
    /// Shares of an open loop's rate by tenant.
    pub(super) rate_shares: Vec<f64>,
    pub(super) dialect: Dialect,
    pub(super) collector: Collector,
    /// All threads wait here before the clock starts.
    pub(super) ready: Barrier,
    /// All threads wait here again. Between the two barriers, a part waits for its parent.
    pub(super) start: Barrier,
    pub(super) clock: OnceLock<Clock>,
}

/// The clock of a run: its start and its window.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    pub(super) starts: Instant,
    pub(super) window: Window,
}

impl<W: Workload> Plan<W> {
    /// Starts the clock once all threads are ready, so that connecting is not part of the warm-up.
    pub(super) async fn clock(&self) -> Clock {
        self.ready.wait().await;
        self.start.wait().await;
        *self.clock.get_or_init(|| self.starting_now())
    }

    fn starting_now(&self) -> Clock {
        let starts = Instant::now();
        let opens = starts + self.options.warm_up;
        Clock { starts, window: Window { opens, closes: opens + self.options.measure } }
    }

    /// The terminals of a thread. If there are at least as many tenants as threads, all terminals
    /// of a tenant are on the same thread.
    fn terminals(&self, thread: usize) -> Vec<TerminalId> {
        let (threads, of) = (self.options.all_threads(), self.options.connections);
        let tenants = self.workloads.len();
        let all = (0..of).flat_map(|number| (0..tenants).map(move |tenant| (tenant, number)));
        let here = |(tenant, number): &(usize, usize)| match tenants >= threads {
            true => tenant % threads == thread,
            false => (tenant * of + number) % threads == thread,
        };
        let place = |(tenant, number)| TerminalId { tenant, number, of, seed: self.options.seed };
        all.filter(here).map(place).collect()
    }

    pub(super) fn meter(&self, window: Window, places: &[TerminalId]) -> Meter {
        let mut here = vec![false; self.workloads.len()];
        places.iter().for_each(|place| here[place.tenant] = true);
        let kinds = self.workloads.first().map_or(0, |workload| workload.kinds().len());
        Meter::new(window, self.options.warm_up, self.options.tick, kinds, here.into_iter())
    }

    /// Calls the watcher if `first` is 0, so that only the first driver thread or process reports
    /// an event.
    pub(super) fn notify(&self, first: usize, event: RunEvent) {
        if let Some(watcher) = self.options.watcher.as_ref().filter(|_| first == 0) {
            watcher(&event);
        }
    }
}

/// The counts of a thread or of a whole process, and the CPU time of each thread in the window.
pub(super) struct Outcome {
    pub(super) meter: Meter,
    pub(super) cpu: Vec<Duration>,
}

/// Runs the terminals of one thread.
pub(super) async fn drive<W: Workload>(plan: Arc<Plan<W>>, thread: usize) -> anyhow::Result<Outcome> {
    if plan.options.separate_cpus {
        restrict_to(CpuHalf::Drivers)?;
    }
    if plan.options.idle_priority {
        use_idle_priority()?;
    }
    let places = plan.terminals(thread);
    let meter = plan.meter(plan.starting_now().window, &places);
    let shared = Rc::new(Shared {
        meter: RefCell::new(meter),
        dialect: plan.dialect,
        reconnect_timeout: plan.options.reconnect_timeout,
    });
    let sessions = connect_all(&plan, &places, &shared).await?;
    let clock = plan.clock().await;
    *shared.meter.borrow_mut() = plan.meter(clock.window, &places);

    let mut running = start_all(&plan, sessions, clock);
    let mut ended = Vec::new();
    let cpu = tokio::select! {
        cpu = watch(&plan, thread, &shared.meter, clock) => cpu,
        error = first_failure(&mut running, &mut ended) => return Err(error),
    };
    let stragglers = async {
        while let Some(session) = running.join_next().await {
            ended.push(session??);
        }
        anyhow::Ok(())
    };
    let stragglers = tokio::time::timeout(ANSWER_GRACE, stragglers).await;
    stragglers.with_context(|| format!("some answers are still outstanding after {ANSWER_GRACE:?}"))??;
    stream::iter(ended).for_each_concurrent(CONCURRENT_CONNECTS, Session::close).await;

    let shared = Rc::into_inner(shared).context("a terminal is still running after the end of the run")?;
    let mut meter = shared.meter.into_inner();
    meter.tenants.iter_mut().flatten().for_each(Availability::close);
    Ok(Outcome { meter, cpu: vec![cpu] })
}

type Sessions<W> = Vec<Session<<W as Workload>::Terminal>>;

async fn connect_all<W: Workload>(
    plan: &Plan<W>,
    places: &[TerminalId],
    shared: &Rc<Shared>,
) -> anyhow::Result<Sessions<W>> {
    let targets = plan.options.targets();
    let workloads: Vec<Rc<W>> = plan.workloads.iter().cloned().map(Rc::new).collect();
    stream::iter(places)
        .map(|place| {
            let terminal = workloads[place.tenant].terminal(*place);
            let target = targets[place.tenant].clone();
            let mut session = Session::new(terminal, *place, target, shared.clone());
            async move {
                session.connect().await?;
                anyhow::Ok(session)
            }
        })
        .buffer_unordered(CONCURRENT_CONNECTS)
        .try_collect()
        .await
}

type Running<T> = JoinSet<anyhow::Result<Session<T>>>;

fn start_all<W: Workload>(plan: &Plan<W>, sessions: Sessions<W>, clock: Clock) -> Running<W::Terminal> {
    let mut running = JoinSet::new();
    let kinds: Rc<[Kind]> = plan.workloads.first().map_or_else(Vec::new, Workload::kinds).into();
    let options = &plan.options;
    let seconds = (options.warm_up + options.measure).as_secs_f64();
    match &options.arrival {
        Arrival::Closed => {
            for session in sessions {
                let choice = Choice { kinds: kinds.clone(), random: arrivals(session.place) };
                running.spawn_local(closed_loop(session, clock, choice));
            }
        }
        Arrival::Open { rate_tps, shape, tolerance } => {
            let offer = OpenLoop { starts: clock.starts, trace: shape.trace(seconds), tolerance: *tolerance };
            let offer = Rc::new(offer);
            for session in sessions {
                let share = plan.rate_shares[session.place.tenant] / options.connections as f64;
                let random = arrivals(session.place);
                let schedule = Schedule::new(offer.clone(), rate_tps * share, &kinds, random);
                running.spawn_local(open_loop(session, clock, schedule, *tolerance));
            }
        }
    }
    running
}

fn arrivals(place: TerminalId) -> Random {
    generator(place.seed, &[place.tenant as u64, place.number as u64, ARRIVALS])
}

/// Chooses the kinds of a session's transactions at random, by weight.
struct Choice {
    kinds: Rc<[Kind]>,
    random: Random,
}

impl Choice {
    fn kind(&mut self) -> usize {
        if let [_] = *self.kinds {
            return 0;
        }
        let total: f64 = self.kinds.iter().map(|kind| kind.weight).sum();
        let mut place = self.random.random::<f64>() * total;
        let before = self.kinds.iter().take_while(|kind| {
            place -= kind.weight;
            place >= 0.0
        });
        // Rounding errors may leave a remainder after the last kind.
        before.count().min(self.kinds.len() - 1)
    }
}

async fn closed_loop<T: Terminal>(
    mut session: Session<T>,
    clock: Clock,
    mut choice: Choice,
) -> anyhow::Result<Session<T>> {
    loop {
        let kind = session.terminal.next_kind(choice.kind());
        session.terminal.draw(kind);
        pause(session.terminal.keying_time(), clock).await;
        let now = Instant::now();
        if now >= clock.window.closes {
            return Ok(session);
        }
        session.transaction(kind, now).await?;
        pause(session.terminal.think_time(), clock).await;
    }
}

/// Pauses for `time`, but not beyond the end of the run.
async fn pause(time: Duration, clock: Clock) {
    if !time.is_zero() {
        tokio::time::sleep_until((Instant::now() + time).min(clock.window.closes).into()).await;
    }
}

/// Runs transactions by a schedule. A session that is behind schedule runs overdue transactions
/// immediately, measured from when they were due, or cancels them if they are later than the
/// tolerance.
async fn open_loop<T: Terminal>(
    mut session: Session<T>,
    clock: Clock,
    mut schedule: Schedule,
    tolerance: Option<Duration>,
) -> anyhow::Result<Session<T>> {
    while let Some((kind, due)) = schedule.next().filter(|(_, due)| *due < clock.window.closes) {
        // A cancelled transaction does not await anything, so yield to the other sessions of this
        // thread here.
        tokio::task::consume_budget().await;
        let now = Instant::now();
        if tolerance.is_some_and(|tolerance| now.saturating_duration_since(due) > tolerance) {
            session.cancelled(kind, due, now);
            continue;
        }
        if now >= clock.window.closes {
            session.unsent(kind, due);
            continue;
        }
        let kind = session.terminal.next_kind(kind);
        session.terminal.draw(kind);
        tokio::time::sleep_until(due.into()).await;
        session.transaction(kind, due).await?;
    }
    tokio::time::sleep_until(clock.window.closes.into()).await;
    Ok(session)
}

/// Returns the error of the first session that fails, and never returns if none does. Sessions that
/// succeed are added to `ended`, still connected.
async fn first_failure<S: 'static>(
    running: &mut JoinSet<anyhow::Result<S>>,
    ended: &mut Vec<S>,
) -> anyhow::Error {
    loop {
        match running.join_next().await {
            Some(Ok(Ok(session))) => ended.push(session),
            Some(Ok(Err(error))) => return error,
            Some(Err(error)) => return error.into(),
            None => return std::future::pending().await,
        }
    }
}

/// Reports each interval until the window closes. Returns the CPU time of this thread in the
/// window.
async fn watch<W: Workload>(plan: &Plan<W>, thread: usize, meter: &RefCell<Meter>, clock: Clock) -> Duration {
    plan.notify(thread, RunEvent::WarmUp);
    let mut spent = thread_cpu();
    report_intervals_until(plan, thread, meter, clock.window.opens, &mut spent).await;
    plan.notify(thread, RunEvent::Opens);
    let opened = thread_cpu();
    report_intervals_until(plan, thread, meter, clock.window.closes, &mut spent).await;
    let cpu = thread_cpu().saturating_sub(opened);
    plan.notify(thread, RunEvent::Closes);
    cpu
}

async fn report_intervals_until<W: Workload>(
    plan: &Plan<W>,
    thread: usize,
    meter: &RefCell<Meter>,
    end: Instant,
    spent: &mut Duration,
) {
    let mut now = Instant::now();
    while now < end {
        let next = meter.borrow().current_end();
        tokio::time::sleep_until(next.min(end).into()).await;
        now = Instant::now();
        let finished = meter.borrow_mut().take_finished(now);
        for interval in finished {
            let before = std::mem::replace(spent, thread_cpu());
            plan.collector.add_counts(thread, interval, spent.saturating_sub(before));
        }
    }
}
