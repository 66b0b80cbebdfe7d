//! A simulated node: runs the protocols of the crate and a model of everything else.
//!
//! A partition is a list. A transaction appends one value, so version `n` is the first `n` values.
//! A log object holds one record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use fulmar_cluster::environment::{Environment, LogObjects, Slot};
use fulmar_cluster::handover::{self, Release};
use fulmar_cluster::incarnation::{self, Begun, LEASE_WAIT, Lease};
use fulmar_cluster::{
    LogId, ManifestName, NodeId, NodeState, PartitionRecord, Position, Read, failover, metadata, recovery,
};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Network, Process};
use futures::channel::oneshot;
use parking_lot::Mutex;

use crate::world::{Env, Manifest};

/// The cluster-unique id of a transaction: the gateway, and its number there.
pub type Transaction = (u32, u64);

/// The contents of a partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub list: Vec<u64>,
    pub outcomes: BTreeMap<Transaction, u64>,
}

impl State {
    fn version(&self) -> u64 {
        self.list.len() as u64
    }

    fn append(&mut self, transaction: Transaction, value: u64) {
        self.list.push(value);
        self.outcomes.insert(transaction, self.version());
    }

    /// As of an earlier version.
    fn at(&self, version: u64) -> State {
        let outcomes = self.outcomes.iter().filter(|(_, of)| **of <= version);
        State {
            list: self.list[..version as usize].to_vec(),
            outcomes: outcomes.map(|(transaction, of)| (*transaction, *of)).collect(),
        }
    }
}

/// The owner that a request assumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Believed {
    pub owner: NodeId,
    pub incarnation: u64,
    pub epoch: u32,
}

#[derive(Clone, Debug)]
pub enum Request {
    Ping,
    Append { partition: PartitionId, believed: Believed, transaction: Transaction, value: u64 },
    Read { partition: PartitionId },
    Outcome { partition: PartitionId, transaction: Transaction },
    Move { partition: PartitionId, to: NodeId },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Alive,
    Done,
    List(Vec<u64>),
    Committed,
    NotCommitted,
    /// Nothing was done: the node does not own the partition, or is releasing it.
    Elsewhere,
}

/// A record of the log, as text: `partition epoch version gateway number value`, or `release ...`.
#[derive(Clone, Copy, Debug)]
struct Record {
    partition: PartitionId,
    epoch: u32,
    version: u64,
    transaction: Transaction,
    value: u64,
    is_release: bool,
}

impl Record {
    fn encode(&self) -> Vec<u8> {
        let Record { partition, epoch, version, transaction: (gateway, number), value, is_release } = self;
        format!("{} {epoch} {version} {gateway} {number} {value} {}", partition.0, u8::from(*is_release))
            .into_bytes()
    }

    fn decode(body: &[u8]) -> Record {
        let text = std::str::from_utf8(body).unwrap();
        let numbers: Vec<u64> = text.split(' ').map(|word| word.parse().unwrap()).collect();
        Record {
            partition: PartitionId(numbers[0]),
            epoch: numbers[1] as u32,
            version: numbers[2],
            transaction: (numbers[3] as u32, numbers[4]),
            value: numbers[5],
            is_release: numbers[6] == 1,
        }
    }
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
    /// A flush or a handover is in progress.
    is_busy: bool,
    refused: BTreeSet<Transaction>,
    /// Records before this position are in manifests.
    kept: Position,
}

impl Owned {
    fn durable_version(&self, durable: u64) -> u64 {
        let first = self.pending.iter().find(|(slot, _)| *slot >= durable);
        first.map_or(self.state.version(), |(_, version)| version - 1)
    }
}

#[derive(Default)]
struct Log {
    next: u64,
    /// All slots before this one are durable.
    durable: u64,
    done: BTreeSet<u64>,
    waiting: Vec<(u64, oneshot::Sender<()>)>,
    kept_from: Position,
    /// Of the newest durable object.
    durable_kept_from: Position,
}

