//! Advisory locks: numbers that sessions of a tenant agree about, for migrations that must not run twice at once.
//!
//! Postgres's: a session may take one several times, and gives it back as often; what it still has when it ends is
//! free. One difference: nobody waits here. `pg_advisory_lock` of a number that another session has is refused (55P03), as
//! if `lock_timeout` were over at once; its caller tries again.

use std::collections::HashMap;

use fulmar_engine::Error;
use fulmar_pages::PartitionId;
use parking_lot::Mutex;

use crate::Result;

/// Numbers that one session may have.
const MOST: usize = 10_000;

/// Who has a number, and how often.
struct Held {
    pid: i32,
    times: u32,
}

/// The locks of all tenants.
#[derive(Default)]
pub(crate) struct AdvisoryLocks(Mutex<HashMap<(PartitionId, i64), Held>>);

impl AdvisoryLocks {
    /// Takes a number for a session; `false` if another one has it.
    pub(crate) fn try_lock(&self, tenant: PartitionId, number: i64, pid: i32) -> Result<bool> {
        let mut locks = self.0.lock();
        if let Some(held) = locks.get_mut(&(tenant, number)) {
            let own = held.pid == pid;
            held.times = held.times.saturating_add(own.into());
            return Ok(own);
        }
        if locks.values().filter(|held| held.pid == pid).count() >= MOST {
            let message = format!("a session has at most {MOST} advisory locks");
            return Err(Error::new(fulmar_engine::sqlstate::PROGRAM_LIMIT, message));
        }
        locks.insert((tenant, number), Held { pid, times: 1 });
        Ok(true)
    }

    /// Takes a number for a session, or says that another one has it.
    pub(crate) fn lock(&self, tenant: PartitionId, number: i64, pid: i32) -> Result<()> {
        const LOCK_NOT_AVAILABLE: &str = "55P03";
        if self.try_lock(tenant, number, pid)? {
            return Ok(());
        }
        Err(Error::new(LOCK_NOT_AVAILABLE, format!("another session has the advisory lock {number}"))
            .hint("Sessions do not wait for advisory locks here: try again later."))
    }

    /// Gives a number back once; `false` if the session does not have it.
    pub(crate) fn unlock(&self, tenant: PartitionId, number: i64, pid: i32) -> bool {
        let mut locks = self.0.lock();
        let Some(held) = locks.get_mut(&(tenant, number)).filter(|held| held.pid == pid) else {
            return false;
        };
        held.times -= 1;
        if held.times == 0 {
            locks.remove(&(tenant, number));
        }
        true
    }

    /// Gives back all that a session has.
    pub(crate) fn unlock_all(&self, pid: i32) {
        let mut locks = self.0.lock();
        if !locks.is_empty() {
            locks.retain(|_, held| held.pid != pid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_one_sessions() {
        let (locks, tenant) = (AdvisoryLocks::default(), PartitionId(1));
        assert!(locks.try_lock(tenant, 7, 1).unwrap() && locks.try_lock(tenant, 7, 1).unwrap());
        assert!(!locks.try_lock(tenant, 7, 2).unwrap());
        assert_eq!(locks.lock(tenant, 7, 2).unwrap_err().state(), "55P03");
        assert!(locks.try_lock(PartitionId(2), 7, 2).unwrap(), "tenants have nothing to do with each other");
        assert!(!locks.unlock(tenant, 7, 2));
        assert!(locks.unlock(tenant, 7, 1) && !locks.try_lock(tenant, 7, 2).unwrap());
        assert!(locks.unlock(tenant, 7, 1) && locks.try_lock(tenant, 7, 2).unwrap());
        locks.unlock_all(2);
        assert!(locks.try_lock(tenant, 7, 1).unwrap());
    }
}
