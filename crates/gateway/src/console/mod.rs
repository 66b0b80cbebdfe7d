//! The console: a web page for operators under `/console`, and its API.
//!
//! ```text
//!   browser --> page (fulmar_console)        /console/...            no token
//!           --> API: JSON, event stream      /console/api/...        token of an administrator
//!                 |-- hub ------ the sections that all pages show, polled once for all of them
//!                 |-- queries -- one tenant, the search for tenants
//!                 `-- actions -- administrative statements
//!                        v
//!                 internal sessions of the superuser: the same SQL as any client's
//! ```
//!
//! The API contains no view and no action of its own: it runs SQL statements in sessions that
//! [`crate::startup::serve_internal`] starts, and returns their rows as JSON.
//!
//! | module | contents |
//! | --- | --- |
//! | [`sql`] | internal sessions: statements in, rows out |
//! | [`sections`] | the statements of the sections, and of the page of a tenant |
//! | [`hub`], [`stream`] | polls the sections while a page is open; server-sent events |
//! | [`actions`] | administrative statements, as JSON |
//! | [`answer`] | responses and errors |
//!
//! # Security
//!
//! - Every request of the API has the token of an administrator (`CREATE TOKEN ... FOR ADMIN`) in the
//!   header `Authorization`, even with `--insecure`. A browser never adds that header on its own, so
//!   other sites' pages cannot send requests. There are no cookies.
//! - Responses have a strict Content-Security-Policy and forbid frames. The page writes data as text
//!   only.
//! - Limits: [`MAX_STREAMS`], [`MAX_QUERIES`], [`MAX_ACTIONS`], [`MAX_BODY_BYTES`], rows and bytes per
//!   result ([`sql`]), and the time of each request, stream and statement. An event stream ends soon
//!   after its token was dropped, and at a shutdown.

mod actions;
mod answer;
mod hub;
mod sections;
mod sql;
mod stream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{ConnectInfo, Path, Request, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state, map_response};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::connection_slots::ConnectionEnd;
use crate::monitoring::MetricsSource;
use crate::tokens::{AdminToken, bearer};
use actions::{Action, Outcome};
use answer::Failure;
use hub::Hub;
use sections::TenantParts;
use sql::Sessions;

/// Maximum number of event streams. Further ones are rejected.
const MAX_STREAMS: usize = 16;
/// Maximum number of concurrent queries.
const MAX_QUERIES: usize = 8;
/// Maximum number of statements that run in the background, such as moves.
const MAX_ACTIONS: usize = 8;
/// Maximum size of a request's body.
const MAX_BODY_BYTES: usize = 16 << 10;
/// Maximum time until a request's body has arrived.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of a query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(15);

/// The state of the console.
struct Console {
    source: Arc<MetricsSource>,
    sessions: Sessions,
    hub: Arc<Hub>,
    streams: Arc<Semaphore>,
    queries: Arc<Semaphore>,
    actions: Arc<Semaphore>,
    /// The results of statements that ended after their requests, as JSON, for the open pages.
    results: broadcast::Sender<Arc<str>>,
    /// Cancelled at the shutdown.
    closing: CancellationToken,
}

/// The routes under `/console`. Streams and background work end when `closing` is cancelled.
pub(crate) fn router(source: Arc<MetricsSource>, closing: CancellationToken) -> Router {
    let sessions = Sessions::new(source.workers.clone(), source.regular);
    let console = Arc::new(Console {
        hub: Arc::new(Hub::new(sessions.clone(), closing.clone())),
        sessions,
        source,
        streams: Arc::new(Semaphore::new(MAX_STREAMS)),
        queries: Arc::new(Semaphore::new(MAX_QUERIES)),
        actions: Arc::new(Semaphore::new(MAX_ACTIONS)),
        results: broadcast::Sender::new(MAX_ACTIONS),
        closing,
    });
    let api = Router::new()
        .route("/console/api/overview", get(overview))
        .route("/console/api/stream", get(stream))
        .route("/console/api/search/{prefix}", get(search))
        .route("/console/api/tenants/{name}", get(tenant))
        .route("/console/api/actions", post(act))
        .route_layer(from_fn_with_state(console.clone(), authorize));
    Router::new()
        .route("/console", get(async || Redirect::permanent("/console/")))
        .route("/console/", get(async || page(fulmar_console::index())))
        .route("/console/{file}", get(file))
        .merge(api)
        .layer(map_response(with_headers))
        .with_state(console)
}

