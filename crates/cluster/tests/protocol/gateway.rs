//! A simulated gateway with its clients: sends transactions and reads to owners, follows partitions
//! when they move, and records the history for the checker.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::{NodeState, metadata, quarantine};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Network, Process};
use parking_lot::Mutex;

use crate::node::{Answer, Append, Believed, Processes, Request};
use crate::run::Features;
use crate::world::Env;

/// An operation of a client and its result.
#[derive(Clone, Debug)]
pub struct Operation {
    pub partition: PartitionId,
    pub begun: Duration,
    /// `None`: no answer came.
    pub ended: Option<Duration>,
    pub kind: OperationKind,
}

#[derive(Clone, Debug)]
pub enum OperationKind {
    /// If `ended` is set, the commit was acknowledged.
    Append(u64),
    Read(Vec<u64>),
}

/// The history of all clients.
pub type History = Arc<Mutex<Vec<Operation>>>;

#[derive(Clone)]
pub struct Gateway {
    pub number: u32,
    pub env: Env,
    pub network: Network<Request, Answer>,
    pub processes: Processes,
    pub features: Features,
    pub history: History,
    pub transactions: Arc<Mutex<u64>>,
    /// The client's cached locations of partitions.
    pub routes: Arc<Mutex<BTreeMap<PartitionId, Believed>>>,
}

const ANSWER_TIMEOUT: Duration = Duration::from_millis(700);
/// One in this number of transactions is fatal.
const POISON_INTERVAL: u64 = 40;

impl Gateway {
    /// A client that appends and reads until `until`, with pauses of up to `think_time`.
    pub async fn client(self, partitions: Vec<PartitionId>, think_time: Duration, until: Duration) {
        let simulation = self.env.world.simulation.clone();
        let partitions = &partitions[..if self.features.is_hot { 2 } else { partitions.len() }];
        while self.env.now() < until {
            let partition = partitions[simulation.below(partitions.len() as u64) as usize];
            if simulation.chance(2, 3) {
                self.append(partition).await;
            } else {
                self.read(partition).await;
            }
            simulation.sleep(simulation.delay(Duration::ZERO, think_time)).await;
        }
    }

    fn begin(&self, partition: PartitionId, kind: OperationKind) -> usize {
        let mut history = self.history.lock();
        history.push(Operation { partition, begun: self.env.now(), ended: None, kind });
        history.len() - 1
    }

    fn next_transaction(&self) -> u64 {
        let mut transactions = self.transactions.lock();
        *transactions += 1;
        *transactions
    }

    /// The cached location of the partition. Asks the metadata store if there is none.
    async fn route(&self, partition: PartitionId) -> Option<(Believed, Process)> {
        let known = self.routes.lock().get(&partition).copied();
        let believed = match known {
            Some(believed) => believed,
            None => {
                let owner = metadata::partition(&self.env, partition).await.unwrap()?.record;
                let node = metadata::node(&self.env, owner.owner).await.unwrap()?.record;
                let believed =
                    Believed { owner: owner.owner, incarnation: node.incarnation, epoch: owner.epoch };
                self.routes.lock().insert(partition, believed);
                believed
            }
        };
        Some((believed, self.processes.current(believed.owner)))
    }

    async fn forget(&self, partition: PartitionId) {
        self.routes.lock().remove(&partition);
        self.env.sleep(Duration::from_millis(20) + self.env.jitter(Duration::from_millis(100))).await;
    }

    async fn call(&self, to: Process, request: Request) -> Option<Answer> {
        self.network.call(self.env.process, to, request, ANSWER_TIMEOUT).await
    }

    async fn append(&self, partition: PartitionId) {
        let kills = self.features.poison && self.env.world.simulation.chance(1, POISON_INTERVAL);
        let value = u64::from(self.number) << 32 | self.next_transaction();
        let place = self.begin(partition, OperationKind::Append(value));
        let mut transaction = (self.number, self.next_transaction());
        let mut owner_deaths = 0;
        loop {
            let Some((believed, to)) = self.route(partition).await else { continue };
            let append = Append { partition, believed, transaction, value, kills };
            let answer = self.call(to, Request::Append(append)).await;
            let simulation = &self.env.world.simulation;
            simulation.note(|| format!("client: {append:x?}: {answer:x?}"));
            match answer {
                Some(Answer::Done) => break,
                // The transaction was not executed.
                Some(_) => self.forget(partition).await,
                None => {
                    self.forget(partition).await;
                    if self.env.world.rules.ask_outcome && self.outcome(partition, transaction).await {
                        break;
                    }
                    owner_deaths += u32::from(self.has_died(believed).await);
                    if !quarantine::may_replay(&self.env.world.rules, owner_deaths) {
                        // The client gets 57P02: the operation has not ended.
                        return;
                    }
                    transaction = (self.number, self.next_transaction());
                }
            }
        }
        self.history.lock()[place].ended = Some(self.env.now());
    }

    /// Returns true if the owner's incarnation has ended.
    async fn has_died(&self, owner: Believed) -> bool {
        let node = metadata::node(&self.env, owner.owner).await.unwrap();
        node.is_none_or(|node| {
            node.record.incarnation != owner.incarnation || node.record.state != NodeState::Alive
        })
    }

    /// Returns true if a transaction whose answer was lost is committed. Asks until an owner
    /// decides.
    async fn outcome(&self, partition: PartitionId, transaction: (u32, u64)) -> bool {
        loop {
            let Some((_, to)) = self.route(partition).await else { continue };
            let answer = self.call(to, Request::Outcome { partition, transaction }).await;
            let simulation = &self.env.world.simulation;
            simulation.note(|| format!("client: outcome of {transaction:?} on {partition}: {answer:?}"));
            match answer {
                Some(Answer::Committed) => return true,
                Some(Answer::NotCommitted) => return false,
                _ => self.forget(partition).await,
            }
        }
    }

    /// Reads a partition. Retries until an owner answers.
    pub async fn read(&self, partition: PartitionId) -> Vec<u64> {
        let place = self.begin(partition, OperationKind::Read(Vec::new()));
        loop {
            let Some((_, to)) = self.route(partition).await else { continue };
            match self.call(to, Request::Read { partition }).await {
                Some(Answer::List(list)) => {
                    let mut history = self.history.lock();
                    history[place].ended = Some(self.env.now());
                    history[place].kind = OperationKind::Read(list.clone());
                    return list;
                }
                _ => self.forget(partition).await,
            }
        }
    }
}