struct Shared {
    begun: Begun,
    owned: BTreeMap<PartitionId, Owned>,
    /// Partitions that it owned when it started and has not opened. Their records keep the log.
    unopened: BTreeMap<PartitionId, Position>,
    opening: BTreeSet<PartitionId>,
    log: Log,
    heard: BTreeMap<NodeId, Duration>,
    observed_ended: BTreeMap<(NodeId, u64), Duration>,
    log_before: Position,
    is_fenced: bool,
    /// Every epoch may be opened once: a second opening would miss the records since the first one.
    opened: BTreeSet<(PartitionId, u32)>,
}

/// Processes that were fenced and must stop, and violations that nodes detect themselves.
#[derive(Clone, Default)]
pub struct Reports {
    pub fenced: Arc<Mutex<Vec<Process>>>,
    pub violations: Arc<Mutex<Vec<String>>>,
}

#[derive(Clone)]
pub struct Node {
    pub id: NodeId,
    pub env: Env,
    network: Network<Request, Answer>,
    peers: Vec<(NodeId, Arc<Mutex<Process>>)>,
    lease: Arc<Lease>,
    shared: Arc<Mutex<Shared>>,
    reports: Reports,
}

const MAX_IN_FLIGHT: u64 = 16;
const PING_INTERVAL: Duration = Duration::from_millis(300);
const SUSPECT_TIMEOUT: Duration = Duration::from_millis(1000);

impl Node {
    /// The process of a node, from its start.
    pub async fn run(
        id: NodeId,
        env: Env,
        network: Network<Request, Answer>,
        peers: Vec<(NodeId, Arc<Mutex<Process>>)>,
        reports: Reports,
    ) {
        let run = env.world.simulation.below(u64::MAX);
        let begun = incarnation::begin(&env, id, run).await.unwrap();
        env.world
            .simulation
            .note(|| format!("node {id}: incarnation {} begins as {:?}", begun.incarnation, env.process));
        let start = Position { incarnation: begun.incarnation, slot: 0 };
        // All partitions that it owns, read after the incarnation began. Their records keep its
        // earlier logs.
        let mut unopened = BTreeMap::new();
        for (partition, read) in metadata::partitions(&env).await.unwrap() {
            if read.record.owner == id {
                unopened.insert(partition, read.record.ranges.last().unwrap().from);
            }
        }
        let now = env.now();
        let kept_from = unopened.values().copied().min().unwrap_or(start);
        let shared = Shared {
            owned: BTreeMap::new(),
            unopened,
            opening: BTreeSet::new(),
            log: Log { kept_from, durable_kept_from: kept_from, ..Log::default() },
            heard: peers.iter().map(|(peer, _)| (*peer, now)).collect(),
            observed_ended: BTreeMap::new(),
            log_before: start,
            is_fenced: false,
            opened: BTreeSet::new(),
            begun,
        };
        let node = Node {
            id,
            env,
            network,
            peers,
            lease: Arc::default(),
            shared: Arc::new(Mutex::new(shared)),
            reports,
        };
        node.clone().spawn(node.clone().keep_lease());
        for (peer, process) in node.peers.clone() {
            node.clone().spawn(node.clone().watch(peer, process));
        }
        node.clone().spawn(node.clone().flush());
        let handler = node.clone();
        node.network.listen(node.env.process, move |request| {
            let node = handler.clone();
            Box::pin(async move { node.answer(request).await })
        });
    }

    fn spawn(self, task: impl Future<Output = ()> + Send + 'static) {
        self.env.world.simulation.spawn(self.env.process, task);
    }

    fn rules(&self) -> fulmar_cluster::Rules {
        self.env.world.rules
    }

    fn incarnation(&self) -> u64 {
        self.shared.lock().begun.incarnation
    }

    fn fenced(&self, reason: &str) {
        self.env.world.simulation.note(|| format!("node {}: fenced: {reason}", self.id));
        self.shared.lock().is_fenced = true;
        self.reports.fenced.lock().push(self.env.process);
    }

    fn violation(&self, text: String) {
        self.env.world.simulation.note(|| format!("VIOLATION {text}"));
        self.reports.violations.lock().push(text);
    }

    async fn keep_lease(self) {
        let begun = self.shared.lock().begun.clone();
        let error = self.lease.keep(&self.env, self.id, &begun).await;
        self.fenced(&error.to_string());
    }

