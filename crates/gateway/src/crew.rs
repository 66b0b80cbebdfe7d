//! How many workers are at work, and whose session is whose.
//!
//! A node has a worker for each processor, and seldom needs them all. Two workers that are each a quarter busy are woken up nearly
//! twice as often as one that is half busy, with half as much to do each time, and have each other's data in their
//! caches: they take an eighth more processor time for the same work. So sessions are kept together: of `n` workers the
//! first `active` serve, where `active` follows the load.
//!
//! ```text
//!   a worker is awake for more than 3/4 of three windows, ---------> one more
//!   and another one would find a processor
//!   all together use less than half of what one fewer have, -------> one fewer
//!   for a second
//! ```
//! Another one finds a processor if a quarter of one was idle meanwhile, or if this one had to wait for its own nearly half of the
//! time: then others want it too, and two get more of it than one. Else the processors are with those who ask (clients on the
//! same machine) and with who answers them; a further worker takes from them what it gets, and all together do no more for
//! a sixth more time. For the same reason what they use counts on the way back, not how long they were awake: where processors
//! are short, who is awake is mostly in line for one.
//!
//! As many as there are processors is enough while sessions are ready at all times: more than that only take processors from each
//! other. It is not where sessions wait for the disk again and again. Each comes back to the worker that it left,
//! which is busy with another one, or in line behind a client, while the next worker's sessions are all at the disk: with two
//! workers on two processors a fifth of both was idle, with three next to nothing. So half as many again are *spare*, and
//! are at work only while sessions wait for the disk that often.
//!
//! Each session has a *home* among those that are active, by its number. One that finds itself elsewhere after it has
//! answered, with nothing open and nothing received, moves there: its state is sent to the other worker, which
//! registers its socket. So a session that says nothing stays where it is. Sessions over TLS do not move, and are
//! spread over all workers when they are accepted.
//!
//! Workers look at their own load while they work, so an idle node has no timer for this. One that could not look for
//! several windows, since what it ran did not let it, has been busy for as many; and one that slept for that long was
//! calm for all of it.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::processors::{self, Processors};
use crate::rest::{self, Rested};

/// A worker looks at its load when so much time has gone by.
const WINDOW: Duration = Duration::from_millis(20);
/// What a worker has told of itself counts for so long.
const FRESH: Duration = Duration::from_millis(200);
/// So many windows in a row a worker must be busy before another comes to help it: one may be the machine's fault.
const BUSY_WINDOWS: u32 = 3;
/// For so long there must be one worker too many before it is sent home.
const CALM: Duration = Duration::from_secs(1);
/// Thousandths of a window.
const BUSY: u32 = 750;
const HALF_USED: u32 = 500;
/// Of the time that a worker is too busy: processors were idle for so much of it, all together (a tenth of one is idle even where
/// clients on the same machine take all that there is),
const IDLE: f64 = 0.25;
/// or it waited for its own for so much. One worker beside two busy threads of a client, on two processors, waits for a third.
const WAITED: f64 = 0.4;
/// Reads in a second that had to wait for the disk, for each processor: from there on spare workers come, and below half of it they go.
const AT_THE_DISK: u32 = 2000;
/// Over so many windows that is smoothed.
const SMOOTHED_WINDOWS: u32 = 8;

thread_local! {
    static WINDOW_BEGAN: Cell<Option<Moment>> = const { Cell::new(None) };
    /// When this worker was last not too busy, or has last been helped.
    static STRAIN_BEGAN: Cell<Option<Moment>> = const { Cell::new(None) };
}

/// A moment in a worker's life, and what was known then.
#[derive(Clone, Copy)]
struct Moment {
    at: Instant,
    rested: Rested,
    /// Reads of this worker's sessions that had to wait for the disk.
    at_the_disk: u64,
    /// `None` where the kernel does not tell.
    processors: Option<Processors>,
}

/// The workers of a gateway, as they see each other.
pub(crate) struct Crew {
    born: Instant,
    active: Arc<AtomicUsize>,
    /// `active` was given by the configuration and does not follow the load.
    is_fixed: bool,
    /// For the first `regular` of them there is a processor each. The others are spare.
    regular: usize,
    seats: Box<[Seat]>,
    /// Since when there is one too many, in microseconds since `born`; 0: there is not.
    calm_since_us: AtomicU64,
}

/// What a worker has told of itself.
#[derive(Default)]
struct Seat {
    used: AtomicU32,
    /// Reads at the disk in a second, smoothed.
    at_the_disk: AtomicU32,
    /// Windows in a row in which it was too busy.
    busy_windows: AtomicU32,
    told_us: AtomicU64,
}

