//! A proxy between a node and its store that delays or refuses requests.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_workload::server::Cluster;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The variable with the address of the store.
const ENDPOINT: &str = "AWS_ENDPOINT_URL";
const CHUNK_BYTES: usize = 64 << 10;
/// The answer to a refused request, as S3 gives it when it is overloaded.
const UNAVAILABLE: &[u8] = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// What a proxy does with requests.
#[allow(dead_code, reason = "not every test program uses all of it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    Pass,
    /// Passes each request on after this delay.
    Delay(Duration),
    /// Answers each request with status 503. The store gets nothing of it.
    Refuse,
}

/// A proxy.
pub struct Proxy {
    treatment: watch::Sender<Treatment>,
    refused: Arc<AtomicU64>,
}

impl Proxy {
    /// Starts a proxy on an address of this machine, to the S3 server of a cluster. Adds it to the
    /// environment of a node's next starts.
    pub async fn start(cluster: &mut Cluster, node: usize, host: Ipv4Addr) -> Proxy {
        let environment = cluster.s3().expect("an S3 server").environment();
        let (_, store) = environment.iter().find(|(name, _)| name == ENDPOINT).expect("an endpoint");
        let store = store.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (treatment, _) = watch::channel(Treatment::Pass);
        cluster.set_environment(node, &[(ENDPOINT, &format!("http://{address}"))]);
        let proxy = Proxy { treatment: treatment.clone(), refused: Arc::default() };
        let refused = proxy.refused.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let (store, treatment, refused) = (store.clone(), treatment.subscribe(), refused.clone());
                tokio::spawn(async move {
                    // A connection that breaks is a fault like any other.
                    let _ = forward(client, &store, treatment, &refused).await;
                });
            }
        });
        proxy
    }

    pub fn set(&self, treatment: Treatment) {
        self.treatment.send_replace(treatment);
    }

    /// The number of requests that were refused.
    #[allow(dead_code, reason = "not every test program uses all of it")]
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

/// Forwards one request after the other: clients do not pipeline them.
async fn forward(
    mut client: TcpStream,
    store: &str,
    treatment: watch::Receiver<Treatment>,
    refused: &AtomicU64,
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
                        refused.fetch_add(1, Ordering::Relaxed);
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
