//! Memory and files that a session holds: one [`Account`] per session, one [`Share`] per owner.
//!
//! ```text
//! Account of memory  <-- Share of a message that is being received
//!                    <-- Share of a Prepared: its text and descriptions (once, under however many names and portals)
//!                    <-- Share of a name of a Prepared
//!                    <-- Share of a Portal: its name, formats and bound values
//!                    <-- Share of an Output, of an Answer: rows that have not been sent
//!                    <-- Share of the session's parameters (SET)
//!                    <-- Share of a statement that is being translated and prepared
//! Account of files   <-- Share of a Spill: the part of a result in a temporary file
//! ```
//!
//! A share returns its bytes when its owner is dropped. The first 16 KiB of a session are free. Beyond them its account
//! charges the tenant ([`crate::memory`]) in steps of 64 KiB, so that ordinary statements touch no shared counter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fulmar_engine::{Error, sqlstate};

use super::rows::ANSWER_BYTES;
use crate::Result;
use crate::memory::{Budget, Class, Shortage};

/// The most memory of one session, whatever its tenant's limit.
const MEMORY_BYTES: u64 = 4 * super::MESSAGE_BYTES as u64;
/// A session holds this much without a charge.
pub(crate) const FREE_BYTES: u64 = 16 << 10;
/// An account charges its tenant for a multiple of this.
const STEP_BYTES: u64 = 64 << 10;
/// A session that has charged no more than this may use the reserve.
const SMALL_BYTES: u64 = 2 * STEP_BYTES;
/// How long a message, or the translation of a long statement, waits for memory.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(5);

/// What a session holds of one kind.
pub(crate) struct Account {
    held: AtomicU64,
    /// The part of it that is charged to the tenant.
    charged: AtomicU64,
    bound: u64,
    /// Whose memory it is; `None` for files.
    tenant: Option<Arc<Budget>>,
    /// The error at the bound, and its hint.
    cause: &'static str,
    remedy: &'static str,
}

impl Account {
    /// For memory that is charged to a tenant.
    pub(crate) fn of_memory(tenant: Arc<Budget>) -> Arc<Account> {
        Arc::new(Account {
            held: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            bound: MEMORY_BYTES,
            tenant: Some(tenant),
            cause: "the messages, prepared statements and portals of a session can hold",
            remedy: "Close those that you no longer need, or fetch all rows of a portal before you bind the next.",
        })
    }

    /// For temporary files. One result may take it all.
    pub(crate) fn of_files() -> Arc<Account> {
        Arc::new(Account {
            held: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            bound: ANSWER_BYTES,
            tenant: None,
            cause: "the answers of a session that are not sent yet can have",
            remedy: "Ask for fewer rows or columns at once, and close portals whose rows you no longer need.",
        })
    }

    /// An account of a tenant with plenty of memory.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Arc<Account> {
        Account::of_memory(Budget::of_tenant(&Budget::of_node(1 << 40)))
    }

    fn full(&self) -> Error {
        let (size, unit) = match self.bound >> 30 {
            0 => (self.bound >> 20, "MiB"),
            size => (size, "GiB"),
        };
        Error::new(sqlstate::PROGRAM_LIMIT, format!("{} {size} {unit} at most", self.cause)).hint(self.remedy)
    }

    /// Only one task of a session works at a time, so load and store need not be one step.
    fn take(&self, bytes: u64, optional: bool) -> Result<(), Refusal> {
        let held = self.held.load(Ordering::Relaxed).saturating_add(bytes);
        if held > self.bound {
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

    /// Resolves once a session waits for memory of the node.
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
            Refusal::Session => self.full(),
            Refusal::Memory(shortage) => shortage.error(),
        }
    }
}

/// Why an account takes no more.
enum Refusal {
    /// The session's own bound.
    Session,
    Memory(Shortage),
}

/// What one of its owners holds.
#[derive(Default)]
pub(crate) struct Share {
    /// `None` until something is held.
    account: Option<Arc<Account>>,
    bytes: u64,
}

impl Share {
    /// Changes the bytes it holds. If the charge is rejected it holds nothing.
    pub(crate) fn set(&mut self, account: &Arc<Account>, bytes: u64) -> Result<()> {
        if bytes > self.bytes {
            let grown = self.cover(account, bytes);
            if grown.is_err() {
                self.release();
            }
            return grown;
        }
        let given = self.bytes - bytes;
        self.bytes = bytes;
        if given > 0 {
            account.give(given);
        }
        Ok(())
    }

