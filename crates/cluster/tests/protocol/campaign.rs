//! Runs many seeds on all cores.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::run::{Options, Outcome, Totals, run};

/// The value of an environment variable that is a number.
pub fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The seeds of a campaign, and how they are run.
#[derive(Clone, Copy, Debug)]
pub struct Campaign {
    pub first: u64,
    pub seeds: u64,
    pub options: Options,
}

/// A seed that fulfils a condition, and its run.
pub struct Found {
    pub seed: u64,
    pub outcome: Outcome,
}

impl Campaign {
    pub fn new(seeds: u64, options: Options) -> Campaign {
        Campaign { first: 0, seeds, options }
    }

    /// Runs seeds until one fulfils the condition. Returns the totals, and the lowest such seed
    /// that was run.
    pub fn find(&self, is_found: impl Fn(&Outcome) -> bool + Sync) -> (Totals, Option<Found>) {
        let next = AtomicU64::new(self.first);
        let is_over = AtomicBool::new(false);
        let results: Mutex<(Totals, Option<Found>)> = Mutex::default();
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let work = || {
            while !is_over.load(Ordering::Relaxed) {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= self.first + self.seeds {
                    return;
                }
                let outcome = run(seed, &self.options);
                let mut results = results.lock();
                results.0.add(&outcome.totals);
                if is_found(&outcome) {
                    is_over.store(true, Ordering::Relaxed);
                    if results.1.as_ref().is_none_or(|found| seed < found.seed) {
                        results.1 = Some(Found { seed, outcome });
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        });
        results.into_inner()
    }
}
