//! A run, from loading to the report, on the driver's thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};
use rand::RngExt;
use tokio::task::JoinSet;

use super::session::{Session, Shared};
use super::{Report, RunEvent, RunOptions, RunTick};
use crate::Target;
use crate::client::Client;
use crate::driver::thread_cpu;
use crate::measure::{Meter, Window};
use crate::workload::{Dialect, Kind, Loading, Place, Random, Terminal, Workload, generator};

/// Databases that are loaded, and connections that are made, at a time.
const CONCURRENT_LOADS: usize = 4;
const CONCURRENT_CONNECTS: usize = 32;

/// How long after its end a run waits for the last answers.
const GRACE: Duration = Duration::from_secs(60);

/// Tells the generators of arrivals from those of terminals.
const ARRIVALS: u64 = 1;

pub(super) async fn run<W: Workload>(workload: W, options: RunOptions) -> anyhow::Result<Report> {
    let (workload, options) = (Rc::new(workload), Rc::new(options));
    let targets = targets(&options);
    let dialect = load_all(&*workload, &options, &targets).await?;
    let (sessions, shared, clock) = connect_all(&workload, &options, &targets, dialect).await?;
    let cpu = measure(&*workload, &options, sessions, &shared, clock).await?;
    check_all(&*workload, &targets).await?;
    let meter = shared.meter.borrow();
    Report::new(&*workload, &options, targets.len(), &meter, cpu)
}

fn tell(options: &RunOptions, event: RunEvent) {
    if let Some(watcher) = &options.watcher {
        watcher(&event);
    }
}

fn targets(options: &RunOptions) -> Vec<Target> {
    match &options.databases[..] {
        [] => vec![options.target.clone()],
        databases => databases.iter().map(|database| options.target.with_database(database)).collect(),
    }
}

async fn connect(target: &Target) -> anyhow::Result<Client> {
    Client::connect(target).await.with_context(|| format!("cannot connect to {target}"))
}

/// Loads what is missing everywhere; answers what the server speaks.
async fn load_all<W: Workload>(
    workload: &W,
    options: &RunOptions,
    targets: &[Target],
) -> anyhow::Result<Dialect> {
    let mut first = connect(targets.first().context("a run needs a database")?).await?;
    let dialect = Dialect::of(&mut first).await?;
    first.close().await?;
    let of = workload.rows() * targets.len() as u64;
    let done = Cell::new(0);
    let loaded = |rows: u64| {
        done.set(done.get() + rows);
        tell(options, RunEvent::Loading { rows: done.get(), of });
    };
    let loaded = &loaded;
    stream::iter(targets)
        .map(|target| async move {
            let mut client = connect(target).await?;
            let mut loading = Loading { client: &mut client, dialect, seed: options.seed, loaded };
            workload.load(&mut loading).await.with_context(|| format!("cannot load {target}"))?;
            anyhow::Ok(client.close().await?)
        })
        .buffer_unordered(CONCURRENT_LOADS)
        .try_collect::<()>()
        .await?;
    Ok(dialect)
}

async fn check_all<W: Workload>(workload: &W, targets: &[Target]) -> anyhow::Result<()> {
    stream::iter(targets)
        .map(|target| async move {
            let mut client = connect(target).await?;
            workload.check(&mut client).await.with_context(|| format!("the check of {target}"))?;
            anyhow::Ok(client.close().await?)
        })
        .buffer_unordered(CONCURRENT_LOADS)
        .try_collect()
        .await
}

/// The run's clock: the moment of the start and the window.
#[derive(Clone, Copy)]
struct Clock {
    starts: Instant,
    window: Window,
}

impl Clock {
    fn starting_now(options: &RunOptions) -> Clock {
        let starts = Instant::now();
        let opens = starts + options.warm_up;
        Clock { starts, window: Window { opens, closes: opens + options.measure } }
    }
}

type Sessions<W> = Vec<Session<<W as Workload>::Terminal>>;

/// Makes all connections, then starts the clock, so that connecting is no part of the warm-up.
async fn connect_all<W: Workload>(
    workload: &Rc<W>,
    options: &RunOptions,
    targets: &[Target],
    dialect: Dialect,
) -> anyhow::Result<(Sessions<W>, Rc<Shared>, Clock)> {
    let meter = RefCell::new(Meter::new(Clock::starting_now(options).window));
    let shared = Rc::new(Shared { meter, dialect, patience: options.patience });
    let sessions: Sessions<W> = stream::iter(0..targets.len() * options.connections)
        .map(|number| {
            let (tenant, number) = (number % targets.len(), number / targets.len());
            let place = Place { tenant, number, of: options.connections, seed: options.seed };
            let mut session = Session::new(workload.terminal(place), targets[tenant].clone(), shared.clone());
            async move {
                session.connect().await?;
                anyhow::Ok(session)
            }
        })
        .buffer_unordered(CONCURRENT_CONNECTS)
        .try_collect()
        .await?;
    let clock = Clock::starting_now(options);
    *shared.meter.borrow_mut() = Meter::new(clock.window);
    Ok((sessions, shared, clock))
}

