//! Connections of strangers: so many at once, and then the oldest makes room.
//!
//! Anybody who reaches a port can open connections to it and say nothing. To refuse those who come when there are enough would
//! leave the port to who came first, for as long as he likes; so the oldest is sent away instead. Who has something to say needs a
//! moment, and has one: nobody is sent away in his first second, and who comes meanwhile waits where connections do that
//! are not accepted yet. A crowd of honest clients (all of an application after a restart) is let in as fast as it is served.
//!
//! ```text
//!   accepted --> a place, if there is one --> served --> it is given back
//!            \-> else that of the oldest, when that is a second old: its connection is closed
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// How long a place is one's own.
const MOMENT: Duration = Duration::from_secs(1);

/// The places of a port.
pub(crate) struct Crowd {
    places: Mutex<Places>,
    most: usize,
    /// Told when one is given back.
    left: Notify,
}

#[derive(Default)]
struct Places {
    /// By their age, the oldest first.
    taken: BTreeMap<u64, Taken>,
    next: u64,
    sent_away: u64,
}

struct Taken {
    since: Instant,
    leave: CancellationToken,
}

/// How many there are.
#[derive(Clone, Copy)]
pub(crate) struct Count {
    pub(crate) now: usize,
    /// Since the start.
    pub(crate) sent_away: u64,
}

impl Crowd {
    /// So many places.
    pub(crate) fn new(most: usize) -> Arc<Crowd> {
        Arc::new(Crowd { places: Mutex::default(), most, left: Notify::new() })
    }

    /// Takes a place when there is one. Everybody is sent away when `closing` says so. There is one who calls this, the acceptor:
    /// whoever comes is waited for in the order in which they came.
    pub(crate) async fn enter(self: &Arc<Self>, closing: &CancellationToken) -> Place {
        loop {
            match self.try_enter(closing, Instant::now()) {
                Ok(place) => return place,
                Err(ready) => {
                    // Either is a reason to try again. A place that was given back since then is remembered.
                    let _ = tokio::time::timeout_at(ready.into(), self.left.notified()).await;
                }
            }
        }
    }

    /// A place, or when that of the oldest can be had.
    fn try_enter(self: &Arc<Self>, closing: &CancellationToken, now: Instant) -> Result<Place, Instant> {
        let mut places = self.places.lock();
        if places.taken.len() >= self.most
            && let Some(oldest) = places.taken.first_entry()
        {
            let ready = oldest.get().since + MOMENT;
            if ready > now {
                return Err(ready);
            }
            oldest.remove().leave.cancel();
            places.sent_away += 1;
        }
        let (number, leave) = (places.next, closing.child_token());
        places.next += 1;
        places.taken.insert(number, Taken { since: now, leave: leave.clone() });
        Ok(Place { crowd: self.clone(), number, leave })
    }

    pub(crate) fn count(&self) -> Count {
        let places = self.places.lock();
        Count { now: places.taken.len(), sent_away: places.sent_away }
    }
}

/// A connection's place; given back when this is dropped.
pub(crate) struct Place {
    crowd: Arc<Crowd>,
    number: u64,
    leave: CancellationToken,
}

impl Place {
    /// Does something, unless it has to leave.
    pub(crate) fn stay<F: Future>(&self, work: F) -> impl Future<Output = Option<F::Output>> {
        self.leave.run_until_cancelled(work)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Of who was sent away nothing is there any more.
        if self.crowd.places.lock().taken.remove(&self.number).is_some() {
            self.crowd.left.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_makes_room_when_it_has_had_its_moment() {
        let (crowd, closing, begun) = (Crowd::new(2), CancellationToken::new(), Instant::now());
        let enter = |ms| crowd.try_enter(&closing, begun + Duration::from_millis(ms));
        let (first, second) = (enter(0).ok().unwrap(), enter(10).ok().unwrap());
        assert_eq!(enter(20).err(), Some(begun + MOMENT));
        drop(second);
        let third = enter(20).ok().unwrap();
        let fourth = enter(1000).ok().unwrap();
        assert!(first.leave.is_cancelled() && !third.leave.is_cancelled());
        assert_eq!(enter(1000).err(), Some(begun + Duration::from_millis(1020)));
        drop(first);
        assert_eq!((crowd.count().now, crowd.count().sent_away), (2, 1), "its place is another's");
        closing.cancel();
        assert!(third.leave.is_cancelled() && fourth.leave.is_cancelled());
    }

    #[tokio::test]
    async fn who_waits_gets_the_place_that_is_given_back() {
        let (crowd, closing) = (Crowd::new(1), CancellationToken::new());
        let first = crowd.enter(&closing).await;
        let mut second = std::pin::pin!(crowd.enter(&closing));
        assert!(futures::poll!(second.as_mut()).is_pending());
        drop(first);
        let second = second.await;
        assert_eq!((crowd.count().now, crowd.count().sent_away), (1, 0));
        assert_eq!(second.stay(async { 7 }).await, Some(7));
        closing.cancel();
        assert_eq!(second.stay(std::future::pending::<i32>()).await, None);
    }
}
