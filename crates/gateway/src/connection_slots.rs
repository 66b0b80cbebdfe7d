//! Connection slots: bounds the number of unauthenticated connections of a port, and closes the
//! oldest connection when all slots are in use.
//!
//! Any client that can reach a port can open connections and send nothing. If new connections were
//! rejected when the slots are in use, idle connections could block the port indefinitely.
//! Therefore the oldest connection is closed instead:
//!
//! - A connection keeps its slot for at least 1 s, which is enough for a client that authenticates.
//! - Until the oldest connection is 1 s old, new connections wait in the accept queue. A burst of
//!   regular clients, such as an application that restarts, is therefore served without closing
//!   any.
//!
//! ```text
//!   accepted --> takes a free slot ----------------------------> served --> the slot is released
//!            `-> no free slot: closes the oldest connection,
//!                once that is 1 s old, and takes its slot -----> served --> the slot is released
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// The minimum time that a connection keeps its slot.
const MIN_SLOT_TIME: Duration = Duration::from_secs(1);

/// Closes a connection when it is cancelled.
#[derive(Clone)]
pub(crate) struct ConnectionEnd(pub(crate) CancellationToken);

/// The connection slots of a port.
pub(crate) struct ConnectionSlots {
    slots: Mutex<Slots>,
    capacity: usize,
    /// Notified when a slot is released.
    released: Notify,
}

#[derive(Default)]
struct Slots {
    /// The slots in use, oldest first.
    used: BTreeMap<u64, UsedSlot>,
    next: u64,
    evicted: u64,
}

struct UsedSlot {
    since: Instant,
    cancel: CancellationToken,
}

/// The counters of the slots.
#[derive(Clone, Copy)]
pub(crate) struct SlotCounts {
    /// Slots in use.
    pub(crate) used: usize,
    /// Connections closed to free a slot, since the start.
    pub(crate) evicted: u64,
}

impl ConnectionSlots {
    /// Creates `capacity` slots.
    pub(crate) fn new(capacity: usize) -> Arc<ConnectionSlots> {
        Arc::new(ConnectionSlots { slots: Mutex::default(), capacity, released: Notify::new() })
    }

    /// Waits for a slot and takes it. If `closing` is cancelled, all connections are closed. Only
    /// the acceptor calls this, so connections get their slots in the order of arrival.
    pub(crate) async fn acquire(self: &Arc<Self>, closing: &CancellationToken) -> ConnectionSlot {
        loop {
            match self.try_acquire(closing, Instant::now()) {
                Ok(slot) => return slot,
                Err(ready) => {
                    // Retries after either event. `Notify` stores a release that happens before the
                    // wait begins.
                    let _ = tokio::time::timeout_at(ready.into(), self.released.notified()).await;
                }
            }
        }
    }

    /// Takes a slot, or returns the time at which the oldest connection can be closed.
    fn try_acquire(
        self: &Arc<Self>,
        closing: &CancellationToken,
        now: Instant,
    ) -> Result<ConnectionSlot, Instant> {
        let mut slots = self.slots.lock();
        if slots.used.len() >= self.capacity
            && let Some(oldest) = slots.used.first_entry()
        {
            let ready = oldest.get().since + MIN_SLOT_TIME;
            if ready > now {
                return Err(ready);
            }
            oldest.remove().cancel.cancel();
            slots.evicted += 1;
        }
        let (number, cancel) = (slots.next, closing.child_token());
        slots.next += 1;
        slots.used.insert(number, UsedSlot { since: now, cancel: cancel.clone() });
        Ok(ConnectionSlot { slots: self.clone(), number, cancel })
    }

    pub(crate) fn count(&self) -> SlotCounts {
        let slots = self.slots.lock();
        SlotCounts { used: slots.used.len(), evicted: slots.evicted }
    }
}

/// The slot of a connection. Released when dropped.
pub(crate) struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    number: u64,
    cancel: CancellationToken,
}

impl ConnectionSlot {
    /// Runs `work` until it completes, or until the connection is closed to free its slot. Returns
    /// `None` in the latter case.
    pub(crate) fn run<F: Future>(&self, work: F) -> impl Future<Output = Option<F::Output>> {
        self.cancel.run_until_cancelled(work)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        // The slot of an evicted connection has already been removed.
        if self.slots.slots.lock().used.remove(&self.number).is_some() {
            self.slots.released.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_connection_is_closed_after_the_minimum_time() {
        let (connection_slots, closing, begun) =
            (ConnectionSlots::new(2), CancellationToken::new(), Instant::now());
        let enter = |ms| connection_slots.try_acquire(&closing, begun + Duration::from_millis(ms));
        let (first, second) = (enter(0).ok().unwrap(), enter(10).ok().unwrap());
        assert_eq!(enter(20).err(), Some(begun + MIN_SLOT_TIME));
        drop(second);
        let third = enter(20).ok().unwrap();
        let fourth = enter(1000).ok().unwrap();
        assert!(first.cancel.is_cancelled() && !third.cancel.is_cancelled());
        assert_eq!(enter(1000).err(), Some(begun + Duration::from_millis(1020)));
        drop(first);
        assert_eq!(
            (connection_slots.count().used, connection_slots.count().evicted),
            (2, 1),
            "dropping an evicted connection must not release a slot"
        );
        closing.cancel();
        assert!(third.cancel.is_cancelled() && fourth.cancel.is_cancelled());
    }

    #[tokio::test]
    async fn waiting_connection_gets_a_released_slot() {
        let (connection_slots, closing) = (ConnectionSlots::new(1), CancellationToken::new());
        let first = connection_slots.acquire(&closing).await;
        let mut second = std::pin::pin!(connection_slots.acquire(&closing));
        assert!(futures::poll!(second.as_mut()).is_pending());
        drop(first);
        let second = second.await;
        assert_eq!((connection_slots.count().used, connection_slots.count().evicted), (1, 0));
        assert_eq!(second.run(async { 7 }).await, Some(7));
        closing.cancel();
        assert_eq!(second.run(std::future::pending::<i32>()).await, None);
    }
}
