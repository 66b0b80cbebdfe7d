//! Advisory locks: locks on numbers whose meaning the sessions of a tenant define, for example to
//! prevent two migrations from running concurrently.
//!
//! They work as in PostgreSQL. A session can acquire the same lock several times and must release
//! it as often. Its locks are released when it ends. One difference: sessions do not wait.
//! `pg_advisory_lock` fails with 55P03 if another session holds the lock, as with an expired
//! `lock_timeout`, and the client must retry.

use std::collections::HashMap;

use fulmar_engine::Error;
use fulmar_pages::PartitionId;
use parking_lot::Mutex;

use crate::Result;

/// Maximum number of locks per session.
const MAX_LOCKS_PER_SESSION: usize = 10_000;

/// The session that holds a lock, and the number of times that it acquired it.
struct Holder {
    pid: i32,
    times: u32,
}

/// The locks of all tenants.
#[derive(Default)]
pub(crate) struct AdvisoryLocks(Mutex<HashMap<(PartitionId, i64), Holder>>);

impl AdvisoryLocks {
    /// Acquires a lock for a session. Returns false if another session holds it.
    pub(crate) fn try_lock(&self, tenant: PartitionId, number: i64, pid: i32) -> Result<bool> {
        let mut locks = self.0.lock();
        if let Some(holder) = locks.get_mut(&(tenant, number)) {
            let is_holder = holder.pid == pid;
            holder.times = holder.times.saturating_add(is_holder.into());
            return Ok(is_holder);
        }
        if locks.values().filter(|holder| holder.pid == pid).count() >= MAX_LOCKS_PER_SESSION {
            let message = format!("too many advisory locks, limit is {MAX_LOCKS_PER_SESSION} per session");
            return Err(Error::new(fulmar_engine::sqlstate::PROGRAM_LIMIT, message));
        }
        locks.insert((tenant, number), Holder { pid, times: 1 });
        Ok(true)
    }

    /// Acquires a lock for a session. Fails if another session holds it.
    pub(crate) fn lock(&self, tenant: PartitionId, number: i64, pid: i32) -> Result<()> {
        const LOCK_NOT_AVAILABLE: &str = "55P03";
        if self.try_lock(tenant, number, pid)? {
            return Ok(());
        }
        Err(Error::new(LOCK_NOT_AVAILABLE, format!("could not obtain advisory lock {number}"))
            .detail("Another session holds the lock.")
            .hint("Fulmar does not wait for advisory locks. Retry later."))
    }

    /// Releases a lock once. Returns false if the session does not hold it.
    pub(crate) fn unlock(&self, tenant: PartitionId, number: i64, pid: i32) -> bool {
        let mut locks = self.0.lock();
        let Some(holder) = locks.get_mut(&(tenant, number)).filter(|holder| holder.pid == pid) else {
            return false;
        };
        holder.times -= 1;
        if holder.times == 0 {
            locks.remove(&(tenant, number));
        }
        true
    }

    /// Releases all locks of a session.
    pub(crate) fn unlock_all(&self, pid: i32) {
        let mut locks = self.0.lock();
        if !locks.is_empty() {
            locks.retain(|_, holder| holder.pid != pid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_exclusive_per_session() {
        let (locks, tenant) = (AdvisoryLocks::default(), PartitionId(1));
        assert!(locks.try_lock(tenant, 7, 1).unwrap() && locks.try_lock(tenant, 7, 1).unwrap());
        assert!(!locks.try_lock(tenant, 7, 2).unwrap());
        assert_eq!(locks.lock(tenant, 7, 2).unwrap_err().state(), "55P03");
        assert!(locks.try_lock(PartitionId(2), 7, 2).unwrap(), "locks of different tenants are independent");
        assert!(!locks.unlock(tenant, 7, 2));
        assert!(locks.unlock(tenant, 7, 1) && !locks.try_lock(tenant, 7, 2).unwrap());
        assert!(locks.unlock(tenant, 7, 1) && locks.try_lock(tenant, 7, 2).unwrap());
        locks.unlock_all(2);
        assert!(locks.try_lock(tenant, 7, 1).unwrap());
    }
}
