//! Memory accounting: quotas for the memory and the temporary files of a session.
//!
//! A session has one [`Quota`] per resource. Each object that uses the resource holds a
//! [`Reservation`] of it:
//!
//! ```text
//! Quota of memory  <-- Reservation of a message that is being received
//!                  <-- ... of a Prepared: text and descriptions, once for all its names
//!                  <-- ... of a name of a Prepared
//!                  <-- ... of a Portal: its name, formats and bound values
//!                  <-- ... of an Output or a SuspendedResult: rows that have not been sent
//!                  <-- ... of the session's parameters (SET)
//!                  <-- ... of a statement that is being translated and prepared
//!                  <-- ... of a front's journal, which has a quota of its own
//! Quota of files   <-- Reservation of a Spill: the part of a result in a temporary file
//! ```
//!
//! A reservation returns its bytes when it is dropped. The first 16 KiB of a session are free.
//! Above that, its quota charges the tenant's budget ([`crate::memory`]) in steps of 64 KiB, so
//! that ordinary statements access no shared counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::{Error, sqlstate};
use fulmar_pgwire::protocol::MAX_MESSAGE_BYTES;

use crate::Result;
use crate::memory::{Budget, Class, Shortage};

/// Maximum memory of one session, independent of the tenant's limit.
const MEMORY_BYTES: u64 = 4 * MAX_MESSAGE_BYTES as u64;
/// Maximum size of the temporary files of a session's results.
pub(crate) const MAX_RESULT_FILE_BYTES: u64 = 8 * 1024 * 1024 * 1024;
/// Memory that a session can use without a charge.
pub(crate) const FREE_BYTES: u64 = 16 << 10;
/// The charge of a quota is a multiple of this.
const STEP_BYTES: u64 = 64 << 10;
/// Sessions with at most this charge can use the reserve of the tenant's budget.
const SMALL_BYTES: u64 = 2 * STEP_BYTES;
/// How long a long message, or the translation of a long statement, waits for memory.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(5);

/// A session's use of one resource, in bytes.
pub(crate) struct Quota {
    used: AtomicU64,
    /// The part of `held` that is charged to the tenant.
    charged: AtomicU64,
    limit: u64,
    /// The budget to charge. `None` for files.
    tenant: Option<Arc<Budget>>,
    /// The name of the resource in the error at the limit, and the hint.
    resource: &'static str,
    hint: &'static str,
}

impl Quota {
    /// A quota of memory, charged to a tenant.
    pub(crate) fn of_memory(tenant: Arc<Budget>) -> Arc<Quota> {
        Arc::new(Quota {
            used: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            limit: MEMORY_BYTES,
            tenant: Some(tenant),
            resource: "session memory for messages, prepared statements and portals",
            hint: "Close statements and portals that are no longer needed, or fetch all rows of a \
                   portal before binding the next one.",
        })
    }

    /// A quota of temporary files. A single result can use all of it.
    pub(crate) fn of_files() -> Arc<Quota> {
        Arc::new(Quota {
            used: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            limit: MAX_RESULT_FILE_BYTES,
            tenant: None,
            resource: "temporary file size of the session's unsent results",
            hint: "Query fewer rows or columns at a time, and close portals that are no longer needed.",
        })
    }