    /// Pings a peer, and fails it over if it does not answer for [`SUSPECT_TIMEOUT`].
    async fn watch(self, peer: NodeId, process: Arc<Mutex<Process>>) {
        loop {
            let to = *process.lock();
            let ping = self.network.call(self.env.process, to, Request::Ping, PING_INTERVAL);
            let heard = ping.await == Some(Answer::Alive);
            let now = self.env.now();
            if heard {
                self.shared.lock().heard.insert(peer, now);
            }
            let silent = now.saturating_sub(self.shared.lock().heard[&peer]);
            if silent > SUSPECT_TIMEOUT {
                self.replace(peer).await;
                let now = self.env.now();
                self.shared.lock().heard.insert(peer, now);
            }
            self.env.sleep(PING_INTERVAL).await;
        }
    }

    async fn replace(&self, peer: NodeId) {
        let Ok(Some(read)) = metadata::node(&self.env, peer).await else { return };
        self.observe(peer, &read.record);
        let (simulation, id) = (self.env.world.simulation.clone(), self.id);
        simulation
            .note(|| format!("node {id}: fails over node {peer}, incarnation {}", read.record.incarnation));
        let choices: Vec<NodeId> =
            self.peers.iter().map(|(peer, _)| *peer).chain([id]).filter(|node| *node != peer).collect();
        let choose = |_| Some(choices[simulation.below(choices.len() as u64) as usize]);
        let failing = failover::fail_over(&self.env, peer, read.record.incarnation, choose);
        let done = simulation.within(Duration::from_secs(5), failing).await;
        simulation.note(|| format!("node {id}: failover of node {peer}: {done:?}"));
    }

    /// Records the time at which it first observed that an incarnation had ended.
    fn observe(&self, node: NodeId, record: &fulmar_cluster::NodeRecord) {
        if record.state != NodeState::Alive {
            let now = self.env.now();
            self.shared.lock().observed_ended.entry((node, record.incarnation)).or_insert(now);
        }
    }

    async fn answer(&self, request: Request) -> Answer {
        match request {
            Request::Ping => match self.lease.is_valid(self.env.now()) {
                true => Answer::Alive,
                // A node that cannot renew its lease counts as dead for the others.
                false => Answer::Elsewhere,
            },
            Request::Append { partition, believed, transaction, value } => {
                self.append(partition, believed, transaction, value).await
            }
            Request::Read { partition } => self.read(partition).await,
            Request::Outcome { partition, transaction } => self.outcome(partition, transaction).await,
            Request::Move { partition, to } => self.move_to(partition, to).await,
        }
    }

    /// Opens the partition if needed. Returns false if this node does not own it.
    async fn open(&self, partition: PartitionId) -> bool {
        loop {
            {
                let mut shared = self.shared.lock();
                if shared.is_fenced {
                    return false;
                }
                if shared.owned.contains_key(&partition) {
                    return true;
                }
                if shared.opening.insert(partition) {
                    break;
                }
            }
            self.env.sleep(Duration::from_millis(5)).await;
        }
        let opened = self.recover(partition).await;
        let mut shared = self.shared.lock();
        shared.opening.remove(&partition);
        let Some(owned) = opened else { return false };
        shared.unopened.remove(&partition);
        let is_first = shared.opened.insert((partition, owned.read.record.epoch));
        shared.owned.insert(partition, owned);
        drop(shared);
        if !is_first {
            self.violation(format!("partition {partition} was opened twice in one epoch"));
        }
        true
    }

