//! The task that notifies observers. It reads one watch over all keys of the cluster.
//!
//! ```text
//!   first follow ─► scan at revision R ─► snapshot ─► watch from R + 1 ─► changed, changed, ...
//!                        ▲                               │
//!                        │  revision compacted, or gap   │ lost, stalled, no leader:
//!                        └───────────────────────────────┤ watch again from the position + 1,
//!                                                        ▼ at the next member
//! ```
//!
//! The *position* is the revision up to which all observers have been notified. `transact` waits
//! until it reaches the revision of the outcome. Every transaction puts the head, so an event with
//! that revision exists and arrives without a request for progress. (etcd before 3.4.25 and 3.5.8
//! can report a progress that is ahead of events.)
//!
//! - **Lost events.** The head's version counts transactions. If it does not grow by one, events
//!   were lost, and the observers get a new snapshot. (etcd before 3.5.13 can lose events at a
//!   compaction.) Events at or below the position are repetitions and are ignored.
//! - **Stalled watch.** If a transaction waits and the watch receives nothing for 1 s, it is opened
//!   at the next member. The time doubles, up to 30 s, until an event arrives.
//! - **Silent connection.** The watch is opened at the next member when a request has found the
//!   connection silent.
//! - **No leader.** etcd ends the watch, because it requires a leader.

use std::sync::{Arc, Weak};
use std::time::Duration;

use etcd_client::{Event, EventType, WatchOptions, WatchRequestSender, WatchResponse, WatchResponseStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::failure::Failure;
use super::keys::{self, Head};
use super::members::Member;
use super::requests::Requests;
use crate::{Change, MetaError, Observer};

/// A waiting transaction and no event for this time: the watch is opened at another member.
const MIN_STALL_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before the watch is opened again. Doubles with each failure. Half of it is random.
const MIN_PAUSE: Duration = Duration::from_millis(20);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Maximum time to open a watch at one member.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// A request to register an observer.
pub(super) struct Follow {
    pub(super) observer: Arc<dyn Observer>,
    pub(super) answer: oneshot::Sender<Result<(), MetaError>>,
}

/// The connection between the watcher and the transactions that wait for it.
pub(super) struct Progress {
    /// The position. `None` if there are no observers.
    pub(super) position: watch::Sender<Option<i64>>,
    /// The greatest revision that a transaction waits for.
    pub(super) wanted: watch::Sender<i64>,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self { position: watch::Sender::new(None), wanted: watch::Sender::new(0) }
    }

    /// Requests that the position reaches `revision`.
    pub(super) fn want(&self, revision: i64) {
        self.wanted.send_if_modified(|wanted| {
            let is_new = revision > *wanted;
            *wanted = revision.max(*wanted);
            is_new
        });
    }
}

/// A registered observer.
struct Registered {
    observer: Weak<dyn Observer>,
    /// The revision of its snapshot. It is notified of later changes only.
    snapshot: i64,
}

/// Why the watch ended.
enum Ended {
    /// The store was dropped.
    Stopped,
    /// The watch was lost. It continues at another member.
    Lost(String),
    /// Events are missing, or may be. The observers need a snapshot.
    Gap(String),
}

/// An open watch. etcd ends it when the sender is dropped.
struct Stream {
    _requests: WatchRequestSender,
    responses: WatchResponseStream,
}

pub(super) struct Watcher {
    requests: Arc<Requests>,
    progress: Arc<Progress>,
    follows: mpsc::Receiver<Follow>,
    observers: Vec<Registered>,
    /// All observers have been notified of the changes up to this revision.
    position: i64,
    /// The head's version at the position.
    head_version: i64,
    /// The index of the member.
    member: usize,
    stall_timeout: Duration,
    pause: Duration,
    /// The cause of the last loss that was logged. Repetitions without progress are not.
    logged: String,
}

impl Watcher {
    pub(super) fn new(
        requests: Arc<Requests>,
        progress: Arc<Progress>,
        follows: mpsc::Receiver<Follow>,
    ) -> Self {
        let member = requests.members.current();
        Self {
            requests,
            progress,
            follows,
            observers: Vec::new(),
            position: 0,
            head_version: 0,
            member,
            stall_timeout: MIN_STALL_TIMEOUT,
            pause: MIN_PAUSE,
            logged: String::new(),
        }
    }

