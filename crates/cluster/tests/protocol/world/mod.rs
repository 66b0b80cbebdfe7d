//! Models of everything outside of the processes: the metadata store, the object store, data
//! directories and clocks.
//!
//! The two stores are linearizable: a request takes effect at one moment. The caller observes less.
//! A request may be lost, its answer may be lost, it may take effect twice, after the caller has
//! timed out, or after the calling process has died.

mod clock;
mod directory;
mod metadata;
mod objects;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use fulmar_cluster::Rules;
use fulmar_cluster::directory::DataDirectory;
use fulmar_cluster::environment::{Environment, LogObjects, ObjectEnvironment, PartitionObjects, Uncertain};
use fulmar_meta::MetadataStore;
use fulmar_pages::PartitionId;
use fulmar_simulation::{Process, Simulation};
use futures::channel::oneshot;
use parking_lot::Mutex;

use crate::violation::{Kind, Violation};
pub use clock::{Clock, ClockError};
pub use directory::Directory;
pub use objects::{Manifest, RETENTION, segment_name};

/// How a store behaves. Probabilities are in 1,000.
#[derive(Clone, Copy, Debug)]
pub struct StoreFaults {
    pub delay: Duration,
    pub max_delay: Duration,
    /// Requests, or their answers, that are lost.
    pub lost_per_mille: u64,
    /// Requests that take effect late, after the caller has given up.
    pub late_per_mille: u64,
    /// Requests that take effect a second time, up to [`MAX_LATE_DELAY`] later.
    pub doubled_per_mille: u64,
}

impl StoreFaults {
    pub const NONE: StoreFaults = StoreFaults {
        delay: Duration::from_millis(1),
        max_delay: Duration::from_millis(5),
        lost_per_mille: 0,
        late_per_mille: 0,
        doubled_per_mille: 0,
    };
    /// Nothing is answered: a metadata store without a leader.
    pub const UNAVAILABLE: StoreFaults = StoreFaults { lost_per_mille: 1000, ..StoreFaults::NONE };
}

/// Time after which a caller abandons a request.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum delay of a late request.
const MAX_LATE_DELAY: Duration = Duration::from_millis(2500);

/// The two stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    Metadata,
    Objects,
}

/// The way between a machine and a store that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    Requests,
    Answers,
}

/// A statement that killed a node.
#[derive(Clone, Copy, Debug)]
struct Kill {
    partition: PartitionId,
    value: u64,
    is_reported: bool,
}

#[derive(Default)]
struct Contents {
    metadata: metadata::Contents,
    objects: objects::Contents,
}

struct State {
    contents: Contents,
    /// Of the metadata store and the object store.
    faults: [StoreFaults; 2],
    /// Number of faults that cut a way.
    cuts: BTreeMap<(u32, Service, Direction), u32>,
    kills: Vec<Kill>,
}

/// Everything outside of the processes.
#[derive(Clone)]
pub struct World {
    pub simulation: Simulation,
    pub rules: Rules,
    /// The next slot, for writers that share a log.
    pub next_slot: Arc<AtomicU64>,
    /// Listings of manifests take long.
    is_listing_slow: bool,
    state: Arc<Mutex<State>>,
    violations: Arc<Mutex<Vec<Violation>>>,
}

impl World {
    pub fn new(simulation: &Simulation, rules: Rules) -> World {
        let state = State {
            contents: Contents::default(),
            faults: [StoreFaults::NONE; 2],
            cuts: BTreeMap::new(),
            kills: Vec::new(),
        };
        World {
            simulation: simulation.clone(),
            rules,
            next_slot: Arc::default(),
            is_listing_slow: simulation.chance(1, 2),
            state: Arc::new(Mutex::new(state)),
            violations: Arc::default(),
        }
    }

    pub fn set_faults(&self, service: Service, faults: StoreFaults) {
        self.state.lock().faults[service as usize] = faults;
    }

    /// Cuts a machine off from a store, until [`World::heal`] is called as often as this.
    pub fn cut(&self, machine: u32, service: Service, direction: Direction) {
        *self.state.lock().cuts.entry((machine, service, direction)).or_default() += 1;
    }

    /// Ends one cut.
    pub fn heal(&self, machine: u32, service: Service, direction: Direction) {
        if let Some(cuts) = self.state.lock().cuts.get_mut(&(machine, service, direction)) {
            *cuts = cuts.saturating_sub(1);
        }
    }

    /// Ends all cuts.
    pub fn heal_all(&self) {
        self.state.lock().cuts.clear();
    }

    pub fn violation(&self, kind: Kind, text: String) {
        self.simulation.note(|| format!("VIOLATION {kind:?} {text}"));
        self.violations.lock().push(Violation { kind, text });
    }

    pub fn violations(&self) -> Vec<Violation> {
        self.violations.lock().clone()
    }

    /// Contents of both stores, for the trace of a failed run.
    pub fn describe(&self) -> Vec<String> {
        let state = self.state.lock();
        let Contents { metadata, objects } = &state.contents;
        metadata.describe().into_iter().chain(objects.describe()).collect()
    }

    /// Records that a statement has killed a node. `is_reported`: its handler has left a report.
    pub fn killed(&self, partition: PartitionId, value: u64, is_reported: bool) {
        let kills = {
            let mut state = self.state.lock();
            state.kills.push(Kill { partition, value, is_reported });
            state.kills.iter().filter(|kill| kill.value == value).count()
        };
        if kills > 2 {
            self.violation(Kind::KilledAgain, format!("value {value:x} has killed {kills} nodes"));
        }
    }
}

