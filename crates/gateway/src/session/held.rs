//! Memory accounting: quotas for the memory and the temporary files of a session.
//!
//! A session has one [`Account`] per resource. Each object that uses the resource holds a [`Share`]
//! of it (a reservation):
//!
//! ```text
//! Account of memory  <-- Share of a message that is being received
//!                    <-- Share of a Prepared: text and descriptions, once for all its names
//!                    <-- Share of a name of a Prepared
//!                    <-- Share of a Portal: its name, formats and bound values
//!                    <-- Share of an Output or an Answer: rows that have not been sent
//!                    <-- Share of the session's parameters (SET)
//!                    <-- Share of a statement that is being translated and prepared
//! Account of files   <-- Share of a Spill: the part of a result in a temporary file
//! ```
//!
//! A share returns its bytes when it is dropped. The first 16 KiB of a session are free. Above
//! that, its account charges the tenant's budget ([`crate::memory`]) in steps of 64 KiB, so that
//! ordinary statements access no shared counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::{Error, sqlstate};
use fulmar_pgwire::protocol::MESSAGE_BYTES;

use crate::Result;
use crate::memory::{Budget, Class, Shortage};

/// Maximum memory of one session, independent of the tenant's limit.
const MEMORY_BYTES: u64 = 4 * MESSAGE_BYTES as u64;
/// Maximum size of the temporary files of a session's results.
pub(crate) const ANSWER_BYTES: u64 = 8 * 1024 * 1024 * 1024;
/// Memory that a session can use without a charge.
pub(crate) const FREE_BYTES: u64 = 16 << 10;
/// The charge of an account is a multiple of this.
const STEP_BYTES: u64 = 64 << 10;
/// Sessions with at most this charge can use the reserve of the tenant's budget.
const SMALL_BYTES: u64 = 2 * STEP_BYTES;
/// How long a long message, or the translation of a long statement, waits for memory.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(5);

/// A session's use of one resource, in bytes.
pub(crate) struct Account {
    held: AtomicU64,
    /// The part of `held` that is charged to the tenant.
    charged: AtomicU64,
    limit: u64,
    /// The budget to charge. `None` for files.
    tenant: Option<Arc<Budget>>,
    /// The name of the resource in the error at the limit, and the hint.
    resource: &'static str,
    hint: &'static str,
}

impl Account {
    /// An account of memory, charged to a tenant.
    pub(crate) fn of_memory(tenant: Arc<Budget>) -> Arc<Account> {
        Arc::new(Account {
            held: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            limit: MEMORY_BYTES,
            tenant: Some(tenant),
            resource: "session memory for messages, prepared statements and portals",
            hint: "Close statements and portals that are no longer needed, or fetch all rows of a \
                   portal before binding the next one.",
        })
    }

    /// An account of temporary files. A single result can use all of it.
    pub(crate) fn of_files() -> Arc<Account> {
        Arc::new(Account {
            held: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            limit: ANSWER_BYTES,
            tenant: None,
            resource: "temporary file size of the session's unsent results",
            hint: "Query fewer rows or columns at a time, and close portals that are no longer needed.",
        })
    }

