//! The listener for other nodes, and connections to them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use fulmar_cluster::NodeId;
use fulmar_transport::hello::{METADATA_CLIENT, VERSIONS};
use fulmar_transport::tls::{NodeStream, NodeTls};
use fulmar_transport::{Connection, Dial, Driver, Error as TransportError, Identity, Incoming, Stream};
use parking_lot::Mutex;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::Error;
use crate::owners::Owners;

/// How long a connection and its handshake may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a node that starts waits for the answers of the others. One that starts as well answers
/// later.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(1);
/// How long one attempt to open a TCP connection may take. The kernel repeats a lost packet only
/// after 1 s, and then after twice the time. The nodes of a cluster are close to each other.
const TCP_CONNECT_TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum number of connections from other nodes. A node dials each other node once.
const MAX_CONNECTIONS: usize = 1024;
/// How many connections the kernel queues.
const BACKLOG: u32 = 1024;
/// Interval between log lines for refused connections of one node.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Stands for a node that has dialed this one, in [`RefusalLog`].
const DIALING_NODE: u32 = 0;
/// Delay after a failed accept: the process may be out of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Listens for other nodes. A process that replaces this one can listen on the same address.
pub fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|error| Error::Listen { address, cause: error.to_string() })
}

/// What this node needs to connect to others, and to be connected to.
#[derive(Clone)]
pub(crate) struct Peering {
    pub identity: Identity,
    /// TLS, if the cluster uses it.
    pub tls: Option<Arc<NodeTls>>,
    /// The names of the nodes, which their certificates must contain.
    pub owners: Arc<Owners>,
    refusals: Arc<RefusalLog>,
}

impl Peering {
    pub fn new(identity: Identity, tls: Option<Arc<NodeTls>>, owners: Arc<Owners>) -> Self {
        Peering { identity, tls, owners, refusals: Arc::default() }
    }

    /// The name of a node. A node that has just joined becomes known when the metadata store has
    /// notified this node.
    async fn name(&self, node: NodeId) -> String {
        loop {
            let changed = self.owners.nodes_changed();
            if let Some(known) = self.owners.node(node) {
                return known.name;
            }
            changed.await;
        }
    }

    /// Completes when an incarnation has ended. Its machine may have lost power: nothing else would
    /// end its connections, and the sessions of its clients.
    async fn ended(&self, node: NodeId, incarnation: u64) {
        // A process without an incarnation reads the metadata before it joins.
        if incarnation == 0 {
            return std::future::pending().await;
        }
        loop {
            let changed = self.owners.nodes_changed();
            if self.owners.observed_ended(node, incarnation).is_some() {
                return;
            }
            changed.await;
        }
    }

    /// Introduces this node and the one that has dialed it to each other.
    async fn accept(&self, tcp: TcpStream) -> Result<(Incoming, NodeDriver), TransportError> {
        let stream = NodeStream::accept(tcp, self.tls.as_deref()).await?;
        let peer = stream.peer();
        let (reader, writer) = tokio::io::split(stream);
        let (incoming, driver) = fulmar_transport::accept(reader, writer, &self.identity).await?;
        // Any node of the authority may use the metadata store: it may not be a member yet.
        if self.tls.is_some() && incoming.peer().node != METADATA_CLIENT {
            peer.check_name(&self.name(NodeId(incoming.peer().node)).await)?;
        }
        Ok((incoming, driver))
    }
}

type NodeDriver = Driver<ReadHalf<NodeStream>, WriteHalf<NodeStream>>;

/// Logs refused connections, which need an operator. Nodes try again several times per second.
#[derive(Default)]
struct RefusalLog {
    /// When a refusal by or of a node was last logged. 0 is a dialing node, which is not known.
    logged: Mutex<BTreeMap<u32, Instant>>,
}

impl RefusalLog {
    fn record(&self, node: u32, error: &TransportError) {
        if !matches!(error, TransportError::Refused(_)) {
            return;
        }
        let mut logged = self.logged.lock();
        if logged.get(&node).is_none_or(|last| last.elapsed() >= REFUSAL_LOG_INTERVAL) {
            logged.insert(node, Instant::now());
            drop(logged);
            tracing::warn!(%error, "connection between nodes refused");
        }
    }
}

/// Dials nodes over TCP.
pub(crate) struct TcpDial {
    pub peering: Peering,
    /// Runs the connections.
    pub runtime: Handle,
}