impl State {
    fn reported_kills(&self, partition: PartitionId) -> usize {
        self.kills.iter().filter(|kill| kill.is_reported && kill.partition == partition).count()
    }
}

/// A request on its way.
struct Call<T, F> {
    world: World,
    machine: u32,
    service: Service,
    effect: F,
    sender: oneshot::Sender<T>,
    deadline: Duration,
}

impl<T: Send + 'static, F: FnMut(&mut Contents) -> T + Send + 'static> Call<T, F> {
    fn is_lost(&self, direction: Direction) -> bool {
        self.world.is_lost(self.machine, self.service, direction)
    }

    /// The request reaches the store.
    fn arrive(mut self) {
        if self.is_lost(Direction::Requests) {
            return self.fail();
        }
        let faults = self.world.state.lock().faults[self.service as usize];
        let result = (self.effect)(&mut self.world.state.lock().contents);
        let simulation = self.world.simulation.clone();
        let delay = simulation.delay(faults.delay, faults.max_delay);
        if simulation.now() + delay >= self.deadline {
            return self.fail();
        }
        if !simulation.chance(faults.doubled_per_mille, 1000) {
            return simulation.after(delay, move || match self.is_lost(Direction::Answers) {
                true => self.fail(),
                false => drop(self.sender.send(result)),
            });
        }
        let Call { world, machine, service, mut effect, sender, deadline } = self;
        let again = world.clone();
        simulation.after(simulation.delay(faults.delay, MAX_LATE_DELAY), move || {
            let _unanswered = effect(&mut again.state.lock().contents);
        });
        simulation.after(delay, move || match world.is_lost(machine, service, Direction::Answers) {
            true => world.fail_at(deadline, sender),
            false => drop(sender.send(result)),
        });
    }

    fn fail(self) {
        self.world.fail_at(self.deadline, self.sender);
    }
}

impl World {
    fn is_lost(&self, machine: u32, service: Service, direction: Direction) -> bool {
        let (is_cut, lost) = {
            let state = self.state.lock();
            let cuts = state.cuts.get(&(machine, service, direction)).copied().unwrap_or(0);
            // The environment of the processes is not affected.
            let lost = if machine == 0 { 0 } else { state.faults[service as usize].lost_per_mille };
            (cuts > 0, lost)
        };
        is_cut || self.simulation.chance(lost, 1000)
    }

    /// The caller gets no answer. It waits until its time-out.
    fn fail_at<T: Send + 'static>(&self, deadline: Duration, sender: oneshot::Sender<T>) {
        let remaining = deadline.saturating_sub(self.simulation.now());
        self.simulation.after(remaining, move || drop(sender));
    }

    /// Runs `effect` at some moment and returns its result, unless something is lost or late.
    async fn request<T: Send + 'static>(
        &self,
        process: Process,
        service: Service,
        mut effect: impl FnMut(&mut Contents) -> T + Send + 'static,
    ) -> Result<T, Uncertain> {
        let (sender, receiver) = oneshot::channel();
        let faults = self.state.lock().faults[service as usize];
        let (machine, simulation) = (process.machine, &self.simulation);
        let deadline = simulation.now() + REQUEST_TIMEOUT;
        if simulation.chance(faults.late_per_mille, 1000) {
            let world = self.clone();
            simulation.after(simulation.delay(REQUEST_TIMEOUT, MAX_LATE_DELAY), move || {
                if !world.is_lost(machine, service, Direction::Requests) {
                    let _unanswered = effect(&mut world.state.lock().contents);
                }
            });
            self.fail_at(deadline, sender);
        } else {
            let call = Call { world: self.clone(), machine, service, effect, sender, deadline };
            let delay = simulation.delay(faults.delay, faults.max_delay);
            simulation.after(delay, move || call.arrive());
        }
        receiver.await.map_err(|_| Uncertain)
    }
}

/// The world as a process sees it.
#[derive(Clone)]
pub struct Env {
    pub world: World,
    pub process: Process,
    pub clock: Arc<Mutex<Clock>>,
    pub directory: Arc<Mutex<Directory>>,
}

impl Env {
    /// A process without a node, with an exact clock.
    pub fn without_node(world: &World, process: Process) -> Env {
        Env { world: world.clone(), process, clock: Arc::default(), directory: Arc::default() }
    }

    async fn request<T: Send + 'static>(
        &self,
        service: Service,
        effect: impl FnMut(&mut Contents) -> T + Send + 'static,
    ) -> Result<T, Uncertain> {
        self.world.request(self.process, service, effect).await
    }
}

impl Environment for Env {
    fn now(&self) -> Duration {
        self.clock.lock().boot_time(&self.world.rules, self.world.simulation.now())
    }

    fn unix_time(&self) -> Duration {
        self.clock.lock().unix_time(self.world.simulation.now())
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + Send {
        self.world.simulation.sleep(self.clock.lock().real(duration))
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

    fn directory(&self) -> &dyn DataDirectory {
        self
    }

    fn rules(&self) -> &Rules {
        &self.world.rules
    }
}

impl ObjectEnvironment for Env {
    fn objects(&self) -> &dyn PartitionObjects {
        self
    }
}