    /// An account of a tenant whose budget is never exhausted.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Arc<Account> {
        Account::of_memory(Budget::of_tenant(&Budget::of_node(1 << 40)))
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
        let held = self.held.load(Ordering::Relaxed).saturating_add(bytes);
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
        self.held.store(held, Ordering::Relaxed);
        Ok(())
    }

    fn give(&self, bytes: u64) {
        let held = self.held.load(Ordering::Relaxed).saturating_sub(bytes);
        self.held.store(held, Ordering::Relaxed);
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

/// Why an account rejected a charge.
enum Refusal {
    /// The session's own limit is reached.
    Session,
    /// The budget of the tenant or of the node is exhausted.
    Memory(Shortage),
}

/// The bytes that one object holds of an account.
#[derive(Default)]
pub(crate) struct Share {
    /// `None` before the first charge.
    account: Option<Arc<Account>>,
    bytes: u64,
}

impl Share {
    /// Changes the size of the share. If the charge is rejected, the share is released.
    pub(crate) fn set(&mut self, account: &Arc<Account>, bytes: u64) -> Result<()> {
        if bytes > self.bytes {
            let grown = self.cover(account, bytes);
            if grown.is_err() {
                self.release();
            }
            return grown;
        }
        let released = self.bytes - bytes;
        self.bytes = bytes;
        if released > 0 {
            account.give(released);
        }
        Ok(())
    }

    /// Grows the share to at least `bytes`. If the charge is rejected, the share is unchanged.
    pub(crate) fn cover(&mut self, account: &Arc<Account>, bytes: u64) -> Result<()> {
        self.try_cover(account, bytes, false).map_err(|refusal| account.error(refusal))
    }

    /// Like [`Share::cover`], for memory that the caller can do without. Returns false if the
    /// charge is rejected.
    pub(crate) fn covers(&mut self, account: &Arc<Account>, bytes: u64) -> bool {
        self.try_cover(account, bytes, true).is_ok()
    }

    fn try_cover(&mut self, account: &Arc<Account>, bytes: u64, optional: bool) -> Result<(), Refusal> {
        let lacking = bytes.saturating_sub(self.bytes);
        if lacking > 0 {
            account.take(lacking, optional)?;
            self.account.get_or_insert_with(|| account.clone());
            self.bytes = bytes;
        }
        Ok(())
    }

    /// Like [`Share::cover`], but waits up to `max_wait` for other sessions to release memory.
    pub(crate) async fn cover_or_wait(
        &mut self,
        account: &Arc<Account>,
        bytes: u64,
        max_wait: Duration,
    ) -> Result<()> {
        let refusal = match (self.try_cover(account, bytes, false), &account.tenant) {
            (Ok(()), _) => return Ok(()),
            (Err(Refusal::Memory(shortage)), Some(tenant)) if shortage.is_temporary() => {
                let attempt = || match self.try_cover(account, bytes, false) {
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
        Err(account.error(refusal))
    }

    /// The size of the share.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns all bytes to the account.
    pub(crate) fn release(&mut self) {
        self.shrink(0);
    }

    /// Shrinks the share to at most `bytes`.
    pub(crate) fn shrink(&mut self, bytes: u64) {
        if let Some(account) = &self.account
            && self.bytes > bytes
        {
            account.give(self.bytes - bytes);
            self.bytes = bytes;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release();
    }
}

impl Drop for Account {
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
        let account = Account::unlimited();
        let held = || account.held.load(Ordering::Relaxed);
        let (mut one, mut other) = (Share::default(), Share::default());
        one.set(&account, MEMORY_BYTES - 10).unwrap();
        other.set(&account, 10).unwrap();
        other.set(&account, 4).unwrap();
        assert_eq!(held(), MEMORY_BYTES - 6);
        let error = other.set(&account, 11).unwrap_err();
        assert_eq!((error.state(), held()), (sqlstate::PROGRAM_LIMIT, MEMORY_BYTES - 10));
        assert!(error.message().ends_with("exceeds 256 MiB"), "{}", error.message());
        drop(one);
        other.set(&account, MEMORY_BYTES).unwrap();
        other.release();
        assert_eq!(held(), 0);
        assert!(Account::of_files().limit_error().message().ends_with("exceeds 8 GiB"));
    }

    #[test]
    fn tenant_is_charged_in_steps_above_the_free_allowance() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let account = Account::of_memory(tenant.clone());
        let mut share = Share::default();
        share.set(&account, FREE_BYTES).unwrap();
        assert_eq!(tenant.used_bytes(), 0);
        share.set(&account, FREE_BYTES + 1).unwrap();
        assert_eq!(tenant.used_bytes(), STEP_BYTES);
        share.cover(&account, FREE_BYTES + STEP_BYTES + 1).unwrap();
        assert_eq!(tenant.used_bytes(), 2 * STEP_BYTES);
        share.cover(&account, 1).unwrap();
        assert_eq!(share.bytes(), FREE_BYTES + STEP_BYTES + 1, "cover() must not shrink a share");
        share.set(&account, 1).unwrap();
        assert_eq!(tenant.used_bytes(), 0);
        share.set(&account, 10 << 20).unwrap();
        drop(share);
        assert_eq!(tenant.used_bytes(), 0);
    }

    #[test]
    fn small_sessions_can_use_the_reserve_when_the_budget_is_exhausted() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let account = || Account::of_memory(tenant.clone());
        let (large_session, small) = (account(), account());
        let (mut large, mut some) = (Share::default(), Share::default());
        large.set(&large_session, 32 << 20).unwrap();
        some.set(&small, 100 << 10).unwrap();
        let error = some.cover(&small, 1 << 20).unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY);
        assert_eq!(some.bytes(), 100 << 10);
    }

    #[tokio::test]
    async fn wait_for_memory_times_out() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let account = || Account::of_memory(tenant.clone());
        let (large_session, waiter) = (account(), account());
        let (mut large, mut some) = (Share::default(), Share::default());
        large.set(&large_session, 32 << 20).unwrap();
        let error = some.cover_or_wait(&waiter, 1 << 20, Duration::ZERO).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY);
        let waiting = some.cover_or_wait(&waiter, 1 << 20, MAX_WAIT);
        let (waited, ()) = tokio::join!(waiting, async { large.release() });
        waited.unwrap();
        assert_eq!(some.bytes(), 1 << 20);
    }
}
