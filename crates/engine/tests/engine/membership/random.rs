//! Random schedules of moves, deaths, failovers and restarts of three nodes, with concurrent
//! inserts. After each, every partition contains exactly the rows whose transactions committed.

use std::collections::{BTreeMap, BTreeSet};

use fulmar_cluster::NodeId;
use fulmar_engine::*;
use fulmar_pages::PartitionId;
use fulmar_store::StoreOperation;
use tokio::task::JoinHandle;

use super::rig::{Member, Rig};
use super::{CREATE, ids, insert};
use crate::common::with_timeout;
use crate::seeds::{self, Random};

const NODES: u32 = 3;
const PARTITIONS: u64 = 3;

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert,
    InsertConcurrently,
    Move,
    Flush,
    Compact,
    /// The node is killed and failed over.
    FailOver,
    /// The node is failed over while its puts to its log are held. It continues as a zombie.
    Suspend,
    /// The node is killed and starts again before a failover.
    Crash,
    Stop,
    Settle,
}

/// An insert whose outcome is not known yet.
struct Pending {
    partition: u64,
    row: u64,
    transaction: u64,
    task: JoinHandle<Result<()>>,
}

struct Schedule {
    random: Random,
    rig: Rig,
    /// By node; None if it is dead.
    members: BTreeMap<u32, Member>,
    zombies: Vec<Member>,
    committed: BTreeMap<u64, BTreeSet<u64>>,
    pending: Vec<Pending>,
    next_row: u64,
}

impl Schedule {
    async fn new(seed: u64) -> Schedule {
        let rig = Rig::new();
        let mut members = BTreeMap::new();
        for node in 1..=NODES {
            members.insert(node, rig.start(node).await);
        }
        rig.create(&members[&1], 1..=PARTITIONS).await;
        for partition in 1..=PARTITIONS {
            members[&1].client(partition).run(CREATE).await.unwrap();
        }
        Schedule {
            random: Random::new(seed),
            rig,
            members,
            zombies: Vec::new(),
            committed: (1..=PARTITIONS).map(|id| (id, BTreeSet::new())).collect(),
            pending: Vec::new(),
            next_row: 1,
        }
    }

    fn a_partition(&mut self) -> u64 {
        1 + self.random.below(PARTITIONS)
    }

    fn a_node(&mut self) -> u32 {
        let alive: Vec<u32> = self.members.keys().copied().collect();
        *self.random.pick(&alive)
    }

    fn another_node(&mut self, node: u32) -> Option<NodeId> {
        let others: Vec<u32> = self.members.keys().copied().filter(|other| *other != node).collect();
        (!others.is_empty()).then(|| NodeId(*self.random.pick(&others)))
    }

    async fn owner(&self, partition: u64) -> &Member {
        &self.members[&self.rig.record(partition).await.owner.0]
    }