#[async_trait]
impl Dial for TcpDial {
    async fn dial(&self, node: u32, address: &str) -> Result<Connection, TransportError> {
        let dialing = dial(self.peering.clone(), node, address.to_owned());
        // The runtime that opens a connection is the one that polls its socket.
        self.runtime.spawn(dialing).await.unwrap_or_else(|_| Err(TransportError::Closed))
    }
}

/// Introduces a process that is about to join the cluster to the node `name` at an address. Returns
/// who answers; `None` if there is no answer.
pub(crate) async fn introduce(
    address: &str,
    name: &str,
    cluster: u128,
    tls: Option<&NodeTls>,
) -> Result<Option<Identity>, TransportError> {
    let identity = Identity { cluster, node: METADATA_CLIENT, incarnation: 0, versions: VERSIONS };
    let connect = async {
        let tcp = timeout(TCP_CONNECT_TIMEOUT, TcpStream::connect(address)).await;
        let tcp = tcp.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))?;
        let stream = NodeStream::connect(tcp, tls, name).await?;
        let (reader, writer) = tokio::io::split(stream);
        let (connection, _) = fulmar_transport::connect(reader, writer, &identity, None).await?;
        Ok(connection.peer().clone())
    };
    match timeout(INTRODUCTION_TIMEOUT, connect).await {
        Ok(Ok(peer)) => Ok(Some(peer)),
        Ok(Err(error @ TransportError::Refused(_))) => Err(error),
        Ok(Err(_)) | Err(_) => Ok(None),
    }
}

/// Opens a connection, and runs it on the current runtime.
async fn dial(peering: Peering, node: u32, address: String) -> Result<Connection, TransportError> {
    let Peering { identity, tls, refusals, .. } = &peering;
    let connect = async {
        let tcp = connect_tcp(&address).await?;
        tcp.set_nodelay(true)?;
        let name = peering.name(NodeId(node)).await;
        let stream = NodeStream::connect(tcp, tls.as_deref(), &name).await?;
        let (reader, writer) = tokio::io::split(stream);
        fulmar_transport::connect(reader, writer, identity, Some(node)).await
    };
    let connected = timeout(CONNECT_TIMEOUT, connect).await.unwrap_or_else(|_| {
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, format!("no answer from {address}")).into())
    });
    let (connection, driver) = connected.inspect_err(|error| refusals.record(node, error))?;
    tokio::spawn(driver.run());
    Ok(connection)
}

/// Opens a TCP connection, in as many attempts as necessary.
async fn connect_tcp(address: &str) -> std::io::Result<TcpStream> {
    loop {
        if let Ok(connected) = timeout(TCP_CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            return connected;
        }
    }
}

/// Accepts connections on this runtime ([`accept`]), whichever the listener was made on.
pub(crate) fn spawn_accept(
    runtime: &Handle,
    listener: TcpListener,
    peering: Peering,
    serve: Arc<dyn Fn(u32, Stream) + Send + Sync>,
) -> Result<(), Error> {
    let failed = |error: std::io::Error| Error::Thread { cause: error.to_string() };
    let listener = listener.into_std().map_err(failed)?;
    let _entered = runtime.enter();
    let listener = TcpListener::from_std(listener).map_err(failed)?;
    runtime.spawn(accept(listener, peering, serve));
    Ok(())
}

/// Accepts connections and passes their streams to `serve`, with the node that opened them, until the
/// listener is dropped.
async fn accept(listener: TcpListener, peering: Peering, serve: Arc<dyn Fn(u32, Stream) + Send + Sync>) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(permit) = connections.clone().acquire_owned().await else { return };
        let tcp = match listener.accept().await {
            Ok((tcp, _)) => tcp,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection from another node");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        let (peering, serve) = (peering.clone(), serve.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let _ = tcp.set_nodelay(true);
            let (mut incoming, driver) = match timeout(CONNECT_TIMEOUT, peering.accept(tcp)).await {
                Ok(Ok(accepted)) => accepted,
                Ok(Err(error)) => return peering.refusals.record(DIALING_NODE, &error),
                Err(_) => return tracing::debug!("a connection from another node did not introduce itself"),
            };
            let Identity { node: peer, incarnation, .. } = *incoming.peer();
            let accept = async {
                while let Some(stream) = incoming.accept().await {
                    serve(peer, stream);
                }
            };
            tokio::select! {
                _ = async { tokio::join!(driver.run(), accept) } => {}
                () = peering.ended(NodeId(peer), incarnation) => {}
            }
        });
    }
}

