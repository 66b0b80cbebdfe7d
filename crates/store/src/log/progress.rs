//! How far a log is: which positions were handed out, which are durable or lost, and who waits to know.
//!
//! Whoever appends moves `appended`, the log's writer alone moves `durable`. All that a commit asks besides appending
//! it asks here, whatever keeps the log; an answer costs one or two atomic loads.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::task::{Context, Poll};

use parking_lot::Mutex;

use super::waiters::{Ticket, Waiters};
use super::{LogError, LogStatistics, Lsn, OnDiscard, OnFlushDue};

/// What a log and its callers share, whatever keeps it.
pub(super) struct Progress {
    /// Up to where everything is durable or discarded. Written by the writer alone.
    durable: AtomicU64,
    /// Where the next record will begin.
    appended: AtomicU64,
    /// The writer has ended: nothing more will be durable.
    ended: AtomicBool,
    /// How many ranges `discarded` has; zero in a log that never failed.
    discards: AtomicUsize,
    /// Positions that were handed out and then lost: (after, upto].
    discarded: Mutex<Vec<(u64, u64)>>,
    waiters: Waiters,
    /// Those who wait for room; woken with position 0.
    room: Waiters,
    on_discard: Mutex<Option<OnDiscard>>,
    on_flush_due: Mutex<Option<OnFlushDue>>,
    /// Where this incarnation of the log began.
    began: u64,
    pub(super) statistics: LogStatistics,
}

impl Progress {
    /// Of a log that goes on at `position`.
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

    /// Called under the lock of whoever hands positions out.
    pub(super) fn set_appended(&self, position: u64) {
        self.appended.store(position, Release);
    }

    /// What became of a position; None if that is still open.
    pub(super) fn fate(&self, position: u64) -> Option<Result<(), LogError>> {
        // In this order: once the writer has ended the durable position is final.
        let ended = self.has_ended();
        if position <= self.durable() {
            // The number of ranges is stored before the durable position that goes beyond them.
            return Some(match self.discards.load(Acquire) {
                0 => Ok(()),
                _ => self.survived(position),
            });
        }
        ended.then_some(Err(LogError::Closed))
    }

    fn survived(&self, position: u64) -> Result<(), LogError> {
        let discarded = self.discarded.lock();
        match discarded.iter().find(|(after, upto)| *after < position && position <= *upto) {
            Some((after, _)) => Err(LogError::Discarded { after: Lsn(*after) }),
            None => Ok(()),
        }
    }

    /// Makes a new durable position known and wakes those who wait for it.
    pub(super) fn publish(&self, position: u64) {
        self.durable.store(position, Release);
        self.waiters.wake_up_to(position);
    }

    /// Tells the engine that what lies between these positions is lost.
    pub(super) fn announce_loss(&self, after: u64, upto: u64) {
        if let Some(callback) = &*self.on_discard.lock() {
            callback(Lsn(after), Lsn(upto));
        }
    }

    /// Notes a range as lost. Those who wait in it learn it when a position beyond is published.
    pub(super) fn discard(&self, after: u64, upto: u64) {
        if upto > after {
            let mut discarded = self.discarded.lock();
            discarded.push((after, upto));
            self.discards.store(discarded.len(), Release);
        }
    }

    /// The writer has ended: nothing that is not yet durable will be.
    pub(super) fn end(&self) {
        self.ended.store(true, Release);
        self.waiters.wake_up_to(u64::MAX);
        self.room.wake_up_to(u64::MAX);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }

    /// Who waits for room shall look again.
    pub(super) fn wake_room(&self) {
        self.room.wake_up_to(0);
    }

    /// Waits until everything up to a position is durable, or known to be lost.
    pub(super) fn wait_durable(
        &self,
        position: u64,
    ) -> impl Future<Output = Result<(), LogError>> + Send + '_ {
        Wait { waiters: &self.waiters, position, ticket: None, verdict: move || self.fate(position) }
    }

    /// Waits until `verdict`, which is asked whenever there may be room, has one.
    pub(super) fn wait_room<'a>(
        &'a self,
        verdict: impl FnMut() -> Option<Result<(), LogError>> + Send + Unpin + 'a,
    ) -> impl Future<Output = Result<(), LogError>> + Send + 'a {
        Wait { waiters: &self.room, position: 0, ticket: None, verdict }
    }

    /// Waits until the writer has ended.
    pub(super) async fn wait_end(&self) {
        // No position is that far, so there is a verdict only at the end.
        let _ = self.wait_durable(u64::MAX).await;
    }
}

/// Waits for a verdict.
struct Wait<'a, V> {
    waiters: &'a Waiters,
    position: u64,
    ticket: Option<Ticket>,
    verdict: V,
}

impl<V: FnMut() -> Option<Result<(), LogError>> + Unpin> Future for Wait<'_, V> {
    type Output = Result<(), LogError>;

    /// Asks for the verdict; if there is none registers, and asks once more under the lock of those who wait, which
    /// whoever changes the verdict takes afterwards: so no change is missed.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(known) = (this.verdict)() {
            return Poll::Ready(known);
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
