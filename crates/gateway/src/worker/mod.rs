//! Workers: threads that serve sessions, each with its own single-threaded runtime.
//!
//! - The acceptor hands each connection to the worker with the fewest connections.
//! - A session shares no locks with other sessions on its usual path. A statement that does not
//!   have to wait is received, executed and responded to on the same thread.
//! - Between two messages a session can migrate to another worker, as the [`WorkerScaler`] decides.

mod relayed;

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::DuplexStream;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::connection_slots::ConnectionSlot;
use crate::metrics::WorkerMetrics;
use crate::registry::RegistryEntry;
use crate::relay::{self, SessionHello};
use crate::session::handoff::{Departure, MigratingSession, QueueEntry, WorkerContext};
use crate::session::{End, Session};
use crate::startup::InternalClient;
use crate::worker_scaling::WorkerScaler;
use crate::{fair, idle_time, startup};
pub(crate) use relayed::serve_relayed_here;

/// Capacity of a worker's queue. If it is full, the acceptor waits, and sessions do not migrate.
const QUEUE_CAPACITY: usize = 1024;

/// Capacity of a worker's queue of clients that are parts of the node.
const INTERNAL_CAPACITY: usize = 16;

/// The handle of a worker.
pub(crate) struct Worker {
    queue: mpsc::Sender<QueueEntry>,
    internal: mpsc::Sender<InternalClient>,
    load: Arc<AtomicUsize>,
    pub(crate) metrics: Arc<WorkerMetrics>,
}

/// Counts a connection of a worker until it is dropped.
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
    pub(crate) scaler: Arc<WorkerScaler>,
    pub(crate) threads: Vec<JoinHandle<()>>,
}

/// Starts `regular` regular workers, and the spare workers. `active` sets the number of active
/// workers; `None` scales it with the load. The workers stop when `closing` is cancelled and their
/// sessions have ended.
pub(crate) fn start(
    regular: usize,
    active: Option<Arc<AtomicUsize>>,
    startup: &Arc<startup::Context>,
    closing: &CancellationToken,
) -> io::Result<Workers> {
    let scaler = Arc::new(WorkerScaler::new(regular).with_active(active));
    let (workers, received): (Vec<_>, Vec<_>) = (0..scaler.workers()).map(|_| Worker::new()).unzip();
    let all: Arc<[Worker]> = workers.into();
    let queues: Arc<[_]> = all.iter().map(|worker| worker.queue.clone()).collect();
    let mut threads = Vec::new();
    for (number, received) in received.into_iter().enumerate() {
        let context = WorkerContext { number, scaler: scaler.clone(), queues: queues.clone() };
        let (startup, closing) = (startup.clone(), closing.clone());
        let (metrics, load) = (all[number].metrics.clone(), all[number].load.clone());
        let thread = std::thread::Builder::new().name(format!("fulmar-sql-{number}"));
        threads.push(thread.spawn(move || {
            fulmar_store::flush_on_idle();
            let mut runtime = Builder::new_current_thread();
            runtime.enable_all().on_thread_park(idle_time::on_park).on_thread_unpark(idle_time::on_unpark);
            match runtime.build_local(LocalOptions::default()) {
                Ok(runtime) => {
                    let context = Rc::new(ThreadContext {
                        post: context,
                        startup,
                        metrics,
                        load,
                        tasks: TaskTracker::new(),
                    });
                    runtime.block_on(serve(received, context, closing));
                }
                Err(error) => tracing::error!(%error, "could not start gateway worker"),
            }
        })?);
    }
    Ok(Workers { all, scaler, threads })
}

/// The receiving sides of a worker's queues.
struct Queues {
    entries: mpsc::Receiver<QueueEntry>,
    internal: mpsc::Receiver<InternalClient>,
}

/// What has arrived in one of the queues.
enum Arrival {
    Entry(QueueEntry),
    Internal(InternalClient),
}

impl Worker {
    fn new() -> (Worker, Queues) {
        let (queue, entries) = mpsc::channel(QUEUE_CAPACITY);
        let (internal, clients) = mpsc::channel(INTERNAL_CAPACITY);
        let worker = Worker { queue, internal, load: Arc::default(), metrics: Arc::default() };
        (worker, Queues { entries, internal: clients })
    }

    /// The number of connections that the worker serves.
    pub(crate) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// Returns true if the worker responds to a ping within `limit`.
    pub(crate) async fn responds_within(&self, limit: Duration) -> bool {
        let (answer, answered) = oneshot::channel();
        let ping =
            async { self.queue.send(QueueEntry::Ping(answer)).await.is_ok() && answered.await.is_ok() };
        tokio::time::timeout(limit, ping).await.unwrap_or(false)
    }

    /// Hands a stream of another node to the worker. At shutdown the stream is dropped.
    pub(crate) async fn hand_over_relayed(&self, stream: fulmar_transport::Stream) {
        let _ = self.queue.send(QueueEntry::Relayed(stream)).await;
    }

    /// Hands a client to the worker that is a part of the node. At shutdown its pipe is closed.
    pub(crate) async fn hand_over_internal(&self, client: InternalClient) {
        let _ = self.internal.send(client).await;
    }

    /// Hands an accepted connection to the worker.
    pub(crate) async fn hand_over(&self, stream: TcpStream, slot: ConnectionSlot) {
        // The socket moves from the acceptor's runtime to the worker's. At shutdown the queue is
        // closed, and the connection is dropped.
        if let Ok(stream) = stream.into_std() {
            let _ = self.queue.send(QueueEntry::Client(stream, slot)).await;
        }
    }
}

