//! The metadata store of another node: the contract of the trait, and lost connections.

#[path = "../../meta/tests/conformance/suite.rs"]
mod suite;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fulmar_meta::{
    Change, Embedded, Entry, MetaError, MetadataStore, Observer, Outcome, Revision, Transaction,
};
use fulmar_node::metadata::{RemoteOptions, RemoteStore, server};
use fulmar_transport::Identity;
use fulmar_transport::hello::VERSIONS;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;

/// A deadline that only a fault exceeds.
const PATIENCE: Duration = Duration::from_secs(120);

async fn commit(store: &dyn MetadataStore, transaction: Transaction) -> Revision {
    match store.transact(transaction).await.unwrap() {
        Outcome::Committed(revision) => revision,
        Outcome::Conflict(revision) => panic!("conflict at {revision:?}"),
    }
}

/// An embedded store, and the process that serves it.
struct Server {
    store: Arc<dyn MetadataStore>,
    address: SocketAddr,
    connections: JoinSet<()>,
    _directory: TempDir,
}

impl Server {
    async fn start() -> Server {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn MetadataStore> =
            Arc::new(Embedded::open(&directory.path().join("meta.db")).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = Server { store, address, connections: JoinSet::new(), _directory: directory };
        server.serve(listener, 7);
        server
    }

    /// Serves the store as node 1 of a cluster.
    fn serve(&mut self, listener: TcpListener, cluster: u128) {
        let store = self.store.clone();
        self.connections.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                connections.spawn(serve_connection(store.clone(), tcp, cluster));
            }
        });
    }

    /// Closes the listener and all connections.
    async fn stop(&mut self) {
        self.connections.shutdown().await;
    }

    /// Listens at the same address again.
    fn listen(&self) -> TcpListener {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(self.address).unwrap();
        socket.listen(16).unwrap()
    }

    /// A client whose requests have this deadline. A busy machine may exceed a short one.
    async fn client(&self, timeout: Duration) -> Arc<RemoteStore> {
        let begin = Instant::now();
        loop {
            let options = RemoteOptions { address: self.address, name: String::new(), tls: None, timeout };
            match RemoteStore::open(options).await {
                Ok(store) => return Arc::new(store),
                Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
            }
        }
    }
}

async fn serve_connection(store: Arc<dyn MetadataStore>, tcp: tokio::net::TcpStream, cluster: u128) {
    let identity = Identity { cluster, node: 1, incarnation: 1, versions: VERSIONS };
    let (reader, writer) = tokio::io::split(tcp);
    let Ok((mut incoming, driver)) = fulmar_transport::accept(reader, writer, &identity).await else {
        return;
    };
    let mut streams = JoinSet::new();
    let accept = async {
        while let Some(mut stream) = incoming.accept().await {
            let store = store.clone();
            streams.spawn(async move {
                let opening = stream.receive().await.unwrap().unwrap();
                assert_eq!(opening, r#"{"kind":"metadata"}"#);
                server::serve(store, stream).await;
            });
        }
    };
    tokio::join!(driver.run(), accept);
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_store_conforms() {
    let server = Server::start().await;
    let stores: [Arc<dyn MetadataStore>; 3] =
        [server.client(PATIENCE).await, server.client(PATIENCE).await, server.store.clone()];
    suite::conforms(&stores).await;
}

/// The keys that exist, as notified.
#[derive(Default)]
struct Keys(Mutex<Vec<String>>);

impl Observer for Keys {
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError> {
        *self.0.lock() = entries.into_iter().map(|entry| entry.key).collect();
        Ok(())
    }

    fn changed(&self, changes: &[Change]) {
        let mut keys = self.0.lock();
        for change in changes {
            keys.retain(|key| *key != change.key);
            keys.extend(change.value.is_some().then(|| change.key.clone()));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_fail_while_the_node_is_gone_and_continue_afterwards() {
    let mut server = Server::start().await;
    let (store, impatient) = (server.client(PATIENCE).await, server.client(Duration::from_secs(2)).await);
    let keys = Arc::new(Keys::default());
    store.follow(keys.clone()).await.unwrap();
    commit(&*store, Transaction::new().put("a", "1")).await;
    assert_eq!(*keys.0.lock(), ["a"]);
    server.stop().await;
    let read = impatient.get("a").await.unwrap_err();
    let changed = impatient.transact(Transaction::new().put("b", "1")).await.unwrap_err();
    let renewed = impatient.transact(Transaction::new().absent("b")).await.unwrap_err();
    for error in [read, changed, renewed] {
        assert!(matches!(error, MetaError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains("does not answer") && error.remedy().contains("--meta embedded"));
    }
    // What changes in the meantime is part of the next snapshot.
    commit(&*server.store, Transaction::new().put("c", "1").delete("a")).await;
    let listener = server.listen();
    server.serve(listener, 7);
    let begin = Instant::now();
    while let Err(error) = impatient.transact(Transaction::new().put("d", "1")).await {
        assert!(begin.elapsed() < PATIENCE, "{error}");
    }
    commit(&*store, Transaction::new().put("e", "1")).await;
    assert_eq!(*keys.0.lock(), ["c", "d", "e"]);
    // A node of another cluster at the same address is refused.
    server.stop().await;
    let listener = server.listen();
    server.serve(listener, 8);
    let begin = Instant::now();
    loop {
        let error = impatient.get("c").await.unwrap_err().to_string();
        if error.contains("belongs to cluster") {
            break;
        }
        assert!(error.contains("no connection within") && begin.elapsed() < PATIENCE, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_node_is_an_error_within_the_deadline() {
    let mut server = Server::start().await;
    let store = server.client(Duration::from_secs(1)).await;
    server.stop().await;
    // Connections are established by the kernel, and nothing answers.
    let _silent = server.listen();
    let error = tokio::time::timeout(PATIENCE, store.get("a")).await.unwrap().unwrap_err();
    assert!(matches!(error, MetaError::Unavailable { .. }), "{error:?}");
}