    /// Holds at least this much. If the charge is rejected it is unchanged.
    pub(crate) fn cover(&mut self, account: &Arc<Account>, bytes: u64) -> Result<()> {
        self.try_cover(account, bytes, false).map_err(|refusal| account.error(refusal))
    }

    /// As [`Share::cover`], for memory that the caller can do without.
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

    /// As [`Share::cover`], but waits up to `patience` for other sessions to release memory.
    pub(crate) async fn cover_or_wait(
        &mut self,
        account: &Arc<Account>,
        bytes: u64,
        patience: Duration,
    ) -> Result<()> {
        let refusal = match (self.try_cover(account, bytes, false), &account.tenant) {
            (Ok(()), _) => return Ok(()),
            (Err(Refusal::Memory(shortage)), Some(tenant)) if shortage.is_temporary() => {
                let attempt = || match self.try_cover(account, bytes, false) {
                    Err(Refusal::Memory(shortage)) => Err(shortage),
                    Err(Refusal::Session) => Ok(Err(Refusal::Session)),
                    Ok(()) => Ok(Ok(())),
                };
                match tokio::time::timeout(patience, tenant.wait_for(attempt)).await {
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

    /// What it holds.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Holds nothing any more.
    pub(crate) fn release(&mut self) {
        self.shrink(0);
    }

    /// Holds at most this much.
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
    fn shares_are_given_back() {
        let account = Account::unlimited();
        let held = || account.held.load(Ordering::Relaxed);
        let (mut one, mut other) = (Share::default(), Share::default());
        one.set(&account, MEMORY_BYTES - 10).unwrap();
        other.set(&account, 10).unwrap();
        other.set(&account, 4).unwrap();
        assert_eq!(held(), MEMORY_BYTES - 6);
        let error = other.set(&account, 11).unwrap_err();
        assert_eq!((error.state(), held()), (sqlstate::PROGRAM_LIMIT, MEMORY_BYTES - 10));
        assert!(error.message().ends_with("256 MiB at most"), "{}", error.message());
        drop(one);
        other.set(&account, MEMORY_BYTES).unwrap();
        other.release();
        assert_eq!(held(), 0);
        assert!(Account::of_files().full().message().ends_with("8 GiB at most"));
    }

    #[test]
    fn a_tenant_is_charged_in_steps_beyond_what_is_free() {
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
        assert_eq!(share.bytes(), FREE_BYTES + STEP_BYTES + 1, "cover must not shrink a share");
        share.set(&account, 1).unwrap();
        assert_eq!(tenant.used_bytes(), 0);
        share.set(&account, 10 << 20).unwrap();
        drop(share);
        assert_eq!(tenant.used_bytes(), 0);
    }

    #[test]
    fn small_sessions_pass_when_the_tenant_is_full() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let account = || Account::of_memory(tenant.clone());
        let (hoarder, small) = (account(), account());
        let (mut most, mut some) = (Share::default(), Share::default());
        most.set(&hoarder, 32 << 20).unwrap();
        some.set(&small, 100 << 10).unwrap();
        let error = some.cover(&small, 1 << 20).unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY);
        assert_eq!(some.bytes(), 100 << 10);
    }

    #[tokio::test]
    async fn a_wait_for_memory_is_bounded() {
        let tenant = Budget::of_tenant(&Budget::of_node(64 << 20));
        let account = || Account::of_memory(tenant.clone());
        let (hoarder, waiter) = (account(), account());
        let (mut most, mut some) = (Share::default(), Share::default());
        most.set(&hoarder, 32 << 20).unwrap();
        let error = some.cover_or_wait(&waiter, 1 << 20, Duration::ZERO).await.unwrap_err();
        assert_eq!(error.state(), sqlstate::OUT_OF_MEMORY);
        let waiting = some.cover_or_wait(&waiter, 1 << 20, MAX_WAIT);
        let (waited, ()) = tokio::join!(waiting, async { most.release() });
        waited.unwrap();
        assert_eq!(some.bytes(), 1 << 20);
    }
}
