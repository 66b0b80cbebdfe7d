//! The metadata store of another node.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use fulmar_meta::{Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction};
use fulmar_transport::hello::{METADATA_CLIENT, VERSIONS};
use fulmar_transport::tls::{NodeStream, NodeTls};
use fulmar_transport::{Connection, Error as TransportError, Identity, Stream};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::wire::{self, Answer, MAX_MESSAGE_BYTES, Request};
use crate::messages::{Opening, decode, encode};

/// How long a connection and its handshake may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before another connection is opened.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// How long the first connection may take: the node may be starting as well.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

const REMEDY: &str = "Start the node that runs with --meta embedded, or check the network. Work continues \
                      when it answers.";

/// How to reach the node with the metadata store.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Where it listens for other nodes.
    pub address: SocketAddr,
    /// Its name, which its certificate must contain. Required with TLS.
    pub name: String,
    /// TLS for connections between nodes.
    pub tls: Option<Arc<NodeTls>>,
    /// Deadline of a request. A transaction may take twice as long: once for the request, once for
    /// the notification of the observers.
    pub timeout: Duration,
}

/// A metadata store in another node of the cluster.
pub struct RemoteStore {
    shared: Arc<Shared>,
    runtime: Handle,
}

struct Shared {
    options: RemoteOptions,
    connection: tokio::sync::Mutex<Option<Connection>>,
    /// The cluster of the node, once known. Another one is refused.
    cluster: Mutex<u128>,
    followers: Mutex<Vec<Weak<Follower>>>,
}

/// The position of an observer.
struct Follower {
    position: watch::Sender<u64>,
}

/// Why a request has no result.
enum Failure {
    /// It was not sent.
    NotSent(String),
    /// It may have been received.
    Lost(String),
    /// The store has answered with an error.
    Answered(MetaError),
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        Failure::Lost(error.to_string())
    }
}

impl RemoteStore {
    /// Connects to the node. Must be called in a tokio runtime, which runs all requests.
    ///
    /// Errors: [`MetaError::Unavailable`] if it does not answer within 30 s.
    pub async fn open(options: RemoteOptions) -> Result<RemoteStore, MetaError> {
        let shared = Arc::new(Shared {
            options,
            connection: tokio::sync::Mutex::default(),
            cluster: Mutex::default(),
            followers: Mutex::default(),
        });
        let deadline = Instant::now() + OPEN_TIMEOUT;
        shared.read(deadline, || Request::Get { key: String::new() }).await?;
        Ok(RemoteStore { shared, runtime: Handle::current() })
    }

    /// Runs a request on the store's runtime. It continues if the caller drops the returned future.
    async fn run<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T, MetaError>> + Send + 'static,
    ) -> Result<T, MetaError> {
        let stopped = |_| Err(MetaError::OutcomeUnknown { cause: "has stopped".to_owned(), remedy: REMEDY });
        self.runtime.spawn(request).await.unwrap_or_else(stopped)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.get_mut() {
            connection.close();
        }
    }
}

