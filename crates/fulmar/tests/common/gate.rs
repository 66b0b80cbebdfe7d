//! A proxy between nodes and an S3 server, which delays or holds back responses.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fulmar_workload::server::Cluster;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Returns the address of an S3 server with this environment.
pub fn address(environment: &[(String, String)]) -> String {
    let (_, url) = environment.iter().find(|(name, _)| name == "AWS_ENDPOINT_URL").unwrap();
    url.trim_start_matches("http://").to_owned()
}

#[derive(Clone, Copy, PartialEq)]
pub enum State {
    /// Requests reach the store, but responses are held back.
    Closed,
    /// Responses pass with this delay.
    Open(Duration),
}

/// A proxy that delays or holds back the responses of a store.
pub struct Gate {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it does with responses.
    pub state: watch::Sender<State>,
    /// Number of request chunks received.
    pub requests: Arc<AtomicUsize>,
}

impl Gate {
    /// Starts a proxy of the server at the address `store`.
    pub async fn start(store: String, state: State) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, requests) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
        let (state, _) = watch::channel(state);
        let gate = Gate { address, state: state.clone(), requests: requests.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&store).await else { continue };
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                let requests = requests.clone();
                tokio::spawn(forward(from_client, to_server, async move || {
                    requests.fetch_add(1, Ordering::Relaxed);
                }));
                let mut state = state.subscribe();
                tokio::spawn(forward(from_server, to_client, async move || {
                    let opened = state.wait_for(|state| *state != State::Closed).await.map(|state| *state);
                    if let Ok(State::Open(delay)) = opened {
                        tokio::time::sleep(delay).await;
                    }
                }));
            }
        });
        gate
    }

    /// Starts an open proxy of the S3 server of a cluster, for one of its nodes.
    pub async fn start_for_node(cluster: &mut Cluster, node: usize) -> Gate {
        let variables = cluster.s3().unwrap().environment();
        let gate = Gate::start(address(&variables), State::Open(Duration::ZERO)).await;
        cluster.set_environment(node, &[("AWS_ENDPOINT_URL", &gate.url())]);
        gate
    }

    /// The URL of the server through the proxy.
    pub fn url(&self) -> String {
        format!("http://localhost:{}", self.address.port())
    }
}

/// Forwards each chunk after `wait`, until one side closes the connection.
async fn forward(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut wait: impl AsyncFnMut(),
) {
    let mut chunk = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from.read(&mut chunk).await {
        wait().await;
        if to.write_all(&chunk[..length]).await.is_err() {
            return;
        }
    }
}
