//! HTTP: `/metrics` for Prometheus, `/healthz` for whoever watches.
//!
//! The server listens before the node is ready ([`listen`]). Until then every request gets 503 and the progress of the start.
//!
//! Health is told to everybody: load balancers have no tokens, and it says no more than whether commits are accepted. Its code is
//! that of the node as a whole (of one that reads beside another: whether it can); that only databases which are `shared` cannot commit is in its text.
//! Metrics have the names of tenants: they need a token ([`crate::tokens`]), and that of a tenant shows that tenant only.
//!
//! Who connects is bounded in number ([`crate::crowd`]: the oldest make room, so that who holds connections open keeps nobody
//! from seeing whether the node is well) and in time: who does not send a request's head for half a minute is closed.

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

use crate::crowd::Crowd;
use crate::gateway::{Gateway, MetricsSource};
use crate::tokens::Refused;

/// Connections at once; then the oldest make room.
const CONNECTIONS: usize = 100;
/// How long a request's head may take, and silence before it.
const HEAD: Duration = Duration::from_secs(30);

/// Returns the progress of a start in a few words, such as `reading the shared log`.
pub type StartProgress = Arc<dyn Fn() -> String + Send + Sync>;

/// A running HTTP server.
pub struct HttpServer {
    local_address: SocketAddr,
    /// Set when the node is ready.
    ready: Arc<OnceLock<Router>>,
    stop: DropGuard,
    task: JoinHandle<()>,
}

/// Serves the figures of a gateway and its engine. Port 0 takes a free one.
pub async fn serve(address: SocketAddr, gateway: &Gateway) -> io::Result<HttpServer> {
    let server = listen(address, Arc::new(|| "starting".to_owned())).await?;
    server.ready(gateway);
    Ok(server)
}

/// Listens while the node starts. Until [`HttpServer::ready`] every request gets 503 and the progress. Port 0 takes a free one.
pub async fn listen(address: SocketAddr, progress: StartProgress) -> io::Result<HttpServer> {
    let listener = TcpListener::bind(address).await?;
    let local_address = listener.local_addr()?;
    let (ready, closing) = (Arc::new(OnceLock::new()), CancellationToken::new());
    let routers =
        Routers { starting: Router::new().fallback(starting).with_state(progress), ready: ready.clone() };
    let task = tokio::spawn(accept(listener, routers, closing.clone()));
    Ok(HttpServer { local_address, ready, stop: closing.drop_guard(), task })
}

/// The router for new connections, before and after the node is ready.
struct Routers {
    starting: Router,
    ready: Arc<OnceLock<Router>>,
}

impl HttpServer {
    /// Serves the figures of a gateway and its engine from now on.
    pub fn ready(&self, gateway: &Gateway) {
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(health))
            .with_state(gateway.metrics());
        // It is called once.
        let _ = self.ready.set(router);
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_address
    }

    /// Answers what has been asked, then stops.
    pub async fn shutdown(self) -> io::Result<()> {
        drop(self.stop);
        self.task.await.map_err(io::Error::other)
    }
}

/// Serves who comes; when the server is to stop, those who are there to the end of what they have asked.
async fn accept(listener: TcpListener, routers: Routers, closing: CancellationToken) {
    // Not ended by `closing`, as logins are: what has been asked is answered.
    let (crowd, never, connections) = (Crowd::new(CONNECTIONS), CancellationToken::new(), TaskTracker::new());
    while let Some(accepted) = closing.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, address)) => {
                let router = routers.ready.get().unwrap_or(&routers.starting).clone();
                let router = router.layer(Extension(ConnectInfo(address)));
                let (place, closing) = (crowd.enter(&never).await, closing.clone());
                connections.spawn(async move { place.stay(converse(stream, router, HEAD, closing)).await });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                // Out of file descriptors, most likely: it would fail again at once.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

/// Serves a connection, until its client is silent for too long. How else it ends is the client's business.
async fn converse(stream: TcpStream, router: Router, head: Duration, closing: CancellationToken) {
    let (stream, service) = (TokioIo::new(stream), TowerToHyperService::new(router));
    let mut http = http1::Builder::new();
    let mut connection =
        pin!(http.timer(TokioTimer::new()).header_read_timeout(head).serve_connection(stream, service));
    if closing.run_until_cancelled(connection.as_mut()).await.is_none() {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await; // its end is what counts
    }
}

/// Closes the connection, so that the next request is answered by the router of that time.
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
        Err(Refused::Crowded) => {
            let text = "too many unknown tokens have come from this address lately; try again in a minute\n";
            (StatusCode::TOO_MANY_REQUESTS, text).into_response()
        }
        Err(Refused::Missing) => unauthorized(
            "send a token: Authorization: Bearer ...; a superuser makes one: CREATE TOKEN name\n",
        ),
        Err(Refused::Unknown) => {
            unauthorized("the token is unknown, or has expired; a superuser makes one: CREATE TOKEN name\n")
        }
    }
}

fn unauthorized(text: &'static str) -> Response {
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], text).into_response()
}

/// The token that a client sends, if it sends one.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, secret) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(secret.trim())
}

async fn health(State(source): State<Arc<MetricsSource>>) -> impl IntoResponse {
    if !source.is_healthy() {
        let text = match source.reads_beside() {
            true => "the log of the node that owns the store cannot be read, or the disk is full\n",
            false => "commits are not accepted: the log is failing, or the disk is full\n",
        };
        return (StatusCode::SERVICE_UNAVAILABLE, text);
    }
    if !source.workers_answer().await {
        return (StatusCode::SERVICE_UNAVAILABLE, "a worker thread does not respond\n");
    }
    // It serves all others: a balancer that took it away would take those away too.
    match source.is_shared_log_healthy() {
        true => (StatusCode::OK, "ok\n"),
        false => (
            StatusCode::OK,
            "ok, but commits of shared databases are not accepted: the log in the store is failing, or full\n",
        ),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn requests_during_a_start_get_503_and_its_progress() {
        let progress: StartProgress = Arc::new(|| "read 7 of 9 objects".to_owned());
        let server = listen(SocketAddr::from(([127, 0, 0, 1], 0)), progress).await.unwrap();
        for path in ["/healthz", "/metrics", "/"] {
            let mut client = TcpStream::connect(server.local_addr()).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
            client.write_all(request.as_bytes()).await.unwrap();
            // To the end of the connection, which must not outlive the start.
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
            assert!(answer.ends_with("\r\n\r\nstarting: read 7 of 9 objects\n"), "{answer}");
        }
        server.shutdown().await.unwrap();
    }

    #[tokio::test]
    async fn who_does_not_come_to_the_point_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let (never, head) = (CancellationToken::new(), Duration::from_millis(100));
        let router = Router::new().route("/", get(|| async { "here" }));
        let served = tokio::spawn(converse(stream, router, head, never));
        client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTT").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        served.await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("here"), "{answer}");
    }
}
