//! Workers: threads with a runtime each, on which sessions live.
//!
//! The acceptor hands a connection to the worker that has the fewest. A session shares no locks with others on its way, and a statement
//! that is ready at once is answered without leaving the thread that received it. Between two messages a session may
//! move to another worker, as the [`Crew`] wants it.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::crew::Crew;
use crate::crowd::Place;
use crate::gateway::Shared;
use crate::metrics::WorkerMetrics;
use crate::registry::Entry;
use crate::session::{Leave, Session};
use crate::{fair, rest, startup};

/// What waits for a busy worker; the acceptor waits for it beyond that, and sessions stay where they are.
const WAITING: usize = 1024;

/// Who comes to a worker.
pub(crate) enum Arrival {
    /// A connection that was accepted, and its place among those that are no sessions yet.
    Client(std::net::TcpStream, Place),
    /// A session of another worker, and its socket.
    Session(Box<Traveller>),
    /// A health check; to be answered.
    Ping(oneshot::Sender<()>),
}

/// A session on its way.
pub(crate) struct Traveller {
    session: Session,
    stream: std::net::TcpStream,
    entry: Entry,
}

/// A worker, as others know it.
pub(crate) struct Worker {
    arrivals: mpsc::Sender<Arrival>,
    load: Arc<AtomicUsize>,
    pub(crate) metrics: Arc<WorkerMetrics>,
}

/// Counts a connection of a worker while it lives.
struct Load(Arc<AtomicUsize>);

