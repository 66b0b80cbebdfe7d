//! A simulated node: runs the protocols of the crate and a model of everything else.

mod background;
mod collector;
mod export;
mod flush;
mod log;
mod migrate;
mod moves;
mod open;
mod serve;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fulmar_cluster::environment::Environment;
use fulmar_cluster::incarnation::{self, Begun, Lease};
use fulmar_cluster::migration::{Command, Fence, Reply};
use fulmar_cluster::{
    LogKind, ManifestName, NodeId, PartitionRecord, Position, Read, Rules, SegmentName, metadata, quarantine,
};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Network, Process, Simulation};
use futures::channel::oneshot;
use parking_lot::Mutex;

use crate::partition::{State, Transaction};
use crate::run::Features;
use crate::world::Env;
use log::Log;
pub use open::load;

/// The owner that a request assumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Believed {
    pub owner: NodeId,
    pub incarnation: u64,
    pub epoch: u32,
}

/// A transaction of a client.
#[derive(Clone, Copy, Debug)]
pub struct Append {
    pub partition: PartitionId,
    pub believed: Believed,
    pub transaction: Transaction,
    pub value: u64,
    /// It kills the node that executes it.
    pub kills: bool,
}

#[derive(Clone, Debug)]
pub enum Request {
    Ping,
    Append(Append),
    Read {
        partition: PartitionId,
    },
    Outcome {
        partition: PartitionId,
        transaction: Transaction,
    },
    /// Hand the partition over, or restore it if `to` is the node itself.
    Move {
        partition: PartitionId,
        to: NodeId,
    },
    /// Change the durability.
    SetLog {
        partition: PartitionId,
        log: LogKind,
    },
    /// Start a migration.
    Migrate {
        partition: PartitionId,
        to: NodeId,
        on_demand: bool,
    },
    /// A command of a migration's coordinator.
    Command(Command),
    /// Store a copy of a private partition.
    StoreCopy {
        partition: PartitionId,
        fence: Fence,
        name: ManifestName,
        state: State,
    },
    /// Return the pages that were pinned for this epoch.
    Pull {
        partition: PartitionId,
        epoch: u32,
    },
    Disown {
        incarnation: u64,
        segments: Vec<SegmentName>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Alive {
        incarnation: u64,
    },
    Done,
    List(Vec<u64>),
    Committed,
    NotCommitted,
    /// Nothing was done: the node does not own the partition, or is releasing it.
    Elsewhere,
    Quarantined,
    Reply(Reply),
    Pages(Option<State>),
    Disowned(Vec<SegmentName>),
}

/// A partition that this node owns.
struct Owned {
    read: Read<PartitionRecord>,
    /// Includes everything that was accepted, durable or not.
    state: State,
    /// Accepted transactions whose slots are not durable yet, oldest first: slot and version.
    pending: Vec<(u64, u64)>,
    serve_from: Duration,
    accepts: bool,
    /// A flush or a change of the record is in progress.
    is_busy: bool,
    refused: BTreeSet<Transaction>,
    /// Records before this position are in manifests.
    kept: Position,
    /// Together they contain the first `flushed` versions. A segment that was dropped never
    /// returns.
    segments: Vec<SegmentName>,
    flushed: u64,
    /// The position up to which the newest attempt of a manifest covers the log.
    attempted: Option<Position>,
    /// It was quarantined when it was opened.
    is_quarantined: bool,
}

impl Owned {
    fn durable_version(&self, durable: u64) -> u64 {
        let first = self.pending.iter().find(|(slot, _)| *slot >= durable);
        first.map_or(self.state.version(), |(_, version)| version - 1)
    }

