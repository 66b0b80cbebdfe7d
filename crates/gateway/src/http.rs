//! The HTTP server: `/metrics` for Prometheus, `/healthz` for health checks, `/console` for operators
//! ([`crate::console`]), and `/`, which lists them.
//!
//! The server listens before the node is ready ([`listen`]). Until then every request gets 503 and
//! the progress of the start.
//!
//! `/healthz` requires no authentication: load balancers have no tokens, and the response only
//! reports whether commits are accepted. The status code is that of the node as a whole (on a read
//! replica: whether it can read). If only databases with `shared` durability cannot commit, the
//! status is 200 and the text reports it.
//!
//! `/metrics` contains tenant names and requires a token ([`crate::tokens`]). The token of a tenant
//! shows only that tenant.
//!
//! Connections are limited in number ([`crate::connection_slots`]: when the limit is reached, the
//! oldest is closed, so that idle connections cannot block health checks) and in time: a client
//! that does not send a complete request head within 30 s is disconnected.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::connection_slots::{ConnectionEnd, ConnectionSlots};
use crate::console;
use crate::gateway::Gateway;
use crate::monitoring::MetricsSource;
use crate::tokens::{AuthorizationError, bearer};

/// Maximum number of connections. Beyond it, the oldest connection is closed.
const MAX_CONNECTIONS: usize = 100;
/// Timeout for receiving a request's head, including idle time before it.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The response to `/`. It requires no token, so it contains nothing about the node.
const INDEX: &str = "Fulmar node\n\n\
    /console   web console; requires a token FOR ADMIN\n\
    /healthz   200 while the node accepts commits (a replica: while it can read); no token required\n\
    /metrics   metrics in the Prometheus text format; requires a token\n\n\
    Superusers create tokens with CREATE TOKEN. SQL clients connect to the node's SQL port.\n";

/// Returns the progress of the start in a few words, such as `reading the shared log`.
pub type StartProgress = Arc<dyn Fn() -> String + Send + Sync>;

/// A running HTTP server.
pub struct HttpServer {
    local_address: SocketAddr,
    /// Set when the node is ready.
    ready: Arc<OnceLock<Router>>,
    closing: CancellationToken,
    stop: DropGuard,
    task: JoinHandle<()>,
}

/// Serves the metrics of a gateway and its engine. Port 0 selects a free port.
pub async fn serve(address: SocketAddr, gateway: &Gateway) -> io::Result<HttpServer> {
    let server = listen(address, Arc::new(|| "starting".to_owned())).await?;
    server.ready(gateway);
    Ok(server)
}

/// Listens while the node starts. Until [`HttpServer::ready`] every request gets 503 and the
/// progress. Port 0 selects a free port.
pub async fn listen(address: SocketAddr, progress: StartProgress) -> io::Result<HttpServer> {
    let listener = TcpListener::bind(address).await?;
    let local_address = listener.local_addr()?;
    let (ready, closing) = (Arc::new(OnceLock::new()), CancellationToken::new());
    let routers =
        Routers { starting: Router::new().fallback(starting).with_state(progress), ready: ready.clone() };
    let task = tokio::spawn(accept(listener, routers, closing.clone()));
    Ok(HttpServer { local_address, ready, closing: closing.clone(), stop: closing.drop_guard(), task })
}

/// The routers for new connections, before and after the node is ready.
struct Routers {
    starting: Router,
    ready: Arc<OnceLock<Router>>,
}

impl HttpServer {
    /// Serves the metrics of a gateway and its engine from now on.
    pub fn ready(&self, gateway: &Gateway) {
        let router = Router::new()
            .route("/", get(async || INDEX))
            .route("/metrics", get(metrics))
            .route("/healthz", get(health))
            .with_state(gateway.metrics())
            .merge(console::router(gateway.metrics(), self.closing.clone()));
        // Called once.
        let _ = self.ready.set(router);
    }

    /// The address on which it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_address
    }

    /// Completes the requests that have been received, then stops.
    pub async fn shutdown(self) -> io::Result<()> {
        drop(self.stop);
        self.task.await.map_err(io::Error::other)
    }
}

