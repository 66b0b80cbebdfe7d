//! Wakers of futures that wait for a log position.

use std::collections::BTreeMap;
use std::task::Waker;

use parking_lot::Mutex;

/// Identifies a registered waker: its position, and a unique number.
pub(super) type Ticket = (u64, u64);

/// Wakers, ordered by the position that they wait for. A dropped future removes its waker, so there
/// are never more wakers than futures.
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
    /// Registers a waker for `position`, or renews the one of `ticket`. If `ready` returns true,
    /// registers nothing and returns false. `ready` is called under the lock that
    /// [`Waiters::wake_up_to`] takes.
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
            Some(registered) => registered.clone_from(waker),
            None => {
                inner.wakers.insert(key, waker.clone());
            }
        }
        true
    }

    /// Removes a waker.
    pub(super) fn forget(&self, ticket: Ticket) {
        self.inner.lock().wakers.remove(&ticket);
    }

    /// Wakes all waiters for positions up to this one.
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