    async fn recover(&self, partition: PartitionId) -> Option<Owned> {
        let read = metadata::partition(&self.env, partition).await.unwrap()?;
        if read.record.owner != self.id {
            return None;
        }
        let now = self.env.now();
        let mut serve_from = self.shared.lock().begun.serve_from;
        if read.record.by_failover && self.rules().wait_out_lease {
            let previous = &read.record.ranges[read.record.ranges.len().saturating_sub(2)];
            let incarnation = previous.to.map_or(0, |to| to.incarnation);
            let observed = self.shared.lock().observed_ended.get(&(previous.node, incarnation)).copied();
            serve_from = serve_from.max(observed.unwrap_or(now) + LEASE_WAIT);
        }
        let manifests = loop {
            if let Ok(manifests) = self.env.manifests(partition).await {
                break manifests;
            }
        };
        let may_use = |manifest: &&Manifest| {
            !self.rules().named_manifests || recovery::is_named(&read.record, manifest.name)
        };
        let manifest = manifests.iter().filter(may_use).max_by_key(|manifest| manifest.name);
        let end = self.shared.lock().log_before;
        let name = manifest.map(|manifest| manifest.name);
        let objects = match recovery::objects(&self.env, &read.record, name, end).await {
            Ok(objects) => objects,
            Err(missing) => {
                // A manifest may have covered it while this node was reading.
                let now = metadata::partition(&self.env, partition).await.unwrap()?;
                if now.revision == read.revision {
                    self.violation(format!("partition {partition}: {missing:?} is missing"));
                }
                return None;
            }
        };
        let mut state = manifest.map(|manifest| manifest.state.clone()).unwrap_or_default();
        for object in &objects {
            let record = Record::decode(&object.body);
            let counts =
                record.partition == partition && record.epoch == object.range.epoch && !record.is_release;
            if !counts || record.version <= state.version() {
                continue;
            }
            if record.version != state.version() + 1 {
                self.violation(format!(
                    "partition {partition}: version {} follows {}",
                    record.version,
                    state.version()
                ));
            }
            state.append(record.transaction, record.value);
        }
        let kept = self.shared.lock().unopened.get(&partition).copied();
        let mut shared = self.shared.lock();
        let next = Position { incarnation: shared.begun.incarnation, slot: shared.log.next };
        let (id, epoch) = (self.id, read.record.epoch);
        self.env.world.simulation.note(|| {
            format!("node {id}: opens {partition}, epoch {epoch}, version {}, from {name:?}", state.version())
        });
        let kept = kept.unwrap_or(next);
        // Its records keep the log until it is in the map of owned partitions.
        shared.unopened.insert(partition, kept);
        Some(Owned {
            read,
            state,
            pending: Vec::new(),
            serve_from,
            accepts: true,
            is_busy: false,
            refused: BTreeSet::new(),
            kept,
        })
    }

    /// Waits until the partition may be served. Returns false if this node does not own it.
    async fn ready(&self, partition: PartitionId) -> bool {
        loop {
            if !self.open(partition).await {
                return false;
            }
            let Some(serve_from) = self.shared.lock().owned.get(&partition).map(|owned| owned.serve_from)
            else {
                continue;
            };
            let now = self.env.now();
            if now >= serve_from {
                return true;
            }
            self.env.sleep(serve_from - now).await;
        }
    }

    async fn append(
        &self,
        partition: PartitionId,
        believed: Believed,
        transaction: Transaction,
        value: u64,
    ) -> Answer {
        if !self.ready(partition).await {
            return Answer::Elsewhere;
        }
        let (slot, object) = {
            let mut shared = self.shared.lock();
            let incarnation = shared.begun.incarnation;
            let shared = &mut *shared;
            let Some(owned) = shared.owned.get_mut(&partition) else { return Answer::Elsewhere };
            let epoch = owned.read.record.epoch;
            let here = Believed { owner: self.id, incarnation, epoch };
            let is_refused =
                self.rules().refuse_asked && (believed != here || owned.refused.contains(&transaction));
            if !owned.accepts || is_refused {
                return Answer::Elsewhere;
            }
            if let Some(version) = owned.state.outcomes.get(&transaction) {
                let slot = owned.pending.iter().find(|(_, of)| of == version).map(|(slot, _)| *slot);
                (slot, None)
            } else {
                let version = owned.state.version() + 1;
                let record = Record { partition, epoch, version, transaction, value, is_release: false };
                owned.state.append(transaction, value);
                owned.pending.push((shared.log.next, version));
                let (slot, object) = next_object(&mut shared.log, &record);
                (Some(slot), Some(object))
            }
        };
        let Some(slot) = slot else { return Answer::Done };
        if let Some(object) = object {
            self.clone().spawn(self.clone().put(slot, object));
        }
        match self.durable(slot).await {
            true => Answer::Done,
            false => Answer::Elsewhere,
        }
    }

