//! Cancelling what a session runs, from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
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

/// Set by whoever cancels, looked at by whoever runs or waits.
#[derive(Default, Debug)]
pub(crate) struct CancelFlag {
    reason: AtomicU8,
    /// The statement continues on the offload pool, where it may not notice for long.
    offloaded: AtomicBool,
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
        self.offloaded.store(false, Ordering::Release);
    }

    pub(crate) fn note_offloaded(&self) {
        self.offloaded.store(true, Ordering::Release);
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
    /// thousand steps; one long function call is finished first ([`Canceller::overdue`]).
    pub fn cancel(&self, reason: CancelReason) {
        if self.running.load(Ordering::Acquire) {
            self.flag.set(reason);
        }
    }

    /// The error of the running statement if it was cancelled, but is in a call that may not notice for long.
    pub fn overdue(&self) -> Option<Error> {
        let overdue = self.flag.offloaded.load(Ordering::Acquire) && self.flag.is_set();
        overdue.then(|| self.flag.error())
    }

    /// Whether the running statement is in a call that may take long and cannot be interrupted.
    pub fn is_offloaded(&self) -> bool {
        self.flag.offloaded.load(Ordering::Acquire)
    }
}
