//! Reservations of page memory.
//!
//! A sweeper keeps part of the budget free. A task that finds no free memory evicts pages itself.
//! Evicted memory is free once concurrent readers have left it. Changed pages can be evicted after
//! a flush has written them; tasks wait for that without holding a thread. A reservation fails when
//! no progress is possible: nothing can be evicted, and a flush that began after that was observed
//! has ended. It also fails after [`RESERVATION_TIMEOUT`].

use std::time::Duration;

use fulmar_sqlite::Result;
use tokio::time::Instant;

use crate::cache::RETRY_INTERVAL;
use crate::memory::Reservation;
use crate::node::Node;

/// Minimum bytes evicted by a task that finds no free memory.
pub(crate) const MIN_EVICTION_BYTES: u64 = 256 << 10;

/// Maximum time that a task waits for memory.
const RESERVATION_TIMEOUT: Duration = Duration::from_secs(30);

/// Minimum time before a reservation fails. By then old snapshots that retain too much have
/// expired.
const MIN_RESERVATION_WAIT: Duration = Duration::from_secs(2);

impl Node {
    /// Reserves memory for pages that are about to be read.
    pub async fn room(&self, bytes: u64) -> Result<Reservation> {
        self.room_by(bytes, || self.memory.reserve(bytes)).await
    }

    /// Reserves memory for changed pages.
    pub(crate) async fn room_for_changes(&self, bytes: u64, grows: bool) -> Result<Reservation> {
        self.room_by(bytes, || self.memory.reserve_unwritten(bytes, grows)).await
    }

    async fn room_by(&self, bytes: u64, reserve: impl Fn() -> bool) -> Result<Reservation> {
        let memory = &self.memory;
        let reserved = || reserve().then(|| Reservation::of(memory.clone(), bytes));
        if let Some(reservation) = reserved() {
            return Ok(reservation);
        }
        let begun = Instant::now();
        let mut waiting = None;
        loop {
            let mut freed = std::pin::pin!(memory.freed().notified());
            // Registered before the check, so that no notification is lost.
            freed.as_mut().enable();
            let flushes = memory.flushes();
            let lacks = memory.used_bytes() + bytes > memory.limit_bytes();
            let evicted = if lacks { self.cache.evict(bytes.max(MIN_EVICTION_BYTES)) } else { Some(0) };
            let moves = evicted != Some(0) || (lacks && self.cache.free_limbo()) || memory.is_moving();
            if let Some(reservation) = reserved() {
                return Ok(reservation);
            }
            if !moves && waiting.is_none() {
                // The flush in progress may have begun earlier; the one after it has not.
                waiting = Some((memory.wait(), flushes + 2));
            }
            let ended = waiting.as_ref().is_some_and(|(_, hopeless_at)| flushes >= *hopeless_at);
            let hopeless = !moves && ended && begun.elapsed() >= MIN_RESERVATION_WAIT;
            if hopeless || begun.elapsed() >= RESERVATION_TIMEOUT || bytes > memory.limit_bytes() {
                return Err(memory.exhausted());
            }
            let _ = tokio::time::timeout(RETRY_INTERVAL, freed).await;
        }
    }
}