    /// Waits until a slot and all slots before it are durable.
    async fn durable(&self, slot: u64) -> bool {
        let receiver = {
            let mut shared = self.shared.lock();
            let is_durable = match self.rules().contiguous {
                true => shared.log.durable > slot,
                false => shared.log.done.contains(&slot) || shared.log.durable > slot,
            };
            if is_durable {
                return true;
            }
            let (sender, receiver) = oneshot::channel();
            shared.log.waiting.push((slot, sender));
            receiver
        };
        receiver.await.is_ok()
    }

    /// Puts an object into the log. Retries until it is stored or the log is sealed.
    async fn put(self, slot: u64, object: Slot) {
        let log = LogId { node: self.id, incarnation: self.incarnation() };
        while slot >= self.shared.lock().log.durable + MAX_IN_FLIGHT {
            self.env.sleep(Duration::from_millis(2)).await;
        }
        loop {
            if let Ok(true) = self.env.create(log, slot, object.clone()).await {
                break;
            }
            match self.env.read(log, slot).await {
                Ok(Some(found)) if found == object => break,
                Ok(Some(found)) => {
                    let reason = if found == Slot::Seal { "its log is sealed" } else { "its slot was taken" };
                    return self.fenced(reason);
                }
                Ok(None) | Err(_) => self.env.sleep(Duration::from_millis(10)).await,
            }
        }
        self.env.world.simulation.note(|| format!("node {}: slot {slot} of {log:?} is stored", self.id));
        let mut shared = self.shared.lock();
        let contiguous = self.rules().contiguous;
        let shared = &mut *shared;
        let log = &mut shared.log;
        log.done.insert(slot);
        while log.done.remove(&log.durable) {
            log.durable += 1;
        }
        if let Slot::Records { kept_from, .. } = object
            && log.durable > slot
        {
            log.durable_kept_from = log.durable_kept_from.max(kept_from);
        }
        let mut waiting = Vec::new();
        for (of, sender) in std::mem::take(&mut log.waiting) {
            if of < log.durable || (!contiguous && of == slot) {
                let _gone = sender.send(());
            } else {
                waiting.push((of, sender));
            }
        }
        log.waiting = waiting;
        let durable = log.durable;
        for owned in shared.owned.values_mut() {
            owned.pending.retain(|(slot, _)| *slot >= durable);
        }
    }

    async fn read(&self, partition: PartitionId) -> Answer {
        if !self.ready(partition).await {
            return Answer::Elsewhere;
        }
        let list = {
            let shared = self.shared.lock();
            let Some(owned) = shared.owned.get(&partition).filter(|owned| owned.accepts) else {
                return Answer::Elsewhere;
            };
            let version = match self.rules().contiguous {
                true => owned.durable_version(shared.log.durable),
                false => owned.state.version(),
            };
            owned.state.list[..version as usize].to_vec()
        };
        match !self.rules().lease || self.lease.is_valid(self.env.now()) {
            true => Answer::List(list),
            false => Answer::Elsewhere,
        }
    }

    async fn outcome(&self, partition: PartitionId, transaction: Transaction) -> Answer {
        if !self.ready(partition).await || !self.lease.is_valid(self.env.now()) {
            return Answer::Elsewhere;
        }
        let slot = {
            let mut shared = self.shared.lock();
            let owned = shared.owned.get_mut(&partition).filter(|owned| owned.accepts);
            let Some(owned) = owned else { return Answer::Elsewhere };
            match owned.state.outcomes.get(&transaction).copied() {
                Some(version) => owned.pending.iter().find(|(_, of)| *of == version).map(|(slot, _)| *slot),
                None => {
                    owned.refused.insert(transaction);
                    return Answer::NotCommitted;
                }
            }
        };
        match slot {
            Some(slot) if !self.durable(slot).await => Answer::Elsewhere,
            _ => Answer::Committed,
        }
    }

