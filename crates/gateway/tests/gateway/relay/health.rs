//! The health check of a node while one of its worker threads is blocked.

use std::net::SocketAddr;
use std::sync::mpsc;

use fulmar_gateway::http::{self, HttpServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::cluster::TestCluster;
use crate::common::{wait_until, with_timeout};

/// The head and body of the response to a health check.
async fn health(server: &HttpServer) -> String {
    let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn is_healthy(server: &HttpServer) -> bool {
    health(server).await.starts_with("HTTP/1.1 200 ")
}

#[tokio::test(flavor = "multi_thread")]
async fn health_check_fails_while_a_worker_is_blocked() {
    let cluster = TestCluster::start(2, 2).await;
    let server = http::serve(SocketAddr::from(([127, 0, 0, 1], 0)), &cluster.gateways[&2]).await.unwrap();
    let client = cluster.client(1, "shop").await;
    client.simple_query("SELECT 1").await.unwrap();
    wait_until("the node is healthy", async || is_healthy(&server).await).await;

    let (release, released) = mpsc::channel();
    *cluster.shared.blocked_worker.lock() = Some(released);
    let running = tokio::spawn(async move { client.simple_query("SELECT 2").await.map(drop) });
    wait_until("a worker is blocked", async || cluster.shared.blocked_worker.lock().is_none()).await;
    let answer = health(&server).await;
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    assert!(answer.ends_with("\r\n\r\na worker thread does not respond\n"), "{answer}");
    assert!(!running.is_finished());

    drop(release);
    with_timeout("an answer", running).await.unwrap().unwrap();
    wait_until("the node is healthy again", async || is_healthy(&server).await).await;
    server.shutdown().await.unwrap();
}
