//! Cancellation of a session's running statement, from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Waker;

use futures::task::AtomicWaker;

use crate::{Error, sqlstate};

/// Why a statement is cancelled. Determines its error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CancelReason {
    /// The client's cancel request (57014).
    User = 1,
    /// `statement_timeout` (57014).
    Timeout = 2,
    /// The server is shutting down, or an operator ended the session (57P01).
    Shutdown = 3,
    /// The future that ran the statement was dropped; no client receives the error.
    Abandoned = 4,
}

/// The statement checks for cancellation frequently, or has begun to commit.
const ON_WORKER: u8 = 0;
/// The statement runs on the offload pool, possibly in a call that cannot be interrupted.
const OFFLOADED: u8 = 1;
/// The client has received the cancellation error. The statement must not commit.
const GIVEN_UP: u8 = 2;

/// Set by the canceller, polled by the running or waiting statement.
#[derive(Default, Debug)]
pub struct CancelFlag {
    reason: AtomicU8,
    /// How soon the statement notices a cancel: [`ON_WORKER`], [`OFFLOADED`] or [`GIVEN_UP`].
    execution: AtomicU8,
    waker: AtomicWaker,
}

impl CancelFlag {
    /// Returns true if the statement was cancelled.
    pub fn is_set(&self) -> bool {
        self.reason.load(Ordering::Acquire) != 0
    }

    /// Cancels the statement, unless it was cancelled already.
    pub fn set(&self, reason: CancelReason) {
        let _ = self.reason.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire);
        self.waker.wake();
    }

    /// Prepares for the next statement.
    pub fn clear(&self) {
        self.reason.store(0, Ordering::Release);
        self.execution.store(ON_WORKER, Ordering::Release);
    }

    /// Records that the statement is about to run on the offload pool.
    pub fn note_offloaded(&self) {
        self.move_to(ON_WORKER, OFFLOADED);
    }

    /// Prevents the statement from being given up from now on: it is about to commit, or has ended.
    /// Returns false if it was given up already; then it must not commit.
    pub fn may_finish(&self) -> bool {
        self.move_to(OFFLOADED, ON_WORKER) || self.execution.load(Ordering::Acquire) != GIVEN_UP
    }

    fn move_to(&self, from: u8, to: u8) -> bool {
        self.execution.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Registers the task to wake when the statement is cancelled.
    pub fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// The error of the cancelled statement.
    pub fn error(&self) -> Error {
        match self.reason.load(Ordering::Acquire) {
            2 => Error::new(sqlstate::QUERY_CANCELED, "canceling statement due to statement timeout")
                .hint("Optimize the statement, or raise statement_timeout."),
            3 => Error::new(sqlstate::ADMIN_SHUTDOWN, "terminating connection due to administrator command"),
            _ => Error::new(sqlstate::QUERY_CANCELED, "canceling statement due to user request"),
        }
    }
}

/// Cancels a session's running statement, from any thread. Does nothing if none is running.
#[derive(Clone, Debug)]
pub struct Canceller {
    flag: Arc<CancelFlag>,
    running: Arc<std::sync::atomic::AtomicBool>,
}

impl Canceller {
    /// Creates a handle that cancels through `flag` while `running` is true.
    pub fn new(flag: Arc<CancelFlag>, running: Arc<std::sync::atomic::AtomicBool>) -> Canceller {
        Canceller { flag, running }
    }

    /// Cancels the running statement. It notices at the next page that it waits for or within a few
    /// thousand VM steps; a single long function call finishes first ([`Canceller::is_overdue`]).
    pub fn cancel(&self, reason: CancelReason) {
        if self.running.load(Ordering::Acquire) {
            self.flag.set(reason);
        }
    }

    /// Whether the running statement was cancelled but is in a call that may not notice for a long
    /// time.
    pub fn is_overdue(&self) -> bool {
        self.is_offloaded() && self.flag.is_set()
    }

    /// Gives up a statement that [is overdue](Canceller::is_overdue), and returns its error for the
    /// client. The statement will not commit.
    pub fn give_up(&self) -> Option<Error> {
        (self.flag.is_set() && self.flag.move_to(OFFLOADED, GIVEN_UP)).then(|| self.flag.error())
    }

    /// Whether the running statement is in a call that may take long and cannot be interrupted.
    pub fn is_offloaded(&self) -> bool {
        self.flag.execution.load(Ordering::Acquire) == OFFLOADED
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
        assert!(canceller.give_up().is_none(), "a statement that was not cancelled must not be given up");
        canceller.cancel(CancelReason::Timeout);
        assert!(canceller.is_overdue() && canceller.give_up().is_some());
        assert!(!canceller.flag.may_finish());
        canceller.flag.clear();
        assert!(canceller.flag.may_finish(), "the next statement may commit");
    }

    #[test]
    fn statement_that_commits_is_not_given_up() {
        let canceller = offloaded();
        canceller.cancel(CancelReason::User);
        assert!(canceller.flag.may_finish());
        assert!(!canceller.is_overdue() && canceller.give_up().is_none());
    }
}