    /// Runs until the store is dropped.
    pub(super) async fn run(mut self) {
        while self.observers.is_empty() {
            let Some(follow) = self.follows.recv().await else { return };
            self.register(follow).await;
        }
        loop {
            match self.watch().await {
                Ended::Stopped => return,
                Ended::Lost(cause) => {
                    if cause != self.logged {
                        tracing::warn!(%cause, position = self.position, "the watch on etcd was lost; opening it again");
                        self.logged = cause;
                    }
                    self.member += 1;
                    self.back_off().await;
                }
                Ended::Gap(cause) => {
                    tracing::warn!(%cause, position = self.position, "the watch on etcd has a gap; reading all keys");
                    self.renew_snapshots().await;
                }
            }
            while let Ok(follow) = self.follows.try_recv() {
                self.register(follow).await;
            }
        }
    }

    /// Passes the observer a snapshot, and registers it. Events wait in the meantime.
    async fn register(&mut self, follow: Follow) {
        let Follow { observer, answer } = follow;
        if answer.is_closed() {
            return;
        }
        let is_first = self.observers.is_empty();
        if is_first {
            // From now on transactions wait. One that has not seen this was committed before the
            // scan, which therefore contains it.
            self.publish(Some(0));
        }
        let result = self.snapshot(observer).await;
        if is_first && result.is_err() {
            self.publish(None);
        }
        let is_registered = result.is_ok();
        if answer.send(result).is_err() && is_registered {
            // The caller has given up, and believes that its observer is not registered.
            self.observers.pop();
            if is_first {
                self.publish(None);
            }
        }
    }

    async fn snapshot(&mut self, observer: Arc<dyn Observer>) -> Result<(), MetaError> {
        let scan = self.requests.scan("").await?;
        observer.snapshot(scan.entries)?;
        if self.observers.is_empty() {
            self.start_at(scan.revision, scan.head);
        }
        self.observers.push(Registered { observer: Arc::downgrade(&observer), snapshot: scan.revision });
        Ok(())
    }

    /// Passes all observers a new snapshot. Repeats it until all have accepted one.
    async fn renew_snapshots(&mut self) {
        while let Err(error) = self.try_renew_snapshots().await {
            let remedy = error.remedy();
            tracing::error!(%error, remedy, "cannot renew this node's copy of the metadata; retrying");
            self.back_off().await;
        }
    }

    async fn try_renew_snapshots(&mut self) -> Result<(), MetaError> {
        let scan = self.requests.scan("").await?;
        for registered in &mut self.observers {
            if let Some(observer) = registered.observer.upgrade() {
                observer.snapshot(scan.entries.clone())?;
                registered.snapshot = scan.revision;
            }
        }
        self.start_at(scan.revision, scan.head);
        Ok(())
    }

    fn start_at(&mut self, revision: i64, head: Head) {
        self.position = revision;
        self.head_version = head.version;
        self.made_progress();
    }

    fn made_progress(&mut self) {
        self.stall_timeout = MIN_STALL_TIMEOUT;
        self.pause = MIN_PAUSE;
        self.logged.clear();
        self.publish(Some(self.position));
    }

    fn publish(&self, position: Option<i64>) {
        self.progress.position.send_replace(position);
    }

    async fn back_off(&mut self) {
        sleep(self.pause / 2 + (self.pause / 2).mul_f64(rand::random())).await;
        self.pause = (self.pause * 2).min(MAX_PAUSE);
    }

