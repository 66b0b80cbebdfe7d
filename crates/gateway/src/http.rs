//! HTTP: `/metrics` for Prometheus, `/healthz` for whoever watches.
//!
//! Health is told to everybody: load balancers have no tokens, and it says no more than whether commits are accepted. Its code is
//! that of the node as a whole (of one that reads beside another: whether it can); that only databases which are `shared` cannot commit is in its text.
//! Metrics have the names of tenants: they need a token ([`crate::tokens`]), and that of a tenant shows that tenant only.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::gateway::{Gateway, MetricsSource};
use crate::tokens::Refused;

/// A running HTTP server.
pub struct HttpServer {
    local_address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<io::Result<()>>,
}

/// Serves the figures of a gateway and its engine. Port 0 takes a free one.
pub async fn serve(address: SocketAddr, gateway: &Gateway) -> io::Result<HttpServer> {
    begin(TcpListener::bind(address).await?, gateway)
}

fn begin(listener: TcpListener, gateway: &Gateway) -> io::Result<HttpServer> {
    let local_address = listener.local_addr()?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .with_state(gateway.metrics());
    let (stop, stopped) = oneshot::channel::<()>();
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    let server = axum::serve(listener, service).with_graceful_shutdown(async move {
        let _ = stopped.await; // a dropped sender says the same
    });
    let task = tokio::spawn(async move { server.await });
    Ok(HttpServer { local_address, stop, task })
}

impl HttpServer {
    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_address
    }

    /// Answers what has been asked, then stops.
    pub async fn shutdown(self) -> io::Result<()> {
        let _ = self.stop.send(()); // the task may have ended by itself: it is asked next
        self.task.await.map_err(io::Error::other)?
    }
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
    // It serves all others: a balancer that took it away would take those away too.
    match source.is_shared_log_healthy() {
        true => (StatusCode::OK, "ok\n"),
        false => (
            StatusCode::OK,
            "ok, but commits of shared databases are not accepted: the log in the store is failing, or full\n",
        ),
    }
}
