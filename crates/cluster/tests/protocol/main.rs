//! The ownership protocol under simulated faults.
//!
//! Each seed runs a cluster of three nodes, two gateways and four partitions for twenty virtual
//! seconds of faults: nodes are killed and paused, the network and the stores lose, delay and
//! double requests, nodes are cut off in one or both directions, partitions are moved. Then the
//! faults end, every partition is read, and the history of all clients is checked.
//!
//! `SIMULATION_SEEDS=N` runs N seeds (`make soak`). `SIMULATION_SEED=S` runs one seed and prints
//! its trace.

mod checker;
mod gateway;
mod node;
mod rules;
mod run;
mod world;

use fulmar_cluster::Rules;

/// Number of seeds in an ordinary test run.
const SEEDS: u64 = 300;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn no_commit_is_lost_doubled_or_reordered_and_no_read_is_stale() {
    if let Some(seed) = number("SIMULATION_SEED") {
        let outcome = run::run(seed, Rules::ALL, true);
        for line in &outcome.trace {
            println!("{line}");
        }
        assert!(outcome.violations.is_empty(), "{:#?}", outcome.violations);
        return;
    }
    let mut totals = run::Totals::default();
    for seed in 0..number("SIMULATION_SEEDS").unwrap_or(SEEDS) {
        let outcome = run::run(seed, Rules::ALL, false);
        assert!(
            outcome.violations.is_empty(),
            "{:#?}\nReplay: SIMULATION_SEED={seed} cargo test -p fulmar-cluster --test protocol no_commit -- --nocapture",
            outcome.violations
        );
        totals.add(&outcome.totals);
    }
    println!("{totals:?}");
    assert!(
        totals.failovers > 0 && totals.moves > 0 && totals.fenced > 0,
        "the schedules must cause failovers, moves and fencing: {totals:?}"
    );
}
