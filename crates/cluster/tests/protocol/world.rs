//! Models of the metadata store, and of the objects of logs and manifests.
//!
//! Both are linearizable: a request takes effect at one moment. The caller observes less. A request
//! may be lost, its answer may be lost, and it may take effect after the caller has timed out, or
//! after the calling process has died.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_cluster::environment::{Environment, LogObjects, Slot, Uncertain};
use fulmar_cluster::{LogId, ManifestName, Rules};
use fulmar_meta::{
    Compare, Entry, MetaError, MetadataStore, Observer, Operation, Outcome, Revision, Transaction,
};
use fulmar_pages::PartitionId;
use fulmar_simulation::{Process, Simulation};
use futures::channel::oneshot;
use parking_lot::Mutex;

/// How a store behaves. Probabilities are in 1,000.
#[derive(Clone, Copy, Debug)]
pub struct StoreFaults {
    pub delay: Duration,
    pub max_delay: Duration,
    /// Requests, or their answers, that are lost.
    pub lost_per_mille: u64,
    /// Requests that take effect late, after the caller has given up.
    pub late_per_mille: u64,
}

impl StoreFaults {
    pub const NONE: StoreFaults = StoreFaults {
        delay: Duration::from_millis(1),
        max_delay: Duration::from_millis(5),
        lost_per_mille: 0,
        late_per_mille: 0,
    };
}

/// Time after which a caller abandons a request.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum delay of a late request.
const MAX_LATE_DELAY: Duration = Duration::from_millis(2500);

/// A manifest: the state of a partition and the position up to which it covers its owner's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub name: ManifestName,
    pub state: crate::node::State,
}

#[derive(Default)]
struct Contents {
    keys: BTreeMap<String, (Vec<u8>, u64)>,
    revision: u64,
    logs: BTreeMap<(LogId, u64), Slot>,
    manifests: BTreeMap<(PartitionId, ManifestName), Manifest>,
    /// All values that keys have had.
    written: Vec<String>,
}

/// The metadata store and the object store.
#[derive(Clone)]
pub struct World {
    pub simulation: Simulation,
    contents: Arc<Mutex<Contents>>,
    faults: Arc<Mutex<StoreFaults>>,
    cut: Arc<Mutex<Vec<Process>>>,
    /// The next slot, for writers that share a log.
    pub next_slot: Arc<AtomicU64>,
    pub rules: Rules,
}

impl World {
    pub fn new(simulation: &Simulation, rules: Rules) -> World {
        World {
            simulation: simulation.clone(),
            contents: Arc::default(),
            faults: Arc::new(Mutex::new(StoreFaults::NONE)),
            cut: Arc::default(),
            next_slot: Arc::default(),
            rules,
        }
    }

    pub fn set_faults(&self, faults: StoreFaults) {
        *self.faults.lock() = faults;
    }

    /// Cuts a process off from both stores, or reconnects it.
    pub fn cut(&self, process: Process, is_cut: bool) {
        let mut cut = self.cut.lock();
        cut.retain(|other| *other != process);
        if is_cut {
            cut.push(process);
        }
    }

    /// Everything about a partition, for the trace of a failed run.
    pub fn describe(&self) -> Vec<String> {
        let contents = self.contents.lock();
        let keys = contents
            .keys
            .iter()
            .map(|(key, (value, revision))| format!("{key} @{revision} {}", String::from_utf8_lossy(value)));
        let logs = contents.logs.iter().map(|((log, slot), contents)| format!("{log:?} {slot} {contents:?}"));
        let manifests = contents.manifests.values().map(|manifest| format!("{manifest:?}"));
        keys.chain(logs).chain(manifests).collect()
    }

    /// Number of written values that contain `text`.
    pub fn count(&self, text: &str) -> usize {
        self.contents.lock().written.iter().filter(|value| value.contains(text)).count()
    }

    /// Number of moves of a partition with its owner's consent.
    pub fn moves(&self) -> usize {
        let contents = self.contents.lock();
        contents
            .written
            .iter()
            .filter(|value| value.contains("\"by_failover\":false,") && !value.contains("\"epoch\":1,\"by"))
            .count()
    }

    /// Runs `effect` at some moment and returns its result, unless something is lost or late.
    async fn request<T: Send + 'static>(
        &self,
        process: Process,
        effect: impl FnOnce(&mut Contents) -> T + Send + 'static,
    ) -> Result<T, Uncertain> {
        let (sender, receiver) = oneshot::channel();
        let world = self.clone();
        // The request is delivered even if the process that sent it dies.
        self.simulation.spawn(Simulation::WORLD, async move {
            let StoreFaults { delay, max_delay, lost_per_mille, late_per_mille } = *world.faults.lock();
            let simulation = &world.simulation;
            let is_late = simulation.chance(late_per_mille, 1000);
            let to = if is_late { MAX_LATE_DELAY } else { max_delay };
            simulation.sleep(simulation.delay(if is_late { REQUEST_TIMEOUT } else { delay }, to)).await;
            let is_cut = || world.cut.lock().contains(&process);
            if is_cut() || simulation.chance(lost_per_mille, 1000) {
                return;
            }
            let result = effect(&mut world.contents.lock());
            simulation.sleep(simulation.delay(delay, max_delay)).await;
            if is_cut() || simulation.chance(lost_per_mille, 1000) {
                return;
            }
            let _the_caller_has_gone = sender.send(result);
        });
        match self.simulation.within(REQUEST_TIMEOUT, receiver).await {
            Ok(Ok(result)) => Ok(result),
            // The answer was lost. The caller waits until its time-out.
            Ok(Err(_)) => {
                self.simulation.sleep(REQUEST_TIMEOUT / 2).await;
                Err(Uncertain)
            }
            Err(_) => Err(Uncertain),
        }
    }
}

