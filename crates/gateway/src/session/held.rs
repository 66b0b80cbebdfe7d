//! What a session's statements and portals hold together, and the bounds of that.
//!
//! A session may name ten thousand statements and as many portals, and one message may bring 64 MiB for each of them. So
//! bytes are counted as well as names, by those who own them: each has a [`Share`] of its session's [`Account`], which
//! gives back what it has taken when its owner is dropped, however that comes about.
//!
//! ```text
//! Account "in memory"   <-- Share of a Prepared: its text and descriptions (one, under however many names and portals)
//!                       <-- Share of a Portal: the values bound to it; once it has been run, what is left of its answer
//! Account "on the disk" <-- Share of a Spill: an answer's part in a temporary file
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fulmar_engine::{Error, sqlstate};

use super::rows::ANSWER_BYTES;
use crate::Result;

/// Texts, bound values and answers of which a part has been sent. A text, and values that are bound to another one, may fill a
/// message each, and a text comes three times where it names a column.
const MEMORY_BYTES: u64 = 4 * super::MESSAGE_BYTES as u64;

/// What a session holds of one kind.
pub(crate) struct Account {
    held: AtomicU64,
    bound: u64,
    /// What there is too much of, and what to do about it.
    cause: &'static str,
    remedy: &'static str,
}

impl Account {
    /// For what is in memory.
    pub(crate) fn of_memory() -> Arc<Account> {
        Arc::new(Account {
            held: AtomicU64::new(0),
            bound: MEMORY_BYTES,
            cause: "the prepared statements and portals of a session can hold",
            remedy: "Close those that you no longer need, or fetch all rows of a portal before you bind the next.",
        })
    }

    /// For what is in temporary files. One answer may take it all.
    pub(crate) fn of_files() -> Arc<Account> {
        Arc::new(Account {
            held: AtomicU64::new(0),
            bound: ANSWER_BYTES,
            cause: "the answers of a session that are not sent yet can have",
            remedy: "Ask for fewer rows or columns at once, and close portals whose rows you no longer need.",
        })
    }

    fn full(&self) -> Error {
        let (size, unit) = match self.bound >> 30 {
            0 => (self.bound >> 20, "MiB"),
            size => (size, "GiB"),
        };
        Error::new(sqlstate::PROGRAM_LIMIT, format!("{} {size} {unit} at most", self.cause)).hint(self.remedy)
    }
}

/// What one of its owners holds.
#[derive(Default)]
pub(crate) struct Share {
    /// `None` until something is held.
    account: Option<Arc<Account>>,
    bytes: u64,
}

impl Share {
    /// Holds so much from now on, instead of what it was. If that is too much it holds nothing.
    pub(crate) fn set(&mut self, account: &Arc<Account>, bytes: u64) -> Result<()> {
        self.release();
        if bytes == 0 {
            return Ok(());
        }
        // Nobody else of the session is at work meanwhile.
        if account.held.load(Ordering::Relaxed).saturating_add(bytes) > account.bound {
            return Err(account.full());
        }
        account.held.fetch_add(bytes, Ordering::Relaxed);
        self.account.get_or_insert_with(|| account.clone());
        self.bytes = bytes;
        Ok(())
    }

    /// What it holds.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Holds nothing any more.
    pub(crate) fn release(&mut self) {
        if let Some(account) = &self.account {
            account.held.fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_given_back() {
        let account = Account::of_memory();
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
}
