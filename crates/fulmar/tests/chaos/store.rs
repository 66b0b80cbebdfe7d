//! A proxy between a node and its store that delays or refuses requests.

use std::net::SocketAddr;
use std::time::Duration;

use fulmar_workload::server::HUB;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const CHUNK_BYTES: usize = 64 << 10;
/// The answer to a refused request, as S3 gives it when it is overloaded.
const UNAVAILABLE: &[u8] = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// What a proxy does with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    Pass,
    /// Passes each request on after this delay.
    Delay(Duration),
    /// Answers each request with status 503. The store gets nothing of it.
    Refuse,
}

/// A proxy on the hub's address.
pub struct Proxy {
    address: SocketAddr,
    treatment: watch::Sender<Treatment>,
}

impl Proxy {
    /// Starts a proxy to the store at this address.
    pub async fn start(store: String) -> Proxy {
        let listener = TcpListener::bind((HUB, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (treatment, _) = watch::channel(Treatment::Pass);
        let proxy = Proxy { address, treatment: treatment.clone() };
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let (store, treatment) = (store.clone(), treatment.subscribe());
                tokio::spawn(async move {
                    // A connection that breaks is a fault like any other.
                    let _ = forward(client, &store, treatment).await;
                });
            }
        });
        proxy
    }

    /// The URL of the store through the proxy.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set(&self, treatment: Treatment) {
        self.treatment.send_replace(treatment);
    }
}

/// Forwards one request after the other: clients do not pipeline them.
async fn forward(
    mut client: TcpStream,
    store: &str,
    treatment: watch::Receiver<Treatment>,
) -> std::io::Result<()> {
    let mut server = TcpStream::connect(store).await?;
    let (mut request, mut response) = (vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]);
    let mut is_inside_request = false;
    loop {
        tokio::select! {
            count = client.read(&mut request) => {
                let count = count?;
                if count == 0 {
                    return Ok(());
                }
                let current = *treatment.borrow();
                match current {
                    Treatment::Delay(delay) if !is_inside_request => tokio::time::sleep(delay).await,
                    Treatment::Refuse if !is_inside_request => {
                        client.write_all(UNAVAILABLE).await?;
                        client.shutdown().await?;
                        // Closing the connection with unread bytes would drop the answer.
                        while client.read(&mut request).await? > 0 {}
                        return Ok(());
                    }
                    _ => {}
                }
                is_inside_request = true;
                server.write_all(&request[..count]).await?;
            }
            count = server.read(&mut response) => {
                let count = count?;
                if count == 0 {
                    return Ok(());
                }
                is_inside_request = false;
                client.write_all(&response[..count]).await?;
            }
        }
    }
}
