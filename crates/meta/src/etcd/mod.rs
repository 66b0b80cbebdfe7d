//! The metadata store in etcd, shared by all nodes of a cluster.
//!
//! ```text
//!   callers ──► thread "fulmar-etcd"                              etcd members
//!                  get, scan, transact ── members ── requests ──► one KV connection each
//!                       │ waits for                  + head
//!                  position ◄── watcher ◄───────── events ─────── one watch
//!                                  └──► observers
//! ```
//!
//! - [`keys`]: the keys. All keys of a cluster begin with its name, so several clusters can share
//!   one etcd.
//! - [`members`]: connections, hedged reads, and when a request may be sent again.
//! - [`requests`]: get, paged scans at one revision, transactions.
//! - [`watcher`]: snapshots and changes for observers.
//! - [`guard`]: rejects an etcd that was restored from an old backup, or is too old.
//! - [`failure`]: whether a failed request may have been carried out.
//!
//! **The head.** Every transaction that has operations also puts the key `head`. Three mechanisms
//! depend on it:
//!
//! 1. The revision of an outcome is that of the head. An event with this revision exists, so
//!    `transact` can wait until the watch has delivered it.
//! 2. The head's version counts the transactions, so a lost event is detected.
//! 3. Every answer contains the head. A head that is older than one seen before means that etcd was
//!    restored from a backup. Changes compare it, so such an etcd is not changed.
//!
//! **Reads are linearizable.** etcd confirms with a majority that the answering member is not
//! behind. This includes a transaction without operations, which renews leases: it writes nothing,
//! so it succeeds when etcd is out of space. etcd would serve a transaction without any operation
//! from a single member, even from one that is cut off. Reading the head prevents that.
//!
//! **Failures.** A request that etcd has not received is sent to the next member, until the
//! deadline. A change that etcd may have received is not repeated: the error is
//! [`MetaError::OutcomeUnknown`]. If the watch does not deliver the revision of an outcome before
//! the deadline, the error is [`MetaError::CacheStale`], which contains the outcome.
//!
//! **The thread** has its own runtime, so requests and the watch do not wait for other tasks of the
//! node, and the store can be used from any executor.

mod failure;
mod guard;
mod keys;
mod members;
mod requests;
mod watcher;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::{Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction};
use guard::Guard;
use keys::Keys;
use members::Members;
use requests::Requests;
use watcher::{Follow, Progress, Watcher};

/// Capacity of the queue of observers that wait for their snapshot.
const QUEUE_FOLLOWS: usize = 16;

const RESTART: &str = "Restart the node. The reason is in its log.";

/// How to reach etcd.
#[derive(Clone)]
pub struct EtcdOptions {
    /// The addresses of the members, as HOST:PORT.
    pub endpoints: Vec<String>,
    /// The name of the cluster, which is part of all keys: `a-z`, `0-9`, hyphen, underscore.
    pub cluster: String,
    /// Name and password, if etcd requires authentication.
    pub user: Option<(String, String)>,
    /// Certificates, if etcd requires TLS.
    pub tls: Option<EtcdTls>,
    /// A revision that this cluster is known to have reached. An etcd with a lower one is rejected.
    pub floor: Revision,
    /// Deadline of a request. A transaction may take twice as long: once for the request, once for
    /// the notification of the observers.
    pub timeout: Duration,
}

/// The certificates of an etcd connection, in PEM format.
#[derive(Clone)]
pub struct EtcdTls {
    /// The authority that signed the certificates of the members.
    pub ca_pem: Vec<u8>,
    /// The certificate and the key of this client, if etcd requires them.
    pub identity_pem: Option<(Vec<u8>, Vec<u8>)>,
}

impl EtcdOptions {
    /// Options without authentication and TLS, with a timeout of 5 s.
    pub fn new(endpoints: Vec<String>, cluster: &str) -> Self {
        Self {
            endpoints,
            cluster: cluster.to_owned(),
            user: None,
            tls: None,
            floor: Revision(0),
            timeout: Duration::from_secs(5),
        }
    }
}

/// A metadata store in etcd.
///
/// A drop ends all requests and blocks until the thread has ended.
pub struct EtcdStore {
    shared: Arc<Shared>,
    cluster_id: u128,
    runtime: Handle,
    follows: mpsc::Sender<Follow>,
    /// Taken on drop, which ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What the tasks of the thread share.
struct Shared {
    requests: Arc<Requests>,
    progress: Arc<Progress>,
    timeout: Duration,
}

impl EtcdStore {
    /// Connects to etcd, and creates the cluster if etcd does not contain it.
    ///
    /// Errors:
    /// - [`MetaError::Unavailable`] if no majority of the members can be reached before the
    ///   deadline;
    /// - [`MetaError::PermissionDenied`], [`MetaError::Unsupported`];
    /// - [`MetaError::Damaged`] if etcd is older than `floor`;
    /// - [`MetaError::Corrupt`] if a newer version of Fulmar created the cluster.
    pub async fn open(options: EtcdOptions) -> Result<Self, MetaError> {
        let requests = Arc::new(Requests {
            keys: Keys::new(&options.cluster)?,
            members: Members::new(&options)?,
            guard: Guard::new(&options.cluster, options.floor),
        });
        let progress = Arc::new(Progress::new());
        let (follows, follow_queue) = mpsc::channel(QUEUE_FOLLOWS);
        let watcher = Watcher::new(requests.clone(), progress.clone(), follow_queue);
        let (runtime, stop, thread) = start_thread(watcher)?;
        let mut store = Self {
            shared: Arc::new(Shared { requests, progress, timeout: options.timeout }),
            cluster_id: 0,
            runtime,
            follows,
            stop: Some(stop),
            thread: Some(thread),
        };
        let opened = store.run(|shared| async move { shared.requests.open_cluster().await });
        store.cluster_id = opened.await?;
        Ok(store)
    }

