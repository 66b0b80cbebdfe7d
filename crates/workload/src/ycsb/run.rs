//! A run, from loading to the report, on the driver's thread.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::stream::{self, StreamExt, TryStreamExt};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinSet;

use super::procedure;
use super::schema::{TABLES, load};
use super::transaction::{Mix, Session};
use super::{YcsbEvent, YcsbOptions, YcsbReport, YcsbTick};
use crate::Target;
use crate::client::Client;
use crate::driver::thread_cpu;
use crate::keys::Keys;
use crate::measure::{Meter, Window};

/// Databases that are loaded, and connections that are made, at a time.
const CONCURRENT_LOADS: usize = 4;
const CONCURRENT_CONNECTS: usize = 32;

/// How long after its end a run waits for the last answers.
const GRACE: Duration = Duration::from_secs(60);

pub(super) async fn run(options: YcsbOptions) -> anyhow::Result<YcsbReport> {
    anyhow::ensure!(
        !options.procedure || options.operations == procedure::OPERATIONS && options.read_percent == 90.0,
        "the procedure has {} operations, one of which updates: leave --operations and --reads as they are",
        procedure::OPERATIONS
    );
    let options = Rc::new(options);
    let targets = targets(&options);
    load_all(&options, &targets).await?;
    let (sessions, meter, clock) = connect_all(&options, &targets).await?;
    let cpu = measure(&options, sessions, &meter, clock).await?;
    let meter = meter.borrow();
    Ok(YcsbReport::new(&options, targets.len(), &meter, cpu))
}

fn tell(options: &YcsbOptions, event: YcsbEvent) {
    if let Some(watcher) = &options.watcher {
        watcher(&event);
    }
}

fn targets(options: &YcsbOptions) -> Vec<Target> {
    match &options.databases[..] {
        [] => vec![options.target.clone()],
        databases => databases.iter().map(|database| options.target.with_database(database)).collect(),
    }
}

async fn load_all(options: &YcsbOptions, targets: &[Target]) -> anyhow::Result<()> {
    let of = u64::from(options.records) * (TABLES.len() * targets.len()) as u64;
    let done = Cell::new(0);
    let loaded = |rows: u32| {
        done.set(done.get() + u64::from(rows));
        tell(options, YcsbEvent::Loading { rows: done.get(), of });
    };
    stream::iter(targets)
        .map(|target| async move {
            let mut client =
                Client::connect(target).await.with_context(|| format!("cannot connect to {target}"))?;
            let mut random: Xoshiro256PlusPlus = rand::make_rng();
            load(&mut client, options.records, &mut random, loaded)
                .await
                .with_context(|| format!("cannot load {target}"))?;
            if options.procedure {
                procedure::create(&mut client).await.context("cannot make the procedure")?;
            }
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
    fn starting_now(options: &YcsbOptions) -> Clock {
        let starts = Instant::now();
        let opens = starts + options.warm_up;
        Clock { starts, window: Window { opens, closes: opens + options.measure } }
    }
}

type Sessions = Vec<Session>;

/// Makes all connections, then starts the clock, so that connecting is no part of the warm-up.
async fn connect_all(
    options: &YcsbOptions,
    targets: &[Target],
) -> anyhow::Result<(Sessions, Rc<RefCell<Meter>>, Clock)> {
    let mix = Rc::new(Mix {
        keys: Keys::new(options.distribution, options.records),
        operations: options.operations,
        updates: f64::from(options.operations) * (1.0 - options.read_percent / 100.0),
        procedure: options.procedure,
        patience: options.patience,
    });
    let meter = Rc::new(RefCell::new(Meter::new(Clock::starting_now(options).window)));
    let sessions: Sessions = stream::iter(0..targets.len() * options.connections)
        .map(|number| {
            let target = targets[number % targets.len()].clone();
            let mut session = Session::new(target, mix.clone(), meter.clone(), options.seed, number);
            async move {
                session.connect().await?;
                anyhow::Ok(session)
            }
        })
        .buffer_unordered(CONCURRENT_CONNECTS)
        .try_collect()
        .await?;
    let clock = Clock::starting_now(options);
    *meter.borrow_mut() = Meter::new(clock.window);
    Ok((sessions, meter, clock))
}

/// Runs the sessions to the end of the window; answers the driver's own CPU time in it.
async fn measure(
    options: &Rc<YcsbOptions>,
    sessions: Sessions,
    meter: &RefCell<Meter>,
    clock: Clock,
) -> anyhow::Result<Duration> {
    let mut running = JoinSet::new();
    let rate_each = options.rate_tps.map(|rate| rate / sessions.len() as f64);
    for (number, session) in sessions.into_iter().enumerate() {
        let arrivals =
            Xoshiro256PlusPlus::seed_from_u64(options.seed ^ (number as u64).wrapping_mul(0x9e37_79b9));
        running.spawn_local(async move {
            match rate_each {
                None => closed_loop(session, clock).await,
                Some(rate) => open_loop(session, clock, rate, arrivals).await,
            }
        });
    }
    let mut ended = Vec::new();
    let cpu = tokio::select! {
        cpu = watch(options, meter, clock) => cpu,
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

async fn closed_loop(mut session: Session, clock: Clock) -> anyhow::Result<Session> {
    loop {
        let now = Instant::now();
        if now >= clock.window.closes {
            return Ok(session);
        }
        session.transaction(now).await?;
    }
}

/// Transactions fall due after exponentially distributed pauses, so that all sessions together are a Poisson stream.
/// A session that is late runs what is overdue at once, each timed from when it was due.
async fn open_loop(
    mut session: Session,
    clock: Clock,
    rate: f64,
    mut arrivals: Xoshiro256PlusPlus,
) -> anyhow::Result<Session> {
    let mut due = clock.starts;
    loop {
        let pause = -(1.0 - arrivals.random::<f64>()).ln() / rate;
        due += Duration::from_secs_f64(pause.min(3600.0));
        if due >= clock.window.closes {
            tokio::time::sleep_until(clock.window.closes.into()).await;
            return Ok(session);
        }
        if Instant::now() >= clock.window.closes {
            return Ok(session);
        }
        tokio::time::sleep_until(due.into()).await;
        session.transaction(due).await?;
    }
}

/// The first session that failed; waits for ever if none does. Sessions that end well are kept, still connected.
async fn first_failure(
    running: &mut JoinSet<anyhow::Result<Session>>,
    ended: &mut Sessions,
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
async fn watch(options: &YcsbOptions, meter: &RefCell<Meter>, clock: Clock) -> Duration {
    tell(options, YcsbEvent::WarmUp);
    tick_until(options, meter, clock, clock.window.opens).await;
    tell(options, YcsbEvent::Opens);
    let cpu = thread_cpu();
    tick_until(options, meter, clock, clock.window.closes).await;
    let cpu = thread_cpu().saturating_sub(cpu);
    tell(options, YcsbEvent::Closes);
    cpu
}

async fn tick_until(options: &YcsbOptions, meter: &RefCell<Meter>, clock: Clock, end: Instant) {
    let tick = options.tick.max(Duration::from_millis(10));
    let mut last = Instant::now();
    while last < end {
        tokio::time::sleep_until((last + tick).min(end).into()).await;
        let now = Instant::now();
        let recent = meter.borrow_mut().take_recent();
        tell(
            options,
            YcsbEvent::Tick(YcsbTick {
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