impl Load {
    fn new(load: &Arc<AtomicUsize>) -> Load {
        load.fetch_add(1, Ordering::Relaxed);
        Load(load.clone())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All workers.
pub(crate) struct Workers {
    pub(crate) all: Arc<[Worker]>,
    pub(crate) crew: Arc<Crew>,
    pub(crate) threads: Vec<JoinHandle<()>>,
}

/// Starts so many regular workers, and spare ones.
pub(crate) fn start(regular: usize, shared: &Arc<Shared>) -> io::Result<Workers> {
    let crew = Arc::new(Crew::new(regular).with_active(shared.config.active_workers.clone()));
    let (workers, received): (Vec<_>, Vec<_>) = (0..crew.workers()).map(|_| Worker::new()).unzip();
    let all: Arc<[Worker]> = workers.into();
    let mut threads = Vec::new();
    for (number, arrivals) in received.into_iter().enumerate() {
        let (workers, crew, shared) = (all.clone(), crew.clone(), shared.clone());
        let thread = std::thread::Builder::new().name(format!("fulmar-sql-{number}"));
        threads.push(thread.spawn(move || {
            fulmar_store::say_when_this_thread_rests();
            let mut runtime = Builder::new_current_thread();
            runtime.enable_all().on_thread_park(rest::falls_asleep).on_thread_unpark(rest::wakes_up);
            match runtime.build_local(LocalOptions::default()) {
                Ok(runtime) => {
                    let metrics = workers[number].metrics.clone();
                    let post = Rc::new(Post { number, crew, workers, shared, metrics });
                    runtime.block_on(serve(arrivals, post));
                }
                Err(error) => tracing::error!(%error, "a worker of the gateway could not start"),
            }
        })?);
    }
    Ok(Workers { all, crew, threads })
}

impl Worker {
    fn new() -> (Worker, mpsc::Receiver<Arrival>) {
        let (arrivals, received) = mpsc::channel(WAITING);
        (Worker { arrivals, load: Arc::default(), metrics: Arc::default() }, received)
    }

    /// Connections that it serves.
    pub(crate) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// Whether it answers within a time.
    pub(crate) async fn answers_within(&self, limit: Duration) -> bool {
        let (answer, answered) = oneshot::channel();
        let asked =
            async { self.arrivals.send(Arrival::Ping(answer)).await.is_ok() && answered.await.is_ok() };
        tokio::time::timeout(limit, asked).await.unwrap_or(false)
    }

    pub(crate) async fn hand(&self, stream: TcpStream, place: Place) {
        // From the acceptor's runtime to the worker's. At a shutdown nobody takes it.
        if let Ok(stream) = stream.into_std() {
            let _ = self.arrivals.send(Arrival::Client(stream, place)).await;
        }
    }
}

/// What a worker's sessions know of it.
pub(crate) struct Post {
    pub(crate) number: usize,
    pub(crate) crew: Arc<Crew>,
    workers: Arc<[Worker]>,
    shared: Arc<Shared>,
    metrics: Arc<WorkerMetrics>,
}

impl Post {
    /// Room for a session at the worker on which it belongs, if that is another one and takes it.
    pub(crate) fn elsewhere(&self, session: i32) -> Option<mpsc::OwnedPermit<Arrival>> {
        let home = self.crew.home(session);
        if home == self.number {
            return None;
        }
        self.workers.get(home)?.arrivals.clone().try_reserve_owned().ok()
    }

    async fn welcome(&self, stream: std::net::TcpStream, place: Place) {
        let Ok(stream) = TcpStream::from_std(stream) else { return };
        let (shared, metrics) = (self.shared.clone(), self.metrics.clone());
        let serving = match startup::serve(stream, place, shared, metrics).await {
            Some((session, entry)) => self.serve(session, entry),
            None => return,
        };
        self.metrics.connected();
        serving.await;
    }

    fn take_over(&self, traveller: Box<Traveller>) -> impl Future<Output = ()> {
        let Traveller { mut session, stream, entry } = *traveller;
        // If its socket cannot be registered the session finds its client gone.
        session.arrive(TcpStream::from_std(stream).ok(), self.metrics.clone());
        self.metrics.moved();
        self.serve(session, entry)
    }

    /// Serves a session until it ends or moves.
    #[expect(clippy::manual_async_fn, reason = "an `async fn` that is given a session has room for it twice")]
    fn serve(&self, mut session: Session, entry: Entry) -> impl Future<Output = ()> {
        async move {
            let leave = {
                let mut serving = pin!(session.serve(self));
                poll_fn(|cx| {
                    fair::slice_begins();
                    serving.as_mut().poll(cx)
                })
                .await
            };
            match leave {
                Leave::Ends(end) => session.end(end).await,
                Leave::Moves(room) => match session.depart() {
                    Some(stream) => {
                        drop(room.send(Arrival::Session(Box::new(Traveller { session, stream, entry }))));
                    }
                    None => session.end(crate::session::End::Client).await,
                },
            }
        }
    }
}

/// What a worker does: serves the sessions that come to it, until the gateway closes and the last has ended.
async fn serve(mut arrivals: mpsc::Receiver<Arrival>, post: Rc<Post>) {
    let (sessions, closing) = (TaskTracker::new(), post.shared.closing.clone());
    let _dispatcher = AbortOnDropHandle::new(tokio::task::spawn_local(fair::dispatch()));
    let _reads = AbortOnDropHandle::new(tokio::task::spawn_local(fulmar_store::serve_reads()));
    while let Some(arrival) = next(&mut arrivals, &closing).await {
        if let Arrival::Ping(answer) = arrival {
            let _ = answer.send(()); // the health check may have timed out
            continue;
        }
        let (post, load) = (post.clone(), Load::new(&post.workers[post.number].load));
        sessions.spawn_local(async move {
            match arrival {
                Arrival::Client(stream, place) => post.welcome(stream, place).await,
                Arrival::Session(traveller) => post.take_over(traveller).await,
                Arrival::Ping(_) => {} // answered above
            }
            drop(load);
        });
    }
    sessions.close();
    sessions.wait().await;
}

/// The next to come. When the gateway closes nobody sets out any more; who is on the way arrives.
async fn next(arrivals: &mut mpsc::Receiver<Arrival>, closing: &CancellationToken) -> Option<Arrival> {
    if let Some(arrival) = closing.run_until_cancelled(arrivals.recv()).await {
        return arrival;
    }
    arrivals.close();
    arrivals.recv().await
}