    fn new_row(&mut self) -> u64 {
        self.next_row += 1;
        self.next_row
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Insert => {
                let (partition, row) = (self.a_partition(), self.new_row());
                let mut client = self.owner(partition).await.client(partition);
                client.session.set_transaction_id(self.owner(partition).await.engine.new_transaction_id());
                insert(&mut client, row).await.unwrap();
                client.close().await;
                self.committed.get_mut(&partition).unwrap().insert(row);
            }
            Step::InsertConcurrently => {
                let (partition, row) = (self.a_partition(), self.new_row());
                self.insert_concurrently(partition, row).await;
            }
            Step::Move => {
                let partition = self.a_partition();
                let owner = self.rig.record(partition).await.owner.0;
                let Some(to) = self.another_node(owner) else { return };
                assert!(self.rig.hand_over(partition, &self.members[&owner], to).await.unwrap());
            }
            Step::Flush => {
                let node = self.a_node();
                self.members[&node].engine.flush().await.unwrap();
            }
            Step::Compact => {
                let node = self.a_node();
                self.members[&node].engine.compact_all().await.unwrap();
            }
            Step::FailOver => {
                let node = self.a_node();
                let Some(to) = self.another_node(node) else { return };
                let dead = self.members.remove(&node).unwrap();
                self.rig.fail_over(&dead, to).await;
                self.rig.kill(dead);
            }
            Step::Suspend => self.suspend().await,
            Step::Crash | Step::Stop => {
                let node = self.a_node();
                let member = self.members.remove(&node).unwrap();
                if matches!(step, Step::Stop) {
                    with_timeout("the shutdown", member.engine.shutdown()).await.unwrap();
                }
                self.rig.kill(member);
                self.members.insert(node, self.rig.start(node).await);
            }
            Step::Settle => self.settle().await,
        }
        // Dead nodes return.
        for node in 1..=NODES {
            if !self.members.contains_key(&node) && self.random.once_in(3) {
                self.members.insert(node, self.rig.start(node).await);
            }
        }
    }

    async fn insert_concurrently(&mut self, partition: u64, row: u64) {
        let owner = self.owner(partition).await;
        let transaction = owner.engine.new_transaction_id();
        let mut client = owner.client(partition);
        let task = tokio::spawn(async move {
            client.session.set_transaction_id(transaction);
            let inserted = insert(&mut client, row).await;
            client.close().await;
            inserted
        });
        self.pending.push(Pending { partition, row, transaction, task });
    }

    async fn suspend(&mut self) {
        let partition = self.a_partition();
        let node = self.rig.record(partition).await.owner.0;
        let Some(to) = self.another_node(node) else { return };
        let held = *self.random.pick(&["logs/", "manifests/", "segments/"]);
        self.members[&node].store.hold_under(StoreOperation::Put, held);
        let row = self.new_row();
        self.insert_concurrently(partition, row).await;
        let zombie = self.members.remove(&node).unwrap();
        if held != "logs/" {
            let engine = zombie.engine.clone();
            tokio::spawn(async move { engine.flush().await });
        }
        if self.random.once_in(2) {
            tokio::task::yield_now().await;
        }
        self.rig.fail_over(&zombie, to).await;
        self.zombies.push(zombie);
    }

    /// Ends all zombies, and waits for the outcome of every insert.
    async fn settle(&mut self) {
        for zombie in &self.zombies {
            zombie.store.hold(StoreOperation::Put, false);
        }
        for Pending { partition, row, transaction, task } in std::mem::take(&mut self.pending) {
            let inserted = with_timeout("an insert", task).await.unwrap();
            let owner = self.owner(partition).await;
            let outcome = owner.engine.outcome(PartitionId(partition), transaction).await.unwrap();
            let committed = outcome == TransactionOutcome::Ended(true);
            match inserted {
                Ok(()) => assert!(committed, "acknowledged row {row} of {partition}: {outcome:?}"),
                Err(error) if error.state() == sqlstate::PARTITION_MOVED => {
                    assert!(!committed, "row {row} of {partition} had an effect");
                }
                Err(_) => assert_ne!(outcome, TransactionOutcome::Forgotten),
            }
            if committed {
                self.committed.get_mut(&partition).unwrap().insert(row);
            }
        }
        self.zombies.clear();
        for partition in 1..=PARTITIONS {
            let mut client = self.owner(partition).await.client(partition);
            let expected: Vec<u64> = self.committed[&partition].iter().copied().collect();
            assert_eq!(ids(&mut client).await, expected, "partition {partition}");
            client.close().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_moves_and_deaths_keep_every_commit() {
    use Step::*;
    let steps = [
        (12, Insert),
        (10, InsertConcurrently),
        (6, Move),
        (3, Flush),
        (1, Compact),
        (3, FailOver),
        (3, Suspend),
        (2, Crash),
        (1, Stop),
        (2, Settle),
    ];
    for seed in seeds::first()..seeds::first() + seeds::rounds(6) {
        let mut schedule = Schedule::new(seed).await;
        for _ in 0..80 {
            let step = schedule.random.weighted(&steps);
            eprintln!("seed {seed}: {step:?}");
            schedule.step(step).await;
        }
        schedule.settle().await;
    }
}