    /// Opens the watch at the current member, and passes its events to the observers until it ends.
    async fn watch(&mut self) -> Ended {
        let replaced = self.requests.members.replaced(self.member);
        tokio::pin!(replaced);
        let mut stream = match timeout(OPEN_TIMEOUT, self.open()).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(failure)) => return Ended::Lost(failure.cause()),
            Err(_) => return Ended::Lost(format!("not opened within {OPEN_TIMEOUT:?}")),
        };
        let mut wanted = self.progress.wanted.subscribe();
        let mut last_event = Instant::now();
        loop {
            let was_behind = *wanted.borrow_and_update() > self.position;
            tokio::select! {
                response = stream.responses.message() => {
                    let ended = match response {
                        Ok(Some(response)) => self.handle(&response).err(),
                        Ok(None) => Some(Ended::Lost("closed by etcd".to_owned())),
                        Err(error) => Some(Ended::Lost(error.to_string())),
                    };
                    if let Some(ended) = ended {
                        return ended;
                    }
                    last_event = Instant::now();
                }
                follow = self.follows.recv() => match follow {
                    Some(follow) => self.register(follow).await,
                    None => return Ended::Stopped,
                },
                // The sender is owned by this task, so the wait does not fail.
                _ = wanted.changed() => if !was_behind {
                    last_event = Instant::now();
                },
                () = &mut replaced => return Ended::Lost("its connection was silent".to_owned()),
                () = sleep_until(last_event + self.stall_timeout), if was_behind => {
                    let stalled = self.stall_timeout;
                    self.stall_timeout = (stalled * 2).min(MAX_STALL_TIMEOUT);
                    return Ended::Lost(format!("no event for {stalled:?} while a transaction waits for one"));
                }
            }
        }
    }

    async fn open(&self) -> Result<Stream, Failure> {
        let member = self.requests.members.member(self.member, &self.requests.guard).await?;
        // A watch of a future revision, at an etcd that was restored, would wait silently.
        let check = |member: Member| async move { self.requests.check_member(&member).await };
        self.requests.members.renewing_token(member.clone(), check).await?;
        let root = self.requests.keys.root.as_str();
        let options = WatchOptions::new()
            .with_range(keys::range_end(root))
            .with_start_revision(self.position + 1)
            .with_progress_notify();
        let stream =
            member.watch().watch(root, Some(options)).await.map_err(|error| member.failure(error))?;
        let (requests, responses) = stream.split();
        Ok(Stream { _requests: requests, responses })
    }

    fn handle(&mut self, response: &WatchResponse) -> Result<(), Ended> {
        if response.compact_revision() > 0 {
            let compacted = response.compact_revision();
            return Err(Ended::Gap(format!("etcd has compacted revision {compacted}")));
        }
        if response.canceled() {
            return Err(Ended::Lost(format!("canceled by etcd: {}", response.cancel_reason())));
        }
        let events = response.events();
        if events.is_empty() && !response.created() {
            // The periodic notification of progress, which etcd sends in order with the events.
            let revision = response.header().map_or(0, |header| header.revision());
            self.position = self.position.max(revision);
            self.made_progress();
        }
        // A response contains all events of a revision.
        for events in events.chunk_by(|a, b| event_revision(a) == event_revision(b)) {
            let revision = event_revision(&events[0]);
            if revision > self.position {
                self.notify(revision, events)?;
                self.position = revision;
                self.made_progress();
            }
        }
        Ok(())
    }

    fn notify(&mut self, revision: i64, events: &[Event]) -> Result<(), Ended> {
        let mut changes = Vec::with_capacity(events.len());
        for event in events {
            let Some(kv) = event.kv() else { continue };
            if kv.key() == self.requests.keys.head.as_bytes() {
                let expected = self.head_version + 1;
                if event.event_type() == EventType::Delete || kv.version() != expected {
                    let found = kv.version();
                    return Err(Ended::Gap(format!("transaction {expected} is missing before {found}")));
                }
                self.head_version = expected;
            } else if let Some(key) = self.requests.keys.parse(kv.key()) {
                let value = (event.event_type() == EventType::Put).then(|| kv.value().to_vec());
                changes.push(Change { key: key.to_owned(), value, revision: keys::revision(revision) });
            }
        }
        if changes.is_empty() {
            return Ok(());
        }
        self.observers.retain(|registered| match registered.observer.upgrade() {
            Some(observer) => {
                if revision > registered.snapshot {
                    observer.changed(&changes);
                }
                true
            }
            None => false,
        });
        Ok(())
    }
}

fn event_revision(event: &Event) -> i64 {
    event.kv().map_or(0, |kv| kv.mod_revision())
}