    /// A quota of a tenant whose budget is never exhausted.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Arc<Quota> {
        Quota::of_memory(Budget::of_tenant(&Budget::of_node(1 << 40)))
    }

    fn limit_error(&self) -> Error {
        let (size, unit) = match self.limit >> 30 {
            0 => (self.limit >> 20, "MiB"),
            size => (size, "GiB"),
        };
        let message = format!("{} exceeds {size} {unit}", self.resource);
        Error::new(sqlstate::PROGRAM_LIMIT, message).hint(self.hint)
    }

    /// Takes bytes. Load and store need not be one atomic operation, because only one task of a
    /// session runs at a time.
    fn take(&self, bytes: u64, optional: bool) -> Result<(), Refusal> {
        let held = self.used.load(Ordering::Relaxed).saturating_add(bytes);
        if held > self.limit {
            return Err(Refusal::Session);
        }
        let charged = self.charged.load(Ordering::Relaxed);
        let lacking = held.saturating_sub(charged + FREE_BYTES);
        if let Some(tenant) = self.tenant.as_ref().filter(|_| lacking > 0) {
            let step = lacking.next_multiple_of(STEP_BYTES);
            let class = match charged + step {
                0..=SMALL_BYTES => Class::Small,
                _ if optional => Class::Optional,
                _ => Class::Large,
            };
            tenant.charge(step, charged, class).map_err(Refusal::Memory)?;
            self.charged.store(charged + step, Ordering::Relaxed);
        }
        self.used.store(held, Ordering::Relaxed);
        Ok(())
    }

    fn give(&self, bytes: u64) {
        let held = self.used.load(Ordering::Relaxed).saturating_sub(bytes);
        self.used.store(held, Ordering::Relaxed);
        let Some(tenant) = &self.tenant else { return };
        let charged = self.charged.load(Ordering::Relaxed);
        let needed = held.saturating_sub(FREE_BYTES).next_multiple_of(STEP_BYTES);
        if needed < charged {
            self.charged.store(needed, Ordering::Relaxed);
            tenant.release(charged - needed);
        }
    }

    /// Resolves once a session waits because the node's budget is exhausted.
    pub(crate) async fn node_shortage(&self) {
        match &self.tenant {
            Some(tenant) => tenant.node_shortage().await,
            None => std::future::pending().await,
        }
    }

    fn error(&self, refusal: Refusal) -> Error {
        if let Some(tenant) = &self.tenant {
            tenant.count_rejection();
        }
        match refusal {
            Refusal::Session => self.limit_error(),
            Refusal::Memory(shortage) => shortage.error(),
        }
    }
}

/// Why a quota rejected a charge.
enum Refusal {
    /// The session's own limit is reached.
    Session,
    /// The budget of the tenant or of the node is exhausted.
    Memory(Shortage),
}

/// The bytes that one object holds of a quota.
#[derive(Default)]
pub(crate) struct Reservation {
    /// `None` before the first charge.
    quota: Option<Arc<Quota>>,
    bytes: u64,
}

impl Reservation {
    /// Changes the size of the reservation. If the charge is rejected, the reservation is released.
    pub(crate) fn resize(&mut self, quota: &Arc<Quota>, bytes: u64) -> Result<()> {
        if bytes > self.bytes {
            let grown = self.grow_to(quota, bytes);
            if grown.is_err() {
                self.release();
            }
            return grown;
        }
        let released = self.bytes - bytes;
        self.bytes = bytes;
        if released > 0 {
            quota.give(released);
        }
        Ok(())
    }

    /// Grows the reservation to at least `bytes`. If the charge is rejected, the reservation is
    /// unchanged.
    pub(crate) fn grow_to(&mut self, quota: &Arc<Quota>, bytes: u64) -> Result<()> {
        self.charge(quota, bytes, false).map_err(|refusal| quota.error(refusal))
    }

    /// Like [`Reservation::grow_to`], for memory that the caller can do without. Returns false if
    /// the charge is rejected.
    pub(crate) fn try_grow_to(&mut self, quota: &Arc<Quota>, bytes: u64) -> bool {
        self.charge(quota, bytes, true).is_ok()
    }