/// The world as a process sees it.
#[derive(Clone)]
pub struct Env {
    pub world: World,
    pub process: Process,
}

impl Environment for Env {
    fn now(&self) -> Duration {
        self.world.simulation.now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send {
        let simulation = self.world.simulation.clone();
        async move { simulation.sleep(duration).await }
    }

    fn jitter(&self, max: Duration) -> Duration {
        self.world.simulation.delay(Duration::ZERO, max)
    }

    fn metadata(&self) -> &dyn MetadataStore {
        self
    }

    fn logs(&self) -> &dyn LogObjects {
        self
    }

    fn rules(&self) -> &Rules {
        &self.world.rules
    }
}

fn unknown(_: Uncertain) -> MetaError {
    MetaError::Unavailable { cause: "no answer: the outcome is not known".to_owned(), remedy: "ask again" }
}

fn entry(key: &str, (value, revision): &(Vec<u8>, u64)) -> Entry {
    Entry { key: key.to_owned(), value: value.clone(), modified: Revision(*revision) }
}

#[async_trait]
impl MetadataStore for Env {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        let key = key.to_owned();
        let read = move |contents: &mut Contents| contents.keys.get(&key).map(|found| entry(&key, found));
        self.world.request(self.process, read).await.map_err(unknown)
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        let prefix = prefix.to_owned();
        let read = move |contents: &mut Contents| {
            let found = contents.keys.iter().filter(|(key, _)| key.starts_with(&prefix));
            found.map(|(key, found)| entry(key, found)).collect()
        };
        self.world.request(self.process, read).await.map_err(unknown)
    }

    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        let apply = move |contents: &mut Contents| {
            let holds = transaction.compares.iter().all(|compare| match compare {
                Compare::Absent(key) => !contents.keys.contains_key(key),
                Compare::Unchanged(key, revision) => {
                    contents.keys.get(key).is_some_and(|(_, modified)| *modified == revision.0)
                }
            });
            if !holds {
                return Outcome::Conflict(Revision(contents.revision));
            }
            if !transaction.operations.is_empty() {
                contents.revision += 1;
            }
            for operation in transaction.operations {
                match operation {
                    Operation::Put(key, value) => {
                        contents.written.push(String::from_utf8_lossy(&value).into_owned());
                        contents.keys.insert(key, (value, contents.revision));
                    }
                    Operation::Delete(key) => {
                        contents.keys.remove(&key);
                    }
                }
            }
            Outcome::Committed(Revision(contents.revision))
        };
        self.world.request(self.process, apply).await.map_err(unknown)
    }

    async fn follow(&self, _: Arc<dyn Observer>) -> Result<(), MetaError> {
        let cause = "the simulated metadata store has no watch: its nodes scan".to_owned();
        Err(MetaError::Unavailable { cause, remedy: "scan" })
    }
}

#[async_trait]
impl LogObjects for Env {
    async fn create(&self, log: LogId, slot: u64, contents: Slot) -> Result<bool, Uncertain> {
        let only_if_absent = self.world.rules.create_if_absent;
        let create = move |all: &mut Contents| {
            if only_if_absent && all.logs.contains_key(&(log, slot)) {
                return false;
            }
            all.logs.insert((log, slot), contents);
            true
        };
        self.world.request(self.process, create).await
    }

    async fn read(&self, log: LogId, slot: u64) -> Result<Option<Slot>, Uncertain> {
        self.world.request(self.process, move |all| all.logs.get(&(log, slot)).cloned()).await
    }

    async fn list(&self, log: LogId) -> Result<Vec<u64>, Uncertain> {
        let list = move |all: &mut Contents| {
            all.logs.range((log, 0)..=(log, u64::MAX)).map(|((_, slot), _)| *slot).collect()
        };
        self.world.request(self.process, list).await
    }
}

impl Env {
    pub async fn delete_slot(&self, log: LogId, slot: u64) -> Result<(), Uncertain> {
        let delete = move |all: &mut Contents| {
            all.logs.remove(&(log, slot));
        };
        self.world.request(self.process, delete).await
    }

    /// Stores a manifest, unless one of the same name exists.
    pub async fn put_manifest(&self, partition: PartitionId, manifest: Manifest) -> Result<(), Uncertain> {
        let put = move |all: &mut Contents| {
            all.manifests.entry((partition, manifest.name)).or_insert(manifest);
        };
        self.world.request(self.process, put).await
    }

    pub async fn manifests(&self, partition: PartitionId) -> Result<Vec<Manifest>, Uncertain> {
        let list = move |all: &mut Contents| {
            let of_partition = all.manifests.iter().filter(|((id, _), _)| *id == partition);
            of_partition.map(|(_, manifest)| manifest.clone()).collect()
        };
        self.world.request(self.process, list).await
    }
}
