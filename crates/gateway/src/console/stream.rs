//! The event stream of a page: sections as server-sent events.
//!
//! An event has the name of a section and its table as JSON. It is sent at first, and when the
//! section has changed. Further events:
//!
//! - `read`: when the sections were read, and the age of that. Sent after each poll, and every 2 s.
//! - `error`: why the node cannot be read at the moment.
//! - `action`: a statement of an action ended after its request was answered.
//! - `end`: the last event of a stream whose token was dropped.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::unfold;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, interval, timeout};

use super::Console;
use super::hub::Snapshot;
use super::sections::SECTIONS;
use crate::connection_slots::ConnectionEnd;
use crate::tokens::AdminToken;

/// How often the token is checked. Each check sends a comment, which also shows the page that the
/// node still answers, and this side whether the page still reads.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// A page that accepts no event for this long is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// A stream ends after this time. The page then opens another one.
const MAX_STREAM_TIME: Duration = Duration::from_secs(3600);

/// Starts a stream. It holds the permit until it ends.
pub(super) fn start(
    console: Arc<Console>,
    token: AdminToken,
    permit: OwnedSemaphorePermit,
    connection: ConnectionEnd,
) -> Response {
    let (sender, receiver) = mpsc::channel::<Bytes>(1);
    tokio::spawn(async move {
        let closing = console.closing.clone();
        let produced = closing.run_until_cancelled(produce(&console, &token, &sender)).await;
        drop(permit);
        if matches!(produced, Some(Stopped::Slow)) {
            connection.0.cancel();
        }
    });
    let next = |mut receiver: mpsc::Receiver<Bytes>| async move {
        let piece = receiver.recv().await?;
        Some((Ok::<_, Infallible>(piece), receiver))
    };
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(unfold(receiver, next))).into_response()
}

/// Why a stream ends.
enum Stopped {
    /// The page has closed it, the token is invalid, or its time is over.
    End,
    /// The page does not read.
    Slow,
}

async fn produce(console: &Console, token: &AdminToken, sender: &mpsc::Sender<Bytes>) -> Stopped {
    let mut snapshots = console.hub.subscribe();
    // The first snapshot may be there already.
    snapshots.mark_changed();
    let mut results = console.results.subscribe();
    let mut checks = interval(CHECK_INTERVAL);
    let (deadline, mut sent) = (Instant::now() + MAX_STREAM_TIME, Snapshot::default());
    loop {
        let mut text = String::new();
        tokio::select! {
            changed = snapshots.changed() => match (changed, snapshots.borrow_and_update().as_ref()) {
                (Err(_), _) => return Stopped::End,
                (Ok(()), Some(snapshot)) => {
                    add_changes(&mut text, &mut sent, snapshot);
                    add_reading(&mut text, snapshot);
                }
                (Ok(()), None) => {}
            },
            result = results.recv() => {
                // A page that was too slow misses results. The events have all of them.
                if let Ok(result) = result {
                    text.push_str(&format!("event: action\ndata: {result}\n\n"));
                }
            }
            _ = checks.tick() => {
                text.push_str(": alive\n\n");
                if let Some(snapshot) = snapshots.borrow().as_ref() {
                    add_reading(&mut text, snapshot);
                }
            }
            () = sender.closed() => return Stopped::End,
        }
        let is_valid = console.source.authorizer.is_valid(token);
        if !is_valid {
            text = "event: end\ndata: {\"message\":\"the token was dropped or has expired\"}\n\n".to_owned();
        }
        if !text.is_empty() {
            match timeout(SEND_TIMEOUT, sender.send(text.into())).await {
                Err(_) => return Stopped::Slow,
                Ok(Err(_)) => return Stopped::End,
                Ok(Ok(())) => {}
            }
        }
        if !is_valid || Instant::now() >= deadline {
            return Stopped::End;
        }
    }
}

/// Adds an event for each section that differs from what was sent.
fn add_changes(text: &mut String, sent: &mut Snapshot, snapshot: &Snapshot) {
    let names = SECTIONS.iter().map(|section| section.name);
    for (name, (sent, new)) in names.zip(sent.sections.iter_mut().zip(&snapshot.sections)) {
        if let Some(json) = new.as_ref().filter(|new| sent.as_ref() != Some(*new)) {
            text.push_str(&format!("event: {name}\ndata: {json}\n\n"));
            *sent = Some(json.clone());
        }
    }
    if sent.error != snapshot.error {
        let json = snapshot.error.as_deref().unwrap_or("null");
        text.push_str(&format!("event: error\ndata: {json}\n\n"));
        sent.error = snapshot.error.clone();
    }
}

/// Adds an event with the time of the last poll.
fn add_reading(text: &mut String, snapshot: &Snapshot) {
    if let Some(read) = snapshot.read {
        text.push_str(&format!("event: read\ndata: {}\n\n", read.to_json()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_sections_are_sent() {
        let (mut sent, mut now) = (Snapshot::default(), Snapshot::default());
        let mut changes = |now: &Snapshot| {
            let mut text = String::new();
            add_changes(&mut text, &mut sent, now);
            text
        };
        now.sections[0] = Some("{\"a\":1}".into());
        assert_eq!(changes(&now), "event: nodes\ndata: {\"a\":1}\n\n");
        assert_eq!(changes(&now), "");
        (now.sections[1], now.error) = (Some("2".into()), Some("3".into()));
        assert_eq!(changes(&now), "event: node_load\ndata: 2\n\nevent: error\ndata: 3\n\n");
        now.error = None;
        assert_eq!(changes(&now), "event: error\ndata: null\n\n");
        assert_eq!(now.to_json(), "{\"nodes\":{\"a\":1},\"node_load\":2}");
    }
}