/// What a worker tells at the end of a window.
#[derive(Clone, Copy)]
struct Told {
    /// For how much of the window it was awake, in thousandths, and for how much of it on a processor.
    busy: u32,
    used: u32,
    /// Reads at the disk in a second.
    at_the_disk: u32,
    window: Duration,
    /// Another worker would find a processor that is idle,
    idle: bool,
    /// or get one for longer than this one alone.
    in_line: bool,
}

impl Told {
    /// How many windows this one is as long as.
    fn windows(&self) -> u32 {
        (self.window.as_micros() / WINDOW.as_micros()).try_into().unwrap_or(u32::MAX)
    }
}

impl Seat {
    fn smooth_at_the_disk(&self, reads: u32, windows: u32) {
        let new = windows.min(SMOOTHED_WINDOWS);
        let before = u64::from(self.at_the_disk.load(Ordering::Relaxed)) * u64::from(SMOOTHED_WINDOWS - new);
        let smoothed = (before + u64::from(reads) * u64::from(new)) / u64::from(SMOOTHED_WINDOWS);
        self.at_the_disk.store(smoothed as u32, Ordering::Relaxed);
    }
}

/// So much of a window, in thousandths.
fn thousandths(time: Duration, window: Duration) -> u32 {
    (time.as_micros() * 1000 / window.as_micros().max(1)).min(1000) as u32
}

impl Moment {
    fn now(at: Instant, rested: Rested) -> Moment {
        Moment { at, rested, at_the_disk: fulmar_store::reads_at_the_disk(), processors: processors::look() }
    }

    /// What a worker tells of the window between this moment and `now`.
    fn tell(&self, now: &Moment, strain_began: &Moment) -> Told {
        let window = now.at.saturating_duration_since(self.at);
        let slept = now.rested.time.saturating_sub(self.rested.time);
        let busy = 1000 - thousandths(slept, window);
        let processors = self.processors.zip(now.processors);
        let used =
            processors.map(|(before, after)| thousandths(after.used.saturating_sub(before.used), window));
        let at_the_disk = (now.at_the_disk - self.at_the_disk) as f64 / window.as_secs_f64();
        let (idle, in_line) = strain_began.chances(now);
        Told { busy, used: used.unwrap_or(busy), at_the_disk: at_the_disk as u32, window, idle, in_line }
    }

    /// Whether another worker would have found an idle processor since this moment, and whether it would have got one for longer
    /// than this worker alone. Yes, where nobody knows.
    fn chances(&self, now: &Moment) -> (bool, bool) {
        let Some((before, after)) = self.processors.zip(now.processors) else { return (true, true) };
        let time = now.at.saturating_duration_since(self.at);
        let idle = after.idle.saturating_sub(before.idle) >= time.mul_f64(IDLE);
        let in_line = after.waited.saturating_sub(before.waited) >= time.mul_f64(WAITED);
        (idle, in_line)
    }
}

impl Crew {
    /// So many regular workers, and half as many spare ones.
    pub(crate) fn new(regular: usize) -> Crew {
        Crew {
            born: Instant::now(),
            active: Arc::new(AtomicUsize::new(1)),
            is_fixed: false,
            regular,
            seats: (0..regular + regular / 2).map(|_| Seat::default()).collect(),
            calm_since_us: AtomicU64::new(0),
        }
    }

    /// Takes the number of active workers from `active`, if it is given, instead of following the load.
    pub(crate) fn with_active(self, active: Option<Arc<AtomicUsize>>) -> Crew {
        match active {
            Some(active) => Crew { active, is_fixed: true, ..self },
            None => self,
        }
    }

    /// The worker on which a session belongs at the moment.
    pub(crate) fn home(&self, session: i32) -> usize {
        session.cast_unsigned() as usize % self.active.load(Ordering::Relaxed)
    }

    /// How many there are, with those that are spare.
    pub(crate) fn workers(&self) -> usize {
        self.seats.len()
    }

