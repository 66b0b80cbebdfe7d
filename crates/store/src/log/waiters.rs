//! Futures that wait for a position of the log.

use std::collections::BTreeMap;
use std::task::Waker;

use parking_lot::Mutex;

/// Names a registered waker: its position, and a number that makes it unique.
pub(super) type Ticket = (u64, u64);

/// Wakers by the position that they wait for. A future that is dropped takes its waker back, so there are never more
/// than there are futures.
#[derive(Default)]
pub(super) struct Waiters {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    wakers: BTreeMap<Ticket, Waker>,
    next: u64,
}

impl Waiters {
    /// Registers a waker for `position` (or renews the one of `ticket`), unless `ready` says, under the lock that
    /// [`Waiters::wake_up_to`] takes, that there is nothing to wait for.
    pub(super) fn register(
        &self,
        position: u64,
        waker: &Waker,
        ticket: &mut Option<Ticket>,
        ready: impl FnOnce() -> bool,
    ) -> bool {
        let mut inner = self.inner.lock();
        if ready() {
            return false;
        }
        let key = ticket.unwrap_or_else(|| {
            inner.next += 1;
            (position, inner.next)
        });
        *ticket = Some(key);
        match inner.wakers.get_mut(&key) {
            Some(known) => known.clone_from(waker),
            None => {
                inner.wakers.insert(key, waker.clone());
            }
        }
        true
    }

    /// Takes a waker back.
    pub(super) fn forget(&self, ticket: Ticket) {
        self.inner.lock().wakers.remove(&ticket);
    }

    /// Wakes all that wait for a position up to this one.
    pub(super) fn wake_up_to(&self, position: u64) {
        let mut inner = self.inner.lock();
        let due = match inner.wakers.first_key_value() {
            Some((first, _)) if first.0 <= position => {
                let later = match position.checked_add(1) {
                    Some(next) => inner.wakers.split_off(&(next, 0)),
                    None => BTreeMap::new(),
                };
                std::mem::replace(&mut inner.wakers, later)
            }
            _ => return,
        };
        drop(inner);
        due.into_values().for_each(Waker::wake);
    }
}