/// Rejects requests without the token of an administrator. Adds the token to the others.
async fn authorize(
    State(console): State<Arc<Console>>,
    ConnectInfo(address): ConnectInfo<SocketAddr>,
    mut request: Request,
    next: Next,
) -> Result<Response, Failure> {
    let authorizer = &console.source.authorizer;
    let token = authorizer.authorize_admin(bearer(request.headers()), Some(address.ip())).await?;
    request.extensions_mut().insert(token);
    Ok(next.run(request).await)
}

/// Adds the headers of all responses.
async fn with_headers(mut response: Response) -> Response {
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, fulmar_console::CONTENT_SECURITY_POLICY),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    let cache = HeaderValue::from_static("no-store");
    response.headers_mut().entry(header::CACHE_CONTROL).or_insert(cache);
    response
}

fn page(asset: fulmar_console::Asset) -> Response {
    // The files of another version must not be mixed with those of this one.
    let headers = [(header::CONTENT_TYPE, asset.content_type), (header::CACHE_CONTROL, "no-cache")];
    (headers, asset.body).into_response()
}

async fn file(Path(name): Path<String>) -> Response {
    match fulmar_console::asset(&name) {
        Some(asset) => page(asset),
        None => (StatusCode::NOT_FOUND, "no such file\n").into_response(),
    }
}

/// All sections once.
async fn overview(State(console): State<Arc<Console>>) -> Result<Response, Failure> {
    let _permit = permit(&console.queries)?;
    let snapshot = timeout(QUERY_TIMEOUT, console.hub.first()).await.map_err(|_| Failure::timed_out())?;
    let snapshot = snapshot.ok_or_else(Failure::closing)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], snapshot.to_json()).into_response())
}

/// The sections as server-sent events, each when it has changed.
async fn stream(
    State(console): State<Arc<Console>>,
    Extension(connection): Extension<ConnectionEnd>,
    Extension(token): Extension<AdminToken>,
) -> Result<Response, Failure> {
    let permit = permit(&console.streams)?;
    Ok(stream::start(console, token, permit, connection))
}

/// The first tenants whose names begin with a prefix.
async fn search(
    State(console): State<Arc<Console>>,
    Path(prefix): Path<String>,
) -> Result<Response, Failure> {
    let _permit = permit(&console.queries)?;
    let found = sections::search(&console.sessions, &prefix);
    Ok(Json(timeout(QUERY_TIMEOUT, found).await.map_err(|_| Failure::timed_out())??).into_response())
}

/// What the page of a tenant shows in addition to the sections. Restore points are listed from the
/// object store: `?history=false` leaves them out.
async fn tenant(
    State(console): State<Arc<Console>>,
    ConnectInfo(address): ConnectInfo<SocketAddr>,
    Path(name): Path<String>,
    uri: Uri,
) -> Result<Response, Failure> {
    let _permit = permit(&console.queries)?;
    // Before the session is opened: an action on a newer database of this name is then refused.
    let partition = console.source.catalog.tenant(&name).map(|tenant| tenant.partition.0);
    let parts = TenantParts {
        partition,
        has_forecast: console.hub.has("forecast"),
        has_history: uri.query() != Some("history=false"),
    };
    let shown = sections::tenant(&console.sessions, &name, address.ip(), parts);
    Ok(Json(timeout(QUERY_TIMEOUT, shown).await.map_err(|_| Failure::timed_out())??).into_response())
}

/// Runs an administrative statement. Returns 202 if it still runs after some seconds: it continues.
/// Returns 409 if the database is not the one that the page shows.
async fn act(
    State(console): State<Arc<Console>>,
    ConnectInfo(address): ConnectInfo<SocketAddr>,
    Extension(token): Extension<AdminToken>,
    body: Body,
) -> Result<Response, Failure> {
    let read = timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES)).await;
    let body = read.map_err(|_| Failure::timed_out())?.map_err(|_| Failure::too_large(MAX_BODY_BYTES))?;
    let action: Action =
        serde_json::from_slice(&body).map_err(|error| Failure::invalid(error.to_string()))?;
    let permit = permit(&console.actions)?;
    let outcome = actions::run(&console, &action, &token, address.ip(), permit).await?;
    let (status, state) = match outcome {
        Outcome::Done => (StatusCode::OK, "done"),
        Outcome::Running => (StatusCode::ACCEPTED, "running"),
    };
    Ok((status, Json(serde_json::json!({ "state": state }))).into_response())
}

fn permit(semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Failure> {
    semaphore.clone().try_acquire_owned().map_err(|_| Failure::busy())
}
