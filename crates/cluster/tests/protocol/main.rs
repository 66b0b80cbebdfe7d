//! The ownership protocol under simulated faults.
//!
//! Each seed runs a cluster of three nodes, two gateways and four partitions for ten virtual
//! seconds of faults ([`faults`]), in which partitions are moved, restored, migrated, flushed and
//! collected. Then the faults end, every partition is read, its contents are recovered from the
//! stores, and the history of all clients is checked ([`checker`]).
//!
//! `SIMULATION_SEEDS=N` runs N seeds (`make soak`). `SIMULATION_SEED=S` runs one seed and prints
//! its trace.

mod campaign;
mod checker;
mod cluster;
mod faults;
mod gateway;
mod node;
mod partition;
mod rules;
mod run;
mod scenarios;
mod violation;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};

use campaign::{Campaign, number};
use run::{Options, run};
use violation::Kind;
use world::ClockError;

/// Number of seeds in an ordinary test run.
const SEEDS: u64 = 10_000;
/// Number of seeds with clocks whose errors are not bounded.
const CLOCK_SEEDS: u64 = 2000;

/// Runs the seed of `SIMULATION_SEED`, and prints its trace. Returns false if there is none.
fn replay(options: Options) -> bool {
    let Some(seed) = number("SIMULATION_SEED") else { return false };
    let outcome = run(seed, &Options { trace: true, ..options });
    for line in &outcome.trace {
        println!("{line}");
    }
    assert!(outcome.violations.is_empty(), "{:#?}", outcome.violations);
    true
}

fn fail(test: &str, found: &campaign::Found) -> ! {
    let campaign::Found { seed, outcome } = found;
    panic!(
        "{:#?}\nReplay: SIMULATION_SEED={seed} cargo test -p fulmar-cluster --test protocol {test} -- --nocapture",
        outcome.violations
    );
}

#[test]
fn no_commit_is_lost_doubled_or_reordered_and_no_read_is_stale() {
    if replay(Options::DEFAULT) {
        return;
    }
    let seeds = number("SIMULATION_SEEDS").unwrap_or(SEEDS);
    let campaign = Campaign::new(seeds, Options::DEFAULT);
    let (totals, found) = campaign.find(|outcome| !outcome.violations.is_empty());
    if let Some(found) = found {
        fail("no_commit", &found);
    }
    println!("{seeds} seeds: {totals:?}");
    let missing = totals.missing();
    assert!(missing.is_empty(), "the schedules must cause {missing:?}: {totals:?}");
}

/// With clocks that run three times faster or slower, and that stop while the machine is suspended,
/// reads may be stale. Commits stay right.
#[test]
fn wrong_clocks_cost_only_freshness() {
    let options = Options { clocks: ClockError::Unbounded, ..Options::DEFAULT };
    if replay(options) {
        return;
    }
    let stale_runs = AtomicU64::new(0);
    let is_wrong = |outcome: &run::Outcome| {
        let is_stale = |violation: &violation::Violation| violation.kind == Kind::StaleRead;
        stale_runs.fetch_add(u64::from(outcome.violations.iter().any(is_stale)), Ordering::Relaxed);
        !outcome.violations.iter().all(is_stale)
    };
    let (_, found) = Campaign::new(CLOCK_SEEDS, options).find(is_wrong);
    if let Some(found) = found {
        fail("wrong_clocks", &found);
    }
    let stale_runs = stale_runs.into_inner();
    println!("{stale_runs} of {CLOCK_SEEDS} runs had stale reads");
    assert!(stale_runs > 0, "some clock must be wrong enough to make a read stale");
}
