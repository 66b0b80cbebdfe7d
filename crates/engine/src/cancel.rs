//! Cancelling what a session runs, from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Waker;

use futures::task::AtomicWaker;

use crate::{Error, sqlstate};

/// Why a statement is cancelled; decides the error that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CancelReason {
    /// The client's cancel request (57014).
    User = 1,
    /// `statement_timeout` (57014).
    Timeout = 2,
    /// The server stops, or the session is ended by an operator (57P01).
    Shutdown = 3,
    /// The future that ran the statement was dropped; nobody sees the error.
    Abandoned = 4,
}

/// The statement notices a cancel soon, or has begun to commit.
const ON_WORKER: u8 = 0;
/// It continues on the offload pool, possibly in a call that cannot be interrupted.
const OFFLOADED: u8 = 1;
/// Its client was told that it is cancelled. It must not commit.
const GIVEN_UP: u8 = 2;

/// Set by whoever cancels, looked at by whoever runs or waits.
#[derive(Default, Debug)]
pub(crate) struct CancelFlag {
    reason: AtomicU8,
    /// Whether the statement may not notice a cancel for long: [`ON_WORKER`], [`OFFLOADED`] or [`GIVEN_UP`].
    place: AtomicU8,
    waker: AtomicWaker,
}

impl CancelFlag {
    pub(crate) fn is_set(&self) -> bool {
        self.reason.load(Ordering::Acquire) != 0
    }

    pub(crate) fn set(&self, reason: CancelReason) {
        let _ = self.reason.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire);
        self.waker.wake();
    }

    pub(crate) fn clear(&self) {
        self.reason.store(0, Ordering::Release);
        self.place.store(ON_WORKER, Ordering::Release);
    }

    pub(crate) fn note_offloaded(&self) {
        self.move_to(ON_WORKER, OFFLOADED);
    }

    /// From here on the statement is not given up: it is about to commit, or has ended. Returns false if that has happened already;
    /// then it must not commit.
    pub(crate) fn may_finish(&self) -> bool {
        self.move_to(OFFLOADED, ON_WORKER) || self.place.load(Ordering::Acquire) != GIVEN_UP
    }

    fn move_to(&self, from: u8, to: u8) -> bool {
        self.place.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(crate) fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// The error of a statement that was cancelled.
    pub(crate) fn error(&self) -> Error {
        match self.reason.load(Ordering::Acquire) {
            2 => Error::new(sqlstate::QUERY_CANCELED, "canceling statement due to statement timeout")
                .hint("make the statement cheaper, or raise statement_timeout"),
            3 => Error::new(sqlstate::ADMIN_SHUTDOWN, "terminating connection due to administrator command"),
            _ => Error::new(sqlstate::QUERY_CANCELED, "canceling statement due to user request"),
        }
    }
}

/// Cancels what a session runs, from any thread; does nothing when nothing runs.
#[derive(Clone, Debug)]
pub struct Canceller {
    pub(crate) flag: Arc<CancelFlag>,
    pub(crate) running: Arc<std::sync::atomic::AtomicBool>,
}

impl Canceller {
    /// The running statement ends with an error soon. A statement notices at the next page it waits for or within some
    /// thousand steps; one long function call is finished first ([`Canceller::is_overdue`]).
    pub fn cancel(&self, reason: CancelReason) {
        if self.running.load(Ordering::Acquire) {
            self.flag.set(reason);
        }
    }

    /// Whether the running statement was cancelled, but is in a call that may not notice for long.
    pub fn is_overdue(&self) -> bool {
        self.is_offloaded() && self.flag.is_set()
    }

    /// Gives the statement up if it [is overdue](Canceller::is_overdue): returns its error for the client. It will not commit.
    pub fn give_up(&self) -> Option<Error> {
        (self.flag.is_set() && self.flag.move_to(OFFLOADED, GIVEN_UP)).then(|| self.flag.error())
    }

    /// Whether the running statement is in a call that may take long and cannot be interrupted.
    pub fn is_offloaded(&self) -> bool {
        self.flag.place.load(Ordering::Acquire) == OFFLOADED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offloaded() -> Canceller {
        let canceller = Canceller { flag: Arc::default(), running: Arc::new(true.into()) };
        canceller.flag.note_offloaded();
        canceller
    }

    #[test]
    fn statement_that_was_given_up_must_not_commit() {
        let canceller = offloaded();
        assert!(canceller.give_up().is_none(), "it was not cancelled");
        canceller.cancel(CancelReason::Timeout);
        assert!(canceller.is_overdue() && canceller.give_up().is_some());
        assert!(!canceller.flag.may_finish());
        canceller.flag.clear();
        assert!(canceller.flag.may_finish(), "the next statement is another one");
    }

    #[test]
    fn statement_that_commits_is_not_given_up() {
        let canceller = offloaded();
        canceller.cancel(CancelReason::User);
        assert!(canceller.flag.may_finish());
        assert!(!canceller.is_overdue() && canceller.give_up().is_none());
    }
}