/// Returns true if nothing listens on the node's address: its process has probably ended.
pub(crate) fn is_refused(error: &TransportError) -> bool {
    matches!(error, TransportError::Lost(error) if error.kind() == std::io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use fulmar_certificates::Authority;
    use fulmar_cluster::records::{encode, node_key};
    use fulmar_cluster::{NodeRecord, NodeState};
    use fulmar_meta::{Change, Observer, Revision};
    use fulmar_transport::Peers;
    use fulmar_transport::hello::VERSIONS;
    use fulmar_transport::tls::NodeTlsFiles;
    use tempfile::TempDir;

    use super::*;
    use crate::registration::member_key;

    /// Longer than any step takes.
    const DEADLINE: Duration = Duration::from_secs(60);
    const DAY: Duration = Duration::from_hours(24);

    fn add_member(owners: &Owners, name: &str, id: u32) {
        let value = format!("{{\"v\":1,\"id\":{id},\"rpc\":\"\",\"sql\":\"\"}}").into_bytes();
        owners.changed(&[Change { key: member_key(name), value: Some(value), revision: Revision(1) }]);
    }

    /// The certificate of the node `name`.
    fn tls(directory: &TempDir, authority: &Authority, name: &str) -> Arc<NodeTls> {
        let file = |kind: &str| directory.path().join(format!("{name}.{kind}"));
        let issued = authority.issue(name, &[], DAY).unwrap();
        std::fs::write(file("crt"), issued.certificate_pem).unwrap();
        std::fs::write(file("key"), issued.key_pem).unwrap();
        let files =
            NodeTlsFiles { ca: directory.path().join("ca.crt"), certificate: file("crt"), key: file("key") };
        NodeTls::load(files, name).unwrap()
    }

    /// Answers each stream with "yes" in the name of node 2. Returns its address.
    fn listen(peering: Peering) -> String {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serve = |_, mut stream: Stream| {
            tokio::spawn(async move {
                stream.receive().await.unwrap();
                stream.send(b"yes").await.unwrap();
                stream.finish();
                let _ = stream.receive().await;
            });
        };
        tokio::spawn(accept(listener, peering, Arc::new(serve)));
        address
    }

    /// Asks node 2 as the node `id` with this certificate.
    async fn ask(
        address: &str,
        id: u32,
        tls: Option<Arc<NodeTls>>,
        owners: &Arc<Owners>,
    ) -> Result<(), TransportError> {
        let peers = Peers::new(TcpDial {
            peering: Peering::new(identity(id), tls, owners.clone()),
            runtime: Handle::current(),
        });
        let answer = async { peers.connection(2, address).await?.call(b"?").await };
        let answer = timeout(DEADLINE, answer).await.expect("no answer in time")?;
        assert_eq!(answer, "yes");
        Ok(())
    }

    fn identity(node: u32) -> Identity {
        Identity { cluster: 1, node, incarnation: 1, versions: VERSIONS }
    }

    #[tokio::test]
    async fn certificate_must_be_that_of_the_node_on_both_sides() {
        let directory = tempfile::tempdir().unwrap();
        let issued = Authority::create(DAY).unwrap();
        std::fs::write(directory.path().join("ca.crt"), &issued.certificate_pem).unwrap();
        let authority = Authority::from_pem(&issued.certificate_pem, &issued.key_pem).unwrap();
        let [one, two, three] = ["n1", "n2", "n3"].map(|name| tls(&directory, &authority, name));
        let owners = Arc::new(Owners::default());
        for (name, id) in [("n1", 1), ("n2", 2), ("n3", 3)] {
            add_member(&owners, name, id);
        }
        let address = listen(Peering::new(identity(2), Some(two.clone()), owners.clone()));
        ask(&address, 1, Some(one.clone()), &owners).await.unwrap();
        ask(&address, 3, Some(three.clone()), &owners).await.unwrap();
        // Node 3 claims to be node 1. It learns of the refusal as a lost connection: the accepting
        // node has already introduced itself.
        ask(&address, 1, Some(three.clone()), &owners).await.expect_err("impersonation must be refused");
        // Node 3 answers at the address of node 2.
        let address = listen(Peering::new(identity(2), Some(three), owners.clone()));
        let error = ask(&address, 1, Some(one), &owners).await.unwrap_err().to_string();
        assert!(error.contains("node \"n2\" was rejected") && error.contains("for \"n3\""), "{error}");
        // Without TLS.
        let error = ask(&address, 1, None, &owners).await.unwrap_err().to_string();
        assert!(error.contains("the node uses TLS"), "{error}");
        let address = listen(Peering::new(identity(2), None, owners.clone()));
        ask(&address, 1, None, &owners).await.unwrap();
    }

    fn set_state(owners: &Owners, node: u32, incarnation: u64, state: NodeState) {
        let value = encode(&NodeRecord::new(incarnation, state, 1)).unwrap();
        let key = node_key(NodeId(node));
        owners.changed(&[Change { key, value: Some(value), revision: Revision(1) }]);
    }

    /// A node that has lost power closes nothing.
    #[tokio::test]
    async fn connections_of_an_ended_incarnation_are_closed() {
        let owners = Arc::new(Owners::default());
        add_member(&owners, "n1", 1);
        add_member(&owners, "n2", 2);
        set_state(&owners, 1, 1, NodeState::Alive);
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let serve = |_, mut stream: Stream| {
            tokio::spawn(async move {
                while let Ok(Some(bytes)) = stream.receive().await {
                    stream.send(&bytes).await.unwrap();
                }
            });
        };
        tokio::spawn(accept(listener, Peering::new(identity(2), None, owners.clone()), Arc::new(serve)));
        let mut streams = Vec::new();
        for incarnation in [1, 2] {
            let identity = Identity { incarnation, ..identity(1) };
            let dial =
                TcpDial { peering: Peering::new(identity, None, owners.clone()), runtime: Handle::current() };
            let connection = dial.dial(2, &address).await.unwrap();
            let mut stream = connection.open().unwrap();
            stream.send(b"?").await.unwrap();
            assert_eq!(timeout(DEADLINE, stream.receive()).await.unwrap().unwrap().unwrap(), "?");
            streams.push((connection, stream));
        }
        set_state(&owners, 1, 1, NodeState::Ended);
        let (_, ended) = &mut streams[0];
        let received = timeout(DEADLINE, ended.receive()).await.expect("the connection must be closed");
        assert!(!matches!(received, Ok(Some(_))), "{received:?}");
        let (_, next) = &mut streams[1];
        next.send(b"!").await.unwrap();
        assert_eq!(timeout(DEADLINE, next.receive()).await.unwrap().unwrap().unwrap(), "!");
    }

    /// A listener is polled by the runtime that it was made on, and a socket by the one that opened it.
    #[test]
    fn connections_are_served_while_the_callers_runtime_is_blocked() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (runtime, pulse) = (runtime.unwrap(), crate::pulse::start().unwrap());
        let owners = Arc::new(Owners::default());
        add_member(&owners, "n2", 2);
        let serve = |_, mut stream: Stream| {
            tokio::spawn(async move {
                stream.receive().await.unwrap();
                stream.send(b"yes").await.unwrap();
                stream.finish();
                let _ = stream.receive().await;
            });
        };
        let address = runtime.block_on(async {
            let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let peering = Peering::new(identity(2), None, owners.clone());
            spawn_accept(&pulse, listener, peering, Arc::new(serve)).unwrap();
            address
        });
        let (begun, has_begun) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        runtime.spawn(async move {
            begun.send(()).unwrap();
            let _ = released.recv();
        });
        has_begun.recv().unwrap();
        pulse.block_on(ask(&address, 1, None, &owners)).unwrap();
        drop(release);
    }

    #[tokio::test]
    async fn name_of_a_node_that_has_just_joined_is_awaited() {
        let owners = Arc::new(Owners::default());
        let peering = Peering::new(identity(2), None, owners.clone());
        let name = peering.name(NodeId(1));
        futures::pin_mut!(name);
        assert!(futures::poll!(&mut name).is_pending());
        add_member(&owners, "n3", 3);
        assert!(futures::poll!(&mut name).is_pending());
        add_member(&owners, "n1", 1);
        assert_eq!(timeout(DEADLINE, name).await.unwrap(), "n1");
    }
}
