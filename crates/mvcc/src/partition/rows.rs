//! Row locks: a row that a client was shown stays unchanged until the client's transaction ends.
//!
//! Pages are validated at commit, and a transaction whose pages have changed is replayed without
//! the client's knowledge. That fails only if the replay returns a different answer, because a row
//! that the client was shown has been changed by another transaction. Therefore a transaction locks
//! the rows that it shows *and* writes: those of `SELECT ... FOR UPDATE`, and those that it updated
//! by key and then read back. Writers of a locked row queue, first come first served. Blind updates
//! lock nothing.
//!
//! A row is named by its table and the equality predicates of the statement (`aid = 5`), hashed.
//! Two names of one row (`aid = 5`, `name = 'x'`) are two locks: then only replay protects the row,
//! which is still serializable. A hash collision only makes a transaction wait.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use fulmar_sqlite::sql::RowName;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::sync::oneshot;

#[derive(Default)]
struct State {
    locks: HashMap<RowName, Lock>,
    /// The row that each waiting transaction waits for.
    waiting: HashMap<u64, RowName>,
}

struct Lock {
    holder: u64,
    queue: VecDeque<(u64, oneshot::Sender<()>)>,
}

/// The row locks of a partition.
#[derive(Default)]
pub struct RowLocks {
    state: Mutex<State>,
    held: AtomicUsize,
}

/// Waiting would create a cycle of waiting transactions.
#[derive(Debug, PartialEq, Eq)]
pub struct Deadlock;

impl RowLocks {
    /// Returns true if any row is locked. Lets statements skip the other checks.
    pub fn any(&self) -> bool {
        self.held.load(Ordering::Acquire) > 0
    }

    /// Returns true if another transaction holds the lock.
    pub fn held_by_other(&self, row: RowName, owner: u64) -> bool {
        self.any() && self.state.lock().locks.get(&row).is_some_and(|lock| lock.holder != owner)
    }

    /// Acquires the lock without waiting. Returns true if `owner` holds it now. A caller that must
    /// release something before it waits uses this: between a check and [`RowLocks::take`] another
    /// thread could acquire the lock.
    pub fn try_take(&self, row: RowName, owner: u64) -> bool {
        self.take_in(&mut self.state.lock(), row, owner)
    }

    fn take_in(&self, state: &mut State, row: RowName, owner: u64) -> bool {
        let lock = state.locks.entry(row).or_insert_with(|| {
            self.held.fetch_add(1, Ordering::Release);
            Lock { holder: owner, queue: VecDeque::new() }
        });
        lock.holder == owner
    }

    /// Acquires the lock after all earlier waiters. `owner` must call [`RowLocks::release`], also
    /// if this future is dropped while it waits.
    pub async fn take(&self, row: RowName, owner: u64) -> Result<(), Deadlock> {
        let turn = {
            let mut state = self.state.lock();
            if self.take_in(&mut state, row, owner) {
                return Ok(());
            }
            let State { locks, waiting } = &mut *state;
            if would_deadlock(locks, waiting, row, owner) {
                return Err(Deadlock);
            }
            waiting.insert(owner, row);
            let (send, receive) = oneshot::channel();
            if let Some(lock) = locks.get_mut(&row) {
                lock.queue.push_back((owner, send));
            }
            receive
        };
        // The sender is dropped only after it was used, or by this owner's own `release`.
        let _ = turn.await;
        Ok(())
    }

    /// Releases a lock, or leaves its queue.
    pub fn release(&self, row: RowName, owner: u64) {
        let mut state = self.state.lock();
        let State { locks, waiting } = &mut *state;
        waiting.remove(&owner);
        let Some(lock) = locks.get_mut(&row) else { return };
        if lock.holder != owner {
            lock.queue.retain(|(waiter, _)| *waiter != owner);
            return;
        }
        while let Some((next, turn)) = lock.queue.pop_front() {
            waiting.remove(&next);
            if turn.send(()).is_ok() {
                lock.holder = next;
                return;
            }
        }
        locks.remove(&row);
        self.held.fetch_sub(1, Ordering::Release);
    }
}

/// Returns true if the holder of `row` waits for `owner`, directly or through other transactions.
/// Each transaction waits for one row at a time and each row has one holder, so the path is a line,
/// no longer than the number of waiters.
fn would_deadlock(
    locks: &HashMap<RowName, Lock>,
    waiting: &HashMap<u64, RowName>,
    row: RowName,
    owner: u64,
) -> bool {
    let mut row = row;
    for _ in 0..=waiting.len() {
        let Some(lock) = locks.get(&row) else { return false };
        if lock.holder == owner {
            return true;
        }
        match waiting.get(&lock.holder) {
            Some(next) => row = *next,
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn locks_are_granted_in_order() {
        let locks = RowLocks::default();
        locks.take(1, 10).await.unwrap();
        locks.take(1, 10).await.unwrap();
        let mut second = Box::pin(locks.take(1, 20));
        let mut third = Box::pin(locks.take(1, 30));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        locks.release(1, 10);
        assert!(third.as_mut().now_or_never().is_none());
        second.await.unwrap();
        assert!(locks.held_by_other(1, 30));
        locks.release(1, 20);
        third.await.unwrap();
        locks.release(1, 30);
        assert!(!locks.any());
    }

    #[tokio::test]
    async fn deadlock_is_detected() {
        let locks = RowLocks::default();
        locks.take(1, 10).await.unwrap();
        locks.take(2, 20).await.unwrap();
        locks.take(3, 30).await.unwrap();
        let mut one = Box::pin(locks.take(2, 10));
        let mut two = Box::pin(locks.take(3, 20));
        assert!(one.as_mut().now_or_never().is_none());
        assert!(two.as_mut().now_or_never().is_none());
        assert_eq!(locks.take(1, 30).await, Err(Deadlock));
        locks.release(3, 30);
        two.await.unwrap();
    }

    #[tokio::test]
    async fn cancelled_waiter_is_skipped() {
        let locks = RowLocks::default();
        locks.take(1, 10).await.unwrap();
        let mut second = Box::pin(locks.take(1, 20));
        assert!(second.as_mut().now_or_never().is_none());
        drop(second);
        locks.release(1, 10);
        assert!(!locks.any());
    }
}