    fn log(&self) -> LogKind {
        self.read.record.log()
    }
}

struct Shared {
    begun: Begun,
    owned: BTreeMap<PartitionId, Owned>,
    /// Partitions that it owned when it started and has not opened. Their records keep the log.
    unopened: BTreeMap<PartitionId, Position>,
    /// Requests that wait for a partition that is being opened.
    opening: BTreeMap<PartitionId, Vec<oneshot::Sender<()>>>,
    shared_log: Log,
    local_log: Log,
    /// The newest incarnation of each peer, and when it was heard of.
    heard: BTreeMap<NodeId, (u64, Duration)>,
    observed_ended: BTreeMap<(NodeId, u64), Duration>,
    is_fenced: bool,
    /// Every epoch may be opened once: a second opening would miss the records since the first one.
    opened: BTreeSet<(PartitionId, u32)>,
    next_number: u64,
    /// Segments that this node writes, or that a manifest names that may still be stored.
    unsettled: BTreeMap<u64, Vec<SegmentName>>,
    /// The newest command for the source of a migration.
    commands: BTreeMap<PartitionId, Fence>,
}

impl Shared {
    fn log(&mut self, kind: LogKind) -> &mut Log {
        match kind {
            LogKind::Shared => &mut self.shared_log,
            LogKind::Local => &mut self.local_log,
        }
    }

    /// A number that is new in this incarnation.
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}

/// What nodes report to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The process was fenced and must stop.
    Fenced,
    /// A statement killed the process.
    Killed,
    /// The node was started with a data directory of another node, or an old one.
    Refused,
    /// It assigned the partitions of a dead node.
    FailedOver,
    /// It handed a partition over.
    Moved,
    /// It handed a private partition over.
    Migrated,
    /// It changed the durability of a partition.
    ChangedLog,
    /// It deleted this number of objects.
    Collected(usize),
    /// Deleted objects of ended logs.
    Truncated(usize),
    /// It read a manifest that it held.
    Exported,
}

pub type Reporter = Arc<dyn Fn(Process, Report) + Send + Sync>;

/// The processes that run the nodes.
#[derive(Clone)]
pub struct Processes(Arc<Vec<AtomicU32>>);

impl Processes {
    pub fn new(nodes: u32) -> Processes {
        Processes(Arc::new((0..nodes).map(|_| AtomicU32::new(0)).collect()))
    }

    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + use<> {
        (1..=self.0.len() as u32).map(NodeId)
    }

    /// The process that runs a node now.
    pub fn current(&self, node: NodeId) -> Process {
        let run = self.0[node.0 as usize - 1].load(Ordering::Relaxed);
        Process { machine: node.0, run }
    }

    /// A new process of a node.
    pub fn next(&self, node: NodeId) -> Process {
        let run = 1 + self.0[node.0 as usize - 1].fetch_add(1, Ordering::Relaxed);
        Process { machine: node.0, run }
    }
}

#[derive(Clone)]
pub struct Node {
    id: NodeId,
    env: Env,
    network: Network<Request, Answer>,
    processes: Processes,
    features: Features,
    lease: Arc<Lease>,
    shared: Arc<Mutex<Shared>>,
    report: Reporter,
}

/// Maximum time that nodes wait for each other's answers.
const NODE_TIMEOUT: Duration = Duration::from_millis(500);

