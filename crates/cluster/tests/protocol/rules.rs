//! Each rule is needed: without it the simulator finds a violation.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_cluster::environment::{Environment, LogObjects, Slot};
use fulmar_cluster::seal::seal;
use fulmar_cluster::{LogId, NodeId, Position, Rules};
use fulmar_simulation::{Process, Simulation};
use parking_lot::Mutex;

use crate::run::run;
use crate::world::{Env, World};

/// Seeds tried before a rule counts as unneeded.
const SEEDS: u64 = 1000;

/// Requires that a run without a rule violates something.
fn is_needed(rule: &str, switch: impl Fn(&mut Rules)) {
    let mut rules = Rules::ALL;
    switch(&mut rules);
    for seed in 0..SEEDS {
        let outcome = run(seed, rules, false);
        if let Some(violation) = outcome.violations.first() {
            println!("{rule}: seed {seed}: {violation}");
            return;
        }
    }
    panic!("no violation without rule {rule} in {SEEDS} seeds");
}

macro_rules! needed {
    ($($rule:ident),* $(,)?) => {
        $(#[test]
        fn $rule() {
            is_needed(stringify!($rule), |rules| rules.$rule = false);
        })*
    };
}

needed!(
    seal_own_log,
    compare_nodes,
    seal_before_assigning,
    release,
    settle_by_writing,
    lease,
    wait_out_lease,
    ask_outcome,
    refuse_asked,
    keep_closed_ranges,
    named_manifests,
    durable_manifests,
    create_if_absent,
    contiguous,
);

/// This rule detects violations of `keep_closed_ranges`. Without both, commits are lost silently.
#[test]
fn no_gaps() {
    let rules = Rules { keep_closed_ranges: false, no_gaps: false, ..Rules::ALL };
    let is_lost =
        |seed: &u64| run(*seed, rules, false).violations.iter().any(|line| line.contains("is lost"));
    let seed = (0..SEEDS).find(is_lost).expect("some seed must lose a commit without an error");
    println!("no_gaps: seed {seed}");
}

/// How long it takes to seal the log of a node that commits as fast as it can, if all requests of
/// the sealer take longer than those of the node. `None`: longer than a virtual minute.
fn sealing_time(rules: Rules) -> Option<Duration> {
    let simulation = Simulation::new(1, false);
    let world = World::new(&simulation, rules);
    let log = LogId { node: NodeId(1), incarnation: 1 };
    for _ in 0..16 {
        let writer = Env { world: world.clone(), process: Process(1) };
        let next = world.next_slot.clone();
        simulation.spawn(writer.process, async move {
            loop {
                let slot = next.fetch_add(1, Ordering::Relaxed);
                let record =
                    Slot::Records { kept_from: Position { incarnation: 1, slot: 0 }, body: Vec::new() };
                if writer.create(log, slot, record).await != Ok(true) {
                    return;
                }
            }
        });
    }
    let sealed: Arc<Mutex<Option<Duration>>> = Arc::default();
    let (result, sealer) = (sealed.clone(), Env { world, process: Process(2) });
    simulation.spawn(sealer.process, async move {
        sealer.sleep(Duration::from_secs(1)).await;
        let begun = sealer.now();
        seal(&sealer, log).await;
        *result.lock() = Some(sealer.now() - begun);
    });
    simulation.run(Duration::from_secs(60), || sealed.lock().is_some());
    *sealed.lock()
}

#[test]
fn barrier() {
    let time = sealing_time(Rules::ALL).expect("the log must be sealed");
    assert!(time < Duration::from_secs(5), "sealing must take less than 5 s: {time:?}");
    let without_barrier = sealing_time(Rules { barrier: false, ..Rules::ALL });
    assert_eq!(without_barrier, None, "sealing without the barrier must not complete");
}