/// Accepts connections. After `closing`, waits until the open connections have answered their
/// requests.
async fn accept(listener: TcpListener, routers: Routers, closing: CancellationToken) {
    // Unlike logins, connections are not cancelled by `closing`: their requests are answered first.
    let (slots, not_cancelled, connections) =
        (ConnectionSlots::new(MAX_CONNECTIONS), CancellationToken::new(), TaskTracker::new());
    while let Some(accepted) = closing.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, address)) => {
                let router = routers.ready.get().unwrap_or(&routers.starting).clone();
                let end = ConnectionEnd(CancellationToken::new());
                let router = router.layer(Extension(ConnectInfo(address))).layer(Extension(end.clone()));
                let (slot, closing) = (slots.acquire(&not_cancelled).await, closing.clone());
                connections.spawn(async move {
                    let handled = slot.run(handle_connection(stream, router, HEAD_TIMEOUT, closing));
                    end.0.run_until_cancelled(handled).await
                });
            }
            Err(error) => {
                tracing::warn!(%error, "could not accept new connection");
                // The process is probably out of file descriptors, so an immediate retry would fail
                // too.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// Serves a connection until it closes or its client times out. Errors of the connection are
/// ignored.
async fn handle_connection(stream: TcpStream, router: Router, head: Duration, closing: CancellationToken) {
    let (stream, service) = (TokioIo::new(stream), TowerToHyperService::new(router));
    let mut http = http1::Builder::new();
    let mut connection =
        pin!(http.timer(TokioTimer::new()).header_read_timeout(head).serve_connection(stream, service));
    if closing.run_until_cancelled(connection.as_mut()).await.is_none() {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await; // errors of a closing connection do not matter
    }
}

/// Closes the connection, so that the next request uses the current router.
async fn starting(State(progress): State<StartProgress>) -> impl IntoResponse {
    (StatusCode::SERVICE_UNAVAILABLE, [(header::CONNECTION, "close")], format!("starting: {}\n", progress()))
}

async fn metrics(
    State(source): State<Arc<MetricsSource>>,
    ConnectInfo(address): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
) -> Response {
    match source.authorize(bearer(&headers), Some(address.ip())).await {
        Ok(scope) => {
            let kind = (header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8");
            ([kind], source.render(scope)).into_response()
        }
        Err(AuthorizationError::TooManyFailures) => {
            let text = "too many invalid tokens from this address; retry after one minute\n";
            (StatusCode::TOO_MANY_REQUESTS, text).into_response()
        }
        Err(AuthorizationError::Missing | AuthorizationError::NotAdmin) => unauthorized(
            "token required: send Authorization: Bearer TOKEN; superusers create one with CREATE TOKEN\n",
        ),
        Err(AuthorizationError::Unknown) => {
            unauthorized("token unknown or expired; superusers create one with CREATE TOKEN\n")
        }
    }
}

fn unauthorized(text: &'static str) -> Response {
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], text).into_response()
}

async fn health(State(source): State<Arc<MetricsSource>>) -> impl IntoResponse {
    if !source.is_healthy() {
        let text = match source.is_replica() {
            true => "unavailable: cannot read the primary's log, or the disk is full\n",
            false => "commits are not accepted: log writes fail, or the disk is full\n",
        };
        return (StatusCode::SERVICE_UNAVAILABLE, text);
    }
    if !source.workers_respond().await {
        return (StatusCode::SERVICE_UNAVAILABLE, "a worker thread does not respond\n");
    }
    // The status is 200, since other databases are served: a load balancer that removed the node
    // would interrupt them.
    match source.is_shared_log_healthy() {
        true => (StatusCode::OK, "ok\n"),
        false => (
            StatusCode::OK,
            "ok, but commits of shared databases are not accepted: the log in the store fails or is full\n",
        ),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn requests_during_start_get_503_and_the_progress() {
        let progress: StartProgress = Arc::new(|| "read 7 of 9 objects".to_owned());
        let server = listen(SocketAddr::from(([127, 0, 0, 1], 0)), progress).await.unwrap();
        for path in ["/healthz", "/metrics", "/"] {
            let mut client = TcpStream::connect(server.local_addr()).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
            client.write_all(request.as_bytes()).await.unwrap();
            // Reads to the end of the connection, which must not outlive the start.
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
            assert!(answer.ends_with("\r\n\r\nstarting: read 7 of 9 objects\n"), "{answer}");
        }
        server.shutdown().await.unwrap();
    }

    #[tokio::test]
    async fn incomplete_request_head_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let (not_cancelled, head) = (CancellationToken::new(), Duration::from_millis(100));
        let router = Router::new().route("/", get(|| async { "here" }));
        let served = tokio::spawn(handle_connection(stream, router, head, not_cancelled));
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTT").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        served.await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("here"), "{answer}");
    }
}
