//! Serves the embedded metadata store to other nodes.

use std::sync::Arc;
use std::time::Duration;

use fulmar_meta::{Change, Entry, MetaError, MetadataStore, Observer, Revision};
use fulmar_transport::{Error as TransportError, Stream};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::wire::{self, Answer, MAX_MESSAGE_BYTES, Request, WireEntry};
use crate::messages::{decode, encode};

/// How long a request may take to arrive, and the end of its stream after the answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Approximate length of a message with entries.
const PART_BYTES: usize = 256 << 10;
/// Events that wait for one observer. One that is further behind is disconnected, and starts over
/// with a snapshot.
const QUEUE_EVENTS: usize = 16_384;

/// Serves one request.
pub async fn serve(store: Arc<dyn MetadataStore>, mut stream: Stream) {
    stream.set_max_message_bytes(MAX_MESSAGE_BYTES);
    let Ok(Ok(Some(request))) = timeout(REQUEST_TIMEOUT, stream.receive()).await else { return };
    let answered = match decode::<Request>(&request) {
        Ok(Request::Follow) => return drop(follow(&*store, &mut stream).await),
        Ok(request) => answer(&*store, &mut stream, request).await,
        Err(error) => return stream.reset(&error),
    };
    if answered.is_ok() {
        stream.finish();
        // Dropping the stream before the caller has finished would reset it.
        let _ = timeout(REQUEST_TIMEOUT, stream.receive()).await;
    }
}

/// Answers every request with the error that this node does not have the metadata store.
pub async fn refuse(node: &str, mut stream: Stream) {
    stream.set_max_message_bytes(MAX_MESSAGE_BYTES);
    let Ok(Ok(Some(_))) = timeout(REQUEST_TIMEOUT, stream.receive()).await else { return };
    let cause = format!("is not in node \"{node}\", which --join names: that node uses another one");
    let error = MetaError::Unavailable { cause, remedy: "" };
    if send(&mut stream, &error.into()).await.is_ok() {
        stream.finish();
        let _ = timeout(REQUEST_TIMEOUT, stream.receive()).await;
    }
}

async fn send(stream: &mut Stream, answer: &Answer) -> Result<(), TransportError> {
    stream.send(&encode(answer)).await
}

async fn answer(
    store: &dyn MetadataStore,
    stream: &mut Stream,
    request: Request,
) -> Result<(), TransportError> {
    let found = match request {
        Request::Get { key } => store.get(&key).await.map(|entry| entry.into_iter().collect()),
        Request::Scan { prefix } => store.scan(&prefix).await,
        Request::Transact { compares, operations } => {
            let outcome = store.transact(wire::transaction(compares, operations)).await;
            return send(stream, &outcome.map_or_else(Answer::from, Answer::from)).await;
        }
        Request::Follow => return Ok(()),
    };
    match found {
        Ok(entries) => send_entries(stream, entries, Revision::default()).await,
        Err(error) => send(stream, &error.into()).await,
    }
}

async fn send_entries(
    stream: &mut Stream,
    entries: Vec<Entry>,
    revision: Revision,
) -> Result<(), TransportError> {
    let (mut part, mut bytes) = (Vec::new(), 0);
    for entry in entries {
        let entry = WireEntry::from(entry);
        bytes += entry.bytes();
        part.push(entry);
        if bytes >= PART_BYTES {
            send(stream, &Answer::Entries(std::mem::take(&mut part))).await?;
            bytes = 0;
        }
    }
    send(stream, &Answer::Entries(part)).await?;
    send(stream, &Answer::End { revision: revision.0 }).await
}

/// An event for an observer of another node.
enum Event {
    Snapshot(Vec<Entry>),
    Positioned(Revision),
    Changed(Vec<Change>),
}

/// Forwards a store's events to a stream. It never blocks the store.
struct Forwarder(Mutex<Option<mpsc::Sender<Event>>>);

impl Forwarder {
    fn push(&self, event: Event) {
        let mut events = self.0.lock();
        if events.as_ref().is_some_and(|events| events.try_send(event).is_err()) {
            // The stream ends after the events that fit.
            *events = None;
        }
    }
}

impl Observer for Forwarder {
    fn snapshot(&self, entries: Vec<Entry>) -> Result<(), MetaError> {
        self.push(Event::Snapshot(entries));
        Ok(())
    }

    fn positioned(&self, revision: Revision) {
        self.push(Event::Positioned(revision));
    }

    fn changed(&self, changes: &[Change]) {
        self.push(Event::Changed(changes.to_vec()));
    }
}

/// Sends a snapshot and all later changes, until the caller ends the stream.
async fn follow(store: &dyn MetadataStore, stream: &mut Stream) -> Result<(), TransportError> {
    let (sender, mut events) = mpsc::channel(QUEUE_EVENTS);
    let forwarder = Arc::new(Forwarder(Mutex::new(Some(sender))));
    if let Err(error) = store.follow(forwarder.clone()).await {
        return send(stream, &error.into()).await;
    }
    let mut snapshot = Vec::new();
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            // The caller sends nothing more: it has gone.
            _ = stream.receive() => return Ok(()),
        };
        match event {
            Some(Event::Snapshot(entries)) => snapshot = entries,
            Some(Event::Positioned(revision)) => {
                send_entries(stream, std::mem::take(&mut snapshot), revision).await?;
            }
            Some(Event::Changed(changes)) => {
                let revision = changes.first().map_or(0, |change| change.revision.0);
                let changes = changes.into_iter().map(Into::into).collect();
                send(stream, &Answer::Changes { revision, changes }).await?;
            }
            None => return Ok(()),
        }
    }
}