impl Shared {
    fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }

    fn unavailable(&self, cause: &str) -> MetaError {
        let RemoteOptions { address, .. } = self.options;
        MetaError::Unavailable { cause: format!("at {address} does not answer: {cause}"), remedy: REMEDY }
    }

    /// The connection, opened if there is none.
    async fn connect(&self) -> Result<Connection, TransportError> {
        let mut connection = self.connection.lock().await;
        if let Some(open) = connection.as_ref().filter(|open| open.ended().is_none()) {
            return Ok(open.clone());
        }
        let RemoteOptions { address, name, tls, .. } = &self.options;
        let cluster = *self.cluster.lock();
        let identity = Identity { cluster, node: METADATA_CLIENT, incarnation: 0, versions: VERSIONS };
        let dial = async {
            let tcp = TcpStream::connect(address).await?;
            tcp.set_nodelay(true)?;
            let stream = NodeStream::connect(tcp, tls.as_deref(), name).await?;
            let (reader, writer) = tokio::io::split(stream);
            fulmar_transport::connect(reader, writer, &identity, None).await
        };
        let timed_out = || TransportError::Refused(format!("no connection within {CONNECT_TIMEOUT:?}"));
        let dialed = timeout(CONNECT_TIMEOUT, dial).await.unwrap_or_else(|_| Err(timed_out()));
        let (dialed, driver) = dialed?;
        *self.cluster.lock() = dialed.peer().cluster;
        tokio::spawn(driver.run());
        Ok(connection.insert(dialed).clone())
    }

    /// Closes a connection on which a request got no answer in time. Observers get new snapshots.
    async fn disconnect(&self) {
        if let Some(connection) = self.connection.lock().await.take() {
            connection.close();
        }
    }

    /// Sends a request. A deadline that passes while there is no connection is not a lost request.
    async fn ask(&self, deadline: Instant, request: &Request) -> Result<Stream, Failure> {
        let mut stream = match timeout_at(deadline, self.open()).await {
            Ok(opened) => opened.map_err(|error| Failure::NotSent(error.to_string()))?,
            Err(_) => {
                return Err(Failure::NotSent(format!("no connection within {:?}", self.options.timeout)));
            }
        };
        stream.send(&encode(request)).await?;
        Ok(stream)
    }

    /// Opens a stream for a request.
    async fn open(&self) -> Result<Stream, TransportError> {
        let mut stream = self.connect().await?.open()?;
        stream.set_max_message_bytes(MAX_MESSAGE_BYTES);
        stream.send(&encode(&Opening::Metadata)).await?;
        Ok(stream)
    }

    /// Runs a request that can be repeated, and repeats it until the deadline.
    async fn read(&self, deadline: Instant, request: impl Fn() -> Request) -> Result<Vec<Entry>, MetaError> {
        let mut cause = format!("no answer within {:?}", self.options.timeout);
        loop {
            let attempt = async {
                let mut stream = self.ask(deadline, &request()).await?;
                entries(&mut stream).await.map(|(entries, _)| entries)
            };
            match timeout_at(deadline, attempt).await {
                Ok(Ok(entries)) => return Ok(entries),
                Ok(Err(Failure::Answered(error))) => return Err(error),
                Ok(Err(Failure::NotSent(error) | Failure::Lost(error))) => cause = error,
                Err(_) => {
                    self.disconnect().await;
                    return Err(self.unavailable(&cause));
                }
            }
            if timeout_at(deadline, sleep(RECONNECT_DELAY)).await.is_err() {
                return Err(self.unavailable(&cause));
            }
        }
    }

    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        let deadline = self.deadline();
        let is_read = transaction.operations.is_empty();
        let request = wire::request(transaction);
        let outcome = loop {
            let attempt = async {
                let mut stream = self.ask(deadline, &request).await?;
                match receive(&mut stream).await? {
                    Answer::Committed { revision } => Ok(Outcome::Committed(Revision(revision))),
                    Answer::Conflict { revision } => Ok(Outcome::Conflict(Revision(revision))),
                    _ => Err(Failure::Lost("unexpected answer".to_owned())),
                }
            };
            let failure = match timeout_at(deadline, attempt).await {
                Ok(Ok(outcome)) => break outcome,
                Ok(Err(failure)) => failure,
                Err(_) => {
                    self.disconnect().await;
                    Failure::Lost(format!("no answer within {:?}", self.options.timeout))
                }
            };
            match failure {
                Failure::Answered(error) => return Err(error),
                Failure::Lost(cause) if !is_read => {
                    let cause = format!("at {} did not answer: {cause}", self.options.address);
                    return Err(MetaError::OutcomeUnknown { cause, remedy: REMEDY });
                }
                Failure::Lost(cause) | Failure::NotSent(cause) => {
                    if timeout_at(deadline, sleep(RECONNECT_DELAY)).await.is_err() {
                        return Err(self.unavailable(&cause));
                    }
                }
            }
        };
        if is_read && matches!(outcome, Outcome::Committed(_)) {
            return Ok(outcome);
        }
        self.wait_for_followers(outcome).await
    }

    /// Waits until all observers have been notified of all changes up to the outcome.
    async fn wait_for_followers(&self, outcome: Outcome) -> Result<Outcome, MetaError> {
        let deadline = self.deadline();
        let followers: Vec<Arc<Follower>> = {
            let mut followers = self.followers.lock();
            followers.retain(|follower| follower.strong_count() > 0);
            followers.iter().filter_map(Weak::upgrade).collect()
        };
        for follower in followers {
            let mut position = follower.position.subscribe();
            // The task holds the other reference: if its observer is dropped, the position ends.
            drop(follower);
            let reached = position.wait_for(|position| *position >= outcome.revision().0);
            if timeout_at(deadline, reached).await.is_err() {
                let timeout = self.options.timeout;
                let cause = format!("no notification of the revision within {timeout:?}");
                return Err(MetaError::CacheStale { outcome, cause });
            }
        }
        Ok(outcome)
    }
}

/// Receives an answer that is not an error.
async fn receive(stream: &mut Stream) -> Result<Answer, Failure> {
    let message = stream.receive().await?.ok_or_else(|| Failure::Lost("the request got no answer".into()))?;
    match decode::<Answer>(&message).map_err(Failure::Lost)? {
        Answer::Error { kind, cause } => Err(Failure::Answered(wire::error(kind, cause))),
        answer => Ok(answer),
    }
}

