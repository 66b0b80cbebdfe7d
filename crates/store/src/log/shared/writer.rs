//! The task that puts a shared log's objects: several puts in flight, acknowledged in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use fulmar_pages::LogId;
use futures::future::BoxFuture;
use futures::stream::{self, FuturesUnordered, StreamExt};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::object_format::{self, Head, Object};
use super::objects::Objects;
use super::options::SharedLogOptions;
use super::recovery::seal;
use super::slot::Slot;
use super::state::{Batch, Core, Live, Phase, State};
use crate::log::LogError;
use crate::log::options::Stop;
use crate::log::progress::Progress;

/// Delay between two series of attempts of a put. Each series has its own delays.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Number of concurrent deletions while the log is written, and after it has ended.
const CONCURRENT_DELETES: usize = 8;
const CONCURRENT_FINAL_DELETES: usize = 32;

/// Time limit for deletions when a log is closed. The next start deletes the rest.
const FINAL_DELETES_TIMEOUT: Duration = Duration::from_secs(5);

/// How long covered objects wait for a commit that states this. Then a mark is put.
const MARK_DELAY: Duration = Duration::from_millis(250);

/// Interval between puts while the backlog is full, unless an object is full.
const THROTTLED_PUT_INTERVAL: Duration = Duration::from_millis(100);

/// Number of concurrent reads when a slot was lost.
const CONCURRENT_READS: usize = 8;

/// State of the writer, with its operations in flight.
pub(super) struct Writer {
    core: Arc<Core>,
    objects: Objects,
    id: LogId,
    claim: Slot,
    /// Slot of the next object.
    next: Slot,
    /// Position of the next object's first record.
    position: u64,
    /// Each returns its slot, and whether this writer's object stands there.
    puts: FuturesUnordered<BoxFuture<'static, (Slot, bool)>>,
    flight: VecDeque<Flight>,
    /// Start time of the newest put.
    last_put_at: Instant,
    /// Slots that may be deleted.
    garbage: Vec<Garbage>,
    deletes: FuturesUnordered<BoxFuture<'static, ()>>,
    /// The log is of a cluster's node ([`super::incarnation`]).
    is_of_cluster: bool,
}

/// What a writer starts with.
pub(super) struct Start {
    /// The claimed slot.
    pub(super) claim: Slot,
    /// Writer id of the claim.
    pub(super) writer: LogId,
    /// Position at which the new log starts.
    pub(super) position: u64,
    /// Valid objects, in order.
    pub(super) live: VecDeque<Live>,
    /// Objects that do not count and are not seals.
    pub(super) garbage: Vec<Slot>,
    /// Objects that do not count. Seals among them are kept.
    pub(super) unread: Vec<Slot>,
    /// The log is of a cluster's node ([`super::incarnation`]).
    pub(super) is_of_cluster: bool,
}

/// A slot that may be deleted.
#[derive(Clone, Copy)]
struct Garbage {
    slot: Slot,
    /// The slot may contain a seal, which is kept.
    may_be_seal: bool,
}

/// An object whose put is in flight.
struct Flight {
    live: Live,
    records: u64,
    needed: Slot,
    started: Instant,
    /// Whether this writer's object stands in the slot, once known.
    won: Option<bool>,
}

/// The writer's next action.
enum Next {
    Put(Batch),
    Wait(Option<Instant>),
    Seal,
    GiveUp(LogError),
}

/// Starts a log that was opened. Its writer is not yet running.
pub(super) fn begin(options: SharedLogOptions, objects: Objects, start: Start) -> (Arc<Core>, Writer) {
    let Start { claim, writer, position, live, garbage, unread, is_of_cluster } = start;
    let next = claim.next();
    let core = Arc::new(Core {
        options,
        progress: Arc::new(Progress::new(position)),
        state: State::new(position, live, next, is_of_cluster).into(),
        work: Notify::new(),
    });
    let known = garbage.into_iter().map(|slot| Garbage { slot, may_be_seal: false });
    let unread = unread.into_iter().map(|slot| Garbage { slot, may_be_seal: true });
    let writer = Writer {
        core: core.clone(),
        objects,
        id: writer,
        claim,
        next,
        position,
        puts: FuturesUnordered::new(),
        flight: VecDeque::new(),
        last_put_at: Instant::now(),
        garbage: known.chain(unread).collect(),
        deletes: FuturesUnordered::new(),
        is_of_cluster,
    };
    (core, writer)
}

impl Writer {
    /// Runs until the log is stopped, or another process has closed it.
    pub(super) async fn run(mut self) {
        let core = self.core.clone();
        let _guard = EndGuard(core.clone());
        let end = loop {
            self.collect();
            let deadline = match self.next() {
                Next::Put(batch) => {
                    self.put(batch);
                    continue;
                }
                Next::Wait(deadline) => deadline,
                Next::Seal => break self.seal().await,
                Next::GiveUp(error) => break Some(error),
            };
            tokio::select! {
                biased;
                Some((slot, won)) = self.puts.next() => {
                    if let Err(lost) = self.settle(slot, won) {
                        break Some(self.fence(lost).await);
                    }
                }
                Some(()) = self.deletes.next() => {}
                () = core.work.notified() => {}
                () = sleep_until(deadline) => {}
            }
        };
        core.closed(end);
    }