    async fn move_to(&self, partition: PartitionId, to: NodeId) -> Answer {
        if !self.ready(partition).await {
            return Answer::Elsewhere;
        }
        let release = {
            let mut shared = self.shared.lock();
            let shared = &mut *shared;
            let Some(owned) = shared.owned.get_mut(&partition) else { return Answer::Elsewhere };
            if owned.is_busy || self.env.now() < owned.serve_from {
                return Answer::Elsewhere;
            }
            owned.is_busy = true;
            owned.accepts = !self.rules().release;
            let record = Record {
                partition,
                epoch: owned.read.record.epoch,
                version: owned.state.version(),
                transaction: (0, 0),
                value: 0,
                is_release: true,
            };
            let (slot, object) = next_object(&mut shared.log, &record);
            (slot, object, owned.read.clone(), owned.kept)
        };
        let (slot, object, read, kept_from) = release;
        self.clone().spawn(self.clone().put(slot, object));
        if !self.durable(slot).await {
            return Answer::Elsewhere;
        }
        let begun = self.shared.lock().begun.clone();
        let slot = Position { incarnation: begun.incarnation, slot };
        if to == self.id {
            return self.restore(partition, &begun, &read, slot).await;
        }
        let release = Release { partition, read, slot, kept_from };
        let outcome = match handover::hand_over(&self.env, self.id, &begun.read, to, &release).await {
            Ok(outcome) => outcome,
            Err(error) => {
                self.fenced(&error.to_string());
                return Answer::Elsewhere;
            }
        };
        let id = self.id;
        self.env.world.simulation.note(|| format!("node {id}: moves {partition} to {to}: {outcome:?}"));
        let mut shared = self.shared.lock();
        match outcome {
            handover::Outcome::Kept(read) => {
                if let Some(owned) = shared.owned.get_mut(&partition) {
                    owned.read = read;
                    owned.accepts = true;
                    owned.is_busy = false;
                }
            }
            handover::Outcome::HandedOver => {
                shared.owned.remove(&partition);
                shared.unopened.remove(&partition);
            }
        }
        Answer::Done
    }

    /// Restores the partition, which was released at `slot`, to its own contents.
    async fn restore(
        &self,
        partition: PartitionId,
        begun: &Begun,
        read: &Read<PartitionRecord>,
        slot: Position,
    ) -> Answer {
        let from = Position { slot: slot.slot + 1, ..slot };
        let epoch = read.record.epoch + 1;
        let (node, covered) = (self.id, from.slot);
        let name = ManifestName { epoch, incarnation: begun.incarnation, covered, node, is_draft: true };
        let state = self.shared.lock().owned.get(&partition).map(|owned| owned.state.clone());
        let Some(state) = state else { return Answer::Elsewhere };
        let is_stored = self.env.put_manifest(partition, Manifest { name, state }).await.is_ok();
        let next = read.record.restored(name, from);
        let mut now = read.clone();
        // Retries until the outcome is known. After another change by this node the draft is
        // dropped.
        while is_stored && now.revision == read.revision {
            let nodes = [(self.id, &begun.read)];
            metadata::change_owner(&self.env, partition, read, &nodes, &next).await.unwrap();
            let Some(read) = metadata::partition(&self.env, partition).await.unwrap() else { break };
            now = read;
            let node = metadata::node(&self.env, self.id).await.unwrap();
            if node.is_none_or(|node| node.revision != begun.read.revision) {
                break;
            }
        }
        let is_mine =
            now.record.owner == self.id && (now.record == next || now.record.epoch == read.record.epoch);
        self.env
            .world
            .simulation
            .note(|| format!("node {node}: restores {partition}: {}", now.record == next));
        if !is_mine {
            self.fenced("its partition was assigned to another node");
            return Answer::Elsewhere;
        }
        let mut shared = self.shared.lock();
        if let Some(owned) = shared.owned.get_mut(&partition) {
            owned.read = now;
            owned.accepts = true;
            owned.is_busy = false;
        }
        Answer::Done
    }

    /// Periodically writes manifests, drops closed ranges from records, and truncates the log.
    async fn flush(self) {
        loop {
            let max_jitter = Duration::from_millis(600);
            self.env.sleep(Duration::from_millis(200) + self.env.jitter(max_jitter)).await;
            let partitions: Vec<_> = self.shared.lock().owned.keys().copied().collect();
            for partition in partitions {
                self.flush_one(partition).await;
            }
            self.truncate().await;
        }
    }