/// Receives entries up to their end, and the revision.
async fn entries(stream: &mut Stream) -> Result<(Vec<Entry>, u64), Failure> {
    let mut entries = Vec::new();
    loop {
        match receive(stream).await? {
            Answer::Entries(part) => entries.extend(part.into_iter().map(Entry::from)),
            Answer::End { revision } => return Ok((entries, revision)),
            _ => return Err(Failure::Lost("unexpected answer".to_owned())),
        }
    }
}

/// Why an observer's stream has ended.
enum Ended {
    /// The store or the observer is gone, or has refused the first snapshot.
    Forever,
    /// The connection was lost.
    Lost,
}

/// Reports whether an observer has accepted its first snapshot.
type FirstAnswer = oneshot::Sender<Result<(), MetaError>>;

/// Notifies one observer, until it or the store is dropped.
struct Following {
    shared: Weak<Shared>,
    observer: Weak<dyn Observer>,
    follower: Arc<Follower>,
    /// The caller that waits for the first snapshot, and the observer, which it holds until then.
    first: Option<(FirstAnswer, Arc<dyn Observer>)>,
}

impl Following {
    async fn run(mut self) {
        while let Ended::Lost = self.follow().await {
            sleep(RECONNECT_DELAY).await;
        }
    }

    /// Follows the store on one stream.
    async fn follow(&mut self) -> Ended {
        let Some(shared) = self.shared.upgrade() else { return Ended::Forever };
        if self.first.as_ref().is_some_and(|(answer, _)| answer.is_closed()) {
            return Ended::Forever;
        }
        let deadline = shared.deadline();
        let begin = async {
            let mut stream = shared.ask(deadline, &Request::Follow).await?;
            entries(&mut stream).await.map(|(entries, revision)| (stream, entries, revision))
        };
        let begun = timeout_at(deadline, begin).await;
        let Ok(Ok((mut stream, entries, revision))) = begun else { return Ended::Lost };
        let Some(observer) = self.observer.upgrade() else { return Ended::Forever };
        let accepted = observer.snapshot(entries);
        match (self.first.take(), accepted) {
            (Some((answer, _)), Ok(())) => {
                self.follower.position.send_replace(revision);
                shared.followers.lock().push(Arc::downgrade(&self.follower));
                let _ = answer.send(Ok(()));
            }
            (Some((answer, _)), Err(error)) => {
                let _ = answer.send(Err(error));
                return Ended::Forever;
            }
            (None, Ok(())) => drop(self.follower.position.send_replace(revision)),
            (None, Err(_)) => return Ended::Lost,
        }
        drop((observer, shared));
        loop {
            let Ok(Answer::Changes { revision, changes }) = receive(&mut stream).await else {
                return Ended::Lost;
            };
            let Some(observer) = self.observer.upgrade() else { return Ended::Forever };
            observer.changed(&wire::changes(changes, revision));
            self.follower.position.send_replace(revision);
        }
    }
}

#[async_trait]
impl MetadataStore for RemoteStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, MetaError> {
        let (shared, key) = (self.shared.clone(), key.to_owned());
        let get = async move {
            let found = shared.read(shared.deadline(), || Request::Get { key: key.clone() }).await?;
            Ok(found.into_iter().next())
        };
        self.run(get).await
    }

    async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, MetaError> {
        let (shared, prefix) = (self.shared.clone(), prefix.to_owned());
        let scan =
            async move { shared.read(shared.deadline(), || Request::Scan { prefix: prefix.clone() }).await };
        self.run(scan).await
    }

    async fn transact(&self, transaction: Transaction) -> Result<Outcome, MetaError> {
        transaction.check()?;
        let shared = self.shared.clone();
        self.run(async move { shared.transact(transaction).await }).await
    }

    async fn follow(&self, observer: Arc<dyn Observer>) -> Result<(), MetaError> {
        let (answer, answered) = oneshot::channel();
        let following = Following {
            shared: Arc::downgrade(&self.shared),
            observer: Arc::downgrade(&observer),
            follower: Arc::new(Follower { position: watch::Sender::new(0) }),
            first: Some((answer, observer)),
        };
        let shared = self.shared.clone();
        self.run(async move {
            tokio::spawn(following.run());
            let deadline = shared.options.timeout * 2;
            match timeout(deadline, answered).await {
                Ok(Ok(accepted)) => accepted,
                Ok(Err(_)) | Err(_) => Err(shared.unavailable(&format!("no snapshot within {deadline:?}"))),
            }
        })
        .await
    }
}
