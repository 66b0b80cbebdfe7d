//! Progress of a log: which positions were assigned, are durable, or were lost, and their waiters.
//!
//! Appenders advance `appended`; only the log's writer advances `durable`. Everything that a commit
//! needs to know besides appending is answered here, for local and shared logs alike, at the cost
//! of one or two atomic loads.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::task::{Context, Poll};

use parking_lot::Mutex;

use super::waiters::{Ticket, Waiters};
use super::{LogError, LogStatistics, Lsn};

/// Called when records are lost. The arguments are the durable position, up to which records are
/// kept, and the appended position, up to which they are lost.
pub type OnDiscard = Box<dyn Fn(Lsn, Lsn) + Send + Sync>;

/// Called when the log's backlog requires a flush.
pub type OnFlushDue = Box<dyn Fn() + Send + Sync>;

/// State shared by a log and its callers, independent of the log's implementation.
pub(super) struct Progress {
    /// Everything up to this position is durable or discarded. Written only by the writer.
    durable: AtomicU64,
    /// Position at which the next record will start.
    appended: AtomicU64,
    /// The writer has stopped: nothing more will become durable.
    ended: AtomicBool,
    /// Number of ranges in `discarded`; zero for a log that has never failed.
    discards: AtomicUsize,
    /// Ranges of positions that were assigned and then lost: (after, upto].
    discarded: Mutex<Vec<(u64, u64)>>,
    waiters: Waiters,
    /// Waiters for space, woken with position 0.
    room: Waiters,
    on_discard: Mutex<Option<OnDiscard>>,
    on_flush_due: Mutex<Option<OnFlushDue>>,
    /// Position at which this incarnation of the log started.
    began: u64,
    pub(super) statistics: LogStatistics,
}

impl Progress {
    /// State of a log that continues at `position`.
    pub(super) fn new(position: u64) -> Self {
        Progress {
            durable: AtomicU64::new(position),
            appended: AtomicU64::new(position),
            ended: AtomicBool::new(false),
            discards: AtomicUsize::new(0),
            discarded: Mutex::default(),
            waiters: Waiters::default(),
            room: Waiters::default(),
            on_discard: Mutex::new(None),
            on_flush_due: Mutex::new(None),
            began: position,
            statistics: LogStatistics::default(),
        }
    }

    pub(super) fn on_discard(&self, callback: OnDiscard) {
        *self.on_discard.lock() = Some(callback);
    }

    pub(super) fn on_flush_due(&self, callback: OnFlushDue) {
        *self.on_flush_due.lock() = Some(callback);
    }

    /// Notifies the engine that a flush has become due.
    pub(super) fn flush_due(&self) {
        if let Some(callback) = &*self.on_flush_due.lock() {
            callback();
        }
    }

    pub(super) fn began(&self) -> u64 {
        self.began
    }

    pub(super) fn durable(&self) -> u64 {
        self.durable.load(Acquire)
    }

    pub(super) fn appended(&self) -> u64 {
        self.appended.load(Acquire)
    }

    /// Called under the lock that protects the assignment of positions.
    pub(super) fn set_appended(&self, position: u64) {
        self.appended.store(position, Release);
    }

    /// Returns what has happened to a record, or None if that is still open.
    pub(super) fn outcome(&self, position: u64) -> Option<Result<(), LogError>> {
        // This order matters: once the writer has stopped, the durable position is final.
        let ended = self.has_ended();
        if position <= self.durable() {
            // The number of ranges is stored before the durable position that exceeds them.
            return Some(match self.discards.load(Acquire) {
                0 => Ok(()),
                _ => self.outcome_after_discards(position),
            });
        }
        ended.then_some(Err(LogError::Closed))
    }

    fn outcome_after_discards(&self, position: u64) -> Result<(), LogError> {
        let discarded = self.discarded.lock();
        match discarded.iter().find(|(after, upto)| *after < position && position <= *upto) {
            Some((after, _)) => Err(LogError::Discarded { after: Lsn(*after) }),
            None => Ok(()),
        }
    }

    /// Publishes a new durable position and wakes its waiters.
    pub(super) fn publish(&self, position: u64) {
        self.durable.store(position, Release);
        self.waiters.wake_up_to(position);
    }

    /// Notifies the engine that the records between these positions are lost.
    pub(super) fn announce_loss(&self, after: u64, upto: u64) {
        if let Some(callback) = &*self.on_discard.lock() {
            callback(Lsn(after), Lsn(upto));
        }
    }

    /// Records a range as lost. Its waiters are notified when a later position is published.
    pub(super) fn discard(&self, after: u64, upto: u64) {
        if upto > after {
            let mut discarded = self.discarded.lock();
            discarded.push((after, upto));
            self.discards.store(discarded.len(), Release);
        }
    }

    /// Called when the writer has stopped: nothing that is not yet durable will become durable.
    pub(super) fn end(&self) {
        self.ended.store(true, Release);
        self.waiters.wake_up_to(u64::MAX);
        self.room.wake_up_to(u64::MAX);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }

    /// Makes all waiters for space check again.
    pub(super) fn wake_room(&self) {
        self.room.wake_up_to(0);
    }

    /// Waits until everything up to a position is durable, or known to be lost.
    pub(super) fn wait_durable(
        &self,
        position: u64,
    ) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        Wait { waiters: &self.waiters, position, ticket: None, verdict: move || self.outcome(position) }
    }

    /// Waits until `verdict` returns one. It is called whenever space may have become available.
    pub(super) fn wait_room<'a>(
        &'a self,
        verdict: impl FnMut() -> Option<Result<(), LogError>> + Send + Unpin + 'a,
    ) -> impl Future<Output = Result<(), LogError>> + Send + 'a {
        Wait { waiters: &self.room, position: 0, ticket: None, verdict }
    }

    /// Waits until the writer has stopped.
    pub(super) async fn wait_end(&self) {
        // No log reaches this position, so there is a verdict only when the writer stops.
        let _ = self.wait_durable(u64::MAX).await;
    }
}

/// A future that waits for a verdict.
struct Wait<'a, V> {
    waiters: &'a Waiters,
    position: u64,
    ticket: Option<Ticket>,
    verdict: V,
}

impl<V: FnMut() -> Option<Result<(), LogError>> + Unpin> Future for Wait<'_, V> {
    type Output = Result<(), LogError>;

    /// Checks the verdict. If there is none, registers the waker and checks once more under the
    /// waiters' lock. The writer takes that lock after it has changed the verdict, so no change is
    /// missed.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(outcome) = (this.verdict)() {
            return Poll::Ready(outcome);
        }
        let mut late = None;
        let verdict = &mut this.verdict;
        this.waiters.register(this.position, context.waker(), &mut this.ticket, || {
            late = verdict();
            late.is_some()
        });
        late.map_or(Poll::Pending, Poll::Ready)
    }
}

impl<V> Drop for Wait<'_, V> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.waiters.forget(ticket);
        }
    }
}