impl Node {
    /// The process of a node, from its start.
    pub async fn run(
        id: NodeId,
        env: Env,
        network: Network<Request, Answer>,
        processes: Processes,
        features: Features,
        report: Reporter,
    ) {
        let run = env.world.simulation.below(u64::MAX);
        let begun = match incarnation::begin(&env, id, run).await {
            Ok(begun) => begun,
            Err(error) => {
                env.world.simulation.note(|| format!("node {id}: {error}"));
                return report(env.process, Report::Refused);
            }
        };
        env.world
            .simulation
            .note(|| format!("node {id}: incarnation {} begins as {:?}", begun.incarnation, env.process));
        // All partitions that it owns, read after the incarnation began. Their records keep its
        // earlier logs.
        let mut unopened = BTreeMap::new();
        for (partition, read) in metadata::partitions(&env).await.unwrap() {
            if read.record.owner == id {
                if !env.world.rules.reported_deaths_only {
                    quarantine::report(&env, partition, id, begun.incarnation - 1).await.unwrap();
                }
                if read.record.log() == LogKind::Shared {
                    unopened.insert(partition, read.record.ranges.last().unwrap().from);
                }
            }
        }
        quarantine::report_crash(&env, id).await.unwrap();
        let (now, start) = (env.now(), Position { incarnation: begun.incarnation, slot: 0 });
        let kept_from = unopened.values().copied().min().unwrap_or(start);
        let shared = Shared {
            owned: BTreeMap::new(),
            unopened,
            opening: BTreeMap::new(),
            shared_log: Log::new(kept_from),
            local_log: Log::new(Position::default()),
            heard: processes.nodes().map(|peer| (peer, (0, now))).collect(),
            observed_ended: BTreeMap::new(),
            is_fenced: false,
            opened: BTreeSet::new(),
            next_number: 0,
            unsettled: BTreeMap::new(),
            commands: BTreeMap::new(),
            begun,
        };
        let shared = Arc::new(Mutex::new(shared));
        let lease = Arc::default();
        let node = Node { id, env, network, processes, features, lease, shared, report };
        node.clone().start_background();
        let handler = node.clone();
        node.network.listen(node.env.process, move |request| {
            let node = handler.clone();
            Box::pin(async move { node.answer(request).await })
        });
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.simulation().spawn(self.env.process, task);
    }

    fn simulation(&self) -> &Simulation {
        &self.env.world.simulation
    }

    /// Pauses between two runs of a background task.
    async fn pause(&self, from: Duration, to: Duration) {
        let pause = from + self.env.jitter(to - from);
        self.env.sleep(pause / self.features.pace as u32).await;
    }

    fn rules(&self) -> &Rules {
        &self.env.world.rules
    }

    fn begun(&self) -> Begun {
        self.shared.lock().begun.clone()
    }

    /// The start of this incarnation's logs.
    fn start(&self) -> Position {
        Position { incarnation: self.shared.lock().begun.incarnation, slot: 0 }
    }

    fn fenced(&self, reason: &str) {
        self.simulation().note(|| format!("node {}: fenced: {reason}", self.id));
        self.shared.lock().is_fenced = true;
        (self.report)(self.env.process, Report::Fenced);
    }

    /// Returns true if this incarnation has not ended.
    async fn is_current(&self) -> bool {
        let revision = self.shared.lock().begun.read.revision;
        let now = metadata::node(&self.env, self.id).await.unwrap();
        now.is_some_and(|now| now.revision == revision)
    }

    async fn call(&self, to: NodeId, request: Request) -> Option<Answer> {
        self.network.call(self.env.process, self.processes.current(to), request, NODE_TIMEOUT).await
    }

    async fn answer(&self, request: Request) -> Answer {
        match request {
            Request::Ping => match self.lease.is_valid(self.env.now()) {
                true => Answer::Alive { incarnation: self.start().incarnation },
                // A node that cannot renew its lease counts as dead for the others.
                false => Answer::Elsewhere,
            },
            Request::Append(append) => self.append(append).await,
            Request::Read { partition } => self.read(partition).await,
            Request::Outcome { partition, transaction } => self.outcome(partition, transaction).await,
            Request::Move { partition, to } => self.move_to(partition, to).await,
            Request::SetLog { partition, log } => self.set_log(partition, log).await,
            Request::Migrate { partition, to, on_demand } => self.migrate(partition, to, on_demand).await,
            Request::Command(command) => Answer::Reply(self.command(command).await),
            Request::StoreCopy { partition, fence, name, state } => {
                Answer::Reply(self.store_copy(partition, fence, name, state).await)
            }
            Request::Pull { partition, epoch } => self.pages(partition, epoch),
            Request::Disown { incarnation, segments } => self.disown(incarnation, segments),
        }
    }
}
