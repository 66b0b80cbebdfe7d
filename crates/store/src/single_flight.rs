//! Work that many want at once and one does for all.
//!
//! Whoever comes while it is under way waits for it, and shares what comes of it, **good or bad**. If failures were not
//! shared, each who waits would begin anew when the one before has failed: behind a store that takes a minute to give no
//! answer, the last of a hundred would wait for a hundred minutes.
//!
//! What comes of it is not kept: who comes later begins anew. If the one that does it is dropped, another of those who wait
//! does it from its beginning.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OnceCell;

type Flights<K, T> = Mutex<HashMap<K, Arc<OnceCell<T>>>>;

/// What is under way, by what it is for.
#[derive(Debug)]
pub struct SingleFlight<K, T>(Flights<K, T>);

impl<K, T> Default for SingleFlight<K, T> {
    fn default() -> Self {
        SingleFlight(Mutex::default())
    }
}

impl<K: Eq + Hash + Copy, T: Clone> SingleFlight<K, T> {
    /// Does the work, or waits for who does it already.
    pub async fn run(&self, key: K, work: impl Future<Output = T>) -> T {
        let cell = self.0.lock().entry(key).or_default().clone();
        let passenger = Passenger { flights: &self.0, key, cell };
        passenger.cell.get_or_init(|| work).await.clone()
    }
}

/// One who waits. It takes the flight away when that is over, or nobody waits for it any more.
struct Passenger<'a, K: Eq + Hash, T> {
    flights: &'a Flights<K, T>,
    key: K,
    cell: Arc<OnceCell<T>>,
}

impl<K: Eq + Hash, T> Drop for Passenger<'_, K, T> {
    fn drop(&mut self) {
        let mut flights = self.flights.lock();
        // The map has one, and this; nobody gets another without the lock.
        let over = self.cell.initialized() || Arc::strong_count(&self.cell) == 2;
        if over && flights.get(&self.key).is_some_and(|cell| Arc::ptr_eq(cell, &self.cell)) {
            flights.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::{pending, ready};

    use futures::FutureExt;
    use futures::future::join_all;

    use super::*;

    #[tokio::test]
    async fn who_waits_shares_what_comes_of_it() {
        let flights = SingleFlight::<u8, Result<(), u32>>::default();
        let done = Cell::new(0);
        let work = || async {
            done.set(done.get() + 1);
            tokio::task::yield_now().await;
            Err(done.get())
        };
        let all = join_all((0..5).map(|_| flights.run(1, work()))).await;
        assert_eq!(all, [Err(1); 5]);
        assert_eq!(flights.run(1, work()).await, Err(2), "who comes later begins anew");
        assert!(flights.0.lock().is_empty());
    }

    #[test]
    fn who_gives_up_leaves_it_to_another() {
        let flights = SingleFlight::<u8, u32>::default();
        let mut first = Box::pin(flights.run(1, pending()));
        let mut second = Box::pin(flights.run(1, ready(2)));
        assert_eq!((first.as_mut().now_or_never(), second.as_mut().now_or_never()), (None, None));
        drop(first);
        assert_eq!(second.now_or_never(), Some(2));
        let mut alone = Box::pin(flights.run(1, pending()));
        assert_eq!(alone.as_mut().now_or_never(), None);
        drop(alone);
        assert!(flights.0.lock().is_empty());
    }
}
