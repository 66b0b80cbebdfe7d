//! Single-flight execution: concurrent callers with the same key share one execution of the work.
//!
//! A caller that arrives while the work is running waits for it and receives the same result,
//! **success or failure**. Failures are shared because otherwise each waiting caller would retry
//! after the previous one failed: with a store that takes one minute to time out, the last of 100
//! callers would wait for 100 minutes.
//!
//! Results are not cached: a call after completion runs the work again. If the running future is
//! dropped, one of the waiting callers restarts the work from the beginning.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OnceCell;

type Flights<K, T> = Mutex<HashMap<K, Arc<OnceCell<T>>>>;

/// Running work by key.
#[derive(Debug)]
pub struct SingleFlight<K, T>(Flights<K, T>);

impl<K, T> Default for SingleFlight<K, T> {
    fn default() -> Self {
        SingleFlight(Mutex::default())
    }
}

impl<K: Eq + Hash + Copy, T: Clone> SingleFlight<K, T> {
    /// Runs the work, or waits for the execution that is already running for `key`.
    pub async fn run(&self, key: K, work: impl Future<Output = T>) -> T {
        let cell = self.0.lock().entry(key).or_default().clone();
        let caller = Caller { flights: &self.0, key, cell };
        caller.cell.get_or_init(|| work).await.clone()
    }
}

/// A waiting caller. Dropping it removes the flight if the work is done or no other caller waits.
struct Caller<'a, K: Eq + Hash, T> {
    flights: &'a Flights<K, T>,
    key: K,
    cell: Arc<OnceCell<T>>,
}

impl<K: Eq + Hash, T> Drop for Caller<'_, K, T> {
    fn drop(&mut self) {
        let mut flights = self.flights.lock();
        // One reference is in the map and one in `self`. New ones are created only under the lock.
        let finished = self.cell.initialized() || Arc::strong_count(&self.cell) == 2;
        if finished && flights.get(&self.key).is_some_and(|cell| Arc::ptr_eq(cell, &self.cell)) {
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
    async fn concurrent_callers_share_one_result() {
        let flights = SingleFlight::<u8, Result<(), u32>>::default();
        let done = Cell::new(0);
        let work = || async {
            done.set(done.get() + 1);
            tokio::task::yield_now().await;
            Err(done.get())
        };
        let all = join_all((0..5).map(|_| flights.run(1, work()))).await;
        assert_eq!(all, [Err(1); 5]);
        assert_eq!(flights.run(1, work()).await, Err(2), "a call after completion must run the work again");
        assert!(flights.0.lock().is_empty());
    }

    #[test]
    fn a_waiting_caller_takes_over_when_the_running_one_is_dropped() {
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