    /// Decides the next action.
    fn next(&self) -> Next {
        let mut state = self.core.state.lock();
        match (state.stop, &state.phase) {
            (Stop::Abandon, _) => return Next::GiveUp(LogError::Closed),
            (Stop::Drain, Phase::Unreachable(cause)) => {
                return Next::GiveUp(LogError::Unreachable { cause: cause.clone() });
            }
            (Stop::Drain, _) if state.pending.is_empty() && self.flight.is_empty() => {
                let states_more = self.is_of_cluster && state.has_unstated();
                return if states_more { Next::Put(Batch::mark(state.appended)) } else { Next::Seal };
            }
            _ => {}
        }
        if self.flight.len() >= self.core.options.in_flight.max(1) {
            return Next::Wait(None);
        }
        if state.pending.is_empty() {
            return self.next_mark(&state);
        }
        let is_full = state.backlog_is_full(&self.core.options);
        let due = self.last_put_at + if is_full { THROTTLED_PUT_INTERVAL } else { self.put_interval() };
        let immediately =
            state.pending.len() > 1 || state.stop == Stop::Drain || (self.flight.is_empty() && !is_full);
        if !immediately && Instant::now() < due {
            return Next::Wait(Some(due));
        }
        state.pending.pop_front().map_or(Next::Wait(None), Next::Put)
    }

    /// Called when there is no record to put. If objects were covered at least [`MARK_DELAY`] ago,
    /// a mark states this: until an object does, they cannot be deleted, and a start would read
    /// them. A mark has no records, takes the next slot, ends at the position at which it starts,
    /// and is kept until it is covered, like any other object.
    fn next_mark(&self, state: &State) -> Next {
        if !state.has_unstated() || !self.flight.is_empty() {
            return Next::Wait(None);
        }
        let due = state.covered_since + MARK_DELAY;
        if Instant::now() < due {
            return Next::Wait(Some(due));
        }
        Next::Put(Batch::mark(state.appended))
    }

    /// Interval between the starts of two puts, so that they are spread evenly over a put's
    /// latency.
    fn put_interval(&self) -> Duration {
        let puts = u32::try_from(self.core.options.in_flight).unwrap_or(u32::MAX).max(1);
        self.core.progress.statistics.smoothed_sync() / puts
    }

    fn put(&mut self, batch: Batch) {
        let (needed, durable) = {
            let state = self.core.state.lock();
            (state.needed(), state.next.sequence)
        };
        let (slot, start) = (self.next, self.position);
        (self.next, self.position) = (slot.next(), batch.end);
        let head = Head { writer: self.id, slot, start, needed, durable };
        let bytes = object_format::finish(batch.bytes, &head);
        let live = Live { slot, start, end: batch.end, bytes: bytes.len() as u64 };
        self.last_put_at = Instant::now();
        self.flight.push_back(Flight {
            live,
            records: batch.records,
            needed,
            started: self.last_put_at,
            won: None,
        });
        let (core, objects) = (self.core.clone(), self.objects.clone());
        self.puts.push(Box::pin(async move {
            loop {
                match objects.put(slot, bytes.clone()).await {
                    Ok(won) => return (slot, won),
                    Err(failure) => core.set_unreachable(&failure.to_string()),
                }
                tokio::time::sleep(RETRY_DELAY).await;
            }
        }));
    }

    /// Records the outcome of a put, and acknowledges all objects up to the first one whose outcome
    /// is unknown. If another process's object stands in a slot, returns that slot: the log cannot
    /// be written any more.
    fn settle(&mut self, slot: Slot, won: bool) -> Result<(), Slot> {
        if let Some(flight) = self.flight.iter_mut().find(|flight| flight.live.slot == slot) {
            flight.won = Some(won);
        }
        while let Some(flight) = self.flight.pop_front_if(|flight| flight.won.is_some()) {
            if flight.won == Some(false) {
                return Err(flight.live.slot);
            }
            self.acknowledge(&flight);
        }
        Ok(())
    }

    fn acknowledge(&mut self, flight: &Flight) {
        let progress = &self.core.progress;
        progress.statistics.sync(flight.started.elapsed());
        progress.statistics.batch(flight.records, flight.live.bytes);
        let mut state = self.core.state.lock();
        let was_due = state.flush_is_due(&self.core.options);
        state.durable(flight.live);
        let is_due = !was_due && state.flush_is_due(&self.core.options);
        while let Some(slot) = state.covered.pop_front_if(|slot| *slot < flight.needed) {
            self.garbage.push(Garbage { slot, may_be_seal: false });
        }
        drop(state);
        progress.publish(flight.live.end);
        progress.wake_room();
        if is_due {
            progress.flush_due();
        }
    }

