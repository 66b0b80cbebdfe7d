//! A network between machines: requests and answers, with delays, losses, late duplicates, and cuts
//! in one direction.

use std::collections::BTreeMap;
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
    /// Requests that arrive a second time, up to `max_late_delay` after they were sent.
    pub doubled_per_mille: u64,
    /// The longest delay of the second copy of a request.
    pub max_late_delay: Duration,
}

type Handler<Request, Answer> = Arc<dyn Fn(Request) -> BoxFuture<'static, Answer> + Send + Sync>;
/// Shared by the copies of a request: the first answer counts.
type Caller<Answer> = Arc<Mutex<Option<oneshot::Sender<Answer>>>>;

struct State<Request, Answer> {
    handlers: BTreeMap<Process, Handler<Request, Answer>>,
    /// Number of faults that cut the way from the first to the second machine.
    cuts: BTreeMap<(u32, u32), u32>,
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
        let state = State { handlers: BTreeMap::new(), cuts: BTreeMap::new(), faults };
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

    /// Requests to `process` are lost from now on.
    pub fn close(&self, process: Process) {
        let handler = self.state.lock().handlers.remove(&process);
        drop(handler);
    }

    /// Closes all processes. Handlers may hold handles to the network, which would otherwise keep
    /// it in memory.
    pub fn clear(&self) {
        let handlers = std::mem::take(&mut self.state.lock().handlers);
        drop(handlers);
    }

    /// Messages from machine `from` to machine `to` are lost, until [`Network::heal`] is called as
    /// often as this.
    pub fn cut(&self, from: u32, to: u32) {
        *self.state.lock().cuts.entry((from, to)).or_default() += 1;
    }

    /// Ends one cut.
    pub fn heal(&self, from: u32, to: u32) {
        if let Some(cuts) = self.state.lock().cuts.get_mut(&(from, to)) {
            *cuts = cuts.saturating_sub(1);
        }
    }

    /// Ends all cuts.
    pub fn heal_all(&self) {
        self.state.lock().cuts.clear();
    }

    /// Returns true if messages from machine `from` to machine `to` are lost.
    pub fn is_cut(&self, from: u32, to: u32) -> bool {
        self.state.lock().cuts.get(&(from, to)).is_some_and(|cuts| *cuts > 0)
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
        let caller: Caller<Answer> = Arc::new(Mutex::new(Some(sender)));
        let faults = self.state.lock().faults;
        if self.simulation.chance(faults.doubled_per_mille, 1000) {
            let late = self.simulation.delay(faults.delay, faults.max_late_delay);
            self.send(from, to, request.clone(), caller.clone(), late);
        }
        let delay = self.simulation.delay(faults.delay, faults.max_delay);
        self.send(from, to, request, caller.clone(), delay);
        self.simulation.after(timeout, move || drop(caller.lock().take()));
        receiver.await.ok()
    }

    /// Delivers one copy of a request after `delay`, unless it is lost.
    fn send(&self, from: Process, to: Process, request: Request, caller: Caller<Answer>, delay: Duration) {
        let lost = self.state.lock().faults.lost_per_mille;
        if self.simulation.chance(lost, 1000) {
            return;
        }
        let network = self.clone();
        self.simulation.after(delay, move || {
            if network.is_cut(from.machine, to.machine) {
                return;
            }
            let Some(handler) = network.state.lock().handlers.get(&to).cloned() else { return };
            let back = network.clone();
            network.simulation.spawn(to, async move {
                let answer = handler(request).await;
                back.answer(from, to, answer, caller);
            });
        });
    }

    /// Delivers the answer of `to` to a request of `from`, unless it is lost.
    fn answer(&self, from: Process, to: Process, answer: Answer, caller: Caller<Answer>) {
        let faults = self.state.lock().faults;
        if self.simulation.chance(faults.lost_per_mille, 1000) {
            return;
        }
        let network = self.clone();
        let delay = self.simulation.delay(faults.delay, faults.max_delay);
        self.simulation.after(delay, move || {
            if !network.is_cut(to.machine, from.machine)
                && let Some(caller) = caller.lock().take()
            {
                let _the_caller_has_gone = caller.send(answer);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAULTS: NetworkFaults = NetworkFaults {
        delay: Duration::from_millis(1),
        max_delay: Duration::from_millis(2),
        lost_per_mille: 0,
        doubled_per_mille: 1000,
        max_late_delay: Duration::from_millis(500),
    };

    /// The answer to one request, and how often the request was handled, with these ways cut.
    fn call(cuts: &[(u32, u32)]) -> (Option<u32>, u32) {
        let simulation = Simulation::new(1, false);
        let network: Network<u32, u32> = Network::new(&simulation, FAULTS);
        let (client, server) = (Process { machine: 1, run: 1 }, Process { machine: 2, run: 1 });
        let handled: Arc<Mutex<u32>> = Arc::default();
        let counter = handled.clone();
        network.listen(server, move |request| {
            *counter.lock() += 1;
            Box::pin(async move { request + 1 })
        });
        for (from, to) in cuts {
            network.cut(*from, *to);
        }
        let answer: Arc<Mutex<Option<u32>>> = Arc::default();
        let (result, caller) = (answer.clone(), network.clone());
        simulation.spawn(client, async move {
            let answered = caller.call(client, server, 1, Duration::from_secs(1)).await;
            *result.lock() = answered;
        });
        simulation.run(Duration::from_secs(5), || false);
        (*answer.lock(), *handled.lock())
    }

    #[test]
    fn cuts_have_a_direction_and_a_doubled_request_is_handled_twice() {
        assert_eq!(call(&[]), (Some(2), 2));
        assert_eq!(call(&[(1, 2)]), (None, 0), "the request must be lost");
        assert_eq!(call(&[(2, 1)]), (None, 2), "only the answer must be lost");
    }
}