    fn charge(&mut self, quota: &Arc<Quota>, bytes: u64, optional: bool) -> Result<(), Refusal> {
        let lacking = bytes.saturating_sub(self.bytes);
        if lacking > 0 {
            quota.take(lacking, optional)?;
            self.quota.get_or_insert_with(|| quota.clone());
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Like [`Reservation::grow_to`], but waits up to `max_wait` for other sessions to release
    /// memory.
    pub(crate) async fn grow_to_or_wait(
        &mut self,
        quota: &Arc<Quota>,
        bytes: u64,
        max_wait: Duration,
    ) -> Result<()> {
        let refusal = match (self.charge(quota, bytes, false), &quota.tenant) {
            (Ok(()), _) => return Ok(()),
            (Err(Refusal::Memory(shortage)), Some(tenant)) if shortage.is_temporary() => {
                let attempt = || match self.charge(quota, bytes, false) {
                    Err(Refusal::Memory(shortage)) => Err(shortage),
                    Err(Refusal::Session) => Ok(Err(Refusal::Session)),
                    Ok(()) => Ok(Ok(())),
                };
                match tokio::time::timeout(max_wait, tenant.wait_for(attempt)).await {
                    Ok(Ok(Ok(()))) => return Ok(()),
                    Ok(Ok(Err(refusal))) => refusal,
                    Ok(Err(shortage)) => Refusal::Memory(shortage),
                    Err(_) => Refusal::Memory(shortage),
                }
            }
            (Err(refusal), _) => refusal,
        };
        Err(quota.error(refusal))
    }

    /// The size of the reservation.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns all bytes to the quota.
    pub(crate) fn release(&mut self) {
        self.shrink(0);
    }

    /// Shrinks the reservation to at most `bytes`.
    pub(crate) fn shrink(&mut self, bytes: u64) {
        if let Some(quota) = &self.quota
            && self.bytes > bytes
        {
            quota.give(self.bytes - bytes);
            self.bytes = bytes;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        if let Some(tenant) = &self.tenant {
            tenant.release(*self.charged.get_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_return_their_bytes_to_the_account() {
        let quota = Quota::unlimited();
        let held = || quota.used.load(Ordering::Relaxed);
        let (mut one, mut other) = (Reservation::default(), Reservation::default());
        one.resize(&quota, MEMORY_BYTES - 10).unwrap();
        other.resize(&quota, 10).unwrap();
        other.resize(&quota, 4).unwrap();
        assert_eq!(held(), MEMORY_BYTES - 6);
        let error = other.resize(&quota, 11).unwrap_err();
        assert_eq!((error.state(), held()), (sqlstate::PROGRAM_LIMIT, MEMORY_BYTES - 10));
        assert!(error.message().ends_with("exceeds 256 MiB"), "{}", error.message());
        drop(one);
        other.resize(&quota, MEMORY_BYTES).unwrap();
        other.release();
        assert_eq!(held(), 0);
        assert!(Quota::of_files().limit_error().message().ends_with("exceeds 8 GiB"));
    }

    #[test]
    fn tenant_is_charged_in_steps_above_the_free_allowance() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let quota = Quota::of_memory(tenant.clone());
        let mut reservation = Reservation::default();
        reservation.resize(&quota, FREE_BYTES).unwrap();
        assert_eq!(tenant.used_bytes(), 0);
        reservation.resize(&quota, FREE_BYTES + 1).unwrap();
        assert_eq!(tenant.used_bytes(), STEP_BYTES);
        reservation.grow_to(&quota, FREE_BYTES + STEP_BYTES + 1).unwrap();
        assert_eq!(tenant.used_bytes(), 2 * STEP_BYTES);
        reservation.grow_to(&quota, 1).unwrap();
        assert_eq!(reservation.bytes(), FREE_BYTES + STEP_BYTES + 1, "cover() must not shrink a share");
        reservation.resize(&quota, 1).unwrap();
        assert_eq!(tenant.used_bytes(), 0);
        reservation.resize(&quota, 10 << 20).unwrap();
        drop(reservation);
        assert_eq!(tenant.used_bytes(), 0);
    }

    #[test]
    fn small_sessions_can_use_the_reserve_when_the_budget_is_exhausted() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let quota = || Quota::of_memory(tenant.clone());
        let (large_session, small) = (quota(), quota());
        let (mut large, mut some) = (Reservation::default(), Reservation::default());
        large.resize(&large_session, 32 << 20).unwrap();
        some.resize(&small, 100 << 10).unwrap();
        let error = some.grow_to(&small, 1 << 20).unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY);
        assert_eq!(some.bytes(), 100 << 10);
    }

    #[tokio::test]
    async fn wait_for_memory_times_out() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let quota = || Quota::of_memory(tenant.clone());
        let (large_session, waiter) = (quota(), quota());
        let (mut large, mut some) = (Reservation::default(), Reservation::default());
        large.resize(&large_session, 32 << 20).unwrap();
        let error = some.grow_to_or_wait(&waiter, 1 << 20, Duration::ZERO).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY);
        let waiting = some.grow_to_or_wait(&waiter, 1 << 20, MAX_WAIT);
        let (waited, ()) = tokio::join!(waiting, async { large.release() });
        waited.unwrap();
        assert_eq!(some.bytes(), 1 << 20);
    }
}
