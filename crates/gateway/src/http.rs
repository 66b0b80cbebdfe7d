//! HTTP: `/metrics` for Prometheus, `/healthz` for whoever watches.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::gateway::{Gateway, MetricsSource};

/// A running HTTP server.
pub struct HttpServer {
    local_address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<io::Result<()>>,
}

/// Serves the figures of a gateway and its engine. Port 0 takes a free one.
pub async fn serve(address: SocketAddr, gateway: &Gateway) -> io::Result<HttpServer> {
    let listener = TcpListener::bind(address).await?;
    let local_address = listener.local_addr()?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .with_state(gateway.metrics());
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, router).with_graceful_shutdown(async move {
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

async fn metrics(State(source): State<Arc<MetricsSource>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], source.render())
}

async fn health(State(source): State<Arc<MetricsSource>>) -> impl IntoResponse {
    if source.is_healthy() {
        (StatusCode::OK, "ok\n")
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "commits are not accepted: the log is failing, or the disk is full\n",
        )
    }
}