    /// How many are at work.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::Relaxed)
    }

    /// To be called by a worker now and then while it works.
    pub(crate) fn look(&self, worker: usize, now: Instant) {
        if self.is_fixed {
            return;
        }
        let rested = rest::rested();
        let Some(began) = WINDOW_BEGAN.get() else {
            let moment = Some(Moment::now(now, rested));
            WINDOW_BEGAN.set(moment);
            return STRAIN_BEGAN.set(moment);
        };
        if now.saturating_duration_since(began.at) < WINDOW {
            return;
        }
        let moment = Moment::now(now, rested);
        let told = began.tell(&moment, &STRAIN_BEGAN.get().unwrap_or(began));
        WINDOW_BEGAN.set(Some(moment));
        if self.tell(worker, told, now.saturating_duration_since(self.born)) {
            STRAIN_BEGAN.set(Some(moment));
        }
    }

    /// Hears what a worker tells at the end of a window. Answers whether its strain, if it is under one, has come to an end.
    fn tell(&self, worker: usize, told: Told, now: Duration) -> bool {
        let now_us = now.as_micros() as u64;
        let Some(seat) = self.seats.get(worker) else { return true };
        seat.used.store(told.used, Ordering::Relaxed);
        seat.told_us.store(now_us.max(1), Ordering::Relaxed);
        let windows = told.windows();
        seat.smooth_at_the_disk(told.at_the_disk, windows);
        let is_busy = told.busy > BUSY;
        let busy_windows =
            if is_busy { seat.busy_windows.load(Ordering::Relaxed) + windows.min(BUSY_WINDOWS) } else { 0 };
        let too_busy = busy_windows >= BUSY_WINDOWS;
        seat.busy_windows.store(if too_busy { 0 } else { busy_windows }, Ordering::Relaxed);
        let active = self.active();
        let helped = if active < self.regular {
            told.idle || told.in_line
        } else {
            told.idle && active < self.seats.len() && self.at_the_disk(now_us) >= AT_THE_DISK
        };
        if too_busy && helped && worker < active {
            self.calm_since_us.store(0, Ordering::Relaxed);
            self.change(active, active + 1);
        } else if active > 1 {
            self.consider_fewer(active, now_us.saturating_sub(told.window.as_micros() as u64), now_us);
        }
        too_busy || !is_busy
    }

    /// What all workers have told lately, added up.
    fn all(&self, now_us: u64, figure: impl Fn(&Seat) -> &AtomicU32) -> u32 {
        let fresh = |seat: &&Seat| {
            let told_us = seat.told_us.load(Ordering::Relaxed);
            told_us > 0 && now_us.saturating_sub(told_us) < FRESH.as_micros() as u64
        };
        let figures = self.seats.iter().filter(fresh).map(|seat| figure(seat).load(Ordering::Relaxed));
        figures.fold(0, u32::saturating_add)
    }

    /// Reads in a second that wait for the disk, for each processor.
    fn at_the_disk(&self, now_us: u64) -> u32 {
        self.all(now_us, |seat| &seat.at_the_disk) / self.regular as u32
    }

    fn consider_fewer(&self, active: usize, began_us: u64, now_us: u64) {
        let used = self.all(now_us, |seat| &seat.used);
        let spared = active > self.regular && self.at_the_disk(now_us) < AT_THE_DISK / 2;
        if used >= (active as u32 - 1) * HALF_USED && !spared {
            return self.calm_since_us.store(0, Ordering::Relaxed);
        }
        let since_us = match self.calm_since_us.load(Ordering::Relaxed) {
            0 => began_us,
            since_us => since_us,
        };
        let over = now_us.saturating_sub(since_us) >= CALM.as_micros() as u64;
        self.calm_since_us.store(if over { 0 } else { since_us.max(1) }, Ordering::Relaxed);
        if over {
            self.change(active, active - 1);
        }
    }

    /// If two want a change at once, one of them gets it.
    fn change(&self, from: usize, to: usize) {
        let _ = self.active.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(busy: u32, windows: u32) -> Told {
        Told { busy, used: busy, at_the_disk: 0, window: windows * WINDOW, idle: true, in_line: true }
    }

    #[test]
    fn more_at_once_and_fewer_after_a_while() {
        let crew = Crew::new(4);
        let mut now = Duration::ZERO;
        let mut tell = |loads: &[u32]| {
            now += WINDOW;
            for (worker, busy) in loads.iter().enumerate() {
                crew.tell(worker, told(*busy, 1), now);
            }
            crew.active()
        };
        assert_eq!(tell(&[700]), 1);
        assert_eq!((tell(&[900]), tell(&[900]), tell(&[300])), (1, 1, 1), "that was nothing");
        assert_eq!((tell(&[900]), tell(&[900]), tell(&[900])), (1, 1, 2));
        assert_eq!(tell(&[600, 600]), 2);
        assert_eq!((tell(&[600, 900]), tell(&[600, 900]), tell(&[600, 900])), (2, 2, 3));
        for _ in 0..40 {
            assert_eq!(tell(&[200, 200, 200]), 3, "too early to say");
        }
        assert_eq!(tell(&[400, 400, 400]), 3, "it was not to be");
        for _ in 0..40 {
            assert_eq!(tell(&[200, 200, 200]), 3);
        }
        for _ in 0..12 {
            tell(&[200, 200, 200]);
        }
        assert_eq!(tell(&[300, 300]), 2);
        for _ in 0..100 {
            assert_eq!(tell(&[300, 300]), 2, "that would be too much for one");
        }
        for _ in 0..52 {
            tell(&[200, 200]);
        }
        assert_eq!(crew.active(), 1);
    }

    #[test]
    fn who_says_nothing_does_nothing() {
        let crew = Crew::new(2);
        for ms in [20, 40, 60] {
            crew.tell(0, told(1000, 1), Duration::from_millis(ms));
            crew.tell(1, told(1000, 1), Duration::from_millis(ms));
        }
        assert_eq!(crew.active(), 2);
        for ms in (1000..3000).step_by(20) {
            crew.tell(0, told(100, 1), Duration::from_millis(ms));
        }
        assert_eq!(crew.active(), 1);
    }

    #[test]
    fn a_long_time_is_many_windows() {
        let crew = Crew::new(2);
        crew.tell(0, told(1000, 2), 2 * WINDOW);
        assert_eq!(crew.active(), 1);
        crew.tell(0, told(1000, BUSY_WINDOWS), 10 * WINDOW);
        assert_eq!(crew.active(), 2);
        // Nobody has said anything for two seconds: they slept.
        crew.tell(0, told(10, 100), 110 * WINDOW);
        assert_eq!(crew.active(), 1);
    }

    #[test]
    fn nobody_comes_who_would_find_no_processor() {
        let crew = Crew::new(2);
        let helpless = Told { idle: false, in_line: false, ..told(1000, 1) };
        let strains = [1, 2, 3, 4].map(|window| crew.tell(0, helpless, window * WINDOW));
        assert_eq!((strains, crew.active()), ([false, false, true, false], 1), "asks anew after a while");
        crew.tell(0, told(1000, 1), 5 * WINDOW);
        crew.tell(0, told(1000, 1), 6 * WINDOW);
        assert_eq!(crew.active(), 2);
    }

    #[test]
    fn who_waits_for_a_processor_does_not_use_one() {
        let crew = Crew::new(2);
        crew.tell(0, told(1000, BUSY_WINDOWS), 10 * WINDOW);
        assert_eq!(crew.active(), 2);
        for window in 11..70 {
            crew.tell(0, Told { used: 200, ..told(700, 1) }, window * WINDOW);
            crew.tell(1, Told { used: 200, ..told(700, 1) }, window * WINDOW);
        }
        assert_eq!(crew.active(), 1);
    }

    #[test]
    fn spare_workers_come_where_sessions_wait_for_the_disk() {
        let crew = Crew::new(2);
        let now = Cell::new(Duration::ZERO);
        // All that are active tell the same for so many windows.
        let tell = |windows: u32, told: Told| {
            for _ in 0..windows {
                now.set(now.get() + WINDOW);
                (0..crew.active()).for_each(|worker| _ = crew.tell(worker, told, now.get()));
            }
            crew.active()
        };
        let at_the_disk = |at_the_disk| Told { at_the_disk, ..told(900, 1) };
        assert_eq!(tell(40, at_the_disk(1900)), 2, "too seldom");
        assert_eq!(tell(20, Told { idle: false, ..at_the_disk(9000) }), 2, "no processor is idle");
        assert_eq!(tell(20, Told { busy: 600, ..at_the_disk(9000) }), 2, "they are at hand");
        assert_eq!(tell(10, at_the_disk(9000)), 3, "all there are");
        assert_eq!(tell(100, at_the_disk(800)), 3, "it comes at more than it goes at");
        assert_eq!(tell(40, at_the_disk(100)), 3, "it may have been a pause");
        assert_eq!(tell(40, at_the_disk(100)), 2);
        assert_eq!(tell(10, at_the_disk(9000)), 3);
        assert_eq!((tell(40, told(900, 1)), tell(1, at_the_disk(2000)), tell(40, told(900, 1))), (3, 3, 2));
    }

    #[test]
    fn every_session_has_a_home_among_the_active() {
        let crew = Crew::new(3);
        assert!((0..10).chain([i32::MIN, -1, i32::MAX]).all(|session| crew.home(session) == 0));
        crew.tell(0, told(1000, BUSY_WINDOWS), 10 * WINDOW);
        let homes: Vec<usize> = (0..4).map(|session| crew.home(session)).collect();
        assert_eq!(homes, [0, 1, 0, 1]);
    }
}
