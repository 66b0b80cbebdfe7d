//! A TCP proxy that injects faults between the store and an etcd member.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the proxy does with connections and their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Forwards everything.
    None,
    /// Delays each piece of data by a random time up to this one.
    Delay(Duration),
    /// Forwards nothing. Connections stay open, and continue after the fault.
    Hang,
    /// Forwards requests, and discards answers. Connections are closed after the fault.
    LoseAnswers,
    /// Forwards requests and the answers to HTTP/2 pings, and discards all other answers: the
    /// connection seems to be alive. Connections are closed after the fault.
    LoseData,
    /// Closes all connections, and refuses new ones.
    Cut,
}

/// The length of an HTTP/2 frame of type PING.
const PING_BYTES: usize = 17;

#[derive(Clone, Copy)]
struct State {
    fault: Fault,
    /// Connections with another generation are closed.
    generation: u64,
    /// Connections with another number forward nothing, and stay open.
    silenced: u64,
}

/// A running proxy.
pub struct Proxy {
    endpoint: String,
    state: Arc<watch::Sender<State>>,
    listener: JoinHandle<()>,
}

impl Proxy {
    pub async fn start(target: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let state = Arc::new(watch::Sender::new(State { fault: Fault::None, generation: 0, silenced: 0 }));
        let listener = tokio::spawn(accept(listener, target.to_owned(), state.clone()));
        Proxy { endpoint, state, listener }
    }

    /// The address, as HOST:PORT.
    pub fn endpoint(&self) -> String {
        self.endpoint.clone()
    }

    pub fn set(&self, fault: Fault) {
        self.state.send_modify(|state| {
            if fault == Fault::Cut || matches!(state.fault, Fault::LoseAnswers | Fault::LoseData) {
                state.generation += 1;
            }
            state.fault = fault;
        });
    }

    /// Closes all connections. New ones are accepted.
    pub fn cut_once(&self) {
        self.state.send_modify(|state| state.generation += 1);
    }

    /// All connections stay open and forward nothing any more. New ones are forwarded.
    pub fn silence_once(&self) {
        self.state.send_modify(|state| state.silenced += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

async fn accept(listener: TcpListener, target: String, state: Arc<watch::Sender<State>>) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        let state = state.subscribe();
        // Read together: a connection that is accepted before a cut does not survive it.
        let generation = {
            let current = state.borrow();
            if current.fault == Fault::Cut {
                continue;
            }
            current.generation
        };
        let target = target.clone();
        tokio::spawn(async move {
            let Ok(server) = TcpStream::connect(&target).await else { return };
            let (client_reads, client_writes) = client.into_split();
            let (server_reads, server_writes) = server.into_split();
            // The first direction that ends closes both.
            tokio::select! {
                () = forward(client_reads, server_writes, state.clone(), true) => {}
                () = forward(server_reads, client_writes, state.clone(), false) => {}
                () = closed(state.clone(), generation) => {}
            }
        });
    }
}

async fn closed(mut state: watch::Receiver<State>, generation: u64) {
    // Fails when the proxy is dropped.
    let _ = state.wait_for(|state| state.generation != generation).await;
}

async fn forward(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut state: watch::Receiver<State>,
    are_requests: bool,
) {
    let State { generation, silenced, .. } = *state.borrow();
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let Ok(bytes @ 1..) = from.read(&mut buffer).await else { return };
        let forwards = |state: &State| state.fault != Fault::Hang && state.silenced == silenced;
        if state.wait_for(forwards).await.is_err() {
            return;
        }
        let current = *state.borrow();
        // What arrives after the cut must not pass, even if the connection is closed a moment later.
        if current.generation != generation {
            return;
        }
        match current.fault {
            Fault::Delay(max) => {
                let delay = max.mul_f64(rand::rng().random());
                tokio::time::sleep(delay).await;
            }
            Fault::LoseAnswers if !are_requests => continue,
            Fault::LoseData if !are_requests && bytes > PING_BYTES => continue,
            Fault::LoseAnswers | Fault::LoseData | Fault::None | Fault::Hang | Fault::Cut => {}
        }
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return;
        }
    }
}