    /// Closes the log because another process's object stands in `slot`. Reports the records from
    /// `slot` on as discarded only if [that is certain](is_lost). Otherwise their waiters get
    /// [`LogError::Closed`]: the outcome is unknown.
    async fn fence(&mut self, slot: Slot) -> LogError {
        let error = LogError::Fenced { object: self.objects.name(slot) };
        tracing::error!(%error, "commit log was taken over by another process");
        let progress = &self.core.progress;
        // Counted before any caller can observe the failure.
        progress.statistics.failures.fetch_add(1, Relaxed);
        // Nothing is appended from here on, so the range is final before the store is queried.
        let (after, upto) = {
            let mut state = self.core.state.lock();
            state.phase = Phase::Closed(Some(error.clone()));
            state.pending.clear();
            (progress.durable(), state.appended)
        };
        progress.wake_room();
        if is_lost(&self.objects, slot).await {
            progress.announce_loss(after, upto);
            progress.discard(after, upto);
            progress.publish(upto);
        } else {
            tracing::warn!("could not determine whether the last commits were taken over with the log");
        }
        error
    }

    /// Seals the log, all of which is durable. Returns the error, if there is one.
    async fn seal(&mut self) -> Option<LogError> {
        let needed = match self.is_of_cluster {
            true => self.core.state.lock().needed(),
            false => self.core.state.lock().cover_marks(),
        };
        let seal = seal(self.id, self.next, self.position, needed);
        match self.objects.put_once(self.next, seal).await {
            Ok(true) => {
                self.delete_covered(needed).await;
                None
            }
            Ok(false) => Some(LogError::Fenced { object: self.objects.name(self.next) }),
            Err(error) => Some(error),
        }
    }

    /// Deletes the objects that the seal states to be covered, so that the next start does not list
    /// them. The seal is durable, has the greatest name of its incarnation and states as much as
    /// any other object, which are the conditions for a deletion.
    async fn delete_covered(&mut self, needed: Slot) {
        if !self.is_of_cluster {
            let covered = std::mem::take(&mut self.core.state.lock().covered);
            let covered = covered.into_iter().chain([self.claim]).filter(|slot| *slot < needed);
            self.garbage.extend(covered.map(|slot| Garbage { slot, may_be_seal: false }));
        }
        let garbage = std::mem::take(&mut self.garbage);
        let rest = delete(self.objects.clone(), garbage, CONCURRENT_FINAL_DELETES);
        let deletes = async { tokio::join!(self.deletes.next(), rest) };
        if tokio::time::timeout(FINAL_DELETES_TIMEOUT, deletes).await.is_err() {
            tracing::warn!("covered log objects remain; the next start will delete them");
        }
    }

    /// Deletes garbage in batches. The next start finds objects that could not be deleted.
    fn collect(&mut self) {
        if !self.garbage.is_empty() && self.deletes.is_empty() {
            let garbage = std::mem::take(&mut self.garbage);
            self.deletes.push(Box::pin(delete(self.objects.clone(), garbage, CONCURRENT_DELETES)));
        }
    }
}

/// Deletes objects, up to `concurrent` at a time.
async fn delete(objects: Objects, garbage: Vec<Garbage>, concurrent: usize) {
    let objects = &objects;
    let delete = async |garbage: Garbage| {
        let Garbage { slot, may_be_seal } = garbage;
        let is_seal = match may_be_seal {
            true => objects.get(slot).await.map(|object| object.is_some_and(|object| object.is_seal)),
            false => Ok(false),
        };
        let deleted = match is_seal {
            Ok(true) => Ok(()),
            Ok(false) => objects.delete(slot).await.map_err(|failure| failure.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(cause) = deleted {
            tracing::warn!(object = objects.name(slot), %cause, "could not delete covered log object");
        }
    };
    stream::iter(garbage).for_each_concurrent(concurrent, delete).await;
}

/// Returns true if this writer's object has never stood in `slot`, where another one was found.
/// That is not certain if the slot may have been deleted in between (rule 3 of [`super`]): then an
/// object with a greater name states a needed slot beyond it, or did so when it was listed.
async fn is_lost(objects: &Objects, slot: Slot) -> bool {
    let Ok(greater) = objects.list_after(Some(slot)).await else { return false };
    // The newest object most likely states the greatest slot.
    let reads = stream::iter(greater.into_iter().rev()).map(|other| objects.get(other));
    // An object that was deleted since it was listed was covered: an object with a greater name
    // states this.
    let proves_nothing = |read: Result<Option<Object>, LogError>| !matches!(read, Ok(Some(object)) if object.head.needed <= slot);
    let mut reads = reads.buffered(CONCURRENT_READS);
    while let Some(read) = reads.next().await {
        if proves_nothing(read) {
            return false;
        }
    }
    true
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Releases all waiters if the writer is gone: it has panicked, or its runtime has shut down.
struct EndGuard(Arc<Core>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if !self.0.progress.has_ended() {
            self.0.closed(Some(LogError::Failed {
                cause: "the log's writer task stopped unexpectedly".into(),
            }));
        }
    }
}