    /// The random id that the cluster was given when it was created.
    pub fn cluster_id(&self) -> u128 {
        self.cluster_id
    }

    /// The newest revision that this process has seen. A caller that keeps it can pass it as
    /// [`EtcdOptions::floor`] at the next start.
    pub fn revision(&self) -> Revision {
        keys::revision(self.shared.requests.guard.floor())
    }

    /// Runs a request on the store's thread. It continues if the caller drops the returned future.
    async fn run<T, F>(&self, request: impl FnOnce(Arc<Shared>) -> F) -> Result<T, MetaError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, MetaError>> + Send + 'static,
    {
        self.runtime.spawn(request(self.shared.clone())).await.unwrap_or_else(|_| Err(stopped()))
    }
}

/// Nice value of the store's thread. The default of other threads is 0.
const NICENESS: i32 = -10;

fn start_thread(
    watcher: Watcher,
) -> Result<(Handle, oneshot::Sender<()>, std::thread::JoinHandle<()>), MetaError> {
    let failed = |error: std::io::Error| MetaError::Unavailable {
        cause: format!("could not start its thread: {error}"),
        remedy: "Raise the limits of threads and open files (ulimit -u, ulimit -n).",
    };
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let handle = runtime.handle().clone();
    let (stop, stopped) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("fulmar-etcd".to_owned())
        .spawn(move || {
            // Leases are renewed here. Without the right to do so the thread has the default priority.
            if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
                tracing::debug!(%error, "cannot raise the priority of the thread for etcd");
            }
            runtime.spawn(watcher.run());
            // Ends with an error when the sender is dropped.
            let _ = runtime.block_on(stopped);
            // Does not wait for a lookup of a host name.
            runtime.shutdown_background();
        })
        .map_err(failed)?;
    Ok((handle, stop, thread))
}

fn stopped() -> MetaError {
    MetaError::Unavailable { cause: "has stopped".to_owned(), remedy: RESTART }
}

impl Shared {
    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        let outcome = self.requests.transact(&transaction).await?;
        let revision = i64::try_from(outcome.revision().0).unwrap_or(i64::MAX);
        let mut position = self.progress.position.subscribe();
        let has_reached = |position: &Option<i64>| position.is_none_or(|position| position >= revision);
        if has_reached(&position.borrow()) {
            return Ok(outcome);
        }
        self.progress.want(revision);
        if transaction.operations.is_empty() && matches!(outcome, Outcome::Committed(_)) {
            return Ok(outcome);
        }
        match timeout(self.timeout, position.wait_for(has_reached)).await {
            Ok(Ok(_)) => Ok(outcome),
            Ok(Err(_)) => Err(stopped()),
            Err(_) => {
                let cause = format!("etcd's watch has not delivered the revision within {:?}", self.timeout);
                Err(MetaError::CacheStale { outcome, cause })
            }
        }
    }
}

#[async_trait]
impl MetadataStore for EtcdStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        let key = key.to_owned();
        self.run(|shared| async move { shared.requests.get(&key).await }).await
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        let prefix = prefix.to_owned();
        self.run(|shared| async move { shared.requests.scan(&prefix).await.map(|scan| scan.entries) }).await
    }

    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        transaction.check()?;
        let is_change = !transaction.operations.is_empty();
        let result = self.run(|shared| async move { shared.transact(transaction).await }).await;
        match result {
            Err(error) if is_change && error == stopped() => {
                Err(MetaError::OutcomeUnknown { cause: "has stopped".to_owned(), remedy: RESTART })
            }
            result => result,
        }
    }

    async fn follow(&self, observer: Arc<dyn Observer>) -> Result<(), MetaError> {
        let follows = self.follows.clone();
        self.run(|shared| async move {
            let (answer, answered) = oneshot::channel();
            let follow = async {
                follows.send(Follow { observer, answer }).await.map_err(|_| stopped())?;
                answered.await.map_err(|_| stopped())?
            };
            // The scan has its own deadline. The second one is for the wait for other snapshots.
            let deadline = shared.timeout * 2;
            let unavailable = |_| {
                let cause = format!("has delivered no snapshot within {deadline:?}");
                Err(MetaError::Unavailable { cause, remedy: "Check etcd, and retry." })
            };
            timeout(deadline, follow).await.unwrap_or_else(unavailable)
        })
        .await
    }
}

impl Drop for EtcdStore {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported by the panic handler.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore")
            .field("keys", &self.shared.requests.keys.root)
            .field("revision", &self.revision())
            .finish_non_exhaustive()
    }
}
