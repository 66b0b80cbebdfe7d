//! A network between processes: requests and answers, with delays, losses, duplicates and
//! cuts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::channel::oneshot;
use futures::future::BoxFuture;
use parking_lot::Mutex;

use crate::{Process, Simulation};

/// How the network behaves. Probabilities are in 1,000.
#[derive(Clone, Copy, Debug)]
pub struct NetworkFaults {
    /// The usual delay of a message.
    pub delay: Duration,
    /// The longest delay of a message.
    pub max_delay: Duration,
    /// Messages that are lost.
    pub lost_per_mille: u64,
    /// Requests that arrive twice.
    pub doubled_per_mille: u64,
}

type Handler<Request, Answer> = Arc<dyn Fn(Request) -> BoxFuture<'static, Answer> + Send + Sync>;

struct State<Request, Answer> {
    handlers: BTreeMap<Process, Handler<Request, Answer>>,
    /// Messages from the first to the second process do not arrive.
    cuts: BTreeSet<(Process, Process)>,
    faults: NetworkFaults,
}

/// A network that carries requests and answers of the given types.
pub struct Network<Request, Answer> {
    simulation: Simulation,
    state: Arc<Mutex<State<Request, Answer>>>,
}

impl<Request, Answer> Clone for Network<Request, Answer> {
    fn clone(&self) -> Self {
        Network { simulation: self.simulation.clone(), state: self.state.clone() }
    }
}

impl<Request: Clone + Send + 'static, Answer: Send + 'static> Network<Request, Answer> {
    /// A network without processes.
    pub fn new(simulation: &Simulation, faults: NetworkFaults) -> Self {
        let state = State { handlers: BTreeMap::new(), cuts: BTreeSet::new(), faults };
        Network { simulation: simulation.clone(), state: Arc::new(Mutex::new(state)) }
    }

    /// Requests to `process` are answered by `handler`, each in a task of that process.
    pub fn listen(
        &self,
        process: Process,
        handler: impl Fn(Request) -> BoxFuture<'static, Answer> + Send + Sync + 'static,
    ) {
        self.state.lock().handlers.insert(process, Arc::new(handler));
    }

    /// Requests to `process` are refused from now on.
    pub fn close(&self, process: Process) {
        let handler = self.state.lock().handlers.remove(&process);
        drop(handler);
    }

    /// Messages from `from` to `to` are lost until [`Network::heal`].
    pub fn cut(&self, from: Process, to: Process) {
        self.state.lock().cuts.insert((from, to));
    }

    /// Ends all cuts.
    pub fn heal(&self) {
        self.state.lock().cuts.clear();
    }

    /// Returns true if messages from `from` to `to` are lost.
    pub fn is_cut(&self, from: Process, to: Process) -> bool {
        self.state.lock().cuts.contains(&(from, to))
    }

    /// Changes how the network behaves.
    pub fn set_faults(&self, faults: NetworkFaults) {
        self.state.lock().faults = faults;
    }

    /// Sends a request and waits for its answer, up to `timeout`. `None`: no answer came; the
    /// request may have been handled, or may still be.
    pub async fn call(
        &self,
        from: Process,
        to: Process,
        request: Request,
        timeout: Duration,
    ) -> Option<Answer> {
        let (sender, receiver) = oneshot::channel();
        let sender = Arc::new(Mutex::new(Some(sender)));
        let doubled = self.state.lock().faults.doubled_per_mille;
        let copies = if self.simulation.chance(doubled, 1000) { 2 } else { 1 };
        for _ in 0..copies {
            let (network, sender, request) = (self.clone(), sender.clone(), request.clone());
            self.simulation.spawn(Simulation::WORLD, async move {
                if !network.carry(from, to).await {
                    return;
                }
                let handler = network.state.lock().handlers.get(&to).cloned();
                let Some(handler) = handler else { return };
                let back = network.clone();
                network.simulation.spawn(to, async move {
                    let answer = handler(request).await;
                    let world = back.simulation.clone();
                    world.spawn(Simulation::WORLD, async move {
                        if back.carry(to, from).await
                            && let Some(sender) = sender.lock().take()
                        {
                            let _the_caller_has_gone = sender.send(answer);
                        }
                    });
                });
            });
        }
        self.simulation.within(timeout, receiver).await.ok()?.ok()
    }

    /// Waits for the delay of a message. Returns false if it is lost.
    async fn carry(&self, from: Process, to: Process) -> bool {
        let faults = self.state.lock().faults;
        let lost = self.simulation.chance(faults.lost_per_mille, 1000);
        self.simulation.sleep(self.simulation.delay(faults.delay, faults.max_delay)).await;
        !lost && !self.is_cut(from, to)
    }
}
