//! A proxy in front of an S3 server that delays its PUT requests.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::Context;
use rand::RngExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

const BUFFER_BYTES: usize = 64 << 10;
/// The begin of a PUT request.
const PUT: &[u8] = b"PUT ";

/// A running proxy. Its connections end when it is dropped.
pub(super) struct SlowPuts {
    address: SocketAddr,
    /// One thread of its own, so that the delays do not depend on the load of the caller.
    runtime: Option<Runtime>,
}

impl SlowPuts {
    /// Starts a proxy on a free port of `host` for the server at `server` (HOST:PORT), without TLS.
    pub(super) fn start(
        host: Ipv4Addr,
        server: String,
        delay: RangeInclusive<Duration>,
    ) -> anyhow::Result<SlowPuts> {
        let listener = std::net::TcpListener::bind((host, 0)).context("cannot listen")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener)?
        };
        runtime.spawn(async move {
            loop {
                let Ok((client, _)) = listener.accept().await else { continue };
                tokio::spawn(forward(client, server.clone(), delay.clone()));
            }
        });
        Ok(SlowPuts { address, runtime: Some(runtime) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for SlowPuts {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn forward(client: TcpStream, server: String, delay: RangeInclusive<Duration>) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, mut to_client) = client.into_split();
    let (mut from_server, to_server) = server.into_split();
    // The first direction that ends closes both.
    tokio::select! {
        () = requests(from_client, to_server, delay) => {}
        _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
    }
}

/// Forwards requests. Clients do not send a request before the previous one was answered, so a PUT
/// begins with the first byte of a read.
async fn requests(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: RangeInclusive<Duration>) {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let Ok(bytes @ 1..) = from.read(&mut buffer).await else { return };
        if buffer[..bytes].starts_with(PUT) {
            let pause = rand::rng().random_range(delay.clone());
            tokio::time::sleep(pause).await;
        }
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return;
        }
    }
}
