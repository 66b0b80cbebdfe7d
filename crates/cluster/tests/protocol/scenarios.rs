//! Tests of single situations that random runs do not produce.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fulmar_cluster::collection::{Collector, Makers, Outcome};
use fulmar_cluster::environment::{Environment, LogObjects, Slot};
use fulmar_cluster::incarnation::{self, Lease, lease_wait};
use fulmar_cluster::records::{encode, node_key, owner_key};
use fulmar_cluster::seal::seal;
use fulmar_cluster::{
    Error, LogId, LogKind, ManifestName, NodeId, NodeRecord, NodeState, PartitionRecord, Position, Rules,
    SegmentName, election, generation, ids, metadata,
};
use fulmar_meta::{MetadataStore, Transaction};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Process, Simulation};
use parking_lot::Mutex;

use crate::world::{Clock, ClockError, Env, Manifest, RETENTION, World};

/// How long it takes to seal the log of a node that commits as fast as it can, if all requests of
/// the sealer take longer than those of the node. `None`: longer than a virtual minute.
fn sealing_time(rules: Rules) -> Option<Duration> {
    let simulation = Simulation::new(1, false);
    let world = World::new(&simulation, rules);
    let log = LogId::shared(NodeId(1), 1);
    for _ in 0..16 {
        let writer = Env::without_node(&world, Process { machine: 1, run: 1 });
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
    let (result, sealer) = (sealed.clone(), Env::without_node(&world, Process { machine: 2, run: 1 }));
    simulation.spawn(sealer.process, async move {
        sealer.sleep(Duration::from_secs(1)).await;
        let begun = sealer.now();
        seal(&sealer, log).await;
        *result.lock() = Some(sealer.now() - begun);
    });
    simulation.run(Duration::from_secs(60), || sealed.lock().is_some());
    simulation.clear();
    *sealed.lock()
}

#[test]
fn barrier() {
    let time = sealing_time(Rules::ALL).expect("the log must be sealed");
    assert!(time < Duration::from_secs(5), "sealing must take less than 5 s: {time:?}");
    let without_barrier = sealing_time(Rules { barrier: false, ..Rules::ALL });
    assert_eq!(without_barrier, None, "sealing without the barrier must not complete");
}

/// Makers that answer nothing.
struct Unreachable;

impl Makers for Unreachable {
    async fn disowned(&self, _: NodeId, _: u64, _: Vec<SegmentName>) -> Option<Vec<SegmentName>> {
        None
    }
}

const PARTITION: PartitionId = PartitionId(1);

fn manifest(epoch: u32) -> ManifestName {
    ManifestName { epoch, incarnation: 1, covered: 5, node: NodeId(1), is_draft: false }
}

/// Collects a partition whose record is as of epoch 1, because the metadata store was restored from
/// a backup, although the store has a manifest of epoch 2. Returns the manifests that are left.
fn collect_after_restore(rules: Rules) -> (Result<Outcome, Error>, Vec<ManifestName>) {
    let simulation = Simulation::new(1, false);
    let world = World::new(&simulation, rules);
    let env = Env::without_node(&world, Process { machine: 1, run: 1 });
    let result: Arc<Mutex<Option<_>>> = Arc::default();
    let ended = result.clone();
    simulation.spawn(env.process, async move {
        let node = NodeRecord::new(1, NodeState::Alive, 1);
        let first = PartitionRecord::new(NodeId(1), LogKind::Shared, Position { incarnation: 1, slot: 0 });
        let second = first.rebased(manifest(1), LogKind::Shared, Position { incarnation: 1, slot: 5 });
        let create = Transaction::new()
            .put(node_key(NodeId(1)), encode(&node).unwrap())
            .put(owner_key(PARTITION), encode(&first).unwrap());
        env.transact(create).await.unwrap();
        env.put_manifest(PARTITION, Manifest { name: manifest(1), segments: Vec::new() }).await.unwrap();
        let backup = world.backup();
        let change = Transaction::new().put(owner_key(PARTITION), encode(&second).unwrap());
        env.transact(change).await.unwrap();
        env.put_manifest(PARTITION, Manifest { name: manifest(2), segments: Vec::new() }).await.unwrap();
        world.restore(backup);
        env.sleep(RETENTION).await;
        let node_read = metadata::node(&env, NodeId(1)).await.unwrap().unwrap();
        let term = election::campaign(&env, "collector", (NodeId(1), &node_read)).await.unwrap().unwrap();
        let outcome = Collector::new(term).collect(&env, &Unreachable).await;
        let left = env.manifests(PARTITION).await.unwrap();
        *ended.lock() = Some((outcome, left.into_iter().map(|manifest| manifest.name).collect()));
    });
    simulation.run(Duration::from_secs(60), || result.lock().is_some());
    simulation.clear();
    let result = result.lock().take();
    result.expect("the collection must end")
}

#[test]
fn refuse_newer_epochs() {
    let (outcome, left) = collect_after_restore(Rules::ALL);
    let error = Error::RecordTooOld { partition: PARTITION, stored: 2, recorded: 1 };
    assert_eq!((outcome, left), (Err(error), vec![manifest(1), manifest(2)]));
    let (_, left) = collect_after_restore(Rules { refuse_newer_epochs: false, ..Rules::ALL });
    assert_eq!(left, [manifest(1)], "without the rule the newest manifest must be deleted");
}

/// Checks the generation of a node after the metadata store was restored from a backup, and other
/// nodes have changed it often. Before that, the node opened a partition that was created after the
/// backup, if `has_opened`.
fn check_after_restore(has_opened: bool, accepted: Option<u64>) -> Result<(), Error> {
    const NODE: NodeId = NodeId(1);
    let simulation = Simulation::new(1, false);
    let world = World::new(&simulation, Rules::ALL);
    let env = Env::without_node(&world, Process { machine: 1, run: 1 });
    let result: Arc<Mutex<Option<_>>> = Arc::default();
    let ended = result.clone();
    simulation.spawn(env.process, async move {
        let begun = incarnation::begin(&env, NODE, 1).await.unwrap();
        generation::raise(&env, NODE, &begun).await.unwrap();
        let backup = world.backup();
        if has_opened {
            let record = PartitionRecord::new(NODE, LogKind::Shared, Position { incarnation: 1, slot: 0 });
            let create = Transaction::new().put(owner_key(PARTITION), encode(&record).unwrap());
            let created = env.transact(create).await.unwrap().revision();
            let covered = generation::raise(&env, NODE, &begun).await.unwrap();
            assert!(covered > created, "the generation must cover the partition's record");
            assert_eq!(generation::check(&env, NODE, None).await, Ok(covered), "the store is not older");
        }
        world.restore(backup);
        for _ in 0..100 {
            env.transact(Transaction::new().put("other", "value")).await.unwrap();
        }
        let checked = generation::check(&env, NODE, accepted).await;
        *ended.lock() = Some(checked.map(drop));
    });
    simulation.run(Duration::from_secs(60), || result.lock().is_some());
    simulation.clear();
    let result = result.lock().take();
    result.expect("the check must end")
}

#[test]
fn metadata_store_without_an_opened_partition_is_refused() {
    let refused = Err(Error::MetadataTooOld { node: NodeId(1), stored: 1, known: 2 });
    assert_eq!(check_after_restore(true, None), refused);
    assert_eq!(check_after_restore(true, Some(0)), refused, "another generation was accepted");
    assert_eq!(check_after_restore(true, Some(1)), Ok(()));
    assert_eq!(check_after_restore(false, None), Ok(()), "the backup lacks nothing of the node");
}

/// Returns true if the old owner still answers reads when the new one begins to, at a random phase
/// of the old owner's renewals. Clocks run apart by almost 5 %.
fn both_serve(seed: u64, rules: Rules) -> bool {
    let simulation = Simulation::new(seed, false);
    let world = World::new(&simulation, rules);
    let env = |machine, is_fast| {
        let clock = Arc::new(Mutex::new(Clock::new(ClockError::Tolerated, is_fast)));
        Env { clock, ..Env::without_node(&world, Process { machine, run: 1 }) }
    };
    let (old, new) = (env(1, false), env(2, true));
    let lease: Arc<Lease> = Arc::default();
    let serves: Arc<Mutex<Option<bool>>> = Arc::default();
    let (held, result) = (lease.clone(), serves.clone());
    simulation.spawn(new.process, async move {
        let simulation = world.simulation.clone();
        let begun = incarnation::begin(&old, NodeId(1), 1).await.unwrap();
        let (node, keeper, renewed) = (begun.read.clone(), old.clone(), held.clone());
        simulation.spawn(old.process, async move {
            renewed.keep(&keeper, NodeId(1), &begun).await;
        });
        simulation.sleep(simulation.delay(Duration::from_secs(1), Duration::from_secs(2))).await;
        let ended = node.record.with_state(NodeState::Ended);
        metadata::change_node(&new, NodeId(1), Some(&node), &ended).await.unwrap();
        // The old owner does not learn of it.
        simulation.pause(old.process);
        new.sleep(lease_wait(new.rules())).await;
        *result.lock() = Some(held.is_valid(old.now()));
    });
    simulation.run(Duration::from_secs(10), || serves.lock().is_some());
    simulation.clear();
    let result = serves.lock().take();
    result.expect("the new owner must begin to serve")
}

#[test]
fn lease_margin() {
    const SEEDS: u64 = 1000;
    let stale = (0..SEEDS).find(|seed| both_serve(*seed, Rules::ALL));
    assert_eq!(stale, None, "two owners must not answer reads");
    let without_margin = Rules { lease_margin: false, ..Rules::ALL };
    let seed = (0..SEEDS).find(|seed| both_serve(*seed, without_margin));
    println!("lease_margin: found after {} seeds", seed.expect("some seed must find two owners") + 1);
}

/// A node restarts, and its clock is set back.
#[test]
fn ids_of_an_incarnation_are_above_those_of_the_previous_one() {
    let simulation = Simulation::new(1, false);
    let world = World::new(&simulation, Rules::ALL);
    let env = Env::without_node(&world, Process { machine: 1, run: 1 });
    let is_done: Arc<Mutex<bool>> = Arc::default();
    let done = is_done.clone();
    simulation.spawn(env.process, async move {
        let node = NodeId(1);
        let first = incarnation::begin(&env, node, 1).await.unwrap();
        let a = ids::reserve(&env, node, &first, 1_000_000).await.unwrap();
        assert_eq!(a.from_ms, 0);
        assert!(a.until_ms > 1_000_000);
        let renewed = ids::reserve(&env, node, &first, 1_020_000).await.unwrap();
        assert!(renewed.until_ms > 1_020_000);
        let second = incarnation::begin(&env, node, 2).await.unwrap();
        let b = ids::reserve(&env, node, &second, 990_000).await.unwrap();
        assert_eq!(b.from_ms, renewed.until_ms, "the clock was set back");
        assert!(b.until_ms > b.from_ms);
        let late = ids::reserve(&env, node, &first, 2_000_000).await;
        assert!(matches!(late, Err(Error::Fenced { incarnation: 1, .. })), "{late:?}");
        let c = ids::reserve(&env, node, &second, 990_000).await.unwrap();
        assert_eq!(c.from_ms, b.until_ms, "the late request changed nothing");
        // The clock catches up.
        let later = ids::reserve(&env, node, &second, 5_000_000).await.unwrap();
        assert!(later.until_ms > 5_000_000);
        *done.lock() = true;
    });
    simulation.run(Duration::from_secs(60), || *is_done.lock());
    simulation.clear();
    assert!(*is_done.lock());
}