    async fn flush_one(&self, partition: PartitionId) {
        let (manifest, read) = {
            let mut shared = self.shared.lock();
            let (incarnation, durable, next) =
                (shared.begun.incarnation, shared.log.durable, shared.log.next);
            let Some(owned) = shared.owned.get_mut(&partition) else { return };
            if owned.is_busy {
                return;
            }
            owned.is_busy = true;
            let (version, covered) = match self.rules().durable_manifests {
                true => (owned.durable_version(durable), durable),
                false => (owned.state.version(), next),
            };
            let epoch = owned.read.record.epoch;
            let name = ManifestName { epoch, incarnation, covered, node: self.id, is_draft: false };
            (Manifest { name, state: owned.state.at(version) }, owned.read.clone())
        };
        let name = manifest.name;
        let covered = Position { incarnation: name.incarnation, slot: name.covered };
        let is_stored = self.env.put_manifest(partition, manifest).await.is_ok();
        let mut new_read = None;
        if is_stored && read.record.ranges.len() > 1 {
            new_read = self.forget_ranges(partition, &read, name, covered).await;
        }
        let mut shared = self.shared.lock();
        let Some(owned) = shared.owned.get_mut(&partition) else { return };
        owned.is_busy = false;
        if let Some(read) = new_read {
            owned.read = read;
        }
        if is_stored {
            owned.kept = owned.kept.max(covered);
        }
        let shared = &mut *shared;
        let nothing = Position { incarnation: shared.begun.incarnation, slot: shared.log.durable };
        let opened = shared.owned.values().map(|owned| owned.kept);
        let unopened =
            shared.unopened.iter().filter(|(id, _)| !shared.owned.contains_key(id)).map(|(_, kept)| *kept);
        let kept_from = opened.chain(unopened).min().unwrap_or(nothing);
        shared.log.kept_from = shared.log.kept_from.max(kept_from);
    }

    /// Drops the ranges that this manifest covers from the partition's record.
    async fn forget_ranges(
        &self,
        partition: PartitionId,
        read: &Read<PartitionRecord>,
        name: ManifestName,
        covered: Position,
    ) -> Option<Read<PartitionRecord>> {
        let mut next = read.record.clone();
        next.base = Some(name);
        next.ranges.drain(..next.ranges.len() - 1);
        next.ranges[0].from = next.ranges[0].from.max(covered);
        let node_read = self.shared.lock().begun.read.clone();
        metadata::change_owner(&self.env, partition, read, &[(self.id, &node_read)], &next).await.unwrap();
        let now = metadata::partition(&self.env, partition).await.unwrap()?;
        (now.record == next).then_some(now)
    }

    async fn truncate(&self) {
        let (kept_from, incarnation) = {
            let shared = self.shared.lock();
            (shared.log.durable_kept_from, shared.begun.incarnation)
        };
        let mut below = kept_from;
        if self.rules().keep_closed_ranges {
            for (_, read) in metadata::partitions(&self.env).await.unwrap() {
                let needed =
                    read.record.ranges.iter().filter(|range| range.node == self.id && range.to.is_some());
                below = needed.map(|range| range.from).fold(below, Position::min);
            }
        }
        for incarnation in 1..=incarnation.min(below.incarnation) {
            let log = LogId { node: self.id, incarnation };
            let Ok(slots) = self.env.list(log).await else { return };
            // Never deletes the last record: its `kept_from` shows what was truncated. Deletes in
            // order, one at a time, because a sealer takes the first gap for the end.
            for slot in &slots {
                if (Position { incarnation, slot: *slot }) >= below {
                    return;
                }
                match self.env.read(log, slot + 1).await {
                    Ok(Some(Slot::Records { .. })) => {}
                    Ok(Some(Slot::Seal)) => break,
                    Ok(None) | Err(_) => return,
                }
                if self.env.delete_slot(log, *slot).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Takes the next slot for a record.
fn next_object(log: &mut Log, record: &Record) -> (u64, Slot) {
    let slot = log.next;
    log.next += 1;
    (slot, Slot::Records { kept_from: log.kept_from, body: record.encode() })
}