/// What a worker's thread needs to start and serve sessions.
struct ThreadContext {
    post: WorkerContext,
    startup: Arc<startup::Context>,
    metrics: Arc<WorkerMetrics>,
    load: Arc<AtomicUsize>,
    /// All tasks of connections and sessions.
    tasks: TaskTracker,
}

impl ThreadContext {
    /// Performs the startup of a connection, and serves its session.
    async fn serve_client(&self, stream: std::net::TcpStream, slot: ConnectionSlot) {
        let Ok(stream) = TcpStream::from_std(stream) else { return };
        let (startup, metrics) = (self.startup.clone(), self.metrics.clone());
        let Some(client) = startup::serve(stream, slot, startup, metrics).await else { return };
        self.metrics.connected();
        self.serve_started(client).await;
    }

    /// Serves a client that is a part of the node.
    async fn serve_internal(&self, client: InternalClient) {
        let (startup, metrics) = (self.startup.clone(), self.metrics.clone());
        if let Some(client) = Box::pin(startup::serve_internal(client, startup, metrics)).await {
            self.serve_started(client).await;
        }
    }

    async fn serve_started(&self, client: startup::Client) {
        match client {
            startup::Client::Session(session, entry) => self.serve(session, entry).await,
            startup::Client::Front(front) => front.serve().await,
        }
    }

    /// Serves a session for a front at another node.
    async fn serve_stream(&self, stream: fulmar_transport::Stream) {
        if let Some((hello, pipe)) = Box::pin(relay::accept(stream, &self.startup)).await {
            self.serve_relayed(hello, pipe).await;
        }
    }

    /// Serves a session for a front.
    async fn serve_relayed(&self, hello: SessionHello, pipe: DuplexStream) {
        let started = relay::start(hello, pipe, self.startup.clone(), self.metrics.clone());
        if let Some((session, entry)) = Box::pin(started).await {
            self.serve(session, entry).await;
        }
    }

    /// Serves a session that has migrated to this worker.
    async fn serve_migrated(&self, migrating: Box<MigratingSession>) {
        let MigratingSession { mut session, stream, entry } = *migrating;
        // If the socket cannot be registered with this runtime, the session ends as if the client
        // had disconnected.
        session.attach(TcpStream::from_std(stream).ok(), self.metrics.clone());
        self.metrics.moved();
        self.serve(session, entry).await;
    }

    /// Serves a session until it ends or migrates. What is not needed while the session is idle is
    /// boxed: an idle connection needs as much memory as this future.
    async fn serve(&self, mut session: Box<Session>, entry: RegistryEntry) {
        let leave = {
            let mut serving = pin!(session.serve(&self.post));
            poll_fn(|cx| {
                fair::slice_begins();
                serving.as_mut().poll(cx)
            })
            .await
        };
        let end = match leave {
            Departure::End(end) => end,
            Departure::Migrate(slot) => match session.detach() {
                Some(stream) => {
                    let migrating = Box::new(MigratingSession { session, stream, entry });
                    drop(slot.send(QueueEntry::Session(migrating)));
                    return;
                }
                None => End::Client,
            },
        };
        Box::pin(session.end(end)).await;
    }
}

/// The main loop of a worker: serves its sessions until the gateway closes and the last session has
/// ended.
async fn serve(mut queues: Queues, context: Rc<ThreadContext>, closing: CancellationToken) {
    let sessions = context.tasks.clone();
    let worker = context.clone();
    relayed::set(Some(Rc::new(move |hello, pipe| {
        let context = worker.clone();
        worker.tasks.spawn_local(async move { context.serve_relayed(hello, pipe).await });
    })));
    let _dispatcher = AbortOnDropHandle::new(tokio::task::spawn_local(fair::dispatch()));
    let _reads = AbortOnDropHandle::new(tokio::task::spawn_local(fulmar_store::serve_reads()));
    while let Some(arrival) = next(&mut queues, &closing).await {
        if let Arrival::Entry(QueueEntry::Ping(answer)) = arrival {
            let _ = answer.send(()); // the health check may have timed out
            continue;
        }
        let (context, load) = (context.clone(), Load::new(&context.load));
        sessions.spawn_local(async move {
            match arrival {
                Arrival::Entry(QueueEntry::Client(stream, slot)) => context.serve_client(stream, slot).await,
                Arrival::Entry(QueueEntry::Session(migrating)) => context.serve_migrated(migrating).await,
                Arrival::Entry(QueueEntry::Relayed(stream)) => context.serve_stream(stream).await,
                Arrival::Entry(QueueEntry::Ping(_)) => {} // answered above
                Arrival::Internal(client) => Box::pin(context.serve_internal(client)).await,
            }
            drop(load);
        });
    }
    sessions.close();
    sessions.wait().await;
    relayed::set(None);
}

/// What arrives next. When the gateway closes, the queues accept nothing more, but existing entries
/// are still processed, except clients that are parts of the node.
async fn next(queues: &mut Queues, closing: &CancellationToken) -> Option<Arrival> {
    let Queues { entries, internal } = queues;
    let arrival = async {
        tokio::select! {
            Some(entry) = entries.recv() => Some(Arrival::Entry(entry)),
            Some(client) = internal.recv() => Some(Arrival::Internal(client)),
            else => None,
        }
    };
    if let Some(arrival) = closing.run_until_cancelled(arrival).await {
        return arrival;
    }
    internal.close();
    while internal.try_recv().is_ok() {}
    entries.close();
    entries.recv().await.map(Arrival::Entry)
}
