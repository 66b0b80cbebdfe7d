//! The listener for other nodes, and connections to them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fulmar_transport::{Connection, Dial, Error as TransportError, Identity, Stream};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::Error;

/// How long a connection and its handshake may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of connections from other nodes. A node dials each other node once.
const MAX_CONNECTIONS: usize = 1024;
/// How many connections the kernel queues.
const BACKLOG: u32 = 1024;
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

/// Dials nodes over TCP.
pub(crate) struct TcpDial {
    pub identity: Identity,
}

#[async_trait]
impl Dial for TcpDial {
    async fn dial(&self, node: u32, address: &str) -> Result<Connection, TransportError> {
        let connect = async {
            let tcp = TcpStream::connect(address).await?;
            tcp.set_nodelay(true)?;
            let (reader, writer) = tcp.into_split();
            fulmar_transport::connect(reader, writer, &self.identity, Some(node)).await
        };
        let (connection, driver) = timeout(CONNECT_TIMEOUT, connect).await.unwrap_or_else(|_| {
            Err(std::io::Error::new(std::io::ErrorKind::TimedOut, format!("no answer from {address}")).into())
        })?;
        tokio::spawn(driver.run());
        Ok(connection)
    }
}

/// Accepts connections and passes their streams to `serve`, until the listener is dropped.
pub(crate) async fn accept(
    listener: TcpListener,
    identity: Identity,
    serve: Arc<dyn Fn(Stream) + Send + Sync>,
) {
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
        let (identity, serve) = (identity.clone(), serve.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let _ = tcp.set_nodelay(true);
            let (reader, writer) = tcp.into_split();
            let accepting = fulmar_transport::accept(reader, writer, &identity);
            let (mut incoming, driver) = match timeout(CONNECT_TIMEOUT, accepting).await {
                Ok(Ok(accepted)) => accepted,
                Ok(Err(error)) => return tracing::debug!(%error, "refused a connection from another node"),
                Err(_) => return tracing::debug!("a connection from another node did not introduce itself"),
            };
            let accept = async {
                while let Some(stream) = incoming.accept().await {
                    serve(stream);
                }
            };
            tokio::join!(driver.run(), accept);
        });
    }
}

/// Returns true if nothing listens on the node's address: its process has probably ended.
pub(crate) fn is_refused(error: &TransportError) -> bool {
    matches!(error, TransportError::Lost(error) if error.kind() == std::io::ErrorKind::ConnectionRefused)
}