/// Runs the sessions to the end of the window; answers the driver's own CPU time in it.
async fn measure<W: Workload>(
    workload: &W,
    options: &RunOptions,
    sessions: Sessions<W>,
    shared: &Shared,
    clock: Clock,
) -> anyhow::Result<Duration> {
    let mut running = JoinSet::new();
    let rate_each = options.rate_tps.map(|rate| rate / sessions.len() as f64);
    let kinds: Rc<[Kind]> = workload.kinds().into();
    for (number, session) in sessions.into_iter().enumerate() {
        let choice =
            Choice { kinds: kinds.clone(), random: generator(options.seed, &[number as u64, 0, ARRIVALS]) };
        running.spawn_local(async move {
            match rate_each {
                None => closed_loop(session, clock, choice).await,
                Some(rate) => open_loop(session, clock, rate, choice).await,
            }
        });
    }
    let mut ended = Vec::new();
    let cpu = tokio::select! {
        cpu = watch(options, &shared.meter, clock) => cpu,
        error = first_failure(&mut running, &mut ended) => return Err(error),
    };
    let stragglers = async {
        while let Some(session) = running.join_next().await {
            ended.push(session??);
        }
        anyhow::Ok(())
    };
    let stragglers = tokio::time::timeout(GRACE, stragglers).await;
    stragglers.with_context(|| format!("some answers are still out after {GRACE:?}"))??;
    stream::iter(ended).for_each_concurrent(CONCURRENT_CONNECTS, Session::close).await;
    Ok(cpu)
}

/// Chooses the kinds of a session's transactions, by their weights.
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
        let kinds = self.kinds.iter();
        let chosen = kinds.take_while(|kind| {
            place -= kind.weight;
            place >= 0.0
        });
        // Rounding may leave a hair beyond the last.
        chosen.count().min(self.kinds.len() - 1)
    }
}

async fn closed_loop<T: Terminal>(
    mut session: Session<T>,
    clock: Clock,
    mut choice: Choice,
) -> anyhow::Result<Session<T>> {
    while Instant::now() < clock.window.closes {
        let kind = choice.kind();
        session.terminal.draw(kind);
        pause(session.terminal.keying(), clock).await;
        session.transaction(kind, Instant::now()).await?;
        pause(session.terminal.thinking(), clock).await;
    }
    Ok(session)
}

/// Pauses, at most to the end of the run.
async fn pause(time: Duration, clock: Clock) {
    if !time.is_zero() {
        tokio::time::sleep_until((Instant::now() + time).min(clock.window.closes).into()).await;
    }
}

/// Transactions fall due after exponentially distributed pauses, so that all sessions together are a Poisson stream.
/// A session that is late runs what is overdue at once, each timed from when it was due.
async fn open_loop<T: Terminal>(
    mut session: Session<T>,
    clock: Clock,
    rate: f64,
    mut choice: Choice,
) -> anyhow::Result<Session<T>> {
    let mut due = clock.starts;
    loop {
        let pause = -(1.0 - choice.random.random::<f64>()).ln() / rate;
        due += Duration::from_secs_f64(pause.min(3600.0));
        if due >= clock.window.closes {
            tokio::time::sleep_until(clock.window.closes.into()).await;
            return Ok(session);
        }
        if Instant::now() >= clock.window.closes {
            return Ok(session);
        }
        let kind = choice.kind();
        session.terminal.draw(kind);
        tokio::time::sleep_until(due.into()).await;
        session.transaction(kind, due).await?;
    }
}

/// The first session that failed; waits for ever if none does. Sessions that end well are kept, still connected.
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

/// Tells the watcher how it goes until the window closes; answers the CPU time of this thread within the window.
async fn watch(options: &RunOptions, meter: &RefCell<Meter>, clock: Clock) -> Duration {
    tell(options, RunEvent::WarmUp);
    tick_until(options, meter, clock, clock.window.opens).await;
    tell(options, RunEvent::Opens);
    let cpu = thread_cpu();
    tick_until(options, meter, clock, clock.window.closes).await;
    let cpu = thread_cpu().saturating_sub(cpu);
    tell(options, RunEvent::Closes);
    cpu
}

async fn tick_until(options: &RunOptions, meter: &RefCell<Meter>, clock: Clock, end: Instant) {
    let tick = options.tick.max(Duration::from_millis(10));
    let mut last = Instant::now();
    while last < end {
        tokio::time::sleep_until((last + tick).min(end).into()).await;
        let now = Instant::now();
        let recent = meter.borrow_mut().take_recent();
        tell(
            options,
            RunEvent::Tick(RunTick {
                elapsed: now - clock.starts,
                of: clock.window.closes - clock.starts,
                throughput_tps: recent.count as f64 / (now - last).as_secs_f64(),
                p50_ms: recent.p50_ms,
                p99_ms: recent.p99_ms,
                lost_connections: meter.borrow().lost_connections,
            }),
        );
        last = now;
    }
}
